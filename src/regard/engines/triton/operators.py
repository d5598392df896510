"""The kernels as operators of ``torch.library``, and as a differentiable function of a problem's rows.

To compilers and transforms an operator is opaque. Every tensor has the size B or 1 in its first dimension, into which
``vmap`` folds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard._utils.operators import define
from regard.engines.triton.decoding import is_step, run_step
from regard.engines.triton.families import row_shape
from regard.engines.triton.launch import Setting, run_backward, run_fields, run_forward
from regard.engines.triton.visible import VisibleKeys


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    by_query: Tensor | None,
    by_key: Tensor | None,
    tiles: Tensor | None,
    words: Tensor | None,
    family: int,
    kind: int,
    rule: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: int,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, L, V), and the log-sum-exp (B, H, L) or what else weights follow from (B, H, L, 2)."""
    visible = VisibleKeys(start, stop, by_query, by_key, tiles, words, bias)
    setting = Setting(family, kind, rule, scale, softcap, dropout_p, seed, alpha)
    if tiles is None and is_step(family, rule, dropout_p, query.shape[2], key.shape[2]):
        return run_step(setting, query, key, value, sink, visible)
    return run_forward(setting, query, key, value, weight, sink, visible)


def _computed_fields(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    by_query: Tensor | None,
    by_key: Tensor | None,
    tiles: Tensor | None,
    words: Tensor | None,
    statistic: Tensor,
    largest: bool,
    lse: bool,
    entropy: bool,
    received: bool,
    k: int,
    family: int,
    kind: int,
    rule: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: int,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what is wanted of largest scores, log-sum-exps, entropies, sums of weights, best scores and their keys."""
    visible = VisibleKeys(start, stop, by_query, by_key, tiles, words, bias)
    setting = Setting(family, kind, rule, scale, softcap, dropout_p, seed, alpha)
    wants = largest, lse, entropy, received, k
    return run_fields(setting, query, key, value, weight, sink, visible, statistic, *wants)


def _fields_shapes(query, key, value, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    statistic, largest, lse, entropy, received, k = rest[TENSORS - 3 : TENSORS + 3]
    (B, H, L), S = query.shape[:3], key.shape[2]

    def like(wanted: bool, *shape: int) -> Tensor:
        return statistic.new_empty((B, H, *shape) if wanted else (0,))

    best = like(k > 0, L, k)
    return *(like(wanted, L) for wanted in (largest, lse, entropy)), like(received, S), best, best.long()


def _forward_shapes(query, key, value, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    rule = rest[TENSORS - 1]
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    shape = query.shape[:3]
    statistic = value.new_empty(*shape, *row_shape(rule), dtype=wide)
    return value.new_empty(*shape, value.shape[-1]), statistic


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    by_query: Tensor | None,
    by_key: Tensor | None,
    tiles: Tensor | None,
    words: Tensor | None,
    output: Tensor,
    statistic: Tensor,
    grad: Tensor,
    to_bias: bool,
    family: int,
    kind: int,
    rule: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: int,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, weight, bias (empty if not needed) and sink (empty without one)."""
    visible = VisibleKeys(start, stop, by_query, by_key, tiles, words, bias)
    setting = Setting(family, kind, rule, scale, softcap, dropout_p, seed, alpha)
    return run_backward(setting, query, key, value, weight, sink, visible, output, statistic, grad, to_bias)


def _backward_shapes(query, key, value, weight, bias, sink, *rest):  # type: ignore[no-untyped-def]
    to_bias = rest[9]

    def like(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    added = like(bias) if to_bias else value.new_empty(0)
    return *(like(t) for t in (query, key, value, weight)), added, value.new_empty(0) if sink is None else like(sink)


#: Number of the first arguments of all operators that are tensors or None, and of further ones of the gradient's.
TENSORS, _RESULTS = 12, 3
#: The place of sinks among them.
SINK = 5


def _folded(info: Any, in_dims: Sequence[int | None], given: Sequence[Any]) -> list[Any]:
    """Fold a vmapped dimension of tensors (B or 1, ...) into the first; ``words`` belong to no sequence."""
    N, found = info.batch_size, []
    for tensor, dim in zip(given, in_dims):
        if isinstance(tensor, Tensor):
            moved = tensor.unsqueeze(0).expand(N, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            found.append(moved)
        else:
            found.append(tensor)
    B = found[0].shape[1]
    return [t.expand(N, B, *t.shape[2:]).flatten(0, 1) if isinstance(t, Tensor) else t for t in found]


def _forward_batch(info, in_dims, *arguments):  # type: ignore[no-untyped-def]
    tensors = _folded(info, in_dims, arguments[:TENSORS])
    found = triton_forward(*tensors, *arguments[TENSORS:])
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in found), (0, 0)


def _fields_batch(info, in_dims, *arguments):  # type: ignore[no-untyped-def]
    count = TENSORS + 1
    tensors = _folded(info, in_dims, arguments[:count])
    found = triton_fields(*tensors, *arguments[count:])
    folded = [t.dim() > 1 for t in found]
    results = tuple(t.unflatten(0, (info.batch_size, -1)) if whole else t for t, whole in zip(found, folded))
    return results, tuple(0 if whole else None for whole in folded)


def _backward_batch(info, in_dims, *arguments):  # type: ignore[no-untyped-def]
    count = TENSORS + _RESULTS
    tensors = _folded(info, in_dims, arguments[:count])
    found = triton_backward(*tensors, *arguments[count:])
    results: list[Tensor] = []
    dims: list[int | None] = []
    for gradient, given, dim in zip(found, arguments, in_dims):
        if gradient.numel() == 0 and gradient.dim() == 1:
            results.append(gradient)
            dims.append(None)
            continue
        by_sample = gradient.unflatten(0, (info.batch_size, -1))
        shared = given.shape[0] if dim is None else given.movedim(dim, 0).shape[1]
        results.append(by_sample.sum(1, keepdim=True) if shared == 1 else by_sample)
        dims.append(0)
    return tuple(results), tuple(dims)


#: The dispatch keys of devices that have Triton; the CPU's is for the interpreter.
KEYS = "CPU CUDA XPU"
# ``custom_op`` does not work: its autograd does not support ``torch.func`` transforms.
_without_grad = torch.no_grad()
triton_forward = define("triton_forward", _without_grad(_forward), _forward_shapes, KEYS, _forward_batch)
triton_fields = define("triton_fields", _without_grad(_computed_fields), _fields_shapes, KEYS, _fields_batch)
triton_backward = define("triton_backward", _without_grad(_backward), _backward_shapes, KEYS, _backward_batch)


class Attend(torch.autograd.Function):
    """:func:`triton_forward` with its gradient.

    The last two arguments are an output and a statistic that were computed elsewhere, or None.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *given, output, statistic = arguments
        return triton_forward(*given) if output is None else (output.clone(), statistic.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.constants = inputs[TENSORS:-2]
        ctx.save_for_backward(*inputs[:TENSORS], *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        to_bias = ctx.needs_input_grad[4]
        found = triton_backward(*ctx.saved_tensors, grad, to_bias, *ctx.constants)
        d_query, d_key, d_value, d_weight, d_bias, d_sink = found
        d_bias, d_sink = d_bias if to_bias else None, d_sink if ctx.needs_input_grad[5] else None
        rest = [None] * (TENSORS - 6 + len(ctx.constants) + 2)
        return d_query, d_key, d_value, d_weight, d_bias, d_sink, *rest
