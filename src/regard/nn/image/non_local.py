"""Attention between all positions of an image (B, C, H, W): the non-local block, and SAGAN's self-attention."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from regard._utils.constraints import OneOf, size
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, parameter
from regard.nn.image.channels import image

Mode = Literal["gaussian", "embedded", "dot", "concat"]
MODES: tuple[Mode, ...] = get_args(Mode)


def places(x: Tensor) -> Tensor:
    """Return an image (B, C, H, W) as rows (B, N, C), N = H·W."""
    return x.flatten(2).mT


def picture(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows (B, N, C) as an image (B, C, H, W) of another's height and width."""
    return rows.mT.unflatten(2, like.shape[2:])


def pooled(rows: Tensor, like: Tensor, pool: int) -> Tensor:
    """Max-pool the rows (B, N, C) of an image over windows of pool × pool, which may be cut at the edges."""
    if pool == 1:
        return rows
    return places(F.max_pool2d(picture(rows, like), pool, ceil_mode=True))


def unfolded(weights: Tensor, like: Tensor, pool: int) -> Tensor:
    """Return weights (B, N, S) between positions as (B, H, W, Hk, Wk)."""
    H, W = like.shape[2:]
    H_pooled, W_pooled = ((side + pool - 1) // pool for side in (H, W))  # ONNX rounds −H // pool up
    return weights.unflatten(2, (H_pooled, W_pooled)).unflatten(1, (H, W))


def softmax_read(
    query: Tensor, key: Tensor, value: Tensor, engine: EngineLike, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return ``softmax(Q Kᵀ) V`` of rows (B, N, C), and the weights if ``wanted``."""
    q, k, v = (t.unsqueeze(1) for t in (query, key, value))
    if not wanted:
        return attention(q, k, v, scale=1.0, engine=engine).squeeze(1), None
    output, aux = attention(q, k, v, scale=1.0, engine=engine, return_aux=AuxRequest(weights=True))
    assert aux.weights is not None, "requested"
    return output.squeeze(1), aux.weights.squeeze(1)


@mechanism(
    formula="x + W_z y, y_i = Σ_j f(x_i, x_j) W_g x_j / C(x); f: exp x_iᵀx_j, exp θ_iᵀφ_j, θ_iᵀφ_j, ReLU(wᵀ[θ_i; φ_j])",
    sources=("wang2018",),
    learned="W_θ, W_φ, W_g (C', C), W_z (C, C'), w (2C')",
    cost="O(N²·C' + N·C·C'), dot: O(N·C'² + N·C·C'), N = H·W",
)
class NonLocalBlock(Layer):
    """Non-local block: each position attends to all positions of its image (Wang 2018, arXiv 1711.07971).

    ``z = W_z y + x`` with ``y_i = Σ_j f(x_i, x_j) g(x_j) / C(x)``, ``g(x_j) = W_g x_j``, and by ``mode``:

    - "gaussian": ``f = exp(x_iᵀ x_j)``, C(x) its sum over j;
    - "embedded": ``f = exp(θ_iᵀ φ_j)``, C(x) its sum over j, with ``θ_i = W_θ x_i``, ``φ_j = W_φ x_j``;
    - "dot": ``f = θ_iᵀ φ_j``, C(x) = N, the number of positions j;
    - "concat": ``f = ReLU(w_fᵀ [θ_i; φ_j])``, C(x) = N.

    The first two are softmax attention with scale 1, run by :func:`regard.attention`. The other two use no softmax:
    their weights do not sum to 1, and those of "dot" may be negative. "dot" materializes the N × N weights only if they
    are requested; "concat" always does.

    The block is initialized to the identity: W_z, or the scale of a batch norm after it, starts at zero.

    Parameters
    ----------
    channels : int
        Number of channels C.
    hidden_size : int, optional
        Number of features C' of the embeddings; defaults to max(1, C // 2).
    mode : {"embedded", "gaussian", "dot", "concat"}
    pool : int, default 1
        Side of the max-pooling windows of φ and g (of x and g in "gaussian"); 1 is no pooling. The paper subsamples by
        2.
    batch_norm : bool, default False
        Whether a batch norm follows W_z.
    bias : bool, default False
        Whether W_θ, W_φ, W_g and W_z add learned biases; the paper's formulas have none.
    engine : str, default "auto"
        See :func:`regard.attention`; not used by "dot" and "concat".
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import NonLocalBlock
    >>> x = torch.randn(2, 8, 5, 7)
    >>> output, weights = NonLocalBlock(8, pool=2)(x, return_map=True)
    >>> torch.equal(output, x), weights.shape
    (True, torch.Size([2, 5, 7, 3, 4]))
    """

    def __init__(
        self,
        channels: int,
        hidden_size: int | None = None,
        *,
        mode: Mode = "embedded",
        pool: int = 1,
        batch_norm: bool = False,
        bias: bool = False,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C = self.channels = size(self, "channels", channels)
        hidden = self.hidden_size = max(1, C // 2) if hidden_size is None else size(self, "hidden_size", hidden_size)
        OneOf(MODES)(self, "mode", mode)
        self.mode, self.pool, self.engine = mode, size(self, "pool", pool), engine
        embedded = mode != "gaussian"
        self.theta = nn.Linear(C, hidden, bias, device=device, dtype=dtype) if embedded else None
        self.phi = nn.Linear(C, hidden, bias, device=device, dtype=dtype) if embedded else None
        self.g = nn.Linear(C, hidden, bias, device=device, dtype=dtype)
        self.w_f = parameter(2 * hidden, device=device, dtype=dtype) if mode == "concat" else None
        self.w_z = nn.Linear(hidden, C, bias, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(C, device=device, dtype=dtype) if batch_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the embeddings as ``nn.Linear`` does, w_f uniformly in ±1/√(2C'), and the block to identity."""
        for part in (self.theta, self.phi, self.g, self.w_z):
            if part is not None:
                part.reset_parameters()
        if self.w_f is not None:
            bound = (2 * self.hidden_size) ** -0.5
            nn.init.uniform_(self.w_f, -bound, bound)
        if self.norm is not None:
            self.norm.reset_parameters()
            nn.init.zeros_(self.norm.weight)
        else:
            for each in self.w_z.parameters():
                nn.init.zeros_(each)

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image plus the attention output.

        Parameters
        ----------
        x : Tensor (B, C, H, W)
        return_map : bool, default False
            Whether to also return the weights.

        Returns
        -------
        output : Tensor (B, C, H, W)
        map : Tensor (B, H, W, Hk, Wk)
            Only if requested: ``map[b, i, j]`` is the attention map of position (i, j); Hk = ⌈H / pool⌉, likewise Wk.
        """
        x = image(self, "x", x, self.channels)
        here = places(x)
        value = pooled(self.g(here), x, self.pool)
        query = here if self.theta is None else self.theta(here)
        key = pooled(here if self.phi is None else self.phi(here), x, self.pool)
        read, weights = self._read(query, key, value, return_map)
        output = picture(self.w_z(read), x)
        output = x + (output if self.norm is None else self.norm(output))
        return output if weights is None else (output, unfolded(weights, x, self.pool))

    def _read(self, query: Tensor, key: Tensor, value: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Return the sums (B, N, C'), and the weights (B, N, S) if ``wanted``."""
        if self.mode in ("gaussian", "embedded"):
            return softmax_read(query, key, value, self.engine, wanted)
        value = value / key.shape[1]
        if self.mode == "dot":
            # (θ φᵀ) g = θ (φᵀ g) needs no N × N matrix.
            return query @ (key.mT @ value), query @ key.mT / key.shape[1] if wanted else None
        assert self.w_f is not None, "mode is 'concat'"
        left, right = self.w_f.to(query.dtype).chunk(2)
        similar = F.relu((query @ left).unsqueeze(2) + (key @ right).unsqueeze(1))
        return similar @ value, similar / key.shape[1] if wanted else None

    def extra_repr(self) -> str:
        """Return the mode and the pooling."""
        return f"mode={self.mode!r}" + (f", pool={self.pool}" if self.pool > 1 else "")


@mechanism(
    formula="x + γ W_v o, o_j = Σ_i softmax_i(f(x_i)ᵀ g(x_j)) h(x_i)",
    sources=("zhang2019",),
    learned="W_f, W_g, W_h (C/k, C), W_v (C, C/k), γ",
    cost="O(N²·C/k + N·C²/k), N = H·W",
)
class SelfAttention2d(Layer):
    """SAGAN's self-attention: each position attends to all positions of its image (Zhang 2019, arXiv 1805.08318).

    ``y_j = γ W_v Σ_i β_{j,i} h(x_i) + x_j`` with ``β_{j,·} = softmax_i(f(x_i)ᵀ g(x_j))``, and f, g, h the linear maps
    ``W_f x``, ``W_g x``, ``W_h x`` to C/k features. γ starts at 0, so the layer is initialized to the identity. Scores
    are not scaled. For the paper's spectral norm, apply ``torch.nn.utils.parametrizations.spectral_norm`` to the maps.

    Parameters
    ----------
    channels : int
        Number of channels C.
    reduction : int, default 8
        Reduction k: the maps have max(1, C // k) features.
    pool : int, default 1
        Side of the max-pooling windows of f and h; 1 is no pooling. The authors' code uses 2.
    bias : bool, default False
        Whether the maps add learned biases; the paper's formulas have none.
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import SelfAttention2d
    >>> x = torch.randn(2, 16, 5, 7)
    >>> output, weights = SelfAttention2d(16)(x, return_map=True)
    >>> torch.equal(output, x), weights.shape
    (True, torch.Size([2, 5, 7, 5, 7]))
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 8,
        *,
        pool: int = 1,
        bias: bool = False,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        C = self.channels = size(self, "channels", channels)
        hidden = max(1, C // size(self, "reduction", reduction))
        self.pool, self.engine = size(self, "pool", pool), engine
        self.f = nn.Linear(C, hidden, bias, device=device, dtype=dtype)
        self.g = nn.Linear(C, hidden, bias, device=device, dtype=dtype)
        self.h = nn.Linear(C, hidden, bias, device=device, dtype=dtype)
        self.v = nn.Linear(hidden, C, bias, device=device, dtype=dtype)
        self.gamma = parameter(device=device, dtype=dtype)
        nn.init.zeros_(self.gamma)

    def reset_parameters(self) -> None:
        """Re-initialize the maps as ``nn.Linear`` does, and γ to 0."""
        for part in (self.f, self.g, self.h, self.v):
            part.reset_parameters()
        nn.init.zeros_(self.gamma)

    def forward(self, x: Tensor, *, return_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image plus the attention output.

        Parameters
        ----------
        x : Tensor (B, C, H, W)
        return_map : bool, default False
            Whether to also return the weights.

        Returns
        -------
        output : Tensor (B, C, H, W)
        map : Tensor (B, H, W, Hk, Wk)
            Only if requested: ``map[b, i, j]`` is the attention map of position (i, j), and sums to 1.
        """
        x = image(self, "x", x, self.channels)
        here = places(x)
        key, value = (pooled(each(here), x, self.pool) for each in (self.f, self.h))
        read, weights = softmax_read(self.g(here), key, value, self.engine, return_map)
        output = x + self.gamma * picture(self.v(read), x)
        return output if weights is None else (output, unfolded(weights, x, self.pool))

    def extra_repr(self) -> str:
        """Return the pooling."""
        return f"pool={self.pool}" if self.pool > 1 else ""
