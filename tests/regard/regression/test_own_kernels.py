"""Estimators with kernels that users register: the methods agree on heavy tails, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.regression import NadarayaWatsonRegressor
from regard.regression._sums.near import _radius
from regard.scores.base import TABLE, register
from regard.scores.kernels import Radial


class Exponential(Radial):
    """``exp(−u)``, whose tail is heavier than the Gaussian's."""

    @staticmethod
    def log_profile(u: Any) -> Any:
        return -u

    def log_weight(self, square: Tensor) -> Tensor:
        return -square.clamp(min=1e-300).sqrt()


class RationalQuadratic(Radial):
    """``(1 + u²/4)^−2``, which never is negligible."""

    @staticmethod
    def log_profile(u: Any) -> Any:
        return -2 * np.log1p(u * u / 4)

    def log_weight(self, square: Tensor) -> Tensor:
        return -2 * torch.log1p(square / 4)


OWN = {"own-exponential": Exponential, "own-rational": RationalQuadratic}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for name, kernel in OWN.items():
        register(name)(kernel)
    yield
    for name in OWN:
        del TABLE[name]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("order", "width"), [(0, 0.0003), (0, 0.003), (0, 0.05), (1, 0.003), (1, 0.05)])
def test_every_method_predicts_the_same(name: str, order: int, width: float) -> None:
    drawn = np.random.default_rng(0)
    X = drawn.uniform(0, 1, (4000, 2))
    y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.1 * drawn.standard_normal(4000)
    queries = np.concatenate([drawn.uniform(0, 1, (50, 2)), [[1.5, 0.5], [3.0, 3.0]]])
    predictions = {}
    for method in ("exact", "tiles", "auto"):
        model = NadarayaWatsonRegressor(kernel=name, bandwidth=width, order=order, method=method)
        predictions[method] = model.fit(X, y).predict(queries)
    differences = queries[:, None] - X
    logs = OWN[name].log_profile(np.sqrt(np.square(differences).sum(2)) / width)
    weights = np.exp(logs - logs.max(1, keepdims=True))
    if order == 0:
        np.testing.assert_allclose(predictions["exact"], weights @ y / weights.sum(1), rtol=1e-9, atol=1e-9)
    for method in ("tiles", "auto"):
        np.testing.assert_allclose(predictions[method], predictions["exact"], rtol=1e-7, atol=1e-7)


def test_the_radius_is_where_the_kernel_has_fallen() -> None:
    nearest = np.array([0.0, 0.5, 3.0])

    class Stand:
        order = 0

        class kernel:  # noqa: N801
            form = Exponential

    np.testing.assert_allclose(_radius(Stand, nearest, 20.0), nearest + 20, rtol=1e-9)
    Stand.kernel.form = RationalQuadratic
    found = _radius(Stand, nearest, 20.0)
    fallen = RationalQuadratic.log_profile(nearest) - RationalQuadratic.log_profile(found)
    np.testing.assert_allclose(fallen, 20.0, rtol=1e-9)
    assert np.isinf(_radius(Stand, nearest, 2000.0)).all()
