"""Training by several processes, by the same loop, gives the numbers of one; and one of them may be killed."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from safetensors.torch import load_file

from regard_lab.data.packing import IGNORE_INDEX, LanguageBatch, PackedBatches, TokenShards
from regard_lab.models import DecoderLM, DecoderLMConfig
from regard_lab.tasks.language.options import LanguageTrainingOptions
from regard_lab.tasks.language.pretraining import MaskedTokens, NextTokens

N, L, STEPS = 30, 16, 5
CONFIG = DecoderLMConfig(
    N, width=16, layers=2, heads=4, kv_heads=2, feedforward=36, max_length=L, positions="rotary", norm="rms", gated=True
)  # fmt: skip
OPTIONS = LanguageTrainingOptions(
    steps=STEPS, learning_rate=1e-2, warmup=1, clip=0.5, precision="float32", accelerator="cpu", validate_every=2,
    save_every=2,
)  # fmt: skip
#: For two processes: of four batches a step.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "accumulate": 2},
    "shard": {"strategy": "fsdp", "accumulate": 2},
    "data": {"strategy": "fsdp", "accumulate": 2, "shard": 1, "average": 2, "keep": 2},
    "tensor": {"strategy": "fsdp", "accumulate": 4, "tensor": 2, "checkpoint_activations": True},
    "context": {"strategy": "fsdp", "accumulate": 4, "context": 2},
}


def batches(options: LanguageTrainingOptions, rank: int, size: int) -> PackedBatches:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 2 * L, (62,), generator=generator).tolist()
    documents = [torch.randint(N, (length,), generator=generator).tolist() for length in lengths]
    place, places = options.data_place(rank, size)
    return PackedBatches(TokenShards.of(documents), length=L, rows=2, rank=place, world=places)


class Uneven:
    """Batches of which some have few targets: a mean of means would be another one."""

    def __init__(self, made: PackedBatches, places: int) -> None:
        self.made, self.places = made, places

    def __call__(self, number: int) -> LanguageBatch:
        batch = self.made.batch(number)
        targets = batch.targets.clone()
        targets[(batch.tokens % 5 > 0) & (batch.tokens.sum() % 3 > 0)] = IGNORE_INDEX
        return LanguageBatch(batch.tokens, targets, batch.documents, batch.positions)


def learned(folder: Path, changes: dict[str, Any], rank: int, size: int) -> tuple[dict[str, np.ndarray], float]:
    """Return the parameters, whole, after the run, and the loss of its last validation."""
    from regard_lab.training.learner import Learner, Stream
    from regard_lab.training.loop import train
    from regard_lab.training.sharded import gather_model

    options = OPTIONS.with_changes(changes | {"devices": size})
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta" if options.divides else "cpu"):
            model = DecoderLM(CONFIG)
        if not options.divides:
            torch.manual_seed(options.seed)
            model.reset_parameters()
        made = batches(options, rank, size)
        stream = Stream(Uneven(made, size))
        learning = Learner(model, options, stream, NextTokens(separate=True))
        train(learning, list(made.once()), options, folder)
        whole = gather_model(model, None) if options.divides else model
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: each.numpy() for name, each in whole.state_dict().items()}, learning.valid_loss


def environment(rank: int, size: int, port: int) -> None:
    """Look like a process that torchrun has started."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def all_strategies(folder: Path, rank: int) -> dict[str, Any]:
    environment(rank, 2, 1)  # the group is there already
    return {name: learned(folder / name, changes, rank, 2) for name, changes in STRATEGIES.items()}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.campaign
@pytest.mark.slow
def test_strategies_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Also where batches have unequally many targets: the mean is over all of a step."""
    expected = {
        average: learned(tmp_path / f"one{average}", {"accumulate": 4, "average": average, "keep": 2}, 0, 1)
        for average in (1, 2)
    }
    found = ranks.run(partial(all_strategies, tmp_path), 2)[0]
    errors = {}
    for name, (parameters, loss) in found.items():
        wanted, valid = expected[STRATEGIES[name].get("average", 1)]
        assert parameters.keys() == wanted.keys()
        errors[name] = max(float(np.abs(parameters[each] - wanted[each]).max()) for each in wanted)
        errors[f"{name}, loss"] = abs(loss - valid)
    assert max(errors.values()) < 1e-9, errors
    left = sorted(path.suffix for path in (tmp_path / "shard" / "checkpoints").iterdir())
    assert left == [".ckpt", ".ckpt", ".shards", ".shards"]


def test_masked_tokens_count() -> None:
    """What a loss is the mean of is what it says."""
    from regard_lab.models import EncoderLM, EncoderLMConfig
    from regard_lab.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.learn(["abcdefghij"], kind="characters", specials=("end", "pad", "mask", "cls", "sep"))
    model = EncoderLM(EncoderLMConfig(len(tokenizer), width=8, layers=1, heads=2, max_length=L, pooled=False))
    documents = torch.zeros(2, L, dtype=torch.int64)
    tokens = torch.arange(2 * L).view(2, L) % 10 + 5
    batch = LanguageBatch(tokens, tokens, documents, torch.arange(L).expand(2, L))
    assert 0 < MaskedTokens(tokenizer).loss(model, batch).count < 2 * L


def command(arguments: list[str], rank: int, size: int, port: int, said: str, dies_at: int) -> None:
    """Run ``regard`` as torchrun would; the last process may be killed in a step."""
    from regard_cli import main
    from regard_lab.training.learner import Learner

    torch.set_num_threads(1)
    if size > 1:
        environment(rank, size, port)
    with Path(said).open("w") as file:
        os.dup2(file.fileno(), 2)
    if dies_at and rank == size - 1:
        step = Learner.training_step

        def training_step(self: Learner, batch: Any, number: int) -> Any:
            return os._exit(9) if number == dies_at else step(self, batch, number)

        Learner.training_step = training_step  # type: ignore[method-assign]
    sys.argv = ["regard", *arguments]
    main(arguments)


def started(arguments: list[str], size: int, dies_at: int = 0) -> list[tuple[int | None, str]]:
    """Return exit codes, and what was written to stderr."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}" for rank in range(size)]
        processes = [
            ranks.CONTEXT.Process(target=command, args=(arguments, rank, size, port, str(files[rank]), dies_at))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(ranks.LIMIT)
            if process.is_alive():
                process.kill()
                process.join()
        return [(process.exitcode, file.read_text()) for process, file in zip(processes, files)]


@pytest.mark.campaign
@pytest.mark.slow
def test_a_killed_process_and_going_on_with_another_number(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw"]
    text.write_text("".join(" ".join(words[(i + j) % 8] for j in range(3 + i * 7 % 17)) + "\n" for i in range(300)))
    sizes = {"width": 32, "layers": 2, "heads": 4}
    training = {"precision": "float32", "save_every": 4, "validate_every": 6, "accelerator": "cpu", "threads": 1}
    flags = [f"--set=model.{name}={value}" for name, value in sizes.items()]
    flags += [f"--set=training.{name}={value}" for name, value in training.items()]
    begin = ["train", "language-model", "--data", str(text), "--per", "line", "--tokenizer", "characters"]
    begin += ["--length", "32", "--batch-tokens", "128", "--steps", "12", "--preset", "tiny", *flags]

    def several(**changes: Any) -> list[str]:
        return [f"--set=training.{name}={value}" for name, value in changes.items()]

    ((code, said),) = started([*begin, "--out", str(tmp_path / "one"), *several(accumulate=4)], 1)
    assert code == 0, said
    out = str(tmp_path / "many")
    fsdp = several(strategy="fsdp", devices=2, accumulate=2)
    (code, said), (killed, _) = started([*begin, "--out", out, *fsdp], 2, dies_at=13)
    assert killed == 9
    last = said.strip().splitlines()[-1]
    assert code == 1, said
    assert "regard: train: another process died or hangs" in said, said
    assert "Traceback" not in said and last.endswith("--resume."), said
    again = ["train", "language-model", "--resume", "--out", out]
    for code, said in started([*again, *several(devices=4, accumulate=2, tensor=2)], 4):
        assert code == 0, said
    one, many = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 1e-4
