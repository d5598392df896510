"""Records in one file: safetensors, which hold numbers alone, and a description in JSON.

Dimensions: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import masks
from regard._errors import rejected
from regard._writing import write_together
from regard.inspect.calls import Attended, Change
from regard.masks import Extent, as_mask

if TYPE_CHECKING:
    from regard.inspect.record import AttentionRecord

FORMAT, VERSION = "regard-record", 1
#: Pairs of a mask that has to be written out, at most.
_LARGEST = 1 << 30
_FIELDS = {"is_causal": bool, "scale": float, "softcap": float, "score": str, "normalizer": str, "mask": str}


def save_record(path: str | Path, runs: Mapping[str, Sequence[AttentionRecord]]) -> Path:
    """Write runs to a file, whole or not at all."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    described: list[dict[str, Any]] = []
    for name, each in ((name, run) for name, found in runs.items() for run in found):
        at, calls = str(len(described)), []
        tensors[f"{at}.key"] = each.calls[-1].key.contiguous()
        for i, call in enumerate(each.calls):
            tensors[f"{at}.{i}.query"] = call.query.contiguous()
            if call.sinks is not None:
                tensors[f"{at}.{i}.sinks"] = call.sinks.contiguous()
            for j, change in enumerate(call.changes):
                if change.weights is not None:
                    tensors[f"{at}.{i}.change.{j}"] = change.weights.contiguous()
            kind, parts = _mask_tensors(call)
            tensors |= {f"{at}.{i}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            heads = [change.heads for change in call.changes]
            calls.append({"keys": call.key.shape[2], "mask": kind, "changes": heads, **_numbers(call)})
        described.append({"name": name, "calls": calls})
    about = {"format": FORMAT, "version": VERSION, "runs": described}
    target = Path(path)
    write_together({target: save(tensors, {"regard": json.dumps(about)})})
    return target


def load_record(path: str | Path) -> dict[str, list[AttentionRecord]]:
    """Return the runs in a file, layer by layer.

    Raises
    ------
    ValueError
        If it is no record, damaged, or of a version that is not known.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {}).get("regard", "null"))
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise _wrong(path, "be a record of attention", "another file")
            if about.get("version") != VERSION:
                raise _wrong(path, f"be of version {VERSION}", about.get("version"))
            return _runs(about["runs"], {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except FileNotFoundError:
        raise _wrong(path, "be a file that is there", "none") from None
    except OSError as error:
        raise _wrong(path, "be a file that can be read", error.strerror or error) from None
    except (SafetensorError, KeyError, TypeError, RuntimeError, json.JSONDecodeError) as error:
        raise _wrong(path, "be a whole record of attention", f"a damaged one ({error})") from None


def _runs(described: Any, tensors: dict[str, Tensor]) -> dict[str, list[AttentionRecord]]:
    from regard.inspect.record import AttentionRecord

    found: dict[str, list[AttentionRecord]] = {}
    for at, run in enumerate(described):
        whole, run_of = tensors[f"{at}.key"], None
        for i, call in enumerate(run["calls"]):
            for name, kind in _FIELDS.items():
                if call[name] is not None and not isinstance(call[name], kind):
                    raise TypeError(f"{name} is {call[name]!r}")
            query = tensors[f"{at}.{i}.query"]
            key = whole[:, :, : call["keys"]]
            if query.dim() != 4 or whole.dim() != 4 or key.shape[2] != call["keys"] or len(query) != len(key):
                raise TypeError(f"{run['name']} has queries {tuple(query.shape)} and keys {tuple(whole.shape)}")
            told = {name: call[name] for name in ("is_causal", "scale", "softcap", "score", "normalizer")}
            attended = Attended(query, key, sinks=tensors.get(f"{at}.{i}.sinks"), **told)
            changes = _changes(call["changes"], f"{at}.{i}", tensors, attended)
            attended = replace(attended, mask=_mask(call["mask"], f"{at}.{i}", tensors), changes=changes)
            if run_of is None:
                run_of = AttentionRecord(str(run["name"]), attended)
            else:
                run_of.grow(attended)
        if run_of is None:
            raise KeyError("calls")
        found.setdefault(run_of.name, []).append(run_of)
    return found


def _numbers(call: Attended) -> dict[str, Any]:
    for name in ("score", "normalizer"):
        given = getattr(call, name)
        if given is not None and not isinstance(given, str):
            raise rejected("save", name, "be one that a name stands for", repr(given))
    scale, softcap = (None if each is None else float(each) for each in (call.scale, call.softcap))
    told = {"is_causal": bool(call.is_causal), "score": call.score, "normalizer": call.normalizer}
    return {"scale": scale, "softcap": softcap, **told}


def _mask_tensors(call: Attended) -> tuple[str | None, dict[str, Tensor]]:
    """Return how a mask is written, and as what: as a tensor, as the keys that each query sees, or as a matrix."""
    if call.mask is None:
        return None, {}
    if isinstance(call.mask, Tensor):
        return "tensor", {"mask": call.mask}
    (B, H, L, _), S = call.query.shape, call.key.shape[2]
    extent, device = Extent(B, H, L, S), call.query.device
    bound = as_mask(call.mask).bind(extent, device)
    span = None if bound.has_bias else bound.intervals(extent)
    if span is not None and all(each.shape[1] == 1 for each in span):
        start, stop = (each.expand(B, 1, L)[:, 0].clamp(0, S) for each in span)
        return "intervals", {"start": start, "stop": stop}
    b, h = torch.arange(B, device=device)[:, None, None, None], torch.arange(H, device=device)[:, None, None]
    if B * H * L * S > _LARGEST:
        raise rejected(
            "save", "mask", f"be a tensor, or one run of keys for each query, beyond {_LARGEST:,} pairs", bound
        )
    rows, cols = torch.arange(L, device=device)[:, None], torch.arange(S, device=device)
    return "tensor", {
        "mask": bound.matrix(b, h, rows, cols, torch.float32)
        if bound.has_bias
        else _marks(bound.visible(b, h, rows, cols), L, S)
    }


def _marks(seen: Tensor | None, L: int, S: int) -> Tensor:
    assert seen is not None  # what hides nothing is an interval
    seen = seen[(None,) * (4 - seen.dim())]
    return seen.expand(*seen.shape[:2], L, S)


def _mask(kind: str | None, at: str, tensors: Mapping[str, Tensor]) -> Any:
    if kind is None:
        return None
    if kind == "tensor":
        return tensors[f"{at}.mask"]
    return masks.padding(tensors[f"{at}.stop"]) & ~masks.padding(tensors[f"{at}.start"])


def _changes(
    given: Sequence[Sequence[int]], at: str, tensors: Mapping[str, Tensor], attended: Attended
) -> tuple[Change, ...]:
    changes = tuple(Change(tuple(heads), tensors.get(f"{at}.change.{j}")) for j, heads in enumerate(given))
    (B, H, L, _), S = attended.query.shape, attended.key.shape[2]
    for each in changes:
        whole = each.weights is None or each.weights.shape == (B, len(each.heads), L, S)
        if not whole or not all(isinstance(head, int) and 0 <= head < H for head in each.heads):
            raise TypeError(f"heads {each.heads} have other weights than there are")
    return changes


def _wrong(path: str | Path, expected: str, got: object) -> Exception:
    return rejected("load", str(path), expected, got)
