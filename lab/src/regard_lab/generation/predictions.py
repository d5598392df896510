"""Predictions for lines of text, and their options.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from regard_lab._options import Options, option, section
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.text.vocabulary import Word
from regard_lab.text.words import DENSE


@dataclass(frozen=True)
class PredictionOptions(Options):
    """How lines are read and written."""

    function: ClassVar[str] = "predict"
    search: SearchOptions = section(SearchOptions, "how to search")
    alignment: bool = option(False, "keep the attention weights")
    #: Otherwise, or where the model has no attention, only what the vocabulary can spell is written.
    replace_unknown: bool = option(True, "write the source word with the most attention in place of one that the "
                                   "vocabulary cannot spell")  # fmt: skip
    #: See :func:`regard_lab.text.words.sentences`. None: unless the model learned from lines of several sentences.
    #: Only texts are taken apart, not letters or other symbols.
    split: bool | None = option(
        None,
        "translate a line sentence by sentence, or at once; by default, as the model was trained",
        kind=bool,
        flag="--split/--whole",
    )
    max_length: int = option(512, "source tokens of a sentence, or of a line that is not split, that are read", ge=1)
    too_long: str = option("cut", "cut a line that has more, or refuse it", choices=("cut", "refuse"))
    batch: int = option(128, "batch size; lower it if memory runs out", ge=1, flag="--batch")
    #: Of matrix products in a search. With bfloat16, rounding decides near ties.
    precision: str = option("float32", "number format: float32, or bfloat16, faster on processors that support it",
                            choices=("float32", "bfloat16"), flag="--precision")  # fmt: skip


@dataclass(frozen=True)
class Note:
    """What a user should know about a prediction.

    Attributes
    ----------
    kind : {"truncated", "missing", "unusual"}
        The source was truncated; the text leaves out something to copy; or the source is unlike the training data.
    text : str
        A phrase for display.
    """

    kind: Literal["truncated", "missing", "unusual"]
    text: str


@dataclass(frozen=True)
class Prediction:
    """A prediction for a line: text, tokens, scores and alignment.

    Attributes
    ----------
    source, text : str
        The input line, and the generated text.
    source_tokens, tokens : tuple of str
        Input and output tokens, for display.
    score : float
        Log-probability of the tokens and the end mark in nats.
    normalized : float
        The score divided by the length penalty; for several sentences, the sum.
    alternatives : tuple of Prediction
        The next best predictions with other texts, if requested; of different tokenizations of a text, only the most
        likely counts. With sampling, more samples, which may be equal.
    maps : tuple of str
        Names of the A attention maps, if requested.
    alignment : Tensor (A, T, S), or None
        Attention weights of each token on each source token, if requested.
    aligning : str or None
        The map that aligns words best, if known.
    source_words, words : tuple of Word
        Words as ranges of tokens, if the alignment was requested.
    notes : tuple of Note
        What the user should know, for example that the line was truncated; usually empty.
    """

    source: str
    text: str = ""
    source_tokens: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    score: float = 0.0
    normalized: float = 0.0
    alternatives: tuple[Prediction, ...] = ()
    maps: tuple[str, ...] = ()
    alignment: Tensor | None = None
    aligning: str | None = None
    source_words: tuple[Word, ...] = ()
    words: tuple[Word, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def note(self) -> str:
        """The texts of all notes, separated by semicolons; usually empty."""
        return "; ".join(note.text for note in self.notes)

    @property
    def confidence(self) -> float:
        """The probability of a token and of the end mark on average (geometric mean), in [0, 1]."""
        return math.exp(self.score / (len(self.tokens) + 1))


def report_truncated(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line that reports truncated sources; an empty list if there are none.

    Examples
    --------
    >>> note = Note("truncated", "truncated to the first 1 of 2 tokens")
    >>> report_truncated([Prediction("a cat"), Prediction("a dog", notes=(note,))])
    ["truncated: 1 of 2 sources; the first, 'a dog', was truncated to the first 1 of 2 tokens"]
    """
    cuts = [(each, [note for note in each.notes if note.kind == "truncated"]) for each in predictions]
    truncated = [(each, notes[0]) for each, notes in cuts if notes]
    if not truncated:
        return []
    prediction, note = truncated[0]
    first = f"the first, {prediction.source[:60]!r}, was {note.text}"
    return [f"truncated: {len(truncated):,} of {len(predictions):,} sources; {first}"]


def join_sentences(line: str, parts: Sequence[Prediction], count: int = 1, *, ranked: bool = True) -> Prediction:
    """Join the predictions for the sentences of a line.

    Texts, tokens and words are concatenated, scores are summed, and the alignment is block-diagonal.

    Parameters
    ----------
    line : str
    parts : sequence of Prediction
        One per sentence; at least one.
    count : int, default 1
        Number of texts, the best and its alternatives: the combinations with the largest sums of ``normalized``.
    ranked : bool, default True
        True if alternatives are ranked, to combine the best; False for samples, which are joined in order.
    """
    if len(parts) == 1:
        return replace(parts[0], source=line)
    each = [(part, *part.alternatives) for part in parts]
    if not ranked:
        return with_alternatives([_joined(line, sample) for sample in zip(*each)])
    best: list[tuple[Prediction, ...]] = [()]
    for options in each:
        longer = [(*before, option) for before in best for option in options]
        best = sorted(longer, key=lambda chosen: -sum(part.normalized for part in chosen))[:count]
    return merge_duplicates([_joined(line, chosen) for chosen in best], count)


def merge_duplicates(predictions: Sequence[Prediction], count: int) -> Prediction:
    """Return the first prediction, with the next ones of different text as alternatives, at most ``count`` in all."""
    kept: dict[str, Prediction] = {}
    for each in predictions:
        kept.setdefault(each.text, each)
    return with_alternatives(list(kept.values())[:count])


def with_alternatives(predictions: Sequence[Prediction]) -> Prediction:
    """Return the first prediction, with the others as alternatives."""
    return replace(predictions[0], alternatives=tuple(predictions[1:]))


def _joined(line: str, parts: Sequence[Prediction]) -> Prediction:
    text = ""
    for part in parts:
        text += " " * bool(text and part.text and text[-1] not in DENSE) + part.text
    return Prediction(
        line,
        text,
        tuple(token for part in parts for token in part.source_tokens),
        tuple(token for part in parts for token in part.tokens),
        sum(part.score for part in parts),
        sum(part.normalized for part in parts),
        maps=parts[0].maps,
        alignment=_diagonal([part.alignment for part in parts if part.alignment is not None]),
        aligning=parts[0].aligning,
        source_words=_concatenated([(part.source_words, len(part.source_tokens)) for part in parts]),
        words=_concatenated([(part.words, len(part.tokens)) for part in parts]),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _diagonal(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return a block-diagonal tensor of blocks (A, T, S)."""
    if not blocks:
        return None
    rows, columns = (sum(block.shape[side] for block in blocks) for side in (1, 2))
    made, row, column = blocks[0].new_zeros(len(blocks[0]), rows, columns), 0, 0
    for block in blocks:
        made[:, row : row + block.shape[1], column : column + block.shape[2]] = block
        row, column = row + block.shape[1], column + block.shape[2]
    return made


def _concatenated(parts: Sequence[tuple[Sequence[Word], int]]) -> tuple[Word, ...]:
    """Concatenate the words of parts, shifting their token ranges by the lengths of earlier parts."""
    shifted: list[Word] = []
    first = 0
    for words, count in parts:
        shifted += [Word(word.text, range(first + word.tokens.start, first + word.tokens.stop)) for word in words]
        first += count
    return tuple(shifted)
