"""What ran and why, and how long each method should take."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from regard.regression._fourier_sums import Series
from regard.regression._tiles import BLOCK

#: The ways to sum up over training points.
METHODS = ("auto", "exact", "nufft", "tiles")


@dataclass(frozen=True)
class Plan:
    """How the last estimates were made; ``print`` says it in sentences.

    Attributes
    ----------
    method : {"exact", "nufft", "tiles"}
        All pairs; a Fourier transform; exact sums over the tiles of points that are near enough to count.
    reason : str
    queries : int
    by_tiles : int
        How many of them the transform's bound did not hold for, so that they went to exact tiles.
    bound : float
        The largest bound on the error of the others, beside ``|ŷ − ȳ| + σ`` of the targets; 0 where all is exact.
    rtol : float
        What the bound may be.
    memory : int
        Bytes that the transforms take while they run, by estimate.
    seconds : dict of str to float
        How long each method should take, of those that could run.
    by_tree : bool
        With "tiles", whether a tree finds the points that are near each query, instead.
    """

    method: str
    reason: str
    queries: int
    by_tiles: int = 0
    bound: float = 0.0
    rtol: float = 0.0
    memory: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    by_tree: bool = False

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.queries:,} queries: {self.reason}."]
        if self.by_tree:
            lines.append("Each query lies far from the others, so a tree finds the points near it.")
        if self.method == "nufft":
            lines.append(
                f"Errors are at most {self.bound:.1e} (rtol {self.rtol:g}) times |ŷ − ȳ| + σ of the targets; "
                f"{self.by_tiles:,} queries, where weights sum to too little for that, were summed up exactly."
            )
            lines.append(f"The transforms take about {self.memory / 1e6:,.0f} MB.")
        if self.seconds:
            each = ", ".join(f"{name} {value:.2g} s" for name, value in sorted(self.seconds.items()))
            lines.append(f"Predicted: {each}.")
        return "\n".join(lines)


@dataclass(frozen=True)
class Task:
    """What is to be summed up, as costs depend on it.

    Attributes
    ----------
    points, queries, features, targets : int
    columns : int
        Values that are averaged exactly.
    transforms : tuple of int
        Complex transforms of the points, and of the queries.
    compact : bool
    """

    points: int
    queries: int
    features: int
    columns: int
    transforms: tuple[int, int]
    compact: bool = False

    def exact(self) -> float:
        """Return the seconds of comparing all pairs."""
        pairs = float(self.points) * self.queries
        rates = _costs()["exact"]["compact" if self.compact else "all"]
        return _product(rates, (1.0, pairs, pairs * self.features, pairs * self.columns))

    def nufft(self, series: Series, held: bool) -> float:
        """Return the seconds of transforming points, unless they are ``held``, and queries."""
        width = math.log(1 / series.eps) / (math.pi * math.sqrt(0.5)) + 2
        grid = series.size * 2**self.features
        seconds = _product(_costs()["around"][str(self.features)], (1.0, series.size * sum(self.transforms)))
        for way, count, times in zip(("forth", "back"), (self.points, self.queries), self.transforms):
            if way == "forth" and held:
                continue
            rates = _costs()[way][str(self.features)]
            spread = count * width**self.features
            seconds += _product(rates, (1.0, count, times * spread, times * grid * math.log2(max(grid, 2.0))))
        return seconds

    def tiles(self, share: float, together: float, sorted_: bool, sharing: int = 1) -> float:
        """Return the seconds where a query needs a share of the points, and so many are together.

        Looks are shared by so many bandwidths.
        """
        # Those together need what any of them does.
        apart = (together / max(self.queries, 1)) ** (1 / self.features)
        share = (share ** (1 / self.features) + min(apart, 1.0)) ** self.features if together > 1 else share
        calls = max(1.0, self.queries / together)
        rates = _costs()["tiles"]
        pairs = calls * max(together, BLOCK) * min(share, 1.0) * self.points
        order = 0.0 if sorted_ else rates[0] * self.points
        looks = order + calls * (rates[1] + rates[2] * self.points)
        return looks / sharing + rates[3] * pairs

    def neighbours(self, share: float, held: bool, sharing: int = 1) -> float:
        """Return the seconds where a tree finds the share of the points that a query needs, for so many bandwidths."""
        point, call, query, found, pair = _costs()["neighbours"]
        pairs = self.queries * min(share, 1.0) * self.points
        tree = 0.0 if held else point * self.points
        # All that share compare the pairs of the widest, on average about twice as many as they would.
        return (tree + call + query * self.queries) / sharing + (found + pair * min(sharing, 2)) * pairs


@cache
def _costs() -> dict:  # type: ignore[type-arg]
    """Return the seconds of each term, by rates that ``python -m benchmarks.regression_costs`` fits."""
    return dict(json.loads(files("regard.regression").joinpath("costs.json").read_text(encoding="utf-8"))["rates"])


def _product(rates: list[float], amounts: tuple[float, ...]) -> float:
    return sum(rate * amount for rate, amount in zip(rates, amounts))
