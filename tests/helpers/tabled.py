"""A model that looks its logits up in a table, so that all that it can write can be enumerated."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from regard_lab.generation.beam_search import SearchOptions
from regard_lab.models.base import END, PAD, EncoderDecoder


@dataclass(frozen=True)
class Config:
    sources: int
    targets: int


@dataclass(frozen=True)
class Rows:
    rows: Tensor

    def select(self, rows: Tensor) -> Rows:
        assert rows.dtype == torch.int64
        return Rows(self.rows[rows])


class Tabled(EncoderDecoder):
    """What comes next depends on the last two symbols and on the sum of the source's."""

    maps = ("one", "two")

    def __init__(self, sources: int = 9, targets: int = 6, seed: int = 0, spread: float = 2.0, end: float = 0.0):
        super().__init__()
        self.config = Config(sources, targets)
        generator = torch.Generator().manual_seed(seed)
        table = spread * torch.randn(7, targets, targets, targets, generator=generator, dtype=torch.float64)
        table[..., END] += end
        self.table = torch.nn.Parameter(table)
        self.looks = torch.nn.Parameter(torch.randn(2, targets, sources, generator=generator, dtype=torch.float64))
        self.steps: list[int] = []  # how many beams each step had

    def encode(self, source, lengths):
        real = torch.arange(source.shape[1]) < lengths[:, None]
        return Rows((source * real).sum(1) % 7)

    @property
    def projection(self):
        targets = self.config.targets
        return torch.eye(targets, dtype=torch.float64), torch.zeros(targets, dtype=torch.float64)

    def features(self, source, lengths, target, teacher_forcing=1.0):
        before = torch.cat([torch.full_like(target[:, :1], PAD), target[:, :-1]], 1)
        return self.table[self.encode(source, lengths).rows[:, None], before, target]

    def start(self, memory, beams):
        return Rows(torch.full((len(memory.rows) * beams,), PAD))

    def advance(self, last, memory, state):
        assert state.rows.numel() == last.numel()
        self.steps.append(last.numel())
        before = state.rows.view(last.shape)
        return self.table[memory.rows[:, None], before, last], Rows(last.flatten())

    def logits(self, features, state=None):
        return features.clone()

    def align(self, source, lengths, target):
        scores = torch.stack([look[target[:, :, None], source[:, None, :]] for look in self.looks], 1)
        behind = torch.arange(source.shape[1]) >= lengths[:, None]
        return scores.masked_fill(behind[:, None, None], -torch.inf).softmax(-1)


@torch.no_grad()
def log_probability(model: EncoderDecoder, source: list[int], target: tuple[int, ...]) -> float:
    """Return what ``forward`` says of a target and its end."""
    given = torch.tensor([[END, *target]])
    logits = model(torch.tensor([source]), torch.tensor([len(source)]), given)[0]
    return float(logits.log_softmax(-1).gather(1, torch.tensor([*target, END])[:, None]).sum())


def everything(model: Tabled, source: list[int], options: SearchOptions) -> list[tuple[tuple[int, ...], float, float]]:
    """Return every target that the options allow, with its score and the one it is ranked by, best first."""
    limit = int(options.limits(torch.tensor([len(source)])))
    table = model.table.detach().log_softmax(-1)[sum(source) % 7].tolist()
    found = []
    for count in range(options.min_length, limit + 1):
        for target in itertools.product(range(2, model.config.targets), repeat=count):
            if options.no_repeat and repeats(target, options.no_repeat):
                continue
            path = (PAD, END, *target, END)
            score = sum(table[a][b][c] for a, b, c in zip(path, path[1:], path[2:]))
            found.append((target, score, score / ((5 + count + 1) / 6) ** options.length_penalty))
    return sorted(found, key=lambda each: -each[2])


def repeats(target: tuple[int, ...], size: int) -> bool:
    runs = [target[i : i + size] for i in range(len(target) - size + 1)]
    return len(set(runs)) < len(runs)
