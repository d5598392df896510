"""``regard pronounce``: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Page

from regard_lab.cli import pronounce as command
from regard_lab.data.pairs import Pairs
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer


def _refused(outcome, message: str) -> None:
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert outcome.err.startswith("regard: ")
    assert outcome.err.count("\n") == 1


def test_words_come_out_as_phonemes(regard, model: Path) -> None:
    outcome = regard("pronounce", "Cat", "don't", "--model", model)
    assert outcome.code == 0
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines] == ["cat", "don't"]
    assert all(set(line.split()[1:]) <= {"AH", "B", "K", "T", "S"} for line in lines)


def test_words_from_standard_input(regard, model: Path) -> None:
    outcome = regard("pronounce", "cat", "-", "dog", "--model", model, stdin="one two\nthree\n")
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["cat", "one", "two", "three", "dog"]
    _refused(regard("pronounce", "-", "--model", model), "words must not be empty, got none")


def test_json(regard, model: Path) -> None:
    records = json.loads(regard("pronounce", "cat", "--model", model, "--json").out)
    assert [record["word"] for record in records] == ["cat"]
    for row in records[0]["weights"]:
        assert len(row) == 3
        assert sum(row) == pytest.approx(1, abs=1e-5)
    assert len(records[0]["weights"]) == len(records[0]["phonemes"])


def test_the_alignment_is_drawn_and_written(regard, model: Path, tmp_path: Path) -> None:
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    outcome = regard("pronounce", "cat", "--model", model, "--alignment", "--plot", png, "--html", html)
    assert outcome.code == 0
    assert "c  a  t" in outcome.out
    assert "attention: ░ 25%" in outcome.out
    assert png.read_bytes().startswith(b"\x89PNG")
    assert Page(html.read_text(encoding="utf-8")).described["layers"][0]["kind"] == "picture"


BAD = [
    ("", "pronounce: word must not be empty, got ''.", "'': a word must not be empty"),
    ("cat5", "which has '5'", "'cat5', which has '5': a word must be spelled with a–z ' - ."),
    ("naïve", "which has 'ï'", "'naïve', which has 'ï': a word must be spelled with a–z ' - ."),
    ("猫", "which has '猫'", "'猫', which has '猫': a word must be spelled with a–z ' - ."),
    ("\x1b[31m", r"which has '\x1b'", r"'\x1b[31m', which has '\x1b': a word must be spelled with a–z ' - ."),
    ("x" * 65, "must have at most 64 letters", f"'{'x' * 60}', which has 65: a word must have at most 64 letters"),
    ("...", "must have a letter", "'...': a word must have a letter"),
]


@pytest.mark.parametrize(("word", "refusal", "skipped"), BAD)
def test_a_bad_word_alone_is_refused_and_among_others_skipped(
    regard, model: Path, word: str, refusal: str, skipped: str
) -> None:
    _refused(regard("pronounce", word, "--model", model), refusal)
    outcome = regard("pronounce", "cat", word, "dog", "--model", model)
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["cat", "dog"]
    assert outcome.err == f"regard: skipped {skipped}\n"


def test_one_of_twenty_words_is_skipped(regard, model: Path) -> None:
    words = [f"word{letter}" for letter in "abcdefghijklmnopqrs"]
    outcome = regard("pronounce", "-", "--json", "--model", model, stdin=" ".join([*words[:7], "naïve", *words[7:]]))
    assert outcome.code == 0
    assert [record["word"] for record in json.loads(outcome.out)] == words
    assert outcome.err.startswith("regard: skipped 'naïve', which has 'ï':")
    assert outcome.err.count("\n") == 1


def test_words_none_of_which_can_be_read(regard, model: Path) -> None:
    outcome = regard("pronounce", "42", "猫", "--model", model)
    assert outcome.code == 2
    assert outcome.out == ""
    assert [line.split(",")[0] for line in outcome.err.splitlines()] == [
        "regard: skipped '42'",
        "regard: skipped '猫'",
        "regard: pronounce: none of the 2 words can be pronounced.",
    ]


def test_no_words_at_all(regard) -> None:
    outcome = regard("pronounce")
    assert outcome.code == 2
    assert "WORD" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_missing_model(regard, tmp_path: Path) -> None:
    _refused(regard("pronounce", "cat", "--model", tmp_path / "no"), "train one with `regard demo --train`")
    (tmp_path / "file").touch()
    _refused(regard("pronounce", "cat", "--model", tmp_path / "file"), "there is no model at")
    (tmp_path / "empty").mkdir()
    _refused(regard("pronounce", "cat", "--model", tmp_path / "empty"), "config.json must exist, got no such file")


def test_a_truncated_model(regard, model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    _refused(regard("pronounce", "cat", "--model", model), "model.safetensors must be a complete safetensors file")


def test_a_foreign_model(regard, model: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"wte.weight": torch.ones(2, 2)}, model / "model.safetensors")
    _refused(
        regard("pronounce", "cat", "--model", model),
        "have at most as many layers as model.safetensors has tensors, 1, got 2",
    )


def test_a_pickle_is_never_loaded(regard, model: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    (model / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    _refused(
        regard("pronounce", "cat", "--model", model), "a pickle or zip file, which could run code and is never loaded"
    )
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json must be JSON"),
        ("{}", "must describe a model of format 'regard.sequences', got None"),
        ('{"format": "regard.sequences", "version": 99}', "must be of version 1, got version 99"),
    ],
)
def test_a_bad_configuration(regard, model: Path, text: str, message: str) -> None:
    (model / "config.json").write_text(text)
    _refused(regard("pronounce", "cat", "--model", model), message)


def test_sizes_that_do_not_fit(regard, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["model"]["decoder"] += 1
    (model / "config.json").write_text(json.dumps(config))
    _refused(regard("pronounce", "cat", "--model", model), "model.safetensors must hold")


def test_a_model_of_another_task(regard, model: Path) -> None:
    writer = SequenceModel.load(model)
    writer.about = {"task": "translation"}
    writer.save(model)
    message = f"pronounce: {model} is a translation model: use `regard translate --model {model}`."
    _refused(regard("pronounce", "cat", "--model", model), message)


@pytest.mark.parametrize("option", [["--alignment"], ["--plot", "a.png"], ["--html", "a.html"]])
def test_a_model_without_attention_speaks_and_draws_nothing(regard, tmp_path: Path, option: list[str]) -> None:
    pairs = Pairs(["abct"], ["K AE T"])
    model = Pronouncer.untrained(pairs, encoder=8, decoder=8, attention="none").save(tmp_path / "blind")
    assert regard("pronounce", "cat", "--model", model).code == 0
    assert json.loads(regard("pronounce", "cat", "--model", model, "--json").out)[0]["weights"] is None
    _refused(
        regard("pronounce", "cat", "--model", model, *option),
        "must hold a model with attention to draw alignments, got one without",
    )


@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_a_picture_that_cannot_be_written(regard, model: Path, tmp_path: Path, option: str) -> None:
    _refused(
        regard("pronounce", "cat", "--model", model, option, tmp_path / "no" / "a.png"), "No such file or directory"
    )


def test_an_interrupt_exits_quietly(regard, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Pronouncer, "pronounce", interrupt)
    outcome = regard("pronounce", "cat", "--model", model)
    assert outcome.code == 130
    assert "interrupted" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.campaign
@pytest.mark.slow
def test_a_plain_pipe_gets_plain_characters(model: Path) -> None:
    code = "from regard_cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "pronounce", "cat", "--alignment", "--model", str(model)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "COLUMNS": "80"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.isascii()
    assert b"attention: . 25%" in run.stdout
    assert b"\x1b" not in run.stdout
