"""Training: it learns, keeps to its budget, is reproducible, and survives an interrupt."""

from __future__ import annotations

import random

import pytest
import torch

from regard.tasks import Pronouncer
from regard.tasks.dictionary import Dictionary
from regard.tasks.training import Progress, Recipe, train

SIZES = {"embedding": 32, "encoder": 32, "decoder": 48, "features": 32, "dropout": 0.0}


def spelled_as_spoken(count: int, seed: int) -> Dictionary:
    """Return made-up words in which every letter has one sound."""
    chance = random.Random(seed)
    words = {"".join(chance.choice("abcdef") for _ in range(chance.randint(2, 6))) for _ in range(count)}
    return {word: [tuple(letter.upper() for letter in word)] for word in sorted(words)}


def _trained(steps: int, seed: int = 0) -> tuple[Pronouncer, Progress]:
    torch.manual_seed(seed)
    entries = spelled_as_spoken(250, seed=1)
    pronouncer = Pronouncer.untrained(entries, seed=seed, **SIZES)
    recipe = Recipe(learning_rate=1e-2, bfloat16=False)
    return pronouncer, train(pronouncer.model, pronouncer.batches(entries, size=32), steps=steps, recipe=recipe)


def test_it_learns_words_it_never_saw_and_where_to_look() -> None:
    pronouncer, progress = _trained(steps=400)
    unseen = {w: s for w, s in spelled_as_spoken(100, seed=2).items() if w not in spelled_as_spoken(250, seed=1)}
    assert len(unseen) > 40
    rates, said = pronouncer.evaluate(unseen)
    assert rates.symbol < 5
    assert set(said) == set(unseen)
    assert progress.steps == 400
    assert progress.fraction == 1.0
    weights = pronouncer.pronounce(["fade"])[0].weights
    assert weights.argmax(-1).tolist() == [0, 1, 2, 3]


def test_the_same_seed_and_steps_give_the_same_parameters() -> None:
    one, two, other = (_trained(5, seed)[0].model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_interrupt_keeps_what_was_learned() -> None:
    entries = spelled_as_spoken(50, seed=1)
    pronouncer = Pronouncer.untrained(entries, **SIZES)
    before = {name: tensor.clone() for name, tensor in pronouncer.model.state_dict().items()}

    def interrupt(progress: Progress) -> None:
        if progress.steps == 3:
            raise KeyboardInterrupt

    progress = train(pronouncer.model, pronouncer.batches(entries, size=8), steps=100, report=interrupt)
    assert progress.interrupted
    assert progress.steps == 3
    assert not pronouncer.model.training
    assert any(not torch.equal(before[name], tensor) for name, tensor in pronouncer.model.state_dict().items())
    assert pronouncer.evaluate(entries)[0].sequences == len(entries)


def test_a_budget_of_seconds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("regard.tasks.training.time.monotonic", lambda: float(next(ticks)))
    entries = spelled_as_spoken(50, seed=1)
    pronouncer = Pronouncer.untrained(entries, **SIZES)
    seen: list[Progress] = []
    progress = train(pronouncer.model, pronouncer.batches(entries, size=8), seconds=10, report=seen.append)
    assert progress.steps == 10
    assert [each.fraction for each in seen] == pytest.approx([step / 10 for step in range(1, 11)])
    assert progress.rate == pytest.approx(progress.sequences / 10)


def test_the_rate_rises_then_falls_to_zero() -> None:
    recipe = Recipe(learning_rate=1.0, warmup=0.1)
    assert recipe.rate(0.0) == 0.0
    assert recipe.rate(0.05) == pytest.approx(0.5 * 0.95)
    assert recipe.rate(0.1) == pytest.approx(0.9)
    assert recipe.rate(1.0) == 0.0


@pytest.mark.parametrize("budget", [{}, {"seconds": 1, "steps": 1}])
def test_exactly_one_budget(budget: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="train: seconds or steps must be given, and not both"):
        train(Pronouncer.untrained({"a": [("A",)]}, **SIZES).model, [], **budget)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_budget_is_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="train: seconds must be positive"):
        train(Pronouncer.untrained({"a": [("A",)]}, **SIZES).model, [], seconds=seconds)
