"""How much of a test a tier runs: all of it, or the share of `make test` and `make test-quick`."""

_whole = True


def run_all(whole: bool) -> None:
    """Say whether tests run whole; called before tests are collected."""
    global _whole
    _whole = whole


def sized(whole: int, usual: int) -> int:
    """Return how many cases a test draws by itself: ``usual`` but for `make test-all`."""
    return whole if _whole else usual
