"""The cases; importing this fills :data:`benchmarks.registry.CASES`."""

from benchmarks.cases import (
    additive,
    dense,
    first,
    kernels,
    latent,
    masked,
    narrow,
    observed,
    order1,
    recurrence,
    regression,
    regression_fit,
    regression_neighbours,
    short,
    small,
    sparse,
)

__all__ = [
    "additive",
    "dense",
    "first",
    "kernels",
    "latent",
    "masked",
    "narrow",
    "observed",
    "order1",
    "recurrence",
    "regression",
    "regression_fit",
    "regression_neighbours",
    "short",
    "small",
    "sparse",
]
