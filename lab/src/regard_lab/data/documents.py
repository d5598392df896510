"""Documents for language models: streamed from files and folders of text, one document at a time."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected, unknown_name
from regard._utils.files import display_name, not_text, open_file

#: Units that can be a document in a text file.
UNITS = ("file", "line", "paragraph")
#: Maximum number of characters of a document; longer ones are split.
LONGEST = 1 << 24
#: Number of bytes to read at a time, and the limit for a line of JSON, which cannot be split.
_PIECE, _LONGEST_JSON = 1 << 16, 1 << 26
#: Suffixes of files with lines of JSON.
_JSON = (".jsonl", ".ndjson", ".json")


def read_documents(
    paths: str | Path | Iterable[str | Path],
    *,
    per: str = "file",
    field: str = "text",
    max_length: int = LONGEST,
    function: str = "read_documents",
) -> Iterator[str]:
    r"""Yield the documents of files, in order, one at a time.

    Files are UTF-8 text, or lines of JSON if their name ends in ``.jsonl``, ``.ndjson`` or ``.json``; both may be
    gzip-compressed. Documents of only white space are skipped. Unpaired surrogates, which JSON allows, become U+FFFD.

    Parameters
    ----------
    paths : str, Path, or iterable of them
        ``"-"`` is standard input, as text. Folders are read recursively, in the order of file names, without hidden
        files.
    per : {"file", "line", "paragraph"}, default "file"
        The unit of a document in a text file. Empty lines separate paragraphs. A line of JSON is always a document.
    field : str, default "text"
        The field with the text in a line of JSON.
    max_length : int, default 2 ** 24
        The most characters of a document; longer ones are split, at line ends if possible.
    function : str
        Prefix of error messages.

    Yields
    ------
    str

    Raises
    ------
    ValueError
        If a file is missing, unreadable, binary, truncated or not UTF-8, a line is not JSON or lacks the field, or
        there are no documents. The message names the file and line.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("One.\n\nTwo\nlines.\n")
    ...     _ = Path(folder, "b.jsonl").write_text('{"text": "Three."}\n')
    ...     print(list(read_documents(folder, per="paragraph")))
    ['One.', 'Two\nlines.', 'Three.']
    """
    if per not in UNITS:
        raise unknown_name(function, "per", per, UNITS)
    if max_length < 1:
        raise rejected(function, "max_length", "be at least 1", max_length)
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    if not named:
        raise rejected(function, "paths", "name a file or folder", "none")
    for path in named:
        if str(path) != "-" and not os.path.lexists(path):
            raise rejected(function, str(path), "exist", "no such file or folder")
    return _documents(named, per, field, max_length, function)


def _documents(paths: list[str | Path], per: str, field: str, max_length: int, function: str) -> Iterator[str]:
    some = False
    for path in (file for named in paths for file in _files(named)):
        if _is_json(path):
            documents = _of_json(path, field, max_length, function)
        else:
            documents = _assembled(_pieces(path, function), per, max_length)
        for document in documents:
            if document and not document.isspace():
                some = True
                yield document
    if not some:
        names = ", ".join(display_name(path) for path in paths)
        raise rejected(function, names, "have a document that is not empty", "none")


def _files(path: str | Path) -> Iterator[str | Path]:
    if str(path) == "-" or not Path(path).is_dir():
        yield path
        return
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _is_json(path: str | Path) -> bool:
    return str(path).lower().removesuffix(".gz").endswith(_JSON)


def _pieces(path: str | Path, function: str) -> Iterator[str]:
    """Yield the text of a file by lines; long lines in pieces."""
    name = display_name(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, before, held = 1, 0, 0  # line number, bytes of the line read so far, and bytes not decoded yet
    with open_file(path, function) as file:
        while True:
            raw = file.readline(_PIECE)
            if number == 1 and not before:
                raw, head = raw.removeprefix(codecs.BOM_UTF8), raw
            else:
                head = raw
            try:
                text = decoder.decode(raw, final=not head)
            except UnicodeDecodeError as error:
                raise not_text(function, name, number, error.object, error, before - held) from None
            if "\0" in text:
                raise not_text(function, name, number, raw)
            if not head:
                return
            if text:
                yield text
            before, held = before + len(head), len(decoder.getstate()[0])
            if raw.endswith(b"\n"):
                number, before = number + 1, 0


def _assembled(pieces: Iterator[str], per: str, max_length: int) -> Iterator[str]:
    """Assemble documents from lines and pieces of lines."""
    held: list[str] = []
    size, fresh = 0, True
    for piece in pieces:
        ends = piece.endswith("\n")
        if per == "paragraph" and fresh and ends and piece.isspace():
            yield "".join(held).rstrip("\r\n")
            held, size = [], 0
            continue
        if size + len(piece) > max_length:
            yield "".join(held)
            held, size = [], 0
        fresh = ends
        *whole, rest = _cut(piece, max_length)
        yield from whole
        held.append(rest)
        size += len(rest)
        if per == "line" and ends:
            yield "".join(held).rstrip("\r\n")
            held, size = [], 0
    yield "".join(held) if per == "file" else "".join(held).rstrip("\r\n")


def _cut(text: str, max_length: int) -> Iterator[str]:
    for begin in range(0, len(text), max_length):
        yield text[begin : begin + max_length]


def _of_json(path: str | Path, field: str, max_length: int, function: str) -> Iterator[str]:
    name = display_name(path)
    with open_file(path, function) as file:
        number = 0
        while raw := file.readline(_LONGEST_JSON):
            number += 1
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            where = f"{name}, line {number}"
            if len(raw) == _LONGEST_JSON and not raw.endswith(b"\n"):
                raise rejected(function, where, f"have fewer than {_LONGEST_JSON:,} bytes", "more")
            if not raw.isspace() and raw:
                yield from _cut(_field(raw, field, function, name, number), max_length)


def _field(raw: bytes, field: str, function: str, name: str, number: int) -> str:
    """Return the text of a line of JSON."""
    if b"\0" in raw:
        raise not_text(function, name, number, raw)
    where, expected = f"{name}, line {number}", f"be a JSON object with a text field {field!r}"
    try:
        said: Any = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise not_text(function, name, number, raw, error) from None
    except (ValueError, RecursionError) as error:
        raise rejected(function, where, expected, f"no JSON ({error})") from None
    if not isinstance(said, dict):
        raise rejected(function, where, expected, f"JSON of type {type(said).__name__}")
    text = said.get(field, ...)
    if not isinstance(text, str):
        got = f"no such field, but {', '.join(map(repr, list(said)[:8])) or 'none'}" if text is ... else repr(text)
        raise rejected(function, where, expected, got)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
