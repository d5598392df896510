"""Small models in every wiring, with what all tests of models read and write."""

from __future__ import annotations

from typing import Any

import torch

from regard_lab.models import (
    EncoderDecoder,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
)
from regard_lab.models.attending import SCORES

SOURCES, TARGETS = 12, 9
_RECURRENT = {"embedding": 6, "encoder": 5, "decoder": 7, "features": 8, "longest": 10}
_TRANSFORMER = {"width": 8, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "feedforward": 12, "longest": 24}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}

RECURRENT: dict[str, dict[str, Any]] = {
    **{f"after {score}": {"attention": score} for score in SCORES},
    "gru": {"cell": "gru"},
    "layers": LAYERS,
    "gru layers": {"cell": "gru", **LAYERS},
    "one direction": {"bidirectional": False, **LAYERS},
    "no attention": {"attention": "none", "decoder_layers": 2},
    "no attention gru": {"attention": "none", "cell": "gru"},
    "dot of equal widths": {"attention": "dot", "decoder": 10},
    "projected dot": {"attention": "dot", "projections": True},
    "projected cosine before": {"attention": "cosine", "projections": True, "wiring": "before"},
    "tied": {"tied": "target"},
    "all tied": {"tied": "all", "attention": "general"},
    "before": {"wiring": "before"},
    "before gru": {"wiring": "before", "cell": "gru", "attention": "additive"},
    "before layers": {"wiring": "before", "attention": "general", **LAYERS},
    "before location": {"wiring": "before", "attention": "location", "cell": "gru"},
    "feeding": {"input_feeding": True, "attention": "general"},
    "feeding tied gru": {"input_feeding": True, "tied": "target", "cell": "gru", "attention": "scaled_dot", **LAYERS},
    "encoder": {"wiring": "encoder", "attention": "dot"},
    "encoder projected": {"wiring": "encoder", "attention": "dot", "projections": True, "cell": "gru"},
    "encoder additive": {"wiring": "encoder"},
    "encoder local-p": {"wiring": "encoder", "scope": "local-p", "window": 2},
    "local-m": {"scope": "local-m", "window": 1, "attention": "general"},
    "local-m before": {"scope": "local-m", "window": 2, "wiring": "before"},
    "local-p": {"scope": "local-p", "window": 2, "attention": "dot"},
    "local-p feeding": {"scope": "local-p", "window": 2, "attention": "concat", "input_feeding": True},
    "local-p location": {"scope": "local-p", "window": 3, "attention": "location"},
    "hard reinforce": {"hard": "reinforce"},
    "hard gumbel": {"hard": "gumbel", "attention": "general"},
    "hard reinforce before": {"hard": "reinforce", "wiring": "before", "attention": "dot"},
    "hard gumbel feeding": {"hard": "gumbel", "input_feeding": True},
    "hard gumbel projected": {"hard": "gumbel", "attention": "dot", "projections": True, "cell": "gru"},
    "local-p projected before": {"scope": "local-p", "attention": "dot", "projections": True, "wiring": "before"},
    "encoder location": {"wiring": "encoder", "attention": "location", **LAYERS},
    "hard reinforce encoder": {"hard": "reinforce", "wiring": "encoder"},
}
TRANSFORMER: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre", "activation": "gelu"},
    "untied": {"tied": "none"},
    "all tied": {"tied": "all"},
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary", "norm": "pre"},
    "grouped": {"heads": 4, "kv_heads": 2, "positions": "rotary"},
    "multi-query": {"kv_heads": 1},
    **{score: {"score": score} for score in SCORES if score != "scaled_dot"},
    **{normalizer: {"normalizer": normalizer} for normalizer in ("sparsemax", "entmax15", "entmax", "sigmoid")},
}
CASES = {
    **{f"rnn {name}": "rnn" for name in RECURRENT},
    **{f"transformer {name}": "transformer" for name in TRANSFORMER},
}

SOURCE = torch.randint(2, SOURCES - 1, (3, 6), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([6, 2, 4])
TARGET = torch.tensor([[1, 3, 4, 5, 7, 2, 2, 8], [1, 8, 2, 4, 6, 3, 5, 1], [1, 2, 5, 7, 3, 3, 4, 6]])


def _targets(options: dict[str, Any]) -> int:
    return SOURCES if options.get("tied") == "all" else TARGETS


def made(case: str, **changes: Any) -> EncoderDecoder:
    """Return the model of this name in double precision and evaluation mode; its parameters are all random."""
    torch.manual_seed(0)
    kind, _, name = case.partition(" ")
    model: EncoderDecoder
    if kind == "rnn":
        options = {**_RECURRENT, **RECURRENT[name], **changes}
        model = RecurrentEncoderDecoder(RecurrentConfig(SOURCES, _targets(options), **options))
    else:
        options = {**_TRANSFORMER, "dropout": 0.0, **TRANSFORMER[name], **changes}
        model = TransformerEncoderDecoder(TransformerConfig(SOURCES, _targets(options), **options))
    for parameter in model.output.parameters():  # they start at zero, which would hide what comes before
        torch.nn.init.normal_(parameter)
    return model.double().eval()
