"""Weights of tokens become weights of words; maps are chosen by name; records are JSON."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard.inspect import draw, render_html
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import Note, Prediction, PredictionOptions
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder, TransformerConfig, TransformerEncoderDecoder
from regard_lab.tasks.translation.alignment.maps import alignment, alignments, merge, record, select_map
from regard_lab.text.vocabulary import SubwordVocabulary, SymbolVocabulary, Word

MAPS = ("layer 1 head 1", "layer 1 head 2", "layer 2 head 1", "layer 2 head 2", "layer 10 head 1")
WEIGHTS = torch.softmax(torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)), -1)
WRITTEN = Prediction(
    "a b", "c d", ("▁a", "▁b", "c"), ("▁c", "c", "▁", "d"), -1.5, -1.0,
    maps=MAPS, alignment=WEIGHTS,
    source_words=(Word("a", range(0, 1)), Word("bc", range(1, 3))),
    words=(Word("cc", range(0, 2)), Word("d", range(2, 4))),
)  # fmt: skip


def cuts(length: int, seed: int) -> list[Word]:
    generator = torch.Generator().manual_seed(seed)
    places = [0, *sorted(set(torch.randint(0, length + 1, (4,), generator=generator).tolist()) - {0, length}), length]
    return [Word("", range(a, b)) for a, b in pairwise(places)]


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(T=st.integers(1, 9), S=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_rows_of_words_still_sum_to_one(T: int, S: int, seed: int) -> None:
    weights = torch.softmax(torch.randn(3, T, S, dtype=torch.float64), -1)
    source, target = cuts(S, seed), cuts(T, seed + 1)
    merged = merge(weights, source, target)
    assert merged.shape == (3, len(target), len(source))
    torch.testing.assert_close(merged.sum(-1), torch.ones(3, len(target), dtype=torch.float64))
    for i, row in enumerate(target):
        for j, column in enumerate(source):
            block = weights[:, row.tokens.start : row.tokens.stop, column.tokens.start : column.tokens.stop]
            torch.testing.assert_close(merged[:, i, j], block.sum(-1).mean(-1))


def test_nothing_written_has_no_rows() -> None:
    assert merge(torch.zeros(2, 0, 3), cuts(3, 0), []).shape == (2, 0, len(cuts(3, 0)))
    assert merge(torch.zeros(0, 0), [], []).shape == (0, 0)


def test_maps_are_chosen_by_name() -> None:
    assert torch.equal(select_map(WRITTEN), WEIGHTS.mean(0))
    assert torch.equal(select_map(WRITTEN, "layer 2 head 1"), WEIGHTS[2])
    assert torch.equal(select_map(WRITTEN, "layer 1"), WEIGHTS[:2].mean(0)), "layer 10 is another one"
    with pytest.raises(ValueError, match=r"alignment: map must be one of .*, got 'layer 3' \(did you mean"):
        select_map(WRITTEN, "layer 3")
    with pytest.raises(ValueError, match=r"alignment: written must have attention weights, got none: ask for them"):
        alignment(Prediction("a", "b"))


def test_pictures_show_words_or_tokens() -> None:
    words = alignment(WRITTEN)
    assert (words.source, words.target, words.title) == (("a", "bc"), ("cc", "d"), "a b → c d")
    torch.testing.assert_close(words.weights, merge(WEIGHTS.mean(0), WRITTEN.source_words, WRITTEN.words))
    tokens = alignment(WRITTEN, "layer 1 head 2", words=False)
    assert (tokens.source, tokens.target) == (WRITTEN.source_tokens, WRITTEN.tokens)
    assert tokens.title == "a b → c d (layer 1 head 2)"
    assert torch.equal(tokens.weights, WEIGHTS[1])
    assert [each.title for each in alignments(WRITTEN)] == list(MAPS)
    assert "layer 10 head 1" in render_html(alignments(WRITTEN, words=False))


def test_a_record_has_everything() -> None:
    told = json.loads(json.dumps(record(WRITTEN)))
    assert told["words"] == [{"text": "cc", "tokens": [0, 2]}, {"text": "d", "tokens": [2, 4]}]
    assert [each["name"] for each in told["maps"]] == list(MAPS)
    torch.testing.assert_close(torch.tensor([each["weights"] for each in told["maps"]]), WEIGHTS, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(told["maps"][3]["words"]).sum(-1), torch.ones(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(told["alignment"]), alignment(WRITTEN).weights, atol=1e-6, rtol=0)
    assert (told["score"], told["normalized"], told["tokens"]) == (-1.5, -1.0, ["▁c", "c", "▁", "d"])
    assert record(Prediction("", "")) == {
        "source": "", "text": "", "score": 0.0, "normalized": 0.0, "confidence": 1.0, "source_tokens": [], "tokens": [],
    }  # fmt: skip
    bare = record(
        Prediction("x", notes=(Note("truncated", "cut"),), score=-float("inf"), alternatives=(Prediction("x", "y"),))
    )
    assert (bare["note"], bare["score"], bare["alternatives"][0]["text"]) == ("cut", None, "y")
    assert "Infinity" not in json.dumps(bare)


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_what_models_write_can_be_drawn(kind: str) -> None:
    torch.manual_seed(0)
    source = SubwordVocabulary.train(["the zone of international control", "a cat"])
    target = SymbolVocabulary.train(["la zone de contrôle international", "un chat"], " ")
    model: SequenceModel
    if kind == "recurrent":
        made = RecurrentEncoderDecoder(RecurrentConfig(len(source), len(target), encoder=8, decoder=8))
        model = SequenceModel(made, source, target)
    else:
        sizes = {"width": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 2, "feedforward": 8}
        made = TransformerEncoderDecoder(TransformerConfig(len(source), len(target), **sizes))
        model = SequenceModel(made, source, target)
    lines = ["the cat of control", "a zone 猫", ""]
    options = PredictionOptions(SearchOptions(n_best=2, min_length=3), alignment=True)
    written = model.predict(lines, options)
    for each in written[:2]:
        for one in (each, *each.alternatives):
            shown = alignment(one)
            assert shown.source == tuple(one.source.split())
            assert list(shown.target) == one.text.split()
            torch.testing.assert_close(shown.weights.sum(-1), torch.ones(len(shown.target)))
            assert len(draw(shown).splitlines()) == len(shown.source) + len(shown.target)
            json.dumps(record(one), allow_nan=False)
    assert record(written[2])["tokens"] == []
