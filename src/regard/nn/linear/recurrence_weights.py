"""A gated recurrence as a matrix: the effective weight of each step's value in each later output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._utils.constraints import size
from regard.nn.linear.gated import gated_recurrence


def gated_recurrence_weights(query: Tensor, key: Tensor, *, num_heads: int | None = None, **options: Any) -> Tensor:
    """Return the matrix W (B, H, L, L) for which the outputs of :func:`gated_recurrence` are ``W @ value``.

    A recurrence is linear in its values: output i is ``Σ_{j≤i} W_ij v_j``, where W depends on queries, keys, decay and
    rates alone. With the delta rule a weight also counts what later steps erase, so it may be negative. This shows a
    recurrence as a map, as attention weights show softmax; the cost grows with L².

    Parameters
    ----------
    query, key : Tensor (B, G, L, K)
    num_heads : int, optional
        Number of heads H of the values; defaults to G.
    **options
        ``log_decay``, ``rate``, ``erase``, ``delta``, ``bonus``, ``scale``, ``valid_lens``, ``documents``, ``form`` and
        ``chunk`` of :func:`gated_recurrence`. There is no state before the first step.

    Returns
    -------
    Tensor (B, H, L, L)
        Weight of value j (last) in output i; 0 for j > i.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; see :func:`gated_recurrence`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import gated_recurrence, gated_recurrence_weights
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    >>> gates = {"log_decay": -torch.rand(1, 2, 5), "rate": torch.rand(1, 2, 5), "delta": True}
    >>> k = torch.nn.functional.normalize(k, dim=-1)
    >>> weights = gated_recurrence_weights(q, k, **gates)
    >>> torch.allclose(weights @ v, gated_recurrence(q, k, v, **gates), atol=1e-5)
    True
    """
    B, G, L, _ = query.shape
    H = G if num_heads is None else size("gated_recurrence_weights", "num_heads", num_heads)
    # The values e_1 … e_L, so that output i is row i of W.
    each = torch.eye(L, dtype=query.dtype, device=query.device).expand(B, H, L, L)
    return gated_recurrence(query, key, each, **options)
