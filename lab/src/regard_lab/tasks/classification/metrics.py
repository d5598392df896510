"""How well labels are named: accuracy, F1 and Matthews' correlation, of a matrix of counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def classification_metrics(confusion: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation coefficient, by scikit-learn.

    Parameters
    ----------
    confusion : ndarray (C, C)
        How often each label, in rows, was named each label, in columns.
    labels : sequence of C str

    Returns
    -------
    dict
        ``accuracy``; ``f1``, the mean of all labels that occur (macro F1); of two labels also ``f1_positive``, that of
        the second; ``matthews`` (Matthews 1975; of more labels Gorodkin 2004), 0 where one label alone was named.

    Examples
    --------
    >>> metrics = classification_metrics(np.array([[3, 1], [0, 2]]), ["no", "yes"])
    >>> {name: round(value, 3) for name, value in metrics.items()}
    {'accuracy': 0.833, 'f1': 0.829, 'f1_positive': 0.8, 'matthews': 0.707}
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    true, named = confusion.nonzero()
    counts = confusion[true, named]
    if not counts.sum():
        return {}
    metrics = {"accuracy": float(np.diag(confusion).sum() / counts.sum())}
    weighed = {"sample_weight": counts, "zero_division": 0.0}
    metrics["f1"] = float(f1_score(true, named, average="macro", **weighed))
    if len(labels) == 2:
        metrics["f1_positive"] = float(f1_score(true, named, pos_label=1, labels=[0, 1], average="binary", **weighed))
    metrics["matthews"] = float(matthews_corrcoef(true, named, sample_weight=counts))
    return metrics
