"""LaCT: a network that learns once for each large chunk of steps, and attention to a window for what is near.

Dimensions: B batch, L steps, E width, A heads of attention, H networks, D width of a network's rows, F of its hidden
layer, C steps of a chunk, w of a window, P numbers of a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.networks import Weights, added, chosen, packed, unpacked
from regard.nn.linear.orthogonal import orthogonalized
from regard.nn.linear.recurrent_attention import Made, Terms, heads, unit
from regard.nn.linear.trained_state import Blocks
from regard.nn.linear.ttt import TrainedMemory
from regard.nn.linear.window import window_attention
from regard.nn.positions.rotary import Rotary, Rotation


class ChunkState(NamedTuple):
    """The state of :class:`LaCT` after earlier steps.

    Attributes
    ----------
    matrix : Tensor (B, H, 2 or 3, P)
        Each network's weights less the initial ones, the gradients of the current chunk so far, and the momentum if
        there is one; in float32 for 16-bit layers.
    gates : Tensor (B, H)
        The sum of the momentum's gates in the current chunk.
    steps : Tensor (B,) of int
        Steps of the current chunk so far.
    window : Tensor (B, w − 1, 2·E + 1)
        The keys and values that attention sees next, and 1 for those that are there.
    past : Tensor (B, 0, E)
        Nothing: there is no convolution.
    """

    matrix: Tensor
    gates: Tensor
    steps: Tensor
    window: Tensor
    past: Tensor


def _applied(weights: Weights, rows: Tensor) -> Tensor:
    """Return what the networks make of rows (B, H, C, D)."""
    gate, up, down = weights
    return (F.silu(rows @ gate) * (rows @ up)) @ down


def _slopes(weights: Weights, key: Tensor, value: Tensor, rates: Tensor) -> Weights:
    """Return the gradients of ``Σ_j f(k_j)·v_j`` by the three matrices, each step times its rate (B, H, C, 3)."""
    gate, up, down = weights
    a, b = key @ gate, key @ up
    share, back = a.sigmoid(), value @ down.mT
    first, second, third = rates.split(1, -1)
    slope = back * b * share * (1 + a * (1 - share))
    return (first * key).mT @ slope, (second * key).mT @ (back * a * share), (third * a * share * b).mT @ value


class _Memory(NamedTuple):
    """The networks within a chunk: weights, gradients so far and perhaps a momentum; and the sum (B, H) of gates."""

    rows: list[Weights]
    gates: Tensor

    @classmethod
    def first(cls, initial: list[Tensor], batch: int, momentum: bool) -> _Memory:
        """Return the networks before the first step of a document."""
        weights = tuple(each.expand(batch, *each.shape) for each in initial)
        none = tuple(torch.zeros_like(each) for each in weights)
        rows = [weights, none, none] if momentum else [weights, none]
        return cls(rows, initial[0].new_zeros(batch, len(initial[0])))

    def where(self, which: Tensor | None, other: _Memory) -> _Memory:
        """Return this memory for the sequences (B,) that are chosen, None for all, and another one for the rest."""
        if which is None:
            return self
        gates = torch.where(which.unsqueeze(-1), self.gates, other.gates)
        return _Memory([chosen(which, a, b) for a, b in zip(self.rows, other.rows)], gates)

    def learned(self, initial: list[Tensor], chunk: int, muon: bool) -> _Memory:
        """Return the networks after a chunk."""
        weights, step, *momentum = self.rows
        for before in momentum:
            kept = (self.gates / chunk).unsqueeze(-1).unsqueeze(-1)
            step = tuple(a + kept * b for a, b in zip(step, before))
        moved = []
        for matrix, change, begin in zip(weights, step, initial):
            new = matrix + (orthogonalized(change) if muon else change)
            norm = torch.linalg.vector_norm(new, dim=-2, keepdim=True) + 1e-5
            moved.append(new / norm * torch.linalg.vector_norm(begin, dim=-2, keepdim=True))
        none = tuple(torch.zeros_like(each) for each in step)
        return _Memory([tuple(moved), none, *[step for _ in momentum]], torch.zeros_like(self.gates))


def chunk_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    gates: Tensor | None,
    initial: Sequence[Tensor],
    layout: Layout,
    chunk: int,
    muon: bool,
    state: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return what networks, which learn after each chunk, make of queries, and the state.

    Parameters
    ----------
    query, key, value : Tensor (B, H, L, D)
    rates : Tensor (B, H, L, 3)
        Of the three matrices.
    gates : Tensor (B, H, L), optional
        Of the momentum; None is none.
    initial : sequence of Tensor (H, K, V)
        The matrices before the first step of a document.
    layout : Layout
        Padding, which neither counts nor is learned, and documents.
    chunk : int
        Steps C of a chunk.
    muon : bool
        Whether steps are orthogonalized.
    state : tuple of Tensor (B, H, 2 or 3, P), (B, H) and (B,), or None
        After earlier steps; see :class:`ChunkState`.

    Returns
    -------
    output : Tensor (B, H, L, D)
    state : tuple of Tensor
    """
    blocks = Blocks(layout, key, chunk, None if state is None else state[2])
    momentum, rows = gates is not None, (query, key, value, rates, rates[..., 0] if gates is None else gates)
    queries, keys, values, rates, gates = (blocks.split(each).unflatten(1, query.shape[:2]) for each in rows)
    initial = [each.to(query.dtype) for each in initial]
    first, found = _Memory.first(initial, len(query), momentum), []
    memory = first
    if state is not None:
        weights, *others = unpacked(state[0], initial)
        memory = _Memory([added(weights, initial), *others], state[1])
    for n in range(blocks.number):
        fresh = blocks.fresh[n]
        memory = memory if fresh is None else first.where(fresh, memory)
        weights, sums, *others = memory.rows
        found.append(_applied(weights, queries[n]).flatten(0, 1).unsqueeze(0))
        sums = added(sums, _slopes(weights, keys[n], values[n], rates[n]))
        memory = _Memory([weights, sums, *others], memory.gates + gates[n].sum(-1))
        ends = blocks.ends[n]
        if ends is not False:  # Muon costs more than a step
            memory = memory.learned(initial, chunk, muon).where(None if ends is True else ends, memory)
    weights, *others = memory.rows
    matrix = packed([added(weights, initial, -1.0), *others])
    return blocks.joined(found, query), (matrix, memory.gates, blocks.count)


@mechanism(
    formula="o = (Attn(x of a window) + s ⊙ norm(f(q))) · W_O; per chunk M ← Σ η ∂f(k)·v + μ M, W ← norm(W + Muon(M))",
    sources=("zhang2025lact",),
    learned="W_QKV (3·E, E), norms, scales and shifts (2·E), W₁, W₂ (H, D, F), W₃ (H, F, D), w (5·H, E), W_O (E, E)",
    cost="O(L·E² + L·E·(F + w) + L/C·H·D²·F)",
    causal="yes",
    cache="3·H·D·F times 3, and 2·w·E",
)
class LaCT(TrainedMemory):
    """Large-chunk test-time training: a SwiGLU network that learns once per chunk, beside a window (Zhang 2025).

    A network ``f(x) = (SiLU(x W₁) ⊙ (x W₂)) W₃`` of each memory answers all queries of a chunk of C steps with the
    weights from before the chunk (arXiv 2505.23884). After the chunk it learns the chunk's keys and values by one step
    along the gradient of ``Σ_j η_j f(k_j)·v_j``: with momentum, ``M ← Σ + μ M``, orthogonalized by Muon, and followed
    by scaling each column of W back to its initial norm. What is nearer comes from softmax attention with rotary
    positions to a window, of the same queries, keys and values; both are added,
    ``(Attn + SiLU(W_s x) ⊙ norm(f(q))) W_O``.

    Queries and keys pass an RMS norm over their whole width. For the memory they get a scale and a shift per column,
    then, as values, SiLU; and queries and keys of a memory are divided by their norm, without positions. The rates η,
    one for each matrix, are softplus, the gates of the momentum sigmoids of linear maps of a row; μ is the mean of the
    chunk's. Chunks begin anew with each document, and padding does not count.

    Between chunks the state holds the chunk's sum of gradients, so that its size does not depend on C. A step that
    completes a chunk costs more than others, as it runs Muon.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of attention heads A.
    num_memories : int, optional
        Number of networks H, each for D = E/H columns; defaults to A. The paper has fewer and larger ones, such as 4.
    hidden_dim : int, optional
        Width F of a network's hidden layer; defaults to D.
    chunk_size : int, default 2048
        Steps C of a chunk.
    window : int, default 2048
        Steps w that attention sees, itself included. Steps of a chunk do not see each other through the memory, so
        that a window below C leaves some out.
    momentum, muon : bool, default True
        Whether the network learns with momentum, and orthogonalized steps.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LaCT, LinearCache
    >>> layer, cache = LaCT(16, 2, chunk_size=4, window=4, dtype=torch.float64).eval(), LinearCache()
    >>> x = torch.randn(3, 9, 16, dtype=torch.float64)
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    state_type: type[Any] = ChunkState

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_memories: int | None = None,
        hidden_dim: int | None = None,
        chunk_size: int = 2048,
        window: int = 2048,
        momentum: bool = True,
        muon: bool = True,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, A = self.embed_dim, self.num_heads
        width = self.head_width("head_dim", None)
        if width % 2:
            raise rejected("LaCT", "num_heads", "give heads of an even width, for rotary positions", width)
        self.num_memories = A if num_memories is None else size(self, "num_memories", num_memories)
        if E % self.num_memories:
            raise rejected("LaCT", "num_memories", f"divide embed_dim {E}", self.num_memories)
        D = E // self.num_memories
        self.hidden_dim = D if hidden_dim is None else size(self, "hidden_dim", hidden_dim)
        self.chunk_size, self.window = size(self, "chunk_size", chunk_size), size(self, "window", window)
        self.muon, eps = flag(self, "muon", muon), positive(self, "norm_eps", norm_eps)
        self.qkv = nn.Linear(E, 3 * E, bias=False, **where)
        self.query_norm, self.key_norm = (nn.RMSNorm(E, eps=eps, **where) for _ in range(2))
        self.rotary = Rotary(width)
        self.scale, self.shift = parameter(2, E, **where), parameter(2, E, **where)
        sizes = (D, self.hidden_dim), (D, self.hidden_dim), (self.hidden_dim, D)
        self.memory = nn.ParameterList(parameter(self.num_memories, a, b, **where) for a, b in sizes)
        self.rates = nn.Linear(E, 3 * self.num_memories, **where)
        self.momentum = nn.Linear(E, self.num_memories, **where) if flag(self, "momentum", momentum) else None
        self.share = nn.Linear(E, self.num_memories, **where)
        self.norm = nn.RMSNorm(D, eps=eps, **where)
        self.out = nn.Linear(E, E, bias=False, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the networks' from normal numbers, and begin with rates of 0.001."""
        super().reset_parameters()
        with torch.no_grad():
            for each in self.initial:
                each.normal_(0, each.shape[1] ** -0.5)
            self.scale.fill_(1)
            self.shift.zero_()
            self.rates.bias.fill_(math.log(math.expm1(1e-3)))

    @property
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights of the networks before the first step: W₁, W₂ (H, D, F) and W₃ (H, F, D)."""
        return tuple(self.memory)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the memory, whose rates are (B, H, L, 3), and of attention."""
        H, wide = self.num_memories, torch.promote_types(x.dtype, torch.float32)
        query, key, value = self.qkv(x).chunk(3, -1)
        query, key = self.query_norm(query), self.key_norm(key)
        attended = tuple(heads(each, self.num_heads) for each in (query, key, value))
        rows = [each * a + b for each, a, b in zip((query, key), self.scale, self.shift)]
        query, key, value = (F.silu(heads(each, H).to(wide)) for each in (*rows, value))
        rates = F.softplus(heads(self.rates(x).to(wide), H))
        gates = None if self.momentum is None else F.logsigmoid(self.momentum(x).to(wide)).transpose(1, 2)
        read: dict[str, Any] = {"attended": attended, "gate": F.silu(self.share(x))}
        return Terms(unit(query), unit(key), value, rate=rates, log_momentum=gates, **read), x[:, :0]

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what attention and the memory read (B, H, L, 2·D), and the state after the last step."""
        assert terms.attended is not None and terms.rate is not None
        near, window = window_attention(terms.attended, self.window, layout, state[3] if state else None, self.rotary)
        near = heads(near.transpose(1, 2).flatten(2), self.num_memories)
        gates = None if terms.log_momentum is None else terms.log_momentum.exp()
        rows = terms.query, terms.key, terms.value, terms.rate, gates
        earlier = (state[0], state[1], state[2]) if state else None
        read, end = chunk_recurrence(*rows, self.initial, layout, self.chunk_size, self.muon, earlier)
        read = layout.clear(read.transpose(1, 2)).transpose(1, 2)
        return torch.cat([near, read], -1), (*end, window)

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:  # noqa: ARG002
        """Return the rows (B, L, E), from what attention and the memory read (B, L, H, 2·D)."""
        near, memory = read.chunk(2, -1)
        assert terms.gate is not None
        rows: Tensor = self.out((near + self.norm(memory) * terms.gate.unsqueeze(-1)).flatten(-2))
        return rows

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        sizes = f"num_memories={self.num_memories}, hidden_dim={self.hidden_dim}"
        steps = f"chunk_size={self.chunk_size}, window={self.window}"
        less = ", momentum=False" if self.momentum is None else ""
        return f"{super().extra_repr()}, {sizes}, {steps}{less}" + ("" if self.muon else ", muon=False")
