"""Guided attention: word alignment links as links between a model's tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard._utils.errors import rejected, unknown_name
from regard._utils.files import write_atomically
from regard_lab.data.pairs import Pairs
from regard_lab.models import EncoderDecoder
from regard_lab.models.transformer import ALIGNMENT
from regard_lab.tasks.translation.alignment.links import (
    Link,
    Links,
    align_words,
    format_links,
    read_pair_links,
    require_aligner,
)
from regard_lab.text.ragged import Ragged
from regard_lab.text.vocabulary import SubwordVocabulary, Vocabulary
from regard_lab.text.words import Span, WordFinder, find_words, split_at_spaces, split_elisions

if TYPE_CHECKING:
    from regard_lab.tasks.translation.options import ExperimentOptions

#: The file of a run's guiding links in its folder.
LINKS = "links.txt"


def pieces(text: str) -> list[Span]:
    """Return the parts of a text's words that aligners treat as words."""
    return split_elisions(text, find_words(text))[0]


class Side(NamedTuple):
    """Texts with their vocabulary."""

    vocabulary: SubwordVocabulary
    texts: Sequence[str]


@dataclass(frozen=True)
class Guide:
    """Links between the tokens of pairs.

    Attributes
    ----------
    sides : (Side, Side)
        Sources and targets.
    numbers : (Ragged, Ragged)
        Their numbers, as training reads them.
    rows : ndarray
        Which of the texts each sequence of numbers is of.
    links : Ragged
        The links (i, j) of each pair of texts, one behind the other.
    cut : callable
        Where the words are that links count.
    """

    sides: tuple[Side, Side]
    numbers: tuple[Ragged, Ragged]
    rows: np.ndarray
    links: Ragged
    cut: WordFinder

    def __call__(self, row: int) -> list[Link]:
        """Return the links (target step, source step) between the tokens of a pair."""
        place = int(self.rows[row])
        flat = self.links[place].tolist()
        if not flat:
            return []
        source, target = (
            side.vocabulary.covering(text, numbers[row].tolist(), self.cut(text))
            for side, numbers in zip(self.sides, self.numbers)
            for text in (side.texts[place],)
        )
        return sorted({(t, s) for i, j in zip(flat[::2], flat[1::2]) for t in target[j] for s in source[i]})


class Guidance:
    """The links that guide attention in a run: from a file, or from an aligner.

    Parameters
    ----------
    options : ExperimentOptions
    folder : Path
        The run's folder, which keeps the links: a resumed run uses the same.
    config : dataclass
        Of the model.

    Raises
    ------
    ValueError
        If the model cannot learn from links, or the aligner is not installed.
    """

    def __init__(self, options: ExperimentOptions, folder: Path, config: Any) -> None:
        self.data, self.path = options.data, folder / LINKS
        self.active = bool(self.data.alignments or self.data.align)
        self._given: dict[int, Links] = {}
        self._links = Ragged.of([])
        if not self.active:
            return
        if self.data.align:
            require_aligner(self.data.aligner)
        score = "score" if options.kind == "transformer" else "attention"
        if getattr(config, score) in ("none", "constant"):
            expected = "be one that learns where to look, where links are to guide it"
            raise rejected("train", f"model.{score}", expected, repr(getattr(config, score)))
        if getattr(config, "hard", "none") == "reinforce":
            raise rejected("train", "model.hard", "be 'none' or 'gumbel' where links guide attention", "'reinforce'")
        if options.kind == "transformer" and options.training.teacher_forcing < 1:
            got = options.training.teacher_forcing
            raise rejected("train", "training.teacher_forcing", "be 1 where a Transformer's attention is guided", got)

    def read(self, pairs: Pairs) -> None:
        """Read the file of links, if any, for the pairs as read.

        Raises
        ------
        ValueError
            If it does not fit the pairs; see :func:`regard_lab.tasks.translation.alignment.links.read_pair_links`.
        """
        if self.active and self.data.alignments:
            assert pairs.places is not None
            gold = read_pair_links(self.data.alignments, pairs, self._cut)
            self._given = {place: each.possible for place, each in zip(pairs.places, gold)}

    def find(self, learn: Pairs, mark: str | None = None, *, keep: bool = True) -> str:
        """Compute the links of the training pairs, or load those of a resumed run; return their checksum.

        Parameters
        ----------
        learn : Pairs
        mark : str, optional
            Of the links that the run began with, if it did.
        keep : bool, default True
            Whether this process writes down what was found.

        Raises
        ------
        ValueError
            If the run's links are missing or damaged.
        """
        if not self.active:
            return ""
        if mark is not None:
            alone = Pairs(learn.sources, learn.targets, learn.name, len(learn), places=list(range(len(learn))))
            try:
                links = [each.possible for each in read_pair_links(self.path, alone, self._cut)]
            except ValueError:
                links = []
        elif self.data.alignments:
            assert learn.places is not None
            links = [self._given[place] for place in learn.places]
        else:
            sources, targets = (
                [[text[start:stop] for start, stop in pieces(text)] for text in texts]
                for texts in (learn.sources, learn.targets)
            )
            links = align_words(sources, targets, self.data.aligner)
        lines = "".join(f"{format_links(each)}\n" for each in links).encode()
        checksum = hashlib.blake2b(lines, digest_size=16).hexdigest()
        if mark is None and keep:
            write_atomically(self.path, lines)
        elif mark not in (None, checksum):
            expected = "be the file that the run began with"
            raise rejected("resume", str(self.path), expected, "one that is damaged or missing")
        self._links = Ragged.of([number for link in sorted(each) for number in link] for each in links)
        return checksum

    def guide(
        self,
        learn: Pairs,
        vocabularies: tuple[Vocabulary, Vocabulary],
        numbers: tuple[Ragged, Ragged],
        rows: np.ndarray,
    ) -> Guide | None:
        """Return the alignment links between tokens for guided attention, or None.

        Parameters
        ----------
        learn : Pairs
        vocabularies : (Vocabulary, Vocabulary)
        numbers : (Ragged, Ragged)
            Sources and targets as training reads them.
        rows : ndarray
            Which of the pairs, which may come several times, these are.
        """
        if not self.active:
            return None
        source, target = vocabularies
        if not isinstance(source, SubwordVocabulary) or not isinstance(target, SubwordVocabulary):
            raise rejected("train", "data.alignments", "be left out for symbols that are no parts of words", "links")
        sides = Side(source, learn.sources), Side(target, learn.targets)
        return Guide(sides, numbers, rows % len(learn), self._links, self._cut)

    def map_of(self, model: EncoderDecoder, name: str) -> str:
        """Return the attention map to guide.

        It is the one of this name, or else a Transformer's map ``"alignment"``, or else the first head of its last
        layer but one.

        Raises
        ------
        ValueError
            If the model has no map of this name.
        """
        if not self.active:
            return ""
        if name:
            if name not in model.maps:
                raise unknown_name("train", "training.guided", name, model.maps)
            return name
        if ALIGNMENT in model.maps:
            return ALIGNMENT
        layers = list(dict.fromkeys(each.rpartition(" head ")[0] for each in model.maps))
        return next(each for each in model.maps if each.startswith(layers[-2:][0]))

    def __str__(self) -> str:
        pairs = int(np.count_nonzero(self._links.lengths))
        return f"attention is guided by {len(self._links.numbers) // 2:,} links in {pairs:,} pairs"

    @property
    def _cut(self) -> WordFinder:
        return pieces if self.data.align else split_at_spaces if self.data.tokenized else find_words
