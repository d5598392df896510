"""Error budgets: twice the error of the plain eager formula in the same dtype, plus one rounding (law 6).

On a single tiny problem, the eager error may be small by luck, or zero. It is therefore the maximum over the problem
and its neighbours, whose inputs and scale differ by random relative factors of 2⁻⁶, each against its own oracle, with
enough neighbours for a fair sample. No tolerance is chosen by hand. A law that fails by its budget is checked again
with more neighbours, and then with many more (:func:`larger_sample`): an error that eager makes, too, if rarely, is no
fault. Problems of many pairs are a sample of their own, and begin with one neighbour.

One rounding is that of the result's dtype, relative to the *amplitude* of the result: the sum of the absolute values of
its terms (Σ α |v| for an output Σ α v). Relative to the result itself, it would vanish where terms cancel, as in the
gradient with respect to the score of a single key, α (d − d): eager happens to subtract two equal numbers there, while
an equally good formula may sum the terms in another order. Stored statistics are rounded too: the threshold of a sparse
normalizer, and the log-sum-exp of a row if the backward pass keeps nothing else
(:func:`~regard.testing.trial.keeps_lse`). The effect of this rounding on the weights is part of the amplitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.testing.formulas import Array
from regard.testing.oracle import WithAmplitude

#: The fewest pairs over which the eager error is sampled; smaller problems get more neighbours.
PAIRS = 512

#: The fewest and the most neighbours.
FEW, MANY = 5, 15

#: Problems of so many pairs begin with one neighbour.
LARGE = 16 * PAIRS

#: How many times as many neighbours are taken, one after the other, to confirm that an error exceeds its budget.
CONFIRMING = (1, 16)

_times: ContextVar[int] = ContextVar("times as many neighbours", default=0)


def neighbours(pairs: int) -> int:
    """Return the number of neighbours for a problem with this many (query, key) pairs."""
    times = _times.get()
    if not times and pairs >= LARGE:
        return 1
    return min(max(-(-PAIRS // max(pairs, 1)), FEW), MANY) * max(times, 1)


@contextmanager
def larger_sample(times: int) -> Iterator[None]:
    """Context manager: budgets sample the eager error over so many times the neighbours, of large problems too."""
    token = _times.set(times)
    try:
        yield
    finally:
        _times.reset(token)


class BudgetError(AssertionError):
    """An error that exceeds its budget."""


@dataclass(frozen=True)
class Budget:
    """The correct result and the allowed error.

    Attributes
    ----------
    oracle : array
    eager : float
        The largest error of the eager formula, over the problem and its neighbours.
    rounding : float
        One rounding of the result's dtype.
    largest : float
        The largest number of that dtype; larger values become infinite.
    """

    oracle: Array
    eager: float
    rounding: float
    largest: float = np.inf

    @property
    def limit(self) -> float:
        """The largest fair error."""
        return 2 * self.eager + self.rounding

    @classmethod
    def of(cls, oracle: WithAmplitude, eager: Tensor, dtype: torch.dtype) -> Budget:
        """Return the budget of the first of K problems from oracle (K, ...) and eager (K, ...)."""
        rounding, largest = one_rounding(oracle.amplitude[0], dtype), torch.finfo(dtype).max
        return cls(oracle.value[0], error(oracle.value, eager, largest - rounding), rounding, largest)

    def check(self, what: str, result: Tensor) -> float:
        """Raise :class:`BudgetError` if the error of a result exceeds the limit; return error / limit."""
        found = error(self.oracle, result, self.largest - self.limit)
        if found <= self.limit:
            return 0.0 if found == 0 else float(found / self.limit)
        place, got, expected = _worst(self.oracle, result)
        raise BudgetError(
            f"{what} is off by {found:.3g}; the limit is {self.limit:.3g} (eager error {self.eager:.3g}, "
            f"one rounding {self.rounding:.3g}): {got!r} at {place}, expected {expected!r}"
        )


def one_rounding(amplitude: Array, dtype: torch.dtype) -> float:
    """Return the spacing of a dtype's numbers at the largest amplitude."""
    largest = float(amplitude.max(initial=0.0))
    info = torch.finfo(dtype)
    return max(info.eps * largest, info.smallest_normal * info.eps) if largest else 0.0


def error(oracle: Array, result: Tensor, overflow: float = np.inf) -> float:
    """Return the largest difference; equal infinities differ by 0, NaN by infinity.

    An infinite result also counts as equal to an oracle beyond ``overflow`` in its direction.
    """
    got = array(result, oracle.dtype)
    if got.size != oracle.size:
        raise AssertionError(f"shape {tuple(result.shape)}, expected {oracle.shape}")
    got = got.reshape(oracle.shape)
    with np.errstate(invalid="ignore"):
        apart = np.where((got == oracle) | overflowed(oracle, got, overflow), 0, np.abs(got - oracle))
    return float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))


def overflowed(oracle: Array, got: Array, overflow: float) -> Array:
    """Return where an infinite result is correct: the oracle is beyond ``overflow`` in its direction.

    ``overflow`` is negative where the error allowed exceeds the dtype's range: both infinities may then be correct.
    """
    found: Array = np.isinf(got) & (np.copysign(1.0, got) * oracle > overflow)
    return found


def array(tensor: Tensor, dtype: np.dtype[np.generic] | type[np.generic] = np.float64) -> Array:
    """Return a tensor as an array."""
    return tensor.detach().double().cpu().numpy().astype(dtype)


def _worst(oracle: Array, result: Tensor) -> tuple[tuple[int, ...], float, float]:
    got = array(result, oracle.dtype).reshape(oracle.shape)
    with np.errstate(invalid="ignore"):
        apart = np.where(got == oracle, 0, np.abs(got - oracle))
    place = np.unravel_index(int(np.where(np.isnan(apart), np.inf, apart).argmax()), oracle.shape)
    return tuple(int(i) for i in place), float(got[place]), float(oracle[place])
