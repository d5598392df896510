"""Functions of single elements, as FlexAttention calls them, evaluated for whole index tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard._utils.errors import described, rejected
from regard._utils.torch_private import is_eager
from regard._utils.tracing import is_symbolic

Kind = Literal["bool", "float"]

#: What RuntimeErrors say when torch.vmap cannot run a function: all but the second come from vmap itself.
_NOT_VMAPPABLE = ("vmap", "doesn't have storage")


def per_element(
    function: Callable[..., Any], *given: Tensor, kind: Kind, blame: tuple[str, str], expected: str | None = None
) -> Tensor:
    """Return what a function of 0-d tensors gives for every element of tensors that broadcast against each other.

    The function is called once: with whole tensors where all that it does is known to treat each element by itself,
    else under one level of ``torch.vmap`` per dimension. An operation on some of the arguments alone costs no more than
    their elements.

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
    if is_eager() and (whole := _whole(function, given, kind)) is not None:
        return whole
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


#: Operations that treat each element by itself, by the names that torch and its tensors have for them.
_POINTWISE_NAMES = frozenset((
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil", "clamp", "cos", "div",
    "double", "eq", "exp", "float", "floor", "floor_divide", "fmod", "ge", "gt", "half", "int", "isfinite", "isinf",
    "isnan", "le", "log", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "long", "lt",
    "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "pow", "reciprocal", "remainder", "round", "rsqrt",
    "rsub", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "tanh", "true_divide", "where", "__add__", "__and__",
    "__eq__", "__floordiv__", "__ge__", "__gt__", "__invert__", "__le__", "__lt__", "__mod__", "__mul__", "__ne__",
    "__neg__", "__or__", "__pow__", "__radd__", "__rand__", "__rfloordiv__", "__rmod__", "__rmul__", "__ror__",
    "__rpow__", "__rsub__", "__rtruediv__", "__rxor__", "__sub__", "__truediv__", "__xor__",
))  # fmt: skip
_POINTWISE = frozenset(
    getattr(owner, name)
    for name in _POINTWISE_NAMES
    for owner in (torch, Tensor)
    if callable(getattr(owner, name, None))
)


def meaning(function: Any) -> tuple[Hashable, ...] | None:
    """Return a key such that functions of one key give the same answers; None where that is not known.

    It is known of a plain function that uses nothing but its arguments, constants, pointwise operations of torch, and
    numbers that it closes over or finds as globals; these are part of the key.
    """
    if type(function) is not FunctionType or function.__kwdefaults__:
        return None
    code, known = function.__code__, function.__globals__
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return None
    found: list[Any] = [code, torch.get_default_dtype()]
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one that is not filled yet
        return None
    globals_ = [known[name] for name in code.co_names if name in known and known[name] is not torch]
    for value in (*cells, *globals_, *(function.__defaults__ or ())):
        if type(value) not in (bool, int, float):
            return None
        found.append(value if type(value) is int else repr(value))  # 1, '1.0', 'True'; -0.0 is not 0.0
    if any(name not in known and name not in _POINTWISE_NAMES for name in code.co_names):
        return None
    return tuple(found)


class _NotPointwiseError(Exception):
    """A function does something else than treat each element by itself."""


class _Pointwise(TorchFunctionMode):
    """Lets a function run on whole tensors as long as that is what it does to each element.

    Operations must be pointwise, of tensors made of those given and of numbers, or look such tensors up in a table.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.made = list(given)  # they are kept, so that no other tensor gets the identity of one
        self.identities = {id(tensor) for tensor in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            known = args[0].dim() == len(items) and all(id(item) in self.identities for item in items)
        else:
            known = func in _POINTWISE and all(map(self._is_element, (*args, *kwargs.values())))
        if not known:
            raise _NotPointwiseError
        made = func(*args, **kwargs)
        self.made.append(made)
        self.identities.add(id(made))
        return made

    def _is_element(self, value: Any) -> bool:
        """Whether a value is one of each element: made of those given, a number, or a tensor that is one."""
        if isinstance(value, Tensor):
            return id(value) in self.identities or value.dim() == 0
        return not isinstance(value, (list, tuple, dict))


def _whole(function: Callable[..., Any], given: tuple[Tensor, ...], kind: Kind) -> Tensor | None:
    """Return what a function gives for whole tensors, if it surely treats each element by itself."""
    watch = _Pointwise(given)
    try:
        with watch:
            found = function(*given)
    except _NotPointwiseError:
        return None
    if not isinstance(found, Tensor) or id(found) not in watch.identities or not _is_kind(found, kind):
        return None
    rank = max(tensor.dim() for tensor in given)
    return found[(None,) * (rank - found.dim())]


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
