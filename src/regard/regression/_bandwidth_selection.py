"""Select a bandwidth: by rules of thumb, or by the least leave-one-out error, searched or learned by gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from regard import masks
from regard.regression._kernel_smoother import Estimate, Smoother
from regard.regression._progress import progress

#: Bandwidths of the first look, per factor of ten, and points that it leaves out at most.
STEPS, LOOK = 6, 8192
#: The widest, in spreads of the data.
WIDEST = 10.0
#: Minima of the first look that are searched, and how exactly, as a share of the bandwidth.
SEARCHED, EXACT = 3, 1e-3
#: How far a learned bandwidth may go from where it began, as a factor.
FAR = 1e3


@dataclass(frozen=True)
class Curve:
    """The leave-one-out error at some bandwidths: narrow to wide after a search, in the order tried after learning.

    Attributes
    ----------
    bandwidths : ndarray (m, n_features)
    errors : ndarray (m,)
    """

    bandwidths: np.ndarray
    errors: np.ndarray


def rule_of_thumb(rule: str, count: float, width: int) -> float:
    """Return the bandwidth in spreads that a rule gives ``count`` points of ``width`` features.

    Scott's: ``n^(−1/(d+4))``; Silverman's: ``(n (d+2) / 4)^(−1/(d+4))``.

    Examples
    --------
    >>> round(rule_of_thumb("scott", 1000, 1), 4), round(rule_of_thumb("silverman", 1000, 1), 4)
    (0.2512, 0.2661)
    """
    base = count if rule == "scott" else count * (width + 2) / 4
    return base ** (-1 / (width + 4))


class LeaveOneOut:
    """Leave-one-out cross-validation: the error of predicting each point from all the others.

    Parameters
    ----------
    smoother : Smoother
    nearest : bool
        A point that nobody else reaches is predicted by its nearest neighbour's target; else by the mean of the others.
    rows : Tensor (R,), int64, optional
        The points that are left out, one at a time; all by default.
    """

    def __init__(self, smoother: Smoother, nearest: bool, rows: Tensor | None = None) -> None:
        self.smoother, self.nearest = smoother, nearest
        self.rows = torch.arange(len(smoother.key), device=smoother.key.device) if rows is None else rows
        # The mask of all points at once holds no tensor, so that later calls find all that it means to an engine.
        self._every = masks.leave_one_out() if rows is None and len(self.rows) <= smoother.rows_at_once else None
        weight = smoother.point_weights()
        self._share = weight[self.rows, 0] / weight[self.rows, 0].sum()

    def predict(self, bandwidth: Tensor, rows: Tensor) -> Estimate:
        """Return the predictions of points ``rows`` (r,) from the others, for a bandwidth per feature.

        Those that nobody reaches are marked, and have what stands in for it.
        """
        query, mask = self.smoother.key[rows], masks.leave_one_out(rows) if self._every is None else self._every
        found = self.smoother.estimate(query, bandwidth, mask)
        lost = ~found.reached
        if not bool(lost.any()):
            return found
        target, own = self.smoother.target, rows[lost]
        if self.nearest:
            near = self.smoother.nearest(query[lost], bandwidth.detach(), masks.leave_one_out(own))
            other = torch.where((near >= 0)[:, None], target[near.clamp(min=0)], 0.0)
        else:
            weight = self.smoother.point_weights()
            rest = (weight.sum() - weight[own]).clamp(min=torch.finfo(weight.dtype).tiny)
            other = ((weight * target).sum(0) - weight[own] * target[own]) / rest
        mean = found.mean.clone()
        mean[lost] = other
        return Estimate(mean, found.reached, found.peak)

    def predictions(self, bandwidth: Tensor) -> Estimate:
        """Return the predictions of all rows."""
        parts = [self.predict(bandwidth, rows) for rows in self.rows.split(self.smoother.rows_at_once)]
        return Estimate(*(torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "reached", "peak")))

    def error(self, bandwidth: Tensor) -> Tensor:
        """Return the mean squared error, each point counted by its weight; its gradient too, where that is wanted."""
        total = bandwidth.new_zeros(())
        size = self.smoother.rows_at_once
        for rows, share in zip(self.rows.split(size), self._share.split(size)):
            squares = (self.predict(bandwidth, rows).mean - self.smoother.target[rows]).square().mean(1)
            part = (squares * share).sum()
            if part.requires_grad and len(rows) < len(self.rows):
                # One part's graph at a time.
                (slope,) = torch.autograd.grad(part, bandwidth)
                part = part.detach() + (slope * (bandwidth - bandwidth.detach())).sum()
            total = total + part
        return total


def search_bandwidth(
    error_of: Callable[[Tensor, Tensor | None], float], unit: Tensor, count: int, look: Tensor | None, verbose: int
) -> tuple[Tensor, Curve]:
    """Return the multiple of ``unit`` (n_features,) with the least error, and the errors that were seen.

    ``error_of(bandwidth, rows)`` is the leave-one-out error over some rows, all where they are None. It may have
    several minima: bandwidths a factor apart are looked at first (over the rows ``look``), and the lowest few minima
    among them searched over all rows.
    """
    seen: dict[float, float] = {}
    narrow = 0.25 * min(rule_of_thumb("scott", count, len(unit)), count ** (-1 / len(unit)))
    decades = np.log10(WIDEST / narrow)
    grid = np.geomspace(narrow, WIDEST, max(8, round(STEPS * decades)) + 1)

    with progress(verbose, "bandwidth", None) as report:

        def exact(log_factor: float) -> float:
            if log_factor not in seen:
                seen[log_factor] = error_of(unit * float(np.exp(log_factor)), None)
                report(1, f"error {min(seen.values()):.4g}")
            return seen[log_factor]

        logs = np.log(grid)
        first = (
            [exact(at) for at in logs] if look is None else [error_of(unit * float(np.exp(at)), look) for at in logs]
        )
        padded = np.concatenate([[np.inf], first, [np.inf]])
        minima = [i for i in range(len(first)) if padded[i] >= padded[i + 1] <= padded[i + 2]]
        for i in sorted(minima, key=lambda i: first[i])[:SEARCHED]:
            exact(logs[i])
            bounds = logs[max(i - 1, 0)], logs[min(i + 1, len(logs) - 1)]
            minimize_scalar(exact, bounds=bounds, method="bounded", options={"xatol": EXACT})
    order = sorted(seen)
    best = min(order, key=lambda at: seen[at])
    curve = Curve(np.exp(order)[:, None] * unit.cpu().numpy(), np.array([seen[at] for at in order]))
    return unit * float(np.exp(best)), curve


def learn_bandwidths(
    loo: LeaveOneOut, begin: Tensor, max_iter: int, tol: float, verbose: int
) -> tuple[Tensor, int, Curve]:
    """Return a bandwidth for each feature by gradient descent (L-BFGS) on the leave-one-out error.

    It ends when an iteration gains less than a share ``tol`` of the error, or after ``max_iter`` iterations; what is
    returned is the best that was seen, with the number of iterations.
    """
    unit = float(loo.error(begin)) or 1.0  # the search measures its gains against 1
    best = (unit, begin)
    gone = [(begin.double().cpu().numpy(), unit)]

    def step(logs: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        log_width = torch.from_numpy(logs).to(begin).requires_grad_()
        error = loo.error(log_width.exp())
        (slope,) = torch.autograd.grad(error, log_width)
        value = float(error.detach())
        gone.append((np.exp(logs), value))
        if value < best[0]:
            best = (value, log_width.detach().exp())
        return value / unit, torch.nan_to_num(slope).double().cpu().numpy() / unit

    start = begin.log().double().cpu().numpy()
    bounds = [(at - np.log(FAR), at + np.log(FAR)) for at in start]
    with progress(verbose, "bandwidths", max_iter) as report, torch.enable_grad():
        found = minimize(
            step, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": max_iter, "ftol": tol},
            callback=lambda _: report(1, f"error {best[0]:.4g}"),
        )  # fmt: skip
    curve = Curve(np.stack([widths for widths, _ in gone]), np.array([error for _, error in gone]))
    return best[1], max(int(found.nit), 1), curve
