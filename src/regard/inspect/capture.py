"""Record what a model attends to while it runs as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from regard._errors import rejected, unknown_name
from regard.inspect.interception import telling
from regard.inspect.record import PRECISIONS, Record


@contextmanager
def capture(
    model: nn.Module | None = None, *, layers: Sequence[int | str] | None = None, precision: str = "float32"
) -> Iterator[Record]:
    """Record the attention of a model, or of everything that runs in a ``with`` block.

    Seen are :func:`regard.attention`, all layers of :mod:`regard.nn` that call it, torch's
    ``scaled_dot_product_attention`` and its modules with their fast paths, whoever calls them, and every attention of
    Hugging Face's transformers, "eager" included. Queries and keys are kept, as they are after rotary
    positions; weights are computed when they are read. The model's outputs do not change by one bit.

    Parameters
    ----------
    model : Module, optional
        Whose modules give the layers their names; without it, names are empty.
    layers : sequence of int or str, optional
        Which layers to keep: their numbers in the order in which they run, or names of modules that they are or that
        hold them. All by default.
    precision : {"float32", "float16"}
        What queries and keys are kept in. A number in float16 is off by 2⁻¹¹ of itself at most, so that a score q·k is
        by 2⁻¹⁰ · Σ |q_e k_e| · scale at most, to first order, and a weight by twice that share of itself.

    Yields
    ------
    Record
        Empty at first; it fills as layers run.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> with capture(model) as record, torch.no_grad():
    ...     out = model(torch.randn(2, 5, 16))
    >>> record["self_attn"].weights(batch=0, head=1).sum(-1)
    tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000])
    """
    if precision not in PRECISIONS:
        raise unknown_name("capture", "precision", precision, PRECISIONS)
    if model is not None and not isinstance(model, nn.Module):
        raise rejected("capture", "model", "be a torch.nn.Module", type(model).__name__, TypeError)
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    record = Record(names, PRECISIONS[precision], layers)
    with telling(record):
        yield record
