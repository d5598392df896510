"""What is written with proposals has the distribution of plain sampling, and is the same where it is greedy."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from language_models import LINEAR, greedy, small_model
from pairwise import across

from regard_lab.generation.sampling import Draws, GenerationOptions, SamplingOptions, probabilities
from regard_lab.generation.speculative import (
    Drafter,
    ModelDrafter,
    NGramDrafter,
    Speculator,
    acceptance,
    residual,
    verified,
)

KINDS: list[dict[str, Any]] = [{}, {"positions": "rotary", "window": 5}, {"positions": "alibi"}]


def drafters() -> list[Any]:
    return [NGramDrafter(), small_model(1, width=8, layers=1, heads=2, max_length=40)]


@pytest.mark.campaign(keep=4)
@across({"penalty": [1.0, 1.3], "which": [0, 1, 2], "kind": KINDS})
def test_greedy_tokens_are_the_same(kind: dict[str, Any], which: int, penalty: float) -> None:
    model = small_model(**kind)
    drafter = [*drafters(), model][which]
    options = GenerationOptions(max_new_tokens=60, sampling=SamplingOptions(repetition_penalty=penalty))
    speculator = Speculator(model, drafter)
    found = [token.token for token in speculator.stream([3, 1, 4, 1], options)]
    from regard_lab.generation.generation import generate

    assert found == generate(model, [[3, 1, 4, 1]], options)[0].numbers
    if penalty == 1:
        assert found == greedy(model, [3, 1, 4, 1], 60)
    if which == 2:
        assert speculator.accepted == speculator.proposed > 40


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_and_residual_give_the_models_distribution(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    p, q = (3 * torch.randn(2, 7, generator=random, dtype=torch.float64)).softmax(-1)
    q = q.masked_fill(torch.rand(7, generator=random) < 0.3, 0)
    q = torch.ones(7).double() / 7 if q.sum() == 0 else q / q.sum()
    accepted = q * acceptance(p, q)
    rest = residual(p, q)
    total = accepted + (1 - accepted.sum()) * rest / rest.sum()
    torch.testing.assert_close(total, p)


@pytest.mark.slow
def test_two_proposals_give_the_models_distribution_by_enumeration() -> None:
    """All pairs of drafts, with the numbers drawn on a grid: the share of each outcome is its probability."""
    p = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], dtype=torch.float64)
    grid = [(i + 0.5) / 12 for i in range(12)]

    class Given(Draws):
        def __init__(self, numbers: tuple[float, ...]) -> None:
            self.numbers = iter(numbers)

        def next(self) -> float:
            return next(self.numbers)

    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for drafts in product(range(3), repeat=2):
        weight = float(q[0, drafts[0]] * q[1, drafts[1]])
        for numbers in product(grid, repeat=3):
            taken = verified(p, q, drafts, Given(numbers))
            first[taken[0]] += weight / len(grid) ** 3
            if len(taken) > 1:
                second[taken[1]] += weight / len(grid) ** 3
    assert [first[i] for i in range(3)] == pytest.approx(p[0].tolist())
    share = sum(second.values())  # of what went on behind an accepted token
    assert [second[i] / share for i in range(3)] == pytest.approx(p[1].tolist())


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["model", "n-grams"])
def test_drawn_tokens_have_the_models_distribution(kind: str) -> None:
    model = small_model(vocabulary=4, std=0.5)
    drafter: Any = small_model(1, vocabulary=4, width=8, layers=1, heads=2) if kind == "model" else NGramDrafter()
    speculator = Speculator(model, drafter, lookahead=2)
    sampling, prompt, count = SamplingOptions(temperature=0.8), [3, 1, 3], 1500
    options = GenerationOptions(max_new_tokens=2, sampling=sampling)
    found = Counter(
        tuple(token.token for token in speculator.stream(prompt, options, sample=sample)) for sample in range(count)
    )
    chi_square = 0.0
    with torch.no_grad():
        first = probabilities(model(torch.tensor([prompt]))[0, -1], sampling)
        for a in range(4):
            both = first[a] * probabilities(model(torch.tensor([[*prompt, a]]))[0, -1], sampling)
            for b in range(4):
                wanted = count * float(both[b])
                chi_square += (found[a, b] - wanted) ** 2 / wanted
    assert chi_square < 37.7  # 0.1 % of draws from 15 degrees of freedom are above
    assert speculator.proposed


def test_stops_and_positions_end_what_is_written() -> None:
    model = small_model(max_length=12)
    whole = greedy(model, [3, 1, 4, 1], 8)
    shown = list(Speculator(model, model).stream([3, 1, 4, 1]))
    assert (len(shown), shown[-1].end) == (9, "length")
    stop = whole[4]
    shown = list(Speculator(model, model).stream([3, 1, 4, 1], stop=[stop]))
    assert [token.token for token in shown] == [*whole[: whole.index(stop)], None]


def test_n_grams_are_looked_up_from_the_latest() -> None:
    drafter = NGramDrafter(2)
    assert drafter.propose([1, 2, 3, 1, 2, 4, 1, 2], 3, SamplingOptions(), Draws(0, [])) == ([4, 1, 2], None)
    assert drafter.propose([1, 2, 3], 3, SamplingOptions(), Draws(0, [])) == ([], None)


def test_wrong_arguments_are_one_sentence() -> None:
    model = small_model()
    with pytest.raises(
        ValueError, match="Speculator: drafter must have the model's vocabulary size of 50 tokens, got 40"
    ):
        Speculator(model, small_model(vocabulary=40))
    with pytest.raises(TypeError, match="Speculator: drafter must be a Drafter or a DecoderLM, got"):
        Speculator(model, 3)  # type: ignore[arg-type]
    assert issubclass(ModelDrafter, Drafter)
    sums = small_model(**LINEAR)
    for pair in ((sums, NGramDrafter()), (model, sums)):
        with pytest.raises(ValueError, match="model must not use linear attention, whose cache cannot drop"):
            Speculator(*pair)
