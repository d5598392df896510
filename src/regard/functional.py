"""``regard.attention`` and ``regard.explain``: validate a call, plan it, run it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention  # bound once: users replace it
from torch.overrides import handle_torch_function, has_torch_function

from regard._call.operator import (
    check_traceable,
    differentiable_once,
    forbid_second_derivative,
    is_recorded,
    record,
    untraceable,
    why_not_operator,
    without_tracer_warnings,
)
from regard._call.plan import Plan, cached_plan, differentiable_lse, is_torch_call, plan_call
from regard._utils.keywords import unexpected
from regard._utils.torch_private import in_functorch, is_dispatched, is_eager, is_jit_tracing
from regard._utils.tracing import autocast_suspended
from regard.engines import EngineLike, EngineOutput, aux_pass, flops
from regard.engines.aux import Aux, AuxRequest
from regard.engines.local_linear import LocalLinear
from regard.engines.problem import Call, Problem, check_request, unbound_mask
from regard.masks import MaskLike
from regard.masks.band import Band
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike

if TYPE_CHECKING:
    from regard._call.explanation import Explanation

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _with_arguments_of(
    like: Callable[_P, Any],
) -> Callable[[Callable[[Call], _R]], Callable[_P, _R]]:
    """Give a function of a :class:`Call` the signature of ``like``."""
    signature = inspect.signature(like)

    def decorate(function: Callable[[Call], _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def taking(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if unknown := kwargs.keys() - signature.parameters.keys():
                raise unexpected(function.__name__, min(unknown), signature.parameters)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(Call(*bound.args, **bound.kwargs))

        own = inspect.signature(function)
        taking.__signature__ = signature.replace(return_annotation=own.return_annotation)  # type: ignore[attr-defined]
        return taking

    return decorate


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: MaskLike | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, score: ScoreLike | None = ..., normalizer: NormalizerLike = ..., softcap: float | None = ..., order: int | LocalLinear = ..., engine: EngineLike = ..., return_aux: None = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: MaskLike | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, score: ScoreLike | None = ..., normalizer: NormalizerLike = ..., softcap: float | None = ..., order: int | LocalLinear = ..., engine: EngineLike = ..., return_aux: AuxRequest) -> tuple[Tensor, Aux]: ...  # noqa: E501  # fmt: skip
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: MaskLike | None = ..., dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, score: ScoreLike | None = ..., normalizer: NormalizerLike = ..., softcap: float | None = ..., order: int | LocalLinear = ..., engine: EngineLike = ..., return_aux: AuxRequest | None) -> Tensor | tuple[Tensor, Aux]: ...  # noqa: E501  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: MaskLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    score: ScoreLike | None = None,
    normalizer: NormalizerLike = "softmax",
    softcap: float | None = None,
    order: int | LocalLinear = 0,
    engine: EngineLike = "auto",
    return_aux: AuxRequest | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Aux]:
    r"""Return the attention-weighted sum of values, ``Σ_i α(q, k_i) v_i``.

    The weights are ``α = normalize(mask(softcap(scale · score(q, k))))``. The first eight parameters match
    :func:`torch.nn.functional.scaled_dot_product_attention` in order and meaning; docs/differences.md lists the
    differences in results and errors.

    Parameters
    ----------
    query : Tensor (..., H, L, E)
        Queries. A single matrix (L, E) is one head.
    key : Tensor (..., G, S, Ek)
        Keys; Ek = E unless the score supports other widths. Leading dimensions broadcast.
    value : Tensor (..., G, S, V)
        Values.
    attn_mask : Tensor, Mask, or callable, optional
        A bool tensor (True = may attend), a float tensor (added after scale and softcap; −inf masks), a
        :mod:`regard.masks` mask, a FlexAttention ``mask_mod`` or ``BlockMask``.
    dropout_p : float, default 0.0
        Probability of dropping a weight. As in torch, it always applies: pass 0.0 in evaluation. After
        ``torch.manual_seed`` a call drops the same weights again on the same engine; engines draw different ones.
    is_causal : bool, default False
        Also mask keys after the query. Query 0 is at key 0 (upper-left alignment, as in torch).
    scale : float, optional
        Factor of the score. Defaults to 1/√E for the scaled dot product and 1 for all other scores.
    enable_gqa : bool, default False
        Allow fewer key–value heads than query heads; H must be a multiple of G.
    score : str, Score, or callable, optional
        A name, a :mod:`regard.scores` score, or a FlexAttention ``score_mod``. Defaults to the scaled dot product.
    normalizer : str or Normalizer, default "softmax"
        A name or a :mod:`regard.normalizers` normalizer.
    softcap : float, optional
        Replace scores s by ``softcap · tanh(s / softcap)``, after scale and before the mask.
    order : int or LocalLinear, default 0
        0 for the mean of the values; 1 for the line that fits them best, evaluated at the query: see
        :class:`regard.LocalLinear`, which has the options.
    engine : str or Engine, default "auto"
        The implementation to use. A named engine that does not support the call raises an error;
        :func:`regard.explain` lists the reasons.
    return_aux : AuxRequest, optional
        Auxiliary outputs to return. Requesting them never changes the output.

    Returns
    -------
    output : Tensor (..., H, L, V)
        Zeros for a query with no visible keys.
    aux : Aux
        Only if ``return_aux`` is given.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, the expected value and the actual one.

    Notes
    -----
    Masked keys and values never affect outputs or gradients, even if they hold NaN or infinity.
    Inputs in float16 and bfloat16 are accumulated in float32.

    Examples
    --------
    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind(0)
    >>> regard.attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 10, 8])
    >>> out, aux = regard.attention(q, k, v, return_aux=regard.AuxRequest(entropy=True, topk=3))
    >>> aux.entropy.shape, aux.topk.indices.shape
    (torch.Size([2, 4, 10]), torch.Size([2, 4, 10, 3]))
    """
    if unknown:
        raise unexpected("attention", next(iter(unknown)), inspect.signature(attention).parameters)
    eager = is_eager()
    if not eager and not torch.compiler.is_compiling() and is_dispatched():
        flops.register()  # an active mode may be a FLOP counter
    if eager and attn_mask is not None and _is_of_last_query(attn_mask, query):
        attn_mask = None
    call = Call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, score, normalizer, softcap, engine,
        return_aux, order,
    )  # fmt: skip
    on_cpu = isinstance(query, Tensor) and query.is_cpu
    if not (eager and on_cpu) and is_torch_call(call, eager):
        # Compilers know torch's function, and other devices must not wait for a plan.
        output = torch_attention(query, key, value, scale=scale)
        return forbid_second_derivative(output, "sdpa") if output.requires_grad else output
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if not tensors and has_torch_function((query, key, value)):
        # Tensor-like objects, such as proxies of torch.fx, handle the call themselves.
        return handle_torch_function(
            attention, (query, key, value), query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            score=score, normalizer=normalizer, softcap=softcap, order=order, engine=engine, return_aux=return_aux,
        )  # fmt: skip
    structure = None
    if eager:
        structure = call.structure()
        known = cached_plan(structure)
        if known is not None and known.shortcut is not None:
            found = known.shortcut(query, key, value, attn_mask)
            if found is not None:
                return forbid_second_derivative(found, known.engine.name) if found.requires_grad else found
    if not eager and is_recorded(query):
        recorded = _recorded(call)
        if recorded is not None:
            return recorded
    plan, problem = plan_call(call, structure)
    once = not plan.engine.twice_differentiable
    if once and not eager and in_functorch():
        problem = differentiable_once(problem, plan.engine.name)
    if plan.autocast:
        with autocast_suspended(query.device.type):
            outcome = plan.run(problem)
    else:
        outcome = plan.run(problem)
    output = outcome.output if plan.as_given else problem.restore(outcome.output)
    if once and output.requires_grad:
        output = forbid_second_derivative(output, plan.engine.name)
    return output if return_aux is None else (output, _aux(problem, plan, outcome, return_aux))


def _aux(problem: Problem, plan: Plan, outcome: EngineOutput, request: AuxRequest) -> Aux:
    """Return the requested auxiliary outputs."""
    with autocast_suspended(problem.query.device.type) if plan.autocast else nullcontext():
        aux = aux_pass.aux_fields(problem, outcome, request, plan.aux_engine)
        if request.lse == "grad" and problem.wants_grad and aux.lse is not None and not aux.lse.requires_grad:
            lse = differentiable_lse(problem, aux.lse.detach().reshape(*problem.query.shape[:3]))
            aux = replace(aux, lse=problem.restore(lse))
        return aux


_whole = inspect.signature(attention)
attention.__signature__ = _whole.replace(parameters=list(_whole.parameters.values())[:-1])  # type: ignore[attr-defined]


@_with_arguments_of(attention)
def explain(call: Call) -> Explanation:
    """Explain how :func:`attention` would run the same arguments: the engine, the reasons and the cost.

    The engine does not depend on ``return_aux``.

    Examples
    --------
    >>> import torch, regard
    >>> q = torch.randn(1, 8, 128, 64)
    >>> regard.explain(q, q, q, score="gaussian").engine.name
    'fused'
    >>> print(regard.explain(q, q, q, normalizer="argmax"))
    attention of B 1, H 8, L 128, S 128, E 64, V 64, torch.float32: score ScaledDot(), normalizer Argmax()
      engine      streaming
      compiled    the same engine
      visible     100 % of the pairs
      operations  51.4 MFLOP forward
      reads       768 KiB
      workspace   3.52 MiB, does not grow with L×S
      sdpa: unsupported, softmax only, not Argmax
      fused: unsupported, softmax, sigmoid and entmax only, not Argmax
      triton: unsupported, GPUs only, not cpu
      flex: unsupported, softmax only, not Argmax
      reference: not chosen, its workspace grows with L×S
    """
    from regard._call.explanation import build_explanation  # few programs ask

    check_request(call.return_aux)
    problem = Problem.of(call)
    mask = unbound_mask(call.attn_mask, call.is_causal, problem.query, problem.key, problem.lead)
    return build_explanation(problem, mask, call)


def _recorded(call: Call) -> Tensor | tuple[Tensor, Aux] | None:
    """Return the result of a call recorded as one operator; None if the compiler should trace into it instead."""
    check_traceable(call.attn_mask, call.score)
    check_request(call.return_aux)
    with without_tracer_warnings():
        problem = Problem.of(call)
    mask = unbound_mask(call.attn_mask, call.is_causal, problem.query, problem.key, problem.lead)
    request = call.return_aux
    wants_lse = request is not None and request.lse is True
    recorded = record(problem, mask, call.scale, call.engine, wants_lse)
    if recorded is None:
        if is_jit_tracing():
            raise untraceable(str(why_not_operator(problem, mask, call.engine)))
        return None
    output, lse = recorded
    if request is None:
        return problem.restore(output)
    outcome = EngineOutput(output, lse)
    with autocast_suspended(output.device.type):
        return problem.restore(output), aux_pass.aux_fields(problem, outcome, request)


def _is_of_last_query(mask: object, query: Tensor) -> bool:
    """Whether a mask is the causal mask of a single query at the last key, which sees every key."""
    return type(mask) is Band and mask.ends_at_last and isinstance(query, Tensor) and query.shape[-2:-1] == (1,)
