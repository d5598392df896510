"""Linear attention with decay: retention, gated linear attention, HGRN2 and lightning attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import Number, positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, heads
from regard.nn.positions.rotary import Rotary, Rotation


class _DecayingAttention(RecurrentAttention):
    """What these layers share: no convolution, so that nothing but the matrix comes from earlier steps."""

    def _past(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 0, 0)


class RetentionState(NamedTuple):
    """The state of retention after earlier steps.

    Attributes
    ----------
    matrix, past : Tensor
        See :class:`RecurrentState`.
    length : Tensor (B,) of int
        Steps of the last document so far, without padding.
    """

    matrix: Tensor
    length: Tensor
    past: Tensor


@mechanism(
    formula="S_h ← (1 − 2^(−5−h)) S_h + k vᵀ; y = norm(R(q)ᵀS / √K) ⊙ SiLU(W_G x) · W_O",
    sources=("sun2023",),
    learned="W_QKV (2·E + 2·E, E), W_G (2·E, E), norm, W_O (E, 2·E)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·V",
)
class Retention(_DecayingAttention):
    """Retention: linear attention with rotary positions and a fixed decay ``1 − 2^(−5−h)`` in head h.

    RetNet (Sun 2023, arXiv 2307.08621). Each head's output ``R(q)ᵀS / √K`` passes an RMS norm and a gate SiLU(W_G x).
    Values are twice as wide as keys. There is no division by the sum of weights. Positions count the steps of a
    document: padding neither decays nor counts.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H, which divides E. A head's keys have width K = E/H, which must be even.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, Retention
    >>> layer, x, cache = Retention(16, 4).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    state_type: type[Any] = RetentionState

    def __init__(
        self, embed_dim: int, num_heads: int, *, norm_eps: float = 1e-5, device: Any = None, dtype: Any = None
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, width = self.embed_dim, self.head_width("head_dim", None)
        self.rotary = Rotary(width)
        self.qkv = nn.Linear(E, 4 * E, bias=False, **where)
        self.gate = nn.Linear(E, 2 * E, bias=False, **where)
        self.norm = nn.RMSNorm(2 * width, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(2 * E, E, bias=False, **where)
        self.reset_parameters()

    def rotation(self, x: Tensor, layout: Layout, *state: Tensor) -> Rotation:
        """Return the rotation of rows by the number of steps before each in its document."""
        if not state and layout.real is None and layout.runs is None:
            return self.rotary.rotation(torch.arange(x.shape[1], device=x.device), x.dtype)
        place, _ = layout.places(x.unsqueeze(1), state[1] if state else None)
        return self.rotary.rotation(place, x.dtype)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        E, H = self.embed_dim, self.num_heads
        q, k, v = (heads(each, H) for each in self.qkv(x).split((E, E, 2 * E), -1))
        assert rotation is not None
        q, k = self.rotary.turn(q, rotation), self.rotary.turn(k, rotation)
        decay = torch.log1p(-(2.0 ** -(5 + torch.arange(H, dtype=torch.float64, device=x.device))))
        decay = decay.to(torch.promote_types(q.dtype, torch.float32)).view(1, H, 1).expand(x.shape[0], H, x.shape[1])
        return Terms(q, k, v, decay, gate=F.silu(self.gate(x))), self._past(x)

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what each head reads (B, H, L, V), and the state after the last step."""
        read, end = super().recur(terms, layout, before, *state)
        _, length = layout.places(terms.key, state[1] if state else None)
        return read, (*end, length)


@mechanism(
    formula="S ← diag(e^g) S + k vᵀ, g = log σ(W₂ W₁ x + b) / 16; y = norm(qᵀS / √K) ⊙ SiLU(W_G x) · W_O",
    sources=("yang2023",),
    learned="W_QKV (2·E, E), W₁ (R, E), W₂ (E/2, R), b, W_G (E, E), norm, W_O (E, E)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·V",
)
class GatedLinearAttention(_DecayingAttention):
    """Gated linear attention (GLA): a learned decay for each channel of the keys (Yang 2023, arXiv 2312.06635).

    ``S ← diag(e^g) S + k vᵀ`` with ``g = log σ(W₂ W₁ x + b) / 16``. Each head's output ``qᵀS / √K`` passes an RMS norm
    and a gate SiLU(W_G x). Keys are half as wide as values: K = E/2H.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H, which divides E/2.
    rank : int, default 16
        Rank R of the decay's projection.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import GatedLinearAttention, LinearCache
    >>> layer, x, cache = GatedLinearAttention(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 16,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H = self.embed_dim, self.num_heads
        if E % (2 * H):
            raise rejected("GatedLinearAttention", "num_heads", f"divide embed_dim / 2, {E / 2:g}", H)
        self.qkv = nn.Linear(E, 2 * E, bias=False, **where)
        self.decay_down = nn.Linear(E, size(self, "rank", rank), bias=False, **where)
        self.decay_up = nn.Linear(rank, E // 2, **where)
        self.gate = nn.Linear(E, E, bias=False, **where)
        self.norm = nn.RMSNorm(E // H, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(E, E, bias=False, **where)
        self.reset_parameters()

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        E = self.embed_dim
        q, k, v = (heads(each, self.num_heads) for each in self.qkv(x).split((E // 2, E // 2, E), -1))
        decay = heads(self.decay_up(self.decay_down(x)), self.num_heads)
        log_decay = F.logsigmoid(decay.to(torch.promote_types(decay.dtype, torch.float32))) / 16
        return Terms(q, k, v, log_decay, gate=F.silu(self.gate(x))), self._past(x)


@mechanism(
    formula="S ← diag(f) S + (1 − f) vᵀ, f = l + (1 − l) σ(W_F x); y = norm(SiLU(q)ᵀS / √K) · W_O",
    sources=("qin2024hgrn2",),
    learned="W_Q, W_F, W_V (E, E), norm (E), W_O (E, E)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·V",
)
class HGRN2(_DecayingAttention):
    """HGRN2: gated linear attention whose key is the complement of its forget gate, ``k = 1 − f``.

    ``S ← diag(f) S + (1 − f) vᵀ`` with ``f = l + (1 − l) σ(W_F x)``, queries SiLU(W_Q x), and an RMS norm over the
    columns of all heads (Qin 2024, arXiv 2404.07904).

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H, which divides E. Keys and values have width K = E/H; the paper has K = 128.
    lower_bound : float, default 0.0
        Least value l of the forget gate. In the paper it is learned and grows with the layer, from 0 in the first.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import HGRN2, LinearCache
    >>> layer, x, cache = HGRN2(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        self.head_width("head_dim", None)  # checks that H divides E
        E, self.lower_bound = self.embed_dim, Number(ge=0, lt=1)(self, "lower_bound", lower_bound)
        self.qfv = nn.Linear(E, 3 * E, bias=False, **where)  # queries, forget gates and values
        self.norm = nn.RMSNorm(E, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(E, E, bias=False, **where)
        self.reset_parameters()

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        rows = self.qfv(x)
        q, f, v = (
            heads(each, self.num_heads) for each in rows.to(torch.promote_types(rows.dtype, torch.float32)).chunk(3, -1)
        )
        low = self.lower_bound
        # 1 − f and log f, without the cancellation of either
        key = (1 - low) * torch.sigmoid(-f)
        log_decay = F.logsigmoid(f) if low == 0 else torch.log(low + (1 - low) * torch.sigmoid(f))
        return Terms(F.silu(q), key, v, log_decay), self._past(x)

    def normed(self, read: Tensor) -> Tensor:
        """Return what the heads read (B, L, H, K), normed over all of them, as rows (B, L, E)."""
        rows: Tensor = self.norm(read.flatten(-2))
        return rows


@mechanism(
    formula="S_h ← e^(−r_h) S_h + k vᵀ, r_h = 2^(−8(h+1)/H); y = norm(qᵀS) ⊙ σ(W_G x) · W_O",
    sources=("qin2024lightning",),
    learned="W_QKV (3·H·D, E), W_G (H·D, E), norm (H·D), W_O (E, H·D)",
    cost="O(L·E² + L·E·D)",
    causal="yes",
    cache="H·K·V",
)
class LightningAttention(_DecayingAttention):
    """Lightning attention: linear attention with a fixed decay for each head, as MiniMax-01 has it.

    ``S ← e^(−r) S + k vᵀ`` with ``r = s · 2^(−8(h+1)/H)`` in head h (Qin 2024, arXiv 2401.04658). Queries, keys and
    values pass SiLU; the output of all heads passes one RMS norm and a gate σ(W_G x). There is no factor 1/√D.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    slope : float, default 1.0
        Factor s of the decay. MiniMax-01 has ``1 − l / (N − 1) + 1e-5`` in layer l of N.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LightningAttention, LinearCache
    >>> layer, x, cache = LightningAttention(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        slope: float = 1.0,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        self.head_dim, self.slope = self.head_width("head_dim", head_dim), Number(ge=0)(self, "slope", slope)
        E, inner = self.embed_dim, self.num_heads * self.head_dim
        self.qkv = nn.Linear(E, 3 * inner, bias=False, **where)
        self.gate = nn.Linear(E, inner, bias=False, **where)
        self.norm = nn.RMSNorm(inner, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(inner, E, bias=False, **where)
        self.reset_parameters()

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        H = self.num_heads
        q, k, v = (heads(each, H) for each in F.silu(self.qkv(x)).chunk(3, -1))
        h = torch.arange(1, H + 1, dtype=torch.float64, device=x.device)
        decay = (-self.slope * torch.exp2(-8 * h / H)).to(torch.promote_types(q.dtype, torch.float32))
        decay = decay.view(1, H, 1).expand(x.shape[0], H, x.shape[1])
        return Terms(q, k, v, decay, scale=1.0, gate=torch.sigmoid(self.gate(x))), self._past(x)

    def normed(self, read: Tensor) -> Tensor:
        """Return what the heads read (B, L, H, D), normed over all of them, as rows (B, L, H · D)."""
        rows: Tensor = self.norm(read.flatten(-2))
        return rows
