"""Conformance testing: an oracle, error budgets, and the laws that every score, normalizer and engine must satisfy.

Needs the extra ``regard[testing]``; ``import regard`` never imports it. A new score, normalizer or engine is tested
by registering it and running the suite:

>>> from regard.testing import Case, judge
>>> judge("budget", "streaming", Case(score="gaussian", mask=("causal", "upper_left"))).outcome
'held'
"""

from regard.testing.budget import Budget
from regard.testing.case import Case, CaseCall
from regard.testing.conformance import Verdict, judge, sweep, tiny_tiles
from regard.testing.formulas import FORMULAS, NormalizerFormula, register_formula, register_weighing
from regard.testing.laws import LAWS, Law
from regard.testing.oracle import Oracle
from regard.testing.statement import NumpyCall
from regard.testing.trial import Trial

__all__ = [
    "FORMULAS",
    "LAWS",
    "Budget",
    "Case",
    "CaseCall",
    "Law",
    "NormalizerFormula",
    "NumpyCall",
    "Oracle",
    "Trial",
    "Verdict",
    "judge",
    "register_formula",
    "register_weighing",
    "sweep",
    "tiny_tiles",
]
