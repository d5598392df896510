"""Perceiver: latent vectors read a long context, at a cost linear in its length; and Flamingo's gated cross-attention.

Dimensions: B sequences, R latents, L rows, S rows of context, E width, Ec width of context, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import flag, lengths, probability, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import Layer, combined_mask, head_sizes, parameter, reset_children, sequences, zero_padding
from regard.nn.transformer import FeedForward


class ReadOptions(TypedDict, total=False):
    """Keyword arguments that all layers of this module share; see :class:`PerceiverAttention`."""

    context_dim: int | None
    head_dim: int | None
    hidden_dim: int | None
    activation: str
    bias: bool
    dropout: float
    engine: EngineLike


class _CrossReading(Layer):
    """Base: projections of rows that read a context, and a feed-forward network."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        head_dim: int | None = None,
        hidden_dim: int | None = None,
        activation: str = "gelu",
        bias: bool = False,
        dropout: float = 0.0,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        E, H, self.head_dim = head_sizes(self, embed_dim, num_heads, head_dim)
        self.embed_dim, self.num_heads = E, H
        self.context_dim = E if context_dim is None else size(self, "context_dim", context_dim)
        hidden = 4 * E if hidden_dim is None else size(self, "hidden_dim", hidden_dim)
        self.dropout, self.engine = probability(self, "dropout", dropout), engine
        flag(self, "bias", bias)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        width = H * self.head_dim
        self.norm = nn.LayerNorm(E, **where)
        self.q_proj = nn.Linear(E, width, bias, **where)
        self.k_proj = nn.Linear(self.context_dim, width, bias, **where)
        self.v_proj = nn.Linear(self.context_dim, width, bias, **where)
        self.out_proj = nn.Linear(width, E, bias, **where)
        self.feedforward_norm = nn.LayerNorm(E, **where)
        self.feedforward = FeedForward(E, hidden, activation, bias=bias, **where)

    def reset_parameters(self) -> None:
        """Re-initialize projections as ``nn.Linear`` does, and norms to the identity."""
        reset_children(self)

    def _checked(self, name: str, rows: Any, context: Any) -> tuple[Tensor, Tensor]:
        rows = sequences(self, name, rows, self.embed_dim)
        context = sequences(self, "context", context, self.context_dim)
        if context.shape[0] != rows.shape[0]:
            expected = f"have {rows.shape[0]} sequences, as {name}"
            raise rejected(type(self).__name__, "context", expected, f"{context.shape[0]} (context {shape(context)})")
        return rows, context

    def _read(
        self, rows: Tensor, keys: Tensor, mask: MaskLike | None, return_aux: AuxRequest | None
    ) -> tuple[Tensor, Aux | None]:
        """Return what rows (B, L, E) read from keys (B, S, Ec), projected, and the requested fields."""
        projected = (self.q_proj(rows), self.k_proj(keys), self.v_proj(keys))
        q, k, v = (each.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for each in projected)
        dropout = self.dropout if self.training else 0.0
        answer = attention(q, k, v, mask, dropout, engine=self.engine, return_aux=return_aux)
        read, aux = (answer, None) if isinstance(answer, Tensor) else answer
        return self.out_proj(read.transpose(1, 2).flatten(2)), aux

    def _fed(self, rows: Tensor) -> Tensor:
        fed: Tensor = self.feedforward(self.feedforward_norm(rows))
        return fed

    def extra_repr(self) -> str:
        """Return the settings that the projections do not show."""
        return f"num_heads={self.num_heads}" + (f", dropout={self.dropout}" if self.dropout else "")


@mechanism(
    formula="Z' + FFN(LN(Z')), Z' = Z + softmax(LN(Z) W_q ([LN(Z); LN(X)] W_k)ᵀ / √D) [LN(Z); LN(X)] W_v W_o",
    sources=("jaegle2021", "alayrac2022"),
    learned="W_q (E, HD), W_k, W_v (Ec, HD), W_o (HD, E), feed-forward network, layer norms",
    cost="O(R·(R + S)·E + (R + S)·E²)",
    reads="scaled_dot",
)
class PerceiverAttention(_CrossReading):
    """A block in which R latent vectors read a long context, at a cost linear in its length.

    ``Z' = Z + heads(softmax(Q Kᵀ / √D) V) W_o`` and ``output = Z' + FFN(LN(Z'))``, with queries from ``LN(Z)`` and keys
    and values from ``LN(X)``: the cross-attention of the Perceiver (Jaegle 2021, arXiv 2103.03206). Flamingo's
    resampler (Alayrac 2022, arXiv 2204.14198) lets the latents also read each other in the same step: keys and values
    come from ``[LN(Z); LN(X)]``. That is the default; ``include_latents=False`` is the Perceiver.

    Parameters
    ----------
    embed_dim : int
        Width E of the latents.
    num_heads : int
        Number of heads H.
    include_latents : bool, default True
        Whether latents are keys and values, too; requires ``context_dim`` E.
    context_dim : int, optional
        Width Ec of the context; defaults to E.
    head_dim : int, optional
        Width D of a head; defaults to E/H.
    hidden_dim : int, optional
        Hidden width of the feed-forward network; defaults to 4·E.
    activation : str, default "gelu"
        See :class:`FeedForward`.
    bias : bool, default False
        Whether projections and feed-forward network have biases. The Perceiver's have; Flamingo's have not.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    engine : str or Engine, default "auto"
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
    >>> from regard.nn import PerceiverAttention
    >>> layer = PerceiverAttention(16, 4, context_dim=6, include_latents=False, bias=True)
    >>> layer(torch.randn(2, 8, 16), torch.randn(2, 1000, 6), torch.tensor([1000, 10])).shape
    torch.Size([2, 8, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        include_latents: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        flag(self, "include_latents", include_latents)
        if include_latents and self.context_dim != self.embed_dim:
            expected = f"be embed_dim {self.embed_dim}, as latents are keys, too; or pass include_latents=False"
            raise rejected(type(self).__name__, "context_dim", expected, self.context_dim)
        self.include_latents = include_latents
        self.context_norm = nn.LayerNorm(self.context_dim, device=device, dtype=dtype)

    def forward(
        self,
        latents: Tensor,
        context: Tensor,
        valid_lens: Tensor | None = None,
        *,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the updated latents.

        Parameters
        ----------
        latents : Tensor (B, R, E)
        context : Tensor (B, S, Ec)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows of the context; later ones are ignored. Reading an empty context gives 0.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, per head. The latents are the first R keys, if they are included.

        Returns
        -------
        output : Tensor (B, R, E)
        aux : Aux
            Only if requested.
        """
        latents, context = self._checked("latents", latents, context)
        if valid_lens is not None:
            context = zero_padding(context, lengths(self, "valid_lens", valid_lens, context.shape[0]))
        rows, keys = self.norm(latents), self.context_norm(context)
        if self.include_latents:
            keys = torch.cat([rows, keys], 1)
        mask = None
        if valid_lens is not None:
            mask = masks.padding(valid_lens + latents.shape[1] if self.include_latents else valid_lens)
        read, aux = self._read(rows, keys, mask, return_aux)
        latents = latents + read
        latents = latents + self._fed(latents)
        return latents if aux is None else (latents, aux)


@mechanism(
    formula="LN(Z_n), Z_i = PerceiverAttention_i(Z_{i−1}, X), Z_0 learned",
    sources=("alayrac2022", "jaegle2021"),
    learned="Z_0 (R, E), those of each PerceiverAttention, layer norm",
    cost="O(layers·(R·(R + S)·E + (R + S)·E²))",
    reads="scaled_dot",
)
class PerceiverResampler(Layer):
    """Resample a sequence of any length to R vectors: learned latents read it in a few blocks, then a layer norm.

    This is Flamingo's resampler (Alayrac 2022, arXiv 2204.14198), which turns the features of images and videos into a
    fixed number of tokens. The blocks are :class:`PerceiverAttention`, from the Perceiver (Jaegle 2021, arXiv
    2103.03206). Flamingo adds embeddings of time to the features of video frames before.

    Parameters
    ----------
    embed_dim : int
        Width E of the latents.
    num_latents : int
        Number of latents R, and of output rows.
    num_heads : int
        Number of heads H.
    num_layers : int, default 1
        Number of blocks.
    include_latents, context_dim, head_dim, hidden_dim, activation, bias, dropout, engine, device, dtype
        See :class:`PerceiverAttention`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import PerceiverResampler
    >>> layer = PerceiverResampler(16, num_latents=8, num_heads=4, num_layers=2)
    >>> layer(torch.randn(2, 1000, 16), torch.tensor([1000, 10])).shape
    torch.Size([2, 8, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_latents: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        include_latents: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        super().__init__()
        E, R = size(self, "embed_dim", embed_dim), size(self, "num_latents", num_latents)
        self.embed_dim, self.num_latents = E, R
        self.latents = parameter(R, E, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            PerceiverAttention(E, num_heads, include_latents=include_latents, device=device, dtype=dtype, **options)
            for _ in range(size(self, "num_layers", num_layers))
        )
        self.norm = nn.LayerNorm(E, device=device, dtype=dtype)
        nn.init.normal_(self.latents)

    def reset_parameters(self) -> None:
        """Draw the latents from the standard normal distribution, and re-initialize the blocks."""
        nn.init.normal_(self.latents)
        for each in (*self.layers, self.norm):
            reset: Any = each.reset_parameters
            reset()

    def forward(self, context: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return the resampled context.

        Parameters
        ----------
        context : Tensor (B, S, Ec)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows per sequence; later ones are ignored.

        Returns
        -------
        output : Tensor (B, R, E)
        """
        first: Any = self.layers[0]
        context = sequences(self, "context", context, first.context_dim)
        latents = self.latents.expand(context.shape[0], -1, -1)
        for layer in self.layers:
            latents = layer(latents, context, valid_lens)
        resampled: Tensor = self.norm(latents)
        return resampled

    def extra_repr(self) -> str:
        """Return the number of latents."""
        return f"num_latents={self.num_latents}"


@mechanism(
    formula="Y + tanh(β) FFN(LN(Y)), Y = X + tanh(α) softmax(LN(X) W_q (M W_k)ᵀ / √D) M W_v W_o",
    sources=("alayrac2022",),
    learned="α, β, W_q (E, HD), W_k, W_v (Ec, HD), W_o (HD, E), feed-forward network, layer norms",
    cost="O(L·S·E + (L + S)·E²)",
    reads="scaled_dot",
)
class GatedCrossAttention(_CrossReading):
    """Cross-attention that starts as the identity, to be put into a trained language model (Flamingo).

    ``Y = X + tanh(α) heads(softmax(Q Kᵀ / √D) V) W_o`` and ``output = Y + tanh(β) FFN(LN(Y))``, with queries from
    ``LN(X)``, keys and values from the media M, and α and β starting at 0 (Alayrac 2022, arXiv 2204.14198). A row that
    sees no media reads 0. In Flamingo, a token sees the media of the last image before it: a mask says so.

    Parameters
    ----------
    embed_dim : int
        Width E of the rows.
    num_heads : int
        Number of heads H.
    context_dim, head_dim, hidden_dim, activation, bias, dropout, engine, device, dtype
        See :class:`PerceiverAttention`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    Three tokens after no image, the first image and the second image, of two vectors each:

    >>> import torch
    >>> from regard.nn import GatedCrossAttention
    >>> layer, x, media = GatedCrossAttention(16, 4), torch.randn(1, 3, 16), torch.randn(1, 4, 16)
    >>> sees = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    >>> torch.equal(layer(x, media, attn_mask=sees), x)  # the gates are closed
    True
    >>> _ = torch.nn.init.ones_(layer.attention_gate)
    >>> (layer(x, media, attn_mask=sees) != x).any(2)
    tensor([[False,  True,  True]])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, device: Any = None, dtype: Any = None, **options: Unpack[ReadOptions]
    ) -> None:
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.attention_gate = parameter(device=device, dtype=dtype)
        self.feedforward_gate = parameter(device=device, dtype=dtype)
        self._close()

    def _close(self) -> None:
        nn.init.zeros_(self.attention_gate)
        nn.init.zeros_(self.feedforward_gate)

    def reset_parameters(self) -> None:
        """Re-initialize projections and norms, and close the gates."""
        super().reset_parameters()
        self._close()

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: MaskLike | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the rows, with what they read added.

        Parameters
        ----------
        x : Tensor (B, L, E)
        context : Tensor (B, S, Ec)
            The media M.
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows of the context; later ones are ignored.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; three dimensions are (B, L, S).
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, per head.

        Returns
        -------
        output : Tensor (B, L, E)
        aux : Aux
            Only if requested.
        """
        x, context = self._checked("x", x, context)
        if valid_lens is not None:
            context = zero_padding(context, lengths(self, "valid_lens", valid_lens, context.shape[0]))
        read, aux = self._read(self.norm(x), context, combined_mask(self, valid_lens, attn_mask), return_aux)
        x = x + torch.tanh(self.attention_gate) * read
        x = x + torch.tanh(self.feedforward_gate) * self._fed(x)
        return x if aux is None else (x, aux)
