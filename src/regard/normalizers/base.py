"""The normalizer interface: maps a row of scores to weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from regard._utils.part import Part

#: ``sweep(visit)`` calls ``visit(scores, kv_idx)`` on every tile of keys, scores (B, H, l, s), left to right.
Sweep = Callable[[Callable[[Tensor, Tensor], None]], None]


class Statistic(NamedTuple):
    """The row statistic that, together with its own score, determines each weight.

    Attributes
    ----------
    shift : Tensor (B, H, l, 1)
        A reference that is subtracted first, so that large scores keep their precision. For argmax, the index of the
        maximum. Not differentiated.
    offset : Tensor (B, H, l, 1)
        The statistic relative to the shift: the log of the denominator, or the rounding error of the threshold.
    """

    shift: Tensor
    offset: Tensor


class Normalizer(Part, ABC):
    """A map from the scores of one query to weights. Masked scores are −inf; a fully masked row gets weights 0.

    Engine ``streaming`` computes a normalizer tile by tile if it sets ``streams`` and defines :meth:`statistic`,
    :meth:`tile_weights` and :meth:`tile_slope`. It may set ``streams`` if all of this holds:

    1. A weight is ``w_i = f(s_i − t)``: a function of its own score relative to one :class:`Statistic` t of the row.
    2. Its slope ``f'(s_i − t)`` is a function of the weight alone, :meth:`tile_slope`.
    3. ``∂t/∂s_i = slope_i / D``, with one D for the whole row, :meth:`slope_total`. Where the weights of every row sum
       to the same number, D is the sum of the slopes: that is the default.

    The gradient of the scores is then ``slope_i · (d w_i − Σ_j slope_j · d w_j / D)``, which is what the backward pass
    computes. Softmax and entmax sum to 1, and keep the default. Softmax-plus-one, ``exp(s_i) / (1 + Σ_j exp(s_j))``,
    sums to less: its statistic is ``t = log(1 + Σ_j exp(s_j))``, so D is 1, and with the default its gradients would be
    wrong. Tensors that the statistic depends on get their gradients from :meth:`pull`. Where each weight depends on its
    own score alone, set ``row_normalized = False``; 3 is then void. A normalizer that meets 1 or 2 in no form, such as
    ``g(s_i) / Σ_j g(s_j)`` with another g than an exponential, leaves ``streams`` False, and is computed by
    :meth:`weights` over whole rows. The laws "gradient budget" and "gradcheck" of :mod:`regard.testing` fail for a
    normalizer that sets ``streams`` and breaks a condition.

    A subclass of a normalizer that streams and overrides one of these methods states ``streams`` (and ``online``) anew,
    or is computed by :meth:`weights` over whole rows.
    """

    shortcuts: ClassVar[Mapping[str, frozenset[str]]] = dict.fromkeys(
        ("streams", "online"), frozenset({"weights", "statistic", "tile_weights", "tile_slope", "slope_total"})
    )

    #: Whether the weights can be had tile by tile, from one statistic for each row: see the three conditions above.
    streams: ClassVar[bool] = False
    #: Whether it is softmax: the statistic is the log-sum-exp, which one pass accumulates along with the output.
    online: ClassVar[bool] = False
    #: Whether the statistic needs all scores of a row at once. Engines then use tiles with fewer rows.
    needs_whole_row: ClassVar[bool] = False
    #: Whether a weight is a differentiable function of the other scores of its row.
    row_normalized: ClassVar[bool] = True
    #: Whether the weights of every non-empty row are ≥ 0 and sum to 1.
    convex: ClassVar[bool] = True
    #: Whether weights are at most 1, in absolute value.
    bounded: ClassVar[bool] = True
    #: Whether a larger score in a row never has a smaller weight.
    monotone: ClassVar[bool] = True
    #: Whether the order of keys counts, so that permuting them changes the output.
    positional: ClassVar[bool] = False
    #: Whether weights of a head depend on the scores of other heads.
    mixes_heads: ClassVar[bool] = False
    #: Whether gradients are those of the weights; a hard choice has zero or surrogate gradients.
    smooth: ClassVar[bool] = True
    #: Whether the result depends on random numbers.
    random: ClassVar[bool] = False

    @abstractmethod
    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights (..., L, S) of whole rows of scores; masked scores are −inf and get exactly 0.

        This defines the normalizer. It is differentiable to any order.
        """

    def statistic(self, sweep: Sweep, like: Tensor) -> Statistic:
        """Compute the row statistic in one or more sweeps; ``like`` (B, H, l, 1) has its shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} cannot stream")

    def tile_weights(self, scores: Tensor, row: Statistic, kv_idx: Tensor) -> Tensor:
        """Return the weights of a tile of scores (B, H, l, s) at keys ``kv_idx`` (s,)."""
        raise NotImplementedError(f"{type(self).__name__} cannot stream")

    def tile_slope(self, weights: Tensor) -> Tensor:
        """Return d weight / d score for a fixed statistic, as a function of the weight."""
        raise NotImplementedError(f"{type(self).__name__} cannot stream")

    def slope_total(self, total: Tensor) -> Tensor:
        """Return D (B, H, l, 1) of ``d statistic / d score_i = slope_i / D``, from the sum of the row's slopes.

        The sum itself is right where the weights of every row sum to the same number.
        """
        return total

    def pull(self, row: Statistic, grad: Tensor) -> list[Tensor]:  # noqa: ARG002
        """Return the gradients of :meth:`tensors`, given that of the statistic (B, H, l, 1), divided by D."""
        return []

    def check(self, heads: int) -> None:  # noqa: ARG002
        """Raise ValueError if the normalizer does not fit the number of query heads."""
        return

    @classmethod
    def sample(cls, generator: torch.Generator) -> Self:  # noqa: ARG003
        """Return an instance for tests."""
        return cls()


#: The names in :data:`TABLE`, for editors and type checkers.
NormalizerName = Literal[
    "argmax",
    "cog",
    "entmax",
    "entmax15",
    "gumbel",
    "learned_entmax",
    "relu",
    "sampled",
    "scalable_softmax",
    "sigmoid",
    "softmax",
    "softmax_sink",
    "sparsemax",
    "stick_breaking",
    "talking_heads",
]

#: A name, including names registered elsewhere, or a Normalizer.
NormalizerLike = NormalizerName | str | Normalizer

_N = TypeVar("_N", bound=type[Normalizer])

#: Every registered normalizer by name. The conformance suite tests each of them.
TABLE: dict[str, type[Normalizer]] = {}


def register(name: str) -> Callable[[_N], _N]:
    """Class decorator: register a normalizer, for ``normalizer="name"`` and the conformance suite."""

    def add(cls: _N) -> _N:
        TABLE[name] = cls
        return cls

    return add
