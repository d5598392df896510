"""Predictions for lines of text, and the options that they are made with.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

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
    split: bool | None = option(None, "a line sentence by sentence, or at once; else as learned", kind=bool,
                                flag="--split/--whole")  # fmt: skip
    max_length: int = option(512, "source tokens of a sentence, or of a line that is not split, that are read", ge=1)
    too_long: str = option("cut", "cut a line that has more, or refuse it", choices=("cut", "refuse"))
    batch: int = option(128, "lines at once; lower it where memory is short", ge=1, flag="--batch")
    #: Of matrix products in a search; what is nearly tied is settled by rounding with bfloat16.
    precision: str = option("float32", "float32; or bfloat16, faster where processors have it",
                            choices=("float32", "bfloat16"), flag="--precision",
                            short="float32; or bfloat16, faster where processors have it.")  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A prediction for a line: text, tokens, scores and alignment.

    Attributes
    ----------
    source, text : str
        The line as it was given, and what was written for it.
    source_tokens, tokens : tuple of str
        What the model read and wrote, as pictures show it.
    score : float
        Log-probability of the tokens and their end in nats.
    normalized : float
        That divided by the length penalty; of several sentences, their sum.
    alternatives : tuple of Prediction
        The next best with other texts, where more than one was asked for: of a text that can be written in different
        tokens, the likeliest counts. Or further samples, which may be the same.
    maps : tuple of str
        Names of the A attention maps; none unless they were asked for.
    alignment : Tensor (A, T, S), or None
        How much of each token's attention went to each source token, where that was asked for.
    aligning : str or None
        The map that aligns words, where the model knows one.
    source_words, words : tuple of Word
        Which tokens make up words, where the alignment was asked for.
    note : str
        What the reader should know, such as that the line was cut; mostly empty.
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
    note: str = ""


def report_truncated(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line that says how many sources were not read to their end, or none where all were.

    Examples
    --------
    >>> report_truncated([Prediction("a cat"), Prediction("a dog", note="cut to the first 1 of 2 tokens")])
    ["1 of 2 sources was not read to its end; the first, 'a dog', was cut to the first 1 of 2 tokens"]
    """
    truncated = [each for each in predictions if each.note]
    if not truncated:
        return []
    were = "was not read to its end" if len(truncated) == 1 else "were not read to their ends"
    first = f"the first, {truncated[0].source[:60]!r}, was {truncated[0].note}"
    return [f"{len(truncated):,} of {len(predictions):,} sources {were}; {first}"]


def join_sentences(line: str, parts: Sequence[Prediction], count: int = 1, *, ranked: bool = True) -> Prediction:
    """Return what was written for the sentences of a line as what was written for the line.

    Texts stand one behind the other, and so do tokens and words; no sentence attends to another. Scores are added up.

    Parameters
    ----------
    line : str
    parts : sequence of Prediction
        For each sentence; at least one.
    count : int, default 1
        How many texts are wanted, the best and its alternatives: those whose ``normalized`` add up to the most.
    ranked : bool, default True
        Whether alternatives are the next best, which are combined, and not samples, which go together in their order.
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
    """Return the first of these, the next with other texts its alternatives: so many in all at most."""
    kept: dict[str, Prediction] = {}
    for each in predictions:
        kept.setdefault(each.text, each)
    return with_alternatives(list(kept.values())[:count])


def with_alternatives(predictions: Sequence[Prediction]) -> Prediction:
    """Return the first of these, the others its alternatives."""
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
        source_words=_behind([(part.source_words, len(part.source_tokens)) for part in parts]),
        words=_behind([(part.words, len(part.tokens)) for part in parts]),
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
    )


def _diagonal(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return blocks (A, T, S) as one of all rows and columns, 0 elsewhere."""
    if not blocks:
        return None
    rows, columns = (sum(block.shape[side] for block in blocks) for side in (1, 2))
    made, row, column = blocks[0].new_zeros(len(blocks[0]), rows, columns), 0, 0
    for block in blocks:
        made[:, row : row + block.shape[1], column : column + block.shape[2]] = block
        row, column = row + block.shape[1], column + block.shape[2]
    return made


def _behind(parts: Sequence[tuple[Sequence[Word], int]]) -> tuple[Word, ...]:
    """Return the words of parts of so many tokens, one behind the other."""
    shifted: list[Word] = []
    first = 0
    for words, count in parts:
        shifted += [Word(word.text, range(first + word.tokens.start, first + word.tokens.stop)) for word in words]
        first += count
    return tuple(shifted)
