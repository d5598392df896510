"""Normalizers: how scores become weights. Each says whether it can stream; each is registered by name."""

from regard.normalizers.base import Normalizer, NormalizerLike, NormalizerName, Statistic, register
from regard.normalizers.entmax import Entmax, Entmax15, Sparsemax
from regard.normalizers.hard import Argmax, Gumbel, Sampled
from regard.normalizers.sigmoid import Sigmoid
from regard.normalizers.softmax import Softmax

__all__ = [
    "Argmax",
    "Entmax",
    "Entmax15",
    "Gumbel",
    "Normalizer",
    "NormalizerLike",
    "NormalizerName",
    "Sampled",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "Statistic",
    "register",
]
