"""The documentation site: what it is made of, and what its builder refuses. `make site` builds it whole."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from tests.regard.test_public_names import PUBLIC

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return import_module("docs.build")


@pytest.fixture
def source(build: ModuleType, tmp_path: Path) -> Path:
    script = tmp_path / "tex-svg.js"
    script.write_text("")
    build.collect(tmp_path / "source", script)
    return tmp_path / "source"


@pytest.mark.slow
def test_every_public_name_has_an_entry_and_every_link_a_page(build: ModuleType, source: Path) -> None:
    names = import_module("_reference").public_names()
    text = "\n".join(path.read_text(encoding="utf-8") for path in (source / "reference").glob("*.rst"))
    entries = set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)$", text, re.MULTILINE))
    assert entries == set(names) and len(entries) > 500
    assert set(import_module("_reference").PACKAGES) == set(PUBLIC)
    for page in source.rglob("*.md"):
        if "_scripts" in page.parts:
            continue
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(source)}: {target}"
    for script in (source / "_scripts").glob("*.py"):
        cells = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        for cell in cells[1:]:
            compile(cell["source"], script.name, "exec")
    filters = (source / "catalogue.md").read_text(encoding="utf-8")
    assert "{py:obj}`Additive <regard.scores.Additive>`" in filters and 'id="catalogue-filter"' in filters


def test_benchmarks_begin_with_what_is_slower(build: ModuleType) -> None:
    rows = import_module("_measurements").comparisons()
    assert rows and [row["ratio"] for row in rows] == sorted(row["ratio"] for row in rows)


def test_names_are_found_by_what_docstrings_call_them(build: ModuleType) -> None:
    reference = import_module("_reference")
    assert reference.resolve("regard.scores.base.Score", None) == "regard.scores.Score"
    assert reference.resolve("Score", "regard.scores") == "regard.scores.Score"
    assert reference.resolve("Score.compare", "regard.scores") == "regard.scores.Score.compare"
    assert reference.resolve("Scores", "regard.scores") is None
    assert reference.resolve("compare", "regard.scores", "Score") == "regard.scores.Score.compare"  # not training's
    assert reference.resolve("compare", "regard_lab.training") == "regard_lab.training.compare"
    assert reference.exists("why_not", "regard.engines.sdpa.Sdpa.cost")  # inherited
    assert not reference.exists("whynot", "regard.engines.sdpa.Sdpa.cost")


def test_links_out_of_docs_lead_to_the_site_or_to_the_repository(build: ModuleType) -> None:
    places = {"CHANGELOG.md": "about/changelog.md", "docs/limits.md": "limits.md"}
    text = "[a](../CHANGELOG.md) [b](limits.md#gpu) [c](../examples) [d](https://x.org) [e](#here)"
    led = build.relinked(text, "docs/index.md", "index.md", places)
    web = build.repository()
    assert (
        led == f"[a](about/changelog.md) [b](limits.md#gpu) [c]({web}/tree/main/examples) [d](https://x.org) [e](#here)"
    )
    assert build.relinked("[a](docs/limits.md)", "CHANGELOG.md", "about/changelog.md", places) == "[a](../limits.md)"
    with pytest.raises(build.BuildError, match=r"docs/index.md links to reference/lost.md, which is neither"):
        build.relinked("[a](reference/lost.md)", "docs/index.md", "index.md", places)


def test_what_a_page_would_load_from_elsewhere_is_found(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="https://cdn.org/a.js"></script><a href="https://fine.org">x</a><img src="b.png">'
        '<link rel="stylesheet" href="//fonts.org/f.css">'
    )
    (tmp_path / "a.css").write_text("@import url(https://fonts.org/g.css); a { background: url(b.png) }")
    assert [address for _, address in build.requests(tmp_path)] == [
        "https://cdn.org/a.js", "//fonts.org/f.css", "https://fonts.org/g.css",
    ]  # fmt: skip


def test_what_a_page_would_show_and_is_not_there_is_found(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "b.png").write_text("")
    (tmp_path / "a.html").write_text(
        '<img src="b.png?v=1"><iframe src="no/page.html"></iframe><source srcset="dark.png"><img src="data:x">'
        '<img src="https://x.org/y.png">'
    )
    assert [address for _, address in build.lacking(tmp_path)] == ["no/page.html", "dark.png"]


def test_the_record_on_the_site_is_made_by_the_command_on_its_page(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1, "", "look: no such model.")

    monkeypatch.setattr(build.subprocess, "run", run)
    with pytest.raises(build.BuildError, match="wrote no page: look: no such model"):
        build.record(tmp_path / "records" / "page.html")
    assert ran[0][3:5] == ["look", "english-french"] and ran[0][-1].endswith("page.html")
    page = (ROOT / "docs" / "see-a-model.md").read_text(encoding="utf-8")
    assert '"_static/records/translator.html"' in page


def test_the_diagram_is_what_its_code_draws(build: ModuleType) -> None:
    diagram = import_module("_diagram")
    assert diagram.FILE.read_text(encoding="utf-8") == diagram.transformer(), "run `python docs/_diagram.py`"


@pytest.mark.parametrize("lacks", ["package", "script", "folder", "module"])
def test_what_the_site_lacks_is_said_in_a_sentence(
    lacks: str, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "tex-svg.js", tmp_path / "site"
    monkeypatch.setattr(build, "NEEDED", {"nothing_of_this_name": "nothing"} if lacks == "package" else {})
    if lacks != "script":
        script.write_text("")
    if lacks == "module":
        monkeypatch.setattr(build, "collect", lambda *_: import_module("nothing_of_this_name"))
    if lacks == "folder":
        out.write_text("a file")
    assert build.main(["--out", str(out), "--mathjax", str(script)]) == 1
    sentence = {
        "module": "pages need nothing_of_this_name: pip install",
        "package": "the site needs nothing: pip install",
        "script": "needs MathJax",
        "folder": "--out",
    }[lacks]
    assert sentence in capsys.readouterr().err
