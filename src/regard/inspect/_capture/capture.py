"""Record what a model attends to while it runs as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from regard._utils.errors import RegardWarning, rejected, unknown_name
from regard._utils.torch_private import is_compiled, is_forced_eager, uncompiled
from regard.inspect._capture.interception import telling
from regard.inspect._capture.record import Record
from regard.inspect._record.recording import PRECISIONS

#: How compiled code is recorded.
_EAGER = 'torch.compiler.set_stance("force_eager") around the capture runs it as it was written'
#: What is kept of a call.
KEPT = ("rows", "summaries")


@contextmanager
def capture(
    model: nn.Module | None = None, *, layers: Sequence[int | str] | None = None, precision: str = "float32",
    keep: str = "rows", topk: int = 8, gradients: bool = False,
) -> Iterator[Record]:  # fmt: skip
    """Record the attention of a model, or of everything that runs in a ``with`` block.

    It sees :func:`regard.attention`, all layers of :mod:`regard.nn` that call it, torch's
    ``scaled_dot_product_attention``, ``flex_attention`` (also a compiled one) and modules with their fast paths, every
    attention of Hugging Face's transformers, "eager" included, and any softmax that a module multiplies with values.
    Queries and keys are kept, as they are after rotary positions; weights are computed when they are read. Of a softmax
    that no function of attention computes, the weights themselves are kept, B · H · L · S numbers. The model's outputs
    do not change by one bit.

    The model is followed into every thread that runs it; without a model, calls of the block's own thread are recorded.
    Of a beam search of transformers, each sequence has the rows of the beams that it came by. When the block ends,
    ``record.coverage`` says what was recorded and what was not, and a warning says so where something is missing.

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
    keep : {"rows", "summaries"}
        "summaries" computes, while the model runs, each layer's ``topk``, ``entropy``, ``received`` and ``pyramid``,
        and lets go of queries and keys: an :class:`AttentionSummary`, whose memory grows with L + S.
    topk : int
        How many weights of each query summaries keep.
    gradients : bool
        Keep values and, when a backward pass comes by, the outputs' gradients, of which
        :meth:`AttentionRecord.gradients` makes those in the weights.

    Yields
    ------
    Record
        Empty at first; it fills as layers run.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these.

    Warns
    -----
    RegardWarning
        If something ran unrecorded, once, when the block ends: see :class:`regard.inspect._record.recording.Coverage`.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> with capture(model) as record, torch.no_grad():
    ...     out = model(torch.randn(2, 5, 16))
    >>> torch.allclose(record["self_attn"].weights(batch=0, head=1).sum(-1), torch.ones(5))
    True
    """
    if precision not in PRECISIONS:
        raise unknown_name("capture", "precision", precision, PRECISIONS)
    if model is not None and not isinstance(model, nn.Module):
        raise rejected("capture", "model", "be a torch.nn.Module", type(model).__name__, TypeError)
    if keep not in KEPT:
        raise unknown_name("capture", "keep", keep, KEPT)
    if gradients and keep == "summaries":
        raise rejected("capture", "gradients", "be False where summaries are kept", gradients)
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise rejected("capture", "topk", "be an int of at least 1", repr(topk))
    names = {} if model is None else {id(module): name for name, module in uncompiled(model).named_modules()}
    record = Record(
        names, PRECISIONS[precision], layers, topk=topk if keep == "summaries" else None, gradients=gradients
    )
    try:
        with telling(record, model):
            yield record
    finally:
        record.coverage = record.ledger.coverage(record.layers, _notes(record, model))
    if not record.coverage.complete:
        warnings.warn(f"capture: {record.coverage}", RegardWarning, stacklevel=3)


def _notes(record: Record, model: nn.Module | None) -> Iterator[str]:
    """Yield what else is to be said of a record."""
    if model is not None and any(map(is_compiled, model.modules())) and not is_forced_eager():
        yield f"What torch.compile has compiled runs where no call is seen: {_EAGER}."
    elif not len(record) and record.tracker.layers:
        yield f"None of the layers that ran is among layers={record.wanted!r}: {', '.join(record.tracker.layers[:4])}."
    elif not len(record) and model is not None and not record.ledger.modules:
        yield (
            "The model did not run in the block, or not where its modules are called: "
            f"in a compiled function, {_EAGER}; in another process, capture there."
        )
    elif not len(record):
        yield "Nothing that ran in the block attends in a way that is seen."
    if record.tracker.ambiguous:
        names = ", ".join(sorted(record.tracker.ambiguous)[:4])
        yield (
            f"Steps of {names} are runs of their own: several sequences read the same keys, as the beams of a search "
            "do, and which row goes on with which is not known."
        )
