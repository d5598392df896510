"""Layers of the delta rule: DeltaNet, Gated DeltaNet, Comba, and Kimi Delta Attention with a decay by channel."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import Number, flag, positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import (
    Made,
    RecurrentAttention,
    Terms,
    draw_decay,
    heads,
    mamba_decay,
    unit,
)
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.positions.rotary import Rotation


class _DeltaRule(RecurrentAttention):
    """What these layers share: a convolution of queries, keys and values, unit queries and keys, and a norm."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_key_heads: int | None,
        key_dim: int | None,
        value_dim: int | None,
        conv_size: int,
        norm_eps: float,
        where: dict[str, Any],
        num_steps: int = 1,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        E, H = self.embed_dim, self.num_heads
        self.num_key_heads = H if num_key_heads is None else size(self, "num_key_heads", num_key_heads)
        if H % self.num_key_heads:
            raise rejected(type(self).__name__, "num_key_heads", f"divide num_heads {H}", self.num_key_heads)
        self.key_dim = self.head_width("key_dim", key_dim)
        self.num_steps = size(self, "num_steps", num_steps)
        self.value_dim = self.key_dim if value_dim is None else size(self, "value_dim", value_dim)
        self.qkv = nn.Linear(E, sum(self._widths), bias=False, **where)
        self.conv = ShortConvolution(sum(self._widths), conv_size, **where)
        self.norm = nn.RMSNorm(self.value_dim, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(H * self.value_dim, E, bias=False, **where)

    def _doubled(self, E: int, H: int, key_dim: int | None, value_dim: int | None) -> int | None:
        """Return the width of values: twice that of keys by default; None where H does not divide E."""
        if value_dim is not None or (key_dim is None and E % H):
            return value_dim
        return 2 * (E // H if key_dim is None else size(self, "key_dim", key_dim))

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, self.num_steps * keys, self.num_steps * self.num_heads * self.value_dim

    def _delta(
        self,
        x: Tensor,
        past: Tensor | None,
        layout: Layout,
        rate: Tensor,
        decay: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Made:
        rows, past = self.conv.run(self.qkv(x), past, layout)
        q, k, v = rows.split(self._widths, -1)
        n, query = self.num_steps, unit(heads(q, self.num_key_heads))
        if n > 1:
            query = query.repeat_interleave(n, 2)
            k, v, rate = (each.unflatten(-1, (n, -1)).flatten(1, 2) for each in (k, v, rate))
            # The first of a row's steps decays.
            decay = None if decay is None else F.pad(decay.unsqueeze(-1), (0, n - 1)).flatten(2)
        key = unit(heads(k, self.num_key_heads))
        value = heads(v, self.num_heads).to(key.dtype)
        return Terms(query, key, value, decay, rate.to(key.dtype).transpose(1, 2), delta=True, gate=gate), past

    def extra_repr(self) -> str:
        """Return the sizes."""
        fewer = f", num_key_heads={self.num_key_heads}" if self.num_key_heads != self.num_heads else ""
        steps = f", num_steps={self.num_steps}" if self.num_steps != 1 else ""
        return f"{super().extra_repr()}{fewer}{steps}, key_dim={self.key_dim}, value_dim={self.value_dim}"


@mechanism(
    formula="S ← S + β k (v − kᵀS)ᵀ; y = norm(qᵀS / √K) · W_O",
    sources=("schlag2021", "yang2024"),
    learned="W_QKV, W_β (H, E), convolution, norm, W_O (E, H·V)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·V and the convolution's steps",
)
class DeltaNet(_DeltaRule):
    """DeltaNet: each step replaces a part β of what the state holds under its key, ``S ← S + β k (v − kᵀS)ᵀ``.

    The rule is Schlag's (2021, arXiv 2102.11174), the layer Yang's (2024, arXiv 2406.06484): queries, keys and values
    pass a short convolution with SiLU, queries and keys are divided by their norm, β = σ(W_β x), and each head's output
    ``qᵀS / √K`` passes an RMS norm before the projection. :class:`FastWeights` has the rule without these parts.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    key_dim, value_dim : int, optional
        Widths K and V of a head; K defaults to E/H, V to K.
    conv_size : int, default 4
        Steps that the short convolution reads.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import DeltaNet, LinearCache
    >>> layer, x, cache = DeltaNet(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
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
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, None, key_dim, value_dim, conv_size, norm_eps, where)
        self.rate = nn.Linear(self.embed_dim, self.num_heads, bias=False, **where)
        self.reset_parameters()

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        return self._delta(x, past, layout, self.rate(x).sigmoid())


class OneStepOptions(TypedDict, total=False):
    """Keyword arguments of :class:`GatedDeltaNet` layers that write one key and value of each token."""

    num_key_heads: int | None
    key_dim: int | None
    value_dim: int | None
    conv_size: int
    negative_eigenvalues: bool
    norm_eps: float
    device: Any
    dtype: Any


@mechanism(
    formula="S ← e^g S; S ← S + β k (v − kᵀS)ᵀ; y = norm(qᵀS / √K) ⊙ SiLU(W_z x) · W_O",
    sources=("yang2024gated", "siems2025"),
    learned="W_QKV, W_z (H·V, E), W_βa (2·H, E), A, b (H), convolution, norm, W_O (E, H·V)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·V and the convolution's steps",
)
class GatedDeltaNet(_DeltaRule):
    """Gated DeltaNet: the delta rule on a state that decays, as Qwen3-Next, Qwen3.5 and OLMo-hybrid have it.

    ``S ← e^g S``, then ``S ← S + β k (v − kᵀS)ᵀ``, with one decay ``g = −e^A softplus(w_a x + b)`` and one rate
    ``β = σ(w_β x)`` per head and step (Yang 2024, arXiv 2412.06464). Queries, keys and values pass a short convolution
    with SiLU, queries and keys are divided by their norm, and each head's output ``qᵀS / √K`` passes an RMS norm, times
    a gate SiLU(W_z x). Value head h reads with query and key head ``h // (H/G)``.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of value heads H.
    num_key_heads : int, optional
        Number of query and key heads G, which divides H; defaults to H.
    key_dim, value_dim : int, optional
        Widths K and V of a head; K defaults to E/H, V to 2·K.
    conv_size : int, default 4
        Steps that the short convolution reads.
    num_steps : int, default 1
        Keys, values and rates of each token, which are written one after the other; the state decays before the first.
        More than one is Gated DeltaProduct (Siems 2025, arXiv 2502.10297).
    negative_eigenvalues : bool, default False
        Whether rates are 2·σ(w_β x), so that a step may also flip the sign of what it replaces (Grazzi 2024, arXiv
        2411.12537).
    norm_eps : float, default 1e-6
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import GatedDeltaNet, LinearCache
    >>> layer, x, cache = GatedDeltaNet(16, 4, num_key_heads=2).eval(), torch.randn(3, 5, 16), LinearCache()
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
        num_key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        num_steps: int = 1,
        negative_eigenvalues: bool = False,
        norm_eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        E, H = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        value_dim = self._doubled(E, H, key_dim, value_dim)
        super().__init__(E, H, num_key_heads, key_dim, value_dim, conv_size, norm_eps, where, num_steps)
        flag(self, "negative_eigenvalues", negative_eigenvalues)
        self.negative_eigenvalues = negative_eigenvalues
        self.rates = nn.Linear(E, (self.num_steps + 1) * H, bias=False, **where)  # of β, then of the decay
        self.gate = nn.Linear(E, H * self.value_dim, bias=False, **where)
        self.A_log, self.dt_bias = parameter(H, **where), parameter(H, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the decay as Mamba-2 does, and set scales to 1."""
        super().reset_parameters()
        draw_decay(self.A_log, self.dt_bias)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        rate, decay = self.rates(x).split((self.num_steps * self.num_heads, self.num_heads), -1)
        rate = 2 * rate.sigmoid() if self.negative_eigenvalues else rate.sigmoid()
        log_decay, _ = mamba_decay(decay, self.A_log, self.dt_bias)
        return self._delta(x, past, layout, rate, log_decay.transpose(1, 2), F.silu(self.gate(x)))

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return super().extra_repr() + (", negative_eigenvalues=True" if self.negative_eigenvalues else "")


@mechanism(
    formula="S ← e^g S + β k (v − σ(b) kᵀS)ᵀ; y = norm((q − d k)ᵀS / √K) ⊙ σ(W_z x) · W_O",
    sources=("hu2025",),
    learned="W_QKV, W_z (H·V, E), W_βa (2·H, E), b, d (G), A, c (H), convolution, norm, W_O (E, H·V)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·V and the convolution's steps",
)
class Comba(_DeltaRule):
    """Comba: a delta rule that erases less than it writes, read by a query without a part of its key (Hu 2025).

    ``S ← e^g S + β k (v − σ(b) kᵀS)ᵀ``: the erased part is read from the state before the decay, and weakened by a
    learned σ(b). A head reads with ``q − d k``, which corrects its output by the key just written; d is learned (arXiv
    2506.02475). The decay is ``g = −e^A softplus(w_a x + c)``, the gate on each head's normed output σ(W_z x); the rest
    is as in :class:`GatedDeltaNet`. There is one b and one d for each head of keys.

    The layer of flash-linear-attention 0.6 subtracts ``d σ(b) k`` from q and only then divides q, k and σ(b) k by their
    norms; so σ(b) changes no more than its query.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of value heads H.
    num_key_heads : int, optional
        Number of query and key heads G, which divides H; defaults to H.
    key_dim, value_dim : int, optional
        Widths K and V of a head; K defaults to E/H, V to 2·K.
    conv_size : int, default 4
        Steps that the short convolution reads.
    correction : float, default 1.0
        What d is at first; the authors also use 0.02 for small models.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import Comba, LinearCache
    >>> layer, x, cache = Comba(16, 4, num_key_heads=2).eval(), torch.randn(3, 5, 16), LinearCache()
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
        num_key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        correction: float = 1.0,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        E, H = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        value_dim = self._doubled(E, H, key_dim, value_dim)
        super().__init__(E, H, num_key_heads, key_dim, value_dim, conv_size, norm_eps, where)
        self.start = Number()(self, "correction", correction)
        self.rates = nn.Linear(E, 2 * H, bias=False, **where)  # of β, then of the decay
        self.gate = nn.Linear(E, H * self.value_dim, bias=False, **where)
        self.feedback, self.correction = (parameter(self.num_key_heads, **where) for _ in range(2))
        self.A_log, self.dt_bias = parameter(H, **where), parameter(H, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the decay as Mamba-2 does, and set scales and b to 1."""
        super().reset_parameters()
        draw_decay(self.A_log, self.dt_bias)
        with torch.no_grad():
            self.feedback.fill_(1)
            self.correction.fill_(self.start)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        rate, decay = self.rates(x).chunk(2, -1)
        log_decay, _ = mamba_decay(decay, self.A_log, self.dt_bias)
        gate = torch.sigmoid(self.gate(x))
        terms, past = self._delta(x, past, layout, rate.sigmoid(), log_decay.transpose(1, 2), gate)
        key, times = terms.key, self.num_heads // self.num_key_heads
        assert terms.rate is not None
        feedback, correction = (each.to(key.dtype).view(-1, 1, 1) for each in (self.feedback, self.correction))
        written = terms.rate.unsqueeze(-1) * key.repeat_interleave(times, 1)
        erased = (feedback.sigmoid() * key).repeat_interleave(times, 1)
        return terms._replace(query=terms.query - correction * key, erase=(written, erased), delta=False), past


@mechanism(
    formula="S ← diag(e^g) S; S ← S + β k (v − kᵀS)ᵀ; y = norm(qᵀS / √D) ⊙ σ(W_z₂ W_z₁ x) · W_O",
    sources=("kimi2025",),
    learned="W_QKV, W_β (H, E), W_a, W_z of rank D, A (H), b (H·D), convolution, norm, W_O (E, H·D)",
    cost="O(L·E² + L·E·D)",
    causal="yes",
    cache="H·K·V and the convolution's steps",
)
class KimiDeltaAttention(_DeltaRule):
    """Kimi Delta Attention: Gated DeltaNet with a decay for each channel of the keys, as Kimi-Linear has it.

    ``S ← diag(e^g) S``, then ``S ← S + β k (v − kᵀS)ᵀ`` (Kimi Team 2025, arXiv 2510.26692). The decay is
    ``g = −e^A softplus(W_a₂ W_a₁ x + b)``, and the gate on each head's normed output σ(W_z₂ W_z₁ x), both of rank D,
    the width of a head. The rest is as in :class:`GatedDeltaNet`.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim : int, optional
        Width D of a head, of keys and of values; defaults to E/H.
    conv_size : int, default 4
        Steps that the short convolution reads.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KimiDeltaAttention, LinearCache
    >>> layer, x, cache = KimiDeltaAttention(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
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
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        D = None if head_dim is None else size(self, "head_dim", head_dim)
        super().__init__(embed_dim, num_heads, None, D, D, conv_size, norm_eps, where)
        E, H, D = self.embed_dim, self.num_heads, self.key_dim
        self.rate = nn.Linear(E, H, bias=False, **where)
        self.decay_down, self.decay_up = nn.Linear(E, D, bias=False, **where), nn.Linear(D, H * D, bias=False, **where)
        self.gate_down, self.gate_up = nn.Linear(E, D, bias=False, **where), nn.Linear(D, H * D, bias=False, **where)
        self.A_log, self.dt_bias = parameter(H, **where), parameter(H * D, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the decay as Mamba-2 does, and set scales to 1."""
        super().reset_parameters()
        draw_decay(self.A_log, self.dt_bias)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        # In one dimension of heads and channels: compilers get the layout of softplus's gradient wrong in two.
        amount = self.A_log.repeat_interleave(self.key_dim)
        log_decay, _ = mamba_decay(self.decay_up(self.decay_down(x)), amount, self.dt_bias)
        gate = torch.sigmoid(self.gate_up(self.gate_down(x)))
        return self._delta(x, past, layout, self.rate(x).sigmoid(), heads(log_decay, self.num_heads), gate)
