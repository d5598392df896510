"""ATLAS: a memory that learns a window of steps at once, by orthogonalized steps, from polynomials of the keys.

Dimensions: B batch, L steps, E width, H heads, D width of a key, F of its polynomials, V of a value, w steps of a
window, C of a block, P numbers of a head's network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, positive, size
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.networks import Weights, added, chosen, packed, unpacked
from regard.nn.linear.orthogonal import orthogonalized
from regard.nn.linear.recurrence import Decay
from regard.nn.linear.recurrent_attention import Made, Terms, heads, unit
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.linear.trained_state import Blocks, finite, spoil
from regard.nn.linear.ttt import TrainedMemory
from regard.nn.positions.rotary import Rotation


class AtlasState(NamedTuple):
    """The state of :class:`Atlas` after earlier steps.

    Attributes
    ----------
    matrix : Tensor (B, H, 3, P)
        The weights of each head's network at the start of the current block and now, less the initial ones, and their
        momentum; in float32 for 16-bit layers.
    steps : Tensor (B,) of int
        Steps of the current block so far.
    window : Tensor (B, H, w − 1, F + V + 1)
        Keys, values and gates that the next steps learn again.
    past : Tensor (B, c − 1, H·(2·D + V))
        The last rows that the short convolution reads.
    """

    matrix: Tensor
    steps: Tensor
    window: Tensor
    past: Tensor


def _applied(weights: Weights, rows: Tensor) -> Tensor:
    """Return what a network (..., K, V) makes of rows (..., N, K)."""
    for i, matrix in enumerate(weights):
        rows = (F.silu(rows) if i else rows) @ matrix
    return rows


def _gradients(weights: Weights, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return rows x and g for each layer: the gradient of ``|M(k) − v|²`` by the layer's matrix is ``xᵀ g``."""
    inputs, sums = [key], [key @ weights[0]]
    for matrix in weights[1:]:
        inputs.append(F.silu(sums[-1]))
        sums.append(inputs[-1] @ matrix)
    found = [2 * (sums[-1] - value)]
    for matrix, before in zip(weights[:0:-1], sums[-2::-1]):
        share = before.sigmoid()
        found.append((found[-1] @ matrix.mT) * share * (1 + before * (1 - share)))
    return list(zip(inputs, reversed(found)))


class Learning(NamedTuple):
    """How the network learns: steps w of a window, steps C of a block, and whether steps are orthogonalized."""

    window: int
    block: int
    muon: bool


def omega_recurrence(
    rows: tuple[Tensor, Tensor, Tensor],
    rates: Tensor,
    log_decay: Tensor,
    log_momentum: Tensor,
    initial: Sequence[Tensor],
    how: Learning,
    layout: Layout,
    state: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return what each step reads in the network that has learned its window, and the state.

    Parameters
    ----------
    rows : tuple of Tensor (B, H, L, F), (B, H, L, F) and (B, H, L, V)
        Queries, keys and values.
    rates : Tensor (B, H, L, 2)
        η and γ.
    log_decay, log_momentum : Tensor (B, H, L)
    initial : sequence of Tensor (H, K, V)
        The weights before the first step of a document.
    how : Learning
    layout : Layout
        Padding, which neither counts nor is learned, and documents.
    state : tuple of Tensor (B, H, 3, P), (B,) and (B, H, w − 1, F + V + 1), or None
        After earlier steps; see :class:`AtlasState`.

    Returns
    -------
    output : Tensor (B, H, L, V)
    state : tuple of Tensor
    """
    blocks = Blocks(layout, rows[1], how.block, None if state is None else state[1])
    given, spoiled = finite(layout, *rows, rates, log_decay, log_momentum)
    query, key, value, rates, *logs = (
        blocks.split(each).unflatten(1, rows[0].shape[:2]) for each in given if each is not None
    )
    rate, gamma = rates.unbind(-1)
    own = torch.cat([key, value, gamma.unsqueeze(-1)], -1)
    initial = [each.to(query.dtype) for each in initial]
    begin = tuple(each.expand(query.shape[1], *each.shape) for each in initial)
    first = [begin, begin, tuple(torch.zeros_like(each) for each in begin)]
    memory, window = first, own.new_zeros(*own.shape[1:3], how.window - 1, own.shape[-1])
    if state is not None:
        *weights, momentum = unpacked(state[0], initial)
        memory, window = [*(added(each, initial) for each in weights), momentum], state[2]
    found = []
    for n in range(blocks.number):
        fresh = blocks.fresh[n]
        if fresh is not None:
            memory = [chosen(fresh, a, b) for a, b in zip(first, memory)]
            window = torch.where(fresh.view(-1, 1, 1, 1), 0.0, window)
        known = torch.cat([window, own[n]], 2)
        rows_n = known[..., : key.shape[-1]], known[..., key.shape[-1] : -1], known[..., -1:]
        decay, carried = (Decay(each[n].unsqueeze(-1), None) for each in logs)
        moved, pushed = _moved(memory, rows_n, rate[n], decay, carried, how)
        # One network for each step, without that before the first.
        after = tuple(each[:, :, 1:] for each in moved)
        found.append(_applied(after, query[n].unsqueeze(-2)).squeeze(-2).flatten(0, 1).unsqueeze(0))
        last, ends = blocks.steps[n].expand_as(blocks.count), blocks.ends[n]
        current, momentum = (tuple(_at(each, last) for each in row) for row in (moved, pushed))
        start = current if ends is True else memory[0]
        if isinstance(ends, Tensor):
            start = chosen(ends, current, start)
        memory = [start, current, momentum]
        places = last.unsqueeze(-1) + torch.arange(how.window - 1, device=last.device)
        window = known.gather(2, places[:, None, :, None].expand(-1, *window.shape[1:]))
    *weights, momentum = memory
    matrix = packed([*(added(each, initial, -1.0) for each in weights), momentum])
    output, matrix = spoil(blocks.joined(found, rows[2]), matrix, spoiled)
    return output, (matrix, blocks.count, window)


def _moved(
    memory: list[Weights],
    rows: tuple[Tensor, Tensor, Tensor],
    rate: Tensor,
    decay: Decay,
    carried: Decay,
    how: Learning,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights and the momentum (B, H, C + 1, K, V) after none, one, … and all steps of a block.

    ``rows`` are the keys, values and gates γ of the window before the block, and of the block.
    """
    (start, current, pushed), (key, value, gamma) = memory, rows
    ones, (C, J) = torch.ones_like(rate).unsqueeze(-1), (rate.shape[-1], key.shape[2])
    seen = torch.ones(C, J, dtype=key.dtype, device=key.device).triu().tril(how.window - 1)
    shares = carried.scores(ones, ones) @ seen  # (B, H, C, J)
    moves = decay.scores(ones, ones) * rate.unsqueeze(-2)
    weights, momentum = [], []
    for (inputs, grad), now, old in zip(_gradients(start, key, value), current, pushed):
        grads = (shares.unsqueeze(-1) * inputs.unsqueeze(2)).mT @ (gamma * grad).unsqueeze(2)
        sums = grads + (carried.from_start(ones) * old.flatten(2).unsqueeze(2)).view_as(grads)
        steps = orthogonalized(sums) if how.muon else sums
        moved = decay.from_start(ones) * now.flatten(2).unsqueeze(2) - moves @ steps.flatten(3)
        weights.append(torch.cat([now.unsqueeze(2), moved.view_as(grads)], 2))
        momentum.append(torch.cat([old.unsqueeze(2), sums], 2))
    return weights, momentum


def _at(each: Tensor, step: Tensor) -> Tensor:
    """Return the matrices (B, H, K, V) after so many steps (B,)."""
    index = step.view(-1, 1, 1, 1, 1).expand(-1, each.shape[1], 1, *each.shape[3:])
    return each.gather(2, index).squeeze(2)


@mechanism(
    formula="S ← θ S + ∇_M Σ_{i>t−w} γ_i |M(φ(k_i)) − v_i|²; M ← α M − η Muon(S); y = norm(M(φ(q))) ⊙ SiLU(g) · W_O",
    sources=("behrouz2025atlas",),
    learned="W_QKV, W_G (H·V, E), w (4·H, E), a (p + 1), M, convolution, norm (V), W_O (E, H·V)",
    cost="O(L·E² + L·H·F·V·(C + w + min(F, V)))",
    causal="yes",
    cache="3·H·F·V, the window and the convolution's steps",
)
class Atlas(TrainedMemory):
    """ATLAS: a memory that learns its last w steps again with each step, by Muon (Behrouz 2025).

    Step t adds to the momentum the gradient for the whole window, the Omega rule, and moves the weights of a head's
    network M along the orthogonalized momentum (arXiv 2505.23735)::

        S_t = θ_t S_{t−1} + ∇_M Σ_{i = t−w+1}^{t} γ_i |M(φ(k_i)) − v_i|²
        M_t = α_t M_{t−1} − η_t Muon(S_t)                                  and the head reads M_t(φ(q_t))

    θ, α, η and γ are between 0 and 1, per head and step. The gradients of a block of C steps are all taken at the
    weights before the block. φ are all products of at most p columns, those of d columns times a learned a_d, which is
    1/d! at first. Queries, keys and values pass a short convolution with SiLU, queries and keys are divided by their
    norm; each head's output passes an RMS norm, times a gate SiLU(W_G x). Without Muon it is the paper's OmegaNet; and
    with a window of 1 step and ``degree=1``, too, :class:`TitansMemory`, but that η there weighs what enters S.

    Implementations differ: some raise each column to a power in place of all products, some give γ to pairs of steps or
    fix the gates. Here γ belongs to the step that is learned.

    Each step has a momentum of its own to orthogonalize, so a block keeps C matrices (F, V) for each head, and the
    backward pass some 20 of each. ``F = (D + p)! / (D! p!)`` grows quickly, so keys are narrow: 153 products for
    D = 16 and p = 2.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    key_dim, value_dim : int, optional
        Widths D and V of a head; V defaults to E/H, D to E/H, but at most 16.
    degree : int, default 2
        Columns p of a product, at most.
    window : int, default 16
        Steps w that a step learns, itself included.
    depth : int, default 1
        Layers of the network: 1 is a matrix; more are 4·V wide inside, with SiLU between.
    muon : bool, default True
        Whether steps are orthogonalized.
    block_size : int, default 16
        Steps C of a block.
    conv_size : int, default 4
        Steps c that the short convolution reads.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import Atlas, LinearCache
    >>> layer, x, cache = Atlas(16, 2, window=3, block_size=4).eval(), torch.randn(3, 9, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-4)
    True
    """

    state_type: type[Any] = AtlasState

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        degree: int = 2,
        window: int = 16,
        depth: int = 1,
        muon: bool = True,
        block_size: int = 16,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H, V = self.embed_dim, self.num_heads, self.head_width("value_dim", value_dim)
        self.value_dim = V
        D = self.head_width("key_dim", key_dim)
        self.key_dim = D = min(16, D) if key_dim is None else D
        self.degree, self.window = size(self, "degree", degree), size(self, "window", window)
        self.depth, self.muon = size(self, "depth", depth), flag(self, "muon", muon)
        self.block_size = size(self, "block_size", block_size)
        self.qkv = nn.Linear(E, sum(self._widths), bias=False, **where)
        self.conv = ShortConvolution(sum(self._widths), conv_size, **where)
        self.rates = nn.Linear(E, 4 * H, **where)  # of η, α, θ and γ
        self.coefficients = parameter(self.degree + 1, **where)
        widths = [math.comb(D + self.degree, self.degree), *[4 * V] * (self.depth - 1), V]
        self.memory = nn.ParameterList(parameter(H, a, b, **where) for a, b in pairwise(widths))
        self.gate = nn.Linear(E, H * V, bias=False, **where)
        self.norm = nn.RMSNorm(V, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(H * V, E, bias=False, **where)
        self.reset_parameters()

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values."""
        keys = self.num_heads * self.key_dim
        return keys, keys, self.num_heads * self.value_dim

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, deep networks from normal numbers; begin with small steps."""
        super().reset_parameters()
        with torch.no_grad():
            for part, start in zip(self.rates.bias.chunk(4), (-3.0, -5.0, -2.0, 2.0)):
                part.fill_(start)
            for each in self.initial:  # a matrix learns from 0
                each.normal_(0, each.shape[1] ** -0.5 if self.depth > 1 else 0)
            for d in range(self.degree + 1):
                self.coefficients[d] = 1 / math.factorial(d)

    @property
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights of the networks (H, K, V) before the first step, one matrix for each layer."""
        return tuple(self.memory)

    def features(self, rows: Tensor) -> Tensor:
        """Return the products (..., F) of at most p columns of rows (..., D), with their coefficients."""
        columns, coefficients = rows.split(1, -1), self.coefficients.to(rows.dtype)
        products, found = torch.ones_like(columns[0]), [coefficients[:1].expand_as(columns[0])]
        for d in range(1, self.degree + 1):
            # Each column times the products, one shorter, of itself and later ones: those are the last.
            counts = [math.comb(len(columns) - i + d - 2, d - 1) for i in range(len(columns))]
            products = torch.cat([each * products[..., -n:] for each, n in zip(columns, counts)], -1)
            found.append(coefficients[d] * products)
        return torch.cat(found, -1)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence; the rates (B, H, L, 2) are η and γ."""
        rows, past = self.conv.run(self.qkv(x), past, layout)
        query, key, value = (heads(each, self.num_heads) for each in rows.split(self._widths, -1))
        query, key = (self.features(unit(each)) for each in (query, key))
        gates = self.rates(x).to(query.dtype).transpose(1, 2)
        rate, forget, momentum, gamma = gates.chunk(4, 1)
        rates = torch.stack([rate, gamma], -1).sigmoid()
        decay, momentum, gate = F.logsigmoid(-forget), F.logsigmoid(momentum), F.silu(self.gate(x))
        return Terms(query, key, value.to(query.dtype), decay, rates, log_momentum=momentum, gate=gate), past

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, V), and the state after the last step."""
        assert terms.rate is not None and terms.log_decay is not None and terms.log_momentum is not None
        how, rows = Learning(self.window, self.block_size, self.muon), (terms.query, terms.key, terms.value)
        earlier = (state[0], state[1], state[2]) if state else None
        gates = terms.rate, terms.log_decay, terms.log_momentum
        return omega_recurrence(rows, *gates, self.initial, how, layout, earlier)

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        sizes = f"key_dim={self.key_dim}, value_dim={self.value_dim}, degree={self.degree}, depth={self.depth}"
        steps = f"window={self.window}, block_size={self.block_size}"
        return f"{super().extra_repr()}, {sizes}, {steps}" + ("" if self.muon else ", muon=False")
