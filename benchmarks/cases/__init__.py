"""The cases; importing this fills :data:`benchmarks.registry.CASES`."""

from benchmarks.cases import dense, masked, observed, scored

__all__ = ["dense", "masked", "observed", "scored"]
