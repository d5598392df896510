"""A tiny model that learns to copy, and runs of it in a folder: also in processes that can be killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import torch
from ranks import CONTEXT
from torch import nn

from regard_lab.data.batches import Batch
from regard_lab.models.base import END, EncoderDecoder
from regard_lab.training import loop as interrupts
from regard_lab.training.learner import Learner, Stream
from regard_lab.training.loop import train
from regard_lab.training.objectives import Seq2SeqObjective
from regard_lab.training.options import TrainingOptions

SYMBOLS, LENGTH = 12, 5


@dataclass(frozen=True)
class Config:
    sources: int = SYMBOLS
    targets: int = SYMBOLS


class Copier(EncoderDecoder):
    """Reads a symbol for each that it writes."""

    maps = ()

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.config = Config()
        self.embedding = nn.Embedding(SYMBOLS, 16)
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(32, SYMBOLS)

    def encode(self, source, lengths):
        raise NotImplementedError

    def start(self, memory, beams):
        raise NotImplementedError

    def advance(self, last, memory, state):
        raise NotImplementedError

    def align(self, source, lengths, target):
        raise NotImplementedError

    @property
    def projection(self):
        return self.output.weight, self.output.bias

    def features(self, source, lengths, target, teacher_forcing=1.0):
        source = torch.nn.functional.pad(source, (0, target.shape[1] - source.shape[1]))
        hidden, _ = self.cell(self.dropout(self.embedding(source) + self.embedding(target)))
        return self.dropout(hidden)


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    source = torch.randint(2, SYMBOLS, (8, LENGTH), generator=generator)
    return Batch(source, torch.full((8,), LENGTH), torch.nn.functional.pad(source, (0, 1), value=END))


VALID = [batch(10_000 + i) for i in range(3)]
OPTIONS = TrainingOptions(
    steps=40, learning_rate=1e-2, warmup=5, validate_every=10, save_every=4, metric="loss", keep=3, average=2,
    precision="float32", label_smoothing=0.05, accumulate=2,
)  # fmt: skip


def learner(options: TrainingOptions = OPTIONS, score=None, make=batch) -> Learner:
    torch.manual_seed(options.seed)
    return Learner(Copier(), options, Stream(make), Seq2SeqObjective.of(options), score)


def begun(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Return a new process, which need not import what all of them import."""
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def alone(folder: str) -> None:
    """Train to the end, from the last checkpoint where there is one, and write the parameters."""
    torch.set_num_threads(1)
    options = OPTIONS.with_changes({"steps": 60})
    learning = learner(options)
    train(learning, VALID, options, folder, resume=(Path(folder) / "checkpoints" / "last.ckpt").exists())
    torch.save(learning.model.state_dict(), Path(folder) / "end.pt")


def apart(folder: str, processes: int, rank: int, port: int, seconds: float = 0.0) -> None:
    """Train on shares of the batches, one for each process, and write every process's parameters.

    The processes meet at a port as those that torchrun starts. With a budget of seconds, each process has a clock that
    is faster than that of the one before.
    """
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
        os.environ |= {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    options = OPTIONS.with_changes(
        {"devices": processes, "strategy": "ddp" if processes > 1 else "auto", "accelerator": "cpu", "keep": 1}
        | {"average": 1, "accumulate": 2 // processes, "steps": 20}
    )
    if seconds:
        interrupts.time = SimpleNamespace(monotonic=lambda: time.monotonic() * (1 + rank))
        options = options.with_changes({"seconds": seconds, "steps": 10**6, "schedule": "linear", "warmup": 0.1})
    torch.manual_seed(0)
    asked = []

    def score(model: EncoderDecoder) -> dict[str, float]:
        asked.append(1)
        return {"bleu": float(model.output.bias.detach().sum()) + rank}

    stream = Stream(lambda number: batch(number * processes + rank))
    learning = Learner(Copier(dropout=0.0), options, stream, Seq2SeqObjective.of(options), score)
    ended = train(learning, VALID[rank::processes], options, folder)
    told = {name: float(value) for name, value in learning.trainer.callback_metrics.items() if "valid" in name}
    found = {"told": told, "asked": len(asked), "reason": ended.reason, "steps": ended.steps}
    torch.save(found, Path(folder) / f"told{rank}.pt")
    torch.save(learning.model.state_dict(), Path(folder) / f"end{rank}.pt")
