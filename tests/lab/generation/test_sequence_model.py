"""A model with its vocabularies, put to lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from small_models import ENGLISH, FRENCH, LINES, MAKERS, SOURCE, TARGET, recurrent, transformer
from tabled import Tabled

from regard_lab.data import batches
from regard_lab.generation import sequence_model as sequences
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.generation.sequence_model import SequenceModel, replace_unknown
from regard_lab.models.base import END
from regard_lab.models.registry import MODELS
from regard_lab.text.vocabulary import UNKNOWN, SubwordVocabulary, SymbolVocabulary


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    return MAKERS[request.param]()


def test_vocabularies_of_other_sizes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"target must have the {len(TARGET)} symbols that the model knows, got {len(SOURCE)}\."
    ):
        SequenceModel(recurrent().model, SOURCE, SOURCE)


def test_a_model_says_what_it_is(model: SequenceModel) -> None:
    shown = f"{sum(each.numel() for each in model.model.parameters()):,} parameters"
    assert shown in repr(model) and f"{type(model.source).__name__} of {len(model.source)} symbols" in repr(model)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_lines_come_back_in_order_and_do_not_depend_on_each_other(model: SequenceModel, batch: int) -> None:
    options = PredictionOptions(alignment=True, batch=batch)
    written = model.predict(LINES, options)
    assert [each.source for each in written] == LINES
    for line, each in zip(LINES, written):
        alone = model.predict([line], options)[0]
        assert (each.text, each.tokens) == (alone.text, alone.tokens)
        assert each.score == pytest.approx(alone.score, abs=1e-4)
        if not line.strip():
            assert (each.text, each.tokens, each.score, each.alignment) == ("", (), 0.0, None)
        else:
            torch.testing.assert_close(each.alignment, alone.alignment, atol=1e-5, rtol=1e-4)


def test_the_alignment_is_the_models_for_what_was_written(model: SequenceModel) -> None:
    options = PredictionOptions(SearchOptions(n_best=3), alignment=True)
    for line, best in zip(LINES, model.predict(LINES, options)):
        if not line.strip():
            continue
        source = SOURCE.encode(line)
        assert best.source_tokens == tuple(SOURCE.tokens(source))
        assert len(best.alternatives) == 2
        for each in (best, *best.alternatives):
            assert each.maps == model.model.maps
            assert each.alignment.shape == (len(each.maps), len(each.tokens), len(source))
            torch.testing.assert_close(each.alignment.sum(-1), torch.ones(each.alignment.shape[:2]))
            numbers = [next(n for n in range(len(TARGET)) if TARGET.tokens([n]) == [token]) for token in each.tokens]
            assert each.text == TARGET.decode(numbers).strip()
            target = torch.tensor([[END, *numbers]])
            weights = model.model.align(torch.tensor([source]), torch.tensor([len(source)]), target)[0, :, :-1]
            torch.testing.assert_close(each.alignment, weights.detach(), atol=1e-5, rtol=1e-4)
        assert best.normalized >= best.alternatives[0].normalized >= best.alternatives[1].normalized
    assert model.predict(LINES[:1])[0].alignment is None


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2, 64])
@pytest.mark.parametrize("kind", MODELS)
def test_given_targets_have_the_score_and_the_alignment_that_they_would_have_if_written(kind: str, batch: int) -> None:
    config, made = MODELS[kind]
    words = SymbolVocabulary.train(FRENCH, " ")  # which spells a text in one way alone
    torch.manual_seed(0)
    model = SequenceModel(made(config.preset("small", len(SOURCE), len(words))), SOURCE, words)
    search = SearchOptions(n_best=5, length_penalty=0.9, max_length=5, unknown=False)
    options = PredictionOptions(search, alignment=True, replace_unknown=False, batch=batch)
    found = model.predict(LINES, options)
    written = [one for each in found for one in (each, *each.alternatives) if one.tokens]
    assert len(written) > 20
    told = model.align([each.source for each in written], [each.text for each in written], options)
    for each, other in zip(written, told, strict=True):
        assert (each.text, each.tokens, each.source_tokens) == (other.text, other.tokens, other.source_tokens)
        assert (other.words, other.source_words, other.maps) == (each.words, each.source_words, each.maps)
        assert (other.score, other.normalized) == pytest.approx((each.score, each.normalized), abs=1e-4)
        torch.testing.assert_close(other.alignment, each.alignment, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_score_of_a_given_target_is_the_sum_of_its_steps(model: SequenceModel) -> None:
    source, target = SOURCE.encode("the cat"), [*TARGET.encode("un chat"), END]
    memory = model.model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    state, last, total = model.model.start(memory, 1), END, 0.0
    for number in target:
        logits, state = model.model.step(torch.tensor([[last]]), memory, state)
        total, last = total + float(logits[0, 0].double().log_softmax(-1)[number]), number
    (told,) = model.align(["the cat"], ["un chat"])
    assert told.score == pytest.approx(total, abs=1e-4)


def test_given_words_that_the_vocabulary_cannot_spell_are_told_as_they_are() -> None:
    (told,) = recurrent().align(["the cat"], ["un  chat 漢字!"])
    assert told.text == "un  chat 漢字!" and "<unk>" in told.tokens
    assert [word.text for word in told.words][-1].startswith("漢字")


def test_long_targets_go_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_PLACES", 64)
    model, seen = recurrent(), []
    monkeypatch.setattr(sequences, "score_targets", lambda _, pairs: seen.append(len(pairs)) or [0.0] * len(pairs))
    assert len(model.align(["the cat"] * 4, ["le chat et le chien " * 8] * 4)) == 4
    assert seen == [1] * 4


def test_what_cannot_be_aligned_is_told() -> None:
    model = recurrent()
    empty = model.align(["the cat", "", "a dog"], ["", "un chat", "un chien"])
    assert [each.alignment is None for each in empty] == [True, True, False]
    with pytest.raises(ValueError, match=r"align: targets must be as many as sources, 2, got 1\."):
        model.align(["a", "b"], ["a"])
    for given in ("a", ["a"]), (["a"], "a"):
        with pytest.raises(TypeError, match=r"align: sources and targets must be lists of lines, got a str\."):
            model.align(*given)
    short = transformer(positions="learned", max_length=4)
    with pytest.raises(ValueError, match=r"align: target 2 must have at most 3 tokens, got \d+\."):
        short.align(["a", "a"], ["un", "le chien aime le chat et un chien"])


def test_a_model_without_attention_has_no_alignment() -> None:
    model = recurrent(attention="none")
    written = model.predict(LINES[:1], PredictionOptions(SearchOptions(min_length=1), alignment=True))[0]
    assert (written.alignment, written.maps) == (None, ())
    assert written.tokens


class Copying(Tabled):
    """Writes the unknown symbol twice, and looks at the last source symbol, then at the first."""

    def __init__(self, sources: int, targets: int) -> None:
        super().__init__(sources, targets)
        self.table.data.fill_(-50.0)
        self.table.data[:, :, END, UNKNOWN] = 0.0
        self.table.data[:, END, UNKNOWN, UNKNOWN] = 0.0
        self.table.data[:, UNKNOWN, UNKNOWN, END] = 0.0

    def align(self, source, lengths, target):
        weights = torch.zeros(len(source), 2, target.shape[1], source.shape[1])
        weights[torch.arange(len(source)), :, 0, lengths - 1] = 1.0
        weights[:, :, 1:, 0] = 1.0
        return weights


def test_unknown_symbols_become_the_words_looked_at() -> None:
    words = SymbolVocabulary.train(["a b"], " ")
    model = SequenceModel(Copying(len(words), len(words)), words, words)
    assert [each.text for each in model.predict(["Bonn a (Köln)", "b"])] == ["Köln Bonn", "b b"]
    for options in (PredictionOptions(replace_unknown=False), PredictionOptions(SearchOptions(unknown=False))):
        known = model.predict(["Bonn a Köln"], options)[0]
        assert not {"<unk>", "\ufffd"} & {*known.tokens, *known.text} and known.alignment is None
    letters = SymbolVocabulary.train(["a b"])
    assert SequenceModel(Copying(len(letters), 6), letters, letters).predict(["a 猫x"])[0].text == "xa"
    pieces = SubwordVocabulary.train(ENGLISH, "characters")
    model = SequenceModel(Copying(len(pieces), len(words)), pieces, words)
    assert model.predict(["the cat, 猫!"])[0].text == "猫 the"
    shown = model.predict(["the cat n猫e"], PredictionOptions(alignment=True))[0]
    assert [word.text for word in shown.source_words] == ["the", "cat", "n猫e"]
    assert [word.text for word in shown.words] == shown.text.split() == ["n猫e", "the"]


def test_nothing_unknown_is_written_where_no_source_word_can_replace_it() -> None:
    letters, words = SymbolVocabulary.train(["abc"]), SymbolVocabulary.train(["a b"], " ")
    sounds = SequenceModel(Copying(len(letters), len(words)), letters, words)
    blind = SequenceModel(Copying(len(words), len(words)), words, words)
    blind.model.maps = ()
    for model in (sounds, blind):
        for search in (SearchOptions(), SearchOptions(beams=1), SearchOptions(sample=True, n_best=4)):
            for each in model.predict(["b a", "c"], PredictionOptions(search)):
                written = [each, *each.alternatives]
                assert all("<unk>" not in one.tokens and "\ufffd" not in one.text for one in written)


def test_a_word_that_is_partly_unknown_is_replaced_as_a_whole() -> None:
    pieces = SubwordVocabulary.train(["la vache", "le veau"], "characters")
    words = SymbolVocabulary.train(["a b"], " ")
    numbers = [*pieces.encode("la v"), UNKNOWN, *pieces.encode("x")[1:], UNKNOWN, *pieces.encode(" e")]
    weights = torch.zeros(len(numbers), 2)
    weights[..., 1] = 1.0
    text, told = replace_unknown(pieces, numbers, pieces.words(numbers), ["a", "vöx"], weights)
    assert text == "la vöx e"
    assert [word.text for word in told] == ["la", "vöx", "e"]
    assert replace_unknown(words, [UNKNOWN, 3], words.words([UNKNOWN, 3]), ["a", "c"], weights[:2])[0] == "c a"


def test_long_lines_are_cut_or_refused() -> None:
    model = recurrent()
    long = "the dog and " * 100
    tokens = len(SOURCE.encode(long))
    whole, short = model.predict([long, "a cat"])
    assert whole.note == "" if tokens <= 512 else f"truncated to the first 512 of {tokens} tokens"
    told, short = model.predict([long, "a cat"], PredictionOptions(max_length=20))
    assert told.note == f"truncated to the first 20 of {tokens} tokens"
    assert (told.source, len(told.source_tokens), short.note) == (long, 20, "")
    with pytest.raises(ValueError, match=rf"^predict: line 2 must have at most 20 tokens, got {tokens}\.$"):
        model.predict(["a cat", long], PredictionOptions(max_length=20, too_long="refuse"))


def test_a_model_that_knows_few_positions_is_not_asked_for_more() -> None:
    makers = {
        9: recurrent(attention="location", max_length=9),
        8: transformer(positions="learned", max_length=9),
        7: transformer(score="location", max_length=8, positions="rotary"),
    }
    for most, model in makers.items():
        told = model.predict([" ".join(ENGLISH)], PredictionOptions(SearchOptions(min_length=most), alignment=True))[0]
        assert told.note.startswith(f"truncated to the first {model.model.config.max_length} of ")
        assert len(told.tokens) >= most
        assert model.max_lengths[1] in (None, most)
    assert recurrent().max_lengths == transformer().max_lengths == (None, None)


def test_bfloat16_is_near_enough(model: SequenceModel) -> None:
    exact = model.predict(LINES, PredictionOptions(alignment=True))
    near = model.predict(LINES, PredictionOptions(alignment=True, precision="bfloat16"))
    assert not torch.is_autocast_enabled("cpu")
    same = [(one, other) for one, other in zip(exact, near) if one.tokens == other.tokens]
    assert len(same) >= len(LINES) / 2  # a model that has learned nothing has near ties, at which a search turns off
    for one, other in same:
        assert other.normalized == pytest.approx(one.normalized, rel=0.05)
    for one, other in zip(exact, near):
        assert one.alignment is None or other.alignment.dtype == torch.float32


def test_long_lines_go_in_small_batches() -> None:
    lengths = [3, 0, 5000, 20, 3000, 3000, 20000, 1]
    assert list(batches.length_batches(lengths, 3)) == [[6], [2], [4, 5], [3, 0, 7]]
    assert list(batches.length_batches([2] * 5, 2)) == [[0, 1], [2, 3], [4]]
    assert list(batches.length_batches([0, 0], 2)) == []


def test_a_stream_is_answered_in_order_and_read_ahead_so_far() -> None:
    model, taken = recurrent(), []

    def lines() -> Iterator[str]:
        for i in range(1000):
            taken.append(i)
            yield LINES[i % len(LINES)] + ("\r\n" if i % 2 else "\n")

    stream = model.stream(lines(), ahead=5)
    first = list(islice(stream, 7))
    assert len(taken) == 10
    assert [each.source for each in first] == LINES[:7]
    assert [each.text for each in first] == [each.text for each in model.predict(LINES[:7])]
    assert [each.source for each in model.stream(["x"], ahead=1)] == ["x"]
    with pytest.raises(ValueError, match=r"predict: line 3 must have at most 2 tokens"):
        list(model.stream(["a", "a", "the zone"], PredictionOptions(max_length=2, too_long="refuse"), ahead=2))
    with pytest.raises(ValueError, match=r"stream: ahead must be at least 1, got 0"):
        next(model.stream([], ahead=0))


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recurrent(dropout=0.5)
    expected = model.predict(LINES)
    model.model.train()

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "search", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.predict(LINES)
    assert model.model.training
    assert model.predict(LINES) == expected, "dropout is off while a model writes"
    assert model.model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, r"predict: max_length must be an int of at least 1, got 0\."),
        ({"batch": 1.5}, r"predict: batch must be an int of at least 1, got 1\.5\."),
        (
            {"too_long": "cute"},
            r"predict: too_long must be one of 'cut', 'refuse', got 'cute' \(did you mean 'cut'\?\)\.",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PredictionOptions(**options)


def test_what_is_no_list_of_lines_or_no_options_is_named() -> None:
    model = recurrent()
    with pytest.raises(TypeError, match=r"^predict: lines must be a list of lines, got a str\.$"):
        model.predict("a cat")
    with pytest.raises(TypeError, match=r"^predict: line 2 must be a str, got None\.$"):
        model.predict(["a cat", None])
    with pytest.raises(
        TypeError, match=r"^predict: options must be PredictionOptions, got an object of type SearchOptions"
    ):
        model.predict(["a cat"], SearchOptions(beams=2))
