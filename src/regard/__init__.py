"""Attention as one function: any score, mask and normalizer, exact, in memory that does not grow with L×S.

The names in ``__all__`` are public: here and in ``regard.nn``, ``masks``, ``scores``, ``normalizers``, ``engines``,
``inspect`` and ``distributed``; and in ``regard.bench``, ``regard.regression``, ``regard.testing`` and
``regard.integrations.transformers``, which need further packages and are imported by name. All other modules and names
are private, with an underscore or without: they may change in any version.
"""

from typing import TYPE_CHECKING

from regard import engines, masks, normalizers, scores
from regard._call.plan import Plan
from regard._utils.errors import RegardWarning
from regard._utils.lazy import lazy
from regard._utils.mechanism import cite
from regard.engines.aux import Aux, AuxRequest, TopK
from regard.engines.local_linear import LocalLinear
from regard.functional import attention, explain

if TYPE_CHECKING:
    from regard import distributed, inspect, nn
    from regard import regression as regression
    from regard._call.explanation import Explanation
    from regard._catalogue import Catalogue, catalogue
else:  # layers, estimators and pictures, at their first use: who needs the function does not wait
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard._call.explanation": "Explanation",
            "regard._catalogue": "Catalogue catalogue",
            "regard.distributed": "",
            "regard.inspect": "",
            "regard.nn": "",
            "regard.regression": "",
        },
    )

__version__ = "0.2.0"

__all__ = [
    "Aux",
    "AuxRequest",
    "Catalogue",
    "Explanation",
    "LocalLinear",
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
