"""Whatever is changed in a record's file, it is refused in a sentence or read: never an error of another kind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import DECODERS, made, tokens

from regard.inspect import Record, capture

VALUES: list[Any] = [None, -1, 0, 1, 2, 99, 10**12, "x", [], {}, [0, 3], 1.5, True, float("nan")]
CASES = 60


def recorded(kind: str) -> Record:
    model = made(DECODERS["mistral, sliding"]())
    with capture(
        model, **{"summaries": {"keep": kind, "topk": 3}, "gradients": {"gradients": True}}.get(kind, {})
    ) as record:
        if kind == "gradients":
            model(tokens(), labels=tokens()).loss.backward()
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
    match chance.randrange(4):
        case 0:
            header[f"{one}x"] = header.pop(one)
        case 1:
            chance.shuffle(header[one]["shape"])
        case 2:
            header[one]["dtype"] = {"F32": "I32", "I32": "F32"}.get(header[one]["dtype"], "F32")
        case _:
            header[one], header[other] = header[other], header[one]


@pytest.mark.parametrize("kind", ["rows", "summaries", "gradients"])
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
