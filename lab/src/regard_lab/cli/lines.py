"""The texts a command reads: its arguments, or the lines of a file or of standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from regard._utils.errors import rejected
from regard._utils.files import display_name
from regard_cli.messages import note
from regard_lab.data.pairs import read_lines

#: Number of lines to read ahead if standard input is not a terminal.
_AHEAD = 1024


def one_source(command: str, given: Sequence[str], data: str | None) -> None:
    """Raise if a command gets both texts and a file of texts."""
    if given and list(given) != ["-"] and data is not None:
        raise rejected(command, "--data", "be left out if texts are given", repr(data))


@dataclass(frozen=True)
class Lines:
    """Texts and their names in error messages.

    Attributes
    ----------
    texts : iterable of str
        Stripped of surrounding whitespace.
    name : str or None
        The file they come from; None for command-line arguments.
    typed : bool
        Whether they are typed at a terminal, so that each needs an immediate answer.
    """

    texts: Iterable[str]
    name: str | None
    typed: bool

    @classmethod
    def of(cls, command: str, texts: Sequence[str], data: str | None) -> Lines:
        """Return the texts in the arguments or in ``--data``; without both, or for ``-``, those of standard input."""
        one_source(command, texts, data)
        source = data if data is not None else "-" if not texts or list(texts) == ["-"] else None
        typed = source == "-" and sys.stdin.isatty()
        if typed:
            note("regard: type a line and press Return; Ctrl-D ends")
        lines = texts if source is None else read_lines(source, command)
        return cls((line.strip() for line in lines), None if source is None else display_name(source), typed)

    def where(self, number: int) -> str:
        """Return the name of the text with this number, counted from 1, in error messages."""
        return "TEXT" if self.name is None else f"{self.name}, line {number:,}"

    def blocks(self) -> Iterator[list[tuple[int, str]]]:
        """Yield blocks of numbered texts, counted from 1, to process together."""
        numbered = enumerate(self.texts, start=1)
        while block := list(islice(numbered, 1 if self.typed else _AHEAD)):
            yield block
