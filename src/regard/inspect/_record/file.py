"""Records in one file: safetensors, which hold only numbers, and a description in JSON.

Dimensions: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from regard import LocalLinear, masks
from regard._utils.errors import available_memory, rejected
from regard._utils.files import write_together
from regard._utils.part import Part
from regard.inspect._record.calls import AttentionCall, Change, OutputGradient, dense_mask
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import Patches, Text
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores.base import TABLE as SCORES

if TYPE_CHECKING:
    from regard.inspect._record.recording import Recording

FORMAT, VERSION = "regard-record", 1
#: The dtypes of a record's tensors.
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64
)  # fmt: skip
#: The largest number of pairs of a mask that is saved as a matrix.
_LARGEST = 1 << 30
#: What a run is saved with, besides its calls.
_RUN = ("reads", "windows", "skipped")
#: What a grid of patches is saved as, besides its image.
_GRID: dict[str, Callable[[Any], Any]] = {
    "rows": int, "cols": int, "first": int, "step": int, "box": lambda given: tuple(map(float, given)), "name": str,
    "seconds": float,
}  # fmt: skip
_FIELDS = {"is_causal": bool, "scale": float, "softcap": float, "mask": str}
#: The named parts of each kind.
_PARTS: dict[str, Mapping[str, type[Part]]] = {"score": SCORES, "normalizer": NORMALIZERS}


def save_record(path: str | Path, record: Recording) -> Path:
    """Write a record to a file atomically."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    described: list[dict[str, Any]] = []
    for name, run in ((layer, run) for layer in record.layers for run in record.runs(layer)):
        at = str(len(described))
        if isinstance(run, AttentionSummary):
            tensors |= {f"{at}.{part}": tensor.contiguous() for part, tensor in run.tensors().items()}
            what: dict[str, Any] = {"summary": run.numbers()}
        else:
            assert isinstance(run, AttentionRecord)
            what = {"calls": _described_calls(run, at, tensors)}
        described.append(
            {"name": name, **what, **{part: getattr(run, part) for part in ("reads", "windows", "skipped")}}
        )
    texts = []
    for number, text in enumerate(record.texts):
        images = list(dict.fromkeys(each.image for each in text.patches))
        for i, image in enumerate(images):
            tensors[f"image.{number}.{i}"] = torch.frombuffer(bytearray(image), dtype=torch.uint8)
        grids = [
            {name: getattr(each, name) for name in _GRID} | {"image": images.index(each.image)} for each in text.patches
        ]
        texts.append({"tokens": text.tokens, "special": text.special, "patches": grids, "seconds": text.seconds})
    about = {"format": FORMAT, "version": VERSION, "title": record.title, "texts": texts, "runs": described}
    about |= {"sequence": record.sequence, "model": record.model}
    target = Path(path)
    write_together({target: save(tensors, {"regard": json.dumps(about)})})
    return target


def _described_calls(run: AttentionRecord, at: str, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    calls = []
    tensors[f"{at}.key"] = run.key.contiguous()
    if (value := run.value) is not None:
        tensors[f"{at}.value"] = value.contiguous()
    for i, call in enumerate(run.calls):
        tensors[f"{at}.{i}.query"] = call.query.contiguous()
        if call.given is not None:
            tensors[f"{at}.{i}.weights"] = call.given.contiguous()
        if call.sinks is not None:
            tensors[f"{at}.{i}.sinks"] = call.sinks.contiguous()
        if call.output is not None and call.output.value is not None:
            tensors[f"{at}.{i}.gradient"] = call.output.value.contiguous()
        for j, change in enumerate(call.changes):
            if change.weights is not None:
                tensors[f"{at}.{i}.change.{j}"] = change.weights.contiguous()
        kind, parts = _mask_tensors(call)
        tensors |= {f"{at}.{i}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        named = {part: _described(part, getattr(call, part), f"{at}.{i}.{part}", tensors) for part in _PARTS}
        heads = [change.heads for change in call.changes]
        calls.append(
            {"keys": [call.first, call.key.shape[2]], "mask": kind, "changes": heads, **_numbers(call), **named}
        )
    return calls


#: What a file holds: the runs of each layer, texts, title, the number of the sequence that has the texts, and model.
Held: TypeAlias = tuple[dict[str, list[LayerRecord]], tuple[Text, ...], str, int, str]


def load_record(path: str | Path) -> Held:
    """Return what a file holds.

    Raises
    ------
    ValueError
        If the file is not a record, is damaged, or has an unknown version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {}).get("regard", "null"))
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise _wrong(path, "be a record of attention", "another file")
            if about.get("version") != VERSION:
                raise _wrong(path, f"be of version {VERSION}", about.get("version"))
            size, free = Path(path).stat().st_size, available_memory()
            if free is not None and size > free:
                raise _wrong(path, f"fit {free / 1e9:.1f} GB of memory", f"{size / 1e9:.1f} GB")
            # Copies: a file that changes or shrinks later does not change the record, or end the process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return _read(about, tensors)
    except FileNotFoundError:
        raise _wrong(path, "be a file that is there", "none") from None
    except OSError as error:
        raise _wrong(path, "be a file that can be read", error.strerror or error) from None
    except (SafetensorError, LookupError, TypeError, AttributeError, RuntimeError, json.JSONDecodeError) as error:
        raise _wrong(path, "be a whole record of attention", f"a damaged one ({error})") from None


def _read(about: Any, tensors: dict[str, Tensor]) -> Held:
    try:
        _require_plain(tensors)
        texts = _texts(about["texts"], tensors)
        sequence, model = _count(about.get("sequence", 0), 0), str(about.get("model", ""))
        return _runs(about["runs"], tensors), texts, str(about["title"]), sequence, model
    except ValueError as error:  # parts and texts check what they are given
        raise TypeError(str(error)) from None


def _require_plain(tensors: Mapping[str, Tensor]) -> None:
    """Reject dtypes that no record holds, such as 8-bit floats, which torch cannot compute with."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is of {tensor.dtype}")


def _count(given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise TypeError(f"{given!r} is no number of sequences, windows or queries")
    return given


def _runs(described: Any, tensors: dict[str, Tensor]) -> dict[str, list[LayerRecord]]:
    found: dict[str, list[LayerRecord]] = {}
    for at, run in enumerate(described):
        name = str(run["name"])
        if "summary" in run:
            prefix = f"{at}."
            own = {each.removeprefix(prefix): tensor for each, tensor in tensors.items() if each.startswith(prefix)}
            made: LayerRecord = AttentionSummary.of(name, own, run["summary"])
        else:
            calls = [_call(call, name, str(at), i, tensors) for i, call in enumerate(run["calls"])]
            made = AttentionRecord(name, calls[0])
            for call in calls[1:]:
                if not _continues(call, calls[0], made.key):
                    raise TypeError(f"calls of {name} have other sizes")
                made.grow(call)
        made.reads, made.windows = run.get("reads"), _count(run.get("windows", 1), 1)
        made.skipped = _count(run.get("skipped", 0), 0)
        if made.reads not in (None, "self", "cross", "linear"):
            raise TypeError(f"{name} reads {made.reads!r}")
        found.setdefault(name, []).append(made)
    return found


def _continues(call: AttentionCall, first: AttentionCall, keys: Tensor) -> bool:
    """Whether a call's rows can follow those of earlier calls."""
    same = call.query.shape[:2] == first.query.shape[:2] and call.query.shape[3] == first.query.shape[3]
    end = call.first + call.key.shape[2]
    return same and call.key.shape[::3] == keys.shape[::3] and call.first <= keys.shape[2] <= end


def _fit(sinks: Tensor, query: Tensor) -> bool:
    """Whether the shape of sinks, (1 or B, H, 1 or L), matches queries (B, H, L, E)."""
    B, H, L, _ = query.shape
    return sinks.dim() == 3 and len(sinks) in (1, B) and sinks.shape[1] == H and sinks.shape[2] in (1, L)


def _call(call: Any, name: str, at: str, i: int, tensors: dict[str, Tensor]) -> AttentionCall:
    for field, kind in _FIELDS.items():
        if call[field] is not None and not isinstance(call[field], kind):
            raise TypeError(f"{field} is {call[field]!r}")
    if not all(call[field] is None or math.isfinite(call[field]) for field in ("scale", "softcap")):
        raise TypeError("scale or softcap is not finite")
    whole, query = tensors[f"{at}.key"], tensors[f"{at}.{i}.query"]
    first, count = map(int, call["keys"])
    key = whole[:, :, first : first + count]
    sinks = tensors.get(f"{at}.{i}.sinks")
    fits = query.dim() == whole.dim() == 4 and key.shape[2] == count and len(query) == len(key)
    fits = fits and 0 <= first <= whole.shape[2] and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
    fits = fits and (sinks is None or _fit(sinks, query))
    if not fits or not all(each is None or each.is_floating_point() for each in (query, whole, sinks)):
        raise TypeError(f"{name} has queries {tuple(query.shape)} and keys {tuple(whole.shape)}")
    given = {field: call[field] for field in ("is_causal", "scale", "softcap")}
    given |= {part: _made(part, call[part], f"{at}.{i}.{part}", tensors) for part in _PARTS}
    weights, given["order"] = tensors.get(f"{at}.{i}.weights"), _order(call.get("order", 0))
    attended = AttentionCall(query, key, sinks=sinks, first=first, given=weights, **given)
    _require_whole(attended, name)
    changes = _changes(call["changes"], f"{at}.{i}", tensors, attended)
    value, output = _with_gradient(tensors, at, i, attended)
    return replace(
        attended, mask=_mask(call["mask"], f"{at}.{i}", tensors, attended), changes=changes, value=value, output=output
    )


def _require_whole(call: AttentionCall, name: str) -> None:
    """Reject a call with impossible sizes, or with weights of another shape."""
    (B, H, L, E), S = call.query.shape, call.key.shape[2]
    if min(B, H) == 0:
        raise TypeError(f"{name} has {B} sequences and {H} heads")
    if call.given is not None:
        if call.given.shape != (B, H, L, S) or not call.given.is_floating_point():
            raise TypeError(f"{name} has weights {tuple(call.given.shape)} for {L} queries and {S} keys")
    elif E == 0:
        raise TypeError(f"{name} has heads of width 0")
    if S == 0:
        raise TypeError(f"{name} has no keys")


def _with_gradient(
    tensors: Mapping[str, Tensor], at: str, i: int, attended: AttentionCall
) -> tuple[Tensor | None, OutputGradient | None]:
    whole, gradient = tensors.get(f"{at}.value"), tensors.get(f"{at}.{i}.gradient")
    if whole is None:
        return None, None
    (B, H, L, _), S = attended.query.shape, attended.key.shape[2]
    value = whole[:, :, attended.first : attended.first + S] if whole.dim() == 4 else whole
    fits = value.dim() == 4 and value.shape[::2] == (B, S) and value.shape[1] and H % value.shape[1] == 0
    fits = fits and value.is_floating_point() and (gradient is None or gradient.is_floating_point())
    if not fits or (gradient is not None and gradient.shape != (B, H, L, value.shape[3])):
        raise TypeError(f"values {tuple(whole.shape)} do not fit")
    return value, OutputGradient(gradient)


def _texts(described: Any, tensors: dict[str, Tensor]) -> tuple[Text, ...]:
    found = []
    for number, each in enumerate(described):
        grids = each["patches"]
        if version_1 := grids and isinstance(grids[0], int):  # one grid: its rows, columns and first token
            grids = [dict(zip(("rows", "cols", "first"), grids))]
        patches = []
        for grid in grids or ():
            image = tensors[f"image.{number}" if version_1 else f"image.{number}.{int(grid['image'])}"]
            given = {name: _checked(name, grid[name]) for name in _GRID if name in grid}
            patches.append(Patches(image.numpy().tobytes(), **given))
        seconds = [None if span is None else (float(span[0]), float(span[1])) for span in each.get("seconds", ())]
        found.append(Text(tuple(each["tokens"]), tuple(map(int, each["special"])), patches, seconds))
    return tuple(found)


def _checked(name: str, given: Any) -> Any:
    """Return a number or name of a grid of patches as the right type."""
    if given is None and name in ("step", "box", "seconds"):
        return None
    return _GRID[name](given)


def _numbers(call: AttentionCall) -> dict[str, Any]:
    scale, softcap = (None if each is None else float(each) for each in (call.scale, call.softcap))
    order: Any = call.order
    if isinstance(order, LocalLinear):
        names = ("ridge", "solver", *(("steps", "tolerance") if order.solver == "cg" else ()))
        order = {name: getattr(order, name) for name in names}
    return {"scale": scale, "softcap": softcap, "is_causal": bool(call.is_causal), "order": order}


def _order(described: Any) -> int | LocalLinear:
    return LocalLinear(**described) if isinstance(described, dict) else {0: 0, 1: 1}[described]


def _described(kind: str, given: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """Return a score or a normalizer as JSON, and add its tensors to ``tensors``."""
    if given is None or isinstance(given, str):
        return given
    name = next((name for name, each in _PARTS[kind].items() if type(given) is each), None)
    if name is None:
        raise rejected("save", kind, f"be a built-in one such as {next(iter(_PARTS[kind]))!r}", repr(given))
    fields = {}
    for field in inspect.signature(type(given)).parameters:
        fields[field] = value = getattr(given, field)
        if isinstance(value, Tensor):
            tensors[f"{at}.{field}"] = value.contiguous()
            fields[field] = {"tensor": f"{at}.{field}"}
    return {"name": name, "fields": fields}


def _made(kind: str, described: Any, at: str, tensors: Mapping[str, Tensor]) -> Any:
    if (described is None and kind == "score") or (isinstance(described, str) and described in _PARTS[kind]):
        return described
    made = _PARTS[kind][described["name"]]
    fields = {
        name: tensors[f"{at}.{name}"] if isinstance(value, dict) else value
        for name, value in described["fields"].items()
    }
    return made(**fields)


def _mask_tensors(call: AttentionCall) -> tuple[str | None, dict[str, Tensor]]:
    """Return how to save a mask (as a tensor, or as the interval of keys that each query sees), and its tensors."""
    if call.mask is None:
        return None, {}
    if isinstance(call.mask, Tensor):
        return "tensor", {"mask": call.mask}
    if (span := replace(call, is_causal=False).intervals()) is not None:
        return "intervals", {"start": span[0], "stop": span[1]}
    (B, H, L, _), S = call.query.shape, call.key.shape[2]
    if B * H * L * S > _LARGEST:
        expected = f"be a tensor or one interval of keys for each query, beyond {_LARGEST:,} pairs"
        raise rejected("save", "mask", expected, type(call.mask).__name__)
    mask = dense_mask(call)
    assert mask is not None  # a mask that hides nothing is an interval
    return "tensor", {"mask": mask}


def _mask(kind: str | None, at: str, tensors: Mapping[str, Tensor], attended: AttentionCall) -> Any:
    if kind is None:
        return None
    (B, H, L, _), S = attended.query.shape, attended.key.shape[2]
    if kind == "tensor":
        mask = tensors[f"{at}.mask"]
        fits = mask.dim() <= 4 and torch.broadcast_shapes(mask.shape, (B, H, L, S)) == (B, H, L, S)
        if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise TypeError(f"a mask of {mask.dtype} is {tuple(mask.shape)}")
        return mask
    start, stop = tensors[f"{at}.start"], tensors[f"{at}.stop"]
    if start.shape != stop.shape or stop.shape != (B, L) or start.is_floating_point() or stop.is_floating_point():
        raise TypeError(f"a mask of intervals is {tuple(start.shape)} and {tuple(stop.shape)}")
    return masks.padding(stop) & ~masks.padding(start)


def _changes(
    given: Sequence[Sequence[int]], at: str, tensors: Mapping[str, Tensor], attended: AttentionCall
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
