"""Tokens per second when training a language model, compared with the same model in plain torch.

    python -m benchmarks.language_training [--rounds 9] [--out FILE]

The plain model is written like nanoGPT: torch layers, ``scaled_dot_product_attention``, cross-entropy of all logits, no
``compile``. Both have the same parameters (GPT-2's shape: 6 layers of width 384 with 6 heads, a vocabulary of 8,000)
and take an AdamW step on 16 rows of 256 tokens, then on 4 rows of 1,024 tokens with packed documents, where plain torch
uses a bool matrix as its mask. Losses and gradients must agree before anything is timed. The two take turns; ratios are
medians over neighbouring turns. The loop around a step is timed separately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import ROOT, facts
from regard_lab.data import LanguageBatch, PackedBatches, StreamBatches, TokenShards
from regard_lab.models import DecoderLM, DecoderLMConfig
from regard_lab.tasks.language import NextTokens

CONFIG = DecoderLMConfig(8000, width=384, layers=6, heads=6, max_length=1024, activation="gelu_tanh")
#: Rows and tokens of a batch, and whether documents are packed in it.
CASES = {"one text": (16, 256, False), "packed documents": (4, 1024, True)}


class PlainBlock(nn.Module):
    """A block of GPT-2 in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        E = CONFIG.width
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.c_fc, self.c_out = nn.Linear(E, 4 * E), nn.Linear(4 * E, E)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return rows (B, T, E)."""
        B, T, E = x.shape
        heads = [
            part.view(B, T, CONFIG.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(E, dim=2)
        ]
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, E))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Plain(nn.Module):
    """The same model in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(CONFIG.vocabulary, CONFIG.width),
            nn.Embedding(CONFIG.max_length, CONFIG.width),
        )
        self.h = nn.ModuleList(PlainBlock() for _ in range(CONFIG.layers))
        self.ln_f = nn.LayerNorm(CONFIG.width)

    def forward(self, batch: LanguageBatch, packed: bool) -> Tensor:
        """Return the loss."""
        T, mask = batch.tokens.shape[1], None
        if packed:
            same = batch.documents[:, :, None] == batch.documents[:, None, :]
            mask = (same & torch.ones(T, T, dtype=torch.bool).tril()).unsqueeze(1)
        x = self.wte(batch.tokens) + self.wpe(batch.positions if packed else torch.arange(T))
        for block in self.h:
            x = block(x, mask)
        logits = self.ln_f(x) @ self.wte.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


NAMES = {
    "embedding.": "wte.", "positions.learned.": "wpe.", "blocks.": "h.", "attention_norm.": "ln_1.",
    "feed_forward_norm.": "ln_2.", "attention.qkv.": "c_attn.", "attention.out.": "c_proj.",
    "feed_forward.up.": "c_fc.", "feed_forward.down.": "c_out.", "norm.": "ln_f.",
}  # fmt: skip


def models() -> tuple[DecoderLM, Plain]:
    """Return both, with the same parameters."""
    torch.manual_seed(0)
    ours, theirs = DecoderLM(CONFIG), Plain()
    state = {}
    for name, value in ours.state_dict().items():
        for our, their in NAMES.items():
            name = name.replace(our, their) if name.startswith(our) or f".{our}" in name else name
        state[name] = value.clone()
    theirs.load_state_dict(state)
    return ours, theirs


def batches(packed: bool) -> Any:
    """Return batches of random tokens; packed documents have 20 to 400."""
    rows, length, _ = CASES["packed documents" if packed else "one text"]
    drawn = np.random.default_rng(0)
    lengths = drawn.integers(20, 400, 2000) if packed else [400_000]
    shards = TokenShards.of([drawn.integers(0, CONFIG.vocabulary, n).tolist() for n in lengths], CONFIG.vocabulary)
    return (PackedBatches if packed else StreamBatches)(shards, length=length, rows=rows)


def cost(model: nn.Module, packed: bool) -> Callable[[LanguageBatch], Tensor]:
    """Return the loss of either model on a batch."""
    objective = NextTokens(packed)
    if isinstance(model, DecoderLM):
        return lambda batch: objective.loss(model, batch).value
    return lambda batch: model(batch, packed)


def step(
    model: nn.Module, loss: Callable[[LanguageBatch], Tensor], drawn: Any, dtype: torch.dtype
) -> Callable[[], int]:
    """Return a training step, which returns its number of tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    number = 0

    def take() -> int:
        nonlocal number
        batch = drawn.batch(number)
        number += 1
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            found = loss(batch)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return batch.count

    return take


def check(ours: DecoderLM, theirs: Plain, batch: LanguageBatch, packed: bool) -> None:
    """Raise unless both find one loss and one gradient."""
    costs = [cost(model, packed)(batch) for model in (ours, theirs)]
    torch.testing.assert_close(*costs, rtol=1e-5, atol=1e-5)
    for each in costs:
        each.backward()
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.wte.weight.grad, rtol=1e-3, atol=1e-6)
    for model in (ours, theirs):
        model.zero_grad()


def lightning(drawn: Any, steps: int) -> float:
    """Return the seconds of a step of a whole run, with all that surrounds it."""
    from regard_lab.training import Learner, Stream, TrainingOptions, train

    ours, _ = models()
    options = TrainingOptions(steps=steps, precision="float32", save_every=10**6, validate_every=10**6, metric="loss")
    with tempfile.TemporaryDirectory() as folder:
        ended = train(Learner(ours, options, Stream(drawn.batch), NextTokens(drawn.separate)), (), options, folder)
    return ended.seconds / steps


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the timings of each case and dtype."""
    found = []
    for name, (_, _, packed) in CASES.items():
        drawn = batches(packed)
        check(*models(), drawn.batch(0), packed)
        for dtype in (torch.float32, torch.bfloat16):
            takes = [step(model, cost(model, packed), drawn, dtype) for model in models()]
            speeds: list[list[float]] = [[], []]
            for i in range(rounds + 1):
                for take, samples in zip(takes, speeds):
                    begin = time.perf_counter()
                    tokens = sum(take() for _ in range(2))
                    if i:
                        samples.append(tokens / (time.perf_counter() - begin))
            ratios = sorted(a / b for a, b in zip(*speeds))
            row = {"case": name, "dtype": str(dtype).removeprefix("torch.")}
            row |= {"regard": statistics.median(speeds[0]), "plain torch": statistics.median(speeds[1])}
            found.append(row | {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]})
    return found


def report(found: list[dict[str, Any]], loop: tuple[float, float], rounds: int) -> str:
    """Return the results as Markdown."""
    lines = ["# Training of a language model", "", "```", *(f"{k}: {v}" for k, v in facts().items()), "```", ""]
    assert __doc__ is not None
    lines += [__doc__.partition("\n\n")[2].partition("\n\n")[2].strip(), ""]
    lines += [f"{rounds} rounds, {datetime.now(UTC):%Y-%m-%d}.", ""]
    lines += ["| batch | type | regard, tokens/s | plain torch, tokens/s | ratio (least–most) |"]
    lines += ["| --- | --- | ---: | ---: | ---: |"]
    for row in found:
        ratio = f"**{row['ratio']:.2f}** ({row['least']:.2f}–{row['most']:.2f})"
        speeds = f"{row['regard']:,.0f} | {row['plain torch']:,.0f}"
        lines.append(f"| {row['case']} | {row['dtype']} | {speeds} | {ratio} |")
    lines += [
        "",
        f"A step of a whole run, float32, one text: {loop[0] * 1e3:.0f} ms; the step alone: {loop[1] * 1e3:.0f} ms.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/language-training.md")
    given = parser.parse_args(arguments)
    found = measure(given.rounds)
    drawn = batches(packed=False)
    rows, length, _ = CASES["one text"]
    loop = lightning(drawn, 12), rows * length / found[0]["regard"]
    text = report(found, loop, given.rounds)
    given.out.write_text(text, encoding="utf-8")
    given.out.with_suffix(".json").write_text(json.dumps({"found": found}, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
