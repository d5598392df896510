"""Prepare the input arrays of the kernels for each family of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from regard import scores
from regard.engines.fused import pool
from regard.engines.fused.arguments import COMPACT, ENTMAX, LAPLACIAN, PAD, RADIAL, SMALL_FEATURE, SOFTMAX
from regard.engines.fused.kernel_call import KernelCall
from regard.engines.fused.rules import Rule
from regard.scores import Score
from regard.scores.dot_products import DotLike
from regard.scores.kernels import kernels
from regard.scores.own_width import OwnWidth

#: Feature size of the additive score above which a product of four denominators overflows.
LARGEST = {torch.float32: 10.8, torch.float64: 88.0}
#: Minimum number of elements per preparation task.
PREPARED = 1 << 17
#: Number of elements up to which NumPy transposes faster than torch.
FEW = 1 << 15
#: Kernel index of each distance score.
KINDS: dict[type[Score], int] = {kernels()[name]: kind for kind, name in enumerate(RADIAL)}


def kind_of(score: Score) -> int:
    """Return the kernel index of a distance score, also with own widths; 0 for other scores."""
    return KINDS.get(type(score.score if isinstance(score, OwnWidth) else score), 0)


def family_of(score: Score) -> str | None:
    """Return the name of the kernel module for a score, or None."""
    if isinstance(score, OwnWidth):
        return "radial" if type(score.score) in KINDS else None
    if type(score) in (scores.Additive, scores.Concat):
        return "additive"
    if type(score) in KINDS:
        return "radial"
    if isinstance(score, DotLike) and type(score).compare is DotLike.compare and type(score).modify is Score.modify:
        return "dot"
    return None


@dataclass(slots=True, eq=False, repr=False)
class Rows:
    """Projected rows in the layout of the kernels.

    Attributes
    ----------
    family : str
    width : int
        Features C of a row.
    arrays : dict of str to Tensor
        By kernel argument: ``query`` (B, H, L, C), ``key`` (B, G, C, S) or, if ``in_place``, (B, H, S, C), and so on.
    numbers : dict of str to int
        Flags by kernel argument.
    scale : float
        Factor of the scores.
    softcap : float
        0 if scores are not capped.
    """

    family: str
    width: int
    arrays: dict[str, Tensor]
    numbers: dict[str, int] = field(default_factory=dict)
    scale: float = 1.0
    softcap: float = 0.0

    @property
    def in_place(self) -> bool:
        """Whether the kernels read keys and values where they are, with any strides and in 16 bits too."""
        return self.family == "rows"

    @property
    def is_direct(self) -> bool:
        """Whether the kernels compute weights instead of scores."""
        return bool(self.numbers.get("direct"))

    @property
    def is_compact(self) -> bool:
        """Whether weights are 0 beyond a distance."""
        return self.numbers.get("kind", 0) >= COMPACT

    @property
    def has_threshold(self) -> bool:
        """Whether a row's weights depend on a threshold, for which the kernels hold its scores."""
        return self.numbers.get("normalizer") == ENTMAX

    @property
    def planes(self) -> int:
        """Number of packed forms of a tile of keys."""
        return 2 if self.numbers.get("mixed", 0) & 1 else 1


def is_direct(kind: int, scale: float, softcap: float, plain: bool, rule: Rule) -> bool:
    """Whether a compact kernel's weights are computed without logarithms."""
    return plain and kind >= COMPACT and scale == 1.0 and not softcap and rule.kind == SOFTMAX


def rows_of(
    family: str,
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    scale: float,
    softcap: float,
    kind: int,
    plain: bool,
    rule: Rule,
    inverse: tuple[Tensor, Tensor] | None = None,
    own_width: Tensor | None = None,
) -> Rows:
    """Convert projected rows (B, H, L, C) and (B, G, S, C) to the layout of the kernels.

    ``weight`` (H, C) is w_v of the additive score, or the widths of a distance score, with their optional ``inverse``.
    ``plain`` says that no finite bias is added to scores. ``own_width`` (B, H, L) multiplies the widths of each query.
    """
    if family == "dot":
        arrays = {"query": query.contiguous(), "key_raw": key.contiguous()}
        return Rows(family, query.shape[-1], arrays, rule.numbers, scale, softcap)
    if family == "radial":
        whole, rest = inverse_of(weight) if inverse is None else inverse
        arrays = {"query": query.contiguous(), "key": lanes(key), "weight": whole, "weight_rest": rest}
        if own_width is not None:
            factor = 1 / (own_width if kind == LAPLACIAN else own_width.square())
            arrays["factor"] = factor.clamp(max=torch.finfo(factor.dtype).max).contiguous()
        direct = int(is_direct(kind, scale, softcap, plain, rule))
        numbers = {"kind": kind, "direct": direct, "weight_head": query.shape[-1], **rule.numbers}
        return Rows(family, query.shape[-1], arrays, numbers, scale, softcap)
    return _additive(query, key, weight if scale == 1.0 else weight * scale, softcap, rule)


def lanes(rows: Tensor) -> Tensor:
    """Return rows (B, G, S, C) as (B, G, C, S), contiguous."""
    if rows.numel() > FEW:
        return rows.mT.contiguous()
    return torch.from_numpy(np.ascontiguousarray(_array(rows).swapaxes(-1, -2)))


def _array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a caller's tensor: after ``numpy()``, its own storage could not be resized, as FSDP does."""
    return tensor.detach().clone().numpy()


def inverse_of(width: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / width as a sum of two numbers, so that multiplication is as accurate as division."""
    inverse = (1 / width).contiguous()
    wide: Any = np.float64 if width.dtype == torch.float32 else np.longdouble
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = 1 / _array(width).astype(wide) - inverse.detach().numpy()
    return inverse, torch.from_numpy(np.where(np.isfinite(rest), rest, 0).astype(inverse.numpy(force=True).dtype))


def _additive(query: Tensor, key: Tensor, weight: Tensor, softcap: float, rule: Rule) -> Rows:
    query, key = query.contiguous(), key.contiguous()
    width = -(-query.shape[-1] // 4) * 4
    extra = (0, width - query.shape[-1])
    # The kernels take weights up to ¼; dividing by a power of two is exact.
    weights = _array(weight)
    largest = float(np.abs(weights).max(initial=0.0))
    unit = 2.0 ** min(max(math.frexp(largest)[1] + 2, -100), math.frexp(torch.finfo(weight.dtype).max)[1] - 1)
    scaled = torch.from_numpy(weights / unit)
    scaled = (pad(scaled, extra) if extra[1] else scaled).contiguous()
    powers_q, classes_q, tasks_q = _powers(query, scaled, True)
    powers_k, classes_k, tasks_k = _powers(key, scaled[: key.shape[1]], False)
    pool.run([*tasks_q, *tasks_k])
    arrays = {"query": powers_q, "key": powers_k, "weight": scaled}
    found_q, found_k = classes_q.numpy().tobytes(), classes_k.numpy().tobytes()
    # A pair is compared as SMALL where both rows are, and as RAW where one is.
    has_small = 0 in found_q and 0 in found_k
    has_large, has_raw = 2 in found_q or 2 in found_k, 3 in found_q or 3 in found_k
    if has_small or has_raw or has_large:
        arrays |= {"query_class": classes_q, "key_class": classes_k}
    if has_small:
        small = [pad(t, extra).clamp(-SMALL_FEATURE, SMALL_FEATURE).tanh() for t in (query, key)]
        arrays |= {"query_small": small[0], "key_small": small[1].mT.contiguous()}
    if has_raw:
        arrays |= {"query_raw": pad(query, extra).contiguous(), "key_raw": pad(key, extra).contiguous()}
    mixed = has_small + 2 * has_raw + 4 * has_large
    numbers = {"weight_head": width, "mixed": mixed, **rule.numbers}
    return Rows("additive", width, arrays, numbers, unit, softcap)


@lru_cache(256)
def _preparation(shape: tuple[int, ...], width: int, dtype: torch.dtype, is_query: bool) -> KernelCall:
    """Return the preparation kernel for rows of these sizes."""
    B, H, S, C = shape
    sizes = {"B": B * H, "H": H, "C": C, "V": width, "S": S, "scratch_numbers": PAD * width}
    return KernelCall("additive.prepare", dtype, sizes, {}, {"direct": int(is_query)}).given({}, LARGEST[dtype])


def _powers(rows: Tensor, weight: Tensor, is_query: bool) -> tuple[Tensor, Tensor, list[pool.Task]]:
    """Return buffers for powers of the features and the rows' classes, and the tasks that fill them.

    The powers are e^{−2x} / 2 of queries, and e^{2x} / 2 of keys, transposed (lanes), with the signs of ``weight``.
    """
    B, H, N, _ = rows.shape
    width = weight.shape[-1]
    powers = rows.new_empty((B, H, N, width) if is_query else (B, H, width, N))
    classes = torch.empty(B, H, N, dtype=torch.uint8, device="cpu")
    call = _preparation(tuple(rows.shape), width, rows.dtype, is_query)
    arrays = {"query": rows, "weight": weight, "output": powers, "query_class": classes}
    items, threads = B * H * -(-N // PAD), torch.get_num_threads()
    count = min(2 * threads if threads > 1 else 1, -(-items * PAD * width // PREPARED))

    def task(i: int) -> None:
        scratch = rows.new_empty(PAD * width)
        at = {"scratch": scratch.data_ptr(), "first": items * i // count, "last": items * (i + 1) // count}
        call(arrays, at)

    if count == 1:  # faster than starting a thread
        task(0)
        return powers, classes, []
    return powers, classes, [partial(task, i) for i in range(count)]


@dataclass(eq=False, repr=False)
class Gradients:
    """Sums from the backward kernels for queries (B, H, L, C), keys in the kernels' layout, and weights."""

    query: Tensor
    key: Tensor
    weight: Tensor

    def finished(self, rows: Rows, width: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the constant factors that kernels omit; return the gradients of projected query, key and weight (H, C).

        The sums may be modified in place.
        """
        if rows.family == "dot":
            return self.query.mul_(scale), self.key.mul_(scale), self.weight.new_zeros(self.weight.shape[1], 0)
        weight = rows.arrays["weight"]
        by_query = weight.unsqueeze(1)  # (H, 1, C)
        by_key = by_query[:: weight.shape[0] // self.key.shape[1]]  # the same for the query heads of a key head
        C = rows.width
        if rows.family == "radial":
            d_weight = -2 * weight * self.weight[..., :C].sum(0)
            return self.query * (2 * by_query), self.key.mT * (2 * by_key), d_weight
        d_weight = scale * (self.weight[..., :C] - 2 * self.weight[..., C:]).sum(0)
        factor = 4 * rows.scale
        d_query, d_key = self.query * (factor * by_query), self.key.mT * (factor * by_key)
        return d_query[..., :width], d_key[..., :width], d_weight[..., :width]
