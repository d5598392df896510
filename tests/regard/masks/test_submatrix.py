"""A part of a larger mask says of its pairs what the whole says of them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from regard import masks
from regard.masks import EMPTY, FULL, Extent, Mask

WHOLE = Extent(2, 2, 24, 24)
PARTS = [((0, 24), (0, 24)), ((8, 8), (0, 16)), ((3, 17), (5, 6)), ((12, 12), (12, 12)), ((20, 1), (23, 1))]
generator = torch.Generator().manual_seed(0)
ids = torch.arange(24) // 7
keep = torch.rand(2, 24, generator=generator) < 0.5
MASKS: dict[str, Mask] = {
    "causal": masks.causal(),
    "window": masks.window(4, 2),
    "one-sided": masks.window(-1, 3, offset=torch.tensor([2, -5])),
    "everything": masks.everything(),
    "nothing": ~masks.everything(),
    "not causal": ~masks.causal(),
    "prefix": masks.causal() | masks.prefix(9),
    "documents": masks.document(ids) & masks.causal(),
    "documents of each": masks.document(torch.stack([ids, 3 - ids])),
    "packed": masks.from_cu_seqlens(torch.tensor([0, 5, 11, 20])),
    "packed window": masks.from_cu_seqlens(torch.tensor([0, 5, 11, 20]), torch.tensor([0, 9, 9, 24]), window=(4, 1)),
    "padding": masks.padding(torch.tensor([10, 0])),
    "padding of rows": masks.padding(torch.arange(48).view(2, 24) % 25),
    "key padding": masks.key_padding(keep),
    "dilated": masks.dilated(3) & masks.window(9, 9),
    "leave one out": masks.leave_one_out(),
    "own": masks.leave_one_out(torch.arange(24).flip(0)),
    "selected": masks.selected(torch.randint(-1, 24, (2, 1, 24, 5), generator=generator)),
    "selected blocks": masks.selected(torch.randint(-1, 5, (2, 1, 24, 2), generator=generator), 5),
    "neighbourhood": masks.neighbourhood((4, 6), 3),
    "dilated neighbourhood": masks.neighbourhood((2, 2, 6), (1, 1, 3), (1, 1, 2), border="truncate"),
    "line": masks.neighbourhood(24, 5),
    "windows": masks.windows((6, 4), (3, 2), (1, 0)),
    "windows of a line": masks.windows(24, 7, 3),
    "axial": masks.axial((4, 6), 0) & masks.causal(),
    "dense": masks.dense(torch.rand(2, 24, 24, generator=generator)[:, None] < 0.4),
    "column": masks.dense(torch.rand(24, 1, generator=generator) < 0.4),
    "float": masks.dense(torch.randn(24, 24, generator=generator)) & masks.causal(),
    "alibi": masks.alibi(2) & masks.causal(),
    "relative": masks.relative(torch.randn(9, generator=generator)),
    "forgetting": masks.forgetting(-torch.rand(2, 24, generator=generator)) & masks.causal(),
    "function": masks.as_mask(lambda b, h, q, k: (q + k + b + h) % 3 == 0),
}


def indices(extent: Extent) -> tuple[torch.Tensor, ...]:
    b, h, q, k = (torch.arange(n) for n in (extent.B, extent.H, extent.L, extent.S))
    return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.unsqueeze(1), k


def matrix(mask: Mask, extent: Extent) -> torch.Tensor:
    found = mask.matrix(*indices(extent), torch.float64)
    return found.expand(extent.B, extent.H, extent.L, extent.S)


@pytest.mark.campaign(keep=80)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", MASKS)
def test_a_part_says_what_the_whole_says(name: str, part: tuple[tuple[int, int], tuple[int, int]]) -> None:
    (first, L), (first_key, S) = part
    bound = MASKS[name].bind(WHOLE, "cpu")
    expected = matrix(bound, WHOLE)[:, :, first : first + L, first_key : first_key + S]
    extent = Extent(2, 2, L, S)
    cut = masks.submatrix(bound, WHOLE, *part).bind(extent, "cpu")
    assert torch.equal(matrix(cut, extent), expected)
    visible = expected > -torch.inf
    for q_block, kv_block in ((1, 1), (4, 5), (L, S)):
        for exact in (False, True):
            states = cut.tiles(extent, q_block, kv_block, exact).expand(2, 2, -1, -1)
            for b, i, j in product(range(2), range(states.shape[2]), range(states.shape[3])):
                h = 1 - b
                tile = visible[b, h, i * q_block : (i + 1) * q_block, j * kv_block : (j + 1) * kv_block]
                if states[b, h, i, j] == EMPTY:
                    assert not tile.any()
                elif states[b, h, i, j] == FULL:
                    assert tile.all()
                elif exact:
                    assert tile.any() and not tile.all()
    intervals = cut.intervals(extent)
    if intervals is not None:
        start, stop = (edge.unsqueeze(-1) for edge in intervals)
        k = torch.arange(S)
        assert torch.equal(((k >= start) & (k < stop)).expand(2, 2, L, S), visible)
    band = cut.as_band(extent)
    if band is not None:
        low, high = band
        distance = torch.arange(S) - torch.arange(L).unsqueeze(1)
        inside = (distance >= (-99 if low is None else low)) & (distance <= (99 if high is None else high))
        assert torch.equal(inside.expand(2, 2, L, S), visible)


def test_a_part_on_the_diagonal_is_plainly_causal() -> None:
    cut = masks.submatrix(masks.causal().bind(WHOLE, "cpu"), WHOLE, (8, 8), (8, 8))
    assert cut.is_plain_causal(Extent(2, 2, 8, 8))
    inner = masks.submatrix(cut, Extent(2, 2, 8, 8), (4, 4), (0, 4))
    assert inner.is_plain_causal(Extent(2, 2, 4, 4)) is False
    assert inner.tiles(Extent(2, 2, 4, 4), 4, 4).item() == FULL


def test_a_part_must_lie_in_the_whole() -> None:
    cut = masks.submatrix(masks.causal().bind(WHOLE, "cpu"), WHOLE, (8, 8), (8, 8))
    with pytest.raises(ValueError, match=r"masks.Submatrix: mask must be a slice of .*, got one of \(2, 2, 17, 8\)"):
        cut.bind(Extent(2, 2, 17, 8), "cpu")
