"""Kill a training run repeatedly, resume it each time, and compare the model with that of an uninterrupted run.

    python -m benchmarks.kills [--kills 20] [--seed 0] [--steps 1000] [--out DIR] [--name NAME]

`regard train translation` trains a small model on synthetic pairs and is killed with SIGKILL at random moments: between
steps, during imports, and every fourth time while it writes a file. Then it starts again with --resume. A run that ends
before all kills are done is compared, and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, facts, slug

SAVE_EVERY, VALIDATE_EVERY = 20, 5
WORDS = {
    "one": "un", "two": "deux", "red": "rouge", "blue": "bleu", "old": "vieux", "young": "jeune", "cat": "chat",
    "dog": "chien", "sees": "voit", "hears": "entend", "loves": "aime", "follows": "suit", "and": "et", "or": "ou",
}  # fmt: skip
MODEL = {"embedding": 48, "encoder": 48, "decoder": 96, "features": 48, "dropout": 0.2}
TRAINING = {
    "batch_tokens": 1000, "accumulate": 2, "save_every": SAVE_EVERY, "validate_every": VALIDATE_EVERY, "keep": 3,
    "average": 2, "precision": "float32", "warmup": 100, "validate_most": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """What one kill met.

    Attributes
    ----------
    run : int
        Which of the runs, from 1.
    after : float
        Seconds since the process was started.
    where : str
    resumed : int
        The step from which this process resumed.
    reached, saved : int
        The last step that it logged, and the step of the latest checkpoint after the kill.
    """

    run: int
    after: float
    where: str
    resumed: int
    reached: int
    saved: int

    @property
    def right(self) -> bool:
        """Whether the latest checkpoint is the last one due; the last logged step may be the one being saved."""
        return self.saved >= max(self.reached - 1, 0) // SAVE_EVERY * SAVE_EVERY and self.saved >= self.resumed


class Campaign:
    """Runs in a folder, all of the same data, options and seed."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self.folder, self.steps, self.drawn = folder, steps, random.Random(seed)
        self.data = folder / "pairs.tsv"
        self.data.write_text("".join(f"{line}\n" for line in pairs(random.Random(seed), 3000)), encoding="utf-8")

    def command(self, out: Path) -> list[str]:
        """Return the command to start, or to resume from a checkpoint."""
        begun = [sys.executable, "-m", "regard_cli", "train", "translation", "--out", str(out)]
        if (out / "checkpoints" / "last.ckpt").exists():
            return [*begun, "--resume"]
        options = {"vocabularies.size": 150, "data.held_out": 8}
        options |= {f"model.{name}": value for name, value in MODEL.items()}
        options |= {f"training.{name}": value for name, value in TRAINING.items()}
        settings = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        return [*begun, "--data", str(self.data), "--preset", "small", "--steps", str(self.steps), *settings]

    def start(self, out: Path) -> tuple[subprocess.Popen[bytes], Path]:
        """Start or resume a run; return the process and its log file."""
        log = self.folder / f"{out.name}.txt"
        with log.open("wb") as file:
            # One thread: sums must not depend on how many the machine can spare.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                self.command(out), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
            )
        return process, log

    def whole(self, out: Path) -> tuple[float, float]:
        """Run without a kill; return the seconds until the first validation, and to the end."""
        began, first = time.monotonic(), 0.0
        process, log = self.start(out)
        while process.poll() is None:
            if not first and last_step(log):
                first = time.monotonic() - began
            time.sleep(0.05)
        ended(process.returncode, log)
        return first, time.monotonic() - began

    def kill(self, run: int, out: Path, after: float, aimed: bool) -> Kill | None:
        """Start or resume a run and kill it; None if it has ended before."""
        resumed = checkpoint_step(out)
        began = time.monotonic()
        process, log = self.start(out)
        unfinished = set(temporary(out))
        wait_until(lambda: process.poll() is not None or time.monotonic() - began >= after, 0.005)
        if aimed:
            wait_until(lambda: process.poll() is not None or bool(set(temporary(out)) - unfinished), 0.0)
        passed = time.monotonic() - began
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            ended(process.returncode, log)
            return None
        new = sorted(set(temporary(out)) - unfinished)
        where = f"while writing {name_of(new[0])}" if new else "while training" if last_step(log) else "while starting"
        return Kill(run, round(passed, 2), where, resumed, max(last_step(log), resumed), checkpoint_step(out))


def pairs(drawn: random.Random, count: int) -> list[str]:
    """Return sentences of a made-up language, each with its translation word by word, the last word first."""
    lines: dict[str, None] = {}
    while len(lines) < count:
        words = [drawn.choice(list(WORDS)) for _ in range(drawn.randint(2, 9))]
        lines[f"{' '.join(words)}\t{' '.join(WORDS[word] for word in reversed(words))}"] = None
    return list(lines)


def wait_until(done: Callable[[], bool], pause: float) -> None:
    """Return as soon as something is so."""
    while not done():
        time.sleep(pause)


def ended(code: int, log: Path) -> None:
    """Raise if a process that was not killed has failed."""
    if code:
        raise RuntimeError(f"regard train ended with {code}: {log.read_text(errors='replace')[-2000:]}")


def last_step(log: Path) -> int:
    """Return the last step that a process spoke of: it does so after every validation."""
    return max(map(int, re.findall(r"^step (\d+) ", log.read_text(errors="replace").replace(",", ""), re.M)), default=0)


def temporary(out: Path) -> list[Path]:
    """Return files that were being written."""
    names = (each.name for folder in (out, out / "checkpoints") if folder.exists() for each in os.scandir(folder))
    return [Path(name) for name in names if name.startswith(".")]


def name_of(path: Path) -> str:
    """Return the name of the file that a temporary one was to become, a best checkpoint's without its numbers."""
    name = path.name.lstrip(".").rsplit(".", 2)[0]
    return "a best checkpoint" if name.startswith("best") else name


def checkpoint_step(out: Path) -> int:
    """Return the step of the last checkpoint, 0 where there is none; raise if it is not whole."""
    path = out / "checkpoints" / "last.ckpt"
    return int(torch.load(path, weights_only=True)["global_step"]) if path.exists() else 0


def campaign(folder: Path, kills: int, seed: int, steps: int) -> dict[str, Any]:
    """Return the outcomes of all kills, and whether the models are equal."""
    made = Campaign(folder, steps, seed)
    begin, whole = made.whole(folder / "whole")
    print(f"undisturbed: {whole:.0f} s, the first {VALIDATE_EVERY} steps after {begin:.0f} s", flush=True)
    reach = begin + 1.5 * (whole - begin) / kills  # so that a run needs about all of the kills to end
    found: list[Kill] = []
    same: list[bool] = []
    while len(found) < kills or not same:
        out = folder / f"killed{len(same) + 1}"
        while len(found) < kills:
            each = made.kill(len(same) + 1, out, made.drawn.uniform(0, reach), aimed=len(found) % 4 == 3)
            if each is None:
                break
            found.append(each)
            print(f"{len(found)}. after {each.after:.1f} s, {each.where}; checkpoint of step {each.saved}", flush=True)
        else:
            made.whole(out)
        names = ("model.safetensors", "source.json", "target.json")
        same.append(all((out / name).read_bytes() == (folder / "whole" / name).read_bytes() for name in names))
        print(f"the model of run {len(same)} is {'the same, byte for byte' if same[-1] else 'ANOTHER'}", flush=True)
    return {
        "steps": steps,
        "save_every": SAVE_EVERY,
        "seconds": round(whole, 1),
        "identical": same,
        "nothing_more_lost": all(each.right for each in found),
        "kills": [asdict(each) for each in found],
    }


def document(found: dict[str, Any], machine: dict[str, str]) -> str:
    """Return the report."""
    kills, runs = found["kills"], len(found["identical"])
    lines = [f"# Training killed and resumed, on {machine['CPU']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in machine.items()]
    same = "the same, byte for byte" if all(found["identical"]) else "**not the same**"
    lost = "nothing but the steps since the last checkpoint" if found["nothing_more_lost"] else "**more**"
    lines += [
        "",
        f"`regard train translation`: {found['steps']:,} steps of a small recurrent model on synthetic pairs, with a "
        f"checkpoint every {found['save_every']} steps; {found['seconds']:.0f} seconds without interruption. "
        f"{len(kills)} SIGKILLs over {runs} run{'s' if runs > 1 else ''}, each followed by `--resume` (or a new start "
        "where nothing had been saved yet).",
        "",
        f"- Final model of {'each run' if runs > 1 else 'the run'}, compared with the undisturbed run: {same}.",
        f"- Lost to a kill: {lost}.",
        "",
        "Steps are logged after every validation, each fifth step: a checkpoint may be later than *reached*.",
        "",
        "| | run | seconds after the start | killed | resumed after step | reached | checkpoint |",
        "| ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for number, each in enumerate(kills, start=1):
        cells = (each["run"], f"{each['after']:.2f}", each["where"], each["resumed"], each["reached"], each["saved"])
        lines.append(f"| {number} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse, kill, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the pairs and of the moments")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the report")
    parser.add_argument("--name", default="kills", help="suffix of the report's file name")
    options = parser.parse_args()
    machine, began = facts(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), options.kills, options.seed, options.steps)
    machine["command"] = f"`python -m benchmarks.kills --kills {options.kills} --seed {options.seed}`"
    machine["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{slug(machine['CPU'])}-{options.name}"
    path.with_suffix(".md").write_text(document(found, machine), encoding="utf-8")
    text = json.dumps({"machine": machine, **found}, indent=1, ensure_ascii=False)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(path.with_suffix(".md"))
    if not (all(found["identical"]) and found["nothing_more_lost"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
