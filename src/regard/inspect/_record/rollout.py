"""Attention across layers: rollout, flow, averages, and differences of two records.

Dimensions: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from regard._utils.errors import RegardWarning, described, rejected, unknown_name
from regard.inspect._record.layer_record import LayerRecord
from regard.inspect._record.numbering import found_layers, labels_of, listed
from regard.inspect._record.recording import Recording
from regard.inspect._record.tiles import tiles_of

# Combine layers: rollout from the last layer to the input, and means over heads and layers ----------------------------


#: Ways to fuse a layer's heads: some heads (h, l, s) over the first dimension, and two results. A mean is a sum first.
HEAD_FUSIONS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mean": (torch.sum, torch.add),
    "max": (torch.amax, torch.maximum),
    "min": (torch.amin, torch.minimum),
}
#: The number of rows of a matrix that are multiplied together.
_ROWS = 128
#: A layer by its number or name, or one of its runs.
LayerLike = int | str | tuple[int | str, int]


def rollout(
    record: Recording,
    *,
    batch: int = 0,
    head_fusion: str = "mean",
    residual: float = 0.5,
    discard: float = 0.0,
    layers: Sequence[LayerLike] | None = None,
) -> Tensor:
    """Return the attention rollout of a stack of layers: how much each output depends on each input.

    With A the fused weights of a layer and r the share of the residual connection,
    ``Â = normalize((1 − r) · A + r · I)`` by rows, and the rollout is the product ``Â_n · … · Â_2 · Â_1``
    (Abnar and Zuidema 2020, arXiv 2005.00928). Rows sum to one.

    Parameters
    ----------
    record : Record
    batch : int
        Which sequence.
    head_fusion : {"mean", "max", "min"}
        How to fuse the heads of a layer.
    residual : float in [0, 1]
        The share r of the residual connection; 0.5 in the paper.
    discard : float in [0, 1)
        The share of the smallest fused weights to set to zero in each row (Gildenblat 2020, vit-explain, does so over
        whole matrices). Each row keeps its largest weight.
    layers : sequence of int, str or (int or str, int), optional
        Layers from the input upward, in the order of the record, as in ``record[layer]``, or modules that contain them.
        Or single runs of a layer such as ``("albert.attention", 3)``, in the given order. All layers of attention by
        default. They must be self-attention over one sequence.

    Returns
    -------
    Tensor (L, S) of float32
        ``[i, j]``: how much output i depends on input j.

    Raises
    ------
    ValueError
        If an argument is out of range, the layers read different sequences, they cut the sequence into windows, or they
        have negative weights.

    Warns
    -----
    RegardWarning
        If layers of the model are left out by default: recurrences, or layers that were not recorded. Of a hybrid model
        the product says nothing about what these carry from position to position.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, rollout
    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> with capture(model) as record, torch.no_grad():
    ...     out = model(torch.randn(1, 5, 16))
    >>> bool(rollout(record).sum(-1).allclose(torch.ones(5)))
    True
    """
    if not 0 <= discard < 1:
        raise rejected("rollout", "discard", "be in [0, 1)", discard)
    matrices = mixed_weights("rollout", record, batch, head_fusion, residual, discard, layers)
    product = matrices[0]
    for each in matrices[1:]:
        product = _times(each, product)
    return product.float()


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return a product of matrices (S, S) without the zeros on the right of a few rows: causal layers have many."""
    S = len(left)
    reach = [_reach(left[first : first + _ROWS]) for first in range(0, S, _ROWS)]
    across = [_reach(right[first : first + _ROWS]) for first in range(0, S, _ROWS)]
    product = torch.zeros_like(left)
    for number, last in enumerate(reach):
        rows, width = slice(number * _ROWS, (number + 1) * _ROWS), max(across[: -(-last // _ROWS)], default=0)
        torch.matmul(left[rows, :last], right[:last, :width], out=product[rows, :width])
    return product


def _reach(rows: Tensor) -> int:
    """Return the number of columns up to the last one that has numbers other than 0."""
    used = rows.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def average(
    record: Recording, *, batch: int = 0, head_fusion: str = "mean", layers: Sequence[LayerLike] | None = None
) -> Tensor:
    """Return the mean of the layers' fused weights; with one layer, the mean of its heads.

    Parameters
    ----------
    record, batch, head_fusion, layers
        As in :func:`rollout`; cross-attention layers are allowed if all have one shape.

    Returns
    -------
    Tensor (L, S) of float32

    Raises
    ------
    ValueError
        If an argument is out of range, or the layers have different shapes.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import average, capture
    >>> query = torch.zeros(1, 2, 3, 4)
    >>> with capture() as record:
    ...     out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    >>> average(record, layers=[0])
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    matrices = fused_weights("average", record, batch, head_fusion, layers)
    return torch.stack(matrices).mean(0).float()


def mixed_weights(
    function: str,
    record: Recording,
    batch: int,
    head_fusion: str,
    residual: float,
    discard: float,
    layers: Sequence[LayerLike] | None,
) -> list[Tensor]:
    """Return each layer's Â (S, S) in float64, from the input upward."""
    if not 0 <= residual <= 1:
        raise rejected(function, "residual", "be in [0, 1]", residual)
    matrices = []
    for weights in fused_weights(function, record, batch, head_fusion, layers):
        L, S = weights.shape
        if L != S:
            raise rejected(function, "layers", "read their own sequence", f"{L} queries and {S} keys")
        if bool((weights < 0).any()):
            raise rejected(function, "layers", "have no negative weights", "recurrences, or differences of softmaxes")
        if dropped := int(discard * S):
            weights.scatter_(-1, weights.topk(dropped, -1, largest=False).indices, 0.0)
        weights.mul_(1 - residual).diagonal().add_(residual)
        total = weights.sum(-1, keepdim=True)
        matrices.append(weights.div_(torch.where(total > 0, total, 1.0)))  # a query may see nothing
    return matrices


def fused_weights(
    function: str, record: Recording, batch: int, head_fusion: str, layers: Sequence[LayerLike] | None
) -> list[Tensor]:
    """Return each layer's weights (L, S) in float64 with fused heads."""
    if head_fusion not in HEAD_FUSIONS:
        raise unknown_name(function, "head_fusion", head_fusion, HEAD_FUSIONS)
    runs = _chosen(function, record, layers)
    if cut := next((run for run in runs if run.windows > 1), None):
        got = f"{cut.windows} windows of each in {cut.name!r}, which do not correspond from layer to layer"
        raise rejected(function, "layers", "attend over whole sequences", got)
    shapes = sorted({run.shape[2:] for run in runs})
    if len(shapes) > 1:
        raise rejected(function, "layers", "be of one shape (L, S)", ", ".join(map(str, shapes)))
    return [_fused(run, batch, head_fusion) for run in runs]


def _fused(run: LayerRecord, batch: int, head_fusion: str) -> Tensor:
    """Return a layer's weights (L, S) in float64 with fused heads."""
    _, H, L, S = run.shape
    within, between = HEAD_FUSIONS[head_fusion]
    fused = torch.zeros(L, S, dtype=torch.float64)
    for tile in tiles_of(run, batch):
        _, l, s = tile.weights.shape  # noqa: E741
        part, new = fused[tile.first : tile.first + l, :s], within(tile.weights.double(), 0)
        part.copy_(new if tile.head == 0 else between(part, new))
    return fused / H if head_fusion == "mean" else fused


def _chosen(function: str, record: Recording, layers: Sequence[LayerLike] | None) -> list[LayerRecord]:
    if layers is None:
        found = [run for run in record if run.kind != "linear"]
        if not found:
            got = "none" if not len(record) else "recurrences alone"
            raise rejected(function, "record", "hold layers of attention", got)
        kinds = {run.kind for run in found}
        if len(kinds) > 1 or len({run.shape[2] for run in found}) > 1:
            got = "layers of several sequences" if len(kinds) == 1 else "both self- and cross-attention layers"
            raise rejected(function, "layers", "name layers of one sequence", f"{got}, {listed(record.named())}")
        if len(record) == 1 and (count := len(record.runs(found[0].name))) > 1:
            raise rejected(function, "layers", "name runs of the only layer", f"{count} runs")
        if missing := left_out(record):
            labels = zip(labels_of(record.named()), record)
            combined = ", ".join(str(label.number) for label, run in labels if run.kind != "linear")
            warnings.warn(
                f"{function}: it combines attention layer{'s' * (len(found) > 1)} {combined}. {missing}",
                RegardWarning,
                stacklevel=5,
            )
        return found
    if not layers:
        raise rejected(function, "layers", "name at least one layer", "none")
    if any(isinstance(each, tuple) for each in layers):
        return [record[each] for each in layers]
    named = record.named()
    chosen: set[int] = set()
    for each in layers:
        assert not isinstance(each, tuple)
        chosen |= set(found_layers(function, each, named, argument="layers", within=True))
    return [record[named[at].name] for at in sorted(chosen)]


def left_out(record: Recording) -> str:
    """Return a sentence about the layers of the model that are no attention layers of a record; empty without any.

    Recurrences mix positions, too, but their weights may be negative. Layers that were not recorded show as gaps in
    the numbers of names such as "layers.3.attn".
    """
    labels = zip(labels_of(record.named()), record)
    linear = [str(label.number) for label, run in labels if run.kind == "linear"]
    found = [spelled for name in record.layers if (spelled := re.fullmatch(r"(\D+\.)(\d+)(\.[^#]*)?", name))]
    numbers = {int(each[2]) for each in found}
    is_stack = len(found) == len(numbers) == len(record) and len({each[1] for each in found}) == 1
    gaps = sorted(set(range(max(numbers))) - numbers) if is_stack else []
    parts = [f"the recurrences {', '.join(linear)}"] if linear else []
    parts += [f"layers {_spans(gaps)}, which are not recorded"] if gaps else []
    return f"It leaves out {' and '.join(parts)}." if parts else ""


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as ranges.

    Examples
    --------
    >>> _spans([0, 1, 2, 4, 6, 7])
    '0–2, 4, 6–7'
    """
    spans: list[list[int]] = []
    for each in numbers:
        if spans and each == spans[-1][1] + 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


# Attention flow: the maximum flow from each output to each input, with the weights as capacities ----------------------
# Dimensions: L queries, S keys, n layers.


#: Capacities are integer multiples of this. Those that leave a node sum to 1, so all sums stay below 2³¹.
_UNIT = 2.0**-30


def flow(
    record: Recording,
    *,
    batch: int = 0,
    head_fusion: str = "mean",
    residual: float = 0.5,
    layers: Sequence[LayerLike] | None = None,
    rows: slice | None = None,
) -> Tensor:
    """Return the maximum flow from each output of a stack of layers to each input.

    The nodes are the positions before and after each layer; an edge from position i after a layer to position j before
    it has the capacity Â_ij of :func:`rollout` (Abnar and Zuidema 2020, arXiv 2005.00928). Rows do not sum to one,
    because each flow is computed separately. The authors' pictures divide each row by its sum.

    Parameters
    ----------
    record, batch, head_fusion, residual, layers
        As in :func:`rollout`.
    rows : slice, optional
        Which outputs; all by default. Each takes S flows through n · S² edges.

    Returns
    -------
    Tensor (L, S) of float32
        ``[i, j]``: the flow from output i to input j, in [0, 1].

    Raises
    ------
    ValueError
        If an argument is out of range, or the layers read different sequences.
    ImportError
        Without SciPy (``regard[sklearn]``).

    Notes
    -----
    Capacities are rounded to multiples of 2⁻³⁰. By the max-flow min-cut theorem, a flow is off by at most 2⁻³¹ for
    each edge of a minimum cut, which has at most n · S² edges. The weights themselves are float32, whose rounding is
    coarser above 2⁻⁷.

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


# Where two runs attend differently ------------------------------------------------------------------------------------
# Dimensions: B batch, H heads, L queries, S keys.


@overload
def difference(first: LayerRecord, second: LayerRecord, **part: int | slice | None) -> Tensor: ...
@overload
def difference(first: Recording, second: Recording, **part: int | slice | None) -> dict[str, Tensor]: ...
def difference(first: Any, second: Any, **part: int | slice | None) -> Tensor | dict[str, Tensor]:
    """Return the weights of one run minus those of another.

    Parameters
    ----------
    first, second : LayerRecord or Record
        Two runs of one shape, or two records with the same layer names.
    batch, head, rows, cols : int or slice, optional
        The part of each matrix, as in :meth:`LayerRecord.weights`.

    Returns
    -------
    Tensor (B, H, L, S) of float32, or dict of str to Tensor
        Positive where the first attends more; for records, the latest run of each layer by name.

    Raises
    ------
    TypeError
        If the two have different types.
    ValueError
        If names or shapes differ.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, difference
    >>> query = torch.zeros(1, 1, 2, 4)
    >>> with capture() as record:
    ...     for causal in (True, False):
    ...         out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
    >>> difference(record[0, 0], record[0, 1], batch=0, head=0)
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  0.0000]])
    """
    if isinstance(first, LayerRecord) and isinstance(second, LayerRecord):
        if first.shape != second.shape:
            raise rejected("difference", "records", "be of one shape", f"{first.shape} and {second.shape}")
        return first.weights(**part) - second.weights(**part)
    if not isinstance(first, Recording) or not isinstance(second, Recording):
        got = f"{described(first)} and {described(second)}"
        raise rejected("difference", "records", "be two Records or two LayerRecords", got, TypeError)
    if set(first.layers) != set(second.layers):
        odd = sorted(set(first.layers) ^ set(second.layers))
        raise rejected("difference", "records", "have the same layer names", f"{odd[0]!r} in only one of them")
    return {name: difference(first[name], second[name], **part) for name in first.layers}
