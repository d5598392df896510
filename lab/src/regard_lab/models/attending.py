"""Attention of recurrent models with any score: soft or hard, global or local; and parts shared by models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import scores
from regard._utils.errors import rejected, unknown_name
from regard.nn import (
    CosineAttention,
    DotProductAttention,
    GeneralAttention,
    HardAttention,
    KernelAttention,
    LocalAttention,
    LocationAttention,
    ScoredAttention,
)
from regard.scores.kernels import kernels
from regard_lab._options import Options, option
from regard_lab.models.packed_weight import PackedWeight

# Shared parts: config checks, presets, and the output projection ------------------------------------------------------


#: Weight tying: none; target embedding and output projection; or these and the source embedding.
TIES = ("none", "target", "all")
#: Upper bounds on widths and lengths, and on the number of layers.
LARGEST, DEEPEST = 1 << 16, 100


def size(default: Any, text: str, le: int = LARGEST) -> Any:
    """Declare a width, a length or a number of layers."""
    return option(default, text, kind=int, ge=1, le=le)


def share(default: float, text: str) -> Any:
    """Declare a share in [0, 1)."""
    return option(default, text, ge=0, lt=1)


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
    """The output projection ``W x + b``; with weight tying, W is the target embedding (Press & Wolf 2017).

    Parameters
    ----------
    width : int
        Number of input features.
    targets : int
        Vocabulary size N.
    tied : bool
        Use the target embedding as W, so that the ``state_dict`` holds it only once.
    """

    def __init__(self, width: int, targets: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(targets, width))
        self.bias = nn.Parameter(torch.empty(targets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to 0, which makes all symbols equally likely."""
        for each in self.parameters():
            nn.init.zeros_(each)

    def projection(self, embedding: nn.Embedding) -> tuple[Tensor, Tensor]:
        """Return W (N, width) and b (N,)."""
        return embedding.weight if self.weight is None else self.weight, self.bias


def scheduled_sampling(given: Tensor, logits: Tensor, share: float) -> Tensor:
    """Return the next input (B, 1): the given symbol with probability ``share``, otherwise the model's most likely one.

    Parameters
    ----------
    given : Tensor (B, 1)
    logits : Tensor (B, 1, N)
        From the previous step.
    share : float
        In [0, 1].
    """
    chance = torch.rand(given.shape, device=given.device)
    return torch.where(chance < share, given, logits.detach().argmax(-1))


def check_probability(model: nn.Module, value: Any) -> float:
    """Return the teacher-forcing probability as a float; raise if it is invalid."""
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= 1:
        raise rejected(type(model).__name__, "teacher_forcing", "be a probability in [0, 1]", repr(value))
    return float(value)


def find_map(model: Any, name: str) -> int:
    """Return the index of the model's attention map with this name; raise if there is none."""
    if name not in model.maps:
        raise unknown_name(type(model).__name__, "map", name, model.maps)
    index: int = model.maps.index(name)
    return index


#: Numbers of rows for which the transposed product with a row-major weight is faster.
_FEW = range(2, 9)


def vocabulary_scores(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the vocabulary logits ``rows @ weight.T`` (..., N) of rows (..., E) and a weight (N, E).

    With 2 to 8 rows, as in a decoding step, this takes about half the time on a CPU.
    """
    few = rows.numel() // max(rows.shape[-1], 1) in _FEW and not torch.is_grad_enabled()
    few = few and not isinstance(weight, PackedWeight)
    if few and rows.device.type == "cpu" and rows.dtype == torch.float32 and weight.is_contiguous():
        return (weight @ rows.flatten(0, -2).t()).t().reshape(*rows.shape[:-1], len(weight))
    return F.linear(rows, weight)


# Attention of one sequence to another ---------------------------------------------------------------------------------
# Dimensions: B batch, L queries, S keys, Q query width, E width of the attended states, C features.


#: Kernels of a distance, without the boxcar, which has no gradient.
KERNELS = tuple(name for name, kernel in kernels().items() if kernel.smooth)
#: Scores that compare queries and keys of equal width and have no projection of their own.
PLAIN = ("cosine", "dot", *KERNELS, "scaled_dot")
#: All scores available to models, by their names in :mod:`regard.scores`.
SCORES = ("additive", "concat", "constant", "general", "location", *PLAIN)
SCOPES, DRAWS = ("global", "local-m", "local-p"), ("none", "gumbel", "reinforce")


class TanhAttention(ScoredAttention):
    """Additive attention ``w_vᵀ tanh(q + k)`` between queries and keys that are already projected.

    Parameters
    ----------
    features : int
        Width C of queries and keys.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w_v = nn.Parameter(torch.empty(features))
        self.reset_parameters()

    def score(self) -> scores.Score:
        return scores.Additive(self.w_v)

    def reset_parameters(self) -> None:
        """Reinitialize w_v with standard deviation 1/√C."""
        nn.init.normal_(self.w_v, std=len(self.w_v) ** -0.5)


class AverageAttention(ScoredAttention):
    """Uniform attention over all keys, without parameters."""

    def score(self) -> scores.Score:
        return scores.Constant()

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""


def scorer(name: str, width: int, max_length: int) -> ScoredAttention:
    """Return an attention layer with the named score for projected queries and keys.

    Parameters
    ----------
    name : str
        One of :data:`SCORES`.
    width : int
        Width of queries and keys.
    max_length : int
        Number of key positions of the location score.
    """
    if name in ("additive", "concat"):
        return TanhAttention(width)
    if name == "constant":
        return AverageAttention()
    if name == "cosine":
        return CosineAttention(5.0)
    if name == "location":
        return LocationAttention(width, max_length)
    if name == "general":
        return GeneralAttention(width)
    if name in KERNELS:
        # For entries of order 1, these bandwidths give the Gaussian scores the size of scaled dot products, and put
        # all keys within the support of a compact kernel.
        return KernelAttention(cast(Any, name), width**0.25 if name == "gaussian" else 2 * width**0.5)
    return DotProductAttention(scale=1.0 if name == "dot" else None)


class Attending(nn.Module):
    """The attention of a recurrent model: states are projected once, and each query is scored against them.

    ======================  =====================================  =========================
    score                   query and key                          formula
    ======================  =====================================  =========================
    additive, concat        W_q q, W_k m, of C features            wᵀ tanh(q + k)
    general                 q, W m, as wide as the query           q·k
    dot and other ``PLAIN`` q, m; W_k m if widths differ           q·k, −½‖(q − k)/σ‖², …
    … with ``projections``  W_q q, W_k m, of C features            the same; values are W_v m
    location                q, by position                         (W q)_s
    constant                                                       0
    ======================  =====================================  =========================

    Parameters
    ----------
    score : str
        One of :data:`SCORES`.
    sizes : (int, int, int)
        Widths Q of queries and E of states, and features C.
    projections : bool
        Project queries, keys and values before a score of :data:`PLAIN`.
    scope : {"global", "local-m", "local-p"}
        Attend to all states, to a window around the query's position, or to a window around a predicted position.
    window : int
        Half the window's width, D.
    hard : {"none", "gumbel", "reinforce"}
        Soft attention, or hard attention to one state with this gradient estimator.
    max_length : int
        Number of positions of the location score.
    entropy : float
        Weight of the entropy bonus in the surrogate loss of hard attention.
    """

    def __init__(
        self,
        score: str,
        sizes: tuple[int, int, int],
        *,
        projections: bool = False,
        scope: str = "global",
        window: int = 10,
        hard: str = "none",
        max_length: int = 64,
        entropy: float = 0.0,
    ) -> None:
        super().__init__()
        Q, E, C = sizes
        self.scope = scope
        self.query: nn.Module = nn.Identity()
        self.key: nn.Module = nn.Identity()
        self.value: nn.Module = nn.Identity()
        self.width = E  # of values
        if score in ("additive", "concat") or projections:
            self.query, self.key = nn.Linear(Q, C, bias=False), nn.Linear(E, C, bias=False)
            Q = C
        elif score == "general" or (score in PLAIN and Q != E):
            self.key = nn.Linear(E, Q, bias=False)
        if projections:
            self.value, self.width = nn.Linear(E, C, bias=False), C
        made = scorer("dot" if score == "general" else score, Q, max_length)
        self.layer: ScoredAttention | LocalAttention | HardAttention = made
        if scope != "global":
            mode: Any = "predictive" if scope == "local-p" else "monotonic"
            # Renormalize, so that alignment weights sum to 1.
            self.layer = LocalAttention(Q, window, mode=mode, score="dot", renormalize=True)
            self.layer.scorer = made
        elif hard != "none":
            self.layer = HardAttention(Q, score="dot", estimator=cast(Any, hard), entropy=entropy)
            self.layer.scorer = made
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the projections by Glorot's rule, and the attention layer by its own."""
        for module in (self.query, self.key, self.value):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        self.layer.reset_parameters()

    def prepare(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, S, ·) and values (B, S, V) of states (B, S, E)."""
        return self.key(states), self.value(states)

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, steps: Tensor, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context vectors of the queries.

        Parameters
        ----------
        query : Tensor (B, L, Q)
        keys, values : Tensor (B, S, ·), (B, S, V)
            From :meth:`prepare`.
        lengths : Tensor (B,)
            Number of real keys.
        steps : Tensor (L,)
            The position of each query in its sequence.
        weights : bool, default False
            Also return the attention weights.

        Returns
        -------
        context : Tensor (B, L, V)
        weights : Tensor (B, L, S), or None
        """
        options = {}
        if self.scope == "local-m":  # past the end of a source, the window stays on its last states
            options["positions"] = torch.minimum(steps, lengths[:, None] - 1)  # (B, L)
        if weights:  # with one-hot values, the output holds the weights, with gradients
            one_hot = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
            values = torch.cat([values, one_hot.expand(len(values), -1, -1)], -1)
        answer = self.layer(self.query(query), keys, values, lengths, **options)
        context, attention = answer.split([self.width, answer.shape[-1] - self.width], -1)
        return context, attention if weights else None
