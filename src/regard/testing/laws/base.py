"""Laws: functions that take a case and an engine, and raise AssertionError if the law is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regard.engines import Engine
from regard.testing.budget import CONFIRMING, BudgetError, larger_sample
from regard.testing.case import Case, CaseCall

#: Raises AssertionError if the law is broken.
Check = Callable[[Case, Engine], None]

#: Turns any case into one to which the law applies, or None.
Adapt = Callable[[Case], Case | None]


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes
    ----------
    name : str
    statement : str
        One sentence.
    check : callable
    adapt : callable
    share : float
        How often a campaign checks it relative to others; lower for slow laws.
    """

    name: str
    statement: str
    check: Check
    adapt: Adapt
    share: float

    def __call__(self, case: Case, engine: Engine) -> None:
        """Check the law on an adapted case, again with larger samples of eager's errors if it exceeds its budget."""
        for times in (0, *CONFIRMING):
            try:
                with larger_sample(times):
                    self.check(case, engine)
                return
            except BudgetError:
                if times == CONFIRMING[-1]:
                    raise


#: Every law by name, in the order of the contract.
LAWS: dict[str, Law] = {}


def any_case(case: Case) -> Case:
    """Return the case unchanged."""
    return case


def law(name: str, statement: str, adapt: Adapt = any_case, share: float = 1.0) -> Callable[[Check], Check]:
    """Decorator: register a function as a law."""

    def add(check: Check) -> Check:
        LAWS[name] = Law(name, statement, check, adapt, share)
        return check

    return add


def pieces(case: Case) -> CaseCall:
    """Return the tensors and parts of a case."""
    return CaseCall.of(case)


def require(condition: object, message: str) -> None:
    """Raise AssertionError with a message unless the condition holds."""
    if not bool(condition):
        raise AssertionError(message)
