"""Make text from a file, a model or data safe for a terminal."""

from __future__ import annotations

import unicodedata

#: Unicode categories that a terminal interprets: control characters, line and paragraph separators; and surrogates,
#: which cannot be encoded.
_CONTROLS = ("Cc", "Zl", "Zp", "Cs")
#: Characters that change the reading direction: embeddings, overrides and isolates.
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with JSON escapes for characters that a terminal would interpret.

    Parameters
    ----------
    text : str
    keep : str
        Characters to keep, such as ``"\n\t"``.

    Examples
    --------
    >>> print(printable("\x1b[2J caf\xe9"))
    \u001b[2J café
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or not _is_control(each) else f"\\u{ord(each):04x}" for each in text)


def encodable(text: str) -> str:
    r"""Return a text with JSON escapes for surrogates, which no encoding can hold.

    Examples
    --------
    >>> print(encodable("caf\udce9"))
    caf\udce9
    """
    return text.encode("utf-8", "backslashreplace").decode()


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in _CONTROLS or character in _DIRECTIONS
