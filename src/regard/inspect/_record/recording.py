"""What a model attended to, as data: which layer each call is of, beams that are followed, coverage, and the record."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import FrameType
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard.inspect._record.calls import AttentionCall, Projected, dense_mask
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.numbering import (
    Named,
    found_layers,
    labels_of,
    matching,
    may_match,
    module_of,
    names_cross_attention,
)
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Text, as_texts, texts_of

# Find the layer that makes a call of attention, from stack frames instead of hooks, and the run that it continues -----
# Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.


_MODULE_CALL = nn.Module._call_impl.__code__
_T = TypeVar("_T")
_Call = TypeVar("_Call", AttentionCall, Projected)


@dataclass(frozen=True)
class Caller:
    """The module that makes a call of attention.

    Attributes
    ----------
    name : str
        The name of the innermost running module of the model; empty if there is none.
    model_pass : frame, optional
        The frame in which the outermost module was called.
    reads : str, optional
        "self" or "cross" attention, or "linear" for a recurrence; None if unknown.
    windows : int
        How many windows each sequence of the batch is cut into.
    skipped : int
        How many of the first queries are not kept.
    """

    name: str
    model_pass: FrameType | None
    reads: str | None = None
    windows: int = 1
    skipped: int = 0


def caller_of(names: Mapping[int, str], part: str = "") -> Caller:
    """Return the module that makes the running call; ``part`` is the name of the attention inside that module."""
    frame, name, model_pass = sys._getframe(1), None, None
    while frame is not None:
        code = frame.f_code
        outer = code is _MODULE_CALL
        if outer or (name is None and code.co_argcount and code.co_varnames[0] == "self"):
            owner = frame.f_locals.get("self")
            if id(owner) in names and isinstance(owner, nn.Module):
                name = names[id(owner)] if name is None else name
                model_pass = frame if outer else model_pass
        frame = frame.f_back  # type: ignore[assignment]
    return Caller(".".join(filter(None, (name, part))), model_pass)


@dataclass
class Run:
    """One run of a layer, which later calls may continue.

    Attributes
    ----------
    layer : str
        The name of a module; name#1, name#2 and so on if the module runs several times in one forward pass.
    number : int
        The number of the run in its layer, from 0.
    heads : int
        Query heads.
    marks : Tensor (B, G, S, 2)
        Two numbers that identify each key so far.
    thread : int
        The thread that runs it.
    """

    layer: str
    number: int
    heads: int
    marks: Tensor | None
    thread: int

    def continued_at(self, query: Tensor, marks: Tensor) -> int | None:
        """Return the position of a call's first key among this run's keys if the call continues it; None otherwise.

        A call continues the run if its keys are the previous ones (or, with a sliding window, the last of them)
        followed by one new key for each query; or if a single query reads the very same keys. In the latter case,
        sequences with equal keys, such as the beams of one source, cannot be matched to rows.
        """
        L, S = query.shape[2], marks.shape[2]
        if self.marks is None or self.heads != query.shape[1] or self.marks.shape[:2] != marks.shape[:2]:
            return None
        keys = self.marks.shape[2]
        if L == 1 < keys == S and torch.equal(self.marks, marks):
            return None if _repeated(marks) else 0
        again = S - L  # repeated keys; a beam that replaced another one has different keys
        if 0 < again <= keys and torch.equal(self.marks[:, :, keys - again :], marks[:, :, :again]):
            return keys - again
        return None

    def has_keys(self, marks: Tensor) -> bool:
        """Whether a call reads the same keys as this run."""
        return self.marks is not None and self.marks.shape == marks.shape and torch.equal(self.marks, marks)

    def extend(self, marks: Tensor, first: int) -> None:
        """Add the keys of a call, which begin at position ``first``."""
        self.marks = marks.clone() if self.marks is None else torch.cat((self.marks[:, :, :first], marks), 2)


class LayerTracker:
    """The layers of a model and their runs, in the order in which they are called.

    Attributes
    ----------
    layers : list of str
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self._runs: dict[str, list[Run]] = {}
        #: For each thread, the latest forward pass and the number of calls of each module in it.
        self._passes: dict[int, tuple[FrameType | None, dict[str, int]]] = {}
        #: Layers whose rows may have changed beams, so that each call is a separate run.
        self.ambiguous: set[str] = set()
        #: The kind and the number of queries of each module's first call.
        self._kinds: dict[str, tuple[str, int | None]] = {}

    @torch.no_grad()
    def run_of(self, caller: Caller, query: Tensor | None, marks: Tensor | None) -> tuple[Run, int | None]:
        """Return the run of a call, and the position of its first key in that run; None if it begins a new run.

        A call without queries (B, H, L, E) or key marks (B, G, S, 2) always begins a new run.
        """
        runs = self._runs.setdefault(caller.name, [])
        if query is not None and marks is not None:
            own = [run for run in reversed(runs) if run.thread == threading.get_ident()]
            for run in own:
                if (first := run.continued_at(query, marks)) is not None:
                    run.extend(marks, first)
                    return run, first
            if query.shape[2] == 1 and _repeated(marks) and any(run.has_keys(marks) for run in own):
                self.ambiguous.add(caller.name)
        L, S = (None, None) if query is None or marks is None else (query.shape[2], marks.shape[2])
        self._kinds.setdefault(caller.name, (_kind(caller, L == S), L))
        layer = self.layer_of(caller)
        heads = 0 if query is None else query.shape[1]
        number = sum(each.layer == layer for each in runs)
        run = Run(layer, number, heads, None if marks is None else marks.clone(), threading.get_ident())
        runs.append(run)
        return run, None

    def begin(self, name: str, layer: str) -> None:
        """Add a run of a layer that no later call continues."""
        runs = self._runs.setdefault(name, [])
        runs.append(Run(layer, sum(each.layer == layer for each in runs), 0, None, threading.get_ident()))

    def layer_of(self, caller: Caller) -> str:
        """Return the name of the layer for a call that begins a run, and count the call."""
        name = caller.name
        latest, counts = self._passes.get(threading.get_ident(), (None, {}))
        if caller.model_pass is None or caller.model_pass is not latest:
            counts = {}
            self._passes[threading.get_ident()] = (caller.model_pass, counts)
        count = counts.get(name, 0) + 1 if caller.model_pass is not None else 1
        counts[name] = count
        first = f"{name}#1"
        if count == 1:
            layer = first if first in self.layers else name
        else:
            layer = f"{name}#{count}"
            self.layers = [first if each == name else each for each in self.layers]
            for run in self._runs.get(name, ()):
                run.layer = first if run.layer == name else run.layer
        if layer not in self.layers:
            self.layers.append(layer)
        return layer

    def named(self) -> list[Named]:
        """Return what the numbers of the layers depend on."""
        found = []
        for each in self.layers:
            unknown = "cross" if names_cross_attention(each) else "self", None
            found.append(Named(each, *self._kinds.get(module_of(each), unknown)))
        return found

    def forget(self) -> None:
        """Release the latest forward passes, whose frames keep the model's inputs and outputs alive."""
        self._passes.clear()


def _kind(caller: Caller, reads_itself: bool) -> str:
    """Return the kind of a layer, as :attr:`LayerRecord.kind` does, from its first call."""
    if names_cross_attention(caller.name):
        return "cross"
    return caller.reads or ("self" if reads_itself else "cross")


def _repeated(marks: Tensor) -> bool:
    """Whether two sequences of a batch have the same keys, as beams of one source do."""
    rows = marks.flatten(1)
    return len(rows) > 1 and len(torch.unique(rows, dim=0)) < len(rows)


def runs_of_module(runs: Mapping[str, list[_T]], module: str) -> list[_T]:
    """Return the runs of all layers of a module, one forward pass after the other."""
    layers = [each for layer, each in runs.items() if module_of(layer) == module]
    return [run for together in zip_longest(*layers) for run in together if run is not None]


# Rows of a beam search, rearranged so that each returned sequence has the rows of its own beams -----------------------
# Dimensions: B rows of the batch (beams), R returned sequences, T steps, G key heads, S keys.


#: The note for a beam search without beam indices.
UNFOLLOWED = "Each step of a beam search is recorded as a separate run: the beams of each sequence are unknown."


@dataclass
class BeamSearch:
    """The calls of a beam search, layer by layer.

    Attributes
    ----------
    calls : dict of str to list of (Caller, AttentionCall)
        In the order of the steps.
    indices : Tensor (R, T), optional
        The row of step t from which token t of a sequence was chosen; −1 after its end.
    """

    calls: dict[str, list[tuple[Caller, AttentionCall]]] = field(default_factory=dict)
    indices: Tensor | None = None

    def add(self, layer: str, caller: Caller, call: AttentionCall) -> None:
        """Add a call of a layer."""
        self.calls.setdefault(layer, []).append((caller, call))

    def rename(self, layer: str, name: str) -> None:
        """Give a layer another name."""
        self.calls = {name if each == layer else each: calls for each, calls in self.calls.items()}

    def followed(self) -> dict[str, list[AttentionCall]] | None:
        """Return each layer's calls with the rows of the returned sequences; None if the beams are unknown."""
        if self.indices is None or not self.indices.numel():
            return None
        found: dict[str, list[AttentionCall]] = {}
        for layer, calls in self.calls.items():
            followed = _followed([call for _, call in calls], self.indices)
            if followed is None:
                return None
            found[layer] = followed
        return found


def _followed(calls: list[AttentionCall], indices: Tensor) -> list[AttentionCall] | None:
    T = indices.shape[1]
    whole = all(call.query.shape[2] == 1 for call in calls[1:])  # without a cache, each step recomputes all rows
    if len(calls) < T or not whole or int(indices.max()) >= len(calls[0].query):
        return None
    valid, rows = indices >= 0, indices.clamp(min=0)
    begins = _begins(calls[:T], rows)
    groups = max(call.key.shape[1] for call in calls)
    keys = [call.key.repeat_interleave(groups // max(call.key.shape[1], 1), 1) for call in calls[:T]]
    width = max(first + key.shape[2] for first, key in zip(begins, keys))
    R, E = len(indices), keys[0].shape[3]
    joint = keys[0].new_zeros(R, groups, width, E)
    for t, (first, key) in enumerate(zip(begins, keys)):
        joint[valid[:, t], :, first : first + key.shape[2]] = key[rows[valid[:, t], t]]
    found = []
    for t, (call, first) in enumerate(zip(calls, begins)):
        key = joint[:, :, first : first + call.key.shape[2]]
        found.append(_gathered(call, key, first, rows[:, t], valid[:, t]))
    return found


def _begins(calls: list[AttentionCall], rows: Tensor) -> list[int]:
    """Return the position of each call's first key: keys grow by one per step, or stay the same."""
    first = calls[0].key.shape[2]
    if len(calls) > 1 and calls[1].key.shape[2] == first:
        one, other = calls[0].marks, calls[1].marks
        if one is None or other is None or torch.equal(one[rows[:, 0]], other[rows[:, 1]]):
            return [0] * len(calls)
    return [first + t - call.key.shape[2] for t, call in enumerate(calls)]


def _gathered(call: AttentionCall, key: Tensor, first: int, rows: Tensor, valid: Tensor) -> AttentionCall:
    hidden = ~valid[:, None, None, None]
    mask = dense_mask(call)
    if mask is not None:
        mask = mask[rows] if len(mask) > 1 else mask
    if not bool(valid.all()):
        shown = valid[:, None, None, None].expand(-1, 1, call.query.shape[2], key.shape[2])
        if mask is None:
            mask = shown
        else:
            mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(hidden, -torch.inf)
    given = None if call.given is None else call.given[rows].masked_fill(hidden, 0.0)
    changes = tuple(
        each if each.weights is None else replace(each, weights=each.weights[rows].masked_fill(hidden, 0.0))
        for each in call.changes
    )
    query = call.query[rows]
    return replace(
        call, query=query, key=key, mask=mask, given=given, changes=changes, first=first, value=None, output=None
    )


# What a capture recorded of a model, and what it missed ---------------------------------------------------------------


#: Class names of attention modules, and the attribute names that models use for them.
_CLASS = re.compile(r"att(entio)?n|mha$|mhsa|gpsa|xca")
_NAMES = ("attn", "attention", "self_attn", "cross_attn", "self_attention", "cross_attention")
#: Class names of their parts that compute no attention.
_PART = re.compile(
    r"(output|bias|dropout|mask\w*|norm|embeddings?|intermediate|config|processor|projection|bottlenecklayer)\d*$"
)
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
        #: Whether a capture inside this one recorded calls of the same modules.
        self.shadowed = False

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

    ``record[layer]`` is the latest run of a layer, by its name or the number that pages show; ``record[layer, 0]`` is
    its first run.

    Attributes
    ----------
    names : dict of int to str
        The names of the model's modules by ``id(module)``.
    wanted : sequence of int or str, optional
        The layers to keep; None keeps all.
    model : str
        The class of the model, if there is one.
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
        *, topk: int | None = None, gradients: bool = False, queries: int | None = None, recurrences: bool = False,
    ) -> None:  # fmt: skip
        self.names, self.gradients, self.recurrences, self._queries = names, gradients, recurrences, queries
        self._dtype, self.wanted, self._topk = dtype, layers, topk
        self.model = self.title = ""
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
                    caller, attended = self._cut(caller, attended.flat())
                    search.add(layer, caller, attended.kept(self._dtype))
                return
            call = attended.flat() if isinstance(attended, AttentionCall) else None
            of, first = self.tracker.run_of(caller, *(None, None) if call is None else (call.query, call.marks))
            if first is None:
                self._named(caller, of.layer)
            if not self._wants(of.layer):
                return
            if call is None:
                assert isinstance(attended, Projected)
                self._begin(of.layer, *self._cut(caller, attended))
                return
            caller, call = self._cut(caller, call)
            if first is None:
                self._begin(of.layer, caller, call)
            else:
                call = replace(call, first=first)
                self._runs[of.layer][of.number].grow(call if self._topk else call.kept(self._dtype))

    def _cut(self, caller: Caller, attended: _Call) -> tuple[Caller, _Call]:
        """Return a call with its last queries only, if no others are wanted."""
        rows, keys = (each.shape[-2] for each in (attended.query, attended.key))
        if self._queries is None or rows <= self._queries:
            return caller, attended
        reads = caller.reads or ("self" if rows == keys else None)
        return replace(caller, reads=reads, skipped=rows - self._queries), attended.last(self._queries)

    def _begin(self, layer: str, caller: Caller, call: AttentionCall | Projected) -> LayerRecord:
        """Begin a new run of a layer."""
        if self._topk:
            run: LayerRecord = AttentionSummary(layer, call, self._topk, caller.reads, caller.windows)
        else:
            run = AttentionRecord(layer, call.kept(self._dtype), caller.reads, caller.windows)
        run.skipped = caller.skipped
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
        """Whether to keep a layer, at least until :meth:`settle` knows the numbers of all."""
        if self.wanted is None:
            return True
        at, named = self.tracker.layers.index(layer), self.tracker.named()
        return any(may_match(each, at, named) for each in self.wanted)

    def settle(self) -> None:
        """Drop the layers that turned out not to be wanted, once all of them have run."""
        if self.wanted is None:
            return
        named = self.tracker.named()
        kept = {named[at].name for each in self.wanted for at in matching(each, named, within=True)}
        with self._lock:
            self._runs = {layer: runs for layer, runs in self._runs.items() if layer in kept}

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers, in the order of their first calls."""
        return tuple(self._runs)

    @property
    def labels(self) -> tuple[str, ...]:
        """The numbers of the layers that pages show and ``record[…]`` takes, in the order of :attr:`layers`.

        The number in a layer's name, if all of them differ: "3" of "model.layers.3.self_attn", so that hybrid models
        have gaps. Otherwise layers are counted from 0. Of an encoder–decoder, "encoder 3", "decoder 3" and "cross 3".
        """
        return tuple(map(str, labels_of(self.named())))

    def named(self) -> list[Named]:
        """Return what the numbers of the layers depend on."""
        return [Named(name, runs[-1].kind, runs[-1].shape[2]) for name, runs in self._runs.items()]

    @property
    def nbytes(self) -> int:
        """The size of all kept tensors in bytes."""
        return sum(run.nbytes for runs in self._runs.values() for run in runs)

    def runs(self, layer: int | str) -> list[LayerRecord]:
        """Return all runs of a layer; the name of a module with several layers returns the runs of all of them.

        A layer is meant by its name, with or without its first part, by the end of its name if no other has it, or by
        its number (see :attr:`labels`). Negative numbers count from the last layer.

        Raises
        ------
        TypeError, ValueError
            If no layer is meant, or several.
        """
        if not self._runs:
            raise rejected("record", "layer", "be a recorded layer", "an empty record")
        if isinstance(layer, str) and layer in self._runs:
            return self._runs[layer]
        found = found_layers("record", layer, self.named())
        name = self.layers[found[0]]
        return self._runs[name] if len(found) == 1 else runs_of_module(self._runs, module_of(name))

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
