"""Beam search: greedy at width one, exhaustive at full width, and the same for a word in any company."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from regard.models import RecurrentConfig, RecurrentEncoderDecoder
from regard.tasks.search import beam_search
from regard.tasks.vocabulary import END, PAD


@pytest.fixture
def model() -> RecurrentEncoderDecoder:
    torch.manual_seed(0)
    config = RecurrentConfig(sources=12, targets=5, embedding=6, encoder=5, decoder=7, features=8, dropout=0.0)
    model = RecurrentEncoderDecoder(config).double().eval()
    torch.nn.init.normal_(model.output.weight, std=2.0)
    return model


SOURCE, LENGTHS = torch.tensor([[3, 4, 5], [6, 7, 0], [8, 0, 0]]), torch.tensor([3, 2, 1])


@torch.no_grad()
def _log_probability(model: RecurrentEncoderDecoder, source: Tensor, target: list[int]) -> float:
    given = torch.tensor([[END, *target]])
    logits = model(source[None], torch.tensor([len(source)]), given)[0].clone()
    logits = logits.log_softmax(-1)
    return float(logits.gather(1, torch.tensor([*target, END])[:, None]).sum())


def test_one_beam_is_greedy(model: RecurrentEncoderDecoder) -> None:
    found = beam_search(model, SOURCE, LENGTHS, beams=1)
    for source, length, answer in zip(SOURCE, LENGTHS.tolist(), found):
        greedy: list[int] = []
        while len(greedy) < 2 * length + 8:
            logits = model(source[None, :length], torch.tensor([length]), torch.tensor([[END, *greedy]]))[0, -1].clone()
            logits[PAD] = -torch.inf
            token = int(logits.argmax())
            if token == END:
                break
            greedy.append(token)
        assert answer == greedy


def test_wide_beams_find_the_likeliest(model: RecurrentEncoderDecoder) -> None:
    with torch.no_grad():
        model.output.bias[END] = 4.0  # short answers, so that all of them can be tried
    source = SOURCE[0]
    answer = beam_search(model, source[None], LENGTHS[:1], beams=200)[0]
    every = [list(t) for n in range(5) for t in itertools.product((2, 3, 4), repeat=n)]
    best = max(every, key=lambda target: _log_probability(model, source, target))
    assert _log_probability(model, source, answer) >= _log_probability(model, source, best) - 1e-9


@pytest.mark.parametrize("beams", [1, 4])
def test_a_word_is_the_same_in_any_company(model: RecurrentEncoderDecoder, beams: int) -> None:
    together = beam_search(model, SOURCE, LENGTHS, beams=beams)
    padded = beam_search(model, torch.nn.functional.pad(SOURCE, (0, 5)), LENGTHS, beams=beams)
    rows = [(SOURCE[i : i + 1, :n], LENGTHS[i : i + 1]) for i, n in enumerate((3, 2, 1))]
    alone = [beam_search(model, *row, beams=beams)[0] for row in rows]
    assert together == padded == alone


def test_a_model_that_never_ends_is_stopped(model: RecurrentEncoderDecoder) -> None:
    with torch.no_grad():
        model.output.bias[END] = -1e9
    assert [len(answer) for answer in beam_search(model, SOURCE, LENGTHS)] == [2 * n + 8 for n in (3, 2, 1)]
