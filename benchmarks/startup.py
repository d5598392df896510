"""What a process pays before it does anything: ``python -m benchmarks.startup --rounds 10``.

Every line is timed in fresh processes, in turn with the others, in seconds of one CPU; the least of all rounds counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks.machine import ROOT

#: What is timed, after what runs before it; and the line with which it is compared.
LINES = {
    "import torch": ("", "import torch", None),
    "import regard": ("", "import regard", "import torch"),
    # A full collection, over torch's objects too, falls into the import above, or else into what a program does next.
    "import torch, uncollected": ("import gc; gc.disable()", "import torch", None),
    "import regard, uncollected": ("import gc; gc.disable()", "import regard", "import torch, uncollected"),
    "scikit-learn's regressor": ("", "from sklearn.neighbors import KNeighborsRegressor", None),
    "regard's regressor": ("", "from regard.regression import NadarayaWatsonRegressor", "scikit-learn's regressor"),
    "second call": ("import torch, regard; q = torch.ones(1, 2, 64, 16); CALL", "CALL", None),
    "first call": ("import torch, regard; q = torch.ones(1, 2, 64, 16)", "CALL", "second call"),
}
CALL = "regard.attention(q, q, q, score='gaussian')"
TIMED = """
import time
{before}
began = time.process_time()
{line}
print(time.process_time() - began)
"""


def seconds(before: str, line: str) -> float:
    """Time a line in a fresh process."""
    code = TIMED.format(before=before, line=line).replace("CALL", CALL)
    # Its first process keeps the bytecode, as an installation does.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Print all times."""
    given = argparse.ArgumentParser(description="Time imports and the first call.")
    given.add_argument("--rounds", type=int, default=10)
    rounds = [
        {name: seconds(before, line) for name, (before, line, _) in LINES.items()}
        for _ in range(given.parse_args().rounds)
    ]
    best = {name: min(each[name] for each in rounds) for name in LINES}
    for name, (_, _, other) in LINES.items():
        ratio = "" if other is None else f"  {best[name] / best[other]:.2f} × {other}"
        print(f"{name:28}{1e3 * best[name]:9.1f} ms{ratio}")


if __name__ == "__main__":
    main()
