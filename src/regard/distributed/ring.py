"""The ranks of a group as a ring: each sends to one while it receives from another, and computes meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from regard._errors import rejected


@dataclass(frozen=True)
class Pending:
    """A tensor on its way. What was sent must not be written to before :meth:`wait`.

    Attributes
    ----------
    sent, received : Tensor
    to, source : int
        The ranks that it goes to and comes from.
    works : list of dist.Work
    """

    sent: Tensor
    received: Tensor
    to: int
    source: int
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return what was received.

        Raises
        ------
        RuntimeError
            If a rank died, or did not answer within the group's timeout.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _lost(self.to, self.source, error) from error
        return self.received


def _lost(to: int, source: int, error: RuntimeError) -> RuntimeError:
    who = f"rank {to}" if to == source else f"rank {to} or rank {source}"
    return RuntimeError(f"ring_attention: {who} of the group died, or passed its timeout ({_reason(error)}).")


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of what the backend says, without its file and line."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.split("] ", 1)[-1].split(". ")[0].rstrip(".")


@dataclass(frozen=True)
class Ring:
    """The ranks of a group, in order; after the last comes the first.

    Attributes
    ----------
    group : ProcessGroup
    rank, size : int
        This process's place in it, and how many there are.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, function: str, group: dist.ProcessGroup | None) -> Ring:
        """Return the ring of a group; None is all processes."""
        if not (dist.is_available() and dist.is_initialized()):
            expected = "belong to an initialized torch.distributed (init_process_group comes first, in every process)"
            raise rejected(function, "group", expected, group)
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise rejected(
                function, "group", "be a ProcessGroup that this process is a member of", type(group).__name__
            )
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    @property
    def device(self) -> torch.device:
        """Where small messages lie, on all ranks alike: on the CPU, or the current GPU where the backend needs one."""
        if "cpu" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def behind(self, hops: int) -> int:
        """Return the rank that stands so many places before this one."""
        return (self.rank - hops) % self.size

    def exchange(self, tensor: Tensor, to: int, source: int) -> Pending:
        """Begin to send a contiguous tensor to a rank, and to receive one like it from another."""
        received = torch.empty_like(tensor)
        try:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, dist.get_global_rank(self.group, to), self.group),
                    dist.P2POp(dist.irecv, received, dist.get_global_rank(self.group, source), self.group),
                ]
            )
        except RuntimeError as error:
            raise _lost(to, source, error) from error
        return Pending(tensor, received, to, source, works)

    def shift(self, tensor: Tensor) -> Pending:
        """Begin to send a tensor to the next rank, and to receive that of the one before."""
        return self.exchange(tensor, self.behind(-1), self.behind(1))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of every rank, all of one shape."""
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(found, tensor, group=self.group)
        except RuntimeError as error:
            reason = _reason(error)
            raise RuntimeError(
                f"ring_attention: a rank of the group died, or passed its timeout ({reason})."
            ) from error
        return found
