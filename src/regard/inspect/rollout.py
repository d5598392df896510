"""Follow attention from the last layer to the input: rollout, and means over heads and layers.

Dimensions: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard._errors import rejected, unknown_name
from regard.inspect.layer_record import LayerRecord
from regard.inspect.record import Record

#: Ways to make one matrix (L, S) of those of a layer's heads (H, L, S).
HEAD_FUSIONS = {
    "mean": lambda weights: weights.mean(0),
    "max": lambda weights: weights.amax(0),
    "min": lambda weights: weights.amin(0),
}
#: A layer by its number or name, or one of its runs.
LayerLike = int | str | tuple[int | str, int]


def rollout(
    record: Record,
    *,
    batch: int = 0,
    head_fusion: str = "mean",
    residual: float = 0.5,
    discard: float = 0.0,
    layers: Sequence[LayerLike] | None = None,
) -> Tensor:
    """Return how much each output of a stack of layers draws on each input: the product of the layers' matrices.

    With A the fused weights of a layer and r the share of the residual connection,
    ``Â = normalize((1 − r) · A + r · I)`` by rows, and the rollout is ``Â_n · … · Â_2 · Â_1``
    (Abnar and Zuidema 2020, arXiv 2005.00928). Rows sum to one.

    Parameters
    ----------
    record : Record
    batch : int
        Which sequence.
    head_fusion : {"mean", "max", "min"}
        How the matrices of a layer's heads become one.
    residual : float in [0, 1]
        The share r of the residual connection; 0.5 in the paper.
    discard : float in [0, 1)
        The share of the smallest fused weights of each row that are set to zero (Gildenblat 2020, vit-explain, does so
        over whole matrices). Each row keeps its largest weight.
    layers : sequence of int, str or (int or str, int), optional
        Layers from the input upward, in the order of the record: numbers, names of modules that they are or that hold
        them, or single runs of a layer such as ``("albert.attention", 3)``, which stay in the order given. All
        by default; they must read one sequence.

    Returns
    -------
    Tensor (L, S) of float32
        ``[i, j]``: how much output i draws on input j.

    Raises
    ------
    ValueError
        If an argument is out of range, the layers are not all of one sequence, or they cut it into windows.

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
        product = each @ product
    return product.float()


def average(
    record: Record, *, batch: int = 0, head_fusion: str = "mean", layers: Sequence[LayerLike] | None = None
) -> Tensor:
    """Return the mean of the layers' fused weights; with one layer, the mean of its heads.

    Parameters
    ----------
    record, batch, head_fusion, layers
        As :func:`rollout` takes them; layers may read another sequence if all are of one shape.

    Returns
    -------
    Tensor (L, S) of float32

    Raises
    ------
    ValueError
        If an argument is out of range, or the layers are of several shapes.

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
    record: Record,
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
        if dropped := int(discard * S):
            weights.scatter_(-1, weights.topk(dropped, -1, largest=False).indices, 0.0)
        mixed = (1 - residual) * weights + residual * torch.eye(S, dtype=weights.dtype)
        total = mixed.sum(-1, keepdim=True)
        matrices.append(torch.where(total > 0, mixed / total, mixed))  # a query may see nothing
    return matrices


def fused_weights(
    function: str, record: Record, batch: int, head_fusion: str, layers: Sequence[LayerLike] | None
) -> list[Tensor]:
    """Return each layer's weights (L, S) in float64, its heads fused."""
    if head_fusion not in HEAD_FUSIONS:
        raise unknown_name(function, "head_fusion", head_fusion, HEAD_FUSIONS)
    runs = _chosen(function, record, layers)
    if cut := next((run for run in runs if run.windows > 1), None):
        got = f"{cut.windows} windows of each in {cut.name!r}, which do not correspond from layer to layer"
        raise rejected(function, "layers", "attend over whole sequences", got)
    shapes = sorted({run.shape[2:] for run in runs})
    if len(shapes) > 1:
        raise rejected(function, "layers", "be of one shape (L, S)", ", ".join(map(str, shapes)))
    return [HEAD_FUSIONS[head_fusion](run.weights(batch=batch).double().cpu()) for run in runs]


def _chosen(function: str, record: Record, layers: Sequence[LayerLike] | None) -> list[LayerRecord]:
    if layers is None:
        record.runs(0)  # raises where nothing was recorded
        kinds = {run.kind for run in record}
        if len(kinds) > 1 or len({run.shape[2] for run in record}) > 1:
            got = "layers of several sequences" if len(kinds) == 1 else "layers that read their own and another one"
            raise rejected(function, "layers", "name layers of one sequence", got)
        if len(record) == 1 and (count := len(record.runs(0))) > 1:
            raise rejected(function, "layers", "name runs of the one layer that there is", f"{count} runs")
        return list(record)
    if not layers:
        raise rejected(function, "layers", "name a layer at least", "none")
    if any(isinstance(each, tuple) for each in layers):
        return [record[each] for each in layers]
    known = list(record.layers)
    chosen: set[int] = set()
    for each in layers:
        within = [i for i, name in enumerate(known) if isinstance(each, str) and name.startswith(f"{each}.")]
        chosen |= set(within or [known.index(record[each].name)])
    return [record[i] for i in sorted(chosen)]
