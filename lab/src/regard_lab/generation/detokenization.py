"""Turn the hypotheses of a search into predictions: text, words and alignment.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from regard_lab.generation.beam_search import Hypothesis
from regard_lab.generation.forced import attention_maps
from regard_lab.generation.predictions import Prediction, PredictionOptions, merge_duplicates, with_alternatives
from regard_lab.generation.unknown_words import replace_unknown, restore_words, words_of_tokens
from regard_lab.text.vocabulary import UNKNOWN

if TYPE_CHECKING:
    from regard_lab.generation.sequence_model import SequenceModel


@dataclass(frozen=True)
class Line:
    """A line as the model reads it, with the hypotheses of a search."""

    text: str
    numbers: list[int]
    note: str = ""
    hypotheses: list[Hypothesis] = field(default_factory=list)


def detokenize(model: SequenceModel, batch: Sequence[Line], options: PredictionOptions) -> Iterator[Prediction]:
    """Yield the predictions for some lines."""
    wanted = [
        (line.numbers, each.numbers)
        for line in batch
        for each in line.hypotheses
        if options.alignment or (options.replace_unknown and UNKNOWN in each.numbers)
    ]
    weights = iter(attention_maps(model.model, wanted) if model.model.maps else [None] * len(wanted))
    for line in batch:
        predictions = []
        for each in line.hypotheses:
            unknown = options.replace_unknown and UNKNOWN in each.numbers
            alignment = next(weights) if options.alignment or unknown else None
            predictions.append(_prediction(model, line, each, alignment, options))
        yield (
            with_alternatives(predictions)
            if options.search.sample
            else merge_duplicates(predictions, options.search.n_best)
        )


def _prediction(
    model: SequenceModel, line: Line, hypothesis: Hypothesis, alignment: Tensor | None, options: PredictionOptions
) -> Prediction:
    """Return a prediction, with the alignment (A, T, S) if it was asked for."""
    text, words, aligning = model.target.decode(hypothesis.numbers), None, model.aligning
    if options.replace_unknown and alignment is not None and UNKNOWN in hypothesis.numbers:
        words = model.target.words(hypothesis.numbers)
        read = words_of_tokens(model.source, line.text, len(line.numbers))
        weights = alignment.mean(0) if aligning is None else alignment[model.model.maps.index(aligning)]
        text, words = replace_unknown(model.target, hypothesis.numbers, words, read, weights)
    prediction = Prediction(
        line.text,
        text,
        tuple(model.source.tokens(line.numbers)),
        tuple(model.target.tokens(hypothesis.numbers)),
        hypothesis.score,
        hypothesis.normalized,
        note=line.note,
    )
    if not options.alignment:
        return prediction
    target_words = model.target.words(hypothesis.numbers) if words is None else words
    return replace(
        prediction,
        maps=model.model.maps,
        alignment=alignment,
        aligning=aligning,
        source_words=tuple(restore_words(model.source, line.text, line.numbers)),
        words=tuple(target_words),
    )
