"""The form in which models read text: composed Unicode, single spaces."""

from __future__ import annotations

import unicodedata


def normalize(text: str, lowercase: bool = False) -> str:
    r"""Return text as models read it: composed (Unicode NFC), every run of white space one space, none at the ends.

    Halves of surrogate pairs, which no file in UTF-8 can hold, become U+FFFD.

    Examples
    --------
    >>> normalize(" Cafe\u0301\u202f! \n", lowercase=True)
    'café !'
    """
    if lowercase:
        text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return " ".join(text.split())
