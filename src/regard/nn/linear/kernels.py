"""The compiled kernels of a gated recurrence, as a differentiable function of its steps.

Dimensions: B batch, H heads of values, G of keys, L steps, K and V widths.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard._utils.tracing import is_traced
from regard.engines.fused import library, pool
from regard.engines.fused.arguments import PAD
from regard.nn.linear.steps import Steps

#: Steps of a chunk, as in ``csrc/recurrence.h``, and steps that are cheaper one after another.
_CHUNK, _FEW = 16, 4
#: Chunks between two saved states: the backward pass computes those in between again.
_SAVED_EVERY = 8
#: Tasks per thread, so that none waits long for another; multiplications that are worth a thread.
_TASKS, _WORTH = 4, 1 << 18
#: Work items of the backward pass that share the heads of a few keys.
_ITEMS = 8

#: Return outputs and the state after the last step, by operations that autograd can differentiate twice.
Formula = Callable[[Steps, Tensor], tuple[Tensor, Tensor]]
_NONE = (0, 0, 0, 0)


def applies(steps: Steps, state: Tensor | None) -> bool:
    """Return whether the kernels can run these steps."""
    query, key, value, decay, rate, erase, bonus, *_ = steps
    return (
        erase is None
        and bonus is None
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and (decay is None or decay.is_cpu)
        and (rate is None or rate.is_cpu)
        and (state is None or state.is_cpu)
        and value.numel() > 0
        and key.numel() > 0
        and library.problem() is None
        and not is_traced(key)
    )


def run(steps: Steps, state: Tensor | None, formula: Formula) -> tuple[Tensor, Tensor, bool]:
    """Return outputs (B, H, L, V), the state after the last step, and whether decays and rates are in range."""
    decay = steps.decay()
    tensors = (steps.query, steps.key, steps.value, decay, steps.rate, state)
    call = _Call(steps.delta, steps.scale)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        output, end = _Recurrence.apply(call, formula, *tensors)
    else:
        output, end, _ = call.forward(tensors, wants_grad=False)
    return output, end, not (call.wrong[0] or (call.wrong[1] and steps.delta))


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
        tensors, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a graph of this pass is wanted, and the kernel has none
            return None, None, *_by_formula(ctx.call, ctx.formula, tensors, wanted, grad, d_end)
        found = ctx.call.backward(tensors, kept, grad, d_end)
        return None, None, *(each if want else None for each, want in zip(found, wanted))


def _by_formula(
    call: _Call, formula: Formula, tensors: Any, wanted: Any, grad: Tensor | None, d_end: Tensor | None
) -> list[Tensor | None]:
    query, key, value, decay, rate, state = tensors
    state = key.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1]) if state is None else state
    results = formula(Steps(query, key, value, decay, rate, delta=call.delta, scale=call.scale), state)
    pairs = [(result, each) for result, each in zip(results, (grad, d_end)) if each is not None]
    inputs = [tensor for tensor, want in zip(tensors, wanted) if want]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs)
    found = iter(torch.autograd.grad(outputs, inputs, given, create_graph=True, allow_unused=True))
    return [next(found) if want else None for want in wanted]


class _Call:
    """The settings of a call, its two passes, and whether its decays and rates are out of range."""

    def __init__(self, delta: bool, scale: float) -> None:
        self.delta, self.scale, self.wrong = delta, scale, array("q", (0, 0))

    def forward(self, tensors: Any, *, wants_grad: bool) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
        """Return output, state, and what the backward pass needs."""
        query, key, value, decay, rate, state = (_readable(t) for t in tensors)
        (B, H, L, V), K = value.shape, key.shape[-1]
        output, end = _empty_like(value), value.new_empty(B, H, K, V)
        few = L <= _FEW and not wants_grad
        residual = saved = None
        if wants_grad:
            residual = value.new_empty(B, H, L, V) if self.delta else None
            saved = value.new_empty(B, H, -(-L // (_CHUNK * _SAVED_EVERY)), V, K)
        state = None if state is None else state.contiguous()
        numbers = self._numbers(query, key, value, decay, rate, output, (state, end, residual, saved))
        numbers.extend((0,) * 28)
        if few:
            room = 3 * K + 2 * V
        else:
            k, v = _padded(K), _padded(V)
            room = _CHUNK * (9 * k + 4 * v) + k + 3 * _CHUNK * _CHUNK + 2 * _CHUNK + 2 * k * v
        self._run("recurrence.step" if few else "recurrence.forward", numbers, value, B * H, L * K * V, room)
        return output, end, (residual, saved)

    def backward(
        self, tensors: Any, kept: tuple[Tensor | None, Tensor | None], grad: Tensor | None, d_end: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value, decay, rate and state."""
        query, key, value, decay, rate, state = (_readable(t) for t in tensors)
        (B, H, L, V), (_, G, _, K) = value.shape, key.shape
        grad = torch.zeros_like(value) if grad is None else grad
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        d_end = None if d_end is None else d_end.contiguous()
        parts = min(H // G, -(-_ITEMS // (B * G)))
        own_query = query.shape[1] == H
        d_query = _empty_like(query).unsqueeze(0) if own_query or parts == 1 else query.new_empty(parts, B, G, L, K)
        d_key = _empty_like(key).unsqueeze(0) if parts == 1 else key.new_empty(parts, B, G, L, K)
        d_value, d_start = _empty_like(value), None if state is None else value.new_empty(B, H, K, V)
        d_decay, d_rate = (None if t is None else t.new_empty(t.shape) for t in (decay, rate))
        numbers = self._numbers(query, key, value, decay, rate, None, (None, None, *kept), parts)
        for each in (grad, d_query[0], d_key[0], d_value, d_decay, d_rate):
            numbers.extend(_rows(each))
        numbers.extend((d_query.stride(0), d_key.stride(0), _address(d_end), _address(d_start)))
        k, v, chunk = _padded(K), _padded(V), _CHUNK
        room = chunk * (13 * k + 6 * v) + 2 * k + 5 * chunk * chunk + 2 * chunk + (_SAVED_EVERY + 3) * k * v
        self._run("recurrence.backward", numbers, value, B * G * parts, H // G * L * K * V // parts, room)
        return _summed(d_query), _summed(d_key), d_value, d_decay, d_rate, d_start

    def _numbers(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        rate: Tensor | None,
        output: Tensor | None,
        states: tuple[Tensor | None, ...],
        parts: int = 1,
    ) -> array[int]:
        """Return the first numbers of ``Recurrence`` in ``csrc/recurrence.h``."""
        _, H, L, V = value.shape
        kind = 0 if decay is None else 1 if decay.shape[-1] == 1 else 2
        sizes = (H, key.shape[1], L, key.shape[-1], V, query.shape[1], self.delta, kind, parts, _SAVED_EVERY)
        rows = [number for each in (query, key, value, decay, rate, output) for number in _rows(each)]
        return array("q", (*sizes, *rows, *map(_address, states), self.wrong.buffer_info()[0]))

    def _run(self, name: str, numbers: array[int], like: Tensor, items: int, each: int, room: int) -> None:
        """Let threads run parts of so many work items, where they are worth it."""
        function, address = library.load(name, like.dtype), numbers.buffer_info()[0]

        def part(first: int, last: int) -> None:
            memory = like.new_empty(room)
            function(address, self.scale, first, last, memory.data_ptr())

        threads = torch.get_num_threads() if items * each > _WORTH else 1
        tasks = min(items, _TASKS * threads) if threads > 1 else 1
        if tasks == 1:
            part(0, items)
            return
        cuts = pairwise([items * i // tasks for i in range(tasks + 1)])
        pool.run([lambda first=first, last=last: part(first, last) for first, last in cuts])


def _readable(tensor: Tensor | None) -> Any:
    """Return a tensor whose rows the kernels can read."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same layout, where that has whole rows."""
    made = torch.empty_like(tensor)
    return made if made.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _rows(tensor: Tensor | None) -> tuple[int, ...]:
    return _NONE if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _padded(width: int) -> int:
    return -(-width // PAD) * PAD


def _summed(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)
