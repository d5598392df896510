"""The training points that made a prediction, with their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class AttendedPoints(NamedTuple):
    """The training points with the most weight in each prediction.

    Attributes
    ----------
    weights : ndarray (n, k)
        Largest first; 0 where there are fewer points.
    indices : ndarray (n, k)
        Rows of the training data; −1 where there are fewer points.
    """

    weights: Any
    indices: Any


@dataclass(frozen=True)
class Explanation:
    """One prediction, and the points that made it; ``print`` shows a table.

    Attributes
    ----------
    prediction : object
        What was predicted: a number, an array or a label.
    rows : list of dict
        For each point, the most important first: ``index`` (row of the training data), ``weight``, ``target``,
        ``distance`` (in bandwidths) and its features by name.
    share : float
        The part of all weight (of absolute values, where some are negative) that these points have.
    effective : float
        The effective number of points, ``1 / Σ α²`` of the kernel's weights.
    """

    prediction: Any
    rows: list[dict[str, Any]]
    share: float
    effective: float

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def __str__(self) -> str:
        head = (
            f"prediction {_short(self.prediction)}; these {len(self.rows)} points have {self.share:.1%} of the weight; "
            f"effectively {self.effective:.3g} points"
        )
        if not self.rows:
            return head
        cells = [list(self.rows[0])] + [[_short(value) for value in row.values()] for row in self.rows]
        sizes = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        return "\n".join([head, *("  ".join(cell.rjust(size) for cell, size in zip(line, sizes)) for line in cells)])

    __repr__ = __str__


def _short(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    if isinstance(value, np.ndarray):
        return "[" + " ".join(_short(each) for each in value.ravel()) + "]"
    return str(value)
