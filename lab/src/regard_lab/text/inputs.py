"""Inputs of classifiers: one text or two with special tokens around them, truncated to a length.

Dimensions: N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from regard._utils.errors import rejected
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Inputs:
    """Tokens that a model reads.

    Attributes
    ----------
    tokens : Ragged of N sequences
        None is empty.
    second : ndarray (N,) or None
        Where the second text of each begins, if there is one.
    segment : int
        The segment of second texts; 0 where they have none of their own.
    cut : ndarray (N,) of bool
        Which texts were cut.
    """

    tokens: Ragged
    second: np.ndarray | None
    segment: int
    cut: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class InputLayout:
    """The special tokens before, between and after texts.

    Attributes
    ----------
    begin, between, end : tuple of int
    segment : int, default 0
        The segment of what stands behind ``between``.

    Examples
    --------
    >>> tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "cls", "sep"))
    >>> layout = InputLayout.of(tokenizer)
    >>> inputs = layout.read(tokenizer, ["to be", "no"], ["or not", "!"], length=10)
    >>> [tokenizer.decode(inputs.tokens[i], specials=True) for i in range(2)]
    ['<|cls|>to b<|sep|>or <|sep|>', '<|cls|>no<|sep|>!<|sep|>']
    >>> inputs.cut.tolist(), inputs.second.tolist()
    ([True, False], [6, 4])
    """

    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    segment: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, segments: int = 2) -> Self:
        """Return the special tokens that a tokenizer's own files put around one text and around two.

        Parameters
        ----------
        tokenizer : Tokenizer
        segments : int, default 2
            Number of segment types of the model.

        Raises
        ------
        ValueError
            If other tokens stand around two texts than around one.
        """
        (begin, end), pair, kind = tokenizer.surroundings()
        if (pair[0], pair[2]) != (begin, end):
            got = f"{[begin, end]} and {[pair[0], pair[2]]}"
            raise rejected("read", "tokenizer", "put the same tokens around one text and around two", got)
        return cls(begin, pair[1], end, min(kind, 1) if segments > 1 and tokenizer.gives_segments else 0)

    def read(
        self, tokenizer: Tokenizer, texts: Sequence[str], others: Sequence[str] | None = None, *, length: int
    ) -> Inputs:
        """Return the tokens of texts, or of pairs of texts, truncated but with all special tokens.

        Of a pair, what is longer is cut until it is as long as the other; then both are.

        Parameters
        ----------
        tokenizer : Tokenizer
        texts : sequence of N str
        others : sequence of N str, optional
        length : int

        Raises
        ------
        ValueError
            If the length leaves no room for tokens besides the special ones.
        """
        special = len(self.begin) + len(self.end) + (len(self.between) if others is not None else 0)
        room = length - special
        if room < (1 if others is None else 2):
            raise rejected("read", "length", f"be above {special + (others is not None)}, for special tokens", length)
        firsts = tokenizer.encode_all(texts)
        seconds = None if others is None else tokenizer.encode_all(others)
        a = firsts.lengths
        b = np.zeros_like(a) if seconds is None else seconds.lengths
        left = np.minimum(a, np.maximum(room - b, room - room // 2))
        right = np.minimum(b, room - left)
        rows: list[np.ndarray] = []
        before, behind, between = (np.array(each, np.int32) for each in (self.begin, self.end, self.between))
        nothing = np.array([tokenizer.unknown or 0], np.int32)  # a model needs at least one token
        for row in range(len(firsts)):
            parts = [before, firsts[row][: left[row]]]
            parts += [] if seconds is None else [between, seconds[row][: right[row]]]
            made = np.concatenate([*parts, behind])
            rows.append(made if len(made) else nothing)
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in rows], dtype=np.int64)])
        numbers = np.concatenate(rows) if rows else np.zeros(0, np.int32)
        second = None if seconds is None else len(before) + left + len(between)
        return Inputs(Ragged(numbers, offsets), second, self.segment, (left < a) | (right < b))
