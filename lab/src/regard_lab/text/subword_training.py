"""How pieces of words are learned from texts, by the trainers of Hugging Face ``tokenizers``."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from tokenizers import Regex, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import Split

#: The most characters of a piece.
_LONGEST = 16
#: No piece goes beyond one of these, each with the space before it: a word with its apostrophes, a digit, signs.
PARTS = Split(Regex(r" ?\p{L}[\p{L}\p{M}]*(?:['’]\p{L}[\p{L}\p{M}]*)*| ?\p{N}| ?[^ \p{L}\p{N}]+"), "isolated")


def alphabet(lines: list[str], rare: float) -> tuple[list[str], list[str]]:
    """Return the characters that are at least such a share of the texts, with the space, and the other ones."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    least = rare * counts.total()
    # The trainers end words with zeros. A space begins each text.
    dropped = sorted(letter for letter, count in counts.items() if count < least or letter == "\0")
    return sorted({" ", *counts}.difference(dropped)), [letter for letter in dropped if letter != " "]


def learned(lines: list[str], kind: str, size: int, letters: list[str]) -> tuple[list[str], list[Any]]:
    """Return at most ``size`` pieces, these letters among them, and the rules of this kind."""
    if kind == "characters":
        return letters, []
    tokenizer = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = PARTS
    shared: dict[str, Any] = {"vocab_size": size, "show_progress": False, "special_tokens": []}
    if kind == "bpe":
        shared |= {"initial_alphabet": letters, "limit_alphabet": len(letters), "max_token_length": _LONGEST}
        tokenizer.train_from_iterator(lines, trainers.BpeTrainer(min_frequency=2, **shared))
        numbers = tokenizer.get_vocab()
        return sorted(numbers, key=numbers.__getitem__), [tuple(rule) for rule in _model(tokenizer)["merges"]]
    trainer = trainers.UnigramTrainer(max_piece_length=_LONGEST, unk_token=None, **shared)
    tokenizer.train_from_iterator(lines, trainer)
    # Sums over threads differ in their last digits: without these, the same texts give the same file.
    scores = _settled({piece: round(score, 6) for piece, score in _model(tokenizer)["vocab"]})
    pieces = sorted(scores, key=lambda piece: (-scores[piece], piece))
    # Near the least size the trainer gives more than it was asked for.
    long = [piece for piece in pieces if len(piece) > 1]
    surplus = set(long[max(0, len(long) - max(0, len(pieces) - size)) :])
    pieces = [piece for piece in pieces if piece not in surplus]
    return pieces, [scores[piece] for piece in pieces]


def _settled(scores: dict[str, float]) -> dict[str, float]:
    """Return scores in which letters that the trainer added last, each a step below another by chance, are equal."""
    last: list[str] = []
    for piece in sorted(scores, key=scores.__getitem__):
        if len(piece) > 1 or (last and not math.isclose(scores[piece] - scores[last[-1]], 1e-4, abs_tol=2e-6)):
            break
        last.append(piece)
    return scores | dict.fromkeys(last, min(scores.values()))


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())["model"]
