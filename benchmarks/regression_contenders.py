"""Whom large regressions are compared with: the same estimate by other libraries, and by each method of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: The bandwidth along each axis.
WIDTH = 0.05
Predict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def sample(N: int, d: int, L: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, targets and queries."""
    rng = np.random.default_rng(seed)
    X, query = rng.random((N, d)), rng.random((L, d))
    return X, np.sin(6 * X[:, 0]) + 0.3 * rng.standard_normal(N), query


def regard(**options: Any) -> Predict:
    from regard.regression import NadarayaWatsonRegressor

    return lambda X, y, query: NadarayaWatsonRegressor(bandwidth=WIDTH, **options).fit(X, y).predict(query)


def neighbours(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the same sums within 6 bandwidths by scikit-learn's trees."""
    from sklearn.neighbors import RadiusNeighborsRegressor

    def weigh(distances: Any) -> Any:
        return np.array([np.exp(-0.5 * (each / WIDTH) ** 2) for each in distances], dtype=object)

    model = RadiusNeighborsRegressor(6 * WIDTH, weights=weigh, n_jobs=-1).fit(X, y)
    return np.concatenate([model.predict(some) for some in np.array_split(query, max(1, len(query) // 500))])


def statsmodels(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    from statsmodels.nonparametric.kernel_regression import KernelReg

    model = KernelReg(y, X, var_type="c" * X.shape[1], reg_type="lc", bw=[WIDTH] * X.shape[1])
    return np.asarray(model.fit(query)[0])


def keops(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    import torch
    from pykeops.torch import LazyTensor

    at, key, value = (torch.from_numpy(each) for each in (query / WIDTH, X / WIDTH, y[:, None]))
    log_weight = -((LazyTensor(at[:, None]) - LazyTensor(key[None])) ** 2).sum(-1) / 2
    return log_weight.sumsoftmaxweight(LazyTensor(value[None]), dim=1)[:, 0].numpy()


def binning(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return linear binning to 8 cells a bandwidth, a convolution by FFT, and linear interpolation."""
    from itertools import product

    from scipy.interpolate import RegularGridInterpolator
    from scipy.signal import fftconvolve

    d, cells = X.shape[1], round(8 / WIDTH)
    at = X * cells
    low = np.minimum(at.astype(int), cells - 1)
    share = at - low
    grids = np.zeros((2, (cells + 1) ** d))
    for corner in product((0, 1), repeat=d):
        weight = np.prod([share[:, i] if b else 1 - share[:, i] for i, b in enumerate(corner)], axis=0)
        place = np.ravel_multi_index(tuple((low + corner).T), (cells + 1,) * d)
        for grid, column in zip(grids, (weight, weight * y)):
            grid += np.bincount(place, column, minlength=grid.size)
    line = np.exp(-0.5 * (np.arange(-48, 49) / 8) ** 2)
    for axis in range(d):
        shape = [1] * (d + 1)
        shape[axis + 1] = -1
        grids = fftconvolve(grids.reshape(2, *(cells + 1,) * d), line.reshape(shape), mode="same", axes=axis + 1)
    axes = [np.linspace(0, 1, cells + 1)] * d
    weight, total = (RegularGridInterpolator(axes, grid)(query) for grid in grids)
    return total / weight


def faiss_range(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the same sums within 6 bandwidths, in float32, by FAISS's search of a flat index."""
    import faiss

    index = faiss.IndexFlatL2(X.shape[1])
    index.add(X.astype(np.float32))
    found = []
    for some in np.array_split(query.astype(np.float32), max(1, len(query) // 500)):
        ends, square, rows = index.range_search(some, (6 * WIDTH) ** 2)
        weight, starts = np.exp(-0.5 * square / WIDTH**2), ends[:-1].astype(int)
        found.append(np.add.reduceat(weight * y[rows], starts) / np.add.reduceat(weight, starts))
    return np.concatenate(found)


def fastlpr(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return what fastlpr interpolates between the places of a grid; three times its h comes nearest to ours."""
    from fastlpr import cv_fastlpr, fastlpr_predict

    return np.asarray(fastlpr_predict(cv_fastlpr(X, y, [[3 * WIDTH] * X.shape[1]], {"order": 0}), query)).ravel()


#: Contenders whose time grows with the points, not with the pairs.
LINEAR = ("regard, auto", "binning + FFT (scipy)", "fastlpr")
CONTENDERS: dict[str, Predict] = {
    "regard, auto": regard(),
    "regard, all pairs": regard(method="exact"),
    "regard, auto, Epanechnikov's kernel": regard(kernel="epanechnikov"),
    "KeOps": keops,
    "binning + FFT (scipy)": binning,
    "RadiusNeighborsRegressor, 6 bandwidths": neighbours,
    "FAISS, 6 bandwidths": faiss_range,
    "fastlpr": fastlpr,
    "statsmodels KernelReg": statsmodels,
}
