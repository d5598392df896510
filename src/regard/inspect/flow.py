"""Attention flow: how much can pass from each output to each input when layers are pipes as wide as their weights.

Dimensions: L queries, S keys, n layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard._errors import rejected
from regard.inspect.record import Record
from regard.inspect.rollout import LayerLike, mixed_weights

#: Capacities are integers: multiples of this part of one. What leaves a node is 1, so that sums stay below 2³¹.
_UNIT = 2.0**-30


def flow(
    record: Record,
    *,
    batch: int = 0,
    head_fusion: str = "mean",
    residual: float = 0.5,
    layers: Sequence[LayerLike] | None = None,
    rows: slice | None = None,
) -> Tensor:
    """Return the maximum flow from each output of a stack of layers to each input.

    The nodes are the positions before and after each layer, and an edge from position i after a layer to position j
    before it has the capacity Â_ij of :func:`rollout` (Abnar and Zuidema 2020, arXiv 2005.00928). Rows do not sum to
    one: each flow is found by itself. The authors' pictures divide each row by its sum.

    Parameters
    ----------
    record, batch, head_fusion, residual, layers
        As :func:`rollout` takes them.
    rows : slice, optional
        Which outputs; all by default. Each takes S flows through n · S² edges.

    Returns
    -------
    Tensor (L, S) of float32
        ``[i, j]``: the flow from output i to input j, in [0, 1].

    Raises
    ------
    ValueError
        If an argument is out of range, or the layers are not all of one sequence.
    ImportError
        Without SciPy (``regard[sklearn]``).

    Notes
    -----
    Capacities are rounded to multiples of 2⁻³⁰. By the theorem of maximum flow and minimum cut a flow is off by
    at most 2⁻³¹ for each edge of a minimum cut, of which there are n · S² at most; the weights
    themselves are rounded to float32, which is coarser for all that exceed 2⁻⁷.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, flow
    >>> query = torch.zeros(1, 2, 3, 4)
    >>> with capture() as record:
    ...     out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    >>> flow(record)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.2500, 0.7500, 0.0000],
            [0.1667, 0.1667, 0.6667]])
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    if rows is not None and not isinstance(rows, slice):
        raise rejected("flow", "rows", "be a slice", repr(rows))
    matrices = mixed_weights("flow", record, batch, head_fusion, residual, 0.0, layers)
    n, S = len(matrices), len(matrices[0])
    capacities = np.rint(torch.stack(matrices).numpy() / _UNIT).astype(np.int32)
    layer, query, key = capacities.nonzero()
    # Node layer · S + position: position before layer 0 is an input, position after layer n − 1 an output.
    edges = ((layer + 1) * S + query, layer * S + key)
    graph = coo_array((capacities[layer, query, key], edges), shape=((n + 1) * S,) * 2).tocsr()
    outputs = range(S) if rows is None else range(S)[rows]
    flows = [[maximum_flow(graph, n * S + output, each).flow_value for each in range(S)] for output in outputs]
    return torch.tensor(flows, dtype=torch.float64).reshape(len(outputs), S).mul(_UNIT).float()
