"""Models learn: to turn short sequences around, or to copy them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from regard_lab.models import (
    EncoderDecoder,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
)

SYMBOLS, LONGEST = 7, 4
RECURRENT: dict[str, dict[str, Any]] = {
    "after gru layers": {"cell": "gru", "encoder_layers": 2, "decoder_layers": 2},
    "no attention": {"attention": "none", "decoder": 64},
    "projected dot": {"attention": "dot", "projections": True},
    "location before": {"attention": "location", "wiring": "before", "cell": "gru"},
    "feeding": {"input_feeding": True, "attention": "general", "tied": "target"},
    "local-p": {"scope": "local-p", "window": 2, "attention": "general"},
    "gumbel": {"hard": "gumbel"},
    "reinforce": {"hard": "reinforce"},
}
COPIES: dict[str, dict[str, Any]] = {
    "encoder": {"wiring": "encoder", "attention": "dot"},
    "local-m": {"scope": "local-m", "window": 1, "bidirectional": False},
}
TRANSFORMER: dict[str, dict[str, Any]] = {
    "post": {},
    "pre rotary": {"norm": "pre", "positions": "rotary", "kv_heads": 1},
    "learned all tied": {"positions": "learned", "tied": "all"},
}


def batch(turned: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 64 sources of one to four symbols, their lengths, and targets closed by 1."""
    lengths = torch.randint(1, LONGEST + 1, (64,))
    source = torch.randint(2, SYMBOLS, (64, LONGEST))
    steps = torch.arange(LONGEST)
    order = torch.where(turned & (steps < lengths[:, None]), lengths[:, None] - 1 - steps, steps.expand(64, -1))
    target = F.pad(source.gather(1, order), (0, 1))
    steps = torch.arange(LONGEST + 1)
    target = torch.where(steps < lengths[:, None], target, (steps == lengths[:, None]).long())
    return source.masked_fill(steps[:-1] >= lengths[:, None], 0), lengths, target


def accuracy(model: EncoderDecoder, *, turned: bool, steps: int, rate: float) -> float:
    """Train, and return the share of sequences that are written without an error by the model alone."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 30) * (1 - step / steps)
        source, lengths, target = batch(turned)
        logits = model(source, lengths, F.pad(target[:, :-1], (1, 0), value=1))
        losses = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0, reduction="none")
        loss = losses.sum() / (target > 0).sum()
        if getattr(model.config, "hard", "none") == "reinforce":
            loss = loss + 0.3 * model.surrogate(-losses.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        source, lengths, target = batch(turned)
        written = model(source, lengths, F.pad(target[:, :-1], (1, 0), value=1), teacher_forcing=0.0).argmax(-1)
    return float(((written == target) | (target == 0)).all(1).float().mean())


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", [*RECURRENT, *COPIES])
def test_recurrent_models_learn(name: str) -> None:
    torch.manual_seed(0)
    options = {"embedding": 24, "encoder": 24, "decoder": 48, "features": 24, "max_length": LONGEST}
    config = RecurrentConfig(SYMBOLS, SYMBOLS, **{**options, **(RECURRENT | COPIES)[name]})
    model = RecurrentEncoderDecoder(config)
    assert accuracy(model, turned=name in RECURRENT, steps=150, rate=0.02) > 0.8


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", TRANSFORMER)
def test_transformers_learn(name: str) -> None:
    torch.manual_seed(0)
    options = {"width": 32, "heads": 4, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 64, "dropout": 0.0}
    model = TransformerEncoderDecoder(TransformerConfig(SYMBOLS, SYMBOLS, **{**options, **TRANSFORMER[name]}))
    assert accuracy(model, turned=True, steps=200, rate=0.01) > 0.7
