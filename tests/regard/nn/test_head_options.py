"""Options of self-attention and differential attention: beside transformers, when decoding, and in narrow types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig, Qwen3NextConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding
from transformers.models.neomme.modeling_neomme import NeoMMEExclusiveSelfAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

import regard
from regard import AuxRequest, masks
from regard.nn import (
    DifferentialAttention,
    ExclusiveOutput,
    KVCache,
    MultiheadAttention,
    OutputGate,
    PolarPositions,
    QueryKeyNorm,
    Rotary,
    SelfAttention,
    ValueResidual,
    XPos,
)
from regard.normalizers import SoftmaxSink

OPTIONS: dict[str, dict[str, Any]] = {
    "rms": {"qk_norm": "rms", "rotary": True},
    "l2": {"qk_norm": "l2", "learn_scale": True, "rotary": True},
    "scale": {"scale": 1.0, "softcap": 5.0},
    "exclusive": {"exclusive": "fixed"},
    "gates": {"output_gate": "channel", "head_scale": True, "exclusive": "learned"},
}


def made(name: str, dtype: torch.dtype = torch.float64) -> SelfAttention:
    torch.manual_seed(0)
    options = dict(OPTIONS[name])
    rotary = Rotary(4) if options.pop("rotary", False) else None
    return SelfAttention(16, 4, num_kv_heads=2, rotary=rotary, **options, dtype=dtype).eval()


def causal(length: int) -> Tensor:
    """Return a causal mask as transformers adds it."""
    return torch.full((1, 1, length, length), -torch.inf, dtype=torch.float64).triu(1)


def copied(layer: Any, theirs: nn.Module) -> None:
    """Copy projections from q_proj, k_proj, v_proj and o_proj."""
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat([getattr(theirs, f"{name}_proj").weight for name in "qkv"]))
        layer.out.weight.copy_(theirs.o_proj.weight)


# transformers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [4, 2])
def test_differential_attention_is_that_of_diffllama(groups: int) -> None:
    torch.manual_seed(1)
    config = DiffLlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=groups, head_dim=8)
    config._attn_implementation = "eager"
    theirs = DiffLlamaAttention(config, layer_idx=3).double().eval()
    ours = DifferentialAttention(
        32,
        4,
        depth=3,
        pairing="halves",
        num_kv_heads=groups,
        bias=False,
        rotary=Rotary(8),
        norm_eps=config.rms_norm_eps,
    ).double()
    copied(ours, theirs)
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(ours, name).copy_(getattr(theirs, name))
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    where = DiffLlamaRotaryEmbedding(config)(x, torch.arange(7)[None])
    expected, _ = theirs(x, where, causal(7))
    # transformers computes λ and the softmax in float32.
    torch.testing.assert_close(ours(x, is_causal=True), expected, rtol=1e-5, atol=1e-6)


def test_the_two_pairings_differ_by_a_permutation_of_rows() -> None:
    torch.manual_seed(2)
    halves = DifferentialAttention(16, 4, num_kv_heads=2, pairing="halves", dtype=torch.float64)
    adjacent = DifferentialAttention(16, 4, num_kv_heads=2, dtype=torch.float64)
    state = halves.state_dict()
    heads = torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])  # queries 0 2 1 3; two keys and two values are a pair either way
    for name in ("qkv.weight", "qkv.bias"):
        state[name] = state[name].unflatten(0, (8, 4))[heads].flatten(0, 1)
    adjacent.load_state_dict(state)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(adjacent(x), halves(x))


def test_gated_attention_is_that_of_qwen3_next() -> None:
    torch.manual_seed(3)
    config = Qwen3NextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = Qwen3NextAttention(config, 0).double().eval()
    ours = SelfAttention(
        32, 4, num_kv_heads=2, head_dim=8, bias=False, qk_norm="rms", output_gate="channel",
        rotary=Rotary(8, 100.0, fraction=0.5), dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for norm in (theirs.q_norm, theirs.k_norm):
            norm.weight.normal_(std=0.3)
        both = theirs.q_proj.weight.unflatten(0, (4, 2, 8))  # of each head a query, and a gate
        rest = theirs.k_proj.weight, theirs.v_proj.weight
        ours.qkv.weight.copy_(torch.cat([both[:, 0].flatten(0, 1), *rest]))
        ours.output_gate.gate.weight.copy_(both[:, 1].flatten(0, 1))
        ours.out.weight.copy_(theirs.o_proj.weight)
        ours.qk_norm.query.weight.copy_(1 + theirs.q_norm.weight)
        ours.qk_norm.key.weight.copy_(1 + theirs.k_norm.weight)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    where = Qwen3NextRotaryEmbedding(config)(x, torch.arange(7)[None])
    expected, _ = theirs(x, where, causal(7))
    torch.testing.assert_close(ours(x, is_causal=True), expected, rtol=1e-5, atol=1e-6)


def test_exclusive_output_is_that_of_neomme() -> None:
    torch.manual_seed(4)
    theirs = NeoMMEExclusiveSelfAttention(SimpleNamespace(num_attention_heads=4, num_key_value_heads=2))
    ours = ExclusiveOutput(4, learned=True)
    with torch.no_grad():
        ours.weight.copy_(theirs.alpha.normal_())
    heads, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(ours(heads, value), theirs(heads.transpose(1, 2), value).transpose(1, 2))


# Decoding, gradients, narrow types ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_give_what_the_whole_gives(name: str) -> None:
    layer, x = made(name), torch.randn(3, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        cache = KVCache()
        steps = [layer(t, cache=cache) for t in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x, is_causal=True))


def test_steps_of_other_layers() -> None:
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    where: dict[str, Any] = {"num_kv_heads": 2, "dtype": torch.float64}
    for layer in (
        DifferentialAttention(16, 4, rotary=Rotary(4), **where),
        SelfAttention(16, 4, rotary=XPos(4, decay=8.0), **where),
        SelfAttention(16, 4, rotary=PolarPositions(2, 4, dtype=torch.float64), **where),
    ):
        cache = KVCache()
        with torch.no_grad():
            steps = [layer(t, cache=cache) for t in x.split(1, 1)]
            torch.testing.assert_close(torch.cat(steps, 1), layer(x, is_causal=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    layer, x = made(name), torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True)
    names = [
        each for each, _ in layer.named_parameters() if each.startswith(("qk_norm", "score", "excl", "head", "outp"))
    ]
    values = [layer.get_parameter(each).detach().clone().requires_grad_() for each in names]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,), {"is_causal": True})

    assert torch.autograd.gradcheck(run, (x, *values))


def test_differential_gradients() -> None:
    layer = DifferentialAttention(8, 4, num_kv_heads=2, norm_weight=True, dtype=torch.float64)
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    names = [each for each, _ in layer.named_parameters()]
    values = [each.detach().clone().requires_grad_() for each in layer.parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,), {"is_causal": True})

    assert torch.autograd.gradcheck(run, (x, *values))


@pytest.mark.parametrize("name", [*OPTIONS, "differential"])
def test_sixteen_bits(name: str) -> None:
    torch.manual_seed(5)
    layer = DifferentialAttention(16, 4) if name == "differential" else made(name, torch.float32)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer(x, is_causal=True)
    assert narrow.dtype == torch.bfloat16
    expected = layer(x, is_causal=True)
    torch.testing.assert_close(narrow.float(), expected, rtol=0.05, atol=0.05)
    narrow.float().square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in layer.parameters())
    half = layer.bfloat16()(x.bfloat16(), is_causal=True)
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


def test_rows_that_see_nothing_and_rows_of_zeros() -> None:
    none = torch.zeros(5, 5, dtype=torch.bool)
    for layer in (*(made(name) for name in OPTIONS), DifferentialAttention(16, 4, dtype=torch.float64)):
        x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
        found = layer(x, none)
        found.sum().backward()
        if name_of(layer) != "exclusive":
            torch.testing.assert_close(found, layer.out.bias.expand_as(found))
        assert x.grad is not None and x.grad.isfinite().all()
        zeros = torch.zeros(1, 5, 16, dtype=torch.float64, requires_grad=True)
        layer(zeros, is_causal=True).sum().backward()
        assert zeros.grad is not None and zeros.grad.isfinite().all()


def name_of(layer: SelfAttention) -> str:
    return "exclusive" if layer.exclusive is not None else ""


def test_padding_has_no_influence() -> None:
    lengths = torch.tensor([3, 5])
    for layer in (*(made(name) for name in OPTIONS), DifferentialAttention(16, 4, dtype=torch.float64)):
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        garbage = x.clone()
        garbage[0, 3:] = torch.nan
        found, right = (layer(each, masks.padding(lengths)) for each in (garbage, x))
        torch.testing.assert_close(found[0, :3], right[0, :3])
        torch.testing.assert_close(found[1], right[1])


# Values of the first layer, sinks, auxiliary outputs ------------------------------------------------------------------


def test_values_of_the_first_layer() -> None:
    first, second = (SelfAttention(16, 4, num_kv_heads=2, value_residual=bool(i)).double() for i in range(2))
    x, y = torch.randn(2, 2, 5, 16, dtype=torch.float64)
    values = first.values(x)
    assert values.shape == (2, 2, 5, 4)
    plain = SelfAttention(16, 4, num_kv_heads=2).double()
    plain.load_state_dict({n: t for n, t in second.state_dict().items() if n != "value_residual.weight"})
    with torch.no_grad():
        second.value_residual.weight.copy_(torch.tensor([0.0, 1.0]))
        torch.testing.assert_close(second(y, first_values=values), plain(y))
    with pytest.raises(ValueError, match=r"SelfAttention: first_values must have shape \(2, 2, 5, 4\), got None"):
        second(y)
    with pytest.raises(ValueError, match="SelfAttention: first_values must be None without value_residual, got "):
        first(y, first_values=values)
    with pytest.raises(ValueError, match=r"ValueResidual: first must be a tensor of value's shape"):
        second(y, first_values=values[:, :1])


def test_sinks_are_a_normalizer() -> None:
    """A sink with a huge logit takes all weight; the layer owns it."""
    layer = SelfAttention(16, 4, bias=False, normalizer=SoftmaxSink(nn.Parameter(torch.zeros(4))))
    with torch.no_grad():
        layer.get_parameter("normalizer.sink").fill_(1e4)
        assert layer(torch.randn(1, 5, 16)).abs().max() == 0


def test_aux_of_differential_attention() -> None:
    layer = DifferentialAttention(16, 4, pairing="halves", dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    output, aux = layer(x, is_causal=True, return_aux=AuxRequest(weights=True))
    assert torch.equal(output, layer(x, is_causal=True))
    q, k, _ = layer.projected(x)
    _, right = regard.attention(q, k, k, is_causal=True, return_aux=AuxRequest(weights=True))
    torch.testing.assert_close(aux.weights, right.weights)


def test_multi_head_attention_turns_keys_their_own_way() -> None:
    torch.manual_seed(6)
    xpos = XPos(4, decay=8.0)
    ours = SelfAttention(16, 4, rotary=xpos).double()
    theirs = MultiheadAttention(16, 4, batch_first=True, rotary=xpos).double()
    state = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    theirs.load_state_dict({**state, "out_proj.weight": ours.out.weight, "out_proj.bias": ours.out.bias})
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(theirs(x, x, x, need_weights=False, is_causal=True)[0], ours(x, is_causal=True))


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: SelfAttention(8, 2, qk_norm="layer"),
            "SelfAttention: qk_norm must be one of 'l2', 'rms', got 'layer'",
        ),
        (lambda: SelfAttention(8, 2, exclusive="yes"), "SelfAttention: exclusive must be one of 'fixed', 'learned'"),
        (lambda: SelfAttention(8, 2, output_gate="row"), "SelfAttention: output_gate must be one of 'channel', 'head'"),
        (lambda: SelfAttention(8, 2, learn_scale=1), "SelfAttention: learn_scale must be a bool, got 1"),
        (
            lambda: SelfAttention(8, 2, learn_scale=True, score="dot"),
            "SelfAttention: learn_scale must be False with a score, got True.",
        ),
        (lambda: SelfAttention(8, 2, softcap=0.0), "SelfAttention: softcap must be a positive finite number, got 0.0."),
        (lambda: SelfAttention(8, 2, scale=float("nan")), "SelfAttention: scale must be a finite number or None"),
        (
            lambda: DifferentialAttention(9, 3),
            "DifferentialAttention: num_heads must be even: heads are in pairs, got 3.",
        ),
        (
            lambda: DifferentialAttention(8, 4, num_kv_heads=1),
            "DifferentialAttention: num_kv_heads must be even: heads are in pairs, got 1.",
        ),
        (lambda: DifferentialAttention(8, 4, depth=-1), "DifferentialAttention: depth must be an int of at least 0"),
        (
            lambda: QueryKeyNorm(4)(torch.ones(1, 1, 1, 3), torch.ones(1, 1, 1, 4)),
            "QueryKeyNorm: query must have shape",
        ),
        (lambda: OutputGate(4, 2, 2)(torch.ones(1, 2, 3, 2), torch.ones(1, 2, 4)), "OutputGate: x must have shape"),
        (lambda: ValueResidual()(torch.ones(1, 1, 1, 1), None), "ValueResidual: first must be a tensor of value's"),
    ],
)
def test_arguments_that_do_not_fit(make: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert str(error.value).startswith(sentence)
