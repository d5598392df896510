"""The mask that a transformers model passes to its layers: a tensor that keeps its structure.

Models slice, add, extend and read their masks. A :class:`ModelMask` behaves as a tensor: bool as for "sdpa", True for
visible pairs, or float as for "eager", with 0 for visible pairs and the dtype's minimum elsewhere. Its values are
computed on first use. If a model passes the mask on unchanged, they are never computed, and the attention function uses
the structure.

Dimensions: B batch, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from regard import masks
from regard._utils.errors import rejected, shape
from regard._utils.torch_private import as_plain_tensors, assert_when_it_runs, changes_of, replaced, without_storage
from regard.masks import Mask


@dataclass(eq=False)
class Structure:
    """The structure of a mask.

    Attributes
    ----------
    mask : Mask, Tensor or None
        Visible pairs and biases; None shows everything.
    first_query, first_key : int
        Positions of the first query and key; −1 if unknown.
    real : Tensor (B, S) of bool, optional
        Valid keys; None is all.
    causal : bool
        Whether the mask is causal.
    packed : bool
        Whether the mask separates packed sequences.
    from_model : bool
        Whether the mask comes from transformers, unmodified, rather than from the user.
    """

    mask: Mask | Tensor | None = None
    first_query: int = -1
    first_key: int = 0
    real: Tensor | None = None
    causal: bool = False
    packed: bool = False
    from_model: bool = True
    #: Cache of the masks that separate packed sequences, by ``packed``, shared by all layers.
    kept: dict[bool | None, Mask | None] = field(default_factory=dict, repr=False)


#: Functions that do not need the values.
_FACTS = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu")]
    + [getattr(Tensor, name).__get__ for name in ("is_meta", "requires_grad", "is_leaf", "grad_fn", "is_sparse")]
    + [getattr(Tensor, name).__get__ for name in ("is_nested", "is_quantized", "itemsize", "nbytes")]
    + [Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point]
    + [Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.is_contiguous, Tensor.is_inference]
    + [Tensor.__len__, Tensor.__hash__, torch.is_tensor, torch.is_floating_point, torch.is_complex]
)
#: Functions that return an alias of a tensor, and a copy of it.
_ALIASES, _COPIES = frozenset((Tensor.contiguous, Tensor.detach, torch.detach)), frozenset((Tensor.clone, torch.clone))


class ModelMask(Tensor):
    """A tensor (B, 1, L, S) whose values are computed from a structure when they are first read.

    Results of operations on it are ordinary tensors. Changing its values in place drops the structure.
    """

    _structure: Structure
    _made: Tensor | None
    _changes: int

    @staticmethod
    def __new__(cls, structure: Structure, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """Return the mask of a structure."""
        made: Self = without_storage(cls, shape, dtype, device)
        made._structure, made._made, made._changes = structure, None, 0
        return made

    def __init__(self, structure: Structure, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pass

    @property
    def structure(self) -> Structure:
        """The structure of the mask, or only its values if these were changed."""
        return self._structure if self._is_intact() else replace(self._structure, mask=self._made, from_model=False)

    def matrix(self) -> Tensor:
        """Return the values (B, 1, L, S) as an ordinary tensor, the same one each time."""
        if self._made is None:
            with as_plain_tensors():
                shape, dtype, device = tuple(self.shape), self.dtype, self.device
            self._made = _matrix(self._structure.mask, shape, dtype, device)
            self._changes = 0 if self._made.is_inference() else changes_of(self._made)
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on the values, unless it only needs metadata or returns the mask itself."""
        kwargs = kwargs or {}
        if func in _FACTS:
            with as_plain_tensors():
                return func(*args, **kwargs)
        mask = args[0] if args else None
        if isinstance(mask, ModelMask) and mask._is_intact():
            if func in _COPIES and not kwargs:
                return mask._again()
            if (func in _ALIASES and not kwargs) or (func is Tensor.__getitem__ and mask._is_all(args[1])):
                return mask
            if func is Tensor.to and _moves_nothing(mask, args[1:], kwargs):
                return mask
        args, kwargs = replaced(ModelMask, ModelMask.matrix, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator that bypassed :meth:`__torch_function__` on the values, which it may change in place."""
        for mask in (value for value in (*args, *(kwargs or {}).values()) if isinstance(value, ModelMask)):
            mask._structure = replace(mask._structure, mask=mask.matrix(), from_model=False)
        args, kwargs = replaced(ModelMask, ModelMask.matrix, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _is_intact(self) -> bool:
        """Whether the values are certainly unchanged; in inference mode, changes are not tracked."""
        made = self._made
        return made is None or (not made.is_inference() and changes_of(made) == self._changes)

    def _again(self) -> ModelMask:
        with as_plain_tensors():
            return ModelMask(self._structure, tuple(self.shape), self.dtype, self.device)

    def _is_all(self, index: Any) -> bool:
        """Whether an index selects everything, keeping all dimensions."""
        items, sizes = list(index) if isinstance(index, tuple) else [index], tuple(self.shape)
        if any(item is Ellipsis for item in items):
            place = next(i for i, item in enumerate(items) if item is Ellipsis)
            items[place : place + 1] = [slice(None)] * (len(sizes) - len(items) + 1)
        return len(items) <= len(sizes) and all(
            isinstance(item, slice) and range(*item.indices(size)) == range(size) for item, size in zip(items, sizes)
        )


def _moves_nothing(mask: ModelMask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``mask.to(...)`` with these arguments returns the mask itself."""
    dtype, device = mask.dtype, mask.device
    given = [*args, *(kwargs[name] for name in kwargs if name in ("dtype", "device"))]
    unchanged = all(name in ("dtype", "device", "non_blocking") for name in kwargs)
    for value in given:
        if isinstance(value, torch.dtype):
            unchanged = unchanged and value == dtype
        elif isinstance(value, (str, torch.device, int)) and not isinstance(value, bool):
            unchanged = unchanged and torch.device(value) == device
        else:
            return False
    return unchanged


def _matrix(mask: Mask | Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Materialize a mask."""
    B, _, L, S = shape
    seen: Tensor | None
    if isinstance(mask, Mask):
        b = torch.arange(B, device=device)[:, None, None, None]
        h, q_idx = torch.zeros(1, 1, 1, dtype=torch.long, device=device), torch.arange(L, device=device)[:, None]
        seen = mask.visible(b, h, q_idx, torch.arange(S, device=device))
    else:
        seen = mask
    seen = torch.ones(shape, dtype=torch.bool, device=device) if seen is None else seen.expand(shape).contiguous()
    return seen if dtype == torch.bool else as_numbers(seen, dtype)


def as_numbers(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to a float mask."""
    return torch.where(seen, torch.zeros((), device=seen.device, dtype=dtype), torch.finfo(dtype).min)


# Packed sequences -----------------------------------------------------------------------------------------------------
# transformers detects them only without a cache and without padding. regard separates them whenever this is certain;
# ``packed=True`` and ``packed=False`` override the detection.
#
# Dimensions: B batch, L queries, S keys, N sequences.


def packed_mask(
    given: Structure,
    positions: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    packed: bool | None,
    causal: bool,
    query: Tensor,
    S: int,
) -> Mask | None:
    """Return the mask that separates packed sequences; None if there are none, or the given mask already does.

    Parameters
    ----------
    given : Structure
        The layer's mask.
    positions : Tensor (B or 1, L), optional
    cu_q, cu_k : Tensor (N + 1,), optional
        Cumulative lengths of packed sequences.
    packed : bool, optional
        Whether positions describe packed sequences; None detects it.
    causal : bool
        Whether the layer is causal. As in transformers, packing is not detected in other layers.
    query : Tensor (B, H, L, E)
    S : int
    """
    if given.packed or packed is False:
        return None
    if cu_q is not None and len(cu_q) > 2:
        return masks.from_cu_seqlens(cu_q, cu_k)
    B, L = query.shape[0], query.shape[2]
    if positions is None or positions.is_meta or positions.dim() != 2 or L == 1 or positions.shape[1] != L:
        return None
    if packed is None and not causal:
        return None
    if torch.compiler.is_compiling():
        if packed:
            return masks.document((positions == 0).cumsum(1).expand(B, -1))
        _refuse_when_it_runs(positions)
        return None
    if packed is None and not given.from_model:
        return None  # a user-defined mask takes precedence
    if packed not in given.kept:
        begins = _begins(given, positions, L, S, bool(packed))
        given.kept[packed] = None if begins is None else masks.document(begins.cumsum(1).expand(B, -1))
    return given.kept[packed]


def _begins(given: Structure, positions: Tensor, L: int, S: int, certain: bool) -> Tensor | None:
    """Return the starts of packed sequences after the first, (B or 1, L); None if there are none."""
    first = max(given.first_query, 0)
    begins = positions == 0
    if given.real is None:
        begins = begins & (torch.arange(first, first + L, device=positions.device) > 0)
    else:  # ignore positions of padding, and do not count the first valid position
        before = given.real.cumsum(1) - given.real.long()
        here = slice(first - given.first_key, first - given.first_key + L)
        begins = begins & given.real[:, here] & (before[:, here] > 0)
    if first and not certain:  # a chunk that starts at position 0, such as after a soft prompt, is one sequence
        begins[:, 0] = False
    if not certain and not bool((begins[:, :-1] & (positions[:, 1:] == 1)).any()):
        return None  # such as positions that are all 0
    if not bool(begins.any()):
        return None
    if first or L != S:
        expected = (
            "be increasing with cached keys, whose sequence is unknown (packed=False treats everything as one sequence)"
        )
        raise rejected("regard", "position_ids", expected, f"several sequences in {shape(positions)}")
    return begins


def _refuse_when_it_runs(positions: Tensor) -> None:
    """Make a compiled model fail on positions such as 2, 0, 1, which padding cannot explain."""
    ends, starts, continues = positions[:, :-2] >= 2, positions[:, 1:-1] == 0, positions[:, 2:] == 1
    assert_when_it_runs(
        ~(ends & starts & continues).any(),
        "regard: position_ids must be increasing in a compiled model, got several sequences; "
        "pass packed=True to separate them, or packed=False to treat them as one.",
    )
