"""A small GPT with regard's layer, compared with the same one with torch's ``scaled_dot_product_attention``.

    python -m benchmarks.small_model [--rounds 41] [--out FILE]

4 layers of width 128 with 4 heads, on 64 tokens: a training step (forward, backward, AdamW) of 8 sequences, and one
decoding step after 64. Both models have the same parameters; losses and logits must agree before anything is timed.
They take turns; ratios are medians over neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import ROOT, facts
from regard.nn import KVCache, MultiheadAttention

LAYERS, WIDTH, HEADS, LENGTH, BATCH, TOKENS = 4, 128, 4, 64, 8, 512
#: Calls of one turn.
TURN = 8


class TorchAttention(nn.Module):
    """Causal self-attention with torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        """Return what is read; with a cache, for one more token."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = k, v
        read = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.out(read.transpose(1, 2).flatten(2))


class OurAttention(nn.Module):
    """The same by regard's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Return what is read; with a cache, for one more token."""
        return self.inner(x, x, x, need_weights=False, is_causal=True, cache=cache)[0]


class Model(nn.Module):
    """A GPT whose attention is one of the two."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.attentions = nn.ModuleList(attention() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, caches: Sequence[Any], start: int = 0) -> Tensor:
        """Return logits (B, L, tokens)."""
        x = self.tokens(tokens) + self.places.weight[start : start + tokens.shape[1]]
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps)):
            x = x + attention(self.norms[2 * i](x), caches[i])
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x)


def models() -> dict[str, Model]:
    """Return both, with the same parameters."""
    torch.manual_seed(0)
    ours, theirs = Model(OurAttention), Model(TorchAttention)
    names = {"inner.in_proj_weight": "qkv.weight", "inner.in_proj_bias": "qkv.bias"}
    names |= {"inner.out_proj.weight": "out.weight", "inner.out_proj.bias": "out.bias"}
    state = {}
    for name, value in ours.state_dict().items():
        state[next((name.replace(a, b) for a, b in names.items() if a in name), name)] = value.clone()
    theirs.load_state_dict(state)
    return {"regard": ours, "torch": theirs}


def trained(model: Model) -> Callable[[], float]:
    """Return a training step, which returns its loss."""
    text = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(text[:, :-1], [None] * LAYERS)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def decoded(model: Model, kind: str) -> Callable[[], Tensor]:
    """Return a step of decoding after LENGTH tokens, always the same one."""
    text = torch.randint(TOKENS, (1, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    caches: list[Any] = [KVCache(2 * LENGTH) if kind == "regard" else [] for _ in range(LAYERS)]
    with torch.no_grad():
        model(text[:, :-1], caches)
    kept = [list(cache) if isinstance(cache, list) else None for cache in caches]

    def step() -> Tensor:
        for cache, before in zip(caches, kept):
            if before is None:
                cache.truncate(LENGTH)
            else:
                cache[:] = before
        with torch.no_grad():
            return model(text[:, -1:], caches, LENGTH)

    return step


def measured(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return milliseconds of each, and the median ratio of turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(TURN):
                step()
            if turn > 1:
                times[name].append((time.perf_counter() - began) / TURN)
    ratios = [a / b for a, b in zip(times["regard"], times["torch"])]
    found = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    return found | {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    said = "\n\n".join((__doc__ or "").split("\n\n")[2:]).strip()
    lines = ["# A small GPT", "", said, "", "| | regard | torch | ratio | smallest, largest |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for name, each in result["found"].items():
        spread = f"{each['low']:.3f}, {each['high']:.3f}"
        lines.append(f"| {name} | {each['regard']:.3f} ms | {each['torch']:.3f} ms | {each['ratio']:.3f} | {spread} |")
    lines += ["", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in result["machine"].items())]
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "small-model.md")
    options = parser.parse_args(given)
    both = {name: model.eval() for name, model in models().items()}
    decoding = {name: decoded(model, name) for name, model in both.items()}
    logits = [step() for step in decoding.values()]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    found = {"decoding one token": measured(decoding, options.rounds)}
    training = {name: trained(model.train()) for name, model in models().items()}
    losses = [[step() for _ in range(3)] for step in training.values()]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0, atol=1e-3)
    found["training step"] = measured(training, options.rounds)
    where = facts() | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "rounds": options.rounds}
    result = {"found": found, "machine": where}
    print(report(result))
    options.out.write_text(report(result), encoding="utf-8")
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
