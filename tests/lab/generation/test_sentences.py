"""Lines of several sentences: taken apart, written for one by one, and put together."""

from __future__ import annotations

import random

import pytest
import torch
from small_models import MAKERS, SOURCE, recurrent

from regard_lab.generation.beam_search import SearchOptions, search
from regard_lab.generation.predictions import Prediction, PredictionOptions, join_sentences, merge_duplicates
from regard_lab.generation.sequence_model import SequenceModel, pad_to_device
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.text.vocabulary import SubwordVocabulary
from regard_lab.text.words import PARAGRAPHS, normalize, sentences


@pytest.mark.parametrize(
    "text",
    [
        "I am tired. | How are you? | Fine!",
        "i am tired. | how are you? fine",
        "Mr. Smith met Dr. J. K. Rowling and John F. Kennedy. | They spoke.",
        "It cost 3.50. | See no. 5, p. 7, fig. 2 and www.example.com. | No. | I won't.",
        "We met at 5 p.m. in the U.S. Army. | It was 5 p.m. | He left.",
        "Wait... what? | Wait... | What? | Well… maybe.",
        '"Why?" Tom asked. | "Me!" | "No." | He left. | "Stop!" she said.',
        "Il a dit : « Bonjour ! » Puis il partit. | Quoi ? | Rien !",
        "Apples, pears, etc. are fruit, e.g. here. | Apples, etc. | The end.",
        "1. Introduction. | 2. The end :-) !",
        "Don't go (please!). | Stay.",
        "She holds a Ph.D. in physics. | He holds a Ph.D. | They met.",
        "Prices (excl. tax) and miles per Imp. gallon. | Files that start with a . are hidden.",
        "I like it. | iPhones are nice. | It is near zero. | abs_tol must be positive.",
        "he holds a ph.d. in physics. | she met dr. smith. | it was 12.50. | then he left.",
        "Un jour, M. Dupont est venu. | M. le Président parle, p.ex. ici. | Il était 17 h. | Elle partit.",
        "We met on Jan. 5 and Sept. 7. | See par. 42.",
        "Take vitamin C. | It helps. | So do I. | Good.",
        "Hello . | How are you ? | Fine",
        "\u4f60\u597d\u3002|\u4f60\u597d\u5417\uff1f|\u6211\u5f88\u597d\u3002",
        "\u0647\u0644 \u0623\u0646\u062a\u061f | \u0646\u0639\u0645.",
        "!!! ???",
        "",
    ],
)
def test_sentences(text: str) -> None:
    whole = text.replace("| ", "").replace("|", "")
    expected = [each.strip() for each in text.replace("how are you? fine", "how are you? | fine").split("|")]
    assert sentences(whole) == expected


def test_nothing_of_a_text_is_lost_and_time_does_not_explode() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        text = "".join(
            drawn.choice(["a", "B", " ", ". ", "!", "? ", "...", '"', "«", "»", "Mr.", "1", "。", "…"])
            for _ in range(40)
        )
        assert "".join("".join(sentences(text)).split()) == "".join(normalize(text).split())
    for part in (".", "a. ", "1. ", '."', '"', "a.。", "a b c. ", ". "):
        assert sentences(part * 20_000)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_sentence_is_written_for(kind: str) -> None:
    model, options = MAKERS[kind](), PredictionOptions(alignment=True)
    one, other = model.predict(["the dog loves the cat.", "you and I!"], options)
    both, single = model.predict(["the dog  loves the cat. you and I!", "you and I!"], options)
    assert single.text == other.text
    assert both.text == f"{one.text} {other.text}".strip() and both.source == "the dog  loves the cat. you and I!"
    assert both.tokens == one.tokens + other.tokens and both.source_tokens == one.source_tokens + other.source_tokens
    assert both.score == pytest.approx(one.score + other.score)
    assert both.normalized == pytest.approx(one.normalized + other.normalized)
    assert both.alignment.shape == (len(model.model.maps), len(both.tokens), len(both.source_tokens))
    T, S = len(one.tokens), len(one.source_tokens)
    torch.testing.assert_close(both.alignment[:, :T, :S], one.alignment)
    torch.testing.assert_close(both.alignment[:, T:, S:], other.alignment)
    assert not both.alignment[:, :T, S:].any() and not both.alignment[:, T:, :S].any()
    assert [word.text for word in both.words] == [word.text for word in (*one.words, *other.words)]
    assert [word.text for word in both.source_words] == [word.text for word in (*one.source_words, *other.source_words)]
    assert [word.tokens.start for word in both.words[len(one.words) :]] == [T + w.tokens.start for w in other.words]


def test_when_a_line_is_read_whole() -> None:
    model, line = recurrent(), "a cat. a dog."
    apart, whole = (model.predict([line], PredictionOptions(split=split))[0] for split in (True, False))
    assert model.predict([line])[0].score == apart.score != whole.score
    model.about["lines"] = PARAGRAPHS
    assert (
        model.predict([line])[0].score == whole.score
        and model.predict([line], PredictionOptions(split=True))[0] == apart
    )


def test_errors_name_the_line_and_notes_are_kept() -> None:
    model = recurrent()
    with pytest.raises(ValueError, match=r"line 7 must have at most 4 tokens"):
        model.predict(["a cat. a dog.", "a cat. the zone of international control."],
                    PredictionOptions(max_length=4, too_long="refuse"), first=6)  # fmt: skip
    (written,) = model.predict(["a. the zone of international control."], PredictionOptions(max_length=4))
    assert written.note.startswith("truncated to the first 4 of")


def test_given_sentences_go_together_where_they_are_as_many() -> None:
    model = recurrent()
    one, other = model.align(["a cat.", "you and I."], ["un chat.", "toi et moi."])
    (both,) = model.align(["a cat. you and I."], ["un  chat. toi et moi."])
    assert both.text == "un  chat. toi et moi." and both.score == pytest.approx(one.score + other.score)
    (uneven,) = model.align(["a cat. you and I."], ["un chat, toi et moi."])
    assert len(uneven.tokens) > len(one.tokens) and uneven.alignment[0, -1, : len(one.source_tokens)].any()


def test_the_next_best_of_a_line_are_the_next_best_sums() -> None:
    def written(*options: tuple[str, float]) -> Prediction:
        first, *rest = (Prediction("s", text, score=score, normalized=score) for text, score in options)
        return merge_duplicates([first, *rest], 9)

    parts = [written(("a", -1.0), ("b", -1.5)), written(("c", -1.0), ("d", -1.2), ("e", -3.0))]
    best = join_sentences("s s", parts, 4)
    assert [each.text for each in (best, *best.alternatives)] == ["a c", "a d", "b c", "b d"]
    drawn = join_sentences(
        "s s", [written(("a", -2.0), ("b", -1.0)), written(("c", -2.0), ("d", -1.0))], 2, ranked=False
    )
    assert [each.text for each in (drawn, *drawn.alternatives)] == ["a c", "b d"]


@pytest.mark.parametrize("seed", [10, 19])  # of these, a search finds a text in two ways
def test_the_n_best_are_different_texts(seed: int) -> None:
    """A text of subwords can be written in different ones: it is there once, and others take the further places."""
    rules = [("a", "b"), (" ", "a"), ("b", "a"), (" a", "b")]
    vocabulary = SubwordVocabulary("bpe", [" ", "a", "b", "ab", " a", "ba", " ab"], rules)
    torch.manual_seed(seed)
    config = RecurrentConfig(len(SOURCE), len(vocabulary), embedding=8, encoder=8, decoder=8)
    model = SequenceModel(RecurrentEncoderDecoder(config), SOURCE, vocabulary)
    torch.nn.init.normal_(model.model.output.weight)
    options = SearchOptions(beams=6, n_best=6)
    (found,) = search(model.model, *pad_to_device(model.model, [SOURCE.encode("the cat")]), options)
    raw = [vocabulary.decode(each.numbers) for each in found]
    (best,) = model.predict(["the cat"], PredictionOptions(options))
    written = [best, *best.alternatives]
    texts, ranks = [each.text for each in written], [each.normalized for each in written]
    assert len(set(raw)) < len(raw) == 6 == len(texts) == len(set(texts))
    assert texts[: len(set(raw))] == list(dict.fromkeys(raw)) and ranks == sorted(ranks, reverse=True)
    assert best.normalized == found[0].normalized


def test_of_a_text_in_other_tokens_the_likeliest_counts() -> None:
    same = [Prediction("s", text, tokens=tokens, normalized=score) for text, tokens, score in
            (("ab", ("ab",), -1.0), ("ab", ("a", "b"), -2.0), ("c", ("c",), -3.0))]  # fmt: skip
    best = merge_duplicates(same, 3)
    assert best.tokens == ("ab",) and [each.text for each in best.alternatives] == ["c"]
