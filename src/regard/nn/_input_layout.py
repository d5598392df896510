"""How inputs of multi-head attention may lie, as torch has it: with or without a batch, the batch first or second.

Dimensions: B batch, N rows, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard._aux import FIELDS, Aux, TopK
from regard._errors import described, rejected, shape


def check_inputs(layer: str, inputs: Sequence[Any], widths: Sequence[int], batch_first: bool) -> bool:
    """Return whether query, key and value, of these widths, have a batch dimension; raise for those that are wrong."""
    query, key, value = inputs
    dims = query.dim() if isinstance(query, Tensor) and query.dim() in (2, 3) else 3
    for name, width, x in zip(("query", "key", "value"), widths, inputs):
        wanted = f"(N, {width})" if dims == 2 else f"(B, N, {width})" if batch_first else f"(N, B, {width})"
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise rejected(layer, name, f"be a float tensor {wanted}", described(x), TypeError)
        if (
            x.dim() != dims
            or x.shape[-1] != width
            or batch_and_length(x, batch_first)[0] != batch_and_length(query, batch_first)[0]
        ):
            context = "" if name == "query" else f" (query {shape(query)})"
            raise rejected(layer, name, f"have shape {wanted}", f"{shape(x)}{context}")
    if batch_and_length(key, batch_first) != batch_and_length(value, batch_first):
        raise rejected(layer, "value", f"be as long as key {shape(key)}", shape(value))
    return dims == 3


def batch_and_length(x: Tensor, batch_first: bool) -> tuple[int, int]:
    """Return B and N of an input."""
    if x.dim() == 2:
        return 1, x.shape[0]
    return (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])


def as_batch_first(x: Tensor, batch_first: bool) -> Tensor:
    """Return an input as (B, N, E)."""
    return x.unsqueeze(0) if x.dim() == 2 else x if batch_first else x.transpose(0, 1)


def unbatched(aux: Aux | None) -> Aux | None:
    """Return the fields of a batch of one without the dimension for it."""
    found: dict[str, Any] = {}
    for name in FIELDS if aux is not None else ():
        field = getattr(aux, name)
        if isinstance(field, Tensor):
            found[name] = field.squeeze(0)
        elif isinstance(field, TopK):
            found[name] = TopK(field.weights.squeeze(0), field.indices.squeeze(0))
    return None if aux is None else replace(aux, **found)
