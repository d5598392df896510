"""Build the documentation site: ``python docs/build.py [--out build/site]``, or ``make docs``.

The pages of this folder, those generated from the code, the gallery and the measurements are put together in
``OUT/source``, so that nothing is written to the checkout, and ``OUT/html`` is built from them. Every warning is an
error: a link or a name that leads nowhere, a page in no menu, a page that would load something from another site.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
#: The tools of the builder, and the packages on PyPI that bring them.
NEEDED = {
    "sphinx": "sphinx",
    "furo": "furo",
    "myst_nb": "myst-nb",
    "sphinx_design": "sphinx-design",
    "sphinx_copybutton": "sphinx-copybutton",
}
INSTALL = "pip install -e '.[dev,docs]' -e './lab[dev]'"
MATHJAX = DOCS / "node_modules" / "mathjax" / "es5" / "tex-svg.js"
#: Pages of the repository that are pages of the site too, and their places there.
ADOPTED = {
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "ARCHITECTURE.md": "about/architecture.md",
    "SECURITY.md": "about/security.md",
    "CODE_OF_CONDUCT.md": "about/conduct.md",
    "lab/src/regard_lab/pretrained/english-french/README.md": "about/english-french.md",
}


class BuildError(Exception):
    """What stops a build, in one sentence."""


def main(arguments: list[str] | None = None) -> int:
    """Build the site, and return 0, or 1 with a sentence that says why there is none."""
    parser = argparse.ArgumentParser("python docs/build.py", description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "site", help="folder of the site (default: %(default)s)"
    )
    parser.add_argument("--mathjax", type=Path, default=MATHJAX, help="MathJax's tex-svg.js, from npm")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        html = build(options.out.resolve(), options.mathjax)
    except BuildError as reason:
        print(f"docs: {reason}", file=sys.stderr)
        return 1
    pages = sum(1 for _ in html.rglob("*.html"))
    print(f"{html}/index.html: {pages} pages in {time.monotonic() - began:.0f} s")
    return 0


def build(out: Path, mathjax: Path) -> Path:
    """Build the site below ``out``, and return the folder of its pages."""
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise BuildError(f"the site needs {', '.join(missing)}: {INSTALL}")
    if not mathjax.exists():
        raise BuildError(f"the site needs MathJax for its formulas, and {mathjax} is not there: run `npm ci` in {DOCS}")
    source, html = out / "source", out / "html"
    try:
        if source.is_dir():
            shutil.rmtree(source)
        source.mkdir(parents=True)
    except OSError as error:
        raise BuildError(f"{out} cannot be written ({error.strerror}): choose another folder by --out") from None
    try:
        collect(source, mathjax)
    except ModuleNotFoundError as error:
        raise BuildError(f"the site's pages need {error.name}: {INSTALL}") from error
    record(source / "_static" / "records" / "translator.html")
    from sphinx.cmd.build import main as sphinx

    settings = ["-b", "html", "-q", "--fail-on-warning", "--keep-going", "-d", str(out / "doctrees")]
    if sphinx([*settings, str(source), str(html)]) != 0:
        raise BuildError("the pages have the faults above")
    for page, address in lacking(html):  # what only HTML within a page shows, Sphinx does not copy
        if (file := source / page.relative_to(html).parent / address).is_file():
            target = page.parent / address
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    absent = [f"{page.relative_to(html)}: {address}" for page, address in lacking(html)]
    if absent:
        raise BuildError("a page would show what is not there: " + "; ".join(absent))
    outside = [f"{page.relative_to(html)}: {address}" for page, address in requests(html)]
    if outside:
        raise BuildError("a page would load what is not on the site: " + "; ".join(outside))
    return html


# Sources --------------------------------------------------------------------------------------------------------------


def collect(source: Path, mathjax: Path) -> None:
    """Put the sources of all pages into a folder."""
    for folder in ("images", "regression", "_static"):
        shutil.copytree(DOCS / folder, source / folder)
    for name in ("conf.py", "_reference.py"):
        shutil.copy(DOCS / name, source / name)
    shutil.copy(mathjax, source / "_static" / "mathjax.js")
    (source / "gallery").mkdir()
    for picture in (DOCS / "gallery").glob("*.png"):
        shutil.copy(picture, source / "gallery")
    sys.path.insert(0, str(ROOT))
    written = generated()
    places = {path.relative_to(ROOT).as_posix(): path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
              if "node_modules" not in path.parts} | ADOPTED  # fmt: skip
    places |= {f"benchmarks/results/{path.name}": f"benchmarks/{path.name}" for path in results("*.md")}
    places |= {f"benchmarks/results/{path.name}": f"benchmarks/{path.name}" for path in results("*.png")}
    places |= {path.relative_to(ROOT).as_posix(): path.relative_to(DOCS).as_posix()
               for pattern in ("gallery/*.png", "images/*", "regression/*", "notebooks/*.ipynb")
               for path in DOCS.glob(pattern)}  # fmt: skip
    places["docs/gallery/README.md"] = "gallery/index.md"
    led = {f"docs/{place}": place for place in written} | places
    for origin, place in places.items():
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if place in written or place.endswith((".png", ".svg")):
            if place.startswith("benchmarks/"):
                shutil.copy(ROOT / origin, target)
            continue
        text = (ROOT / origin).read_text(encoding="utf-8")
        if place.endswith(".ipynb"):
            target.write_text(_notebook(text, origin, place, led), encoding="utf-8")
        else:
            target.write_text(_marked(relinked(text, origin, place, led), place), encoding="utf-8")
    for place, text in written.items():
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def record(page: Path) -> None:
    """Write the inspector's page of the included translator, by the command that the guide shows."""
    guide = (DOCS / "see-a-model.md").read_text(encoding="utf-8")
    found = re.search(r'regard look (\S+) --text "([^"]+)" --html page.html', guide)
    assert found is not None, "see-a-model.md shows the command"
    page.parent.mkdir()
    command = [sys.executable, "-m", "regard_cli", "look", found[1], "--text", found[2], "--html", str(page)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise BuildError(f"`regard look` wrote no page: {ran.stderr.strip()}")


def results(pattern: str) -> list[Path]:
    """Return the files of measurements."""
    return sorted((ROOT / "benchmarks" / "results").glob(pattern))


def generated() -> dict[str, str]:
    """Return the pages that are made from the code and from measurements, by their places."""
    sys.path.insert(0, str(DOCS))
    reference = importlib.import_module("_reference")
    made = dict(reference.pages())
    made |= importlib.import_module("_gallery").pages()
    made |= importlib.import_module("_measurements").pages()
    return made


def relinked(text: str, origin: str, place: str, places: dict[str, str]) -> str:
    """Return a page with its links to files of the repository led to the site, or to the repository on the web."""

    def led(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        file = (ROOT / origin).parent / target
        name = Path(*_normal(file.relative_to(ROOT))).as_posix()
        if name in places:
            steps = len(Path(place).parts) - 1
            return f"]({'../' * steps}{places[name]}{anchor})"
        if not (ROOT / name).exists():
            raise BuildError(f"{origin} links to {target}, which is neither a page nor a file of the repository")
        kind = "tree" if (ROOT / name).is_dir() else "blob"
        return f"]({repository()}/{kind}/main/{name}{anchor})"

    return re.sub(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)", led, text)


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return parts


def repository() -> str:
    """Return the address of the repository, which pyproject.toml states."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        address: str = tomllib.load(file)["project"]["urls"]["Source"]
    return address


def _notebook(text: str, origin: str, place: str, places: dict[str, str]) -> str:
    found = json.loads(text)
    for cell in found["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = relinked("".join(cell["source"]), origin, place, places)
    return json.dumps(found)


def _marked(text: str, place: str) -> str:
    """Return a page with what the site adds to it: links from the catalogue to the reference, and its filters."""
    text = re.sub(r"\n\n```\n", "\n```\n", text)  # doctest needs the empty line, a reader does not
    if place != "catalogue.md":
        return text
    names = importlib.import_module("_reference").public_names()
    last = {name.rpartition(".")[2]: name for name in names if name.startswith("regard.")}

    def linked(match: re.Match[str]) -> str:
        return f"| {{py:obj}}`{match[1]} <{last[match[1]]}>` |" if match[1] in last else match[0]

    text = re.sub(r"^\| `(\w+)` \|", linked, text, flags=re.MULTILINE)
    return text.replace("\n## Scores", '\n```{raw} html\n<div id="catalogue-filter"></div>\n```\n\n## Scores', 1)


# What a page would load -----------------------------------------------------------------------------------------------


class _Loads(HTMLParser):
    """Addresses that a browser asks for when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.append(given.get("src") or given.get("srcset") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "shortcut icon", "preconnect"):
            self.found.append(given.get("href") or "")


def shown(html: Path) -> list[tuple[Path, str]]:
    """Return every address that a page loads, with its page."""
    found = []
    for page in sorted(html.rglob("*.html")):
        parser = _Loads()
        parser.feed(page.read_text(encoding="utf-8"))
        found += [(page, address) for address in parser.found]
    return found


def lacking(html: Path) -> list[tuple[Path, str]]:
    """Return what pages would load from the site itself, and is not there."""
    return [
        (page, address)
        for page, address in shown(html)
        if (parts := urlsplit(address)).path and not parts.scheme and not parts.netloc
        and not (page.parent / unquote(parts.path)).exists()
    ]  # fmt: skip


def requests(html: Path) -> list[tuple[Path, str]]:
    """Return what pages would load from elsewhere, styles included."""
    found = [(page, address) for page, address in shown(html) if urlsplit(address).netloc]
    for sheet in sorted(html.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        found += [(sheet, each) for each in re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\s\"')]+)", text)]
    return found


if __name__ == "__main__":
    sys.exit(main())
