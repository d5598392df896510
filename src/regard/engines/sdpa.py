"""Engine ``sdpa``: torch's fused kernel, with structured masks in blocks of queries.

The key ranges of a block are merged by their log-sum-exp. The backward pass runs the kernel's own backward on each
range with the merged output and log-sum-exp. This is exact, because weights are relative to the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as torch_attention  # bound once: users replace it

from regard import masks
from regard._utils.torch_private import flash_attention_backward, in_forward_mode, in_functorch
from regard._utils.tracing import is_exported_to_onnx, is_traced
from regard.engines import dense, nonfinite
from regard.engines.aux import AuxRequest
from regard.engines.base import Cost, Engine, EngineOutput, Runner, Shortcut
from regard.engines.flash import LARGE_LSE, flash_attention, scores_fit
from regard.engines.problem import Problem
from regard.engines.tiles import BlockMask, OnlineSoftmax, Run, Span, spans
from regard.masks.base import EMPTY, FULL, MIXED, Extent, Mask
from regard.normalizers import Softmax, SoftmaxSink
from regard.scores import DotForm, Score
from regard.scores.dot_products import DotLike

# Structured masks: blocks of queries, each over the ranges of keys that it sees ---------------------------------------


#: Number of queries of a block, and granularity of its key ranges.
ROWS, BLOCK = 128, 128
#: Number of full blocks in a row that are worth a separate call without a mask.
FULL_RUN = 4
#: Maximum number of key blocks in a masked call, which bounds the size of its mask.
MASKED_RUN = 16


class KeyRange(NamedTuple):
    """Keys that a block reads in one call; ``masked`` if some of the pairs are hidden."""

    cols: Span
    masked: bool


class QueryBlock(NamedTuple):
    """Queries ``rows`` of sequences and heads ``where``, and the ranges of keys that they see."""

    where: tuple[slice, slice]
    rows: Span
    ranges: tuple[KeyRange, ...]


def cut_queries(mask: Mask, extent: Extent) -> list[QueryBlock]:
    """Split a bound mask into blocks, separately for sequences and heads in which it differs."""
    blocks = BlockMask.of(mask, extent, ROWS, BLOCK)
    by_batch, by_head = blocks.differs
    found = []
    for b, h, row, runs in blocks.rows(*blocks.states.shape[:2]):
        where = slice(b, b + 1) if by_batch else slice(None), slice(h, h + 1) if by_head else slice(None)
        rows = Span(row * ROWS, min((row + 1) * ROWS, extent.L))
        found.append(QueryBlock(where, rows, tuple(_ranges(runs))))
    return found


def _is_long(run: Run) -> bool:
    """Whether a run is worth a separate call without a mask."""
    return run.state == FULL and run.stop - run.start > (FULL_RUN - 1) * BLOCK


def _ranges(runs: list[Run]) -> Iterator[KeyRange]:
    """Merge runs of blocks into ranges: long full runs stay separate, the rest is masked, in ranges of bounded size."""
    joined: list[Run] = []
    for run in runs:
        alone = run.state == EMPTY or _is_long(run)
        last = joined[-1] if joined and joined[-1].stop == run.start else None
        if alone or last is None or last.state == EMPTY or _is_long(last):
            joined.append(run)
        else:
            state = FULL if last.state == run.state == FULL else MIXED
            joined[-1] = Run(last.start, run.stop, state)
    for run in joined:
        if run.state == FULL:
            yield KeyRange(Span(run.start, run.stop), masked=False)
        elif run.state == MIXED:
            for start in range(run.start, run.stop, MASKED_RUN * BLOCK):
                yield KeyRange(Span(start, min(start + MASKED_RUN * BLOCK, run.stop)), masked=True)


@dataclass(eq=False, repr=False)
class BlockedRun:
    """The non-differentiable arguments of a blocked run."""

    mask: Mask
    extent: Extent
    blocks: list[QueryBlock]
    scale: float
    wants_grad: bool
    #: Precomputed output and log-sum-exp over more keys than these, if any.
    precomputed: tuple[Tensor, Tensor] | None = None

    def shift(self, block: QueryBlock, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the largest bias of each row (b, h, l, 1), 0 in rows without visible keys; None if nothing is merged.

        Ranges are merged by their log-sum-exp, in which a bias of −1e9 would leave no precision for the scores.
        """
        if not self.mask.has_bias or len(block.ranges) < 2:
            return None
        peak: Tensor | None = None
        for part in block.ranges:
            added, _ = self.tile_mask(block, part, dtype, device, None)
            assert added is not None
            largest = added.amax(-1, keepdim=True)
            peak = largest if peak is None else torch.maximum(peak, largest)
        assert peak is not None
        return torch.where(peak == -torch.inf, 0.0, peak)

    def tile_mask(
        self, block: QueryBlock, part: KeyRange, dtype: torch.dtype, device: torch.device, shift: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias (b, h, l, s), −inf for hidden pairs, and the non-empty rows (b, h, l, 1); None for all rows.

        The bias has at least float32, and the ``shift`` of each row is subtracted.
        """
        if not part.masked and not self.mask.has_bias:
            return None, None
        b = torch.arange(self.extent.B, device=device)[block.where[0]].view(-1, 1, 1, 1)
        h = torch.arange(self.extent.H, device=device)[block.where[1]].view(-1, 1, 1)
        q_idx = torch.arange(block.rows.start, block.rows.stop, device=device).unsqueeze(1)
        index = b, h, q_idx, torch.arange(part.cols.start, part.cols.stop, device=device)
        bias = self.mask.bias(*index) if self.mask.has_bias else None
        wide = torch.promote_types(dtype, torch.float32)
        added = torch.zeros((), dtype=wide, device=device) if bias is None else bias.detach().to(wide)
        seen = None
        visible = self.mask.visible(*index) if part.masked else None
        if visible is not None:
            added = torch.where(visible, added, -torch.inf)
            seen = visible.any(-1, keepdim=True)
            seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)
        if shift is not None:
            added = added - shift
        sizes = (q_idx.shape[0], index[3].shape[0])
        outer = added.shape[:-2] if added.dim() >= 2 else ()
        return added.expand(*(1,) * (2 - len(outer)), *outer, *sizes), seen


class BlockedAttention(torch.autograd.Function):
    """Attention under a structured mask; query, key and value (B, H, N, E) of one width, on the CPU."""

    @staticmethod
    def forward(
        ctx: Any, run: BlockedRun, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        if run.precomputed is not None:
            return _attached(ctx, run, query, key, value, tensors)
        output = torch.zeros_like(query)
        relative = query.new_full(query.shape[:3], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = relative.clone()
        for block in run.blocks:
            rows = (*block.where, block.rows.slice)
            shift = run.shift(block, query.dtype, query.device)
            found = _block(run, block, query[rows], key[block.where], value[block.where], shift)
            output[rows], relative[rows] = found
            lse[rows] = found[1] if shift is None else found[1] + shift.squeeze(-1)
        ctx.run = run
        # Save the mask's tensors too, so that autograd detects in-place changes.
        ctx.save_for_backward(query, key, value, output, relative, *tensors)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *tensors = ctx.saved_tensors
        run = replace(ctx.run, mask=ctx.run.mask.with_tensors(tensors))
        grad = grad.contiguous()
        wide = lse.dtype  # sums over blocks keep their precision for narrow inputs
        d_query, d_key, d_value = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        lse = torch.where(lse == -torch.inf, 0.0, lse)  # the kernel's value for empty rows
        for block in run.blocks:
            rows = (*block.where, block.rows.slice)
            shift = run.shift(block, query.dtype, query.device)
            for part in block.ranges:
                cols = (*block.where, part.cols.slice)
                added = run.tile_mask(block, part, query.dtype, query.device, shift)[0]
                found = flash_attention_backward(
                    grad[rows], query[rows], key[cols], value[cols], output[rows], lse[rows], 0.0, False,
                    attn_mask=added, scale=run.scale,
                )  # fmt: skip
                for total, where, gradient in zip((d_query, d_key, d_value), (rows, cols, cols), found):
                    total[where] += gradient
        grads = (total.to(query.dtype) for total in (d_query, d_key, d_value))
        return None, *grads, *(None for _ in tensors)


def _attached(
    ctx: Any, run: BlockedRun, query: Tensor, key: Tensor, value: Tensor, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return the precomputed output and log-sum-exp, and save them for :meth:`BlockedAttention.backward`."""
    assert run.precomputed is not None
    output, lse = (t.detach() for t in run.precomputed)
    relative = lse.clone()
    for block in run.blocks:
        shift = run.shift(block, query.dtype, query.device)
        if shift is not None:
            relative[(*block.where, block.rows.slice)] -= shift.squeeze(-1)
    ctx.run = replace(run, precomputed=None)
    ctx.save_for_backward(query, key, value, output, relative, *tensors)
    ctx.mark_non_differentiable(lse)
    return output, lse


def _block(
    run: BlockedRun, block: QueryBlock, query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a block's output (b, h, l, V) and log-sum-exp (b, h, l), relative to the ``shift`` of its rows."""
    parts = []
    for part in block.ranges:
        added, seen = run.tile_mask(block, part, query.dtype, query.device, shift)
        cols = part.cols.slice
        out, flat = flash_attention(query, key[:, :, cols], value[:, :, cols], False, added, run.scale, fits=True)
        lse = flat.unsqueeze(-1)
        parts.append((out, lse if seen is None else torch.where(seen, lse, -torch.inf)))
    if len(parts) == 1:
        return parts[0][0], parts[0][1].squeeze(-1)
    wide = torch.promote_types(query.dtype, torch.float32)
    state = OnlineSoftmax(query.new_zeros(*query.shape[:3], 1, dtype=wide), value.shape[-1])
    for out, lse in parts:
        state.merge(out, lse)
    out, lse = state.finish()
    return out.to(query.dtype), lse.squeeze(-1)


# Masks in the forms that torch's fused CPU kernel takes: none, causal, a matrix, or blocks of queries -----------------


#: Maximum number of queries for which all scores are computed at once, reading keys once.
FEW = 4
#: Maximum number of pairs for which a mask is materialized, as blocks would cost more in calls than they save.
MATRIX = 256 * 256
#: Maximum number of elements of a materialized mask over all sequences and heads.
MATRICES = 64 * MATRIX
#: Maximum number of elements of a materialized mask that is kept for later calls.
KEPT = 8 * MATRIX


@dataclass(eq=False, repr=False)
class KernelMask:
    """A mask in the form that torch's kernel takes.

    Attributes
    ----------
    hides : bool
        Whether the mask hides pairs among the keys that are read.
    causal : bool
        Whether the kernel's own causal mask is part of it.
    keys : slice, or None
        The keys that are read; None is all.
    added : Tensor (1 or B, 1 or H, 1 or L, S), or None
        Added to the scores.
    empty : Tensor (1 or B, 1 or H, 1 or L), or None
        Rows without visible keys; None if there are none, or the log-sum-exp is not requested.
    blocks : list of QueryBlock, or None
    """

    hides: bool = False
    causal: bool = False
    keys: slice | None = None
    added: Tensor | None = None
    empty: Tensor | None = None
    blocks: list[QueryBlock] | None = None

    @classmethod
    def of(cls, problem: Problem, needs_lse: bool = True, fixed: Tensor | None = None) -> KernelMask:
        """Convert a problem's mask.

        Parameters
        ----------
        problem : Problem
        needs_lse : bool
            Whether the log-sum-exp is requested.
        fixed : Tensor (1, 1 or H, 1 or L, S), optional
            The bias of the fixed parts of the mask; see :func:`fixed_part`.
        """
        mask, extent = problem.mask, problem.extent
        if mask is None:
            return cls()
        if isinstance(mask, masks.Dense):
            return GIVEN
        if is_causal(problem):
            # Skip keys that no query sees, except with dropout, whose random numbers depend on the number of keys.
            keys = slice(extent.L) if extent.L < extent.S and not problem.dropout_p else None
            return cls(hides=True, causal=True, keys=keys)
        kept = mask.is_fixed
        keys = _shared_keys(problem) if kept and not mask.has_bias else None
        if keys is not None:
            return cls(keys=None if keys == slice(0, extent.S) else keys)
        if FEW < extent.L <= MATRIX // extent.S:
            causal, rest = _split(mask, extent)
            added = _matrix_of(problem, rest if fixed is None else _among(rest, fixed=False))
            added = added if fixed is None else fixed + added
            if added.numel() <= (KEPT if kept else MATRICES):
                empty = _empty(mask, causal, added, extent) if needs_lse else None
                return cls(hides=True, causal=causal, added=added, empty=empty)
        return cls(hides=True, blocks=cut_queries(mask, extent))


#: A dense mask from the caller.
GIVEN = KernelMask(hides=True)
#: A mask applied to scores that are computed at once.
AT_ONCE = KernelMask(hides=True)


def _shared_keys(problem: Problem) -> slice | None:
    """Return the visible keys if they are the same for all queries, and more than one."""
    if problem.intervals is None:
        return None
    (first, last), (least, most) = ((int(edge.min()), int(edge.max())) for edge in problem.intervals)
    return slice(first, most) if first == last and least == most and most - first > 1 else None


def fixed_part(problem: Problem) -> Tensor | None:
    """Return the bias of the fixed parts of a short mask, which is the same in all calls of a structure.

    None if the mask is not composed of fixed and other parts, or is not materialized.
    """
    mask, extent = problem.mask, problem.extent
    if not isinstance(mask, masks.AndMask) or not FEW < extent.L <= MATRIX // extent.S or is_causal(problem):
        return None
    rest = _split(mask, extent)[1]
    if not isinstance(rest, masks.AndMask) or len({part.is_fixed for part in rest.masks}) < 2:
        return None
    added = _matrix_of(problem, _among(rest, fixed=True))
    return added if added.numel() <= KEPT else None


def _split(mask: Mask, extent: Extent) -> tuple[bool, Mask]:
    """Return whether a mask contains the kernel's own causal mask, and the rest of it."""
    if not isinstance(mask, masks.AndMask):
        return False, mask
    rest = tuple([part for part in mask.masks if not part.is_plain_causal(extent)])
    if len(rest) == len(mask.masks):
        return False, mask
    return True, rest[0] if len(rest) == 1 else masks.AndMask(rest)


def _among(mask: Mask, fixed: bool) -> Mask:
    """Return the parts of a composed mask that are fixed, or those that are not."""
    assert isinstance(mask, masks.AndMask)
    return masks.AndMask(tuple([part for part in mask.masks if part.is_fixed == fixed]))


def _empty(mask: Mask, causal: bool, added: Tensor, extent: Extent) -> Tensor | None:
    """Return which rows (1 or B, 1 or H, 1 or L) are empty; None if the mask hides nothing."""
    if not mask.hides:
        return None
    hidden = added == -torch.inf
    if causal:
        hidden = hidden | torch.ones(extent.L, extent.S, dtype=torch.bool, device=hidden.device).triu(1)
    return hidden.all(-1)


def _matrix_of(problem: Problem, mask: Mask) -> Tensor:
    """Materialize a mask as a bias with −inf for hidden pairs: (1 or B, 1 or H, 1 or L, S)."""
    extent, dtype = problem.extent, wide_dtype(problem.query.dtype)
    index = indices(problem, Span(0, extent.L), Span(0, extent.S))
    visible, bias = mask.visible(*index), mask.cast(dtype).bias(*index) if mask.has_bias else None
    if bias is None:
        bias = dense.constant(0.0, dtype, problem.query.device)
    added = bias if visible is None else torch.where(visible, bias, dense.constant(-torch.inf, dtype, bias.device))
    added = added.detach()[(None,) * (4 - added.dim())]
    return added.expand(*added.shape[:3], extent.S).contiguous()


def is_causal(problem: Problem) -> bool:
    """Whether the mask is the kernel's own causal mask."""
    return problem.mask is not None and problem.mask.is_plain_causal(problem.extent)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of biases in torch's kernels: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def indices(problem: Problem, rows: Span, cols: Span) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments b (B, 1, 1, 1), h (H, 1, 1), q_idx (l, 1) and kv_idx (s,) of masks."""
    device, extent = problem.query.device, problem.extent
    b = torch.arange(extent.B, device=device).view(-1, 1, 1, 1)
    h = torch.arange(extent.H, device=device).view(-1, 1, 1)
    q_idx = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    return b, h, q_idx, torch.arange(cols.start, cols.stop, device=device)


# The engine -----------------------------------------------------------------------------------------------------------


#: Number of queries per materialized mask in traced calls.
TRACED_STRIP = 512
#: Squared distance from the origin above which lifted Gaussian scores have too few digits in float32.
FAR = 2.0**28
#: Number of pairs per head that fit into one streaming tile.
SMALL = 256 * 256


class Sdpa(Engine):
    """torch's ``scaled_dot_product_attention`` for every score that is a dot product of features.

    The Gaussian lifts its keys by one feature. Structured masks are not materialized, except for short sequences: each
    block of queries runs over the ranges of keys that it sees. Without a mask, grouped queries become rows of their key
    head.

    If a dense mask adds a bias to a whole row that leaves no precision for the scores (−1e9 in float32), torch's own
    function returns gradients that are several times too large. This engine computes such rows by definition.
    """

    name = "sdpa"
    keeps_lse = True

    def refusal(self, problem: Problem) -> str | None:
        mask, device = problem.mask, problem.query.device.type
        sinks = type(problem.normalizer) is SoftmaxSink
        if not sinks and type(problem.normalizer) is not Softmax:
            return f"softmax only, not {type(problem.normalizer).__name__}"
        if problem.softcap is not None:
            return "no softcap"
        refusal = problem.score.dot_refusal(problem.query.dtype) or (_sink_refusal(problem) if sinks else None)
        if refusal is not None:
            return refusal
        if in_forward_mode():
            return "no forward-mode derivative (engines 'streaming' and 'reference' have one)"
        if mask is None or is_causal(problem):
            return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in mask.tensors()):
            return "no gradient to a bias"
        if problem.dropout_p and not isinstance(mask, masks.Dense):
            return "dropout needs the whole mask as a matrix"
        if device != "cpu" and not isinstance(mask, masks.Dense) and not is_traced(problem.query):
            return f"structured masks on the CPU only, not on {device}"
        narrow = problem.query.dtype != problem.compute_dtype
        wider = (t.is_floating_point() and t.dtype != problem.query.dtype for t in mask.tensors())
        if device != "cpu" and narrow and mask.has_bias and any(wider):
            return f"no float32 bias for {problem.query.dtype} scores on {device}"
        return None

    def grows(self, problem: Problem) -> bool:
        # A matrix that fits into one streaming tile does not count.
        return bool(problem.dropout_p) and problem.extent.L * problem.extent.S > SMALL

    def cost(self, problem: Problem) -> Cost:
        B, H, L, S = problem.extent
        E, V = problem.query.shape[-1], problem.value.shape[-1]
        size = problem.query.element_size()
        share, mask_bytes, work = 1.0, 0.0, 0.0
        mask = problem.mask
        if mask is not None:
            if isinstance(mask, masks.Dense):
                mask_bytes = float(sum(t.numel() * t.element_size() for t in mask.tensors()))
            else:
                share = problem.visible_share
                work = float(ROWS * BLOCK * MASKED_RUN * size * (H if mask.has_bias else 1))
        moved = problem.bytes_read + mask_bytes
        if _widens(problem):
            work += 4.0 * (problem.bytes_read / size + B * H * L * V)
        work += float(B * H * L * S * size) if problem.dropout_p else float(B * H * L * (V + 1) * size)
        return Cost(B * H * L * S * share * (2 * E + 2 * V + 5), float(moved), work, self.grows(problem))

    def prepare(self, problem: Problem, request: AuxRequest | None) -> Runner:
        # torch's kernel treats a single key as hidden if its score is NaN.
        if 0 in problem.query.shape[:3] or problem.extent.S < 2:
            return dense.attend_nothing
        if is_traced(problem.query):
            return _traced
        few = problem.extent.L <= FEW and not problem.wants_grad and not problem.dropout_p
        if not problem.is_softmax and not few:
            return self._prepare_with_sink(problem)
        if _widens(problem):
            return self._prepare_widened(problem, request)
        mask, wants_grad, on_cpu = problem.mask, problem.wants_grad, problem.query.device.type == "cpu"
        fixed = mask is None or isinstance(mask, masks.Dense) or mask.is_fixed
        needs_lse = request is not None
        kernel_mask = KernelMask.of(problem, needs_lse) if fixed else None
        part = None if fixed else fixed_part(problem)
        attend = _run_as_given if _is_as_given(problem, kernel_mask) else _run
        if few and (kernel_mask is None or kernel_mask.hides or not problem.is_softmax):
            kernel_mask, attend = AT_ONCE, _run_at_once

        def run(problem: Problem) -> EngineOutput:
            own = KernelMask.of(problem, needs_lse, part) if kernel_mask is None else kernel_mask

            def once(problem: Problem) -> EngineOutput | None:
                outcome = attend(problem, own)
                return outcome if needs_lse or outcome is None else EngineOutput(outcome.output)

            # A backward pass multiplies hidden values by 0, which leaks NaN.
            if wants_grad and own.hides and dense.needs_care(problem):
                return nonfinite.contained(problem, once)
            if own.hides or on_cpu:
                return nonfinite.recomputed(problem, once)
            outcome = once(problem)
            assert outcome is not None
            return outcome

        if attend is _run_as_given and kernel_mask is not None and not (wants_grad and kernel_mask.hides):
            run.shortcut = _shortcut(problem, kernel_mask)  # type: ignore[attr-defined]
        return run

    def _prepare_with_sink(self, problem: Problem) -> Runner:
        """Return a runner for softmax with a sink: softmax over the keys, times ``sigmoid(lse − sink)``.

        The derivative is that of softmax over more keys, of which these are a part: the sink is a key without a value.
        """
        with torch.no_grad():
            attend = self.prepare(_without_sink(problem), AuxRequest(lse=True))
        wants_grad = problem.wants_grad

        def run(problem: Problem) -> EngineOutput:
            plain, normalizer = _without_sink(problem), problem.normalizer.cast(problem.compute_dtype)
            assert isinstance(normalizer, SoftmaxSink)
            with torch.no_grad():
                outcome = attend(plain)
            if outcome.lse is None:  # recomputed by definition, as sums overflow
                return dense.attend_by_rows(problem)
            lse, sink = outcome.lse, normalizer.logits(outcome.lse.unsqueeze(-1))
            row = sink.detach().reshape(-1, 1)  # (H or 1, 1)
            empty = lse == -torch.inf
            output = outcome.output * torch.where(empty, 0.0, torch.sigmoid(lse - row)).unsqueeze(-1)
            if wants_grad:
                # Weights that are computed from a log-sum-exp like −1e9 would have no precision.
                imprecise = problem.mask is not None and problem.mask.has_bias and bool((lse.abs() > LARGE_LSE).any())
                whole = torch.logaddexp(lse, row)
                attached = None if imprecise else self.partial_backward(plain, output, whole)
                if attached is None:
                    return dense.attend_by_rows(problem)
                share = torch.where(empty, 0.0, torch.sigmoid(row - lse))
                output = _SinkShare.apply(attached, sink, share) if sink.requires_grad else attached
            return EngineOutput(output.to(problem.query.dtype), lse)

        return run

    def _prepare_widened(self, problem: Problem, request: AuxRequest | None) -> Runner:
        """Return a runner in float32: torch's 16-bit backward pass on a CPU takes up to 8 times as long."""
        run = self.prepare(_widened(problem), request)

        def run_widened(problem: Problem) -> EngineOutput:
            outcome = run(_widened(problem))
            return replace(outcome, output=outcome.output.to(problem.query.dtype))

        return run_widened

    def partial_backward(
        self,
        problem: Problem,
        output: Tensor,
        lse: Tensor,
        runner: Runner | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        query, few = problem.query, problem.extent.S < 2 or 0 in problem.query.shape
        if few or query.device.type != "cpu" or problem.dropout_p or is_traced(query) or dense.needs_care(problem):
            return None
        form, V = _form(problem), problem.value.shape[-1]
        if form.offset is not None:
            return None  # over a part of the keys, the derivative of the offset does not cancel
        dtype, width = form.query.dtype, max(form.query.shape[-1], V)
        rows = form.query, form.key, problem.value.to(dtype), output.detach().to(dtype)
        # torch's kernel returns wrong gradients for rows that are not contiguous.
        query, key, value, output = (
            t.contiguous() if t.shape[-1] == width else pad(t, (0, width - t.shape[-1])) for t in rows
        )
        attached: Tensor = _part(problem, KernelMask.of(problem), query, key, value, output, lse.to(dtype))
        return attached[..., :V].to(problem.query.dtype)


def _sink_refusal(problem: Problem) -> str | None:
    """Return why the engine cannot run a problem with a sink, or None."""
    if problem.query.device.type != "cpu":
        return "a sink needs the log-sum-exp of torch's kernel, which it returns on the CPU only"
    if problem.dropout_p:
        return "a sink needs the log-sum-exp of torch's kernel, which does not return it with dropout"
    if not isinstance(problem.score, DotLike):
        return f"a sink with dot products only, not with {type(problem.score).__name__}"
    return None


def _without_sink(problem: Problem) -> Problem:
    """Return the problem with softmax over its keys, in the compute dtype.

    A dense mask becomes a composed one, whose empty rows are known: the kernel's log-sum-exp is wrong in them.
    """
    mask = masks.AndMask((problem.mask,)) if isinstance(problem.mask, masks.Dense) else problem.mask
    return replace(_widened(problem) if problem.query.itemsize < 4 else problem, normalizer=Softmax(), mask=mask)


def _widens(problem: Problem) -> bool:
    """Whether the call runs in float32, as a backward pass in 16 bits may follow on a CPU."""
    return problem.query.is_cpu and problem.query.itemsize < 4 and problem.wants_grad


def _widened(problem: Problem) -> Problem:
    """Return the problem with query, key and value in float32."""
    return replace(problem, query=problem.query.float(), key=problem.key.float(), value=problem.value.float())


def _is_as_given(problem: Problem, kernel_mask: KernelMask | None) -> bool:
    """Whether torch's kernel can run on query, key and value unchanged."""
    query, key, value = problem.query, problem.key, problem.value
    foldable = kernel_mask is not None and not kernel_mask.hides
    return (
        type(problem.score).project is Score.project
        and type(problem.score).as_dot is DotLike.as_dot
        and query.shape[-1] == key.shape[-1] == value.shape[-1] > 0
        and (query.shape[1] == key.shape[1] or foldable)
        and query.dtype == problem.compute_dtype
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and problem.scale > 0
        and not problem.dropout_p
        and query.device.type == "cpu"
    )


def _run_at_once(problem: Problem, kernel_mask: KernelMask) -> EngineOutput:  # noqa: ARG001
    return dense.attend_few(problem)


def _run_as_given(problem: Problem, kernel_mask: KernelMask) -> EngineOutput | None:
    """Run the kernel without pre- and postprocessing, unless the mask needs blocks."""
    if kernel_mask.blocks is not None:
        return _run(problem, kernel_mask)
    mask = problem.mask
    values = mask.values if isinstance(mask, masks.Dense) else None
    output, lse = _as_given(problem.query, problem.key, problem.value, values, kernel_mask, problem.scale)
    if kernel_mask is GIVEN:
        return EngineOutput(output)
    lse = lse.reshape(output.shape[:3])
    return EngineOutput(output, lse if kernel_mask.empty is None else lse.masked_fill(kernel_mask.empty, -torch.inf))


def _as_given(
    query: Tensor, key: Tensor, value: Tensor, values: Tensor | None, kernel_mask: KernelMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, V) and the log-sum-exp (B, G, H // G · L); ``values`` are those of a dense mask."""
    if kernel_mask.keys is not None:
        key, value = key[:, :, kernel_mask.keys], value[:, :, kernel_mask.keys]
    if query.shape[1] != key.shape[1]:  # query heads become rows of their key head
        shape = query.shape
        output, lse = flash_attention(query.reshape(shape[0], key.shape[1], -1, shape[3]), key, value, scale=scale)
        return output.reshape(shape), lse
    added = kernel_mask.added if values is None else dense.matrix(values, query.dtype)
    return flash_attention(query, key, value, kernel_mask.causal, added, scale)


def _shortcut(problem: Problem, kernel_mask: KernelMask) -> Shortcut | None:
    """Return :func:`_as_given` for problems of this structure, if its output is finite; see ``nonfinite``."""
    if kernel_mask.blocks is not None:
        return None
    scale, is_dense = problem.scale, isinstance(problem.mask, masks.Dense)

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any) -> Tensor | None:
        output = _as_given(query, key, value, attn_mask if is_dense else None, kernel_mask, scale)[0]
        return output if dense.is_finite(output) else None

    return run


def _run(problem: Problem, kernel_mask: KernelMask) -> EngineOutput | None:
    """Run the kernel with pre- and postprocessing; None if a masked score might not be finite."""
    dtype = problem.query.dtype
    form = _form(problem)
    query, key = form.query, form.key
    if problem.mask is not None and form.offset is not None and float(form.offset.detach().abs().amax()) > FAR:
        return None  # hidden keys may have moved the origin
    if kernel_mask.blocks is not None and not scores_fit(query, key, problem.scale):
        return None
    value = problem.value.to(query.dtype)
    V = value.shape[-1]
    width = max(query.shape[-1], V)
    if not query.shape[-1] == key.shape[-1] == V:
        query, key, value = (pad(t, (0, width - t.shape[-1])) for t in (query, key, value))
    output, lse = _dispatch(problem, kernel_mask, query, key, value)
    if lse is not None and form.offset is not None:
        lse = lse + problem.scale * form.offset
    if dtype not in (torch.float32, torch.float64) or form.query.dtype != dtype:
        lse = None  # computed from features in another precision
    return EngineOutput((output if width == V else output[..., :V].contiguous()).to(dtype), lse)


def _form(problem: Problem) -> DotForm:
    """Return the problem as a dot product; features of narrow inputs are computed in float32 and rounded once."""
    score, dtype, wide = problem.score, problem.query.dtype, problem.compute_dtype
    if type(score).project is Score.project and type(score).as_dot is DotLike.as_dot:
        return DotForm(problem.query, problem.key)
    form = score.cast(wide).as_dot(problem.query.to(wide), problem.key.to(wide))
    if form.query.dtype != wide:
        return form
    return DotForm(form.query.to(dtype), form.key.to(dtype), form.offset)


def _dispatch(
    problem: Problem, kernel_mask: KernelMask, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    mask = problem.mask
    query, scale = _scaled(query, problem.scale)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    H, G = query.shape[1], key.shape[1]
    if kernel_mask.keys is not None:
        key, value = key[:, :, kernel_mask.keys], value[:, :, kernel_mask.keys]
    if not kernel_mask.hides:
        return _folded(query, key, value, scale, None, problem.dropout_p)
    if isinstance(mask, masks.Dense):
        same = not mask.has_bias or mask.values.dtype == query.dtype
        added = dense.matrix(mask.values, query.dtype if same else wide_dtype(query.dtype))
        if G != H and added.shape[1] == added.shape[2] == 1:
            return _folded(query, key, value, scale, added, problem.dropout_p)[0], None
        key, value = _expanded(H, key, value)
        return _kernel(query, key, value, scale, added, False, problem.dropout_p)[0], None
    key, value = _expanded(H, key, value)
    if kernel_mask.blocks is None:
        # Features may be wider than the inputs.
        made = None if kernel_mask.added is None else kernel_mask.added.to(wide_dtype(query.dtype))
        output, lse = _kernel(query, key, value, scale, made, kernel_mask.causal, problem.dropout_p)
        if lse is not None and kernel_mask.empty is not None:
            lse = lse.masked_fill(kernel_mask.empty, -torch.inf)
        return output, lse
    assert mask is not None
    plan = BlockedRun(mask, problem.extent, kernel_mask.blocks, scale, problem.wants_grad)
    return BlockedAttention.apply(plan, query, key, value, *mask.tensors())


def _scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries and a positive scale: the kernel masks before scaling, and −inf times 0 or −1 would be wrong."""
    return (query, scale) if scale > 0 else (query * scale, 1.0)


def _expanded(H: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t if t.shape[1] == H else t.repeat_interleave(H // t.shape[1], 1) for t in tensors)


def _folded(
    query: Tensor, key: Tensor, value: Tensor, scale: float, added: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor | None]:
    """Run with the query heads of each group as rows of its key head, without copying keys."""
    B, H, L, E = query.shape
    G = key.shape[1]
    output, lse = _kernel(query.reshape(B, G, H // G * L, E), key, value, scale, added, False, dropout_p)
    return output.reshape(B, H, L, E), None if lse is None else lse.reshape(B, H, L)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, added: Tensor | None, causal: bool, dropout_p: float
) -> tuple[Tensor, Tensor | None]:
    if query.device.type != "cpu" or dropout_p or query.shape[-1] == 0:
        causal = causal and added is None  # torch's function takes only one; scores of width 0 are all 0
        output = torch_attention(query, key, value, added, dropout_p, causal, scale=scale)
        return output, None
    return flash_attention(query, key, value, causal, added, scale)


def _part(
    problem: Problem, own: KernelMask, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
) -> Any:
    """Implement :meth:`Sdpa.partial_backward` for features of equal width."""
    mask, (query, scale) = problem.mask, _scaled(query, problem.scale)
    (B, H, L, E), G = query.shape, key.shape[1]
    if own.keys is not None:
        key, value = key[:, :, own.keys], value[:, :, own.keys]
    if not own.hides:  # the query heads of a group are rows of its key head
        query, output, lse = (t.reshape(B, G, H // G * L, *t.shape[3:]) for t in (query, output, lse))
        attached = _KernelPart.apply((output, lse, None, False, scale), query, key, value)
        return attached.reshape(B, H, L, E)
    key, value = _expanded(H, key, value)
    if own.blocks is not None and mask is not None:
        plan = BlockedRun(mask, problem.extent, own.blocks, scale, True, (output, lse))
        return BlockedAttention.apply(plan, query, key, value, *mask.tensors())[0]
    added = dense.matrix(mask.values, query.dtype) if isinstance(mask, masks.Dense) else own.added
    return _KernelPart.apply((output, lse, added, own.causal, scale), query, key, value)


class _SinkShare(torch.autograd.Function):
    """An output (B, H, L, V) with the derivative to the sinks' logits; ``share`` (B, H, L) are the sinks' weights."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sink: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(output, sink, share)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        output, sink, share = ctx.saved_tensors
        by_row = -share * (grad * output).sum(-1)
        return grad, by_row.sum((0, 2)).view(-1, 1, 1).sum_to_size(sink.shape), None


class _KernelPart(torch.autograd.Function):
    """A precomputed output with the derivative of torch's kernel over some of the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        precomputed: tuple[Tensor, Tensor, Tensor | None, bool, float],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        output, lse, added, ctx.causal, ctx.scale = precomputed
        ctx.added = None if added is None else added.to(query.dtype)
        lse = torch.where(lse == -torch.inf, 0.0, lse)  # the kernel's value for empty rows
        ctx.save_for_backward(query, key, value, output.detach(), lse)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = flash_attention_backward(
            grad.contiguous(), *ctx.saved_tensors, 0.0, ctx.causal, attn_mask=ctx.added, scale=ctx.scale
        )
        return None, *found


def _traced(problem: Problem) -> EngineOutput:
    """Run a traced call by torch's function, materializing the mask for a strip of queries at a time."""
    mask, extent = problem.mask, problem.extent
    if isinstance(problem.normalizer, SoftmaxSink):
        return _traced_with_sink(problem, problem.normalizer)
    if mask is None or is_causal(problem):
        if mask is not None:
            problem = replace(problem, key=problem.key[:, :, : extent.L], value=problem.value[:, :, : extent.L])
        return EngineOutput(_plain(problem, None, mask is not None))
    rows = spans(extent.L, TRACED_STRIP)
    band = mask.as_band(extent)
    if band is None:
        # Zero keys that no query sees, so that nothing leaks. In a strip of a band, every key is visible.
        visible = _any_row(problem, mask, rows)
        key, value = torch.where(visible, problem.key, 0.0), torch.where(visible, problem.value, 0.0)
        problem = replace(problem, key=key, value=value)
    outputs = []
    for span in rows:
        low, high = (None, None) if band is None else band
        first = 0 if low is None else min(max(span.start + low, 0), extent.S)
        last = extent.S if high is None else min(max(span.stop + high, first), extent.S)
        part = replace(
            problem,
            query=problem.query[:, :, span.slice],
            key=problem.key[:, :, first:last],
            value=problem.value[:, :, first:last],
        )
        added = _added(problem, mask, span, Span(first, last))
        output = _plain(part, added, False)
        if added is not None and is_exported_to_onnx():  # torch's function returns zeros for empty rows, ONNX does not
            visible = added if added.dtype == torch.bool else added > -torch.inf
            output = torch.where(visible.any(-1, keepdim=True), output, 0.0)
        outputs.append(output)
    return EngineOutput(outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2))


def _traced_with_sink(problem: Problem, normalizer: SoftmaxSink) -> EngineOutput:
    """Run a traced call with one more key, whose score is the sink's and whose value is 0."""
    mask, extent, outputs = problem.mask, problem.extent, []
    rows = spans(extent.L, TRACED_STRIP)
    if mask is not None:
        visible = _any_row(problem, mask, rows)
        key, value = torch.where(visible, problem.key, 0.0), torch.where(visible, problem.value, 0.0)
        problem = replace(problem, key=key, value=value)
    form, V = _form(problem), problem.value.shape[-1]
    key, value = _expanded(extent.H, form.key, problem.value.to(form.query.dtype))
    key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    query, scale = _scaled(form.query, problem.scale)
    wide = wide_dtype(query.dtype)
    for span in rows:
        added = None if mask is None else _added(problem, mask, span, Span(0, extent.S))
        if added is None:
            added = query.new_zeros(1, 1, dtype=wide)
        elif added.dtype == torch.bool:
            added = torch.where(added, 0.0, -torch.inf)
        added = added.to(wide)[(None,) * (4 - added.dim())]
        strip = query[:, :, span.slice]
        added = added.expand(added.shape[0], extent.H, strip.shape[2], extent.S)
        added = torch.cat((added, normalizer.logits(added).expand(*added.shape[:3], 1)), -1)
        if in_functorch():  # torch then chooses a kernel without a gradient for the sinks, whose level it does not see
            output = torch.softmax(strip.to(wide) @ key.mT.to(wide) * scale + added, -1) @ value.to(wide)
        else:
            output = torch_attention(strip, key, value, added, scale=scale)
        outputs.append(output[..., :V])
    return EngineOutput(torch.cat(outputs, 2).to(problem.query.dtype))


def _any_row(problem: Problem, mask: Mask, rows: list[Span]) -> Tensor:
    """Return which keys (B, G, S, 1) are visible to at least one query."""
    extent, seen = problem.extent, None
    B, G, S = extent.B, problem.key.shape[1], extent.S
    for span in rows:
        visible = mask.visible(*indices(problem, span, Span(0, S)))
        if visible is None:
            return torch.ones((), dtype=torch.bool, device=problem.query.device)
        some = visible.expand(torch.broadcast_shapes((B, extent.H, 1, S), visible.shape)).any(-2)
        seen = some if seen is None else seen | some
    assert seen is not None
    return seen.view(B, G, -1, S).any(2).unsqueeze(-1)


def _added(problem: Problem, mask: Mask, rows: Span, cols: Span) -> Tensor | None:
    """Materialize the mask, or its bias, for these rows and columns."""
    index = indices(problem, rows, cols)
    visible, bias = mask.visible(*index), mask.cast(problem.compute_dtype).bias(*index)
    added = None if bias is None else bias.to(problem.compute_dtype)
    if visible is not None:
        added = visible if added is None else torch.where(visible, added, -torch.inf)
    return None if added is None else added[(None,) * (2 - added.dim())]


def _plain(problem: Problem, added: Tensor | None, causal: bool) -> Tensor:
    dtype = problem.query.dtype
    form = _form(problem)
    key, value = _expanded(form.query.shape[1], form.key, problem.value.to(form.query.dtype))
    if added is not None and added.is_floating_point():
        added = added.to(wide_dtype(form.query.dtype) if added.device.type == "cpu" else form.query.dtype)
    query, scale = _scaled(form.query, problem.scale)
    output = torch_attention(query, key, value, added, problem.dropout_p, causal, scale=scale)
    return output.to(dtype)
