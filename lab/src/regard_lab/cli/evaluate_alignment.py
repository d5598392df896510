"""``regard evaluate alignment``: compare a translation model's attention with word alignments in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard_cli.messages import note
from regard_lab.cli.align import require_attention
from regard_lab.cli.translate import load
from regard_lab.data.pairs import read_pairs
from regard_lab.tasks.translation.alignment.attention import strongest_links, symmetrize_attention, word_attention
from regard_lab.tasks.translation.alignment.links import Agreement, read_pair_links
from regard_lab.text.words import find_words, split_at_spaces

#: The symmetrization methods to score.
_METHODS = ("intersection", "grow-diag-final-and")


def evaluate(
    data: str, targets: str | None, model: Path, links: str, *, back: Path | None, tokenized: bool
) -> dict[str, Any]:
    """Compare gold links with the strongest attention weights, and with links extracted from posterior attention."""
    if links == "-" and "-" in (data, targets):
        raise rejected("evaluate", "--links", "be a file if standard input holds the pairs", "-")
    other = None if back is None else require_attention(load(back, "evaluate"), "--back")
    translator = require_attention(load(model, "evaluate"), "--model")
    pairs = read_pairs(data, targets, max_length=None, words=None, duplicates=True)
    for line in pairs.report():
        note(line)
    cut = split_at_spaces if tokenized else find_words
    gold = read_pair_links(links, pairs, cut)
    sides = pairs.sources, pairs.targets
    ways = {
        "attention": [
            strongest_links(weights) for weights in word_attention(translator, *sides, cut=cut, posterior=False)
        ]
    }
    forward = word_attention(translator, *sides, cut=cut)
    if without := sum(each is None for each in forward):
        note(f"too long to align: {without:,} pairs; their gold links count as missed")
    backward = [None] * len(forward) if other is None else word_attention(other, *reversed(sides), cut=cut)
    for method in _METHODS:
        ways[method] = [symmetrize_attention(ours, theirs, method) for ours, theirs in zip(forward, backward)]
    report: dict[str, Any] = {"pairs": len(pairs)}
    for name, each in ways.items():
        agreement = Agreement.of(each, gold)
        report |= {
            f"{what}|{name}": round(100 * getattr(agreement, what), 2) for what in ("precision", "recall", "aer")
        }
    return report
