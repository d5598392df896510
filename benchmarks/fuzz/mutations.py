"""Ways to damage bytes and values, drawn at random."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

#: Texts that terminals obey, parsers trip over, or encodings lack.
TEXTS = (
    "", " ", "\x1b[2J\x1b[31m", "\x9b31m", "\x07\x08\r", "\u202egnp.exe", "\u2028", "\0", "\ufeff", "\ud800",
    "é" * 300, "x" * 5000, "nan", "1e999", "-", "../../etc/passwd", "[bold]", "%s{0}", "'\"`", "\u0000\u0001",
    "🙂\u200d🙂", "a\tb\nc",
)  # fmt: skip
NUMBERS = (0, -1, 1, 3, 7, 2**16, 2**31, 2**31 - 1, 2**63, -(2**63), 10**20, 10**400, 0.5, -0.0, 1e-300, 1e308)
SPECIAL = (float("nan"), float("inf"), -float("inf"), None, True, False, [], {}, [[]], {"": None})
#: What is put into bytes.
PIECES = (
    b"\0", b"\0" * 64, b"\xff" * 8, b"\x1b[31m", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b'"' * 3, b"\n" * 20, b"\r",
    b"\t" * 5, b"\xc3", b"[" * 5000, b"{" * 400, b"9" * 5000, b"PK\x03\x04", b"\x1f\x8b\x08\0", b"PAR1",
    b"\x80\x04.", b",;|\t",
)  # fmt: skip


def odd_value(drawn: Random) -> Any:
    """Return an unexpected value."""
    kind = drawn.randrange(6)
    if kind == 0:
        return drawn.choice(TEXTS)
    if kind == 1:
        return drawn.choice(SPECIAL)
    if kind == 2:
        depth, nested = drawn.choice((3, 30, 300)), []
        for _ in range(depth):
            nested = [nested] if drawn.random() < 0.5 else {"a": nested}  # type: ignore[assignment]
        return nested
    if kind == 3:
        return drawn.choices(("a", 1, None, "\x1b[0m"), k=drawn.choice((1, 10, 3000)))
    return drawn.choice(NUMBERS)


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values within one, the first few of long lists."""
    found = [place] if place else []
    items = value.items() if isinstance(value, dict) else enumerate(value[:6]) if isinstance(value, list) else ()
    for key, each in items:
        found += places(each, (*place, key))
    return found


def mutated_value(drawn: Random, value: Any) -> Any:
    """Return JSON with one to three of its values changed, removed, moved or renamed."""
    value = copy.deepcopy(value)
    for _ in range(drawn.choice((1, 1, 2, 3))):
        known = places(value)
        if not known:
            return odd_value(drawn)
        *way, last = drawn.choice(known)
        inner = value
        for key in way:
            inner = inner[key]
        kind = drawn.randrange(6)
        if kind == 0:
            del inner[last]
        elif kind == 1 and isinstance(inner, dict):
            inner[drawn.choice(TEXTS)] = inner.pop(last)
        elif kind == 2 and isinstance(inner, list):
            inner.extend(inner[: drawn.choice((1, 100))])
        elif kind == 3 and isinstance(inner[last], (int, float)) and not isinstance(inner[last], bool):
            inner[last] = drawn.choice((inner[last] + 1, -inner[last], inner[last] * 1000, str(inner[last])))
        elif kind == 4:
            other = value
            for key in drawn.choice(known):
                other = other[key] if _has(other, key) else other
            inner[last] = copy.deepcopy(other)
        else:
            inner[last] = odd_value(drawn)
    return value


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def mutated_bytes(drawn: Random, data: bytes) -> bytes:
    """Return bytes of which some were changed, cut out, repeated or put in."""
    made = bytearray(data)
    for _ in range(drawn.choice((1, 1, 1, 2, 5))):
        size = len(made)
        begin = drawn.randrange(size + 1)
        end = min(size, begin + drawn.choice((1, 2, 8, 100)))
        kind = drawn.randrange(8)
        if kind == 0 and size:
            made[min(begin, size - 1)] ^= 1 << drawn.randrange(8)
        elif kind == 1:
            made[begin:end] = drawn.randbytes(end - begin)
        elif kind == 2:
            del made[begin:end]
        elif kind == 3:
            made[begin:begin] = made[begin:end] * drawn.choice((1, 3, 50))
        elif kind == 4:
            made[begin:begin] = drawn.choice(PIECES)
        elif kind == 5:
            del made[begin:]
        elif kind == 6 and size >= 8:
            place = drawn.choice((0, size - 8, min(begin, size - 8)))
            claimed = drawn.choice((2**63 - 1, 2**40, 2**31, 10**8, 255, 0))
            made[place : place + 8] = claimed.to_bytes(8, "little")
        else:
            made += drawn.randbytes(drawn.choice((1, 100)))
    return bytes(made)


def as_json(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=True).encode()
