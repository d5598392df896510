"""Pages of docs: the Python on them runs, their pictures and links are there, their numbers are those measured."""

from __future__ import annotations

import doctest
import json
import re
import sys
from pathlib import Path

import pytest

from regard.normalizers.base import TABLE

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if "```python\n>>>" in path.read_text(encoding="utf-8"))
#: Pages of the site that its builder makes; it checks the links to them.
GENERATED = ("reference/", "benchmarks/index.md")
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def test_there_is_a_page_with_examples() -> None:
    assert "regression.md" in [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_on_a_page_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(>>>.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    assert test.examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, clear_globs=False)  # what torch.compile keeps there, it removes itself
    assert runner.summarize().failed == 0


def test_links_lead_to_files_and_headings() -> None:
    links = r"\]\((?!http)([^)#]*)#?([^)]*)\)"
    for page in TEXTS:
        for target, anchor in re.findall(links, page.read_text(encoding="utf-8")):
            if page.parent.name == "docs" and target.startswith(GENERATED):
                continue
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
                assert anchor in slugs, f"{page.name}: {anchor}"


def test_numbers_are_those_of_the_newest_reports() -> None:
    from benchmarks import readme

    for path, text in readme.pages():
        assert text == path.read_text(encoding="utf-8"), f"{path.relative_to(ROOT)} is out of date: run `make docs`"


@pytest.mark.slow
def test_summaries_are_those_of_the_reports() -> None:
    from benchmarks import report

    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found.get("cases"), dict):
            assert report.summary(found) in path.with_suffix(".md").read_text(encoding="utf-8"), path.name


def test_a_menu_of_the_site_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {
        line.strip() for menu in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in menu.split("\n")
    }
    listed |= {"index", "catalogue", "coverage", "performance"}  # menus of the generated pages have these
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - listed == set()


def test_limits_list_the_normalizers_that_need_whole_rows() -> None:
    listed = re.search(r"^- the normalizers ([^:]*): they need whole rows", (ROOT / "docs/limits.md").read_text(), re.M)
    assert listed is not None
    assert re.findall(r"`(\w+)`", listed[1]) == sorted(name for name, kind in TABLE.items() if not kind.streams)


def test_no_text_follows_a_mark_that_starts_its_line() -> None:
    """Markdown shows such a line as HTML, with its backticks and stars."""
    shown = r"^\s*(?:- )?<!-- [\w:-]+ -->\S.*"
    found = {page.name: re.findall(shown, page.read_text(encoding="utf-8"), re.MULTILINE) for page in TEXTS}
    assert not {name: lines for name, lines in found.items() if lines}


def test_python_that_shows_no_result_is_python() -> None:
    shown = r"```python\n(?!>>>)(.*?)```"
    blocks = [(page, each) for page in TEXTS for each in re.findall(shown, page.read_text(encoding="utf-8"), re.DOTALL)]
    assert blocks
    for page, block in blocks:
        compile(block, page.name, "exec")


@pytest.mark.slow
def test_readme_is_short_and_its_first_code_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    code = re.findall(r"```python\n(import .*?)```", text, re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {})
