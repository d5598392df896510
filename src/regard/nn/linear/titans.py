"""Titans: a memory that learns as it reads, with momentum and forgetting, and its combinations with attention.

Dimensions: B batch, L steps, E width, H heads, D width of a head, C steps of a block, P numbers of a head's network.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import is_symbolic
from regard.functional import attention
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import Made, Terms, heads, unit
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.linear.trained_state import (
    Blocks,
    Targets,
    Trained,
    Training,
    finite,
    gradients,
    heightened,
    read,
    recalled,
    spoil,
    stepwise,
    sums_of,
    trained_recurrence,
)
from regard.nn.linear.ttt import TrainedMemory
from regard.nn.linear.window import window_attention
from regard.nn.positions.rotary import Rotary, Rotation

#: Steps that are computed together where each learns from the one before.
_TOGETHER = 32


class _Titans(TrainedMemory):
    """What all of Titans share: the memory, its projections and its gates."""

    conv: ShortConvolution

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int | None,
        depth: int,
        block_size: int | None,
        where: dict[str, Any],
    ) -> None:
        super().__init__(embed_dim, num_heads)
        E, H, D = self.embed_dim, self.num_heads, self.head_width("head_dim", head_dim)
        self.head_dim, self.depth = D, size(self, "depth", depth)
        if block_size is None:
            block_size = 1 if self.depth == 1 else 16
        self.block_size = size(self, "block_size", block_size)
        self.qkv = nn.Linear(E, 3 * H * D, bias=False, **where)
        self.rates = nn.Linear(E, 3 * H, **where)  # of θ, α and η
        widths = [D, *[4 * D] * (self.depth - 1), D]
        self.memory = nn.ParameterList(parameter(H, a, b, **where) for a, b in pairwise(widths))

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, deep networks from normal numbers; begin with little forgetting."""
        super().reset_parameters()
        # Step by step, half of what a key finds is replaced, as the delta rule begins. The steps of a block add up:
        # even 16 along one key do not overshoot.
        rate = -math.log(3) if self._stepwise else -3.0
        with torch.no_grad():
            for part, start in zip(self.rates.bias.chunk(3), (rate, -5.0, -2.0)):
                part.fill_(start)
            for each in self.initial:  # a matrix learns from 0, as that of the delta rule does; layers could not
                each.normal_(0, each.shape[1] ** -0.5 if self.depth > 1 else 0)

    @property
    def _stepwise(self) -> bool:
        """Whether each step's gradient is at the weights before it, and the memory a matrix: a linear recurrence."""
        return self.block_size == 1 and self.depth == 1

    @property
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights of the networks (H, K, V) before the first step, one matrix for each layer."""
        return tuple(self.memory)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        rows, past = self.conv.run(self.qkv(x), past, layout)
        query, key, value = (heads(each, self.num_heads) for each in rows.chunk(3, -1))
        query, key = unit(query), unit(key)
        rate, decay, momentum = self._gates(x)
        return Terms(query, key, value.to(query.dtype), decay, rate, log_momentum=momentum), past

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return 2θ, log(1 − α) and log η (B, H, L) of rows (B, L, E)."""
        rows = self.rates(x).to(torch.promote_types(x.dtype, torch.float32))
        rate, forget, momentum = rows.transpose(1, 2).chunk(3, 1)
        return 2 * rate.sigmoid(), F.logsigmoid(-forget), F.logsigmoid(momentum)

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, D), and the state after the last step."""
        assert terms.rate is not None
        length, step = terms.key.shape[2], self._stepwise
        # An exported program cannot loop over blocks whose number it does not know.
        block = length if is_symbolic(length) else _TOGETHER
        begun = state[1] if state and not step else None
        blocks = Blocks(layout, terms.key, block if step else self.block_size, begun)
        how = Training(terms.rate, terms.log_decay, terms.log_momentum, stepwise=step)
        earlier = state[0] if state else None
        found, matrix = trained_recurrence(terms.query, terms.key, terms.value, self.initial, how, blocks, earlier)
        return found, (matrix, torch.zeros_like(blocks.count) if step else blocks.count)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, head_dim={self.head_dim}, depth={self.depth}, {self._steps_repr()}"

    def _steps_repr(self) -> str:
        return f"block_size={self.block_size}"


@mechanism(
    formula="S ← η S − θ ∇_M |M(k) − v|²; M ← (1 − α) M + S; y = norm(M(q)) ⊙ SiLU(W_G x) · W_O",
    sources=("behrouz2024",),
    learned="W_QKV (3·H·D, E), W_G (H·D, E), w (3·H, E), M, convolution, norm (D), W_O (E, H·D)",
    cost="O(L·E² + L·E·(D + C))",
    causal="yes",
    cache="2·H·D² and the convolution's steps",
)
class TitansMemory(_Titans):
    """Titans' neural memory: a network that learns by gradient descent with momentum, and forgets (Behrouz 2024).

    The network M of a head learns to map keys to values (arXiv 2501.00663): step t adds the gradient of its surprise
    ``|M(k) − v|²`` to the momentum, ``S ← η S − θ ∇``, the weights follow, ``M ← (1 − α) M + S``, and the head reads
    M(q). The rate θ, the forgetting α and η are between 0 and 1, per head and step: sigmoids of linear maps of the row.
    Each gradient is taken at the weights before its step; a deep network takes those of a block of C steps at the
    weights before the block, so that its steps run together. With ``depth=1``, α = 0 and η = 0, this is the delta rule.

    Queries, keys and values pass a short convolution with SiLU, queries and keys are divided by their norm, and each
    head's output passes an RMS norm, times a gate SiLU(W_G x). Padding does not count, and blocks begin anew with each
    document.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    depth : int, default 1
        Layers of the network: 1 is a matrix; more are 4·D wide inside, with GELU between.
    block_size : int, optional
        Steps C of a block; defaults to 1 for a matrix, and to 16 for a deep network. Larger blocks forget more of what
        they read: their steps add up, without regard for what the block has already stored under the same keys.
    conv_size : int, default 4
        Steps that the short convolution reads.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, TitansMemory
    >>> layer, x, cache = TitansMemory(16, 2, block_size=4).eval(), torch.randn(3, 9, 16), LinearCache()
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
        depth: int = 1,
        block_size: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, head_dim, depth, block_size, where)
        E, inner = self.embed_dim, self.num_heads * self.head_dim
        self.conv = ShortConvolution(3 * inner, conv_size, **where)
        self.gate = nn.Linear(E, inner, bias=False, **where)
        self.norm = nn.RMSNorm(self.head_dim, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(inner, E, bias=False, **where)
        self.reset_parameters()

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:
        """Return the terms of the recurrence."""
        terms, past = super().terms(x, past, layout, rotation)
        return terms._replace(gate=F.silu(self.gate(x))), past


class WindowState(NamedTuple):
    """The state of a layer that combines Titans' memory with attention, after earlier steps.

    Attributes
    ----------
    matrix : Tensor (B, H, 2 or 3, P)
    steps : Tensor (B,) of int
        See :class:`TrainedState`.
    window : Tensor (B, N, C)
        The keys and values that the next steps see.
    past : Tensor (B, w − 1, C)
        The last rows that the short convolution reads; w is 1 where there is none.
    """

    matrix: Tensor
    steps: Tensor
    window: Tensor
    past: Tensor


class _Combined(_Titans):
    """What the combinations with attention share: its projections and its persistent keys and values."""

    state_type: type[Any] = WindowState

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        depth: int,
        block_size: int | None,
        num_persistent: int,
        norm_eps: float,
        where: dict[str, Any],
    ) -> None:
        super().__init__(embed_dim, num_heads, None, depth, block_size, where)
        E, H, D = self.embed_dim, self.num_heads, self.head_dim
        if D % 2:
            raise rejected(type(self).__name__, "num_heads", "give heads of an even width, for rotary positions", D)
        self.num_persistent = size(self, "num_persistent", num_persistent)
        self.attended = nn.Linear(E, 3 * E, bias=False, **where)
        self.persistent = parameter(2, H, self.num_persistent, D, **where)
        self.rotary = Rotary(D)
        self.norm_eps = positive(self, "norm_eps", norm_eps)
        self.out = nn.Linear(E, E, bias=False, **where)

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the rest from normal numbers, and begin with small steps."""
        super().reset_parameters()
        nn.init.normal_(self.persistent, std=0.02)

    def _attended(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, L, D) of rows (B, L, E)."""
        query, key, value = (heads(each, self.num_heads) for each in self.attended(rows).chunk(3, -1))
        return query, key, value

    def _near(
        self, rows: tuple[Tensor, Tensor, Tensor], window: int, layout: Layout, past: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what attention to a window and the persistent keys reads (B, H, L, D), and the keys of next steps."""
        return window_attention(rows, window, layout, past, self.rotary, self.persistent)


class _Gated(_Combined):
    """A combination whose output is attention's, gated by the memory's."""

    memory_norm: nn.RMSNorm

    def _add_own(self, where: dict[str, Any]) -> None:
        self.norm = nn.RMSNorm(self.embed_dim, eps=self.norm_eps, **where)
        self.memory_norm = nn.RMSNorm(self.embed_dim, eps=self.norm_eps, **where)

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:  # noqa: ARG002
        """Return the rows (B, L, E), from what attention and the memory read (B, L, H, 2·D)."""
        near, memory = (each.flatten(-2) for each in read.chunk(2, -1))
        rows: Tensor = self.out(self.norm(near) * torch.sigmoid(self.memory_norm(memory)))
        return rows


class _Windowed(_Combined):
    """A combination with attention to a window of steps, beside or after the memory."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        window: int = 64,
        depth: int = 1,
        block_size: int | None = None,
        conv_size: int = 4,
        num_persistent: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, depth, block_size, num_persistent, norm_eps, where)
        self.window = size(self, "window", window)
        self.conv = ShortConvolution(3 * self.embed_dim, conv_size, **where)
        self._add_own(where)
        self.reset_parameters()

    @abstractmethod
    def _add_own(self, where: dict[str, Any]) -> None:
        """Set the parameters that the combination has of its own."""

    def _steps_repr(self) -> str:
        return f"{super()._steps_repr()}, window={self.window}"


_LEARNED = "W_QKV, W'_QKV (3·E, E), w (3·H, E), M, persistent keys and values (2·N·E)"


@mechanism(
    formula="y = Attn([p ‖ x of a window]), m = M(q) as in TitansMemory; o = (norm(y) ⊙ σ(norm(m))) · W_O",
    sources=("behrouz2024",),
    learned=f"{_LEARNED}, convolution, norms, W_O (E, E)",
    cost="O(L·E² + L·E·(D + C + w))",
    causal="yes",
    cache="2·H·D² and 2·w·E",
)
class TitansMAG(_Gated, _Windowed):
    """Titans with memory as a gate: attention to a window, gated by the memory of everything before (Behrouz 2024).

    Each step attends to the last ``window`` steps, itself included, and to persistent keys and values, which are
    learned; beside it runs :class:`TitansMemory` (arXiv 2501.00663). Their outputs y and m are normed and combined as
    ``norm(y) ⊙ σ(norm(m))``. Attention has rotary positions. The initial weights of the memory are what the paper's
    persistent tokens are to it.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    window : int, default 64
        Steps that attention sees, itself included.
    depth, block_size, conv_size : int
        Of the memory, see :class:`TitansMemory`.
    num_persistent : int, default 4
        Number N of persistent keys and values of each head.
    norm_eps : float, default 1e-5
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, TitansMAG
    >>> layer, x, cache = TitansMAG(16, 2, window=4, block_size=4).eval(), torch.randn(3, 9, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:
        """Return the terms of the recurrence."""
        terms, past = super().terms(x, past, layout, rotation)
        return terms._replace(attended=self._attended(x)), past

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what attention and the memory read (B, H, L, 2·D), and the state after the last step."""
        assert terms.attended is not None
        near, rows = self._near(terms.attended, self.window, layout, state[2] if state else None)
        read, end = super().recur(terms, layout, before, *state)
        return torch.cat([near.to(read.dtype), layout.clear(read.transpose(1, 2)).transpose(1, 2)], -1), (*end, rows)


@mechanism(
    formula="m = norm(M(q)) ⊙ SiLU(W_G x) · W_M as in TitansMemory; o = Attn([p ‖ m of a window]) · W_O",
    sources=("behrouz2024",),
    learned=f"{_LEARNED}, W_G, W_M (E, E), convolution, norm (D), W_O (E, E)",
    cost="O(L·E² + L·E·(D + C + w))",
    causal="yes",
    cache="2·H·D² and 2·w·E",
)
class TitansMAL(_Windowed):
    """Titans with memory as a layer: attention to a window of what the memory makes of each step (Behrouz 2024).

    The rows pass :class:`TitansMemory`, and its output attention to the last ``window`` steps and to persistent keys
    and values (arXiv 2501.00663).

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    window, depth, block_size, conv_size, num_persistent, norm_eps, device, dtype : optional
        See :class:`TitansMAG`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, TitansMAL
    >>> layer, x, cache = TitansMAL(16, 2, window=4, block_size=4).eval(), torch.randn(3, 9, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def _add_own(self, where: dict[str, Any]) -> None:
        E = self.embed_dim
        self.gate = nn.Linear(E, E, bias=False, **where)
        self.norm = nn.RMSNorm(self.head_dim, eps=self.norm_eps, **where)
        self.memory_out = nn.Linear(E, E, bias=False, **where)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:
        """Return the terms of the recurrence."""
        terms, past = super().terms(x, past, layout, rotation)
        return terms._replace(gate=F.silu(self.gate(x))), past

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what attention reads (B, H, L, D), and the state after the last step."""
        read, end = super().recur(terms, layout, before, *state)
        assert terms.gate is not None
        dtype = self.memory_out.weight.dtype  # autocast is off
        rows = self.memory_out(self.normed(read.transpose(1, 2).to(dtype)) * terms.gate.to(dtype))
        near, last = self._near(self._attended(rows), self.window, layout, state[2] if state else None)
        return near, (*end, last)

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:  # noqa: ARG002
        """Return the rows (B, L, E), from what attention read (B, L, H, D)."""
        rows: Tensor = self.out(read.flatten(-2))
        return rows


@mechanism(
    formula="h = norm(M(q(x))); y = Attn([p ‖ h ‖ x of a segment]); M learns y; o = (norm(y) ⊙ σ(norm(M(q(y))))) · W_O",
    sources=("behrouz2024",),
    learned=f"{_LEARNED}, W_Y, W_O (E, E), norms",
    cost="O(L·E² + L·E·(D + C))",
    causal="yes",
    cache="3·H·D² and 4·C·E",
)
class TitansMAC(_Gated):
    """Titans with memory as context: attention within a segment, to what the memory recalls for it (Behrouz 2024).

    The memory before a segment of C steps recalls ``h = norm(M(q))`` for each of its rows (arXiv 2501.00663); a step
    attends to persistent keys and values, to its segment so far, and to what was recalled for the steps so far; the
    memory then learns from attention's output y, and answers it: the output is ``norm(y) ⊙ σ(norm(M(q(y))))``. As
    attention to what was recalled is causal, too, and each step is answered by the memory that has learned the steps
    up to it, no step knows a later one. A deep network takes the gradients of a segment at the weights before it.

    The gates of the memory are maps of y. In place of short convolutions, queries, keys and values pass SiLU alone.
    Attention has rotary positions within the segment.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    segment : int, default 64
        Steps C of a segment.
    depth, num_persistent, norm_eps, device, dtype : optional
        See :class:`TitansMAG`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, TitansMAC
    >>> layer, x, cache = TitansMAC(16, 2, segment=4).eval(), torch.randn(3, 9, 16), LinearCache()
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
        segment: int = 64,
        depth: int = 1,
        num_persistent: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        self.segment = size(self, "segment", segment)
        block_size = self.segment if depth != 1 else 1
        super().__init__(embed_dim, num_heads, depth, block_size, num_persistent, norm_eps, where)
        self._add_own(where)
        self.attended_out = nn.Linear(self.embed_dim, self.embed_dim, bias=False, **where)
        self.recalled_norm = nn.RMSNorm(self.embed_dim, eps=self.norm_eps, **where)
        self.reset_parameters()

    def _steps_repr(self) -> str:
        return f"segment={self.segment}"

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence: of attention, and the queries of what is recalled."""
        query, key, value = self._attended(x)
        recalled, _, _ = self._remembered(x)
        return Terms(recalled, key, value, attended=(query, key, value)), x[:, :0]

    def _remembered(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the memory's queries, keys and values (B, H, L, D) of rows (B, L, E)."""
        query, key, value = (heads(each, self.num_heads) for each in F.silu(self.qkv(rows)).chunk(3, -1))
        query, key = unit(query), unit(key)
        return query, key, value.to(query.dtype)

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what attention and the memory read (B, H, L, 2·D), and the state after the last step."""
        assert terms.attended is not None
        blocks = Blocks(layout, terms.key, self.segment, state[1] if state else None)
        given, spoiled = finite(layout, terms.query, *terms.attended)
        recalling, *attended = (blocks.split(each).unbind() for each in given if each is not None)
        wide, H, batch = terms.query.dtype, self.num_heads, terms.query.shape[0]
        initial = [each.to(wide) for each in self.initial]
        memory = Trained.unpacked(initial, batch, True, state[0] if state else None)
        context = state[2].unflatten(-1, (4, -1)) if state else None
        found = []
        for n, pair in enumerate(zip(recalling, *attended)):
            memory = memory.opened(initial, blocks.fresh[n])
            known, *near = (each.unflatten(0, (batch, H)) for each in (recalled(memory, pair[0]), *pair[1:]))
            near = [each.to(self.out.weight.dtype) for each in near]  # autocast is off
            rows, context = self._segment(near, known, context, blocks, n)
            query, key, value = (each.flatten(0, 1) for each in self._remembered(rows))
            rate, decay, momentum = (each.flatten(0, 1).unsqueeze(0) for each in self._gates(rows))
            sums = sums_of(rate, decay, momentum, None, blocks.of_heads(blocks.steps[n : n + 1]))
            keys, values = key.unsqueeze(0), value.unsqueeze(0)
            if self._stepwise:
                first, goals = stepwise(keys, values, sums)
                steps = gradients(Trained(memory.held), first[0], goals[0], Targets(values), bias=False)
            else:
                steps = gradients(memory, heightened(key, memory.held[0]), value, Targets(values), bias=False)
            answer = read(query.unsqueeze(0), keys, sums, [memory], [steps], bias=False)[0].unflatten(0, (batch, H))
            memory = memory.after(steps, sums.blocks(keys)[0], blocks.ends[n])
            found.append(torch.cat([heads(rows, H).to(wide), answer], -1).flatten(0, 1).unsqueeze(0))
        output = blocks.joined(found, terms.query.repeat(1, 1, 1, 2))
        output, matrix = spoil(output, memory.packed(initial, batch), spoiled)
        if context is None:
            context = terms.value.new_zeros(output.shape[0], self.segment, 4, self.embed_dim)
        return output, (matrix, blocks.count, context.flatten(-2))

    def _segment(
        self, attended: list[Tensor], recalled: Tensor, context: Tensor | None, blocks: Blocks, n: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention (B, C, E) in block n, and the keys and values of the segment so far.

        These are (B, C, 4, E), of what was recalled and of the rows; None if the segment is complete.
        """
        (query, key, value), C, H = attended, self.segment, self.num_heads
        B, _, W, _ = query.shape  # W ≤ C
        own, slots = (torch.arange(each, device=query.device) for each in (W, C))
        begun = blocks.begun[n].unsqueeze(-1)  # (B or 1, 1)
        recalled = recalled.transpose(1, 2).flatten(2).to(self.attended.weight.dtype)
        _, *others = self._attended(self.recalled_norm(recalled))
        rows = torch.stack([each.transpose(1, 2).flatten(2) for each in (*others, key, value)], 2)  # (B, W, 4, E)
        place, seen, known = (begun + own).expand(B, W), (own <= own.unsqueeze(-1)).expand(B, W, W), rows
        places = place
        if n == 0 and context is not None:  # the segment began before
            known, places = torch.cat([context, rows], 1), torch.cat([slots.expand(B, C), place], 1)
            seen = torch.cat([(slots < begun).unsqueeze(1).expand(B, W, C), seen], -1)
        keys = self.rotary.rotation(places, query.dtype)
        pairs = [heads(each, H) for each in known.unbind(2)]
        first = [each.to(query.dtype).expand(B, -1, -1, -1) for each in self.persistent]
        key = torch.cat([first[0], *(self.rotary.turn(each, keys) for each in pairs[::2])], 2)
        value = torch.cat([first[1], *pairs[1::2]], 2)
        query = self.rotary.turn(query, self.rotary.rotation(place, query.dtype))
        mask = torch.cat([seen.new_ones(B, W, self.num_persistent), seen, seen], -1)
        read = attention(query, key, value, mask.unsqueeze(1))
        output = self.attended_out(read.transpose(1, 2).flatten(2))
        steps, ends = blocks.steps[n].unsqueeze(-1), blocks.ends[n]
        if ends is True:
            return output, None
        rows = F.pad(rows, (0, 0, 0, 0, 0, C - W))
        if n == 0 and context is not None:
            index = torch.where(slots < begun, slots, C + slots - begun).clamp(max=C + W - 1)
            rows = known.gather(1, index.view(B, C, 1, 1).expand_as(rows))
        held = slots < begun + steps
        if ends is not False:
            held = held & ~ends.unsqueeze(-1)
        rows = torch.where(held.expand(B, C)[..., None, None], rows, 0.0)
        if context is not None:
            rows = torch.where(steps[..., None, None] > 0, rows, context)
        return output, rows
