"""Scaled rotary angles, for sequences longer than those in training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._utils.constraints import Number, positive, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism


class AngleScaling(ABC):
    """A factor for each rotary frequency: the ``scaling`` of a :class:`~regard.nn.Rotary`."""

    #: Whether the factors depend on the length of the sequence. Keys in a cache then keep the factors that they had.
    needs_length = False

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and of rotated keys; scores get its square."""
        return 1.0

    @abstractmethod
    def factors(self, frequencies: Tensor, length: Tensor | None = None) -> Tensor:
        """Return the factors of angles.

        Parameters
        ----------
        frequencies : Tensor (R/2,)
            In radians per position, from 1 down.
        length : Tensor () or (B,), optional
            Length of the sequences; used if ``needs_length``.

        Returns
        -------
        Tensor (R/2,) or (B, R/2)
        """


@dataclass(frozen=True)
class RotaryScaling(AngleScaling):
    """Scale rotary angles so that longer sequences stay within the angles seen in training.

    By default all angles are divided by ``factor`` (Chen 2023, arXiv 2306.15595). With ``original_length``, angles of
    wavelengths above ``original_length / low`` are divided by ``factor``, those of wavelengths below
    ``original_length / high`` are kept, and those in between are interpolated (Llama 3.1; Dubey 2024, arXiv
    2407.21783).

    Parameters
    ----------
    factor : float
        Ratio of the new to the original sequence length.
    original_length : int, optional
        Sequence length in training.
    low, high : float
        Numbers of rotations within ``original_length``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import RotaryScaling
    >>> RotaryScaling(4.0).factors(torch.tensor([1.0, 0.001]))
    tensor([0.2500, 0.2500])
    >>> RotaryScaling(8.0, original_length=8192).factors(torch.tensor([1.0, 0.001, 0.0001]))
    tensor([1.0000, 0.2136, 0.1250])
    """

    factor: float
    original_length: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        positive(self, "factor", self.factor)
        if self.original_length is not None:
            size(self, "original_length", self.original_length)
            positive(self, "low", self.low)
            if not self.low < self.high:
                raise rejected("RotaryScaling", "high", f"be above low, {self.low:g}", self.high)

    def factors(self, frequencies: Tensor, length: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the factors of angles, given their frequencies in radians per position."""
        if self.original_length is None:
            return torch.full_like(frequencies, 1 / self.factor)
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept + (1 - kept) / self.factor


@mechanism(
    formula="θ_i ↦ θ_i κ^(−2i/(R−2));  dynamic: κ ↦ max(κT/T₀ − κ + 1, 1)",
    sources=("bloc2023",),
    cost="O(R)",
)
@dataclass(frozen=True)
class NTKScaling(AngleScaling):
    """Scale rotary angles by a larger base, ``base · κ^(R/(R−2))``: fast angles are kept, slow ones divided by κ.

    κ is ``factor`` ("NTK-aware"; bloc97 2023). With ``original_length`` T₀, κ grows with the length T of the sequence,
    ``max(factor · T/T₀ − factor + 1, 1)`` ("dynamic NTK"): short sequences are as in training. Keys that are in a cache
    keep the κ that they were rotated by, which the sequence's length has outgrown.

    Parameters
    ----------
    factor : float
        At least 1.
    original_length : int, optional
        Sequence length in training, for a dynamic κ.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import NTKScaling
    >>> frequencies = torch.tensor([1.0, 0.1, 0.01])
    >>> NTKScaling(4.0).factors(frequencies)
    tensor([1.0000, 0.5000, 0.2500])
    >>> NTKScaling(2.0, original_length=8).factors(frequencies, torch.tensor([8, 20]))
    tensor([[1.0000, 1.0000, 1.0000],
            [1.0000, 0.5000, 0.2500]])
    """

    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        Number(ge=1)(self, "factor", self.factor)
        if self.original_length is not None:
            size(self, "original_length", self.original_length)

    @property
    def needs_length(self) -> bool:  # type: ignore[override]
        """Whether κ is dynamic."""
        return self.original_length is not None

    def factors(self, frequencies: Tensor, length: Tensor | None = None) -> Tensor:
        """Return ``κ^(−2i/(R−2))``."""
        ratio: float | Tensor = self.factor
        if self.original_length is not None:
            if length is None:
                raise rejected("NTKScaling", "length", "be given with original_length", None)
            excess = length.to(frequencies.dtype) / self.original_length - 1
            ratio = (1 + self.factor * excess).clamp(min=1).unsqueeze(-1)
        pairs = frequencies.shape[0]
        powers = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device) / -max(pairs - 1, 1)
        return ratio**powers


@mechanism(
    formula="θ_i ↦ (1 − r_i) θ_i + r_i θ_i / κ, r_i a ramp over i;  q, k ↦ (0.1 ln κ + 1) (q, k)",
    sources=("peng2023",),
    cost="O(R)",
)
@dataclass(frozen=True)
class YarnScaling(AngleScaling):
    """YaRN: keep fast angles, divide slow ones by ``factor``, and sharpen the scores (Peng 2023, arXiv 2309.00071).

    Pairs of columns that rotate ``fast`` times or more within ``original_length`` are kept, those that rotate ``slow``
    times or less are divided by ``factor``. In between, the share of the two is linear in the index of the pair.
    Queries and keys are multiplied by ``attention_factor``.

    Parameters
    ----------
    factor : float
        Ratio κ of the new to the original sequence length, at least 1.
    original_length : int
        Sequence length in training.
    fast, slow : float
        Numbers of rotations within ``original_length``: β_fast and β_slow.
    attention_factor : float, optional
        Defaults to ``0.1 ln κ + 1``. DeepSeek's is the ratio of two of these, as ``mscale_all_dim`` puts its square
        into the ``scale`` of the scores.
    truncate : bool, default True
        Whether the ramp begins and ends at whole indices.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import YarnScaling
    >>> scaling = YarnScaling(4.0, original_length=1024)
    >>> scaling.factors(torch.tensor([1.0, 0.1, 0.01, 0.001]))
    tensor([1.0000, 0.7500, 0.5000, 0.2500])
    >>> round(scaling.magnitude, 4)
    1.1386
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        Number(ge=1)(self, "factor", self.factor)
        size(self, "original_length", self.original_length)
        positive(self, "slow", self.slow)
        if not self.slow < self.fast:
            raise rejected("YarnScaling", "fast", f"be above slow, {self.slow:g}", self.fast)
        if self.attention_factor is not None:
            positive(self, "attention_factor", self.attention_factor)

    @property
    def magnitude(self) -> float:
        """The factor of queries and of keys."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def factors(self, frequencies: Tensor, length: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the share of each frequency that is kept, plus that which is divided by the factor."""
        pairs = frequencies.shape[0]
        if pairs == 1:
            return torch.ones_like(frequencies)
        step = -frequencies[1].log()  # θ_i = exp(−i · step)
        low, high = (math.log(self.original_length / (2 * math.pi * turns)) / step for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = low.floor(), high.ceil()
        low, high = low.clamp(min=0), high.clamp(max=2 * pairs - 1)
        span = torch.where(low == high, 1e-3, high - low)
        index = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        divided = ((index - low) / span).clamp(0, 1)
        return 1 - divided + divided / self.factor


@mechanism(
    formula="θ_i ↦ θ_i / λ_i, λ of short or long sequences;  q, k ↦ √(1 + ln κ / ln T₀) (q, k)",
    sources=("ding2024",),
    cost="O(R)",
)
@dataclass(frozen=True)
class LongRopeScaling(AngleScaling):
    """LongRoPE: divide each angle by a factor found by search (Ding 2024, arXiv 2402.13753), as in Phi-3.

    Sequences longer than ``original_length`` T₀ use ``long``, all others ``short``. Queries and keys are multiplied by
    ``attention_factor``. Keys in a cache keep the table that they were rotated by: prefill again, once a sequence has
    grown beyond T₀.

    Parameters
    ----------
    short, long : sequence of float
        Divisors of the R/2 frequencies.
    original_length : int
        Sequence length in training, at least 2.
    factor : float, default 1.0
        Ratio κ of the new to the original length.
    attention_factor : float, optional
        Defaults to ``√(1 + ln κ / ln T₀)``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LongRopeScaling
    >>> scaling = LongRopeScaling((1.0, 1.0), (1.0, 8.0), original_length=4096, factor=8.0)
    >>> scaling.factors(torch.tensor([1.0, 0.01]), torch.tensor([4096, 4097]))
    tensor([[1.0000, 1.0000],
            [1.0000, 0.1250]])
    >>> round(scaling.magnitude, 4)
    1.118
    """

    short: Sequence[float]
    long: Sequence[float]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None

    needs_length = True

    def __post_init__(self) -> None:
        for name in ("short", "long"):
            given = getattr(self, name)
            if not isinstance(given, Sequence) or isinstance(given, str):
                raise rejected("LongRopeScaling", name, "be a sequence of numbers", described(given), TypeError)
            object.__setattr__(self, name, tuple(positive(self, name, each) for each in given))
        if len(self.short) != len(self.long):
            expected = f"have as many numbers as short, {len(self.short)}"
            raise rejected("LongRopeScaling", "long", expected, len(self.long))
        Number(ge=2)(self, "original_length", size(self, "original_length", self.original_length))
        positive(self, "factor", self.factor)
        if self.attention_factor is not None:
            positive(self, "attention_factor", self.attention_factor)

    @property
    def magnitude(self) -> float:
        """The factor of queries and of keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_length))

    def factors(self, frequencies: Tensor, length: Tensor | None = None) -> Tensor:
        """Return the inverse divisors of the length's table."""
        if len(self.short) != frequencies.shape[0]:
            expected = f"have one number for each of {frequencies.shape[0]} frequencies"
            raise rejected("LongRopeScaling", "short", expected, len(self.short))
        if length is None:
            raise rejected("LongRopeScaling", "length", "be given", None)
        short, long = (frequencies.new_tensor(each) for each in (self.short, self.long))
        return 1 / torch.where(length.unsqueeze(-1) > self.original_length, long, short)
