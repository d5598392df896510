"""``regard train classifier``, ``classify`` and ``evaluate`` of text, as a new user runs them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, PairClassifier, save
from regard_lab.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "red", "blue", "cat", "dog", "sees", "good"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    drawn = random.Random(0)
    texts = [" ".join(drawn.choice(WORDS) for _ in range(drawn.randint(2, 6))) for _ in range(150)]
    path = tmp_path_factory.mktemp("data") / "labelled.tsv"
    path.write_text("".join(f"{text}\t{'yes' if 'good' in text else 'no'}\n" for text in texts))
    return path


SMALL = ["--set", "model.width=32", "--set", "model.layers=1", "--set", "model.heads=2", "--set", "model.dropout=0"]
SMALL += ["--set", "training.precision=float32", "--vocabulary-size", "290", "--learning-rate", "0.006"]
SMALL += ["--length", "24", "--batch", "16"]


@pytest.fixture(scope="module")
def model(labelled, tmp_path_factory) -> Path:
    import regard_cli

    out = tmp_path_factory.mktemp("model") / "out"
    with pytest.raises(SystemExit) as caught:
        regard_cli.main(["train", "classifier", "--data", str(labelled), "--out", str(out), "--epochs", "12", *SMALL])
    assert not caught.value.code
    return out


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    torch.manual_seed(0)
    Tokenizer.learn([], kind="bytes").save(folder)
    save(DecoderLM(DecoderLMConfig(258, width=16, layers=1, max_length=32)), folder)
    return folder


def test_labels_of_texts(regard, model) -> None:
    result = regard("classify", "--model", model, "a good cat", "red dog", "--top", "2")
    assert result.code == 0, result.err
    one, other = (line.split("\t") for line in result.out.splitlines())
    assert (one[0], other[0]) == ("yes", "no") and float(one[1]) > 0.8
    assert float(one[1]) + float(one[3]) == pytest.approx(1, abs=2e-4) and one[2] == "no"


def test_a_line_in_is_a_line_out(regard, model, tmp_path) -> None:
    result = regard("classify", "--model", model, stdin="good dog\n\nred\tdog\n")
    lines = result.out.splitlines()
    assert [line.partition("\t")[0] for line in lines] == ["yes", "", "no"]
    (tmp_path / "texts.txt").write_text("good dog\n" + "red dog " * 20 + "\n")
    result = regard("classify", "--model", model, "--data", tmp_path / "texts.txt", "--json")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert records[0]["label"] == "yes" and set(records[0]["probabilities"]) == {"yes", "no"}
    assert result.err == "regard: truncated 1 of 2 texts to 24 tokens\n"
    assert json.loads(regard("classify", "--model", model, "--json", "--", " ").out)["label"] is None


@pytest.mark.campaign
def test_a_pipe_that_is_closed_early(model) -> None:
    command = [sys.executable, "-m", "regard_cli", "classify", "--model", str(model)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdin is not None and run.stdout is not None and run.stderr is not None
    run.stdout.close()
    run.stdin.write(b"good dog\n" * 3000)
    run.stdin.close()
    assert run.wait() == 1 and b"Traceback" not in run.stderr.read()
    run.stderr.close()


def test_evaluate_a_classifier(regard, model, labelled, tmp_path) -> None:
    result = regard("evaluate", "classifier", labelled, "--model", model, "--json", "--out", tmp_path / "named.txt")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["texts"] == 150 and report["accuracy"] > 0.95 and report["f1 of 'yes'"] > 0.95
    assert {"loss", "f1", "matthews", "seconds"} < set(report)
    assert len((tmp_path / "named.txt").read_text().splitlines()) == 150
    result = regard("evaluate", "classifier", "-", "--model", model, stdin="good cat\tyes\nred\tmaybe\n")
    assert result.code == 2
    assert "evaluate: standard input, line 2 must have a label among 'no', 'yes', got 'maybe'." in result.err


def test_evaluate_a_language_model(regard, language, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 5)
    whole = json.loads(regard("evaluate", "language-model", tmp_path / "a.txt", "--model", language, "--json").out)
    assert whole["documents"] == 1 and whole["tokens"] == 96 and 7.5 < whole["bits_per_byte"] < 8.8
    lines = regard(
        "evaluate", "language-model", tmp_path / "a.txt", "--model", language, "--per", "line", "--stride", "32"
    )
    assert "documents: 5\ntokens: 95\n" in lines.out and "perplexity: " in lines.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stride", "33"], "--stride must be from 1 to 32, the length of a window, got 33."),
        (["--length", "99"], "--length must be from 2 to 32, got 99."),
        (["--per", "word"], "--per must be one of 'file', 'line', 'paragraph', got 'word'."),
        (["--batch", "0"], "--batch must be an int of at least 1, got 0."),
        (["--precision", "half"], "--precision must be one of"),
    ],
)
def test_options_that_an_evaluation_rejects(regard, language, tmp_path, arguments, sentence) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n")
    result = regard("evaluate", "language-model", tmp_path / "a.txt", "--model", language, *arguments)
    assert result.code == 2 and f"regard: evaluate: {sentence}" in result.err


def test_folders_that_are_no_classifiers(regard, language, model, tmp_path) -> None:
    encoder = EncoderLM(EncoderLMConfig(260, width=16, layers=1, score="cosine"))
    save(PairClassifier(encoder, ["a", "b"]), tmp_path / "pairs")
    shutil.copytree(model, tmp_path / "none")
    (tmp_path / "none" / "tokenizer.json").unlink()
    shutil.copytree(model, tmp_path / "fits")
    Tokenizer.learn([f"{word}{i}" for i in range(99) for word in WORDS], 320).save(tmp_path / "fits")
    cases = {
        language: f"classify: {language} is a language model: use `regard generate --model {language}`.",
        tmp_path / "pairs": "is a text-pair classifier: use `regard embed --model",
        tmp_path / "nowhere": "--model must be the folder of a classifier, got no such folder",
        tmp_path / "none": "have a tokenizer.json",
        tmp_path / "fits": "must have a tokenizer of at most",
        "english-french": "is a translation model: use `regard translate --model english-french`.",
    }
    for folder, sentence in cases.items():
        result = regard("classify", "--model", folder, "text")
        assert result.code == 2 and sentence in result.err and "Traceback" not in result.err, result.err
    result = regard("evaluate", "classifier", "-", "--model", tmp_path / "pairs", stdin="a\tb\n")
    assert result.code == 2 and "is a text-pair classifier: use `regard embed --model" in result.err


def test_lines_that_are_refused(regard, model, labelled, tmp_path) -> None:
    for content, sentence in (
        (b"a\tx\nb\tx\n", "must have"),
        (b"text without a label\n", "line 1 must have 2 tab-separated columns: text, label, got 1"),
        (b"\x00\x01\t\n", "must be text in UTF-8, got a binary file"),
        (b"", "must have lines with a text and a label, got an empty file"),
    ):
        (tmp_path / "bad.tsv").write_bytes(content)
        result = regard("train", "classifier", "--data", tmp_path / "bad.tsv", "--out", tmp_path / "out", *SMALL)
        assert result.code == 2 and sentence in result.err and not (tmp_path / "out").exists(), result.err
    result = regard("classify", "--model", model, "--data", labelled, "text")
    assert result.code == 2 and "--data must be left out if texts are given" in result.err
    result = regard("classify", "--model", model, "--pairs", stdin="one\ttwo\nthree\n")
    assert result.code == 2 and "standard input, line 2 must have two texts separated by a tab" in result.err
    result = regard("classify", "--model", model, stdin=b"caf\xe9\n")
    assert result.code == 2 and "standard input, line 1 must be text in UTF-8" in result.err
    result = regard("train", "classifier", "--out", tmp_path / "out")
    assert result.code == 2 and "--data is required: lines of text, tab, label." in result.err


def test_options_are_shown_and_a_run_goes_on(regard, labelled, model, tmp_path) -> None:
    shown = regard(
        "train", "classifier", "--out", tmp_path / "out", "--show-options", "--start", model, "--tune", "lora"
    )
    assert shown.code == 0 and 'tune = "lora"' in shown.out and "[lora]" in shown.out
    out = ["train", "classifier", "--out", tmp_path / "out"]
    done = regard(*out, "--data", labelled, *SMALL, "--steps", "3")
    assert done.code == 0 and "Ended after step 3" in done.out and "regard classify --model" in done.out
    again = regard(*out, "--data", labelled, *SMALL)
    assert again.code == 2 and "or be resumed (--resume)" in again.err
    on = regard(*out, "--resume", "--steps", "5")
    assert on.code == 0 and "steps changed from 3 to 5" in on.out and "Ended after step 5" in on.out, on.err
    other = regard(*out, "--resume", "--epochs", "5")
    assert other.code == 2 and "--epochs must be 20.0, as the run that is resumed began, got 5.0." in other.err
