"""Caches, lengths and sizes that do not fit a layer: one sentence, or an empty result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard import masks
from regard.nn import (
    DeepSeekSparseAttention,
    GatedDeltaNet,
    KVCache,
    LaserAttention,
    LinearCache,
    LinearSelfAttention,
    MultiheadLatentAttention,
    NativeSparseAttention,
    PathAttention,
    Rotary,
    RWKV7Attention,
    SelfAttention,
    TensorProductAttention,
)

E, H = 16, 2
LATENT: dict[str, Any] = {"latent_dim": 6, "head_dim": 8, "rotary": Rotary(4, interleaved=True)}
WITH_KEYS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: SelfAttention(E, H),
    "laser": lambda: LaserAttention(E, H),
    "latent": lambda: MultiheadLatentAttention(E, H, **LATENT),
    "indexed": lambda: DeepSeekSparseAttention(E, H, **LATENT, index_heads=2, index_dim=8, topk=3),
    "blocks": lambda: NativeSparseAttention(E, H, block_size=4, num_blocks=3, window=3),
    "path": lambda: PathAttention(E, H),
    "products": lambda: TensorProductAttention(E, H),
}
WITH_STATE: dict[str, Callable[[], nn.Module]] = {
    "delta": lambda: GatedDeltaNet(E, H),
    "rwkv": lambda: RWKV7Attention(E, H),
    "linear": lambda: LinearSelfAttention(E, H),
}


@pytest.mark.parametrize("make", [*WITH_KEYS.values(), *WITH_STATE.values()], ids=[*WITH_KEYS, *WITH_STATE])
@pytest.mark.parametrize("size", [(2, 0), (0, 5)], ids=str)
def test_nothing_in_gives_nothing_out(make: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    assert make()(torch.zeros(*size, E)).shape == (*size, E)


@pytest.mark.parametrize("make", WITH_KEYS.values(), ids=WITH_KEYS)
@pytest.mark.parametrize("cache", [LinearCache(), []], ids=["state", "list"])
def test_a_layer_with_keys_takes_their_cache(make: Callable[[], nn.Module], cache: object) -> None:
    layer = make()
    expected = f"^{type(layer).__name__}: cache must be a KVCache or None, got an object of type {type(cache).__name__}"
    with pytest.raises(TypeError, match=expected):
        layer(torch.zeros(1, 2, E), cache=cache)


@pytest.mark.parametrize("make", WITH_STATE.values(), ids=WITH_STATE)
def test_a_layer_with_a_state_takes_a_cache_of_its_sequences(make: Callable[[], nn.Module]) -> None:
    layer, cache = make(), LinearCache()
    name = type(layer).__name__
    with pytest.raises(TypeError, match=f"^{name}: cache must be a LinearCache or None, got an object of type KVCache"):
        layer(torch.zeros(1, 2, E), cache=KVCache())
    with torch.no_grad():
        layer(torch.zeros(2, 3, E), cache=cache)
        with pytest.raises(ValueError, match=f"^{name}: cache must hold as many sequences as x, 1, got 2"):
            layer(torch.zeros(1, 1, E), cache=cache)
    assert len(cache) == 3


def test_a_causal_layer_takes_lengths_and_no_mask() -> None:
    expected = (
        "valid_lens must be an integer tensor of lengths, as the layer is causal by itself, got the mask causal()"
    )
    with pytest.raises(TypeError) as error:
        PathAttention(E, H)(torch.zeros(1, 2, E), masks.causal())
    assert str(error.value) == f"PathAttention: {expected}."
    with pytest.raises(ValueError, match="PathAttention: cache must keep all steps, got window=4"):
        PathAttention(E, H)(torch.zeros(1, 2, E), cache=KVCache(window=4))


@pytest.mark.parametrize("make", [SelfAttention, LaserAttention, TensorProductAttention])
@pytest.mark.parametrize("width", [4, 16])
def test_rotary_positions_are_as_wide_as_a_head(make: Any, width: int) -> None:
    with pytest.raises(ValueError, match=f"Rotary: head_dim must be the width of a head, 8, got {width}"):
        make(E, H, rotary=Rotary(width))(torch.zeros(1, 2, E))
