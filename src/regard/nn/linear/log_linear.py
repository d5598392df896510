"""Log-linear attention: a recurrence whose past is split into log L spans, each read with a weight of its own.

Dimensions: B batch, L steps, E width, G heads of keys, H heads of values, N levels, K width of a key, V of a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import Integer
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import is_symbolic
from regard.nn._base import parameter
from regard.nn.linear.gated_delta import GatedDeltaNet, OneStepOptions
from regard.nn.linear.layout import Layout
from regard.nn.linear.mamba2 import Mamba2, Mamba2Options
from regard.nn.linear.operator import recur
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, heads
from regard.nn.linear.steps import Steps
from regard.nn.positions.rotary import Rotation

_LONG = Integer(ge=2)


class LogLinearState(NamedTuple):
    """The state of a log-linear layer after earlier steps.

    Attributes
    ----------
    matrix : Tensor (B, H, N − 1, K, V)
        The sums that the levels read; in float32 for 16-bit layers.
    length : Tensor (B,) of int
        Number of real steps in the current document.
    past : Tensor (B, w − 1, C)
        The last rows that the short convolution reads.
    """

    matrix: Tensor
    length: Tensor
    past: Tensor


def log_linear_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    levels: Tensor,
    *,
    log_decay: Tensor,
    rate: Tensor,
    delta: bool,
    scale: float,
    layout: Layout,
    before: int = 0,
    state: tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
) -> Any:
    """Return ``y_t = scale · Σ_j λ_{t,l(t,j)} q_t W_tj v_j``, where W is what the recurrence without levels keeps.

    The level l(t, j) is the number of binary digits of ``t xor j``: 0 for the step itself, and l for a step in the
    first half of a block of 2^l steps, whose second half holds t. So level l is a recurrence that starts anew with each
    block, writes in the first half and is read in the second: all levels are the heads of one call. Steps are numbered
    from 0 within their document, padding left out.

    Parameters
    ----------
    query, key : Tensor (B, G, L, K)
    value : Tensor (B, H, L, V)
    levels : Tensor (B, H, L, N)
        λ. There must not be more than 2^(N − 1) steps.
    log_decay, rate : Tensor (B, H, L)
        Zeros in padding, as keys and values.
    delta, scale
        See :func:`regard.nn.gated_recurrence`.
    layout : Layout
        Padding and documents.
    before : int, default 0
        An upper bound of the steps in ``state``.
    state : pair of Tensor (B, H, N − 1, K, V) and (B,), optional
        The sums after earlier steps, and the steps of their last document.
    return_state : bool, default False

    Returns
    -------
    output : Tensor (B, H, L, V)
    state : pair of Tensor
        Only if requested.
    """
    return _read(query, key, value, levels, log_decay, rate, delta, scale, layout, before, state, return_state)


def _read(
    query: Tensor, key: Tensor, value: Tensor, levels: Tensor, log_decay: Tensor, rate: Tensor, delta: bool,
    scale: float, layout: Layout, before: int = 0, state: tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
) -> Any:  # fmt: skip
    (B, H, L, V), (_, G, _, K), most = value.shape, key.shape, levels.shape[-1] - 1
    place, length = layout.places(key, None if state is None else state[1])
    # Sums of the levels that are read, and one for all others, which are the same so far.
    used = most if is_symbolic(L) else min(most, (before + L - 1).bit_length())
    count = min(used + 1, most) if return_state else max(used, 1)
    block = 2 ** torch.arange(1, count + 1, device=key.device).view(-1, 1)
    within = place.view(B, 1, 1, L) % block  # (B, 1, count, L)
    reads, begins = 2 * within >= block, within == 0
    if layout.real is not None:
        begins = begins & layout.real.view(B, 1, 1, L)
    steps = Steps(
        query,
        key,
        torch.where(reads.unsqueeze(-1), 0.0, value.unsqueeze(2)).flatten(1, 2),
        torch.where(begins, -torch.inf, log_decay.unsqueeze(2)).flatten(1, 2).unsqueeze(-1),
        rate.unsqueeze(2).expand(B, H, count, L).flatten(1, 2).unsqueeze(-1),
        delta=delta,
        scale=scale,
    )
    sums = None if state is None else state[0][:, :, :count].flatten(1, 2)
    found, end = recur(steps, sums, form="auto", chunk=64)
    found = torch.where(reads.unsqueeze(-1), found.unflatten(1, (H, count)), 0.0)
    weights = levels[..., 1 : 1 + count].transpose(2, 3)
    own = (query * key).sum(-1).repeat_interleave(H // G, 1) * (scale * rate * levels[..., 0])
    output = (weights.unsqueeze(-1) * found).sum(2) + own.unsqueeze(-1) * value
    if not return_state:
        return output
    end = end.unflatten(1, (H, count))
    others = end[:, :, -1:].expand(B, H, most - count, K, V)
    return output, (torch.cat([end, others], 2), length)


class _LogLinear(RecurrentAttention):
    """What both layers share: weights of levels, and the recurrence that they read."""

    state_type = LogLinearState
    max_len: int
    level_scale: nn.Parameter

    def _add_levels(self, max_len: int) -> None:
        where: dict[str, Any] = {"device": self.out.weight.device, "dtype": self.out.weight.dtype}
        self.max_len = _LONG(self, "max_len", max_len)
        self.num_levels = (self.max_len - 1).bit_length() + 1
        self.levels = nn.Linear(self.embed_dim, self.num_heads * self.num_levels, bias=False, **where)
        self.level_scale = parameter(self.num_heads, self.num_levels, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, and set the scales of levels to 1."""
        super().reset_parameters()
        if hasattr(self, "level_scale"):
            nn.init.ones_(self.level_scale)

    def leveled(self, made: Made, x: Tensor) -> Made:
        """Return terms with the weights of levels."""
        terms, past = made
        wide = torch.promote_types(x.dtype, torch.float32)
        # In one dimension of heads and levels: compilers get the layout of softplus's gradient wrong in two.
        levels = F.softplus(self.levels(x).to(wide) * self.level_scale.to(wide).flatten())
        return terms._replace(levels=heads(levels, self.num_heads)), past

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what each head reads (B, H, L, V), and the state after the last step."""
        length = before + terms.value.shape[2]
        if not is_symbolic(length) and length > self.max_len:
            raise rejected(type(self).__name__, "x", f"bring the steps to at most max_len {self.max_len:,}", length)
        earlier = (state[0], state[1]) if state else None
        found: tuple[Tensor, tuple[Tensor, ...]] = log_linear_recurrence(
            **self._arguments(terms, layout), before=before, state=earlier, return_state=True
        )
        return found

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> Tensor:
        """Return the effective weights (B, H, L, L)."""
        B, H, L, _ = terms.value.shape
        each = torch.eye(L, dtype=terms.value.dtype, device=terms.value.device).expand(B, H, L, L)
        arguments = self._arguments(terms._replace(value=each), layout)
        if state:  # earlier steps are in no weight, but they count
            K, most = terms.key.shape[-1], self.num_levels - 1
            arguments |= {"before": self.max_len, "state": (each.new_zeros(B, H, most, K, L), state[1])}
        found: Tensor = _read(**arguments)
        return found

    def _arguments(self, terms: Terms, layout: Layout) -> dict[str, Any]:
        gates = {"log_decay": terms.log_decay, "rate": terms.rate, "delta": terms.delta}
        scale = terms.key.shape[-1] ** -0.5 if terms.scale is None else terms.scale
        rows = {"query": terms.query, "key": terms.key, "value": terms.value, "levels": terms.levels}
        return rows | gates | {"scale": scale, "layout": layout}

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, max_len={getattr(self, 'max_len', None)}"


@mechanism(
    formula="S as in Mamba-2, split into S_l by l = bits(t xor j); y = norm((Σ_l λ_l CᵀS_l + D x) ⊙ SiLU(z)) · W_O",
    sources=("guo2025loglinear",),
    learned="W_in (2·I + 2·G·N + H, E), W_λ (H·M, E), s (H, M), A, b, D (H), convolution, norm (I), W_O (E, I)",
    cost="O(L·E·I + L·log L·I·N)",
    causal="yes",
    cache="H·K·V·log₂ max_len and the convolution's steps",
)
class LogLinearMamba2(Mamba2, _LogLinear):
    """Log-linear Mamba-2: log L spans of the past, each with a state and a weight (Guo 2025, arXiv 2506.04761).

    As a Fenwick tree does, step t splits the steps j before it into spans, by the number of binary digits of
    ``t xor j``: the longer ago, the longer is a span. The state S of :class:`Mamba2` is the sum of their states S_l,
    and a head reads ``Σ_l λ_l CᵀS_l`` with weights of its own for each step, ``λ = softplus(s ⊙ W_λ x)``. With all
    weights 1, this is Mamba-2. Steps are numbered within their document.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    max_len : int, default 16384
        Most steps of a row, those in a cache included; there are ``M = ⌈log₂ max_len⌉ + 1`` levels.
    head_dim, state_dim, num_groups, conv_size, conv_bias, bias, norm_eps, device, dtype : optional
        See :class:`Mamba2`.

    Raises
    ------
    ValueError
        If there are more steps than ``max_len``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, LogLinearMamba2
    >>> layer, x, cache = LogLinearMamba2(16, 4, state_dim=8).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, max_len: int = 16384, **options: Unpack[Mamba2Options]
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self._add_levels(max_len)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:
        """Return the terms of the recurrence."""
        return self.leveled(super().terms(x, past, layout, rotation), x)


@mechanism(
    formula="S as in Gated DeltaNet, split into S_l by l = bits(t xor j); y = norm(Σ_l λ_l qᵀS_l / √K) ⊙ SiLU(z) · W_O",
    sources=("guo2025loglinear",),
    learned="W_QKV, W_z (H·V, E), W_βa (2·H, E), W_λ (H·M, E), s (H, M), A, b (H), convolution, norm, W_O (E, H·V)",
    cost="O(L·E² + L·log L·E·K)",
    causal="yes",
    cache="H·K·V·log₂ max_len and the convolution's steps",
)
class LogLinearGatedDeltaNet(GatedDeltaNet, _LogLinear):
    """Log-linear Gated DeltaNet: log L spans of the past, each with a state and a weight (Guo 2025, arXiv 2506.04761).

    The state S of :class:`GatedDeltaNet` is the sum of a state S_l for each span of the past: what its steps wrote, and
    later steps let decay and erased. A head reads ``Σ_l λ_l qᵀS_l / √K``. Spans and their weights λ are those of
    :class:`LogLinearMamba2`; with all weights 1, this is Gated DeltaNet.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of value heads H.
    max_len : int, default 16384
        Most steps of a row, those in a cache included; there are ``M = ⌈log₂ max_len⌉ + 1`` levels.
    num_key_heads, key_dim, value_dim, conv_size, negative_eigenvalues, norm_eps, device, dtype : optional
        See :class:`GatedDeltaNet`.

    Raises
    ------
    ValueError
        If there are more steps than ``max_len``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, LogLinearGatedDeltaNet
    >>> layer, x, cache = LogLinearGatedDeltaNet(16, 4).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, max_len: int = 16384, **options: Unpack[OneStepOptions]
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self._add_levels(max_len)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:
        """Return the terms of the recurrence."""
        return self.leveled(super().terms(x, past, layout, rotation), x)
