"""What contenders have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.registry import Call, Contender, MissingError, Point, Result
from benchmarks.work import Work


def differentiated(work: Work, forward: Callable[[], Tensor]) -> Call:
    """Return the call of a forward pass, and of the gradients to all inputs where the point wants them."""
    if not work.backward:
        return lambda: {"output": forward()}
    names = [f"d_{name}" for name in work.inputs]
    inputs = list(work.inputs.values())

    def both() -> Result:
        output = forward()
        return {"output": output, **dict(zip(names, torch.autograd.grad(output, inputs, work.grad)))}

    return both


def seeded(*sizes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors of normal numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


def by_regard(
    options: Callable[[Work], dict[str, Any]] = lambda _: {},
    *,
    forward: bool = False,
    build: Callable[[Point], Work] | None = None,
) -> Contender:
    """Return ``regard.attention``; ``options(work)`` makes its further arguments, outside the timed call.

    ``forward`` alone: no gradients, even where the point wants them.
    """

    def prepare(work: Work) -> Call:
        arguments = options(work)
        query, key, value = work.query, work.key, work.value
        if forward:
            query, key, value = query.detach(), key.detach(), value.detach()
            return lambda: {"output": regard.attention(query, key, value, **arguments)}
        return differentiated(work, lambda: regard.attention(query, key, value, **arguments))

    def engine(work: Work) -> str:
        return regard.explain(work.query, work.key, work.value, **options(work)).engine.name

    return Contender(prepare, does=("output",) if forward else (), build=build, engine=engine)


def by_torch(
    options: Callable[[Work], dict[str, Any]] = lambda work: {"attn_mask": work.dense()},
    *,
    build: Callable[[Point], Work] | None = None,
) -> Contender:
    """Return torch's ``scaled_dot_product_attention``, by default with the mask as a bool matrix made beforehand."""

    def prepare(work: Work) -> Call:
        arguments = options(work)
        query, key, value = work.query, work.key, work.value
        return differentiated(work, lambda: F.scaled_dot_product_attention(query, key, value, **arguments))

    return Contender(prepare, build=build)


def compiled(work: Work, function: Callable[..., Tensor], *arguments: Any) -> Call:
    """Return the call of ``torch.compile(function)(*arguments)``, compiled already."""
    # Compiled in this process: a pool of compiling processes would outlive a child that measures memory.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        torch._dynamo.reset()  # it gives up, silently, after some sizes of one function
        fast = torch.compile(function, dynamic=False)
        call = differentiated(work, lambda: fast(*arguments))
        call()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise MissingError(
            f"torch.compile failed: {type(error).__name__}: {lines[0][:160] if lines else ''}"
        ) from error
    return call
