"""Launch the kernels: tile sizes, arguments and grids."""

from __future__ import annotations

import math
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from regard._utils.torch_private import evaluated_by_compilers
from regard.engines.triton.families import ADDITIVE, DISTANCE, DOT, ENTMAXES, SIGMOID, SOFTMAX, row_shape
from regard.engines.triton.visible import WORD, VisibleKeys

#: Rows and columns of a tile in Triton's interpreter, which takes as long for few pairs as for many.
INTERPRETED_TILE = (16, 16)
#: Features and values of which a kernel has at least so many: the least of a matrix product.
LEAST_WIDTH = 16
#: More features than any row has.
WHOLE = 1 << 16
LOG2_E = 1 / math.log(2)
#: Arguments that are no integers.
REALS = ("scale", "factor", "softcap", "alpha", "keeping")


@cache
def kernels() -> Any:
    """Return the module of the kernels, which imports Triton."""
    return import_module("regard.engines.triton.kernels")


@cache
def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter: ``TRITON_INTERPRET=1`` when Triton was imported."""
    return type(kernels().forward).__name__ == "InterpretedFunction"


@evaluated_by_compilers
def chip(device: str) -> str:
    """Return which tiles suit a device: ``"sm_80"``, ``"sm_90a"``, ``"sm_100"`` or ``"gfx942"``."""
    if not device.startswith("cuda"):
        return "sm_90a"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return "sm_80" if major < 9 else "sm_90a" if major == 9 else "sm_100"


def padded(width: int, least: int = LEAST_WIDTH) -> int:
    """Return the number of columns of which a kernel holds a row of this width."""
    return max(1 << max(width - 1, 0).bit_length(), least)


@dataclass(frozen=True)
class Shape:
    """The sizes of the tiles of a problem, and how the kernels are compiled.

    Attributes
    ----------
    rows, cols : int
        Queries and keys of a tile.
    query_part, key_part : int
        Queries that the kernels of queries' and of keys' gradients take at once.
    warps, stages : int
    features : int
        Features, or values, of which a product of rows is summed at once.
    """

    rows: int
    cols: int
    query_part: int
    key_part: int
    warps: int
    stages: int
    features: int = WHOLE

    def warps_of(self, kernel: str) -> int:
        """Return the warps of a kernel: eight would spill in small tiles of auxiliary outputs, and for many rows."""
        small = kernel == "fields" and self.query_part * self.cols < 2048
        few = small or (kernel in ("fields", "statistics") and self.query_part == 64)
        return min(self.warps, 4) if few else self.warps


def tile_shape(
    family: int, dtype: torch.dtype, C: int, V: int, biased: bool, interpreted: bool, chip: str = "sm_90a",
    drops: bool = False,
) -> Shape:  # fmt: skip
    """Return the tiles for rows of C features and V values, with or without a bias, for a :func:`chip`.

    Dropout (``drops``) changes neither rows nor columns.
    """
    if interpreted:
        rows, cols = INTERPRETED_TILE
        return Shape(rows, cols, rows, max(rows // 2, 1), 4, 1, LEAST_WIDTH)
    size, width = dtype.itemsize, max(padded(C), padded(V))
    if family != DOT:
        if size == 4 and width > LEAST_WIDTH:
            if width > 64:
                rows, warps = (32, 8) if width <= 128 else (16, 8 if chip == "gfx942" else 16)
                return Shape(rows, 16, 16, 16, warps, 1 if chip == "sm_80" else 2, 16)
            return Shape(32, 16 if chip == "sm_100" else 32, 16, 16, 8, 1, 32 if chip == "sm_90a" else WHOLE)
        if width > 128 or size == 8:
            return Shape(32, 32, 32, 32, 4, 1)
        return Shape(64, 32, 32, 16 if chip == "sm_80" else 32, 4, 1)
    if size == 2 and chip == "gfx942":  # four warps, of 64 threads, have all registers
        return Shape(64, 32, 32, 16, 4, 1) if width > 128 else Shape(128, 32 if width > 64 else 64, 32, 16, 4, 2)
    if size == 2:
        ampere, stages = chip == "sm_80", 1 if drops and chip == "sm_100" else 2
        if width > 128:
            return Shape(64, 32, 32, 16, 8, 1) if ampere else Shape(64, 32, 16, 32, 8, 2)
        part = 64 if width <= 64 else 32
        if biased:
            return Shape(64, 64, part, 16 if ampere else 32, 8, 2)
        return Shape(128, 32 if ampere else 64, part, 32, 8, stages)
    if size == 4:
        if width > 64:
            return Shape(16 if width > 128 else 32, 16, 16, 16, 8, 1, 32)
        if chip == "sm_80":
            return Shape(64, 32, 16, 32, 8, 1)
        if chip == "sm_90a":
            return Shape(64, 16, 16, 16, 8, 2)
        return Shape(64, 16, 16, 32, 8, 1, 32 if chip == "sm_100" else WHOLE)
    if width > 64:
        return Shape(16, 16, 16, 16, 4, 1)
    return Shape(32, 16 if chip == "sm_100" else 32, 16, 16, 8, 1)


@dataclass(frozen=True)
class Setting:
    """What does not depend on tensors.

    Attributes
    ----------
    family, kind, rule : int
        Constants of ``families``.
    scale, softcap : float
        A softcap of 0 is none.
    dropout_p : float
    seed : int
        Of the random numbers of dropout.
    alpha : float
        That of entmax: 2 for sparsemax; 0 for other rules.
    """

    family: int
    kind: int
    rule: int
    scale: float
    softcap: float
    dropout_p: float
    seed: int
    alpha: float = 0.0

    def base_2(self, bias: bool) -> bool:
        """Whether scores are held in units of log 2, which saves a product if nothing is added to them."""
        plain = self.family == DOT and self.rule == SOFTMAX and not self.softcap and not bias
        return plain and abs(self.scale) * LOG2_E <= 1  # the largest scores must not overflow


class Arguments:
    """The arguments that all kernels share, by name."""

    def __init__(
        self, setting: Setting, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, sink: Tensor | None,
        visible: VisibleKeys,
    ) -> None:  # fmt: skip
        (B, H, L, C), (G, S), V = query.shape, key.shape[1:3], value.shape[-1]
        self.sizes = B, H, L, C, G, S, V
        self.shape = tile_shape(
            setting.family, value.dtype, C, V, visible.bias is not None, is_interpreted(), chip(str(query.device)),
            setting.dropout_p > 0,
        )  # fmt: skip
        if visible.start is not None and visible.by_query is None:  # the forward pass was a step of decoding
            visible = visible.with_lists(S, (self.shape.rows, self.shape.cols))
        self.setting, self.visible = setting, visible
        self.base_2 = setting.base_2(visible.bias is not None)
        inverse, rest = (weight, weight) if setting.family != DISTANCE else inverse_of(weight)
        if setting.family == DOT:
            inverse = rest = query
        compact = setting.family == DISTANCE and setting.kind > 1
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        tl = kernels().tl
        exact = value.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        none = query  # a pointer that is never read
        self.tensors: dict[str, Any] = {
            "query": query, "key": key, "value": value, "weight": inverse, "rest": rest,
            "sink": none if sink is None else sink,
            "start": none, "stop": none, "tiles": none, "words": none, "bias": none, "lists": none, "checksum": none,
        }  # fmt: skip
        for name in ("start", "stop", "tiles", "words", "bias"):
            if getattr(visible, name) is not None:
                self.tensors[name] = getattr(visible, name)
        self.numbers: dict[str, Any] = {"H": H, "R": H // G, "L": L, "S": S, "C": C, "V": V}
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            self.numbers.update(zip((f"{name}_b", f"{name}_h", f"{name}_r", f"{name}_c"), tensor.stride()))
        self.numbers |= strides("w", inverse if setting.family != DOT else None, 2) | strides("z", sink, 2)
        self.numbers |= strides("s", visible.start, 3) | strides("t", visible.tiles, 3) | strides("b", visible.bias, 4)
        threshold = min(round(setting.dropout_p * 2**32), 2**32 - 1)
        self.numbers |= {
            "scale": setting.scale * (LOG2_E if self.base_2 else 1.0),
            "factor": setting.scale,  # in natural units
            "softcap": setting.softcap or 1.0,
            "alpha": setting.alpha,
            "keeping": 1 / (1 - setting.dropout_p) if setting.dropout_p < 1 else 0.0,
        }
        self.numbers |= reals({name: self.numbers[name] for name in REALS}, wide)
        self.numbers |= {"seed": setting.seed, "threshold": threshold}
        self.constants: dict[str, Any] = {
            "FAMILY": setting.family, "KIND": setting.kind, "RULE": setting.rule, "SOFTCAP": bool(setting.softcap),
            "BASE2": self.base_2, "SPANS": visible.start is not None, "BITS": visible.tiles is not None,
            "BIAS": visible.bias is not None, "LISTS": visible.by_query is not None,
            "HIDES": visible.bias is not None or compact, "SINK": sink is not None,
            "DROPOUT": setting.dropout_p > 0, "PRECISION": "tf32" if exact else "ieee",
            "WIDE": tl.float64 if wide == torch.float64 else tl.float32,
            "BM": self.shape.rows, "BN": self.shape.cols, "BK": self.shape.features, "BC": padded(C), "BV": padded(V),
            "W": -(-self.shape.cols // WORD), "LARGEST": torch.finfo(value.dtype).max,
        }  # fmt: skip
        self.wide = wide

    def launch(
        self, name: str, by_key: bool = False, tensors: dict[str, Any] | None = None, grouped: bool = True, **given: Any
    ) -> None:
        """Run a kernel, of which a program takes a block of queries, or of keys of a group's heads or of a head's."""
        B, H, L, _, G, S, _ = self.sizes
        kernel = getattr(kernels(), name)
        lists = self.visible.by_key if by_key else self.visible.by_query
        part = self.shape.key_part if by_key else self.shape.query_part
        rows = self.shape.rows if name == "forward" else part
        blocks = -(-S // self.shape.cols) if by_key else -(-L // rows)
        given = {
            **self.tensors, **self.numbers, **strides("n", lists, 3), **self.constants, **(tensors or {}),
            "blocks": blocks, "BQ": part, **given,
        }  # fmt: skip
        if lists is not None:
            given["lists"] = lists
        programs = blocks * B * (G if by_key and grouped else H)
        run_kernel(kernel, programs, given, self.shape.warps_of(name), self.shape.stages)


def strides(name: str, tensor: Tensor | None, dims: int) -> dict[str, int]:
    """Return the strides of the first dimensions by their names in the kernels, 0 along dimensions of size 1."""
    found = {}
    for dim, letter in enumerate("bhrc"[:dims]):
        found[f"{name}_{letter}"] = 0 if tensor is None or tensor.shape[dim] == 1 else tensor.stride(dim)
    return found


def run_kernel(kernel: Any, programs: int, given: dict[str, Any], warps: int, stages: int) -> None:
    """Run a kernel on the device of its first argument; ``given`` has its arguments, and maybe others, by name."""
    given = {each: given[each] for each in kernel.arg_names}
    device = given[kernel.arg_names[0]].device
    current = nullcontext() if device.type == "cpu" else torch.get_device_module(device.type).device(device)
    try:
        with current:
            kernel[(programs,)](**given, num_warps=warps, num_stages=stages)
    except kernels().OutOfResources as error:
        raise RuntimeError(
            f"attention: engine 'triton' needs {error.required} of {error.name}, and {device} has {error.limit}; "
            "use engine='streaming' or engine='reference'."
        ) from error


def reals(numbers: dict[str, float], wide: torch.dtype) -> dict[str, float]:
    """Return numbers as kernels take them: for scores in float64 as bits, as Triton rounds them to float32."""
    if wide != torch.float64:
        return numbers
    return {name: struct.unpack("q", struct.pack("d", number))[0] for name, number in numbers.items()}


def inverse_of(width: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / width as a sum of two numbers, so that multiplication is as accurate as division."""
    width = width.detach()
    if width.dtype == torch.float64:  # the remainder of a division, by products of halves
        inverse = 1 / width
        rest = _remainder(width, inverse) * inverse
    else:
        exact = 1 / width.double()
        inverse = exact.to(width.dtype)
        rest = (exact - inverse.double()).to(width.dtype)
    return inverse.contiguous(), torch.where(rest.isfinite(), rest, 0.0).contiguous()


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 − a · b in float64, without the rounding of the product (Dekker 1971)."""
    split = 134217729.0
    (a_high, b_high) = (t * split - (t * split - t) for t in (a, b))
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return (1 - product) - error


def sum_of(*tensors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum (1,) of all elements, which is not finite if one of them is not."""
    return torch.stack([t.sum(dtype=dtype) for t in tensors]).sum(0, keepdim=True)


def run_forward(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, sink: Tensor | None,
    visible: VisibleKeys,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (B, H, L, V), and the log-sum-exp (B, H, L) or what else weights follow from (B, H, L, 2)."""
    arguments = Arguments(setting, query, key, value, weight, sink, visible)
    B, H, L, *_ = arguments.sizes
    output = value.new_empty(B, H, L, value.shape[-1])
    statistic = value.new_zeros(B, H, L, *row_shape(setting.rule), dtype=arguments.wide)
    found = {"output": output, "statistic": statistic}
    if setting.rule in ENTMAXES:
        found["checksum"] = sum_of(value, dtype=arguments.wide)
    if setting.rule not in (SOFTMAX, SIGMOID):
        arguments.launch("statistics", tensors=found)
    arguments.launch("forward", tensors=found, REPAIRS=False)
    masked = arguments.constants["HIDES"] or visible.by_query is not None
    if masked or (setting.rule != SIGMOID and value.dtype != torch.float16):  # float16 is summed in float32
        arguments.launch("forward", tensors=found, REPAIRS=True)
    return output, statistic


def run_backward(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, sink: Tensor | None,
    visible: VisibleKeys, output: Tensor, statistic: Tensor, grad: Tensor, to_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key, value, weight, bias (empty if not needed) and sink (empty without one)."""
    arguments = Arguments(setting, query, key, value, weight, sink, visible)
    B, H, L, C, _, S, _ = arguments.sizes
    wide = arguments.wide
    whole = statistic.contiguous()
    if sink is not None:
        whole = torch.logaddexp(whole, sink.to(wide).unsqueeze(-1))
    deltas = value.new_empty(B, H, L, dtype=wide)
    d_query, d_key, d_value = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    blocks = -(-L // arguments.shape.query_part)
    features = setting.family in (ADDITIVE, DISTANCE)
    d_weight = value.new_empty(B, H, blocks, C, dtype=wide) if features else d_query
    d_bias = value.new_zeros(B, H, L, S, dtype=wide) if to_bias else d_query
    shared = {
        "output": output.contiguous(), "statistic": whole, "d_output": grad.to(value.dtype).contiguous(),
        "deltas": deltas, "d_query": d_query, "d_key": d_key, "d_value": d_value, "d_weight": d_weight,
        "d_bias": d_bias,
    }  # fmt: skip
    if setting.rule in ENTMAXES:
        shared["checksum"] = sum_of(query, key, value, grad, dtype=wide)
    arguments.launch("backward_query", tensors=shared, TO_BIAS=to_bias)
    arguments.launch("backward_key", by_key=True, tensors=shared)
    sums = weight.new_empty(weight.shape)
    if features:
        total = d_weight.sum(2).sum_to_size(weight.shape) if weight.shape[0] == 1 else d_weight.sum(2)
        sums = total.to(weight.dtype)
    added = value.new_empty(0)
    if to_bias and visible.bias is not None:
        added = d_bias.sum_to_size(visible.bias.shape).to(visible.bias.dtype)
    d_sink = value.new_empty(0)
    if sink is not None:
        share = torch.where(statistic == -torch.inf, 0.0, torch.exp(sink.to(wide).unsqueeze(-1) - whole))
        d_sink = -(share * deltas).sum(-1).sum_to_size(sink.shape).to(sink.dtype)
    return d_query, d_key, d_value, sums, added, d_sink


def run_fields(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, sink: Tensor | None,
    visible: VisibleKeys, statistic: Tensor, largest: bool, lse: bool, entropy: bool, received: bool, k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what is wanted of a second sweep, and empty tensors for the rest.

    Largest scores, log-sum-exps and entropies (B, H, L), sums of weights (B, H, S), and the best scores and their keys
    (B, H, L, k) in descending order, −∞ and −1 beyond the keys that a query sees.
    """
    arguments = Arguments(setting, query, key, value, weight, sink, visible)
    B, H, L, _, _, S, _ = arguments.sizes
    wide = arguments.wide
    whole = statistic.contiguous()
    if sink is not None:
        whole = torch.logaddexp(whole, sink.to(wide).unsqueeze(-1))

    def new(wanted: bool, *shape: int, dtype: torch.dtype = wide) -> Tensor:
        return value.new_empty((B, H, *shape) if wanted else (0,), dtype=dtype)

    slots = padded(k, 1) if k else 0
    peaks, sums, entropies = new(largest, L), new(lse, L), new(entropy, L)
    best, best_key = new(k > 0, L, slots), new(k > 0, L, slots, dtype=torch.int32)
    totals = new(received, S)
    tensors = {
        "statistic": whole, "peaks": peaks, "sums": sums, "entropies": entropies, "best": best, "best_key": best_key,
        "totals": totals,
    }  # fmt: skip
    plain: dict[str, Any] = {"BASE2": False, "scale": arguments.numbers["factor"]}
    if largest or lse or entropy or k:
        wants: dict[str, Any] = {"MAX": largest, "LSE": lse, "ENTROPY": entropy, "TOPK": slots}
        arguments.launch("fields", tensors=tensors, **wants, **plain)
    if received:
        arguments.launch("received", by_key=True, grouped=False, tensors=tensors, **plain)
    if k:
        best, order = best.sort(dim=-1, descending=True, stable=True)
        best, best_key = best[..., :k], best_key.gather(-1, order)[..., :k]
    return peaks, sums, entropies, totals, best.contiguous(), best_key.long()
