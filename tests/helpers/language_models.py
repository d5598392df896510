"""Small random language models, with weights so large that their tokens differ."""

from __future__ import annotations

from typing import Any

import torch

from regard_lab.models import DecoderLM, DecoderLMConfig

#: Ways to tell positions, with and without a window.
KINDS: list[dict[str, Any]] = [
    {"positions": positions, "window": window, "sinks": sinks}
    for positions in ("learned", "rotary", "sinusoidal", "alibi")
    for window, sinks in ((None, 0), (6, 0), (6, 2))
]

#: Linear attention, whose cache does not tell steps apart.
LINEAR: dict[str, Any] = {"positions": "learned", "feature_map": "elu"}


def small_model(seed: int = 0, std: float = 0.3, **changes: Any) -> DecoderLM:
    """Return a model in evaluation mode."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocabulary": 50, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    model = DecoderLM(DecoderLMConfig(**sizes | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


@torch.no_grad()
def greedy(model: DecoderLM, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest tokens one by one, all computed anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
