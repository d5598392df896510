"""The catalogue: complete, the same in code and docs, and citable."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from engines_here import HERE

import regard
import regard.nn
from regard import engines, masks, nn, normalizers, scores
from regard._utils.mechanism import references
from regard.engines.problem import Call, Problem
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores.base import TABLE as SCORES
from regard_lab.planner.published import METHODS, PUBLISHED

ROOT = Path(__file__).parents[2]
ROWS = list(regard.catalogue())


def test_every_registered_part_is_a_row() -> None:
    names = {row.name for row in ROWS}
    assert {cls.__name__ for cls in (*SCORES.values(), *NORMALIZERS.values())} <= names
    assert {row.name for row in ROWS if row.module == "regard.nn"} <= set(regard.nn.__all__)
    functions = {name for name in masks.__all__ if name.islower()} - {"as_mask", "everything"}
    assert {row.name for row in ROWS if row.module == "regard.masks"} == functions


#: A mask of each function, for 2 sequences, 2 heads, 5 queries and 5 keys.
MASKS = {
    "alibi": lambda: masks.alibi(2),
    "axial": lambda: masks.axial((5, 1), 0),
    "causal": masks.causal,
    "chunked": lambda: masks.chunked(2),
    "dense": lambda: masks.dense(torch.eye(5) > 0),
    "dilated": lambda: masks.dilated(2),
    "document": lambda: masks.document(torch.tensor([0, 0, 0, 1, 1])),
    "forgetting": lambda: masks.forgetting(torch.zeros(5)),
    "from_cu_seqlens": lambda: masks.from_cu_seqlens(torch.tensor([0, 2, 5])),
    "key_padding": lambda: masks.key_padding(torch.tensor([True, False, True, False, True])),
    "leave_one_out": masks.leave_one_out,
    "neighbourhood": lambda: masks.neighbourhood(5, 3),
    "padding": lambda: masks.padding(torch.tensor([2, 0])),
    "prefix": lambda: masks.prefix(2),
    "relative": lambda: masks.relative(torch.zeros(2, 9)),
    "selected": lambda: masks.selected(torch.zeros(2, 1, 5, 2, dtype=torch.long)),
    "sinks": lambda: masks.sinks(1),
    "submatrix": lambda: masks.submatrix(masks.causal(), masks.Extent(2, 2, 8, 8), (0, 5), (1, 6)),
    "window": lambda: masks.window(1, 1),
    "windows": lambda: masks.windows(5, 2),
}


def test_every_engine_takes_every_mask() -> None:
    """As the table says of masks, without a look at each."""
    assert set(MASKS) == {row.name for row in ROWS if row.module == "regard.masks"}
    rows = torch.zeros(2, 2, 5, 8)
    for name, made in MASKS.items():
        problem = Problem.of(Call(rows, rows, rows, made()))
        for engine in map(engines.TABLE.__getitem__, HERE):
            assert engine.refusal(problem) is None, (name, engine)


def test_a_row_says_everything() -> None:
    for row in ROWS:
        assert row.formula and row.cost.startswith("O("), row.name
        assert getattr(__import__(row.module, fromlist=["x"]), row.name) is row.defined, row.name
        if row.module != "regard.nn":
            assert regard._catalogue.engines_of(row), f"no engine runs {row.name}"


def test_caches_and_causality_are_those_of_calls() -> None:
    layers = [row for row in ROWS if row.module == "regard.nn" and hasattr(row.defined, "forward")]
    for row in layers:
        taken = inspect.signature(row.defined.forward).parameters
        assert bool(row.cache) == ("cache" in taken and row.defined is not nn.MultiTokenAttention), row.name
        assert row.causal in ("", "yes", "option")
        assert (row.causal == "option") == bool({"is_causal", "tgt_is_causal"} & set(taken)), row.name
        assert row.causal or not row.cache, f"{row.name} decodes, but is not causal"


def test_it_prints_as_a_table() -> None:
    lines = str(regard.catalogue()).splitlines()
    assert lines[0].split() == ["name", "formula", "source", "learned", "engines", "causal", "cost", "cache"]
    assert len(lines) == len(ROWS) + 1
    assert repr(regard.catalogue()[:2]).count("\n") == 2
    assert regard.catalogue()[:2]._repr_markdown_().count("\n| `") == 2, "a notebook shows a table"


def test_json_and_markdown_tell_the_same() -> None:
    found = json.loads(regard.catalogue().json())
    text = regard.catalogue().markdown()
    for row in found:
        assert f"| `{row['name']}` | " in text
        assert all(reference["url"] in text for reference in row["references"])


def test_the_page_is_what_the_catalogue_says() -> None:
    page = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
    assert regard.catalogue().markdown() in page, "run `make docs`"


def test_references_are_bibtex() -> None:
    for key, reference in references().items():
        entry = reference.bibtex
        assert re.fullmatch(r"@(article|inproceedings|misc)\{" + key + r",\n(  \w+ = \{.*\},\n)+\}", entry), key
        assert entry.count("{") == entry.count("}"), key


def test_every_reference_is_used() -> None:
    used = {each.key for row in ROWS for each in row.references}
    used |= {*METHODS, *(each.source for each in PUBLISHED.values())}
    assert set(references()) == used


def test_cite_takes_parts_layers_classes_and_models() -> None:
    layer = regard.nn.AdditiveAttention(4, 4, 8)
    assert "bahdanau2014" in regard.cite(layer)
    assert regard.cite(regard.nn.AdditiveAttention) == regard.cite(layer)
    assert "martins2016" in regard.cite(normalizers.Sparsemax())
    assert "martins2016" in regard.cite(regard.nn.DotProductAttention(normalizer="sparsemax"))
    model = torch.nn.Sequential(
        layer, torch.nn.Linear(2, 2), regard.nn.DotProductAttention(normalizer=normalizers.Entmax15())
    )
    keys = re.findall(r"@\w+\{(\w+)", regard.cite(model))
    assert keys == ["bahdanau2014", "luong2015", "vaswani2017", "peters2019"]


def test_cite_refuses_what_it_does_not_know() -> None:
    with pytest.raises(
        ValueError,
        match=r"cite: thing must be or contain a mechanism in regard.catalogue\(\) with a source, got Linear",
    ):
        regard.cite(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got Boxcar"):
        regard.cite(scores.Boxcar(1.0))
