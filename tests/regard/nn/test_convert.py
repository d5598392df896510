"""``convert``: torch's models with our attention inside."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from pairwise import across
from torch import Tensor, nn

from regard.nn.convert import convert
from regard.nn.heads.multihead import MultiheadAttention

B, S, E, H = 3, 5, 16, 4


def encoder(**named: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True, **named)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=named.get("norm_first") is None)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def ours(model: nn.Module) -> list[MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiheadAttention)]


PADDING = torch.arange(S) >= torch.tensor([[5], [2], [4]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(S)


def test_parameters_training_mode_and_attributes_stay() -> None:
    model = encoder().eval()
    model.layers[1].train()
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    model.layers[0].self_attn.note = "mine"
    before = dict(model.named_parameters())
    state = torch.get_rng_state()
    assert convert(model) is model
    assert torch.equal(torch.get_rng_state(), state)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert [layer.self_attn.training for layer in model.layers] == [False, True]
    assert model.layers[0].self_attn.note == "mine"
    assert len(ours(model)) == 2 and not any(type(m) is nn.MultiheadAttention for m in model.modules())
    assert ours(convert(model)) == ours(model)


def test_a_shared_module_stays_shared_and_subclasses_stay() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    one = nn.MultiheadAttention(E, H)
    model = convert(nn.ModuleList([one, one, nn.Sequential(one), Mine(E, H)]))
    assert isinstance(model[0], MultiheadAttention) and model[0] is model[1] is model[2][0]
    assert type(model[3]) is Mine
    alone = convert(one)
    assert isinstance(alone, MultiheadAttention) and alone.in_proj_weight is one.in_proj_weight


@pytest.mark.parametrize("named", [
    {}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 6, "vdim": 7}, {"batch_first": True},
], ids=str)  # fmt: skip
def test_every_kind_of_module(named: dict[str, Any]) -> None:
    old = nn.MultiheadAttention(E, H, **named)
    new = convert(nn.Sequential(old))[0]
    query, key, value = torch.randn(B, S, E), torch.randn(B, S, old.kdim), torch.randn(B, S, old.vdim)
    for a, b in zip(new(query, key, value), old(query, key, value)):
        torch.testing.assert_close(a, b)
    assert new.state_dict().keys() == old.state_dict().keys()


def test_hooks_stay_and_are_called() -> None:
    seen: list[str] = []
    model = encoder()
    model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append("after"))
    model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append("before"))
    convert(model)(torch.randn(B, S, E))
    assert seen == ["before", "after"]


@across(
    {
        "masks": [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL}, {"mask": CAUSAL, "is_causal": True}],
        "named": [{}, {"norm_first": True}, {"activation": "gelu"}],
        "grad": [True, False],
        "training": [True, False],
    }
)
def test_encoders_agree_and_attention_is_ours(
    named: dict[str, Any], masks: dict[str, Any], grad: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder(**named).train(training)
    other = convert(copy.deepcopy(model))
    called: set[int] = set()
    forward = MultiheadAttention.forward
    monkeypatch.setattr(MultiheadAttention, "forward", lambda *a, **k: (called.add(id(a[0])), forward(*a, **k))[1])
    x = torch.randn(B, S, E, generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(grad):
        a, b = model(x, **masks), other(x, **masks)
    assert len(called) == 2, "torch computed the attention without our module"
    real = ~PADDING if "src_key_padding_mask" in masks else slice(None)
    torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_fully_padded_sequences_are_finite(training: bool) -> None:
    model = convert(encoder()).train(training)
    padding = torch.arange(S) >= torch.tensor([[5], [0], [4]])
    x = torch.randn(B, S, E)
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding).isfinite().all()
    output: Tensor = model(x, src_key_padding_mask=padding)
    output.sum().backward()
    assert output.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


def test_the_whole_transformer_and_its_copies() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 1, 24, 0.0, batch_first=True).eval()
    src, tgt = torch.randn(B, S, E), torch.randn(B, S, E)
    want = model(src, tgt, tgt_mask=CAUSAL, tgt_is_causal=True)
    other = convert(model)
    assert len(ours(other)) == 3
    for each in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        torch.testing.assert_close(each(src, tgt, tgt_mask=CAUSAL, tgt_is_causal=True), want, rtol=1e-4, atol=1e-5)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("masks", [
    {}, {"src_key_padding_mask": PADDING}, {"src_mask": CAUSAL, "is_causal": True},
], ids=["none", "padding", "hint"])  # fmt: skip
def test_torchs_layers_still_compile(masks: dict[str, Any]) -> None:
    layer = convert(encoder()).layers[0].eval()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(B, S, E)
    torch.testing.assert_close(compiled(x, **masks), layer(x, **masks))


def test_dropped_weights_are_torchs() -> None:
    new = convert(nn.MultiheadAttention(E, H, dropout=0.5), dropped_weights=True)
    x = torch.randn(30, B, E)
    assert (new(x, x, x, average_attn_weights=False)[1] == 0).any()
    assert not (convert(nn.MultiheadAttention(E, H, dropout=0.5))(x, x, x)[1] == 0).any()


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"^convert: model must be a torch.nn.Module, got the class Linear"):
        convert(nn.Linear)  # type: ignore[arg-type]
