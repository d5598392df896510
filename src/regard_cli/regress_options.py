"""The options of ``regard regress``, checked before any file is read."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from regard._utils.constraints import Number
from regard._utils.errors import rejected, unknown_name
from regard.scores.kernels import kernels
from regard_cli.messages import require
from regard_cli.tables import METHODS, check_out

KERNELS = (*kernels(), "constant")
WAYS = ("loo", "learned", "scott", "silverman")
EMPTY = ("nearest", "mean", "nan", "raise")


@dataclass(frozen=True)
class Options:
    """The options as they were typed, and what they mean."""

    data: str
    target: str
    features: str | None
    weights: str | None
    kernel: str
    bandwidth: str
    order: int
    empty: str
    method: str
    rtol: float | None
    predict: str | None
    out: str | None
    std: bool
    quantiles: str | None
    plot: Path | None
    as_json: bool

    @cached_property
    def names(self) -> list[str] | None:
        """The columns to predict from; None for all others."""
        if self.features is None:
            return None
        if not (names := _split(self.features)):
            raise rejected("regress", "--features", "name columns, separated by commas", "''")
        return names

    @cached_property
    def widths(self) -> str | list[float]:
        """The bandwidth: a way to choose it, or numbers."""
        if self.bandwidth in WAYS:
            return self.bandwidth
        try:
            widths = [float(each) for each in _split(self.bandwidth)]
            if not widths:
                raise ValueError
        except ValueError:
            raise unknown_name("regress", "--bandwidth (where it is no number)", self.bandwidth, WAYS) from None
        if not all(0 < each < math.inf for each in widths):
            raise rejected("regress", "--bandwidth", "be above 0 and finite", self.bandwidth)
        return widths

    @cached_property
    def shares(self) -> list[float]:
        """The quantiles, each once, in ascending order."""
        if self.quantiles is None:
            return []
        expected = "be numbers between 0 and 1, separated by commas"
        try:
            shares = sorted({float(each) for each in _split(self.quantiles)})
            if not shares:
                raise ValueError
        except ValueError:
            raise rejected("regress", "--quantiles", expected, self.quantiles or "''") from None
        if not all(0 <= each <= 1 for each in shares):
            raise rejected("regress", "--quantiles", expected, self.quantiles)
        return shares

    def check(self) -> None:
        """Raise ValueError if an option, or two of them together, cannot be."""
        for option, value, known in (
            ("--kernel", self.kernel, KERNELS), ("--empty", self.empty, EMPTY), ("--method", self.method, METHODS)
        ):  # fmt: skip
            if value not in known:
                raise unknown_name("regress", option, value, known)
        if self.method == "nufft":
            if self.kernel != "gaussian":
                raise rejected("regress", "--method", "be another", f"'nufft' with --kernel {self.kernel}")
            require("finufft")
        if self.rtol is not None:
            Number(gt=0, lt=1)("regress", "--rtol", self.rtol)
        if self.widths == "learned" and (self.kernel == "constant" or not kernels()[self.kernel].smooth):
            got = f"'learned' with --kernel {self.kernel}, whose weights do not change smoothly with it"
            raise rejected("regress", "--bandwidth", "be another", got)
        if (self.shares or self.std) and self.predict is None:
            option = "--std" if self.std else "--quantiles"
            raise rejected("regress", option, "come with --predict", "none")
        if self.data == "-" and self.predict == "-":
            raise rejected("regress", "--predict", "be a file when the data come from standard input", "-")
        if self.out == "-" and self.as_json:
            raise rejected("regress", "--out", "be a file with --json, which prints too", "-")
        if self.out is not None:
            check_out(self.out)
            if self.out.lower().endswith(".parquet"):
                require("pyarrow")
        if self.plot is not None:
            _check_picture(self.plot)
        # Unlike Path.resolve, this takes links that lead in a circle.
        read = [os.path.realpath(each) for each in (self.data, self.predict) if each is not None and each != "-"]
        for option, path in (("--out", self.out), ("--plot", self.plot)):
            if path is not None and path != "-" and os.path.realpath(path) in read:
                raise rejected("regress", option, "be another file than those that are read", str(path))


def _check_picture(path: Path) -> None:
    require("matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(f".{each}" for each in FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower() not in known:
        raise rejected("regress", "--plot", f"end in one of {', '.join(known)}", str(path))
    if not path.parent.is_dir():
        raise rejected("regress", "--plot", "be in a folder that exists", f"{path.parent}, which does not")
    if path.is_dir():
        raise rejected("regress", "--plot", "be a file", f"{path}, a folder")


def _split(text: str) -> list[str]:
    """Return what stands between commas, which may be quoted where a name has one."""
    try:
        return [each.strip() for each in next(csv.reader([text], skipinitialspace=True), [])]
    except csv.Error:
        raise rejected("regress", "a list", "stand in one line, separated by commas", repr(text)) from None
