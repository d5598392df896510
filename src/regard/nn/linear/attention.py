"""Linear attention: a product of features in place of the softmax, so that keys and values sum up to one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from regard._utils.constraints import flag, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.nn._base import Layer, draw_linear, sequences
from regard.nn.linear.operator import recur
from regard.nn.linear.recurrence import (
    FeatureMap,
    LinearState,
    check_options,
    document_starts,
    features,
    initial,
    inputs,
    real_rows,
    zero_padding,
)
from regard.nn.linear.steps import Steps


@overload
def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, feature_map: FeatureMap = ..., is_causal: bool = ..., form: str = ..., chunk: int = ..., state: tuple[Tensor, Tensor | None] | None = ..., valid_lens: Tensor | None = ..., documents: Tensor | None = ..., normalize: bool = ..., return_state: Literal[False] = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
@overload
def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, feature_map: FeatureMap = ..., is_causal: bool = ..., form: str = ..., chunk: int = ..., state: tuple[Tensor, Tensor | None] | None = ..., valid_lens: Tensor | None = ..., documents: Tensor | None = ..., normalize: bool = ..., return_state: Literal[True]) -> tuple[Tensor, LinearState]: ...  # noqa: E501  # fmt: skip
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap = "elu",
    is_causal: bool = False,
    form: str = "auto",
    chunk: int = 64,
    state: tuple[Tensor, Tensor | None] | None = None,
    valid_lens: Tensor | None = None,
    documents: Tensor | None = None,
    normalize: bool = True,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LinearState]:
    """Return ``φ(q)·S / φ(q)·z`` for each query, where ``S = Σ φ(k)ᵀ v`` and ``z = Σ φ(k)`` over the keys it sees.

    The weight of a key is φ(q)·φ(k) over its sum (Katharopoulos 2020, arXiv 2006.16236). Individual weights are never
    needed: sums over keys suffice, computed once for all queries, or step by step.

    Parameters
    ----------
    query : Tensor (B, H, L, E)
    key : Tensor (B, H, S, E)
    value : Tensor (B, H, S, V)
    feature_map : {"elu", "relu", "identity"} or callable, default "elu"
        φ: elu(x) + 1, max(x, 0), x, or a function from (..., E) to (..., F) in the same dtype.
    is_causal : bool, default False
        Whether query i sees only keys 0 to i; requires S = L.
    form : {"auto", "parallel", "chunked", "recurrent"}, default "auto"
        The algorithm; all agree up to rounding. "parallel" builds the L×S matrix of products, O(L·S·(E + V)).
        "chunked" does so within chunks of a causal call and passes sums between them, O(L·(E·V + chunk·(E + V)));
        a non-causal call needs no chunks: it is φ(Q)(φ(K)ᵀV), O((L + S)·E·V). "recurrent" loops over the keys of a
        causal call, O(L·E·V). "auto" is a compiled kernel where one applies (see :func:`gated_recurrence`), else
        "recurrent" for a single key and "chunked" otherwise.
    chunk : int, default 64
        Length of a chunk; it need not divide L.
    state : LinearState, or pair (matrix, normalizer), optional
        The sums over earlier keys, which every query sees; None if there are none.
    valid_lens : Tensor (B,) of int, optional
        Number of valid keys per sequence; later keys are ignored and do not enter the state.
    documents : Tensor (L,) or (B, L) of int, optional
        Document of each step of a causal call: runs of equal numbers. A query sees only its own document. An initial
        state belongs to the first document, the returned state to the last.
    normalize : bool, default True
        Whether to divide by φ(q)·z. Use False for "identity" and other maps with negative values, for which φ(q)·z may
        be close to 0.
    return_state : bool, default False
        Whether to also return the sums, including those of ``state``.

    Returns
    -------
    output : Tensor (B, H, L, V)
        0 if the query sees no key or φ(q)·z is 0.
    state : LinearState
        Only if requested: matrix (B, H, F, V), normalizer (B, H, F) or None.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, the expected value and the actual one.

    Notes
    -----
    Inputs in float16 and bfloat16 are summed in float32. As in the paper, there is no factor 1/√E. In a causal
    call on a CPU, a key or value that is not finite affects its own and later queries alone.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.linear.attention import linear_attention
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind(0)
    >>> out, state = linear_attention(q, k, v, is_causal=True, return_state=True)
    >>> out.shape, state.matrix.shape, state.normalizer.shape
    (torch.Size([2, 4, 10, 8]), torch.Size([2, 4, 8, 8]), torch.Size([2, 4, 8]))
    """
    name = "linear_attention"
    flag(name, "normalize", normalize)
    function = check_options(name, feature_map, form, chunk)
    query, key, value = inputs(name, query, key, value, is_causal)
    dtype = query.dtype
    with autocast_suspended(query.device.type):
        query, key, value, real = zero_padding(name, query, key, value, valid_lens)
        query, key = features(name, function, query, key, real)
        starts = document_starts(name, documents, key)
        if starts is not None and not is_causal:
            raise rejected(name, "documents", "be None in a non-causal call", shape(starts))
        matrix, normalizer = initial(name, state, key, value, normalize)
        if normalizer is not None:
            # A further column of ones accumulates the denominator.
            value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1)
            matrix = torch.cat([matrix, normalizer.unsqueeze(-1)], -1)
        if is_causal:
            output, matrix = recur(Steps(query, key, value, resets=starts), matrix, form=form, chunk=chunk)
        else:
            output, matrix = _both_ways(query, key, value, matrix, form)
        if normalizer is not None:
            output, total = output[..., :-1], output[..., -1:]
            matrix, normalizer = matrix[..., :-1], matrix[..., -1]
            output = torch.where(total == 0, 0.0, output / torch.where(total == 0, 1.0, total))
    return (output.to(dtype), LinearState(matrix, normalizer)) if return_state else output.to(dtype)


def _both_ways(query: Tensor, key: Tensor, value: Tensor, matrix: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return what every query reads of all keys and the sums before them, and the sums with these keys."""
    end = matrix + key.mT @ value
    return (query @ key.mT) @ value + query @ matrix if form == "parallel" else query @ end, end


class ProjectedHeads(Layer, ABC):
    """Base of multi-head layers with a state: query, key, value and output projections.

    Parameters
    ----------
    embed_dim : int
        Width C of queries and outputs.
    num_heads : int
        Number of heads H, which divides ``embed_dim``. Each head has width C/H.
    kdim, vdim : int, optional
        Widths of keys and values; defaults to C.
    bias : bool, default True
        Whether the four projections have a bias.
    feature_map, form, chunk
        See :func:`linear_attention`. A module is trained with the layer.
    device, dtype : optional
        Device and dtype of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        feature_map: FeatureMap = "elu",
        form: str = "auto",
        chunk: int = 64,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        if embed_dim % num_heads:
            raise rejected(type(self).__name__, "num_heads", f"divide embed_dim {embed_dim}", num_heads)
        self.kdim = self.embed_dim if kdim is None else size(self, "kdim", kdim)
        self.vdim = self.embed_dim if vdim is None else size(self, "vdim", vdim)
        check_options(type(self).__name__, feature_map, form, chunk)
        self.feature_map, self.form, self.chunk = feature_map, form, chunk
        self.q_proj = nn.Linear(self.embed_dim, self.embed_dim, bias, device, dtype)
        self.k_proj = nn.Linear(self.kdim, self.embed_dim, bias, device, dtype)
        self.v_proj = nn.Linear(self.vdim, self.embed_dim, bias, device, dtype)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias, device, dtype)

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, valid_lens: Tensor | None = None
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Return the outputs (B, L, C), and the state if requested."""

    def reset_parameters(self) -> None:
        """Re-initialize weights by Glorot's rule, biases to 0, and a feature map that is a module."""
        for name, each in self.named_children():
            if isinstance(each, nn.Linear) and name.endswith("_proj"):
                draw_linear(each)
            elif callable(reset := getattr(each, "reset_parameters", None)):
                reset()

    def extra_repr(self) -> str:
        """Return the settings, without the projections'."""
        mapped = self.feature_map
        name = mapped if isinstance(mapped, str) else getattr(mapped, "__name__", type(mapped).__name__)
        form = "" if self.form == "auto" else f", form={self.form!r}"
        return f"{self.embed_dim}, num_heads={self.num_heads}, feature_map={name!r}{form}"

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, valid_lens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return heads (B, H, N, C/H) of queries, keys and values, and the input keys, with zeros in padding."""
        is_self = key is None
        key = query if key is None else key
        value = key if value is None else value
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        query, key, value = (sequences(self, name, tensor, width) for name, tensor, width in widths)
        if valid_lens is not None:
            # Zero padding before the projections: NaN times 0 would be NaN in the gradients of their weights.
            name = type(self).__name__
            key, value = (torch.where(real_rows(name, valid_lens, each), each, 0.0) for each in (key, value))
            query = key if is_self else query
        heads = [self._split(each) for each in (self.q_proj(query), self.k_proj(key), self.v_proj(value))]
        return heads[0], heads[1], heads[2], key

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _merge(self, answer: tuple[Tensor, LinearState], return_state: bool) -> Tensor | tuple[Tensor, LinearState]:
        """Project the heads' output; also return their state if requested."""
        output = self.out_proj(answer[0].transpose(1, 2).flatten(-2))
        return (output, answer[1]) if return_state else output


@mechanism(
    formula="φ(Q)(φ(K)ᵀV) / φ(Q)(φ(K)ᵀ1)",
    sources=("katharopoulos2020",),
    learned="W_q (C, C), W_k (C, Ck), W_v (C, Cv), W_o (C, C), biases",
    cost="O((L + S)·E·V)",
)
class LinearAttention(ProjectedHeads):
    """Multi-head linear attention, ``φ(Q)(φ(K)ᵀV) / φ(Q)(φ(K)ᵀ1)`` in each head (Katharopoulos 2020, arXiv 2006.16236).

    Time and memory are linear in length; see :func:`linear_attention`. Weights are never computed, so there is no
    dropout of weights.

    Parameters
    ----------
    embed_dim : int
        Width C of queries and outputs.
    num_heads : int
        Number of heads H, which divides ``embed_dim``. Each head has width C/H.
    normalize : bool, default True
        Whether to normalize weights to sum to 1. Use False if the feature map may be negative.
    kdim, vdim : int, optional
        Widths of keys and values; defaults to C.
    bias : bool, default True
        Whether the four projections have a bias.
    feature_map : {"elu", "relu", "identity"} or callable, default "elu"
        φ, from (B, H, N, C/H) to (B, H, N, F). A module is trained with the layer.
    form, chunk
        See :func:`linear_attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.linear.attention import LinearAttention
    >>> layer = LinearAttention(8, 2)
    >>> x = torch.randn(2, 5, 8)
    >>> layer(x, valid_lens=torch.tensor([3, 5])).shape
    torch.Size([2, 5, 8])

    Step by step, as in decoding:

    >>> state = None
    >>> for t in range(5):
    ...     y, state = layer(x[:, t : t + 1], is_causal=True, state=state, return_state=True)
    >>> torch.allclose(y, layer(x, is_causal=True)[:, -1:], atol=1e-6)
    True
    """

    def __init__(self, embed_dim: int, num_heads: int, *, normalize: bool = True, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        flag(type(self).__name__, "normalize", normalize)
        self.normalize = normalize
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        is_causal: bool = False,
        documents: Tensor | None = None,
        state: tuple[Tensor, Tensor | None] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Return the attention output.

        Parameters
        ----------
        query : Tensor (B, L, C)
        key : Tensor (B, S, Ck), optional
            Defaults to ``query``: self-attention, in which padded queries count as zeros.
        value : Tensor (B, S, Cv), optional
            Defaults to ``key``.
        valid_lens : Tensor (B,) of int, optional
            Number of valid keys per sequence; later keys are ignored.
        is_causal : bool, default False
            Whether query i sees only keys 0 to i.
        documents : Tensor (L,) or (B, L) of int, optional
            Document of each step of a causal call; a query sees only its own document.
        state : LinearState, optional
            The state after earlier keys.
        return_state : bool, default False
            Whether to also return the state.

        Returns
        -------
        output : Tensor (B, L, C)
        state : LinearState
            Only if requested.
        """
        q, k, v, _ = self._project(query, key, value, valid_lens)
        answer = linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            is_causal=is_causal,
            form=self.form,
            chunk=self.chunk,
            state=state,
            valid_lens=valid_lens,
            documents=documents,
            normalize=self.normalize,
            return_state=True,
        )
        return self._merge(answer, return_state)
