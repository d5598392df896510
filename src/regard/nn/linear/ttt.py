"""TTT layers: the state of each head is a network that learns to map keys to values, by gradient descent as it reads.

Dimensions: B batch, L steps, E width, H heads, D width of a head, C steps of a block, P numbers of a head's network.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import flag, positive, size
from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import Made, RecurrentAttention, Terms, heads
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.linear.trained_state import Blocks, Training, trained_recurrence
from regard.nn.positions.rotary import Rotary, Rotation


class TrainedState(NamedTuple):
    """The state of a layer whose memory is a network, after earlier steps.

    Attributes
    ----------
    matrix : Tensor (B, H, 2 or 3, P)
        The weights of each head's network at the start of the current block, unless each step is one, and now, less the
        initial ones, and their momentum if there is one; in float32 for 16-bit layers.
    steps : Tensor (B,) of int
        Steps of the current block so far.
    past : Tensor (B, w − 1, C)
        The last rows that the short convolution reads.
    """

    matrix: Tensor
    steps: Tensor
    past: Tensor


class TrainedMemory(RecurrentAttention):
    """What layers share whose state is a network: its initial weights, and no effective weights."""

    state_type: type[Any] = TrainedState

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the network's from N(0, 0.02²), and set scales to 1, biases to 0."""
        super().reset_parameters()
        with torch.no_grad():
            for each in self.initial:
                each.normal_(0, 0.02)

    @property
    @abstractmethod
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights of the networks (H, K, V) before the first step, one matrix for each layer."""

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> NoReturn:  # noqa: ARG002
        """Raise: the outputs are not linear in the values."""
        expected = "be None, as a network that learns has no effective weights of steps"
        raise rejected(type(self).__name__, "return_aux", expected, "weights=True")


class _TTT(TrainedMemory):
    """What TTT-Linear and TTT-MLP share: all but the network."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        block_size: int = 16,
        learning_rate: float = 1.0,
        conv_size: int = 4,
        rotary: bool = True,
        output_gate: bool = True,
        norm_eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H, D = self.embed_dim, self.num_heads, self.head_width("head_dim", head_dim)
        self.head_dim, self.block_size = D, size(self, "block_size", block_size)
        self.learning_rate = positive(self, "learning_rate", learning_rate)
        if flag(self, "rotary", rotary) and D % 2:
            raise rejected(type(self).__name__, "head_dim", "be even with rotary positions", D)
        self.rotary = Rotary(D) if rotary else None
        self.qk = nn.Linear(E, H * D, bias=False, **where)
        self.value = nn.Linear(E, H * D, bias=False, **where)
        self.conv = ShortConvolution(2 * H * D, conv_size, bias=True, activation=False, **where)
        self.rate = nn.Linear(E, H, **where)
        self.share = parameter(self.block_size, **where)
        self.scale, self.shift = parameter(H, D, **where), parameter(H, D, **where)
        self._add_network(H, D, where)
        self.gate = nn.Linear(E, H * D, bias=False, **where) if flag(self, "output_gate", output_gate) else None
        self.norm_eps = positive(self, "norm_eps", norm_eps)
        self.norm = nn.LayerNorm(H * D, eps=self.norm_eps, **where)
        self.out = nn.Linear(H * D, E, bias=False, **where)
        self.reset_parameters()

    @abstractmethod
    def _add_network(self, H: int, D: int, where: dict[str, Any]) -> None:
        """Set the network's parameters, whose last rows are biases."""

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, the network's from N(0, 0.02²), and set scales to 1, biases to 0."""
        super().reset_parameters()
        with torch.no_grad():
            self.share.zero_()
            self.scale.fill_(1)
            self.shift.zero_()
            for each in self.initial:
                each[:, -1] = 0

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        H, wide = self.num_heads, torch.promote_types(x.dtype, torch.float32)
        rows = self.qk(x)
        rows, past = self.conv.run(torch.cat([rows, rows], -1), past, layout)
        query, key = (heads(each, H).to(wide) for each in rows.chunk(2, -1))
        rate = self.rate(x).to(wide).sigmoid().transpose(1, 2) * (self.learning_rate / self.head_dim)
        gate = None if self.gate is None else F.gelu(self.gate(x), approximate="tanh")
        return Terms(query, key, heads(self.value(x), H).to(wide), rate=rate, gate=gate), past

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, D), and the state after the last step."""
        query, key, dtype = terms.query, terms.key, terms.value.dtype
        assert terms.rate is not None
        blocks = Blocks(layout, key, self.block_size, state[1] if state else None)
        if self.rotary is not None:
            angles = self.rotary.rotation(blocks.place, dtype)
            query, key = self.rotary.turn(query, angles), self.rotary.turn(key, angles)
        share = self.share.to(dtype) + 1 / torch.arange(1, self.block_size + 1, dtype=dtype, device=key.device)
        norm = self.scale.to(dtype), self.shift.to(dtype)
        how = Training(
            terms.rate,
            share=share.clamp(min=0)[blocks.place].unsqueeze(1).expand_as(terms.rate),
            bias=True,
            norm=norm,
            norm_eps=self.norm_eps,
        )
        read, matrix = trained_recurrence(
            query, key, terms.value, self.initial, how, blocks, state[0] if state else None
        )
        unit = F.layer_norm(read, read.shape[-1:], eps=self.norm_eps)
        rows = query + unit * norm[0].unsqueeze(1) + norm[1].unsqueeze(1)
        return layout.clear(rows.transpose(1, 2)).transpose(1, 2), (matrix, blocks.count)

    def normed(self, read: Tensor) -> Tensor:
        """Return what the heads read (B, L, H, D), normed over all of them, as rows (B, L, H · D)."""
        rows: Tensor = self.norm(read.flatten(-2))
        return rows

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, head_dim={self.head_dim}, block_size={self.block_size}"


_LEARNED = "W_QK, W_V, W_G (H·D, E), w (H, E), s (C), γ, β (H, D), convolution, norm, W_O (E, H·D)"


@mechanism(
    formula="W_t = W − s_t Σ_{j≤t} η_j k_j g_jᵀ, g = ∂ ½|k + LN(kW) − v|²; y = norm(q + LN(qW_t)) ⊙ GELU(W_G x) · W_O",
    sources=("sun2024ttt",),
    learned=f"W (H, D + 1, D), {_LEARNED}",
    cost="O(L·E² + L·E·(D + C))",
    causal="yes",
    cache="2·H·D² and the convolution's steps",
)
class TTTLinear(_TTT):
    """TTT-Linear: the state is a linear model that learns by gradient descent on what it reads (Sun 2024).

    The model of a head, ``f(x) = x + LN(x W + b) γ + β``, learns to map keys to values: step t adds the gradient of its
    loss ``½ |f(k) − v|²`` by W and b, and the head's output is f(q) with the weights after it (arXiv 2407.04620). The
    gradients of a block of C steps are all taken at the weights before the block, so that its steps run together. With
    the gradients G of the block's steps, ``W_t = W − s_t Σ_{j≤t} η_j G_j``, at the rate ``η = learning_rate · σ(w x) /
    D``, and with a learned share ``s_t`` for each place in the block, at first 1/t: steps move W by their mean.

    This is the authors' layer: queries and keys share a projection and have a convolution each, are rotated by their
    place in the block, and the output is normed, and gated by GELU(W_G x). Padding does not count, and blocks begin
    anew with each document. What is learned within a layer's call are not its parameters; these are trained through it.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    block_size : int, default 16
        Steps C of a block.
    learning_rate : float, default 1.0
    conv_size : int, default 4
        Steps that the short convolutions read.
    rotary : bool, default True
        Whether to rotate queries and keys by their place in the block.
    output_gate : bool, default True
    norm_eps : float, default 1e-6
        Of the norms inside and outside the network.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, TTTLinear
    >>> layer, x, cache = TTTLinear(16, 2, block_size=4).eval(), torch.randn(3, 9, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def _add_network(self, H: int, D: int, where: dict[str, Any]) -> None:
        self.memory = parameter(H, D + 1, D, **where)

    @property
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights before the first step (H, D + 1, D)."""
        return (self.memory,)


@mechanism(
    formula="as TTT-Linear, with f(x) = x + LN(GELU(xW₁)W₂) in place of x + LN(xW)",
    sources=("sun2024ttt",),
    learned=f"W₁ (H, D + 1, 4·D), W₂ (H, 4·D + 1, D), {_LEARNED}",
    cost="O(L·E² + L·E·(D + C))",
    causal="yes",
    cache="16·H·D² and the convolution's steps",
)
class TTTMLP(_TTT):
    """TTT-MLP: :class:`TTTLinear` with a network of two layers as its state (Sun 2024, arXiv 2407.04620).

    The network of a head is ``f(x) = x + LN(GELU(x W₁ + b₁) W₂ + b₂) γ + β``, 4·D wide inside.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    head_dim, block_size, conv_size, rotary, output_gate, norm_eps, device, dtype : optional
        See :class:`TTTLinear`.
    learning_rate : float, default 0.1

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, TTTMLP
    >>> layer, x, cache = TTTMLP(16, 2, block_size=4).eval(), torch.randn(3, 9, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(self, embed_dim: int, num_heads: int, *, learning_rate: float = 0.1, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, learning_rate=learning_rate, **options)

    def _add_network(self, H: int, D: int, where: dict[str, Any]) -> None:
        self.memory_in, self.memory_out = parameter(H, D + 1, 4 * D, **where), parameter(H, 4 * D + 1, D, **where)

    @property
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights before the first step, (H, D + 1, 4·D) and (H, 4·D + 1, D)."""
        return self.memory_in, self.memory_out
