"""Titans: a memory that learns as it reads, with momentum and forgetting, and its combinations with attention.

Dimensions: B batch, L steps, E width, H heads, D width of a head, C steps of a block, P numbers of a head's network.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import positive, size
from regard._utils.mechanism import mechanism
from regard.nn._base import parameter
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import Made, Terms, heads, unit
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.linear.trained_state import Training, trained
from regard.nn.linear.ttt import TrainedMemory
from regard.nn.positions.rotary import Rotation


@mechanism(
    formula="S ← η S − θ ∇_M |M(k) − v|²; M ← (1 − α) M + S; y = norm(M(q)) ⊙ SiLU(W_G x) · W_O",
    sources=("behrouz2024",),
    learned="W_QKV (3·H·D, E), W_G (H·D, E), w (3·H, E), M, convolution, norm (D), W_O (E, H·D)",
    cost="O(L·E² + L·E·(D + C))",
    causal="yes",
    cache="3·H·D² and the convolution's steps",
)
class TitansMemory(TrainedMemory):
    """Titans' neural memory: a network that learns by gradient descent with momentum, and forgets (Behrouz 2024).

    The network M of a head learns to map keys to values (arXiv 2501.00663): step t adds the gradient of its surprise
    ``|M(k) − v|²`` to the momentum, ``S ← η S − θ ∇``, the weights follow, ``M ← (1 − α) M + S``, and the head reads
    M(q). The rate θ, the forgetting α and η are between 0 and 1, per head and step: sigmoids of linear maps of the row.
    The gradients of a block of C steps are all taken at the weights before the block, so that its steps run together;
    with blocks of one step, ``depth=1``, α = 0 and η = 0, this is the delta rule.

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
    block_size : int, default 16
        Steps C of a block.
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
        block_size: int = 16,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads)
        E, H, D = self.embed_dim, self.num_heads, self.head_width("head_dim", head_dim)
        self.head_dim, self.depth = D, size(self, "depth", depth)
        self.block_size = size(self, "block_size", block_size)
        self.qkv = nn.Linear(E, 3 * H * D, bias=False, **where)
        self.conv = ShortConvolution(3 * H * D, conv_size, **where)
        self.rates = nn.Linear(E, 3 * H, **where)  # of θ, α and η
        widths = [D, *[4 * D] * (self.depth - 1), D]
        self.memory = nn.ParameterList(parameter(H, a, b, **where) for a, b in pairwise(widths))
        self.gate = nn.Linear(E, H * D, bias=False, **where)
        self.norm = nn.RMSNorm(D, eps=positive(self, "norm_eps", norm_eps), **where)
        self.out = nn.Linear(H * D, E, bias=False, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule and the network's from normal numbers; begin with small steps."""
        super().reset_parameters()
        with torch.no_grad():
            # A block's steps add up: large ones along one key would overshoot.
            for part, start in zip(self.rates.bias.chunk(3), (-4.0, -5.0, 0.0)):
                part.fill_(start)
            for each in self.initial if self.depth > 1 else ():
                each.normal_(0, each.shape[1] ** -0.5)

    @property
    def initial(self) -> tuple[nn.Parameter, ...]:
        """The weights of the networks (H, K, V) before the first step, one matrix for each layer."""
        return tuple(self.memory)

    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:  # noqa: ARG002
        """Return the terms of the recurrence."""
        rows, past = self.conv.run(self.qkv(x), past, layout)
        query, key, value = (heads(each, self.num_heads) for each in rows.chunk(3, -1))
        return self._gated(x, unit(query), unit(key), value), past

    def _gated(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Terms:
        """Return the terms with gates of rows (B, L, E)."""
        rate, forget, momentum = self.rates(x).to(query.dtype).transpose(1, 2).chunk(3, 1)
        return Terms(
            query,
            key,
            value.to(query.dtype),
            F.logsigmoid(-forget),
            2 * rate.sigmoid(),
            gate=F.silu(self.gate(x)),
            log_momentum=F.logsigmoid(momentum),
        )

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, D), and the state after the last step."""
        assert terms.rate is not None
        how = Training(self.block_size, terms.rate, terms.log_decay, terms.log_momentum)
        earlier = (state[0], state[1]) if state else None
        return trained(terms.query, terms.key, terms.value, self.initial, how, layout, earlier)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, head_dim={self.head_dim}, depth={self.depth}, block_size={self.block_size}"
