"""The same numbers as statsmodels' KernelReg, an implementation of others."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from regard.regression import NadarayaWatsonRegressor

BANDWIDTH = [0.3, 0.4, 0.5]


@pytest.mark.parametrize(("order", "kind"), [(0, "lc"), (1, "ll")])
def test_predictions_agree_with_statsmodels(order: int, kind: str) -> None:
    from statsmodels.nonparametric.kernel_regression import KernelReg

    rng = np.random.default_rng(0)
    X, queries = rng.uniform(-1, 1, (300, 3)), rng.uniform(-1, 1, (50, 3))
    y = np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.normal(size=len(X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about a generator that is not used
        theirs = KernelReg(y, X, var_type="ccc", reg_type=kind, bw=BANDWIDTH)
    model = NadarayaWatsonRegressor(bandwidth=BANDWIDTH, order=order).fit(X, y)
    np.testing.assert_allclose(model.predict(queries), theirs.fit(queries)[0], rtol=0, atol=1e-8)


def test_the_leave_one_out_error_agrees_with_statsmodels() -> None:
    from statsmodels.nonparametric.kernel_regression import KernelReg

    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (150, 3))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=len(X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about a generator that is not used
        theirs = KernelReg(y, X, var_type="ccc", reg_type="lc", bw=BANDWIDTH)
    expected = float(np.squeeze(theirs.cv_loo(np.array(BANDWIDTH), theirs.est["lc"])))
    model = NadarayaWatsonRegressor(bandwidth=BANDWIDTH).fit(X, y)
    assert model.loo_error() == pytest.approx(expected, abs=1e-8)
