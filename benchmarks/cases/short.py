"""Masks over short sequences, where call overhead counts; and compiled calls against eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.cases.contenders import by_regard, by_torch, compiled, seeded
from benchmarks.registry import Call, Case, Contender, Goal, Point, register
from benchmarks.work import Formula, Work
from regard import masks, scores

LENGTH, BATCH, HEADS, WIDTH = 256, 2, 8, 64
LEFT = 63
DENSE, EAGER, COMPILED = "torch SDPA, dense mask", "regard", "regard, compiled"

KEEP = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.2
IDS = torch.arange(LENGTH) // 50


def _mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return (kv_idx <= q_idx) & (kv_idx >= q_idx - LEFT)


def _document_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return (kv_idx <= q_idx) & (IDS[q_idx] == IDS[kv_idx])


def _causal(rows: Tensor) -> Tensor:
    return torch.arange(LENGTH) <= rows.unsqueeze(-1)


def _near(rows: Tensor) -> Tensor:
    return _causal(rows) & (torch.arange(LENGTH) >= rows.unsqueeze(-1) - LEFT)


def _alibi() -> Tensor:
    """Return the paper's biases (1, H, L, S), −inf after the query."""
    rows = torch.arange(LENGTH)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    distance = (rows.unsqueeze(-1) - rows).abs()
    return (-slopes.view(1, HEADS, 1, 1) * distance).masked_fill(~_causal(rows), -torch.inf)


#: What each variant shows (rows), and what it is to regard.
SHOWN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "bool matrix": (lambda rows: _causal(rows)[None, None], lambda: _causal(torch.arange(LENGTH))),
    "key_padding & causal": (
        lambda rows: KEEP[:, None, None] & _causal(rows),
        lambda: masks.key_padding(KEEP) & masks.causal(),
    ),
    "document & causal": (
        lambda rows: (_causal(rows) & (IDS[rows].unsqueeze(-1) == IDS))[None, None],
        lambda: masks.document(IDS) & masks.causal(),
    ),
    "window & causal": (lambda rows: _near(rows)[None, None], lambda: masks.causal() & masks.window(LEFT, 0)),
    "a mask_mod": (lambda rows: _near(rows)[None, None], lambda: _mask_mod),
    "a mask_mod that reads a tensor": (
        lambda rows: (_causal(rows) & (IDS[rows].unsqueeze(-1) == IDS))[None, None],
        lambda: _document_mod,
    ),
}


def _masked(point: Point) -> Work:
    ends = seeded(*[(BATCH, HEADS, point.size, WIDTH)] * 3)
    if point.variant == "alibi & causal":
        return Work(*ends, scores=_biased, visible=lambda rows: _causal(rows)[None, None], kernel=point.variant)
    return Work(*ends, visible=SHOWN[point.variant][0], kernel=point.variant)


def _biased(query: Tensor, key: Tensor, parameters: dict[str, Tensor]) -> Tensor:  # noqa: ARG001
    bias = _alibi().masked_fill(~_causal(torch.arange(LENGTH)), 0.0).to(query.dtype)
    return query @ key.mT / WIDTH**0.5 + bias


def _mask(work: Work) -> dict[str, Any]:
    if work.kernel == "alibi & causal":
        return {"attn_mask": masks.alibi(HEADS) & masks.causal()}
    return {"attn_mask": SHOWN[work.kernel][1]()}


def _dense(work: Work) -> dict[str, Any]:
    return {"attn_mask": _alibi() if work.kernel == "alibi & causal" else work.dense()}


VARIANTS = (*SHOWN, "alibi & causal")

register(
    Case(
        name="short-masks",
        title=f"Masks over {LENGTH} tokens: {BATCH} sequences, {HEADS} heads of {WIDTH}",
        unit="queries and keys",
        build=_masked,
        contenders={DENSE: by_torch(_dense), "regard": by_regard(_mask)},
        baseline=DENSE,
        points=tuple(Point(LENGTH, variant=variant) for variant in VARIANTS),
        quick=LENGTH,
        goals=tuple(
            Goal(f"short-mask-{i}", "time", 1.15, LENGTH, against=DENSE, variant=variant)
            for i, variant in enumerate(VARIANTS)
        ),
        bound="",
        notes="The dense mask is made before the clock starts. So are masks; what they show is part of regard's call.",
    )
)


def _difference(query: Tensor, key: Tensor) -> Tensor:
    return query.unsqueeze(-2) - key.unsqueeze(-3)


FORMULAS: dict[str, Formula] = {
    "gaussian": lambda query, key, _: -_difference(query, key).square().sum(-1) / 2,
    "laplacian": lambda query, key, _: -_difference(query, key).abs().sum(-1),
    "additive": lambda query, key, parameters: torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ parameters["w_v"],
}
SCORES = ("scaled_dot", *FORMULAS)
COMPILED_MASKS = ("no mask", "window & causal", "document & causal", "key_padding & causal")
NARROW = 32


def _scored(point: Point) -> Work:
    score, mask = point.variant.split(", ")
    shape = (BATCH, HEADS, point.size, NARROW)
    ends, (weight,) = seeded(*[shape] * 3), seeded((NARROW,))
    named: dict[str, Any] = {} if score == "scaled_dot" else {"scores": FORMULAS[score], "features": NARROW}
    named |= {"parameters": {"w_v": weight}} if score == "additive" else {}
    visible = None if mask == "no mask" else SHOWN[mask][0]
    return Work(*ends, backward=point.backward, visible=visible, kernel=point.variant, **named)


def _call(work: Work) -> dict[str, Any]:
    score, mask = work.kernel.split(", ")
    return {
        "score": scores.Additive(work.parameters["w_v"]) if score == "additive" else score,
        "attn_mask": None if mask == "no mask" else SHOWN[mask][1](),
    }


def _compiled(work: Work) -> Call:
    arguments = _call(work)
    return compiled(work, lambda q, k, v: regard.attention(q, k, v, **arguments), work.query, work.key, work.value)


register(
    Case(
        name="compiled",
        title=f"torch.compile: {BATCH} sequences of {LENGTH} tokens, {HEADS} heads of {NARROW}, every score and mask",
        unit="queries and keys",
        build=_scored,
        contenders={EAGER: by_regard(_call), COMPILED: Contender(_compiled, compiles=True)},
        baseline=EAGER,
        points=tuple(
            Point(LENGTH, backward=backward, variant=f"{score}, {mask}")
            for score in SCORES
            for mask in COMPILED_MASKS
            for backward in (False, True)
        ),
        quick=LENGTH,
        goals=tuple(
            Goal(f"compiled-{score}-{i}{'-backward' * backward}", "time", 1.15, LENGTH, backward=backward,
                 contender=COMPILED, against=EAGER, variant=f"{score}, {mask}")
            for score in SCORES
            for i, mask in enumerate(COMPILED_MASKS)
            for backward in (False, True)
        ),
        bound="",
    )
)  # fmt: skip
