"""Gated recurrences: a matrix that decays, is written to and is read at every step."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from regard._utils.constraints import Number, OneOf, TensorOf, flag, size
from regard._utils.errors import described, rejected, shape
from regard._utils.tracing import autocast_cast, autocast_suspended
from regard.engines.problem import DTYPES
from regard.masks.base import Mask
from regard.nn.linear import gpu, kernels
from regard.nn.linear.operator import recur
from regard.nn.linear.recurrence import FORMS, document_starts, real_rows
from regard.nn.linear.steps import Steps

_NAME = "gated_recurrence"
#: Constraints, made once: a step of decoding checks its arguments, too.
_FORM, _SCALE = OneOf(FORMS), Number()
#: What steps of decoding have run before, by the structure of the call: checked already, they only run again.
_PLANS: dict[tuple[Any, ...], kernels.StepPlan] = {}
_MOST_PLANS = 64


@overload
def gated_recurrence(query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor | None = ..., rate: Tensor | None = ..., erase: tuple[Tensor, Tensor] | None = ..., delta: bool = ..., bonus: Tensor | None = ..., scale: float | None = ..., state: Tensor | None = ..., return_state: Literal[False] = ..., valid_lens: Tensor | None = ..., documents: Tensor | Mask | None = ..., form: str = ..., chunk: int = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
@overload
def gated_recurrence(query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor | None = ..., rate: Tensor | None = ..., erase: tuple[Tensor, Tensor] | None = ..., delta: bool = ..., bonus: Tensor | None = ..., scale: float | None = ..., state: Tensor | None = ..., return_state: Literal[True], valid_lens: Tensor | None = ..., documents: Tensor | Mask | None = ..., form: str = ..., chunk: int = ...) -> tuple[Tensor, Tensor]: ...  # noqa: E501  # fmt: skip
def gated_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    rate: Tensor | None = None,
    erase: tuple[Tensor, Tensor] | None = None,
    delta: bool = False,
    bonus: Tensor | None = None,
    scale: float | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    valid_lens: Tensor | None = None,
    documents: Tensor | Mask | None = None,
    form: str = "auto",
    chunk: int = 64,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let a matrix S (K, V) decay, write to it and read it at every step: ``y_t = scale · q_t S_t``.

    With D = exp(log_decay), a number or a column of K numbers, and the write strength β = ``rate``:

    * sum rule: ``S_t = D_t S_{t-1} + β_t k_tᵀ v_t``;
    * delta rule: ``S_t = D_t S_{t-1} + β_t k_tᵀ (v_t − k_t D_t S_{t-1})``, which replaces what is stored under the key;
    * erase = (a, e): ``S_t = D_t S_{t-1} − a_tᵀ (e_t S_{t-1}) + β_t k_tᵀ v_t``. It reads the state before the decay;
      pass e · exp(log_decay) to read the decayed one. With a = β k and e = k · exp(log_decay) it is the delta rule.

    These are linear attention, retention (Sun 2023, arXiv 2307.08621), gated linear attention (Yang 2024, arXiv
    2312.06635), Mamba-2 (Dao 2024, arXiv 2405.21060), RWKV-6 and 7 (Peng 2024, arXiv 2404.05892; 2025, arXiv
    2503.14456), DeltaNet (Yang 2024, arXiv 2406.06484), Gated DeltaNet (Yang 2025, arXiv 2412.06464) and Kimi Delta
    Attention (2025, arXiv 2510.26692).

    Parameters
    ----------
    query : Tensor (B, G, L, K) or (B, H, L, K)
    key : Tensor (B, G, L, K)
        Head h of the values has the query and key of head ``h // (H/G)``.
    value : Tensor (B, H, L, V)
        H is a multiple of G.
    log_decay : Tensor (B, H, L) or (B, H, L, K), optional
        Logarithm of the decay of each step, at most 0, for all rows of S or for each; −inf forgets everything. None is
        no decay.
    rate : Tensor (B, H, L), optional
        Write strength β; None is 1. With the delta rule it must be in [0, 2].
    erase : pair of Tensor (B, H, L, K), optional
        a and e; not together with ``delta``.
    delta : bool, default False
        Whether to use the delta rule. It needs keys of norm 1 or less to be stable.
    bonus : Tensor (H, K), optional
        u of RWKV-6: then a step reads before it writes, ``y_t = scale · q_t (S_{t-1} + β_t diag(u) k_tᵀ v_t)``.
    scale : float, optional
        Default 1/√K.
    state : Tensor (B, H, K, V), optional
        S before the first step; None is zeros.
    return_state : bool, default False
        Whether to also return S after the last step.
    valid_lens : Tensor (B,) of int, optional
        Number of valid steps per sequence; later steps neither decay nor write, and their output is 0.
    documents : Tensor (L,) or (B, L) of int, or Mask, optional
        Document of each step: runs of equal numbers, each of which starts with S = 0. For one packed sequence also
        ``masks.from_cu_seqlens(cu)``. An initial state belongs to the first document, the returned one to the last.
    form : {"auto", "parallel", "chunked", "recurrent"}, default "auto"
        The algorithm; all agree up to rounding. "recurrent" is a loop over steps, O(L·K·V). "chunked" loops over
        chunks, O(L·(K·V + chunk·(K + V))); "parallel" is one chunk. "auto" is a compiled kernel where one applies,
        outside of ``torch.func``: on the CPU, also under ``torch.compile``, with ``erase`` if no ``log_decay`` is below
        −20; on GPUs in eager mode, for more than 4 steps without ``erase`` and ``bonus``, flash-linear-attention's for
        16-bit inputs if that package is installed (K ≤ 256, no ``documents``), else our own (K ≤ 128, any dtype but
        float64) on devices where they were measured. Elsewhere "auto" is "recurrent" for one step and "chunked"
        otherwise; in a program that ``torch.export`` makes for any length, "parallel".
    chunk : int, default 64
        Length of a chunk; it need not divide L. The kernel has chunks of its own.

    Returns
    -------
    output : Tensor (B, H, L, V)
        In query's dtype.
    state : Tensor (B, H, K, V)
        Only if requested; in float32 for 16-bit inputs, so that splitting a sequence does not lose precision.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, the expected value and the actual one. On devices
        other than the CPU, and under compilers and transforms, values of ``log_decay`` and ``rate`` are not checked.

    Notes
    -----
    Inputs in float16 and bfloat16 are summed in float32; flash-linear-attention rounds some sums to 16 bits. On GPUs
    float32 is multiplied as TF32 only if ``torch.backends.cuda.matmul`` allows it. Decays are only multiplied, never
    divided by each other, so strong ones do not overflow. A row that is not finite affects only later steps of its
    document: a call on a CPU runs again, step by step, if its state is not finite. Its gradients may not be finite
    either. On GPUs and under transforms, such a row also affects earlier steps of its chunk.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import gated_recurrence
    >>> key, value = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    >>> half = torch.full((1, 1, 3), 0.5)
    >>> gated_recurrence(key, key, value, log_decay=half.log()).flatten()  # a half, and the new value
    tensor([1.0000, 2.5000, 5.2500])
    >>> gated_recurrence(key, key, value, rate=half, delta=True).flatten()  # half of the way to the new value
    tensor([0.5000, 1.2500, 2.6250])

    Step by step, as in decoding:

    >>> q, k, v, state = *torch.randn(3, 2, 4, 6, 8).unbind(0), None
    >>> for t in range(6):
    ...     now = (x[:, :, t : t + 1] for x in (q, k, v))
    ...     y, state = gated_recurrence(*now, state=state, return_state=True)
    >>> torch.allclose(y, gated_recurrence(q, k, v)[:, :, -1:], atol=1e-5)
    True
    """
    structure = None
    if erase is None and bonus is None and valid_lens is None and documents is None:
        structure = kernels.structure_of(query, key, value, log_decay, rate, state, delta, scale, form, chunk)
    if structure is not None and (plan := _PLANS.get(structure)) is not None:
        output, end, in_range = plan(query, key, value, log_decay, rate, state)
        if in_range:
            return (output, end) if return_state else output
    _FORM(_NAME, "form", form)
    size(_NAME, "chunk", chunk)
    flag(_NAME, "delta", delta)
    query, key, value = _inputs(query, key, value)
    (B, H, _, V), K, dtype = value.shape, key.shape[-1], query.dtype
    log_decay, rate, erase, bonus = _gates(log_decay, rate, erase, bonus, delta, key, H)
    scale = max(K, 1) ** -0.5 if scale is None else _SCALE(_NAME, "scale", scale)
    wide = torch.promote_types(dtype, torch.float32)
    rows = dtype if form == "auto" and gpu.applies(query, key, value, erase, bonus) else wide
    if state is not None:
        state = _shaped("state", state, query, (B, H, K, V)).to(wide)
    with autocast_suspended(query.device.type):
        steps = Steps(
            query.to(rows),
            key.to(rows),
            value.to(rows),
            None if log_decay is None else log_decay.to(wide),
            None if rate is None else rate.to(wide),
            None if erase is None else (erase[0].to(wide), erase[1].to(wide)),
            None if bonus is None else bonus.to(wide),
            document_starts(_NAME, documents, key),
            delta,
            scale,
        )
        if valid_lens is not None:
            steps = _without_padding(steps, real_rows(_NAME, valid_lens, key))
        output, end = recur(steps, state, form=form, chunk=chunk, function=_NAME)
    if structure is not None and form == "auto" and kernels.applies(steps, state):
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[structure] = kernels.StepPlan(steps, state)
    output = output.to(dtype)
    return (output, end) if return_state else output


def _inputs(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Check queries, keys and values, and return them in autocast's dtype if it is on."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            raise rejected(_NAME, name, "be a float tensor (B, H, L, width)", described(tensor), TypeError)
        if tensor.dim() != 4:
            raise rejected(_NAME, name, "have shape (B, H, L, width)", shape(tensor))
        if tensor.device != query.device:
            raise rejected(_NAME, name, f"be on query's device {query.device}", tensor.device)
        if tensor.shape[0] != query.shape[0] or tensor.shape[2] != query.shape[2]:
            came = f"{shape(tensor)} (query {shape(query)})"
            raise rejected(_NAME, name, "have query's batch and length", came)
    # Messages are formatted only when raised: under torch.compile, formatting a symbolic size specializes it.
    H, G = value.shape[1], key.shape[1]
    if H % G if G else H:
        raise rejected(_NAME, "value", f"have a multiple of key's {G} heads", H)
    if query.shape[1] not in (G, H):
        raise rejected(_NAME, "query", f"have as many heads as key or value, {G} or {H}", query.shape[1])
    if key.shape[-1] != query.shape[-1]:
        came = f"{key.shape[-1]} (query {shape(query)}, key {shape(key)})"
        raise rejected(_NAME, "key", f"have query's head width {query.shape[-1]}", came)
    query, key, value = autocast_cast(query, key, value)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise rejected(_NAME, name, f"have query's dtype {query.dtype}", tensor.dtype, TypeError)
    return query, key, value


def _shaped(name: str, tensor: Any, like: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """Return a float tensor of one of these shapes on the device of ``like``, or raise."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.shape not in shapes:
        tensor = TensorOf(*shapes)(_NAME, name, tensor)
    if tensor.device != like.device:
        raise rejected(_NAME, name, f"be on query's device {like.device}", tensor.device)
    found: Tensor = tensor
    return found


def _gates(
    log_decay: Any, rate: Any, erase: Any, bonus: Any, delta: bool, key: Tensor, heads: int
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None, Tensor | None]:
    """Check what else a step takes; decays and rates become (B, H, L, 1), or (B, H, L, K) for decays of channels."""
    B, _, L, K = key.shape
    if log_decay is not None:
        log_decay = _shaped("log_decay", log_decay, key, (B, heads, L), (B, heads, L, K))
        log_decay = log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay
    if rate is not None:
        rate = _shaped("rate", rate, key, (B, heads, L)).unsqueeze(-1)
    if erase is not None:
        if not isinstance(erase, tuple | list) or len(erase) != 2:
            raise rejected(_NAME, "erase", "be a pair (a, e) of tensors", described(erase), TypeError)
        if delta:
            raise rejected(_NAME, "erase", "be None with the delta rule", "a pair")
        a, e = (_shaped(f"erase[{i}]", each, key, (B, heads, L, K)) for i, each in enumerate(erase))
        erase = (a, e)
    if bonus is not None:
        bonus = _shaped("bonus", bonus, key, (heads, K))
    return log_decay, rate, erase, bonus


def _without_padding(steps: Steps, real: Tensor) -> Steps:
    """Return the steps with those that are not ``real`` (B, 1, L, 1) doing nothing."""

    def cleared(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.where(real, tensor, 0.0)

    erase = None if steps.erase is None else (cleared(steps.erase[0]), cleared(steps.erase[1]))
    return steps._replace(
        query=cleared(steps.query),
        key=cleared(steps.key),
        value=cleared(steps.value),
        log_decay=cleared(steps.log_decay),
        rate=cleared(steps.rate),
        erase=erase,
        resets=None if steps.resets is None else steps.resets & real[:, 0, :, 0],
    )
