"""``regard.catalogue()``: every mechanism as a table that prints, and goes into README, docs and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, overload

import torch

from regard import engines, scores
from regard._utils.mechanism import GROUPS, Mechanism, mechanisms
from regard.engines.local_linear import LocalLinear
from regard.engines.problem import Call, Problem
from regard.normalizers import Normalizer
from regard.scores.base import TABLE as SCORES

#: The columns: heading, and the attribute of a row.
COLUMNS = ("name", "formula", "source", "learned", "engines", "causal", "cost", "cache")


class Catalogue(Sequence[Mechanism]):
    """The rows of :func:`catalogue`; prints as a table."""

    def __init__(self, rows: Sequence[Mechanism]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Mechanism: ...
    @overload
    def __getitem__(self, index: slice) -> Catalogue: ...
    def __getitem__(self, index: int | slice) -> Mechanism | Catalogue:
        return Catalogue(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mechanism]:
        return iter(self._rows)

    def table(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries of text: ``module``, ``group``, columns, ``references`` with links."""
        return [
            {
                "module": row.module,
                "group": GROUPS[row.group],
                "name": row.name,
                "formula": row.formula,
                "source": row.source,
                "learned": row.learned,
                "engines": ", ".join(engines_of(row)),
                "causal": row.causal,
                "cost": row.cost,
                "cache": row.cache,
                "references": [
                    {"key": each.key, "title": each.fields["title"], "year": each.year, "url": each.url}
                    for each in row.references
                ],
            }
            for row in self
        ]

    def json(self) -> str:
        """Return :meth:`table` as JSON."""
        return json.dumps(self.table(), ensure_ascii=False, indent=2)

    def markdown(self, columns: Sequence[str] = COLUMNS, level: int = 2) -> str:
        """Return these columns in Markdown, group by group under headings of this level, sources linked.

        A column that is empty for a whole group is left out of its table.
        """
        parts = []
        for group, heading in GROUPS.items():
            rows = [row for row in self if row.group == group]
            if not rows:
                continue
            shown = [column for column in columns if any(_cell(row, column) for row in rows)]
            head = f"{'#' * level} {heading} (`{rows[0].module}`)"
            lines = [head, "", f"| {' | '.join(shown)} |", "|" + " --- |" * len(shown)]
            for row in rows:
                cells = [_cell(row, column).replace("|", "\\|") for column in shown]
                lines.append(f"| {' | '.join(cells)} |")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        table = [dict(zip(COLUMNS, COLUMNS)), *({name: row[name] for name in COLUMNS} for row in self.table())]
        widths = {name: max(len(row[name]) for row in table) for name in COLUMNS}
        return "\n".join("  ".join(row[name].ljust(widths[name]) for name in COLUMNS).rstrip() for row in table)

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return self.markdown()  # as notebooks show it: lines of text are too long for their cells


def catalogue() -> Catalogue:
    """Return every mechanism: its name, formula, source, learned parts, engines, and cost.

    Returns
    -------
    Catalogue
        A sequence of rows, which prints as a table.

    Examples
    --------
    >>> import regard
    >>> rows = {row.name: row for row in regard.catalogue()}
    >>> rows["Additive"].formula, rows["Additive"].source
    ('w_vᵀ tanh(W_q q + W_k k)', 'Bahdanau et al. 2014')
    """
    return Catalogue(mechanisms())


def _cell(row: Mechanism, column: str) -> str:
    """Return a cell in Markdown."""
    if column == "name":
        return f"`{row.name}`"
    if column == "source":
        return "; ".join(f"[{each.short}]({each.url})" if each.url else each.short for each in row.references)
    return ", ".join(engines_of(row)) if column == "engines" else str(getattr(row, column))


@cache
def engines_of(row: Mechanism) -> tuple[str, ...]:
    """Return which engines run a plain call of a mechanism on this machine's CPU; () where none takes part."""
    if row.module == "regard.masks":
        return tuple(engines.TABLE)  # each takes every mask
    generator = torch.Generator().manual_seed(0)
    defined, score, order = row.defined, None, int(row.defined is LocalLinear)
    normalizer: Any = "softmax"
    if isinstance(defined, type) and issubclass(defined, scores.Score):
        user = defined is scores.ScoreMod
        score = scores.ScoreMod(lambda score, *_: score) if user else defined.sample(4, 4, 5, generator)
    elif isinstance(defined, type) and issubclass(defined, Normalizer):
        normalizer = defined.sample(generator)
    elif row.reads:
        score = SCORES[row.reads].sample(4, 4, 5, generator)
    else:
        return ()
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    problem = Problem.of(Call(query, key, key, score=score, normalizer=normalizer, order=order))
    return tuple(name for name, engine in engines.TABLE.items() if engine.why_not(problem) is None)
