"""Tokens of large texts: stored in memory-mapped files, and packed into rows of a fixed length."""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.files import naming, write_atomically
from regard_lab.data.batches import Endless, TensorBatch
from regard_lab.text.ragged import Ragged
from regard_lab.text.tokenizer import Tokenizer, text_blocks

# Files of token ids: written with bounded memory, and mapped into memory for reading ----------------------------------


MANIFEST, _ENDS, _PART = "shards.json", "ends.bin", "tokens-{:05}.bin"
_FORMAT, _VERSION = "regard.shards", 1
#: Tokens per file; a file ends after the document that reaches this number.
_SHARD = 1 << 28
#: Maximum size of a manifest; size of tokens up to which checksums are verified by default; bytes to hash at once.
_LARGEST, _VERIFIED, _HASHED = 1 << 24, 1 << 28, 1 << 24
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenShards:
    """Token ids of documents, concatenated, in memory-mapped files or in arrays.

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
        """Return documents in memory, with the same methods.

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
        for name, (count, checksum) in sorted(manifest["files"].items()):  # the file of ends comes first
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

    def __reduce__(self) -> Any:  # worker processes map the files themselves
        if self._folder is not None:
            return _reopened, (self._folder,)
        return TokenShards, (self._parts, self.ends, self.vocabulary, self.tokenizer)

    def document(self, row: int) -> np.ndarray:
        """Return the token ids of a document, (length,) int64."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.gather(np.arange(self.ends[row - 1] if row else 0, self.ends[row]))

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Return the token ids at positions in the concatenated documents, int64 of the same shape.

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
    """Write the tokens of documents to files, with a few megabytes in memory at a time.

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
        """Return its length and checksum."""
        if not self._file.closed:
            with naming(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
        return self.count, self._sum.hexdigest()


def _enclosed(documents: Ragged, tokenizer: Tokenizer) -> Ragged:
    """Return documents with begin and end tokens, if the tokenizer has them and does not add them itself."""
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
        # If one token is both begin and end, an empty document is that token alone.
        wanted[lengths == 1, 1] |= tokenizer.end == tokenizer.begin
    numbers = np.insert(numbers, places[wanted.ravel()], values.ravel()[wanted.ravel()])
    return Ragged(numbers, np.concatenate([[0], np.cumsum(lengths + wanted.sum(1))]))


def _reopened(folder: Path) -> TokenShards:
    return TokenShards.open(folder, verify=False)


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the checked manifest of a folder of shards."""
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


# Layout of runs of tokens in rows of a fixed length: by best fit, or as windows over documents ------------------------


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive tokens: start, length, and number of first targets that are left out, (C,) each."""

    starts: np.ndarray
    lengths: np.ndarray
    skips: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Runs in rows.

    Row r has the slots ``firsts[r]`` to ``firsts[r + 1]``; slot s begins at ``offsets[s]`` of its row and has run
    ``runs_of[s]``; rows come in this ``order``.
    """

    runs: Runs
    firsts: np.ndarray
    offsets: np.ndarray
    runs_of: np.ndarray
    order: np.ndarray


def best_fit(runs: Runs, length: int) -> Rows:
    """Return runs in rows by best fit, the longest first.

    Runs of a length, and rows in which lengths follow each other alike, are counted, not gone through: this takes time
    for each different length (Krell 2021, arXiv 2107.02027).

    Examples
    --------
    >>> rows = best_fit(Runs(np.array([0, 9, 20, 30]), np.array([3, 7, 5, 2]), np.zeros(4, int)), 8)
    >>> [rows.runs.lengths[rows.runs_of[a:b]].tolist() for a, b in zip(rows.firsts, rows.firsts[1:])]
    [[5, 3], [7], [2]]
    """
    counts = np.bincount(runs.lengths, minlength=1)
    rows: dict[int, dict[tuple[int, ...], int]] = {}  # room left: (lengths in a row, number of such rows)
    rooms: list[int] = []  # its keys, sorted

    def add(room: int, pattern: tuple[int, ...], count: int) -> None:
        if room not in rows:
            rows[room] = {}
            insort(rooms, room)
        rows[room][pattern] = rows[room].get(pattern, 0) + count

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                pattern, count = rows[room].popitem()
                if not rows[room]:
                    del rows[room], rooms[at]
            else:
                room, pattern, count = length, (), -(-left // (length // size))
            each = room // size
            full = min(count, left // each)
            rest = left - full * each if full < count else 0  # in one more row
            if full:
                add(room - each * size, (*pattern, *(size,) * each), full)
            if rest:
                add(room - rest * size, (*pattern, *(size,) * rest), 1)
            if others := count - full - (rest > 0):
                add(room, pattern, others)
            left -= full * each + rest
    groups = [(np.array(pattern), count) for room in rooms for pattern, count in rows[room].items()]
    sizes = np.concatenate([np.tile(pattern, count) for pattern, count in groups])
    offsets = np.concatenate([np.tile(np.cumsum(pattern) - pattern, count) for pattern, count in groups])
    slots = np.concatenate([np.full(count, len(pattern)) for pattern, count in groups])
    runs_of = np.empty_like(sizes)
    runs_of[np.argsort(sizes, kind="stable")] = np.argsort(runs.lengths, kind="stable")
    return Rows(runs, np.concatenate([[0], np.cumsum(slots)]), offsets, runs_of, np.arange(len(slots)))


def windows(begins: np.ndarray, reads: np.ndarray, length: int, stride: int) -> Runs:
    """Return windows over documents, each without the targets of earlier windows.

    Parameters
    ----------
    begins, reads : ndarray (N,)
        Where each document begins, and how many of its tokens are read.
    length, stride : int
        Of a window, and from one to the next.

    Examples
    --------
    >>> runs = windows(np.array([100]), np.array([10]), 6, 3)
    >>> runs.starts.tolist(), runs.lengths.tolist(), runs.skips.tolist()
    ([100, 103, 104], [6, 6, 6], [0, 3, 5])
    """
    count = 1 + -(-np.maximum(reads - length, 0) // stride)
    number, whose = ranges(np.zeros_like(count), count)
    reads = reads[whose]
    ends = np.minimum(length + number * stride, reads)
    starts = np.maximum(ends - length, 0)
    before = np.where(number > 0, length + (number - 1) * stride, 0)
    return Runs(begins[whose] + starts, ends - starts, before - starts * (number > 0))


def ranges(firsts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers of concatenated ranges, and the index of each one's range.

    Examples
    --------
    >>> ranges(np.array([5, 0]), np.array([2, 3]))
    (array([5, 6, 0, 1, 2]), array([0, 0, 1, 1, 1]))
    """
    which = np.repeat(np.arange(len(counts)), counts)
    shift = firsts - (np.cumsum(counts) - counts)
    return np.arange(len(which)) + shift[which], which


# Batches of rows for language models: documents packed side by side, or one stream cut into rows ----------------------


#: The target of positions without one; ``torch.nn.functional.cross_entropy`` ignores it by default.
IGNORE_INDEX = -100
#: The document number of padding.
NO_DOCUMENT = -1


@dataclass(frozen=True)
class LanguageBatch(TensorBatch):
    """Rows of tokens, and the token that follows each.

    Attributes
    ----------
    tokens : Tensor (B, T), int64
        To read.
    targets : Tensor (B, T), int64
        The next token of the same document, or :data:`IGNORE_INDEX` where none is to be predicted.
    documents : Tensor (B, T), int64
        Which document of its row a token is of, from 0; :data:`NO_DOCUMENT` for padding, which stands behind.
    positions : Tensor (B, T), int64
        Where in its document, or the part of it that is in the row; from 0 for padding too.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor

    @property
    def examples(self) -> int:
        """The number of rows."""
        return len(self.tokens)

    @property
    def count(self) -> int:
        """The number of targets."""
        return int((self.targets != IGNORE_INDEX).sum())

    def turned(self, rows: Tensor) -> LanguageBatch:
        """Return the batch with some rows reversed: each target becomes an input that predicts the token before it.

        Parameters
        ----------
        rows : Tensor (B,) of bool

        Examples
        --------
        >>> batch = PackedBatches(TokenShards.of([[5, 6, 7], [8, 9]]), length=4, rows=1).batch(0)
        >>> turned = batch.turned(torch.tensor([True]))
        >>> turned.tokens.tolist(), turned.targets.tolist()
        ([[0, 9, 7, 6]], [[-100, 8, 6, 5]])
        >>> turned.documents.tolist(), turned.positions.tolist()
        ([[-1, 1, 0, 0]], [[0, 0, 0, 1]])
        """
        missing = self.targets == IGNORE_INDEX
        tokens = torch.where(missing, self.tokens, self.targets).flip(1)
        targets = self.tokens.masked_fill(missing, IGNORE_INDEX).flip(1)
        documents = self.documents.flip(1)
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        begins = F.pad(documents.diff() != 0, (1, 0))
        positions = steps - (steps * begins).cummax(1).values
        made = zip((tokens, targets, documents, positions), (self.tokens, self.targets, self.documents, self.positions))
        return LanguageBatch(*(torch.where(rows[:, None], back, forward) for back, forward in made))


class LanguageBatches(Endless[LanguageBatch]):
    """Endless shuffled batches of rows.

    Batch k depends only on the data, the seed and k, so that a resumed run continues exactly where it stopped.
    In every epoch each token that has one before it in its document is a target once. All batches have one shape; the
    rows that are missing for whole batches are empty ones, evenly spread.

    Parameters
    ----------
    shards : TokenShards
        Read where a batch needs it.
    length : int
        T, tokens of a row.
    rows : int
        B, rows of a batch.
    seed : int, default 0
    rank, world : int, default 0 and 1
        Of ``world`` processes that train one model, each takes other rows, and equally many batches. (With one row in
        a batch, the last batch of some may be empty.)
    pad : int, default 0
        The number that padding has.

    Attributes
    ----------
    separate : bool
        Whether rows have several documents, which are not to see each other.

    Raises
    ------
    ValueError
        If no document has two tokens, there are fewer rows than processes, or an argument is out of its range.
    """

    separate: bool

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        rows: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        pad: int = 0,
    ) -> None:
        name = type(self).__name__
        for argument, value, least in (
            ("length", length, 1),
            ("rows", rows, 1),
            ("seed", seed, 0),
            ("world", world, 1),
        ):
            if value < least:
                raise rejected(name, argument, f"be at least {least}", value)
        if not 0 <= rank < world:
            raise rejected(name, "rank", f"be from 0 to {world - 1}, below world", rank)
        if not 0 <= pad < max(shards.vocabulary, 1):
            raise rejected(name, "pad", f"be from 0 to {shards.vocabulary - 1}, below the vocabulary", pad)
        self._shards, self._length, self._size, self._seed, self._pad = shards, length, rows, seed, pad
        self._rank, self._world = rank, world
        # Predicted tokens: a document of n tokens has n - 1.
        self._begins, self._reads = self._stretches()
        self.targets = int(self._reads.sum())
        if not self.targets:
            raise rejected(name, "shards", "have a document of two tokens or more", repr(shards))
        self._drawn: tuple[int, Rows] | None = None
        self._rows = self._count()
        if world > self._rows:
            raise rejected(name, "world", f"be at most the number of rows, {self._rows}", world)

    @abstractmethod
    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where documents begin, and how many of their tokens have a successor."""

    @abstractmethod
    def _count(self) -> int:
        """Return the number of rows per epoch."""

    @abstractmethod
    def _epoch(self, random: np.random.Generator) -> Rows:
        """Return the rows of an epoch."""

    @property
    def per_epoch(self) -> int:
        """The number of batches per epoch (for each process)."""
        return self._steps(self._rows)

    @property
    def padding(self) -> float:
        """The share of positions without a target in the rows of an epoch."""
        return 1 - self.targets / (self._rows * self._length)

    def batch(self, number: int) -> LanguageBatch:
        """Return a batch by its number, counted from 0 over all epochs, in any order.

        Raises
        ------
        ValueError
            If the number is negative.
        """
        if number < 0:
            raise rejected("batch", "number", "be at least 0", number)
        epoch, step = divmod(number, self.per_epoch)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._epoch(np.random.default_rng([self._seed, epoch])))
        return self._made(self._drawn[1], step)

    def once(self, stride: int | None = None) -> Iterator[LanguageBatch]:
        """For evaluation: yield every target once, always in the same batches.

        What is longer than a row is read by a window of T tokens that moves on by ``stride``; of each, the targets
        behind those of the one before it count, which see at least T − stride tokens. A smaller stride gives more
        context, and takes T / stride times as long. With several processes, each yields equally many batches.

        Parameters
        ----------
        stride : int, optional
            From 1 to T; T by default.
        """
        stride = self._length if stride is None else stride
        if not 1 <= stride <= self._length:
            raise rejected("once", "stride", f"be from 1 to {self._length}, the length of rows", stride)
        rows = best_fit(windows(self._begins, self._reads, self._length, stride), self._length)
        return (self._made(rows, step) for step in range(self._steps(len(rows.order))))

    def _steps(self, rows: int) -> int:
        return -(-rows // (self._size * self._world))

    def _made(self, rows: Rows, step: int) -> LanguageBatch:
        """Return this process's batch of a step: an even share of the step's rows."""
        count = len(rows.order)
        groups = self._steps(count) * self._world
        begin, end = (count * (step * self._world + self._rank + i) // groups for i in (0, 1))
        chosen = rows.order[begin:end]
        B, T = self._size, self._length
        slots, which = ranges(rows.firsts[chosen], rows.firsts[chosen + 1] - rows.firsts[chosen])
        run = rows.runs_of[slots]
        lengths = rows.runs.lengths[run]
        within, _ = ranges(np.zeros_like(lengths), lengths)
        there = np.repeat(which * T + rows.offsets[slots], lengths) + within
        places = np.repeat(rows.runs.starts[run], lengths) + within
        tokens, targets = np.full(B * T, self._pad), np.full(B * T, IGNORE_INDEX)
        documents, positions = np.full(B * T, NO_DOCUMENT), np.empty(B * T, np.int64)
        used = np.bincount(which, lengths, minlength=B).astype(np.int64)
        positions[:] = (np.arange(T) - used[:, None]).ravel()
        tokens[there] = self._shards.gather(places)
        follows = self._shards.gather(places + 1)
        follows[within < np.repeat(rows.runs.skips[run], lengths)] = IGNORE_INDEX
        targets[there] = follows
        documents[there] = np.repeat(slots - rows.firsts[chosen][which], lengths)
        positions[there] = within
        return LanguageBatch(
            *(torch.from_numpy(each.reshape(B, T)) for each in (tokens, targets, documents, positions))
        )


@final
class PackedBatches(LanguageBatches):
    """Rows filled with documents side by side that do not attend to each other.

    Documents longer than a row are cut into parts of T places; all parts are put into rows by best fit, the longest
    first, once. In each epoch, parts of equal lengths are drawn into their places anew, and rows are shuffled.

    Best fit leaves little room empty, and cuts no document that fits a row (Ding 2024, arXiv 2404.10830). What is put
    where depends on lengths alone, so it is found for each length rather than for each document.

    Parameters
    ----------
    shards, length, rows, seed, rank, world, pad
        As of :class:`LanguageBatches`.

    Examples
    --------
    >>> shards = TokenShards.of([[5, 6, 7], [8, 9]])
    >>> batches = PackedBatches(shards, length=4, rows=1)
    >>> batch = batches.batch(0)
    >>> batch.tokens.tolist(), batch.targets.tolist()
    ([[5, 6, 8, 0]], [[6, 7, 9, -100]])
    >>> batch.documents.tolist(), batch.positions.tolist()
    ([[0, 0, 1, -1]], [[0, 1, 0, 0]])
    """

    separate = True

    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.asarray(self._shards.ends)
        begins = np.concatenate([[0], ends[:-1]])
        reads = np.maximum(ends - begins - 1, 0)
        return begins[reads > 0], reads[reads > 0]

    def _count(self) -> int:
        T = self._length
        parts = -(-self._reads // T)
        number, whose = ranges(np.zeros_like(parts), parts)
        starts, lengths = self._begins[whose] + number * T, np.minimum(self._reads[whose] - number * T, T)
        self._layout = best_fit(Runs(starts, lengths, np.zeros(1, np.int64).repeat(len(starts))), T)
        # Shuffle runs of equal length; both lists are sorted by length.
        self._slots = np.argsort(lengths[self._layout.runs_of], kind="stable")
        self._sorted = self._layout.runs_of[self._slots]
        self._ties = np.cumsum(np.diff(lengths[self._sorted], prepend=0) != 0, dtype=np.float64)
        return len(self._layout.order)

    def _epoch(self, random: np.random.Generator) -> Rows:
        runs_of = np.empty_like(self._sorted)
        runs_of[self._slots] = self._sorted[np.argsort(self._ties + random.random(len(self._ties)))]
        layout = self._layout
        return Rows(layout.runs, layout.firsts, layout.offsets, runs_of, random.permutation(self._rows))


@final
class StreamBatches(LanguageBatches):
    """Rows cut from the concatenated documents, which attend to each other: for one long text, or as in GPT-2.

    In each epoch the stream is cut from another place on, as if its end were joined to its beginning; but nothing is
    predicted across this, and the row where it lies has two documents.

    Parameters
    ----------
    shards, length, rows, seed, rank, world, pad
        As of :class:`LanguageBatches`.

    Examples
    --------
    >>> batches = StreamBatches(TokenShards.of([[0, 1, 2, 3, 4], [5, 6, 7, 8]]), length=4, rows=2)
    >>> sorted(batches.batch(0).targets.flatten().tolist())
    [1, 2, 3, 4, 5, 6, 7, 8]
    """

    separate = False

    def _stretches(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(1, np.int64), np.array([max(self._shards.tokens - 1, 0)])

    def _count(self) -> int:
        return -(-self.targets // self._length)

    def _epoch(self, random: np.random.Generator) -> Rows:
        T, M, count = self._length, self.targets, self._rows
        starts = (int(random.integers(M)) + T * np.arange(count)) % M
        lengths = np.full(count, T)
        lengths[-1] = M - T * (count - 1)
        firsts, offsets = np.arange(count + 1), np.zeros(count, np.int64)
        joined = np.flatnonzero(starts + lengths > M)  # one row at most
        if len(joined):
            row = int(joined[0])
            before = M - int(starts[row])
            rest = int(lengths[row]) - before
            lengths[row] = before
            starts, lengths = np.insert(starts, row + 1, 0), np.insert(lengths, row + 1, rest)
            offsets = np.insert(offsets, row + 1, before)
            firsts[row + 1 :] += 1
        runs = Runs(starts, lengths, np.zeros(len(starts), np.int64))
        return Rows(runs, firsts, offsets, np.arange(len(starts)), random.permutation(count))
