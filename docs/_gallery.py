"""The gallery of the site: a page of thumbnails, and for each example its words, its picture and its code."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def pages() -> dict[str, str]:
    """Return the pages of the gallery, and each example as a script and as a notebook, by their places."""
    found, cards = {}, []
    names = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_"))
    for name in names:
        code = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        title, _, rest = (inspect.getdoc(import_module(f"examples.{name}")) or "").partition("\n")
        title = title.rstrip(".")
        found[f"gallery/{name}.md"] = (
            f"# {title}\n\n{rest.strip()}\n\n![{title}]({name}.png)\n\n"
            f"{{download}}`Script </_scripts/{name}.py>` · {{download}}`notebook </_scripts/{name}.ipynb>`\n\n"
            f"```python\n{code.partition('from __future__')[1] and 'from __future__'}"
            f"{code.partition('from __future__')[2]}```\n"
        )
        found[f"_scripts/{name}.py"] = code
        found[f"_scripts/{name}.ipynb"] = notebook(code, title, rest.strip())
        cards.append(f":::{{grid-item-card}} {title}\n:img-top: {name}.png\n:link: {name}\n:link-type: doc\n:::\n")
    listed = "\n".join(names)
    found["gallery/index.md"] = (
        "# Gallery\n\nOne picture for each family of mechanisms. Each page has the code that draws it, as a script and "
        "as a notebook.\n\n::::{grid} 1 2 2 3\n:gutter: 3\n\n" + "\n".join(cards) + "::::\n\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    )
    return found


def notebook(code: str, title: str, words: str) -> str:
    """Return an example as a notebook, which draws its picture in the last cell."""
    body = code.partition('"""')[2].partition('"""')[2].partition('if __name__ == "__main__":')[0].strip()

    def cell(kind: str, text: str) -> dict[str, object]:
        made: dict[str, object] = {"cell_type": kind, "id": f"{kind}-{len(text)}", "metadata": {}, "source": text}
        return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})

    cells = [cell("markdown", f"# {title}\n\n{words}"), cell("code", body), cell("code", "draw();")]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1
    )
