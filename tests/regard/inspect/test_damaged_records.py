"""Whatever is changed in a record's file, it is refused in a sentence or read: never an error of another kind."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import DECODERS, made, tokens
from other_attention import RECORDED
from tiers import sized

from regard.inspect import Record, capture, compare_tokens, summarize_heads

VALUES: list[Any] = [None, -1, 0, 1, 2, 99, 10**12, "x", [], {}, [0, 3], 1.5, True, float("nan")]
CASES = sized(60, 20)


def recorded(kind: str) -> Record:
    model = RECORDED["gpt-neo"][0]() if kind == "weights" else made(DECODERS["mistral, sliding"]())
    with capture(
        model, **{"summaries": {"keep": kind, "topk": 3}, "gradients": {"gradients": True}}.get(kind, {})
    ) as record:
        if kind == "gradients":
            model(tokens(), labels=tokens()).loss.backward()
        elif kind == "weights":
            model(tokens())
        else:
            with torch.no_grad():
                model.generate(tokens(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    return record


def places(described: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys to every value of what JSON holds."""
    for key, value in described.items() if isinstance(described, dict) else enumerate(described):
        yield (*place, key)
        if isinstance(value, dict | list):
            yield from places(value, (*place, key))


def change_description(header: dict[str, Any], chance: random.Random) -> None:
    about = json.loads(header["__metadata__"]["regard"])
    *way, last = chance.choice(list(places(about)))
    inner = about
    for key in way:
        inner = inner[key]
    inner[last] = chance.choice(VALUES)
    header["__metadata__"]["regard"] = json.dumps(about)


def change_tensors(header: dict[str, Any], chance: random.Random) -> None:
    one, other = chance.sample([name for name in header if name != "__metadata__"], 2)
    match chance.randrange(6):
        case 0:
            header[f"{one}x"] = header.pop(one)
        case 1:
            chance.shuffle(header[one]["shape"])
        case 2:  # no bytes, whatever the other extents are
            header[one]["shape"] = [*chance.choices([0, 1, 2, 10**12], k=len(header[one]["shape"]) - 1), 0]
            chance.shuffle(header[one]["shape"])
            header[one]["data_offsets"][1] = header[one]["data_offsets"][0]
        case 3:
            header[one]["dtype"] = "F8_E4M3"
            header[one]["shape"][-1] *= 4
        case 4:
            header[one]["dtype"] = {"F32": "I32", "I32": "F32"}.get(header[one]["dtype"], "F32")
        case _:
            header[one], header[other] = header[other], header[one]


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("kind", ["rows", "summaries", "gradients", "weights"])
@pytest.mark.parametrize("change", [change_description, change_tensors])
def test_a_changed_file_is_read_or_refused(change: Any, kind: str, tmp_path: Path) -> None:
    data, read = recorded(kind).save(tmp_path / "run.regard").read_bytes(), 0
    length = int.from_bytes(data[:8], "little")
    for seed in range(CASES):
        header = json.loads(data[8 : 8 + length])
        change(header, random.Random(seed))
        written = json.dumps(header).encode()
        (tmp_path / "other.regard").write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])
        try:
            found = Record.load(tmp_path / "other.regard")
        except ValueError as error:
            assert str(error).startswith("load: "), error
            continue
        try:
            found.to_html()
        except ValueError as error:
            assert str(error).partition(":")[0] in ("page", "record", "topk"), error
            continue
        read += 1
    assert read < CASES


WHOLE = {"key": ("F32", [1, 1, 3, 4]), "0.query": ("F32", [1, 1, 2, 4])}
SIZES = {"F32": 4, "F8_E4M3": 1, "BOOL": 1}
EXTENTS: list[tuple[dict[str, tuple[str, list[int]]], str | None, str]] = [
    ({"key": ("F32", [1, 1, 3, 0]), "0.query": ("F32", [1, 1, 2, 0])}, None, "a has heads of width 0"),
    ({"key": ("F32", [1, 1, 3, 0]), "0.query": ("F32", [1, 1, 10**12, 0])}, None, "a has heads of width 0"),
    ({"key": ("F32", [0, 1, 3, 4]), "0.query": ("F32", [0, 1, 10**12, 4])}, None, "a has 0 sequences and 1 heads"),
    ({"key": ("F32", [1, 1, 3, 4]), "0.query": ("F32", [1, 0, 10**12, 4])}, None, "a has 1 sequences and 0 heads"),
    ({"key": ("F32", [1, 1, 0, 4])}, None, "a has no keys"),
    ({"0.mask": ("F8_E4M3", [1, 1, 2, 3])}, "tensor", "0.0.mask is of torch.float8_e4m3fn"),
    ({"0.weights": ("F32", [1, 1, 2, 2])}, None, r"a has weights \(1, 1, 2, 2\) for 2 queries and 3 keys"),
]


def written(path: Path, tensors: dict[str, tuple[str, list[int]]], mask: str | None) -> Path:
    """Write a record of one call by hand, of zeros."""
    call = {"keys": [0, tensors["key"][1][2]], "mask": mask, "changes": [], "scale": None, "softcap": None,
            "is_causal": False, "score": None, "normalizer": "softmax"}  # fmt: skip
    about = {
        "format": "regard-record",
        "version": 1,
        "title": "",
        "texts": [],
        "runs": [{"name": "a", "calls": [call]}],
    }
    header: dict[str, Any] = {"__metadata__": {"regard": json.dumps(about)}}
    at = 0
    for name, (dtype, extents) in tensors.items():
        end = at + math.prod(extents) * SIZES[dtype]
        header[f"0.{name}"] = {"dtype": dtype, "shape": extents, "data_offsets": [at, end]}
        at = end
    data = json.dumps(header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(at))
    return path


@pytest.mark.parametrize(("changed", "mask", "message"), EXTENTS, ids=[each[2] for each in EXTENTS])
def test_extents_that_no_model_has(
    changed: dict[str, tuple[str, list[int]]], mask: str | None, message: str, tmp_path: Path
) -> None:
    assert len(Record.load(written(tmp_path / "whole.regard", WHOLE, None))) == 1
    with pytest.raises(ValueError, match=f"load: .* must be a whole record of attention, got a damaged one .{message}"):
        Record.load(written(tmp_path / "other.regard", WHOLE | changed, mask))


def test_a_record_of_no_queries_is_not_shown() -> None:
    with capture() as record:
        torch.nn.functional.scaled_dot_product_attention(*(torch.zeros(1, 1, each, 4) for each in (0, 3, 3)))
    with pytest.raises(ValueError, match="page: the layer must have heads, queries and keys, got 1 heads, 0 queries"):
        record.to_html()


@pytest.mark.parametrize("extents", [(0, 3, 3), (1, 3, 0), (1, 0, 3)])
def test_a_record_of_nothing_is_summarized_and_compared(extents: tuple[int, int, int]) -> None:
    H, L, S = extents
    with capture() as record:
        torch.nn.functional.scaled_dot_product_attention(*(torch.zeros(1, H, each, 4) for each in (L, S, S)))
    assert len(summarize_heads(record)) == H
    assert compare_tokens(record, record)[0].largest == ()
    with pytest.raises(ValueError, match="page: the layer must have heads, queries and keys"):
        record.to_html()


def test_a_record_outlives_its_file(tmp_path: Path) -> None:
    query = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    with capture() as record:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    path = tmp_path / "record.safetensors"
    read = Record.load(record.save(path))
    path.write_bytes(b"shorter")  # in place: memory that is a part of the file would be gone
    assert torch.equal(read[0].weights(), record[0].weights())
    path.unlink()
    assert read.to_html()
