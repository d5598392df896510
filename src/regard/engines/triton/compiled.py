"""Which kernels to compile ahead of time, for checks without a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from regard._utils.compilation import Compilation
from regard.engines.triton.decoding import MOST_SPLITS, step_kernels, step_shape
from regard.engines.triton.families import ADDITIVE, ARGMAX, DISTANCE, DOT, ENTMAX, ENTMAX15, SOFTMAX, SPARSEMAX
from regard.engines.triton.launch import REALS, Shape, kernels, padded, tile_shape
from regard.engines.triton.visible import WORD

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_INT32 = ("start", "stop", "lists", "tiles", "words", "best_key", "table")
_WIDE = (
    "statistic", "deltas", "d_weight", "d_bias", "bias", "sink", "weight", "rest", "peaks", "sums", "entropies", "best",
    "totals", "parts", "statistics", "checksum",
)  # fmt: skip
#: What a plain call launches; entmax and argmax first find a statistic, and auxiliary outputs take a sweep more.
_PLAIN = ("forward", "backward_query", "backward_key")
_WHOLE, _FIELDS = ("statistics", *_PLAIN), ("fields", "received")


@dataclass(frozen=True)
class _Case:
    """A family of scores, the widths of rows, and what else a kernel does."""

    family: int
    dtype: torch.dtype
    C: int
    V: int
    kind: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    rule: int = SOFTMAX
    kernels: tuple[str, ...] = _PLAIN

    @property
    def name(self) -> str:
        family = ("dot", "additive", f"distance {self.kind}")[self.family]
        rest = ", ".join(self.options)
        rule = ("", "sigmoid", "sparsemax", "entmax15", "entmax", "argmax")[self.rule]
        return " ".join(filter(None, (family, _TYPES[self.dtype], f"{self.C}×{self.V}", rule, rest)))


def _cases() -> list[_Case]:
    narrow, single, double = torch.bfloat16, torch.float32, torch.float64
    spans = {"SPANS": True, "LISTS": True}
    bias = {"BIAS": True, "HIDES": True, "BASE2": False}
    found = [_Case(DOT, narrow, C, C, 0, spans) for C in (64, 128, 256)]
    found += [_Case(DOT, narrow, 64, 64, 0, options) for options in ({"BITS": True, "LISTS": True}, bias)]
    found += [_Case(DOT, torch.float16, 128, 128, 0, {"DROPOUT": True}), _Case(DOT, single, 64, 64, 0, spans)]
    found += [_Case(ADDITIVE, narrow, 64, 64, 0, spans), _Case(DOT, double, 64, 64)]
    found += [_Case(DISTANCE, single, 3, 1), _Case(DISTANCE, single, 3, 1, 4, {"HIDES": True})]
    found += [_Case(ADDITIVE, single, 64, 64, 0, spans), _Case(DISTANCE, single, 64, 64)]
    found += [_Case(family, single, C, C) for family in (DOT, ADDITIVE, DISTANCE) for C in (128, 256)]
    found += [_Case(DOT, narrow, C, C, 0, spans, rule, _WHOLE) for C, rule in ((64, SPARSEMAX), (128, ENTMAX))]
    found += [_Case(DOT, narrow, 64, 64, 0, spans, ARGMAX, ("statistics", "forward"))]
    found += [_Case(DOT, single, 64, 64, 0, spans, ENTMAX15, _WHOLE)]
    found += [_Case(ADDITIVE, narrow, 64, 64, 0, spans, ENTMAX15, _WHOLE)]
    best = {**spans, "ENTROPY": True, "TOPK": 8}
    found += [_Case(DOT, narrow, C, C, 0, best, SOFTMAX, _FIELDS) for C in (128, 256)]
    found += [_Case(ADDITIVE, narrow, 64, 64, 0, best, SOFTMAX, _FIELDS)]
    every = {"MAX": True, "LSE": True, "ENTROPY": True, "TOPK": 64}
    return [*found, _Case(DOT, single, 64, 64, 0, every, ENTMAX, _FIELDS)]


def kernels_to_compile(chip: str) -> list[Compilation]:
    """Return every kernel at the default shapes of a chip: what a user is likely to run.

    Triton's interpreter must be off when Triton is imported.
    """
    return [_compilation(case, name, chip) for case in _cases() for name in case.kernels] + _steps()


def _compilation(case: _Case, name: str, chip: str) -> Compilation:
    kernel, tl = getattr(kernels(), name), kernels().tl
    biased, drops = "BIAS" in case.options, "DROPOUT" in case.options
    shape: Shape = tile_shape(case.family, case.dtype, case.C, case.V, biased, False, chip, drops)
    wide = "fp64" if case.dtype == torch.float64 else "fp32"
    rows = _TYPES[case.dtype] if case.family == DOT else wide
    constants: dict[str, Any] = {
        "FAMILY": case.family, "KIND": case.kind, "RULE": case.rule, "PRECISION": "ieee",
        "BASE2": case.family == DOT and case.rule == SOFTMAX,
        "WIDE": tl.float64 if wide == "fp64" else tl.float32, "BM": shape.rows, "BN": shape.cols, "BK": shape.features,
        "BQ": shape.key_part if name in ("backward_key", "received") else shape.query_part, "BC": padded(case.C),
        "BV": padded(case.V), "W": -(-shape.cols // WORD), "q_c": 1, "k_c": 1, "v_c": 1,
        "LARGEST": torch.finfo(case.dtype).max,
    }  # fmt: skip
    switches = ("SOFTCAP", "SPANS", "BITS", "BIAS", "LISTS", "HIDES", "SINK", "DROPOUT", "TO_BIAS", "REPAIRS")
    wants: dict[str, Any] = {"MAX": False, "LSE": False, "ENTROPY": False, "TOPK": 0}
    constants |= dict.fromkeys(switches, False) | wants | case.options
    signature, attributes = _signature(kernel, constants, rows, case.dtype, wide, case.C)
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Compilation(f"{name}: {case.name}", kernel, signature, used, attributes, shape.warps_of(name), shape.stages)


def _signature(
    kernel: Any, constants: dict[str, Any], rows: str, dtype: torch.dtype, wide: str, C: int
) -> tuple[dict[str, str], dict[tuple[int, ...], Any]]:
    """Return the types of a kernel's arguments, and which are multiples of 16."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        pointer = argument in ("query", "key", "d_query", "d_key", "value", "output", "d_output", "d_value")
        if argument in ("query", "key", "d_query", "d_key"):
            signature[argument] = f"*{rows}"
        elif pointer:
            signature[argument] = f"*{_TYPES[dtype]}"
        elif argument in _INT32:
            signature[argument] = "*i32"
        elif argument in _WIDE:
            signature[argument] = f"*{wide}"
        elif argument in REALS:
            signature[argument] = "fp32" if wide == "fp32" else "i64"
        else:
            signature[argument] = "i64" if argument in ("seed", "threshold") else "i32"
        width = argument[1:] in ("_b", "_h", "_r") or argument in ("C", "V")
        aligned = signature[argument].startswith("*") or (width and C % 16 == 0)
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, attributes


def _steps() -> list[Compilation]:
    """Return the kernels of steps of decoding."""
    found = []
    single, double = torch.float32, torch.float64
    cases: list[tuple[torch.dtype, int, int, dict[str, Any]]] = [
        (torch.bfloat16, C, queries, {"SPANS": True}) for C in (64, 128, 256) for queries in (4, 32)
    ]
    cases += [(torch.bfloat16, 128, 8, {"SPANS": True, "PAGE": 16}), (torch.float16, 128, 8, {"BIAS": True})]
    cases += [(single, 128, 8, {"SOFTCAP": True}), (double, 64, 8, {"SPANS": True})]
    for dtype, C, queries, options in cases:
        shape, wide = step_shape(dtype, C, C, queries, "PAGE" in options), "fp64" if dtype == double else "fp32"
        tl = kernels().tl
        constants = {
            "SOFTCAP": False, "BASE2": "BIAS" not in options and "SOFTCAP" not in options, "SPANS": False,
            "BIAS": False, "PAGE": 0, "SINK": True, "PRECISION": "ieee",
            "WIDE": tl.float64 if dtype == double else tl.float32, "LARGEST": torch.finfo(dtype).max,
            "BM": shape.rows, "BN": shape.cols, "BC": padded(C), "BV": padded(C), "BS": MOST_SPLITS,
            "q_c": 1, "k_c": 1, "v_c": 1, **options,
        }  # fmt: skip
        for name, warps, stages in (("decode", shape.warps, shape.stages), ("merge", 4, 1)):
            if name == "merge" and options != {"SPANS": True}:
                continue
            kernel = getattr(step_kernels(), name)
            used = {each: value for each, value in constants.items() if each in kernel.arg_names}
            signature, attributes = _signature(kernel, used, _TYPES[dtype], dtype, wide, C)
            about = f"{name}: {_TYPES[dtype]} {C}, {queries} queries" + "".join(f", {each}" for each in options)
            found.append(Compilation(about, kernel, signature, used, attributes, warps, stages))
    return found
