"""Kernel regression as scikit-learn estimators: attention pooling over the training data.

>>> from regard.regression import NadarayaWatsonRegressor
>>> model = NadarayaWatsonRegressor(bandwidth=0.5).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 4.0])
>>> model.predict([[1.0]]).round(3)
array([1.213])

Needs scikit-learn: ``pip install 'regard[sklearn]'``.
"""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ModuleNotFoundError(
        "regard.regression needs scikit-learn, which is missing: pip install 'regard[sklearn]'", name="sklearn"
    )

from regard.regression._bandwidth import Curve
from regard.regression._base import AttendedPoints, Explanation
from regard.regression._training import ExtrapolationWarning
from regard.regression.classifier import NadarayaWatsonClassifier
from regard.regression.plots import plot_fit, plot_loo, plot_weights
from regard.regression.regressor import NadarayaWatsonRegressor

__all__ = [
    "AttendedPoints",
    "Curve",
    "Explanation",
    "ExtrapolationWarning",
    "NadarayaWatsonClassifier",
    "NadarayaWatsonRegressor",
    "plot_fit",
    "plot_loo",
    "plot_weights",
]
