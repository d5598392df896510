"""JoeyNMT's worker, run by the Python of its environment: ``python theirs.py JOB``. It imports nothing of regard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joeynmt.batch import Batch
from joeynmt.config import parse_global_args, set_validation_args
from joeynmt.model import Model, build_model
from joeynmt.search import search
from joeynmt.training import TrainManager
from joeynmt.vocabulary import Vocabulary
from turns import Turns


def config(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration as JoeyNMT's files have it; what is not here is its default."""
    training = {"optimizer": "adamw", "learning_rate": job["rate"], "adam_betas": job["betas"], "batch_size": 4096}
    training |= {"weight_decay": job["decay"], "clip_grad_norm": job["clip"], "label_smoothing": job["smoothing"]}
    training |= {"normalization": "tokens", "batch_type": "token", "epochs": 1_000_000, "validation_freq": 100_000_000}
    training |= {"scheduling": "warmupinversesquareroot", "learning_rate_min": 1e-9, "learning_rate_warmup": 1000}
    testing = {"beam_size": job["beams"], "beam_alpha": job["alpha"], "max_output_length": job["longest"]}
    found = {"name": "benchmark", "model_dir": str(folder), "use_cuda": False, "random_seed": 1, "data": {}}
    return found | {"model": job["model"], "training": training, "testing": testing}


class Given:
    """In place of a data set: the same batches whenever it is this side's turn."""

    seed = 0

    def __init__(self, turns: Turns, batches: list[dict[str, torch.Tensor]], model: Model) -> None:
        self.turns, self.batches, self.model = turns, batches, model

    @property
    def batch_sampler(self) -> Given:
        return self

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def make_iter(self, **_: Any) -> Given:
        return self

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.turns.wait()
            began = time.perf_counter()
            for batch in self.batches:
                yield made(batch, self.model)
            self.turns.say(seconds=time.perf_counter() - began)


def made(batch: dict[str, torch.Tensor], model: Model) -> Batch:
    """Return a batch as JoeyNMT's loader makes it."""
    rows = torch.arange(len(batch["source"]))
    where = {"device": torch.device("cpu"), "pad_index": model.pad_index, "eos_index": model.eos_index}
    lengths, target = batch["lengths"], batch.get("target")
    return Batch(batch["source"], lengths, None, target, None, rows, is_train=target is not None, **where)


def load(path: str) -> list[dict[str, torch.Tensor]]:
    """Return batches as they were saved."""
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    count = len({name.split(".")[0] for name in arrays})
    return [
        {name.split(".")[1]: each for name, each in arrays.items() if name.split(".")[0] == str(i)}
        for i in range(count)
    ]


def take(model: Model, path: str) -> None:
    """Give the model parameters that were saved by its names."""
    with np.load(path) as file:
        state = {name: torch.from_numpy(file[name]) for name in file.files}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or any(not name.endswith("pe.pe") for name in missing):
        raise SystemExit(f"parameters must be the model's, got {missing} missing and {unexpected} too many")


def check(model: Model, batch: dict[str, torch.Tensor], out: str) -> float:
    """Save the log-probabilities of a batch, and return the norm of the gradient of its mean loss in the layers."""
    model.eval()
    model.loss_function = ("crossentropy", 0.0)
    given = made(batch, model)
    back = given.sort_by_src_length()
    loss, log_probs, _, _ = model(return_type="loss", **vars(given))
    (loss / given.ntokens).backward()
    np.save(out, log_probs.detach()[back].numpy())
    layers = [each for name, each in model.named_parameters() if "embed" not in name and "decoder.output_l" not in name]
    norm = torch.stack([each.grad.norm() for each in layers]).norm().item()
    model.zero_grad()
    return norm


def translate(model: Model, batches: list[dict[str, torch.Tensor]], args: Any, autocast: dict[str, Any]) -> list[Any]:
    """Return what is written for each source, as ``joeynmt.prediction.predict`` asks for it."""
    written = []
    for batch in batches:
        given = made(batch, model)
        back = given.sort_by_src_length()
        test = args.test
        output, _, _ = search(
            model=model, batch=given, beam_size=test.beam_size, beam_alpha=test.beam_alpha, n_best=test.n_best,
            max_output_length=test.max_output_length, return_attention=test.return_attention,
            return_prob=test.return_prob, generate_unk=test.generate_unk, repetition_penalty=test.repetition_penalty,
            no_repeat_ngram_size=test.no_repeat_ngram_size, autocast=autocast,
        )  # fmt: skip
        written += list(output[back])
    return written


def main() -> None:
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    torch.manual_seed(1)
    args = parse_global_args(config(job, Path(job["folder"])), mode="train")
    autocast = dict(args.autocast)
    if job["precision"] == "bfloat16":  # its configuration does not allow that on a CPU
        autocast = {"device_type": "cpu", "enabled": True, "dtype": torch.bfloat16}
    symbols = [f"piece{number}" for number in range(job["symbols"] - 4)]
    vocabulary = Vocabulary(symbols, args.data["special_symbols"])
    model = build_model(args.model, vocabulary, vocabulary)
    parameters = sum(each.numel() for each in model.parameters())
    about = {"parameters": parameters, "torch": torch.__version__, "threads": torch.get_num_threads()}
    batches = load(job["batches"])
    if job["task"] == "train":
        model.loss_function = (args.train.loss, args.train.label_smoothing)
        manager = TrainManager(
            rank=0, model=model, model_dir=args.model_dir, device=args.device, n_gpu=args.n_gpu,
            num_workers=args.num_workers, autocast=autocast, seed=args.seed, train_args=args.train,
            dev_args=set_validation_args(args.test),
        )  # fmt: skip
        turns.say(**about)
        data: Any = Given(turns, batches, model)
        manager.train_and_validate(train_data=data, valid_data=data)
        raise SystemExit("JoeyNMT stopped training before the end of the measurement.")
    take(model, job["weights"])
    turns.say(**about)
    while True:
        asked = turns.wait()
        if asked["do"] == "check":
            turns.say(norm=check(model, load(job["check"])[0], asked["out"]))
            continue
        model.eval()
        began = time.perf_counter()
        written = translate(model, batches, args, autocast)
        turns.say(seconds=time.perf_counter() - began, written=[each.tolist() for each in written])


if __name__ == "__main__":
    main()
