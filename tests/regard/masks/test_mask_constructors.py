"""Every constructor against a predicate written by other means: numpy, one pair at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard import masks
from regard.masks import Extent, Mask

SETTINGS = settings(max_examples=examples(40), deadline=None, derandomize=True)
sizes = st.integers(0, 9)


def engine_indices(extent: Extent) -> tuple[torch.Tensor, ...]:
    B, H, L, S = extent.B, extent.H, extent.L, extent.S
    return (
        torch.arange(B)[:, None, None, None],
        torch.arange(H)[:, None, None],
        torch.arange(L)[:, None],
        torch.arange(S),
    )


def seen(mask: Mask, extent: Extent) -> np.ndarray:
    return mask.bind(extent, "cpu")(*engine_indices(extent)).numpy()


def added(mask: Mask, extent: Extent) -> np.ndarray:
    shape = (extent.B, extent.H, extent.L, extent.S)
    return mask.bind(extent, "cpu").bias(*engine_indices(extent)).expand(shape).detach().numpy()


def brute(extent: Extent, rule) -> np.ndarray:
    out = np.zeros((extent.B, extent.H, extent.L, extent.S), bool)
    for index in np.ndindex(*out.shape):
        out[index] = rule(*index)
    return out


@SETTINGS
@given(sizes, sizes, st.sampled_from(["upper_left", "lower_right"]))
def test_causal_aligned(L, S, align):
    wanted = np.tri(L, S, 0 if align == "upper_left" else S - L, dtype=bool)
    assert (seen(masks.causal(align), Extent(1, 1, L, S)) == wanted).all()
    assert (seen(masks.causal(align), Extent(1, 1, L, L)) == np.tri(L, dtype=bool)).all()


@SETTINGS
@given(sizes, sizes, st.integers(-3, 9))
def test_causal_offset(L, S, offset):
    assert (seen(masks.causal(offset=offset), Extent(1, 1, L, S)) == np.tri(L, S, offset, dtype=bool)).all()
    assert (
        seen(masks.causal(offset=torch.tensor(offset)), Extent(1, 1, L, S)) == np.tri(L, S, offset, dtype=bool)
    ).all()


def test_causal_offset_per_sequence():
    found = seen(masks.causal(offset=torch.tensor([0, 3], dtype=torch.int32)), Extent(2, 1, 2, 6))
    assert (found[0, 0] == np.tri(2, 6, 0)).all() and (found[1, 0] == np.tri(2, 6, 3)).all()


@SETTINGS
@given(sizes, st.integers(-1, 4), st.integers(-1, 4), st.integers(-2, 4))
def test_window(L, left, right, offset):
    extent = Extent(1, 1, L, L + 2)

    def rule(b, h, q, k):
        near = range(q + offset - (left if left >= 0 else 99), q + offset + (right if right >= 0 else 99) + 1)
        return k in near

    assert (seen(masks.window(left, right, offset=offset), extent) == brute(extent, rule)).all()


def test_window_conversions():
    """The table in the docstring, against each library's own formula."""
    n = 12
    q, k = np.ogrid[:n, :n]
    square = Extent(1, 1, n, n)
    causal = k <= q
    for w in (2, 4, 6):
        assert (seen(masks.causal() & masks.window(w - 1, 0), square) == (causal & (k > q - w))).all()  # transformers
        assert (seen(masks.window(w // 2, w // 2), square) == (abs(q - k) <= w // 2)).all()  # Longformer
    # FlashAttention: from i + seqlen_k − seqlen_q − l to i + seqlen_k − seqlen_q + r, inclusive.
    L, S, left, right = 4, 9, 2, 1
    i, j = np.ogrid[:L, :S]
    flash = (j >= i + S - L - left) & (j <= i + S - L + right)
    assert (seen(masks.window(left, right, align="lower_right"), Extent(1, 1, L, S)) == flash).all()


@SETTINGS
@given(sizes, sizes, st.integers(1, 5), st.integers(-3, 3))
def test_dilated(L, S, step, offset):
    extent = Extent(1, 1, L, S)
    wanted = brute(extent, lambda b, h, q, k: abs(q + offset - k) in range(0, 99, step))
    assert (seen(masks.dilated(step, offset=offset), extent) == wanted).all()


@SETTINGS
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), sizes, sizes)
def test_first_keys(lengths, L, S):
    extent = Extent(len(lengths), 2, L, S)
    wanted = brute(extent, lambda b, h, q, k: k in range(lengths[b]))
    assert (seen(masks.padding(torch.tensor(lengths).clamp(max=S)), extent) == wanted).all()
    assert (seen(masks.prefix(torch.tensor(lengths, dtype=torch.int32)), extent) == wanted).all()
    for make in (masks.prefix, masks.sinks):
        assert (seen(make(lengths[0]), extent) == brute(extent, lambda b, h, q, k: k in range(lengths[0]))).all()
    per_query = np.random.default_rng(0).integers(0, 9, (len(lengths), L))
    wanted = brute(extent, lambda b, h, q, k: k in range(per_query[b, q]))
    assert (seen(masks.padding(torch.from_numpy(per_query)), extent) == wanted).all()


@SETTINGS
@given(sizes, sizes, st.integers(0, 99))
def test_others(L, S, seed):
    extent = Extent(2, 1, L, S)
    assert (seen(masks.leave_one_out(), extent) == ~np.eye(L, S, dtype=bool)).all()
    own = np.random.default_rng(seed).integers(-1, S + 1, L)
    wanted = brute(extent, lambda b, h, q, k: k not in (own[q],))
    for dtype in (np.int8, np.int64):
        assert (seen(masks.leave_one_out(torch.from_numpy(own.astype(dtype))), extent) == wanted).all()


@SETTINGS
@given(st.integers(1, 3), sizes, sizes, st.integers(0, 99))
def test_ids_and_marks(B, L, S, seed):
    rng = np.random.default_rng(seed)
    extent = Extent(B, 2, L, S)
    ids, kv_ids, keep = rng.integers(0, 3, (B, L)), rng.integers(0, 3, (B, S)), rng.random((B, S)) < 0.5
    found = seen(masks.document(torch.from_numpy(ids), torch.from_numpy(kv_ids)), extent)
    assert (found == brute(extent, lambda b, h, q, k: ids[b, q] == kv_ids[b, k])).all()
    found = seen(masks.document(torch.from_numpy(ids[0])), Extent(B, 2, L, L))
    assert (found == (ids[0][:, None] == ids[0])).all()
    assert (seen(masks.key_padding(torch.from_numpy(keep)), extent) == keep[:, None, None]).all()
    assert (seen(masks.key_padding(torch.from_numpy(keep[0])), extent) == keep[0]).all()


def packing(pairs, side, spare):
    """Sequence and place in it of each position, None of padding, and the cumulative lengths."""
    lengths = [pair[side] for pair in pairs]
    places = [(i, at) for i, n in enumerate(lengths) for at in range(n)] + [None] * spare
    return places, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4)


@SETTINGS
@given(pairs, st.integers(0, 3), st.booleans())
def test_packed(lengths, spare, same):
    q_at, cu_q = packing(lengths, 0, spare)
    k_at, cu_kv = (q_at, None) if same else packing(lengths, 1, spare)
    extent = Extent(1, 1, len(q_at), len(k_at))
    wanted = brute(extent, lambda b, h, q, k: None not in (q_at[q], k_at[k]) and q_at[q][0] == k_at[k][0])
    assert (seen(masks.from_cu_seqlens(cu_q, cu_kv), extent) == wanted).all()


@pytest.mark.slow
@settings(SETTINGS, max_examples=examples(300))
@given(
    pairs,
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.booleans(),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.sampled_from([None, "lower_right", "upper_left"]),
)
def test_packed_window(lengths, spare, same, left, right, align):
    """Also sequences without queries or keys, and with more queries than keys, of which the first see nothing."""
    q_at, cu_q = packing(lengths, 0, spare[0])
    k_at, cu_kv = (q_at, None) if same else packing(lengths, 1, spare[1])
    counts = [(n, n) if same else (n, m) for n, m in lengths]
    extent = Extent(2, 1, len(q_at), len(k_at))

    def rule(b, h, q, k):
        if q_at[q] is None or k_at[k] is None or q_at[q][0] != k_at[k][0]:
            return False
        (sequence, at), (_, key) = q_at[q], k_at[k]
        queries, keys = counts[sequence]
        at += 0 if align == "upper_left" else keys - queries
        return (left < 0 or key >= at - left) and (right < 0 or key <= at + right)

    mask = masks.from_cu_seqlens(cu_q, cu_kv, window=(left, right), align=align)
    wanted = brute(extent, rule)
    assert (seen(mask, extent) == wanted).all()
    start, stop = (
        edge.expand(2, 1, extent.L)[..., None].numpy() for edge in mask.bind(extent, "cpu").intervals(extent)
    )
    k = np.arange(extent.S)
    assert ((start <= k) & (k < stop) == wanted).all()


def test_packed_windows_are_those_of_flash_attention():
    """Its documentation's two examples of ``causal=True``, and its formula for ``window_size=(2, 1)``."""
    two, five = torch.tensor([0, 2]), torch.tensor([0, 5])
    causal = masks.from_cu_seqlens(two, five, window=(-1, 0))
    assert seen(causal, Extent(1, 1, 2, 5))[0, 0].astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    causal = masks.from_cu_seqlens(five, two, window=(-1, 0))
    assert seen(causal, Extent(1, 1, 5, 2))[0, 0].astype(int).tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    i, j = np.ogrid[:5, :9]
    flash = (j >= i + 9 - 5 - 2) & (j <= i + 9 - 5 + 1)
    near = masks.from_cu_seqlens(torch.tensor([0, 3, 8]), torch.tensor([0, 1, 10]), window=(2, 1))
    assert (seen(near, Extent(1, 1, 8, 10))[0, 0, 3:, 1:] == flash).all()


def test_packed_windows_of_one_length_are_bands():
    cu, extent = torch.tensor([0, 4, 4, 9]), Extent(1, 1, 11, 11)
    packed = masks.from_cu_seqlens(cu)
    for left, right in ((-1, 0), (2, 1), (0, -1), (2**63, 2**70)):
        wanted = seen(packed & masks.window(left, right), extent)
        for align in ("lower_right", "upper_left"):
            assert (seen(masks.from_cu_seqlens(cu, window=(left, right), align=align), extent) == wanted).all()


@pytest.mark.parametrize(
    "shape", [(4, 5), (1, 5), (4, 1), (1, 1), (3, 4, 5), (1, 4, 5), (2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 1, 5)]
)
def test_dense(shape):
    extent = Extent(2, 3, 4, 5)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    marks = values > 0
    assert (seen(masks.dense(marks), extent) == np.broadcast_to(marks, (2, 3, 4, 5))).all()
    assert (
        not masks.dense(marks).has_bias and masks.dense(marks).bind(extent, "cpu").bias(*engine_indices(extent)) is None
    )
    hidden = values.masked_fill(values < -0.5, -math.inf)
    assert (seen(masks.dense(hidden), extent) == np.broadcast_to(~hidden.isneginf(), (2, 3, 4, 5))).all()
    finite = np.where(np.isneginf(hidden.numpy()), 0, hidden.numpy())
    assert (added(masks.dense(hidden), extent) == np.broadcast_to(finite, (2, 3, 4, 5))).all()


def test_dense_gradient_is_finite_where_hidden():
    values = torch.tensor([[0.5, -math.inf]], requires_grad=True)
    extent = Extent(1, 1, 3, 2)
    masks.dense(values).bind(extent, "cpu").bias(*engine_indices(extent)).expand(1, 1, 3, 2).sum().backward()
    assert values.grad.tolist() == [[3.0, 0.0]]


def test_alibi():
    extent = Extent(1, 3, 4, 6)
    slopes = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64, requires_grad=True)
    mask = masks.alibi(slopes, align="lower_right")
    q, k = np.ogrid[:4, :6]
    wanted = -np.array([1.0, 0.5, 0.25])[:, None, None] * abs(q + 2 - k)
    assert (added(mask, extent)[0] == wanted).all()
    assert not mask.hides and seen(mask, extent).all()
    mask.bind(extent, "cpu").bias(*engine_indices(extent)).sum().backward()
    assert slopes.grad.tolist() == [-abs(q + 2 - k).sum()] * 3


@pytest.mark.parametrize("heads", [*range(1, 20), 32, 40])
def test_alibi_slopes(heads):
    """The rule as the authors' code states it, recursively."""

    def published(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start ** (i + 1) for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return published(closest) + published(2 * closest)[0::2][: n - closest]

    mask = masks.alibi(heads).bind(Extent(1, heads, 2, 2), "cpu").cast(torch.float64)
    one = torch.ones((), dtype=torch.long)
    found = mask.bias(one, torch.arange(heads), one, torch.zeros_like(one))  # one key before the query
    np.testing.assert_allclose(-found.numpy(), published(heads), rtol=1e-14)


@pytest.mark.parametrize("rows", [None, 3])
def test_relative(rows):
    radius, extent = 2, Extent(1, 3, 5, 7)
    shape = (2 * radius + 1,) if rows is None else (rows, 2 * radius + 1)
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mask = masks.relative(table, offset=1)
    wanted = np.zeros((3, 5, 7))
    counts = np.zeros(shape)
    for h, q, k in np.ndindex(3, 5, 7):
        entry = (int(np.clip(k - q - 1, -radius, radius)) + radius,)
        entry = entry if rows is None else (h, *entry)
        wanted[h, q, k] = table.detach().numpy()[entry]
        counts[entry] += 1 if rows is not None or h == 0 else 0
    assert (added(mask, extent)[0] == wanted).all()
    mask.bind(extent, "cpu").bias(*engine_indices(extent)).sum().backward()
    assert (table.grad.numpy() == counts).all()


def test_relative_gradcheck():
    index = engine_indices(Extent(1, 2, 3, 4))
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: masks.relative(t).bias(*index), table)


def test_called_with_ints_gives_a_tensor():
    for mask in (
        masks.causal(),
        masks.everything(),
        masks.padding(torch.tensor([3, 4])),
        masks.alibi(2),
        ~masks.sinks(1),
    ):
        answer = mask(1, 0, 2, 2)
        assert isinstance(answer, torch.Tensor) and answer.dtype == torch.bool and answer.shape == () and bool(answer)


def test_unbound_lower_right_says_what_it_needs():
    with pytest.raises(ValueError, match=r"masks\.causal: align='lower_right' needs the numbers of queries and keys"):
        masks.causal("lower_right")(0, 0, 1, 1)
