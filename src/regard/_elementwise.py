"""Functions of single elements, as FlexAttention calls them, evaluated for whole index tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard._errors import described, rejected
from regard._tracing import is_symbolic

Kind = Literal["bool", "float"]

#: What RuntimeErrors say when torch.vmap cannot run a function: all but the second come from vmap itself.
_NOT_VMAPPABLE = ("vmap", "doesn't have storage")


def per_element(
    function: Callable[..., Any], *given: Tensor, kind: Kind, blame: tuple[str, str], expected: str | None = None
) -> Tensor:
    """Return what a function of 0-d tensors gives for every element of tensors that broadcast against each other.

    The function is called once, under one level of ``torch.vmap`` per dimension. An operation on some of the
    arguments alone costs no more than their elements.

    Parameters
    ----------
    function : callable
        Called with as many 0-d tensors as are given; it returns one.
    *given : Tensor
    kind : {"bool", "float"}
        What it must return.
    blame : (str, str)
        The function and the argument that error messages name.
    expected : str, optional
        What they say the argument must be; by default, what the function must return.

    Returns
    -------
    Tensor
        It has the rank of what the tensors broadcast to, and size 1 or stride 0 in dimensions on which the function
        does not depend.

    Raises
    ------
    TypeError
        If the function returns something else, or does not work under ``torch.vmap``.

    Examples
    --------
    >>> keys = torch.arange(4)
    >>> per_element(lambda i, j: (i >= j) | (j == keys[:2]).any(), keys[:3, None], keys, kind="bool", blame=("f", "g"))
    tensor([[ True,  True, False, False],
            [ True,  True, False, False],
            [ True,  True,  True, False]])
    """

    def element(*values: Tensor) -> Tensor:
        with _Lookup():
            answer = function(*values)
        if isinstance(answer, Tensor) and answer.dim() == 0 and _is_kind(answer, kind):
            return answer
        wanted = expected or f"return a {kind} tensor of shape (), as in FlexAttention"
        came = f"{described(function)}, which returned {described(answer)} for one pair"
        raise rejected(*blame, wanted, came, TypeError)

    if any(_is(size, 0) for tensor in given for size in tensor.shape):  # vmap refuses to map over nothing
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
        dtype = torch.bool if kind == "bool" else given[0].dtype
        return torch.zeros(shape, dtype=dtype, device=given[0].device)
    mapped: Callable[..., Tensor] = element
    rank = max(tensor.dim() for tensor in given)
    shared = []
    for dim in reversed(range(rank)):
        varies = [_varies(tensor, dim - rank) for tensor in given]
        if not any(varies):
            shared.append(dim)
        else:
            mapped = torch.vmap(mapped, in_dims=tuple([0 if each else None for each in varies]))
    try:
        found = mapped(*map(_squeezed, given))
    except RuntimeError as error:
        if not any(word in str(error) for word in _NOT_VMAPPABLE):
            raise
        came = f"{described(function)}, which does not ({str(error).split('. ')[0]})"
        raise rejected(*blame, "work under torch.vmap, as in FlexAttention", came, TypeError) from error
    for dim in reversed(shared):
        found = found.unsqueeze(dim)
    return found


def _is_kind(tensor: Tensor, kind: Kind) -> bool:
    return tensor.is_floating_point() if kind == "float" else tensor.dtype == torch.bool


def _is(size: int, number: int) -> bool:
    """Whether a size is a number; one that is not known yet is none."""
    return not is_symbolic(size) and size == number


def _varies(tensor: Tensor, dim: int) -> bool:
    """Whether a tensor varies along a dimension, counted from the last."""
    return tensor.dim() >= -dim and not _is(tensor.shape[dim], 1)


def _squeezed(tensor: Tensor) -> Tensor:
    shared = [dim for dim, size in enumerate(tensor.shape) if _is(size, 1)]
    return tensor.squeeze(shared) if shared else tensor  # ONNX has no rule for squeezing nothing


class _Lookup(TorchFunctionMode):
    """Makes ``table[index]`` work where an index is a 0-d tensor whose value must not be read in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_element(item) for item in items) and all(_is_simple(item) for item in items):
                return _looked_up(args[0], items)
        return func(*args, **(kwargs or {}))


def _is_element(item: Any) -> bool:
    return _is_index(item) and item.dim() == 0


def _is_simple(item: Any) -> bool:
    return _is_index(item) or item is None or item is Ellipsis or type(item) in (int, slice)


def _is_index(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype not in (torch.bool, torch.uint8)  # these are masks


def _looked_up(table: Tensor, items: Sequence[Any]) -> Tensor:
    """Return ``table[items]``: first by the numbers and slices, then by the tensors."""
    part = table[tuple([slice(None) if isinstance(item, Tensor) else item for item in items])]
    named = sum(item is not None and item is not Ellipsis for item in items)
    index: list[Tensor | None] = []
    for item in items:
        if item is Ellipsis:
            index += [None] * (table.dim() - named)
        elif not isinstance(item, int):
            index.append(item.long() if isinstance(item, Tensor) else None)
    return torch.ops.aten.index.Tensor(part, index)
