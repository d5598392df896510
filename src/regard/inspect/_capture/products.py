"""Find attention outside attention functions: a softmax that is multiplied with values, operator by operator.

Weights are identified by their storage, so views need no special case. Elementwise operations on them (casts, head
masks, gates, dropout) are followed, and so are sums over heads (talking heads).

Dimensions: B batch, H heads, L queries, S keys, V width of a value, N any number of dimensions in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard._utils.torch_private import Observer, is_fake, softmaxes, to_copy
from regard.inspect._capture.running import Running, thread

_aten = torch.ops.aten
#: Matrix products, and the position of the first matrix among the arguments.
_PRODUCTS = {_aten.bmm.default: 0, _aten.mm.default: 0, _aten.baddbmm.default: 1, _aten.addmm.default: 1}
_NOISE = {_aten.bernoulli_.float, _aten.bernoulli_.Tensor}
_COPIES = {_aten.clone.default, to_copy, _aten.native_dropout.default}
#: How many softmaxes outside modules are kept.
_MOST = 8

SEVERAL = "it multiplies several softmaxes with each other"
PARTS = "it attends in blocks, windows or chunks, and its softmax is multiplied with values in parts"
EMPTY = "its tensors have no values (meta or fake tensors)"
FEATURES = "it attends between features, or between parts of positions"


@dataclass(eq=False)
class Softmax:
    """A computed softmax.

    Attributes
    ----------
    running : tuple of Running
        The modules that were running, the outermost first.
    shape : torch.Size
    used : bool
        Whether its weights were multiplied with values.
    """

    running: tuple[Running, ...]
    shape: torch.Size
    used: bool = False


@dataclass(eq=False)
class _Followed:
    """A storage that holds weights.

    Attributes
    ----------
    tensor : Tensor
        Keeps the storage alive.
    dims : list of [size, stride]
        The dimensions of the weights, in the order of the softmax.
    key : int
        The dimension that the softmax normalizes over.
    origins : list of Softmax
    clean : Tensor, optional
        The weights without dropout, with the strides of ``tensor``.
    mixed : bool
        Whether they are products of several softmaxes.
    """

    tensor: Tensor
    dims: list[list[int]]
    key: int
    origins: list[Softmax]
    clean: Tensor | None = None
    mixed: bool = False

    def factor(self, view: Tensor) -> list[list[int]] | None:
        """Return the dimensions of the weights that make up each dimension of a view, the outer ones first.

        None if the view covers only a part. If the view splits a dimension in two, ``dims`` is split as well.
        """
        if view.storage_offset() != self.tensor.storage_offset():
            return None
        left = {i: each for i, each in enumerate(self.dims) if each[0] != 1}
        found: list[list[int]] = []
        for size, stride in zip(view.shape, view.stride()):
            group: list[int] = []
            have = 1
            while have < size and stride != 0:
                at = next((i for i, each in left.items() if each[1] == stride * have), None)
                if at is None:
                    return None
                if left[at][0] * have > size:
                    if not self._cut(at, size // have):
                        return None
                    return self.factor(view)
                have *= left.pop(at)[0]
                group.insert(0, at)
            if stride != 0 and have != size:
                return None
            found.append(group)
        return None if left else found

    def _cut(self, at: int, inner: int) -> bool:
        size, stride = self.dims[at]
        if inner < 2 or size % inner or at == self.key:
            return False
        self.dims[at : at + 1] = [[size // inner, stride * inner], [inner, stride]]
        self.key += self.key > at
        return True

    def weights(self, query: int | None) -> Tensor:
        """Return the weights before dropout, (..., L, S); ``query`` is the query dimension, None for one row."""
        lead = [self.dims[i] for i in range(len(self.dims)) if i not in (query, self.key)]
        order = [*lead, [1, 0] if query is None else self.dims[query], self.dims[self.key]]
        tensor = self.tensor if self.clean is None else self.clean
        shape, strides = ([each[which] for each in order] for which in (0, 1))
        return tensor.as_strided(shape, strides, self.tensor.storage_offset())


@dataclass(frozen=True)
class Read:
    """Weights that were multiplied with values.

    Attributes
    ----------
    weights : Tensor (..., L, S)
        Before dropout.
    value : Tensor (N, S, V)
        As in the product.
    running : tuple of Running
        The modules in which both the softmax and the product ran, the outermost first.
    """

    weights: Tensor
    value: Tensor
    running: tuple[Running, ...]


@dataclass
class _State:
    followed: dict[int, _Followed] = field(default_factory=dict)
    noise: dict[int, Tensor] = field(default_factory=dict)


def _state() -> _State:
    if thread.products is None:
        thread.products = _State()
    found: _State = thread.products
    return found


class ProductObserver(Observer):
    """Reports each product of a softmax with values, and each call of torch's attention kernels.

    Parameters
    ----------
    wanted : callable
        Returns whether to follow operators at the moment.
    read : callable
        Receives each :class:`Read`.
    kernel : callable
        Receives every other operator with its arguments and output; returns whether it was an attention kernel.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        read: Callable[[Read], None],
        kernel: Callable[[Any, Sequence[Any], dict[str, Any], Any], bool],
    ) -> None:
        super().__init__()
        self._wanted, self._read, self._kernel = wanted, read, kernel

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # in inference mode, composite operators arrive undecomposed
                answer = func.decompose(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        answer = func(*args, **kwargs)
        if self._wanted():
            self._look(func, args, kwargs, answer)
        return answer

    def _look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], answer: Any) -> None:
        state = _state()
        if func in softmaxes:
            _begin(state, answer, args[1])
        elif not state.followed:
            self._kernel(func, args, kwargs, answer)
        elif func in _PRODUCTS:
            at = _PRODUCTS[func]
            self._product(state, args[at], args[at + 1], answer)
        elif func in _NOISE:
            if any(each.tensor.numel() == answer.numel() for each in state.followed.values()):
                state.noise[_place(answer)] = answer
        elif func in _COPIES or torch.Tag.pointwise in getattr(func, "tags", ()):
            _follow(state, func, args, kwargs, answer)
        else:
            self._kernel(func, args, kwargs, answer)

    def _product(self, state: _State, left: Tensor, right: Tensor, answer: Tensor) -> None:
        one, other = state.followed.get(_place(left)), state.followed.get(_place(right))
        if one is None and other is None:
            return
        found = one or other
        assert found is not None
        if (one is not None and other is not None) or found.mixed:
            if one is not None and other is not None:
                origins = [*one.origins, *other.origins]
                state.followed[_place(answer)] = _Followed(answer, [], 0, origins, mixed=True)
            _refuse(found, SEVERAL)
            return
        view, rest = (left, right) if one is not None else (right.mT, left.mT)  # (N, L, S) and (N, S, V)
        groups = found.factor(view)
        if groups is None:
            _refuse(found, PARTS)
            return
        if groups[-1] == [found.key] or (not groups[-1] and found.dims[found.key][0] == 1):
            self._values(found, groups, view, rest)
        elif len(groups[-1]) == 1 and one is not None:  # heads are mixed
            mixed = groups[-1][0]
            dims = [list(each) for each in found.dims]
            for size_at, group in enumerate(groups[:-1]):
                stride = answer.stride(size_at)
                for i in reversed(group):
                    dims[i][1] = stride
                    stride *= dims[i][0]
            dims[mixed] = [answer.shape[-1], answer.stride(-1)]
            clean = None
            if found.clean is None:
                state.followed[_place(answer)] = _Followed(answer, dims, found.key, found.origins, clean)

    def _values(self, found: _Followed, groups: list[list[int]], view: Tensor, value: Tensor) -> None:
        others = [i for i in range(len(found.dims)) if i != found.key]
        rows = [i for i in groups[-2] if i != found.key]
        query = rows[-1] if rows else next((i for i in reversed(others) if found.dims[i][0] == 1), None)
        for each in found.origins:
            each.used = True
        weights = found.weights(query)
        common = thread.stack[: _depth(found.origins[-1].running)]
        self._read(Read(weights, value if view.dim() == 3 else value[None], tuple(common)))


def _depth(running: Sequence[Running]) -> int:
    """Return how many of these modules, from the outermost, are still running."""
    depth = 0
    for one, other in zip(running, thread.stack):
        if one is not other:
            break
        depth += 1
    return depth


def _begin(state: _State, weights: Tensor, dim: int) -> None:
    if weights.dim() < 2 or not weights.numel():
        return
    if weights.is_meta or is_fake(weights):
        for each in thread.stack:
            each.hints.append(EMPTY)
        return
    if dim % weights.dim() != weights.dim() - 1:  # a convolution kernel, or a softmax over positions for each feature
        return
    origin = Softmax(tuple(thread.stack), weights.shape)
    dims = [list(each) for each in zip(weights.shape, weights.stride())]
    state.followed[_place(weights)] = _Followed(weights, dims, len(dims) - 1, [origin])
    owner = _owner(origin.running)
    if owner is None:
        while len(state.followed) > _MOST:
            state.followed.pop(next(iter(state.followed)))
    else:
        owner.leave.append(lambda: _forget(state, origin, owner))


def _owner(running: Sequence[Running]) -> Running | None:
    """Return the innermost module that has submodules or parameters."""
    for each in reversed(running):
        if any(True for _ in each.module.children()) or any(True for _ in each.module.parameters()):
            return each
    return running[0] if running else None


def _forget(state: _State, origin: Softmax, owner: Running) -> None:
    gone = [place for place, each in state.followed.items() if origin in each.origins]
    for place in gone:
        del state.followed[place]
    if not state.followed:
        state.noise.clear()
    if not origin.used and len(origin.shape) > 2:
        owner.hints.append(PARTS)


def _refuse(found: _Followed, reason: str) -> None:
    depth = max((_depth(each.running) for each in found.origins), default=0)
    if depth:
        thread.stack[depth - 1].reasons.append(reason)


def _follow(state: _State, func: Any, args: Sequence[Any], kwargs: dict[str, Any], answer: Any) -> None:
    """Follow an elementwise operation on weights."""
    out = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return
    tensors = [(i, each) for i, each in enumerate(args) if isinstance(each, Tensor)]
    found = [(i, each, state.followed[_place(each)]) for i, each in tensors if _place(each) in state.followed]
    if not found or _place(out) in state.followed:  # an in-place operation: nothing to do until the product
        return
    at, view, source = next((each for each in found if each[1].shape == out.shape), found[0])
    if view.shape != out.shape:
        return
    origins = [origin for _, _, each in found for origin in each.origins]
    for origin in origins[1:]:
        origin.used = origin.used or origin not in source.origins
    mixed = any(each.mixed for _, _, each in found)
    groups = None if mixed else source.factor(view)
    if groups is None:
        if mixed:
            state.followed[_place(out)] = _Followed(out, [], 0, origins, mixed=True)
        return
    dims = [list(each) for each in source.dims]
    for i, group in enumerate(groups):
        stride = out.stride(i)
        for dim in reversed(group):
            dims[dim][1] = stride
            stride *= dims[dim][0]
    dropped = func is _aten.native_dropout.default or any(_place(each) in state.noise for _, each in tensors)
    clean = None
    if dropped or source.clean is not None:
        before = (
            view if source.clean is None else source.clean.as_strided(view.shape, view.stride(), view.storage_offset())
        )
        if dropped:
            clean = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(before)
        else:
            clean = func(*(before if i == at else each for i, each in enumerate(args)), **kwargs)
    state.followed[_place(out)] = _Followed(out, dims, source.key, origins, clean)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def matrices(read: Read) -> tuple[Tensor, Tensor | None] | None:
    """Return weights (B, H, L, S) and values (B, H, S, V) of a read; None for weights with more dimensions.

    Values are None if heads share them.
    """
    weights = read.weights
    *lead, L, S = weights.shape
    lead = [each for each in lead if each != 1] if len(lead) > 2 else lead
    if len(lead) > 2:
        return None
    if len(lead) == 1:
        lead = list(_split(lead[0], L, read.running))
    lead = [1] * (2 - len(lead)) + lead
    weights = weights.reshape(*lead, L, S)
    value = read.value
    whole = value.shape[-2] == S and value.dim() == 3 and len(value) == math.prod(lead)
    return weights, value.reshape(*lead, *value.shape[-2:]) if whole else None


def _split(N: int, L: int, running: Sequence[Running]) -> tuple[int, int]:
    """Split a dimension into sequences and heads, by the inputs or attributes of the running modules."""
    for each in reversed(running):
        for _, tensor in each.tensors():
            if tensor.dim() == 3:
                B = tensor.shape[0] if tensor.shape[1] == L or tensor.shape[0] != L else tensor.shape[1]
                return (B, N // B) if B and N % B == 0 else (1, N)
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"):
            heads = getattr(each.module, name, None)
            if isinstance(heads, int) and heads > 0 and N % heads == 0:
                return N // heads, heads
    return 1, N


def kernels() -> Iterator[Any]:
    """Yield torch's attention kernels for all devices."""
    for name in dir(_aten):
        if name.startswith("_scaled_dot_product_") and "backward" not in name and "quantized" not in name:
            yield from (getattr(getattr(_aten, name), each) for each in getattr(_aten, name).overloads())
