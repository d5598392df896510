"""``regard embed``: embeddings of texts."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path

import numpy as np

from regard._utils.errors import fitting, rejected
from regard._utils.files import write_out
from regard_cli.messages import JsonOutput, echo, note, report_errors, require_writable
from regard_lab.cli.kinds import TEXTS, require_kind
from regard_lab.cli.lines import Lines
from regard_lab.tasks.embedding import Embedder
from regard_lab.text.unknown import UnknownCharacters

#: Output formats: a NumPy array, tab-separated numbers, or one line of JSON per text.
_SUFFIXES = (".npy", ".tsv", ".jsonl")


def run(
    texts: Sequence[str],
    *,
    model: Path,
    data: str | None,
    pooling: str | None,
    normalize: bool | None,
    out: Path | None,
    batch: int,
    json: JsonOutput,
) -> None:
    """Print the vector of each text, or write all to a file."""
    with report_errors("regard-lab"), json:
        require_writable(out, json.file)
        if out is not None and out.suffix not in _SUFFIXES:
            raise rejected("embed", "--out", f"end in {', '.join(_SUFFIXES)}", repr(out.name))
        if out is not None and json.wanted:
            raise rejected("embed", "--json", "be left out with --out, whose suffix sets the format", "both")
        lines = Lines.of("embed", texts, data)
        require_kind("embed", model, *TEXTS)
        embedder = Embedder.load(model, pooling=pooling, normalize=normalize, function="embed")
        note(f"regard: each vector is {embedder.how}")
        found = _embedded(lines, embedder, batch)
        if out is None:
            for text, vector in found:
                if not json.alone:
                    echo(_line(vector))
                json.add(_record(text, vector))
        else:
            written = list(found)
            write_out(out, _file(written, out.suffix))
            note(f"regard: wrote {out}: {len(written):,} vectors of {len(written[0][1]):,} numbers")


def _embedded(lines: Lines, embedder: Embedder, batch: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each text with its vector (E,); report how many were truncated, and characters that are unknown."""
    full = f"embed: out of memory: lower --batch (now {batch})."
    count, cut, unknown = 0, 0, UnknownCharacters()
    for block in lines.blocks():
        for number, text in block:
            if not text:
                raise rejected("embed", lines.where(number), "not be empty", "an empty line")
        with fitting(full, MemoryError):
            inputs = embedder.read([text for _, text in block])
            vectors = embedder.vectors(inputs, batch=batch).numpy()
        count, cut = count + len(block), cut + int(inputs.cut.sum())
        unknown += UnknownCharacters.of(embedder.tokenizer, (text for _, text in block))
        yield from zip((text for _, text in block), vectors)
    if not count:
        raise rejected("embed", lines.name or "TEXT", "hold a text", "none")
    if cut:
        note(f"regard: truncated {cut:,} of {count:,} texts to {embedder.length:,} tokens")
    if unknown:
        note(f"regard: {unknown}")


def _record(text: str, vector: np.ndarray) -> dict[str, object]:
    return {"text": text, "vector": [float(f"{value:.9g}") for value in vector.tolist()]}


def _line(vector: np.ndarray) -> str:
    """Format a vector with the 9 significant digits of float32."""
    return "\t".join(f"{value:.9g}" for value in vector.tolist())


def _file(found: Sequence[tuple[str, np.ndarray]], suffix: str) -> bytes:
    if suffix == ".npy":
        written = io.BytesIO()
        np.save(written, np.stack([vector for _, vector in found]))
        return written.getvalue()
    lines = (dumps(_record(*each), ensure_ascii=False) if suffix == ".jsonl" else _line(each[1]) for each in found)
    return "".join(f"{line}\n" for line in lines).encode()
