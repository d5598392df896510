"""Engine ``flex``: torch's FlexAttention, a compiled kernel in which masks and biases are functions of a pair."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from regard import masks
from regard._utils.elementwise import Kind, per_element
from regard._utils.torch_private import (
    compilation_errors,
    distinct_sizes,
    evaluated_by_compilers,
    in_forward_mode,
    in_functorch,
    is_view,
)
from regard._utils.tracing import is_traced
from regard.engines import dense, nonfinite
from regard.engines.aux import AuxRequest
from regard.engines.base import Cost, Engine, EngineOutput, KernelError, Runner
from regard.engines.problem import Problem
from regard.masks.base import FULL, MIXED, Extent, Mask, Predicate, lookup
from regard.masks.matrix import BlockSparse
from regard.normalizers import Softmax, SoftmaxSink
from regard.scores import Score, ScoreMod
from regard.scores.dot_products import DotLike

# The mode: compiled, or by definition, which the tests run -----------------------------------------------------------


#: Environment variable: with "uncompiled", calls compute what the kernel is documented to, with all scores in memory.
MODE = "REGARD_FLEX"


@evaluated_by_compilers
def is_compiled() -> bool:
    """Whether calls run on the compiled kernel; the definition, for tests, is for those who ask for it."""
    return os.environ.get(MODE) != "uncompiled"


# Masks: lists of blocks, and a predicate for pairs of mixed blocks ----------------------------------------------------


#: Number of queries, and of keys, in a block.
BLOCK = 128
#: Maximum number of blocks: longer sequences have larger blocks, so that their lists do not grow with L×S.
MOST_BLOCKS = 1 << 20

#: A predicate or a change of scores, of single elements: FlexAttention's ``mask_mod`` and ``score_mod``.
Function = Callable[..., Tensor]
#: Calls FlexAttention, or its definition: see :func:`attend`.
Attend = Callable[..., tuple[Tensor, Tensor | None]]


class Lowered(NamedTuple):
    """What a mask hides, in FlexAttention's form.

    Attributes
    ----------
    block : int
        Number of queries, and of keys, in a block.
    lists : tuple of Tensor
        Numbers and indices of mixed and full blocks, by query and, for the backward pass, by key: the first eight
        tensors of torch's BlockMask.
    edges : (Tensor, Tensor), or None
        The interval of visible keys of each query, (B or 1, H or 1, L): one predicate for all such masks, so that
        another mask compiles nothing.
    mask : Mask or None
        The mask, if each query's keys are no interval.
    """

    block: int
    lists: tuple[Tensor, ...]
    edges: tuple[Tensor, Tensor] | None
    mask: Mask | None

    @classmethod
    def of(cls, problem: Problem, reads: bool) -> Lowered | None:
        """Lower a problem's mask; None if it hides nothing. ``reads`` is whether values of tensors can be read."""
        mask, extent, device = problem.mask, problem.extent, problem.query.device
        if mask is None or not mask.hides:
            return None
        edges = problem.intervals if reads else None
        if edges is not None:
            shape = (*torch.broadcast_shapes(*[edge.shape[:2] for edge in edges]), extent.L)
            start, stop = (edge.to(device).expand(shape).clone(memory_format=torch.contiguous_format) for edge in edges)
            block = _block_size(extent, *shape[:2])
            return cls(block, _lists(_states_of_edges(start, stop, extent, block)), (start, stop), None)
        B, H = (size or 1 for size in mask.sizes()[:2])
        block = _block_size(extent, B, H)
        states = mask.tiles(extent, block, block, device=device)
        return cls(block, _lists(states), None, mask.in_tensors(problem.compute_dtype, device))

    def block_mask(self, predicate: Function, extent: Extent) -> Any:
        """Return torch's BlockMask."""
        from torch.nn.attention.flex_attention import BlockMask  # its import takes a second

        block = self.block, self.block
        made: Any = BlockMask
        return made((extent.L, extent.S), *self.lists, BLOCK_SIZE=block, mask_mod=predicate)


def _block_size(extent: Extent, B: int, H: int) -> int:
    block = BLOCK
    while B * H * -(-extent.L // block) * -(-extent.S // block) > MOST_BLOCKS:
        block *= 2
    return block


def _states_of_edges(start: Tensor, stop: Tensor, extent: Extent, block: int) -> Tensor:
    """Return the state of each block, (B or 1, H or 1, rows, columns), from intervals: no pair is evaluated."""
    some = start < stop  # rows without keys empty no block, and fill none
    rows = -(-extent.L // block)
    past = (0, rows * block - extent.L)

    def reduced(edge: Tensor, fill: int, least: bool, empty: int | None) -> Tensor:
        edge = pad(edge if empty is None else torch.where(some, edge, empty), past, value=fill)
        tiles = edge.unflatten(-1, (rows, block))
        return (tiles.amin(-1) if least else tiles.amax(-1)).unsqueeze(-1)

    S = extent.S
    first = torch.arange(0, S, block, device=start.device)
    last = (first + (block - 1)).clamp(max=S - 1)
    touched = (reduced(start, S, True, S) <= last) & (reduced(stop, 0, False, 0) > first)
    full = (reduced(start, 0, False, None) <= first) & (reduced(stop, S, True, None) > last)
    full = full & reduced(some.long(), 1, True, None).bool()
    return (touched.to(torch.int8) + (touched & full).to(torch.int8)).contiguous()


def _lists(states: Tensor) -> tuple[Tensor, ...]:
    """Return the lists of mixed and of full blocks, by query and by key.

    There are at least two rows and columns, if need be empty ones: compilers specialize on sizes of 1.
    """
    rows, columns = states.shape[2:]
    if rows == 1 or columns == 1:
        states = pad(states, (0, int(columns == 1), 0, int(rows == 1)))
    found: list[Tensor] = []
    for by_key in (False, True):
        for state in (MIXED, FULL):
            marked = ((states.mT if by_key else states) == state).contiguous()
            found.append(marked.sum(-1, dtype=torch.int32))
            found.append(marked.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32))
    return tuple(found)


def visible(mask: Mask, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor | None:
    """Return whether a pair is visible; functions of the caller are called as they are, as FlexAttention does."""
    if isinstance(mask, masks.AndMask):
        found = None
        for part in mask.masks:
            here = visible(part, b, h, q_idx, kv_idx) if part.hides else None
            if here is not None:
                found = here if found is None else found & here
        return found
    if isinstance(mask, masks.OrMask):
        found = None
        for part in mask.masks:
            here = visible(part, b, h, q_idx, kv_idx)
            if here is None:
                return None
            found = here if found is None else found | here
        return found
    if isinstance(mask, masks.NotMask):
        here = visible(mask.mask, b, h, q_idx, kv_idx)
        return torch.zeros_like(q_idx, dtype=torch.bool) if here is None else ~here
    if isinstance(mask, Predicate):
        answer: Tensor = mask.mask_mod(b, h, q_idx, kv_idx)
        return answer
    return mask.visible(b, h, q_idx, kv_idx)


# Scores: dot products of features, and functions of a score and its place ---------------------------------------------


class Features(NamedTuple):
    """Query, key and value as the kernel takes them, and what the dot products of the features leave out."""

    query: Tensor
    key: Tensor
    value: Tensor
    offset: Tensor | None  # see DotForm
    exact: bool  # whether scores have the precision of the log-sum-exp that aux fields promise


#: Least width of a row for the kernel's matrix products; narrower rows are padded with zeros.
LEAST_WIDTH = 16
#: Largest width of a row that fits the kernel's blocks.
MOST_WIDTH = 256
#: Largest squared distance from the origin, in squared widths and halved, of which float32 keeps enough digits for
#: scores of 16-bit inputs.
FAR = 2048.0


def base_of(score: Score) -> Score:
    """Return the score inside all functions of a score."""
    while type(score) is ScoreMod:
        score = score.base
    return score


def features(problem: Problem) -> Features:
    """Return the problem as dot products; those of narrow inputs are computed in float32 and rounded once."""
    score, dtype, wide = base_of(problem.score), problem.query.dtype, problem.compute_dtype
    value, offset = problem.value, None
    exact = type(score).project is Score.project and type(score).as_dot is DotLike.as_dot
    if exact:
        query, key = problem.query, problem.key
    else:
        form = score.cast(wide).as_dot(problem.query.to(wide), problem.key.to(wide))
        query, key, offset = form.query, form.key, form.offset
        if offset is not None and (problem.softcap is not None or type(problem.score) is ScoreMod):
            # What depends on the query alone cancels in softmax, and not in a function of the score.
            query = torch.cat((query, offset.unsqueeze(-1)), -1)
            key = torch.cat((key, torch.ones_like(key[..., :1])), -1)
        if offset is None:
            query, key = query.to(dtype), key.to(dtype)
        else:  # lifted rows cancel, and keep float32
            query, key, value = query.to(wide), key.to(wide), value.to(wide)
        exact = dtype == wide
    width = max(query.shape[-1], LEAST_WIDTH)
    query, key = (_padded(rows, width) for rows in (query, key))
    return Features(query, key, _padded(value, max(value.shape[-1], LEAST_WIDTH)), offset, exact)


def _padded(rows: Tensor, width: int) -> Tensor:
    return rows if rows.shape[-1] == width else pad(rows, (0, width - rows.shape[-1]))


def modified(score: Score, value: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return a score after all functions of a score, called as they are."""
    if type(score) is not ScoreMod:
        return value
    value = modified(score.base, value, b, h, q_idx, kv_idx)
    answer: Tensor = score.score_mod(value, b, h, q_idx, kv_idx)
    return answer.to(value.dtype)


class Change(NamedTuple):
    """What happens to a score after the dot product and scale: functions of a score, softcap and bias."""

    score: Score | None
    softcap: float | None
    bias: Mask | None

    @classmethod
    def of(cls, problem: Problem) -> Change | None:
        """Return the change; None if there is none."""
        score = problem.score if type(problem.score) is ScoreMod else None
        bias = None if problem.mask is None or not problem.mask.has_bias else problem.mask
        if score is None and problem.softcap is None and bias is None:
            return None
        if bias is not None:
            bias = bias.in_tensors(problem.compute_dtype, problem.query.device)
        return cls(score, problem.softcap, bias)


def score_mod(change: Change) -> Function:
    """Return FlexAttention's ``score_mod``."""
    score, softcap, bias = change.score, change.softcap, change.bias

    def changed(value: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if score is not None:
            value = modified(score, value, b, h, q_idx, kv_idx)
        if softcap is not None:
            capped = softcap * torch.tanh(value / softcap)
            value = capped if score is None else torch.where(value == -torch.inf, value, capped)
        if bias is not None:
            added = bias.bias(b, h, q_idx, kv_idx)
            value = value if added is None else value + added
        return value

    return changed


def mask_mod(edges: tuple[Tensor, Tensor] | None, mask: Mask | None) -> Function:
    """Return FlexAttention's ``mask_mod``."""

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert edges is not None
        return (lookup(edges[0], b, h, q_idx) <= kv_idx) & (kv_idx < lookup(edges[1], b, h, q_idx))

    def shown(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert mask is not None
        found = visible(mask, b, h, q_idx, kv_idx)
        return torch.ones_like(q_idx, dtype=torch.bool) if found is None else found

    return shown if edges is None else within


# The call -------------------------------------------------------------------------------------------------------------


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, change: Change | None, lowered: Lowered | None
) -> tuple[Tensor, Tensor | None]:
    """Call FlexAttention: output (B, H, L, V) and log-sum-exp (B, H, L), None on a CPU, whose kernel has none."""
    from torch.nn.attention.flex_attention import AuxRequest as FlexRequest
    from torch.nn.attention.flex_attention import flex_attention

    extent = Extent(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    block_mask = None if lowered is None else lowered.block_mask(mask_mod(lowered.edges, lowered.mask), extent)
    function = None if change is None else score_mod(change)
    grouped = query.shape[1] != key.shape[1]
    if query.is_cpu:
        output: Tensor = flex_attention(query, key, value, function, block_mask, scale, grouped)
        return output, None
    found, aux = flex_attention(
        query, key, value, function, block_mask, scale, grouped, return_aux=FlexRequest(lse=True)
    )
    return found, aux.lse


def attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, scale: float, change: Change | None, lowered: Lowered | None
) -> tuple[Tensor, Tensor]:
    """Compute what FlexAttention is documented to, with all scores in memory, under the same lists of blocks."""
    (B, H, L, _), S = query.shape, key.shape[2]
    device, wide = query.device, torch.promote_types(query.dtype, torch.float32)
    sizes = ((B, 1, 1, 1), (H, 1, 1), (L, 1), (S,))
    index = tuple([torch.arange(max(shape), device=device).view(shape) for shape in sizes])
    key, value = (rows.to(wide).repeat_interleave(H // rows.shape[1], 1) for rows in (key, value))
    scores = query.to(wide) @ key.mT * scale
    if change is not None:
        given = scores, *index
        scores = _evaluated(score_mod(change), given, change.score is not None, "float").to(wide)
    if lowered is not None:
        predicate = mask_mod(lowered.edges, lowered.mask)
        foreign = lowered.mask is not None and lowered.mask.calls_a_function()
        listed = masks.as_mask(lowered.block_mask(predicate, Extent(B, H, L, S)))
        assert isinstance(listed, BlockSparse)
        state = lookup(listed.states, *index[:2], index[2] // lowered.block, index[3] // lowered.block)
        seen = (state == FULL) | ((state == MIXED) & _evaluated(predicate, index, foreign, "bool"))
        scores = torch.where(seen, scores, -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    lse = torch.where(empty.unsqueeze(-1), 0.0, scores).logsumexp(-1).masked_fill(empty, -torch.inf)
    return (Softmax().weights(scores) @ value).to(query.dtype), lse


def _evaluated(function: Function, given: tuple[Tensor, ...], foreign: bool, kind: Kind) -> Tensor:
    """Call a function for all pairs: functions of the caller are promised single ones."""
    return per_element(function, *given, kind=kind, blame=("attention", "score")) if foreign else function(*given)


# Compiled functions: one for each kind of call ------------------------------------------------------------------------


#: Maximum number of compiled functions that are kept.
MOST_KERNELS = 256
#: The compiler, by the name that ``torch.compile`` has for it.
BACKEND: Any = "inductor"

_kernels: dict[Any, Attend] = {}
_names = count()
#: Why torch could not compile a kind of problems; ``auto`` then chooses another engine.
_failures: dict[Any, str] = {}


def has_dynamic_sizes(device: torch.device) -> bool:
    """Whether one compiled function serves all lengths.

    Not on a CPU: torch's code for symbolic sizes confuses them there (up to 2.13, it replaces their names as text).
    """
    return device.type != "cpu"


def kind_of(value: Any, dynamic: bool) -> Any:
    """Return what a compiler specializes a value on, as a key: types, numbers, and which sizes are 1."""
    if isinstance(value, Tensor):
        sizes = tuple([size == 1 for size in value.shape]) if dynamic else tuple(value.shape)
        return value.dtype, sizes, value.requires_grad, is_view(value)
    if isinstance(value, (tuple, list)):
        return tuple([kind_of(item, dynamic) for item in value])
    if isinstance(value, FunctionType):
        return value.__code__
    if isinstance(value, (bool, int, float, str, torch.dtype, torch.device)) or value is None:
        return value
    return type(value), *[kind_of(item, dynamic) for item in getattr(value, "__dict__", {}).values()]


def kernel(kind: Any, dynamic: bool) -> Attend:
    """Return the compiled function for a kind of calls.

    Each has its own code object: torch limits how often one is compiled again.
    """
    found = _kernels.get(kind)
    if found is None:
        code = attend.__code__.replace(co_name=f"attend_{next(_names)}")
        twin = FunctionType(code, attend.__globals__)
        found = _kernels[kind] = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=BACKEND)
        while len(_kernels) > MOST_KERNELS:
            _kernels.pop(next(iter(_kernels)), None)
    return found


def run_compiled(
    query: Tensor, key: Tensor, value: Tensor, scale: float, change: Change | None, lowered: Lowered | None
) -> tuple[Tensor, Tensor | None]:
    """Call FlexAttention compiled.

    Raises
    ------
    KernelError
        If torch cannot compile the call.
    """
    given = query, key, value, scale, change, lowered
    widths = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    dynamic = has_dynamic_sizes(query.device)
    kind = kind_of((*given, query.device, widths, torch.is_grad_enabled()), dynamic)
    try:
        with distinct_sizes():
            found = kernel(kind, dynamic)(*given)
    except compilation_errors() as error:
        reason = str(error).strip().partition("\n")[0]
        raise KernelError(
            f"attention: torch could not compile FlexAttention for this call ({type(error).__name__}: {reason}); "
            "use engine='streaming', or another that regard.explain lists."
        ) from error
    return found


# The engine -----------------------------------------------------------------------------------------------------------


#: Above this log-sum-exp, its rounding affects the weights that the kernel's backward pass recomputes from it.
LARGE_LSE = 1024.0


class Flex(Engine):
    """FlexAttention, ``torch.nn.attention.flex_attention``: masks and biases of any form in torch's compiled kernel.

    Blocks of pairs that a mask hides are skipped, and in blocks that it shows it is not evaluated. Masks that show each
    query one run of keys share one kernel; others are compiled, as are functions of the caller. Scores are dot products
    of features; a bias, a softcap and a ``score_mod`` change them inside the kernel.

    On a CPU the kernel has no backward pass and returns no log-sum-exp. ``auto`` chooses this engine on CUDA devices
    only, where it is estimated to be the fastest.

    The first call of a kind takes seconds, in which torch compiles it. Other lengths, masks of that kind and contents
    of tensors compile nothing, except that each length is compiled by itself on a CPU.
    """

    name = "flex"
    keeps_lse = True
    has_transforms = False
    can_fail = True

    def refusal(self, problem: Problem) -> str | None:
        return (
            _parts_refusal(problem)
            or _transform_refusal()
            or _gradient_refusal(problem)
            or (_device_refusal(problem) if is_compiled() else None)
            or (_failures.get(_problem_kind(problem)) if _failures else None)
        )

    def not_automatic(self, problem: Problem) -> str | None:
        if problem.query.device.type == "cuda":
            return None
        return "its kernel is compiled for seconds at the first call; auto chooses it on CUDA devices only"

    def grows(self, problem: Problem) -> bool:  # noqa: ARG002
        return False

    def cost(self, problem: Problem) -> Cost:
        B, H, L, S = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        size = problem.query.element_size()
        read = [] if problem.mask is None else problem.mask.tensors()
        moved = problem.bytes_read + sum(t.numel() * t.element_size() for t in read)
        blocks = -(-L // BLOCK) * -(-S // BLOCK)
        lists = 0.0 if problem.mask is None else 18.0 * min(blocks, MOST_BLOCKS) + 16.0 * L
        work = lists + float(B * H * L * (4 + V * size))
        return Cost(B * H * L * S * problem.visible_share * (2 * E + 2 * V + 5), float(moved), work, grows=False)

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:  # noqa: ARG002
        if 0 in problem.extent:
            return dense.attend_nothing
        if problem.query.is_meta:
            return _shaped
        if is_traced(problem.query):
            return _traced
        wants_grad, on_cpu = problem.wants_grad, problem.query.is_cpu
        call: Attend = run_compiled if is_compiled() else attend_by_definition
        fixed = Lowered.of(problem, reads=True) if problem.mask is not None and problem.mask.is_fixed else None

        def run(problem: Problem) -> EngineOutput:
            lowered = fixed or Lowered.of(problem, reads=True)

            def once(problem: Problem) -> EngineOutput | None:
                try:
                    return _run(problem, lowered, call)
                except KernelError:
                    _failures[_problem_kind(problem)] = "torch could not compile FlexAttention for such a call before"
                    raise

            if lowered is not None and wants_grad and dense.needs_care(problem):
                return nonfinite.contained(problem, once)  # a backward pass multiplies hidden values by 0
            if lowered is not None or on_cpu or _checks(problem):
                return nonfinite.recomputed(problem, once)
            outcome = once(problem)
            assert outcome is not None
            return outcome

        return run


def _problem_kind(problem: Problem) -> Any:
    """Return what decides whether the kernel of a problem can be compiled, as a key."""
    ends = problem.query, problem.key, problem.value
    parts = problem.score, problem.mask, problem.softcap, problem.wants_grad
    return kind_of((*parts, *[(t.dtype, t.shape[1], t.shape[3]) for t in ends], problem.query.device), True)


def _parts_refusal(problem: Problem) -> str | None:
    """Return which part the kernel has no form for."""
    normalizer, score = problem.normalizer, base_of(problem.score)
    if type(normalizer) not in (Softmax, SoftmaxSink):
        return f"softmax only, not {type(normalizer).__name__}"
    if problem.dropout_p:
        return "no dropout"
    refusal = score.dot_refusal(problem.query.dtype)
    if refusal is not None:
        return refusal
    if not isinstance(score, DotLike) and problem.query.itemsize > 2:
        return f"as a dot product, {type(score).__name__} needs a dtype wider than {problem.query.dtype}"
    if max(problem.query.shape[-1], problem.key.shape[-1], problem.value.shape[-1]) > MOST_WIDTH:
        return f"widths of at most {MOST_WIDTH}"
    return None


def _transform_refusal() -> str | None:
    if in_forward_mode():
        return "no forward-mode derivative (engines 'streaming' and 'reference' have one)"
    if in_functorch():
        return "no transforms of torch.func (engines 'streaming' and 'reference' have them)"
    return None


def _gradient_refusal(problem: Problem) -> str | None:
    if problem.mask is not None and torch.is_grad_enabled() and any(t.requires_grad for t in problem.mask.tensors()):
        return "no gradient to a bias"
    return None


def _device_refusal(problem: Problem) -> str | None:
    """Return why the compiled kernel does not run on the device of a problem."""
    device, dtype = problem.query.device, problem.query.dtype
    if device.type not in ("cuda", "cpu", "meta"):
        return f"CUDA devices and CPUs only, not {device.type}"
    if dtype == torch.float64:
        return "float16, bfloat16 and float32 only, not torch.float64"
    if device.type == "meta":
        return None
    if device.type == "cuda":
        refusal: str | None = _cuda_refusal(str(device))
        return refusal
    if problem.wants_grad:
        return "no gradients on a CPU, where FlexAttention has no backward pass"
    if isinstance(problem.normalizer, SoftmaxSink):
        return "no sink on a CPU, where FlexAttention returns no log-sum-exp"
    if dtype.itemsize < 4 and isinstance(problem.score, ScoreMod):
        return "float32 only for a score_mod on a CPU, where torch's kernel can be wrong in 16 bits"
    refused: str | None = _cpu_refusal()
    return refused


@evaluated_by_compilers
def _cpu_refusal() -> str | None:
    if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "on a CPU, FlexAttention needs one with AVX2, and Linux or Windows"
    compiler = os.environ.get("CXX") or ("cl" if sys.platform == "win32" else "g++")
    if shutil.which(compiler) is None:
        return f"on a CPU, FlexAttention needs a C++ compiler: there is no {compiler!r}, which CXX can name"
    return None


@evaluated_by_compilers
def _cuda_refusal(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention needs Triton, which is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        return f"FlexAttention needs a CUDA device of compute capability 7.0 or more, not {major}.{minor}"
    return None


def _checks(problem: Problem) -> bool:
    """Whether the outcome can be None: see :func:`_run`."""
    return not isinstance(base_of(problem.score), DotLike) or _is_biased(problem)


def _is_biased(problem: Problem) -> bool:
    """Whether something that is added may leave a log-sum-exp no precision for gradients."""
    biased = type(problem.score) is ScoreMod or (problem.mask is not None and problem.mask.has_bias)
    return biased and problem.wants_grad


def _run(problem: Problem, lowered: Lowered | None, call: Attend) -> EngineOutput | None:
    """Run the kernel; None if float32 has too few digits for lifted keys, or for the log-sum-exp of large biases."""
    given = features(problem)
    if given.offset is not None and float(given.offset.detach().abs().amax()) * abs(problem.scale) > FAR:
        return None
    outcome = _finished(problem, given, lowered, call)
    if outcome.lse is not None and _is_biased(problem):
        lse = outcome.lse.detach()
        if bool((lse.isfinite() & (lse.abs() > LARGE_LSE)).any()):
            return None
    return outcome if given.exact else EngineOutput(outcome.output)


def _finished(problem: Problem, given: Features, lowered: Lowered | None, call: Attend) -> EngineOutput:
    """Run the kernel and return its output without padding, after the sink, with the log-sum-exp."""
    output, lse = call(given.query, given.key, given.value, problem.scale, Change.of(problem), lowered)
    if output.shape[-1] != problem.value.shape[-1]:
        output = output[..., : problem.value.shape[-1]].contiguous()
    cancels = problem.softcap is None and type(problem.score) is not ScoreMod
    if lse is not None and given.offset is not None and cancels:
        lse = lse + problem.scale * given.offset.to(lse.dtype)
    if isinstance(problem.normalizer, SoftmaxSink):
        assert lse is not None
        sink = problem.normalizer.logits(lse.unsqueeze(-1)).reshape(-1, 1)
        empty = lse == -torch.inf
        # The derivative of this sigmoid keeps its digits where the sink takes little.
        share = torch.where(empty, 0.0, torch.exp(logsigmoid(torch.where(empty, 0.0, lse) - sink)))
        output = output * share.unsqueeze(-1).to(output.dtype)
    return EngineOutput(output.to(problem.query.dtype), None if lse is None else lse.detach())


def _shaped(problem: Problem) -> EngineOutput:
    """Return an output without values."""
    output = problem.query.new_empty(*problem.query.shape[:3], problem.value.shape[-1])
    return EngineOutput(dense.attached(output, problem))


def _traced(problem: Problem) -> EngineOutput:
    """Run a traced call, in which no value is read: keys that no query sees are set to 0, so that they cannot leak."""
    lowered = Lowered.of(problem, reads=False)
    if lowered is not None and problem.mask is not None:
        B, G, S = problem.key.shape[:3]
        used = problem.mask.visible_keys(problem.extent).expand(B, problem.extent.H, S)
        used = used.view(B, G, -1, S).any(2).unsqueeze(-1)
        key, value = (torch.where(used, rows, 0.0) for rows in (problem.key, problem.value))
        problem = replace(problem, key=key, value=value)
    return _finished(problem, features(problem), lowered, attend)
