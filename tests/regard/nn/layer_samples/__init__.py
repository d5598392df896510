"""Samples of layers: a small one of each, a call of it, and its formula in NumPy, for the test that all share."""

from tests.regard.nn.layer_samples import (
    approximate,
    choices,
    images,
    latents,
    linear,
    memory,
    multihead,
    options,
    others,
    positions,
    recurrent,
    scored,
    sets,
    sparse,
    trained,
)
from tests.regard.nn.layer_samples.sample import SAMPLES, Sample, sample

__all__ = [
    "SAMPLES",
    "Sample",
    "approximate",
    "choices",
    "images",
    "latents",
    "linear",
    "memory",
    "multihead",
    "options",
    "others",
    "positions",
    "recurrent",
    "sample",
    "scored",
    "sets",
    "sparse",
    "trained",
]
