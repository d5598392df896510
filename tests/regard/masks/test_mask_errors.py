"""What is refused, and in which words."""

# ruff: noqa: E501 (messages are read best whole)

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from regard import masks
from regard.masks import Extent

FLOATS, BOOLS, INTS = torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.int64)
EXTENT = Extent(2, 4, 5, 7)
UNSTATED = (
    "align must be given if the numbers of queries and keys differ: 'upper_left' (query 0 is at key 0) "
    "or 'lower_right' (the last query is at the last key), got None (5 queries, 7 keys)."
)

CONSTRUCTION = [
    (
        lambda: masks.causal("left"),
        ValueError,
        "masks.causal: align must be 'upper_left', 'lower_right' or None, got 'left'.",
    ),
    (
        lambda: masks.causal("upper_left", 2),
        ValueError,
        "masks.causal: offset must be None if align is given, got align='upper_left' and an offset.",
    ),
    (lambda: masks.causal(offset=1.5), TypeError, "masks.causal: offset must be an int, got 1.5."),
    (
        lambda: masks.causal(offset=FLOATS[0]),
        TypeError,
        "masks.causal: offset must be an int, or an integer tensor () or (B,), got a float32 tensor of shape (5,).",
    ),
    (
        lambda: masks.causal(offset=INTS),
        ValueError,
        "masks.causal: offset must have shape () or (B,), got (2, 5).",
    ),
    (
        lambda: masks.window(-2, 0),
        ValueError,
        "masks.window: left must be an int of at least -1 (-1 is no bound), got -2.",
    ),
    (
        lambda: masks.window(1, True),
        TypeError,
        "masks.window: right must be an int of at least -1 (-1 is no bound), got True.",
    ),
    (
        lambda: masks.window(1.0, 0),
        TypeError,
        "masks.window: left must be an int of at least -1 (-1 is no bound), got 1.0.",
    ),
    (lambda: masks.dilated(0), ValueError, "masks.dilated: step must be an int of at least 1, got 0."),
    (
        lambda: masks.leave_one_out([1, 2]),
        TypeError,
        "masks.leave_one_out: own must be an integer tensor (L,), got an object of type list.",
    ),
    (
        lambda: masks.leave_one_out(FLOATS[0]),
        TypeError,
        "masks.leave_one_out: own must be an integer tensor (L,), got a float32 tensor of shape (5,).",
    ),
    (
        lambda: masks.leave_one_out(INTS),
        ValueError,
        "masks.leave_one_out: own must have shape (L,), got (2, 5).",
    ),
    (
        lambda: masks.selected(FLOATS[0]),
        TypeError,
        "masks.selected: indices must be an integer tensor of key indices, −1 for none, got a float32 tensor of shape "
        "(5,).",
    ),
    (
        lambda: masks.selected(torch.zeros(4, 3, dtype=torch.uint16)),
        TypeError,
        "masks.selected: indices must be an integer tensor of key indices, −1 for none, got a uint16 tensor of shape "
        "(4, 3).",
    ),
    (
        lambda: masks.selected(INTS[0]),
        ValueError,
        "masks.selected: indices must have shape (L, K), (H, L, K) or (B, H, L, K), got (5,).",
    ),
    (
        lambda: masks.selected(torch.zeros(4, 3, dtype=torch.long), 0),
        ValueError,
        "masks.selected: block_size must be an int of at least 1, got 0.",
    ),
    (
        lambda: masks.neighbourhood((8, 8), 4),
        ValueError,
        "masks.neighbourhood: window must be odd along axes that are not causal, got 4.",
    ),
    (
        lambda: masks.neighbourhood((8, 6), 7),
        ValueError,
        "masks.neighbourhood: window must be at most the size of the grid: 6 along axis 1, got 7.",
    ),
    (
        lambda: masks.neighbourhood(8, 3, 3),
        ValueError,
        "masks.neighbourhood: window times dilation must be at most the size of the grid: 8 along axis 0, got 3 times 3.",
    ),
    (
        lambda: masks.neighbourhood((8, 8), 3, (1, 0)),
        ValueError,
        "masks.neighbourhood: dilation[1] must be an int of at least 1, got 0.",
    ),
    (
        lambda: masks.neighbourhood((8, 8), (3, 3, 3)),
        ValueError,
        "masks.neighbourhood: window must be one value for all axes or 2, one for each, got (3, 3, 3).",
    ),
    (
        lambda: masks.neighbourhood((8, 0), 3),
        ValueError,
        "masks.neighbourhood: sizes[1] must be an int of at least 1, got 0.",
    ),
    (
        lambda: masks.neighbourhood(8.0, 3),
        TypeError,
        "masks.neighbourhood: sizes must be a tuple of ints, one for each axis, got 8.0.",
    ),
    (
        lambda: masks.neighbourhood(8, 3, is_causal=1),
        TypeError,
        "masks.neighbourhood: is_causal must be a bool, got 1.",
    ),
    (
        lambda: masks.neighbourhood(8, 3, border="pad"),
        ValueError,
        "masks.neighbourhood: border must be 'shift' or 'truncate', got 'pad'.",
    ),
    (
        lambda: masks.windows((8, 6), 7),
        ValueError,
        "masks.windows: window must be at most the size of the grid: 6 along axis 1, got 7.",
    ),
    (lambda: masks.windows(8, 4, 4), ValueError, "masks.windows: shift must be less than the window, 4, got 4."),
    (lambda: masks.windows(8, 4, -1), ValueError, "masks.windows: shift must be an int of at least 0, got -1."),
    (lambda: masks.axial((4, 4), 2), ValueError, "masks.axial: axis must be an int from -2 to 1, got 2."),
    (
        lambda: masks.axial((4, 4), (1, -1)),
        ValueError,
        "masks.axial: axis must name at least one axis, and none twice, got (1, -1).",
    ),
    (lambda: masks.prefix(-1), ValueError, "masks.prefix: n must be an int of at least 0, got -1."),
    (lambda: masks.prefix(torch.tensor([3, -4])), ValueError, "masks.prefix: n must be at least 0, got -4."),
    (lambda: masks.padding(torch.tensor([-1, 2])), ValueError, "masks.padding: lengths must be at least 0, got -1."),
    (
        lambda: masks.prefix(INTS),
        ValueError,
        "masks.prefix: n must have shape (B,), got (2, 5).",
    ),
    (
        lambda: masks.sinks(INTS),
        TypeError,
        "masks.sinks: n must be an int of at least 0, got an int64 tensor of shape (2, 5).",
    ),
    (
        lambda: masks.padding(FLOATS),
        TypeError,
        "masks.padding: lengths must be an integer tensor (B,) or (B, L), got a float32 tensor of shape (2, 5).",
    ),
    (
        lambda: masks.padding([1, 2]),
        TypeError,
        "masks.padding: lengths must be an integer tensor (B,) or (B, L), got an object of type list.",
    ),
    (
        lambda: masks.padding(BOOLS),
        TypeError,
        "masks.padding: lengths must be an integer tensor (for a bool tensor (B, S) of valid keys, use "
        "masks.key_padding), got a bool tensor of shape (2, 5).",
    ),
    (
        lambda: masks.key_padding(INTS),
        TypeError,
        "masks.key_padding: keep must be a bool tensor (B, S) or (S,), True for valid keys, got an int64 tensor of shape (2, 5).",
    ),
    (
        lambda: masks.key_padding(BOOLS[None]),
        ValueError,
        "masks.key_padding: keep must be a bool tensor (B, S) or (S,), True for valid keys, got a bool tensor of shape (1, 2, 5).",
    ),
    (
        lambda: masks.document(FLOATS),
        TypeError,
        "masks.document: ids must be an integer tensor (L,) or (B, L), got a float32 tensor of shape (2, 5).",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([3, 4])),
        ValueError,
        "masks.from_cu_seqlens: cu_q must begin with 0 (it holds cumulative lengths, not lengths), got [3, 4].",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4, 2])),
        ValueError,
        "masks.from_cu_seqlens: cu_q must be non-decreasing, got [0, 4, 2].",
    ),
    (
        lambda: masks.from_cu_seqlens(INTS[0, :0]),
        ValueError,
        "masks.from_cu_seqlens: cu_q must begin with 0, got an empty tensor.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4]), torch.tensor([0])),
        ValueError,
        "masks.from_cu_seqlens: cu_kv must have cu_q's length 2, got 1.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4]), window=(-2, 0)),
        ValueError,
        "masks.from_cu_seqlens: window[0] must be an int of at least -1 (-1 is no bound), got -2.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4]), window=(1, 0.5)),
        TypeError,
        "masks.from_cu_seqlens: window[1] must be an int of at least -1 (-1 is no bound), got 0.5.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4]), window=3),
        TypeError,
        "masks.from_cu_seqlens: window must be a pair (left, right) or None, got 3.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4]), window=(3, 0), align="bottom_right"),
        ValueError,
        "masks.from_cu_seqlens: align must be 'lower_right', 'upper_left' or None, got 'bottom_right'.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 4]), align="upper_left"),
        ValueError,
        "masks.from_cu_seqlens: align must be None without a window, got 'upper_left'.",
    ),
    (
        lambda: masks.dense(INTS),
        TypeError,
        "masks.dense: tensor must be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides), "
        "got an int64 tensor of shape (2, 5); if 1 = may attend, pass it as tensor.bool().",
    ),
    (
        lambda: masks.dense(np.ones((2, 5), bool)),
        TypeError,
        "masks.dense: tensor must be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides), "
        "got a numpy bool array (torch.from_numpy makes it a tensor).",
    ),
    (
        lambda: masks.dense(FLOATS.to_sparse()),
        TypeError,
        "masks.dense: tensor must be a dense tensor, got a sparse_coo one.",
    ),
    (
        lambda: masks.dense(BOOLS[0]),
        ValueError,
        "masks.dense: tensor must have shape (L, S), (H, L, S) or (B, H, L, S), got (5,); "
        "for the same keys in all queries, unsqueeze(0) makes it (1, S).",
    ),
    (lambda: masks.alibi(0), ValueError, "masks.alibi: slopes must be an int of at least 1, got 0."),
    (
        lambda: masks.alibi(INTS[0]),
        TypeError,
        "masks.alibi: slopes must be an int or a float tensor (H,), got an int64 tensor of shape (5,).",
    ),
    (
        lambda: masks.relative(torch.zeros(4)),
        ValueError,
        "masks.relative: table must be a float tensor (2 R + 1,) or (H, 2 R + 1), got a float32 tensor of shape (4,).",
    ),
    (
        lambda: masks.as_mask(np.ones(3)),
        TypeError,
        "masks.as_mask: mask must be a Mask, a mask_mod(b, h, q_idx, kv_idx), a BlockMask, or a bool or float tensor, "
        "got a numpy float64 array (torch.from_numpy makes it a tensor).",
    ),
    (
        lambda: masks.as_mask(INTS, "attention", "attn_mask"),
        TypeError,
        "attention: attn_mask must be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides), "
        "got an int64 tensor of shape (2, 5); if 1 = may attend, pass it as tensor.bool().",
    ),
    (
        lambda: masks.as_mask(masks.Mask),
        TypeError,
        "masks.as_mask: mask must be a Mask, a mask_mod(b, h, q_idx, kv_idx), a BlockMask, or a bool or float tensor, "
        "got the class Mask (make an instance: Mask(...)).",
    ),
]

BINDING = [
    (masks.causal, "masks.causal: " + UNSTATED),
    (lambda: masks.window(2, 0), "masks.window: " + UNSTATED),
    (lambda: masks.dilated(2) & masks.sinks(1), "masks.dilated: " + UNSTATED),
    (lambda: masks.causal(offset=0) & masks.alibi(4), "masks.alibi: " + UNSTATED),
    (lambda: masks.relative(torch.zeros(3)), "masks.relative: " + UNSTATED),
    (lambda: ~masks.causal(offset=INTS[0]), "masks.causal: offset must have one entry per sequence (2), got (5,)."),
    (
        lambda: masks.padding(INTS[0]),
        "masks.padding: lengths must have one entry per sequence (2), or per query (2, 5), got (5,).",
    ),
    (
        lambda: masks.padding(INTS.T),
        "masks.padding: lengths must have one entry per sequence (2), or per query (2, 5), got (5, 2).",
    ),
    (
        lambda: masks.padding(torch.tensor([7, 8])),
        "masks.padding: lengths must be at most 7, the number of keys, got 8.",
    ),
    (
        lambda: masks.causal(offset=0) & ~masks.padding(torch.tensor([0, 99], dtype=torch.int8)),
        "masks.padding: lengths must be at most 7, the number of keys, got 99.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 6]), torch.tensor([0, 7])),
        "masks.from_cu_seqlens: cu_q must end at or before 5, the number of queries, got 6.",
    ),
    (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 5]), torch.tensor([0, 8])),
        "masks.from_cu_seqlens: cu_kv must end at or before 7, the number of keys, got 8.",
    ),
    (
        lambda: masks.leave_one_out(INTS.flatten()),
        "masks.leave_one_out: own must have one entry per query (5), got (10,).",
    ),
    (
        lambda: masks.selected(torch.zeros(4, 3, dtype=torch.long)),
        "masks.selected: indices must have shape (B or 1, heads, L, K) with B = 2, L = 5 and a number of heads that "
        "divides 4, got (1, 1, 4, 3).",
    ),
    (
        lambda: masks.selected(torch.full((5, 3), 7)),
        "masks.selected: indices must hold indices of keys below S = 7, or −1 for none, got 7.",
    ),
    (
        lambda: masks.selected(torch.full((5, 3), -2)),
        "masks.selected: indices must hold indices of keys below S = 7, or −1 for none, got -2.",
    ),
    (
        lambda: masks.selected(torch.full((5, 3), 3), 3),
        "masks.selected: indices must hold indices of blocks of 3 keys that begin below S = 7, or −1 for none, got 3.",
    ),
    (
        lambda: masks.neighbourhood((3, 2), 1),
        "masks.neighbourhood: sizes must multiply to the numbers of queries and keys, L = 5 and S = 7, got (3, 2), "
        "6 tokens.",
    ),
    (lambda: masks.prefix(INTS[0]), "masks.prefix: n must have one entry per sequence (2), got (5,)."),
    (
        lambda: masks.key_padding(BOOLS),
        "masks.key_padding: keep must have shape (B, S) = (2, 7) or (S,) = (7,), got (2, 5).",
    ),
    (
        lambda: masks.document(INTS),
        "masks.document: kv_ids must be given if the numbers of queries and keys differ, got None (5 queries, 7 keys).",
    ),
    (
        lambda: masks.document(INTS, INTS),
        "masks.document: kv_ids must have one id per key: shape (S,) = (7,) or (B, S) = (2, 7), got (2, 5).",
    ),
    (
        lambda: masks.document(INTS[:1], INTS),
        "masks.document: ids must have one id per query: shape (L,) = (5,) or (B, L) = (2, 5), got (1, 5).",
    ),
    (lambda: masks.alibi(3, offset=0), "masks.alibi: slopes must have one entry per query head (4), got 3."),
    (
        lambda: masks.relative(torch.zeros(2, 3), offset=0),
        "masks.relative: table must have one row per query head (4), got (2, 3).",
    ),
    (
        lambda: masks.dense(torch.zeros(5, 6)),
        "masks.dense: tensor must have shape (L, S) = (5, 7), (H, L, S) = (4, 5, 7) or (B, H, L, S) = (2, 4, 5, 7); "
        "1 broadcasts, got (5, 6).",
    ),
    (
        lambda: masks.dense(torch.zeros(2, 7)),
        "masks.dense: tensor must have shape (L, S) = (5, 7), (H, L, S) = (4, 5, 7) or (B, H, L, S) = (2, 4, 5, 7); "
        "1 broadcasts, got (2, 7); for key padding, use masks.key_padding.",
    ),
    (
        lambda: masks.as_mask(torch.zeros(2, 5, 7), "attention", "attn_mask"),
        "attention: attn_mask must have shape (L, S) = (5, 7), (H, L, S) = (4, 5, 7) or (B, H, L, S) = (2, 4, 5, 7); "
        "1 broadcasts, got (2, 5, 7); for one matrix per sequence, unsqueeze(1).",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), CONSTRUCTION, ids=[m[:40] for _, _, m in CONSTRUCTION])
def test_refused_when_made(make, kind, message):
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize(("make", "message"), BINDING, ids=[m[:40] for _, m in BINDING])
def test_refused_when_bound(make, message):
    mask = make()
    with pytest.raises(ValueError) as error:
        mask.bind(EXTENT, "cpu")
    assert str(error.value) == message


def test_more_keys_than_a_sequence_has_is_no_mistake_of_a_prefix():
    for mask in (masks.prefix(9), masks.prefix(torch.tensor([9, 8])), masks.sinks(9)):
        assert mask.bind(EXTENT, "cpu").visible_keys(EXTENT).all()


@pytest.mark.parametrize("wrong", ["negative", "too long"])
def test_values_are_not_looked_at_where_that_costs_or_cannot_be(wrong):
    """On another device, under vmap, and where a call is compiled or traced."""
    lengths = torch.tensor([-1, 2] if wrong == "negative" else [1, 9])
    cu = torch.tensor([0, -1] if wrong == "negative" else [0, 9])

    def call(lengths, cu, x):
        mask = masks.padding(lengths) & masks.prefix(lengths) & masks.from_cu_seqlens(cu, window=(1, 0))
        q = torch.arange(5)[:, None]
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        bound = mask.bind(EXTENT, lengths.device)
        return x if lengths.is_meta else torch.where(bound(zero, zero, q, torch.arange(7)), x, 0.0)

    with pytest.raises(ValueError, match=r"must be at least 0|must be at most 7"):
        call(lengths, cu, torch.ones(5, 7))
    call(lengths.to("meta"), cu.to("meta"), torch.ones(5, 7))
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend="eager")(lengths, cu, torch.ones(5, 7))
    make_fx(call)(lengths, cu, torch.ones(5, 7))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(lengths), mode.from_tensor(cu), torch.ones(5, 7))
    found = torch.func.vmap(lambda lengths: masks.padding(lengths).bind(EXTENT, "cpu").n)(lengths.expand(3, 2))
    assert torch.equal(found, lengths.expand(3, 2))


def test_dense_per_head_or_per_sequence_is_never_guessed():
    with pytest.raises(ValueError) as error:
        masks.dense(torch.zeros(3, 5, 7)).bind(Extent(3, 3, 5, 7), "cpu")
    assert str(error.value) == (
        "masks.dense: tensor must be (1, H, L, S) or (B, 1, L, S), as there are 3 heads and sequences: "
        "unsqueeze(0) or (1), got (3, 5, 7)."
    )
    for shape in ((1, 3, 5, 7), (3, 1, 5, 7), (1, 5, 7)):
        masks.dense(torch.zeros(shape)).bind(Extent(3, 3, 5, 7), "cpu")
    masks.dense(torch.zeros(1, 5, 7)).bind(Extent(1, 1, 5, 7), "cpu")


def test_a_stated_offset_is_a_statement():
    wide = Extent(1, 1, 3, 5)
    for mask, visible in (
        (masks.causal(offset=0), 3),
        (masks.window(1, 1, offset=0), 4),
        (masks.causal("upper_left"), 3),
        (masks.causal("lower_right"), 5),
    ):
        assert mask.bind(wide, "cpu").visible_keys(wide).flatten().tolist() == [True] * visible + [False] * (
            5 - visible
        )
    for nothing in (Extent(1, 1, 0, 5), Extent(1, 1, 3, 0)):  # no pair whose alignment could matter
        assert not masks.causal().bind(nothing, "cpu").visible_keys(nothing).any()


def test_tensors_must_be_where_the_queries_are():
    with pytest.raises(ValueError) as error:
        masks.padding(torch.tensor([1, 2])).bind(Extent(2, 1, 3, 3), "meta")
    assert str(error.value) == "attention: attn_mask must hold tensors on the query's device meta, got one on cpu."
    # One number on the CPU is moved, as torch does it; the paper's ALiBi slopes are made in place.
    assert masks.causal(offset=torch.tensor(2)).bind(Extent(2, 1, 3, 3), "meta").offset.device.type == "meta"
    index = [torch.zeros(1, dtype=torch.long, device="meta")] * 4
    assert masks.alibi(4).bind(Extent(2, 4, 3, 3), "meta").bias(*index).device.type == "meta"
