"""A gated recurrence, for ``torch.compile`` and ``torch.jit.trace`` as one operator.

Compilers unroll loops over steps, and cannot see into kernels. So they record one operator, which runs the recurrence
eagerly when it runs, at whatever length comes.

Dimensions: B batch, H heads of values, L steps, K and V widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard._call.operator import is_recorded
from regard._utils.operators import define, keep_nothing
from regard._utils.torch_private import is_jit_tracing, recording
from regard._utils.tracing import autocast_suspended
from regard.nn.linear.recurrence import recurrence
from regard.nn.linear.steps import Steps


def recur(
    steps: Steps, state: Tensor | None, *, form: str, chunk: int, function: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return what :func:`recurrence` does; a compiler or tracer records a call of form "auto" as one operator."""
    if form == "auto" and is_recorded(steps.key):
        return _record(steps, state, function)
    return recurrence(steps, state, form=form, chunk=chunk, function=function)


def _record(steps: Steps, state: Tensor | None, function: str | None) -> tuple[Tensor, Tensor]:
    erase = (None, None) if steps.erase is None else steps.erase
    tensors = (steps.query, steps.key, steps.value, steps.log_decay, steps.rate, *erase, steps.bonus, state)
    # A trace may run on tensors other than those of its example.
    needed = [t is not None and (is_jit_tracing() or (torch.is_grad_enabled() and t.requires_grad)) for t in tensors]
    wanted = "".join(["1" if each else "0" for each in needed])  # a trace records no list of bool
    settings = (steps.resets, steps.delta, steps.scale, function or "", wanted)
    operator = torch.ops.regard.recur if any(needed) else torch.ops.regard.recur_forward
    output, end, _ = operator(*tensors, *settings)
    return output, end


def _run(
    tensors: Sequence[Tensor | None],
    resets: Tensor | None,
    delta: bool,
    scale: float,
    function: str,
    wanted: str,
) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """Run the recurrence eagerly; return output and state, and the tensors as leaves of their graph."""
    leaves = [None if t is None else t.detach().requires_grad_(want == "1") for t, want in zip(tensors, wanted)]
    query, key, value, log_decay, rate, a, e, bonus, state = leaves
    assert query is not None and key is not None and value is not None
    erase = None if a is None or e is None else (a, e)
    steps = Steps(query, key, value, log_decay, rate, erase, bonus, resets, delta, scale)
    with autocast_suspended(query.device.type):
        return recurrence(steps, state, form="auto", chunk=64, function=function or None), leaves


def _recur(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor | None, rate: Tensor | None, a: Tensor | None,
    e: Tensor | None, bonus: Tensor | None, state: Tensor | None, resets: Tensor | None, delta: bool, scale: float,
    function: str, wanted: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return output (B, H, L, V), state (B, H, K, V), and an empty tensor that holds their graph."""
    tensors, graph = (query, key, value, log_decay, rate, a, e, bonus, state), query.new_empty(0)
    if "1" not in wanted:
        with torch.no_grad():
            (output, end), _ = _run(tensors, resets, delta, scale, function, wanted)
        return _own(output), _own(end), graph
    with recording(), torch.enable_grad():
        graph.regard_run = _run(tensors, resets, delta, scale, function, wanted)  # type: ignore[attr-defined]
    output, end = graph.regard_run[0]  # type: ignore[attr-defined]
    return _own(output), _own(end), graph


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor outside of the graph, which compilers may overwrite: the graph keeps another."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _recur_shapes(query, key, value, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    B, H, L, V = value.shape
    return value.new_empty(B, H, L, V), value.new_empty(B, H, key.shape[-1], V), query.new_empty(0)


def _recur_backward(
    grad: Tensor | None, d_end: Tensor | None, graph: Tensor, query: Tensor, key: Tensor, value: Tensor,
    log_decay: Tensor | None, rate: Tensor | None, a: Tensor | None, e: Tensor | None, bonus: Tensor | None,
    state: Tensor | None, resets: Tensor | None, delta: bool, scale: float, wanted: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the tensors, empty if not needed."""
    tensors = (query, key, value, log_decay, rate, a, e, bonus, state)
    with recording(), torch.enable_grad():
        run = getattr(graph, "regard_run", None)
        if run is None:  # hooks on saved tensors replaced it by a copy
            run = _run(tensors, resets, delta, scale, "", wanted)
        results, leaves = run
        pairs = [(result, each) for result, each in zip(results, (grad, d_end)) if each is not None]
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        outputs, given = zip(*pairs)
        found = iter(torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True))
    return [_gradient(next(found), like) if want == "1" else query.new_empty(0) for want, like in zip(wanted, tensors)]


def _gradient(found: Tensor | None, like: Any) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format) if found is None else found.contiguous()


def _recur_backward_shapes(grad, d_end, graph, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    tensors, wanted = rest[:9], rest[-1]
    return [
        t.new_empty(t.shape) if want == "1" else rest[0].new_empty(0) for t, want in zip(tensors, wanted, strict=True)
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.delta, ctx.scale, _, ctx.wanted = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], *tensors)


def _backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad is None and d_end is None:
        return (None,) * 14
    found = torch.ops.regard.recur_backward(grad, d_end, *ctx.saved_tensors, ctx.delta, ctx.scale, ctx.wanted)
    gradients = [gradient if want == "1" else None for gradient, want in zip(found, ctx.wanted)]
    return *gradients, None, None, None, None, None


def _refuse(ctx: Any, *_: Any) -> None:  # noqa: ARG001
    raise RuntimeError(
        "gated_recurrence: a compiled or traced call has no second derivative (create_graph=True); use form='chunked'."
    )


define("recur", _recur, _recur_shapes, backward=_backward, setup_context=_save_for_backward)
define("recur_forward", _recur, _recur_shapes)  # faster to call, without a derivative
define("recur_backward", _recur_backward, _recur_backward_shapes, backward=_refuse, setup_context=keep_nothing)
