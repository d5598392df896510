"""Notebooks of docs: their code runs as it stands, and what is stored in them is whole."""

from __future__ import annotations

import ast
import builtins
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
mpl.use("agg")


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_there_is_a_notebook() -> None:
    assert "attention-step-by-step" in [notebook.stem for notebook in NOTEBOOKS]


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_code_runs(notebook: Path) -> None:
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    compared = 0
    with mpl.rc_context(), torch.random.fork_rng():
        for place, cell in enumerate(cells(notebook, "code"), 1):
            source = "".join(cell["source"])
            exec(compile(source, f"{notebook.name}, cell {place}", "exec"), names)
            compared += source.count("assert_close(")
    plt.close("all")
    assert compared > 10, "formulas are compared with the library"


def names(code: str) -> tuple[set[str], set[str]]:
    """Return what code defines, and what it reads."""
    defined, read = set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (defined if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    return defined, read


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_section_needs_the_first_cell_alone(notebook: Path) -> None:
    known, common, numbered = set(dir(builtins)), set(), False
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if source.startswith("## "):
                numbered = source[3].isdigit()
                common = common or known
                known = set(common)
            continue
        defined, read = names(source)
        assert not numbered or not read - defined - known, f"{source.splitlines()[0]}: {read - defined - known}"
        known |= defined


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_those_of_one_execution(notebook: Path) -> None:
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run `make notebook`"
    for cell in code:
        kinds = [kind for output in cell["outputs"] for kind in output.get("data", {})]
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
        assert ("image/png" in kinds) == ("plt.subplots(" in "".join(cell["source"])), "run `make notebook`"
    assert notebook.stat().st_size < 450_000, "its pictures are too large to load quickly"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_to_files(notebook: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    targets = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert targets
    for target in targets:
        assert (notebook.parent / target).exists(), target
