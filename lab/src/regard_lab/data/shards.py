"""Token numbers of any amount of text: written to files with bounded memory, and read from there piece by piece."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from regard._utils.errors import rejected
from regard._utils.files import naming, write_atomically
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer, text_blocks

MANIFEST, _ENDS, _PART = "shards.json", "ends.bin", "tokens-{:05}.bin"
_FORMAT, _VERSION = "regard.shards", 1
#: Token numbers of a file; it is closed behind the document that reaches them.
_SHARD = 1 << 28
#: Bytes of a manifest; bytes of tokens whose checksum is looked at where nothing else is asked; bytes hashed at once.
_LARGEST, _VERIFIED, _HASHED = 1 << 24, 1 << 28, 1 << 24
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenShards:
    """Documents as numbers of tokens, one behind the other, in files that are mapped into memory or in arrays.

    Make one by :meth:`open`, :meth:`of` or :func:`write_shards`.

    Attributes
    ----------
    tokens : int
        How many numbers there are.
    vocabulary : int
        Every number is below this.
    ends : ndarray (N,), int64
        Where each document ends.
    tokenizer : str or None
        The checksum of the tokenizer, if known.

    Examples
    --------
    >>> shards = TokenShards.of([[5, 6, 7], [8]])
    >>> len(shards), shards.tokens, shards.document(0).tolist()
    (2, 4, [5, 6, 7])
    """

    def __init__(
        self,
        parts: Sequence[np.ndarray],
        ends: np.ndarray,
        vocabulary: int,
        tokenizer: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self._parts, self.ends, self._folder = list(parts), ends, folder
        self._firsts = np.cumsum([0, *map(len, parts)])[:-1]
        self.tokens, self.vocabulary, self.tokenizer = int(ends[-1]) if len(ends) else 0, vocabulary, tokenizer

    @classmethod
    def of(cls, documents: Ragged | Iterable[Sequence[int]], vocabulary: int | None = None) -> TokenShards:
        """Return documents that are in memory, with the same methods.

        Parameters
        ----------
        documents : Ragged, or iterable of sequence of int
        vocabulary : int, optional
            By default, one more than the largest number.

        Raises
        ------
        ValueError
            If a number is negative, or not below ``vocabulary``.
        """
        ragged = documents if isinstance(documents, Ragged) else Ragged.of(documents)
        least, most = (int(f(ragged.numbers, initial=0)) for f in (np.min, np.max))
        if least < 0 or (vocabulary is not None and most >= vocabulary):
            expected = "have numbers from 0" + ("" if vocabulary is None else f" to {vocabulary - 1}")
            raise rejected("TokenShards.of", "documents", expected, least if least < 0 else most)
        return cls([ragged.numbers], ragged.offsets[1:], most + 1 if vocabulary is None else vocabulary)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool | None = None) -> TokenShards:
        """Map the files that :func:`write_shards` wrote.

        Sizes are always compared with what was written, and numbers with the vocabulary when they are read.

        Parameters
        ----------
        folder : str or Path
        verify : bool, optional
            Read all files once and compare their checksums. By default, where they have less than 256 MiB.

        Raises
        ------
        ValueError
            If the folder has no whole shards: none, an interrupted writing, or files that were cut short or changed.
        """
        folder = Path(folder)
        manifest = _manifest(folder)
        dtype = _DTYPES[manifest["dtype"]]
        if verify is None:
            verify = manifest["tokens"] * dtype.itemsize < _VERIFIED
        parts: list[np.ndarray] = []
        for name, (count, checksum) in sorted(manifest["files"].items()):  # that of ends is the first
            parts.append(_mapped(folder / name, np.dtype("<i8") if name == _ENDS else dtype, count, checksum, verify))
        ends = parts.pop(0)
        total = sum(map(len, parts))
        if total != manifest["tokens"] or (
            len(ends) and (ends[-1] != total or ends[0] < 0 or (np.diff(ends) < 0).any())
        ):
            raise rejected("TokenShards.open", str(folder / _ENDS), "end documents in order", "something else")
        return cls(parts, ends, manifest["vocabulary"], manifest["tokenizer"], folder.absolute())

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.ends)

    def __repr__(self) -> str:
        return f"TokenShards of {len(self):,} documents, {self.tokens:,} tokens"

    def __reduce__(self) -> Any:  # processes that load data map the files themselves
        if self._folder is not None:
            return _reopened, (self._folder,)
        return TokenShards, (self._parts, self.ends, self.vocabulary, self.tokenizer)

    def document(self, row: int) -> np.ndarray:
        """Return the numbers of a document, (length,) int64."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.gather(np.arange(self.ends[row - 1] if row else 0, self.ends[row]))

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at places of all documents one behind the other, int64 of the same shape.

        Raises
        ------
        ValueError
            If one is not below ``vocabulary``: a file was changed since it was written.
        """
        if len(self._parts) == 1:
            numbers = self._parts[0][places]
        else:
            whose = np.searchsorted(self._firsts, places, side="right") - 1
            numbers = np.empty(places.shape, np.int64)
            for part in np.unique(whose).tolist():
                here = whose == part
                numbers[here] = self._parts[part][places[here] - self._firsts[part]]
        if numbers.size and int(numbers.max()) >= self.vocabulary:
            where = "documents" if self._folder is None else str(self._folder)
            raise rejected("TokenShards", where, f"have numbers below {self.vocabulary}", int(numbers.max()))
        return numbers.astype(np.int64, copy=False)


def write_shards(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    specials: bool = True,
    size: int = _SHARD,
    progress: Callable[[int, int], None] | None = None,
) -> TokenShards:
    """Write the numbers of documents to files, of which a few megabytes are in memory at a time.

    Numbers take two bytes where the vocabulary has at most 65,536, else four. What says that the files are whole,
    ``shards.json`` with their sizes and checksums, is written last.

    Parameters
    ----------
    documents : iterable of str
    tokenizer : Tokenizer
    folder : str or Path
        Made if missing. Files of a writing that was interrupted are replaced.
    specials : bool, default True
        Put around each document what the tokenizer has of begin, cls and sep, and end.
    size : int, default 2 ** 28
        Numbers of a file, or a few more.
    progress : callable, optional
        Called with the documents and tokens so far, now and then.

    Returns
    -------
    TokenShards

    Raises
    ------
    ValueError
        If there is no document, or the folder has whole shards already.
    OSError
        If a file cannot be written.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> tokenizer = Tokenizer.learn([], kind="bytes")
    >>> with TemporaryDirectory() as folder:
    ...     shards = write_shards(["to be", "or not"], tokenizer, folder)
    ...     print(shards, tokenizer.decode(shards.document(1), specials=True))
    TokenShards of 2 documents, 15 tokens <|endoftext|>or not<|endoftext|>
    """
    folder = Path(folder)
    if size < 1:
        raise rejected("write_shards", "size", "be at least 1", size)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise rejected("write_shards", str(folder), "have no shards yet", f"one with {MANIFEST}")
    for path in (*folder.glob("tokens-*.bin"), folder / _ENDS):
        path.unlink(missing_ok=True)
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    count = total = 0
    with ExitStack() as opened:
        ends, files = _File(folder / _ENDS, "<i8", opened), [_File(folder / _PART.format(0), _DTYPES[dtype], opened)]
        for block in text_blocks(documents):
            numbers = tokenizer.encode_all(block, specials=specials)
            if specials:
                numbers = _enclosed(numbers, tokenizer)
            if files[-1].count >= size:
                files[-1].close()
                files.append(_File(folder / _PART.format(len(files)), _DTYPES[dtype], opened))
            files[-1].write(numbers.numbers)
            ends.write(numbers.offsets[1:] + total)
            count, total = count + len(numbers), total + len(numbers.numbers)
            if progress is not None:
                progress(count, total)
        if not total:
            raise rejected("write_shards", "documents", "have a document that is not empty", "none")
        written = {file.path.name: file.close() for file in [*files, ends]}
    manifest = {"format": _FORMAT, "version": _VERSION, "vocabulary": len(tokenizer), "dtype": dtype}
    manifest |= {"tokens": total, "documents": count, "tokenizer": tokenizer.checksum(), "files": written}
    manifest |= {"sha256": _sealed(manifest)}
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return TokenShards.open(folder, verify=False)


class _File:
    """An array that grows in a file."""

    def __init__(self, path: Path, dtype: str | np.dtype[Any], opened: ExitStack) -> None:
        self.path, self.count, self._dtype, self._sum = path, 0, dtype, hashlib.sha256()
        with naming(path):
            self._file: BinaryIO = opened.enter_context(path.open("wb"))

    def write(self, numbers: np.ndarray) -> None:
        data = numbers.astype(self._dtype).tobytes()
        self.count += len(numbers)
        self._sum.update(data)
        with naming(self.path):
            self._file.write(data)

    def close(self) -> tuple[int, str]:
        """Return how many numbers it has, and its checksum."""
        if not self._file.closed:
            with naming(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
        return self.count, self._sum.hexdigest()


def _enclosed(documents: Ragged, tokenizer: Tokenizer) -> Ragged:
    """Return documents with begin and end, where the tokenizer has them and did not put them there itself."""
    lengths, numbers, offsets = documents.lengths, documents.numbers, documents.offsets
    places, values = np.repeat(offsets[:-1], 2), np.zeros((len(documents), 2), np.int32)
    places[1::2] = offsets[1:]
    wanted = np.zeros((len(documents), 2), bool)
    some = lengths > 0
    if tokenizer.begin is not None and tokenizer.cls is None:
        wanted[:, 0], values[:, 0] = True, tokenizer.begin
        wanted[some, 0] = numbers[offsets[:-1][some]] != tokenizer.begin
    if tokenizer.end is not None:
        wanted[:, 1], values[:, 1] = True, tokenizer.end
        wanted[some, 1] = numbers[offsets[1:][some] - 1] != tokenizer.end
        # Where one token is both, a document of nothing else has its beginning alone.
        wanted[lengths == 1, 1] |= tokenizer.end == tokenizer.begin
    numbers = np.insert(numbers, places[wanted.ravel()], values.ravel()[wanted.ravel()])
    return Ragged(numbers, np.concatenate([[0], np.cumsum(lengths + wanted.sum(1))]))


def _reopened(folder: Path) -> TokenShards:
    return TokenShards.open(folder, verify=False)


def _manifest(folder: Path) -> dict[str, Any]:
    """Return what says that shards are whole, checked."""
    path = folder / MANIFEST

    def wrong(expected: str, got: str, where: Path = path) -> Exception:
        return rejected("TokenShards.open", str(where), expected, got)

    if not folder.is_dir():
        raise wrong("be a folder of shards", "a file" if folder.exists() else "no such folder", folder)
    if not path.exists():
        begun = (folder / _ENDS).exists()
        raise wrong(f"have a {MANIFEST}", "a writing that was interrupted: write it again" if begun else "none", folder)
    with path.open("rb") as file:
        data = file.read(_LARGEST)
    try:
        said = json.loads(data)
        if said["format"] != _FORMAT or said["version"] != _VERSION:
            raise wrong(f"be of format {_FORMAT}, version {_VERSION}", "another")
        if said.pop("sha256") != _sealed(said):
            raise wrong("be as it was written", "one that was changed since")
        whole = [said["tokens"], said["vocabulary"], *(count for count, _ in said["files"].values())]
        names = {_ENDS, *(_PART.format(i) for i in range(len(said["files"]) - 1))}
        if (
            said["dtype"] not in _DTYPES
            or names != set(said["files"])
            or any(type(n) is not int or n < 0 for n in whole)
        ):
            raise wrong("describe shards", "something else")
    except (LookupError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise wrong(f"be the {MANIFEST} of shards", "something else") from None
    return said


def _mapped(path: Path, dtype: np.dtype[Any], count: int, checksum: str, verify: bool) -> np.ndarray:
    def wrong(expected: str, got: object) -> Exception:
        return rejected("TokenShards.open", str(path), expected, got)

    if not path.is_file():
        raise wrong("exist", "no such file")
    if path.stat().st_size != count * dtype.itemsize:
        raise wrong(f"have {count * dtype.itemsize:,} bytes", f"{path.stat().st_size:,}: cut short or changed")
    if not count:
        return np.zeros(0, dtype)
    if verify:
        found = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(_HASHED):
                found.update(data)
        if found.hexdigest() != checksum:
            raise wrong(f"be the file that {MANIFEST} was written with", "one with another checksum")
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))


def _sealed(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
