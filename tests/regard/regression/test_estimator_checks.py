"""scikit-learn's own checks of an estimator."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor

ESTIMATORS = [
    NadarayaWatsonRegressor(),
    NadarayaWatsonRegressor(kernel="epanechnikov", order=1),
    NadarayaWatsonRegressor(kernel="laplacian", bandwidth="silverman"),
    NadarayaWatsonRegressor(bandwidth="loo"),
    NadarayaWatsonRegressor(bandwidth="learned", max_iter=5),
    NadarayaWatsonRegressor(bandwidth=0.8, method="nufft", order=1),
    NadarayaWatsonRegressor("epanechnikov", 0.8, method="tiles"),
    NadarayaWatsonClassifier(),
    NadarayaWatsonClassifier(method="nufft"),
    NadarayaWatsonClassifier(kernel="triangular", bandwidth="loo"),
]


def fails(estimator: Any) -> dict[str, str]:
    """Return the checks that do not apply."""
    if estimator.bandwidth in ("loo", "learned"):
        # Leaving a point out leaves its repetition in, but not its weight.
        return {"check_sample_weight_equivalence_on_dense_data": "cross-validation tells a weight from a repetition"}
    return {}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=fails)
def test_scikit_learns_checks(estimator: Any, check: Any, request: pytest.FixtureRequest) -> None:
    check(estimator)
