"""Models that read texts rewritten: what users type goes in, and what users expect comes out."""

from __future__ import annotations

import pytest
import torch
from tabled import Config, Rows

from regard_lab.generation.beam_search import Beams, Restriction, SearchOptions, allowed_logits, top_candidates
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.generation.sequence_model import UNUSUAL, SequenceModel
from regard_lab.models.base import END, EncoderDecoder
from regard_lab.text.rewriting import Rewriting
from regard_lab.text.vocabulary import SubwordVocabulary, SymbolVocabulary

TEXTS = [
    "Ann saw Bob in 1987.",
    "We paid 3,500 for it!",
    "they saw a dog and a cat",
    "Write to a@b.org, or go to x.org 😀",
    "l'abc d'efg, hijk - lmno; pqrst: uvw? xyz! 01 23 45 67 89 vîmes",
]
#: The logit of what an :class:`Echo` writes.
LIKELY = 20.0


class Echo(EncoderDecoder):
    """Writes what it reads, but would rather leave out some symbols."""

    maps = ("one",)

    def __init__(self, symbols: int, disliked: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config = Config(symbols, symbols)
        self.disliked = disliked
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def encode(self, source, lengths):
        behind = torch.arange(source.shape[1]) >= lengths[:, None]
        return Rows(torch.cat([source.masked_fill(behind, END), torch.full_like(source[:, :1], END)], 1))

    def start(self, memory, beams):
        return Rows(torch.zeros(len(memory.rows) * beams, dtype=torch.long))

    def advance(self, last, memory, state):
        at = state.rows.view(last.shape)
        next_symbol = memory.rows.gather(1, at.clamp(max=memory.rows.shape[1] - 1))
        skipped = memory.rows.gather(1, (at + 1).clamp(max=memory.rows.shape[1] - 1))
        features = torch.nn.functional.one_hot(next_symbol, self.config.targets).double() * LIKELY
        for symbol in self.disliked:  # what comes behind it is likelier
            passed = (next_symbol == symbol)[..., None]
            features = torch.where(
                passed, features + 1.1 * LIKELY * torch.nn.functional.one_hot(skipped, self.config.targets), features
            )
        return features, Rows((at + 1).flatten())

    def logits(self, features, state=None):
        return features.clone()

    @property
    def projection(self):
        return torch.eye(self.config.targets).double(), torch.zeros(self.config.targets).double()

    def features(self, source, lengths, target, teacher_forcing=1.0):
        rows = self.encode(source, lengths).rows
        steps = torch.arange(target.shape[1]).clamp(max=rows.shape[1] - 1)
        return torch.nn.functional.one_hot(rows[:, steps], self.config.targets).double() * LIKELY

    def align(self, source, lengths, target):
        weights = torch.zeros(len(source), 1, target.shape[1], source.shape[1])
        for step in range(target.shape[1]):
            weights[:, :, step, min(step, source.shape[1] - 1)] = 1.0
        return weights


REWRITING = Rewriting.learn([(text, text) for text in TEXTS * 20] + [("we met them", "we met them")] * 30, ("en", "fr"))


def echo(**changes: object) -> SequenceModel:
    read = [REWRITING.read(text).placed.text for text in TEXTS]
    read += [REWRITING.read_pair(text, text, shift)[0].placed.text for text in TEXTS for shift in range(8)]
    vocabulary = SubwordVocabulary.train(read, "characters")
    return SequenceModel(Echo(len(vocabulary), **changes), vocabulary, vocabulary, rewriting=REWRITING)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Ann saw Bob.", "Ann saw Bob."),
        ("WE PAID FOR IT!", "WE PAID FOR IT!"),
        ("We paid 12,345.5 for it!", "We paid 12 345,5 for it!"),
        ("go to zork@x.org, 猫 😀", "go to zork@x.org, 猫 😀"),
        ("Ann’s dog", "Ann’s dog"),
        ("we met Zorkimun", "we met Zorkimun"),
        ("", ""),
    ],
)
def test_what_users_type_and_see(source: str, text: str) -> None:
    model = echo()
    (prediction,) = model.predict([source], PredictionOptions(alignment=True))
    assert prediction.text == text
    assert not prediction.note
    for words, whole in ((prediction.words, text), (prediction.source_words, source)):
        assert "".join(word.text for word in words).replace(" ", "") == whole.replace(" ", "")
    assert not any("\ue000" <= letter <= "\uf8ff" for token in prediction.tokens for letter in token)


def test_words_of_alignments_are_those_that_users_see() -> None:
    (pair,) = echo().align(["We met Zorkimun in 1,987."], ["Nous vîmes Zorkimun en 1 987."])
    assert [word.text for word in pair.source_words] == ["We", "met", "Zorkimun", "in", "1,987", "."]
    assert [word.text for word in pair.words] == ["Nous", "vîmes", "Zorkimun", "en", "1 987", "."]
    covered = [place for word in pair.source_words for place in word.tokens]
    assert covered == list(range(len(pair.source_tokens)))


def test_a_hypothesis_that_copies_all_comes_first() -> None:
    plain = echo()
    lazy = echo(disliked=tuple(number for number, text in plain.placeholders.items() if text == "\ue010"))
    (found,) = lazy.predict(["We paid 3,500 for it!"])
    assert "3 500" in found.text and not found.note
    greedy = PredictionOptions(SearchOptions(beams=1))
    (found,) = lazy.predict(["We paid 3,500 for it!"], greedy)
    assert "3 500" not in found.text and found.note == "the translation leaves out '3,500'"


def test_placeholders_of_others_are_never_written() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 150, generator=generator)
    front = Beams(torch.tensor([1, 0]), torch.tensor([9, 9]), torch.zeros(2, 3), torch.full((2, 3, 1), END))
    symbols, allowed = torch.tensor([5, 70, 149]), torch.tensor([[True, False, False], [False, False, True]])
    found, total, maxima = allowed_logits(
        logits.clone(), front, min_length=0, no_repeat=0, restriction=Restriction(symbols, allowed)
    )
    torch.testing.assert_close(total, logits.logsumexp(-1))
    wanted = logits.clone()
    wanted[..., 0] = -torch.inf
    wanted[0][:, [5, 70]] = -torch.inf  # this is source 1
    wanted[1][:, [70, 149]] = -torch.inf
    assert torch.equal(found, wanted)
    best = top_candidates(torch.zeros(2, 3), found, 4, maxima)
    assert torch.equal(best.score, wanted.flatten(1).topk(4).values)


def test_lines_do_not_depend_on_those_beside_them() -> None:
    model = echo()
    lines = ["Ann saw Bob.", "We paid 3,500 for it!", "in 1987", "a dog", "go to x.org"]
    together = [each.text for each in model.predict(lines)]
    assert together == [each.text for line in lines for each in model.predict([line])]


def test_it_is_saved_with_its_model(tmp_path) -> None:
    from small_models import transformer

    from regard_lab.generation.sequence_model import REWRITING as FILE

    small = transformer()
    SequenceModel(small.model, small.source, small.target, rewriting=REWRITING).save(tmp_path / "model")
    loaded = SequenceModel.load(tmp_path / "model")
    assert loaded.rewriting == REWRITING
    (tmp_path / "model" / FILE).write_text("{}")
    with pytest.raises(ValueError, match=r"rewriting\.json"):
        SequenceModel.load(tmp_path / "model")


def test_symbols_are_not_rewritten() -> None:
    letters = SymbolVocabulary.train(["abc"])
    with pytest.raises(ValueError, match="source must have subwords where texts are rewritten"):
        SequenceModel(Echo(len(letters)), letters, letters, rewriting=REWRITING)


def test_a_text_far_from_those_learned_from_is_reported() -> None:
    model = echo()
    model.about["usual"] = {"confidence": 0.5, "known": 0.4}
    usual, foreign = model.predict(["they saw a dog", "мы видели кота"])
    assert usual.note == "" and usual.confidence > 0.9
    assert foreign.note == UNUSUAL
    model.about["usual"] = {"confidence": 1.0, "known": 0.0}
    assert model.predict(["they saw a dog"])[0].note == UNUSUAL
