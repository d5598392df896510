"""The engine interface. Engines decide how an attention is executed, never what is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from regard.engines.aux import AuxRequest, TopK
from regard.engines.problem import Problem


@dataclass(slots=True, eq=False)
class EngineOutput:
    """The output (B, H, L, V) of a run, and auxiliary outputs that the engine has computed anyway.

    Attributes
    ----------
    output : Tensor (B, H, L, V)
    lse : Tensor (B, H, L) or None
        Natural log-sum-exp of the scores; −inf in an empty row.
    weights, scores : Tensor (B, H, L, S) or None
        Only from engines that materialize them.
    max, entropy : Tensor (B, H, L) or None
    topk : TopK or None
    received : Tensor (B, H, S) or None
        Requested fields that the engine computes in the same pass; see :class:`regard.Aux`.
    is_finite : bool or None
        Whether the output has no NaN or infinity; None if the engine does not know.
    """

    output: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None
    scores: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    topk: TopK | None = None
    received: Tensor | None = None
    is_finite: bool | None = None


class Cost(NamedTuple):
    """The estimated cost of a run.

    Attributes
    ----------
    flops : float
        Floating-point operations of the forward pass.
    bytes_read : float
        Bytes read from query, key, value and mask tensors.
    workspace : float
        Bytes of memory in addition to inputs and output.
    grows : bool
        Whether the workspace grows with L×S.
    """

    flops: float
    bytes_read: float
    workspace: float
    grows: bool


#: Executes problems of one structure.
Runner = Callable[[Problem], EngineOutput]
#: Takes query, key, value and ``attn_mask`` of a call and returns the runner's output, or None if the problem must run.
#: A runner may have one as its attribute ``shortcut``: in small calls, building a problem costs as much as the kernel.
Shortcut = Callable[[Tensor, Tensor, Tensor, Any], Tensor | None]


class KernelError(RuntimeError):
    """A kernel that could not be compiled. Its engine refuses such problems from then on."""


class Engine(ABC):
    """An implementation of attention. Engines depend on the interfaces of the parts, not on each other."""

    name: ClassVar[str]
    #: Whether the backward pass recomputes weights from the log-sum-exp, whose rounding then affects gradients.
    keeps_lse: ClassVar[bool] = False
    #: Whether second derivatives and forward-mode work.
    twice_differentiable: ClassVar[bool] = False
    #: Whether it fits lines, ``order=1``: an engine that knows nothing of orders never sees such a call.
    fits_lines: ClassVar[bool] = False
    #: Whether traced calls may have dropout.
    drops_when_traced: ClassVar[bool] = True
    #: Whether transforms of ``torch.func`` work; if not, :meth:`refusal` says so inside one.
    has_transforms: ClassVar[bool] = True
    #: Whether a run may raise :class:`KernelError`.
    can_fail: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Return why this engine does not support the problem, or None if it does."""

    def why_not(self, problem: Problem) -> str | None:
        """Return why this engine cannot run the problem, or None if it can: what callers ask."""
        if problem.order is not None and not self.fits_lines:
            return "order=0 only"
        return self.refusal(problem)

    def not_automatic(self, problem: Problem) -> str | None:  # noqa: ARG002
        """Return why ``auto`` does not consider this engine although it can run the problem, or None if it does."""
        return None

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Return the estimated cost; called only if :meth:`why_not` is None."""

    @abstractmethod
    def grows(self, problem: Problem) -> bool:
        """Whether the workspace grows with L×S."""

    def run(self, problem: Problem) -> EngineOutput:
        """Execute the problem."""
        return self.prepare(problem, None)(problem)

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:  # noqa: ARG002
        """Return a function that executes this problem and all others of the same structure.

        Define this method if something depends only on the structure and is worth computing once; otherwise define
        :meth:`run`. The function must not hold tensors of the problem. With a request, it also returns the
        fields that it has available; the output must be bit-identical.
        """
        if type(self).run is Engine.run:
            raise NotImplementedError(f"{type(self).__name__} must define run or prepare")
        return self.run

    def fields(self, problem: Problem) -> frozenset[str]:  # noqa: ARG002
        """Return the fields of :class:`regard.Aux` that the engine can compute together with the output."""
        return frozenset()

    def partial_backward(
        self,
        problem: Problem,  # noqa: ARG002
        output: Tensor,  # noqa: ARG002
        lse: Tensor,  # noqa: ARG002
        runner: Runner | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        """Attach a precomputed output over all keys to the graph of a problem over some of the keys.

        If keys are split into parts, a part's weights are ``exp(score − lse)`` with the log-sum-exp of the whole row.
        Its gradient needs the output and log-sum-exp of the whole row, but no forward pass of the part. The
        gradients of all parts add up to those of the whole.

        Parameters
        ----------
        problem : Problem
            All queries and some of the keys; tensors are in the compute dtype.
        output : Tensor (B, H, L, V)
            Output over all keys, a constant.
        lse : Tensor (B, H, L)
            Log-sum-exp over all keys, a constant; −inf in a row without visible keys.
        runner : callable, optional
            The result of :meth:`prepare` for problems of this structure, which an engine may reuse.

        Returns
        -------
        Tensor (B, H, L, V) or None
            ``output``, with a graph to the problem's tensors; None if the engine does not support this.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


#: Names of engines, for editors and type checkers.
EngineName = Literal["auto", "flex", "fused", "reference", "sdpa", "streaming", "triton"]

#: A name, including names registered elsewhere, or an Engine.
EngineLike = EngineName | str | Engine
