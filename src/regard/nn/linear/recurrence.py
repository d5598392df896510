"""Sums of outer products over time, in three equivalent forms; shared by linear attention and fast weights.

Each step updates a matrix of "fast" weights S (E, V), which queries read:

    S_t = S_{t-1} + k_tᵀ u_t        y_t = q_t S_t

where k and q are features of keys and queries, and u_t is β_t v_t (sum rule) or β_t (v_t − k_t S_{t-1}) (delta rule).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import masks
from regard._utils.constraints import OneOf, flag, lengths, size
from regard._utils.errors import described, rejected, shape
from regard._utils.tracing import autocast_cast
from regard.engines.problem import DTYPES

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


def options(function: str, feature_map: Any, form: Any, chunk: Any) -> Callable[[Tensor], Tensor]:
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
    """Return which rows (B, ..., S, C) lie within their sequence: bool, broadcasting with the rows."""
    valid_lens = lengths(function, "valid_lens", valid_lens, rows.shape[0])
    b = torch.arange(rows.shape[0], device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    kv_idx = torch.arange(rows.shape[-2], device=rows.device).unsqueeze(-1)
    visible = masks.padding(valid_lens).visible(b, b, b, kv_idx)
    assert visible is not None, "padding masks hide"
    return visible


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


def document_runs(function: str, documents: Any, key: Tensor, is_causal: bool) -> Tensor | None:
    """Check the documents, and return the index of each step's run of equal numbers, (B, L)."""
    if documents is None:
        return None
    B, length = key.shape[0], key.shape[-2]
    if (
        not isinstance(documents, Tensor)
        or documents.is_floating_point()
        or documents.shape not in ((B, length), (length,))
    ):
        expected = f"be an integer tensor (L,) or (B, L), here ({B}, {length})"
        raise rejected(function, "documents", expected, described(documents))
    if not is_causal:
        raise rejected(function, "documents", "be None in a non-causal call", shape(documents))
    documents = documents.expand(B, length)
    changes = documents[:, 1:] != documents[:, :-1]
    return torch.nn.functional.pad(changes.long().cumsum(-1), (1, 0)) if length else documents


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


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor | None,
    state: Tensor,
    *,
    form: str,
    chunk: int,
    is_causal: bool = True,
    delta: bool = False,
    runs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write values at keys and read them at queries.

    Parameters
    ----------
    query, key, value : Tensor (B, H, L, E), (B, H, S, E), (B, H, S, V)
        Features of queries and keys, and values; keys of padding are 0. S is L where causal.
    rate : Tensor (B, H, S, 1), optional
        Write strength β; None is 1.
    state : Tensor (B, H, E, V)
        The matrix before the first step.
    form, chunk
        See :func:`regard.nn.linear.attention.linear_attention`.
    is_causal : bool, default True
        Whether query t reads the writes up to step t; else every query reads all writes (sum rule only).
    delta : bool, default False
        Whether to use the delta rule rather than the sum rule.
    runs : Tensor (B, L) of int, optional
        Index of the run of each step, from 0: a query reads only the writes of its own run (causal sum rule only). The
        initial state belongs to run 0.

    Returns
    -------
    output : Tensor (B, H, L, V)
    state : Tensor (B, H, E, V)
        The matrix after the last step.
    """
    length = key.shape[-2]
    if length == 0:
        return query @ state, state
    if runs is not None:
        most = {"recurrent": 1, "parallel": length}.get(form, chunk)
        return _chunked_runs(query, key, value, state, min(most, length), runs)
    if form == "recurrent" or (form == "auto" and length == 1):
        return _recurrent(query, key, value, rate, state, is_causal, delta)
    if is_causal:
        return _chunked(query, key, value, rate, state, length if form == "parallel" else min(chunk, length), delta)
    written = value if rate is None else rate * value
    end = state + key.mT @ written
    return (query @ key.mT) @ written + query @ state if form == "parallel" else query @ end, end


def _recurrent(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor | None, state: Tensor, is_causal: bool, delta: bool
) -> tuple[Tensor, Tensor]:
    """Return output and state, one step after another."""
    found = []
    for t in range(key.shape[-2]):
        k, written = key[..., t : t + 1, :], value[..., t : t + 1, :]
        if delta:
            written = written - k @ state
        if rate is not None:
            written = rate[..., t : t + 1, :] * written
        state = state + k.mT @ written
        if is_causal:
            found.append(query[..., t : t + 1, :] @ state)
    return torch.cat(found, -2) if is_causal else query @ state, state


def _chunked(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor | None, state: Tensor, size: int, delta: bool
) -> tuple[Tensor, Tensor]:
    """Return output and state, all steps of a chunk at once: y = q S_start + (visible q kᵀ) u."""
    length = key.shape[-2]
    query, key, value = (_split(rows, size) for rows in (query, key, value))
    rate = None if rate is None else _split(rate, size)
    written = value if rate is None else rate * value
    if delta:
        states, written = _corrected(key, written, rate, state)
    else:
        states = torch.cat([state.unsqueeze(-3), state.unsqueeze(-3) + (key.mT @ written).cumsum(-3)], -3)
    scores = torch.where(_until(size, 0, key), query @ key.mT, 0.0)
    output = query @ states[..., :-1, :, :] + scores @ written
    return output.flatten(-3, -2)[..., :length, :], states[..., -1, :, :]


def _chunked_runs(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, size: int, runs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output and state with separate runs; each chunk passes on the sums of its last run."""
    runs, current, found = runs[:, None], runs.new_zeros(len(runs), 1, 1), []  # (B, 1, L), (B, 1, 1)
    for q, k, v, run in zip(*(each.split(size, -2) for each in (query, key, value)), runs.split(size, -1)):
        own = _until(k.shape[-2], 0, k) & (run.unsqueeze(-1) == run.unsqueeze(-2))  # (B, 1, C, C)
        before = torch.where((run == current).unsqueeze(-1), q @ state, 0.0)
        found.append(before + torch.where(own, q @ k.mT, 0.0) @ v)
        last = run[..., -1:]
        written = torch.where((run == last).unsqueeze(-1), k, 0.0).mT @ v
        state = torch.where((last == current).unsqueeze(-1), state, 0.0) + written
        current = last
    return torch.cat(found, -2), state


def _corrected(key: Tensor, value: Tensor, rate: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states around chunks (B, H, N + 1, E, V), and what the delta rule writes (B, H, N, C, V).

    In a chunk that starts with S, step t writes u_t = β_t (v_t − k_t S − Σ_{s<t} (k_t·k_s) u_s). In rows that is
    (I + A) U = β V − β K S, where A = β K Kᵀ below the diagonal: a triangular system. It is solved for β V and β K
    in all chunks at once, before S is known; then U = Z − W S, and only S passes from chunk to chunk.
    """
    strong = key if rate is None else rate * key
    below = torch.where(_until(key.shape[-2], -1, key), strong @ key.mT, 0.0)
    solved = torch.linalg.solve_triangular(below, torch.cat([value, strong], -1), upper=False, unitriangular=True)
    first, slopes = solved.split([value.shape[-1], key.shape[-1]], -1)
    states, written = [state], []
    for k, z, w in zip(key.unbind(-3), first.unbind(-3), slopes.unbind(-3)):
        written.append(z - w @ states[-1])
        states.append(states[-1] + k.mT @ written[-1])
    return torch.stack(states, -3), torch.stack(written, -3)


def _split(rows: Tensor, size: int) -> Tensor:
    """Return rows (B, H, L, C) as chunks (B, H, N, size, C), the last one filled up with zeros."""
    missing = -rows.shape[-2] % size
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    return padded.unflatten(-2, (-1, size))


def _until(size: int, offset: int, like: Tensor) -> Tensor:
    """Return (size, size), True where a key comes at most ``offset`` after the query."""
    index = torch.arange(size, device=like.device)
    visible = masks.causal(offset=offset).visible(index, index, index.unsqueeze(-1), index)
    assert visible is not None, "a causal mask always answers"
    return visible
