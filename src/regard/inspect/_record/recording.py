"""What a capture recorded of a model, and what it missed."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn

from regard._utils.errors import rejected, unknown_name
from regard.inspect._record.beam_search import UNFOLLOWED, BeamSearch
from regard.inspect._record.calls import AttentionCall, Projected
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.layer_tracker import Caller, LayerTracker, chosen, runs_of_module
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Text, as_texts, texts_of

#: Class names of attention modules, and the attribute names that models use for them.
_CLASS = re.compile(r"att(entio)?n|mha$|mhsa|gpsa|xca")
_NAMES = ("attn", "attention", "self_attn", "cross_attn", "self_attention", "cross_attention")
#: Class names of their parts that compute no attention.
_PART = re.compile(r"(output|bias|dropout|mask\w*|norm|embeddings?|intermediate|config|processor)\d*$")
#: How many modules a warning names.
_NAMED = 4
#: The default reason for an unrecorded module.
UNKNOWN = "its attention is not a softmax whose product with values could be followed"


@dataclass(frozen=True)
class Unrecorded:
    """A module that looks like attention and ran, but is missing from the record, wholly or in part.

    Attributes
    ----------
    module : str
        Its name in the model; empty for a capture without a model.
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
    """What a capture recorded, and what it missed.

    Attributes
    ----------
    recorded : tuple of str
        The names of the layers in the record.
    unrecorded : tuple of Unrecorded
        Modules that look like attention and ran, with at least some runs missing from the record.
    notes : tuple of str
        Sentences about anything else that is missing: calls in other threads, compiled code, tensors without
        values, an empty record.

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
    """What a capture misses, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed: dict[tuple[str, str], Counter[str]] = {}
        self._skipped: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        #: How many modules ran.
        self.modules = 0

    def miss(self, module: str, class_name: str, reason: str) -> None:
        """Note that a module ran without its attention being recorded."""
        with self._lock:
            self._missed.setdefault((module, class_name), Counter())[reason] += 1

    def skip(self, why: str) -> None:
        """Count a call that is not recorded; ``why`` completes a sentence that begins with a number of calls."""
        with self._lock:
            self._skipped[why] += 1

    def note(self, sentence: str) -> None:
        """Add a note; the same one is added once."""
        with self._lock:
            self._notes[sentence] = None

    def coverage(self, recorded: Iterable[str], notes: Iterable[str] = ()) -> Coverage:
        """Return the coverage so far."""
        missed = [
            Unrecorded(module, kind, counts.total(), counts.most_common(1)[0][0])
            for (module, kind), counts in self._missed.items()
        ]
        skipped = [f"{count} {_calls(count)} {why}." for why, count in self._skipped.items()]
        return Coverage(tuple(recorded), tuple(missed), (*skipped, *self._notes, *notes))


def looks_like_attention(module: nn.Module, name: str) -> bool:
    """Whether a module's class name, or its name in its parent, mentions attention.

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


# What a model attended to: queries and keys of each layer, from which weights are computed on demand ------------------
# Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.


#: The dtypes in which queries and keys are kept.
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


class Recording:
    """What a model attended to, layer by layer; :class:`Record` adds files and pages.

    ``record[layer]`` is the latest run of a layer, by its name or its number in the order of first runs;
    ``record[layer, 0]`` is its first run.

    Attributes
    ----------
    names : dict of int to str
        The names of the model's modules by ``id(module)``.
    wanted : sequence of int or str, optional
        The layers to keep; None keeps all.
    title : str
        The heading of pictures and pages.
    texts : tuple of Text
        The text that was read, or the texts that were read and written; see :meth:`describe`.
    sequence : int
        Which sequence of the batch has these texts; others are shown with numbers instead of tokens.
    coverage : Coverage
        What was recorded and what was missed; set when the block of the capture ends.
    """

    def __init__(
        self, names: dict[int, str], dtype: torch.dtype, layers: Sequence[int | str] | None = None,
        *, topk: int | None = None, gradients: bool = False,
    ) -> None:  # fmt: skip
        self.names, self.gradients = names, gradients
        self._dtype, self.wanted, self._topk = dtype, layers, topk
        self.title = ""
        self.texts: tuple[Text, ...] = ()
        self.sequence = 0
        self._runs: dict[str, list[LayerRecord]] = {}
        self.tracker, self.ledger, self.coverage = LayerTracker(), Ledger(), Coverage()
        self._lock = threading.RLock()
        #: The running beam search of each thread.
        self._searches: dict[int, BeamSearch] = {}

    def add(self, caller: Caller, attended: AttentionCall | Projected) -> None:
        """Keep a call of a layer, if it is wanted: append it to the run that it continues, or begin a new run."""
        with self._lock:
            search = self._searches.get(threading.get_ident())
            if search is not None and isinstance(attended, AttentionCall):
                layer = self._named(caller, self.tracker.layer_of(caller))
                if self._wants(layer):
                    search.add(layer, caller, attended.kept(self._dtype))
                return
            call = attended.flat() if isinstance(attended, AttentionCall) else None
            of, first = self.tracker.run_of(caller, *(None, None) if call is None else (call.query, call.marks))
            if first is None:
                self._named(caller, of.layer)
            if not self._wants(of.layer):
                return
            if first is not None and call is not None:
                call = replace(call, first=first)
                self._runs[of.layer][of.number].grow(call if self._topk else call.kept(self._dtype))
            else:
                self._begin(of.layer, caller, call or attended)

    def _begin(self, layer: str, caller: Caller, call: AttentionCall | Projected) -> LayerRecord:
        """Begin a new run of a layer."""
        if self._topk:
            run: LayerRecord = AttentionSummary(layer, call, self._topk, caller.reads, caller.windows)
        else:
            run = AttentionRecord(layer, call.kept(self._dtype), caller.reads, caller.windows)
        self._runs.setdefault(layer, []).append(run)
        return run

    @contextmanager
    def beam_search(self) -> Iterator[BeamSearch]:
        """Collect the calls of this thread, one row per beam, until the search knows the beams of each sequence."""
        search = self._searches[threading.get_ident()] = BeamSearch()
        try:
            yield search
        finally:
            del self._searches[threading.get_ident()]
            with self._lock:
                self._add_beams(search)

    def _add_beams(self, search: BeamSearch) -> None:
        followed = search.followed()
        if followed is None and search.calls:
            self.ledger.note(UNFOLLOWED)
        for layer, calls in search.calls.items():
            caller = calls[0][0]
            if followed is None:
                for each, call in calls:
                    self.tracker.begin(each.name, layer)
                    self._begin(layer, each, call)
                continue
            self.tracker.begin(caller.name, layer)
            first, *others = followed[layer]
            run = self._begin(layer, caller, first)
            for call in others:
                run.grow(call)

    def _named(self, caller: Caller, layer: str) -> str:
        """Return a layer's name; if it is the second of its module, number the first one too."""
        if layer == f"{caller.name}#2":
            self._rename(caller.name, f"{caller.name}#1")
        return layer

    def _rename(self, layer: str, name: str) -> None:
        self._runs = {name if each == layer else each: runs for each, runs in self._runs.items()}
        for run in self._runs.get(name, ()):
            run.name = name
        for search in self._searches.values():
            search.rename(layer, name)

    def _wants(self, layer: str) -> bool:
        layers = self.tracker.layers
        return self.wanted is None or any(chosen(layer, layers, each) for each in self.wanted)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers, in the order of their first calls."""
        return tuple(self._runs)

    @property
    def nbytes(self) -> int:
        """The size of all kept tensors in bytes."""
        return sum(run.nbytes for runs in self._runs.values() for run in runs)

    def runs(self, layer: int | str) -> list[LayerRecord]:
        """Return all runs of a layer; the name of a module with several layers returns the runs of all of them."""
        if not self._runs:
            raise rejected("record", "layer", "be a recorded layer", "an empty record")
        if isinstance(layer, str):
            runs = self._runs.get(layer) or runs_of_module(self._runs, layer)
            if not runs:
                raise unknown_name("record", "layer", layer, self._runs)
            return runs
        names = self.layers
        if not isinstance(layer, int) or not -len(names) <= layer < len(names):
            raise rejected("record", "layer", f"be a name, or a number below {len(names)}", repr(layer))
        return self._runs[names[layer]]

    def __getitem__(self, layer: int | str | tuple[int | str, int]) -> LayerRecord:
        which = -1
        if isinstance(layer, tuple):
            layer, which = layer
        runs = self.runs(layer)
        if not -len(runs) <= which < len(runs):
            raise rejected("record", "run", f"be below {len(runs)}, the number of runs of the layer", which)
        return runs[which]

    def __iter__(self) -> Iterator[LayerRecord]:
        return (runs[-1] for runs in self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layers, {self.nbytes / 2**20:.1f} MiB)"

    def describe(self, *texts: Text | Sequence[str], title: str = "", sequence: int = 0) -> Self:
        """Name the tokens that were read, for pictures and pages, and return the record.

        Parameters
        ----------
        *texts : Text or sequence of str
            The text; or the text that an encoder read and the text that a decoder wrote.
        title : str
        sequence : int
            Which sequence of the batch has these texts.

        Raises
        ------
        ValueError
            If the number of tokens differs from the rows or columns of a layer, or the batch has fewer sequences.
        """
        given = as_texts(texts)
        for run in self:
            texts_of(given, run)
            if not 0 <= sequence < run.shape[0]:
                raise rejected("record", "sequence", f"be below {run.shape[0]}, the batch size", sequence)
        self.texts, self.title, self.sequence = given, title, sequence
        return self

    def texts_of(self, run: LayerRecord, sequence: int) -> tuple[Text, Text]:
        """Return the tokens of a layer's queries and keys in one sequence; numbers for a sequence without texts.

        Raises
        ------
        ValueError
            If the texts do not fit.
        """
        return texts_of(self.texts if sequence == self.sequence else (), run)
