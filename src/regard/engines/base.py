"""The interface of an engine: how an attention is executed, never what is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from regard._aux import AuxRequest, TopK
from regard._problem import Problem


@dataclass(frozen=True)
class Outcome:
    """What a run yields: the output (B, H, L, V), and what else it has at hand anyway.

    Attributes
    ----------
    output : Tensor (B, H, L, V)
    lse : Tensor (B, H, L) or None
        Natural log-sum-exp of the scores; −inf in an empty row.
    weights, scores : Tensor (B, H, L, S) or None
        From an engine that materializes them.
    max, entropy : Tensor (B, H, L) or None
    topk : TopK or None
    received : Tensor (B, H, S) or None
        What an engine was asked for and tells from the same pass, as in :class:`regard.Aux`.
    """

    output: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None
    scores: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    topk: TopK | None = None
    received: Tensor | None = None


@dataclass(frozen=True)
class Cost:
    """An estimate of what a run costs.

    Attributes
    ----------
    flops : float
        Floating-point operations of the forward pass.
    bytes_read : float
        Bytes of query, key, value and mask tensors that are read.
    workspace : float
        Bytes held beside inputs and output.
    grows : bool
        Whether that workspace grows with L×S.
    """

    flops: float
    bytes_read: float
    workspace: float
    grows: bool


class Engine(ABC):
    """A way to execute a problem. An engine knows the parts' interfaces and no other engine."""

    name: ClassVar[str]
    #: Whether the backward pass knows a row through its log-sum-exp alone, whose rounding its gradients then carry.
    keeps_lse: ClassVar[bool] = False
    #: Whether second derivatives and forward-mode work.
    twice_differentiable: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Return why this engine cannot run the problem, or None when it can."""

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Return an estimate of the run's cost; only asked where :meth:`refusal` is None."""

    @abstractmethod
    def grows(self, problem: Problem) -> bool:
        """Return whether the workspace grows with L×S."""

    @abstractmethod
    def run(self, problem: Problem) -> Outcome:
        """Execute the problem."""

    def fields(self, problem: Problem) -> frozenset[str]:  # noqa: ARG002
        """Return the fields of :class:`regard.Aux` that :meth:`observe` tells from the pass that makes the output."""
        return frozenset()

    def observe(self, problem: Problem, request: AuxRequest) -> Outcome:  # noqa: ARG002
        """Execute the problem, to the same bits, and tell what comes with it; a second pass finds the rest."""
        return self.run(problem)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


#: What ``engine=`` can name, for editors and type checkers.
EngineName = Literal["auto", "fused", "reference", "sdpa", "streaming"]

#: What stands for an engine: a name (also one that was registered elsewhere) or an Engine.
EngineLike = EngineName | str | Engine
