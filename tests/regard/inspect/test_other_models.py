"""Whatever a model attends by, its weights are recorded, or a warning says which of its modules are not."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, SIZES, made, tokens
from other_attention import LAYERS, RECORDED, REPORTED, Closure, Einsum, Layer, attentions
from pages import Page
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    BertConfig,
    DiffLlamaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    SqueezeBertConfig,
    SwinConfig,
    ViTConfig,
    WhisperConfig,
)

import regard
from regard import RegardWarning
from regard.inspect import Record, average, capture, flow, rollout

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WHISPER = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
           "max_source_positions": 20, "max_target_positions": 30, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).detach().abs().max()) < most


def run(model: nn.Module, given: dict[str, Any], record: bool = False, **options: Any) -> Any:
    torch.manual_seed(5)  # Informer draws the keys that it measures queries by
    with capture(model, **options) if record else nullcontext() as found, torch.no_grad():
        return model(**given), found


def first(output: Any) -> Tensor:
    return output[0]


@pytest.mark.campaign(keep=len(RECORDED))
@pytest.mark.parametrize("name", RECORDED)
def test_families_that_attend_by_functions_of_their_own(name: str) -> None:
    make, give = RECORDED[name]
    model, given = make(), give()
    alone, _ = run(model, given)
    expected = attentions(run(model, given | {"output_attentions": True})[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegardWarning)
        together, record = run(model, given, record=True)
    assert torch.equal(first(alone), first(together)) and record.coverage.complete
    runs = [each for layer in record.layers for each in record.runs(layer)]
    assert expected and len(runs) >= len(expected)
    for each in expected:
        found = [one for one in runs if one.shape == each.shape and float((one.weights() - each).abs().max()) < 1e-5]
        assert found, (name, tuple(each.shape))
        runs.remove(found[0])
    assert not runs or name == "swinv2"  # which returns the weights of one block of each stage


def test_a_family_that_returns_scores_in_the_place_of_weights() -> None:
    model = made(SqueezeBertConfig(**SIZES, embedding_size=32), AutoModel)
    scores = attentions(run(model, {"input_ids": tokens(), "output_attentions": True})[0])
    _, record = run(model, {"input_ids": tokens()}, record=True)
    assert record.layers == ("encoder.layers.0.attention", "encoder.layers.1.attention")
    for layer, each in zip(record, scores):
        near(layer.weights(), each.softmax(-1))


@pytest.mark.parametrize("name", REPORTED)
def test_families_whose_attention_is_no_matrix_of_softmaxes_are_reported(name: str) -> None:
    make, give, kind, count = REPORTED[name]
    model, given = make(), give()
    alone, _ = run(model, given)
    with pytest.warns(RegardWarning, match=f"{count} modules that look like attention are unrecorded, .*{kind}"):
        together, record = run(model, given, record=True)
    assert torch.equal(first(alone), first(together)) and not record.coverage.complete
    assert [each.class_name for each in record.coverage.unrecorded] == [kind] * count
    assert all(each.runs == 1 and each.reason for each in record.coverage.unrecorded)
    assert not {each.module for each in record.coverage.unrecorded} & set(record.layers)


def whole() -> dict[str, Any]:
    source, target = tokens(), tokens(length=9)
    found = {name: (made(make()), {"input_ids": source}) for name, make in DECODERS.items()}
    for name, make in PAIRED.items():
        found[name] = made(make(), AutoModelForSeq2SeqLM), {"input_ids": source, "decoder_input_ids": target}
    found["bert"] = made(BertConfig(**SIZES), AutoModel), {"input_ids": source}
    found["vit"] = (
        made(ViTConfig(**VISION, image_size=16, patch_size=4), AutoModel),
        {"pixel_values": drawn(2, 3, 16, 16)},
    )
    found["whisper"] = made(WhisperConfig(**WHISPER), AutoModel), {
        "input_features": drawn(2, 8, 40), "decoder_input_ids": target
    }  # fmt: skip
    torch.manual_seed(0)
    found["torch"] = nn.Transformer(16, 4, 2, 2, 32, batch_first=True).eval(), {
        "src": drawn(2, 7, 16), "tgt": drawn(2, 5, 16)
    }  # fmt: skip
    found["torch, rows first"] = nn.Transformer(16, 4, 2, 2, 32).train(), {
        "src": drawn(7, 2, 16), "tgt": drawn(5, 2, 16)
    }  # fmt: skip
    return found


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("name", [*DECODERS, *PAIRED, "bert", "vit", "whisper", "torch", "torch, rows first"])
def test_nothing_is_said_of_models_that_are_recorded_whole(name: str) -> None:
    model, given = whole()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegardWarning)
        _, record = run(model, given, record=True)
    assert record.coverage.complete and record.coverage.recorded == record.layers and len(record) >= 2
    assert all(each.windows == 1 for each in record)


@pytest.mark.campaign(keep=20)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("grad", ["no_grad", "enable_grad", "inference_mode"])
def test_layers_by_however_they_write_it(layer: type[Layer], grad: str) -> None:
    model, x = nn.ModuleDict({"attend": layer()}), drawn(3, 5, 8)
    with getattr(torch, grad)():
        torch.manual_seed(2)
        alone = model["attend"](x)
        torch.manual_seed(2)
        with warnings.catch_warnings(), capture(model) as record:
            warnings.simplefilter("error", RegardWarning)
            together = model["attend"](x)
    if (
        grad == "inference_mode"
    ):  # torch rounds some products otherwise there when a dispatch mode is on, even an empty one
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(alone, together)
    assert record.layers == ("attend",) and len(record.runs(0)) == 1
    near(record[0].weights(), model["attend"].expected)
    assert record[0].kind == "self"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["deberta", "xlnet", "funnel", "fsmt"])
def test_families_in_inference_mode(name: str) -> None:
    make, give = RECORDED[name]
    model, given = make(), give()
    expected = attentions(model(**given, output_attentions=True))
    alone = first(model(**given))
    with capture(model) as record:
        together = first(model(**given))
    assert torch.equal(alone, together) and record.coverage.complete
    shapes = sorted(tuple(each.shape) for each in expected)
    assert sorted(record[layer].shape for layer in record.layers) == shapes
    near(record[record.layers[0]].weights(), expected[0])


@pytest.mark.parametrize("layer", [Einsum, Closure])
def test_transforms_and_tracers_run_as_they_do_alone(layer: type[Layer]) -> None:
    model, x = layer(), drawn(3, 5, 8)
    runs = {
        "trace": lambda: torch.jit.trace(Plain(model), x, check_trace=False)(x),
        "make_fx": lambda: make_fx(Plain(model))(x)(x),
        "vmap": lambda: torch.func.vmap(Plain(model))(x[None]),
        "grad": lambda: torch.func.grad(lambda rows: Plain(model)(rows).sum())(x),
    }
    for name, call in runs.items():
        alone = call()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with capture(model):
                assert torch.equal(call(), alone), name


class Plain(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.attention = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.attention.attend(*self.attention.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4))


def test_functions_outside_of_modules() -> None:
    query, key = drawn(2, 3, 4, 8), drawn(2, 3, 6, 8, seed=1)
    with capture() as record:
        weights = (query @ key.mT).softmax(-1)
        _ = weights @ key
        _ = drawn(4, 9).softmax(-1) * 2  # is no attention
    assert record.layers == ("",) and len(record.runs(0)) == 1
    near(record[0].weights(), weights)


def test_a_record_of_weights_is_kept_read_and_shown_like_any_other(tmp_path: Any) -> None:
    model, x = Einsum(), drawn(3, 5, 8)
    with capture(model) as record:
        model(x)
    with capture(model, keep="summaries", topk=5) as summary:
        model(x)
    expected = model.expected
    read = Record.load(record.save(tmp_path / "a.regard"))
    for each in (record[0], read[0]):
        near(each.weights(batch=1, head=0, rows=slice(1, 3)), expected[1, 0, 1:3])
        near(each.entropy(), torch.special.entr(expected).sum(-1))
        near(each.received(), expected.sum(2))
        near(each.topk(2).weights, expected.topk(2).values)
    near(summary[0].received(), expected.sum(2))
    assert "<script" in str(read.to_html()) and read[0].nbytes == expected.nbytes
    with pytest.raises(ValueError, match="lse: record must hold queries and keys, got only weights in ''"):
        record[0].lse()
    with capture(model, gradients=True) as record:
        model(x).sum().backward()
    with pytest.raises(
        ValueError, match="gradients: record must hold queries, keys and values of the layer, got only its we"
    ):
        record[0].gradients()


@torch.no_grad()
@pytest.mark.parametrize("name", ["bloom", "gpt-neo"])
def test_what_such_a_model_writes_is_one_matrix(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = RECORDED[name][0]().config
    model, given = made(config, AutoModelForCausalLM), tokens(2, 6)
    with capture(model) as record:
        written = model.generate(given, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = model(written[:, :-1], output_attentions=True, use_cache=False).attentions
    assert record.coverage.complete
    for layer, each in zip(record, expected, strict=True):
        near(layer.weights(), each, 2e-5)


@pytest.mark.campaign(keep=4)
@torch.no_grad()
@pytest.mark.parametrize("keep", ["rows", "summaries"])
@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "mistral, sliding"])
def test_beams_are_followed(name: str, keep: str) -> None:
    paired = name in PAIRED
    model = made((PAIRED if paired else DECODERS)[name](), *([AutoModelForSeq2SeqLM] if paired else []))
    given = {"input_ids": tokens(2), "num_beams": 4, "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    given |= {"eos_token_id": 5}
    alone = model.generate(**given, num_return_sequences=3)
    with capture(model, **({} if keep == "rows" else {"keep": keep, "topk": 4})) as record:
        written = model.generate(**given, num_return_sequences=3)
    assert torch.equal(written, alone) and record.coverage.complete
    if paired:
        encoded = given["input_ids"].repeat_interleave(3, 0)
        told = model(input_ids=encoded, decoder_input_ids=written[:, :-1], output_attentions=True)
        expected = {"self_attn": told.decoder_attentions, "cross": told.cross_attentions}
    else:
        told = model(written[:, :-1], output_attentions=True, use_cache=False)
        expected = {"": told.attentions}
    runs = [each for each in record if "encoder." not in each.name or "decoder" in each.name]
    for part, each in expected.items():
        chosen = [one for one in runs if not paired or (one.kind == "cross") == (part == "cross")]
        for layer, whole in zip(chosen, each, strict=True):
            assert len(record.runs(layer.name)) == 1
            for row, one in enumerate(written.tolist()):
                begin = 1 if paired else 14
                length = (
                    begin + one[begin:].index(5) if 5 in one[begin:] else len(one) - 1
                )  # rows before the last token
                if keep == "rows":
                    near(layer.weights(batch=row, rows=slice(0, length)), whole[row, :, :length], 2e-5)
                else:
                    near(layer.entropy()[row, :, :length], torch.special.entr(whole[row, :, :length]).sum(-1), 1e-4)


class Reads(nn.Module):
    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, memory, memory)


@torch.no_grad()
def test_rows_of_beams_that_cannot_be_followed_are_not_joined() -> None:
    attend, memory = nn.ModuleDict({"cross_attn": Reads()}), drawn(1, 2, 6, 4).expand(3, -1, -1, -1)
    with pytest.warns(
        RegardWarning, match="Each step of cross_attn is recorded as a separate run: several sequences read the same"
    ):
        watching = capture(attend)
        with watching as record:
            for step in range(3):
                attend["cross_attn"](drawn(3, 2, 1, 4, seed=step), memory)
    assert record.layers == ("cross_attn",) and len(record.runs(0)) == 3


@torch.no_grad()
def test_windows_are_no_sequences() -> None:
    config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    model = made(config, AutoModel)
    for batch in (1, 3):
        with capture(model) as record:
            model(drawn(batch, 3, 32, 32))
        assert [each.windows for each in record] == [16, 16]
        for read in (rollout, flow, average):
            with pytest.raises(
                ValueError, match=f"{read.__name__}: layers must attend over whole sequences, got 16 windo"
            ):
                read(record)


@torch.no_grad()
def test_the_weights_that_a_differential_layer_uses() -> None:
    model = made(DiffLlamaConfig(**SIZES, num_key_value_heads=2), AutoModel)
    raw = model(tokens(), output_attentions=True, use_cache=False).attentions
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with capture(model) as record:
            model(tokens(), use_cache=False)
        assert record.layers == ("layers.0.self_attn", "layers.1.self_attn") and record.coverage.complete
        for layer, each, module in zip(record, raw, model.layers):
            attend = module.self_attn
            factor = (attend.lambda_q1 * attend.lambda_k1).sum().exp() - (
                attend.lambda_q2 * attend.lambda_k2
            ).sum().exp()
            one, other = each.chunk(2, 1)
            near(layer.weights(), one - (factor + attend.lambda_init) * other)
            assert layer.entropy().isfinite().all()
        assert "<script" in str(record.to_html())


@torch.no_grad()
def test_a_cache_makes_no_cross_attention() -> None:
    model, given = made(DECODERS["llama, grouped"]()), tokens(1)
    past = model(given[:, :9]).past_key_values
    with capture(model) as record:
        model(given[:, 9:], past_key_values=past)
    assert record[0].shape[2:] == (5, 14) and [each.kind for each in record] == ["self", "self"]
    attend = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with capture(attend) as record:
        attend(drawn(1, 3, 8), drawn(1, 6, 8), drawn(1, 6, 8))
    assert record[0].kind == "cross"


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama, grouped", "bart"])
def test_other_threads_that_run_the_model_are_recorded(name: str) -> None:
    paired = name in PAIRED
    model = made((PAIRED if paired else DECODERS)[name](), *([AutoModelForSeq2SeqLM] if paired else []))
    givens, written = [tokens(1, length) for length in (5, 9)], {}

    def write(number: int) -> None:
        with torch.no_grad():
            written[number] = model.generate(givens[number], max_new_tokens=4, min_new_tokens=4, do_sample=False)

    with capture(model) as record:
        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert record.coverage.complete
    layer = next(layer for layer in record.layers if not paired or "decoder.layers.0.self_attn" in layer)
    for number in range(2):
        with capture(model) as alone:
            write(number)
        expected = alone[layer].weights()
        found = [each.weights() for each in record.runs(layer) if each.shape == alone[layer].shape]
        assert any(torch.allclose(each, expected, atol=1e-6) for each in found)
    assert len(record.runs(layer)) == 2


def test_two_threads_with_one_prompt_are_two_runs() -> None:
    model, given = made(DECODERS["gpt2"]()), tokens(1, 5)
    with capture(model) as record:
        together = threading.Barrier(2)

        def write() -> None:
            together.wait()
            with torch.no_grad():
                model.generate(given, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)

        threads = [threading.Thread(target=write) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [each.shape[2:] for each in record.runs(0)] == [(10, 10), (10, 10)]
    near(record[0, 0].weights(), record[0, 1].weights(), 1e-7)


def test_calls_in_threads_that_no_capture_follows_are_counted() -> None:
    query = drawn(1, 2, 5, 8)
    with pytest.warns(
        RegardWarning, match=r"1 call of attention ran in other threads; capture\(model\) follows its mo"
    ):
        watching = capture()
        with watching as record:
            F.scaled_dot_product_attention(query, query, query)
            thread = threading.Thread(target=F.scaled_dot_product_attention, args=(query, query, query))
            thread.start()
            thread.join()
    assert len(record.runs(0)) == 1


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Einsum()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


@pytest.mark.campaign(keep=1)
@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_in_a_compiled_function_is_reported(backend: str) -> None:
    model, x = made(BertConfig(**SIZES), AutoModel), tokens()
    function = torch.compile(lambda given: model(given)[0], backend=backend)
    alone = function(x)
    with pytest.warns(
        RegardWarning, match="did not run in the block, or it ran in a compiled function or another process"
    ):
        watching = capture(model)
        with watching as record:
            assert torch.equal(function(x), alone)
    assert len(record) == 0 and not record.coverage.complete
    with torch.compiler.set_stance("force_eager"), capture(model) as record:
        function(x)
    assert record.coverage.complete and len(record) == 2


def test_a_record_of_nothing_says_why() -> None:
    model = Holder()
    cases = [
        (lambda: None, {}, "The model did not run in the block"),
        (
            lambda: model(drawn(1, 4, 8)),
            {"layers": ["other"]},
            r"No layer that ran is among layers=\['other'\]",
        ),
    ]
    for call, options, message in cases:
        with pytest.warns(RegardWarning, match=f"capture: 0 layers are recorded. .*{message}"):
            watching = capture(model, **options)
            with watching as record:
                call()
        assert record.coverage.recorded == () and len(record.coverage.notes) == 1
    with pytest.warns(RegardWarning, match="No attention that capture can see ran in the block"):
        layer = nn.Linear(2, 2)
        watching = capture(layer)
        with watching:
            layer(drawn(1, 2))


def test_a_block_that_raises_gives_no_warning() -> None:
    with warnings.catch_warnings(), pytest.raises(ZeroDivisionError), capture(Holder()):
        warnings.simplefilter("error")
        _ = 1 / 0


@torch.no_grad()
def test_a_model_without_values_runs_and_is_reported() -> None:
    for make in (Einsum, Closure):
        model = nn.ModuleDict({"attention": make()}).to("meta")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with capture(model) as record:
                assert model["attention"](torch.empty(2, 5, 8, device="meta")).shape == (2, 5, 8)
        assert len(record) == 0 and not record.coverage.complete and len(said) == 1
        assert "no values" in str(said[0].message) or "without values" in str(said[0].message)
    model = made(BertConfig(**SIZES), AutoModel).to("meta")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with pytest.warns(RegardWarning, match="2 calls of attention had tensors without values"):
            watching = capture(model)
            with watching as record:
                model(tokens().to("meta"))
        assert len(record) == 0
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, device="meta").eval()
    with pytest.warns(RegardWarning, match="without values"):
        watching = capture(layer)
        with watching:
            layer(torch.empty(2, 5, 16, device="meta"))


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_that_takes_padding_out(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, hidden = drawn(3, 7, 16), torch.zeros(3, 7, dtype=torch.bool)
    hidden[1, 4:] = hidden[2, 6:] = True
    alone = model(x, src_key_padding_mask=hidden)
    with capture(model) as record:
        assert torch.equal(model(x, src_key_padding_mask=hidden), alone)
    assert record.layers == ("layers.0.self_attn", "layers.1.self_attn") and record.coverage.complete
    model.enable_nested_tensor = model.use_nested_tensor = False
    with capture(model) as plain:
        model(x, src_key_padding_mask=hidden)
    for one, other in zip(record, plain, strict=True):
        seen = ~hidden[:, None, :, None]
        near(one.weights() * seen, other.weights() * seen)


def test_nested_tensors_are_padded() -> None:
    rows = torch.nested.nested_tensor([drawn(2, 5, 8), drawn(2, 3, 8, seed=1)])
    with capture() as record:
        F.scaled_dot_product_attention(rows, rows, rows)
    weights = record[0].weights()
    assert weights.shape == (2, 2, 5, 5) and record.coverage.complete
    for each, row in zip(rows.unbind(), weights):
        near(row[:, : each.shape[1], : each.shape[1]], (each @ each.mT * 8**-0.5).softmax(-1))
    assert not weights[1, :, 3:].any() and not weights[1, :, :, 3:].any()


def test_a_partial_of_ours_is_reported() -> None:
    import functools

    held = functools.partial(regard.attention, engine="sdpa")
    query = drawn(1, 2, 5, 8)
    with pytest.warns(RegardWarning, match="reached regard.attention through a partial or a closure"):
        watching = capture()
        with watching as record:
            held(query, query, query)
    assert len(record) == 0


def test_nothing_is_left_behind() -> None:
    call, model, x = nn.Module.__call__, Holder(), drawn(2, 4, 8)
    with capture(model):
        model(x)
        assert nn.Module.__call__ is not call
    assert nn.Module.__call__ is call
    from regard._utils.torch_private import is_eager
    from regard.inspect._capture.running import thread

    assert is_eager() and not thread.stack and thread.observers == 0 and thread.products is None


def test_texts_are_of_one_sequence(tmp_path: Any) -> None:
    model = made(DECODERS["gpt2"]())
    with torch.no_grad(), capture(model) as record:
        model(tokens(2, 4))
    record.describe(["a", "b", "c", "d"], sequence=1)
    for each in (record, Record.load(record.save(tmp_path / "a.regard"))):
        assert each.sequence == 1
        assert each.texts_of(each[0], 1)[0].tokens == ("a", "b", "c", "d")
        assert each.texts_of(each[0], 0)[0].tokens == ("0", "1", "2", "3")
        for batch, first in ((1, ["a", "b", "c", "d"]), (0, ["0", "1", "2", "3"])):  # that of the page's first layer
            page = Page(str(each.to_html(batch=batch))).described
            assert page["texts"][page["layers"][0]["queries"]]["tokens"] == first
    with pytest.raises(ValueError, match="record: sequence must be below 2, the batch size, got 2"):
        record.describe(["a", "b", "c", "d"], sequence=2)


def test_a_keyword_that_may_change_attention_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that passes what no attention function of ours knows may attend to something else."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.eager_attention_forward

    def novel(*args: Any, novelty: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    class Novel(modeling_llama.LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, novelty=torch.ones(1), **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", novel)
    monkeypatch.setattr(modeling_llama, "LlamaAttention", Novel)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    message = "2 calls of attention got keywords of unknown meaning from the model"
    with pytest.warns(RegardWarning, match=message), capture(model) as record, torch.no_grad():
        model(torch.tensor([[3, 1, 4]]))
    assert not record.coverage.complete and len(record) == 0
