"""``regard demo --train`` end to end, on a made-up dictionary and a fixed number of steps."""

from __future__ import annotations

import os
import random
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from pages import Page

from regard_lab.cli import demo_training as demo
from regard_lab.data.pairs import Pairs
from regard_lab.tasks.pronunciation.pronouncer import Dictionary, Pronouncer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Dictionary:
    """Make the demonstration small: few words, few steps, a narrow model."""
    chance = random.Random(0)
    words = {"".join(chance.choice("abcdefghiklmnopqrstuvwy") for _ in range(4)) for _ in range(400)}
    entries = {word: [tuple(word.upper())] for word in sorted(words) + list(demo.EXAMPLES)}
    untrained = Pronouncer.untrained

    def narrow(pairs: Pairs, *, seed: int = 0) -> Pronouncer:
        return untrained(pairs, seed=seed, embedding=8, encoder=8, decoder=8, features=8)

    monkeypatch.setattr(demo, "load_dictionary", lambda: dict(entries))
    monkeypatch.setattr(Pronouncer, "untrained", narrow)
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE.with_changes({"steps": 30, "precision": "float32"}))
    return entries


@pytest.mark.slow
def test_it_says_what_a_newcomer_needs(regard, small: Dictionary, tmp_path: Path) -> None:
    out = tmp_path / "here"
    outcome = regard("demo", "--train", "--seconds", 20, "--out", out)
    assert outcome.code == 0, outcome.err
    for text in (
        "held out",
        "training 100%  loss",
        "words/s",
        "phoneme error rate",
        "word error rate",
        "Held-out words",
    ):
        assert text in outcome.out
    for word in demo.EXAMPLES:
        assert word in outcome.out
    assert f"regard pronounce serendipity flibbertigibbet --alignment --model {out / 'model'}" in outcome.out
    assert (out / "alignments.png").read_bytes().startswith(b"\x89PNG")
    assert Page((out / "alignments.html").read_text(encoding="utf-8")).described["heads"]
    again = regard("pronounce", "table", "--model", out / "model")
    assert again.code == 0, again.err


@pytest.mark.slow
def test_examples_are_neither_learned_nor_scored(regard, small: Dictionary, tmp_path: Path, monkeypatch) -> None:
    seen: list[set[str]] = []
    learn, evaluate = Pronouncer.learn, Pronouncer.evaluate

    def learning(self, pairs, options, **others):
        seen.append(set(pairs.sources))
        return learn(self, pairs, options, **others)

    def evaluating(self, pairs):
        seen.append(set(pairs.sources))
        return evaluate(self, pairs)

    monkeypatch.setattr(Pronouncer, "learn", learning)
    monkeypatch.setattr(Pronouncer, "evaluate", evaluating)
    assert regard("demo", "--train", "--out", tmp_path).code == 0
    warming, learned, scored = seen
    assert warming <= learned
    assert not set(demo.EXAMPLES) & (learned | scored)
    assert not learned & scored
    assert len(learned) + len(scored) + len(demo.EXAMPLES) == len(small)


@pytest.mark.slow
def test_an_interrupt_of_training_still_evaluates_and_saves(regard, small, tmp_path: Path, monkeypatch) -> None:
    class Interrupt(Callback):
        def on_train_batch_start(self, trainer, module, batch, number):
            if number == 5:
                os.kill(os.getpid(), signal.SIGINT)

    learn = Pronouncer.learn
    monkeypatch.setattr(
        Pronouncer, "learn", lambda *given, callbacks=(): learn(*given, callbacks=[*callbacks, Interrupt()])
    )
    outcome = regard("demo", "--train", "--out", tmp_path)
    assert outcome.code == 0
    assert "interrupted" in outcome.out
    assert ", 6 steps)" in outcome.out
    assert "phoneme error rate" in outcome.out
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_interrupt_later_ends_it(regard, small, tmp_path: Path, monkeypatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pronouncer, "evaluate", interrupt)
    outcome = regard("demo", "--train", "--out", tmp_path)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_a_folder_that_cannot_be_made_is_noticed_before_training(regard, small, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = regard("demo", "--train", "--out", tmp_path / "file")
    assert outcome.code == 2
    assert "cannot be used" in outcome.err
    assert "training" not in outcome.out


def test_a_missing_package_is_noticed_before_training(regard, small, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("regard_cli.messages.find_spec", lambda name: None)
    outcome = regard("demo", "--train", "--out", tmp_path)
    assert outcome.code == 2
    assert "matplotlib is missing: pip install 'regard-lab[pronunciation]'" in outcome.err
    assert "training" not in outcome.out
    real = find_spec
    monkeypatch.setattr("regard_cli.messages.find_spec", lambda name: None if name == "lightning" else real(name))
    assert (
        "lightning is missing: pip install 'regard-lab[pronunciation]'"
        in regard("demo", "--train", "--out", tmp_path).err
    )


def test_a_missing_dictionary_says_how_to_get_it(regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard_lab.tasks.pronunciation.pronouncer.find_spec", lambda name: None)
    outcome = regard("demo", "--train", "--out", tmp_path)
    assert outcome.code == 2
    assert "pip install 'regard-lab[pronunciation]'" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_loss_that_is_no_number_is_one_sentence(regard, small, tmp_path: Path, monkeypatch) -> None:
    untrained = Pronouncer.untrained

    def broken(pairs, *, seed=0):
        made = untrained(pairs, seed=seed)
        made.model.model.output.bias.data.fill_(float("nan"))
        return made

    monkeypatch.setattr(Pronouncer, "untrained", broken)
    monkeypatch.setattr(demo, "_warm", lambda *_: 0.0)
    outcome = regard("demo", "--train", "--out", tmp_path)
    assert outcome.code == 2
    assert outcome.err.startswith("regard: demo: the loss is nan at step 1: lower learning_rate")
    assert outcome.err.count("\n") == 1
