"""One recurrence for linear attention, fast weights and their gated descendants, in equivalent forms.

Each step lets a matrix S (K, V) decay, writes to it and reads it:

    S_t = diag(d_t) S_{t-1} + k_tᵀ u_t        y_t = q_t S_t

where u_t is β_t v_t (sum rule) or β_t (v_t − k_t diag(d_t) S_{t-1}) (delta rule).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import masks
from regard._utils.constraints import OneOf, flag, lengths, size
from regard._utils.errors import described, rejected, shape
from regard._utils.torch_private import scan
from regard._utils.tracing import autocast_cast, is_exported_to_onnx, is_symbolic, values_unavailable
from regard.engines.dense import is_finite
from regard.engines.problem import DTYPES
from regard.masks.base import Extent
from regard.masks.documents import Documents, Packed
from regard.nn.linear import gpu, kernels
from regard.nn.linear.steps import Steps

#: A name in :data:`FEATURES`, or a function from (..., E) to (..., F).
FeatureMap = str | Callable[[Tensor], Tensor]

#: Algorithms for the recurrence.
FORMS = ("auto", "parallel", "chunked", "recurrent")


class LinearState(NamedTuple):
    """The state of linear attention or of a fast-weight layer after the steps so far.

    It is a tuple of tensors: pass it as ``state=`` to continue a sequence, or None to start a new one. To make it
    loadable by ``torch.load`` with ``weights_only=True``, save ``tuple(state)``; a plain pair is also a valid state.

    Attributes
    ----------
    matrix : Tensor (B, H, E, V)
        The sum of φ(k)ᵀ u. In float32 for 16-bit inputs, so that splitting a sequence does not lose precision.
    normalizer : Tensor (B, H, E), or None
        The sum of φ(k), if outputs are normalized.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.linear.attention import linear_attention
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4).unbind(0)
    >>> whole = linear_attention(q, k, v, is_causal=True)
    >>> ends, state = [], None
    >>> for part in zip(q.split(4, -2), k.split(4, -2), v.split(4, -2)):
    ...     end, state = linear_attention(*part, is_causal=True, state=state, return_state=True)
    ...     ends.append(end)
    >>> torch.allclose(torch.cat(ends, -2), whole, atol=1e-6)
    True
    """

    matrix: Tensor
    normalizer: Tensor | None = None

    def detach(self) -> LinearState:
        """Detach the state from the graph, for truncated backpropagation through time."""
        return LinearState(self.matrix.detach(), None if self.normalizer is None else self.normalizer.detach())


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1 > 0, as e^x for negative x, which adding 1 would round."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def identity(x: Tensor) -> Tensor:
    """Return x."""
    return x


#: Feature maps by name.
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu_plus_one, "relu": torch.relu, "identity": identity}


def check_options(function: str, feature_map: Any, form: Any, chunk: Any) -> Callable[[Tensor], Tensor]:
    """Check the three options, and return the feature map as a function."""
    if not isinstance(feature_map, str) and not callable(feature_map):
        raise rejected(function, "feature_map", "be a name or a function", described(feature_map), TypeError)
    if isinstance(feature_map, str):
        OneOf(FEATURES)(function, "feature_map", feature_map)
    OneOf(FORMS)(function, "form", form)
    size(function, "chunk", chunk)
    return FEATURES[feature_map] if isinstance(feature_map, str) else feature_map


def inputs(function: str, query: Any, key: Any, value: Any, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Check queries, keys and values, and return them in autocast's dtype if it is on."""
    flag(function, "is_causal", is_causal)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            raise rejected(function, name, "be a float tensor (B, H, length, width)", described(tensor), TypeError)
        if tensor.dim() != 4:
            raise rejected(function, name, "have shape (B, H, length, width)", shape(tensor))
        if tensor.device != query.device:
            raise rejected(function, name, f"be on query's device {query.device}", tensor.device)
        if tensor.shape[:2] != query.shape[:2]:
            came = f"{tuple(tensor.shape[:2])} (query {shape(query)}, {name} {shape(tensor)})"
            raise rejected(function, name, f"have query's batch and heads {tuple(query.shape[:2])}", came)
    # Messages are formatted only when raised: under torch.compile, formatting a symbolic size specializes it.
    if key.shape[-1] != query.shape[-1]:
        came = f"{key.shape[-1]} (query {shape(query)}, key {shape(key)})"
        raise rejected(function, "key", f"have query's head width {query.shape[-1]}", came)
    if is_causal and key.shape[-2] != query.shape[-2]:
        expected = f"have query's length {query.shape[-2]}, one key for each query of a causal call"
        came = f"{key.shape[-2]} (query {shape(query)}, key {shape(key)})"
        raise rejected(function, "key", expected, came)
    if value.shape[-2] != key.shape[-2]:
        came = f"{value.shape[-2]} (key {shape(key)}, value {shape(value)})"
        raise rejected(function, "value", f"have key's length {key.shape[-2]}", came)
    query, key, value = autocast_cast(query, key, value)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise rejected(function, name, f"have query's dtype {query.dtype}", tensor.dtype, TypeError)
    return query, key, value


def zero_padding(
    function: str, query: Tensor, key: Tensor, value: Tensor, valid_lens: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors in the dtype of the sums, with zeros in padding, and which keys are valid."""
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if valid_lens is None:
        return query, key, value, None
    real = real_rows(function, valid_lens, key)
    return query, torch.where(real, key, 0.0), torch.where(real, value, 0.0), real


def real_rows(function: str, valid_lens: Any, rows: Tensor) -> Tensor:
    """Return which rows (B, ..., S, C) lie within their sequence: bool (B, 1, ..., S, 1)."""
    valid_lens = lengths(function, "valid_lens", valid_lens, rows.shape[0], rows.shape[-2])
    b = torch.arange(rows.shape[0], device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    kv_idx = torch.arange(rows.shape[-2], device=rows.device).unsqueeze(-1)
    visible = masks.padding(valid_lens).visible(b, b, b, kv_idx)
    assert visible is not None, "padding masks hide"
    return visible.expand(*b.shape[:-2], *kv_idx.shape)  # that of a single sequence does not follow b


def features(
    function: str, feature_map: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, real: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the features of queries and of keys; those of keys that are not ``real`` are 0."""
    found = []
    for rows in (query, key):
        mapped = feature_map(rows)
        if not isinstance(mapped, Tensor) or mapped.shape[:-1] != rows.shape[:-1] or mapped.dtype != rows.dtype:
            expected = f"return a {rows.dtype} tensor (..., F) for an input of shape {shape(rows)}"
            raise rejected(function, "feature_map", expected, described(mapped))
        found.append(mapped)
    # A zeroed key need not have zero features: elu(0) + 1 = 1.
    return found[0], found[1] if real is None else torch.where(real, found[1], 0.0)


def document_starts(function: str, documents: Any, key: Tensor) -> Tensor | None:
    """Check the documents, and return the steps (B, L) with which one begins, except for the first of a sequence."""
    if documents is None:
        return None
    B, length = key.shape[0], key.shape[-2]
    if isinstance(documents, Documents) and documents.kv_ids is None:
        documents = documents.ids
    elif isinstance(documents, Packed) and documents.cu_kv is None and documents.window is None:
        documents.fit(Extent(B, 1, length, length), key.device)
        cu = documents.cu_q.to(key.device)
        documents = torch.bucketize(torch.arange(length, device=key.device, dtype=cu.dtype), cu[1:], right=True)
    if (
        not isinstance(documents, Tensor)
        or documents.is_floating_point()
        or documents.shape not in ((B, length), (length,))
    ):
        expected = f"be an integer tensor (L,) or (B, L), here ({B}, {length})"
        raise rejected(function, "documents", expected, described(documents))
    documents = documents.expand(B, length)
    return torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0)) if length else documents.bool()


def initial(function: str, state: Any, key: Tensor, value: Tensor, normalized: bool) -> LinearState:
    """Check the initial state against the features of keys and values, and return it; zeros for None."""
    *lead, _, E = key.shape
    sizes = (*lead, E, value.shape[-1])
    if state is None:
        return LinearState(key.new_zeros(sizes), key.new_zeros(sizes[:-1]) if normalized else None)
    if not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[0], Tensor):
        expected = "be a LinearState, or a pair (matrix, normalizer)"
        raise rejected(function, "state", expected, described(state), TypeError)
    matrix, normalizer = state
    if matrix.shape != sizes:
        raise rejected(function, "state", f"hold a matrix (B, H, E, V) = {sizes}", shape(matrix))
    if not normalized:
        if normalizer is not None:
            raise rejected(function, "state", "hold no normalizer: this call does not normalize", described(normalizer))
        return LinearState(matrix.to(key.dtype))
    if not isinstance(normalizer, Tensor) or normalizer.shape != sizes[:-1]:
        raise rejected(function, "state", f"hold a normalizer (B, H, E) = {sizes[:-1]}", described(normalizer))
    return LinearState(matrix.to(key.dtype), normalizer.to(key.dtype))


# The recurrence -------------------------------------------------------------------------------------------------------
# Dimensions: B batch, H heads of values, G of keys, R = H / G of them a group; N chunks of C steps; K, V widths.


def recurrence(
    steps: Steps, state: Tensor | None, *, form: str, chunk: int, function: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, L, V), and the state (B, H, K, V) after the last step; None is zeros before the first.

    The forms are those of :func:`regard.nn.gated_recurrence`. ``function`` is the name under which decays and rates out
    of range are reported; None leaves them unchecked.
    """
    output, end = _computed(steps, state, form, chunk, function)
    if steps.key.shape[-2] > 1 and form != "recurrent" and _may_have_spread(steps, output, end):
        # The chunk of a row that is not finite multiplies it by zeros. Steps one after another know what came before.
        with torch.no_grad():
            right = _recurrent(steps, _start(steps, state))
        output, end = (_Replaced.apply(*pair) for pair in zip((output, end), right))
    return output, end


class _Replaced(torch.autograd.Function):
    """The second tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:  # noqa: ARG004
        return second

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Tensor | None) -> Tensor:  # noqa: ARG004
        return tangent


def _computed(steps: Steps, state: Tensor | None, form: str, chunk: int, function: str | None) -> tuple[Tensor, Tensor]:
    length = steps.key.shape[-2]
    if form == "auto" and kernels.applies(steps, state):
        output, end, in_range = kernels.run(steps, state, _formula)
        if function is not None and not in_range:
            check_ranges(function, steps)
        return output, end
    if form == "auto" and gpu.applies(steps.query, steps.key, steps.value, steps.erase, steps.bonus):
        return gpu.run(steps, state, _formula)
    if function is not None:
        check_ranges(function, steps)
    state = _start(steps, state)
    if length == 0:
        return steps.value.clone(), state
    if form == "recurrent" or (form == "auto" and length == 1):
        return _recurrent(steps, state)
    # An exported program cannot loop over chunks whose number it does not know.
    whole = form == "parallel" or is_symbolic(length)
    return _chunked(steps, state, length if whole else min(chunk, length))


def _start(steps: Steps, state: Tensor | None) -> Tensor:
    """Return the state before the first step."""
    if state is not None:
        return state
    return steps.key.new_zeros(*steps.value.shape[:2], steps.key.shape[-1], steps.value.shape[-1])


def _may_have_spread(steps: Steps, output: Tensor, end: Tensor) -> bool:
    """Return whether a row of a CPU call was not finite: then neither is a state, nor what its document reads."""
    if not steps.key.is_cpu or values_unavailable(output):
        return False
    forgets = steps.resets is not None or (steps.log_decay is not None and not is_finite(steps.log_decay))
    seen = (end, output) if forgets else (end,)
    return not all(is_finite(each) or bool(each.isfinite().all()) for each in seen)


#: Write strengths of the delta rule: beyond 2, a step makes what a unit key reads larger instead of smaller.
_MOST = 2.0


def check_ranges(function: str, steps: Steps) -> None:
    """Check that no decay is above 1, and the rates of the delta rule, where values can be read."""
    if not steps.key.is_cpu or values_unavailable(steps.key):
        return
    if steps.log_decay is not None and bool((steps.log_decay > 0).any()):
        raise rejected(function, "log_decay", "be at most 0", steps.log_decay.nan_to_num(0.0).amax().item())
    if steps.rate is not None and steps.delta and bool(((steps.rate < 0) | (steps.rate > _MOST)).any()):
        low, high = (x.item() for x in steps.rate.nan_to_num(0.0).aminmax())
        raise rejected(function, "rate", f"be in [0, {_MOST:g}] with the delta rule", low if low < 0 else high)


def _formula(steps: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and state by chunks of a length that suits most machines."""
    return _chunked(steps, state, min(64, steps.key.shape[-2]))


class _Groups(NamedTuple):
    """The tensors of :class:`Steps` in the groups of heads that share a key: (B, G, 1 or R, L, ...)."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None
    rate: Tensor | None
    erase: tuple[Tensor, Tensor] | None
    bonus: Tensor | None
    resets: Tensor | None
    reader: Tensor

    @classmethod
    def of(cls, steps: Steps) -> _Groups:
        G = steps.key.shape[1]

        def split(heads: Tensor, dim: int = 1) -> Tensor:
            return heads.unflatten(dim, (G, heads.shape[dim] // max(G, 1)))

        decay = steps.decay()
        return cls(
            split(steps.query if steps.scale == 1.0 else steps.scale * steps.query),
            split(steps.key),
            split(steps.value),
            None if decay is None else split(decay),
            None if steps.rate is None else split(steps.rate),
            None if steps.erase is None else (split(steps.erase[0]), split(steps.erase[1])),
            None if steps.bonus is None else split(steps.bonus, 0).unsqueeze(-2),
            None if steps.resets is None else steps.resets[:, None, None, :, None],
            split(steps.key if steps.reader is None else steps.reader),
        )


def _recurrent(steps: Steps, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and state, one step after another."""
    groups, length, found = _Groups.of(steps), steps.key.shape[-2], []

    def by_step(rows: Tensor | None) -> Sequence[Any]:
        return [None] * length if rows is None else rows.split(1, -2)

    state = state.unflatten(1, groups.value.shape[1:3])
    erased = groups.erase or (None, None)
    tensors = (*groups[:5], *erased, groups.resets, groups.reader)
    for q, k, v, g, rate, a, e, reset, reader in zip(*map(by_step, tensors)):
        before = state if reset is None else torch.where(reset, 0.0, state)
        kept = before if g is None else torch.where(g.mT == -torch.inf, 0.0, before * g.exp().mT)
        written = v - reader @ kept if steps.delta else v
        written = written if rate is None else rate * written
        state = kept + k.mT @ written
        if a is not None:
            state = state - a.mT @ (e @ before)
        if groups.bonus is None:
            found.append(q @ state)
        else:
            found.append(q @ before + (q * groups.bonus * k).sum(-1, keepdim=True) * written)
    return torch.cat(found, -2).flatten(1, 2), state.flatten(1, 2)


def _chunked(steps: Steps, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return outputs and state, all steps of a chunk at once.

    In a chunk that starts with S, a row that the delta rule writes depends on those before it: u_t = β_t (v_t − k_t S −
    Σ_{s<t} (k_t·k_s) u_s), decays left out. In rows that is (I + A) U = β V − β K S, where A is β K Kᵀ below the
    diagonal: a triangular system, which is solved for β V and β K in all chunks at once, before S is known. Then
    U = X + Y S, and only S passes from chunk to chunk. What an erasing step reads is found in the same way.
    """
    groups, length = _Groups.of(steps), steps.key.shape[-2]
    q, k, v = (_split(rows, size) for rows in (groups.query, groups.key, groups.value))
    rate = None if groups.rate is None else _split(groups.rate, size)
    decay = Decay(*(None if rows is None else _split(rows, size) for rows in (groups.log_decay, groups.resets)))
    v = v if rate is None else rate * v
    sums, writer, own, slopes = None, k, None, None
    if steps.delta:
        reader = k if steps.reader is None else _split(groups.reader, size)
        below, strong = decay.scores(reader, k, strict=True), decay.from_start(reader)
        below, strong = (below, strong) if rate is None else (rate * below, rate * strong)
        own, slopes = _solved(below, v, -strong)
    else:
        sums = decay.to_end(k).mT @ v
        if groups.erase is not None:
            writer, e = (_split(rows, size) for rows in groups.erase)
            below, seen = (decay.scores(e, rows, before=True) for rows in (writer, k))
            own, slopes = _solved(below, -(seen @ v), -decay.from_start(e, before=True))
    states, end, written = _scan(state.unflatten(1, groups.value.shape[1:3]), sums, decay, writer, own, slopes)
    before = groups.bonus is not None
    output = decay.from_start(q, before=before) @ states
    if sums is not None:
        output = output + decay.scores(q, k, before=before) @ v
    if written is not None:
        output = output + decay.scores(q, writer, before=before) @ written
    if groups.bonus is not None:
        output = output + (q * groups.bonus.unsqueeze(-2) * k).sum(-1, keepdim=True) * v
    return output.flatten(-3, -2)[..., :length, :].flatten(1, 2), end.flatten(1, 2)


def _scan(
    state: Tensor, sums: Tensor | None, decay: Decay, writer: Tensor, own: Tensor | None, slopes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the states before chunks (..., N, K, V), the one after the last, and the rows U = X + Y S or None.

    ``sums`` is what a chunk writes of itself; ``own`` and ``slopes`` are X and Y, and ``writer`` the keys under which U
    is written.
    """
    if own is None and decay.total is None:
        assert sums is not None
        states = torch.cat([state.unsqueeze(-3), state.unsqueeze(-3) + sums.cumsum(-3)], -3)
        return states[..., :-1, :, :], states[..., -1, :, :], None
    some = own if sums is None else sums
    assert some is not None
    count = some.shape[-3]

    def by_chunk(tensor: Tensor | None) -> Sequence[Any]:
        return [None] * count if tensor is None else tensor.unbind(-3)

    ends = None if own is None else decay.to_end(writer).mT
    passed: list[Tensor] = [state]
    written: list[Tensor] = []
    for s, kept, k, x, y in zip(*map(by_chunk, (sums, decay.whole, ends, own, slopes))):
        following = passed[-1] if kept is None else kept * passed[-1]
        following = following if s is None else following + s
        if x is not None:
            written.append(x + y @ passed[-1])
            following = following + k @ written[-1]
        passed.append(following)
    return torch.stack(passed[:-1], -3), passed[-1], torch.stack(written, -3) if written else None


def _solved(below: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return (I + below)⁻¹ times two matrices."""
    second = second.expand(*first.shape[:-1], -1)
    solved = substituted(below, torch.cat([first, second], -1))
    return solved[..., : first.shape[-1]], solved[..., first.shape[-1] :]


def substituted(below: Tensor, right: Tensor) -> Tensor:
    """Return ``(I + below)⁻¹ right`` by substitution: powers of ``below`` would grow without bound.

    Parameters
    ----------
    below : Tensor (..., C, C)
        Zeros on and above the diagonal.
    right : Tensor (..., C, W)
    """
    if not is_exported_to_onnx():
        return torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    below, right = below.detach(), right.detach()  # ONNX has no gradient, and that of a scan cannot be exported
    size = below.shape[-1]

    def step(solved: Tensor, row: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weights, sums, place = row
        new = sums - (weights.unsqueeze(-2) @ solved).squeeze(-2)
        return solved + place.unsqueeze(-1) * new.unsqueeze(-2), new.clone()

    places = torch.eye(size, dtype=right.dtype, device=right.device).expand(*below.shape[:-2], size, size)
    solved: Tensor = scan(step, torch.zeros_like(right), (below, right, places), below.dim() - 2)
    return solved


#: Steps of a block in which decays of channels are multiplied pair by pair.
_BLOCK = 16
#: The logarithm of a decay that is 0 in every dtype.
_NOTHING = -1000.0


class Decay:
    """The decays within chunks, exponentials of differences of summed logarithms: none is divided by another.

    The sums are kept in float64, as a strong decay would round those that come after it.

    Parameters
    ----------
    log_decay : Tensor (..., N, C, 1 or K), optional
    resets : Tensor (..., N, C, 1), optional
        The steps before which the state is set to 0; their decay is 0, too.
    """

    def __init__(self, log_decay: Tensor | None, resets: Tensor | None) -> None:
        self.total: Tensor | None = None
        self.before: Tensor | None = None
        self.whole: Tensor | None = None
        if log_decay is None:
            return
        wide = torch.float32 if log_decay.device.type == "mps" else torch.float64
        self.total = total = log_decay.clamp(min=_NOTHING).to(wide).cumsum(-2)
        earlier = torch.nn.functional.pad(total[..., :-1, :], (0, 0, 1, 0))
        self.before = earlier if resets is None else torch.where(resets, total, earlier)
        self.whole = total[..., -1:, :].to(log_decay.dtype).exp().mT

    def from_start(self, rows: Tensor, *, before: bool = False) -> Tensor:
        """Return rows times the decay from the start of their chunk to their step, or until before it."""
        total = self.before if before else self.total
        return rows if total is None else rows * total.to(rows.dtype).exp()

    def to_end(self, rows: Tensor) -> Tensor:
        """Return rows times the decay from behind their step to the end of their chunk."""
        total = self.total
        return rows if total is None else rows * (total[..., -1:, :] - total).to(rows.dtype).exp()

    def scores(self, rows: Tensor, columns: Tensor, *, strict: bool = False, before: bool = False) -> Tensor:
        """Return the products (..., C, C) of rows with the columns up to them, times the decay in between.

        ``strict`` leaves out a row's own column. So does ``before``, and the decay of the row's own step with it.
        """
        size = rows.shape[-2]
        offset = -1 if strict or before else 0
        visible = _until(size, offset, rows)
        total, at = self.total, self.before if before else self.total
        if total is None or at is None:
            return torch.where(visible, rows @ columns.mT, 0.0)
        if total.shape[-1] == 1:
            factors = torch.where(visible, at - total.mT, -torch.inf).to(rows.dtype).exp()
            return torch.where(visible, (rows @ columns.mT) * factors, 0.0)
        if is_symbolic(size):
            return self._scores_at_once(rows, columns, at, offset)
        parts = []
        for first in range(0, size, _BLOCK):
            own = slice(first, first + _BLOCK)
            differences = at[..., own, :].unsqueeze(-2) - total[..., own, :].unsqueeze(-3)
            near = torch.where(visible[own, own].unsqueeze(-1), differences, -torch.inf).to(rows.dtype).exp()
            part = (rows[..., own, :].unsqueeze(-2) * near * columns[..., own, :].unsqueeze(-3)).sum(-1)
            if first:
                # Decays from a column to the block's start, and from there to the row: neither can overflow.
                start, earlier = total[..., first - 1 : first, :], slice(0, first)
                late = rows[..., own, :] * (at[..., own, :] - start).to(rows.dtype).exp()
                early = columns[..., earlier, :] * (start - total[..., earlier, :]).to(rows.dtype).exp()
                part = torch.cat([late @ early.mT, part], -1)
            parts.append(torch.nn.functional.pad(part, (0, size - part.shape[-1])))
        return torch.cat(parts, -2)

    def _scores_at_once(self, rows: Tensor, columns: Tensor, at: Tensor, offset: int) -> Tensor:
        """Return the scores with decays of channels, without a loop over blocks: their number is not known.

        It takes more time and memory than the loop, which leaves out the columns after each block.
        """
        assert self.total is not None
        size, total = rows.shape[-2], self.total
        place = torch.arange((size + _BLOCK - 1) // _BLOCK * _BLOCK, device=rows.device)  # ONNX rounds −size // 16 to 0
        kept = place.clamp(max=size - 1)  # rows that fill the last block repeat the last row
        block_rows, at, near_total, near_columns = (
            each.index_select(-2, kept).unflatten(-2, (-1, _BLOCK)) for each in (rows, at, total, columns)
        )
        blocks = place.view(-1, _BLOCK)
        seen = blocks.unsqueeze(-2) <= blocks.unsqueeze(-1) + offset
        differences = torch.where(seen.unsqueeze(-1), at.unsqueeze(-2) - near_total.unsqueeze(-3), -torch.inf)
        near = (block_rows.unsqueeze(-2) * differences.to(rows.dtype).exp() * near_columns.unsqueeze(-3)).sum(-1)
        start = torch.nn.functional.pad(near_total[..., :-1, -1:, :], (0, 0, 0, 0, 1, 0))
        late = block_rows * (at - start).to(rows.dtype).exp()
        gaps = torch.where((place[:size] < blocks[:, :1]).unsqueeze(-1), start - total.unsqueeze(-3), -torch.inf)
        far = late @ (columns.unsqueeze(-3) * gaps.to(rows.dtype).exp()).mT  # (..., blocks, 16, size)
        block = torch.arange(blocks.shape[0], device=rows.device)
        own = (block == block.unsqueeze(-1))[:, None, :, None]
        placed = torch.where(own, near.unsqueeze(-2), 0.0).flatten(-2)
        return (far + placed[..., :size]).flatten(-3, -2)[..., :size, :]


def _split(rows: Tensor, size: int) -> Tensor:
    """Return rows (..., L, C) as chunks (..., N, size, C), the last one filled up with zeros."""
    missing = -rows.shape[-2] % size
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    return padded.unflatten(-2, (-1, size))


def _until(size: int, offset: int, like: Tensor) -> Tensor:
    """Return (size, size), True where a key comes at most ``offset`` after the query."""
    index = torch.arange(size, device=like.device)
    visible = masks.causal(offset=offset).visible(index, index, index.unsqueeze(-1), index)
    assert visible is not None, "a causal mask always answers"
    return visible
