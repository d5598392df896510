"""Kernel regression written out in NumPy, point by point."""

from __future__ import annotations

import numpy as np

from regard.scores.kernels import kernels


def weight(kernel, d):
    """Return the weight at differences (..., E) in units of the bandwidth."""
    if kernel == "constant":
        return np.ones(d.shape[:-1])
    form = kernels()[kernel]
    return form.profile(np.abs(d).sum(-1) if form.manhattan else np.sqrt((d**2).sum(-1)))


def weights(kernel, query, X, bandwidth, sample_weight=None):
    """Return the kernel's weights (L, N), not normalized."""
    found = weight(kernel, (query[:, None] - X[None]) / bandwidth)
    return found if sample_weight is None else found * sample_weight


def predicted(kernel, query, X, y, bandwidth, order=0, sample_weight=None):
    """Return the estimate at each query; NaN where no point has a weight."""
    result = []
    for row, w in zip(query, weights(kernel, query, X, bandwidth, sample_weight)):
        if w.sum() == 0:
            result.append(np.full(y.shape[1:], np.nan))
        elif order == 0:
            result.append((w @ y) / w.sum())
        else:
            design = np.column_stack([np.ones(len(X)), (X - row) / bandwidth])
            root = np.sqrt(w)[:, None]
            result.append(np.linalg.lstsq(root * design, (root.T * y.T).T, rcond=None)[0][0].reshape(y.shape[1:]))
    return np.array(result)
