"""Metrics: BLEU and chrF by sacreBLEU, and error rates by edit distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from regard._utils.errors import rejected, unknown_name


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
    """The shares of symbols, and of whole sequences, that are wrong.

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


def error_rates(
    predictions: Mapping[str, Sequence[str]], references: Mapping[str, Sequence[Sequence[str]]]
) -> ErrorRates:
    """Score the prediction for each word against the nearest of its references (the first of equally near ones).

    Parameters
    ----------
    predictions : mapping from str to sequence of str
        One answer for each word.
    references : mapping from str to sequence of sequence of str
        The right answers for each word, at least one; words without a prediction are ignored.

    Returns
    -------
    ErrorRates

    Raises
    ------
    ValueError
        If there is no prediction, or a word has no reference.

    Examples
    --------
    >>> rates = error_rates({"read": "R EH T".split()}, {"read": ["R IY D".split(), "R EH D".split()]})
    >>> round(rates.symbol, 1), rates.sequence
    (33.3, 100.0)
    """
    if not predictions:
        raise rejected("error_rates", "predictions", "have at least one word", "none")
    errors = symbols = wrong = 0
    for word, answer in predictions.items():
        if not references.get(word):
            raise rejected("error_rates", "references", "have an entry for every word", f"none for {word!r}")
        distances = [edit_distance(answer, reference) for reference in references[word]]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        errors += distances[nearest]
        symbols += len(references[word][nearest])
        wrong += distances[nearest] > 0
    if not symbols:
        raise rejected("error_rates", "references", "have symbols", "only empty ones")
    return ErrorRates(errors, symbols, wrong, len(predictions))


@dataclass(frozen=True)
class Score:
    """How good translations are, and how that was measured.

    Attributes
    ----------
    name : str
        ``"BLEU"`` or ``"chrF2"``.
    value : float
        From 0 to 100, the higher the better.
    signature : str
        With which sacreBLEU users say what was measured; ``nrefs:var`` where sentences have unequally many references.
    details : str
        As sacreBLEU prints it, for BLEU with precisions, brevity penalty and lengths.
    """

    name: str
    value: float
    signature: str
    details: str


def bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False, tokenize: str = "13a"
) -> Score:
    """Return the BLEU of a corpus (Papineni 2002), as sacreBLEU computes it (Post 2018, arXiv 1804.08771).

    Parameters
    ----------
    hypotheses : sequence of str
        What the model wrote for each of N sentences, as plain text.
    references : sequence of sequence of str
        For each of these sentences its right answers: at least one, and not equally many for all.
    lowercase : bool, default False
    tokenize : str, default "13a"
        How sacreBLEU splits text into words: ``"13a"``, ``"intl"``, ``"zh"``, ``"char"`` and so on.

    Returns
    -------
    Score

    Raises
    ------
    ValueError
        If there are no sentences, not as many references, a sentence has none, or there is no such tokenizer.

    Examples
    --------
    >>> score = bleu(["Run as fast as you can!"], [["Run!", "Run as fast as you can!"]])
    >>> round(score.value), score.signature.split("|")[0]
    (100, 'nrefs:2')
    """
    from sacrebleu.metrics.bleu import BLEU

    if tokenize not in BLEU.TOKENIZERS:
        raise unknown_name("bleu", "tokenize", tokenize, BLEU.TOKENIZERS)
    return _scored("bleu", BLEU(lowercase=lowercase, tokenize=tokenize), hypotheses, references)


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False) -> Score:
    """Return the BLEU of texts whose words have spaces between them already, as older papers report it.

    Arguments and errors are those of :func:`bleu`. Such values depend on the tokenizer that made the texts, and can
    only be compared where it was the same.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(lowercase=lowercase, tokenize="none", force=True)
    return _scored("tokenized_bleu", metric, hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False) -> Score:
    """Return the chrF2 of a corpus (Popović 2015), the F-score of character n-grams, as sacreBLEU computes it.

    Arguments and errors are those of :func:`bleu`. Of several references the nearest counts.
    """
    from sacrebleu.metrics.chrf import CHRF

    return _scored("chrf", CHRF(lowercase=lowercase), hypotheses, references)


def _scored(function: str, metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    if not hypotheses:
        raise rejected(function, "hypotheses", "have at least one sentence", "none")
    if isinstance(references, str) or any(isinstance(answers, str) for answers in references):
        raise rejected(function, "references", "be a list of references for each sentence", "a string for one")
    if len(references) != len(hypotheses):
        got = f"{len(references)} for {len(hypotheses)} hypotheses"
        raise rejected(function, "references", "be as many as hypotheses", got)
    for number, answers in enumerate(references, start=1):
        if not answers:
            raise rejected(function, "references", "have at least one for each sentence", f"none for number {number}")
    # sacreBLEU expects the first references of all sentences, then the second ones, with None for missing ones.
    streams = [list(stream) for stream in zip_longest(*references)]
    score = metric.corpus_score(list(hypotheses), streams)
    return Score(score.name, float(score.score), str(metric.get_signature()), str(score))
