"""Where two runs attend differently.

Dimensions: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor

from regard._errors import described, rejected
from regard.inspect.layer_record import LayerRecord
from regard.inspect.record import Record


@overload
def difference(first: LayerRecord, second: LayerRecord, **part: int | slice | None) -> Tensor: ...
@overload
def difference(first: Record, second: Record, **part: int | slice | None) -> dict[str, Tensor]: ...
def difference(first: Any, second: Any, **part: int | slice | None) -> Tensor | dict[str, Tensor]:
    """Return the weights of one run minus those of another.

    Parameters
    ----------
    first, second : LayerRecord or Record
        Of one shape; two records have layers of the same names.
    batch, head, rows, cols : int or slice, optional
        The part of each matrix, as :meth:`LayerRecord.weights` takes it.

    Returns
    -------
    Tensor (B, H, L, S) of float32, or dict of str to Tensor
        Positive where the first attends more; for records, the latest run of each layer by its name.

    Raises
    ------
    TypeError
        If the two are not of one kind.
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
    if not isinstance(first, Record) or not isinstance(second, Record):
        got = f"{described(first)} and {described(second)}"
        raise rejected("difference", "records", "be two of Record or two of LayerRecord", got, TypeError)
    if set(first.layers) != set(second.layers):
        odd = sorted(set(first.layers) ^ set(second.layers))
        raise rejected("difference", "records", "have layers of the same names", f"{odd[0]!r} in one of them")
    return {name: difference(first[name], second[name], **part) for name in first.layers}
