"""Gated recurrences, whole sequences and one step of decoding, compared with what transformers falls back to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from benchmarks.cases.contenders import differentiated, seeded
from benchmarks.registry import Call, Case, Contender, Goal, MissingError, Point, register
from benchmarks.work import Work

HEADS, WIDTH, LONG = 8, 64, 4096
TRANSFORMERS, PLAIN = "transformers", "regard, plain torch"
GATED, KIMI, MAMBA = "Gated DeltaNet", "Kimi Delta Attention", "Mamba-2"
WIDE = f"{MAMBA}, state of 128"
VARIANTS = (GATED, KIMI, MAMBA, WIDE)
#: The chunk of Mamba-2 in transformers, and steps whose states the formula holds at a time.
CHUNK, SEGMENT = 256, 128


@dataclass
class Recurrence(Work):
    """Steps that decay, write and read; ``parameters`` has the gates, and the state that a step continues."""

    def __post_init__(self) -> None:
        self.grad = seeded(tuple(self.value.shape))[0]
        if self.backward:
            for tensor in self.inputs.values():
                tensor.requires_grad_()

    @property
    def options(self) -> dict[str, Any]:
        """What the steps are, as arguments of ``regard.nn.gated_recurrence``."""
        delta = self.kernel in (GATED, KIMI)
        return {**self.parameters, "delta": delta, "scale": WIDTH**-0.5 if delta else 1.0}

    def rows(self) -> Tensor:
        """Return all rows: each depends on those before it."""
        return torch.arange(self.query.shape[2])

    def flops(self) -> float:
        """Return the operations of steps that are taken one by one."""
        B, H, L, V = self.value.shape
        return 2.0 * (3 if self.kernel in (GATED, KIMI) else 2) * B * H * L * V * self.key.shape[-1]

    def expected(self, rows: Tensor, dtype: torch.dtype, *, weights: bool = False) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the results of a loop over the steps."""
        leaves = {name: x.detach().to(dtype).requires_grad_(self.backward) for name, x in self.inputs.items()}
        B, H, L, V = self.value.shape
        gate = leaves["log_decay"]
        decay = (gate if gate.dim() == 4 else gate.unsqueeze(-1)).exp()
        q, k = (leaves[name].repeat_interleave(H // leaves[name].shape[1], 1) for name in ("query", "key"))
        q = q * self.options["scale"]
        state = leaves.get("state", q.new_zeros(B, H, k.shape[-1], V))
        found = []
        for part in torch.arange(L).split(SEGMENT):
            first, last = int(part[0]), int(part[-1]) + 1
            given = [x[:, :, first:last] for x in (q, k, leaves["value"], decay, leaves["rate"].unsqueeze(-1))]
            outputs, state = checkpoint(self._steps, state, *given, use_reentrant=False)
            found.append(outputs)
        output = torch.cat(found, 2)
        result = {"output": output.detach()}
        if self.backward:
            pulled = torch.autograd.grad(output, list(leaves.values()), self.grad.to(dtype))
            result |= {f"d_{name}": each for name, each in zip(leaves, pulled)}
        return result

    def _steps(self, state: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for q, k, v, d, rate in zip(*(x.unbind(2) for x in tensors)):
            state = state * d.unsqueeze(-1)
            v = v - (k.unsqueeze(-2) @ state).squeeze(-2) if self.options["delta"] else v
            state = state + k.unsqueeze(-1) * (rate * v).unsqueeze(-2)
            found.append((q.unsqueeze(-2) @ state).squeeze(-2))
        return torch.stack(found, 2), state


def build(point: Point) -> Recurrence:
    """Return the steps of a sequence, in the layout in which layers project them; a single step continues a state."""
    L, delta = point.size, point.variant in (GATED, KIMI)
    groups, width = (HEADS if delta else 1), (128 if point.variant == WIDE else WIDTH)
    shapes = [(1, L, groups, width)] * 2 + [(1, L, HEADS, WIDTH), (1, L, HEADS), (1, L, HEADS, WIDTH)]
    query, key, value, gate, channels = (x.transpose(1, 2) for x in seeded(*shapes))
    if delta:
        query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    rate = gate.sigmoid()
    parameters = {"log_decay": -0.1 * (channels if point.variant == KIMI else gate).exp(), "rate": rate}
    if L == 1:
        (parameters["state"],) = seeded((1, HEADS, width, WIDTH))
    return Recurrence(query, key, value, point.backward, parameters=parameters, kernel=point.variant)


def _by_regard(form: str) -> Contender:
    def prepare(work: Work) -> Call:
        assert isinstance(work, Recurrence)
        options = {**work.options, "form": form}

        def forward() -> Tensor:
            output, _ = regard.nn.gated_recurrence(work.query, work.key, work.value, return_state=True, **options)
            return output

        return differentiated(work, forward)

    return Contender(prepare)


def _rival(variant: str, state: Tensor | None) -> Callable[..., Tensor]:
    """Return transformers' function of (query, key, value, log decay, rate), each (B, L, heads, ...)."""
    try:
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi
        from transformers.models.mamba2 import modeling_mamba2 as mamba
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    except ImportError as error:
        raise MissingError(f"transformers has no such model: {error}") from error
    if variant in (GATED, KIMI):
        chunked, recurrent = {
            GATED: (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule),
            KIMI: (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention),
        }[variant]
        function = chunked if state is None else recurrent
        return lambda *x: function(*x, initial_state=state, output_final_state=state is not None)[0]
    if state is None:
        # The decay is exp(A · rate) with one A per head there: an A per step gives the decays of this work.
        return lambda c, b, x, gate, rate: mamba.mamba2_chunk_scan(x, rate, gate / rate, b, c, chunk_size=CHUNK)
    turned = state.mT.contiguous()  # which they replace, too

    def step(c: Tensor, b: Tensor, x: Tensor, gate: Tensor, rate: Tensor) -> Tensor:
        time = rate[:, 0, :, None].expand(x[:, 0].shape)
        decay = (gate / rate)[:, 0, :, None, None]
        return mamba.mamba2_selective_state_update(turned, x[:, 0], time, decay, b[:, 0], c[:, 0]).unsqueeze(1)

    return step


def _transformers(work: Work) -> Call:
    state = work.parameters.get("state")
    function = _rival(work.kernel, None if state is None else state.clone())
    tensors = (work.query, work.key, work.value, work.parameters["log_decay"], work.parameters["rate"])
    return differentiated(work, lambda: function(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2))


def _both(variant: str) -> int:
    """Return the steps of forward and backward passes: transformers' KDA takes minutes for many."""
    return LONG // 4 if variant == KIMI else LONG


register(
    Case(
        name="recurrence",
        title=f"Gated recurrences, {HEADS} heads of {WIDTH} (size 1: a step of decoding)",
        unit="steps",
        build=build,
        contenders={
            TRANSFORMERS: Contender(_transformers),
            "regard": _by_regard("auto"),
            PLAIN: _by_regard("chunked"),
        },
        baseline=TRANSFORMERS,
        points=tuple(
            point
            for variant in VARIANTS
            for point in (
                Point(1, variant=variant),
                Point(LONG, variant=variant, rounds=5),
                Point(_both(variant), True, variant, rounds=3),
            )
        ),
        quick=40,
        goals=tuple(
            goal
            for variant, name, limit in (
                (GATED, "gated-delta", 5),
                (KIMI, "kda", 5),
                (MAMBA, "mamba2", 6),
                (WIDE, "mamba2-128", 6),
            )
            for goal in (
                Goal(f"{name}-backward", "speed", limit, _both(variant), True, variant=variant),
                Goal(f"{name}-step", "speed", 4, 1, variant=variant),
            )
        ),
        bound="",
        notes=f"transformers without its optional packages: Mamba-2 in chunks of {CHUNK}, the default of its models, "
        "the others in chunks of 64; a step by the functions that its models call in decoding.",
    )
)
