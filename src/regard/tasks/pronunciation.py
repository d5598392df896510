"""Pronouncing English words: letters in, phonemes out, with the attention that led from one to the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._errors import rejected
from regard.models import RecurrentConfig, RecurrentEncoderDecoder
from regard.tasks.batches import Batches, pad
from regard.tasks.dictionary import Dictionary, Phonemes
from regard.tasks.evaluation import ErrorRates, error_rates
from regard.tasks.files import CONFIG, ModelFileError, load_config, load_weights, save_model
from regard.tasks.search import beam_search
from regard.tasks.vocabulary import END, Vocabulary

FORMAT, VERSION = "regard.pronunciation", 1
#: Longer words are refused. The longest in the dictionary has 28 letters.
LONGEST = 64
_BATCH = 256


@dataclass(frozen=True)
class Pronunciation:
    """How a word is spoken.

    Attributes
    ----------
    word : str
        As it was read: in lower case.
    phonemes : tuple of str
        Such as ``("K", "AE", "T")``; may be empty.
    weights : Tensor (L, S)
        How much of each phoneme's attention went to each letter; every row sums to 1.
    """

    word: str
    phonemes: Phonemes
    weights: Tensor


class Pronouncer:
    """A model with its letters and phonemes: trained, saved, loaded, and used to pronounce words.

    Parameters
    ----------
    model : RecurrentEncoderDecoder
    letters, phonemes : Vocabulary
        What the model reads and writes.

    Examples
    --------
    >>> entries = {"cat": [("K", "AE", "T")], "tack": [("T", "AE", "K")]}
    >>> pronouncer = Pronouncer.untrained(entries, encoder=8, decoder=8)
    >>> [spoken.word for spoken in pronouncer.pronounce(["cat", "act"])]
    ['cat', 'act']
    """

    def __init__(self, model: RecurrentEncoderDecoder, letters: Vocabulary, phonemes: Vocabulary) -> None:
        self.model = model.eval()
        self.letters = letters
        self.phonemes = phonemes

    @classmethod
    def untrained(cls, entries: Dictionary, *, seed: int = 0, **sizes: Any) -> Pronouncer:
        """Return a pronouncer for the letters and phonemes of a dictionary that has learned nothing yet.

        Parameters
        ----------
        entries : dict
        seed : int
            Of the first parameters. The global generator is left as it was.
        **sizes
            Fields of :class:`regard.models.RecurrentConfig`, such as ``decoder=128``.
        """
        letters = Vocabulary.of(entries)
        phonemes = Vocabulary.of(spoken for pronunciations in entries.values() for spoken in pronunciations)
        config = RecurrentConfig(sources=len(letters), targets=len(phonemes), **sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(RecurrentEncoderDecoder(config), letters, phonemes)

    def batches(self, entries: Dictionary, *, size: int = 128, seed: int = 0) -> Batches:
        """Return training batches of every word with every one of its pronunciations."""
        pairs = [(word, spoken) for word, pronunciations in entries.items() for spoken in pronunciations]
        sources = [self.letters.encode(word) for word, _ in pairs]
        return Batches(sources, [self.phonemes.encode(spoken) for _, spoken in pairs], size=size, seed=seed)

    def read(self, word: str) -> str:
        """Return a word in the spelling that the model knows: lower case, with a plain apostrophe.

        Raises
        ------
        ValueError
            If the word is empty, too long, or has a character that the model never saw.
        """
        plain = word.strip().lower().replace("’", "'")
        if not plain:
            raise rejected("pronounce", "word", "not be empty", repr(word))
        if len(plain) > LONGEST:
            raise rejected("pronounce", "word", f"have at most {LONGEST} letters", f"{len(plain)} ({plain[:12]!r}...)")
        for letter in plain:
            if letter not in self.letters:
                spelled = f"be spelled with {self._alphabet()}"
                raise rejected("pronounce", "word", spelled, f"{word!r}, which has {letter!r}")
        if not any(letter.isalpha() for letter in plain):
            raise rejected("pronounce", "word", "have a letter", repr(word))
        return plain

    def say(self, words: Iterable[str], *, beams: int = 4) -> dict[str, Phonemes]:
        """Return the likeliest phonemes of each word, without the weights: for many words.

        Raises
        ------
        ValueError
            As :meth:`read`.
        """
        plain = sorted({self.read(word) for word in words}, key=len)  # equal lengths together: less padding
        said: dict[str, Phonemes] = {}
        for first in range(0, len(plain), _BATCH):
            chosen = plain[first : first + _BATCH]
            source, lengths = pad([self.letters.encode(word) for word in chosen])
            found = beam_search(self.model, source, lengths, beams=beams)
            said.update((word, self.phonemes.decode(numbers)) for word, numbers in zip(chosen, found))
        return said

    @torch.no_grad()
    def pronounce(self, words: Sequence[str], *, beams: int = 4) -> list[Pronunciation]:
        """Return how each word is spoken, in the order given, with the attention weights.

        Parameters
        ----------
        words : sequence of str
        beams : int
            Width of the beam search.

        Raises
        ------
        ValueError
            As :meth:`read`.
        """
        said = self.say(words, beams=beams)
        return [self._aligned(word, said[word]) for word in map(self.read, words)]

    def evaluate(self, entries: Dictionary, *, beams: int = 4) -> tuple[ErrorRates, dict[str, Phonemes]]:
        """Return the error rates over a dictionary's words, each scored against its nearest pronunciation.

        Returns
        -------
        (ErrorRates, dict)
            ``rates.symbol`` is the phoneme error rate and ``rates.sequence`` the word error rate, in percent; the
            second item is what was said for each word.
        """
        said = self.say(entries, beams=beams)
        return error_rates(said, entries), said

    def save(self, folder: str | Path) -> Path:
        """Write the model to a folder, as ``config.json`` and ``model.safetensors``; see :meth:`load`."""
        config = {
            "format": FORMAT,
            "version": VERSION,
            "letters": list(self.letters.symbols),
            "phonemes": list(self.phonemes.symbols),
            "model": asdict(self.model.config),
        }
        return save_model(folder, self.model, config)

    @classmethod
    def load(cls, folder: str | Path) -> Pronouncer:
        """Read a pronouncer from the folder that :meth:`save` wrote.

        Raises
        ------
        ModelFileError
            If a file is missing, unreadable, cut short, of another format or version, or does not fit the other.
        """
        path = Path(folder) / CONFIG
        config = load_config(folder, kind=FORMAT, version=VERSION)
        letters, phonemes = _symbols(path, config, "letters"), _symbols(path, config, "phonemes")
        known = {field.name for field in fields(RecurrentConfig)}
        sizes = config.get("model")
        if not isinstance(sizes, dict) or set(sizes) != known:
            expected = f"have a field 'model' with {', '.join(sorted(known))}"
            raise rejected("load", str(path), expected, "other fields", ModelFileError)
        if (sizes["sources"], sizes["targets"]) != (len(letters), len(phonemes)):
            sized = f"{sizes['sources']!r} and {sizes['targets']!r}"
            expected = f"have sources {len(letters)} and targets {len(phonemes)}, as its letters and phonemes say"
            raise rejected("load", str(path), expected, sized, ModelFileError)
        try:
            with torch.device("meta"):
                model = RecurrentEncoderDecoder(RecurrentConfig(**sizes))
        except ValueError as error:
            raise rejected("load", str(path), "describe a model", f"this: {error}", ModelFileError) from None
        load_weights(folder, model, config)
        return cls(model, letters, phonemes)

    def _aligned(self, word: str, phonemes: Phonemes) -> Pronunciation:
        source, lengths = pad([self.letters.encode(word)])
        target = torch.tensor([[END, *self.phonemes.encode(phonemes)]])
        weights = self.model.align(source, lengths, target)[0, : len(phonemes)]
        return Pronunciation(word, phonemes, weights)

    def _alphabet(self) -> str:
        letters = [letter for letter in self.letters.symbols if letter.isalpha()]
        others = [symbol for symbol in self.letters.symbols if not symbol.isalpha()]
        plain = letters == [chr(code) for code in range(ord("a"), ord("z") + 1)]
        return " ".join([*(["a–z"] if plain else letters), *others])


def _symbols(path: Path, config: dict[str, Any], name: str) -> Vocabulary:
    symbols = config.get(name)
    if not isinstance(symbols, list) or not all(isinstance(symbol, str) and symbol for symbol in symbols):
        raise rejected("load", str(path), f"have a list of symbols {name!r}", "something else", ModelFileError)
    try:
        return Vocabulary(tuple(symbols))
    except ValueError as error:
        raise rejected("load", str(path), f"have {name!r} without repeats", f"this: {error}", ModelFileError) from None
