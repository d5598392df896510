"""Texts as numbers and back: vocabularies, subwords, words and sentences."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.text.inputs import InputLayout, Inputs
    from regard_lab.text.ragged import Ragged, pad
    from regard_lab.text.rewriting import Rewriting, uniform
    from regard_lab.text.tokenizer import DecodeStream, Tokenizer
    from regard_lab.text.unknown import UnknownCharacters
    from regard_lab.text.vocabulary import UNKNOWN, SubwordVocabulary, SymbolVocabulary, Vocabulary, Word
    from regard_lab.text.words import Span, find_words, normalize, sentences, split_at_spaces, split_elisions
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.text.inputs": "InputLayout Inputs",
            "regard_lab.text.ragged": "Ragged pad",
            "regard_lab.text.rewriting": "Rewriting uniform",
            "regard_lab.text.tokenizer": "DecodeStream Tokenizer",
            "regard_lab.text.unknown": "UnknownCharacters",
            "regard_lab.text.vocabulary": "UNKNOWN SubwordVocabulary SymbolVocabulary Vocabulary Word",
            "regard_lab.text.words": "Span find_words normalize sentences split_at_spaces split_elisions",
        },
    )

__all__ = [
    "UNKNOWN",
    "DecodeStream",
    "InputLayout",
    "Inputs",
    "Ragged",
    "Rewriting",
    "Span",
    "SubwordVocabulary",
    "SymbolVocabulary",
    "Tokenizer",
    "UnknownCharacters",
    "Vocabulary",
    "Word",
    "find_words",
    "normalize",
    "pad",
    "sentences",
    "split_at_spaces",
    "split_elisions",
    "uniform",
]
