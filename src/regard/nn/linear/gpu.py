"""A gated recurrence on GPUs: flash-linear-attention's kernels where they cover the call, else our own.

Dimensions: B batch, H heads of values, G of keys, L steps, K and V widths.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from regard._utils.tracing import is_traced
from regard.engines import cost_model
from regard.nn.linear.kernels import Formula, by_formula
from regard.nn.linear.steps import Steps

#: The widest keys of our kernels, and of flash-linear-attention's.
_OURS, _THEIRS = 128, 256
_HALF = (torch.float16, torch.bfloat16)
#: The logarithm of a decay that is 0 in every dtype: kernels that subtract logarithms cannot have −∞.
_NOTHING = -1000.0
#: The fewest steps for which a GPU runs chunks.
FEW = 4


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def applies(query: Tensor, key: Tensor, value: Tensor, erase: Any, bonus: Any) -> bool:
    """Return whether kernels run a call: on a GPU with Triton, no ``erase`` and no ``bonus``, more than few steps.

    Our own run only on devices that were measured. Query, key and value are as the caller gave them: the kernels read
    16-bit rows themselves.
    """
    return (
        query.is_cuda
        and erase is None
        and bonus is None
        and _is_installed("triton")
        and query.dtype in (*_HALF, torch.float32)
        and (
            (query.dtype in _HALF and _is_installed("fla") and key.shape[-1] <= _THEIRS)
            or (key.shape[-1] <= _OURS and cost_model.is_measured(query.device))
        )
        and key.shape[2] > FEW
        and value.numel() > 0
        and key.numel() > 0
        and not is_traced(key)
    )


def run(steps: Steps, state: Tensor | None, formula: Formula) -> tuple[Tensor, Tensor]:
    """Return outputs (B, H, L, V), in value's dtype or float32, and the state (B, H, K, V) after the last step.

    Parameters
    ----------
    steps : Steps
        Without erasing and bonus. Query, key and value in any dtype of the kernels, all else in float32.
    state : Tensor (B, H, K, V), optional
    formula : callable
        For second derivatives.
    """
    if _library_covers(steps):
        tensors = (steps.query, steps.key, steps.value, steps.log_decay, steps.rate, state)
        output, end = _Library.apply((steps.delta, steps.scale), formula, *tensors)
        return output, end
    if steps.key.shape[-1] > _OURS or not cost_model.is_measured(steps.key.device):
        wide = steps._replace(query=steps.query.float(), key=steps.key.float(), value=steps.value.float())
        return formula(wide, _start(wide) if state is None else state)
    tensors = (steps.query, steps.key, steps.value, steps.decay(), steps.rate, state)
    output, end = _Recurrence.apply((steps.delta, steps.scale), formula, *tensors)
    return output, end


def _start(steps: Steps) -> Tensor:
    return steps.key.new_zeros(*steps.value.shape[:2], steps.key.shape[-1], steps.value.shape[-1])


# flash-linear-attention -----------------------------------------------------------------------------------------------


def _library_covers(steps: Steps) -> bool:
    """Return whether flash-linear-attention's kernels run the steps.

    They round the states between chunks to the dtype of their inputs, so only 16-bit inputs go to them; they know
    packed sequences by cumulative lengths, not by the steps that begin one.
    """
    return steps.query.dtype in _HALF and steps.resets is None and _is_installed("fla")


class _Library(torch.autograd.Function):
    """The library's own graph, within one that has second derivatives."""

    @staticmethod
    def forward(
        ctx: Any, settings: tuple[bool, float], formula: Formula, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.settings, ctx.formula, wanted = settings, formula, ctx.needs_input_grad[2:]
        with torch.set_grad_enabled(any(wanted)):
            leaves = [None if t is None else t.detach().requires_grad_(want) for t, want in zip(tensors, wanted)]
            query, key, value, decay, rate, state = leaves
            assert query is not None and key is not None and value is not None
            steps = Steps(query, key, value, decay, rate, delta=settings[0], scale=settings[1])
            results = _by_library(steps, state)
        ctx.save_for_backward(*tensors)
        ctx.inner = results, leaves
        ctx.set_materialize_grads(False)
        return results[0].detach(), results[1].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a graph of this pass is wanted, and the library has none
            return None, None, *by_formula(ctx.settings, ctx.formula, (*ctx.saved_tensors, None), wanted, grad, d_end)
        results, leaves = ctx.inner
        pairs = [(result, each) for result, each in zip(results, (grad, d_end)) if each is not None]
        inputs = [leaf for leaf, want in zip(leaves, wanted) if want]
        if not pairs:
            return (None,) * (2 + len(wanted))
        outputs, given = zip(*pairs)
        found = iter(torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True))
        return None, None, *(next(found) if want else None for want in wanted)


def _by_library(steps: Steps, state: Tensor | None) -> tuple[Tensor, Tensor]:
    H, G = steps.value.shape[1], steps.key.shape[1]
    query, key, value = steps.query, steps.key, steps.value
    if not steps.delta or query.shape[1] != G or steps.log_decay is None:  # the others know groups of heads
        query, key = (each.repeat_interleave(H // each.shape[1], 1) for each in (query, key))
    q, k, v = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    decay = None if steps.log_decay is None else steps.log_decay.clamp(min=_NOTHING).transpose(1, 2)
    channels = decay is not None and decay.shape[-1] > 1
    rate = None if steps.rate is None else steps.rate.squeeze(-1).transpose(1, 2)
    given: dict[str, Any] = {"scale": steps.scale, "initial_state": state, "output_final_state": True}
    if decay is not None:
        given["g"] = decay.contiguous() if channels else decay.squeeze(-1).contiguous()
    if steps.delta:
        given["beta"] = (torch.ones_like(v[..., 0]) if rate is None else rate).contiguous()
    elif rate is not None:
        v = (rate.unsqueeze(-1) * v).to(v.dtype).contiguous()
    if steps.delta and channels:
        from fla.ops.kda import chunk_kda as run
    elif steps.delta and decay is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as run
    elif steps.delta:
        from fla.ops.delta_rule import chunk_delta_rule as run
    elif channels:
        from fla.ops.gla import chunk_gla as run
    else:
        from fla.ops.simple_gla import chunk_simple_gla as run
    output, end = run(q, k, v, **given)
    return output.transpose(1, 2), end


# Our kernels ----------------------------------------------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: tuple[bool, float], formula: Formula, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        call = _Call(tensors, *settings)
        wants_grad = any(ctx.needs_input_grad)
        output, end, kept = call.forward(save=wants_grad)
        ctx.settings, ctx.formula = settings, formula
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        return output, end

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as activation checkpointing wants
        tensors, kept = saved[:6], saved[6:]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a graph of this pass is wanted, and the kernels have none
            return None, None, *by_formula(ctx.settings, ctx.formula, (*tensors, None), wanted, grad, d_end)
        found = _Call(tensors, *ctx.settings).backward(kept, grad, d_end)
        return None, None, *(each if want else None for each, want in zip(found, wanted))


class _Call:
    """The launches of a call.

    Parameters
    ----------
    tensors : sequence of Tensor or None
        query, key, value, decay (B, H, L, 1 or K), rate (B, H, L, 1) and the state before the first step.
    """

    def __init__(self, tensors: Any, delta: bool, scale: float) -> None:
        from regard.nn.linear import triton_kernels

        self.compiled = triton_kernels
        self.query, self.key, self.value, self.decay, self.rate = (
            each if each is None or each.stride(-1) == 1 or each.shape[-1] == 1 else each.contiguous()
            for each in tensors[:5]
        )
        self.start = None if tensors[5] is None else tensors[5].contiguous()
        self.delta, self.scale = delta, scale
        (self.B, self.H, self.L, self.V), self.G, self.K = self.value.shape, self.key.shape[1], self.key.shape[-1]
        kind = 0 if self.decay is None else 1 if self.decay.shape[-1] == 1 else 2
        exact = self.query.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
        self.sizes, self.warps = triton_kernels.blocks(self.K, kind, exact), triton_kernels.warps(exact)
        self.chunks = -(-self.L // self.sizes["C"])
        self.constants: dict[str, Any] = {**self.sizes, "KIND": kind, "DELTA": delta, "RATE": self.rate is not None}
        self.constants["DOT"] = "ieee" if exact else "tf32"

    def forward(self, *, save: bool) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Return output, state, and what the backward pass needs."""
        like, B, H, L, K, V = self.value, self.B, self.H, self.L, self.K, self.V
        heads, size = B * H, self.sizes["C"]
        products = self._new(heads, self.chunks, size, size)
        alike, inverse = (torch.empty_like(products) if self.delta else None for _ in range(2))
        self._launch("prepare", (self.chunks, heads), {}, products=products, alike=alike, inverse=inverse)
        output = torch.empty_like(like)
        output = output if output.stride(-1) == 1 else like.new_empty(like.shape)
        end = self._new(B, H, K, V)
        states = self._new(heads, self.chunks, K, V) if save else None
        written = self._new(heads, L, V) if save else None
        residual = self._new(heads, L, V) if save and self.rate is not None else None
        self._launch(
            "forward", (-(-V // self.sizes["BV"]), heads),
            {"START": self.start is not None, "SAVE": save},
            products=products, inverse=inverse, start=self.start, output=output, end=end, states=states,
            residual=residual, written=written, o=output,
        )  # fmt: skip
        return output, end, (products, alike, inverse, states, residual, written) if save else ()

    def backward(self, kept: Any, grad: Tensor | None, d_end: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value, decay, rate and state."""
        products, alike, inverse, states, residual, written = kept
        B, H, L, K, V, heads = self.B, self.H, self.L, self.K, self.V, self.B * self.H
        grad = torch.zeros_like(self.value) if grad is None else grad
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        d_end = None if d_end is None else d_end.contiguous()
        d_start, d_written, d_states = self._new(B, H, K, V), self._new(heads, L, V), torch.empty_like(states)
        self._launch(
            "backward", (-(-V // self.sizes["BV"]), heads), {"END": d_end is not None},
            products=products, inverse=inverse, grad=grad, d_end=d_end, d_start=d_start, d_states=d_states,
            d_written=d_written, o=grad,
        )  # fmt: skip
        d_query, d_key, d_value = self._new(B, H, L, K), self._new(B, H, L, K), self._new(B, H, L, V)
        d_rate = None if self.rate is None else self._new(B, H, L, 1)
        from_state, to_end = self._new(heads, L, K), self._new(heads, L, K)
        into_state = self._new(heads, L, K) if self.delta else None
        d_products, kept_by = torch.empty_like(products), self._new(heads, self.chunks, K)
        d_inverse = torch.empty_like(products) if self.delta else None
        parts = -(-K // self.sizes["BQ"])
        sums = {"from_state": from_state, "to_end": to_end, "into_state": into_state, "d_products": d_products}
        sums |= {"d_inverse": d_inverse, "kept_by": kept_by, "d_rate": d_rate}
        grid = (self.chunks, heads, parts)
        self._launch(
            "sums_over_values", grid, {}, grad=grad, states=states, d_states=d_states, residual=residual,
            written=written, d_written=d_written, d_value=d_value, o=grad, **sums,
        )  # fmt: skip
        d_decay = None
        if self.decay is not None:  # one gradient of a head's decay for each block of channels
            d_decay = self._new(*((parts,) if self.decay.shape[-1] == 1 else ()), *self.decay.shape)
        self._launch(
            "gradients", grid, {}, products=products, alike=alike, d_query=d_query, d_key=d_key, d_decay=d_decay, **sums
        )
        if d_decay is not None and d_decay.dim() > 4:
            d_decay = d_decay.sum(0)
        found = (self._summed(d_query, self.query), self._summed(d_key, self.key), d_value.to(self.value.dtype))
        return *found, d_decay, d_rate, d_start

    def _launch(self, name: str, grid: tuple[int, ...], constants: dict[str, bool], **tensors: Tensor | None) -> None:
        """Launch a kernel with the arguments that its signature names."""
        kernel = self.compiled.KERNELS[name]
        all_tensors = {
            "query": self.query, "key": self.key, "value": self.value, "decay": self.decay, "rate": self.rate, **tensors
        }  # fmt: skip
        known: dict[str, Any] = {
            "B": self.B, "H": self.H, "G": self.G, "HQ": self.query.shape[1], "L": self.L, "K": self.K, "V": self.V,
            "N": self.chunks, "scale": self.scale, **self.constants, **constants,
        }  # fmt: skip
        for short, tensor in zip("qkvgro", (*(all_tensors[each] for each in _STRIDED), tensors.get("o"))):
            strides = (0, 0, 0) if tensor is None else tensor.stride()[:3]
            known |= {f"{short}_{letter}": stride for letter, stride in zip("bhl", strides)}
        for each, tensor in all_tensors.items():
            known[each] = self.query if tensor is None else tensor  # one that is not read must still be an address
        arguments = {each: known[each] for each in kernel.arg_names}
        kernel[grid](**arguments, num_warps=self.warps, num_stages=self.compiled.STAGES)

    def _new(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self.value.device)

    def _summed(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Return a gradient (B, H, L, K), summed over the heads that share a row."""
        groups = like.shape[1]
        if groups != self.H:
            gradient = gradient.unflatten(1, (groups, -1)).sum(2)
        return gradient.to(like.dtype)


#: Tensors with strides of their own, by the first letters of their strides' names: q, k, v, g, r.
_STRIDED = ("query", "key", "value", "decay", "rate")
