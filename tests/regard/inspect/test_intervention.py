"""Heads that are removed or patched give what the formula says, and nothing else in a model changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, SIZES, L, made, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AlbertConfig, AutoModel, AutoModelForSeq2SeqLM

import regard
from regard.inspect import Record, ablate, capture, patch
from regard.integrations.transformers import register
from regard.nn import SelfAttention

IMPLEMENTATIONS = ("eager", "sdpa", "regard")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < most


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head", [2, [0, -1], None])
def test_a_head_removed_is_its_rows_of_the_projection_at_zero(head: Any, implementation: str) -> None:
    model, given = made(DECODERS["gpt2"]()), tokens()
    model.set_attn_implementation(implementation)
    before = model(given).logits
    with ablate(model, "transformer.h.1.attn", head), capture(model) as record:
        found = model(given).logits
    with ablate(model, 1, head):
        assert torch.equal(model(given).logits, found)
    assert torch.equal(model(given).logits, before)
    heads = range(4) if head is None else [each % 4 for each in ([head] if isinstance(head, int) else head)]
    for each in heads:
        model.transformer.h[1].attn.c_proj.weight[each * 8 : each * 8 + 8] = 0
    near(found, model(given).logits)
    assert float((found - before).abs().max()) > 1e-3
    sums = record[1].weights().sum(-1)
    for each in range(4):
        near(sums[:, each], torch.full((2, L), float(each not in heads)))
    near(record[0].weights().sum(-1), torch.ones(2, 4, L))


@pytest.mark.campaign(keep=6)
@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped", "mistral, sliding", "gpt-oss, sinks"])
def test_a_models_own_weights_change_nothing(name: str, implementation: str) -> None:
    model, given = made(DECODERS[name]()), tokens()
    model.set_attn_implementation("eager" if name == "gpt-oss, sinks" and implementation == "sdpa" else implementation)
    with capture(model) as record:
        before = model(given).logits
    with patch(model, 0, record), patch(model, record.layers[1], record[1].weights(), head=[3, 1]):
        near(model(given).logits, before, 1e-4)
    assert torch.equal(model(given).logits, before)


@torch.no_grad()
def test_a_module_that_is_several_layers() -> None:
    config = AlbertConfig(**SIZES, embedding_size=16)
    model, given = made(config, AutoModel), tokens()
    model.set_attn_implementation("sdpa")
    with capture(model) as record:
        before = model(given).last_hidden_state
    module = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert record.layers == (f"{module}#1", f"{module}#2") and len(record.runs(module)) == 2
    with patch(model, module, record):
        for _ in range(2):
            near(model(given).last_hidden_state, before)
    changed = []
    for layer, left in ((0, [False, True]), (f"{module}#2", [True, False]), (module, [False, False])):
        with ablate(model, layer), capture(model) as ablated:
            changed.append(model(given).last_hidden_state)
        assert [bool(run.weights().any()) for run in ablated] == left
    assert not any(torch.equal(each, before) for each in changed)


def by_hand(attend: Any, x: Tensor, weights: dict[int, Tensor]) -> Tensor:
    """GPT-2's attention in float64, with some heads' weights given."""
    query, key, value = F.linear(x.double(), attend.c_attn.weight.double().mT, attend.c_attn.bias.double()).chunk(3, -1)
    query, key, value = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (query, key, value))
    scores = (query @ key.mT * 8**-0.5).masked_fill(~torch.ones(L, L, dtype=torch.bool).tril(), -torch.inf)
    used = scores.softmax(-1)
    for head, each in weights.items():
        used[:, head] = each.double()
    read = (used @ value).transpose(1, 2).flatten(2)
    return F.linear(read, attend.c_proj.weight.double().mT, attend.c_proj.bias.double())


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_another_run(implementation: str) -> None:
    model, first, second = made(DECODERS["gpt2"]()), tokens(), tokens().flip(1)
    model.set_attn_implementation(implementation)
    attend = model.transformer.h[0].attn
    seen: list[Tensor] = []
    with capture(model) as record:
        model(first)
    hooks = [
        attend.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
        attend.register_forward_hook(lambda _, args, out: seen.append(out[0])),
    ]
    with patch(model, 0, record, head=2), capture(model) as ran:
        patched = model(second, output_attentions=implementation != "sdpa")
    for each in hooks:
        each.remove()
    weights = record[0].weights(head=2)
    near(seen[1], by_hand(attend, seen[0], {2: weights}))
    near(ran[0].weights(head=2), weights, 1e-7)
    if patched.attentions:
        near(patched.attentions[0][:, 2], weights, 1e-7)
        near(patched.attentions[0], ran[0].weights())


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torchs_module(needed: bool, grad: bool, training: bool) -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    x, weights = drawn(2, 7, 16), drawn(3, 7, 7).softmax(-1)
    with torch.set_grad_enabled(grad), patch(attend, "", torch.cat([weights, weights[:1]])[None], head=[0, 2]):
        with ablate(attend, 0, 3), capture(attend) as record:
            found, used = attend(x, x, x, need_weights=needed, average_attn_weights=False)
        _, mean = attend(x, x, x)
    query, key, value = F.linear(x.double(), attend.in_proj_weight.double(), attend.in_proj_bias.double()).chunk(3, -1)
    query, key, value = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in (query, key, value))
    expected = (query @ key.mT / 2).softmax(-1)
    expected[:, 0], expected[:, 2] = weights[0].double(), weights[2].double()
    if used is not None:
        near(mean, expected.mean(1))
    expected[:, 3] = 0
    read = (expected @ value).transpose(1, 2).flatten(2)
    near(found, F.linear(read, attend.out_proj.weight.double(), attend.out_proj.bias.double()))
    near(record[0].weights(), expected.detach())
    if used is not None:
        near(used, expected)


@torch.no_grad()
@pytest.mark.parametrize("padding", [False, True])
def test_torchs_layers_leave_their_fast_path(padding: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, hidden = drawn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    given = {"src_key_padding_mask": hidden} if padding else {}
    before = model(x, **given)
    with ablate(model, "layers.1.self_attn", [1, 2]), capture(model) as record:
        found = model(x, **given)
    assert record.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert torch.equal(model(x, **given), before)
    model.layers[1].self_attn.out_proj.weight[:, 4:12] = 0
    near(found[~hidden], model(x, **given)[~hidden])
    assert torch.backends.mha.get_fastpath_enabled()


def test_regards_functions_and_layers() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(16, 4).eval(), drawn(2, 6, 16)
    aux = regard.AuxRequest(weights=True, entropy=True, topk=2, received=True)
    weights = drawn(2, 4, 6, 6).softmax(-1)
    with patch(layer, 0, weights), capture(layer) as record:
        _, found = layer(x, return_aux=aux)
    double = weights.double()
    for run in (found, regard.Aux(record[0].weights(), None, record[0].entropy(), record[0].topk(2))):
        near(run.entropy, -(double * double.log()).sum(-1))
        near(run.topk.weights, double.topk(2).values)
        assert torch.equal(run.topk.indices, double.topk(2).indices)
    near(found.weights, weights)
    near(found.received, weights.sum(2))
    near(record[0].received(), weights.sum(2))
    query = drawn(4, 6, 8)
    with patch(nn.ModuleDict(), 0, weights[0, 1:2], head=1), ablate(nn.ModuleDict(), 0, 2):
        out, told = regard.attention(query, query, query, return_aux=regard.AuxRequest(weights=True))
    near(out[1], weights[0, 1] @ query[1])
    near(told.weights[1], weights[0, 1])
    assert not out[2].any() and not told.weights[2].any()
    near(out[3], (query[3] @ query[3].mT * 8**-0.5).softmax(-1) @ query[3])


@torch.no_grad()
def test_cross_attention_of_an_encoder_decoder() -> None:
    model, source, target = made(PAIRED["t5"](), AutoModelForSeq2SeqLM), tokens(), tokens(length=9)
    with capture(model) as record:
        before = model(source, decoder_input_ids=target).logits
    name = next(run.name for run in record if run.shape[2:] == (9, L))
    with patch(model, name, record):
        near(model(source, decoder_input_ids=target).logits, before, 1e-4)
    with ablate(model, name):
        found = model(source, decoder_input_ids=target).logits
    model.decoder.block[0].layer[1].EncDecAttention.o.weight.zero_()
    near(found, model(source, decoder_input_ids=target).logits, 1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_flow_to_values(reentrant: bool) -> None:
    given = drawn(1, 4, 5, 8).requires_grad_()
    key, weights = drawn(1, 2, 5, 8, seed=1), drawn(5, 5, seed=2).softmax(-1)
    target = drawn(1, 4, 5, 8, seed=3)

    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, query[:, :2], enable_gqa=True)

    with patch(nn.ModuleDict(), 0, weights, head=[1, 3]), ablate(nn.ModuleDict(), 0, 2):
        (checkpoint(attend, given, use_reentrant=reentrant) * target).sum().backward()
    query = given.detach().double().requires_grad_()
    used = (query @ key.double().repeat_interleave(2, 1).mT * 8**-0.5).softmax(-1)
    used = torch.stack([used[:, 0], weights.double()[None], torch.zeros(1, 5, 5), weights.double()[None]], 1)
    (used @ query[:, :2].repeat_interleave(2, 1) * target).sum().backward()
    assert given.grad is not None and query.grad is not None
    near(given.grad, query.grad)


def test_heads_that_stay_are_the_same_to_the_bit() -> None:
    query = drawn(2, 4, 6, 8)
    before = F.scaled_dot_product_attention(query, query, query)
    with ablate(nn.ModuleDict(), 0, 1):
        found = F.scaled_dot_product_attention(query, query, query)
    assert torch.equal(found[:, [0, 2, 3]], before[:, [0, 2, 3]]) and not found[:, 1].any()


def test_blocks_nest_and_end_with_an_exception() -> None:
    model, query = nn.ModuleDict(), drawn(1, 2, 5, 8)
    before, functions = F.scaled_dot_product_attention(query, query, query), (F.scaled_dot_product_attention,)
    mean = torch.full((5, 5), 0.2)
    with ablate(model, 0), patch(model, 0, mean):
        near(F.scaled_dot_product_attention(query, query, query), query.mean(2, keepdim=True).expand(1, 2, 5, 8))
    with patch(model, 0, mean), ablate(model, 0):
        assert not F.scaled_dot_product_attention(query, query, query).any()
    with pytest.raises(ZeroDivisionError), ablate(model, 0):
        _ = 1 / 0
    assert torch.equal(F.scaled_dot_product_attention(query, query, query), before)
    assert functions == (F.scaled_dot_product_attention,)


def test_other_threads_are_left_alone() -> None:
    torch.manual_seed(0)
    attend, x, answers = nn.MultiheadAttention(16, 4, batch_first=True).eval(), drawn(2, 7, 16), []

    @torch.no_grad()
    def call() -> None:
        answers.append(attend(x, x, x, need_weights=False)[0])

    call()
    with ablate(attend, 0):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        call()
    assert torch.equal(answers[0], answers[1])
    near(answers[2], attend.out_proj.bias.expand(2, 7, 16))


def test_a_record_of_an_intervention_comes_back(tmp_path: Path) -> None:
    model, given = made(DECODERS["gpt2"]()), tokens()
    weights = drawn(L, L).softmax(-1)
    with torch.no_grad(), capture(model) as record, ablate(model, 0, 1), patch(model, 1, weights, [0, 2]):
        model(given)
    read = Record.load(record.save(tmp_path / "changed.regard"))
    for one, other in zip(read, record, strict=True):
        near(one.weights(), other.weights(), 1e-7)
    assert not read[0].weights(head=1).any()


class TestWrong:
    @pytest.mark.slow
    def test_a_layer_that_does_not_run(self) -> None:
        model, given = made(DECODERS["gpt2"]()), tokens()
        for layer, message in (
            (2, r"ablate: layer must be the number or the name of 0 \(transformer.h.0.attn\), 1 .*, got 2"),
            ("transformer.h.1.atn", r"ablate: layer must be the number .* \(did you mean 'transformer.h.1.attn'\?\)"),
        ):
            with pytest.raises(ValueError, match=message), ablate(model, layer):
                model(given)
        with (
            pytest.raises(ValueError, match="ablate: layer must run in the block, got no call of attention that"),
            ablate(model, 0),
        ):
            pass

    def test_heads_and_weights_that_do_not_fit(self) -> None:
        model, query = nn.ModuleDict(), drawn(2, 4, 6, 8)
        for head in (4, [0, -5], True, "x"):
            message = "ablate: head must be one or more numbers below 4"
            with pytest.raises(ValueError, match=message), ablate(model, 0, head):  # type: ignore[arg-type]
                F.scaled_dot_product_attention(query, query, query)
        for shape in ((5, 6), (3, 6, 6), (2, 3, 6, 6), (1, 1, 1, 6, 6)):
            message = r"patch: weights must be of shape \(2, 4, 6, 6\), or without"
            with pytest.raises(ValueError, match=message), patch(model, 0, torch.zeros(shape)):
                F.scaled_dot_product_attention(query, query, query)
        message = "patch: weights must be a Tensor or a record, got"
        with pytest.raises(TypeError, match=message), patch(model, 0, [1.0]):  # type: ignore[arg-type]
            pass
        message = r"ablate: model must be a torch\.nn\.Module, got 'gpt2'"
        with pytest.raises(TypeError, match=message), ablate("gpt2", 0):  # type: ignore[arg-type]
            pass


@torch.no_grad()
def test_names_of_a_model_with_a_head_fit_the_model_without_it() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    trunk = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model, x = nn.ModuleDict({"model": trunk}), torch.randn(1, 4, 8)
    whole = trunk(x)
    with ablate(trunk, "layers.1.self_attn", head=0):
        expected = trunk(x)
    for owner, name in ((trunk, "model.layers.1.self_attn"), (model, "layers.1.self_attn")):
        with ablate(owner, name, head=0):
            found = trunk(x)
        assert torch.equal(found, expected) and not torch.equal(found, whole)
    with pytest.raises(ValueError, match=r"layer must be the number .*, got 'self_attn'"), ablate(model, "self_attn"):
        trunk(x)
