"""Hypothesis strategies for cases of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import assume
from hypothesis import strategies as st

from regard import engines
from regard.engines import Engine
from regard.testing.case import Case, CaseCall, Recipe
from regard.testing.case_generator import draw, mask
from regard.testing.conformance import combinations
from regard.testing.laws import LAWS, Law

T = TypeVar("T")


class _Drawn:
    """Choices from hypothesis, which shrinks them towards the first option."""

    def __init__(self, drawn: st.DrawFn) -> None:
        self.drawn = drawn

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return self.drawn(st.sampled_from(options))

    def seed(self) -> int:
        """Return a seed for a random generator."""
        return self.drawn(st.integers(0, (1 << 16) - 1))


@st.composite
def masks(draw_: st.DrawFn, depth: int = 2, bias: bool = True) -> Recipe:
    """Recipes of masks, composed up to a depth, with or without biases."""
    return mask(_Drawn(draw_), depth, bias)


@st.composite
def cases(draw_: st.DrawFn, law: str | Law | None = None, engine: str | Engine | None = None) -> Case:
    """Cases: empty to multi-tile shapes, grouped heads, leading dimensions, layouts, dtypes, masks and parts.

    Parameters
    ----------
    law : str or Law, optional
        Only cases to which the law applies, adapted to it.
    engine : str or Engine, optional
        Only cases that the engine can run.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from regard.testing import judge
    >>> @settings(max_examples=5, database=None, derandomize=True)
    ... @given(cases("determinism", "streaming"))
    ... def same_bits(case):
    ...     assert judge("determinism", "streaming", case).outcome == "held"
    >>> same_bits()
    """
    the_engine = engines.TABLE[engine] if isinstance(engine, str) else engine
    source = _Drawn(draw_)
    among = combinations(the_engine or engines.TABLE["reference"])
    case = draw(source, *source.pick(among))
    if law is not None:
        adapted = (LAWS[law] if isinstance(law, str) else law).adapt(case)
        assume(adapted is not None)
        assert adapted is not None
        case = adapted
    assume(the_engine is None or CaseCall.of(case).refusal(the_engine) is None)
    return case
