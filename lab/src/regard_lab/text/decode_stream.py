"""Text that appears token by token: no part of it is shown before it is certain."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

#: What decoding puts where bytes are no character, or not yet.
_INCOMPLETE = "\ufffd"
#: A character has at most four bytes: whatever is not clear after so many tokens does not become clearer.
_LONGEST = 8


class DecodeStream(ABC):
    """The text of tokens that come one at a time; made by :meth:`Tokenizer.decode_stream`.

    All that :meth:`push` and :meth:`close` return, one behind the other, is the text of all tokens.
    """

    @abstractmethod
    def push(self, number: int) -> str:
        """Return the further text that is certain with this token: perhaps none, never part of a character."""

    @abstractmethod
    def close(self) -> str:
        """Return the text that was held back, where no further token comes; the stream begins anew."""


@final
class ByteStream(DecodeStream):
    """The text of tokens that stand for bytes.

    Parameters
    ----------
    to_bytes : callable
        Returns the bytes of a token, given its number.

    Examples
    --------
    >>> stream = ByteStream(lambda number: bytes([number]))
    >>> [stream.push(byte) for byte in "né".encode()], stream.close()
    (['n', '', 'é'], '')
    """

    def __init__(self, to_bytes: Callable[[int], bytes]) -> None:
        self._to_bytes = to_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        return self._decoder.decode(self._to_bytes(number))

    def close(self) -> str:
        return self._decoder.decode(b"", True)


@final
class WindowStream(DecodeStream):
    """The text of tokens that are decoded together, by what a further token adds to the text of the last few.

    Parameters
    ----------
    decode : callable
        Returns the text of several tokens.
    begun : callable, optional
        Returns how many of the last tokens are the beginning of a character; by default, all may be where their text
        ends with U+FFFD.

    Examples
    --------
    >>> stream = WindowStream(lambda numbers: " ".join(map(str, numbers)))
    >>> [stream.push(number) for number in (3, 1, 4)]
    ['3', ' 1', ' 4']
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], begun: Callable[[Sequence[int]], int] | None = None
    ) -> None:
        self._decode, self._begun = decode, begun
        self._shown: list[int] = []  # the last tokens that text was returned for: what follows is spaced as behind them
        self._held: list[int] = []

    def push(self, number: int) -> str:
        self._held.append(number)
        if self._begun is not None:
            ready = len(self._held) - self._begun(self._held)
            text = self._added(self._held[:ready])
            return self._released(ready, text)
        text = self._added(self._held)
        waits = text.endswith(_INCOMPLETE) and len(self._held) < _LONGEST
        return "" if waits else self._released(len(self._held), text)

    def close(self) -> str:
        text = self._added(self._held)
        self._shown, self._held = [], []
        return text

    def _released(self, count: int, text: str) -> str:
        """Return the text of the first tokens that are held, which then are no longer."""
        if text:
            self._shown, self._held = self._held[:count], self._held[count:]  # whole: a part may have another text
        return text

    def _added(self, held: Sequence[int]) -> str:
        before, after = self._decode(self._shown), self._decode([*self._shown, *held])
        return after[len(before) :] if after.startswith(before) else ""
