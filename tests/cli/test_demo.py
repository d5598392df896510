"""``regard demo`` end to end, on a made-up dictionary and a fixed number of steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from regard.cli import demo
from regard.tasks import Pronouncer
from regard.tasks.dictionary import Dictionary
from regard.tasks.training import Progress, train


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Dictionary:
    """Make the demonstration small: few words, few steps, a narrow model."""
    chance = random.Random(0)
    words = {"".join(chance.choice("abcdefghiklmnopqrstuvwy") for _ in range(4)) for _ in range(400)}
    entries = {word: [tuple(word.upper())] for word in sorted(words) + list(demo.EXAMPLES)}
    untrained = Pronouncer.untrained

    def narrow(entries: Dictionary, *, seed: int = 0) -> Pronouncer:
        return untrained(entries, seed=seed, embedding=8, encoder=8, decoder=8, features=8)

    def short(model, batches, *, seconds: float | None = None, steps: int = 30, report=None) -> Progress:
        return train(model, batches, steps=steps, report=report)

    monkeypatch.setattr(demo, "load_dictionary", lambda: dict(entries))
    monkeypatch.setattr(demo.Pronouncer, "untrained", narrow)
    monkeypatch.setattr(demo, "train", short)
    return entries


def test_it_says_what_a_newcomer_needs(regard, small: Dictionary, tmp_path: Path) -> None:
    out = tmp_path / "here"
    outcome = regard("demo", "--seconds", 20, "--out", out)
    assert outcome.code == 0, outcome.err
    for text in (
        "held out",
        "training 100%  loss",
        "words/s",
        "phoneme error rate",
        "word error rate",
        "Words it never",
    ):
        assert text in outcome.out
    for word in demo.EXAMPLES:
        assert word in outcome.out
    assert f"regard pronounce serendipity flibbertigibbet --alignment --model {out / 'model'}" in outcome.out
    assert (out / "alignments.png").read_bytes().startswith(b"\x89PNG")
    assert "<table>" in (out / "alignments.html").read_text(encoding="utf-8")
    again = regard("pronounce", "table", "--model", out / "model")
    assert again.code == 0, again.err


def test_examples_are_neither_learned_nor_scored(regard, small: Dictionary, tmp_path: Path, monkeypatch) -> None:
    seen: list[Dictionary] = []
    batches, evaluate = Pronouncer.batches, Pronouncer.evaluate
    monkeypatch.setattr(Pronouncer, "batches", lambda self, e, **o: seen.append(e) or batches(self, e, **o))
    monkeypatch.setattr(Pronouncer, "evaluate", lambda self, e: seen.append(e) or evaluate(self, e))
    regard("demo", "--out", tmp_path)
    warming, learned, scored = seen
    assert set(warming) <= set(learned)
    assert not set(demo.EXAMPLES) & (set(learned) | set(scored))
    assert not set(learned) & set(scored)
    assert len(learned) + len(scored) + len(demo.EXAMPLES) == len(small)


def test_an_interrupt_of_training_still_evaluates_and_saves(regard, small, tmp_path: Path, monkeypatch) -> None:
    def interrupted(model, batches, *, seconds: float | None = None, steps: int = 30, report=None) -> Progress:
        def stop(progress: Progress) -> None:
            if report is not None:
                report(progress)
            if progress.steps == 5:
                raise KeyboardInterrupt

        return train(model, batches, steps=steps, report=stop)

    monkeypatch.setattr(demo, "train", interrupted)
    outcome = regard("demo", "--out", tmp_path)
    assert outcome.code == 0
    assert "interrupted" in outcome.out
    assert "phoneme error rate" in outcome.out
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_interrupt_later_ends_it(regard, small, tmp_path: Path, monkeypatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pronouncer, "evaluate", interrupt)
    outcome = regard("demo", "--out", tmp_path)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_a_folder_that_cannot_be_made_is_noticed_before_training(regard, small, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = regard("demo", "--out", tmp_path / "file")
    assert outcome.code == 2
    assert "cannot be used" in outcome.err
    assert "training" not in outcome.out


def test_a_missing_package_is_noticed_before_training(regard, small, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("regard.cli.messages.find_spec", lambda name: None)
    outcome = regard("demo", "--out", tmp_path)
    assert outcome.code == 2
    assert "matplotlib is missing: pip install 'regard[pronunciation]'" in outcome.err
    assert "training" not in outcome.out


def test_a_missing_dictionary_says_how_to_get_it(regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.tasks.dictionary.find_spec", lambda name: None)
    outcome = regard("demo", "--out", tmp_path)
    assert outcome.code == 2
    assert "pip install 'regard[pronunciation]'" in outcome.err
    assert "Traceback" not in outcome.err
