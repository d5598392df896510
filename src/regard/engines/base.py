"""The interface of an engine: how an attention is executed, never what is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from regard.engines.aux import AuxRequest, TopK
from regard.engines.problem import Problem


@dataclass(slots=True, eq=False)
class EngineOutput:
    """The output (B, H, L, V) of a run, and what else it has at hand anyway.

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


#: Executes problems of one structure.
Runner = Callable[[Problem], EngineOutput]


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

    def run(self, problem: Problem) -> EngineOutput:
        """Execute the problem."""
        return self.prepare(problem, None)(problem)

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:  # noqa: ARG002
        """Return the function that executes this problem, and every other of its structure.

        An engine defines this where something depends on the structure alone and is worth computing once, else
        :meth:`run`. What is returned keeps no tensor of the problem. With a request it tells what it has at hand, and
        its output is the same to the bit.
        """
        if type(self).run is Engine.run:
            raise NotImplementedError(f"{type(self).__name__} must define run or prepare")
        return self.run

    def fields(self, problem: Problem) -> frozenset[str]:  # noqa: ARG002
        """Return the fields of :class:`regard.Aux` that can come from the pass that makes the output."""
        return frozenset()

    def partial_backward(
        self,
        problem: Problem,  # noqa: ARG002
        output: Tensor,  # noqa: ARG002
        lse: Tensor,  # noqa: ARG002
        runner: Runner | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        """Return the output of an attention of which the problem is a part, with the part's own derivative.

        Where keys are divided, a part's weights are ``exp(score − lse)`` with the log-sum-exp of the whole row. Its
        gradient then needs the whole row's output and log-sum-exp, and no forward pass of the part: the gradients of
        all parts add up to those of the whole.

        Parameters
        ----------
        problem : Problem
            All queries, and some of the keys that they see; its tensors are in the compute dtype.
        output : Tensor (B, H, L, V)
            The whole output, a constant.
        lse : Tensor (B, H, L)
            The whole log-sum-exp, a constant; −inf in a row that sees nothing.
        runner : callable, optional
            What :meth:`prepare` returned for problems of this structure, of which an engine may use what it prepared.

        Returns
        -------
        Tensor (B, H, L, V) or None
            ``output``, with a graph to the problem's tensors; None where this engine cannot.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


#: What ``engine=`` can name, for editors and type checkers.
EngineName = Literal["auto", "fused", "reference", "sdpa", "streaming"]

#: What stands for an engine: a name (also one that was registered elsewhere) or an Engine.
EngineLike = EngineName | str | Engine
