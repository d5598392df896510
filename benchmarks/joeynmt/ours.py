"""Regard's worker: ``python -m benchmarks.joeynmt.ours JOB``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from benchmarks.joeynmt.shapes import BETAS, CLIP, DECAY, RATE, SHAPES, SMOOTHING
from benchmarks.joeynmt.turns import Turns
from regard_lab.data import Batch
from regard_lab.generation import SearchOptions, search
from regard_lab.models import (
    END,
    EncoderDecoder,
    RecurrentConfig,
    RecurrentEncoderDecoder,
    TransformerConfig,
    TransformerEncoderDecoder,
)
from regard_lab.training import Learner, Seq2SeqObjective, Stream, TrainingOptions, cross_entropy, train


def built(shape: str, symbols: int, *, copied: bool) -> EncoderDecoder:
    """Return a model; one that is to be ``copied`` has what JoeyNMT's has: no output bias, zeros to start at."""
    fields = SHAPES[shape].ours
    model: EncoderDecoder
    if SHAPES[shape].kind == "recurrent":
        model = RecurrentEncoderDecoder(RecurrentConfig(symbols, symbols, **fields))
    else:
        model = TransformerEncoderDecoder(TransformerConfig(symbols, symbols, **fields))
    if copied:
        for name, parameter in model.named_parameters():
            if name == "output.bias" or name.startswith("bridge."):
                parameter.requires_grad_(False).zero_()
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-6
    return model


def options(**changes: Any) -> TrainingOptions:
    """Return how both sides train."""
    given = {"label_smoothing": SMOOTHING, "clip": CLIP, "weight_decay": DECAY, "beta2": BETAS[1]}
    return TrainingOptions(learning_rate=RATE, schedule="constant", warmup=0.0).with_changes(given | changes)


def load(path: str) -> list[Batch]:
    """Return batches as they were saved."""
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    count = len({name.split(".")[0] for name in arrays})
    parts = [(arrays[f"{i}.source"], arrays[f"{i}.lengths"], arrays.get(f"{i}.target")) for i in range(count)]
    return [Batch(source, lengths, source[:, :0] if target is None else target) for source, lengths, target in parts]


class Rounds(Callback):
    """Lets a run train for some steps whenever it is this side's turn."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps, self.began = turns, steps, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:  # noqa: ARG002
        if number % self.steps == 0:
            self.turns.wait()
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:  # noqa: ARG002
        if (number + 1) % self.steps == 0:
            self.turns.say(seconds=time.perf_counter() - self.began)


def repeated(batches: list[Batch]) -> Callable[[int], Batch]:
    """Return what gives these batches over and over."""
    return lambda number: batches[number % len(batches)]


def check(model: EncoderDecoder, batch: Batch, out: str) -> float:
    """Save the log-probabilities of a batch, and return the norm of the gradient of its mean loss in the layers."""
    model.eval()
    shifted = torch.cat([torch.full_like(batch.target[:, :1], END), batch.target[:, :-1]], 1)
    features = model.features(batch.source, batch.lengths, shifted)
    loss, _ = cross_entropy(features, model.projection, batch.target)
    loss.backward()
    np.save(out, model.logits(features).detach().log_softmax(-1).numpy())
    left_out = ("source_embedding", "target_embedding", "output.")
    layers = [each for name, each in model.named_parameters() if each.requires_grad and not name.startswith(left_out)]
    norm = torch.stack([each.grad.norm() for each in layers if each.grad is not None]).norm().item()
    model.zero_grad()
    return norm


def limited(wanted: SearchOptions, batch: Batch) -> SearchOptions:
    """Return options with JoeyNMT's default limit: 1.5 times the longest source of a batch, the end mark included."""
    most = max(int(1.5 * int(batch.lengths.max())) - 1, 1)
    return replace(wanted, extra=most, max_length=most)


def main() -> None:
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    torch.manual_seed(1)
    copied = job["task"] == "translate"
    model = built(job["shape"], job["symbols"], copied=copied)
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    about["parameters"] = sum(each.numel() for each in model.parameters())
    batches = load(job["batches"])
    turns.say(**about)
    if job["task"] == "train":
        never = 1_000_000_000
        given = options(steps=never, save_every=never, validate_every=never, precision=job["precision"], metric="loss")
        learner = Learner(model, given, Stream(repeated(batches)), Seq2SeqObjective.of(given))
        train(learner, [], given, Path(job["folder"]), callbacks=[Rounds(turns, len(batches))])
    with np.load(job["weights"]) as file:
        model.load_state_dict({name: torch.from_numpy(file[name]) for name in file.files})
    model.eval()
    wanted = SearchOptions(beams=job["beams"], length_penalty=job["alpha"], min_length=1)
    while True:
        asked = turns.wait()
        if asked["do"] == "check":
            turns.say(norm=check(model, load(job["check"])[0], asked["out"]))
            continue
        began = time.perf_counter()
        written: list[list[int]] = []
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=job["precision"] == "bfloat16"):
                found = search(model, batch.source, batch.lengths, limited(wanted, batch))
            written += [list(best[0].numbers) if best else [] for best in found]
        turns.say(seconds=time.perf_counter() - began, written=written)


if __name__ == "__main__":
    main()
