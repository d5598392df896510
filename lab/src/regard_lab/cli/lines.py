"""The texts that a command reads: those that were typed, or the lines of a file or of standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from regard._utils.errors import rejected
from regard._utils.files import display_name
from regard_cli.messages import note
from regard_lab.data.pairs import read_lines

#: Lines that are read before the first is answered, where standard input is no terminal.
_AHEAD = 1024


def one_source(command: str, given: Sequence[str], data: str | None) -> None:
    """Raise where a command is given both something to read and a file of it."""
    if given and list(given) != ["-"] and data is not None:
        raise rejected(command, "--data", "be left out where texts are given", repr(data))


@dataclass(frozen=True)
class Lines:
    """Texts, and what errors call them.

    Attributes
    ----------
    texts : iterable of str
        Without space around them.
    name : str or None
        The file that they are lines of; None where they were typed behind the command.
    typed : bool
        Whether somebody types them now, and waits for an answer to each.
    """

    texts: Iterable[str]
    name: str | None
    typed: bool

    @classmethod
    def of(cls, command: str, texts: Sequence[str], data: str | None) -> Lines:
        """Return what a command reads of its arguments and its ``--data``; of neither, or of ``-``, standard input."""
        one_source(command, texts, data)
        source = data if data is not None else "-" if not texts or list(texts) == ["-"] else None
        typed = source == "-" and sys.stdin.isatty()
        if typed:
            note("regard: type a line, and Return; Ctrl-D ends")
        lines = texts if source is None else read_lines(source, command)
        return cls((line.strip() for line in lines), None if source is None else display_name(source), typed)

    def where(self, number: int) -> str:
        """Return what an error calls the text of this number, counted from 1."""
        return "TEXT" if self.name is None else f"{self.name}, line {number:,}"

    def blocks(self) -> Iterator[list[tuple[int, str]]]:
        """Yield texts with their numbers, counted from 1, as many at a time as are answered together."""
        numbered = enumerate(self.texts, start=1)
        while block := list(islice(numbered, 1 if self.typed else _AHEAD)):
            yield block
