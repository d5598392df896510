"""Recurrences, ours and those of transformers, as effective weights: the map from their values to their outputs.

A recurrence is linear in its values, so its outputs for the values e_1, …, e_S are the columns of that matrix. Where
each channel has a matrix of its own (RWKV-4, Mamba), the weights are the mean over channels.

Dimensions: B batch, H heads, C channels, L steps, S values, N numbers of a channel's state.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

#: What is not recorded, and why: the steps before a state have no weights.
STATE = "a recurrence that continues a state, whose earlier steps have no weights"
NOT_ASKED = "a recurrence, whose effective weights capture(…, recurrences=True) records"
TRAINED = "a network that learns as it reads, which has no effective weights"
#: The names of functions in the modeling files of transformers; each family has copies of its own. They are private to
#: transformers: tests/regard/inspect/test_recurrences.py fails if they change.
_NAMED = {
    name: kind
    for kind, names in {
        "rows": (
            "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
            "recurrent_kimi_delta_attention", "mamba2_chunk_scan",
        ),
        "rwkv": ("rwkv_linear_attention",),
        "mamba": ("mamba_selective_scan",),
    }.items()
    for name in names
}  # fmt: skip

#: From a function, its signature and its arguments to effective weights (B, H, L, S), or why there are none.
Weights = Callable[..., Tensor | str]


def recurrences() -> Iterator[tuple[Callable[..., Any], Weights]]:
    """Yield each loaded function that runs a recurrence, with a function that returns its effective weights."""
    for name, functions in _OURS.items():
        if (module := sys.modules.get(name)) is not None:
            yield from ((getattr(module, each), _of_ours) for each in functions)
    for name, learning in _LEARNING.items():
        if (module := sys.modules.get(name)) is not None:
            yield getattr(module, learning), of_trained
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for each, kind in _NAMED.items():
                if (function := vars(module).get(each)) is not None:
                    yield function, _KINDS[kind]


def of_trained(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:  # noqa: ARG001
    """Return why a network that learns has no weights: its outputs are not linear in the values."""
    return TRAINED


@torch.no_grad()
def _of_ours(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | str:
    """Return the weights of a function whose values are (…, S, V), and whose outputs are (…, L, V)."""
    given = _bound(function, args, kwargs)
    if given["state"] is not None:
        return STATE
    value = given["value"]
    S = value.shape[-2]
    each = torch.eye(S, dtype=value.dtype, device=value.device).expand(*value.shape[:-1], S)
    found: Tensor = function(**given | {"value": each, "return_state": False})
    return found[(None,) * (4 - found.dim())].flatten(0, -4)


@torch.no_grad()
def _of_rows(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | str:
    """Return the weights of a function whose values are (B, S, H, V); without Mamba-2's skip D."""
    given = _bound(function, args, kwargs)
    if any(given.get(name) is not None for name in ("initial_state", "initial_states")):
        return STATE
    name = "value" if "value" in given else "hidden_states"
    B, S, H, _ = given[name].shape
    each = torch.eye(S, device=given[name].device)[None, :, None].expand(B, S, H, S)
    if "D" in given:
        given["D"] = None
    answer = function(**given | {name: each})
    found: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return found.transpose(1, 2)


@torch.no_grad()
def _of_rwkv(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | str:
    """Return RWKV-4's weights: of each channel the softmax of keys that lose ``exp(time_decay)`` a step."""
    given = _bound(function, args, kwargs)
    if given["state"] is not None and bool(given["state"][1].any()):  # a sum of weights, 0 before the first step
        return STATE
    key, decay = given["key"].float(), given["time_decay"].float().exp()  # (B, L, C) and (C,)
    L = key.shape[1]
    found = key.new_zeros(len(key), 1, L, L)
    for i in range(L):
        ago = torch.arange(i - 1, -2, -1, device=key.device)[:, None]
        scores = key[:, : i + 1] - ago * decay  # (B, i + 1, C)
        scores[:, i] = key[:, i] + given["time_first"].float()
        found[:, 0, i, : i + 1] = scores.softmax(1).mean(-1)
    return found


@torch.no_grad()
def _of_mamba(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | str:
    """Return Mamba's weights (Ali 2024, arXiv 2403.01590), the mean over channels; without the skip D."""
    given = _bound(function, args, kwargs)
    step, A = given["dt"].float(), given["A"].float()  # (B, C, L) and (C, N)
    if given["delta_bias"] is not None:
        step = step + given["delta_bias"].float()[:, None]
    if given["delta_softplus"]:
        step = torch.nn.functional.softplus(step)
    write, read = given["B"].float(), given["C"].float()  # (B, N, L)
    L, total = step.shape[-1], step.cumsum(-1)
    found = step.new_zeros(len(step), 1, L, L)
    for i in range(L):
        passed = total[:, :, i : i + 1] - total[:, :, : i + 1]  # (B, C, j): the steps after j
        kept = torch.exp(passed[..., None] * A[None, :, None])  # (B, C, j, N)
        each = torch.einsum("bcjn,bnj,bn->bcj", kept, write[..., : i + 1], read[..., i]) * step[..., : i + 1]
        found[:, 0, i, : i + 1] = each.mean(1)
    return found


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a function's arguments by name."""
    signature = inspect.signature(inspect.unwrap(function))
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name)
    return given


_KINDS: dict[str, Weights] = {"rows": _of_rows, "rwkv": _of_rwkv, "mamba": _of_mamba}
#: Our functions, by the modules that define them.
_OURS = {
    "regard.nn.linear.gated": ("gated_recurrence",),
    "regard.nn.linear.log_linear": ("log_linear_recurrence",),
    "regard.nn.linear.mesa": ("mesa_recurrence",),
    "regard.nn.linear.attention": ("linear_attention",),
    "regard.nn.linear.fast_weights": ("fast_weights",),
}
#: Those in which a network learns.
_LEARNING = {
    "regard.nn.linear.trained_state": "trained_recurrence",
    "regard.nn.linear.lact": "chunk_recurrence",
    "regard.nn.linear.atlas": "omega_recurrence",
}
