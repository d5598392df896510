"""What the weights look like, without the weights."""

from __future__ import annotations

from dataclasses import replace

import regard
from benchmarks.cases.contenders import by_regard, seeded
from benchmarks.registry import Call, Case, Contender, Goal, Point, Result, register
from benchmarks.work import Work

TOPK = 8
PLAIN = "regard, output alone"
ASKED = "regard"


def _build(point: Point) -> Work:
    return Work(*seeded(*[(1, 4, point.size, 64)] * 3), topk=TOPK)


def _observed(work: Work) -> Call:
    request = regard.AuxRequest(topk=TOPK, entropy=True)

    def call() -> Result:
        output, aux = regard.attention(work.query, work.key, work.value, return_aux=request)
        assert aux.topk is not None and aux.entropy is not None
        return {
            "output": output, "entropy": aux.entropy, "topk": aux.topk.weights, "topk_keys": aux.topk.indices,
        }  # fmt: skip

    return call


register(
    Case(
        name="aux",
        title=f"The {TOPK} largest weights and the entropy of every row, 4 heads of 64",
        unit="queries and keys",
        build=_build,
        contenders={PLAIN: replace(by_regard(), does=("output",)), ASKED: Contender(_observed)},
        baseline=PLAIN,
        points=(Point(16384),),
        quick=64,
        goals=(
            Goal("aux", "time", 1.3, 16384, contender=ASKED),
            Goal("aux-memory", "memory", 100, 16384, contender=ASKED),
        ),
        notes="The limit counts the operations of the output alone.",
    )
)
