"""A case: one call of ``attention`` in a few numbers and names, which print, compare and shrink."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import regard
from regard import _problem, engines
from regard._part import Part
from regard._problem import Problem
from regard.engines import Engine
from regard.masks import Extent, Mask
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.normalizers.base import Normalizer
from regard.scores import Score
from regard.testing import recipes, samples


@dataclass(frozen=True)
class Case:
    """The description of a call; the same description always makes the same tensors.

    Attributes
    ----------
    score, normalizer : str
        Names from the tables, or of a variant.
    dtype : str
        Of query, key and value.
    lead : tuple of int
        Leading dimensions, before heads.
    key_heads, group : int
        G, and how many query heads share one of them.
    queries, keys, width, key_width, value_width : int
        L, S, E, Ek (0 for E) and V.
    mask : recipe or None
    scale, softcap : float or None
    magnitude : float
        Standard deviation of queries and keys.
    values : float
        That of values.
    layout : str
        "plain", "transposed", "sliced", "expanded" (keys and values shared by stride 0), "broadcast" (keys and
        values without the first leading dimension), "broadcast query", or "matrix" (no dimensions for batch and head,
        where there is one of each).
    rows : str
        "random"; "zeros", the first query and key are 0; or "twins", the first two keys are the first query where the
        widths allow it, and one another in any case.
    learned : bool
        Whether gradients to the tensors of score and mask are asked for.
    wide : bool
        Whether those tensors are float32 where the inputs are narrower.
    dropout_p : float
    tile : (int, int)
        Rows and columns of a tile, where an engine lets itself be told.
    seed : int
    device : str
    """

    score: str = "scaled_dot"
    normalizer: str = "softmax"
    dtype: str = "float32"
    lead: tuple[int, ...] = (1,)
    key_heads: int = 1
    group: int = 1
    queries: int = 4
    keys: int = 5
    width: int = 4
    key_width: int = 0
    value_width: int = 3
    mask: recipes.Recipe | None = None
    scale: float | None = None
    softcap: float | None = None
    magnitude: float = 1.0
    values: float = 1.0
    layout: str = "plain"
    rows: str = "random"
    learned: bool = False
    wide: bool = False
    dropout_p: float = 0.0
    tile: tuple[int, int] = (4, 4)
    seed: int = 0
    device: str = "cpu"

    @property
    def extent(self) -> Extent:
        """B, H, L and S."""
        return Extent(math.prod(self.lead), self.key_heads * self.group, self.queries, self.keys)

    def but(self, **changes: Any) -> Case:
        """Return the case with some fields changed."""
        return replace(self, **changes)

    def masked(self, recipe: recipes.Recipe) -> Case:
        """Return the case with a mask added to its own."""
        return replace(self, mask=recipe if self.mask is None else ("and", self.mask, recipe))

    def __str__(self) -> str:
        """Return code that makes the case: fields that are not the default."""
        plain = Case()
        told = [f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return f"Case({', '.join(told)})"


@dataclass
class Call:
    """The tensors and parts of a case, ready to call ``attention`` with; any of them may be exchanged."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    score: Score
    normalizer: Normalizer
    scale: float | None
    softcap: float | None
    dropout_p: float
    enable_gqa: bool

    @classmethod
    def of(cls, case: Case) -> Call:
        """Make the tensors and parts of a case."""
        generator = torch.Generator().manual_seed(case.seed)
        dtype, extent = getattr(torch, case.dtype), case.extent
        key_width = case.key_width or case.width
        inner = case.lead[1:] if case.layout == "broadcast" else case.lead
        outer = case.lead[1:] if case.layout == "broadcast query" else case.lead
        shapes = [
            (*outer, extent.H, case.queries, case.width),
            (*inner, case.key_heads, case.keys, key_width),
            (*inner, case.key_heads, case.keys, case.value_width),
        ]
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        query, key = _special(case.rows, drawn[0] * case.magnitude, drawn[1] * case.magnitude)
        query, key, value = (
            _laid_out(t, case.layout, i > 0, dtype, case.device)
            for i, t in enumerate((query, key, drawn[2] * case.values))
        )
        widths = samples.Widths(case.width, key_width, case.keys, extent.H, case.key_heads)
        score = samples.make(case.score, widths, generator)
        inside = torch.promote_types(dtype, torch.float32) if case.wide else dtype
        mask = None if case.mask is None else recipes.build(case.mask, extent, generator, inside)
        normalizer = NORMALIZERS[case.normalizer].sample(generator)

        def settle(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.to(case.device)
            # As it stands in memory: a copy would make strides of 0 and gaps plain.
            return tensor.to(case.device, inside).detach().requires_grad_(case.learned)

        return cls(
            query, key, value, None if mask is None else mask.map_tensors(settle), score.map_tensors(settle),
            normalizer.map_tensors(settle), case.scale, case.softcap, case.dropout_p,
            case.group > 1 and bool(case.key_heads > 1 or case.seed % 2),
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``attention``, engine aside."""
        return {
            "query": self.query, "key": self.key, "value": self.value, "attn_mask": self.mask, "score": self.score,
            "normalizer": self.normalizer, "scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout_p,
            "enable_gqa": self.enable_gqa,
        }  # fmt: skip

    def run(self, engine: Engine | str) -> Tensor:
        """Return the output of an engine."""
        return regard.attention(**self.arguments(), engine=engine)

    def look(self, engine: Engine | str, **request: Any) -> tuple[Tensor, regard.Aux]:
        """Return the output of an engine, and what ``AuxRequest(**request)`` asks for."""
        return regard.attention(**self.arguments(), engine=engine, return_aux=regard.AuxRequest(**request))

    def but(self, **changes: Any) -> Call:
        """Return the call with some arguments changed."""
        return replace(self, **changes)

    def problem(self) -> Problem:
        """Return the call as engines see it."""
        return _problem.build(
            self.query, self.key, self.value, self.mask, self.dropout_p, False, self.scale, self.enable_gqa,
            self.score, self.normalizer, self.softcap,
        )  # fmt: skip

    def refusal(self, engine: Engine) -> str | None:
        """Return why an engine cannot run the call, or None."""
        return engine.refusal(self.problem())

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that gradients are asked for, by name; query, key and value are made to want one."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        for tensor in found.values():
            tensor.requires_grad_()
        for what, part in (("score", self.score), ("mask", self.mask)):
            found |= {name: t for name, t in named(what, part) if name}
        return found


def named(what: str, part: Part | None) -> list[tuple[str, Tensor]]:
    """Return a part's tensors, those that want a gradient with a name; binding a mask may add some that do not."""
    tensors = [] if part is None else part.tensors()
    count = iter(range(len(tensors)))
    return [(f"{what} tensor {next(count)}" if t.requires_grad else "", t) for t in tensors]


def gradients(output: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return the gradient of ``(output · grad).sum()`` to each leaf; zeros where there is none."""
    found = torch.autograd.grad(output, list(leaves.values()), grad, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found)
    }


def has_graph(output: Tensor, leaves: dict[str, Tensor]) -> bool:
    """Return whether an output has a gradient to give; raise AssertionError if a leaf wants one and it has none."""
    if not output.requires_grad and any(leaf.requires_grad for leaf in leaves.values()):
        raise AssertionError("an input wants a gradient, and the output has no graph")
    return output.requires_grad


def engine_of(name: str) -> Engine:
    """Return a registered engine."""
    return engines.TABLE[name]


def _special(rows: str, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys with the rows that a case asks for; without queries, keys or heads, as they are."""
    if rows == "zeros":
        query[..., :1, :], key[..., :1, :] = 0, 0
    if rows == "twins" and query.numel() and key.numel():
        key[..., :2, :] = (
            query.reshape(-1, query.shape[-1])[0] if query.shape[-1] == key.shape[-1] else key[..., :1, :].clone()
        )
    return query, key


def _laid_out(values: Tensor, layout: str, shared: bool, dtype: torch.dtype, device: str) -> Tensor:
    """Return the values in memory as a layout says."""
    values = values.to(device, dtype)
    if layout == "matrix" and values.shape[:-2].numel() == 1:
        return values.reshape(values.shape[-2:]).clone()
    if layout == "transposed":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "sliced":
        return torch.stack((values, values.flip(-1)), -1)[..., 0]
    if layout == "expanded" and shared and values.dim() > 3 and values.shape[0]:
        return values[:1].expand(values.shape)
    return values.clone()
