"""Validate parameters when they are used, and convert arrays of NumPy, pandas and torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._errors import described, rejected

EMPTY = ("nan", "nearest", "mean", "raise")
RULES = ("scott", "silverman")
CHOSEN = ("loo", "learned")


def as_array(X: Any) -> Any:
    """Return a tensor's numbers as a NumPy array, and everything else as it is."""
    if isinstance(X, Tensor):
        X = X.detach().cpu()
        return X.float().numpy() if X.dtype == torch.bfloat16 else X.numpy()
    return X


def as_tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, without a copy where nobody forbids to write to it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def resolve_device(function: str, device: Any) -> torch.device:
    """Return the device asked for, the CPU by default; raise where there is none of this name here."""
    expected = "be the name of a device that torch has here, such as 'cpu' or 'cuda'"
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError):
        raise rejected(function, "device", expected, described(device)) from None
    return found


def like_input(X: Any, array: np.ndarray) -> Any:
    """Return an array as a tensor on the device of X where that is a tensor, and as it is elsewhere."""
    return torch.from_numpy(array).to(X.device) if isinstance(X, Tensor) else array


def resolve_dtype(function: str, dtype: Any, X: np.ndarray) -> torch.dtype:
    """Return the dtype to calculate in: the one asked for, or that of X."""
    if dtype is None:
        return torch.float32 if X.dtype == np.float32 else torch.float64
    expected = "be 'float32', 'float64' or None"
    if not isinstance(dtype, torch.dtype):
        try:
            dtype = getattr(torch, np.dtype(dtype).name, None)
        except TypeError:
            raise rejected(function, "dtype", expected, described(dtype)) from None
    if dtype not in (torch.float32, torch.float64):
        raise rejected(function, "dtype", expected, str(dtype))
    return dtype


def validate_bandwidth(function: str, bandwidth: Any, width: int) -> np.ndarray | str:
    """Return a bandwidth for each of ``width`` features, or the name of the way to choose it; else raise."""
    ways = (*RULES, *CHOSEN)
    expected = f"be a positive number, {width} of them, or one of {', '.join(map(repr, ways))}"
    if isinstance(bandwidth, str):
        if bandwidth not in ways:
            near = "".join(f" (did you mean {each!r}?)" for each in get_close_matches(bandwidth, ways, 1))
            raise rejected(function, "bandwidth", expected, f"{bandwidth!r}{near}")
        return bandwidth
    try:
        found = np.asarray(as_array(bandwidth))
        given = found.astype(np.float64)
    except (TypeError, ValueError):
        raise rejected(function, "bandwidth", expected, described(bandwidth), TypeError) from None
    if given.shape not in ((), (1,), (width,)):
        raise rejected(function, "bandwidth", expected, f"an array of shape {given.shape}")
    if found.dtype.kind not in "iuf" or _has_bool(bandwidth) or not (np.isfinite(given) & (given > 0)).all():
        raise rejected(function, "bandwidth", expected, bandwidth)
    return np.full(width, given) if given.ndim == 0 else np.broadcast_to(given, (width,)).copy()


def _has_bool(bandwidth: Any) -> bool:
    each = bandwidth if isinstance(bandwidth, (list, tuple)) else (bandwidth,)
    return any(isinstance(one, (bool, np.bool_)) for one in each)
