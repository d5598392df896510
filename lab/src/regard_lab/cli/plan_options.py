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
    layers: int | None = option(None, "layers of a model", kind=int, ge=1, flag="--layers")
    width: int | None = option(None, "width (hidden size) of a model", kind=int, ge=1, flag="--width")
    heads: int | None = option(None, "attention heads per layer", kind=int, ge=1, flag="--heads")
    vocabulary: int | None = option(None, "vocabulary size in tokens", kind=int, ge=1, flag="--vocabulary")
    length: int | None = option(None, "tokens per sequence", kind=int, ge=1, flag="--length")
    batch: int = option(1 << 21, "tokens per step, over all GPUs", ge=1, flag="--batch-tokens")
    tokens: float | None = option(
        None, "training tokens in all; by default, 20 per parameter", kind=float, gt=0, flag="--tokens"
    )
    gpus: int = option(1, "GPUs in all", ge=1, le=1 << 20, flag="--gpus")
    memory: float = option(80.0, "memory of a GPU in GB", gt=0, flag="--memory")
    #: Of an A100 in bfloat16.
    peak: float = option(312.0, "peak speed of a GPU in TFLOP/s", gt=0, flag="--peak-tflops")
    share: float = option(0.5, "share of the peak speed that matrix products reach", gt=0, le=1, flag="--share")
    bandwidth: float = option(300.0, "bandwidth between GPUs of a node in GB/s", gt=0, flag="--bandwidth")
    network: float = option(25.0, "bandwidth between nodes in GB/s", gt=0, flag="--network")
    node: int = option(8, "GPUs per node", ge=1, flag="--node")
    precision: str = option(
        "mixed", f"number formats: {', '.join(PRECISIONS)}", choices=tuple(PRECISIONS), flag="--precision"
    )
    optimizer: str = option(
        "adamw", f"optimizer: {', '.join(OPTIMIZERS)}", choices=tuple(OPTIMIZERS), flag="--optimizer"
    )
    watts: float | None = option(
        None, "power of a GPU in watts, to estimate the energy", kind=float, gt=0, flag="--watts"
    )
    pue: float = option(
        1.1, "power usage effectiveness: power of the data center per power of its computers", ge=1, flag="--pue"
    )
    price: float | None = option(
        None, "price of a GPU hour, in any currency, to estimate the cost", kind=float, gt=0, flag="--price"
    )
