"""Attention over sequences that several processes hold together, on torch.distributed.

Context parallelism for any score and any mask: each process (rank) holds a slice of queries, keys and values. Keys and
values travel round a ring; partial results merge by their log-sum-exp. The result is each rank's slice of what one
process would compute over the whole sequence.
"""

from regard.distributed.context_parallel import ContextParallel, ring_attention, sum_gradients
from regard.distributed.layouts import Layout, gather_sequence, shard_positions, shard_sequence

__all__ = [
    "ContextParallel",
    "Layout",
    "gather_sequence",
    "ring_attention",
    "shard_positions",
    "shard_sequence",
    "sum_gradients",
]
