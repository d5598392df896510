"""MesaNet: a recurrence that is read through the solution of a least-squares problem for each step.

Dimensions: B batch, L steps, E width, H heads, D width of a head's keys and values, V width of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import Number, flag, positive, size
from regard._utils.mechanism import mechanism
from regard._utils.tracing import is_exported_to_onnx, is_symbolic, is_traced
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.operator import recur
from regard.nn.linear.recurrence import Decay, document_starts
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, heads, unit
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.linear.steps import Steps
from regard.nn.positions.rotary import Rotation

#: Steps whose systems are solved at once.
_CHUNK = 16


def mesa_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ridge: Tensor,
    *,
    log_decay: Tensor,
    rate: Tensor,
    iterations: int | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Read ``H ← e^g H + β k vᵀ`` by ``y = Hᵀ (G + diag(λ))⁻¹ q``, where ``G ← e^g G + β k kᵀ``.

    This is what the linear map predicts at q that fits the earlier pairs of key and value best, with weights β that
    decay and the penalty λ: ``y = Wq`` for the W that minimizes ``Σ_j β_j e^(g_{j+1} + … + g_t) |W k_j − v_j|² +
    Σ_c λ_c |W_c|²``.

    Parameters
    ----------
    query, key : Tensor (B, H, L, D)
    value : Tensor (B, H, L, V)
    ridge : Tensor (H, D)
        λ, above 0.
    log_decay, rate : Tensor (B, H, L)
        g and β.
    iterations : int, optional
        Steps of conjugate gradients, which approximate the solution; None solves the systems.
    state : Tensor (B, H, D, D + V), optional
        G and H after earlier steps.
    return_state : bool, default False

    Returns
    -------
    output : Tensor (B, H, L, V)
    state : Tensor (B, H, D, D + V)
        Only if requested.
    """
    return _read(query, key, value, ridge, log_decay, rate, iterations, state, return_state)


def _read(
    query: Tensor, key: Tensor, value: Tensor, ridge: Tensor, log_decay: Tensor, rate: Tensor,
    iterations: int | None = None, state: Tensor | None = None, return_state: bool = False,
) -> Any:  # fmt: skip
    D, log_decay, rate = key.shape[-1], log_decay.unsqueeze(-1), rate.unsqueeze(-1)
    if state is None:
        state = value.new_zeros(*key.shape[:2], D, D + value.shape[-1])
    system = _finite(key, log_decay, rate, ridge, state[..., :D])
    if is_traced(query) or not torch.is_grad_enabled():
        solution = _solved(iterations, query, *system)
    else:
        solution = _Solution.apply(iterations, query, *system)
    steps = Steps(solution, key, torch.cat([key, value], -1), log_decay, rate)
    output, end = recur(steps, state, form="auto", chunk=64)
    return (output[..., D:], end) if return_state else output[..., D:]


def _finite(key: Tensor, log_decay: Tensor, rate: Tensor, ridge: Tensor, start: Tensor) -> System:
    """Return the systems without steps that are not finite: a chunk would spread them to earlier ones.

    Later steps of their document read a state that holds them.
    """
    if not is_traced(key):
        right = torch.cat([key, log_decay.exp(), rate], -1).isfinite().all(-1, keepdim=True)
        key, log_decay, rate = (torch.where(right, each, 0.0) for each in (key, log_decay, rate))
    return key, ridge, log_decay, rate, start


#: The systems (G_t + diag(λ)) of all steps: key, ridge, log_decay and rate (B, H, L, 1), and G before the first.
System = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _times(rows: Tensor, *system: Tensor) -> Tensor:
    """Return the matrices of all steps times their rows (B, H, L, D): linear attention with keys as values."""
    key, ridge, log_decay, rate, start = system
    found, _ = recur(Steps(rows, key, key, log_decay, rate), start.contiguous(), form="auto", chunk=64)
    return found + ridge.unsqueeze(-2) * rows


def _solved(iterations: int | None, rows: Tensor, *system: Tensor) -> Tensor:
    """Return the solutions of the systems of all steps for rows (B, H, L, D)."""
    if iterations is not None:
        return _by_gradients(iterations, rows, *system)
    key, ridge, log_decay, rate, total = system
    length, found = rows.shape[-2], []
    if not is_symbolic(length) and not length:
        return rows
    # An exported program cannot loop over chunks whose number it does not know.
    chunk = length if is_symbolic(length) else min(_CHUNK, length)
    for q, k, g, beta in zip(*(each.split(chunk, -2) for each in (rows, key, log_decay, rate))):
        decay, ones = Decay(g, None), torch.ones_like(beta)
        products = (k.unsqueeze(-1) * k.unsqueeze(-2)).flatten(-2)  # (B, H, C, D²)
        sums = (decay.scores(ones, beta) @ products).unflatten(-1, k.shape[-1:] * 2)
        sums = sums + decay.from_start(ones).unsqueeze(-1) * total.unsqueeze(-3)
        total = sums[..., -1, :, :]
        found.append(_divided(sums + torch.diag_embed(ridge).unsqueeze(-3), q))
    return torch.cat(found, -2)


def _divided(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return rows (..., D) divided by symmetric matrices (..., D, D), all of whose eigenvalues are positive."""
    if is_exported_to_onnx():  # which has no factorizations: eliminate column by column
        both = torch.cat([matrix, rows.unsqueeze(-1)], -1)
        for i in range(rows.shape[-1]):
            pivot = both[..., i : i + 1, :] / both[..., i : i + 1, i : i + 1]
            others = torch.arange(rows.shape[-1], device=rows.device).unsqueeze(-1) != i
            both = torch.where(others, both - both[..., i : i + 1] * pivot, pivot)
        return both[..., -1]
    factor, failed = torch.linalg.cholesky_ex(matrix)
    found = torch.cholesky_solve(rows.unsqueeze(-1), factor).squeeze(-1)
    return torch.where(failed.unsqueeze(-1) > 0, torch.nan, found)  # only rows that are not finite fail


def _by_gradients(iterations: int, rows: Tensor, *system: Tensor) -> Tensor:
    """Approximate the solutions by conjugate gradients; rows that are solved up to rounding stay as they are."""

    def squared(rows: Tensor) -> Tensor:
        return rows.square().sum(-1, keepdim=True)

    found, left, direction, square = torch.zeros_like(rows), rows, rows, squared(rows)
    solved = square * (8 * torch.finfo(rows.dtype).eps) ** 2
    for _ in range(iterations):
        changed, unsolved = _times(direction, *system), square > solved
        curved = (direction * changed).sum(-1, keepdim=True)
        step = torch.where(unsolved, square / torch.where(unsolved, curved, 1.0), 0.0)
        found, left = found + step * direction, left - step * changed
        before, square = square, squared(left)
        direction = left + torch.where(unsolved, square / torch.where(unsolved, before, 1.0), 0.0) * direction
    return found


class _Solution(torch.autograd.Function):
    """The solutions, whose gradient solves the same systems: no matrix of a step is kept."""

    @staticmethod
    def forward(ctx: Any, iterations: int | None, rows: Tensor, *system: Tensor) -> Tensor:
        found = _solved(iterations, rows, *system)
        ctx.iterations = iterations
        ctx.save_for_backward(found, rows, *system)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found, *inputs = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a graph of this pass is wanted
            again, outputs, create = grad, _solved(ctx.iterations, *inputs), True
        else:
            again, create = _solved(ctx.iterations, grad, *inputs[1:]), False
            with torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in inputs]
                # d(A⁻¹ r) = A⁻¹ (dr − dA A⁻¹ r)
                outputs = inputs[0] - _times(found.detach(), *inputs[1:])
        leaves = [each for each, want in zip(inputs, wanted) if want]
        given = iter(torch.autograd.grad(outputs, leaves, again, create_graph=create))
        return None, *(next(given) if want else None for want in wanted)


@mechanism(
    formula="G ← e^g G + β k kᵀ; H ← e^g H + β k vᵀ; y = norm(Hᵀ (G + diag λ)⁻¹ q) · W_O",
    sources=("vonoswald2025",),
    learned="W_QK (2·H·D, E), W_V (H·D, E), W_βa (2·H, E) and biases, λ (H, D), convolution, norm, W_O (E, H·D)",
    cost="O(L·E² + L·E·D²)",
    causal="yes",
    cache="2·H·D² and the convolution's steps",
)
class MesaNet(RecurrentAttention):
    """MesaNet: each step reads the least-squares fit of all earlier values (von Oswald 2025, arXiv 2506.05233).

    Two sums ``G ← e^g G + β k kᵀ`` and ``H ← e^g H + β k vᵀ`` are read as ``y = Hᵀ (G + diag(λ))⁻¹ q``: what the linear
    map that fits the pairs of key and value up to this step best, with a ridge λ, predicts for the query. Queries and
    keys pass a short convolution with SiLU and are divided by their norm; ``g = log σ(w_a x + b_a)``,
    ``β = σ(w_β x + b_β)``, and each head's output passes an RMS norm.

    The systems of all steps are solved exactly, in O(D³) for each; memory does not grow with their number, except under
    compilers, which hold a matrix for each step.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim : int, optional
        Width D of a head, of keys and of values; defaults to E/H.
    iterations : int, optional
        Approximates each solution by so many steps of conjugate gradients, O(D²) each. The paper has 30.
    conv_size : int, default 4
        Steps that the short convolution reads.
    least_ridge : float, default 0.25
        What λ is at least, ``λ = least_ridge + softplus(p)``; it starts at 1.
    output_gate : bool, default False
        Whether to gate each head's normed output by SiLU(W_z x).
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, MesaNet
    >>> layer, x, cache = MesaNet(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True

    The error of a few steps of conjugate gradients:

    >>> layer.iterations = 2
    >>> bool((torch.cat(steps, 1) - layer(x)).abs().max() > 1e-4)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        iterations: int | None = None,
        conv_size: int = 4,
        least_ridge: float = 0.25,
        output_gate: bool = False,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H, self.head_dim = self.embed_dim, self.num_heads, self.head_width("head_dim", head_dim)
        self.iterations = None if iterations is None else size(self, "iterations", iterations)
        self.least_ridge = Number(gt=0, lt=1)(self, "least_ridge", least_ridge)
        inner = H * self.head_dim
        self.qk = nn.Linear(E, 2 * inner, bias=False, **where)
        self.value = nn.Linear(E, inner, bias=False, **where)
        self.conv = ShortConvolution(2 * inner, conv_size, **where)
        self.rates = nn.Linear(E, 2 * H, **where)  # of β, then of the decay
        self.ridge = parameter(H, self.head_dim, **where)
        self.gate = nn.Linear(E, inner, bias=False, **where) if flag(self, "output_gate", output_gate) else None
        self.norm = nn.RMSNorm(self.head_dim, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(inner, E, bias=False, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, and set the ridge and the norm's scale to 1."""
        super().reset_parameters()
        with torch.no_grad():
            self.ridge.fill_(1 - self.least_ridge).expm1_().log_()  # the inverse of softplus

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        H, wide = self.num_heads, torch.promote_types(x.dtype, torch.float32)
        rows, past = self.conv.run(self.qk(x), past, layout)
        query, key = (unit(heads(each, H)) for each in rows.chunk(2, -1))
        rate, decay = self.rates(x).to(wide).transpose(1, 2).chunk(2, 1)
        gate = None if self.gate is None else F.silu(self.gate(x))
        value = heads(self.value(x), H).to(wide)
        return Terms(query, key, value, F.logsigmoid(decay), rate.sigmoid(), scale=1.0, gate=gate), past

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, D), and the state after the last step."""
        found, end = mesa_recurrence(
            **self._arguments(terms, layout), state=state[0] if state else None, return_state=True
        )
        return found, (end,)

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> Tensor:
        """Return the effective weights (B, H, L, L): outputs are linear in the values."""
        B, H, L, _ = terms.value.shape
        each = torch.eye(L, dtype=terms.value.dtype, device=terms.value.device).expand(B, H, L, L)
        # Earlier keys change how a step reads these values, too.
        earlier = F.pad(state[0][..., : self.head_dim], (0, L)) if state else None
        found: Tensor = _read(**self._arguments(terms._replace(value=each), layout), state=earlier)
        return found

    def _arguments(self, terms: Terms, layout: Layout) -> dict[str, Any]:
        assert terms.log_decay is not None
        starts, decay = document_starts("MesaNet", layout.runs, terms.key), terms.log_decay
        decay = decay if starts is None else torch.where(starts.unsqueeze(1), -torch.inf, decay)
        ridge = self.least_ridge + F.softplus(self.ridge.to(terms.key.dtype))
        rows = {"query": terms.query, "key": terms.key, "value": terms.value, "ridge": ridge}
        return rows | {"log_decay": decay, "rate": terms.rate, "iterations": self.iterations}

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        approximate = "" if self.iterations is None else f", iterations={self.iterations}"
        return f"{super().extra_repr()}, head_dim={self.head_dim}{approximate}"
