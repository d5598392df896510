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
    NadarayaWatsonRegressor(bandwidth="loo", cv=3),
    NadarayaWatsonRegressor(bandwidth="aicc"),
    NadarayaWatsonRegressor(bandwidth=0.8, method="nufft", order=1),
    NadarayaWatsonRegressor("epanechnikov", 0.8, method="tiles"),
    NadarayaWatsonRegressor("epanechnikov", n_neighbors=3),
    NadarayaWatsonRegressor("epanechnikov", n_neighbors="loo", order=1),
    NadarayaWatsonClassifier(),
    NadarayaWatsonClassifier(method="nufft"),
    NadarayaWatsonClassifier(kernel="triangular", bandwidth="loo"),
]


@pytest.mark.campaign(keep=120)
@parametrize_with_checks(ESTIMATORS)
def test_scikit_learns_checks(estimator: Any, check: Any, request: pytest.FixtureRequest) -> None:
    check(estimator)
