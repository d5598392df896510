"""Conformal prediction intervals: how far predictions missed the targets of points that they did not see."""

from __future__ import annotations

import math

import numpy as np


def half_width(residuals: np.ndarray, coverage: float, weight: np.ndarray | None = None) -> np.ndarray:
    """Return how far an interval reaches on both sides of a prediction (M,).

    The ``⌈(n + 1) coverage⌉``-th smallest of n absolute residuals (Lei et al. 2018); infinite where there are too few.
    A weight counts repetitions, and one more point stands at infinity.

    Parameters
    ----------
    residuals : ndarray (n, M)
        Absolute; NaN where a point had no prediction.
    coverage : float
    weight : ndarray (n,), optional

    Examples
    --------
    >>> half_width(np.arange(1.0, 10.0)[:, None], 0.8)
    array([8.])
    >>> half_width(np.ones((3, 1)), 0.8)
    array([inf])
    """
    found = []
    for column in residuals.T:
        known = ~np.isnan(column)
        counts = np.ones(int(known.sum())) if weight is None else weight[known]
        order = np.argsort(column[known])
        reached = np.cumsum(counts[order])
        # Rounding must not ask for one more.
        wanted = math.ceil((reached[-1] + 1) * coverage - 1e-9) if len(reached) else 1
        place = int(np.searchsorted(reached, wanted * (1 - 1e-12)))
        found.append(column[known][order][place] if place < len(order) else math.inf)
    return np.array(found)
