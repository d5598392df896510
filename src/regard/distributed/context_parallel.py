"""Ring attention over a sharded sequence, and the context object that layers use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard import engines
from regard._utils.errors import rejected, shape
from regard._utils.part import Part
from regard._utils.tracing import autocast_cast, autocast_suspended
from regard.distributed.layouts import (
    Layout,
    Region,
    Schedule,
    checked_layout,
    gather_sequence,
    pieces_of,
    shard_positions,
    shard_sequence,
)
from regard.distributed.ring import Ring, check_agreement
from regard.distributed.ring_function import Parts, RingAttention, RingCall
from regard.engines import EngineLike
from regard.engines.aux import FIELDS, Aux, AuxRequest
from regard.engines.problem import (
    Call,
    Problem,
    as_normalizer,
    as_score,
    bound_mask,
    canonical,
    check_device,
    check_dtypes,
    check_flag,
    check_numbers,
    check_request,
    check_tensors,
    check_widths,
)
from regard.functional import attention
from regard.masks import MaskLike
from regard.masks.base import Extent
from regard.normalizers import NormalizerLike, Sigmoid
from regard.scores import ScoreLike


def ring_attention(
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
    engine: EngineLike = "auto",
    return_aux: AuxRequest | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    check: bool = True,
) -> Any:
    r"""Return this rank's slice of :func:`regard.attention` over a sequence that is sharded among ranks.

    Every rank calls it with its own slice of queries, keys and values. Keys and values are passed around a ring while
    the rank computes with the current ones; partial results are merged by their log-sum-exp,
    ``o = Σ_b exp(lse_b − lse) o_b``. In the backward pass they go around once more, together with their gradients.
    Memory is O(L / W) on each of W ranks. Sums follow the order of the ring, so results are reproducible bit for bit.

    Parameters
    ----------
    query : Tensor (B, H, L / W, E)
    key : Tensor (B, G, S / W, E)
    value : Tensor (B, G, S / W, V)
        Slices of equal length on all ranks, as returned by :func:`shard_sequence`.
    attn_mask : Tensor, Mask, or callable, optional
        The mask of the *whole* sequence, the same on every rank: positions and tensor sizes are those of the whole
        sequence. Hidden pieces are not computed, and keys are passed only as far as some query sees them.
    dropout_p : float
        Must be 0.
    is_causal, scale, enable_gqa, score, softcap, engine
        See :func:`regard.attention`. Like parameters of other layers, tensors of a score or mask get the gradient of
        this rank's queries only; sum them over ranks (:func:`sum_gradients`).
    normalizer : "softmax" or "sigmoid"
        The normalizers whose partial results can be merged: by log-sum-exp, or as a sum.
    return_aux : AuxRequest, optional
        ``AuxRequest(lse=True)``, for the log-sum-exp over all keys.
    group : ProcessGroup, optional
        The ranks that share the sequence; None is all processes.
    layout : {"contiguous", "zigzag"}
        Layout of positions over ranks. "zigzag" balances the work under a causal mask.
    check : bool
        First compare sizes and settings of all ranks in one small message. If one rank cannot run the call, all ranks
        raise, and can call again. Without this check, a rank that raises leaves the others waiting.

    Returns
    -------
    output : Tensor (B, H, L / W, V)
        In the dtype of the queries; narrow inputs are computed, merged and summed in float32.
    aux : Aux
        Only if ``return_aux`` is given.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid or differs between ranks, or the engine does not support the call, including the
        backward pass if gradients are needed. All ranks raise before any keys are sent.
    RuntimeError
        If a rank died or did not respond within the group's timeout.

    References
    ----------
    Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023). The zigzag
    is that of Brandon et al., "Striped attention" (2023) in pieces, as in Dubey et al., "The Llama 3 herd of models"
    (2024).

    Examples
    --------
    In a script that ``torchrun`` starts in several processes:

    >>> def attend(q, k, v):                                        # the whole sequence, on every rank
    ...     q, k, v = (shard_sequence(x, 2, layout="zigzag") for x in (q, k, v))
    ...     return ring_attention(q, k, v, is_causal=True, layout="zigzag")
    """
    ring = Ring.of("ring_attention", group)
    shapes: list[torch.Size] = []
    facts: dict[str, object] = {}
    answer: Tensor | tuple[Tensor, Aux] | None = None
    refusal: Exception | None = None
    try:
        checked_layout("ring_attention", layout)
        dropout_p, scale, softcap = check_numbers(dropout_p, scale, softcap)
        check_flag("is_causal", is_causal)
        check_flag("enable_gqa", enable_gqa)
        _check_arguments(query, key, value, dropout_p, return_aux)
        given = query, key, value
        query, key, value = autocast_cast(query, key, value)
        check_dtypes(query, key, value)
        lead, query, key, value, _ = canonical(query, key, value, enable_gqa)
        shapes = [query.shape, key.shape, value.shape]
        if ring.size == 1 or 0 in (*query.shape[:3], key.shape[2], value.shape[-1]):
            answer = attention(
                *given, attn_mask, 0.0, is_causal, scale, enable_gqa, score=score, normalizer=normalizer,
                softcap=softcap, engine=engine, return_aux=return_aux,
            )  # fmt: skip
        else:
            (B, H, L, _), S = query.shape, key.shape[2]
            extent = Extent(B, H, ring.size * L, ring.size * S)
            mask = bound_mask(attn_mask, is_causal, query, key, extent, lead)
            normalizer = as_normalizer(normalizer)
            parts = Parts(as_score(score, query, key), mask, normalizer, scale, softcap, engine, extent)
            _check_parts(parts, query, key, value)
            schedule = _schedule(ring, layout, parts, L, S)
            call = RingCall(ring, schedule, parts, return_aux is not None and bool(return_aux.lse))
            with autocast_suspended(query.device.type):
                call.check(query, key, value)
            facts = _facts(call, query, key, value)
    except Exception as error:  # the other ranks are waiting: report to them before raising
        refusal = error
    if check and ring.size > 1:
        check_agreement(ring, shapes, facts, refusal)
    if refusal is not None:
        raise refusal
    if answer is not None:
        return answer
    with autocast_suspended(query.device.type):
        output, lse = RingAttention.apply(call, query, key, value, *parts.tensors())
    return output if return_aux is None else (output, Aux(lse=lse if return_aux.lse else None))


def _schedule(ring: Ring, layout: Layout, parts: Parts, L: int, S: int) -> Schedule:
    """Return the schedule for L queries and S keys on each rank."""
    pieces = len(pieces_of(ring.rank, ring.size, layout))
    if L % pieces or S % pieces:
        expected = "have an even number of positions for layout 'zigzag'"
        raise rejected("ring_attention", "query and key", expected, f"{L} queries and {S} keys")
    return Schedule.of(layout, ring.rank, ring.size, parts.extent, parts.mask, parts.moves)


def _facts(call: RingCall, query: Tensor, key: Tensor, value: Tensor) -> dict[str, object]:
    """Return settings that must be the same on all ranks, in addition to shapes."""
    parts = call.parts
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *parts.tensors()))
    return {
        "query's dtype": query.dtype, "requires_grad": (wants, key.requires_grad or value.requires_grad),
        "layout": call.schedule.layout, "attn_mask": call.schedule.states, "score": type(parts.score).__name__,
        "normalizer": type(parts.normalizer).__name__, "scale": parts.scale, "softcap": parts.softcap,
    }  # fmt: skip


def _check_arguments(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, request: AuxRequest | None) -> None:
    """Check arguments that are more restricted than in :func:`regard.attention`."""
    check_tensors(query, key, value)
    check_request(request)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise rejected("ring_attention", name, "have shape (B, heads, length, width)", shape(tensor))
    if dropout_p:
        raise rejected("ring_attention", "dropout_p", "be 0: ranks would drop different weights", dropout_p)
    others = [] if request is None else [name for name in FIELDS if getattr(request, name) and name != "lse"]
    if others:
        raise rejected("ring_attention", "return_aux", "request only lse", ", ".join(others))
    if request is not None and request.lse == "grad":
        expected = "request lse=True: the log-sum-exp over all ranks has no gradient"
        raise rejected("ring_attention", "return_aux", expected, "lse='grad'")


def _may_capture(part: Part | None) -> bool:
    """Whether a part may use tensors that are not attributes."""
    return part is not None and (part.structure() is None or part.calls_a_function())


def _check_parts(parts: Parts, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Reject normalizers that cannot be merged, and tensors that would silently get no gradient."""
    normalizer, score = parts.normalizer, parts.score
    independent = isinstance(normalizer, Sigmoid) and not normalizer.row_normalized
    if not (normalizer.online or independent) or not normalizer.streams or normalizer.random:
        expected = "be 'softmax' or 'sigmoid', whose partial results can be merged"
        raise rejected("ring_attention", "normalizer", expected, repr(normalizer))
    parts.at(Region((0, 1), (0, 1), 0, 1, masked=False))
    check_device("score", score.tensors(), query)
    if not score.mixed_widths:
        check_widths(query, key)
    whole = parts.extent
    score.check(
        *(t.new_empty(*t.shape[:2], n, t.shape[3], device="meta") for t, n in ((query, whole.L), (key, whole.S)))
    )
    if torch.is_grad_enabled() and any(map(_may_capture, (score, parts.mask))):
        constant = parts.with_tensors([t.detach() for t in parts.tensors()])
        corner = Region((0, 1), (0, 1), 0, 0, True)
        at_corner = constant.at(corner)
        q, k, v = (end[:, :, :1].detach() for end in (query, key, value))
        call = Call(q, k, v, at_corner[1], 0.0, False, parts.scale, True, at_corner[0], normalizer, parts.softcap)
        problem = Problem.of(call)
        if engines.TABLE["reference"].run(problem).output.requires_grad:
            expected = "hold tensors that require gradients as attributes"
            raise rejected("ring_attention", "score and attn_mask", expected, "one in the closure of a function")


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of parameters over the ranks of a group, in place.

    Each rank's gradients are those of the loss over its own positions. Their sum is the gradient of the sum of all
    ranks' losses. Data parallelism over the same ranks does this already, and divides by the number of ranks.

    Parameters
    ----------
    parameters : iterable of Tensor
        The same on every rank, in the same order. Parameters without a gradient on any rank are skipped.
    group : ProcessGroup, optional
    """
    ring = Ring.of("sum_gradients", group)
    held = list(parameters)
    if not held:
        return
    some = torch.tensor([p.grad is not None for p in held], dtype=torch.int64, device=held[0].device)
    dist.all_reduce(some, group=ring.group)
    for parameter, count in zip(held, some.tolist()):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=ring.group)


@dataclass(frozen=True)
class ContextParallel:
    """Context parallelism for layers and models: the ranks that share a sequence, and its layout.

    :meth:`attend` is a drop-in replacement of :func:`regard.attention`. All other parts of a model work on single
    positions and need no change except the right :meth:`positions`. Language models and
    :class:`regard.nn.SelfAttention` accept this object directly.

    Parameters
    ----------
    group : ProcessGroup, optional
        The ranks that share a sequence; None is all processes.
    layout : {"contiguous", "zigzag"}
        "zigzag" balances the work under a causal mask.
    check : bool
        See :func:`ring_attention`.

    Examples
    --------
    >>> context = ContextParallel(layout="zigzag")
    >>> def step(model, tokens):                                   # a DecoderLM; (B, L) on every rank
    ...     model.set_context(context)
    ...     return model(context.shard(tokens, 1))                   # the logits of this rank's tokens
    """

    group: dist.ProcessGroup | None = None
    layout: Layout = "contiguous"
    check: bool = True

    def __post_init__(self) -> None:
        checked_layout("ContextParallel", self.layout)

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""
        return Ring.of("ContextParallel", self.group).size

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """Call :func:`ring_attention` with this context; takes the arguments of :func:`regard.attention`."""
        return ring_attention(*args, **kwargs, group=self.group, layout=self.layout, check=self.check)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a whole sequence; see :func:`shard_sequence`."""
        return shard_sequence(x, dim, self.group, self.layout)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole sequence from the slices of all ranks; see :func:`gather_sequence`."""
        return gather_sequence(x, dim, self.group, self.layout)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this rank's slice; see :func:`shard_positions`."""
        return shard_positions(length, self.group, self.layout, device)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of parameters over the ranks; see :func:`sum_gradients`."""
        sum_gradients(parameters, self.group)
