"""Communication around the ring of ranks, and the check that all ranks make the same call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from regard._utils.errors import rejected

# Communication around the ring ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """An asynchronous exchange. Do not write to the sent tensor before :meth:`wait`.

    Attributes
    ----------
    sent, received : Tensor
    to, source : int
        Destination and source ranks.
    works : list of dist.Work
    """

    sent: Tensor
    received: Tensor
    to: int
    source: int
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return the received tensor.

        Raises
        ------
        RuntimeError
            If a rank died or did not respond within the group's timeout.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _rank_failed(self.to, self.source, error) from error
        return self.received


def _rank_failed(to: int, source: int, error: RuntimeError) -> RuntimeError:
    who = f"rank {to}" if to == source else f"rank {to} or rank {source}"
    return RuntimeError(f"ring_attention: {who} of the group died or timed out ({_reason(error)}).")


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of the backend's message, without file and line."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.split("] ", 1)[-1].split(". ")[0].rstrip(".")


@dataclass(frozen=True)
class Ring:
    """The ranks of a group, in cyclic order.

    Attributes
    ----------
    group : ProcessGroup
    rank, size : int
        Rank of this process, and number of ranks.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, function: str, group: dist.ProcessGroup | None) -> Ring:
        """Return the ring of a group; None is all processes."""
        if not (dist.is_available() and dist.is_initialized()):
            expected = "belong to an initialized torch.distributed (call init_process_group first, in every process)"
            raise rejected(function, "group", expected, group)
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise rejected(function, "group", "be a ProcessGroup that contains this process", type(group).__name__)
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    @property
    def device(self) -> torch.device:
        """Device of small messages: the CPU, or the current GPU if the backend requires it."""
        if "cpu" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def behind(self, hops: int) -> int:
        """Return the rank ``hops`` positions before this one."""
        return (self.rank - hops) % self.size

    def exchange(self, tensor: Tensor, to: int, source: int) -> Pending:
        """Start sending a contiguous tensor to a rank, and receiving one of the same shape from another."""
        received = torch.empty_like(tensor)
        try:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, dist.get_global_rank(self.group, to), self.group),
                    dist.P2POp(dist.irecv, received, dist.get_global_rank(self.group, source), self.group),
                ]
            )
        except RuntimeError as error:
            raise _rank_failed(to, source, error) from error
        return Pending(tensor, received, to, source, works)

    def shift(self, tensor: Tensor) -> Pending:
        """Start sending a tensor to the next rank, and receiving from the previous one."""
        return self.exchange(tensor, self.behind(-1), self.behind(1))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have equal shapes."""
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(found, tensor, group=self.group)
        except RuntimeError as error:
            reason = _reason(error)
            raise RuntimeError(f"ring_attention: a rank of the group died or timed out ({reason}).") from error
        return found


# Agreement of all ranks before a call ---------------------------------------------------------------------------------


#: Sizes of the messages of each rank: integers that describe a call, and bytes of an error message.
HEADER, TEXT = 32, 2048
#: Error types that are the same on other ranks; all others become RuntimeError there.
KINDS: tuple[type[Exception], ...] = (ValueError, TypeError)
#: Names of the tensors whose shapes are compared, and their number of dimensions.
TENSORS, DIMENSIONS = ("query", "key", "value"), 4


def check_agreement(
    ring: Ring, shapes: Sequence[tuple[int, ...]], facts: Mapping[str, object], refusal: Exception | None
) -> None:
    """Raise on every rank unless all ranks can run the call, with the same shapes and settings.

    It takes one exchange, and a second one if some but not all ranks refuse. No messages are left pending, so the ranks
    can call again.

    Parameters
    ----------
    ring : Ring
    shapes : sequence of tuple of int
        Shapes of query, key and value, (B, heads, length, width) each; empty if the arguments are invalid.
    facts : dict of str to object
        Settings whose text must be the same on all ranks.
    refusal : Exception or None
        Why this rank cannot run the call.

    Raises
    ------
    ValueError
        If shapes or facts differ.
    Exception
        The refusal; on other ranks, an error of the same type that names the refusing rank and its reason.
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
                got = f"{fact} on rank {ring.rank}, and ranks 0 and {rank} differ"
                raise rejected("ring_attention", name, "be the same on all ranks", got)


def _kind(refusal: Exception | None) -> int:
    """Return 0 for no refusal, else 1 + the index of its type in :data:`KINDS`."""
    if refusal is None:
        return 0
    return 1 + next((i for i, kind in enumerate(KINDS) if isinstance(refusal, kind)), len(KINDS))


def _check_shapes(rows: list[list[int]]) -> None:
    valid = [rank for rank, row in enumerate(rows) if row[1]]
    for i, name in enumerate(TENSORS):
        span = slice(2 + i * DIMENSIONS, 2 + (i + 1) * DIMENSIONS)
        for rank in valid:
            if rows[rank][span] != rows[valid[0]][span]:
                one, other = (f"{tuple(rows[r][span])} on rank {r}" for r in (valid[0], rank))
                raise rejected("ring_attention", name, "have the same shape on all ranks", f"{one} and {other}")


def _check_refusals(ring: Ring, kinds: list[int], refusal: Exception | None) -> None:
    """Raise this rank's refusal, or that of the first rank that refuses."""
    if not any(kinds):
        return
    if not all(kinds):  # refusing ranks send their reason
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
