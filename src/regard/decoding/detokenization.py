"""What a search found for lines, as what was written for them: text, words and alignment.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from regard.decoding.beam_search import Hypothesis
from regard.decoding.forced import aligned
from regard.decoding.predictions import WritingOptions, Written, best_of, distinct
from regard.decoding.unknown_words import replaced, spelled, whole_words
from regard.text.vocabulary import UNKNOWN

if TYPE_CHECKING:
    from regard.decoding.sequence_model import SequenceModel


@dataclass(frozen=True)
class Line:
    """A line as the model reads it, with what was found for it."""

    text: str
    numbers: list[int]
    note: str = ""
    found: list[Hypothesis] = field(default_factory=list)


def told(model: SequenceModel, batch: Sequence[Line], options: WritingOptions) -> Iterator[Written]:
    """Yield what was written for some lines."""
    wanted = [
        (line.numbers, each.numbers)
        for line in batch
        for each in line.found
        if options.alignment or (options.replace_unknown and UNKNOWN in each.numbers)
    ]
    weights = iter(aligned(model.model, wanted) if model.model.maps else [None] * len(wanted))
    for line in batch:
        written = []
        for each in line.found:
            unknown = options.replace_unknown and UNKNOWN in each.numbers
            alignment = next(weights) if options.alignment or unknown else None
            written.append(_one(model, line, each, alignment, options))
        yield best_of(written) if options.search.sample else distinct(written, options.search.n_best)


def _one(
    model: SequenceModel, line: Line, found: Hypothesis, alignment: Tensor | None, options: WritingOptions
) -> Written:
    """Return what was written, with the alignment (A, T, S) if it was asked for."""
    text, words, aligning = model.target.decode(found.numbers), None, model.aligning
    if options.replace_unknown and alignment is not None and UNKNOWN in found.numbers:
        words = model.target.words(found.numbers)
        read = whole_words(model.source, line.text, len(line.numbers))
        weights = alignment.mean(0) if aligning is None else alignment[model.model.maps.index(aligning)]
        text, words = replaced(model.target, found.numbers, words, read, weights)
    written = Written(
        line.text,
        text,
        tuple(model.source.tokens(line.numbers)),
        tuple(model.target.tokens(found.numbers)),
        found.score,
        found.normalized,
        note=line.note,
    )
    if not options.alignment:
        return written
    said = model.target.words(found.numbers) if words is None else words
    return replace(
        written,
        maps=model.model.maps,
        alignment=alignment,
        aligning=aligning,
        source_words=tuple(spelled(model.source, line.text, line.numbers)),
        words=tuple(said),
    )
