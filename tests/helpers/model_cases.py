"""Small models in every wiring, with what all tests of models read and write."""

from __future__ import annotations

from typing import Any

import torch
from pairwise import pairwise

from regard_lab.models import (
    EncoderDecoder,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
)
from regard_lab.models.attending import DRAWS, PLAIN, SCOPES, SCORES, TIES
from regard_lab.models.recurrent import CELL_NAMES, WIRINGS
from regard_lab.models.transformer import NORMS, POSITIONS

SOURCES, TARGETS = 12, 9
_RECURRENT = {"embedding": 6, "encoder": 5, "decoder": 7, "features": 8, "max_length": 10}
_TRANSFORMER = {"width": 8, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "feedforward": 12, "max_length": 24}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}

#: Models that some test names.
RECURRENT: dict[str, dict[str, Any]] = {
    "after additive": {},
    "after location": {"attention": "location"},
    "gru": {"cell": "gru"},
    "layers": LAYERS,
    "gru layers": {"cell": "gru", **LAYERS},
    "no attention": {"attention": "none", "decoder_layers": 2},
    "no attention gru": {"attention": "none", "cell": "gru"},
    "dot of equal widths": {"attention": "dot", "decoder": 10},
    "tied": {"tied": "target"},
    "all tied": {"tied": "all", "attention": "general"},
    "before gru": {"wiring": "before", "cell": "gru", "attention": "additive"},
    "feeding": {"input_feeding": True, "attention": "general"},
    "feeding tied gru": {"input_feeding": True, "tied": "target", "cell": "gru", "attention": "scaled_dot", **LAYERS},
    "encoder": {"wiring": "encoder", "attention": "dot"},
    "encoder projected": {"wiring": "encoder", "attention": "dot", "projections": True, "cell": "gru"},
    "local-m": {"scope": "local-m", "window": 1, "attention": "general"},
    "local-p": {"scope": "local-p", "window": 2, "attention": "dot"},
    "hard reinforce": {"hard": "reinforce"},
    "hard gumbel": {"hard": "gumbel", "attention": "general"},
}
TRANSFORMER: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre", "activation": "gelu"},
    "all tied": {"tied": "all"},
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary", "norm": "pre"},
    "aligned": {"alignment": "layer 2 head 1", "norm": "pre"},
}
_HEADS = {"heads": {}, "grouped": {"heads": 4, "kv_heads": 2}, "multi-query": {"kv_heads": 1}}


def _fits(row: dict[str, Any]) -> bool:
    try:
        RecurrentConfig(SOURCES, SOURCES, attention="dot", **row)
    except ValueError:
        return False
    return True


def _recurrent() -> dict[str, dict[str, Any]]:
    """Return models with every pair of the options beside the score, and each score in some of them."""
    rows = pairwise(
        {
            "wiring": WIRINGS,
            "cell": CELL_NAMES,
            "encoder_layers": (1, 2),
            "decoder_layers": (1, 2),
            "bidirectional": (True, False),
            "input_feeding": (False, True),
            "scope": SCOPES,
            "hard": DRAWS,
            "tied": TIES,
            "projections": (False, True),
        },
        _fits,
    )
    others, plain = [score for score in SCORES if score not in PLAIN], list(PLAIN)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        scores = plain if row["projections"] else others + plain if len(found) % 2 else plain + others
        used = [each["attention"] for each in found.values()]
        options = {**row, "attention": min(scores, key=used.count), "window": 1 + len(found) % 3}
        words = [value for value in row.values() if isinstance(value, str) and value not in ("global", "none")]
        marks = {"all": "all tied", "target": "tied", "gumbel": "hard gumbel", "reinforce": "hard reinforce"}
        name = " ".join([options["attention"], *(marks.get(word, word) for word in words)])
        layers = f"{row['encoder_layers']}+{row['decoder_layers']}"
        flags = [name for name in ("bidirectional", "input_feeding", "projections") if row[name]]
        found[" ".join([name, layers, *flags])] = options
    return found


def _transformers() -> dict[str, dict[str, Any]]:
    """Return models with every pair of the options beside score and normalizer, and each of those in some of them."""
    rows = pairwise({"norm": NORMS, "positions": POSITIONS, "tied": TIES, "heads": tuple(_HEADS)})
    rows += rows[: max(0, len(SCORES) - len(rows))]
    normalizers = ("softmax", "sparsemax", "entmax15", "entmax", "sigmoid")
    found = {}
    for i, row in enumerate(rows):
        score, normalizer = SCORES[i % len(SCORES)], normalizers[i % len(normalizers)]
        tied = {"all": "all tied", "target": "tied", "none": "untied"}[row["tied"]]
        name = " ".join([score, normalizer, row["norm"], row["positions"], tied, row["heads"]])
        found[name] = {**row, **{"heads": 2}, **_HEADS[row["heads"]], "score": score, "normalizer": normalizer}
    return found


_PAIRS = {"rnn": _recurrent(), "transformer": _transformers()}
_NAMED = {"rnn": RECURRENT, "transformer": TRANSFORMER}
#: Names of what every encoder–decoder is tested on: all pairs of options, models without attention, and a map more.
CASES = [
    *("rnn no attention", "rnn no attention gru", "transformer aligned"),
    *(f"{kind} {name}" for kind, models in _PAIRS.items() for name in models),
]

SOURCE = torch.randint(2, SOURCES - 1, (3, 6), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([6, 2, 4])
TARGET = torch.tensor([[1, 3, 4, 5, 7, 2, 2, 8], [1, 8, 2, 4, 6, 3, 5, 1], [1, 2, 5, 7, 3, 3, 4, 6]])


def _targets(options: dict[str, Any]) -> int:
    return SOURCES if options.get("tied") == "all" else TARGETS


def made(case: str, **changes: Any) -> EncoderDecoder:
    """Return the model of this name in double precision and evaluation mode; its parameters are all random."""
    torch.manual_seed(0)
    kind, _, name = case.partition(" ")
    models = {**_PAIRS[kind], **_NAMED[kind]}
    model: EncoderDecoder
    if kind == "rnn":
        options = {**_RECURRENT, **models[name], **changes}
        model = RecurrentEncoderDecoder(RecurrentConfig(SOURCES, _targets(options), **options))
    else:
        options = {**_TRANSFORMER, "dropout": 0.0, **models[name], **changes}
        model = TransformerEncoderDecoder(TransformerConfig(SOURCES, _targets(options), **options))
    for parameter in model.output.parameters():  # they start at zero, which would hide what comes before
        torch.nn.init.normal_(parameter)
    return model.double().eval()
