"""``regard train --start``: training that begins with a model."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder, TransformerConfig, TransformerEncoderDecoder
from regard_lab.tasks.translation.training import copy_parameters
from regard_lab.text.vocabulary import SubwordVocabulary, SymbolVocabulary

pytestmark = pytest.mark.slow

TEXTS = ["a red dog", "a blue cat", "the dog sees the cat", "the cat sees a red dog", "a cat and a dog"]
FEW = ["--steps", "4", "--set", "training.precision=float32", "--set", "training.save_every=2"]


def made(kind: str = "recurrent") -> SequenceModel:
    torch.manual_seed(3)
    vocabulary = SubwordVocabulary.train([*TEXTS, "a box"], size=35)
    model: RecurrentEncoderDecoder | TransformerEncoderDecoder
    if kind == "recurrent":
        sizes = {"embedding": 8, "encoder": 6, "decoder": 8, "features": 6, "dropout": 0.0, "tied": "all"}
        model = RecurrentEncoderDecoder(RecurrentConfig(len(vocabulary), len(vocabulary), **sizes))
    else:
        sizes = {"width": 8, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 1, "score": "cosine"}
        model = TransformerEncoderDecoder(TransformerConfig(len(vocabulary), len(vocabulary), **sizes))
    return SequenceModel(model, vocabulary, vocabulary, {"task": "translation"})


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{text}\t{text}{' box' * number}\n" for number, text in enumerate(TEXTS)))
    return path


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_parameters_vocabularies_and_options_are_the_models(regard, pairs, tmp_path, kind) -> None:
    start = made(kind)
    start.save(tmp_path / "start")
    options = ["--data", pairs, "--out", tmp_path / "out", *FEW, "--learning-rate", "1e-12"]
    result = regard("train", "translation", "--start", tmp_path / "start", *options)
    assert result.code == 0, result.err
    found = SequenceModel.load(tmp_path / "out")
    for name, each in start.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], each, atol=1e-6, rtol=1e-5)
    assert (found.source.to_json(), found.kind) == (start.source.to_json(), kind)
    table = tomllib.loads((tmp_path / "out" / "options.toml").read_text(encoding="utf-8"))
    assert (table["kind"], table["start"]) == (kind, str(tmp_path / "start"))
    assert (table["vocabularies"]["joint"], table["vocabularies"]["size"]) == (True, len(start.source))


def test_a_run_goes_on_without_the_model_that_it_began_with(regard, pairs, tmp_path) -> None:
    made().save(tmp_path / "start")
    options = ["--data", pairs, "--set", "model.dropout=0.25"]
    options += ["--set", "training.schedule=constant", "--set", "training.warmup=1"]
    for out, steps in (("whole", "6"), ("parted", "4")):
        run = ["--start", tmp_path / "start", "--out", tmp_path / out, *options, *FEW[2:], "--steps", steps]
        assert regard("train", "translation", *run).code == 0
    shutil.rmtree(tmp_path / "start")
    result = regard("train", "translation", "--out", tmp_path / "parted", "--resume", "--steps", "6")
    assert result.code == 0, result.err
    whole, parted = (SequenceModel.load(tmp_path / out).model for out in ("whole", "parted"))
    assert whole.config == parted.config and whole.config.dropout == 0.25
    for name, each in whole.state_dict().items():
        assert torch.equal(parted.state_dict()[name], each), name


def test_what_the_model_settles_is_not_asked_for_otherwise(regard, pairs, tmp_path) -> None:
    made().save(tmp_path / "start")
    since = "as in the start model, got"
    asked = {
        ("--model", "transformer"): f"--model must be 'recurrent', {since} 'transformer'.",
        ("--attention", "dot"): f"model.attention must be 'additive', {since} 'dot'.",
        (
            "--preset",
            "small",
        ): "be the start model's preset, or be left out, got 'small', whose embedding is 128, not 8.",
        ("--vocabulary-size", "41"): f"--vocabulary-size must be {len(made().source)}, {since} 41.",
        ("--apart",): f"--joint must be True, {since} False.",
        ("--set", "model.decoder=9"): f"model.decoder must be 8, {since} 9.",
        ("--start", str(tmp_path / "none")): f"there is no model at {tmp_path / 'none'}: ",
        ("--set", "start=1"): "start must be a string, got 1",
    }
    for arguments, why in asked.items():
        start = [] if "start" in arguments[-1] or "--start" in arguments else ["--start", tmp_path / "start"]
        result = regard("train", "translation", "--data", pairs, "--out", tmp_path / "out", *start, *arguments)
        assert result.code == 2 and why in result.err, result.err
        assert not (tmp_path / "out").exists()
    same = ["--model", "rnn", "--joint", "--attention", "additive", "--set", "model.decoder=8"]
    options = ["--data", pairs, "--out", tmp_path / "out", "--start", tmp_path / "start", *FEW]
    assert regard("train", "translation", *options, *same).code == 0


def test_the_model_is_one_for_the_task(regard, pairs, tmp_path) -> None:
    result = regard("train", "pronunciation", "--data", pairs, "--out", tmp_path / "out", "--start", "english-french")
    assert result.code == 2 and "start must be a model for pronunciation, got one for translation." in result.err
    letters, sounds = SymbolVocabulary.train(["tack"]), SymbolVocabulary.train(["K AE T"], separator=" ")
    sizes = {"embedding": 8, "encoder": 6, "decoder": 8, "features": 6}
    model = RecurrentEncoderDecoder(RecurrentConfig(len(letters), len(sounds), **sizes))
    SequenceModel(model, letters, sounds, {"task": "pronunciation"}).save(tmp_path / "start")
    words = tmp_path / "words.tsv"
    words.write_text("cat\tK AE T\nact\tAE K T\ntack\tT AE K\n", encoding="utf-8")
    options = ["--data", words, "--out", tmp_path / "out", "--start", tmp_path / "start", *FEW]
    assert regard("train", "pronunciation", *options).code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["about"]["task"] == "pronunciation"


def test_models_of_another_shape_are_refused() -> None:
    start = made()
    other = RecurrentEncoderDecoder(replace(start.model.config, decoder=9))
    with pytest.raises(ValueError, match=r"train: start must have the config .*decoder=9.*decoder=8"):
        copy_parameters(other, start)
    dropped = RecurrentEncoderDecoder(replace(start.model.config, dropout=0.5))
    copy_parameters(dropped, start)
    assert torch.equal(dropped.target_embedding.weight, start.model.target_embedding.weight)


def test_the_preset_and_the_options_of_the_model_may_be_said_again(regard, pairs, tmp_path) -> None:
    small = ["--preset", "small", "--set", "model.decoder=8", "--set", "vocabularies.kind=characters"]
    assert regard("train", "translation", "--data", pairs, "--out", tmp_path / "start", *small, *FEW).code == 0
    for number, again in enumerate((small, ["--options", tmp_path / "start" / "options.toml"])):
        options = ["--data", pairs, "--out", tmp_path / f"out{number}", "--start", tmp_path / "start", *FEW]
        result = regard("train", "translation", *options, *again)
        assert result.code == 0, result.err
        config = SequenceModel.load(tmp_path / f"out{number}").model.config
        assert config == SequenceModel.load(tmp_path / "start").model.config


def test_a_model_is_not_trained_over(regard, pairs, tmp_path) -> None:
    made().save(tmp_path / "start")
    before = {path.name: path.read_bytes() for path in (tmp_path / "start").iterdir()}
    options = ["--data", pairs, "--out", tmp_path / "start", *FEW]
    for more in ([], ["--start", tmp_path / "start"]):
        result = regard("train", "translation", *options, *more)
        assert result.code == 2
        assert f"out must be a new folder, got {tmp_path / 'start'}, which has a model." in result.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "start").iterdir()} == before


RUSSIAN = ["красная собака", "синяя кошка", "собака видит кошку", "кошка видит собаку", "кошка и собака", "кошка"]


def test_texts_that_the_vocabulary_cannot_spell_are_refused_or_asked_for(regard, tmp_path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"a {text.split()[0]}\t{text}\n" for text in RUSSIAN), encoding="utf-8")
    options = ["--data", path, "--out", tmp_path / "out", "--start", "english-french", *FEW[:4]]
    result = regard("train", "translation", *options)
    # Words that stand on both sides are copied: the other ones of the target cannot be spelled.
    assert result.code == 2 and "regard: train: target: " in result.err
    assert " symbols (7" in result.err and "are unknown to the vocabulary (first in " in result.err
    assert f"{path} (training), line 2: 'к', 'о', 'ш', 'а')" in result.err
    assert result.err.endswith("Use texts that it can spell or another vocabulary, or add --set data.max_unknown=1.\n")
    assert not (tmp_path / "out").exists()
    path.write_text("".join(f"{source}\t{target}\n" for source, target in zip(TEXTS, RUSSIAN)), encoding="utf-8")
    result = regard("train", "translation", *options)
    assert result.code == 2 and "regard: train: target: " in result.err and "source: " not in result.out
    result = regard("train", "translation", *options, "--set", "data.max_unknown=1")
    assert result.code == 0, result.err
    assert result.out.count("target: ") == 2, "of the pairs to learn from, and of those to validate with"


def test_a_few_unknown_symbols_are_told_by_side(regard, tmp_path) -> None:
    made().save(tmp_path / "start")
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{text}\t{text * 9}\n" for text in TEXTS) + "a red dog\ta red dog!\n", encoding="utf-8")
    options = ["--data", path, "--valid", path, "--out", tmp_path / "out", "--start", tmp_path / "start", *FEW]
    result = regard("train", "translation", *options)
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "unknown to the vocabulary" in line]
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0].startswith("target: 1 of ") and lines[0].endswith(f"(first in {path}, line 6: '!')")


def test_a_model_that_rewrites_nothing_is_not_asked_to(regard, pairs, tmp_path) -> None:
    made().save(tmp_path / "start")
    options = ["--data", pairs, "--out", tmp_path / "out", "--start", tmp_path / "start", "--rewrite"]
    result = regard("train", "translation", *options)
    assert result.code == 2 and "--rewrite must be False, as in the start model, got True." in result.err
