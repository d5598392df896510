"""The options of ``regard plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from regard_lab._options import Options, option
from regard_lab.planner import OPTIMIZERS, PRECISIONS


@dataclass(frozen=True)
class PlanOptions(Options):
    """What a model is trained on and with. A GB is 10⁹ bytes, a TFLOP/s 10¹² operations a second."""

    function: ClassVar[str] = "plan"
    layers: int | None = option(None, "of a model", kind=int, ge=1, flag="--layers", short="Layers of the model.")
    width: int | None = option(None, "of its rows", kind=int, ge=1, flag="--width", short="Width of its rows.")
    heads: int | None = option(None, "of attention", kind=int, ge=1, flag="--heads", short="Heads of attention.")
    vocabulary: int | None = option(None, "tokens there are", kind=int, ge=1, flag="--vocabulary")
    length: int | None = option(None, "of a sequence", kind=int, ge=1, flag="--length", short="Tokens of a sequence.")
    batch: int = option(1 << 21, "of a step", ge=1, flag="--batch-tokens", short="Tokens of a step.")
    tokens: float | None = option(
        None, "of the run", kind=float, gt=0, flag="--tokens", short="Tokens of the run; 20 a parameter."
    )
    gpus: int = option(1, "of the cluster", ge=1, le=1 << 20, flag="--gpus", short="GPUs of the cluster.")
    memory: float = option(80.0, "GB of a GPU", gt=0, flag="--memory")
    #: Of an A100 in bfloat16.
    peak: float = option(312.0, "TFLOP/s of a GPU", gt=0, flag="--peak-tflops", short="TFLOP/s of a GPU.")
    share: float = option(0.5, "share of it in products", gt=0, le=1, flag="--share")
    bandwidth: float = option(300.0, "GB/s within a node", gt=0, flag="--bandwidth")
    network: float = option(25.0, "GB/s between nodes", gt=0, flag="--network")
    node: int = option(8, "GPUs of a node", ge=1, flag="--node")
    precision: str = option(
        "mixed", "of numbers", choices=tuple(PRECISIONS), flag="--precision", short="Or autocast, float32, ..."
    )
    optimizer: str = option(
        "adamw", "of the parameters", choices=tuple(OPTIMIZERS), flag="--optimizer", short="Or momentum, sgd."
    )
    watts: float | None = option(
        None, "of a GPU", kind=float, gt=0, flag="--watts", short="Of a GPU: tells the energy."
    )
    pue: float = option(
        1.1, "watts of the building for one of a GPU", ge=1, flag="--pue", short="Building's watts a watt."
    )
    price: float | None = option(
        None, "of an hour of a GPU", kind=float, gt=0, flag="--price", short="Of a GPU hour: tells the cost."
    )
