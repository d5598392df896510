"""``regard embed``: vectors that transformers gives, alone and in batches, of models of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.lab.cli.test_fill_mask import DISTILBERT, MODERN, SIZES
from tests.lab.cli.test_other_families import GPT2, folder_of
from transformers import AutoModel, AutoTokenizer, T5EncoderModel

from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, load, save
from regard_lab.tasks.embedding import Embedder
from regard_lab.text.tokenizer import Tokenizer

TEXTS = ["to be or not to be", "a", "that is the question of some length", "no"]
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 4, "eos_token_id": 256, "bos_token_id": 256}
T5 = {"vocab_size": 264, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4, "pad_token_id": 257}
T5 |= {"decoder_start_token_id": 257, "eos_token_id": 256}
MODELS: dict[str, dict[str, Any]] = {
    "BertModel": SIZES, "BertForMaskedLM": SIZES, "BertForSequenceClassification": SIZES, "RobertaModel": SIZES,
    "BertForTokenClassification": SIZES, "GPT2LMHeadModel": GPT2 | {"pad_token_id": 257}, "Qwen2Model": GROUPED,
    "ModernBertModel": SIZES | MODERN, "DistilBertForMaskedLM": DISTILBERT, "ElectraForMaskedLM": SIZES,
    "DistilBertForSequenceClassification": DISTILBERT, "ConvBertModel": SIZES, "FNetModel": SIZES,
    "Qwen3ForCausalLM": GROUPED, "Qwen3ForSequenceClassification": GROUPED, "T5ForConditionalGeneration": T5,
    "T5EncoderModel": T5,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn([], kind="bytes", specials=("end", "pad", "mask", "cls", "sep"))


def theirs_of(folder: Path, name: str) -> list[torch.Tensor]:
    """Return the rows (L, E) that transformers makes of each text, read by itself."""
    made: Any = T5EncoderModel if name.startswith("T5") else AutoModel
    model, read = (
        made.from_pretrained(folder, attn_implementation="eager").eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    return [model(torch.tensor([read(text)["input_ids"]])).last_hidden_state[0] for text in TEXTS]


@pytest.mark.campaign(keep=4)
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_transformers_whatever_the_batch(
    regard, name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", name, tokenizer, **MODELS[name])
    rows = theirs_of(folder, name)
    expected = {
        "mean": [each.mean(0) for each in rows],
        "first": [each[0] for each in rows],
        "last": [each[-1] for each in rows],
        "max": [each.amax(0) for each in rows],
    }
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS))
    for batch, pooling in ((1, None), (3, None), (128, "first"), (3, "last"), (3, "max")):
        chosen = [] if pooling is None else ["--pooling", pooling]
        outcome = regard("embed", "--model", folder, "--data", tmp_path / "texts", "--batch", batch, *chosen)
        assert outcome.code == 0, outcome.err
        found = torch.tensor([[float(each) for each in line.split("\t")] for line in outcome.out.splitlines()])
        wanted = torch.stack(expected[pooling or "mean"])
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        assert error < 1e-5, (batch, pooling, error)


@torch.no_grad()
@pytest.mark.parametrize("name", ["RobertaModel", "ModernBertModel", "Qwen3ForCausalLM"])
def test_padding_on_either_side_changes_no_row(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of models whose positions do not count padding, or only their distance; the command pads behind or not at all."""
    model: Any = load(folder_of(tmp_path, name, tokenizer, **MODELS[name]))
    rows = model if isinstance(model, EncoderLM) else model.rows
    numbers = torch.tensor([tokenizer.encode(TEXTS[0], specials=True)])
    alone = rows(numbers)[0]
    for left, right in ((0, 7), (7, 0)):
        padded = torch.nn.functional.pad(numbers, (left, right), value=257)
        keep = torch.nn.functional.pad(torch.ones_like(numbers), (left, right)).bool()
        found = rows(padded, attention_mask=keep)[keep]
        assert float((found - alone).abs().max() / alone.abs().max().clamp(min=1)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_models_of_ours(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = (
        EncoderLM(EncoderLMConfig(261, width=16, layers=2, positions="rotary", norm="rms"))
        if kind == "encoder"
        else DecoderLM(DecoderLMConfig(261, width=16, layers=2, window=4, sinks=1))
    )
    save(model.eval(), tmp_path)
    tokenizer.save(tmp_path)
    embedder = Embedder.load(tmp_path, normalize=True)
    found = embedder.vectors(embedder.read(TEXTS), batch=3)
    for text, vector in zip(TEXTS, found):
        numbers = torch.tensor([tokenizer.encode(text, specials=True)])
        mean = (model(numbers) if kind == "encoder" else model.features(numbers))[0].mean(0)
        assert float((vector - mean / mean.norm()).abs().max()) < 1e-5


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("new", [True, False], ids=["one key", "a key for each pooling"])
def test_folders_of_sentence_transformers(regard, new: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "BertModel", tokenizer, **SIZES)
    rows = theirs_of(folder, "BertModel")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    steps = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "1_Pooling").mkdir()

    def state(pooling: object, listed: object = steps, **reading: object) -> None:
        (folder / "modules.json").write_text(json.dumps(listed))
        flags = {"mean_tokens": pooling == "mean", "cls_token": pooling == "cls", "weightedmean_tokens": False}
        said = {f"pooling_mode_{name}": on for name, on in flags.items()}
        said = {"pooling_mode": pooling} if new else said | {"include_prompt": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **said}))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False, **reading}))

    state("cls")
    outcome = regard("embed", *TEXTS, "--model", folder, "--out", tmp_path / "vectors.npy")
    assert "each vector is the first token in the last layer, scaled to length 1" in outcome.err
    found, wanted = np.load(tmp_path / "vectors.npy"), torch.stack([each[0] / each[0].norm() for each in rows])
    assert found.dtype == np.float32 and np.abs(found - wanted.numpy()).max() < 1e-5
    outcome = regard("embed", *TEXTS, "--model", folder, "--pooling", "mean", "--out", tmp_path / "vectors.jsonl")
    assert "each vector is the mean over all tokens in the last layer\n" in outcome.err
    listed = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert [each["text"] for each in listed] == TEXTS
    assert (
        np.abs(
            np.array([each["vector"] for each in listed]) - torch.stack([each.mean(0) for each in rows]).numpy()
        ).max()
        < 1e-5
    )
    state("mean", max_seq_length=5)
    outcome = regard("embed", TEXTS[0], "a", "--model", folder, "--no-normalize", "--json")
    assert "truncated 1 of 2 texts to 5 tokens" in outcome.err and "length 1" not in outcome.err
    for change, sentence in (
        ({"pooling": ["mean", "cls"]}, "have a pooling of mean, cls, lasttoken, max (--pooling overrides it)"),
        (
            {"pooling": "mean", "listed": [*steps[:2], {"type": "models.Dense"}]},
            "list Transformer, Pooling and optionally",
        ),
        (
            {"pooling": "mean", "do_lower_case": True},
            "leave lowercasing to the tokenizer (--pooling embeds without lowercasing)",
        ),
    ):
        state(**change)  # type: ignore[arg-type]
        outcome = regard("embed", "a", "--model", folder)
        assert outcome.code == 2 and sentence in outcome.err, outcome.err
        assert regard("embed", "a", "--model", folder, "--pooling", "mean").code == 0


def test_what_is_refused(regard, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "BertModel", tokenizer, **SIZES)
    (tmp_path / "empty").write_text("")
    (tmp_path / "gap").write_text("a\n\nb\n")
    for arguments, sentence in (
        (["--data", tmp_path / "empty"], "empty must hold a text, got none"),
        (["--data", tmp_path / "gap"], "gap, line 2 must not be empty"),
        (["a", "--out", tmp_path / "a.csv"], "--out must end in .npy, .tsv, .jsonl, got 'a.csv'"),
        (
            ["a", "--out", tmp_path / "a.npy", "--json"],
            "--json must be left out with --out, whose suffix sets the format",
        ),
        (["a", "--pooling", "means"], "--pooling must be one of 'first', 'last', 'max', 'mean', got 'means'"),
    ):
        outcome = regard("embed", *arguments, "--model", folder)
        assert outcome.code == 2 and sentence in outcome.err, outcome.err
    assert not (tmp_path / "a.npy").exists()
