"""In a fresh process: the first additive call after ``import regard, torch``, timed.

``python -m benchmarks.first_call {regard,formula} SIZE FILE`` saves the output, and prints the seconds and the bytes.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import regard


def main(who: str, size: int, file: str) -> None:
    """Run one call."""
    # These load nothing that a call would have to load: a test holds it.
    from benchmarks import memory
    from benchmarks.cases import additive
    from benchmarks.registry import Point

    resettable = memory.reset()
    before = memory.status("VmRSS") if resettable else 0
    began = time.perf_counter()
    work = additive.headline(Point(size))
    if who == "regard":
        output = regard.attention(work.query, work.key, work.value, **additive.options(work))
    else:
        output = additive.eager(work)()["output"]
    seconds = time.perf_counter() - began
    peak = memory.status("VmHWM") - before if resettable else 0
    torch.save(output, file)
    print(json.dumps({"seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
