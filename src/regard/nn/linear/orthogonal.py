"""Muon's step: a matrix with all singular values moved close to 1."""

from __future__ import annotations

import torch
from torch import Tensor

#: Coefficients (a, b, c) of each step X ← a X + (b A + c A²) X with A = X Xᵀ, as in LaCT's code. Singular values above
#: 0.002 times the norm end within 0.15 of 1.
_STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return about U Vᵀ for each matrix (..., K, V) = U Σ Vᵀ, by five steps of Newton and Schulz (Jordan 2024).

    It takes 5·(4·m²·M + 2·m³) operations for the smaller width m and the larger width M. A matrix of zeros stays one.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    rows = matrix.mT if tall else matrix
    rows = rows / (torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _STEPS:
        square = rows @ rows.mT
        rows = a * rows + (b * square + c * square @ square) @ rows
    return rows.mT if tall else rows
