"""What is asked of a model that writes, and what it wrote.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from regard._errors import described, rejected, unknown_name
from regard.tasks.codecs import Word
from regard.tasks.search import SearchOptions


@dataclass(frozen=True)
class WritingOptions:
    """How lines are read and written.

    Attributes
    ----------
    search : SearchOptions
    alignment : bool
        Whether to tell the attention weights.
    replace_unknown : bool
        Write the source word with the most attention in place of a word that the vocabulary cannot spell. Otherwise,
        or where the model has no attention, only what the vocabulary can spell is written.
    split : bool or None
        Whether a line of several sentences is taken apart, and what is written for each put together again; see
        :func:`regard.tasks.sentences.sentences`. None: unless the model learned from lines of several sentences. Only
        texts are taken apart, not letters or other symbols.
    longest : int
        Source tokens of a sentence, or of a line that is not taken apart, that are read at most; the model may know
        fewer positions.
    too_long : {"cut", "refuse"}
        What to do with a line that has more: read its first ones and say so, or raise ValueError.
    batch : int
        Lines that are written for at once, at most; fewer where they are long.
    precision : {"float32", "bfloat16"}
        Of matrix products in a search. bfloat16 is faster for wide models and large vocabularies where the processor
        is built for it; what is nearly tied is then settled by rounding.
    """

    search: SearchOptions = field(default_factory=SearchOptions)
    alignment: bool = False
    replace_unknown: bool = True
    split: bool | None = None
    longest: int = 512
    too_long: str = "cut"
    batch: int = 128
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("longest", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise rejected("write", name, "be a whole number from 1 on", described(value))
        for name, known in (("too_long", ("cut", "refuse")), ("precision", ("float32", "bfloat16"))):
            if getattr(self, name) not in known:
                raise unknown_name("write", name, str(getattr(self, name)), known)


@dataclass(frozen=True)
class Written:
    """What a model wrote for a line.

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
    alternatives : tuple of Written
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
    alternatives: tuple[Written, ...] = ()
    maps: tuple[str, ...] = ()
    alignment: Tensor | None = None
    aligning: str | None = None
    source_words: tuple[Word, ...] = ()
    words: tuple[Word, ...] = ()
    note: str = ""


def cut(written: Sequence[Written]) -> list[str]:
    """Return a line that says how many sources were not read to their end, or none where all were.

    Examples
    --------
    >>> cut([Written("a cat"), Written("a dog", note="cut to the first 1 of 2 tokens")])
    ["1 of 2 sources was not read to its end; the first, 'a dog', was cut to the first 1 of 2 tokens"]
    """
    found = [each for each in written if each.note]
    if not found:
        return []
    were = "was not read to its end" if len(found) == 1 else "were not read to their ends"
    first = f"the first, {found[0].source[:60]!r}, was {found[0].note}"
    return [f"{len(found):,} of {len(written):,} sources {were}; {first}"]
