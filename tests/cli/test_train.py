"""``regard train``, ``translate`` and ``evaluate``, as a new user runs them on pairs of their own."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path

import pytest
import torch

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
    import regard.cli

    out = tmp_path_factory.mktemp("model") / "out"
    torch.manual_seed(0)
    with pytest.raises(SystemExit) as caught:
        regard.cli.main(["train", "translation", "--data", str(pairs), "--out", str(out), "--steps", "500", *SMALL])
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
    assert options["training"]["steps"] == 500 and options["model"]["decoder"] == 128
    assert (model / "log" / "metrics.csv").read_text(encoding="utf-8").startswith("epoch,")


def test_a_filter_from_standard_input(regard, model) -> None:
    result = regard("translate", "--model", model, stdin="red dog\n\nblue cat\n")
    assert result.out.splitlines() == ["rouge chien", "", "bleu chat"]


def test_json(regard, model) -> None:
    (record,) = map(json.loads, regard("translate", "--model", model, "--json", "red dog").out.splitlines())
    assert record["text"] == "rouge chien"
    assert [len(row) for row in record["alignment"]] == [2, 2]
    for row in record["alignment"]:
        assert sum(row) == pytest.approx(1, abs=1e-4)
    assert record["alignment"][0][0] > 0.5 > record["alignment"][0][1]


def test_n_best_and_samples(regard, model) -> None:
    best = regard("translate", "--model", model, "--n-best", "3", "red dog").out.splitlines()
    scores = [float(line.split("\t")[0]) for line in best]
    assert len(best) == 3 and scores == sorted(scores, reverse=True)
    one, other = (regard("translate", "--model", model, "--sample", "--seed", seed, "red dog").out for seed in (1, 1))
    assert one == other


def test_pictures(regard, model, tmp_path) -> None:
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    assert regard("translate", "--model", model, "red dog", "--png", png, "--html", html).code == 0
    assert png.read_bytes().startswith(b"\x89PNG") and "rouge" in html.read_text(encoding="utf-8")


def test_evaluation(regard, model, pairs) -> None:
    result = regard("evaluate", pairs, "--model", model, "--json")
    found = json.loads(result.out.splitlines()[-1])
    (bleu,) = [value for name, value in found.items() if name.startswith("BLEU|")]
    assert bleu > 80
    assert "left out" in result.err or "empty" in result.err
    assert any(name.startswith("chrF") and "version:" in name for name in found)


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
        path.write_text(shown.out, encoding="utf-8")
        assert regard("train", "translation", "--out", "x", "--options", path, "--show-options").out == shown.out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--set", "training.stpes=3"], r"did you mean 'steps'"),
            (["--set", "model.decoders=3", "--data", "DATA"], r"did you mean 'decoder'"),
            (["--set", "training"], "--set must be NAME=VALUE, such as training.clip=0.5, got 'training'"),
            (["--steps", "0"], "steps must be at least 1, got 0"),
            (["--model", "rnm"], "did you mean 'rnn'"),
            (["--preset", "smal", "--data", "DATA"], "did you mean 'small'"),
            (["--attention", "aditive", "--data", "DATA"], "did you mean 'additive'"),
            (
                ["--model", "transformer", "--attention", "hard"],
                "attention must be a score for a Transformer, got 'hard'",
            ),
            (["--set", "training.clip=abc"], "clip must be of type float, got 'abc'"),
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
            (["--vocabulary", "words", "--data", "DATA"], "kind must be one of"),
            (["--vocabulary-size", "5", "--data", "DATA"], "size must be at least"),
            ([], "data must be given: a file of pairs separated by a tab"),
            (["--data", "nowhere.tsv"], "nowhere.tsv"),
            (["--options", "nowhere.toml"], "nowhere.toml cannot be used: No such file"),
        ],
    )
    def test_wrong_options(self, regard, pairs, tmp_path, arguments, message) -> None:
        arguments = [str(pairs) if each == "DATA" else each for each in arguments]
        result = regard("train", "translation", "--out", tmp_path / "x", *arguments)
        assert result.code == 2 and "Traceback" not in result.err
        assert message in result.err.replace("\n", " ")
        assert not (tmp_path / "x" / "checkpoints").exists()

    def test_an_unknown_task(self, regard, tmp_path) -> None:
        result = regard("train", "translaton", "--out", tmp_path)
        assert result.code == 2 and "did you mean 'translation'" in result.err


class TestResume:
    def test_a_longer_run(self, regard, pairs, tmp_path) -> None:
        first = regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "10", *SMALL)
        assert first.code == 0, first.err
        again = regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "10", *SMALL)
        assert again.code == 2 and "--resume" in again.err
        on = regard("train", "translation", "--out", tmp_path, "--resume", "--steps", "15")
        assert on.code == 0, on.err
        assert "steps is now 15, was 10" in on.out and "Ended after step 15" in on.out
        assert tomllib.loads((tmp_path / "options.toml").read_text(encoding="utf-8"))["training"]["steps"] == 15

    def test_what_may_not_change(self, regard, pairs, tmp_path) -> None:
        assert regard("train", "translation", "--data", pairs, "--out", tmp_path, "--steps", "5", *SMALL).code == 0
        for arguments, message in (
            (["--batch-tokens", "64"], "batch_tokens must be 400, as the run that is resumed began"),
            (["--show-options"], "--show-options must be left out with --resume"),
            (["--preset", "base"], "preset must be left out with --resume"),
        ):
            result = regard("train", "translation", "--out", tmp_path, "--resume", *arguments)
            assert result.code == 2 and message in result.err.replace("\n", " ")
        text = pairs.read_text(encoding="utf-8")
        try:
            pairs.write_text(text.replace("un ", "une ", 1), encoding="utf-8")
            changed = regard("train", "translation", "--out", tmp_path, "--resume")
            assert changed.code == 2 and "data must be the pairs that the run began with" in changed.err
        finally:
            pairs.write_text(text, encoding="utf-8")

    def test_a_folder_without_a_run(self, regard, tmp_path) -> None:
        result = regard("train", "translation", "--out", tmp_path, "--resume")
        assert result.code == 2 and "be the folder of a run, got no options.toml in it" in result.err


@pytest.mark.parametrize("kind", [["--model", "transformer"], ["--attention", "hard"], ["--attention", "location"]])
def test_other_mechanisms_are_trained_saved_and_loaded(regard, pairs, tmp_path, kind) -> None:
    chosen = SMALL[2:] if "transformer" not in kind else SMALL[2:6]
    chosen = [*chosen, "--set", "model.longest=4"] if "location" in kind else chosen
    result = regard("train", "translation", "--data", pairs, "--out", tmp_path / "out", "--steps", "4", *kind, *chosen)
    assert result.code == 0, result.err
    assert ("left out, longer than model.longest allows" in result.out) == ("location" in kind)
    assert regard("translate", "--model", tmp_path / "out", "red dog").code == 0


def test_no_model(regard, tmp_path) -> None:
    result = regard("translate", "--model", tmp_path / "none", "hello")
    assert result.code == 2 and "train one with `regard train translation" in result.err


def test_pronunciation_by_the_same_command(regard, tmp_path) -> None:
    words = [a + b + c for a in "bdgk" for b in "aeiou" for c in "mnst"]
    lines = [f"{word}\t{' '.join(letter.upper() for letter in word)}" for word in words]
    (tmp_path / "words.tsv").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "out"
    result = regard(
        "train", "pronunciation", "--data", tmp_path / "words.tsv", "--out", out, "--steps", "500", *SMALL,
    )  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(regard("evaluate", tmp_path / "words.tsv", "--model", out, "--json").out.splitlines()[-1])
    assert found["per"] < 10 and found["wer"] < 30
