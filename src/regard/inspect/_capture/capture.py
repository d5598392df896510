"""Record what an unmodified model attends to while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from regard._utils.errors import RegardWarning, rejected, unknown_name
from regard._utils.torch_private import is_compiled, is_forced_eager, uncompiled
from regard.inspect._capture.interception import recording
from regard.inspect._capture.record import Record
from regard.inspect._record.recording import PRECISIONS

#: How to record compiled code.
_EAGER = 'to record it, run the capture under torch.compiler.set_stance("force_eager")'
#: What to keep of each call.
KEPT = ("rows", "summaries")


@contextmanager
def capture(
    model: nn.Module | None = None, *, layers: Sequence[int | str] | None = None, precision: str = "float32",
    keep: str = "rows", topk: int = 8, gradients: bool = False, queries: int | None = None,
    recurrences: bool = False,
) -> Iterator[Record]:  # fmt: skip
    """Record the attention of a model, or of everything that runs in a ``with`` block.

    It intercepts :func:`regard.attention` and all layers of :mod:`regard.nn` that call it; torch's
    ``scaled_dot_product_attention``, ``flex_attention`` (compiled or not) and attention modules with their fast paths;
    every attention implementation of Hugging Face's transformers, "eager" included; and any softmax that a module
    multiplies with values. It keeps queries and keys, after rotary positions, and computes weights when you read them.
    For a softmax outside an attention function it keeps the weights themselves, B · H · L · S numbers. The model's
    outputs stay the same bit for bit.

    With a model, calls are recorded in every thread that runs it; without one, only in the thread of the block. For a
    beam search of transformers, each returned sequence has the rows of its own beams. Of captures inside each other,
    the innermost that has the model records a call. When the block ends, ``record.coverage`` lists what was recorded
    and what was not, and a warning reports anything missing.

    Parameters
    ----------
    model : Module, optional
        The model whose module names become layer names; without it, names are empty.
    layers : sequence of int or str, optional
        The layers to keep, as in ``record[layer]``, or modules that contain them. All by default.
    precision : {"float32", "float16"}
        The dtype of the kept queries and keys. float16 has a relative error of at most 2⁻¹¹, so a score q·k is off by
        at most 2⁻¹⁰ · Σ |q_e k_e| · scale to first order, and the relative error of a weight is at most twice that.
    keep : {"rows", "summaries"}
        "summaries" computes each layer's ``topk``, ``entropy``, ``received`` and ``pyramid`` while the model runs and
        drops queries and keys. Each run is then an :class:`AttentionSummary`, whose memory grows with L + S.
    topk : int
        How many weights of each query summaries keep.
    gradients : bool
        Also keep values and, after a backward pass, the gradients of the outputs, from which
        :meth:`AttentionRecord.gradients` computes the gradients of the weights.
    queries : int, optional
        Keep the last queries of each call only, such as those of a question after images: memory then grows with the
        number of keys alone. All by default.
    recurrences : bool
        Also record linear attention and recurrences (DeltaNet, Mamba, RWKV and others, ours and those of transformers)
        as effective weights, which map their values to their outputs: L² numbers for each head, which may be negative.
        Layers of kind "linear".

    Yields
    ------
    Record
        Empty at first; it fills as layers run.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or value.

    Warns
    -----
    RegardWarning
        Once, when the block ends, if anything ran unrecorded: see :class:`regard.inspect._record.recording.Coverage`.

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
        raise rejected("capture", "gradients", "be False with keep='summaries'", gradients)
    if gradients and queries is not None:
        raise rejected("capture", "gradients", "be False with queries", gradients)
    if queries is not None and (isinstance(queries, bool) or not isinstance(queries, int) or queries < 1):
        raise rejected("capture", "queries", "be an int of at least 1, or None", repr(queries))
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise rejected("capture", "topk", "be an int of at least 1", repr(topk))
    names = {} if model is None else {id(module): name for name, module in uncompiled(model).named_modules()}
    record = Record(
        names, PRECISIONS[precision], layers, topk=topk if keep == "summaries" else None, gradients=gradients,
        queries=queries, recurrences=recurrences,
    )  # fmt: skip
    record.model = "" if model is None else type(uncompiled(model)).__name__
    try:
        with recording(record, model):
            yield record
    finally:
        record.settle()
        record.coverage = record.ledger.coverage(record.layers, _notes(record, model))
    if not record.coverage.complete:
        warnings.warn(f"capture: {record.coverage}", RegardWarning, stacklevel=3)


def _notes(record: Record, model: nn.Module | None) -> Iterator[str]:
    """Yield the remaining notes on what a record lacks."""
    if record.ledger.shadowed:
        yield "Calls in the block of an inner capture of the same modules are in its record alone."
    elif model is not None and any(map(is_compiled, model.modules())) and not is_forced_eager():
        yield f"Calls in code that torch.compile compiled are not recorded; {_EAGER}."
    elif not len(record) and record.tracker.layers:
        ran = ", ".join(record.tracker.layers[:4])
        yield f"No layer that ran is among layers={record.wanted!r}; these ran: {ran}."
    elif not len(record) and model is not None and not record.ledger.modules:
        yield (
            "The model did not run in the block, or it ran in a compiled function or another process: "
            f"for compiled code, {_EAGER}; for another process, capture there."
        )
    elif not len(record):
        yield "No attention that capture can see ran in the block."
    if record.tracker.ambiguous:
        names = ", ".join(sorted(record.tracker.ambiguous)[:4])
        yield (
            f"Each step of {names} is recorded as a separate run: several sequences read the same keys, as beams do, "
            "so rows cannot be matched between steps."
        )
