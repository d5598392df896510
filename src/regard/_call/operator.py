"""A call as one torch operator, for compilers and tracers, and the error for missing second derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from regard._call.plan import Plan, plan_call
from regard._utils.operators import define, keep_nothing
from regard._utils.part import Part, brief
from regard._utils.torch_private import (
    functorch_derivatives,
    in_forward_mode,
    in_functorch,
    is_eager,
    is_jit_tracing,
    recording,
)
from regard._utils.tracing import autocast_suspended, in_transform, is_exported_to_onnx
from regard.engines import EngineOutput, aux_pass
from regard.engines.aux import AuxRequest
from regard.engines.problem import Call, Problem
from regard.masks import Mask
from regard.scores.dot_products import DotLike

# Second derivatives: an error if the engine has none ------------------------------------------------------------------


def no_second_derivative(what: str) -> RuntimeError:
    """Return the error for a second derivative of ``what``."""
    return RuntimeError(
        f"attention: {what} has no second derivative (create_graph=True, torch.func); "
        "use engine='streaming' or engine='reference'."
    )


def forbid_second_derivative(output: Tensor, engine: str) -> Tensor:
    """Make a second derivative of the output of an untransformed call an error."""
    if torch.compiler.is_compiling() or in_transform():
        return output

    def refuse(grads: tuple[Tensor, ...]) -> None:  # noqa: ARG001
        if torch.is_grad_enabled():
            raise no_second_derivative(f"engine {engine!r}")

    assert output.grad_fn is not None
    output.grad_fn.register_prehook(refuse)  # faster than a tensor hook
    return output


def differentiable_once(problem: Problem, engine: str) -> Problem:
    """Return a problem whose tensors ``torch.func`` can differentiate once; twice is an error."""
    if torch.compiler.is_compiling():  # which cannot trace the autograd function below
        if functorch_derivatives() > 1:
            raise no_second_derivative(f"engine {engine!r}")
        return problem

    def watch(tensor: Tensor) -> Tensor:
        return _Once.apply(tensor, engine) if tensor.is_floating_point() else tensor

    query, key, value = (watch(tensor) for tensor in (problem.query, problem.key, problem.value))
    mask = None if problem.mask is None else problem.mask.map_tensors(watch)
    return replace(problem, query=query, key=key, value=value, score=problem.score.map_tensors(watch), mask=mask)


class _Gradient(torch.autograd.Function):
    """The identity; computing its gradient is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, engine: str) -> Tensor:  # noqa: ARG004
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG004
        ctx.engine = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # noqa: ARG004
        raise no_second_derivative(f"engine {ctx.engine!r}")


class _Once(_Gradient):
    """The identity; computing its second derivative is an error."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Gradient.apply(grad, ctx.engine), None


# A call as one operator of ``torch.library``
# Compilers and tracers cannot read tensor values, so an engine could neither skip masked keys nor keep non-finite ones
# from leaking. They therefore record an opaque operator, which plans and runs the call eagerly, with actual sizes and
# values. Score, mask and normalizer are serialized as a text, plus the tensors and numbers inside them. A forward pass
# that may be followed by a backward pass keeps the autograd graph of the eager call on its second output.


_LSE = AuxRequest(lse=True)
#: The words of tensors that need a gradient and of others: no attribute, and no string inside a part, is one of these.
_GRAD, _TENSOR = "@grad", "@tensor"


@dataclass(eq=False, repr=False)
class _Packed:
    """Serialized parts: a text, plus tensors and (possibly symbolic) numbers."""

    text: str = ""
    tensors: list[Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    complete: bool = True

    def add(self, value: Any) -> None:
        """Append a value."""
        if value is None:
            self.text += "none "
        elif isinstance(value, bool):
            self.text += "true " if value else "false "
        elif isinstance(value, int):
            self.text += "int "
            self.ints.append(value)
        elif isinstance(value, float):
            self.text += "float "
            self.floats.append(value)
        elif isinstance(value, str):
            self.text += f"str {value} "
            self.complete = self.complete and " " not in value
        elif isinstance(value, torch.dtype):
            self.text += f"dtype {str(value)[6:]} "
        elif isinstance(value, Tensor):
            self.text += f"{_GRAD} " if value.requires_grad else f"{_TENSOR} "
            self.tensors.append(value)
        elif isinstance(value, tuple):
            self.text += f"tuple {len(value)} "
            for item in value:
                self.add(item)
        elif isinstance(value, Part) and type(value).__module__.startswith("regard."):
            attributes = vars(value)
            self.text += f"part {type(value).__module__} {type(value).__qualname__} {len(attributes)} "
            for name, attribute in attributes.items():
                self.text += f"{name} "
                self.add(attribute)
        else:
            self.complete = False


class _Unpacking:
    """Deserializes :class:`_Packed`."""

    def __init__(self, text: str, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> None:
        self.words = iter(_words(text))
        self.tensors, self.ints, self.floats = iter(tensors), iter(ints), iter(floats)

    def next(self) -> Any:
        """Return the next value."""
        word = next(self.words)
        if word == "part":
            cls, count = _class(next(self.words), next(self.words)), int(next(self.words))
            part = cls.__new__(cls)
            for _ in range(count):
                name = next(self.words)
                part.__dict__[name] = self.next()
            return part
        if word == "tuple":
            return tuple([self.next() for _ in range(int(next(self.words)))])
        if word == "str":
            return next(self.words)
        if word == "dtype":
            return getattr(torch, next(self.words))
        if word in (_TENSOR, _GRAD):
            return next(self.tensors).detach().requires_grad_(word == _GRAD)
        if word in ("int", "float"):
            return next(self.ints if word == "int" else self.floats)
        return {"none": None, "true": True, "false": False}[word]


def _parts(text: str, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> list[Any]:
    """Return mask, score, normalizer, order and engine."""
    packed = _Unpacking(text, tensors, ints, floats)
    return [packed.next() for _ in range(5)]


@lru_cache(256)
def _fixed_parts(text: str, ints: tuple[int, ...], floats: tuple[float, ...]) -> list[Any]:
    return _parts(text, (), ints, floats)


@lru_cache(1024)
def _words(text: str) -> list[str]:
    return text.split(" ")[:-1]


@lru_cache(256)
def _class(module: str, name: str) -> type[Part]:
    found: type[Part] = getattr(import_module(module), name)
    return found


def is_recorded(query: Tensor) -> bool:
    """Whether a compiler or ``torch.jit.trace`` records calls; exporters do not count: their programs run elsewhere."""
    if in_functorch() or in_forward_mode() or is_exported_to_onnx():
        return False
    if is_jit_tracing():
        return True
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return isinstance(query, Tensor) and query.device.type == "cpu"


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        yield


def without_tracer_warnings() -> AbstractContextManager[None]:
    """Silence the tracer's warnings about branches on sizes: the operator checks sizes when it runs."""
    return _without_warnings() if is_jit_tracing() else nullcontext()


def untraceable(reason: str) -> RuntimeError:
    """Return the error for a call that ``torch.jit.trace`` would record for the sizes of its example only."""
    return RuntimeError(
        f"attention: torch.jit.trace cannot record this call because {reason}; use torch.compile or torch.export."
    )


def check_traceable(*parts: object) -> None:
    """Raise if ``torch.jit.trace`` meets a function as a score or a mask."""
    if is_jit_tracing():
        for part in parts:
            if callable(part) and not isinstance(part, (Part, Tensor)):
                raise untraceable(f"{brief(part)} is a function")


def why_not_operator(problem: Problem, mask: Mask | None, engine: object) -> str | None:
    """Return why a call cannot be recorded as the operator; None if it can."""
    if problem.dropout_p or problem.normalizer.random:
        return "it draws random numbers"
    if not isinstance(engine, str):
        return "the engine is an object, not a name"
    packed = _Packed()
    for part in (mask, problem.score, problem.normalizer):
        packed.add(part)
        if not packed.complete:
            return f"{part!r} holds a function or has a user-defined class"
    return None


def record(
    problem: Problem, mask: Mask | None, scale: float | None, engine: object, wants_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the output (B, H, L, V) of the operator, and log-sum-exp (B, H, L) if it is wanted and has a meaning.

    Return None if the call cannot be recorded; see :func:`why_not_operator`.

    Parameters
    ----------
    problem : Problem
    mask : Mask or None
        The unbound mask: sizes may differ when the operator runs.
    scale : float or None
        The argument of the call.
    engine : str
    wants_lse : bool
    """
    if problem.dropout_p or problem.normalizer.random or not isinstance(engine, str):
        return None
    ends = problem.query, problem.key, problem.value
    packed = _Packed()
    for part in (mask, problem.score, problem.normalizer, problem.order, engine):
        packed.add(part)
    if not packed.complete:
        return None
    # A trace may run on tensors other than those of its example.
    wants_grad = is_jit_tracing() or problem.wants_grad
    grads = "".join(["1" if wants_grad and (is_jit_tracing() or end.requires_grad) else "0" for end in ends])
    wants_lse = wants_lse and problem.normalizer.online
    header = f"{grads} {_layout(problem)} {'lse' if wants_lse else 'output'}"
    operator = torch.ops.regard.attend if wants_grad else torch.ops.regard.attend_forward
    output, lse = operator(
        *ends, packed.tensors, f"{header} {packed.text}", packed.ints, packed.floats, scale, problem.softcap,
    )  # fmt: skip
    return output, lse if wants_lse else None


def _layout(problem: Problem) -> str:
    """Return the memory layout of gradients: "tokens" (B, L, H, E), as in torch's kernel, or "heads" (B, H, L, E).

    Compilers need to know it in advance. If the engine produces the other layout, this costs a copy.
    """
    return "tokens" if isinstance(problem.score, DotLike) and problem.is_softmax else "heads"


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "heads":
        return tensor.contiguous()
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(eq=False, repr=False)
class _Header:
    """What the text of an operator says of the call, apart from its parts.

    Attributes
    ----------
    wanted : tuple of bool
        Whether query, key, value and each tensor of the parts need a gradient.
    layouts : tuple of str
        The memory layouts of these gradients.
    wants_lse : bool
    parts : str
        The rest of the text, for :class:`_Unpacking`.
    """

    wanted: tuple[bool, ...]
    layouts: tuple[str, ...]
    wants_lse: bool
    parts: str

    @staticmethod
    @lru_cache(1024)
    def of(text: str) -> _Header:
        """Read a text."""
        grads, layout, asked, parts = text.split(" ", 3)
        held = [word == _GRAD for word in _words(parts) if word in (_GRAD, _TENSOR)]
        layouts = (*[layout] * 3, *["heads"] * len(held))
        return _Header((*[grad == "1" for grad in grads], *held), layouts, asked == "lse", parts)

    @property
    def wants_grad(self) -> bool:
        """Whether a backward pass may follow."""
        return any(self.wanted)


@dataclass(eq=False, repr=False)
class _Run:
    """A call that ran eagerly.

    Attributes
    ----------
    plan : Plan
    problem : Problem
    outcome : EngineOutput
    held : list of Tensor
        Query, key, value and the tensors of the parts, detached from the caller's graph.
    """

    plan: Plan
    problem: Problem
    outcome: EngineOutput
    held: list[Tensor]


def _run(
    query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], header: _Header,
    ints: Sequence[int], floats: Sequence[float], scale: float | None, softcap: float | None,
) -> _Run:  # fmt: skip
    """Run a call eagerly; the output is differentiable with respect to the tensors that need a gradient."""
    query, key, value = (
        end.detach().requires_grad_() if wanted else end.detach()
        for end, wanted in zip((query, key, value), header.wanted)
    )
    if tensors:
        mask, score, normalizer, order, engine = _parts(header.parts, tensors, ints, floats)
    else:
        mask, score, normalizer, order, engine = _fixed_parts(header.parts, tuple(ints), tuple(floats))
    request = _LSE if header.wants_lse else None
    order = 0 if order is None else order
    call = Call(query, key, value, mask, 0.0, False, scale, True, score, normalizer, softcap, engine, request, order)
    plan, problem = plan_call(call, call.structure() if is_eager() else None)
    held = [query, key, value]
    if tensors:
        held += [tensor for part in (mask, score, normalizer) if part is not None for tensor in part.tensors()]
    return _Run(plan, problem, plan.run(problem), held)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], text: str,
    ints: Sequence[int], floats: Sequence[float], scale: float | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output (B, H, L, V) and log-sum-exp (B, H, L); the latter is empty if it is not wanted."""
    header = _Header.of(text)
    with autocast_suspended(query.device.type), _recording(header.wants_grad):
        run = _run(query, key, value, tensors, header, ints, floats, scale, softcap)
    problem, output = run.problem, run.outcome.output.detach()
    lse = output.new_empty(0, dtype=problem.compute_dtype)
    if header.wants_lse:
        with autocast_suspended(query.device.type), torch.no_grad():
            found = aux_pass.aux_fields(problem, run.outcome, _LSE, run.plan.aux_engine).lse
        assert found is not None
        lse = _own(found.to(problem.compute_dtype))
    if header.wants_grad:
        lse.regard_run = run  # type: ignore[attr-defined]
    return _own(output, query, key, value), lse


def _own(tensor: Tensor, *others: Tensor) -> Tensor:
    """Return a contiguous tensor that shares no memory with the others; compilers require both."""
    if any(tensor.data_ptr() == other.data_ptr() for other in others):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.detach().contiguous()


def _recording(wanted: bool) -> AbstractContextManager[object]:
    """Return a context in which autograd records, if wanted, even inside an operator."""
    if not wanted:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(recording())
    stack.enter_context(torch.enable_grad())
    return stack


def _attend_shapes(query, key, value, tensors, text, ints, floats, scale, softcap):  # type: ignore[no-untyped-def]  # noqa: ARG001
    B, H, L, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(B, H, L, dtype=wide) if _Header.of(text).wants_lse else query.new_empty(0, dtype=wide)
    return query.new_empty(B, H, L, value.shape[-1]), lse


def _attend_backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor],  # noqa: ARG001
    text: str, ints: Sequence[int], floats: Sequence[float], scale: float | None, softcap: float | None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of query, key, value and the tensors; empty if not needed.

    ``output`` is an argument so that compilers do not reuse its memory, which the graph of the forward pass reads.
    """
    header = _Header.of(text)
    with autocast_suspended(query.device.type), _recording(True):
        run = getattr(lse, "regard_run", None)
        if run is None:  # hooks on saved tensors replaced it by a copy
            run = _run(query, key, value, tensors, header, ints, floats, scale, softcap)
        wanted = [tensor for tensor in run.held if tensor.requires_grad]
        attached = run.outcome.output
        found = iter(torch.autograd.grad(attached, wanted, grad, retain_graph=True, allow_unused=True))
    given = [query, key, value, *tensors]
    return [
        _gradient(next(found), like, layout) if wanted else like.new_empty(0)
        for wanted, like, layout in zip(header.wanted, given, header.layouts)
    ]


def _gradient(found: Tensor | None, like: Tensor, layout: str) -> Tensor:
    if found is None:
        found = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return _laid_out(found, layout)


def _attend_backward_shapes(grad, output, lse, query, key, value, tensors, text, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    header = _Header.of(text)
    return [
        _laid_out(t.new_empty(t.shape), layout) if wanted else t.new_empty(0)
        for t, wanted, layout in zip((query, key, value, *tensors), header.wanted, header.layouts)
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, tensors, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, query, key, value, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    output, lse, query, key, value, *tensors = ctx.saved_tensors
    found = torch.ops.regard.attend_backward(grad, output, lse, query, key, value, tensors, *ctx.rest)
    gradients = [gradient if wanted else None for gradient, wanted in zip(found, _Header.of(ctx.rest[0]).wanted)]
    _, ints, floats, _, _ = ctx.rest
    # torch expects [] as the gradient of an empty list, and None as that of a list of numbers.
    return *gradients[:3], gradients[3:], None, None if ints else [], None if floats else [], None, None


def _refuse(ctx: Any, *_: Any) -> None:  # noqa: ARG001
    raise no_second_derivative("a compiled or traced call")


define("attend", _attend, _attend_shapes, backward=_backward, setup_context=_save_for_backward)
define("attend_forward", _attend, _attend_shapes)  # faster to call, without a derivative
define("attend_backward", _attend_backward, _attend_backward_shapes, backward=_refuse, setup_context=keep_nothing)
