"""Beam search over continuations finds what a search written out plainly finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import LINEAR, greedy, small_model

from regard_lab.generation.prompt_search import search_prompts
from regard_lab.models import DecoderLM

PROMPTS = [[3, 1, 4, 1], [5], [2, 2, 2, 2, 2, 7]]


def plain_search(model: DecoderLM, prompt: list[int], beams: int, most: int, end: int) -> tuple[float, list[int]]:
    """Return the best normalized score and its tokens."""

    def penalty(symbols: int) -> float:
        return ((5 + symbols) / 6) ** 0.6

    front: list[tuple[float, list[int]]] = [(0.0, [])]
    ended = []
    for step in range(most):
        candidates = []
        for score, tokens in front:
            gains = model(torch.tensor([prompt + tokens]))[0, -1].log_softmax(-1).tolist()
            candidates += [(score + gain, tokens, token) for token, gain in enumerate(gains)]
        candidates.sort(key=lambda each: -each[0])
        ended += [(s / penalty(step + 1), tokens) for s, tokens, token in candidates[:beams] if token == end]
        front = [(s, [*tokens, token]) for s, tokens, token in candidates if token != end][:beams]
    ended += [(score / penalty(most + 1), tokens) for score, tokens in front]
    return max(ended)


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("kind", [{}, {"positions": "rotary", "window": 4}, {"positions": "alibi"}, LINEAR], ids=str)
@pytest.mark.parametrize("beams", [3, 5])
@torch.no_grad()
def test_the_best_continuation_is_found(kind: dict[str, Any], beams: int) -> None:
    for seed in range(3):
        model = small_model(seed, vocabulary=12, **kind)
        for prompt, best in zip(PROMPTS, search_prompts(model, PROMPTS, [0], beams=beams, max_new_tokens=6)):
            score, tokens = plain_search(model, prompt, beams, 6, 0)
            assert list(best[0].numbers) == tokens
            assert best[0].normalized == pytest.approx(score, abs=1e-4)


def test_one_beam_is_greedy() -> None:
    model = small_model()
    found = search_prompts(model, PROMPTS, beams=1, max_new_tokens=7)
    assert [list(best[0].numbers) for best in found] == [greedy(model, prompt, 7) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [11, 13, 200])
@torch.no_grad()
def test_more_beams_than_continuations(beams: int) -> None:
    model = small_model(vocabulary=12)
    for prompt, best in zip(PROMPTS, search_prompts(model, PROMPTS, [0], beams=beams, max_new_tokens=4)):
        score, tokens = plain_search(model, prompt, beams, 4, 0)
        assert list(best[0].numbers) == tokens
        assert best[0].normalized == pytest.approx(score, abs=1e-4)


def test_wrong_arguments_are_one_sentence() -> None:
    model = small_model(max_length=10)
    with pytest.raises(ValueError, match="search_prompts: prompt must leave room for 8 of the model's 10 positions"):
        search_prompts(model, PROMPTS, max_new_tokens=8)
    with pytest.raises(ValueError, match="search_prompts: end must hold tokens from 0 to 49, got 50"):
        search_prompts(model, PROMPTS, [50], max_new_tokens=2)
    assert search_prompts(model, []) == []
