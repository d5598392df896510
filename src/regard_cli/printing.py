"""Text from a file, a model or data, as a terminal may be given it."""

from __future__ import annotations

import unicodedata

#: Unicode categories that a terminal obeys rather than shows: control characters, line and paragraph separators, and
#: halves of surrogate pairs, which no encoding has.
_OBEYED = ("Cc", "Zl", "Zp", "Cs")
#: What makes a line read in another order than it is written: embeddings, overrides and isolates of direction.
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with escapes, as JSON writes them, for what a terminal would obey instead of showing it.

    Parameters
    ----------
    text : str
    keep : str
        Characters that stay, such as ``"\n\t"``.

    Examples
    --------
    >>> print(printable("\x1b[2J caf\xe9"))
    \u001b[2J café
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or not _is_obeyed(each) else f"\\u{ord(each):04x}" for each in text)


def _is_obeyed(character: str) -> bool:
    return unicodedata.category(character) in _OBEYED or character in _DIRECTIONS
