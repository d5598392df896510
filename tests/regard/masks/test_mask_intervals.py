"""Intervals: where a mask says that each query sees one run of keys, it does; and the usual masks say it."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import examples

from regard import masks
from regard.masks import Extent
from regard.testing import strategies
from regard.testing.case import build_mask
from regard.testing.statement import evaluate_mask

SETTINGS = settings(max_examples=examples(300), deadline=None, derandomize=True)
extents = st.builds(Extent, st.integers(0, 2), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))
SQUARE, WIDE, TALL = Extent(2, 3, 6, 6), Extent(2, 3, 4, 7), Extent(2, 3, 7, 4)
IDS = torch.tensor([4, 4, 1, 1, 1, 9])
LENGTHS = torch.tensor([0, 4])
SLOPES = torch.tensor([0.1, 0.9, 0.4])
CAUSAL = masks.causal()


def shown(found, extent):
    """Where start ≤ k < stop: (B, H, L, S). Checks what is promised of the two tensors."""
    whole = (extent.B, extent.H, extent.L)
    for edge in found:
        assert edge.dtype == torch.int64 and edge.dim() == 3
        assert all(size in (1, full) for size, full in zip(edge.shape, whole))
    start, stop = (edge.expand(whole)[..., None] for edge in found)
    assert bool(((start >= 0) & (start <= stop) & (stop <= extent.S)).all())
    k = torch.arange(extent.S)
    return (start <= k) & (k < stop)


def check(mask, extent):
    """Assert that the intervals, if there are any, are the mask; return whether there are."""
    bound = mask.bind(extent, "cpu")
    found = bound.intervals(extent)
    if found is None:
        return False
    assert torch.equal(shown(found, extent), torch.from_numpy(evaluate_mask(bound, extent)[0])), f"{mask!r} {extent}"
    return True


@pytest.mark.slow
@SETTINGS
@given(strategies.masks(), extents, st.integers(0, 99))
def test_intervals_are_the_mask(recipe, extent, seed):
    check(build_mask(recipe, extent, torch.Generator().manual_seed(seed), torch.float32), extent)


@st.composite
def runs(draw, extent):
    """Masks that are more often intervals than those of the other strategy."""
    B, L, S = extent.B, extent.L, extent.S
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ints = lambda low, high, *size: torch.randint(low, high, size, generator=generator)  # noqa: E731
    k, low, high = torch.arange(S), ints(0, S + 1, B, 1), ints(0, S + 2, B, 1)
    choices = {
        "band": lambda: masks.window(draw(st.integers(-1, 4)), draw(st.integers(-1, 4)), offset=ints(-9, 9, B)),
        "padding": lambda: masks.padding(ints(-2, S + 3, B, L).to(torch.int8)),
        "prefix": lambda: masks.prefix(ints(0, S + 3, B)),
        "keep": lambda: masks.key_padding((low <= k) & (k < high)),
        "dense": lambda: masks.dense(((low <= k) & (k < high))[:, None, None]),
        "rows": lambda: masks.dense(ints(0, 2, L, 1).bool()),
        "document": lambda: masks.document(ints(0, 3, B, L), ints(0, 3, S).sort(descending=True).values.int()),
    }
    return choices[draw(st.sampled_from(sorted(choices)))]()


@pytest.mark.slow
@SETTINGS
@given(st.data(), extents)
def test_intervals_of_compositions_are_exact_and_complete(data, extent):
    """An intersection of two intervals answers, a union or complement if and only if it is one."""
    one, other = data.draw(runs(extent)), data.draw(runs(extent))
    assume(check(one, extent) and check(other, extent))
    assert check(one & other, extent)
    for mask in (one | other, ~one, ~(one & other), (one & other) | ~other):
        seen = torch.nn.functional.pad(torch.from_numpy(evaluate_mask(mask.bind(extent, "cpu"), extent)[0]), (1, 1))
        is_run = bool((seen.int().diff().clamp(min=0).sum(-1) <= 1).all())
        parts = mask.masks if isinstance(mask, masks.OrMask) else ()
        known = all(part.bind(extent, "cpu").intervals(extent) is not None for part in parts)
        answers = check(mask, extent)
        if extent.B * extent.H * extent.L:  # rows that are not there may be judged all the same
            assert answers == (known and is_run), f"{mask!r} {extent}"


ANSWER = [
    (CAUSAL, SQUARE),
    (masks.causal("upper_left"), WIDE),
    (masks.causal("lower_right"), WIDE),
    (masks.causal("upper_left"), TALL),
    (masks.causal("lower_right"), TALL),
    (masks.causal(offset=torch.tensor([1, 3])), WIDE),
    (masks.causal(offset=torch.tensor(2, dtype=torch.int32)), WIDE),
    (masks.window(2, 1), SQUARE),
    (masks.window(-1, -1), SQUARE),
    (masks.window(0, 0, "lower_right"), TALL),
    (masks.window(2**63 - 1, 2**63 - 8, offset=1), WIDE),
    (masks.causal(offset=2**63 - 7), SQUARE),
    (CAUSAL & masks.window(2, 2), SQUARE),
    (masks.padding(LENGTHS), WIDE),
    (masks.padding(torch.arange(8).reshape(2, 4)), WIDE),
    (CAUSAL & masks.padding(LENGTHS), SQUARE),
    (masks.document(IDS), SQUARE),
    (masks.document(torch.stack([IDS, IDS.flip(0)])), SQUARE),
    (masks.document(torch.tensor([5, 0, 5, 0]), torch.tensor([0, 0, 7, 5, 5, 7, 7])), Extent(2, 1, 4, 7)),
    (masks.document(IDS) & CAUSAL, SQUARE),
    (masks.from_cu_seqlens(torch.tensor([0, 2, 2, 5], dtype=torch.int32)) & CAUSAL, SQUARE),
    (masks.from_cu_seqlens(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 7])), WIDE),
    (masks.from_cu_seqlens(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 7]), window=(1, 0)), WIDE),
    (masks.from_cu_seqlens(torch.tensor([0, 3, 7]), torch.tensor([0, 1, 4]), window=(-1, 0), align="upper_left"), TALL),
    (masks.from_cu_seqlens(torch.tensor([0]), window=(1, 0)), SQUARE),
    (masks.from_cu_seqlens(torch.tensor([0])), SQUARE),
    (masks.prefix(2), WIDE),
    (masks.sinks(9), WIDE),
    (masks.prefix(torch.tensor([1, 4])) | CAUSAL, SQUARE),
    (masks.causal("lower_right") | masks.prefix(2), WIDE),
    (~CAUSAL, SQUARE),
    (~masks.padding(LENGTHS), SQUARE),
    (~masks.everything(), SQUARE),
    (~(~CAUSAL | ~masks.padding(LENGTHS)), SQUARE),
    (masks.sinks(1) | masks.window(0, 0, offset=3) | masks.window(1, 0, offset=2), Extent(1, 1, 1, 6)),
    (masks.everything(), WIDE),
    (masks.alibi(SLOPES), SQUARE),
    (masks.relative(torch.zeros(3, 5)) & CAUSAL, SQUARE),
    (masks.dense(torch.tensor([1.0, 0.0, -math.inf, 2.0])[:, None]), WIDE),
    (masks.dense(torch.tensor([False, True, True, False, False, False])[None]), SQUARE),
    (masks.key_padding(torch.arange(6) < torch.tensor([[2], [5]])), SQUARE),
    (masks.dilated(1), SQUARE),
]


@pytest.mark.parametrize(("mask", "extent"), ANSWER, ids=str)
def test_the_usual_masks_are_intervals(mask, extent):
    assert check(mask, extent)


@pytest.mark.parametrize(
    "mask",
    [
        masks.sinks(1) | masks.window(1, 0),
        CAUSAL & (masks.sinks(1) | masks.window(1, 0)),
        masks.dilated(2),
        masks.document(torch.tensor([1, 1, 2, 2, 1, 1])),
        ~masks.window(1, 1),
        masks.key_padding(torch.tensor([True, False, True, True, True, True])),
        masks.leave_one_out(),
        masks.leave_one_out(torch.full((6,), -1)),
        masks.dense(torch.ones(6, 6, dtype=torch.bool)),
        masks.dense(torch.zeros(6, 6)),
        masks.as_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0) & CAUSAL,
    ],
    ids=repr,
)
def test_others_say_that_they_are_not_or_do_not_know(mask):
    assert mask.bind(SQUARE, "cpu").intervals(SQUARE) is None


def test_values():
    start, stop = (CAUSAL & masks.padding(LENGTHS)).bind(SQUARE, "cpu").intervals(SQUARE)
    assert start.tolist() == [[[0]]]
    assert stop.tolist() == [[[0] * 6], [[1, 2, 3, 4, 4, 4]]]


KNOWN_UNSEEN = [
    CAUSAL & masks.padding(LENGTHS),
    masks.causal(offset=LENGTHS) & masks.window(2, 0),
    masks.from_cu_seqlens(torch.tensor([0, 2, 6])) & CAUSAL,
    masks.from_cu_seqlens(torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 6]), window=(2, 0)),
    CAUSAL | masks.prefix(LENGTHS),
    ~CAUSAL & ~masks.padding(LENGTHS),
    masks.alibi(SLOPES) & CAUSAL,
]


@pytest.mark.parametrize("mask", KNOWN_UNSEEN, ids=repr)
def test_compiles_without_a_break(mask):
    def call(x):
        start, stop = mask.bind(SQUARE, x.device).intervals(SQUARE)
        k = torch.arange(6)
        return torch.where((start[..., None] <= k) & (k < stop[..., None]), x, 0.0)

    x = torch.randn(2, 3, 6, 6)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x), call(x))


UNKNOWN_UNSEEN = [
    masks.document(IDS),
    masks.key_padding(torch.ones(2, 6, dtype=torch.bool)),
    masks.window(3, 3, offset=LENGTHS) | masks.window(2, 2),
    ~masks.window(6, 6, offset=LENGTHS),
]


@pytest.mark.parametrize("mask", UNKNOWN_UNSEEN, ids=repr)
def test_what_needs_a_look_is_unknown_where_none_is_possible(mask):
    def call(x):
        return x + (mask.bind(SQUARE, x.device).intervals(SQUARE) is None)

    torch._dynamo.reset()
    assert torch.compile(call, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1
    assert mask.map_tensors(lambda t: t.to("meta")).bind(SQUARE, "meta").intervals(SQUARE) is None


@pytest.mark.parametrize("mask", KNOWN_UNSEEN, ids=repr)
def test_edges_are_where_the_tensors_are(mask):
    moved = mask.map_tensors(lambda t: t.to("meta")).bind(SQUARE, "meta")
    assert [edge.device.type for edge in moved.intervals(SQUARE)] == ["meta", "meta"]


def test_lengths_can_be_mapped_over():
    def stop(lengths):
        return (CAUSAL & masks.padding(lengths)).bind(Extent(1, 1, 6, 6), "cpu").intervals(Extent(1, 1, 6, 6))[1]

    found = torch.vmap(stop)(LENGTHS[:, None])
    assert found[:, 0, 0].tolist() == [[0] * 6, [1, 2, 3, 4, 4, 4]]


def test_no_matrix_is_built():
    n = 1 << 20
    extent = Extent(1, 1, n, n)
    ids = torch.arange(n) // 1000
    mask = (masks.document(ids) & CAUSAL & masks.padding(torch.tensor([n - 1]))) | masks.window(0, 0)
    start, stop = mask.bind(extent, "cpu").intervals(extent)
    assert start.shape[-1] == n and stop[0, 0, -1] == n
