"""Beam search: greedy at width one, exhaustive at full width, and the same for a source in any company."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tabled import Tabled, everything, log_probability, repeats
from tiers import examples
from torch import Tensor

from regard_lab.generation.beam_search import Beams, Hypothesis, SearchOptions, allowed_logits, search, top_candidates
from regard_lab.models import (
    EncoderDecoder,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
)
from regard_lab.models.base import END, PAD
from regard_lab.text.ragged import pad
from regard_lab.text.vocabulary import UNKNOWN

LINES = [[3, 4, 5], [6, 7], [8], [2, 2, 2, 2], [5, 3]]
SOURCE, LENGTHS = pad(LINES)


def found(model: EncoderDecoder, lines: list[list[int]], **options: object) -> list[list[Hypothesis]]:
    return search(model, *pad(lines), SearchOptions(**options))


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    penalty=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    n_best=st.sampled_from([1, 3, 7]),
    min_length=st.integers(0, 3),
    no_repeat=st.integers(0, 3),
    end=st.sampled_from([-3.0, 0.0, 2.0]),
)
def test_wide_beams_find_the_best(
    seed: int, penalty: float, n_best: int, min_length: int, no_repeat: int, end: float
) -> None:
    model = Tabled(targets=5, seed=seed, end=end)
    options = SearchOptions(400, n_best, penalty, no_repeat, min_length, ratio=0, extra=4)
    for source, answers in zip(LINES, search(model, SOURCE, LENGTHS, options)):
        best = everything(model, source, options)[:n_best]
        assert [each.numbers for each in answers] == [target for target, _, _ in best]
        for each, (_, score, rank) in zip(answers, best):
            assert each.score == pytest.approx(score, abs=1e-9)
            assert each.normalized == pytest.approx(rank, abs=1e-9)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), beams=st.integers(1, 6), penalty=st.sampled_from([0.0, 1.0]))
def test_answers_are_ranked_and_their_scores_are_the_models(seed: int, beams: int, penalty: float) -> None:
    model = Tabled(targets=7, seed=seed)
    for source, answers in zip(LINES, found(model, LINES, beams=beams, n_best=beams, length_penalty=penalty)):
        assert 1 <= len(answers) <= beams
        assert len({each.numbers for each in answers}) == len(answers)
        assert [each.normalized for each in answers] == sorted((each.normalized for each in answers), reverse=True)
        for each in answers:
            assert len(each.numbers) <= 2 * len(source) + 8
            assert not {PAD, END} & set(each.numbers)
            assert each.score == pytest.approx(log_probability(model, source, each.numbers), abs=1e-9)
            assert each.normalized == pytest.approx(each.score / ((6 + len(each.numbers)) / 6) ** penalty)


@pytest.mark.parametrize("beams", [1, 400])
def test_what_is_unknown_may_be_barred(beams: int) -> None:
    model = Tabled(targets=5, seed=4)
    model.table.data[..., UNKNOWN] += 4.0
    options = SearchOptions(beams, min_length=2, ratio=0, extra=4, unknown=False)
    for source, (answer,) in zip(LINES, search(model, SOURCE, LENGTHS, options)):
        assert UNKNOWN not in answer.numbers
        assert UNKNOWN in found(model, [source], min_length=2, ratio=0, extra=4)[0][0].numbers
        best = next(target for target, _, _ in everything(model, source, options) if UNKNOWN not in target)
        assert beams == 1 or answer.numbers == best


def tied(ranked: list[tuple[float, tuple[int, ...]]], first: int, last: int) -> bool:
    """Return whether two neighbours of these places differ by no more than rounding: sums of the same numbers do."""
    scores = [score for score, _ in ranked[first : last + 1]]
    return any(a - b < 1e-9 for a, b in pairwise(scores))


def plainly(model: Tabled, source: list[int], options: SearchOptions) -> list[tuple[int, ...]] | None:
    """Search with lists, hypothesis by hypothesis, for as long as the limit allows; None where rounding decides."""
    table = model.table.detach().log_softmax(-1)[sum(source) % 7].tolist()
    limit = int(options.limits(torch.tensor([len(source)])))
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, (PAD, END))]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for step in range(limit + 1):
        following = []
        for score, path in beams:
            for symbol in range(1, model.config.targets):
                longer = (*path, symbol)
                barred = step < options.min_length if symbol == END else step == limit
                if options.no_repeat and symbol != END and repeats(longer[2:], options.no_repeat):
                    barred = True
                if not barred:
                    following.append((score + table[path[-2]][path[-1]][symbol], longer))
        following.sort(reverse=True)
        going_on = [each for each in following if each[1][-1] != END]
        if any(tied(each, options.beams - 1, options.beams) for each in (following, going_on)):
            return None
        for score, path in following[: options.beams]:
            if path[-1] == END:
                ended.append((score / ((5 + step + 1) / 6) ** options.length_penalty, path[2:-1]))
        beams = going_on[: options.beams]
        if options.beams == 1 and ended:
            break
    ended.sort(reverse=True)
    return None if tied(ended, 0, options.n_best) else [path for _, path in ended[: options.n_best]]


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    beams=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.6, 1.5]),
    min_length=st.integers(0, 4),
    no_repeat=st.integers(0, 3),
    end=st.sampled_from([-2.0, 0.0, 2.0]),
    data=st.data(),
)
def test_narrow_beams_find_what_a_plain_search_finds(
    seed: int, beams: int, penalty: float, min_length: int, no_repeat: int, end: float, data: st.DataObject
) -> None:
    model = Tabled(targets=9, seed=seed, end=end)
    n_best = data.draw(st.integers(1, beams))
    options = SearchOptions(beams, n_best, penalty, no_repeat, min_length, ratio=1.5, extra=3)
    answers = search(model, SOURCE, LENGTHS, options)
    plain = [plainly(model, line, options) for line in LINES]
    assume(all(each is not None for each in plain))
    assert [[each.numbers for each in best] for best in answers] == plain


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_one_beam_is_greedy(penalty: float) -> None:
    for seed in range(8):
        model = Tabled(seed=seed)
        for source, answers in zip(LINES, found(model, LINES, beams=1, length_penalty=penalty)):
            greedy: list[int] = []
            while len(greedy) < 2 * len(source) + 8:
                logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[END, *greedy]]))
                logits[..., PAD] = -torch.inf
                token = int(logits[0, -1].argmax())
                if token == END:
                    break
                greedy.append(token)
            assert [list(each.numbers) for each in answers] == [greedy]


def test_more_beams_find_nothing_worse_as_a_rule() -> None:
    best = [
        [answers[0].normalized for answers in found(Tabled(20, 30, seed=3, end=1.0), LINES, beams=beams)]
        for beams in (1, 5, 60)
    ]
    assert sum(best[0]) < sum(best[1]) <= sum(best[2])


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), no_repeat=st.integers(1, 4), beams=st.integers(1, 4))
def test_no_run_is_written_twice(seed: int, no_repeat: int, beams: int) -> None:
    model = Tabled(seed=seed, end=-4.0)
    for answers in found(model, LINES, beams=beams, n_best=beams, no_repeat=no_repeat, ratio=0, extra=12):
        assert answers
        for each in answers:
            assert not repeats(each.numbers, no_repeat)
    endless = found(Tabled(seed=seed, end=-1e9), LINES, beams=1, ratio=0, extra=40)
    assert any(repeats(answers[0].numbers, no_repeat) for answers in endless)


@pytest.mark.parametrize("beams", [1, 4])
def test_lengths_keep_their_bounds(beams: int) -> None:
    endless, terse = Tabled(end=-1e9), Tabled(end=1e9)
    assert [len(a[0].numbers) for a in found(endless, LINES, beams=beams)] == [2 * len(s) + 8 for s in LINES]
    limited = found(endless, LINES, beams=beams, ratio=1.5, extra=1)
    assert [len(a[0].numbers) for a in limited] == [math.floor(1.5 * len(s)) + 1 for s in LINES]
    assert {len(a[0].numbers) for a in found(endless, LINES, beams=beams, max_length=3)} == {3}
    assert [a[0].numbers for a in found(terse, LINES, beams=beams)] == [()] * len(LINES)
    assert {len(a[0].numbers) for a in found(terse, LINES, beams=beams, min_length=5)} == {5}
    assert {len(a[0].numbers) for a in found(endless, LINES, beams=beams, min_length=50, extra=0)} == {50}


def _models() -> dict[str, EncoderDecoder]:
    torch.manual_seed(0)
    recurrent = RecurrentConfig(12, 80, embedding=6, encoder=5, decoder=7, features=8)
    transformer = TransformerConfig(12, 80, width=8, heads=2, feedforward=16, encoder_layers=1, decoder_layers=2)
    models = {
        "table": Tabled(12, 80),
        "recurrent": RecurrentEncoderDecoder(recurrent),
        "transformer": TransformerEncoderDecoder(transformer),
    }
    for model in models.values():
        model.double().eval()
    for name in ("recurrent", "transformer"):
        for parameter in models[name].parameters():
            parameter.data *= 2.0  # decisions that no rounding turns
    return models


MODELS = _models()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [{"beams": 1}, {"beams": 4, "n_best": 3}, {"sample": True, "n_best": 3}, {"no_repeat": 2, "length_penalty": 1}],
    ids=str,
)
def test_a_source_is_treated_the_same_in_any_company(name: str, options: dict[str, object]) -> None:
    model, lines = MODELS[name], [*LINES, [11, 3, 9, 4, 2, 7, 8], [10]]
    together = found(model, lines, **options)
    padded = search(model, torch.nn.functional.pad(pad(lines)[0], (0, 5)), pad(lines)[1], SearchOptions(**options))
    turned = found(model, lines[::-1], **options)[::-1]
    alone = [found(model, [line], **options)[0] for line in lines]
    numbers = [[each.numbers for each in answers] for answers in together]
    for other in (padded, turned, alone):
        assert [[each.numbers for each in answers] for answers in other] == numbers
        assert [a[0].score for a in other] == pytest.approx([a[0].score for a in together], abs=1e-9)
    for line, answers in zip(lines, together):
        for each in answers:
            assert each.score == pytest.approx(log_probability(model, line, each.numbers), abs=1e-9)


def test_finished_sources_leave_the_batch() -> None:
    model = Tabled(end=1e9)
    found(model, LINES, beams=5)
    assert model.steps == [len(LINES)]
    model = Tabled(end=-1e9)
    found(model, [[3], [4, 4, 4, 4]], beams=3, ratio=1, extra=0)
    assert model.steps == [2, 6, 3, 3, 3]


def test_sampling_follows_the_probabilities() -> None:
    model, draws = Tabled(targets=6, seed=5, spread=0.7), 4000
    for options in (
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 4, "top_p": 0.8},
    ):
        answers = found(model, [[3]], sample=True, n_best=draws, ratio=0, extra=1, seed=11, **options)[0]
        wanted = model.table[3, PAD, END].detach().clone() / options.get("temperature", 1.0)
        wanted[PAD] = -torch.inf
        if "top_k" in options:
            wanted[wanted < wanted.topk(options["top_k"]).values[-1]] = -torch.inf
        share = wanted.softmax(0)
        if "top_p" in options:
            ranked, at = share.sort(descending=True)
            share[at[ranked.cumsum(0) - ranked >= options["top_p"]]] = 0.0
            share = share / share.sum()
        first = torch.tensor([each.numbers[0] if each.numbers else END for each in answers])
        seen = torch.bincount(first, minlength=6).double()
        assert (seen[share == 0] == 0).all()
        expected = share[share > 0] * draws
        chi2 = float(((seen[share > 0] - expected) ** 2 / expected).sum())
        assert chi2 < 20.5, options  # 1 in 1000 for 5 degrees of freedom


def test_samples_depend_on_the_seed_and_the_source_alone() -> None:
    model = Tabled(targets=30, spread=0.5)
    one = found(model, LINES, sample=True, n_best=2, seed=1)
    assert one == found(model, LINES, sample=True, n_best=2, seed=1)
    assert one != found(model, LINES, sample=True, n_best=2, seed=2)
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    found(model, LINES, sample=True)
    assert torch.equal(torch.rand(2), expected), "the global generator is left alone"
    for answers in one:
        assert len(answers) == 2
        assert answers[0].normalized >= answers[1].normalized


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), N=st.sampled_from([5, 63, 64, 65, 300, 1000]), count=st.integers(1, 12),
    beams=st.integers(1, 5), ties=st.booleans(),
)  # fmt: skip
def test_runs_hold_the_likeliest(seed: int, N: int, count: int, beams: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    gains = torch.randn(3, beams, N, generator=generator)
    score = torch.randn(3, beams, generator=generator)
    if ties:
        gains, score = gains.round(), score.round()
    runs = [gains[..., first : first + 64].amax(-1) for first in range(0, N, 64)]
    made = top_candidates(score, gains, count, torch.stack(runs, -1))
    total = (score[..., None] + gains).flatten(1)
    assert torch.equal(made.score, total.topk(min(count, beams * N)).values)
    assert torch.equal(total.gather(1, made.parent * N + made.symbol), made.score)
    assert all(len(set(row)) == len(row) for row in (made.parent * N + made.symbol).tolist())


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), N=st.sampled_from([4, 63, 64, 65, 200]), beams=st.integers(1, 3),
    min_length=st.integers(0, 4), no_repeat=st.integers(0, 2), limit=st.integers(2, 5), unknown=st.booleans(),
)  # fmt: skip
def test_what_may_come_next(
    seed: int, N: int, beams: int, min_length: int, no_repeat: int, limit: int, unknown: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = 5 * torch.randn(2, beams, N, generator=generator)
    tokens = torch.randint(3, N, (2, beams, 3), generator=generator)
    front = Beams(torch.arange(2), torch.tensor([limit, 9]), torch.zeros(2, beams), tokens)
    options: dict[str, Any] = {"min_length": min_length, "no_repeat": no_repeat, "unknown": unknown}
    logits, total, maxima = allowed_logits(given.clone(), front, **options)
    torch.testing.assert_close(total, given.logsumexp(-1))
    runs = [logits[..., first : first + 64].amax(-1) for first in range(0, N, 64)]
    assert torch.equal(maxima, torch.stack(runs, -1))
    for row in range(2):
        for beam in range(beams):
            written = tokens[row, beam, 1:].tolist()
            barred = {PAD} | (set() if unknown else {UNKNOWN}) | ({END} if min_length > 2 else set())
            if no_repeat:
                runs_so_far = [written[i : i + no_repeat] for i in range(3 - no_repeat)]
                barred |= {each[-1] for each in runs_so_far if each[:-1] == written[3 - no_repeat :]}
            if limit == 2 and row == 0:
                barred |= set(range(N)) - {END}
            for symbol in range(N):
                wanted = -math.inf if symbol in barred else float(given[row, beam, symbol])
                assert float(logits[row, beam, symbol]) == wanted


def test_bfloat16_logits_become_float32() -> None:
    front = Beams.first(SOURCE, LENGTHS, 1)
    logits, total, maxima = allowed_logits(torch.zeros(5, 1, 8, dtype=torch.bfloat16), front, min_length=0, no_repeat=0)
    assert logits.dtype == total.dtype == torch.float32
    assert maxima.tolist() == [[[0.0]]] * 5
    assert (logits - total[..., None])[0, 0].tolist() == [-math.inf, *[pytest.approx(-math.log(8))] * 7]


def test_nothing_to_read_and_nothing_allowed() -> None:
    assert search(Tabled(), SOURCE[:0], LENGTHS[:0]) == []
    model = Tabled(targets=4)
    assert found(model, [[3]], no_repeat=1, min_length=9) == [[]], "two symbols cannot make nine different ones"


def test_no_gradient_is_kept_and_the_mode_is_left_alone() -> None:
    model = MODELS["recurrent"].train()
    found(model, LINES)
    assert model.training
    model.eval()
    assert all(parameter.grad is None for parameter in model.parameters())


class Interrupted(Tabled):
    """Is interrupted once, in its third step."""

    def advance(self, last: Tensor, memory: object, state: object) -> object:
        if len(self.steps) == 2:
            self.steps += [0]
            raise KeyboardInterrupt
        return super().advance(last, memory, state)


def test_after_an_interrupt_all_is_as_before() -> None:
    model = Interrupted(end=-5.0)
    with pytest.raises(KeyboardInterrupt):
        found(model, LINES)
    assert torch.is_grad_enabled()
    assert found(model, LINES) == found(Tabled(end=-5.0), LINES)


def test_logits_that_are_no_numbers_are_named() -> None:
    model = Tabled()
    model.table.data[3, :, 4] = torch.nan
    model.table.data[3, :, :, 4] += 50
    with pytest.raises(ValueError, match=r"^search: model must return logits without NaN, got nan\.$"):
        found(model, [[3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 0}, "search: beams must be an int from 1 to 1,000, got 0."),
        ({"beams": 1001}, "search: beams must be an int from 1 to 1,000, got 1001."),
        ({"sample": True, "n_best": 10**9}, "search: n_best must be an int from 1 to 10,000, got 1000000000."),
        ({"beams": 2, "n_best": 3}, "search: n_best must be at most beams, which is 2, got 3."),
        ({"length_penalty": -1}, "search: length_penalty must be a finite number of at least 0, got -1."),
        ({"ratio": math.inf}, "search: ratio must be a finite number of at least 0, got inf."),
        ({"no_repeat": -1}, "search: no_repeat must be an int of at least 0, got -1."),
        ({"top_k": 3}, "search: top_k has no effect in beam search; set sample."),
        ({"seed": 3}, "search: seed has no effect in beam search; set sample."),
        ({"sample": True, "beams": 3}, "search: beams has no effect when sampling."),
        ({"temperature": 0.5}, "search: temperature has no effect in beam search; set sample."),
        ({"sample": True, "temperature": 0}, "search: temperature must be a positive finite number, got 0."),
        ({"sample": True, "top_p": 0.0}, "search: top_p must be a number in (0, 1], got 0.0."),
        ({"beams": 2.5}, "search: beams must be an int from 1 to 1,000, got 2.5."),
        ({"sample": 1}, "search: sample must be a bool, got 1."),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        SearchOptions(**options)
    assert str(caught.value) == message
