"""The Transformer's layers and stacks: torch's weights, torch's numbers."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import across
from torch import Tensor, nn

from regard.nn.heads.scored import GeneralAttention
from regard.nn.kv_cache import KVCache
from regard.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

B, L, S, E, H = 2, 4, 5, 16, 4
F64 = torch.float64
LATER = torch.ones(S, S, dtype=torch.bool).triu(1)
PADDING = torch.arange(S) >= torch.tensor([[3], [5]])
TARGET = torch.arange(L) >= torch.tensor([[4], [2]])

BUILDS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"batch_first": True, "activation": "gelu"},
    {"bias": False, "norm_first": True},
    {"activation": nn.SiLU(), "layer_norm_eps": 1e-3},
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def rows(build: dict[str, Any], n: int, seed: int = 0) -> Tensor:
    x = normal(B, n, E, seed=seed)
    return (x if build.get("batch_first") else x.transpose(0, 1).contiguous()).requires_grad_()


def twins(kind: str, build: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Return torch's layer or stack and ours, with the same parameters by ``state_dict``."""
    ours: dict[str, Any] = {"Encoder": TransformerEncoderLayer, "Decoder": TransformerDecoderLayer}
    named = {"dropout": 0.0, "dtype": F64, **build}
    torch.manual_seed(0)
    right = getattr(nn, f"Transformer{kind}Layer")(E, H, 24, **named)
    for i, parameter in enumerate(right.parameters()):
        parameter.data = normal(*parameter.shape, seed=20 + i) / 2
    layer = ours[kind](E, H, 24, **named)
    layer.load_state_dict(right.state_dict())
    return right, layer


def agree(right: nn.Module, ours: nn.Module, ends: list[Tensor], real: Any = slice(None), **masks: Any) -> None:
    """Check that outputs and all gradients are the same."""
    found = []
    for model in (ours, right):
        output = model(*ends, **masks)[real]
        total = (output * normal(*output.shape, seed=3)).sum()
        found.append([output, *torch.autograd.grad(total, [*ends, *model.parameters()], materialize_grads=True)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


ENCODER_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "pairs": {"src_mask": LATER},
    "float pairs": {"src_mask": normal(S, S)},
    "hint": {"src_mask": LATER, "is_causal": True},
    "both": {"src_mask": LATER, "src_key_padding_mask": PADDING},
}


@across({"masks": ENCODER_MASKS, "training": [True, False], "build": BUILDS})
def test_encoder_layers_agree_with_torch(build: dict[str, Any], masks: str, training: bool) -> None:
    right, ours = (layer.train(training) for layer in twins("Encoder", build))
    agree(right, ours, [rows(build, S)], **ENCODER_MASKS[masks])


@across(
    {
        "masks": [
            {},
            {"tgt_mask": LATER[:L, :L], "tgt_is_causal": True},
            {"tgt_mask": LATER[:L, :L], "memory_mask": LATER[:L], "memory_key_padding_mask": PADDING},
            {"tgt_key_padding_mask": TARGET, "memory_key_padding_mask": PADDING},
        ],
        "training": [True, False],
        "build": BUILDS,
    }
)
def test_decoder_layers_agree_with_torch(build: dict[str, Any], masks: dict[str, Any], training: bool) -> None:
    right, ours = (layer.train(training) for layer in twins("Decoder", build))
    agree(right, ours, [rows(build, L), rows(build, S, seed=1)], **masks)


def test_unbatched() -> None:
    right, ours = twins("Encoder", {})
    agree(right, ours, [normal(S, E).requires_grad_()], src_key_padding_mask=PADDING[0])
    right, ours = twins("Decoder", {"norm_first": True})
    agree(right, ours, [normal(L, E).requires_grad_(), normal(S, E, seed=1).requires_grad_()])


def stacks(kind: str, build: dict[str, Any], norm: bool) -> tuple[nn.Module, nn.Module]:
    right, ours = twins(kind, build)
    end = nn.LayerNorm(E, dtype=F64) if norm else None
    if kind == "Encoder":
        pair = nn.TransformerEncoder(right, 2, end, enable_nested_tensor=False), TransformerEncoder(ours, 2, end)
    else:
        pair = nn.TransformerDecoder(right, 2, end), TransformerDecoder(ours, 2, end)
    for i, parameter in enumerate(pair[0].parameters()):
        parameter.data = normal(*parameter.shape, seed=40 + i) / 2
    pair[1].load_state_dict(pair[0].state_dict())
    assert [name for name, _ in pair[0].named_parameters()] == [name for name, _ in pair[1].named_parameters()]
    return pair


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", BUILDS[:3], ids=str)
def test_stacks_agree_with_torch(build: dict[str, Any], training: bool) -> None:
    right, ours = (model.train(training) for model in stacks("Encoder", build, norm=True))
    x = rows(build, S)
    later = torch.zeros(S, S, dtype=F64).masked_fill(LATER, -torch.inf)
    for masks in ({}, {"mask": later}, {"mask": later, "is_causal": True}, {"src_key_padding_mask": PADDING}):
        agree(right, ours, [x], **masks)
    right, ours = (model.train(training) for model in stacks("Decoder", build, norm=False))
    for masks in ({}, {"tgt_mask": later[:L, :L]}, {"memory_key_padding_mask": PADDING}):
        agree(right, ours, [rows(build, L), rows(build, S, seed=1)], **masks)


def test_stacks_take_torchs_layers() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True, dtype=F64)
    ours = TransformerEncoder(layer, 2)
    right = nn.TransformerEncoder(layer, 2)
    agree(right, ours, [normal(B, S, E).requires_grad_()], mask=LATER)


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_the_same_seed_draws_the_same_parameters(kind: str) -> None:
    ours: Any = {"Encoder": TransformerEncoderLayer, "Decoder": TransformerDecoderLayer}[kind]
    found = []
    for make in (ours, getattr(nn, f"Transformer{kind}Layer")):
        torch.manual_seed(4)
        found.append(make(E, H, 24))
    for (name, a), (other, b) in zip(found[0].named_parameters(), found[1].named_parameters()):
        assert name == other and torch.equal(a, b)


@pytest.mark.parametrize("build", BUILDS[:4], ids=str)
def test_the_whole_model_is_torchs(build: dict[str, Any]) -> None:
    found: list[nn.Module] = []
    for make in (nn.Transformer, Transformer):
        torch.manual_seed(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about nested tensors
            found.append(make(E, H, 1, 2, 24, 0.0, dtype=F64, **build))
    right, ours = found
    for (name, a), (other, b) in zip(ours.named_parameters(), right.named_parameters()):
        assert name == other and torch.equal(a, b)
    right.load_state_dict(ours.state_dict())
    later = Transformer.generate_square_subsequent_mask(L, dtype=F64)
    assert torch.equal(later, nn.Transformer.generate_square_subsequent_mask(L, dtype=F64))
    ends = [rows(build, S), rows(build, L, seed=1)]
    agree(right, ours, ends, tgt_mask=later, src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)
    agree(right.eval(), ours.eval(), ends, tgt_mask=later, tgt_is_causal=True)
    with pytest.raises(ValueError, match=r"^Transformer: tgt must have width d_model 16, got \(2, 15\)\.$"):
        ours(ends[0], torch.zeros(2, 15))


def test_is_causal_needs_no_mask() -> None:
    right, ours = stacks("Encoder", {}, norm=False)
    x = rows({}, S)
    torch.testing.assert_close(ours(x, is_causal=True), right(x, mask=LATER))
    right, ours = stacks("Decoder", {}, norm=False)
    tgt, memory = rows({}, L), rows({}, S, seed=1)
    torch.testing.assert_close(ours(tgt, memory, tgt_is_causal=True), right(tgt, memory, tgt_mask=LATER[:L, :L]))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("build", BUILDS[:3], ids=str)
def test_garbage_in_padding_reaches_nothing_real(build: dict[str, Any], garbage: float) -> None:
    first = build.get("batch_first")

    def turned(padding: Tensor) -> Tensor:
        return padding if first else padding.T

    def all_of(model: nn.Module, value: float, ends: list[tuple[int, Tensor]], **masks: Any) -> list[Tensor]:
        given = []
        for seed, (n, padding) in enumerate(ends):
            x = rows(build, n, seed=seed).detach()
            given.append(torch.where(turned(padding).unsqueeze(-1), value, x).requires_grad_())
        output = model(*given, **masks)[turned(~ends[0][1])]
        total = (output * normal(*output.shape, seed=3)).sum()
        return [output, *torch.autograd.grad(total, [*given, *model.parameters()], materialize_grads=True)]

    _, encoder = stacks("Encoder", build, norm=True)
    _, decoder = stacks("Decoder", build, norm=True)
    calls = [
        (encoder, [(S, PADDING)], {"src_key_padding_mask": PADDING}),
        (decoder, [(L, TARGET), (S, PADDING)], {"tgt_key_padding_mask": TARGET, "memory_key_padding_mask": PADDING}),
    ]
    for model, ends, masks in calls:
        for a, b in zip(all_of(model, garbage, ends, **masks), all_of(model, 0.0, ends, **masks)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_rows_that_see_nothing_are_finite() -> None:
    _, ours = stacks("Encoder", {}, norm=True)
    x = rows({}, S)
    output = ours(x, src_key_padding_mask=torch.ones(B, S, dtype=torch.bool))
    output.sum().backward()
    assert output.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("parts", [
    {"num_kv_heads": 2}, {"normalizer": "sparsemax"}, {"score": "cosine"}, {"score": GeneralAttention(4, dtype=F64)},
], ids=str)  # fmt: skip
def test_parts_reach_the_attention(parts: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = TransformerDecoderLayer(E, H, 24, 0.0, batch_first=True, dtype=F64, **parts)
    for attention in (layer.self_attn, layer.multihead_attn):
        name, part = next(iter(parts.items()))
        assert getattr(attention, name) == part or isinstance(part, nn.Module)
    if isinstance(parts.get("score"), nn.Module):
        assert layer.self_attn.score.weight is not layer.multihead_attn.score.weight
    x = normal(B, L, E).requires_grad_()
    found = layer(x, normal(B, S, E, seed=1), tgt_is_causal=True)
    inner = layer.self_attn(x, x, x, is_causal=True)[0]
    want = layer.norm1(x + inner)
    want = layer.norm2(want + layer.multihead_attn(want, *[normal(B, S, E, seed=1)] * 2)[0])
    want = layer.norm3(want + layer.linear2(F.relu(layer.linear1(want))))
    torch.testing.assert_close(found, want)
    found.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_decoding_step_by_step_is_the_whole_call() -> None:
    torch.manual_seed(0)
    encoder = TransformerEncoder(TransformerEncoderLayer(E, H, 24, batch_first=True, num_kv_heads=2, dtype=F64), 2)
    decoder = TransformerDecoder(TransformerDecoderLayer(E, H, 24, batch_first=True, norm_first=True, dtype=F64), 2)
    x, memory = normal(B, 6, E), normal(B, S, E, seed=1)
    with torch.no_grad():
        caches = [KVCache(6), KVCache(6)]
        found = torch.cat([encoder.eval()(t, is_causal=True, cache=caches) for t in x.split([2, 1, 3], 1)], 1)
        torch.testing.assert_close(found, encoder(x, is_causal=True))
        caches = [KVCache(), KVCache()]
        found = torch.cat([decoder.eval()(t, memory, tgt_is_causal=True, cache=caches) for t in x.split(1, 1)], 1)
        torch.testing.assert_close(found, decoder(x, memory, tgt_is_causal=True))


def test_dropout_obeys_training() -> None:
    layer = TransformerEncoderLayer(E, H, 24, 0.5, dtype=F64)
    x = normal(S, B, E)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_reset_draws_layers_apart() -> None:
    model = TransformerEncoder(TransformerEncoderLayer(E, H, 24), 2)
    first, second = (layer.linear1.weight for layer in model.layers)
    assert torch.equal(first, second)
    model.reset_parameters()
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda: TransformerEncoderLayer(0, 2), ValueError, "TransformerEncoderLayer: d_model must be an int of at least 1, got 0."),
    (lambda: TransformerEncoderLayer(8, 2, 0), ValueError, "TransformerEncoderLayer: dim_feedforward must be an int of at least 1, got 0."),
    (lambda: TransformerDecoderLayer(8, 3), ValueError, "MultiheadAttention: num_heads must divide embed_dim 8, got 3."),
    (lambda: TransformerDecoderLayer(8, 2, dropout=1.5), ValueError, "TransformerDecoderLayer: dropout must be a probability in [0, 1], got 1.5."),
    (lambda: TransformerDecoderLayer(8, 2, activation="tanh"), ValueError, "TransformerDecoderLayer: activation must be 'relu', 'gelu' or a function, got 'tanh'."),
    (lambda: TransformerEncoder(TransformerEncoderLayer(8, 2), 0), ValueError, "TransformerEncoder: num_layers must be an int of at least 1, got 0."),
    (lambda: TransformerEncoder(TransformerEncoderLayer(8, 2), 2)(torch.zeros(1, 1, 8), cache=[KVCache()]), ValueError, "TransformerEncoder: cache must hold one KVCache for each of 2 layers, got 1."),
    (lambda: TransformerEncoderLayer(8, 2)(torch.zeros(3, 2, 8), src_key_padding_mask=torch.zeros(3, 2).bool()), ValueError, "MultiheadAttention: key_padding_mask must have shape (B, S) = (2, 3), got (3, 2)."),
])  # fmt: skip
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
