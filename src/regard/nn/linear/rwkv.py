"""RWKV-6 and RWKV-7: layers that mix each row with the one before it, over a state that decays by channel."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, positive, size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines.aux import Aux, AuxRequest
from regard.masks import MaskLike
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, heads, unit
from regard.nn.linear.self_attention import LinearCache
from regard.nn.positions.rotary import Rotation


class _LowRank(nn.Module):
    """Rows (…, E) to (…, width): ``f(x W₁) W₂ + b``, with the bias b if there is one."""

    def __init__(self, embed_dim: int, rank: int, width: int, act: nn.Module, bias: bool, where: dict[str, Any]):
        super().__init__()
        self.down = nn.Linear(embed_dim, rank, bias=False, **where)
        self.act = act
        self.up = nn.Linear(rank, width, bias=bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.up(self.act(self.down(x)))
        return rows


class _Rwkv(RecurrentAttention):
    """What both layers share: the difference to the row before, a norm of each head, and the sizes."""

    def __init__(self, embed_dim: int, num_heads: int, norm_eps: float, where: dict[str, Any]) -> None:
        super().__init__(embed_dim, num_heads)
        E, H, self.head_dim = self.embed_dim, self.num_heads, self.head_width("head_dim", None)
        self.receptance, self.key, self.value, self.out = (nn.Linear(E, E, bias=False, **where) for _ in range(4))
        self.norm = nn.GroupNorm(H, E, eps=self.head_dim * positive(self, "norm_eps", norm_eps), **where)

    def _difference(self, x: Tensor, past: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return each row's predecessor minus itself (B, L, E), zeros preceding a document, and the last row."""
        past = x.new_zeros(x.shape[0], 1, x.shape[2]) if past is None else past
        rows = torch.cat([past.to(x.dtype), x], 1)
        before = rows[:, : x.shape[1]]
        if layout.runs is not None:
            runs = F.pad(layout.runs, (1, 0))
            before = torch.where((runs[:, :-1] == runs[:, 1:]).unsqueeze(-1), before, 0.0)
        return before - x, layout.last(rows, 1)

    def normed(self, read: Tensor) -> Tensor:
        """Return what each head read (B, L, H, V), normed per head, as rows (B, L, E)."""
        rows: Tensor = self.norm(read.flatten(0, 1).flatten(1)).unflatten(0, read.shape[:2])
        return rows


def _rank(name: str, argument: str, given: int | None, default: float) -> int:
    """Return a rank: what is given, or the default, rounded to a multiple of 32."""
    return max(32, 32 * round(default / 32)) if given is None else size(name, argument, given)


def _falling(count: int, like: Tensor) -> Tensor:
    """Return −6 to −1 over the channels: some forget slowly, others at once."""
    return torch.linspace(-6, -1, count, dtype=like.dtype, device=like.device)


@mechanism(
    formula="y = r (S + uᵀ⊙kᵀ v); S ← diag(e^{−e^w}) S + kᵀ v; norm(y) ⊙ SiLU(g) · W_O",
    sources=("peng2024",),
    learned="W_r, W_k, W_v, W_g, W_O (E, E), w and the mix of rows by matrices of low rank, u (H, K), norm",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·K and one row",
)
class RWKV6Attention(_Rwkv):
    """RWKV-6's time mixing (Finch): linear attention whose state decays by channel, as the input says.

    Receptance r, key k, value v, gate g and decay w are made of ``x + (x₋₁ − x) ⊙ m``, where each mix m of a row x and
    its predecessor depends on both: ``m = μ + tanh((x + (x₋₁ − x) ⊙ μ₀) A) B``. A step reads before it writes, with a
    bonus u for its own key: ``y = r (S + diag(u) kᵀ v)``, then ``S ← diag(e^{−e^w}) S + kᵀ v``, where
    ``w = b + tanh(x_w W₁) W₂`` (Peng 2024, arXiv 2404.05892). Each head's output is normed and gated by SiLU(g).

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H; the state of a head has E/H rows and columns.
    mix_rank, decay_rank : int, optional
        Ranks of the matrices that make the mixes and the decay; default to 32 and 64.
    norm_eps : float, default 1e-5
        Times E/H, it is added to the variance of a head's output.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, RWKV6Attention
    >>> layer, x, cache = RWKV6Attention(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
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
        mix_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, norm_eps, where)
        E, rank = self.embed_dim, size(self, "mix_rank", mix_rank)
        self.gate = nn.Linear(E, E, bias=False, **where)
        self.mix = parameter(E, **where)
        self.mixes = parameter(5, E, **where)  # of decay, key, value, receptance and gate
        self.mix_down, self.mix_up = nn.Linear(E, 5 * rank, bias=False, **where), parameter(5, rank, E, **where)
        self.decay = _LowRank(E, size(self, "decay_rank", decay_rank), E, nn.Tanh(), True, where)
        self.bonus = parameter(self.num_heads, self.head_dim, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule and the mixes from U(0, 1), and spread the decays over the channels."""
        super().reset_parameters()
        for mix in (self.mix, self.mixes):
            nn.init.uniform_(mix)
        nn.init.uniform_(self.mix_up, -0.01, 0.01)  # at first, mixes hardly depend on the input
        nn.init.zeros_(self.bonus)
        with torch.no_grad():
            self.decay.up.bias.copy_(_falling(self.embed_dim, self.decay.up.bias))

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        change, past = self._difference(x, past, layout)
        own = torch.tanh(self.mix_down(x + change * self.mix)).unflatten(-1, (5, -1))  # (B, L, 5, rank)
        mixes = self.mixes + torch.einsum("blmr,mre->blme", own, self.mix_up)
        w, k, v, r, g = (x.unsqueeze(2) + change.unsqueeze(2) * mixes).unbind(2)
        wide = torch.promote_types(x.dtype, torch.float32)
        H, log_decay = self.num_heads, -self.decay(w).to(wide).exp()
        query, key, value = heads(self.receptance(r), H), heads(self.key(k), H), heads(self.value(v), H)
        bonus = self.bonus.to(key.dtype)
        return Terms(query, key, value, heads(log_decay, H), scale=1.0, bonus=bonus, gate=F.silu(self.gate(g))), past


@mechanism(
    formula="S ← diag(e^w) S − (κ ⊙ a)ᵀ (κ S) + kᵀ v; y = norm(r S) + (Σ r ⊙ k ⊙ ρ) v; (y ⊙ g) · W_O",
    sources=("peng2025",),
    learned="W_r, W_k, W_v, W_O (E, E), w, a and g by matrices of low rank, mixes (6, E), norm, ρ (H, K)",
    cost="O(L·E² + L·E·K)",
    causal="yes",
    cache="H·K·K and one row",
)
class RWKV7Attention(_Rwkv):
    """RWKV-7's time mixing (Goose): a generalized delta rule with a decay and a rate for each channel.

    ``S ← diag(e^w) S − (κ ⊙ a)ᵀ (κ S) + kᵀ v``, then ``y = r S``: what the state holds under the unit key κ is erased
    at the rates a, in a state that has not decayed yet, and the key k is written (Peng 2025, arXiv 2503.14456). All are
    made of ``x + (x₋₁ − x) ⊙ μ``, with one mix μ each: receptance r and value v by matrices,
    ``w = −e^{−1/2} σ(b + tanh(x_w W₁) W₂)``, ``a = σ(b + x_a W₁ W₂)``, the gate ``g = σ(x_g W₁) W₂``, ``κ`` is the key
    times a factor of each channel, divided by its norm in each head, and the key written is ``k ⊙ (1 + (a − 1) ⊙ c)``.
    Each head's output is normed, and gets the value times ``Σ r ⊙ k ⊙ ρ``.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H; the state of a head has E/H rows and columns.
    value_residual : bool, default False
        Whether values are mixed with those of the model's first layer, ``v + (v₁ − v) ⊙ σ(b + x_v W₁ W₂)``, as in all
        layers but the first.
    decay_rank, rate_rank, value_rank, gate_rank : int, optional
        Ranks of W₁ W₂; default to 1.8·√E, 1.8·√E, 1.3·√E and 0.6·E^0.8, rounded to multiples of 32.
    norm_eps : float, default 1e-5
        Times E/H, it is added to the variance of a head's output.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, RWKV7Attention
    >>> layer, x, cache = RWKV7Attention(16, 2).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True

    A second layer mixes its values with those of the first:

    >>> second = RWKV7Attention(16, 2, value_residual=True).eval()
    >>> second(x, first_values=layer.values(x)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        value_residual: bool = False,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        name, where = type(self).__name__, {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, norm_eps, where)
        E, root = self.embed_dim, math.sqrt(self.embed_dim)
        self.mixes = parameter(6, E, **where)  # of receptance, decay, key, value, rate and gate
        self.decay = _LowRank(E, _rank(name, "decay_rank", decay_rank, 1.8 * root), E, nn.Tanh(), True, where)
        self.rate = _LowRank(E, _rank(name, "rate_rank", rate_rank, 1.8 * root), E, nn.Identity(), True, where)
        gate_width = _rank(name, "gate_rank", gate_rank, 0.6 * E**0.8)
        self.gate = _LowRank(E, gate_width, E, nn.Sigmoid(), False, where)
        mixes = flag(self, "value_residual", value_residual)
        if value_rank is not None and not mixes:
            raise rejected(name, "value_rank", "be None without value_residual", value_rank)
        width = _rank(name, "value_rank", value_rank, 1.3 * root)
        self.value_residual = _LowRank(E, width, E, nn.Identity(), True, where) if mixes else None
        self.unit_factor, self.key_factor = parameter(E, **where), parameter(E, **where)
        self.bonus = parameter(self.num_heads, self.head_dim, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule and the mixes from U(0, 1), and spread the decays over the channels."""
        super().reset_parameters()
        nn.init.uniform_(self.mixes)
        nn.init.zeros_(self.bonus)
        nn.init.constant_(self.unit_factor, 0.85)
        nn.init.ones_(self.key_factor)
        with torch.no_grad():
            self.decay.up.bias.copy_(_falling(self.embed_dim, self.decay.up.bias))

    def values(
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        valid_lens: Tensor | None = None,
        documents: Tensor | None = None,
        cache: LinearCache | None = None,
    ) -> Tensor:
        """Return the values (B, L, E) of rows (B, L, E), for the ``first_values`` of later layers.

        Parameters
        ----------
        x, attn_mask, valid_lens, documents, cache : optional
            As in the layer's call, and before it: the call adds the rows to the cache.
        """
        layout = self.layout(x, attn_mask, valid_lens, documents, cache)
        x, past = layout.clear(x), None if cache is None or cache.state is None else cache.state.past
        change, _ = self._difference(x, past, layout)
        rows: Tensor = self.value(x + change * self.mixes[3])
        return rows

    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, valid_lens: Tensor | None = ..., documents: Tensor | None = ..., rotation: Rotation | None = ..., cache: LinearCache | None = ..., return_aux: None = ..., first_values: Tensor | None = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, valid_lens: Tensor | None = ..., documents: Tensor | None = ..., rotation: Rotation | None = ..., cache: LinearCache | None = ..., return_aux: AuxRequest, first_values: Tensor | None = ...) -> tuple[Tensor, Aux]: ...  # noqa: E501  # fmt: skip
    def forward(
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        valid_lens: Tensor | None = None,
        documents: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: LinearCache | None = None,
        return_aux: AuxRequest | None = None,
        first_values: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return rows (B, L, E), each of which reads the rows before it and itself.

        Parameters
        ----------
        x, attn_mask, valid_lens, documents, rotation, cache, return_aux : optional
            As of all layers with a state; see :meth:`DeltaNet.forward`. There is no rotation.
        first_values : Tensor (B, L, E), optional
            :meth:`values` of the model's first layer for its rows; only and always with ``value_residual``.
        """
        terms = partial(self.terms, first_values=first_values)
        return self.run(x, attn_mask, valid_lens, documents, rotation, cache, return_aux, terms)

    def terms(
        self,
        x: Tensor,
        past: Tensor | None,
        layout: Layout,
        rotation: Rotation | None,  # noqa: ARG002
        first_values: Tensor | None = None,
    ) -> Made:
        """Return the terms of the recurrence."""
        if (first_values is None) != (self.value_residual is None) or (
            first_values is not None and first_values.shape != x.shape
        ):
            expected = "be None without value_residual" if self.value_residual is None else f"have shape {shape(x)}"
            raise rejected("RWKV7Attention", "first_values", expected, described(first_values))
        change, past = self._difference(x, past, layout)
        r, w, k, v, a, g = (x.unsqueeze(2) + change.unsqueeze(2) * self.mixes).unbind(2)
        wide, H = torch.promote_types(x.dtype, torch.float32), self.num_heads
        log_decay = -math.exp(-0.5) * torch.sigmoid(self.decay(w).to(wide))
        rate, key, value = torch.sigmoid(self.rate(a)), self.key(k), self.value(v)
        if self.value_residual is not None and first_values is not None:
            value = value + (first_values - value) * torch.sigmoid(self.value_residual(v))
        erased = unit(heads(key * self.unit_factor, H))
        key = key * (1 + (rate - 1) * self.key_factor)
        query, value = (heads(each, H).to(key.dtype) for each in (self.receptance(r), value))
        key = heads(key, H)
        erase = (erased * heads(rate, H)).to(key.dtype), erased.to(key.dtype)
        return Terms(query, key, value, heads(log_decay, H), scale=1.0, erase=erase, gate=self.gate(g)), past

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:  # noqa: ARG002
        """Return the rows."""
        own = (terms.query * terms.key * self.bonus.unsqueeze(1)).sum(-1, keepdim=True) * terms.value
        assert terms.gate is not None
        rows: Tensor = self.out((self.normed(read) + own.transpose(1, 2).flatten(2)) * terms.gate)
        return rows

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return super().extra_repr() + (", value_residual=True" if self.value_residual is not None else "")
