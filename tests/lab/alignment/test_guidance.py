"""Links of words become links of tokens, and a loss that attention learns by."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import across
from small_models import ENGLISH, FRENCH, SOURCE, TARGET
from tiers import examples

from regard_lab.data.batches import Batches
from regard_lab.data.pairs import Pairs
from regard_lab.models import RecurrentConfig
from regard_lab.tasks.translation.alignment import guidance
from regard_lab.tasks.translation.alignment.guidance import Guidance, Guide, Side
from regard_lab.tasks.translation.options import DataOptions, ExperimentOptions
from regard_lab.text.ragged import Ragged
from regard_lab.text.vocabulary import SubwordVocabulary
from regard_lab.text.words import find_words, normalize, split_at_spaces, split_elisions
from regard_lab.training.objectives import alignment_loss


@settings(derandomize=True, deadline=None)
@given(
    st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 3)), unique=True, max_size=12),
)  # fmt: skip
def test_the_loss_is_the_mean_cross_entropy_of_steps_with_links(seed, B, T, S, links):
    links = [(b % B, t % T, s % S) for b, t, s in links]
    links = sorted(set(links))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, T, S, generator=generator, dtype=torch.float64).requires_grad_()
    given = torch.tensor(links, dtype=torch.int64).view(-1, 3)
    loss = alignment_loss(scores.softmax(-1), given)
    steps = {(b, t) for b, t, _ in links}
    right = torch.zeros((), dtype=torch.float64)
    logs = scores.log_softmax(-1)
    for b, t in steps:
        mine = [s for row, step, s in links if (row, step) == (b, t)]
        right = right - logs[b, t, mine].mean() / len(steps)
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-5, abs=1e-6)
    if steps:
        (found,) = torch.autograd.grad(loss, scores)
        (wanted,) = torch.autograd.grad(right, scores)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_weight_of_zero_makes_no_infinite_loss():
    weights = torch.tensor([[[0.0, 1.0]]], requires_grad=True)
    loss = alignment_loss(weights, torch.tensor([[0, 0, 0]]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(weights.grad).all()


KINDS = {"bpe": 25, "unigram": 14, "characters": 13}
KNOWN = {
    kind: SubwordVocabulary.train(["the cat", "a dog, too"] * 3, size=size, kind=kind) for kind, size in KINDS.items()
}


def flat(links):
    return Ragged.of([number for link in sorted(each) for number in link] for each in links)


TEXTS = ["L'homme dort-il ?", "I'm not sure.", "the cat", "a", "Ça va, merci !", "日本語 ok", "e\u0301te\u0301 1,000 x"]


@pytest.mark.filterwarnings("ignore::regard.RegardWarning")
@across(
    {
        "fallback": [False, True],
        "cut": [find_words, split_at_spaces, guidance.pieces],
        "kind": ["bpe", "unigram", "characters"],
    }
)
def test_tokens_of_words_cover_all_and_only_their_characters(kind, cut, fallback):
    texts = [normalize(text) for text in TEXTS]
    vocabulary = SubwordVocabulary.train(texts * 3, size=400, kind=kind, byte_fallback=fallback)
    for text in texts:
        numbers = vocabulary.encode(text)
        whole, places = vocabulary.placed(numbers)
        shift = len(whole) - len(text)
        assert whole[shift:] == text
        words = cut(text)
        found = vocabulary.covering(text, numbers, words)
        assert len(found) == len(words) and all(len(tokens) for tokens in found)
        spaces = {token for token, (begin, end) in enumerate(places) if whole[begin:end] in ("", " ")}
        for (start, stop), tokens in zip(words, found):
            inside = {
                token
                for token, (begin, end) in enumerate(places)
                if token not in spaces and any(start <= place - shift < stop for place in range(begin, end))
            }
            assert inside <= set(tokens) <= inside | spaces
        assert all(one.start <= two.start for one, two in pairwise(found))


def test_what_is_unknown_keeps_its_place():
    vocabulary = SubwordVocabulary.train(["the cat"] * 3, kind="characters")
    numbers = vocabulary.encode("the zat cat")
    assert vocabulary.covering("the zat cat", numbers, find_words("the zat cat"))[2] == range(8, 12)


def _guide(links):
    numbers = SOURCE.encode_all(ENGLISH), TARGET.encode_all(FRENCH)
    sides = Side(SOURCE, ENGLISH), Side(TARGET, FRENCH)
    return Guide(sides, numbers, np.arange(len(ENGLISH)), flat(links), find_words), numbers


def test_links_of_words_are_links_of_their_tokens():
    links = [frozenset({(0, 0), (1, 2), (3, 1), (4, 3)}), frozenset(), *[frozenset({(0, 0)})] * 3]
    guide, numbers = _guide(links)
    source, target = (vocabulary.words(numbers[side][0].tolist()) for side, vocabulary in enumerate((SOURCE, TARGET)))
    assert [word.text for word in source] == ["the", "zone", "of", "international", "control"]
    assert set(guide(0)) == {(t, s) for i, j in links[0] for t in target[j].tokens for s in source[i].tokens}
    assert guide(1) == [] and guide(2)


@pytest.mark.filterwarnings("ignore::regard.RegardWarning")
def test_texts_that_are_split_in_several_ways_keep_their_links():
    vocabulary = SubwordVocabulary.train(ENGLISH * 4, size=300)
    numbers = vocabulary.sample_all(ENGLISH, 0.6, 1, 4)
    plain = vocabulary.encode_all(ENGLISH)
    links = [frozenset((i, i) for i in range(len(find_words(text)))) for text in ENGLISH]
    sides = Side(vocabulary, ENGLISH), Side(vocabulary, ENGLISH)
    guide = Guide(sides, (numbers, numbers), np.arange(20) % 5, flat(links), find_words)
    assert any(numbers[row].tolist() != plain[row % 5].tolist() for row in range(20))
    for row in range(20):
        found = guide(row)
        assert {t for t, _ in found} == set(range(len(numbers[row])))
        words = vocabulary.covering(ENGLISH[row % 5], numbers[row].tolist(), find_words(ENGLISH[row % 5]))
        assert set(found) == {(t, s) for word in words for t in word for s in word}


def test_batches_carry_the_links_of_their_rows():
    links = [frozenset({(0, 0)}), frozenset(), frozenset({(1, 1), (0, 2)}), frozenset({(2, 2)}), frozenset({(0, 2)})]
    guide, numbers = _guide(links)
    batches = Batches(*numbers, size=2, links=guide)
    seen = {}
    for batch in batches.once():
        assert batch.links.shape[1] == 3 and batch.to("cpu").links is not None
        for place, row in enumerate(batch.rows.tolist()):
            mine = batch.links[batch.links[:, 0] == place][:, 1:].tolist()
            seen[row] = [tuple(link) for link in mine]
            assert all(t < batch.target.shape[1] and s < batch.lengths[place] for t, s in mine)
    assert seen == {row: guide(row) for row in range(5)}


def test_what_is_elided_is_linked_by_itself(tmp_path):
    learn = Pairs(["l'homme dort"] * 30 + ["l'eau"] * 30, ["the man sleeps"] * 30 + ["the water"] * 30)
    found = Guidance(ExperimentOptions(data=DataOptions(align=True)), tmp_path, RecurrentConfig(8, 8))
    mark = found.find(learn)
    assert str(found) == "attention is guided by 150 links in 60 pairs"
    assert [len(split_elisions(text, find_words(text))[0]) for text in ("l'homme dort", "l'eau")] == [3, 2]
    assert (tmp_path / "links.txt").read_text(encoding="utf-8").splitlines()[0] == "0-0 1-1 2-2"
    assert found.find(learn, mark) == mark
    assert str(found) == "attention is guided by 150 links in 60 pairs"
    for damage in ("0-0\n", "0-0\n" * 59 + "9-0\n", "x\n" * 60, "\n" * 60, "0-0\n" * 60, None):
        (tmp_path / "links.txt").unlink()
        if damage is not None:
            (tmp_path / "links.txt").write_text(damage, encoding="utf-8")
        with pytest.raises(ValueError, match=r"be the file that the run began with, got one that is damaged"):
            found.find(learn, mark)


def test_nothing_is_guided_unless_it_is_asked_for(tmp_path):
    found = Guidance(ExperimentOptions(), tmp_path, RecurrentConfig(8, 8))
    assert found.find(Pairs(["a"], ["b"])) == ""
    assert found.guide(Pairs(["a"], ["b"]), (SOURCE, TARGET), (flat([]), flat([])), np.arange(1)) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters"])
@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(
    text=st.lists(st.sampled_from(["the", "cat", "Жзык", "象象", "cat,", "Ж", "aЖb", "dog"]), min_size=1, max_size=6)
)
def test_words_that_are_not_wholly_known_keep_their_tokens(kind, text):
    vocabulary = KNOWN[kind]
    text = " ".join(text)
    words = find_words(text)
    numbers = vocabulary.encode(text)
    found = vocabulary.covering(text, numbers, words)
    shown = vocabulary.tokens(numbers)
    for (start, stop), tokens in zip(words, found):
        said = text[start:stop]
        assert len(tokens), (said, shown)
        if said in ("the", "cat"):
            assert "".join(shown[token] for token in tokens).replace("▁", "").startswith(said)
