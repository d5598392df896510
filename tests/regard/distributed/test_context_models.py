"""Language models whose sequences are divided among processes give what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from regard import masks
from regard.distributed import ContextParallel
from regard.nn import KVCache, Rotary, SelfAttention
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig

B, L, N = 2, 32, 50
IDS = torch.tensor([[0] * 13 + [1] * 19, [0] * 5 + [1] * 20 + [2] * 7])
STARTS = torch.stack(
    [torch.cat([torch.arange(int((row == i).sum())) for i in range(int(row.max()) + 1)]) for row in IDS]
)

SIZES: dict[str, Any] = {"vocabulary": N, "width": 16, "layers": 2, "heads": 4, "max_length": L}
LLAMA = SIZES | {"positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "bias": False}
#: A decoder's config, and whether documents are packed.
DECODERS: dict[str, tuple[dict[str, Any], bool]] = {
    "rotary": (LLAMA | {"kv_heads": 2}, False),
    "packed": (LLAMA | {"kv_heads": 2, "tied": False}, True),
    "learned": (SIZES, False),
    "alibi, packed": (SIZES | {"positions": "alibi"}, True),
    "window": (LLAMA | {"window": 9, "sinks": 2}, False),
    "additive": (LLAMA | {"score": "additive"}, False),
    "sigmoid": (SIZES | {"normalizer": "sigmoid"}, False),
}


def tokens() -> Tensor:
    return torch.randint(N, (B, L), generator=torch.Generator().manual_seed(3))


def weights() -> Tensor:
    return torch.randn(B, L, N, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def compared(model: Any, context: ContextParallel, call: Any, recomputed: bool = False) -> float:
    """Return the error of logits and of gradients; ``call`` gets the model and what cuts this rank's part."""
    expected = call(model, lambda x: x)
    (expected * weights()).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_context(context)
    model.checkpoint_activations = recomputed

    def cut(x: Tensor) -> Tensor:
        return context.shard(x, 1)

    found = call(model, cut)
    (found * cut(weights())).sum().backward()
    context.sum_gradients(model.parameters())
    errors = [error(context.gather(found.detach(), 1), expected.detach())]
    return max(errors + [error(p.grad, grad) for p, grad in zip(model.parameters(), grads)])


def decoder(name: str) -> tuple[DecoderLM, Any]:
    fields, packed = DECODERS[name]
    torch.manual_seed(1)
    model = DecoderLM(DecoderLMConfig(**fields)).double()

    def call(model: DecoderLM, cut: Any) -> Tensor:
        if not packed:
            return model(cut(tokens()))
        return model(cut(tokens()), mask=masks.document(IDS), positions=cut(STARTS))

    return model, call


def encoder(**changes: Any) -> tuple[EncoderLM, Any]:
    torch.manual_seed(1)
    model = EncoderLM(EncoderLMConfig(**SIZES | {"pooled": False} | changes)).double()
    keep = torch.arange(L) < torch.tensor([[L], [21]])

    def call(model: EncoderLM, cut: Any) -> Tensor:
        return model.logits(model(cut(tokens()), mask=masks.key_padding(keep), segments=cut(IDS % 2)))

    return model, call


def compare_all(rank: int) -> dict[str, float]:
    found = {}
    for size in (2, 4):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for i, name in enumerate(DECODERS):
            context = ContextParallel(group, ("zigzag", "contiguous")[i % 2])  # type: ignore[arg-type]
            found[f"{name}, {size}"] = compared(*decoder(name)[:1], context, decoder(name)[1], i == 0)
        model, call = encoder()
        found[f"encoder, {size}"] = compared(model, ContextParallel(group), call)
        model, call = encoder(positions="rotary", shared=True)
        found[f"shared encoder, {size}"] = compared(model, ContextParallel(group, "zigzag"), call, True)
        found[f"layer, {size}"] = layer(ContextParallel(group, "zigzag"))
        refusals(ContextParallel(group))
    return found


def layer(context: ContextParallel) -> float:
    torch.manual_seed(2)
    made = SelfAttention(16, 4, num_kv_heads=2, rotary=Rotary(4)).double()
    x = torch.randn(B, L, 16, dtype=torch.float64)
    expected = made(x, is_causal=True)
    made.context = context
    found = made(context.shard(x, 1), is_causal=True)
    return error(context.gather(found.detach(), 1), expected.detach())


def refusals(context: ContextParallel) -> None:
    made = SelfAttention(16, 4).double()
    made.context = context
    with pytest.raises(ValueError, match="SelfAttention: cache must be None under context parallelism"):
        made(torch.ones(1, 2, 16, dtype=torch.float64), cache=KVCache())
    model, _ = decoder("rotary")
    model.set_context(context)
    with pytest.raises(ValueError, match="DecoderLM: caches must be None if a context splits the sequence"):
        model(tokens(), caches=model.caches())
    model.set_context(None)
    assert model(tokens(), caches=model.caches()).shape == (B, L, N)
    bert, _ = encoder()
    bert.set_context(context)
    with pytest.raises(ValueError, match=r"EncoderLM: attention_mask must be None if a context splits the sequence"):
        bert(tokens(), attention_mask=torch.ones(B, L, dtype=torch.bool))


@pytest.mark.campaign
@pytest.mark.slow
def test_models_agree_with_one_process() -> None:
    """All of it in one group of four processes."""
    results = ranks.run(compare_all, 4)
    worst = {name: max(found.get(name, 0.0) for found in results) for name in results[0]}
    assert len(worst) == 2 * (len(DECODERS) + 3)
    assert not {name: value for name, value in worst.items() if not value < 1e-12}


def test_recomputed_activations_change_nothing() -> None:
    """Also with dropout, in one process."""
    grads = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        model = DecoderLM(DecoderLMConfig(**LLAMA | {"dropout": 0.3}))
        model.checkpoint_activations = recomputed
        assert model.checkpoint_activations == recomputed
        model(tokens()).logsumexp(-1).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
