"""Masks of images and video, whose tokens are a grid in row-major order: neighbourhoods, windows and axes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from regard._utils.constraints import Constraint, Integer, count, flag, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.masks.base import Cover, Extent, Mask, Sizes, Span, Tiling
from regard.masks.matrix import submatrix

# A grid of tokens -----------------------------------------------------------------------------------------------------


class GridMask(Mask):
    """A mask of a grid of tokens, which are both queries and keys, numbered in row-major order.

    Parameters
    ----------
    lengths : tuple of int
        Tokens along each axis: (N,), (H, W) or (T, H, W).
    """

    #: The function that made the mask, for error messages and the repr.
    name: str

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def fit(self, extent: Extent, device: torch.device) -> Mask:  # noqa: ARG002
        """Check that the queries and the keys are the tokens of the grid."""
        tokens = math.prod(self.lengths)
        if (tokens, tokens) != (extent.L, extent.S):
            expected = f"multiply to the numbers of queries and keys, L = {extent.L} and S = {extent.S}"
            raise rejected(f"masks.{self.name}", "sizes", expected, f"{self.lengths}, {tokens} tokens")
        return self

    def coordinates(self, index: Tensor) -> list[Tensor]:
        """Return the coordinates of tokens, by axis."""
        found = []
        for length in reversed(self.lengths[1:]):
            found.append(index % length)
            index = index // length
        return [index, *reversed(found)]

    def sizes(self) -> Sizes:
        """Return the number of tokens as L and S."""
        tokens = math.prod(self.lengths)
        return None, None, tokens, tokens

    def lines(self, tiling: Tiling) -> tuple[int, list[Tensor]]:
        """Return the first axis of several tokens, and on it the first and last line of tiles' queries and keys."""
        axis = next((axis for axis, length in enumerate(self.lengths) if length > 1), 0)
        line = math.prod(self.lengths[axis + 1 :])
        return axis, [edge // line for edge in (tiling.q_lo, tiling.q_hi, tiling.k_lo, tiling.k_hi)]

    @classmethod
    @abstractmethod
    def drawn(cls, lengths: tuple[int, ...], pick: Callable[[int], int]) -> GridMask:
        """Return a random mask of a grid; ``pick(n)`` is an int below n."""

    @classmethod
    def sample(cls, extent: Extent, generator: torch.Generator) -> Mask:
        """Return a random mask for the tests: a part of it if the numbers of queries and keys differ."""

        def pick(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        left, lengths = max(extent.L, extent.S, 1), []
        for _ in range(pick(3)):
            divisors = [n for n in range(1, left + 1) if left % n == 0]
            lengths.append(divisors[pick(len(divisors))])
            left //= lengths[-1]
        mask = cls.drawn((left, *lengths), pick)
        if extent.L == extent.S > 0:
            return mask
        tokens = math.prod(mask.lengths)
        whole = Extent(extent.B, extent.H, tokens, tokens)
        return submatrix(mask.bind(whole, "cpu"), whole, (0, extent.L), (0, extent.S))


def _lengths(function: str, sizes: Any) -> tuple[int, ...]:
    """Return the sizes of a grid."""
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        sizes = (sizes,)
    if not isinstance(sizes, (tuple, list, torch.Size)) or not sizes:
        raise rejected(function, "sizes", "be a tuple of ints, one for each axis", described(sizes), TypeError)
    return tuple([size(function, f"sizes[{axis}]", length) for axis, length in enumerate(sizes)])


def _by_axis(function: str, argument: str, value: Any, axes: int, constraint: Constraint) -> tuple[Any, ...]:
    """Return an argument for each axis, which may be given once for all."""
    if not isinstance(value, (tuple, list)):
        return (constraint(function, argument, value),) * axes
    if len(value) != axes:
        raise rejected(function, argument, f"be one value for all axes or {axes}, one for each", value)
    return tuple([constraint(function, f"{argument}[{axis}]", each) for axis, each in enumerate(value)])


def _check_fit(function: str, lengths: tuple[int, ...], widths: tuple[int, ...], steps: tuple[int, ...]) -> None:
    """Raise if a window is larger than the grid."""
    for axis, (length, width, step) in enumerate(zip(lengths, widths, steps)):
        if width * step > length:
            what, got = ("window times dilation", f"{width} times {step}") if step > 1 else ("window", f"{width}")
            raise rejected(function, what, f"be at most the size of the grid: {length} along axis {axis}", got)


def _shortest(values: tuple[Any, ...]) -> str:
    """Return values by axis as they are written: once if they are equal."""
    return repr(values[0] if len(set(values)) == 1 else values)


def _flat(parts: Sequence[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """Return the tokens (T, n) at all combinations of coordinates (T_axis, n_axis); −1 where one is −1."""
    tokens = parts[0]
    for part, length in zip(parts[1:], lengths[1:]):
        a, b = tokens[:, None, :, None], part[None, :, None, :]
        tokens = torch.where((a < 0) | (b < 0), -1, a * length + b).flatten(2).flatten(0, 1)
    return tokens


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of different lengths as a tensor, filled with −1."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], device="cpu")


# Neighbourhoods -------------------------------------------------------------------------------------------------------


@mechanism(
    formula="visible iff j is in the window around i, on a grid; it moves inward at the border",
    sources=("hassani2022",),
    cost="O(L·wᵈ·E), on d axes",
)
def neighbourhood(
    sizes: int | Sequence[int],
    window: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    border: str = "shift",
) -> Mask:
    """Return the neighbourhood mask of an image or video: each token sees the window around it.

    Along an axis, token i sees ``i + dilation · j`` for all ``|j| ≤ window // 2``. A token is visible if it is visible
    along every axis. On a CPU, engine ``fused`` computes it in tiles of the image: time follows the visible pairs.

    Parameters
    ----------
    sizes : int or tuple of int
        Tokens along each axis: (N,), (H, W) or (T, H, W). The sequence holds them in row-major order.
    window : int or tuple of int
        Tokens that the window spans along each axis, the query's own included; odd along axes that are not causal.
    dilation : int or tuple of int
        Distance of the window's tokens along each axis.
    is_causal : bool or tuple of bool
        Along a causal axis, token i sees ``i − dilation · j`` for all ``0 ≤ j < window``: itself and tokens before it.
    border : {"shift", "truncate"}
        Where a window reaches beyond the grid: "shift" moves it inward by multiples of the dilation, so that every
        token sees as many keys; "truncate" leaves out what lies beyond. The windows of causal axes are truncated.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If a size, a window or a dilation is not positive, a window is even along an axis that is not causal,
        ``window · dilation`` is larger than the grid, a tuple has not one value for each axis, or ``border`` is
        unknown. When used, if the sizes do not multiply to the numbers of queries and keys.

    Notes
    -----
    With ``border="shift"`` this is the mask of NATTEN's ``na1d``, ``na2d`` and ``na3d``.

    References
    ----------
    Hassani et al., Neighborhood attention transformer, 2023, arXiv 2204.07143.
    Hassani and Shi, Dilated neighborhood attention transformer, 2022, arXiv 2209.15001.

    Examples
    --------
    >>> import torch
    >>> from regard import masks
    >>> print(masks.neighbourhood(6, 3))
    neighbourhood(6, 3)
    6 queries ↓, 6 keys →; █ visible, · not
      0    5
    0 ███···
    1 ███···
    2 ·███··
    3 ··███·
    4 ···███
    5 ···███
    >>> pixel = masks.neighbourhood((4, 4), 3)(0, 0, 5, torch.arange(16)).view(4, 4)  # row 1, column 1
    >>> pixel.int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    """
    function = "masks.neighbourhood"
    lengths = _lengths(function, sizes)
    dilations = _by_axis(function, "dilation", dilation, len(lengths), size)
    causal = _by_axis(function, "is_causal", is_causal, len(lengths), flag)
    windows = _by_axis(function, "window", window, len(lengths), size)
    for width, is_one_sided in zip(windows, causal):
        if width % 2 == 0 and not is_one_sided:
            raise rejected(function, "window", "be odd along axes that are not causal", width)
    _check_fit(function, lengths, windows, dilations)
    if border not in ("shift", "truncate"):
        raise rejected(function, "border", "be 'shift' or 'truncate'", repr(border))
    return Neighbourhood(lengths, windows, dilations, causal, border)


class _Axis(NamedTuple):
    """The windows along one axis of a grid."""

    length: int
    window: int
    dilation: int
    causal: bool
    shifts: bool

    @property
    def span(self) -> int:
        """The distance of a window's first and last token."""
        return (self.window - 1) * self.dilation

    def first(self, i: Tensor) -> Tensor:
        """Return the first token of the windows of these tokens; negative if it lies before the grid."""
        step, half = self.dilation, self.window // 2
        if self.causal:
            return i - self.span
        if not self.shifts:
            return i - half * step
        # Tokens that stand a multiple of the dilation apart are a grid of their own.
        rest = i % step
        count = (self.length + step - 1 - rest) // step
        return rest + step * torch.minimum((i // step - half).clamp(min=0), count - self.window)

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Return which keys lie in the windows of queries."""
        gap = k - self.first(q)
        seen = (gap >= 0) & (gap <= self.span)
        return seen if self.dilation == 1 else seen & (gap % self.dilation == 0)

    def reach(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds of what the queries from ``first`` to ``last`` see."""
        after = 0 if self.causal else self.window // 2 * self.dilation
        low, high = first - (self.span - after), last + after
        if self.causal or not self.shifts:
            return low, high
        widest = self.window * self.dilation
        return low.clamp(max=self.length - widest), high.clamp(min=widest - 1)

    def pieces(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split the axis into pieces of at most so many queries.

        Returns
        -------
        (Tensor, Tensor, Tensor)
            Queries (pieces, n) and keys (pieces, m), −1 for none, and what pieces with equal windows have in common.
        """
        queries, keys, patterns = [], [], []
        for rest in range(min(self.dilation, self.length)):
            tokens = range(rest, self.length, self.dilation)
            for start, stop in _cuts(len(tokens), most):
                piece = tokens[start:stop]
                firsts = self.first(torch.tensor(piece, device="cpu")).tolist()
                low = max(firsts[0], rest)
                seen = range(low, min(firsts[-1] + self.span, self.length - 1) + 1, self.dilation)
                queries.append(piece)
                keys.append(seen)
                patterns.append((len(seen), *(first - low for first in firsts)))
        kinds = {pattern: kind for kind, pattern in enumerate(dict.fromkeys(patterns))}
        return _padded(queries), _padded(keys), torch.tensor([kinds[each] for each in patterns], device="cpu")

    def piece(self, most: int) -> tuple[int, int]:
        """Return the largest numbers of queries and keys of a piece."""
        count = -(-self.length // self.dilation)
        queries = max(stop - start for start, stop in _cuts(count, most))
        return queries, min(queries + self.window - 1, count)


def _cuts(count: int, most: int) -> list[tuple[int, int]]:
    """Return the ends of equal parts of at most so many."""
    parts = -(-count // most)
    return list(pairwise([count * i // parts for i in range(parts + 1)]))


#: The time that a tile takes for one of its keys, in that for a pair.
KEY = 12


@final
class Neighbourhood(GridMask):
    """The window around each token of a grid."""

    name = "neighbourhood"

    def __init__(
        self,
        lengths: tuple[int, ...],
        windows: tuple[int, ...],
        dilations: tuple[int, ...],
        causal: tuple[bool, ...],
        border: str,
    ) -> None:
        super().__init__(lengths)
        self.windows = windows
        self.dilations = dilations
        self.causal = causal
        self.border = border

    @property
    def _axes(self) -> list[_Axis]:
        shifts = self.border == "shift"
        return [_Axis(*each, shifts) for each in zip(self.lengths, self.windows, self.dilations, self.causal)]

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys lie in the windows along all axes."""
        ends = zip(self._axes, self.coordinates(q_idx), self.coordinates(kv_idx))
        first, *others = [axis.visible(q, k) for axis, q, k in ends]
        for other in others:
            first = first & other
        return first

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles hold lines in reach of each other; on a line, also which lie within all windows."""
        at, (q_lo, q_hi, k_lo, k_hi) = self.lines(tiling)
        axis = self._axes[at]
        low, high = axis.reach(q_lo, q_hi)
        some = (k_hi >= low) & (k_lo <= high)
        if len(self.lengths) > 1 or axis.dilation > 1:
            return some, torch.zeros_like(some)
        return some, (k_lo >= axis.first(q_hi)) & (k_hi <= axis.first(q_lo) + axis.span)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the windows of a line without dilation."""
        axis = self._axes[0]
        if len(self.lengths) > 1 or axis.dilation > 1:
            return None
        first = axis.first(torch.arange(extent.L, device=device)[None, None])
        return first, first + axis.window

    def cover(self, extent: Extent, queries: int = Cover.QUERIES) -> Cover | None:  # noqa: ARG002
        """Return tiles of the grid, each with the keys around it."""
        axes = self._axes
        powers = [1 << i for i in range(queries.bit_length())]
        shapes = [each for each in product(powers, repeat=len(axes)) if math.prod(each) == powers[-1]]
        best: tuple[int, ...] = min(shapes, key=self._time)
        found = [axis.pieces(most) for axis, most in zip(axes, best)]
        kinds = torch.zeros(1, dtype=torch.int64, device="cpu")
        for _, _, own in found:
            kinds = (kinds.unsqueeze(1) * (own.max() + 1) + own).flatten()
        tokens, keys = ([each[i] for each in found] for i in (0, 1))
        return Cover(_flat(tokens, self.lengths), _flat(keys, self.lengths), kinds)

    def _time(self, shape: tuple[int, ...]) -> float:
        """Return the time for a query of tiles of at most this shape, in that for a pair.

        Engines handle a few queries together, which see the keys from the first to the last that one of them sees.
        """
        queries, keys = zip(*(axis.piece(most) for axis, most in zip(self._axes, shape)))
        line, time = math.prod(queries[1:]), KEY * math.prod(keys) / math.prod(queries)
        for together in (4, 16):
            lines = min(self.windows[0] + -(-together // line) - 1, keys[0])
            time += lines * math.prod(keys[1:]) / 2
        return time

    @classmethod
    def drawn(cls, lengths: tuple[int, ...], pick: Callable[[int], int]) -> Neighbourhood:
        """Return random windows."""
        dilations = tuple([1 + pick(min(length, 3)) for length in lengths])
        causal = tuple([pick(3) == 0 for _ in lengths])
        widest = [length // step for length, step in zip(lengths, dilations)]
        windows = tuple([1 + pick(n) if c else 1 + 2 * pick((n + 1) // 2) for n, c in zip(widest, causal)])
        return cls(lengths, windows, dilations, causal, ("shift", "truncate")[pick(2)])

    def __repr__(self) -> str:
        options = ""
        if set(self.dilations) != {1}:
            options += f", dilation={_shortest(self.dilations)}"
        if True in self.causal:
            options += f", is_causal={_shortest(self.causal)}"
        if self.border != "shift":
            options += f", border={self.border!r}"
        return f"neighbourhood({_written(self.lengths)}, {_shortest(self.windows)}{options})"


def _written(lengths: tuple[int, ...]) -> str:
    return repr(lengths[0] if len(lengths) == 1 else lengths)


# Windows --------------------------------------------------------------------------------------------------------------


@mechanism(
    formula="visible iff i and j are in one window of a grid, after a shift",
    sources=("liu2021",),
    cost="O(L·wᵈ·E), on d axes",
)
def windows(sizes: int | Sequence[int], window: int | Sequence[int], shift: int | Sequence[int] = 0) -> Mask:
    """Return the mask of an image or video that is cut into windows: each token sees its own window.

    Tokens p and q of an axis are in one window iff ``(p − shift) // window = (q − shift) // window``.

    Parameters
    ----------
    sizes : int or tuple of int
        Tokens along each axis: (N,), (H, W) or (T, H, W). The sequence holds them in row-major order.
    window : int or tuple of int
        Tokens of a window along each axis. The last windows are smaller if it does not divide the size.
    shift : int or tuple of int
        Where the second window begins along each axis; tokens before it are a window of their own. Swin's every second
        layer has ``window // 2``.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If a size or a window is not positive, a window is larger than the grid, a shift is negative or not less than
        the window, or a tuple has not one value for each axis. When used, if the sizes do not multiply to the numbers
        of queries and keys.

    Notes
    -----
    This is the attention of Swin without its relative bias. Swin rolls the image by ``shift``, cuts it into windows,
    and hides from each other the tokens of a window that were not neighbours before; here nothing is rolled. Swin fills
    an image up to whole windows with zeros, which its tokens see.

    References
    ----------
    Liu et al., Swin transformer, 2021, arXiv 2103.14030.

    Examples
    --------
    >>> from regard import masks
    >>> print(masks.windows(6, 3, shift=1))
    windows(6, 3, shift=1)
    6 queries ↓, 6 keys →; █ visible, · not
      0    5
    0 █·····
    1 ·███··
    2 ·███··
    3 ·███··
    4 ····██
    5 ····██
    """
    function = "masks.windows"
    lengths = _lengths(function, sizes)
    widths = _by_axis(function, "window", window, len(lengths), size)
    _check_fit(function, lengths, widths, (1,) * len(lengths))
    shifts = _by_axis(function, "shift", shift, len(lengths), count)
    for width, start in zip(widths, shifts):
        if start >= width:
            raise rejected(function, "shift", f"be less than the window, {width}", start)
    return Windows(lengths, widths, shifts)


@final
class Windows(GridMask):
    """The window of a grid in which a token lies."""

    name = "windows"

    def __init__(self, lengths: tuple[int, ...], widths: tuple[int, ...], shifts: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.widths = widths
        self.shifts = shifts

    def _at(self, axis: int, i: Tensor) -> Tensor:
        """Return the window of each token along an axis."""
        return (i - self.shifts[axis]) // self.widths[axis]

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys lie in the same window along all axes."""
        ends = zip(self.coordinates(q_idx), self.coordinates(kv_idx))
        first, *others = [self._at(axis, q) == self._at(axis, k) for axis, (q, k) in enumerate(ends)]
        for other in others:
            first = first & other
        return first

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles hold lines of the same window; on a line, also which lie within one window."""
        axis, lines = self.lines(tiling)
        q_lo, q_hi, k_lo, k_hi = (self._at(axis, line) for line in lines)
        some = (k_hi >= q_lo) & (k_lo <= q_hi)
        if len(self.lengths) > 1:
            return some, torch.zeros_like(some)
        return some, some & (q_lo == q_hi) & (k_lo == k_hi)

    def span(self, extent: Extent, device: torch.device) -> Span | None:
        """Return the windows of a line."""
        if len(self.lengths) > 1:
            return None
        start = self._at(0, torch.arange(extent.L, device=device)[None, None]) * self.widths[0] + self.shifts[0]
        return start, start + self.widths[0]

    def cover(self, extent: Extent, queries: int = Cover.QUERIES) -> Cover | None:  # noqa: ARG002
        """Return the windows as tiles."""
        parts = []
        for length, width, shift in zip(self.lengths, self.widths, self.shifts):
            edges = sorted({0, *range(shift, length, width), length})
            parts.append(_padded([range(*ends) for ends in pairwise(edges)]))
        tokens = _flat(parts, self.lengths)
        order = (tokens < 0).sort(stable=True).indices
        tokens = tokens.gather(1, order)
        return Cover(tokens, tokens, None, whole=True)

    @classmethod
    def drawn(cls, lengths: tuple[int, ...], pick: Callable[[int], int]) -> Windows:
        """Return random windows."""
        widths = tuple([1 + pick(length) for length in lengths])
        return cls(lengths, widths, tuple([pick(width) for width in widths]))

    def __repr__(self) -> str:
        shift = f", shift={_shortest(self.shifts)}" if any(self.shifts) else ""
        return f"windows({_written(self.lengths)}, {_shortest(self.widths)}{shift})"


# Axes -----------------------------------------------------------------------------------------------------------------


@mechanism(formula="visible iff i and j are on one line along an axis of a grid", sources=("ho2019",), cost="O(L·n·E)")
def axial(sizes: int | Sequence[int], axis: int | Sequence[int]) -> Mask:
    """Return the axial mask of an image or video: each token sees the tokens on its line along an axis.

    Tokens are on one line along an axis iff their coordinates on all other axes are equal.

    Parameters
    ----------
    sizes : int or tuple of int
        Tokens along each axis: (N,), (H, W) or (T, H, W). The sequence holds them in row-major order.
    axis : int or tuple of int
        The axis along which tokens see each other, counted from the end if negative. With several, a token sees all its
        lines: in an image, ``(0, 1)`` is criss-cross attention, its column and its row.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If a size is not positive, or an axis does not exist, is named twice or none is. When used, if the sizes do not
        multiply to the numbers of queries and keys.

    References
    ----------
    Ho et al., Axial attention in multidimensional transformers, 2019, arXiv 1912.12180.
    Huang et al., CCNet: criss-cross attention for semantic segmentation, 2019, arXiv 1811.11721.

    Examples
    --------
    >>> from regard import masks
    >>> print(masks.axial((2, 3), 1))
    axial((2, 3), 1)
    6 queries ↓, 6 keys →; █ visible, · not
      0    5
    0 ███···
    1 ███···
    2 ███···
    3 ···███
    4 ···███
    5 ···███
    """
    function = "masks.axial"
    lengths = _lengths(function, sizes)
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    constraint = Integer(ge=-len(lengths), le=len(lengths) - 1)
    axes = sorted(constraint(function, "axis", each) % len(lengths) for each in given)
    if not axes or len(set(axes)) < len(axes):
        raise rejected(function, "axis", "name at least one axis, and none twice", axis)
    return Axial(lengths, tuple(axes))


@final
class Axial(GridMask):
    """The lines of a grid through each token, along some of the axes."""

    name = "axial"

    def __init__(self, lengths: tuple[int, ...], axes: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.axes = axes

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return which keys share with the query all coordinates but one."""
        equal = [q == k for q, k in zip(self.coordinates(q_idx), self.coordinates(kv_idx))]
        found = torch.zeros((), dtype=torch.bool, device=kv_idx.device)
        for axis in self.axes:
            line = torch.ones((), dtype=torch.bool, device=kv_idx.device)
            for other, same in enumerate(equal):
                line = line if other == axis else line & same
            found = found | line
        return found

    def bounds(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return which tiles hold tokens of the same line on the first axis of several tokens."""
        axis, (q_lo, q_hi, k_lo, k_hi) = self.lines(tiling)
        some = (k_hi >= q_lo) & (k_lo <= q_hi)
        every = torch.zeros_like(some)
        return (torch.ones_like(some) if axis in self.axes else some), every

    def cover(self, extent: Extent, queries: int = Cover.QUERIES) -> Cover | None:  # noqa: ARG002
        """Return lines as tiles or, of several axes, tiles of the grid with all lines through them."""
        if len(self.axes) == 1:
            lines = [range(n) if at == self.axes[0] else None for at, n in enumerate(self.lengths)]
            parts = [_padded([line] if line else [[i] for i in range(n)]) for line, n in zip(lines, self.lengths)]
            tokens = _flat(parts, self.lengths)
            return Cover(tokens, tokens, None, whole=True)
        powers = [1 << i for i in range(queries.bit_length())]
        shapes = [each for each in product(powers, repeat=len(self.lengths)) if math.prod(each) <= queries]
        best: tuple[int, ...] = min(shapes, key=self._time)
        pieces = [_cuts(n, most) for n, most in zip(self.lengths, best)]
        parts = [_padded([range(*ends) for ends in each]) for each in pieces]
        found = []
        for tile in product(*pieces):
            seen = torch.zeros(self.lengths, dtype=torch.bool, device="cpu")
            for axis in self.axes:
                seen[tuple(slice(None) if at == axis else slice(*ends) for at, ends in enumerate(tile))] = True
            found.append(seen.flatten().nonzero().squeeze(1).tolist())
        return Cover(_flat(parts, self.lengths), _padded(found), None)

    def _time(self, shape: tuple[int, ...]) -> float:
        """Return the time for a query of tiles of at most this shape, in that for a pair."""
        tile = [min(n, most) for n, most in zip(self.lengths, shape)]
        keys = sum(math.prod(tile) // tile[axis] * self.lengths[axis] for axis in self.axes)
        return keys + KEY * keys / math.prod(tile)

    @classmethod
    def drawn(cls, lengths: tuple[int, ...], pick: Callable[[int], int]) -> Axial:
        """Return random axes."""
        some = tuple([axis for axis in range(len(lengths)) if pick(2)])
        return cls(lengths, some or (pick(len(lengths)),))

    def __repr__(self) -> str:
        return f"axial({_written(self.lengths)}, {_written(self.axes)})"
