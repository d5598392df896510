"""Folders of families that transformers computes: its own numbers and texts, by what our commands are made of."""

from __future__ import annotations

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoTokenizer

from regard._utils.errors import RegardWarning
from regard_lab.generation.sampling import GenerationOptions, SamplingOptions
from regard_lab.models import DecoderLM, load
from regard_lab.models.folders import ModelFileError, NotMappedError
from regard_lab.models.hugging_face import hosted
from regard_lab.models.hugging_face.hosted import HostedClassifier, HostedEncoder, HostedMaskedLM, HostedWriter
from regard_lab.models.hugging_face.reading import read_folder
from regard_lab.tasks.classification.classifiers import TextClassifier
from regard_lab.tasks.language.evaluation import score_text
from regard_lab.tasks.language.text_generator import TextGenerator
from regard_lab.text.tokenizer import Tokenizer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
#: Small sizes, by every name that configs have for them.
SIZES: dict[str, Any] = {
    "attention_heads": 4, "d_ff": 24, "d_kv": 4, "d_model": 16, "decoder_attention_heads": 4, "decoder_ffn_dim": 24,
    "decoder_layers": 2, "dim": 16, "embedding_size": 16, "encoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "encoder_layers": 2, "ffn_dim": 24, "head_dim": 4, "hidden_dim": 24, "hidden_size": 16, "intermediate_size": 24,
    "max_position_embeddings": 64, "moe_intermediate_size": 24, "n_embd": 16, "n_head": 4, "n_heads": 4, "n_inner": 24,
    "n_layer": 2, "n_layers": 2, "n_positions": 64, "num_attention_heads": 4, "num_decoder_layers": 2, "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_layers": 2, "num_local_experts": 4,
    "rotary_dim": 4, "sliding_window": 8, "state_size": 4, "word_embed_proj_dim": 16, "query_pre_attn_scalar": 4,
    "layer_types": None, "local_attention": 8, "global_attn_every_n_layers": 2, "ffn_hidden_size": 24,
}  # fmt: skip
CAUSAL = {
    "bloom": "BloomForCausalLM", "codegen": "CodeGenForCausalLM", "cohere": "CohereForCausalLM",
    "falcon": "FalconForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gpt_neo": "GPTNeoForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "gptj": "GPTJForCausalLM", "granite": "GraniteForCausalLM",
    "mamba": "MambaForCausalLM", "ministral": "MinistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "opt": "OPTForCausalLM", "phi": "PhiForCausalLM", "phi3": "Phi3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
}  # fmt: skip
PAIRS = {
    "bart": "BartForConditionalGeneration", "marian": "MarianMTModel", "mbart": "MBartForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration", "pegasus": "PegasusForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
}  # fmt: skip
ENCODERS = {
    "convbert": "ConvBert", "deberta-v2": "DebertaV2", "distilbert": "DistilBert", "electra": "Electra",
    "ernie": "Ernie", "modernbert": "ModernBert", "mpnet": "MPNet", "roformer": "RoFormer",
    "xlm-roberta-xl": "XLMRobertaXL",
}  # fmt: skip
LABELLED = {
    "bart": "BartForSequenceClassification", "distilbert": "DistilBertForSequenceClassification",
    "electra": "ElectraForSequenceClassification", "gemma": "GemmaForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification", "opt": "OPTForSequenceClassification",
    "phi": "PhiForSequenceClassification", "qwen3": "Qwen3ForSequenceClassification",
}  # fmt: skip
TEXTS = ["to be or not to be", "a", "that is the question of some length", "no"]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.learn(TEXTS, None, "bytes", specials=("end", "pad"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn(TEXTS, None, "bytes", specials=("end", "pad", "mask", "cls", "sep"))


def stored(kind: str, name: str, tokenizer: Tokenizer, folder: Path, **changes: Any) -> Any:
    """Return a small random model of a family, saved in a folder with a tokenizer."""
    made = CONFIG_MAPPING[kind]
    known = {each.name for each in fields(made)} | set(made.attribute_map)
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if kind in ("gpt_neo",):
        sizes |= {"attention_types": [[["global", "local"], 1]], "window_size": 8}
    special = {"pad_token_id": tokenizer.pad, "eos_token_id": tokenizer.end, "bos_token_id": tokenizer.begin}
    sizes |= {"max_position_embeddings": 400} if "rob" in kind else {}  # positions begin behind the number of padding
    special |= {"decoder_start_token_id": tokenizer.pad, "forced_eos_token_id": None} if kind in PAIRS else {}
    config = made(**{**sizes, **special, "vocab_size": len(tokenizer) + 3, **changes})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.eval().save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save(folder)
    return getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").eval()


def loaded(folder: Path, kind: type) -> Any:
    """Return a hosted model; that its attention is transformers' own may be said."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RegardWarning)
        model = load(folder)
    assert type(model) is kind and not model.training
    return model


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
    assert error < 1e-5, error


@torch.no_grad()
@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize("kind", [*CAUSAL, *PAIRS])
def test_texts_are_those_that_transformers_generates(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = stored(kind, {**CAUSAL, **PAIRS}[kind], tokenizer, tmp_path)
    generator = TextGenerator(loaded(tmp_path, HostedWriter), Tokenizer.load(tmp_path))
    prompts, options = ["to be", "a"], GenerationOptions(max_new_tokens=20)
    written = generator.generate(prompts, options)
    searched = generator.search(prompts, 3, GenerationOptions(max_new_tokens=6))
    for prompt, each, best in zip(prompts, written, searched):
        given = torch.tensor([generator.encode(prompt)])
        plain: Any = {"do_sample": False, "pad_token_id": tokenizer.pad}
        expected = theirs.generate(given, max_new_tokens=20, num_beams=1, **plain)[0].tolist()
        expected = expected[1:] if kind in PAIRS else expected[given.shape[1] :]
        expected = expected[: expected.index(tokenizer.end)] if tokenizer.end in expected else expected
        assert list(each.numbers) == expected
        # A search finds nothing less likely than the greedy text, by the model's own probabilities.
        assert best.log_probability is not None
    stops = [each.text[2:4] or "never" for each in written]
    for each, stop in zip(generator.generate(prompts, options, stop=stops), stops):
        assert not any(text in each.text for text in stops) and (each.end == "stop" or stop == "never")
    drawn = GenerationOptions(max_new_tokens=5, samples=2, sampling=SamplingOptions(temperature=1.0, seed=3))
    first, again = generator.generate(["to be"], drawn), generator.generate(["a", "to be"], drawn)[2:]
    assert [each.numbers for each in first] == [each.numbers for each in again]


@torch.no_grad()
@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_search_scores_as_transformers_does(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = stored(kind, CAUSAL[kind], tokenizer, tmp_path)
    generator = TextGenerator(loaded(tmp_path, HostedWriter), Tokenizer.load(tmp_path))
    (best,) = generator.search(["to be"], 4, GenerationOptions(max_new_tokens=5))
    given = torch.tensor([[*generator.encode("to be"), *best.numbers]])
    chances = theirs(given).logits.log_softmax(-1)[0, -len(best.numbers) - 1 : -1]
    score = float(sum(row[number] for row, number in zip(chances, best.numbers)))
    assert best.end == "stop" or best.log_probability == pytest.approx(score, abs=1e-4)


@torch.no_grad()
@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("kind", CAUSAL)
def test_what_a_text_costs_is_what_transformers_says(kind: str, plain: Tokenizer, tmp_path: Path) -> None:
    theirs = stored(kind, CAUSAL[kind], plain, tmp_path)
    scores = score_text(loaded(tmp_path, HostedWriter), plain, TEXTS, length=40)
    total = 0.0
    for text in TEXTS:
        numbers = torch.tensor([[plain.begin, *plain.encode(text), plain.end]])
        logits = theirs(numbers).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits, numbers[0, 1:], reduction="sum"))
    assert scores.nats == pytest.approx(total, rel=1e-5)


@pytest.mark.campaign(keep=5)
@torch.no_grad()
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_name_masked_tokens_and_embed(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = stored(kind, f"{ENCODERS[kind]}ForMaskedLM", tokenizer, tmp_path / "masked")
    bare = stored(kind, f"{ENCODERS[kind]}Model", tokenizer, tmp_path / "bare")
    ours, vectors = loaded(tmp_path / "masked", HostedMaskedLM), loaded(tmp_path / "bare", HostedEncoder)
    tokens = torch.randint(0, 250, (3, 20), generator=torch.Generator().manual_seed(2))
    keep = torch.arange(20) < torch.tensor([[20], [9], [2]])
    for kept in (keep, keep.flip(1)):
        given = torch.where(kept, tokens, int(tokenizer.pad or 0))
        close(ours(given, attention_mask=kept)[kept], theirs(given, attention_mask=kept.long()).logits[kept])
        rows = vectors(given, attention_mask=kept)
        close(rows[kept], bare(given, attention_mask=kept.long()).last_hidden_state[kept])
        assert vectors.pool(rows, kept).shape == (3, rows.shape[-1])
    scores = score_text(ours, tokenizer, TEXTS, length=40)
    assert scores.targets > 0 and 0 < scores.loss < 20


@pytest.mark.campaign(keep=8)
@torch.no_grad()
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("kind", LABELLED)
def test_labels_are_those_of_transformers_alone_and_in_batches(
    kind: str, pad: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"id2label": {0: "a", 1: "b", 2: "c"}, "problem_type": "multi_label_classification"}
    changes |= {} if pad or kind in ("bart", "electra") else {"pad_token_id": None}
    changes |= {"eos_token_id": tokenizer.sep} if kind == "bart" else {}  # whose row stands for a text
    theirs = stored(kind, LABELLED[kind], tokenizer, tmp_path, **changes)
    classifier = TextClassifier(loaded(tmp_path, HostedClassifier), Tokenizer.load(tmp_path))
    texts = AutoTokenizer.from_pretrained(tmp_path)
    expected = torch.cat([theirs(torch.tensor([texts(text)["input_ids"]])).logits.sigmoid() for text in TEXTS])
    for batch in (1, 4):
        close(classifier.probabilities(classifier.read(TEXTS), batch=batch), expected)
    assert classifier.labels == ("a", "b", "c")


@torch.no_grad()
def test_a_mapped_family_with_an_unmapped_config_is_hosted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
    theirs = stored("qwen2", "Qwen2ForCausalLM", tokenizer, tmp_path, rope_parameters=yarn)
    with pytest.raises(NotMappedError, match="have a rope_type of default, linear, llama3, got 'yarn'"):
        read_folder(tmp_path)
    given = torch.arange(40)[None]
    model = loaded(tmp_path, HostedWriter)
    close(model(given), theirs(given).logits)
    assert model.attention == "regard" and repr(model).startswith("HostedWriter(\n  attention='regard'")


def test_a_mapped_family_is_ours(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored("qwen2", "Qwen2ForCausalLM", tokenizer, tmp_path)
    assert isinstance(load(tmp_path), DecoderLM)


def test_without_transformers_one_sentence_names_the_package(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("qwen3", "Qwen3ForCausalLM", tokenizer, tmp_path)
    monkeypatch.setattr("regard_lab.models.stored_models.find_spec", lambda _: None)
    with pytest.raises(
        ModelFileError, match=r"must have one of the model_types .*, got 'qwen3'; pip install 'regard\[hf\]' lets"
    ):
        load(tmp_path)
    monkeypatch.setattr(hosted, "find_spec", lambda _: None)
    with pytest.raises(ModelFileError, match=r"\(for others: pip install 'regard\[hf\]'\), got 'qwen3'"):
        hosted.load_module(tmp_path)


def test_folders_that_transformers_does_not_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored("qwen3", "Qwen3ForCausalLM", tokenizer, tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())

    def refused(change: dict[str, Any], sentence: str) -> None:
        path.write_text(json.dumps(described | change))
        with pytest.raises(ModelFileError, match=sentence) as caught:
            load(tmp_path)
        assert str(tmp_path) in str(caught.value)

    refused(
        {"architectures": ["FutureForCausalLM"]},
        r"name an architecture of transformers .*, got 'FutureForCausalLM'",
    )
    refused({"architectures": ["Qwen3ForQuestionAnswering"]}, "hold the tensors of Qwen3ForQuestionAnswering, got no")
    refused({"num_hidden_layers": 3}, "must be equal to the number of `layer_types`")
    refused(
        {"intermediate_size": 20}, r"hold model\.layers\.0\.mlp\.down_proj\.weight of shape \(16, 20\), got \(16, 24\)"
    )
    refused({"hidden_size": None}, "be a model that transformers loads, got .*hidden_size")
    refused({"head_dim": 0}, "be a model that transformers loads, got 0.0 cannot be raised to a negative power")
    refused({"rope_parameters": {"rope_type": "later"}}, "be a model that transformers loads, got KeyError: 'later'")
    refused({"architectures": None, "model_type": "future"}, "does not recognize this architecture")
    mapped = {"auto_map": {"AutoConfig": "c.Config", "AutoModel": "m.Model"}}
    refused({"architectures": None, "model_type": "future"} | mapped, "contains custom code")
    refused({"vocab_size": 7}, "be a model that transformers loads, got Padding_idx must be within num_embeddings")
    path.write_text(json.dumps({"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": {}}))
    with pytest.raises(ModelFileError, match=r"got one of timm, 'resnet18': timm\.create_model\('local-dir:"):
        load(tmp_path)


def test_files_that_are_missing_or_damaged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored("qwen3", "Qwen3ForCausalLM", tokenizer, tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFileError, match="be a model that transformers loads, got"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelFileError, match=r"be a model that transformers loads, got .*model\.safetensors"):
        load(tmp_path)


def test_errors_of_ours_are_not_disguised(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong call, an error in a function of ours that transformers calls, and full memory are not the folder's."""
    stored("qwen3", "Qwen3ForCausalLM", tokenizer, tmp_path)
    made = transformers.Qwen3ForCausalLM
    plain = made.from_pretrained.__func__
    monkeypatch.setattr(made, "from_pretrained", classmethod(lambda cls, *a, **k: plain(cls, *a, nonsense=1, **k)))
    with pytest.raises(TypeError, match="nonsense"):
        load(tmp_path)
    monkeypatch.undo()

    def wrong(*_: Any, **__: Any) -> None:
        hosted.read_json(None)  # type: ignore[arg-type]

    monkeypatch.setattr(made, "_init_weights", wrong)
    monkeypatch.setattr(made, "post_init", wrong)
    with pytest.raises(AttributeError):
        load(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(made, "post_init", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load(tmp_path)


def test_positions_of_roberta_need_a_number_of_padding(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored("roberta", "RobertaModel", tokenizer, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": None}))
    with pytest.raises(ModelFileError, match=r"have a pad_token_id of at least 0, .* \(usually 1\), got None"):
        load(tmp_path)


def test_training_begins_with_models_of_ours(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored("qwen3", "Qwen3ForCausalLM", tokenizer, tmp_path)
    with pytest.raises(NotMappedError, match=r"must have one of the model_types albert, .*, got 'qwen3'"):
        load(tmp_path, hosted=False)


def test_what_hosted_models_leave_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored("t5", "T5ForConditionalGeneration", tokenizer, tmp_path / "pair")
    stored("qwen3", "Qwen3ForCausalLM", tokenizer, tmp_path / "one")
    with pytest.raises(ValueError, match="decoder or a model of masked tokens, got T5ForConditionalGeneration"):
        score_text(loaded(tmp_path / "pair", HostedWriter), tokenizer, TEXTS)
    with pytest.raises(ValueError, match="--int8 must be left out unless regard implements the model"):
        TextGenerator.load(tmp_path / "one", int8=True)
    generator = TextGenerator.load(tmp_path / "one")
    with pytest.raises(ValueError, match="--draft must be left out unless regard implements both models"):
        generator.generate(["a"], drafter=generator.model)
