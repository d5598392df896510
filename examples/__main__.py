"""Draw the gallery: ``python -m examples [NAME ...] [--out docs/gallery]``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from pathlib import Path

import matplotlib as mpl

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def main(arguments: list[str] | None = None) -> int:
    """Draw what is asked for, or everything with its page."""
    parser = argparse.ArgumentParser("python -m examples", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all where none is given")
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "docs" / "gallery", help="folder of the pictures")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no example called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    mpl.use("agg")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        began = time.monotonic()
        figure = importlib.import_module(f"examples.{name}").draw()
        figure.savefig(options.out / f"{name}.png", dpi=110, bbox_inches="tight", metadata={"Software": None})
        mpl.pyplot.close(figure)
        print(f"{options.out / name}.png  {time.monotonic() - began:.1f} s", flush=True)
    if not options.names:
        (options.out / "README.md").write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """Return the gallery's page: each example's own words, and its picture."""
    parts = [
        "# Gallery\n\nEach picture is drawn by a short file in [examples](../../examples); `make gallery` draws all.\n"
        "[Attention, step by step](../notebooks/attention-step-by-step.ipynb) is a notebook that derives the best "
        "known of them.\n"
    ]
    for name in NAMES:
        text = inspect.getdoc(importlib.import_module(f"examples.{name}")) or ""
        title, _, rest = text.partition("\n")
        parts.append(
            f"## {title.rstrip('.')}\n\n{rest.strip()}\n\n![{title}]({name}.png)\n\n"
            f"Drawn by [{name}.py](../../examples/{name}.py).\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
