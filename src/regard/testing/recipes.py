"""Masks as recipes: nested tuples that print, compare and shrink, and become masks of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.masks import Extent, Mask

#: The name of a kind of mask and its arguments, or ``("and" | "or", recipe, recipe)``, or ``("not", recipe)``, or
#: ``("part", recipe, first query, first key)`` of a mask for more queries and keys.
Recipe = tuple[Any, ...]


def build(recipe: Recipe, extent: Extent, generator: torch.Generator, dtype: torch.dtype) -> Mask:
    """Return the mask of a recipe; the generator decides what its tensors hold.

    Examples
    --------
    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> build(("and", ("causal", 1), ("window", 2, -1, 0)), Extent(1, 1, 3, 4), generator, torch.float32)
    causal(offset=1) & window(2, -1, offset=0)
    """
    kind, *arguments = recipe
    if kind in ("and", "or"):
        left, right = (build(part, extent, generator, dtype) for part in arguments)
        return left & right if kind == "and" else left | right
    if kind == "not":
        return ~build(arguments[0], extent, generator, dtype)
    if kind == "part":
        inner, first_query, first_key = arguments
        whole = Extent(extent.B, extent.H, extent.L + first_query + 1, extent.S + first_key + 1)
        bound = build(inner, whole, generator, dtype).bind(whole, "cpu")
        return masks.Submatrix(bound, whole, first_query, first_key)
    if kind in KINDS:
        return KINDS[kind](extent, generator, dtype, *arguments)
    return sampled()[kind].sample(extent, generator)


def has_bias(recipe: Recipe | None) -> bool:
    """Return whether the mask of a recipe adds something to the scores."""
    if recipe is None:
        return False
    if recipe[0] in sampled():
        return bool(sampled()[recipe[0]].sample(Extent(1, 1, 1, 1), torch.Generator()).has_bias)
    return recipe[0] in BIASES or any(has_bias(part) for part in recipe[1:] if isinstance(part, tuple))


def plain(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe with dense masks plain in memory and biases around 0, where differences are taken."""
    if recipe is None or recipe[0] in ("dense", "bias"):
        return None if recipe is None else recipe[:3]
    return tuple(plain(part) if isinstance(part, tuple) else part for part in recipe)


def _where(offset: Any, extent: Extent, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments for an alignment by name, a fixed offset, or "each": one for each sequence."""
    if offset == "each":
        return {"offset": _ints(-1, 4, (extent.B,), generator)}
    return {"offset": offset} if isinstance(offset, int) else {"align": offset}


def _ints(low: int, high: int, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, max(high, low + 1), size, generator=generator)


def _bools(share: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(size, generator=generator) < share


def _causal(extent: Extent, generator: torch.Generator, _: Any, where: Any) -> Mask:
    return masks.causal(**_where(where, extent, generator))


def _window(extent: Extent, generator: torch.Generator, _: Any, left: int, right: int, where: Any) -> Mask:
    return masks.window(left, right, **_where(where, extent, generator))


def _dilated(extent: Extent, generator: torch.Generator, _: Any, step: int, where: Any) -> Mask:
    return masks.dilated(step, **_where(where, extent, generator))


def _padding(extent: Extent, generator: torch.Generator, _: Any, per_query: bool) -> Mask:
    size = (extent.B, extent.L) if per_query else (extent.B,)
    return masks.padding(_ints(0, extent.S + 1, size, generator))


def _key_padding(extent: Extent, generator: torch.Generator, _: Any, shared: bool) -> Mask:
    return masks.key_padding(_bools(0.7, (extent.S,) if shared else (extent.B, extent.S), generator))


def _prefix(extent: Extent, generator: torch.Generator, _: Any, n: int | str) -> Mask:
    return masks.prefix(n if isinstance(n, int) else _ints(0, extent.S + 1, (extent.B,), generator))


def _sinks(extent: Extent, generator: torch.Generator, _: Any, n: int) -> Mask:  # noqa: ARG001
    return masks.sinks(n)


def _others(extent: Extent, generator: torch.Generator, _: Any, named: bool) -> Mask:
    return masks.leave_one_out(_ints(-1, extent.S, (extent.L,), generator) if named else None)


def _document(extent: Extent, generator: torch.Generator, _: Any, per_sequence: bool) -> Mask:
    lead = (extent.B,) if per_sequence else ()
    ids, kv_ids = (_ints(0, 3, (*lead, n), generator).sort(-1).values for n in (extent.L, extent.S))
    return masks.document(ids, kv_ids)


def _packed(
    extent: Extent,
    generator: torch.Generator,
    _: Any,
    left: int | None = None,
    right: int | None = None,
    align: str | None = None,
) -> Mask:
    cu_q, cu_kv = (
        torch.cat((torch.zeros(1, dtype=torch.long), _ints(0, n + 1, (3,), generator).sort().values))
        for n in (extent.L, extent.S)
    )
    window = None if left is None or right is None else (left, right)
    return masks.from_cu_seqlens(cu_q, cu_kv, window=window, align=align)


def _size(extent: Extent, shared: str) -> tuple[int, ...]:
    """Return the shape of a dense mask: the letters B, H, L and S in upper case are its own, in lower case shared."""
    return tuple(getattr(extent, letter) if letter.isupper() else 1 for letter in shared)


def _stored(values: Tensor, layout: str, extent: Extent, shared: str) -> Tensor:
    """Return a dense mask's values in memory as a layout says.

    "expanded": what is shared has stride 0; "transposed": queries stand side by side, not keys; "sliced": with gaps.
    """
    if layout == "expanded":
        return values.expand(_size(extent, shared.upper()))
    if layout == "transposed":
        return values.mT.contiguous().mT
    return torch.stack((values, values), -1)[..., 0] if layout == "sliced" else values


def _dense(
    extent: Extent, generator: torch.Generator, _: Any, shared: str, share: float, layout: str = "plain"
) -> Mask:
    return masks.dense(_stored(_bools(share, _size(extent, shared), generator), layout, extent, shared))


def _bias(
    extent: Extent,
    generator: torch.Generator,
    dtype: torch.dtype,
    shared: str,
    share: float,
    layout: str = "plain",
    level: float = 0.0,
) -> Mask:
    size, most = _size(extent, shared), torch.finfo(dtype).max / 4
    level = min(max(level, -most), most)
    values = (level + torch.randn(size, generator=generator)).to(dtype)
    values = values.masked_fill(~_bools(share, size, generator), -torch.inf)
    return masks.dense(_stored(values, layout, extent, shared))


def _alibi(extent: Extent, generator: torch.Generator, dtype: torch.dtype, paper: bool, where: Any) -> Mask:
    slopes = torch.rand(extent.H, generator=generator).to(dtype)
    return masks.alibi(extent.H if paper and extent.H else slopes, **_where(where, extent, generator))


def _relative(
    extent: Extent, generator: torch.Generator, dtype: torch.dtype, reach: int, per_head: bool, where: Any
) -> Mask:
    table = torch.randn(*((extent.H,) if per_head else ()), 2 * reach + 1, generator=generator).to(dtype)
    return masks.relative(table, **_where(where, extent, generator))


def _predicate(extent: Extent, generator: torch.Generator, _: Any, step: int) -> Mask:  # noqa: ARG001
    return masks.as_mask(lambda b, h, q_idx, kv_idx: (b + h + q_idx + 2 * kv_idx) % step != 0)


def _everything(extent: Extent, generator: torch.Generator, _: Any) -> Mask:  # noqa: ARG001
    return masks.everything()


def _empty_rows(extent: Extent, generator: torch.Generator, _: Any) -> Mask:
    rows = _bools(0.5, (extent.L, 1), generator)
    rows[:1] = False
    return masks.dense(rows)


def _hidden_keys(extent: Extent, generator: torch.Generator, _: Any) -> Mask:
    keys = _bools(0.6, (1, extent.S), generator)
    keys[:, -1:] = False
    return masks.dense(keys)


#: What builds each kind: ``(extent, generator, dtype of floats, *arguments) -> Mask``.
KINDS: dict[str, Callable[..., Mask]] = {
    "alibi": _alibi,
    "bias": _bias,
    "causal": _causal,
    "dense": _dense,
    "dilated": _dilated,
    "document": _document,
    "empty_rows": _empty_rows,
    "everything": _everything,
    "hidden_keys": _hidden_keys,
    "key_padding": _key_padding,
    "others": _others,
    "packed": _packed,
    "padding": _padding,
    "predicate": _predicate,
    "prefix": _prefix,
    "relative": _relative,
    "sinks": _sinks,
    "window": _window,
}

#: The kinds that add something to the scores, which "or" and "not" refuse.
BIASES = {"alibi", "bias", "relative"}


def sampled() -> dict[str, type[Any]]:
    """Return the public masks that make a sample of themselves, ``sample(extent, generator)``, by their names."""
    return {name: cls for name, cls in vars(masks).items() if isinstance(cls, type) and hasattr(cls, "sample")}
