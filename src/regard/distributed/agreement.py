"""Whether all ranks can run a call and ask for the same, before the first of its messages travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch

from regard._errors import rejected
from regard.distributed.ring import Ring

#: Numbers and bytes that each rank sends: those of a call, and those of the text of an error.
HEADER, TEXT = 32, 2048
#: The errors that other ranks raise where one refuses; any other is a RuntimeError there.
KINDS: tuple[type[Exception], ...] = (ValueError, TypeError)
#: The names of the tensors whose shapes are compared, and their dimensions.
TENSORS, DIMENSIONS = ("query", "key", "value"), 4


def check_agreement(
    ring: Ring, shapes: Sequence[tuple[int, ...]], facts: Mapping[str, object], refusal: Exception | None
) -> None:
    """Raise on every rank, in one sentence, unless all can run the call and state the same shapes and facts.

    It costs one exchange, and a second one if some rank refuses and another does not. After it no message is left on
    the way, so that the ranks can call again.

    Parameters
    ----------
    ring : Ring
    shapes : sequence of tuple of int
        Those of query, key and value, (B, heads, length, width) each; empty where the arguments have none.
    facts : dict of str to object
        What prints the same on all ranks; equally many on all that do not refuse.
    refusal : Exception or None
        Why this rank cannot run the call.

    Raises
    ------
    ValueError
        If shapes or facts differ.
    Exception
        The refusal; on the other ranks, an error of the same type that names the rank that refuses, and its reason.
    """
    own = [_kind(refusal), len(shapes), *(size for each in shapes for size in each)]
    own += [crc32(str(fact).encode()) for fact in facts.values()]
    header = torch.zeros(HEADER, dtype=torch.int64)
    header[: len(own)] = torch.tensor(own)
    rows = [found.tolist() for found in ring.gathered(header.to(ring.device))]
    _check_shapes(rows)
    _check_refusals(ring, [row[0] for row in rows], refusal)
    first = 2 + len(shapes) * DIMENSIONS
    for column, (name, fact) in enumerate(facts.items(), first):
        for rank, row in enumerate(rows):
            if row[column] != rows[0][column]:
                came = f"{fact} on rank {ring.rank}, and ranks 0 and {rank} differ"
                raise rejected("ring_attention", name, "be the same on all ranks", came)


def _kind(refusal: Exception | None) -> int:
    """Return 0 for no refusal, or 1 more than the place of its type among the known ones."""
    if refusal is None:
        return 0
    return 1 + next((i for i, kind in enumerate(KINDS) if isinstance(refusal, kind)), len(KINDS))


def _check_shapes(rows: list[list[int]]) -> None:
    known = [rank for rank, row in enumerate(rows) if row[1]]
    for i, name in enumerate(TENSORS):
        span = slice(2 + i * DIMENSIONS, 2 + (i + 1) * DIMENSIONS)
        for rank in known:
            if rows[rank][span] != rows[known[0]][span]:
                one, other = (f"{tuple(rows[r][span])} on rank {r}" for r in (known[0], rank))
                raise rejected("ring_attention", name, "have the same shape on all ranks", f"{one} and {other}")


def _check_refusals(ring: Ring, kinds: list[int], refusal: Exception | None) -> None:
    """Raise this rank's refusal, or that of the first rank that refuses."""
    if not any(kinds):
        return
    if not all(kinds):  # those that refuse say why
        text = "" if refusal is None else " ".join(str(refusal).split()) or type(refusal).__name__
        sent = torch.zeros(TEXT, dtype=torch.uint8)
        encoded = text.encode()[:TEXT]
        sent[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        texts = ring.gathered(sent.to(ring.device))
        if refusal is None:
            rank = next(rank for rank, kind in enumerate(kinds) if kind)
            reason = bytes(texts[rank].tolist()).rstrip(b"\0").decode(errors="ignore")
            kind = (*KINDS, RuntimeError)[kinds[rank] - 1]
            raise kind(f"ring_attention: rank {rank} cannot run this call, so no rank does ({reason.rstrip('.')}).")
    assert refusal is not None
    raise refusal
