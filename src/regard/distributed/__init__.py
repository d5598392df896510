"""Context parallelism: attention over sequences that are sharded among processes, on torch.distributed.

It supports any score and mask. Each process (rank) holds a slice of queries, keys and values. Keys and values are
passed around a ring, and partial results are merged by their log-sum-exp. Each rank gets its slice of the result that
one process would compute over the whole sequence.
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
