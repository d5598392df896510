"""What a capture saw of a model, and what it did not."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

#: Classes of modules that attend, and the names that models give such modules.
_CLASS = re.compile(r"att(entio)?n|mha$|mhsa|gpsa|xca")
_NAMES = ("attn", "attention", "self_attn", "cross_attn", "self_attention", "cross_attention")
#: Classes of parts of them that do not attend themselves.
_PART = re.compile(r"(output|bias|dropout|mask\w*|norm|embeddings?|intermediate|config|processor)\d*$")
#: Modules that a warning names.
_NAMED = 4
#: Why a module is unrecorded where nothing more is known.
UNKNOWN = "its attention is not a softmax whose product with values could be followed"


@dataclass(frozen=True)
class Unrecorded:
    """A module that looks like attention, ran, and is not in the record, or not with all that it attended to.

    Attributes
    ----------
    module : str
        Its name in the model; empty where the capture was given no model.
    class_name : str
    runs : int
        How often it ran unrecorded.
    reason : str
    """

    module: str
    class_name: str
    runs: int
    reason: str


@dataclass(frozen=True)
class Coverage:
    """What a capture recorded, and what it did not.

    Attributes
    ----------
    recorded : tuple of str
        The names of the layers in the record.
    unrecorded : tuple of Unrecorded
        Modules that look like attention, ran, and are missing in the record, at least from some of their runs.
    notes : tuple of str
        Sentences about everything else that is missing: calls in other threads, compiled code, tensors without
        values, a record of no layer.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> with capture(model) as record:
    ...     out, _ = model(x, x, x)
    >>> record.coverage.complete, record.coverage.unrecorded
    (True, ())
    """

    recorded: tuple[str, ...] = ()
    unrecorded: tuple[Unrecorded, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is known to be missing."""
        return not self.unrecorded and not self.notes

    def __str__(self) -> str:
        sentences = [f"{len(self.recorded)} layers are recorded."]
        for reason in dict.fromkeys(each.reason for each in self.unrecorded):
            found = [each for each in self.unrecorded if each.reason == reason]
            names = ", ".join(f"{each.module} ({each.class_name})".strip() for each in found[:_NAMED])
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            modules = "1 module that looks like attention is"
            if len(found) > 1:
                modules = f"{len(found)} modules that look like attention are"
            sentences.append(f"{modules} unrecorded, {names}{more}: {reason}.")
        return " ".join((*sentences, *self.notes))


class Ledger:
    """What happens while something is captured, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed: dict[tuple[str, str], Counter[str]] = {}
        self._left_out: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        #: Runs of modules, all of them.
        self.modules = 0

    def miss(self, module: str, class_name: str, reason: str) -> None:
        """Note that a module ran and its attention was not seen."""
        with self._lock:
            self._missed.setdefault((module, class_name), Counter())[reason] += 1

    def leave_out(self, why: str) -> None:
        """Count a call that is not recorded; ``why`` is a sentence whose subject is a number of calls."""
        with self._lock:
            self._left_out[why] += 1

    def note(self, sentence: str) -> None:
        """Note something once."""
        with self._lock:
            self._notes[sentence] = None

    def coverage(self, recorded: Iterable[str], notes: Iterable[str] = ()) -> Coverage:
        """Return what is known so far."""
        missed = [
            Unrecorded(module, kind, counts.total(), counts.most_common(1)[0][0])
            for (module, kind), counts in self._missed.items()
        ]
        left_out = [f"{count} {_calls(count)} {why}." for why, count in self._left_out.items()]
        return Coverage(tuple(recorded), tuple(missed), (*left_out, *self._notes, *notes))


def looks_like_attention(module: nn.Module, name: str) -> bool:
    """Whether a module's class, or the name its parent has for it, mentions attention.

    Examples
    --------
    >>> import torch
    >>> looks_like_attention(torch.nn.MultiheadAttention(4, 1), ""), looks_like_attention(torch.nn.Linear(4, 1), "proj")
    (True, False)
    """
    kind = type(module).__name__.lower()
    if _PART.search(kind):
        return False
    own = not type(module).__module__.startswith("torch.nn.")
    return bool(_CLASS.search(kind)) or (own and name.rpartition(".")[2] in _NAMES)


def _calls(count: int) -> str:
    return "call of attention" if count == 1 else "calls of attention"
