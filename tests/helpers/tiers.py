"""How much of a test a tier runs: all of it, or the share of `make test` and `make test-quick`."""

from contextvars import ContextVar

#: Whether tests run whole; conftest.py sets it before tests are collected.
WHOLE: ContextVar[bool] = ContextVar("whole", default=True)


def sized(whole: int, usual: int) -> int:
    """Return how many cases a test draws by itself: ``usual`` but for `make test-all`."""
    return whole if WHOLE.get() else usual


def examples(whole: int) -> int:
    """Return how many examples Hypothesis draws: a fifth of them, and at least five, but for `make test-all`."""
    return sized(whole, max(whole // 5, min(whole, 5)))
