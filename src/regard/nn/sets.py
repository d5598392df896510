"""Attention over sets (B, N, E), whose elements have no order: the blocks of the Set Transformer."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from regard import masks
from regard._utils.constraints import lengths, probability, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, PartLayer, non_default, parameter, resolve_part, sequences, zero_padding
from regard.normalizers import NormalizerLike


class BlockParts(TypedDict, total=False):
    """Keyword arguments of every block; see :class:`MAB`."""

    layer_norm: bool
    normalizer: NormalizerLike
    scale: float | None
    engine: EngineLike


def split(layer: object, hidden_size: Any, num_heads: Any) -> tuple[int, int]:
    """Check the width and the number of heads, which must divide it, and return both."""
    width, heads = size(layer, "hidden_size", hidden_size), size(layer, "num_heads", num_heads)
    if width % heads:
        raise rejected(type(layer).__name__, "num_heads", f"divide hidden_size {width}", heads)
    return width, heads


def counts(layer: object, argument: str, value: Any, elements: Tensor) -> Tensor | None:
    """Check the numbers (B,) of valid elements (B, N, E), or None for all, and return them."""
    return None if value is None else lengths(layer, argument, value, *elements.shape[:2])


@mechanism(
    formula="LN(H + ReLU(H W_o)), H = LN(X W_q + softmax(X W_q (Y W_k)ᵀ / √d) Y W_v)",
    sources=("lee2019",),
    learned="W_q (E, C), W_k, W_v (Ek, C), W_o (C, C), biases, layer norms",
    cost="O(L·S·C + (L + S)·C²)",
)
class MAB(PartLayer):
    """Multihead attention block: the elements of one set read those of another (Lee 2019, arXiv 1810.00825).

    ``H = LN(Q + heads(softmax(Q Kᵀ / √d) V))`` and ``MAB(X, Y) = LN(H + ReLU(H W_o + b_o))``, with the projections
    ``Q = X W_q + b_q``, ``K = Y W_k + b_k`` and ``V = Y W_v + b_v``, and d = C / num_heads the width of a head.

    As in the authors' code, the residual connection carries the projected query, so X may have another width, and heads
    are concatenated without a further projection. Their code divides scores by √C, the width of all heads
    (``scale=hidden_size ** -0.5``), and uses layer norms only on request. Parameter names match theirs.

    Parameters
    ----------
    query_size, key_size : int
        Widths E of X and Ek of Y.
    hidden_size : int
        Width C of the output, over all heads.
    num_heads : int
        Number of heads, which divides ``hidden_size``.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    layer_norm : bool, default True
        Whether to apply layer norms LN.
    normalizer, scale, engine : optional
        See :func:`regard.attention`; a scale of None is 1/√d.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the same holds for all blocks.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import MAB
    >>> MAB(3, 5, 8, num_heads=2)(torch.randn(2, 4, 3), torch.randn(2, 6, 5), torch.tensor([6, 1])).shape
    torch.Size([2, 4, 8])
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        layer_norm: bool = True,
        normalizer: NormalizerLike = "softmax",
        scale: float | None = None,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.query_size, self.key_size = size(self, "query_size", query_size), size(self, "key_size", key_size)
        self.hidden_size, self.num_heads = split(self, hidden_size, num_heads)
        self.dropout = probability(self, "dropout", dropout)
        self.normalizer, self.scale, self.engine = normalizer, scale, engine
        self.fc_q = nn.Linear(self.query_size, self.hidden_size, device=device, dtype=dtype)
        self.fc_k = nn.Linear(self.key_size, self.hidden_size, device=device, dtype=dtype)
        self.fc_v = nn.Linear(self.key_size, self.hidden_size, device=device, dtype=dtype)
        self.fc_o = nn.Linear(self.hidden_size, self.hidden_size, device=device, dtype=dtype)
        self.ln0 = nn.LayerNorm(self.hidden_size, device=device, dtype=dtype) if layer_norm else nn.Identity()
        self.ln1 = nn.LayerNorm(self.hidden_size, device=device, dtype=dtype) if layer_norm else nn.Identity()

    def reset_parameters(self) -> None:
        """Re-initialize the projections as ``nn.Linear`` does, and layer norms to the identity."""
        for part in (self.fc_q, self.fc_k, self.fc_v, self.fc_o, self.ln0, self.ln1):
            if not isinstance(part, nn.Identity):
                part.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        valid_lens: Tensor | None = None,
        *,
        query_lens: Tensor | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the first set updated by attention to the second.

        Parameters
        ----------
        query : Tensor (B, L, E)
            The set X.
        key : Tensor (B, S, Ek)
            The set Y.
        valid_lens : Tensor (B,) of int, optional
            Number of valid elements of Y; later ones are ignored. Attention to an empty Y reads 0.
        query_lens : Tensor (B,) of int, optional
            Number of valid elements of X; later ones are ignored and their output is 0.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return.

        Returns
        -------
        output : Tensor (B, L, C)
        aux : Aux
            Only if requested, per head: weights (B, H, L, S) and so on.
        """
        query, key = sequences(self, "query", query, self.query_size), sequences(self, "key", key, self.key_size)
        if query.shape[0] != key.shape[0]:
            raise rejected("MAB", "key", f"have query's {query.shape[0]} sets", f"{key.shape[0]} (key {shape(key)})")
        key = zero_padding(key, counts(self, "valid_lens", valid_lens, key))
        query = zero_padding(query, counts(self, "query_lens", query_lens, query))
        mask = None if valid_lens is None else masks.padding(valid_lens)
        projected = self.fc_q(query)
        heads = (self.num_heads, self.hidden_size // self.num_heads)
        q, k, v = (t.unflatten(2, heads).transpose(1, 2) for t in (projected, self.fc_k(key), self.fc_v(key)))
        answer = attention(
            q, k, v, mask, self.dropout if self.training else 0.0,
            scale=self.scale, normalizer=resolve_part(self.normalizer), engine=self.engine, return_aux=return_aux,
        )  # fmt: skip
        read = answer if isinstance(answer, Tensor) else answer[0]
        hidden = self.ln0(projected + read.transpose(1, 2).flatten(2))
        output = zero_padding(self.ln1(hidden + F.relu(self.fc_o(hidden))), query_lens)
        return output if isinstance(answer, Tensor) else (output, answer[1])

    def extra_repr(self) -> str:
        """Return the settings that the projections do not show."""
        settings = [f"num_heads={self.num_heads}"]
        settings += [f"dropout={self.dropout}"] if self.dropout else []
        settings += non_default(self, "normalizer", "softmax")
        return ", ".join(settings + ([f"scale={self.scale}"] if self.scale is not None else []))


@mechanism(formula="MAB(X, X)", sources=("lee2019",), learned="those of MAB", cost="O(N²·C + N·C²)")
class SAB(Layer):
    """Set attention block: self-attention within a set, ``SAB(X) = MAB(X, X)`` (Lee 2019, arXiv 1810.00825).

    Permuting the elements permutes the outputs.

    Parameters
    ----------
    input_size : int
        Width E of the elements.
    hidden_size, num_heads, dropout, layer_norm, normalizer, scale, engine, device, dtype
        See :class:`MAB`; scores are divided by √(C / num_heads).

    Examples
    --------
    >>> import torch
    >>> from regard.nn import SAB
    >>> SAB(3, 8, num_heads=2)(torch.randn(2, 6, 3), torch.tensor([6, 1])).shape
    torch.Size([2, 6, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[BlockParts],
    ) -> None:
        super().__init__()
        self.input_size = size(self, "input_size", input_size)
        self.hidden_size, self.num_heads = split(self, hidden_size, num_heads)
        E, C, heads, dropout = input_size, self.hidden_size, self.num_heads, probability(self, "dropout", dropout)
        self.mab = MAB(E, E, C, heads, dropout, device=device, dtype=dtype, **parts)

    def reset_parameters(self) -> None:
        """Re-initialize the parameters."""
        self.mab.reset_parameters()

    def forward(
        self, x: Tensor, valid_lens: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the updated set.

        Parameters
        ----------
        x : Tensor (B, N, E)
        valid_lens : Tensor (B,) of int, optional
            Number of valid elements per set; later ones are ignored and their output is 0.
        return_aux : AuxRequest, optional

        Returns
        -------
        output : Tensor (B, N, C)
        aux : Aux
            Only if requested, per head.
        """
        x = sequences(self, "x", x, self.input_size)
        valid_lens = counts(self, "valid_lens", valid_lens, x)
        return self.mab(x, x, valid_lens, query_lens=valid_lens, return_aux=return_aux)


@mechanism(
    formula="MAB(X, MAB(I, X))",
    sources=("lee2019",),
    learned="I (M, C), those of two MAB",
    cost="O(N·M·C + N·C²)",
)
class ISAB(Layer):
    """Induced set attention block: self-attention through M inducing points (Lee 2019, arXiv 1810.00825).

    ``ISAB(X) = MAB(X, MAB(I, X))`` with M learned inducing points I, at a cost linear in N. Permuting the elements
    permutes the outputs.

    Parameters
    ----------
    input_size : int
        Width E of the elements.
    num_inducing : int
        Number of inducing points M, each of width C.
    hidden_size, num_heads, dropout, layer_norm, normalizer, scale, engine, device, dtype
        See :class:`MAB`; scores are divided by √(C / num_heads).

    Examples
    --------
    >>> import torch
    >>> from regard.nn import ISAB
    >>> ISAB(3, 8, num_heads=2, num_inducing=4)(torch.randn(2, 100, 3), torch.tensor([100, 1])).shape
    torch.Size([2, 100, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_inducing: int,
        dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[BlockParts],
    ) -> None:
        super().__init__()
        self.input_size = size(self, "input_size", input_size)
        C, heads = self.hidden_size, self.num_heads = split(self, hidden_size, num_heads)
        self.num_inducing = size(self, "num_inducing", num_inducing)
        dropout = probability(self, "dropout", dropout)
        self.I = parameter(1, self.num_inducing, C, device=device, dtype=dtype)
        self.mab0 = MAB(C, self.input_size, C, heads, dropout, device=device, dtype=dtype, **parts)
        self.mab1 = MAB(self.input_size, C, C, heads, dropout, device=device, dtype=dtype, **parts)
        nn.init.normal_(self.I, std=self.hidden_size**-0.5)

    def reset_parameters(self) -> None:
        """Re-initialize the parameters; inducing points have about unit length."""
        nn.init.normal_(self.I, std=self.hidden_size**-0.5)
        self.mab0.reset_parameters()
        self.mab1.reset_parameters()

    def forward(
        self, x: Tensor, valid_lens: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, tuple[Aux, Aux]]:
        """Return the updated set, (B, N, C); see :meth:`SAB.forward` for the arguments.

        If requested, aux is a pair: for the inducing points attending to the set (L = M, S = N), and for the set
        attending to them.
        """
        x = sequences(self, "x", x, self.input_size)
        valid_lens = counts(self, "valid_lens", valid_lens, x)
        points = self.I.expand(x.shape[0], -1, -1)
        if return_aux is None:
            return self.mab1(x, self.mab0(points, x, valid_lens), query_lens=valid_lens)
        summary, gathered = self.mab0(points, x, valid_lens, return_aux=return_aux)
        output, spread = self.mab1(x, summary, query_lens=valid_lens, return_aux=return_aux)
        return output, (gathered, spread)

    def extra_repr(self) -> str:
        return f"num_inducing={self.num_inducing}"


@mechanism(
    formula="MAB(S, ReLU(Z W))",
    sources=("lee2019",),
    learned="S (K, C), W (C, C), b (C), those of MAB",
    cost="O(N·K·C + N·C²)",
)
class PMA(Layer):
    """Pooling by multihead attention: K learned seeds attend to a set (Lee 2019, arXiv 1810.00825).

    ``PMA(Z) = MAB(S, rFF(Z))`` with ``rFF(Z) = ReLU(Z W + b)``. Permuting the elements changes nothing. The authors'
    code leaves rFF out: ``feedforward=False``.

    Parameters
    ----------
    hidden_size : int
        Width C of elements, seeds and output.
    num_seeds : int, default 1
        Number of seeds K, and of output rows.
    feedforward : bool, default True
        Whether to apply rFF to the elements.
    num_heads, dropout, layer_norm, normalizer, scale, engine, device, dtype
        See :class:`MAB`; scores are divided by √(C / num_heads).

    Examples
    --------
    >>> import torch
    >>> from regard.nn import PMA
    >>> PMA(8, num_heads=2)(torch.randn(2, 6, 8), torch.tensor([6, 1])).shape
    torch.Size([2, 1, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_seeds: int = 1,
        dropout: float = 0.0,
        *,
        feedforward: bool = True,
        device: Any = None,
        dtype: Any = None,
        **parts: Unpack[BlockParts],
    ) -> None:
        super().__init__()
        C, heads = self.hidden_size, self.num_heads = split(self, hidden_size, num_heads)
        self.num_seeds = size(self, "num_seeds", num_seeds)
        dropout = probability(self, "dropout", dropout)
        self.S = parameter(1, self.num_seeds, C, device=device, dtype=dtype)
        self.fc = nn.Linear(C, C, device=device, dtype=dtype) if feedforward else None
        self.mab = MAB(C, C, C, heads, dropout, device=device, dtype=dtype, **parts)
        nn.init.normal_(self.S, std=C**-0.5)

    def reset_parameters(self) -> None:
        """Re-initialize the parameters; seeds have about unit length."""
        nn.init.normal_(self.S, std=self.hidden_size**-0.5)
        if self.fc is not None:
            self.fc.reset_parameters()
        self.mab.reset_parameters()

    def forward(
        self, x: Tensor, valid_lens: Tensor | None = None, *, return_aux: AuxRequest | None = None
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the pooled rows, (B, K, C); see :meth:`SAB.forward` for the arguments, with x (B, N, C).

        Attention to an empty set reads 0.
        """
        x = sequences(self, "x", x, self.hidden_size)
        x = zero_padding(x, counts(self, "valid_lens", valid_lens, x))
        if self.fc is not None:
            x = F.relu(self.fc(x))
        return self.mab(self.S.expand(x.shape[0], -1, -1), x, valid_lens, return_aux=return_aux)

    def extra_repr(self) -> str:
        return f"num_seeds={self.num_seeds}"
