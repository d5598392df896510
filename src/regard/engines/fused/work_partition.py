"""How the work is cut into shares for the threads: by the problem and the number of threads alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.engines.fused.kernels.fields import BLOCK
from regard.engines.fused.visible_keys import VisibleKeys, WorkItem

#: Shares of the work for each thread: enough that a late thread does not hold up the others; fewer for gradients of
#: few heads, as each share has sums of its own for the keys of its heads.
SHARES, FEW_SHARES = 8, 2
#: Pairs times features and values that a share should have: less is done before another thread has taken it.
SHARE = 1 << 21
#: The same of a whole forward pass, and of a backward pass, up to which one thread is done before several have begun.
ALONE, ALONE_BACKWARD = 10 << 20, 4 << 20


@dataclass(frozen=True)
class Partition:
    """Units that one task runs in turn, and the heads and key heads among which they lie."""

    units: list[WorkItem]
    heads: range
    kv_heads: range


def partitions(visible: VisibleKeys, groups: int, width: int, backward: bool = False) -> list[Partition]:
    """Cut the work into shares of about equal cost; the same for the same problem and number of threads.

    ``groups`` are the key heads, ``width`` the features and values of a pair.
    """
    extent, threads = visible.extent, torch.get_num_threads()
    few = backward and extent.B * groups < threads * SHARES
    work = extent.B * extent.H * extent.L * extent.S * width
    alone = threads == 1 or work < (ALONE_BACKWARD if backward else ALONE)
    count = 1 if alone else min(threads * (FEW_SHARES if few else SHARES), max(threads, work // SHARE))
    H, blocks = extent.H, -(-extent.L // BLOCK)

    def share(units: list[WorkItem], heads: range) -> Partition:
        first, last = (head // H * groups + head % H // (H // groups) for head in (heads[0], heads[-1]))
        return Partition(units, heads, range(first, last + 1))

    if visible.mask is None:
        costs = visible.costs()
        whole = extent.B * H * blocks
        cuts = [whole * i // count for i in range(count + 1)] if costs is None else _cuts(costs, count)
        spans = [(first, last) for first, last in pairwise(cuts) if first < last]
        return [share([WorkItem(*span)], range(span[0] // blocks, (span[1] - 1) // blocks + 1)) for span in spans]
    units = list(visible.units())
    cuts = _cuts(torch.tensor([unit.cost for unit in units], dtype=torch.float64, device="cpu"), count)
    parts = [units[first:last] for first, last in pairwise(cuts) if first < last]
    return [share(part, range(min(u.first for u in part), max(u.last for u in part))) for part in parts]


def _cuts(costs: Tensor, count: int) -> list[int]:
    """Return where a row of costs is to be cut into ``count`` parts, with its two ends."""
    done = costs.cumsum(0)
    at = done[-1] * torch.arange(1, count, dtype=done.dtype, device="cpu") / count
    return [0, *torch.searchsorted(done, at).tolist(), len(costs)]
