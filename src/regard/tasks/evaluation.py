"""How far what a model says is from what is right: edit distance, and the error rates made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regard._errors import rejected


def edit_distance(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the least number of insertions, deletions and substitutions that turn one sequence into the other.

    Levenshtein (1966), by dynamic programming over one row: O(len(ours)·len(theirs)) time, O(len(theirs)) memory.

    Examples
    --------
    >>> edit_distance("kitten", "sitting"), edit_distance("", "abc")
    (3, 3)
    """
    row = list(range(len(theirs) + 1))
    for i, mine in enumerate(ours, start=1):
        diagonal, row[0] = row[0], i
        for j, yours in enumerate(theirs, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (mine != yours))
    return row[-1]


@dataclass(frozen=True)
class ErrorRates:
    """What share of the symbols, and of the whole sequences, is wrong.

    Attributes
    ----------
    symbol_errors, symbols : int
        Edits over all sequences, and the symbols of the references they were counted against.
    wrong, sequences : int
        Sequences with any edit at all, and all sequences.
    """

    symbol_errors: int
    symbols: int
    wrong: int
    sequences: int

    @property
    def symbol(self) -> float:
        """Symbol error rate in percent: for phonemes, the phoneme error rate. Above 100 if too much is said."""
        return 100.0 * self.symbol_errors / self.symbols

    @property
    def sequence(self) -> float:
        """Share of sequences that are not entirely right, in percent: the word error rate."""
        return 100.0 * self.wrong / self.sequences


def error_rates(said: Mapping[str, Sequence[str]], references: Mapping[str, Sequence[Sequence[str]]]) -> ErrorRates:
    """Score what was said for each word against the nearest of its references (the first of equally near ones).

    Parameters
    ----------
    said : mapping from str to sequence of str
        One answer for each word.
    references : mapping from str to sequence of sequence of str
        The right answers for each word, at least one; words that were not said are ignored.

    Returns
    -------
    ErrorRates

    Raises
    ------
    ValueError
        If nothing was said, or a word has no reference.

    Examples
    --------
    >>> rates = error_rates({"read": "R EH T".split()}, {"read": ["R IY D".split(), "R EH D".split()]})
    >>> round(rates.symbol, 1), rates.sequence
    (33.3, 100.0)
    """
    if not said:
        raise rejected("error_rates", "said", "have at least one word", "none")
    errors = symbols = wrong = 0
    for word, answer in said.items():
        if not references.get(word):
            raise rejected("error_rates", "references", "have an entry for every word", f"none for {word!r}")
        distances = [edit_distance(answer, reference) for reference in references[word]]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        errors += distances[nearest]
        symbols += len(references[word][nearest])
        wrong += distances[nearest] > 0
    if not symbols:
        raise rejected("error_rates", "references", "have symbols", "only empty ones")
    return ErrorRates(errors, symbols, wrong, len(said))
