"""The conformance suite: judge one law on one engine and case, or sweep over all parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

from regard import engines
from regard._call.plan import clear_plans
from regard.engines import Engine, aux_pass, flex, sdpa, tiles
from regard.normalizers import entmax
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores.base import TABLE as SCORES
from regard.testing.case import Case, CaseCall, Recipe, normalizer_names, score_names
from regard.testing.case_generator import DTYPES, CaseSampler, Source, draw
from regard.testing.laws import LAWS, Law
from regard.testing.laws.parts import refused

# Tiny tiles: a problem of a dozen keys then crosses as many tile borders as one of thousands --------------------------


@contextmanager
def tiny_tiles(rows: int = 4, cols: int = 4) -> Iterator[None]:
    """Set the tile size of all tiled engines in a ``with`` block.

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.randn(1, 1, 10, 3)
    >>> with tiny_tiles(3, 5):
    ...     regard.attention(q, q, q, engine="streaming").shape
    torch.Size([1, 1, 10, 3])
    """

    def shape(*_: Any, **__: Any) -> tuple[int, int]:
        return rows, cols

    with (
        patch.object(tiles, "tile_shape", shape),
        patch.multiple(sdpa, ROWS=rows, BLOCK=max(cols // 2, 1), FULL_RUN=2, MASKED_RUN=3),
        patch.object(flex, "BLOCK", rows),
        patch.object(aux_pass, "GROUP", 2),
        patch.multiple(entmax, FEW=4, GROUP=2),
    ):
        clear_plans()
        try:
            yield
        finally:
            clear_plans()


# The suite: every law on every registered score, normalizer, dtype and engine -----------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case.

    Attributes
    ----------
    law, engine : str
    case : Case
        As adapted to the law.
    outcome : str
        "held"; "refused" if the engine cannot run the case and raises an error that says so; or "broken".
    reason : str
        Why the law is broken.
    """

    law: str
    engine: str
    case: Case
    outcome: str
    reason: str = ""

    def __str__(self) -> str:
        """Return the verdict with code to reproduce it."""
        return f"{self.law} / {self.engine}: {self.reason}\n    judge({self.law!r}, {self.engine!r}, {self.case})"


def judge(law: str | Law, engine: str | Engine, case: Case) -> Verdict:
    """Check one law on one case with one engine; the case must already be adapted to the law.

    Examples
    --------
    >>> judge("empty rows", "streaming", Case(mask=("empty_rows",), queries=6)).outcome
    'held'
    """
    the_law = LAWS[law] if isinstance(law, str) else law
    the_engine = engines.TABLE[engine] if isinstance(engine, str) else engine
    try:
        with tiny_tiles(*case.tile):
            if CaseCall.of(case).refusal(the_engine) is not None:
                refused(case, the_engine)
                return Verdict(the_law.name, the_engine.name, case, "refused")
            the_law(case, the_engine)
    except Exception as error:  # any exception breaks the law and is part of the verdict
        if isinstance(error, ValueError) and (why := _why_no_gradients(case, the_engine)) and why in str(error):
            return Verdict(the_law.name, the_engine.name, case, "refused")
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Verdict(the_law.name, the_engine.name, case, "broken", f"{kind}{error}")
    return Verdict(the_law.name, the_engine.name, case, "held")


def _why_no_gradients(case: Case, engine: Engine) -> str | None:
    """Return why an engine that runs a call cannot run it with gradients, or None."""
    call = CaseCall.of(case)
    call.leaves()
    return call.refusal(engine)


@lru_cache(None)
def _runs(engine: Engine, part: tuple[str, Any], normalizer: tuple[str, Any], dtype: str, device: str) -> bool:
    """Return whether an engine can run parts, given by names and what is registered by them, in a default call."""
    return CaseCall.of(Case(part[0], normalizer[0], dtype, device=device)).refusal(engine) is None


@lru_cache
def _combinations(
    engine: Engine, parts: tuple[tuple[str, Any], ...], normalizers: tuple[tuple[str, Any], ...], device: str
) -> list[tuple[str, str, str]]:
    return [
        (score[0], normalizer[0], dtype)
        for score, normalizer, dtype in product(parts, normalizers, DTYPES)
        if _runs(engine, score, normalizer, dtype, device)
    ]


def _registered(names: Iterable[str], table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, table.get(name.partition("/")[0])) for name in names)


def combinations(engine: Engine, device: str = "cpu") -> list[tuple[str, str, str]]:
    """Return every registered (score, normalizer, dtype) that an engine can run in a default call on a device.

    Dtypes repeat as in :data:`~regard.testing.case_generator.DTYPES`, so some are more frequent.
    """
    parts, normalizers = _registered(score_names(), SCORES), _registered(normalizer_names(), NORMALIZERS)
    return _combinations(engine, parts, normalizers, device)


def sweep(
    law: str | Law,
    engine: str | Engine,
    score: str | None = None,
    normalizer: str | None = None,
    every_dtype: bool = True,
    device: str = "cpu",
) -> list[Verdict]:
    """Check one law for every (score, normalizer, dtype) that an engine can run, or those of one score or normalizer.

    All else is random with a fixed seed. Without ``every_dtype``, each (score, normalizer) is tested with one dtype.
    """
    the_law = LAWS[law] if isinstance(law, str) else law
    the_engine = engines.TABLE[engine] if isinstance(engine, str) else engine
    among = list(dict.fromkeys(combinations(the_engine, device)))
    if not every_dtype:
        pairs = dict.fromkeys(found[:2] for found in among)
        among = [(*pair, dtype) for pair, dtype in zip(pairs, cycle(dict.fromkeys(DTYPES))) if (*pair, dtype) in among]
    verdicts = []
    for i, combination in enumerate(among):
        if score not in (None, combination[0]) or normalizer not in (None, combination[1]):
            continue
        for seed in range(i, 4 * len(among), len(among)):  # an engine may refuse a case only when it needs gradients
            case = draw_for(CaseSampler(seed), the_law, the_engine, [combination], device=device)
            verdict = None if case is None else judge(the_law, the_engine, case)
            if verdict is not None and verdict.outcome != "refused":
                break
        if verdict is not None:
            verdicts.append(verdict)
    return verdicts


#: How often to draw another case if the law does not apply or the engine refuses it.
TRIES = 40


def draw_for(
    source: Source,
    law: Law,
    engine: Engine,
    among: list[tuple[str, str, str]],
    mask: Recipe | None = None,
    device: str = "cpu",
) -> Case | None:
    """Return a case, adapted to the law, that the engine runs; None if none was found in some tries.

    With a ``mask`` the case has that, unless the law brings its own.
    """
    for _ in range(TRIES):
        drawn = draw(source, *source.pick(among)).but(device=device)
        case = law.adapt(drawn if mask is None else drawn.but(mask=mask))
        if case is not None and (CaseCall.of(case).refusal(engine) is None or source.pick((False,) * 9 + (True,))):
            return case
    return None
