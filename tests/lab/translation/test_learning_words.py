"""Training a pronouncer: it learns, keeps to its budget, is reproducible, and survives an interrupt."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch
from lightning.pytorch import Callback

from regard_lab.data.pairs import Pairs
from regard_lab.tasks.pronunciation.pronouncer import RECIPE, Pronouncer
from regard_lab.training.loop import TrainingResult

SIZES = {"embedding": 32, "encoder": 32, "decoder": 48, "features": 32, "dropout": 0.0}
OPTIONS = RECIPE.with_changes({"seconds": 0.0, "steps": 100, "learning_rate": 1e-2, "precision": "float32"})


def spelled_as_spoken(count: int, seed: int) -> Pairs:
    """Return made-up words in which every letter has one sound."""
    chance = random.Random(seed)
    words = sorted({"".join(chance.choice("abcdef") for _ in range(chance.randint(2, 6))) for _ in range(count)})
    return Pairs(words, [" ".join(word.upper()) for word in words])


def _trained(
    steps: int, seed: int = 0, count: int = 250, callbacks: tuple[Callback, ...] = ()
) -> tuple[Pronouncer, TrainingResult]:
    pairs = spelled_as_spoken(count, seed=1)
    pronouncer = Pronouncer.untrained(pairs, seed=seed, **SIZES)
    options = OPTIONS.with_changes({"steps": steps, "seed": seed})
    return pronouncer, pronouncer.learn(pairs, options, callbacks=callbacks)


@pytest.mark.slow
def test_it_learns_words_it_never_saw_and_where_to_look() -> None:
    pronouncer, ended = _trained(steps=200)
    known = set(spelled_as_spoken(250, seed=1).sources)
    unseen = [(w, s) for w, s in spelled_as_spoken(100, seed=2) if w not in known]
    assert len(unseen) > 40
    rates, said = pronouncer.evaluate(Pairs([w for w, _ in unseen], [s for _, s in unseen]))
    assert rates.symbol < 5
    assert set(said) == {word for word, _ in unseen}
    assert (ended.steps, ended.reason) == (200, "steps")
    assert len(known) * 100 <= ended.pairs <= 200 * 128
    weights = pronouncer.pronounce(["fade"])[0].alignment[0]
    assert weights.argmax(-1).tolist() == [0, 1, 2, 3]


def test_the_same_seed_and_steps_give_the_same_parameters() -> None:
    one, two, other = (_trained(5, seed)[0].model.model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_interrupt_keeps_what_was_learned() -> None:
    class Interrupt(Callback):
        def on_train_batch_start(self, trainer, module, batch, number):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    pronouncer, ended = _trained(100, count=50, callbacks=(Interrupt(),))
    before = Pronouncer.untrained(spelled_as_spoken(50, seed=1), **SIZES).model.model.state_dict()
    assert (ended.reason, ended.steps) == ("interrupt", 3)
    assert not pronouncer.model.model.training
    assert any(not torch.equal(before[name], found) for name, found in pronouncer.model.model.state_dict().items())
    assert pronouncer.evaluate(spelled_as_spoken(50, seed=1))[0].sequences > 40
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_budget_of_seconds_ends_and_the_rate_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rates = [0.0], []

    class Tick(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])
            clock[0] += 1.0  # every step takes a second

    monkeypatch.setattr("regard_lab.training.loop.time.monotonic", lambda: clock[0])
    pairs = spelled_as_spoken(50, seed=1)
    pronouncer = Pronouncer.untrained(pairs, **SIZES)
    options = RECIPE.with_changes({"seconds": 20.0, "warmup": 0.2, "learning_rate": 1.0, "precision": "float32"})
    ended = pronouncer.learn(pairs, options, callbacks=[Tick()])
    assert (ended.steps, ended.reason, ended.seconds) == (20, "seconds", 20.0)
    assert ended.pairs == 20 * len(pairs)
    rising, falling = [0.25 * i for i in range(4)], [1 - i / 16 for i in range(16)]
    assert rates == pytest.approx([*rising, *falling], abs=1e-6)


def test_nothing_is_written(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _trained(3, count=50)
    assert not list(tmp_path.iterdir())
