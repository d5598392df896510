"""What a model attended to: queries and keys of each layer, from which weights are computed when somebody looks.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import AuxRequest, TopK
from regard._errors import rejected, unknown_name
from regard.inspect.calls import Attended, Projected
from regard.inspect.texts import Text, as_texts, texts_of

#: What layers are called that read another sequence: in torch, BART, T5 and BERT, and in our recurrent decoders.
_CROSS = ("cross", "multihead_attn", "encoder_attn", "encdec", "attending")
#: Bytes of a record that a notebook shows as it is.
_SHOWN = 32 << 20
#: What queries and keys are kept in.
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


class AttentionRecord:
    """The weights of one layer in one run: a matrix (B, H, L, S), computed where it is read.

    While a model writes, its layers are called with one query at a time, and keys that grow: these calls are one
    matrix.

    Attributes
    ----------
    name : str
        The layer's name in the model.
    shape : (int, int, int, int)
        B, H, L and S.
    """

    def __init__(self, name: str, attended: Attended | Projected) -> None:
        self.name = name
        self._calls = [attended]

    @property
    def calls(self) -> list[Attended]:
        """The calls, in turn, of which the rows are."""
        self._calls = [each.attended() if isinstance(each, Projected) else each for each in self._calls]
        return self._calls  # type: ignore[return-value]

    def grows_by(self, attended: Attended | Projected) -> bool:
        """Whether a call goes on with this matrix.

        Its keys are those before, and as many more as there are queries; or all the same, where one query reads them.
        """
        if isinstance(attended, Projected) or isinstance(self._calls[-1], Projected):
            return False
        last, (B, H, L, _) = self.calls[-1], attended.query.shape
        before, S = last.key.shape[2], attended.key.shape[2]
        goes_on = before + L == S or (L == 1 < before == S)
        if last.query.shape[:2] != (B, H) or not goes_on or attended.key.shape[1] != last.key.shape[1]:
            return False
        ends = [0, before - 1]  # a beam that took the place of another has other keys
        return torch.equal(attended.key[:, :, ends], last.key[:, :, ends])

    def grow(self, attended: Attended) -> None:
        """Append the rows of a call."""
        self.calls.append(attended)
        for i, each in enumerate(self.calls[:-1]):  # the last call's keys hold those of all
            self.calls[i] = replace(each, key=attended.key[:, :, : each.key.shape[2]])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, L and S."""
        B, H = self.calls[0].query.shape[:2]
        return B, H, sum(each.query.shape[2] for each in self.calls), self.calls[-1].key.shape[2]

    @property
    def kind(self) -> str:
        """Whether it reads its own sequence, "self", or another, "cross": by its name, or as L and S differ."""
        _, _, L, S = self.shape
        return "cross" if L != S or any(each in self.name.lower() for each in _CROSS) else "self"

    @property
    def heads_per_group(self) -> int:
        """How many query heads read one head of keys."""
        return self.shape[1] // self.calls[0].key.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that queries and keys take."""
        return sum(each.query.nbytes for each in self.calls) + self.calls[-1].key.nbytes

    def weights(
        self, *, batch: int | slice | None = None, head: int | slice | None = None, rows: int | slice | None = None,
        cols: int | slice | None = None,
    ) -> Tensor:  # fmt: skip
        """Return weights: of all, of one (an int, whose dimension falls away), or of some (a slice).

        Only the rows that are asked for are computed, each over all of its keys.

        Parameters
        ----------
        batch, head, rows, cols : int or slice, optional
            Which sequences, heads, queries and keys.

        Returns
        -------
        Tensor (B, H, L, S) of float32
            Those dimensions of it that are not single.
        """
        B, H, L, S = self.shape
        given = {"batch": (batch, B), "head": (head, H), "rows": (rows, L), "cols": (cols, S)}
        index = tuple(_index(name, each, size) for name, (each, size) in given.items())
        first, last, step = index[2].indices(L) if isinstance(index[2], slice) else (index[2], index[2] + 1, 1)
        if step < 1:
            raise rejected("weights", "rows", "go forward", rows)
        parts, at = [], 0
        for call in self.calls:
            length = call.query.shape[2]
            begin, end = max(first - at, 0), min(last - at, length)
            if begin < end:
                weights: Any = call.rows(begin, end, AuxRequest(weights=True)).weights
                parts.append(F.pad(weights, (0, S - weights.shape[-1])))
            at += length
        whole = torch.cat(parts, 2) if parts else torch.zeros(B, H, 0, S)
        within = slice(0, None, step) if isinstance(index[2], slice) else 0
        for dim, each in reversed(list(enumerate((index[0], index[1], within, index[3])))):
            whole = whole[(slice(None),) * dim + (each,)]
        return whole

    def lse(self) -> Tensor:
        """Return the log-sum-exp (B, H, L) of each query's scores: a weight is exp(score − lse)."""
        return torch.cat([_whole(each, AuxRequest(lse=True)).lse for each in self.calls], 2)

    def entropy(self) -> Tensor:
        """Return the entropy (B, H, L) of each query's weights, in nats; of those over keys where there are sinks."""
        return torch.cat([_whole(each, AuxRequest(entropy=True)).entropy for each in self.calls], 2)

    def topk(self, k: int = 5) -> TopK:
        """Return the k largest weights of each query and the indices of their keys, (B, H, L, k) each.

        Where there are fewer keys, weights are 0 and indices −1.
        """
        found = [_whole(each, AuxRequest(topk=k)).topk for each in self.calls]
        return TopK(torch.cat([each.weights for each in found], 2), torch.cat([each.indices for each in found], 2))

    def received(self) -> Tensor:
        """Return how much each key is attended to, (B, H, S): the sum of its weights over all queries."""
        S = self.shape[3]
        found = [_whole(each, AuxRequest(received=True)).received for each in self.calls]
        return torch.stack([F.pad(each, (0, S - each.shape[-1])) for each in found]).sum(0)

    def __repr__(self) -> str:
        B, H, L, S = self.shape
        calls = f", {len(self.calls)} calls" if len(self.calls) > 1 else ""
        return f"AttentionRecord({self.name!r}: {B} × {H} heads, {L} queries, {S} keys{calls})"


class Record:
    """What a model attended to, layer by layer; made by :func:`regard.inspect.capture`.

    ``record[layer]`` is the latest run of a layer, by its name or its number in the order of the first run;
    ``record[layer, 0]`` the first one.

    Attributes
    ----------
    names : dict of int to str
        The model's modules that are recorded, by their identities.
    title : str
        What pictures and pages are headed with.
    texts : tuple of Text
        What was read, or what was read and what was written; see :meth:`describe`.
    """

    def __init__(self, names: dict[int, str], dtype: torch.dtype, layers: Sequence[int | str] | None = None) -> None:
        self.names = names
        self._dtype, self._wanted = dtype, layers
        self.title = ""
        self.texts: tuple[Text, ...] = ()
        self._runs: dict[str, list[AttentionRecord]] = {}
        self._order: list[str] = []

    def add(self, name: str, attended: Attended | Projected) -> None:
        """Keep a call of a layer, if it is wanted."""
        if name not in self._order:
            self._order.append(name)
        if not self._wants(name):
            return
        kept = attended.kept(self._dtype)
        runs = self._runs.setdefault(name, [])
        growing = next((run for run in reversed(runs) if run.grows_by(kept)), None)
        if growing is None or isinstance(kept, Projected):
            runs.append(AttentionRecord(name, kept))
        else:
            growing.grow(kept)

    def _wants(self, name: str) -> bool:
        if self._wanted is None:
            return True
        number = self._order.index(name)
        return any(
            each == number if isinstance(each, int) else name == each or name.startswith(f"{each}.")
            for each in self._wanted
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that were recorded, in the order of their first calls."""
        return tuple(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes that all queries and keys take."""
        return sum(run.nbytes for runs in self._runs.values() for run in runs)

    def runs(self, layer: int | str) -> list[AttentionRecord]:
        """Return all runs of a layer."""
        if not self._runs:
            raise rejected("record", "layer", "be one of a model that attends to something", "no call of attention")
        if isinstance(layer, str):
            if layer not in self._runs:
                raise unknown_name("record", "layer", layer, self._runs)
            return self._runs[layer]
        names = self.layers
        if not isinstance(layer, int) or not -len(names) <= layer < len(names):
            raise rejected("record", "layer", f"be a name, or a number below {len(names)}", repr(layer))
        return self._runs[names[layer]]

    def __getitem__(self, layer: int | str | tuple[int | str, int]) -> AttentionRecord:
        which = -1
        if isinstance(layer, tuple):
            layer, which = layer
        runs = self.runs(layer)
        if not -len(runs) <= which < len(runs):
            raise rejected("record", "run", f"be below {len(runs)}, as often as the layer ran", which)
        return runs[which]

    def __iter__(self) -> Iterator[AttentionRecord]:
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

    def describe(self, *texts: Text | Sequence[str], title: str = "") -> Self:
        """Name the tokens that were read, for pictures and pages, and return the record.

        Parameters
        ----------
        *texts : Text or sequence of str
            The text; or what an encoder read, and what a decoder wrote.
        title : str

        Raises
        ------
        ValueError
            If a layer has another number of rows or columns than texts have tokens.
        """
        given = as_texts(texts)
        for run in self:
            texts_of(given, run)
        self.texts, self.title = given, title
        return self

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
        made._runs, made.texts, made.title = load_record(path)
        made._order = list(made._runs)
        return made


def _whole(call: Attended, request: AuxRequest) -> Any:
    return call.rows(0, call.query.shape[2], request)


def _index(name: str, given: int | slice | None, size: int) -> int | slice:
    if given is None:
        return slice(None)
    if isinstance(given, slice):
        return given
    if isinstance(given, bool) or not isinstance(given, int) or not -size <= given < size:
        raise rejected("weights", name, f"be a slice, or a number below {size}", repr(given))
    return given % size
