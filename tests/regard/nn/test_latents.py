"""Perceiver, Flamingo, slots, Hopfield layers, product keys, depth: against transformers, laws, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.regard.nn.layer_samples.latents import slots_of
from torch import Tensor, nn

from regard import AuxRequest
from regard.nn import (
    AttentionResidual,
    GatedCrossAttention,
    HopfieldAttention,
    PerceiverAttention,
    PerceiverResampler,
    ProductKeyMemory,
    SlotAttention,
)

F64 = torch.float64


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loaded(layer: nn.Module, state: dict[str, Tensor], names: dict[str, str]) -> None:
    """Load a state of other names, of which ``names`` says what replaces what, longest first."""
    found = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    layer.load_state_dict(found)


# Against transformers -------------------------------------------------------------------------------------------------


def test_the_resampler_is_that_of_idefics() -> None:
    from transformers import IdeficsConfig
    from transformers.models.idefics.perceiver import IdeficsPerceiverResampler

    torch.manual_seed(0)
    config = IdeficsConfig(vision_config={"embed_dim": 8}, perceiver_config={"qk_layer_norms_perceiver": False})
    theirs = IdeficsPerceiverResampler(config, 8, 2, 2, 5, 3).double()
    ours = PerceiverResampler(8, 3, 2, 2, head_dim=5, activation="relu", dtype=F64)
    names = {
        "blocks.": "layers.", ".0.latents_layer_norm": ".norm", ".0.context_layer_norm": ".context_norm",
        ".0.output_proj": ".out_proj", ".0.": ".", ".1.ln": ".feedforward_norm", ".1.fc": ".feedforward.up",
        ".1.c_proj": ".feedforward.down", "layer_norm.": "norm.",
    }  # fmt: skip
    state = theirs.state_dict()
    # The second block, "blocks.1.", must not be taken for the second part of a block.
    state = {name.replace("blocks.0.", "blocks.x.").replace("blocks.1.", "blocks.y."): t for name, t in state.items()}
    loaded(ours, state, names | {"layers.x.": "layers.0.", "layers.y.": "layers.1."})
    x = numbers(2, 7, 8)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_a_block_is_that_of_the_perceiver() -> None:
    from transformers import PerceiverConfig
    from transformers.models.perceiver.modeling_perceiver import PerceiverLayer

    torch.manual_seed(0)
    config = PerceiverConfig(attention_probs_dropout_prob=0.0)
    theirs = PerceiverLayer(config, True, 8, 8, 2, 8, 6, widening_factor=3).double().eval()
    ours = PerceiverAttention(8, 2, include_latents=False, context_dim=6, hidden_dim=24, bias=True, dtype=F64)
    names = {
        "attention.self.layernorm1": "norm", "attention.self.layernorm2": "context_norm",
        "attention.self.query": "q_proj", "attention.self.key": "k_proj", "attention.self.value": "v_proj",
        "attention.output.dense": "out_proj", "layernorm.": "feedforward_norm.", "mlp.dense1": "feedforward.up",
        "mlp.dense2": "feedforward.down",
    }  # fmt: skip
    loaded(ours, theirs.state_dict(), names)
    latents, x = numbers(2, 3, 8), numbers(2, 7, 6)
    torch.testing.assert_close(ours(latents, x), theirs(latents, inputs=x)[0], rtol=1e-12, atol=1e-12)


def test_attention_residuals_are_those_of_inkling() -> None:
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    theirs = Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=6, _attn_implementation="eager"))  # type: ignore[arg-type]
    ours = AttentionResidual(6, normalize_values=True)
    query, states = numbers(6, dtype=torch.float32), numbers(2, 5, 4, 6, dtype=torch.float32)
    with torch.no_grad():
        theirs.query.copy_(query)
        ours.query.copy_(query * 6**-0.5)
    (right,) = theirs(states[:, :, :3], states[:, :, 3])
    torch.testing.assert_close(ours(list(states.unbind(2))), right, rtol=1e-4, atol=1e-5)


# Slots ----------------------------------------------------------------------------------------------------------------


def test_given_slots_and_their_permutation() -> None:
    torch.manual_seed(0)
    layer, inputs, slots = SlotAttention(6, 4, input_dim=5, dtype=F64), numbers(2, 9, 5), numbers(2, 3, 6, seed=2)
    found = layer(inputs, slots=slots)
    torch.testing.assert_close(found, torch.from_numpy(slots_of(layer, inputs, slots=slots)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(inputs, slots=slots[:, [2, 0, 1]]), found[:, [2, 0, 1]], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(inputs.flip(1), slots=slots), found, rtol=1e-10, atol=1e-10)


def test_slots_compete_for_inputs() -> None:
    """The shares of an input among slots sum to 1, so that the mass of all slots is the number of inputs."""
    torch.manual_seed(0)
    layer, inputs, slots = SlotAttention(6, 4, rounds=1, dtype=F64), numbers(2, 9, 6), numbers(2, 3, 6, seed=2)
    _, aux = layer(inputs, torch.tensor([9, 4]), slots=slots, return_aux=AuxRequest(weights=True, lse=True))
    assert aux.weights.shape == (2, 1, 3, 9)
    torch.testing.assert_close(aux.lse.exp().sum(2).flatten(), torch.tensor([9.0, 4.0], dtype=F64))
    assert not aux.weights[1, ..., 4:].any()


@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.1])
def test_gradients_of_slots(eps: float) -> None:
    torch.manual_seed(0)
    layer = SlotAttention(3, 2, rounds=2, eps=eps, dtype=F64)
    inputs, slots = numbers(1, 4, 3).requires_grad_(), numbers(1, 2, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: layer(x, torch.tensor([3]), slots=s), (inputs, slots))


# Hopfield layers ------------------------------------------------------------------------------------------------------


def test_rounds_never_raise_the_energy() -> None:
    layer = HopfieldAttention(6, rounds=1, beta=2.0, layer_norm=False, bias=False, dtype=F64)
    for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        nn.init.eye_(part.weight)
    patterns, state = numbers(1, 8, 6), numbers(1, 5, 6, seed=2)

    def energy(state: Tensor) -> Tensor:
        return state.square().sum(-1) / 2 - torch.logsumexp(2.0 * state @ patterns.mT, -1) / 2.0

    for _ in range(5):
        with torch.no_grad():
            after = layer(state, patterns)
        assert (energy(after) <= energy(state) + 1e-12).all()
        state = after


def test_one_round_is_attention() -> None:
    torch.manual_seed(0)
    layer = HopfieldAttention(6, 2, layer_norm=False, dtype=F64)
    theirs = nn.MultiheadAttention(6, 2, batch_first=True, dtype=F64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
        theirs.in_proj_bias.copy_(torch.cat([layer.q_proj.bias, layer.k_proj.bias, layer.v_proj.bias]))
        theirs.out_proj.load_state_dict(layer.out_proj.state_dict())
    x, y = numbers(2, 5, 6), numbers(2, 7, 6, seed=2)
    torch.testing.assert_close(layer(x, y), theirs(x, y, y)[0], rtol=1e-12, atol=1e-12)


# Product keys ---------------------------------------------------------------------------------------------------------


def test_indices_name_the_values_that_were_read() -> None:
    torch.manual_seed(0)
    layer, x = ProductKeyMemory(6, 4, 2, 3, query_norm="none", dtype=F64), numbers(2, 5, 6)
    output, indices, weights = layer(x, return_indices=True)
    assert indices.shape == weights.shape == (2, 5, 2, 3)
    torch.testing.assert_close((layer.values[indices] * weights.unsqueeze(-1)).sum((2, 3)), output)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5, 2, dtype=F64))


def test_gradients_of_product_keys() -> None:
    torch.manual_seed(0)
    layer = ProductKeyMemory(4, 3, 2, 2, dtype=F64).train()
    assert torch.autograd.gradcheck(layer, (numbers(5, 4).requires_grad_(),))


# 16 bits, no rows, bad input ------------------------------------------------------------------------------------------

BUILT: dict[str, Callable[..., Any]] = {
    "resampler": lambda **where: PerceiverResampler(8, 3, 2, **where),
    "slots": lambda **where: SlotAttention(8, 3, **where),
    "hopfield": lambda **where: HopfieldAttention(8, 2, rounds=3, **where),
    "product keys": lambda **where: ProductKeyMemory(8, 4, 2, 16 // 4, **where),
}


@pytest.mark.parametrize("name", list(BUILT))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = BUILT[name](dtype=F64).eval()
    if name == "product keys":
        layer.topk = 1  # whose weight is 1: rounding changes no weights, and here no choice
    x = numbers(2, 6, 8)
    torch.manual_seed(3)
    right = layer(x)
    torch.manual_seed(3)
    found = layer.to(dtype)(x.to(dtype))
    assert found.dtype == dtype and (found - right).abs().max() <= 40 * torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("name", list(BUILT))
@pytest.mark.parametrize("sizes", [(0, 4), (2, 0)])
def test_no_sequences_and_no_rows(name: str, sizes: tuple[int, int]) -> None:
    found = BUILT[name]().eval()(torch.randn(*sizes, 8))
    assert found.shape[0] == sizes[0] and found.isfinite().all()


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "heads": (lambda: PerceiverAttention(8, 3), ValueError, "num_heads must divide embed_dim 8, got 3"),
    "latents of another width": (
        lambda: PerceiverAttention(8, 2, context_dim=6),
        ValueError,
        "context_dim must be embed_dim 8, as latents are keys, too; or pass include_latents=False, got 6",
    ),
    "batches": (
        lambda: PerceiverAttention(8, 2)(rows(2, 3, 8), rows(3, 5, 8)),
        ValueError,
        "context must have 2 sequences, as latents, got 3",
    ),
    "media": (
        lambda: GatedCrossAttention(8, 2)(rows(2, 3, 8), rows(2, 5, 6)),
        ValueError,
        r"context must have shape \(B, N, 8\), got \(2, 5, 6\)",
    ),
    "slots": (
        lambda: SlotAttention(8, 3)(rows(2, 5, 8), slots=rows(2, 3, 7)),
        ValueError,
        r"slots must have shape \(2, K, 8\), got \(2, 3, 7\)",
    ),
    "lengths": (
        lambda: SlotAttention(8, 3)(rows(2, 5, 8), torch.tensor([1, 2, 3])),
        ValueError,
        r"valid_lens must have shape \(2,\), got \(3,\)",
    ),
    "beta": (lambda: HopfieldAttention(8, beta=0.0), ValueError, "beta must be a positive finite number, got 0.0"),
    "patterns": (
        lambda: HopfieldAttention(8)(rows(2, 5, 8), rows(3, 5, 8)),
        ValueError,
        "patterns must have 2 sequences, as x, got 3",
    ),
    "topk": (
        lambda: ProductKeyMemory(8, 4, topk=5),
        ValueError,
        "topk must be an int from 1 to 4, num_keys, got 5",
    ),
    "query_dim": (lambda: ProductKeyMemory(8, 4, topk=2, query_dim=5), ValueError, "query_dim must be even, got 5"),
    "query_norm": (
        lambda: ProductKeyMemory(8, 4, topk=2, query_norm="bach"),  # type: ignore[arg-type]
        ValueError,
        r"did you mean 'batch'\?",
    ),
    "outputs": (
        lambda: AttentionResidual(8)(rows(2, 3, 8)),
        TypeError,
        "outputs must be a list of at least one tensor",
    ),
    "outputs alike": (
        lambda: AttentionResidual(8)([rows(2, 3, 8), rows(2, 4, 8)]),
        ValueError,
        r"outputs\[1\] must be like outputs\[0\]",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_bad_input(case: str) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()
