"""Parts that models share: checks of configs, presets, and the matrix that scores the vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from regard._errors import described, rejected, unknown_name

#: What shares the matrix of the target embedding: nothing, what scores the vocabulary, or the source embedding, too.
TIES = ("none", "target", "all")
#: No width or length is larger, and no model deeper.
_LARGEST, _DEEPEST = 1 << 16, 100


@dataclass(frozen=True)
class Config(ABC):
    """The sizes of the vocabularies, and the checks that every config has in common.

    Attributes
    ----------
    sources, targets : int
        Size of the vocabularies that are read and written, padding and end mark included.
    """

    sources: int
    targets: int

    @classmethod
    @abstractmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return the named settings of everything but the vocabularies."""

    @classmethod
    def preset(cls, name: str, sources: int, targets: int, **changes: Any) -> Self:
        """Return the config of this name for two vocabularies.

        Parameters
        ----------
        name : str
            One of :meth:`presets`.
        sources, targets : int
        **changes
            Other fields, in place of the preset's.
        """
        known = cls.presets()
        if name not in known:
            raise unknown_name(cls.__name__, "preset", str(name), known)
        return cls(sources, targets, **{**known[name], **changes})

    def whole(self, *names: str, most: int = _LARGEST) -> None:
        """Raise unless these fields are whole numbers from 1 on, and not absurdly large."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise self.refused(name, f"be a whole number from 1 to {most}", repr(value))

    def layers(self, *names: str) -> None:
        """Raise unless these fields are numbers of layers."""
        self.whole(*names, most=_DEEPEST)

    def share(self, *names: str) -> None:
        """Raise unless these fields are numbers in [0, 1)."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < 1:
                raise self.refused(name, "be a number in [0, 1)", repr(value))

    def ties(self, tied: str) -> None:
        """Raise unless this is one of :data:`TIES` that the vocabularies allow."""
        self.one_of("tied", TIES)
        if tied == "all" and self.sources != self.targets:
            raise self.refused("targets", f"be sources {self.sources} where tied is 'all'", self.targets)

    def flag(self, *names: str) -> None:
        """Raise unless these fields are bools."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise self.refused(name, "be a bool", described(value))

    def one_of(self, name: str, known: Sequence[str]) -> None:
        """Raise unless a field is one of these names."""
        value = getattr(self, name)
        if not isinstance(value, str):
            raise self.refused(name, f"be one of {', '.join(map(repr, known))}", described(value))
        if value not in known:
            raise unknown_name(type(self).__name__, name, value, known)

    def refused(self, name: str, expected: str, got: object) -> Exception:
        """Return the error to raise for a field."""
        return rejected(type(self).__name__, name, expected, got)


class Output(nn.Module):
    """Make logits ``W x + b``; W is the embedding of the symbols where that is tied (Press & Wolf 2017).

    Parameters
    ----------
    width : int
        Of the rows.
    targets : int
        How many symbols N.
    tied : bool
        Whether there is no W of its own, so that a ``state_dict`` has it once.
    """

    def __init__(self, width: int, targets: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(targets, width))
        self.bias = nn.Parameter(torch.empty(targets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all to 0: every symbol is equally likely."""
        for each in self.parameters():
            nn.init.zeros_(each)

    def projection(self, embedding: nn.Embedding) -> tuple[Tensor, Tensor]:
        """Return W (N, width) and b (N,)."""
        return embedding.weight if self.weight is None else self.weight, self.bias


def scheduled_sampling(given: Tensor, logits: Tensor, share: float) -> Tensor:
    """Return what is read next, (B, 1): each sequence's given symbol with probability ``share``, else the likeliest.

    Parameters
    ----------
    given : Tensor (B, 1)
    logits : Tensor (B, 1, N)
        Of the step before.
    share : float
        In [0, 1].
    """
    chance = torch.rand(given.shape, device=given.device)
    return torch.where(chance < share, given, logits.detach().argmax(-1))


def check_probability(model: nn.Module, value: Any) -> float:
    """Return the share of steps that are given the target's symbols, or raise."""
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= 1:
        raise rejected(type(model).__name__, "teacher_forcing", "be a probability in [0, 1]", repr(value))
    return float(value)


def find_map(model: Any, name: str) -> int:
    """Return which of a model's attention maps has this name, or raise."""
    if name not in model.maps:
        raise unknown_name(type(model).__name__, "map", name, model.maps)
    index: int = model.maps.index(name)
    return index
