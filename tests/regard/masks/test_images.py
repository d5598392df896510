"""Masks of images and video: against loops over pixels by the definitions of NATTEN, Swin and axial attention."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from transformers.models.swin.configuration_swin import SwinConfig
from transformers.models.swin.modeling_swin import SwinLayer

import regard
from regard import masks
from regard.masks import Extent

SIZES = st.one_of(
    st.tuples(st.integers(1, 13)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
)
SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True)


def window_of(i: int, n: int, window: int, dilation: int, causal: bool, border: str) -> set[int]:
    """Return what token i of n sees along an axis, token by token."""
    own = [j for j in range(n) if j % dilation == i % dilation]  # the tokens that it can see at all
    place = own.index(i)
    if causal:
        return {own[p] for p in range(place - window + 1, place + 1) if p >= 0}
    half = window // 2
    if border == "truncate":
        return {own[p] for p in range(place - half, place + half + 1) if 0 <= p < len(own)}
    first = place - half
    while first < 0:
        first += 1
    while first + window > len(own):
        first -= 1
    return set(own[first : first + window])


def seen_by_loops(sizes, windows, dilations, causal, border):
    """Return the visible pairs of a neighbourhood (N, N), pixel by pixel."""
    pixels = list(itertools.product(*map(range, sizes)))
    found = torch.zeros(len(pixels), len(pixels), dtype=torch.bool)
    for q, pixel in enumerate(pixels):
        axes = [window_of(*each, border) for each in zip(pixel, sizes, windows, dilations, causal)]
        for k, other in enumerate(pixels):
            found[q, k] = all(j in axis for j, axis in zip(other, axes))
    return found


def pairs(mask, tokens):
    """Return the visible pairs (N, N) of a mask."""
    bound = mask.bind(Extent(1, 1, tokens, tokens), "cpu")
    return bound(0, 0, torch.arange(tokens)[:, None], torch.arange(tokens))


@st.composite
def neighbourhoods(draw):
    """Return the arguments of a neighbourhood, by axis."""
    sizes = draw(SIZES)
    dilations = tuple(draw(st.integers(1, min(n, 3))) for n in sizes)
    causal = tuple(draw(st.booleans()) for _ in sizes)
    widest = [n // step for n, step in zip(sizes, dilations)]
    windows = tuple(
        draw(st.integers(1, n)) if one_sided else 1 + 2 * draw(st.integers(0, (n - 1) // 2))
        for n, one_sided in zip(widest, causal)
    )
    return sizes, windows, dilations, causal, draw(st.sampled_from(["shift", "truncate"]))


@pytest.mark.slow
@SETTINGS
@given(neighbourhoods())
def test_neighbourhood(arguments):
    sizes, windows, dilations, causal, border = arguments
    mask = masks.neighbourhood(sizes, windows, dilations, causal, border=border)
    wanted = seen_by_loops(*arguments)
    assert torch.equal(pairs(mask, len(wanted)), wanted)
    shifted = border == "shift" and not any(causal)
    if shifted:
        assert set(wanted.sum(1).tolist()) == {math.prod(windows)}  # NATTEN: every token sees as many
    check_cover(mask, wanted)


def check_cover(mask, wanted):
    """Assert that tiles hold each query once and all that it sees, and that tiles of a kind are alike."""
    tokens = len(wanted)
    for most in (1, 4, 64):
        cover = mask.cover(Extent(1, 1, tokens, tokens), most)
        assert sorted(cover.queries[cover.queries >= 0].tolist()) == list(range(tokens))
        kinds = {}
        for tile, (queries, keys) in enumerate(zip(cover.queries, cover.keys)):
            real = keys[keys >= 0].tolist()
            assert len(set(real)) == len(real)
            exists = (queries >= 0)[:, None] & (keys >= 0)
            seen = wanted[queries.clamp(min=0)][:, keys.clamp(min=0)] & exists
            rows = wanted[queries.clamp(min=0)] & (queries >= 0)[:, None]
            assert torch.equal(seen.sum(1), rows.sum(1))
            if cover.whole:
                assert torch.equal(seen, exists)
                assert not bool(
                    ((queries[:-1] < 0) & (queries[1:] >= 0)).any() or ((keys[:-1] < 0) & (keys[1:] >= 0)).any()
                )
            if cover.kinds is not None:
                assert torch.equal(kinds.setdefault(int(cover.kinds[tile]), seen), seen)


def test_one_dimension_in_full():
    """Every row of a dilated line by hand: two interleaved lines of 4 and 3 tokens."""
    found = pairs(masks.neighbourhood(7, 3, dilation=2), 7).int().tolist()
    assert found == [
        [1, 0, 1, 0, 1, 0, 0],
        [0, 1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [0, 1, 0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 0, 1],
        [0, 1, 0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 0, 1],
    ]


@pytest.mark.slow
@SETTINGS
@given(SIZES, st.data())
def test_windows(sizes, data):
    """Tokens see each other iff no cut lies between them, along any axis."""
    widths = tuple(data.draw(st.integers(1, n)) for n in sizes)
    shifts = tuple(data.draw(st.integers(0, width - 1)) for width in widths)
    cuts = [range(shift, n, width) for n, width, shift in zip(sizes, widths, shifts)]
    pixels = list(itertools.product(*map(range, sizes)))
    wanted = torch.tensor([
        [
            all(not any(min(a, b) < cut <= max(a, b) for cut in axis) for a, b, axis in zip(one, other, cuts))
            for other in pixels
        ]
        for one in pixels
    ])  # fmt: skip
    mask = masks.windows(sizes, widths, shifts)
    assert torch.equal(pairs(mask, len(pixels)), wanted)
    check_cover(mask, wanted)


@SETTINGS
@given(SIZES, st.data())
def test_axial(sizes, data):
    axes = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    pixels = list(itertools.product(*map(range, sizes)))
    wanted = torch.tensor([
        [any(all(a == b for i, (a, b) in enumerate(zip(one, other)) if i != axis) for axis in axes) for other in pixels]
        for one in pixels
    ])  # fmt: skip
    mask = masks.axial(sizes, tuple(axes))
    assert torch.equal(pairs(mask, len(pixels)), wanted)
    assert torch.equal(pairs(masks.axial(sizes, [axis - len(sizes) for axis in axes]), len(pixels)), wanted)
    check_cover(mask, wanted)


@pytest.mark.parametrize("shift", [0, 2])
def test_a_layer_of_swin(shift):
    """transformers rolls the image, cuts it, and adds −100 between what was no neighbour; we do neither."""
    torch.manual_seed(0)
    side, width, heads, features = 12, 4, 2, 16
    config = SwinConfig(window_size=width, attn_implementation="eager", qkv_bias=True)
    layer = SwinLayer(config, features, (side, side), heads, shift_size=shift).double().eval()
    own = layer.attention
    torch.nn.init.normal_(own.relative_position_bias.relative_position_bias_table)
    image = torch.randn(2, side * side, features, dtype=torch.float64)

    y, x = torch.arange(side * side) // side, torch.arange(side * side) % side
    gaps = [(c[:, None] - c).clamp(1 - width, width - 1) + width - 1 for c in (y, x)]
    table = own.relative_position_bias.relative_position_bias_table.detach()
    bias = table[gaps[0] * (2 * width - 1) + gaps[1]].permute(2, 0, 1)  # (H, N, N)
    rows = layer.layernorm_before(image)
    query, key, value = (
        project(rows).unflatten(-1, (heads, -1)).transpose(1, 2) for project in (own.q_proj, own.k_proj, own.v_proj)
    )
    mask = masks.windows((side, side), width, shift) & masks.dense(bias[None])
    for engine in ("reference", "fused", "sdpa", "streaming"):
        read = regard.attention(query, key, value, mask, engine=engine)
        hidden = image + own.o_proj(read.transpose(1, 2).flatten(2))
        found = hidden + layer.mlp(layer.layernorm_after(hidden))
        torch.testing.assert_close(found, layer(image, (side, side))[0], rtol=1e-6, atol=1e-6)  # its softmax is float32


def test_criss_cross_names_the_centre_once():
    """One softmax over row and column: the query's own key is not counted twice."""
    value = torch.eye(12, dtype=torch.float64)[None, None]
    zeros = torch.zeros(1, 1, 12, 2, dtype=torch.float64)
    weights = regard.attention(zeros, zeros, value, masks.axial((3, 4), (0, 1)))[0, 0]
    assert weights[5, 5] == weights[5, 1] == pytest.approx(1 / 6)


def test_printed_and_written():
    assert repr(masks.neighbourhood((4, 6), (3, 5), dilation=(1, 1))) == "neighbourhood((4, 6), (3, 5))"
    mask = masks.neighbourhood([4, 6], 3, (1, 2), (False, True), border="truncate")
    assert repr(mask) == ("neighbourhood((4, 6), 3, dilation=(1, 2), is_causal=(False, True), border='truncate')")
    assert (
        repr(masks.windows(6, 3)) == "windows(6, 3)" and repr(masks.axial((2, 3), [-1, 0])) == "axial((2, 3), (0, 1))"
    )
    assert "4 queries" in str(masks.windows((2, 2), (1, 2)) & masks.causal())
