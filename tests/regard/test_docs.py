"""Pages of docs: the Python on them runs, their pictures and links are there, their numbers are those measured."""

from __future__ import annotations

import doctest
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if "```python\n>>>" in path.read_text(encoding="utf-8"))
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def test_there_is_a_page_with_examples() -> None:
    assert "regression.md" in [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_on_a_page_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(>>>.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    assert len(test.examples) > 5
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test)
    assert runner.summarize().failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_numbers_are_those_of_the_newest_report() -> None:
    from benchmarks import capture, page, readme
    from benchmarks.joeynmt import report
    from benchmarks.translation import markdown

    results = readme.RESULTS
    assert markdown(json.loads(readme.TRAINED.read_text(encoding="utf-8"))) == (results / "translation.md").read_text(
        encoding="utf-8"
    )
    for beside in results.glob("*-joeynmt.json"):
        tables = json.loads(beside.read_text(encoding="utf-8"))["tables"]
        assert report.markdown(tables) == beside.with_suffix(".md").read_text(encoding="utf-8")
    assert readme.regression() == readme.REGRESSION.read_text(encoding="utf-8"), "run `make docs`"
    large = readme.LARGE_REGRESSION.read_text(encoding="utf-8")
    assert readme.of_large_regression() == large, "run `make docs`"
    assert readme.of_planning() == readme.PLANNING.read_text(encoding="utf-8"), "run `make docs`"
    assert readme.of_language() == readme.LANGUAGE.read_text(encoding="utf-8"), "run `make docs`"
    assert readme.of_hugging_face() == readme.HUGGING_FACE.read_text(encoding="utf-8"), "run `make docs`"
    assert readme.of_inspector() == readme.INSPECTOR.read_text(encoding="utf-8"), "run `make docs`"
    for name, table in (("page", page), ("capture", capture)):
        text = (results / f"{name}.json").read_text(encoding="utf-8")
        assert table.report(json.loads(text)) == (results / f"{name}.md").read_text(encoding="utf-8")
    assert readme.translation() == readme.TRANSLATION.read_text(encoding="utf-8"), "run `make docs`"
