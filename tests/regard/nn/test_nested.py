"""Nested tensors of every structure, against each sequence by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nested import nested_tensor, nested_tensor_from_jagged

from regard import masks
from regard.nn import (
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from regard.testing.laws.ragged import MAKERS, Maker, jagged, narrowed, rows, sequences, strided, with_ends

E, H = 8, 2
PLACES = {"query": [(1, 3), (0, 2), (4, 0), (2, 4)], "key": [(3, 2), (0, 5), (1, 1), (0, 6)]}
OTHERS = {"query": PLACES["query"], "key": [(0, 2), (1, 5), (5, 1), (1, 6)]}  # as long, elsewhere


def source(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 7, E, generator=generator, dtype=torch.float64).requires_grad_()


def compared(found: Tensor, wanted: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Check values, and gradients to the padded sequences that the nested ones are views or copies of."""
    outputs = sequences(found)
    for output, right in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output, right)
    losses = [sum(x.square().sum() for x in each) for each in (outputs, wanted)]
    torch.testing.assert_close(*[torch.autograd.grad(loss, sources, retain_graph=True) for loss in losses])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("options", [{}, {"bias": False, "num_kv_heads": 1}, {"add_zero_attn": True}], ids=str)
def test_attention_to_others(make: Maker, options: dict[str, Any]) -> None:
    """Keys elsewhere than values; sequences of no rows; the output can be added to the query."""
    torch.manual_seed(0)
    layer = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    sources = [source(seed) for seed in range(3)]
    places = PLACES["query"], PLACES["key"], OTHERS["key"]
    nested = [make(x, each) for x, each in zip(sources, places)]
    each = list(zip(*[rows(x, where) for x, where in zip(sources, places)]))
    wanted = [layer(*(x.unsqueeze(0) for x in three)) for three in each]
    output, weights = layer(*nested)
    compared(output, [right.squeeze(0) for right, _ in wanted], sources)
    assert weights.shape == (4, 4, 7 if "add_zero_attn" in options else 6)
    for found, (_, right), (query, key, _) in zip(weights, wanted, each):
        torch.testing.assert_close(found[: len(query), : len(key)], right[0, :, : len(key)])
        assert not found[len(query) :].any()
    if make is not with_ends:  # which torch does not add
        sums = (nested[0] + output).unbind()
        for found, query, (right, _) in zip(sums, rows(sources[0], places[0]), wanted):
            torch.testing.assert_close(found, query + right.squeeze(0))


@pytest.mark.parametrize("make", MAKERS)
def test_attention_to_itself(make: Maker) -> None:
    torch.manual_seed(0)
    layer, x = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64), source()
    nested = make(x, PLACES["key"])
    wanted = [layer(*[row.unsqueeze(0)] * 3, is_causal=True)[0].squeeze(0) for row in rows(x, PLACES["key"])]
    compared(layer(nested, nested, nested, need_weights=False, is_causal=True)[0], wanted, [x])
    window = [layer(*[row.unsqueeze(0)] * 3, attn_mask=masks.window(1, 1))[0][0] for row in rows(x, PLACES["key"])]
    mask = masks.window(1, 1)
    compared(layer(nested, nested, nested, attn_mask=mask)[0], window, [x])


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformers(make: Maker, norm_first: bool) -> None:
    """Layers, stacks and the whole, in training mode; a memory has holes elsewhere."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    encoder, decoder = (kind(E, H, 16, 0.0, **options) for kind in (TransformerEncoderLayer, TransformerDecoderLayer))
    model = Transformer(E, H, 1, 2, 16, 0.0, **options)
    x, memory = source(), source(1)
    nested, other = make(x, PLACES["query"]), make(memory, PLACES["key"])
    pairs = list(zip(rows(x, PLACES["query"]), rows(memory, PLACES["key"])))

    def apart(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        return [function(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0) if len(a) else a for a, b in pairs]

    for layer in (encoder, TransformerEncoder(copy.deepcopy(encoder), 2)):
        compared(layer(nested), apart(lambda a, _, layer=layer: layer(a)), [x])
    for layer in (decoder, TransformerDecoder(copy.deepcopy(decoder), 2)):
        wanted = apart(lambda a, b, layer=layer: layer(a, b, tgt_is_causal=True))
        compared(layer(nested, other, tgt_is_causal=True), wanted, [x, memory])
    compared(model(other, nested), apart(lambda a, b: model(b, a)), [x, memory])


ALIGNED = [
    masks.causal(align="lower_right"),
    ~(masks.window(1, 0, align="lower_right") | masks.sinks(1)),
    masks.alibi(H, align="lower_right") & masks.dilated(2, align="lower_right"),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("mask", ALIGNED, ids=repr)
def test_masks_are_aligned_in_each_sequence(make: Maker, mask: masks.Mask) -> None:
    """By its own numbers of queries and keys, not by those of the longest."""
    torch.manual_seed(0)
    layer = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    sources = [source(0), source(1)]
    places = PLACES["query"], PLACES["key"]
    query, key = (make(x, where) for x, where in zip(sources, places))
    each = zip(*[rows(x, where) for x, where in zip(sources, places)])
    wanted = [layer(q.unsqueeze(0), *[k.unsqueeze(0)] * 2, attn_mask=mask)[0].squeeze(0) for q, k in each]
    compared(layer(query, key, key, attn_mask=mask)[0], wanted, sources)


def test_an_alignment_must_be_stated_where_one_sequence_needs_it() -> None:
    layer = MultiheadAttention(E, H, batch_first=True)
    ends = jag(2, 3), jag(3, 2)
    with pytest.raises(ValueError, match=r"align must be given .* \(2 queries, 3 keys in sequence 0\)"):
        layer(ends[0], ends[1], ends[1], attn_mask=masks.causal())
    same = [jag(0, 3), jag(4, 3)]  # a sequence without queries is aligned in any way
    assert layer(same[0], same[1], same[1], attn_mask=masks.causal(), need_weights=False)[0].is_nested


def test_gradients_to_a_leaf_with_holes() -> None:
    torch.manual_seed(0)
    layer, x = TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64), source()
    leaf: Any = narrowed(x, PLACES["query"]).detach().requires_grad_()
    sum(row.square().sum() for row in layer(leaf).unbind()).backward()
    (wanted,) = torch.autograd.grad(
        sum(layer(row.unsqueeze(0)).square().sum() for row in rows(x, PLACES["query"]) if len(row)), x
    )
    for found, right in zip(leaf.grad.unbind(), rows(wanted, PLACES["query"])):
        torch.testing.assert_close(found, right)


def test_garbage_in_holes_does_not_leak() -> None:
    torch.manual_seed(0)
    layer, x = TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64), source().detach()
    wanted = layer(narrowed(x, PLACES["query"])).unbind()
    spoiled = torch.full_like(x, torch.nan)
    for row, clean in zip(rows(spoiled, PLACES["query"]), rows(x, PLACES["query"])):
        row.copy_(clean)
    for found, right in zip(layer(narrowed(spoiled, PLACES["query"])).unbind(), wanted):
        assert torch.equal(found, right)


def test_a_layer_keeps_what_has_no_holes() -> None:
    """So that what comes out can be added to what went in."""
    layer = TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64)
    for make in (strided, jagged):
        nested = make(source(), PLACES["query"])
        assert (nested + layer(nested)).is_nested


def jag(*lengths: int, width: int = E) -> Tensor:
    return nested_tensor([torch.zeros(n, width) for n in lengths], layout=torch.jagged)


OVERLAPPING = nested_tensor_from_jagged(torch.zeros(9, E), torch.tensor([0, 3, 9]), torch.tensor([5, 4]))
TURNED = nested_tensor_from_jagged(torch.zeros(E, 2 * E), torch.tensor([0, E, 2 * E]), jagged_dim=2)
#: query, key and value, and what is said of them.
REFUSED = {
    "value must hold sequences of key's lengths [3, 5], got [5, 3].": (jag(3, 5), jag(3, 5), jag(5, 3)),
    "key must hold as many sequences as query, 2, got 1.": (jag(3, 5), jag(5), jag(5)),
    "query must hold sequences of shape (N, 8), got a float32 tensor of shape (3, 4).": [jag(3, 5, width=4)] * 3,
    "query must hold sequences that do not overlap, got a jagged tensor with overlapping ones.": [OVERLAPPING] * 3,
    f"query must have shape (B, N, 8) with jagged N, got {tuple(TURNED.shape)}.": [TURNED] * 3,
    "query must hold sequences of shape (N, 8), got a float32 tensor of shape (8,).": [
        nested_tensor([torch.zeros(E), torch.zeros(2)])
    ]
    * 3,
    "query, key and value must be either all nested, without a key_padding_mask, or all dense, got a mixture.": (
        jag(3, 5), torch.zeros(2, 5, E), torch.zeros(2, 5, E),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError) as error:
        MultiheadAttention(E, H, batch_first=True)(*REFUSED[message])
    assert str(error.value) == f"MultiheadAttention: {message}"


def test_a_key_may_overlap() -> None:
    """It is read alone."""
    layer = MultiheadAttention(E, H, batch_first=True)
    values = torch.randn(9, E)
    key = nested_tensor_from_jagged(values, torch.tensor([0, 3, 9]), torch.tensor([5, 4]))
    query = nested_tensor([torch.randn(2, E), torch.randn(1, E)], layout=torch.jagged)
    found = layer(query, key, key)[0].unbind()
    for output, row, start, stop in zip(found, query.unbind(), (0, 3), (5, 7)):
        torch.testing.assert_close(output, layer(row, values[start:stop], values[start:stop])[0])
