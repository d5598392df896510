"""A page as the browser reads it: its description, its blocks, and a weight computed from them in float64."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np


class Page(HTMLParser):
    """The tags, attributes and scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = None
        if tag == "script":
            self._inside = dict(attrs).get("id") or "code"
            assert self._inside not in self.scripts
            self.scripts[self._inside] = ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            self.scripts[self._inside] += data

    @property
    def described(self) -> dict[str, Any]:
        return json.loads(self.scripts["page"])

    def block(self, number: int) -> bytes:
        return base64.b64decode(self.scripts[f"block-{number}"], validate=True)

    def layer(self, head: dict[str, Any]) -> dict[str, Any]:
        return self.described["layers"][head["layer"]]

    def weights(self, head: dict[str, Any]) -> np.ndarray:
        """The matrix of a head, in float64, as the page computes it."""
        L, S = self.layer(head)["shape"]
        given = head["weights"]
        if given["kind"] == "table":
            return np.frombuffer(self.block(given["block"]), "<f2").reshape(L, S).astype(float)
        kind = {"float16": "<f2", "float32": "<f4"}[given["format"]]
        query, key = (
            np.frombuffer(self.block(given[n]), kind).reshape(-1, given["width"]).astype(float)
            for n in ("query", "key")
        )
        start, stop = (np.frombuffer(self.block(given[name]), "<i4") for name in ("start", "stop"))
        lse = np.frombuffer(self.block(given["lse"]), "<f4").astype(float)
        scores = query @ key.T * given["scale"]
        if given["softcap"]:
            scores = given["softcap"] * np.tanh(scores / given["softcap"])
        at = np.arange(S)
        seen = (at >= start[:, None]) & (at < stop[:, None])
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where(seen, np.exp(scores - lse[:, None]), 0)

    def heads(self) -> list[dict[str, Any]]:
        """The heads of layers: without what was computed from all of them."""
        page = self.described
        return [head for head in page["heads"] if page["layers"][head["layer"]]["kind"] not in ("rollout", "flow")]

    def rows(self, facts: dict[str, Any]) -> np.ndarray:
        """The largest weight of each row of a head, the same without sinks, and its entropy."""
        return np.frombuffer(self.block(facts["rows"]), "<f2").reshape(3, -1).astype(float)

    def overview(self, layer: int) -> dict[str, np.ndarray]:
        """What the grid shows of a layer's heads and, last, of their mean."""
        described = self.described["layers"][layer]
        heads = sum(head["layer"] == layer for head in self.described["heads"]) + bool(described["mean"])
        rows, cols = described["thumbnail"]
        block, found = self.block(described["overview"]), {}
        for name, kind, count in (
            ("entropy", "<f4", heads), ("received", "<f4", heads), ("diagonal", "<f4", heads), ("hidden", "<f4", heads),
            ("sinks", "<i4", heads),
            ("starts", "<i4", rows), ("stops", "<i4", rows), ("counts", "<i4", rows), ("spread", "u1", heads * rows),
            ("thumbnails", "u1", heads * rows * cols),
        ):  # fmt: skip
            size = count * np.dtype(kind).itemsize
            found[name], block = np.frombuffer(block[:size], kind), block[size:]
        found["bare"] = np.frombuffer(block, "u1").reshape(-1)
        found["spread"] = found["spread"].reshape(heads, rows)
        found["thumbnails"] = found["thumbnails"].reshape(heads, rows, cols)
        return found


def decoded(codes: np.ndarray) -> np.ndarray:
    """Weights by their codes, as viewer/src/blocks.ts has them."""
    return np.where(codes < 2, 0, 2.0 ** ((codes.astype(float) - 2) / 253 * 24 - 24))


def pooled(weights: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The largest weights of blocks."""
    rows, cols = (math.ceil(each / by) for each, by in zip(weights.shape, size))
    padded = np.zeros((rows * size[0], cols * size[1]))
    padded[: weights.shape[0], : weights.shape[1]] = weights
    return padded.reshape(rows, size[0], cols, size[1]).max((1, 3))


def addresses(text: str) -> list[str]:
    """Everything in a page that could make a browser ask somebody; names of formats and places in it are none."""
    without = text.replace("http://www.w3.org/", "").replace("url(#", "")
    return re.findall(r"https?:|//[a-z]+\.[a-z]|@import|url\(", without)
