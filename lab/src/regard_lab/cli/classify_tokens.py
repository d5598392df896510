"""``regard classify`` of tokens: a label with its probability for each token of a text."""

from __future__ import annotations

import json

from regard._utils.errors import fitting
from regard_cli.messages import echo, note
from regard_lab.cli.lines import Lines
from regard_lab.tasks.classification.token_labeller import LabelledTokens, TokenLabeller


def classify(lines: Lines, labeller: TokenLabeller, *, top: int | None, batch: int, as_json: bool) -> None:
    """Print a line for each token of a text, and an empty line behind it, as CoNLL's files have; or JSON for each."""
    full = f"classify: lines must fit in memory, got an allocation that failed; lower --batch (now {batch})."
    count = cut = 0
    for block in lines.blocks():
        with fitting(full, MemoryError):
            found = labeller.label([text for _, text in block], batch=batch)
        for each in found:
            _show(each, labeller.labels, top, as_json)
        count, cut = count + len(found), cut + sum(each.cut for each in found)
    if cut:
        note(f"regard: {cut:,} of {count:,} texts were cut to {labeller.length:,} tokens")


def _show(found: LabelledTokens, labels: tuple[str, ...], top: int | None, as_json: bool) -> None:
    named = [
        sorted(zip(labels, shares), key=lambda each: -each[1])[: top or (len(labels) if as_json else 1)]
        for shares in found.probabilities.tolist()
    ]
    if as_json:
        tokens = [
            {"token": token, "start": start, "end": end, "label": best[0][0],
             "probabilities": {label: round(share, 6) for label, share in best}}
            for token, (start, end), best in zip(found.tokens, found.spans, named)
        ]  # fmt: skip
        echo(json.dumps({"text": found.text, "tokens": tokens}, ensure_ascii=False))
        return
    for token, best in zip(found.tokens, named):
        echo("\t".join([token, *(f"{label}\t{share:.4f}" for label, share in best)]))
    echo()
