"""Pronouncing words: letters in, phonemes out."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.tasks.pronunciation.pronouncer import (
        RECIPE,
        Dictionary,
        Pronouncer,
        load_dictionary,
        pairs_of,
        read_dictionary,
        split_dictionary,
    )
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.tasks.pronunciation.pronouncer": (
                "RECIPE Dictionary Pronouncer load_dictionary pairs_of read_dictionary split_dictionary"
            ),
        },
    )

__all__ = [
    "RECIPE",
    "Dictionary",
    "Pronouncer",
    "load_dictionary",
    "pairs_of",
    "read_dictionary",
    "split_dictionary",
]
