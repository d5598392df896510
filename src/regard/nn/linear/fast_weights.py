"""Fast weights: a matrix updated by the sequence itself, by the sum rule or the delta rule."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from regard._utils.constraints import OneOf, floats
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.nn.linear.attention import ProjectedHeads
from regard.nn.linear.operator import recur
from regard.nn.linear.recurrence import (
    FeatureMap,
    LinearState,
    check_options,
    features,
    initial,
    inputs,
    zero_padding,
)
from regard.nn.linear.steps import Steps

RULES = ("delta", "sum")

#: Norms that features can be divided by.
_ORDERS = {"l1": 1, "l2": 2}


@overload
def fast_weights(query: Tensor, key: Tensor, value: Tensor, beta: Tensor | None = ..., *, rule: str = ..., feature_map: FeatureMap = ..., feature_norm: str | None = ..., form: str = ..., chunk: int = ..., state: tuple[Tensor, Tensor | None] | None = ..., valid_lens: Tensor | None = ..., return_state: Literal[False] = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
@overload
def fast_weights(query: Tensor, key: Tensor, value: Tensor, beta: Tensor | None = ..., *, rule: str = ..., feature_map: FeatureMap = ..., feature_norm: str | None = ..., form: str = ..., chunk: int = ..., state: tuple[Tensor, Tensor | None] | None = ..., valid_lens: Tensor | None = ..., return_state: Literal[True]) -> tuple[Tensor, LinearState]: ...  # noqa: E501  # fmt: skip
def fast_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None = None,
    *,
    rule: str = "sum",
    feature_map: FeatureMap = "identity",
    feature_norm: str | None = None,
    form: str = "auto",
    chunk: int = 64,
    state: tuple[Tensor, Tensor | None] | None = None,
    valid_lens: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LinearState]:
    """Return ``W_t φ(q_t)`` for each step t; each step updates W before reading it.

    The sum rule adds an outer product, ``W += β v φ(k)ᵀ`` (Schmidhuber 1992). The delta rule replaces the value stored
    under the key, ``W += β (v − W φ(k)) φ(k)ᵀ`` (Schlag 2021, arXiv 2102.11174).

    Parameters
    ----------
    query, key : Tensor (B, H, L, E)
    value : Tensor (B, H, L, V)
    beta : Tensor (B, H, L), optional
        Write strength of each step; None is 1. For a key of norm 1, the delta rule stores β times the new value plus
        1 − β times the old one.
    rule : {"sum", "delta"}, default "sum"
    feature_map : {"elu", "relu", "identity"} or callable, default "identity"
        φ: elu(x) + 1, max(x, 0), x, or a function from (..., E) to (..., F) in the same dtype.
    feature_norm : {"l1", "l2"}, optional
        Divide φ(q) and φ(k) by this norm. "l1" is the sum of features where they are positive, as Schlag does;
        "l2" as Yang does. The delta rule needs one, or keys of norm at most 1: with β|φ(k)|² > 2, W grows without
        bound. A row of zeros stays zero.
    form : {"auto", "parallel", "chunked", "recurrent"}, default "auto"
        The algorithm; all agree up to rounding. "recurrent" is a loop over steps, O(L·E·V). "chunked" is a loop over
        chunks, O(L·(E·V + chunk·(E + V))): within one, the steps of the delta rule are a triangular system
        (Yang 2024, arXiv 2406.06484). "parallel" is one chunk. "auto" is a compiled kernel where one applies (see
        :func:`gated_recurrence`), else "recurrent" for one step and "chunked" otherwise.
    chunk : int, default 64
        Length of a chunk; it need not divide L.
    state : LinearState, or pair (matrix, None), optional
        W before the first step, transposed: (B, H, F, V); None is zeros.
    valid_lens : Tensor (B,) of int, optional
        Number of valid steps per sequence; later steps write nothing.
    return_state : bool, default False
        Whether to also return W after the last step.

    Returns
    -------
    output : Tensor (B, H, L, V)
    state : LinearState
        Only if requested: matrix (B, H, F, V), normalizer None.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, the expected value and the actual one.

    Notes
    -----
    Inputs in float16 and bfloat16 are summed in float32. On a CPU, a key or value that is not finite
    affects its own and later queries alone.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.linear.fast_weights import fast_weights
    >>> key = torch.eye(2)[[0, 1, 0]].view(1, 1, 3, 2)  # the third step writes under the key of the first
    >>> value = torch.tensor([1.0, 2.0, 5.0]).view(1, 1, 3, 1)
    >>> fast_weights(key, key, value, rule="sum").flatten()
    tensor([1., 2., 6.])
    >>> fast_weights(key, key, value, rule="delta").flatten()
    tensor([1., 2., 5.])
    """
    name = "fast_weights"
    function = check_options(name, feature_map, form, chunk)
    _rule(name, rule, feature_norm)
    query, key, value = inputs(name, query, key, value, is_causal=True)
    dtype, rate = query.dtype, _rate(name, beta, key)
    with autocast_suspended(query.device.type):
        query, key, value, real = zero_padding(name, query, key, value, valid_lens)
        if rate is not None:
            rate = rate.to(key.dtype).unsqueeze(-1)
            rate = rate if real is None else torch.where(real, rate, 0.0)
        query, key = features(name, lambda x: _unit(function(x), feature_norm), query, key, real)
        matrix, _ = initial(name, state, key, value, normalized=False)
        steps = Steps(query, key, value, rate=rate, delta=rule == "delta")
        output, matrix = recur(steps, matrix, form=form, chunk=chunk)
    return (output.to(dtype), LinearState(matrix)) if return_state else output.to(dtype)


def _rule(function: str, rule: Any, feature_norm: Any) -> None:
    OneOf(RULES)(function, "rule", rule)
    OneOf((*_ORDERS, None))(function, "feature_norm", feature_norm)


def _rate(function: str, beta: Any, key: Tensor) -> Tensor | None:
    if beta is None:
        return None
    floats(function, "beta", beta, *key.shape[:-1])
    return beta


def _unit(rows: Any, norm: str | None) -> Any:
    """Return rows divided by their norm; rows of zeros stay zeros."""
    if norm is None or not isinstance(rows, Tensor):
        return rows
    total = torch.linalg.vector_norm(rows, _ORDERS[norm], -1, keepdim=True)
    return rows / torch.where(total == 0, 1.0, total)


@mechanism(
    formula="W += β (v − W φ(k)) φ(k)ᵀ, or W += v φ(k)ᵀ; y = W φ(q)",
    sources=("schmidhuber1992", "schlag2021", "yang2024"),
    learned="W_q (C, C), W_k (C, Ck), W_v (C, Cv), W_o (C, C), biases; with the delta rule W_β (H, Ck), b_β (H)",
    cost="O(L·E·V)",
    causal="yes",
)
class FastWeights(ProjectedHeads):
    """Multi-head fast weights: every step updates and then reads each head's W, so the layer is always causal.

    The delta rule, ``W += β (v − W φ(k)) φ(k)ᵀ`` with a learned β = σ(W_β x + b_β) per head and step, is that of Schlag
    (2021, arXiv 2102.11174), computed in chunks as Yang does (2024, arXiv 2406.06484). The sum rule,
    ``W += v φ(k)ᵀ``, is Schmidhuber's (1992). A step returns the projection of ``W φ(q)``.

    Parameters
    ----------
    embed_dim : int
        Width C of queries and outputs.
    num_heads : int
        Number of heads H, which divides ``embed_dim``. Each head has width C/H.
    rule : {"delta", "sum"}, default "delta"
    feature_norm : {"auto", "l1", "l2"} or None, default "auto"
        Norm that φ(q) and φ(k) are divided by. "auto" is "l1" for the delta rule, which needs it for stability, and
        None for the sum rule.
    kdim, vdim : int, optional
        Widths of keys and values; defaults to C.
    bias : bool, default True
        Whether the four projections have a bias.
    feature_map : {"elu", "relu", "identity"} or callable, default "elu"
        φ, from (B, H, L, C/H) to (B, H, L, F). A module is trained with the layer.
    form, chunk
        See :func:`fast_weights`.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.linear.fast_weights import FastWeights
    >>> layer = FastWeights(8, 2)
    >>> x = torch.randn(2, 5, 8)
    >>> y, state = layer(x, valid_lens=torch.tensor([3, 5]), return_state=True)
    >>> y.shape, state.matrix.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 2, 4, 4]))
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, rule: str = "delta", feature_norm: str | None = "auto", **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if feature_norm == "auto":
            feature_norm = "l1" if rule == "delta" else None
        _rule(type(self).__name__, rule, feature_norm)
        self.rule, self.feature_norm = rule, feature_norm
        where = self.out_proj.weight
        self.beta_proj = (
            nn.Linear(self.kdim, self.num_heads, device=where.device, dtype=where.dtype) if rule == "delta" else None
        )
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        state: tuple[Tensor, Tensor | None] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, LinearState]:
        """Return the output of each step.

        Parameters
        ----------
        query : Tensor (B, L, C)
        key : Tensor (B, L, Ck), optional
            Defaults to ``query``; padded queries then count as zeros.
        value : Tensor (B, L, Cv), optional
            Defaults to ``key``.
        valid_lens : Tensor (B,) of int, optional
            Number of valid steps per sequence; later steps write nothing.
        state : LinearState, optional
            The state after earlier steps.
        return_state : bool, default False
            Whether to also return the state.

        Returns
        -------
        output : Tensor (B, L, C)
        state : LinearState
            Only if requested.
        """
        q, k, v, x = self._project(query, key, value, valid_lens)
        answer = fast_weights(
            q,
            k,
            v,
            None if self.beta_proj is None else self.beta_proj(x).sigmoid().transpose(1, 2),
            rule=self.rule,
            feature_map=self.feature_map,
            feature_norm=self.feature_norm,
            form=self.form,
            chunk=self.chunk,
            state=state,
            valid_lens=valid_lens,
            return_state=True,
        )
        return self._merge(answer, return_state)

    def extra_repr(self) -> str:
        """Return the settings, without the projections'."""
        return f"{super().extra_repr()}, rule={self.rule!r}"
