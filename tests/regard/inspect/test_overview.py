"""The overview of a layer is that of its matrices, read whole in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pages import Page, decoded, pooled

import regard
from regard.inspect import Record, capture
from regard.inspect._record.layer_record import AttentionRecord
from regard.inspect._record.tiles import Products, Tile, tiles_of
from regard.inspect._view.overview import overview, pooled_block


def recorded(length: int, sinks: dict[int, list[tuple[int, slice]]], **options: Any) -> Record:
    """A run of four heads, in which queries of a range look at a key that is named."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2))
    query[..., 0] = key[..., 0] = 0.0
    for head, placed in sinks.items():
        for at, queries in placed:
            query[:, head, queries, 0] = 6.0
            key[:, head // 2, at, 0] = 6.0
    with capture() as record, torch.no_grad():
        regard.attention(query, key, key, enable_gqa=True, **options)
    return record


def whole(record: Record) -> np.ndarray:
    """The matrices of all heads and their mean, in float64."""
    call = record[0].calls[0]  # type: ignore[union-attr]
    key = call.key.double().repeat_interleave(2, 1)
    scores = (call.query.double() @ key.mT)[0] / 8**0.5
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    return torch.cat([weights, weights.mean(0, keepdim=True)]).numpy()


CASES: dict[str, tuple[int, dict[int, list[tuple[int, slice]]], dict[str, Any]]] = {
    "no sink": (90, {}, {}),
    "a sink that all see": (90, {0: [(0, slice(None))], 3: [(60, slice(None))]}, {"softcap": 30.0}),
    "causal": (300, {0: [(0, slice(None))], 1: [(40, slice(100, None))]}, {"is_causal": True}),
    "a likely one that is none": (300, {0: [(7, slice(0, 80))]}, {}),
    # Of 300 queries, every fifth is tried: they hint at other keys than the others.
    "tried queries mislead": (300, {0: [(7, slice(0, None, 5)), (9, slice(1, None, 2))]}, {}),
    "large": (301, {2: [(33, slice(None))], 3: [(7, slice(0, 80))]}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("special", [(), (0, 7, 50)], ids=["", "special"])
def test_an_overview_is_that_of_whole_matrices(
    name: str, special: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "large":
        monkeypatch.setattr("regard.inspect._view.overview._POOLED", 128)
    length, sinks, options = CASES[name]
    record = recorded(length, sinks, **options)
    record.describe(regard.inspect.Text(tuple(map(str, range(length))), special))
    page, weights = Page(str(record.to_html())), whole(record)
    grid = page.overview(0)
    received = weights.mean(1)
    largest, at = received.max(1), received.argmax(1)
    assert np.allclose(grid["received"], largest, atol=1e-5)
    assert (grid["sinks"] == np.where(largest > 0.3, at, -1)).all()
    logs = np.log(np.where(weights > 0, weights, 1.0))
    assert np.allclose(grid["entropy"], -(weights * logs).sum(2).mean(1), atol=1e-5)
    near = [sum(np.trace(each, offset) for offset in (-1, 0, 1)) / length for each in weights]
    assert np.allclose(grid["diagonal"], near, atol=1e-5)
    facts = [*page.described["heads"], page.described["layers"][0]["mean"] | {"head": 4}]
    block, size = -(-length // 48), pooled_block(length)
    codes = grid["bare"]
    for head, (each, matrix, sink) in enumerate(zip(facts, weights, grid["sinks"], strict=True)):
        hidden = sorted({*special, *([int(sink)] if sink >= 0 else [])})
        bare = matrix.copy()
        bare[:, hidden] = 0
        assert np.allclose(grid["hidden"][head], (matrix - bare).sum(1).mean(), atol=1e-5)
        assert np.allclose(page.rows(each)[0], matrix.max(1), rtol=2**-9, atol=1e-6)
        assert np.allclose(page.rows(each)[1], bare.max(1), rtol=2**-9, atol=1e-6)
        close = {"rtol": 0.036, "atol": 2.0**-24}
        assert np.allclose(decoded(grid["thumbnails"][head]), pooled(matrix, (block, block)), **close)
        partly = sorted({key // block for key in hidden})
        rows = grid["thumbnails"].shape[1]
        mine, codes = codes[: rows * len(partly)].reshape(rows, -1), codes[rows * len(partly) :]
        assert np.allclose(decoded(mine), pooled(bare, (block, block))[:, partly], **close)
        if size > 1:
            cells = -(-length // size)
            blocks = np.frombuffer(page.block(each["pooled"]["blocks"]), np.uint8).reshape(cells, cells)
            assert np.allclose(decoded(blocks), pooled(bare, (size, size)), **close)
            apart = np.frombuffer(page.block(each["pooled"]["sinks"]), np.uint8).reshape(cells, len(hidden))
            assert np.allclose(decoded(apart), pooled(matrix[:, hidden], (size, 1)), **close)
    assert not len(codes)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": regard.masks.window(5, 2)}, {"softcap": 3.0, "scale": 0.7}],
    ids=str,
)
def test_tiles_are_the_weights(options: dict[str, Any]) -> None:
    record = recorded(300, {}, **options)
    run = record[0]
    products = Products.of(run, 0)  # type: ignore[arg-type]
    assert products is not None
    weights = run.weights(batch=0)
    for at in (torch.arange(300), torch.arange(2, 300, 7)):
        found = torch.zeros(4, len(at), 300)
        for tile in products.tiles(at):
            _, l, s = tile.weights.shape  # noqa: E741
            found[tile.head, tile.first : tile.first + l, :s] = tile.weights[0]
        assert torch.allclose(found, weights[:, at], atol=1e-6)
        assert torch.allclose(products.lse(at), run.lse()[0][:, at], atol=1e-5)  # type: ignore[union-attr]


def test_learned_sinks_take_their_share() -> None:
    run = recorded(40, {}, is_causal=True)[0]
    (call,) = run.calls  # type: ignore[union-attr]
    sinks = torch.tensor([0.0, 2.0, -3.0, 9.0]).view(1, 4, 1)
    run = AttentionRecord("", replace(call, sinks=sinks))
    products = Products.of(run, 0)
    assert products is not None
    lse = torch.logaddexp(run.lse(), sinks)[0]
    assert torch.allclose(products.lse(torch.arange(40)), lse, atol=1e-5)
    for tile in products.tiles():
        weights = run.weights(batch=0, head=tile.head)
        assert torch.allclose(tile.weights[0], weights, atol=1e-6)
        assert tile.lse is not None and torch.allclose(tile.lse[0], lse[tile.head], atol=1e-5)
        assert torch.allclose(tile.entropy[0], torch.special.entr(weights).sum(1), atol=1e-5)


def test_queries_that_see_nothing_and_values_that_are_no_numbers() -> None:
    query = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[2] = False
    query[0, 0, 5] = torch.nan
    with capture() as record:
        F.scaled_dot_product_attention(query, query, query, attn_mask=seen)
    (tile,) = tiles_of(record[0], 0)
    assert (tile.weights[0, 2] == 0).all() and tile.entropy[0, 2] == 0
    assert tile.lse is not None and tile.lse[0, 2] == -torch.inf
    assert tile.weights[0, 5].isnan().all() and tile.weights[0, :5].isfinite().all()


def test_signed_weights_count_by_their_size() -> None:
    weights = torch.tensor([[[0.5, -0.5], [0.25, 0.75]]])
    found = overview(lambda: [Tile.of(0, 0, weights.clone())], (1, 2, 2))
    assert found.row_max.tolist() == [[0.5, 0.75]] and found.sinks.tolist() == [-1]
    assert found.entropy.item() == pytest.approx(-(np.log(0.5) + 0.25 * np.log(0.25) + 0.75 * np.log(0.75)) / 2)
