"""What the first call of a process costs: loading and planning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.cases import additive
from benchmarks.cases.contenders import by_regard
from benchmarks.machine import ROOT
from benchmarks.measure import Elsewhere
from benchmarks.registry import Call, Case, Contender, Goal, Point, Result, register
from benchmarks.work import Work

TIMEOUT = 300.0


class FirstCall(Elsewhere):
    """The first additive call of a fresh process, by ``regard`` or by the ``formula``."""

    def __init__(self, who: str, size: int) -> None:
        self.who, self.size = who, size

    def __call__(self) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "output.pt"
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.first_call", self.who, str(self.size), str(path)],
                check=False,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            if done.returncode:
                raise RuntimeError(f"the process failed: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
            result = json.loads(done.stdout.splitlines()[-1])
            self.seconds, self.peak = result["seconds"], result["peak"]
            return {"output": torch.load(path, weights_only=True)}


def _by(who: str) -> Contender:
    def prepare(work: Work) -> Call:
        return FirstCall(who, work.query.shape[2])

    ours = by_regard(additive.options).engine if who == "regard" else None
    return Contender(prepare, engine=ours)


register(
    Case(
        name="first-call",
        title=f"First call of a process: additive attention, {additive.FEATURES} features, a batch of 4",
        unit="queries and keys",
        build=additive.headline,
        contenders={additive.EAGER: _by("formula"), "regard": _by("regard")},
        baseline=additive.EAGER,
        points=(Point(512, rounds=5),),
        quick=16,
        goals=(Goal("first-call", "seconds", 0.3, 512),),
        bound="",
        notes="From after `import regard, torch` to the end of the call. Memory contains code that is loaded.",
    )
)
