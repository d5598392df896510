"""Parts that models share: checks of configs, presets, and the matrix that scores the vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import rejected, unknown_name
from regard._utils.options import Options, option
from regard.nn.packed_weight import PackedWeight

#: What shares the matrix of the target embedding: nothing, what scores the vocabulary, or the source embedding, too.
TIES = ("none", "target", "all")
#: No width or length is larger, and no model deeper.
LARGEST, DEEPEST = 1 << 16, 100


def size(default: Any, text: str, most: int = LARGEST) -> Any:
    """Declare a width, a length or a number of layers."""
    return option(default, text, kind=int, least=1, most=most)


def share(default: float, text: str) -> Any:
    """Declare a share in [0, 1)."""
    return option(default, text, least=0, below=1)


@dataclass(frozen=True)
class Config(Options, ABC):
    """The sizes of the vocabularies that are read and written, padding and end mark included."""

    sources: int = size(MISSING, "size of the vocabulary that is read")
    targets: int = size(MISSING, "size of the vocabulary that is written")

    @classmethod
    @abstractmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return the named settings of everything but the vocabularies."""

    @classmethod
    def preset(cls, name: str, sources: int, targets: int, **changes: Any) -> Self:
        """Return the config of this name for two vocabularies, with other fields in place of the preset's."""
        known = cls.presets()
        if name not in known:
            raise unknown_name(cls.__name__, "preset", str(name), known)
        return cls(sources, targets, **{**known[name], **changes})

    def check_tied(self, tied: str) -> None:
        """Raise unless the vocabularies allow to tie the embeddings so."""
        if tied == "all" and self.sources != self.targets:
            raise self.refused("targets", f"be sources {self.sources} where tied is 'all'", self.targets)

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


#: With so many rows a product with many columns takes less time the other way round, where weights lie row by row.
_FEW = range(2, 9)


def vocabulary_scores(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the products (..., N) of rows (..., E) with a matrix (N, E) that scores a vocabulary.

    The same as ``rows @ weight.T``; with 2 to 8 rows, as in a step of decoding, a CPU takes about half the time.
    """
    few = rows.numel() // max(rows.shape[-1], 1) in _FEW and not torch.is_grad_enabled()
    few = few and not isinstance(weight, PackedWeight)
    if few and rows.device.type == "cpu" and rows.dtype == torch.float32 and weight.is_contiguous():
        return (weight @ rows.flatten(0, -2).t()).t().reshape(*rows.shape[:-1], len(weight))
    return F.linear(rows, weight)
