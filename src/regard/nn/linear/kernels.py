"""The compiled kernels of a gated recurrence, as a differentiable function of its steps.

Dimensions: B batch, H heads of values, G of keys, L steps, K and V widths.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.tracing import autocast_is_active, is_traced
from regard.engines.fused import library, pool
from regard.engines.fused.arguments import PAD, RECORDS
from regard.engines.fused.arguments import SPAN as _CHUNK
from regard.engines.fused.pages import in_large_pages
from regard.nn.linear.steps import Steps

#: Steps that are cheaper one after another than in a chunk.
FEW = 4
#: Chunks between two saved states: the backward pass computes those in between again.
_SAVED_EVERY = 8
#: Tasks per thread, so that none waits long for another; multiplications that are worth a thread.
_TASKS, _WORTH = 4, 1 << 18
#: Tasks of a step of decoding, for any number of threads.
_MOST_TASKS = 16
#: Work items of the backward pass that share the heads of a few keys, and heads that are handled together.
_ITEMS, _TOGETHER = 4, 8

#: The least logarithm of a decay by which a row is divided.
_WEAKEST = -20.0

#: Return outputs and the state after the last step, by operations that autograd can differentiate twice.
Formula = Callable[[Steps, Tensor], tuple[Tensor, Tensor]]
_NONE = (0, 0, 0, 0)
_DTYPES = (torch.float32, torch.float64)
#: Types of settings by which plans are found.
_PLAIN = (bool, int, float, str, type(None))


def applies(steps: Steps, state: Tensor | None) -> bool:
    """Return whether the kernels can run these steps."""
    query, key, value, decay, rate, erase, *_ = steps
    return (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and (decay is None or decay.is_cpu)
        and (rate is None or rate.is_cpu)
        and (state is None or state.is_cpu)
        and value.numel() > 0
        and key.numel() > 0
        and library.problem() is None
        and not is_traced(key)
        and (erase is None or (_weak(decay) and erase[0].is_cpu and erase[1].is_cpu))
    )


def _weak(decay: Tensor | None) -> bool:
    """Return whether what is read before a decay may be divided by it."""
    return decay is None or bool(decay.amin() > _WEAKEST)


def run(steps: Steps, state: Tensor | None, formula: Formula) -> tuple[Tensor, Tensor, bool]:
    """Return outputs (B, H, L, V), the state after the last step, and whether decays and rates are in range."""
    if steps.bonus is not None:
        return _reading_before(steps, state, formula)
    if steps.erase is not None:
        return _erasing(steps, steps.erase, state, formula)
    tensors = (steps.query, steps.key, steps.value, steps.decay(), steps.rate, state, steps.reader)
    call = _Call(steps.delta, steps.scale)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        output, end = _Recurrence.apply(call, formula, *tensors)
    elif steps.key.shape[2] <= FEW:
        query, key, value, decay, rate, state, reader = map(_readable, tensors)
        state = None if state is None else state.contiguous()
        settings = {"reader": reader, "delta": steps.delta, "scale": steps.scale}
        return StepPlan(Steps(query, key, value, decay, rate, **settings), state)(query, key, value, decay, rate, state)
    else:
        output, end, _ = call.forward(tensors, wants_grad=False)
    return output, end, call.in_range


def _reading_before(steps: Steps, state: Tensor | None, formula: Formula) -> tuple[Tensor, Tensor, bool]:
    """Run steps that read before they write: a query reads what the step before its own left, and its own bonus."""
    query, key, value, bonus, length = steps.query, steps.key, steps.value, steps.bonus, steps.key.shape[2]
    assert bonus is not None
    groups = key.shape[1]
    u, q = (each.unflatten(dim, (groups, -1)) for each, dim in ((bonus, 0), (query, 1)))
    own = (q * u.unsqueeze(2) * key.unsqueeze(2)).sum(-1, keepdim=True).flatten(1, 2) * steps.scale
    own = own if steps.rate is None else own * steps.rate
    if steps.resets is not None:
        query = torch.where(steps.resets[:, None, :, None], 0.0, query)

    def later(rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0, 1, 0))

    moved = steps._replace(
        query=F.pad(query, (0, 0, 0, 1)),
        key=later(key),
        value=later(value),
        log_decay=None if steps.log_decay is None else later(steps.log_decay),
        rate=None if steps.rate is None else later(steps.rate),
        erase=None if steps.erase is None else (later(steps.erase[0]), later(steps.erase[1])),
        resets=None if steps.resets is None else F.pad(steps.resets, (1, 0)),
        bonus=None,
    )
    output, end, in_range = run(moved, state, formula)
    return output[:, :, :length] + own * value, end, in_range


def _erasing(
    steps: Steps, erase: tuple[Tensor, Tensor], state: Tensor | None, formula: Formula
) -> tuple[Tensor, Tensor, bool]:
    """Run erasing steps as two steps of the delta rule each: the first erases and decays, the second writes.

    The first reads the decayed state, so that its reader is divided by the decay.
    """
    (a, e), H = erase, steps.value.shape[1]
    heads = [rows.repeat_interleave(H // rows.shape[1], 1) for rows in (steps.query, steps.key)]
    value = steps.value if steps.rate is None else steps.rate * steps.value
    log_decay = steps.log_decay
    reader = e if log_decay is None else e * (-log_decay).exp()
    if steps.resets is not None:
        reader = torch.where(steps.resets[:, None, :, None], 0.0, reader)

    def pairs(first: Tensor | None, second: Tensor | None) -> Tensor:
        like = first if second is None else second
        assert like is not None
        zeros = torch.zeros_like(like)
        both = zeros if first is None else first, zeros if second is None else second
        return torch.stack(both, 3).flatten(2, 3)

    doubled = Steps(
        pairs(None, heads[0]),
        pairs(a, heads[1]),
        pairs(None, value),
        None if log_decay is None else pairs(log_decay, None),
        resets=None if steps.resets is None else F.pad(steps.resets.unsqueeze(-1), (0, 1)).flatten(1),
        delta=True,
        scale=steps.scale,
        reader=pairs(reader, None),
    )
    output, end, in_range = run(doubled, state, formula)
    return output[:, :, 1::2], end, in_range


# A step of decoding ---------------------------------------------------------------------------------------------------


class StepPlan:
    """A call for few steps without gradients, with all that does not depend on where tensors lie.

    Parameters
    ----------
    steps : Steps
        Without erasing, bonus and resets; the kernel must be able to read the tensors. A plan with a reader runs once.
    state : Tensor (B, H, K, V), optional
        Contiguous.
    """

    def __init__(self, steps: Steps, state: Tensor | None) -> None:
        query, key, value, decay, rate, *_, reader = steps
        (B, H, L, V), K = value.shape, key.shape[-1]
        self.items, self.scale, self.sizes = B * H, steps.scale, (B, H, K, V)
        self.function = library.load("recurrence.step", value.dtype)
        output = torch.empty(value.shape, dtype=value.dtype, device="meta")  # for its strides
        numbers = _numbers(query, key, reader, value, decay, rate, output, (state, None, None, None), steps.delta)
        # Whether values are out of range, and the scratch memory of each task, follow the numbers in the same array.
        self.wrong, room = len(numbers), ((3 * K + 2 * V) * value.element_size() + 7) // 8
        tasks = min(self.items, _MOST_TASKS) if self.items * L * K * V > _WORTH else 1
        ends = [self.items * i // tasks for i in range(tasks + 1)]
        self.parts = [(*part, 8 * (self.wrong + 2 + i * room)) for i, part in enumerate(pairwise(ends))]
        numbers.extend((0,) * (2 + tasks * room))
        self.numbers, self.delta = numbers, steps.delta

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        rate: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor, bool]:
        """Return outputs, the state after the last step, and whether decays and rates are in range.

        All tensors must have the dtype, the shape and the strides of those of the plan.
        """
        numbers, wrong = self.numbers[:], self.wrong
        output, end = value.new_empty(value.shape), value.new_empty(self.sizes)
        base = numbers.buffer_info()[0]
        numbers[_QUERY], numbers[_KEY], numbers[_VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if decay is not None:
            numbers[_DECAY] = decay.data_ptr()
        if rate is not None:
            numbers[_RATE] = rate.data_ptr()
        if state is not None:
            numbers[_START] = state.data_ptr()
        numbers[_OUTPUT], numbers[_END], numbers[_WRONG] = output.data_ptr(), end.data_ptr(), base + 8 * wrong
        function, scale, parts = self.function, self.scale, self.parts
        if len(parts) == 1:
            function(base, scale, 0, self.items, base + parts[0][2])
        else:
            pool.run([lambda part=part: function(base, scale, *part[:2], base + part[2]) for part in parts])
        return output, end, not (numbers[wrong] or (numbers[wrong + 1] and self.delta))


def structure_of(
    query: Any, key: Any, value: Any, decay: Any, rate: Any, state: Any, *settings: Any
) -> tuple[Any, ...] | None:
    """Return what decides how a call for few steps runs, or None if a plan cannot be kept for it."""
    if torch.compiler.is_compiling() or not (type(query) is type(key) is type(value) is Tensor):
        return None
    if query.dim() != 4 or query.shape[2] > FEW or is_traced(query) or autocast_is_active("cpu"):
        return None
    if not all(type(each) in _PLAIN for each in settings):
        return None
    dtype, found = query.dtype, list(settings)
    if dtype not in _DTYPES or (state is not None and not (type(state) is Tensor and state.is_contiguous())):
        return None
    for each in (query, key, value, decay, rate, state):
        if each is None:
            found.append(None)
            continue
        if type(each) is not Tensor or each.dtype != dtype or not each.is_cpu:
            return None
        if each.requires_grad and torch.is_grad_enabled():
            return None
        strides = each.stride()
        if each.dim() == 4 and strides[3] != 1 != each.shape[3]:
            return None
        found += (each.shape, strides)
    return dtype, *found


# With gradients -------------------------------------------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, formula: Formula, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        output, end, kept = call.forward(tensors, wants_grad=True)
        ctx.call, ctx.formula = call, formula
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        return output, end

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as activation checkpointing wants
        tensors, kept = saved[:7], saved[7:]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a graph of this pass is wanted, and the kernel has none
            return None, None, *by_formula((ctx.call.delta, ctx.call.scale), ctx.formula, tensors, wanted, grad, d_end)
        found = ctx.call.backward(tensors, kept, grad, d_end, wanted)
        return None, None, *(each if want else None for each, want in zip(found, wanted))


def by_formula(
    settings: tuple[bool, float], formula: Formula, tensors: Any, wanted: Any, grad: Tensor | None, d_end: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of query, key, value, decay, rate, state and reader, with a graph of their own."""
    query, key, value, decay, rate, state, reader = tensors
    wide = torch.promote_types(key.dtype, torch.float32)
    if state is None:
        state = key.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1], dtype=wide)
    delta, scale = settings
    rows = query.to(wide), key.to(wide), value.to(wide)
    steps = Steps(*rows, decay, rate, delta=delta, scale=scale, reader=reader)
    results = formula(steps, state)
    pairs = [(result, each.to(result.dtype)) for result, each in zip(results, (grad, d_end)) if each is not None]
    inputs = [tensor for tensor, want in zip(tensors, wanted) if want]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs)
    found = iter(torch.autograd.grad(outputs, inputs, given, create_graph=True, allow_unused=True))
    return [next(found) if want else None for want in wanted]


class _Call:
    """The settings of a call, its two passes, and whether its decays and rates are in range."""

    def __init__(self, delta: bool, scale: float) -> None:
        self.delta, self.scale, self._wrong = delta, scale, array("q", (0, 0))

    @property
    def in_range(self) -> bool:
        """Whether no decay is above 1, nor a rate of the delta rule out of [0, 2]."""
        return not (self._wrong[0] or (self._wrong[1] and self.delta))

    def forward(self, tensors: Any, *, wants_grad: bool) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
        """Return output, state, and what the backward pass needs."""
        query, key, value, decay, rate, state, reader = (_readable(t) for t in tensors)
        (B, H, L, V), K = value.shape, key.shape[-1]
        output, end = _empty_like(value), value.new_empty(B, H, K, V)
        residual = saved = None
        if wants_grad:
            residual = in_large_pages(value.new_empty(B, H, L, V)) if self.delta else None
            saved = in_large_pages(value.new_empty(B, H, -(-L // (_CHUNK * _SAVED_EVERY)), V, K))
        state = None if state is None else state.contiguous()
        numbers = _numbers(query, key, reader, value, decay, rate, output, (state, end, residual, saved), self.delta)
        numbers[_WRONG] = self._wrong.buffer_info()[0]
        k, v, together = _padded(K), _padded(V), numbers[_HEADS]
        room = _room(k, v, 1) + (together + 1) * k * v + 4 * _CHUNK * v
        self._run("recurrence.forward", numbers, value, B * H, L * K * V, room, together)
        return output, end, (residual, saved)

    def backward(
        self,
        tensors: Any,
        kept: tuple[Tensor | None, Tensor | None],
        grad: Tensor | None,
        d_end: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value, decay, rate, state and reader; of the last four, those wanted."""
        query, key, value, decay, rate, state, reader = (_readable(t) for t in tensors)
        (B, H, L, V), (_, G, _, K) = value.shape, key.shape
        grad = torch.zeros_like(value) if grad is None else grad.resolve_neg()
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        d_end = None if d_end is None else d_end.resolve_neg().contiguous()
        parts = min(H // G, -(-_ITEMS // (B * G)))
        own_query = query.shape[1] == H
        d_query = _empty_like(query).unsqueeze(0) if own_query or parts == 1 else _empty_parts(query, parts)
        d_key = _empty_like(key).unsqueeze(0) if parts == 1 else _empty_parts(key, parts)
        d_value, d_reader = _empty_like(value), None if reader is None else in_large_pages(d_key.new_empty(d_key.shape))
        d_decay, d_rate, d_start = (
            t.new_empty(t.shape) if want else None for t, want in zip((decay, rate, state), wanted[3:6])
        )
        numbers = _numbers(query, key, reader, value, decay, rate, None, (None, None, *kept), self.delta, parts)
        first = None if d_reader is None else d_reader[0]
        rows = [_rows(each) for each in (grad, d_query[0], d_key[0], first, d_value, d_decay, d_rate)]
        ends = (d_query.stride(0), d_key.stride(0), _address(d_end), _address(d_start))
        numbers[_GRAD:] = array("q", (*chain.from_iterable(rows), *ends))
        k, v, together = _padded(K), _padded(V), numbers[_HEADS]
        sums = (3 * _SAVED_EVERY + 4) * _CHUNK * k + (2 * _SAVED_EVERY + 2) * _CHUNK * _CHUNK + _CHUNK
        room = _room(k, v, _SAVED_EVERY) + sums + (together + _SAVED_EVERY + 2) * k * v + 9 * _CHUNK * v
        self._run("recurrence.backward", numbers, value, B * G * parts, H // G * L * K * V // parts, room)
        first = None if d_reader is None else _summed(d_reader)
        return _summed(d_query), _summed(d_key), d_value, d_decay, d_rate, d_start, first

    def _run(
        self, name: str, numbers: array[int], like: Tensor, items: int, each: int, room: int, together: int = 1
    ) -> None:
        """Let threads run parts of so many work items, where they are worth it; some are cheaper ``together``."""
        function, address = library.load(name, like.dtype), numbers.buffer_info()[0]

        def part(first: int, last: int) -> None:
            memory = like.new_empty(room)
            function(address, self.scale, first, last, memory.data_ptr())

        threads = torch.get_num_threads() if items * each > _WORTH else 1
        tasks = min(items, max(_TASKS * threads // together, threads)) if threads > 1 else 1
        pool.split(part, items, tasks)


def _room(k: int, v: int, chunks: int) -> int:
    """Return how many numbers Chunk of csrc/recurrence.h takes for padded widths, with rows of so many chunks."""
    return (3 * chunks + 7) * _CHUNK * k + (2 * chunks + 3) * _CHUNK * _CHUNK + 5 * _CHUNK + max(k, v)


#: Places among the numbers of a call.
_QUERY, _KEY, _VALUE, _DECAY, _RATE, _OUTPUT, _START, _END, _WRONG, _GRAD, _HEADS = map(
    RECORDS["recurrence"].index,
    ("query", "key", "value", "decay", "rate", "output", "start", "end", "wrong", "grad", "together"),
)
_COUNT = len(RECORDS["recurrence"])


def _numbers(
    query: Tensor,
    key: Tensor,
    reader: Tensor | None,
    value: Tensor,
    decay: Tensor | None,
    rate: Tensor | None,
    output: Tensor | None,
    states: tuple[Tensor | None, ...],
    delta: bool,
    parts: int = 1,
) -> array[int]:
    """Return the numbers of a call, those from ``wrong`` on 0."""
    _, H, L, V = value.shape
    kind = 0 if decay is None else 1 if decay.shape[-1] == 1 else 2
    shared = query.shape[1] != H and kind != 2
    together = min(H // key.shape[1], _TOGETHER) if shared else 1
    sizes = (H, key.shape[1], L, key.shape[-1], V, query.shape[1], delta, kind, parts, _SAVED_EVERY, together)
    rows = [_rows(each) for each in (query, key, reader, value, decay, rate, output)]
    numbers = array("q", (*sizes, *chain.from_iterable(rows), *map(_address, states)))
    numbers.extend((0,) * (_COUNT - len(numbers)))
    return numbers


def _readable(tensor: Tensor | None) -> Any:
    """Return a tensor whose rows the kernels can read."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same layout, where that has whole rows."""
    made = torch.empty_like(tensor)
    return in_large_pages(made if made.stride(-1) == 1 else tensor.new_empty(tensor.shape))


def _empty_parts(tensor: Tensor, parts: int) -> Tensor:
    """Return so many tensors of a shape, side by side."""
    return in_large_pages(tensor.new_empty(parts, *tensor.shape))


def _rows(tensor: Tensor | None) -> tuple[int, ...]:
    return _NONE if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _padded(width: int) -> int:
    return -(-width // PAD) * PAD


def _summed(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)
