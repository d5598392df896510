"""``regard train``, ``translate`` and ``evaluate``, as a new user runs them on pairs of their own."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch
from pages import Page

from regard_lab.data.pairs import read_pairs
from regard_lab.generation import sequence_model as sequences
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import folders as files
from regard_lab.tasks.translation.metrics import bleu
from regard_lab.training.learner import Learner

pytestmark = pytest.mark.slow

WORDS = {"one": "un", "two": "deux", "red": "rouge", "blue": "bleu", "cat": "chat", "dog": "chien", "sees": "voit"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Sentences of a language of seven words, and their translations word by word."""
    drawn = random.Random(0)
    lines = set()
    while len(lines) < 400:
        chosen = [drawn.choice(list(WORDS)) for _ in range(drawn.randint(1, 5))]
        lines.add(f"{' '.join(chosen)}\t{' '.join(WORDS[word] for word in chosen)}")
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("\n".join(sorted(lines)) + "\n\tempty\n", encoding="utf-8")
    return path


SMALL = [
    "--preset", "small", "--vocabulary-size", "60", "--batch-tokens", "400", "--learning-rate", "0.003",
    "--set", "training.schedule=constant",
    "--set", "model.embedding=64", "--set", "model.encoder=64", "--set", "model.decoder=128",
    "--set", "training.label_smoothing=0.0",
    "--set", "model.features=64", "--set", "training.warmup=20", "--set", "training.validate_every=120",
    "--set", "training.precision=float32", "--set", "training.save_every=20", "--set", "data.held_out=30",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(pairs, tmp_path_factory) -> Path:
    """A model that learned it, trained by the command itself."""
    import regard_cli

    out = tmp_path_factory.mktemp("model") / "out"
    torch.manual_seed(0)
    with pytest.raises(SystemExit) as caught:
        regard_cli.main(["train", "translation", "--data", str(pairs), "--out", str(out), "--steps", "360", *SMALL])
    assert not caught.value.code
    return out


def test_from_pairs_to_a_sentence_with_its_alignment(regard, model) -> None:
    result = regard("translate", "--model", model, "one red cat sees dog", "--alignment")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "un rouge chat voit chien"
    assert any(line.startswith("rouge") for line in lines) and "attention:" in lines[-1]


def test_the_folder_holds_everything(model) -> None:
    names = {path.name for path in model.iterdir()}
    assert {"config.json", "model.safetensors", "source.json", "target.json", "options.toml", "checkpoints"} <= names
    options = tomllib.loads((model / "options.toml").read_text(encoding="utf-8"))
    assert options["training"]["steps"] == 360 and options["model"]["decoder"] == 128
    with (model / "log" / "metrics.csv").open(encoding="utf-8") as file:
        names = next(csv.reader(file))
    assert {"step", "loss", "valid_loss", "valid_bleu"} <= set(names) and "epoch" not in names


def test_a_filter_from_standard_input(regard, model) -> None:
    result = regard("translate", "--model", model, stdin="red dog\n\nblue cat\n")
    assert result.out.splitlines() == ["rouge chien", "", "bleu chat"]


def test_memory_that_is_full(regard, model, pairs, monkeypatch) -> None:
    def full(*given, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(sequences, "search", full)
    for command in (["translate", "red dog"], ["evaluate", "translation", pairs]):
        result = regard(*command, "--model", model, "--beams", "4", "--batch", "9")
        assert result.code == 2 and "Traceback" not in result.err
        why = "out of memory: lower batch (now 9) or beams (now 4)."
        assert result.err.splitlines()[-1] == f"regard: {command[0]}: {why}", "no name of a function"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"\xef\xbb\xbfred dog\n", "rouge chien\n"),
        (b"red\rdog\nblue cat", "rouge chien\nbleu chat\n"),
        (b"red dog\r\n", "rouge chien\n"),
        (gzip.compress(b"red dog\n"), "rouge chien\n"),
    ],
    ids=["a byte order mark", "a carriage return within", "lines of Windows", "gzip"],
)
def test_a_line_in_is_a_line_out(regard, model, given, shown) -> None:
    assert regard("translate", "--model", model, stdin=given).out == shown


def test_a_line_that_is_no_text_is_named(regard, model) -> None:
    result = regard("translate", "--model", model, stdin=b"red dog\ncaf\xe9\n")
    assert result.code == 2
    assert "regard: translate: standard input, line 2 must be text in UTF-8, got byte 0xe9 at column 4" in result.err


def test_json(regard, model) -> None:
    (record,) = map(json.loads, regard("translate", "--model", model, "--json", "red dog").out.splitlines())
    assert record["text"] == "rouge chien"
    assert [len(row) for row in record["alignment"]] == [2, 2]
    for row in record["alignment"]:
        assert sum(row) == pytest.approx(1, abs=1e-4)
    assert record["alignment"][0][0] > 0.5 > record["alignment"][0][1]


def test_every_sentence_of_a_line_is_translated(regard, model) -> None:
    whole = regard("translate", "--model", model, "red dog. blue cat. one dog", "--alignment")
    assert whole.out.splitlines()[0] == " ".join(
        regard("translate", "--model", model, each).out.strip() for each in ("red dog.", "blue cat.", "one dog")
    )
    (record,) = map(json.loads, regard("translate", "--model", model, "--json", "red dog. blue cat").out.splitlines())
    assert [len(row) for row in record["alignment"]] == [len(record["source_words"])] * len(record["words"])
    assert regard("translate", "--model", model, "--whole", "red dog. blue cat").code == 0


def test_n_best_and_samples(regard, model) -> None:
    best = regard("translate", "--model", model, "--n-best", "3", "red dog").out.splitlines()
    scores = [float(line.split("\t")[0]) for line in best]
    assert len(best) == 3 and scores == sorted(scores, reverse=True)
    assert len({line.split("\t")[1] for line in best}) == 3
    one, other = (regard("translate", "--model", model, "--sample", "--seed", seed, "red dog").out for seed in (1, 1))
    assert one == other


def test_precision(regard, model) -> None:
    assert regard("translate", "--model", model, "--precision", "bfloat16", "red dog").out == "rouge chien\n"
    for command in (["translate", "red dog"], ["evaluate", "translation", "pairs.tsv"]):
        result = regard(*command, "--model", model, "--precision", "bfloat61")
        assert result.code == 2 and "did you mean 'bfloat16'" in result.err


def test_the_alignment_of_a_translation_that_is_given(regard, model) -> None:
    result = regard("translate", "--model", model, "red dog", "--given", "chien rouge", "--alignment")
    lines = result.out.splitlines()
    assert result.code == 0 and lines[0] == "chien rouge"
    (record,) = map(
        json.loads,
        regard("translate", "--model", model, "red dog", "--given", "rouge chien", "--json").out.splitlines(),
    )
    (own,) = map(json.loads, regard("translate", "--model", model, "red dog", "--json").out.splitlines())
    assert record["text"] == own["text"] and record["score"] == pytest.approx(own["score"], abs=1e-4)
    pairs = {
        ("red", "dog", "--given", "rouge"): "--given must be repeated once per text, 2 times, got 1.",
        ("red", "--given", ""): "--given must not be empty.",
        ("red", "dog", "--given", "rouge", "--given", " "): "--given must not be empty.",
        ("--given", "rouge"): "--plot, --html and --given require texts as arguments.",
        (
            "red",
            "--given",
            "rouge",
            "--n-best",
            "2",
        ): "--given cannot be combined with --beams, --n-best, --no-repeat, --sample",
        ("red", "--given", "rouge", "--precision", "bfloat16"): "--given cannot be combined with --beams",
        ("red", "--given", "rouge", "--keep-unknown"): "--given cannot be combined with --beams",
    }
    for arguments, why in pairs.items():
        refused = regard("translate", "--model", model, *arguments, stdin="red\n")
        assert refused.code == 2 and f"regard: translate: {why}" in refused.err, refused.err


def test_pictures(regard, model, tmp_path) -> None:
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    assert regard("translate", "--model", model, "red dog", "--plot", png, "--html", html).code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "rouge" in Page(html.read_text(encoding="utf-8")).described["texts"][0]["tokens"]
    result = regard("translate", "--model", model, "red \udce9 dog", "--plot", png, "--html", html)
    name = Page(html.read_text(encoding="utf-8")).described["layers"][0]["name"]
    assert result.code == 0 and name == f"red � dog → {result.out.strip()}", result.err
    png.unlink()
    result = regard("translate", "--model", model, " ", "--plot", png)
    assert (result.code, result.out) == (0, "\n") and not png.exists()
    assert f"regard: the output is empty, so there is no picture: {png}" in result.err
    (tmp_path / "folder.png").mkdir()
    for path, why in (
        (tmp_path / "folder.png", "Is a directory"),
        (tmp_path / "no" / "a.png", "No such file or directory"),
    ):
        result = regard("translate", "--model", model, "red dog", "--plot", path)
        assert (result.code, result.out, result.err) == (2, "", f"regard: {path} cannot be used: {why}\n")


def test_a_sentence_without_quotes_is_told(regard, model) -> None:
    result = regard("translate", "--model", model, "red", "dog")
    assert result.code == 0 and len(result.out.splitlines()) == 2
    assert result.err == "regard: each argument is translated separately; put quotes around a sentence\n"
    assert not regard("translate", "--model", model, "red dog", "dog").err


def test_a_sign_that_no_font_has_is_drawn_without_a_word(regard, model, tmp_path) -> None:
    result = regard("translate", "--model", model, "red dog\U0001f9ff", "--plot", tmp_path / "a.png")
    assert result.code == 0 and not result.err, result.err


def test_evaluation(regard, model, pairs) -> None:
    result = regard("evaluate", "translation", pairs, "--model", model, "--json")
    found = json.loads(result.out.splitlines()[-1])
    (bleu,) = [value for name, value in found.items() if name.startswith("BLEU|")]
    assert bleu > 80
    assert "left out" in result.err or "empty" in result.err
    assert any(name.startswith("chrF") and "version:" in name for name in found)
    refused = regard("evaluate", "translation", pairs, "--model", model, "--out", "nowhere/out.txt")
    assert (refused.code, refused.err) == (2, "regard: nowhere/out.txt cannot be used: No such file or directory\n")


def test_a_model_of_lower_case_is_scored_in_lower_case(regard, pairs, tmp_path) -> None:
    loud = tmp_path / "loud.tsv"
    loud.write_text(pairs.read_text(encoding="utf-8").upper(), encoding="utf-8")
    options = ["--data", loud, "--out", tmp_path / "out", "--steps", "120", "--set", "vocabularies.lowercase=true"]
    assert regard("train", "translation", *options, *SMALL).code == 0
    scored = ["--model", tmp_path / "out", "--tokenized", "--json", "--out", tmp_path / "said"]
    result = regard("evaluate", "translation", loud, *scored)
    found = json.loads(result.out.splitlines()[-1])
    scores = {name: value for name, value in found.items() if "|" in name}
    assert len(scores) == 3 and all("case:lc" in name for name in scores)
    said = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
    right = list(read_pairs(str(loud), lowercase=True).references().values())
    (value,) = [value for name, value in scores.items() if "tok:13a" in name]
    assert value == round(bleu(said, right).value, 2) > 0


@pytest.mark.parametrize("command", ["train translation", "train classifier", "compare"])
def test_help_lists_each_option_under_its_heading(regard, monkeypatch, command) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = regard(*command.split(), "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    options = [line for line in lines if re.match(r"│[ *]+--.* (<|NAME=)", line)]
    assert len(options) == {"train translation": 25, "train classifier": 29, "compare": 20}[command]
    panels = [re.search(r"╭─ (\w+)", line)[1] for line in lines if line.startswith("╭")]
    assert {"Options", "Data", "Model", "Training"} <= set(panels) and len(panels) == len(set(panels))


def interrupt_while_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C be pressed when the model is about to be saved."""
    real = files.write_together

    def interrupted(written) -> None:
        if any(path.name == "config.json" for path in written):
            signal.raise_signal(signal.SIGINT)
        real(written)

    monkeypatch.setattr(files, "write_together", interrupted)


class TestOptions:
    def test_a_file_flags_and_settings(self, regard, pairs, tmp_path) -> None:
        path = tmp_path / "options.toml"
        path.write_text('preset = "small"\n[training]\nsteps = 7\nclip = 2.0\n[data]\nheld_out = 5\n', encoding="utf-8")
        shown = regard(
            "train", "translation", "--out", tmp_path / "x", "--options", path, "--steps", "9", "--attention", "local",
            "--set", "training.clip=0.5", "--show-options",
        )  # fmt: skip
        assert shown.code == 0, shown.err
        options = tomllib.loads(shown.out)
        assert (options["training"]["steps"], options["training"]["clip"], options["data"]["held_out"]) == (9, 0.5, 5)
        assert options["model"] == {"attention": "general", "scope": "local-p"} and options["preset"] == "small"
        assert re.search(r"^patience = 0 +# stop after this many validations without improvement", shown.out, re.M)
        assert re.search(r'^schedule = "linear" +# .*: inverse_sqrt, cosine, linear, constant$', shown.out, re.M)
        rest = shown.out[shown.out.index("# What else [model] may have") :].splitlines()
        assert all(line.startswith("# ") for line in rest) and 'wiring = "after"' in "".join(rest)
        assert not any(line.startswith("# attention") for line in rest)
        path.write_text(shown.out, encoding="utf-8")
        assert regard("train", "translation", "--options", path, "--show-options").out == shown.out  # without --out

    @pytest.mark.parametrize(
        ("arguments", "rate"),
        [
            (["--preset", "small"], 4e-3),
            (["--preset", "small", "--learning-rate", "0.001"], 1e-3),
            (["--preset", "small", "--model", "transformer"], 2e-3),
            ([], 2e-3),
        ],
    )
    def test_a_preset_has_its_own_learning_rate(self, regard, tmp_path, arguments, rate) -> None:
        shown = regard("train", "translation", "--out", tmp_path / "x", "--show-options", *arguments)
        assert tomllib.loads(shown.out)["training"]["learning_rate"] == rate

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--set", "training.stpes=3"], r"did you mean 'steps'"),
            (["--set", "model.decoders=3", "--data", "DATA"], r"did you mean 'decoder'"),
            (["--set", "training"], "--set must be NAME=VALUE, such as training.clip=0.5, got 'training'"),
            (["--steps", "0"], "steps must be an int of at least 1, got 0"),
            (["--model", "rnm"], "did you mean 'rnn'"),
            (["--preset", "smal", "--data", "DATA"], "did you mean 'small'"),
            (["--attention", "aditive", "--data", "DATA"], "--attention must be one of 'additive', 'concat', "),
            (["--attention", "locall"], "'hard', 'laplacian', 'local', 'location', 'none', "),
            (["--attention", "transformer"], "--attention must be a score; choose the kind of model with --model"),
            (["--model", "transformer", "--attention", "none"], "must be a score for a Transformer, got 'none'"),
            (["--vocabulary", "bpee", "--data", "nowhere"], "did you mean 'bpe'"),
            (
                ["--model", "transformer", "--attention", "hard"],
                "attention must be a score for a Transformer, got 'hard'",
            ),
            (["--set", "training.clip=abc"], "clip must be a finite number of at least 0, got 'abc'"),
            (["--set", "training=5"], "training must be a table of options, got 5"),
            (["--set", "model=5"], "model must be a table of options, got 5"),
            (["--set", "data=5"], "data must be a table"),
            (["--set", "training.metric=wer"], "training.metric must be loss or one of bleu, chrf for translation"),
            (
                ["--model", "transformer", "--set", "model.tied=all"],
                "model.tied must be 'none' or 'target' without a joint",
            ),
            (["--set", "training.devices=2"], "training.devices must be 1 without torchrun, got 2"),
            (["--valid-targets", "x", "--data", "DATA"], "valid must be given with valid_targets"),
            (["--vocabulary", "words", "--data", "DATA"], "--vocabulary must be one of"),
            (
                ["--vocabulary", "characters", "--vocabulary-size", "90"],
                "--vocabulary-size must be left out for characters, all of which count, got 90",
            ),
            (
                ["--set", "vocabularies.kind=unigram", "--set", "vocabularies.dropout=0.1"],
                "vocabularies.dropout must be left out but for bpe, which has merges, got 0.1",
            ),
            (["--set", "vocabularies.dropout=1.0"], "vocabularies.dropout must be a number in [0, 1), got 1.0"),
            (
                ["--set", "model.tied=all"],
                "model.tied must be 'none' or 'target' without a joint vocabulary, got 'all'",
            ),
            (
                ["--valid", "x", "--set", "data.held_out=7"],
                "data.held_out must be left out where valid is given, got 7",
            ),
            (["--data", "DATA", "--set", "data.held_out=9999"], "held_out must be from 1 to"),
            (["--targets", "x"], "train: --data must be given with targets, got none"),
            (
                ["--data", "-", "--valid", "-"],
                "valid must be a file where standard input is something else, got - as data",
            ),
            (
                ["--attention", "dot", "--set", "model.attention=general"],
                "model.attention must be left out with --attention, got 'general'",
            ),
            (
                ["--model", "transformer", "--attention", "dot", "--set", "model.score=cosine"],
                "model.score must be left out with --attention, got 'cosine'",
            ),
            (["--set", "model.window=3"], "model.window must be left out without scope 'local-m' or 'local-p', got 3"),
            (["--set", "model.max_length=9"], "model.max_length must be left out without attention 'location', got 9"),
            (
                ["--model", "transformer", "--set", "model.max_length=9"],
                "model.max_length must be left out without positions 'learned' or score 'location', got 9",
            ),
            (["--vocabulary-size", "5", "--data", "DATA"], "size must be at least"),
            (["--vocabulary-size", "0", "--data", "DATA"], "size must be at least"),
            (["--set", "data.held_out=0"], "train: data.held_out must be an int of at least 1, got 0"),
            (["--set", "training.strategy=dpp", "--data", "nowhere"], "did you mean 'ddp'"),
            (["--set", "training.accelerator=gpus", "--data", "nowhere"], "did you mean 'gpu'"),
            (
                ["--set", "training.accelerator=tpu", "--data", "nowhere"],
                "accelerator must be available on this machine, got 'tpu'",
            ),
            ([], "--data is required: a file of tab-separated pairs"),
            (["--data", "nowhere.tsv"], "nowhere.tsv"),
            (["--options", "nowhere.toml"], "train: nowhere.toml must exist, got no such file"),
        ],
    )
    def test_wrong_options(self, regard, pairs, tmp_path, arguments, message) -> None:
        arguments = [str(pairs) if each == "DATA" else each for each in arguments]
        result = regard("train", "translation", "--out", tmp_path / "x", *arguments)
        assert result.code == 2 and "Traceback" not in result.err
        assert message in result.err.replace("\n", " ")
        assert not (tmp_path / "x" / "checkpoints").exists()

    @pytest.mark.parametrize("name", ["kind=unigram", "size=90", "joint=true"])
    def test_pronunciation_has_symbols_of_its_own(self, regard, pairs, tmp_path, name) -> None:
        result = regard("train", "pronunciation", "--out", tmp_path, "--data", pairs, "--set", f"vocabularies.{name}")
        said = f"vocabularies.{name.split('=')[0]} must be left out for pronunciation, where letters and phonemes are"
        assert result.code == 2 and said in result.err.replace("\n", " ")

    def test_attention_is_given_once(self, regard, tmp_path) -> None:
        path = tmp_path / "options.toml"
        path.write_text('attention = "local"\n[model]\nattention = "dot"\n', encoding="utf-8")
        arguments = ["train", "translation", "--out", tmp_path / "x", "--options", path, "--show-options"]
        result = regard(*arguments)
        assert result.code == 2 and f"model.attention must be left out in {path}, got 'dot'" in result.err
        path.write_text('attention = "additive"\n', encoding="utf-8")
        shown = regard(*arguments, "--set", "model.attention=dot")
        assert tomllib.loads(shown.out)["model"] == {"attention": "dot"}, "a setting goes before the file"

    def test_sources_on_both_sides_are_told(self, regard, pairs, tmp_path) -> None:
        lines = pairs.read_text(encoding="utf-8").splitlines()
        (tmp_path / "valid.tsv").write_text("\n".join([*lines[:3], "never seen\tx"]), encoding="utf-8")
        result = regard(
            "train", "translation", "--data", pairs, "--valid", tmp_path / "valid.tsv", "--out", tmp_path / "x",
            "--steps", "2", *SMALL[:-2],
        )  # fmt: skip
        assert result.code == 0, result.err
        assert "3 of the 4 validation sources are also in the training data: validation scores will" in result.out

    def test_pairs_given_twice_count_once_or_twice(self, regard, pairs, tmp_path) -> None:
        lines = [line for line in pairs.read_text(encoding="utf-8").splitlines() if line[0] != "\t"]
        (tmp_path / "twice.tsv").write_text("\n".join([*lines, *lines[:50]]), encoding="utf-8")
        told = {}
        for number, given in enumerate(([], ["--set", "data.duplicates=true"])):
            arguments = ["--data", tmp_path / "twice.tsv", "--out", tmp_path / str(number), "--steps", "1", *SMALL]
            result = regard("train", "translation", *arguments, *given)
            assert result.code == 0, result.err
            told[number] = result.out
        assert f"{len(lines)} pairs of {len(lines) + 50} lines" in told[0]
        assert "skipped, duplicate pairs: 50" in told[0]
        assert f"{len(lines) + 50} pairs of {len(lines) + 50} lines" in told[1]
        assert "identical" not in told[1]

    def test_what_to_type_next_is_what_works(self, regard, pairs, tmp_path) -> None:
        out = tmp_path / "a folder"
        options = ["--attention", "none", "--set", "vocabularies.dropout=0", "--out", out, "--steps", "1", *SMALL]
        result = regard("train", "translation", "--data", "-", *options, stdin=pairs.read_bytes())
        assert result.code == 0, result.err
        word, *arguments = shlex.split(result.out.splitlines()[-1].partition("Now try:  regard ")[2])
        again = regard(word, *arguments)
        assert again.code == 0, again.err

    def test_an_interrupted_run_of_standard_input_needs_it_again(self, regard, pairs, tmp_path, monkeypatch) -> None:
        interrupt_while_saving(monkeypatch)
        options = ["--data", "-", "--out", tmp_path, "--steps", "1", *SMALL]
        result = regard("train", "translation", *options, stdin=pairs.read_bytes())
        assert f"regard train translation --out {tmp_path} --resume < the same pairs" in result.out

    def test_an_unknown_task(self, regard, tmp_path) -> None:
        result = regard("train", "translaton", "--out", tmp_path)
        assert result.code == 2 and "Did you mean 'translation'" in " ".join(result.err.split())

    def test_threads_that_cannot_be_had(self, regard, pairs, tmp_path, monkeypatch) -> None:
        arguments = ["train", "translation", "--data", pairs, "--out", tmp_path / "out", "--steps", "2", *SMALL]
        result = regard(*arguments, "--set", "training.threads=100000")
        assert result.code == 2 and "train: training.threads must be an int from 0 to 1,024, got 100000." in result.err
        real, started = threading.Thread.start, []

        def start(thread) -> None:
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            real(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            result = regard(*arguments, "--set", "training.threads=9")
        assert result.code == 2 and result.err == (
            "regard: train: training.threads must be at most 4, the machine's limit, got 9.\n"
        )
        assert not any(thread.is_alive() for thread in started)

    def test_a_run_that_learns_nothing_says_so(self, regard, pairs, tmp_path) -> None:
        few = ["train", "translation", "--data", pairs, "--out", tmp_path / "out", "--steps", "2", *SMALL]
        told = regard(*few, "--learning-rate", "1e-6").out
        assert "no better than guessing by frequency, " in told
        assert "It has learned no more than how often each symbol is written. Continue with --resume" in told
        assert "a lower --learning-rate (now 1e-06)" in told and "training.metric=chrf" not in told


class TestResume:
    def test_a_longer_run(self, regard, pairs, tmp_path) -> None:
        first = regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "10", *SMALL)
        assert first.code == 0, first.err
        again = regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "10", *SMALL)
        assert again.code == 2 and "--resume" in again.err
        on = regard("train", "translation", "--out", tmp_path, "--resume", "--steps", "15")
        assert on.code == 0, on.err
        assert "steps changed from 10 to 15" in on.out and "Ended after step 15" in on.out
        assert "resuming after step 10\n" in on.out and "resuming" not in first.out
        assert tomllib.loads((tmp_path / "options.toml").read_text(encoding="utf-8"))["training"]["steps"] == 15

    @pytest.mark.campaign
    def test_seconds_count_from_this_start(self, regard, pairs, tmp_path) -> None:
        few = ["--seconds", "2", "--set", "training.validate_every=100000"]
        first = regard("train", "translation", "--data", pairs, "--out", tmp_path, *SMALL, *few)
        assert first.code == 0, first.err
        last = tmp_path / "checkpoints" / "last.ckpt"
        used = torch.load(last, weights_only=True)["callbacks"]["_Stop"]["used"]
        for option in (["--seconds", "1.5"], ["--set", "training.seconds=1.5"]):
            before, used = used, None
            on = regard("train", "translation", "--out", tmp_path, "--resume", *option)
            assert on.code == 0, on.err
            begun, ended = (int(re.search(rf"{said} step ([\d,]+)", on.out)[1]) for said in ("after", "Ended after"))
            assert ended > begun and "the time is up" in on.out
            used = torch.load(last, weights_only=True)["callbacks"]["_Stop"]["used"]
            assert before + 1.49 <= used < before + 20, "a busy machine may take long for its last step"
            budget = tomllib.loads((tmp_path / "options.toml").read_text(encoding="utf-8"))["training"]["seconds"]
            assert budget == round(before + 1.5, 2), "the file counts all starts"
        again = regard("train", "translation", "--out", tmp_path, "--resume")
        assert again.code == 0 and "the time is up" in again.out, "without the option, the whole budget counts"
        assert torch.load(last, weights_only=True)["callbacks"]["_Stop"]["used"] == pytest.approx(used, abs=0.1)
        last.write_bytes(b"nothing")
        damaged = regard("train", "translation", "--out", tmp_path, "--resume", "--seconds", "1")
        assert damaged.code == 2 and f"{last} is damaged: the run cannot be resumed." in damaged.err

    def test_an_interrupt_while_the_model_is_saved(self, regard, pairs, tmp_path, monkeypatch) -> None:
        with monkeypatch.context() as patch:
            interrupt_while_saving(patch)
            result = regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "4", *SMALL)
        assert result.code == 130 and "Traceback" not in result.err
        assert f"Stopped. Resume with:  regard train translation --out {tmp_path} --resume" in result.out
        saved = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
        assert SequenceModel.load(tmp_path).about["training"]["steps"] == 4, "it was saved to the end"
        assert regard("train", "translation", "--out", tmp_path, "--resume").code == 0
        assert (tmp_path / "model.safetensors").read_bytes() == saved["model.safetensors"]

    def test_a_disk_that_is_full_when_the_model_is_saved(self, regard, pairs, tmp_path, monkeypatch) -> None:
        real = files.write_together

        def full(written) -> None:
            if any(path.name == "config.json" for path in written):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(written)

        monkeypatch.setattr(files, "write_together", full)
        result = regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "4", *SMALL)
        assert result.code == 2 and "Traceback" not in result.err
        assert f"cannot write the model to {tmp_path}: No space left on device. Training is complete" in result.err
        assert not (tmp_path / "config.json").exists() and (tmp_path / "checkpoints" / "last.ckpt").exists()

    def test_data_that_is_gone(self, regard, pairs, tmp_path) -> None:
        copied = tmp_path / "pairs.tsv"
        copied.write_bytes(pairs.read_bytes())
        out = tmp_path / "out"
        assert regard("train", "translation", "--data", copied, "--out", out, "--steps", "4", *SMALL).code == 0
        copied.unlink()
        result = regard("train", "translation", "--out", out, "--resume", "--steps", "6")
        assert result.code == 2 and f"{copied} must exist, got no such file" in result.err

    def test_what_may_not_change(self, regard, pairs, tmp_path) -> None:
        assert regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "5", *SMALL).code == 0
        for arguments, message in (
            (["--batch-tokens", "64"], "--batch-tokens must be 400, as the run that is resumed began"),
            (["--show-options"], "--show-options must be left out with --resume"),
            (["--preset", "base"], "preset must be left out with --resume"),
        ):
            result = regard("train", "translation", "--out", tmp_path, "--resume", *arguments)
            assert result.code == 2 and message in result.err.replace("\n", " ")
        text = pairs.read_text(encoding="utf-8")
        try:
            pairs.write_text(text.replace("un ", "une ", 1), encoding="utf-8")
            changed = regard("train", "translation", "--out", tmp_path, "--resume")
            assert changed.code == 2 and "data must be the pairs of the original run" in changed.err
        finally:
            pairs.write_text(text, encoding="utf-8")

    def test_options_that_were_edited(self, regard, pairs, tmp_path, monkeypatch) -> None:
        options = tmp_path / "options.toml"
        first = ["--data", pairs, "--out", tmp_path, "--steps", "2", *SMALL]
        assert regard("train", "translation", *first).code == 0
        saved = options.read_text(encoding="utf-8")
        for line, other, place in (
            ("batch_tokens = 400", "batch_tokens = 64", "training.batch_tokens"),
            ("size = 60", "size = 61", "vocabularies.size"),
            ("encoder = 64", "encoder = 32", "model.encoder"),
            ("held_out = 30", "held_out = 31", "data.held_out"),
        ):
            assert line in saved
            options.write_text(saved.replace(line, other), encoding="utf-8")
            result = regard("train", "translation", "--out", tmp_path, "--resume")
            assert result.code == 2 and f"regard: train: {place}" in result.err, result.err
            was, now = line.split()[-1], other.split()[-1]
            assert f"be {was}, as " in result.err and f", got {now}." in result.err
        options.write_text(saved.replace("steps = 2", "steps = 3"), encoding="utf-8")
        before = torch.get_num_threads()
        monkeypatch.setattr(torch, "get_num_threads", lambda: before + 1)
        set_to = []
        monkeypatch.setattr(torch, "set_num_threads", set_to.append)
        result = regard("train", "translation", "--out", tmp_path, "--resume")
        assert result.code == 0, result.err
        assert "steps changed from 2 to 3" in result.out and f"threads: {before}, as when the run started" in result.out
        assert before in set_to
        run = tmp_path / "run.json"
        run.write_text(
            run.read_text(encoding="utf-8").replace('"bfloat16": false', '"bfloat16": true'), encoding="utf-8"
        )
        result = regard("train", "translation", "--out", tmp_path, "--resume")
        assert (
            "products were in bfloat16 when the run started and are in float32 here: results will differ slightly"
            in result.out
        )
        run.write_text(run.read_text(encoding="utf-8").replace('"bfloat16"', '"bfloat"', 1), encoding="utf-8")
        result = regard("train", "translation", "--out", tmp_path, "--resume")
        assert result.code == 2 and f"{run} is damaged: the run cannot be resumed" in result.err

    def test_an_interrupt_in_a_step(self, regard, pairs, tmp_path, monkeypatch) -> None:
        real, steps = Learner.training_step, []

        def interrupted(self, *given):
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)
            return real(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Learner, "training_step", interrupted)
            out = tmp_path / "two words"
            result = regard("train", "translation", "--data", pairs, "--out", out, "--steps", "6", *SMALL)
        assert result.code == 130 and "Traceback" not in result.err
        said, _, command = result.out.splitlines()[-1].partition(" Resume with:  regard ")
        assert said == "Stopped after step 3; the model is written at the end."
        on = regard(*shlex.split(command))
        assert on.code == 0 and "resuming after step 3\n" in on.out, on.err
        whole = regard("train", "translation", "--data", pairs, "--out", tmp_path / "whole", "--steps", "6", *SMALL)
        assert whole.code == 0, whole.err
        one, other = ((folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "whole"))
        assert one == other

    def test_a_run_that_was_killed_before_it_was_saved(self, regard, pairs, tmp_path) -> None:
        assert regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "1", *SMALL).code == 0
        (tmp_path / "checkpoints" / "last.ckpt").unlink()
        result = regard("train", "translation", "--out", tmp_path, "--resume")
        assert result.code == 2 and "has no checkpoints/last.ckpt: start the run again without --resume" in result.err

    def test_a_folder_without_a_run(self, regard, tmp_path) -> None:
        result = regard("train", "translation", "--out", tmp_path, "--resume")
        assert result.code == 2 and "be the folder of a run, got no options.toml in it" in result.err


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", [["--model", "transformer"], ["--attention", "hard"], ["--attention", "location"]])
def test_other_mechanisms_are_trained_saved_and_loaded(regard, pairs, tmp_path, kind) -> None:
    small = ["--set", "model.width=32", "--set", "model.heads=2", "--set", "model.feedforward=64"]
    chosen = SMALL[2:] if "transformer" not in kind else [*SMALL[2:6], *small]
    chosen = [*chosen, "--set", "model.max_length=4"] if "location" in kind else chosen
    result = regard("train", "translation", "--data", pairs, "--out", tmp_path / "out", "--steps", "4", *kind, *chosen)
    assert result.code == 0, result.err
    assert ("skipped, longer than model.max_length" in result.out) == ("location" in kind)
    assert regard("translate", "--model", tmp_path / "out", "red dog").code == 0
    long = tmp_path / "long.tsv"
    long.write_text("red dog\trouge chien\none two red blue cat dog\tun deux rouge bleu chat chien\n", encoding="utf-8")
    told = regard("evaluate", "translation", long, "--model", tmp_path / "out")
    cut = "truncated: 1 of 2 sources; the first, 'one two red blue cat dog', was truncated to the first 4 of 6 "
    assert told.code == 0 and (cut in told.err) == ("location" in kind)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("plain", "chosen"),
    [
        ([], ["--set", "training.schedule=cosine", "--set", "training.tensorboard=true"]),
        ([], ["--set", "training.teacher_forcing=0.5"]),
        (["--set", "model.hard=gumbel"], ["--set", "model.hard=reinforce"]),
        ([], ["--set", "training.precision=bfloat16"]),
        ([], ["--set", "training.accumulate=2"]),
    ],
    ids=["cosine", "teacher forcing", "reinforce", "bfloat16", "accumulate"],
)
def test_ways_of_training_change_what_is_learned(regard, pairs, tmp_path, plain, chosen) -> None:
    found = []
    for name, given in (("plain", plain), ("other", chosen)):
        options = [
            "--data",
            pairs,
            "--out",
            tmp_path / name,
            "--steps",
            "6",
            *SMALL,
            "--set",
            "training.warmup=2",
            *given,
        ]
        result = regard("train", "translation", *options)
        assert result.code == 0, result.err
        found.append(SequenceModel.load(tmp_path / name).model.state_dict())
    assert all(each.isfinite().all() for each in found[1].values())
    assert any(not torch.equal(each, found[0][name]) for name, each in found[1].items() if "baseline" not in name)
    written = list((tmp_path / "other" / "log").glob("events.out.tfevents.*"))
    assert bool(written) == ("training.tensorboard=true" in chosen)


def test_a_run_ends_where_the_loss_no_longer_falls(regard, pairs, tmp_path) -> None:
    options = ["--set", "training.metric=loss", "--set", "training.patience=2", "--set", "training.validate_every=5"]
    chosen = [*SMALL, *options, "--learning-rate", "0", "--steps", "100"]
    result = regard("train", "translation", "--data", pairs, "--out", tmp_path, *chosen)
    assert result.code == 0, result.err
    assert "Ended after step 15: nothing better was found" in result.out


@pytest.mark.campaign
def test_two_processes_train_one_model(pairs, tmp_path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "regard_cli"]
    chosen = [*SMALL, "--set", "training.devices=2", "--set", "training.strategy=ddp"]
    first = ["--data", pairs, "--out", tmp_path / "out", "--steps", "4", "--set", "training.accelerator=cpu", *chosen]
    for arguments, step in ((first, 4), (["--out", tmp_path / "out", "--resume", "--steps", "6"], 6)):
        done = subprocess.run(
            [*start, "train", "translation", *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count(f"Ended after step {step}") == done.stdout.count("Now try:") == 1
    assert SequenceModel.load(tmp_path / "out").predict(["red dog"])[0].score < 0


def test_words_are_learned_in_several_spellings(regard, pairs, tmp_path) -> None:
    said = {}
    for dropout in ("0.0", "0.3"):
        chosen = ["--out", tmp_path / dropout, "--set", f"vocabularies.dropout={dropout}", "--steps", "4", *SMALL]
        result = regard("train", "translation", "--data", pairs, *chosen)
        assert result.code == 0, result.err
        said[dropout] = int(re.search(r"an epoch has ([\d,]+) batches", result.out)[1].replace(",", ""))
    assert said["0.3"] > 4 * said["0.0"]


def shown(regard, *arguments) -> dict:
    result = regard("train", "translation", "--data", "x", "--out", "y", "--show-options", *arguments)
    assert result.code == 0, result.err
    return tomllib.loads(result.out)


def test_attention_replaces_what_a_short_name_in_the_file_stood_for(regard, tmp_path) -> None:
    for name, field, value in (("local", "scope", "local-p"), ("hard", "hard", "gumbel")):
        found = regard("train", "translation", "--data", "x", "--out", "y", "--show-options", "--attention", name)
        assert tomllib.loads(found.out)["model"][field] == value
        (tmp_path / "file.toml").write_text(found.out, encoding="utf-8")
        assert shown(regard, "--options", tmp_path / "file.toml")["model"][field] == value
        replaced = shown(regard, "--options", tmp_path / "file.toml", "--attention", "additive")
        assert replaced["model"] == {"attention": "additive"}


@pytest.mark.parametrize("preset", ["bahdanau2014", "luong2015"])
@pytest.mark.parametrize("attention", ["none", "hard"])
def test_a_preset_without_its_attention(regard, preset, attention) -> None:
    from regard_lab.models import RecurrentConfig

    model = shown(regard, "--preset", preset, "--attention", attention)["model"]
    assert RecurrentConfig.preset(preset, 10, 10, **model).attention == model["attention"]


def test_a_value_of_another_type_is_one_sentence_also_on_resume(regard, model) -> None:
    result = regard("train", "translation", "--out", model, "--resume", "--set", "training.steps=abc")
    assert (result.code, result.err) == (2, "regard: train: training.steps must be an int of at least 1, got 'abc'.\n")


def test_no_model(regard, tmp_path) -> None:
    result = regard("translate", "--model", tmp_path / "none", "hello")
    assert result.code == 2 and "train one with `regard train translation" in result.err


@pytest.mark.campaign
def test_pronunciation_by_the_same_command(regard, tmp_path) -> None:
    words = [a + b + c for a in "bdgk" for b in "aeiou" for c in "mnst"]
    lines = [f"{word}\t{' '.join(letter.upper() for letter in word)}" for word in words]
    (tmp_path / "words.tsv").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "out"
    result = regard(
        "train", "pronunciation", "--data", tmp_path / "words.tsv", "--out", out, "--steps", "360", *SMALL[:2],
        *SMALL[4:],
    )  # fmt: skip
    assert result.code == 0, result.err
    refused = regard("evaluate", "translation", tmp_path / "words.tsv", "--model", out)
    use = f"regard evaluate pronunciation DATA --model {out}"
    assert (refused.code, refused.err) == (2, f"regard: evaluate: {out} is a pronunciation model: use `{use}`.\n")
    scored = regard("evaluate", "pronunciation", tmp_path / "words.tsv", "--model", out, "--json")
    found = json.loads(scored.out.splitlines()[-1])
    assert found["per"] < 10 and found["wer"] < 30


def test_what_looks_wrong_in_pairs_is_told_and_training_goes_on(regard, pairs, tmp_path) -> None:
    path = tmp_path / "pairs.tsv"
    sources, targets = zip(*(line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines()[:-1]))
    mixed = list(targets)
    random.Random(0).shuffle(mixed)
    lines = ["English\tFrench", *map("\t".join, zip(sources, mixed)), "taxi\ttaxi"]
    path.write_text("\n".join(lines), encoding="utf-8")
    options = ["--out", tmp_path / "out", "--steps", "1", *SMALL]
    result = regard("train", "translation", "--data", path, "--valid", pairs, *options[:4], *SMALL[:-2])
    assert result.code == 0, result.err
    told = result.out.splitlines()
    assert told[:4] == [
        f"{path}: 402 pairs of 402 lines",
        "both sides are the same: 1 (first in line 402)",
        "looks like a header row, read as a pair: 1 (first in line 1)",
        f"the targets look shuffled in {path}: by length and shared words, they fit their sources no better than in "
        "random order",
    ]
    assert told[4:6] == [f"{pairs}: 400 pairs of 401 lines", "skipped, one side is empty: 1 (first in line 401)"]
    assert not told[6].startswith("the targets look shuffled")


def test_messages_about_vocabularies_say_which_side_they_mean(regard, pairs, tmp_path) -> None:
    targets = tmp_path / "targets.txt"
    sources = tmp_path / "sources.txt"
    lines = [line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines()[:-1]]
    sources.write_text("".join(f"{source}\n" for source, _ in lines), encoding="utf-8")
    targets.write_text("".join(f"{target} #%&\n" for _, target in lines), encoding="utf-8")
    options = ["--data", sources, "--targets", targets, "--out", tmp_path / "out", "--steps", "1", *SMALL]
    where = f"{sources}, {targets} (training)"
    small = regard("train", "translation", *options, "--set", "vocabularies.size=20")
    assert (
        f"--vocabulary-size must be at least 23, for the 20 characters of the targets of {where}, got 20." in small.err
    )
    large = regard("train", "translation", *options, "--set", "vocabularies.size=900")
    assert large.code == 0, large.err
    for side in ("sources", "targets"):
        assert f"a vocabulary of size 900 is more than the {side} of {where} support: " in large.out
    assert re.search(r"vocabularies of \d+ \(source\) and \d+ \(target\)", large.out)
    options[options.index("--out") + 1] = tmp_path / "joint"
    both = regard("train", "translation", *options, "--joint", "--set", "vocabularies.size=9")
    assert f"characters of both sides of {where}, got 9." in both.err
