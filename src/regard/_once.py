"""Derivatives of derivatives where an engine has none: an error that names engines which have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._problem import Problem
from regard._torch import functorch_derivatives
from regard._tracing import in_transform


def error(what: str) -> RuntimeError:
    """Return the error to raise."""
    return RuntimeError(
        f"attention: {what} has no second derivative (create_graph=True, torch.func); "
        "use engine='streaming' or engine='reference'."
    )


def watched(output: Tensor, engine: str) -> Tensor:
    """Return the output of a call that was not transformed, after which a second derivative is an error."""
    if torch.compiler.is_compiling() or in_transform():
        return output

    def refuse(grads: tuple[Tensor, ...]) -> None:  # noqa: ARG001
        if torch.is_grad_enabled():
            raise error(f"engine {engine!r}")

    assert output.grad_fn is not None
    output.grad_fn.register_prehook(refuse)  # in less time than a hook of the tensor
    return output


def once(problem: Problem, engine: str) -> Problem:
    """Return a problem whose tensors can be differentiated once by ``torch.func``; twice is an error."""
    if torch.compiler.is_compiling():  # which cannot look into what follows
        if functorch_derivatives() > 1:
            raise error(f"engine {engine!r}")
        return problem

    def watch(tensor: Tensor) -> Tensor:
        return _Once.apply(tensor, engine) if tensor.is_floating_point() else tensor

    query, key, value = (watch(tensor) for tensor in (problem.query, problem.key, problem.value))
    mask = None if problem.mask is None else problem.mask.map_tensors(watch)
    return replace(problem, query=query, key=key, value=value, score=problem.score.map_tensors(watch), mask=mask)


class _Gradient(torch.autograd.Function):
    """A tensor that has no gradient: to ask for it is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, engine: str) -> Tensor:  # noqa: ARG004
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG004
        ctx.engine = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # noqa: ARG004
        raise error(f"engine {ctx.engine!r}")


class _Once(_Gradient):
    """A tensor whose gradient has no gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Gradient.apply(grad, ctx.engine), None
