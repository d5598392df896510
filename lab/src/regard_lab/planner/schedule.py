"""How long a training run takes, and what it costs: tokens, days, energy, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regard_lab.planner.shapes import Shape

#: Tokens for each parameter with which a run of given operations reaches the least loss: about 20 at every size
#: (Hoffmann 2022, arXiv 2203.15556, table 3).
CHINCHILLA = 20


def chinchilla_tokens(shape: Shape) -> int:
    """Return how many tokens a model of this size should see: 20 for each parameter (Hoffmann 2022)."""
    return CHINCHILLA * shape.parameters


@dataclass(frozen=True)
class Schedule:
    """A run of so many steps.

    Attributes
    ----------
    tokens : float
        That are read.
    steps : int
    seconds : float
        Of all steps.
    devices : int
    """

    tokens: float
    steps: int
    seconds: float
    devices: int

    @property
    def days(self) -> float:
        """Days of all steps."""
        return self.seconds / 86400

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.seconds / 3600 * self.devices

    def energy(self, watts: float, overhead: float = 1.0) -> float:
        """Return kWh: of devices of so many watts, times what the building takes for each watt of theirs (PUE)."""
        return self.device_hours * watts * overhead / 1000

    def money(self, price: float) -> float:
        """Return the cost at a price of an hour of one device."""
        return self.device_hours * price


def schedule(tokens: float, batch: int, step_seconds: float, devices: int) -> Schedule:
    """Return the run that reads so many tokens in steps of ``batch`` tokens.

    Examples
    --------
    >>> run = schedule(tokens=1e9, batch=500_000, step_seconds=2.0, devices=8)
    >>> run.steps, round(run.device_hours, 1), round(run.energy(watts=400, overhead=1.2), 1)
    (2000, 8.9, 4.3)
    """
    steps = math.ceil(tokens / batch)
    return Schedule(tokens, steps, steps * step_seconds, devices)
