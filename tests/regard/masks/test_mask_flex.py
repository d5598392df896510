"""FlexAttention: our masks where it wants a mask_mod, its mask_mod and BlockMask where we want a mask."""

import functools
import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiers import examples
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks

import regard
from regard import masks
from regard._utils.elementwise import meaning, per_element
from regard.masks import FULL, MIXED, BlockSparse, Extent

B, H, L, S = 2, 3, 10, 10
EXTENT = Extent(B, H, L, S)
INDEX = (
    torch.arange(B)[:, None, None, None],
    torch.arange(H)[:, None, None],
    torch.arange(L)[:, None],
    torch.arange(S),
)
G = torch.Generator().manual_seed(0)
MASKS = [
    masks.causal(),
    masks.causal(offset=torch.tensor([1, 4])),
    masks.window(3, 1) | masks.sinks(2),
    masks.dilated(2),
    masks.padding(torch.tensor([3, 7])),
    masks.padding(torch.randint(0, 10, (B, L), generator=G)),
    masks.prefix(torch.tensor([1, 2])),
    masks.key_padding(torch.rand(B, S, generator=G) > 0.5),
    masks.document(torch.randint(0, 3, (B, L), generator=G)),
    masks.leave_one_out(),
    masks.leave_one_out(torch.randint(-1, S, (L,), generator=G)),
    masks.selected(torch.randint(-1, S, (L, 4), generator=G)),
    masks.selected(torch.randint(-1, S, (B, H, L, 3), generator=G)),
    masks.neighbourhood((2, 5), (1, 3), is_causal=(True, False)),
    masks.neighbourhood(10, 3, 2) | masks.windows((5, 2), (3, 1), shift=(1, 0)),
    masks.axial((5, 2), (0, 1)) & masks.causal(),
    masks.from_cu_seqlens(torch.tensor([0, 5, 9], dtype=torch.int32)),
    masks.from_cu_seqlens(torch.tensor([0, 5, 9]), torch.tensor([0, 3, 10]), window=(2, 0)),
    masks.from_cu_seqlens(torch.tensor([0, 5, 9]), torch.tensor([0, 3, 10]), window=(0, 2), align="upper_left"),
    masks.dense(torch.rand(B, H, L, S, generator=G) > 0.5),
    masks.dense(torch.rand(1, S, generator=G) > 0.5) & masks.causal(),
    masks.alibi(H),
    ~masks.everything(),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_serves_as_a_mask_mod(mask):
    """Under vmap, with 0-d indices, alone and inside torch's own combinators."""
    wanted = mask(*INDEX)
    assert torch.equal(create_mask(mask, B, H, L, S, "cpu"), wanted)
    mapped = mask
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims)
    assert torch.equal(mapped(*(torch.arange(n) for n in (B, H, L, S))), wanted)
    other = masks.window(2, 2)
    assert torch.equal(create_mask(and_masks(mask, other), B, H, L, S, "cpu"), wanted & other(*INDEX))
    assert torch.equal(create_mask(or_masks(mask, other), B, H, L, S, "cpu"), wanted | other(*INDEX))


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("block", [4, (3, 5)])
def test_block_mask_is_accepted(mask, block):
    sparse = masks.as_mask(create_block_mask(mask, B, H, L, S, "cpu", BLOCK_SIZE=block))
    assert isinstance(sparse, BlockSparse)
    bound = sparse.bind(EXTENT, "cpu")
    wanted = mask(*INDEX)
    assert torch.equal(bound(*INDEX), wanted)
    for q_block, kv_block in ((4, 4), (2, 3), (7, 10)):
        tiles = sparse.tiles(EXTENT, q_block, kv_block)
        exact = sparse.tiles(EXTENT, q_block, kv_block, exact=True)
        true = masks.dense(wanted).tiles(EXTENT, q_block, kv_block)
        assert torch.equal(exact, true)
        decided = tiles != MIXED
        assert torch.equal(tiles[decided], true[decided])


def test_block_lists_have_the_last_word():
    """What no list names is hidden, and full blocks do not ask the mask_mod."""
    counts, columns = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full_counts, full_columns = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    asked = BlockMask.from_kv_blocks(
        counts, columns, full_counts, full_columns, BLOCK_SIZE=2, mask_mod=lambda b, h, q, k: q > k, seq_lengths=(4, 3)
    )
    sparse = masks.as_mask(asked).bind(Extent(2, 5, 4, 3), "cpu")
    assert sparse.states.tolist() == [[[[MIXED, 0], [FULL, MIXED]]]]
    found = sparse(torch.tensor(1), torch.tensor(4), torch.arange(4)[:, None], torch.arange(3))
    assert found.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_block_mask_shared_by_sequences_and_heads():
    sparse = masks.as_mask(create_block_mask(masks.causal(), None, None, L, S, "cpu", BLOCK_SIZE=4))
    assert sparse.tiles(EXTENT, 4, 4).shape == (1, 1, 3, 3)
    assert torch.equal(sparse.bind(EXTENT, "cpu")(*INDEX), masks.causal()(*INDEX))
    assert torch.equal((sparse & masks.window(1, 0))(*INDEX), (masks.causal() & masks.window(1, 0))(*INDEX))


def test_block_mask_of_other_sizes_is_refused():
    sparse = masks.as_mask(create_block_mask(masks.causal(), 2, None, L, S, "cpu", BLOCK_SIZE=4))
    with pytest.raises(ValueError) as error:
        sparse.bind(Extent(3, 1, 10, 12), "cpu")
    assert str(error.value) == (
        "masks.as_mask: BlockMask must be made for (B or 1, H or 1, L, S) = (3, 1, 10, 12), "
        "got one made for (2, 1, 10, 10)."
    )


def test_torch_causal_bias_is_accepted():
    extent = Extent(1, 1, 3, 5)
    assert masks.as_mask(causal_upper_left(3, 5)).is_plain_causal(extent)
    assert masks.as_mask(causal_lower_right(3, 5)).as_band(extent) == masks.causal("lower_right").as_band(extent)
    with pytest.raises(ValueError) as error:
        masks.as_mask(causal_lower_right(4, 5)).bind(extent, "cpu")
    assert str(error.value) == "masks.as_mask: CausalBias must be made for (L, S) = (3, 5), got one made for (4, 5)."


def test_tables_under_vmap():
    """Masks whose tensors are mapped over, as torch.func.vmap of an attention call does."""
    tables, lengths = torch.randn(4, H, 5), torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    found = torch.func.vmap(lambda t: masks.relative(t).bind(EXTENT, "cpu").bias(*INDEX))(tables)
    assert torch.equal(found, torch.stack([masks.relative(t).bias(*INDEX) for t in tables]))
    found = torch.func.vmap(lambda n: masks.padding(n).bind(EXTENT, "cpu").visible(*INDEX))(lengths)
    assert torch.equal(found, torch.stack([masks.padding(n).visible(*INDEX) for n in lengths]))


# Functions of one pair

TABLE = torch.randint(0, 3, (B, S), generator=G)
BITS = torch.rand(B, H, L, S, generator=G) > 0.6
GLOBAL, WIDTHS, EDGES = torch.tensor([1, 4]), torch.tensor([1, 3, 6]), torch.tensor([2, 5])
FUNCTIONS = {
    "causal": lambda b, h, q, k: q >= k,
    "global tokens": lambda b, h, q, k: (q == k) | (q == GLOBAL).any() | (k == GLOBAL).any(),
    "documents": lambda b, h, q, k: TABLE[0][q] == TABLE[0][k],
    "documents of a sequence": lambda b, h, q, k: TABLE[b, q] == TABLE[b, k],
    "row of a table": lambda b, h, q, k: TABLE[b].sum() > q + k,
    "window of a head": lambda b, h, q, k: (q - k).abs() < WIDTHS[h],
    "matrix": lambda b, h, q, k: BITS[b, h, q, k],
    "numbers and slices": lambda b, h, q, k: BITS[0, h, 1:, k].any() | BITS[b, ..., k][0].all(),
    "ellipsis and None": lambda b, h, q, k: BITS[..., q, k].any() & BITS[b, :, None, -1, k].any(),
    "vector and element": lambda b, h, q, k: BITS[b, WIDTHS % H, q, k].any(),
    "narrow indices": lambda b, h, q, k: TABLE[b.int(), q.to(torch.int8)] == TABLE[b, k.short()],
    "counted": lambda b, h, q, k: (torch.arange(S) <= q).sum() > k + 1,
    "segments": lambda b, h, q, k: torch.bucketize(q, EDGES) == torch.bucketize(k, EDGES),
    "masks": lambda b, h, q, k: (masks.window(2, 0) & masks.padding(TABLE[:, 0] + 5))(b, h, q, k) | (k == 0),
    "mask_mod": lambda b, h, q, k: masks.as_mask(lambda b, h, q, k: (k == GLOBAL).any())(b, h, q, k) | (q == k),
    "sequence": lambda b, h, q, k: b > 0,
    "constant": lambda b, h, q, k: torch.tensor(True),
    "partial": functools.partial(lambda edge, b, h, q, k: (q < edge) == (k < edge), 4),
    "or_masks": or_masks(masks.sinks(1), lambda b, h, q, k: (q == GLOBAL).any()),
}


def by_pairs(mask_mod):
    """Return (B, H, L, S) of calls for one pair each."""
    places = itertools.product(range(B), range(H), range(L), range(S))
    found = [bool(mask_mod(*map(torch.tensor, place))) for place in places]
    return torch.tensor(found).view(B, H, L, S)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_mod_is_a_function_of_one_pair(name):
    """Each pair by itself, torch's own reading, and every engine agree."""
    mask_mod = FUNCTIONS[name]
    wanted = by_pairs(mask_mod)
    mask = masks.as_mask(mask_mod).bind(EXTENT, "cpu")
    assert torch.equal(mask(*INDEX), wanted)
    assert torch.equal((~mask)(*INDEX), ~wanted)
    if name != "narrow indices":  # which torch's own does not take
        assert torch.equal(create_mask(mask_mod, B, H, L, S, "cpu"), wanted)
        sparse = masks.as_mask(create_block_mask(mask_mod, B, H, L, S, "cpu", BLOCK_SIZE=4))
        assert torch.equal(sparse.bind(EXTENT, "cpu")(*INDEX), wanted)
    assert torch.equal(mask.tiles(EXTENT, 4, 3, exact=True), masks.dense(wanted).tiles(EXTENT, 4, 3).expand(B, H, 3, 4))
    query, key, value = torch.randn(3, B, H, L, 4, generator=G, dtype=torch.float64)
    output = regard.attention(query, key, value, wanted, engine="reference")
    for engine in ("reference", "streaming", "sdpa", "auto"):
        torch.testing.assert_close(regard.attention(query, key, value, mask_mod, engine=engine), output)


def test_a_mask_mod_is_evaluated_no_more_than_it_depends_on():
    """What depends on the query and key alone has no copy for each sequence and head; nor has what follows."""
    shapes = {"causal": (1, 1, L, S), "documents of a sequence": (B, 1, L, S), "sequence": (B, 1, 1, 1), "constant": ()}
    for name, shape in shapes.items():
        mask = masks.as_mask(FUNCTIONS[name])
        assert mask.visible(*INDEX).shape == (shape or (1, 1, 1, 1))
        assert (~mask & masks.sinks(1)).visible(*INDEX).shape[:2] == (shape or (1, 1))[:2]
    sizes = []

    def watched(b, h, q, k):
        assert all(i.dim() == 0 for i in (b, h, q, k))
        sizes.append(1)
        return q >= k

    masks.as_mask(watched)(*INDEX)
    assert len(sizes) == 1


SIZES = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4)


NUMBER, NUMBERS = 3, torch.tensor([1, 2])


def _of(left):
    return lambda b, h, q, k: k >= q - left


KNOWN = [
    lambda b, h, q, k: q >= k,
    lambda b, h, q, k: (q - k).abs() <= NUMBER,
    lambda b, h, q, k, n=2: torch.where(h > n, q >= k, torch.logical_not(q < k)),
    _of(3),
]
UNKNOWN = {
    "a tensor": lambda b, h, q, k: NUMBERS[b] > k,
    "a tensor that it closes over": _of(torch.tensor(3)),
    "an object": lambda b, h, q, k: k < EXTENT.B,
    "random numbers": lambda b, h, q, k: torch.rand(()) > 0.5,
    "the state of torch": lambda b, h, q, k: q >= k if torch.is_grad_enabled() else q < k,
    "another function": lambda b, h, q, k: any(q >= key for key in k),
    "a partial": functools.partial(lambda b, h, q, k: q >= k),
    "a mutable default": lambda b, h, q, k, seen=[]: q >= len(seen),
    "a keyword": functools.update_wrapper(lambda b, h, q, k, *, seen=NUMBERS: q >= k, _of),
}


@pytest.mark.parametrize("function", KNOWN)
def test_what_a_function_of_its_arguments_alone_means(function):
    assert meaning(function) == meaning(function) is not None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_function_reads_elsewhere_is_not_known(name):
    assert meaning(UNKNOWN[name]) is None


def test_functions_of_other_numbers_mean_something_else(monkeypatch):
    found = {meaning(_of(number)) for number in (3, 3.0, 1, True, 1.0, 0.0, -0.0, 4)}
    assert len(found) == 8 and meaning(_of(3)) == meaning(_of(3))
    before = meaning(KNOWN[1])
    monkeypatch.setitem(globals(), "NUMBER", 4)
    assert meaning(KNOWN[1]) != before
    monkeypatch.setitem(globals(), "NUMBER", NUMBERS)
    assert meaning(KNOWN[1]) is None


@hypothesis.given(sizes=SIZES, shared=st.lists(st.integers(0, 15), min_size=3, max_size=3), seed=st.integers(0, 9))
@hypothesis.settings(max_examples=examples(60), deadline=None)
def test_any_shapes_that_broadcast(sizes, shared, seed):
    """Each argument has some of the dimensions, with or without those in front."""
    generator = torch.Generator().manual_seed(seed)
    given = []
    for bits in shared:
        shape = [1 if bits >> dim & 1 else size for dim, size in enumerate(sizes)]
        shape = shape[next((d for d, n in enumerate(shape) if n != 1), len(shape)) if bits % 2 else 0 :]
        given.append(torch.randint(0, 5, shape, generator=generator))
    table = torch.rand(5, 5, generator=generator)

    def function(x, y, z):
        return table[x, y] + (table[y] * (z == torch.arange(5))).sum() - table[:, z].max() * x

    whole = torch.broadcast_tensors(*given)
    each = [function(*(t[place] for t in whole)) for place in itertools.product(*map(range, whole[0].shape))]
    found = per_element(function, *given, kind="float", blame=("f", "g"))
    assert found.dim() == whole[0].dim()
    assert math.prod(found.shape) == len(each)
    if each:
        torch.testing.assert_close(found.flatten(), torch.stack(each))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("engine", ["reference", "streaming", "sdpa", "auto"])
def test_a_mask_mod_of_no_pairs(sizes, engine):
    B, H, L, S = sizes
    query, key = torch.randn(B, H, L, 4, requires_grad=True), torch.randn(B, H, S, 4)
    output = regard.attention(query, key, key, FUNCTIONS["global tokens"], engine=engine)
    assert torch.equal(output, torch.zeros(B, H, L, 4))
    output.sum().backward()
    assert torch.equal(query.grad, torch.zeros(B, H, L, 4))


@pytest.mark.campaign
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_mask_mod_compiles(backend):
    query, key, value = torch.randn(3, B, H, L, 4, generator=G)
    names = ["global tokens", "documents of a sequence", "numbers and slices", "masks"]
    names = names if backend == "aot_eager" else names[:2]
    one = slice(1), slice(1)  # where the index of the sequence and head is not mapped over

    def call(query):
        outputs = [regard.attention(query, key, value, FUNCTIONS[name]) for name in names]
        first = [regard.attention(query[one], key[one], value[one], FUNCTIONS[name]) for name in names]
        return torch.cat((torch.stack(outputs), torch.stack(first).expand(-1, B, H, L, 4)))

    found, wanted = query.clone().requires_grad_(), query.clone().requires_grad_()
    output, expected = torch.compile(call, fullgraph=True, backend=backend)(found), call(wanted)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("engine", ["reference", "streaming", "sdpa"])
def test_a_mask_mod_under_vmap(engine):
    """Tensors that it closes over are mapped over."""
    query, key, value = torch.randn(3, B, H, L, 4, generator=G)
    chosen = torch.tensor([[0, 3], [5, 5], [2, 9]])

    def call(tokens):
        return regard.attention(query, key, value, lambda b, h, q, k: (q == k) | (k == tokens).any(), engine=engine)

    torch.testing.assert_close(torch.func.vmap(call)(chosen), torch.stack([call(tokens) for tokens in chosen]))


def branches(b, h, q, k):
    return k if q > 1 else k > 1


REFUSED = {
    lambda b, h, q, k: q - k: "return a bool tensor of shape (), as in FlexAttention, got the function <lambda>, "
    "which returned an int64 tensor of shape () for one pair.",
    lambda b, h, q, k: k == GLOBAL: "return a bool tensor of shape (), as in FlexAttention, got the function <lambda>, "
    "which returned a bool tensor of shape (2,) for one pair.",
    branches: "work under torch.vmap, as in FlexAttention, got the function branches, which does not "
    "(vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow).",
    lambda b, h, q, k: torch.tensor(q.item() > 1): "work under torch.vmap, as in FlexAttention, got the function "
    "<lambda>, which does not (vmap: It looks like you're calling .item() on a Tensor).",
    lambda b, h, q, k: torch.from_numpy(q.numpy() > 1): "work under torch.vmap, as in FlexAttention, got the function "
    "<lambda>, which does not (Cannot access data pointer of Tensor that doesn't have storage).",
}


@pytest.mark.parametrize("mask_mod", REFUSED, ids=lambda f: REFUSED[f])
def test_what_is_no_mask_mod_is_refused(mask_mod):
    with pytest.raises(TypeError) as error:
        masks.as_mask(mask_mod)(*INDEX)
    assert str(error.value) == f"masks.as_mask: mask_mod must {REFUSED[mask_mod]}"
    x = torch.zeros(B, H, L, 4)
    with pytest.raises(TypeError) as error:
        regard.attention(x, x, x, mask_mod)
    must = "be a Mask, a tensor, or a mask_mod(b, h, q_idx, kv_idx) that returns a bool tensor"
    wanted = REFUSED[mask_mod].replace("return a bool tensor of shape (), as in FlexAttention", must)
    assert str(error.value) == f"attention: attn_mask must {wanted}"


def test_errors_of_a_mask_mod_are_its_own():
    def fails(b, h, q, k):
        raise RuntimeError("no more")

    x = torch.zeros(B, H, L, 4)
    with pytest.raises(RuntimeError, match=r"^no more$"):
        regard.attention(x, x, x, fails)
    with pytest.raises(IndexError):
        regard.attention(x, x, x, lambda b, h, q, k: GLOBAL[k] > 0)
