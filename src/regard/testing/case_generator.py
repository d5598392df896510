"""Generate cases from any source of choices: a random generator in a campaign, Hypothesis in a test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any, Protocol, TypeVar

from regard.testing.case import Case, Recipe, fits_lines, has_bias, mixes_widths, sampled

T = TypeVar("T")


class Source(Protocol):
    """A source of choices. The first option is the simplest."""

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        ...

    def seed(self) -> int:
        """Return a seed for a random generator."""
        ...


class CaseSampler:
    """Choices from Python's random number generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options with equal probability."""
        return self.random.choice(options)

    def seed(self) -> int:
        """Return a number below 2¹⁶."""
        return self.random.randrange(1 << 16)


#: Lengths; some cross the border of a tile, the last that of a block of compiled kernels.
LENGTHS = (3, 1, 2, 4, 5, 6, 7, 8, 9, 11, 13) * 3 + (67,)
WIDTHS = (3, 1, 2, 4, 8)
#: Magnitudes of values; the smallest and largest only for dtypes that can represent them.
VALUES = (1.0,) * 10 + (1e-36, 1e30)
#: Ridges of order 1, and 0 for order 0.
RIDGES = (0.0, 0.0, 0.0, 0.0, 0.01, 0.1)
TILES = ((4, 4), (3, 5), (2, 8), (8, 2), (16, 16))
LAYOUTS = ("plain", "plain", "transposed", "sliced", "expanded", "broadcast", "broadcast query", "matrix")
#: The dimensions of a dense mask, in upper case, and those it broadcasts, in lower case: every combination.
SHARED = ("LS", *map("".join, product("Bb", "Hh", "Ll", "Ss")), "lS", "Ls", "ls")
#: Memory layouts of dense masks, and the levels around which their biases lie.
STORED = ("plain", "plain", "plain", "expanded", "transposed", "sliced")
LEVELS = (0.0, 0.0, 0.0, -40.0, -1e9, 1e5)
DTYPES = ("float32", "float32", "float64", "float64", "bfloat16", "float16")
WHERE: tuple[Any, ...] = ("upper_left", "lower_right", 2, -1, "each")


def draw(source: Source, score: str, normalizer: str, dtype: str) -> Case:
    """Return a random case for a score, a normalizer and a dtype."""
    zero = source.pick(("",) * 30 + ("queries", "keys", "lead", "width", "value_width"))
    lead = source.pick(((1,), (1,), (2,), (3,), (2, 2), (), (1, 2, 1)))
    sizes: dict[str, Any] = {
        "lead": lead,
        "key_heads": source.pick((1, 2)),
        "group": source.pick((1, 1, 2, 3)),
        "queries": source.pick(LENGTHS),
        "keys": source.pick(LENGTHS),
        "width": source.pick(WIDTHS),
        "value_width": source.pick(WIDTHS),
    }
    if zero:
        sizes[zero] = (0,) if zero == "lead" else 0
    if mixes_widths(score) and source.pick((False, True)):
        sizes["key_width"] = source.pick(WIDTHS)
    return Case(
        score, normalizer, dtype,
        mask=mask(source, 2, True) if source.pick((False, True, True)) else None,
        scale=source.pick((None, None, None, None, None, None, 0.5, 2.0, -1.0, 0.0)),
        softcap=source.pick((None, None, None, None, 1.5, 20.0)),
        magnitude=source.pick((1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 4.0, 4.0, 0.0, 1e-3)),
        values=_value(source.pick(VALUES), normalizer, dtype),
        layout=source.pick(LAYOUTS),
        rows=source.pick(("random",) * 8 + ("zeros", "twins")),
        learned=source.pick((False, False, False, True)),
        wide=source.pick((False, False, True)),
        ridge=source.pick(RIDGES) if normalizer == "softmax" and fits_lines(score) else 0.0,
        tile=source.pick(TILES),
        seed=source.seed(),
        **sizes,
    )  # fmt: skip


def _value(size: float, normalizer: str, dtype: str) -> float:
    """Limit the magnitude of values to the range of the dtype and of gradients: entmax slopes can reach 1e30."""
    if dtype == "float16":
        return 1.0
    return min(size, 1.0) if normalizer == "entmax" else size


def mask(source: Source, depth: int, bias: bool) -> Recipe:
    """Return the recipe of a mask, composed up to a depth; only "and" accepts masks with a bias."""
    kinds = ("single", "single", "and", "causal", "causal", "function", "or", "not", "part")
    kind = source.pick(kinds) if depth else "single"
    if kind == "function":  # combined with a structured mask, which may be learned
        return "and", mask(source, 0, bias), ("predicate", source.pick((3, 2)))
    if kind == "causal":  # combined with padding, documents or biases, as in models
        rest: Sequence[Recipe] = (("key_padding", False), ("padding", False), ("document", True), mask(source, 0, bias))
        return "and", ("causal", source.pick(("upper_left", "lower_right"))), source.pick(rest)
    if kind == "and":
        return "and", mask(source, depth - 1, bias), mask(source, depth - 1, bias)
    if kind == "or":
        return "or", mask(source, depth - 1, False), mask(source, depth - 1, False)
    if kind == "not":
        return "not", mask(source, depth - 1, False)
    if kind == "part":
        return "part", mask(source, depth - 1, bias), source.pick((0, 2, 9)), source.pick((0, 1, 7))
    recipe = _single(source)
    return ("causal", "upper_left") if has_bias(recipe) and not bias else recipe


def _single(source: Source) -> Recipe:
    where = source.pick(WHERE)
    shared, stored = source.pick(SHARED), source.pick(STORED)
    return source.pick((
        ("causal", "upper_left"),
        ("causal", where),
        ("window", source.pick((0, 1, 3, -1)), source.pick((0, 1, 2, -1)), where),
        ("padding", source.pick((False, True))),
        ("key_padding", source.pick((False, True))),
        ("prefix", source.pick((2, 0, 5, "each"))),
        ("sinks", source.pick((1, 0, 4))),
        ("document", source.pick((False, True))),
        source.pick((("packed",), ("packed", -1, 0, "lower_right"), ("packed", 2, 1, "upper_left"))),
        ("dilated", source.pick((2, 1, 3)), where),
        ("chunked", source.pick((3, 1, 4, 20)), where),
        ("dense", shared, source.pick((0.5, 0.8, 0.2)), stored),
        ("predicate", source.pick((3, 2))),
        ("everything",),
        ("others", source.pick((False, True))),
        ("selected", source.pick((3, 1, 0, 20)), source.pick(("BH", "bh", "bH", "Bh")), source.pick((1, 3, 64))),
        ("bias", shared, source.pick((1.0, 0.8)), stored, source.pick(LEVELS)),
        ("alibi", source.pick((True, False)), where),
        ("relative", source.pick((1, 3)), source.pick((False, True)), where),
        ("forgetting", source.pick(("BH", "bh", "bH")), where),
        *((name,) for name in sampled()),
    ))  # fmt: skip
