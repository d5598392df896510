"""How fast kinds of attention learn associative recall: pairs are read, then keys are asked for in another order.

    python -m benchmarks.recall [--kinds delta,gated-delta,titans,ttt] [--steps 600] [--pairs 8] [--seeds 0 1]

A text is n pairs of a key and a value, drawn anew for each text, and then the same pairs in another order: the model is
to name the value of each key that comes again (Arora 2023, arXiv 2312.04927). Every kind is the attention of the same
decoder of 2 layers of width 64 with 2 heads, without positions, and sees the same 32 texts in each step of AdamW. The
table has the accuracy over the last 20 of every 100 steps, and the CPU seconds of all.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from regard_lab.models import DecoderLM, DecoderLMConfig

#: Number of keys, and of values.
SYMBOLS = 32


def texts(generator: torch.Generator, count: int, pairs: int) -> Tensor:
    """Return texts (B, 4·n): pairs of a key below SYMBOLS and a value above, twice, in two orders."""

    def drawn() -> Tensor:
        return torch.rand(count, SYMBOLS, generator=generator).argsort(-1)[:, :pairs]

    keys, values = drawn(), torch.randint(SYMBOLS, 2 * SYMBOLS, (count, pairs), generator=generator)
    order = torch.rand(count, pairs, generator=generator).argsort(-1)
    halves = [(keys, values), (keys.gather(1, order), values.gather(1, order))]
    return torch.cat([torch.stack(half, -1).flatten(1) for half in halves], 1)


def learn(kind: str, steps: int, pairs: int, seed: int) -> list[float]:
    """Train a model, and return its accuracy over the last 20 of every 100 steps, and of the rest."""
    torch.manual_seed(seed)
    model = DecoderLM(DecoderLMConfig(2 * SYMBOLS, 64, layers=2, heads=2, attention=kind, block=16, positions="none"))
    optimizer = torch.optim.AdamW(model.train().parameters(), 3e-3)
    generator, right = torch.Generator().manual_seed(seed), list[float]()
    for _ in range(steps):
        batch = texts(generator, 32, pairs)
        logits = model(batch[:, :-1])[:, 2 * pairs :: 2]
        wanted = batch[:, 2 * pairs + 1 :: 2]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right.append((logits.argmax(-1) == wanted).float().mean().item())
    ends = sorted({*range(100, steps + 1, 100), steps})
    return [sum(right[max(0, end - 20) : end]) / min(20, end) for end in ends]


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each kind and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="delta,gated-delta,titans,ttt")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args(arguments)
    for kind in given.kinds.split(","):
        for seed in given.seeds:
            began = time.process_time()
            found = learn(kind, given.steps, given.pairs, seed)
            shown = " ".join(f"{each:5.1%}" for each in found)
            print(f"{kind:12s} seed {seed}  {shown}  {time.process_time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
