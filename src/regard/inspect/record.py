"""What a model attended to: queries and keys of each layer, from which weights are computed when somebody looks.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from regard._errors import rejected, unknown_name
from regard.inspect.beam_search import UNFOLLOWED, BeamSearch
from regard.inspect.calls import Attended, Projected
from regard.inspect.coverage import Coverage, Ledger
from regard.inspect.layer_record import AttentionRecord, LayerRecord
from regard.inspect.layer_tracker import Caller, LayerTracker, chosen, runs_of_module
from regard.inspect.summary import AttentionSummary
from regard.inspect.texts import Text, as_texts, texts_of

#: Bytes of a record that a notebook shows as it is.
_SHOWN = 32 << 20
#: What queries and keys are kept in.
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


class Record:
    """What a model attended to, layer by layer; made by :func:`regard.inspect.capture`.

    ``record[layer]`` is the latest run of a layer, by its name or its number in the order of the first run;
    ``record[layer, 0]`` the first one.

    Attributes
    ----------
    names : dict of int to str
        The model's modules that are recorded, by their identities.
    wanted : sequence of int or str, optional
        Which layers are kept; None is all.
    title : str
        What pictures and pages are headed with.
    texts : tuple of Text
        What was read, or what was read and what was written; see :meth:`describe`.
    sequence : int
        Which sequence of the batch the texts are of; others are shown with numbers in the place of tokens.
    coverage : Coverage
        What was recorded and what was not, once the block of the capture has ended.
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
        #: Of each thread that writes with several beams.
        self._searches: dict[int, BeamSearch] = {}

    def add(self, caller: Caller, attended: Attended | Projected) -> None:
        """Keep a call of a layer, if it is wanted: as rows of a run that it goes on with, or as a new run."""
        with self._lock:
            search = self._searches.get(threading.get_ident())
            if search is not None and isinstance(attended, Attended):
                layer = self._named(caller, self.tracker.layer_of(caller))
                if self._wants(layer):
                    search.add(layer, caller, attended.kept(self._dtype))
                return
            call = attended.flat() if isinstance(attended, Attended) else None
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

    def _begin(self, layer: str, caller: Caller, call: Attended | Projected) -> LayerRecord:
        """Begin a run of a layer."""
        if self._topk:
            run: LayerRecord = AttentionSummary(layer, call, self._topk, caller.reads, caller.windows)
        else:
            run = AttentionRecord(layer, call.kept(self._dtype), caller.reads, caller.windows)
        self._runs.setdefault(layer, []).append(run)
        return run

    @contextmanager
    def beam_search(self) -> Iterator[BeamSearch]:
        """Collect the calls of this thread, whose rows are of beams, until it is known which beams sequences are of."""
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
        """Return a layer's name; where it is the second of its module, the first one gets a number, too."""
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
        """The names of the layers that were recorded, in the order of their first calls."""
        return tuple(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes that all queries and keys take."""
        return sum(run.nbytes for runs in self._runs.values() for run in runs)

    def runs(self, layer: int | str) -> list[LayerRecord]:
        """Return all runs of a layer; of a module that is several layers, by its name alone, those of all of them."""
        if not self._runs:
            raise rejected("record", "layer", "be one of a model that attends to something", "no call of attention")
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
            raise rejected("record", "run", f"be below {len(runs)}, as often as the layer ran", which)
        return runs[which]

    def __iter__(self) -> Iterator[LayerRecord]:
        return (runs[-1] for runs in self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def _repr_html_(self) -> str:
        """Return the page in a frame that can do nothing but show itself; a sentence where it is large."""
        from html import escape

        if not self._runs or self.nbytes > _SHOWN:
            return escape(f"{self!r}; its to_html(path) writes a page, and regard view serves what save(path) writes")
        page = escape(str(self.to_html()))
        size = 'width="100%" height="560" style="border: 1px solid #8884"'
        return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{page}" {size}></iframe>'

    def __repr__(self) -> str:
        return f"Record({len(self)} layers, {self.nbytes / 2**20:.1f} MiB)"

    def describe(self, *texts: Text | Sequence[str], title: str = "", sequence: int = 0) -> Self:
        """Name the tokens that were read, for pictures and pages, and return the record.

        Parameters
        ----------
        *texts : Text or sequence of str
            The text; or what an encoder read, and what a decoder wrote.
        title : str
        sequence : int
            Which sequence of the batch they are of.

        Raises
        ------
        ValueError
            If a layer has another number of rows or columns than texts have tokens, or fewer sequences.
        """
        given = as_texts(texts)
        for run in self:
            texts_of(given, run)
            if not 0 <= sequence < run.shape[0]:
                raise rejected("record", "sequence", f"be below {run.shape[0]}, as many as there are", sequence)
        self.texts, self.title, self.sequence = given, title, sequence
        return self

    def texts_of(self, run: LayerRecord, sequence: int) -> tuple[Text, Text]:
        """Return what the queries and the keys of a layer are in one sequence: tokens, or numbers where none are known.

        Raises
        ------
        ValueError
            If the texts do not fit.
        """
        return texts_of(self.texts if sequence == self.sequence else (), run)

    def save(self, path: str | Path) -> Path:
        """Write the record to a file, which :meth:`load` and ``regard view`` read."""
        from regard.inspect.record_file import save_record

        return save_record(path, self)

    def to_html(self, path: str | Path | None = None, *, batch: int = 0) -> str | Path:
        """Return the page that shows the record, in one piece that works offline; or write it to a file.

        Raises
        ------
        ValueError
            If the record is empty, or too large for one file.
        """
        from regard.inspect.page import render_html, save_html

        return render_html(self, batch=batch) if path is None else save_html(self, path, batch=batch)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the record in a file.

        Raises
        ------
        ValueError
            If the file is no record, damaged, or of a version that is not known, in one sentence.
        """
        from regard.inspect.record_file import load_record

        made = cls({}, torch.float32)
        made._runs, made.texts, made.title, made.sequence = load_record(path)
        return made
