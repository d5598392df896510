"""Tables, pairs of lines and options files, each damaged."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pandas as pd
import tomli_w

from benchmarks.fuzz.folders import ENGLISH, FRENCH
from benchmarks.fuzz.mutations import TEXTS, mutated_bytes, mutated_value
from regard_lab.tasks.translation import ExperimentOptions

CELLS = (
    "1", "2.5", "-3e4", "", "NA", "nan", "inf", "1e400", "1e101", "9" * 400, "2024-01-31", "2024-13-99", "9999-12-31",
    "0001-01-01T00:00", "true", "a", "b", "1,5", '"', '""', "=cmd()", "1_000", "٣", "0x10", "２",
)  # fmt: skip
#: Bytes that a bomb unpacks to: more than may be read.
_BOMB = 300 << 20
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp1252", "utf-32", "shift_jis")


def table(drawn: Random) -> tuple[str, bytes]:
    """Return the ending and the bytes of a table with columns x, z and y, more or less."""
    if drawn.random() < 0.2:
        return ".parquet", _parquet(drawn)
    delimiter = drawn.choice(",,;\t|")
    rows = [["x", "z", "y"], *([str(i), drawn.choice("ab"), str(i * i)] for i in range(drawn.choice((1, 3, 12))))]
    for _ in range(drawn.choice((0, 1, 1, 3, 12))):
        row = drawn.choice(rows)
        kind = drawn.randrange(7)
        if kind <= 2 and row:
            row[drawn.randrange(len(row))] = drawn.choice((*CELLS, *TEXTS))
        elif kind == 3:
            row.append(drawn.choice(CELLS))
        elif kind == 4 and row:
            row.pop()
        elif kind == 5:
            rows.insert(drawn.randrange(len(rows) + 1), list(drawn.choice(rows)))
        elif row and drawn.random() < 0.3:
            row[drawn.randrange(len(row))] = drawn.choice(("x", '"')) * drawn.choice((70_000, 140_000))
        elif drawn.random() < 0.05 and max(len("".join(each)) for each in rows) < 1000:
            rows = [each * drawn.choice((5_000, 30_000)) for each in rows[:2]]
    quoted = drawn.random() < 0.2
    text = drawn.choice(("\n", "\n", "\r\n", "\r")).join(
        delimiter.join(f'"{cell}"' if quoted else cell for cell in row) for row in rows
    )
    return ".csv", dressed(drawn, text, lambda: b"x,y\n" + b"1,2\n" * (_BOMB // 4), lambda: b'"' + b"x" * _BOMB)


def pairs(drawn: Random) -> tuple[str, bytes]:
    """Return the ending and the bytes of a file of pairs."""
    rows = [[english, french] for english, french in zip(ENGLISH, FRENCH)]
    for _ in range(drawn.choice((0, 1, 1, 3))):
        row = drawn.choice(rows)
        kind = drawn.randrange(4)
        if kind == 0 and row:
            row[drawn.randrange(len(row))] = drawn.choice(TEXTS)
        elif kind == 1 and row:
            row.pop()
        elif kind == 2:
            row.append(drawn.choice(TEXTS))
        else:
            rows.append([drawn.choice(TEXTS), drawn.choice(TEXTS)])
    text = "".join("\t".join(row) + "\n" for row in rows)
    return ".tsv", dressed(drawn, text, lambda: b"a\tb\n" * (_BOMB // 40), lambda: b"x" * _BOMB)


def options(drawn: Random) -> tuple[str, bytes]:
    """Return the ending and the bytes of an options file."""
    table = _options()
    if drawn.random() < 0.7:
        table = mutated_value(drawn, table)
    try:
        data = tomli_w.dumps(_with_toml(table)).encode()
    except (TypeError, ValueError, AttributeError, RecursionError):
        data = tomli_w.dumps(_options()).encode()
    kind = drawn.randrange(8)
    if kind == 0:
        data = mutated_bytes(drawn, data)
    elif kind == 1:
        lines = data.splitlines()
        place = drawn.randrange(len(lines))
        key = lines[place].partition(b" = ")[0]
        odd = (
            b"[" * 5000, b"9" * 5000, b"0x" + b"f" * 5000, b"1e999", b"nan", b"-inf", b"1979-05-27T07:32:00Z",
            b"'\x1b[31m'", b'"\\u001b[2J"', b"{a = 1}", b"[[1, 2], 3]", b'"""\nx"""',
            b"99999999999999999999", b"true", b"07:32:00",
        )  # fmt: skip
        lines[place] = key + b" = " + drawn.choice(odd)
        data = b"\n".join(lines)
    elif kind == 2:
        nested = b"\n[a" + b".b" * 3000 + b"]\nc = 1\n", b"\n" + b"a." * 3000 + b"z = 1\n", b"\n[[data]]\n"
        data += drawn.choice(nested)
    return ".toml", data


def setting(drawn: Random) -> str:
    """Return what follows ``--set``."""
    names = "training.steps", "model.x", "model.encoder", "a.b.c.d", "data", "training.seconds", ".", "x" * 900
    large = "[" * 4000, "9" * 4500, "1e400", "99999999999999999999"
    value = drawn.choice((*large, "nan", "{a={b=1}}", '"\x1b[31m"', "\x1b[31m", "-1", ""))
    return f"{drawn.choice(names)}={value}"


def dressed(drawn: Random, text: str, *bombs: Callable[[], bytes]) -> bytes:
    """Return a text in some encoding, perhaps damaged, perhaps compressed."""
    data = text.encode(drawn.choice(ENCODINGS) if drawn.random() < 0.3 else "utf-8", "replace")
    if drawn.random() < 0.35:
        data = mutated_bytes(drawn, data)
    if drawn.random() < 0.004:
        return _bomb(drawn.choice(bombs)())
    if drawn.random() < 0.15:
        data = gzip.compress(data, mtime=0)
        if drawn.random() < 0.5:
            data = mutated_bytes(drawn, data)
    return data


def _bomb(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


@cache
def _options() -> dict[str, Any]:
    return ExperimentOptions().to_table()


def _with_toml(value: Any) -> Any:
    """Return a value without what TOML cannot say."""
    if isinstance(value, dict):
        return {str(key): _with_toml(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_with_toml(each) for each in value if each is not None]
    return value


def _parquet(drawn: Random) -> bytes:
    data = _parquet_bomb() if drawn.random() < 0.01 else _parquets()[drawn.randrange(len(_parquets()))]
    if drawn.random() < 0.8:
        half = len(data) // 2 if drawn.random() < 0.5 else 0  # what says how to read the rest stands at the end
        data = data[:half] + mutated_bytes(drawn, data[half:])
    return data


@cache
def _parquets() -> list[bytes]:
    plain = pd.DataFrame({"x": [1.0, 2.0, 3.0, None], "z": ["a", "b", "a", None], "y": [1, 4, 9, 16]})
    dated = plain.assign(x=pd.date_range("2024-01-01", periods=4), z=pd.Categorical(["a", "b", "a", "b"]))
    nested = plain.assign(z=[[1], [2, 3], None, []], x=[{"a": 1}, {"a": 2}, None, {"a": 3}])
    made = []
    for frame in (plain, dated, nested, plain.set_index("z"), plain.rename(columns={"x": "\x1b[31mx"})):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, compression=None if len(made) % 2 else "snappy")
        made.append(buffer.getvalue())
    return made


@cache
def _parquet_bomb() -> bytes:
    """Return a file of some kilobytes whose rows would fill gigabytes."""
    buffer = io.BytesIO()
    pd.DataFrame({"x": pd.Categorical.from_codes([0] * 4_000_000, ["x" * 4000]).astype("category"), "y": 1.0}).assign(
        x=lambda frame: frame["x"]
    ).to_parquet(buffer)
    return buffer.getvalue()
