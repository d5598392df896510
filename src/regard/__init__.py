"""Attention as one function: any score, mask and normalizer, exact, in memory that does not grow with L×S."""

from importlib import import_module
from types import ModuleType

from regard import engines, masks, normalizers, scores
from regard._call.plan import Plan
from regard._catalogue import Catalogue, catalogue
from regard._utils.errors import RegardWarning
from regard._utils.mechanism import cite
from regard.engines.aux import Aux, AuxRequest, TopK
from regard.functional import attention, explain

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "AuxRequest",
    "Catalogue",
    "Plan",
    "RegardWarning",
    "TopK",
    "__version__",
    "attention",
    "catalogue",
    "cite",
    "distributed",
    "engines",
    "explain",
    "inspect",
    "masks",
    "nn",
    "normalizers",
    "scores",
]


def __getattr__(name: str) -> ModuleType:
    """Import layers, estimators and pictures at their first use: who needs the function does not wait."""
    if name in ("distributed", "inspect", "nn", "regression"):
        return import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
