"""The algebra: laws of &, | and ~, sums of biases, copies."""

import copy
import pickle

import numpy as np
import pytest
import torch

from regard import masks
from regard.masks import AndMask, Extent, NotMask, OrMask

EXTENT = Extent(2, 3, 6, 6)
INDEX = (
    torch.arange(2)[:, None, None, None],
    torch.arange(3)[:, None, None],
    torch.arange(6)[:, None],
    torch.arange(6),
)
A, B, C = masks.causal(), masks.window(1, 2), masks.padding(torch.tensor([2, 5]))
DRAW = torch.Generator().manual_seed(0)
BIASES = [
    masks.alibi(3),
    masks.relative(torch.randn(3, 5, generator=DRAW)),
    masks.dense(torch.randn(6, 6, generator=DRAW)),
]


def seen(mask):
    return mask.bind(EXTENT, "cpu")(*INDEX)


def same(one, other):
    return torch.equal(seen(one), seen(other))


def test_laws():
    assert same(~(A & C), ~A | ~C) and same(~(A | C), ~A & ~C)
    assert same(A & B, B & A) and same(A | C, C | A)
    assert same((A & B) & C, A & (B & C)) and same((A | B) | C, A | (B | C))
    assert same(A & (B | C), (A & B) | (A & C)) and same(A | (B & C), (A | B) & (A | C))
    assert same(A & masks.everything(), A) and not seen(A & ~A).any() and seen(A | ~A).all()
    assert ~~A is A


def test_nodes_are_flat_and_read_like_code():
    three = (A & B) & C
    assert isinstance(three, AndMask) and three.masks == (A, B, C)
    assert isinstance(A | (B | C), OrMask) and (A | (B | C)).masks == (A, B, C)
    assert isinstance(~three, NotMask)
    assert repr((A | B) & ~(B & C)) == "(causal() | window(1, 2)) & ~(window(1, 2) & padding(tensor[2]))"
    assert repr(masks.causal("lower_right") & masks.window(256, 0, offset=3)) == (
        "causal(align='lower_right') & window(256, 0, offset=3)"
    )
    assert repr(masks.alibi(8) & masks.dilated(2) & masks.prefix(3)) == "alibi(8) & dilated(2) & prefix(3)"


def test_biases_add_up():
    mask = (A & BIASES[0] & BIASES[1] & C & BIASES[2]).bind(EXTENT, "cpu")
    parts = [bias.bind(EXTENT, "cpu").bias(*INDEX) for bias in BIASES]
    torch.testing.assert_close(mask.bias(*INDEX), parts[0] + parts[1] + parts[2])
    assert mask.has_bias and mask.hides
    assert torch.equal(mask(*INDEX), seen(A & C))
    assert A.bind(EXTENT, "cpu").bias(*INDEX) is None and (A & C).bias(*INDEX) is None
    assert (BIASES[0] & BIASES[1]).visible(*INDEX) is None


@pytest.mark.parametrize("bias", BIASES, ids=repr)
def test_a_bias_has_no_union_and_no_complement(bias):
    with pytest.raises(TypeError, match=r"\|: .* adds a bias, and \| takes masks without one; add the bias with &"):
        A | bias
    with pytest.raises(TypeError, match=r"\|: .* adds a bias"):
        (bias & A) | B
    with pytest.raises(TypeError, match=r"~: .* adds a bias, which has no complement"):
        ~(bias & A)


def test_functions_and_tensors_combine_on_either_side():
    def even(b, h, q_idx, kv_idx):
        return kv_idx % 2 == 0

    marks = torch.arange(6)[None] % 2 == 0
    for left, right in ((A & even, even & A), (A & marks, marks & A)):
        assert same(left, right) and torch.equal(seen(left), seen(A) & marks)
    assert torch.equal(seen(A | even), seen(even | A)) and torch.equal(seen(A | even), seen(A) | marks)


def test_what_cannot_be_combined():
    for other in (3, "causal", None, np.ones((6, 6), bool), torch.ones(6, 6, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"masks\.as_mask: mask must be"):
            A & other
        with pytest.raises(TypeError, match=r"masks\.as_mask: mask must be"):
            other | A
    with pytest.raises(TypeError, match="a mask has no truth value"):
        bool(A)


def test_alignments_resolve_each_by_itself():
    extent = Extent(1, 1, 2, 4)
    mask = (masks.causal("lower_right") & ~masks.causal(offset=0)).bind(extent, "cpu")
    found = mask(torch.tensor(0), torch.tensor(0), torch.arange(2)[:, None], torch.arange(4))
    assert found.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


EVERY = [
    A,
    B,
    C,
    masks.dilated(2),
    masks.key_padding(torch.ones(2, 6, dtype=torch.bool)),
    masks.document(torch.arange(6)),
    masks.from_cu_seqlens(torch.tensor([0, 4, 6])),
    masks.from_cu_seqlens(torch.tensor([0, 4, 6]), torch.tensor([0, 1, 5]), window=(-1, 1), align="upper_left"),
    masks.everything(),
    masks.leave_one_out(),
    masks.leave_one_out(torch.tensor([5, -1, 0, 1, 2, 3])),
    masks.selected(torch.tensor([[0, 5], [3, -1], [1, 1], [-1, -1], [2, 4], [5, 0]])),
    masks.neighbourhood((2, 3), (1, 3), is_causal=(True, False)),
    masks.windows((2, 3), 2, (0, 1)),
    masks.axial((3, 2), 0),
    ~A & C | B,
    *BIASES,
    A & BIASES[1],
]


@pytest.mark.parametrize("mask", EVERY, ids=repr)
def test_copies(mask):
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.with_tensors(mask.tensors())):
        assert same(twin, mask) and repr(twin) == repr(mask)


def test_tensors_are_found_and_replaced():
    table, lengths = torch.randn(3, 5), torch.tensor([2, 5])
    mask = masks.causal(offset=torch.tensor([1, 2])) & masks.relative(table) & ~masks.padding(lengths)
    bound = mask.bind(EXTENT, "cpu")
    assert [t.shape for t in bound.tensors()] == [(2,), (3, 5), (2,)]
    doubled = bound.map_tensors(lambda t: t * 2)
    assert torch.equal(doubled.bias(*INDEX), 2 * bound.bias(*INDEX))


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("mask", EVERY, ids=repr)
def test_traced_by_dynamo_without_a_break(mask):
    def call(x):
        bound = mask.bind(EXTENT, x.device)
        bias = bound.bias(*INDEX)
        x = torch.where(bound(*INDEX), x, 0.0)
        return (x if bias is None else x + bias), bound.tiles(EXTENT, 4, 4), bound.is_plain_causal(EXTENT)

    x = torch.randn(2, 3, 6, 6)
    torch._dynamo.reset()
    for found, wanted in zip(torch.compile(call, fullgraph=True, backend="eager")(x), call(x)):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))
