"""Tiles: sound for every composition, exact on request, and never an L×S matrix."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard import masks
from regard.masks import EMPTY, FULL, MIXED, Extent
from regard.masks import base as tiling

SETTINGS = settings(max_examples=examples(150), deadline=None, derandomize=True)
extents = st.builds(Extent, st.integers(1, 2), st.integers(1, 3), st.integers(0, 11), st.integers(0, 11))


def even(b, h, q_idx, kv_idx):
    return (q_idx + b * kv_idx + h) % 2 == 0


@st.composite
def leaves(draw, extent: Extent):
    B, H, L, S = extent.B, extent.H, extent.L, extent.S
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    offset = draw(st.integers(-3, 5))
    ints = lambda high, *shape: torch.randint(0, high, shape, generator=generator)  # noqa: E731
    cu = lambda n: torch.cat([torch.zeros(1, dtype=torch.int64), ints(n + 1, 3).sort().values])  # noqa: E731
    choices = {
        "causal": lambda: masks.causal(offset=offset),
        "causal aligned": lambda: masks.causal("lower_right"),
        "causal per sequence": lambda: masks.causal(offset=ints(4, B)),
        "window": lambda: masks.window(draw(st.integers(-1, 4)), draw(st.integers(-1, 4)), offset=offset),
        "dilated": lambda: masks.dilated(draw(st.integers(1, 4)), offset=offset),
        "padding": lambda: masks.padding(ints(S + 1, B)),
        "padding per query": lambda: masks.padding(ints(S + 2, B, L)),
        "prefix": lambda: masks.prefix(draw(st.integers(0, 12))),
        "key_padding": lambda: masks.key_padding(ints(2, B, S).bool()),
        "document": lambda: masks.document(ints(3, B, L).sort().values, ints(3, S)),
        "packed": lambda: masks.from_cu_seqlens(cu(L), cu(S)),
        "packed window": lambda: masks.from_cu_seqlens(
            cu(L),
            cu(S),
            window=(draw(st.integers(-1, 4)), draw(st.integers(-1, 4))),
            align=draw(st.sampled_from(["lower_right", "upper_left"])),
        ),
        "others": masks.leave_one_out,
        "others named": lambda: masks.leave_one_out(ints(S + 2, L) - 1),
        "selected": lambda: masks.selected(ints(S + 1, B, 1, L, draw(st.integers(0, 5))) - 1),
        "selected by head": lambda: masks.selected(ints(S + 1, H, L, 3) - 1),
        "selected blocks": lambda: masks.selected(ints(-(-S // 3) + 1, B, 1, L, 2) - 1, 3),
        **{
            kind.name: lambda kind=kind: kind.sample(extent, generator)
            for kind in (masks.Neighbourhood, masks.Windows, masks.Axial)
        },
        "dense": lambda: masks.dense(ints(4, B, 1, L, S) > 0),
        "dense heads": lambda: masks.dense(ints(4, 1, H, 1, S) > 0),
        "dense -inf": lambda: masks.dense(torch.where(ints(3, L, S) > 0, 0.5, -math.inf)),
        "predicate": lambda: masks.as_mask(even),
        "everything": masks.everything,
        "alibi": lambda: masks.alibi(H, "upper_left"),
        "relative": lambda: masks.relative(torch.zeros(3), "upper_left"),
        "forgetting": lambda: masks.forgetting(torch.full((H, S), -0.5), "upper_left"),
    }
    return choices[draw(st.sampled_from(sorted(choices)))]()


@st.composite
def compositions(draw, extent: Extent, depth: int = 3):
    kind = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves(extent))
    one = draw(compositions(extent, depth - 1))
    if kind == "not":
        return one if one.has_bias else ~one
    other = draw(compositions(extent, depth - 1))
    return one | other if kind == "or" and not (one.has_bias or other.has_bias) else one & other


def indices(extent: Extent):
    B, H, L, S = extent.B, extent.H, extent.L, extent.S
    return (
        torch.arange(B)[:, None, None, None],
        torch.arange(H)[:, None, None],
        torch.arange(L)[:, None],
        torch.arange(S),
    )


def true_states(seen: torch.Tensor, q_block: int, kv_block: int) -> torch.Tensor:
    """The states of tiles of a materialized (B, H, L, S) mask."""
    rows = []
    for q in range(0, seen.shape[2], q_block):
        row = []
        for k in range(0, seen.shape[3], kv_block):
            tile = seen[:, :, q : q + q_block, k : k + kv_block].flatten(2)
            row.append(torch.where(tile.all(2), FULL, torch.where(tile.any(2), MIXED, EMPTY)))
        rows.append(torch.stack(row, 2) if row else seen.new_zeros((*seen.shape[:2], 0), dtype=torch.int64))
    return torch.stack(rows, 2) if rows else seen.new_zeros((*seen.shape[:2], 0, -(-seen.shape[3] // kv_block)))


@pytest.mark.slow
@SETTINGS
@given(st.data(), extents, st.integers(1, 6), st.integers(1, 6))
def test_tiles_are_sound_and_exact_on_request(data, extent, q_block, kv_block):
    mask = data.draw(compositions(extent))
    bound = mask.bind(extent, "cpu")
    true = true_states(bound(*indices(extent)), q_block, kv_block)
    shape = (extent.B, extent.H, -(-extent.L // q_block), -(-extent.S // kv_block))
    for exact in (False, True):
        found = mask.tiles(extent, q_block, kv_block, exact=exact)
        assert found.dtype == torch.int8 and found.dim() == 4
        assert found.shape[0] in (1, extent.B) and found.shape[1] in (1, extent.H) and found.shape[2:] == shape[2:]
        known = found.expand(shape)
        decided = torch.ones_like(known, dtype=torch.bool) if exact or bound.bounds_are_exact else known != MIXED
        assert torch.equal(known[decided].long(), true[decided].long()), f"{mask!r} {extent} {q_block}×{kv_block}"


@SETTINGS
@given(st.data(), extents)
def test_band_and_plain_causal_say_what_the_mask_is(data, extent):
    mask = data.draw(compositions(extent, 2))
    band = mask.as_band(extent)
    if band is None:
        assert not mask.is_plain_causal(extent)
        return
    lo, hi = (-99 if band[0] is None else band[0]), (99 if band[1] is None else band[1])
    _, _, q, k = indices(extent)
    seen = mask.bind(extent, "cpu")(*indices(extent))
    assert torch.equal(seen, ((k - q >= lo) & (k - q <= hi)).expand_as(seen)) and not mask.has_bias
    assert mask.is_plain_causal(extent) == (band == (None, 0))


@SETTINGS
@given(st.data(), extents)
def test_structural_masks_need_no_data(data, extent):
    mask = data.draw(compositions(extent, 2))
    if mask.is_structural:
        meta = mask.map_tensors(lambda t: t.to("meta"))
        assert torch.equal(meta.bind(extent, "meta").tiles(extent, 3, 4), mask.tiles(extent, 3, 4))


def test_plain_causal():
    square, wide = Extent(1, 1, 4, 4), Extent(1, 1, 4, 6)
    for mask in (masks.causal(), masks.causal("lower_right"), masks.window(-1, 0), masks.causal() & masks.everything()):
        assert mask.is_plain_causal(square)
    assert masks.causal("upper_left").is_plain_causal(wide) and masks.causal(offset=0).is_plain_causal(wide)
    others = [
        masks.causal(offset=1),
        masks.causal("lower_right"),
        masks.causal(offset=torch.tensor(0)),
        masks.window(3, 0, offset=0),
    ]
    others += [masks.causal(offset=0) & masks.alibi(1, offset=0), ~masks.causal(offset=0), masks.everything()]
    for mask in others:
        assert not mask.is_plain_causal(wide)


def test_small_windows_of_a_huge_matrix():
    """A million by a million would be a terabyte: only the tiles may be built."""
    n, block = 1_000_000, 4096
    huge = Extent(1, 1, n, n)
    tiles = masks.causal().tiles(huge, block, block)[0, 0]
    count = -(-n // block)
    assert tiles.shape == (count, count)
    assert torch.equal(tiles, (torch.ones(count, count).tril(-1) * FULL + torch.eye(count) * MIXED).to(torch.int8))
    tiles = (masks.causal() & masks.window(block, 0)).tiles(huge, block, block)[0, 0]
    assert (tiles != EMPTY).sum() == 2 * count - 1  # the diagonal and the one below it


@pytest.mark.parametrize("own", [None, torch.tensor([9, 0, 3, -1, 3, 9, 9], dtype=torch.int8)], ids=["same", "named"])
def test_only_tiles_with_an_own_key_are_mixed(own):
    extent = Extent(1, 1, 7, 10)
    tiles = masks.leave_one_out(own).bind(extent, "cpu").tiles(extent, 2, 3)[0, 0]
    mixed = {(q // 2, k // 3) for q, k in enumerate(range(7) if own is None else own.tolist()) if k >= 0}
    empty = set() if own is None else {(3, 3)}  # the last query, and the last key that is its own
    wanted = [
        [EMPTY if at in empty else MIXED if at in mixed else FULL for at in ((i, j) for j in range(4))]
        for i in range(4)
    ]
    assert tiles.tolist() == wanted


@pytest.mark.parametrize("align", ["lower_right", "upper_left"])
def test_tiles_of_packed_windows_lose_little(align):
    """Far fewer tiles are left than without the window, and only those on the edges of it are mixed."""
    cu_q, cu_kv = torch.tensor([0, 64, 96, 256]), torch.tensor([0, 96, 96, 256])
    extent = Extent(1, 1, 256, 256)
    mask = masks.from_cu_seqlens(cu_q, cu_kv, window=(31, 0), align=align)
    tiles, exact = (mask.tiles(extent, 16, 16, exact=exact)[0, 0] for exact in (False, True))
    assert torch.equal(tiles, exact)
    whole = masks.from_cu_seqlens(cu_q, cu_kv).tiles(extent, 16, 16)[0, 0]
    assert (tiles != EMPTY).sum() < 0.4 * (whole != EMPTY).sum() and (tiles == FULL).sum() > 10


def test_masks_with_tensors_never_build_the_matrix():
    """At 300,000 × 300,000 a bool matrix would take 90 gigabytes."""
    n, block = 300_000, 4096
    huge = Extent(1, 1, n, n)
    ids = torch.arange(n) // 5000
    candidates = [
        masks.padding(torch.tensor([1234])),
        masks.padding(torch.arange(n)[None]),
        masks.key_padding(torch.arange(n)[None] < 7),
        masks.document(ids) & masks.causal(),
        masks.from_cu_seqlens(torch.arange(0, n + 1, 5000)) | ~masks.sinks(3),
        masks.from_cu_seqlens(torch.arange(0, n + 1, 5000), window=(700, 0)),
        masks.leave_one_out(torch.arange(n).flip(0)),
    ]
    for mask in candidates:
        assert mask.tiles(huge, block, block).shape == (1, 1, 74, 74)


def test_conjunctions_that_hide_nothing_are_full_inside_other_masks():
    nothing_hidden = masks.everything() & masks.window(-1, -1)
    extent = Extent(1, 1, 4, 4)
    assert (masks.causal() | nothing_hidden).tiles(extent, 2, 2).eq(FULL).all()
    assert (~nothing_hidden).tiles(extent, 2, 2).eq(EMPTY).all()


def test_exact_evaluates_in_bounded_chunks(monkeypatch):
    monkeypatch.setattr(tiling, "PAIRS_AT_ONCE", 500)
    asked = []

    def every_third(b, h, q_idx, kv_idx):
        shape = torch.broadcast_shapes(b.shape, h.shape, q_idx.shape, kv_idx.shape)
        asked.append(math.prod(shape))
        return (q_idx // 40 + kv_idx // 40) % 3 == 0

    extent = Extent(1, 2, 130, 90)
    for block in (7, 40, 200):
        found = masks.as_mask(every_third).tiles(extent, block, block, exact=True)
        assert torch.equal(found.long(), true_states(masks.as_mask(every_third)(*indices(extent)), block, block))
    del asked[-1]
    assert max(n for n in asked if n != 2 * 130 * 90) <= 500


def test_what_bounds_know_is_not_evaluated():
    class Fail(masks.Mask):
        def visible(self, b, h, q_idx, kv_idx):
            assert q_idx.max() < 8 and kv_idx.max() < 8  # one mixed tile of the sinks and the causal corner is left
            return kv_idx >= 0

    mask = masks.causal(offset=0) & masks.sinks(4) & Fail()
    found = mask.tiles(Extent(1, 1, 8, 64), 8, 8, exact=True)
    assert found[0, 0].tolist() == [[MIXED] + [EMPTY] * 7]


@pytest.mark.parametrize("blocks", [(0, 1), (1, -2)])
def test_block_sizes_are_checked(blocks):
    with pytest.raises(ValueError, match=r"Mask\.tiles: (q_block|kv_block) must be an int of at least 1, got"):
        masks.causal().tiles(Extent(1, 1, 4, 4), *blocks)
