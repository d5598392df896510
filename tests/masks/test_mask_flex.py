"""FlexAttention: our masks where it wants a mask_mod, its BlockMask where we want a mask."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks

from regard import masks
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
    masks.from_cu_seqlens(torch.tensor([0, 5, 9], dtype=torch.int32)),
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


def test_a_mask_mod_must_answer_with_bools():
    with pytest.raises(TypeError) as error:
        masks.as_mask(lambda b, h, q, k: q - k)(0, 0, 1, 1)
    assert str(error.value) == "masks.as_mask: mask_mod must return a bool tensor, got an int64 tensor of shape ()."
