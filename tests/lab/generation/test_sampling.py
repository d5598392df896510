"""Logits are processed as Hugging Face's processors do it, and drawn from as probabilities say."""

from __future__ import annotations

import pytest
import torch

from regard_lab.generation.sampling import Draws, SamplingOptions, drawn, probabilities, processed


@pytest.mark.parametrize("seed", range(30))
def test_logits_are_processed_as_by_hugging_face(seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    random = torch.Generator().manual_seed(seed)
    logits, before = 3 * torch.randn(3, 40, generator=random), torch.randint(40, (3, 7), generator=random)
    temperature, top_p, min_p, penalty = (torch.rand(4, generator=random).double() + 0.05).clamp(max=1).tolist()
    top_k = int(torch.randint(1, 45, (), generator=random))
    theirs = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1 + penalty),
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
            transformers.MinPLogitsWarper(min_p / 3),
        ]
    )
    options = SamplingOptions(temperature, top_k, top_p, min_p / 3, 1 + penalty)
    assert torch.equal(processed(logits, options, before), theirs(before, logits.clone()))


def test_a_greedy_choice_is_certain() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 4.0]])
    assert probabilities(logits, SamplingOptions()).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_penalty_applies_to_greedy_choices() -> None:
    assert int(probabilities(torch.tensor([2.0, 1.9]), SamplingOptions(repetition_penalty=2.0), [0]).argmax()) == 1


def test_tokens_are_drawn_in_proportion() -> None:
    weights, uniform = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]), (torch.arange(400) + 0.5) / 400
    found = drawn(weights.expand(400, 5), uniform)
    assert found.bincount(minlength=5).tolist() == [0, 100, 0, 300, 0]
    almost = torch.tensor(1 - 2**-53, dtype=torch.float64)
    assert int(drawn(weights, almost)) == 3 and int(drawn(weights, torch.tensor(0.0))) == 1


def test_numbers_are_settled_by_tokens_seed_and_sample() -> None:
    def first(*given: object) -> list[float]:
        draws = Draws(*given)  # type: ignore[arg-type]
        return [draws.next() for _ in range(3)]

    assert first(1, [2, 3]) == first(1, [2, 3])
    assert len({tuple(first(*each)) for each in ((1, [2, 3]), (2, [2, 3]), (1, [3, 2]), (1, [2, 3], 1))}) == 4


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": -1.0}, r"sampling: temperature must be a finite number of at least 0, got -1\.0\."),
        ({"temperature": 1.0, "top_p": 0.0}, r"sampling: top_p must be a number in \(0, 1\], got 0\.0\."),
        ({"top_k": 5}, r"sampling: top_k has no effect at temperature 0; set temperature\."),
        ({"top_p": 0.5}, r"sampling: top_p has no effect at temperature 0; set temperature\."),
        ({"min_p": 0.5}, r"sampling: min_p has no effect at temperature 0; set temperature\."),
        ({"seed": 1}, r"sampling: seed has no effect at temperature 0; set temperature\."),
        ({"repetition_penalty": 0.0}, r"sampling: repetition_penalty must be a positive finite number, got 0\.0\."),
    ],
    ids=str,
)
def test_wrong_options_are_one_sentence(given: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingOptions(**given)  # type: ignore[arg-type]
