"""Recurrences as effective weights: they map the values of a layer to its outputs."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard import AuxRequest
from regard._utils.errors import RegardWarning
from regard.inspect import Record, capture
from regard.nn import (
    HGRN2,
    Atlas,
    Comba,
    DeltaNet,
    FastWeights,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedSlotAttention,
    KimiDeltaAttention,
    LaCT,
    LightningAttention,
    LinearAttention,
    LinearCache,
    LinearSelfAttention,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba,
    Mamba2,
    MesaNet,
    Retention,
    TitansMemory,
    TTTLinear,
    gated_recurrence,
    gated_recurrence_weights,
)

transformers.utils.logging.set_verbosity_error()
L, VOCABULARY = 11, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
}  # fmt: skip
#: For each model of transformers its config, the function that runs its recurrence, and the layers that have one.
MODELS: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "qwen3_next": ("Qwen3Next", SIZES | DELTA | {"num_experts": 0, "mlp_only_layers": [0, 1, 2]},
                   "torch_chunk_gated_delta_rule", ["layers.0.linear_attn", "layers.2.linear_attn"]),
    "olmo_hybrid": ("OlmoHybrid", SIZES | DELTA | {"linear_num_key_heads": 4},
                    "torch_chunk_gated_delta_rule", ["layers.0.linear_attn", "layers.2.linear_attn"]),
    "mamba2": ("Mamba2", SIZES | {"num_hidden_layers": 2, "num_heads": 8, "state_size": 8, "n_groups": 2, "expand": 2,
                                  "chunk_size": 4},
               "mamba2_chunk_scan", ["layers.0.mixer", "layers.1.mixer"]),
    "mamba": ("Mamba", SIZES | {"num_hidden_layers": 2, "state_size": 4}, "mamba_selective_scan",
              ["layers.0.mixer", "layers.1.mixer"]),
    "rwkv": ("Rwkv", SIZES | {"num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 32},
             "rwkv_linear_attention", ["blocks.0.attention", "blocks.1.attention"]),
}  # fmt: skip


def made(name: str) -> nn.Module:
    kind, sizes, *_ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def logged(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[..., Any], dict[str, Any], Any]]:
    """Note each call of the function of a family: the function, its arguments by name, and what it returns."""
    import inspect

    module, calls = sys.modules[f"transformers.models.{name}.modeling_{name}"], []
    function = getattr(module, MODELS[name][2])

    @functools.wraps(inspect.unwrap(function))
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        bound = inspect.signature(inspect.unwrap(function)).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append((function, bound.arguments | bound.arguments.pop("kwargs", {}), answer))
        return answer

    monkeypatch.setattr(module, MODELS[name][2], call)
    return calls


def mapped(name: str, weights: Tensor, given: dict[str, Any], function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Return what effective weights and a function make of the same values."""
    if name in ("mamba", "rwkv"):  # the mean over channels, for values that all channels share
        value = torch.randn(len(weights), L, 1)
        if name == "rwkv":
            answer, _ = function(**given | {"value": value.expand_as(given["key"])})
        else:
            shared = value.transpose(1, 2).expand_as(given["hidden_states"])
            answer = function(**given | {"hidden_states": shared, "D": None, "z": None})
            answer = (answer[0] if isinstance(answer, tuple) else answer).transpose(1, 2)
        return weights[:, 0] @ value, answer.mean(-1, keepdim=True)
    value = given.get("value", given.get("hidden_states"))
    assert value is not None
    answer = function(**given | ({"D": None} if name == "mamba2" else {}))
    found = answer[0] if isinstance(answer, tuple) else answer
    return weights @ value.transpose(1, 2).float(), found.transpose(1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, tokens = made(name), torch.randint(3, VOCABULARY, (2, L))
    with torch.no_grad():
        alone = model(tokens, use_cache=False).last_hidden_state
    calls = logged(name, monkeypatch)
    with torch.no_grad(), capture(model, recurrences=True) as record:
        together = model(tokens, use_cache=False).last_hidden_state
    assert torch.equal(alone, together) and record.coverage.complete
    names = MODELS[name][3]
    assert [run.name for run in record if run.kind == "linear"] == names
    for layer, (function, given, _) in zip(names, calls[:: len(calls) // len(names)]):
        weights = record[layer].weights()
        assert torch.equal(weights, weights.tril())
        found, expected = mapped(name, weights, given, function)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if name == "rwkv":
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, L))
    again = Record.load(record.save(tmp_path / "one.regard"))
    assert [run.kind for run in again] == [run.kind for run in record]
    assert record.describe([f"w{i}" for i in range(L)]).to_html()


def test_the_gated_delta_rule_by_our_own_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, calls = made("qwen3_next"), torch.randint(3, VOCABULARY, (1, L)), logged("qwen3_next", monkeypatch)
    with torch.no_grad(), capture(model, recurrences=True) as record:
        model(tokens, use_cache=False)
    _, given, _ = calls[0]
    query, key = (nn.functional.normalize(given[each], dim=-1, eps=1e-6).transpose(1, 2) for each in ("query", "key"))
    rate, decay = (given[each].transpose(1, 2).float() for each in ("beta", "g"))
    expected = gated_recurrence_weights(query, key, num_heads=4, log_decay=decay, rate=rate, delta=True)
    torch.testing.assert_close(record["layers.0.linear_attn"].weights(), expected, rtol=1e-3, atol=1e-4)


LAYERS: dict[str, Callable[[], Any]] = {
    "Comba": lambda: Comba(16, 2),
    "DeltaNet": lambda: DeltaNet(16, 2),
    "GatedDeltaNet": lambda: GatedDeltaNet(16, 2),
    "KimiDeltaAttention": lambda: KimiDeltaAttention(16, 2),
    "Retention": lambda: Retention(16, 2),
    "GatedLinearAttention": lambda: GatedLinearAttention(16, 2),
    "GatedSlotAttention": lambda: GatedSlotAttention(16, 2),
    "HGRN2": lambda: HGRN2(16, 2),
    "LightningAttention": lambda: LightningAttention(16, 2),
    "Mamba2": lambda: Mamba2(16, 4),
    "LogLinearGatedDeltaNet": lambda: LogLinearGatedDeltaNet(16, 2),
    "LogLinearMamba2": lambda: LogLinearMamba2(16, 4),
    "MesaNet": lambda: MesaNet(16, 2),
    "Mamba": lambda: Mamba(16, inner_dim=3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_our_recurrent_layers(name: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().eval(), torch.randn(2, L, 16)
    with torch.no_grad(), capture(layer, recurrences=True) as record:
        together = layer(x)
    with torch.no_grad():
        alone, aux = layer(x, return_aux=AuxRequest(weights=True))
    found, expected = record[0].weights(), aux.weights
    if isinstance(layer, Mamba | Mamba2):  # whose skip D is no part of the recurrence
        expected = expected - torch.diag_embed(layer.D.detach()[:, None].expand(-1, L))
    assert torch.equal(alone, together) and record.coverage.complete
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kind", [TTTLinear, TitansMemory, Atlas, LaCT])
def test_networks_that_learn_are_reported(kind: type[nn.Module], asked: bool) -> None:
    layer, x = nn.Sequential(kind(16, 2)), torch.randn(2, L, 16)
    expected = rf"0 \({kind.__name__}\): it is a network that learns as it reads, which has no effective weights"
    with pytest.warns(RegardWarning, match=expected), torch.no_grad(), capture(layer, recurrences=asked) as record:
        layer(x)
    assert len(record) == (kind is LaCT)  # whose window is recorded
    assert not record.coverage.complete


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_and_fast_weights(causal: bool) -> None:
    x, lengths = torch.randn(2, L, 16), torch.tensor([L, 4])
    attend = LinearAttention(16, 2)
    with torch.no_grad(), capture(attend, recurrences=True) as record:
        attend(x, x, x, lengths, is_causal=causal)
    weights = record[0].weights()
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, L))
    assert not weights[1, :, :, 4:].any() and bool(weights.triu(1).any()) != causal
    for layer in (FastWeights(16, 2), LinearSelfAttention(16, 2)):
        with torch.no_grad(), capture(layer, recurrences=True) as record:
            layer(x)
        assert record[0].shape == (2, 2, L, L) and record[0].kind == "linear" and len(record) == 1


def test_recurrences_that_are_not_asked_for_are_reported() -> None:
    model, tokens = made("qwen3_next"), torch.randint(3, VOCABULARY, (1, L))
    expected = (
        r"2 modules that look like attention are unrecorded, layers.0.linear_attn \(Qwen3NextGatedDeltaNet\), .*: "
        r"it is a recurrence, whose effective weights capture\(…, recurrences=True\) records"
    )
    with pytest.warns(RegardWarning, match=expected), torch.no_grad(), capture(model) as record:
        model(tokens, use_cache=False)
    assert record.layers == ("layers.1.self_attn",) and record[1].number == 1


def test_steps_after_a_state_are_reported() -> None:
    layer, x, cache = Retention(16, 2), torch.randn(1, 4, 16), LinearCache()
    with warnings.catch_warnings(), torch.no_grad(), capture(layer, recurrences=True) as record:
        warnings.simplefilter("ignore")
        layer(x, cache=cache)
        layer(x[:, :1], cache=cache)
    assert len(record.runs(0)) == 1 and record[0].shape == (1, 2, 4, 4)
    (missed,) = record.coverage.unrecorded
    assert missed.runs == 1 and missed.reason.startswith("it is a recurrence that continues a state")
    with warnings.catch_warnings(), capture() as nothing:
        warnings.simplefilter("ignore")
        gated_recurrence(*torch.randn(3, 1, 1, 4, 2))
    assert "1 call of attention came from a recurrence, whose effective weights" in str(nothing.coverage)


def test_a_state_without_steps_before_it() -> None:
    """RWKV is given a state of zeros by transformers, where it will need one afterwards."""
    model, tokens = made("rwkv"), torch.randint(3, VOCABULARY, (1, L))
    with torch.no_grad(), capture(model, recurrences=True) as record:
        model(tokens, use_cache=True)
    with torch.no_grad(), capture(model, recurrences=True) as without:
        model(tokens, use_cache=False)
    assert record.coverage.complete and torch.equal(record[1].weights(), without[1].weights())


def test_functions_without_a_model() -> None:
    q, k, v = torch.randn(3, 2, 2, L, 4).unbind()
    with capture(recurrences=True) as record:
        out = gated_recurrence(q, k, v, log_decay=-torch.ones(2, 2, L))
    torch.testing.assert_close(record[0].weights() @ v, out)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("name", "number"),
    [("model.layers.3.self_attn", 3), ("encoder.block.5.layer.0.SelfAttention", 5), ("h.2.attn#4", 2), ("attn", None)],
)
def test_layers_have_the_numbers_of_the_model(name: str, number: int | None) -> None:
    with capture() as record:
        regard.attention(*torch.randn(3, 1, 1, 2, 4))
    record[0].name = name
    assert record[0].number == number
