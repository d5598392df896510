"""Attention, models and training over several processes, on torch.distributed as it is.

Context parallelism for any score and any mask: each process (rank) holds a slice of queries, keys and values. Keys and
values travel round a ring; partial results merge by their log-sum-exp. The result is each rank's slice of what one
process would compute over the whole sequence. Language models are divided over a mesh of processes by heads, by
parameters, by sequences and by examples.
"""

from regard.distributed.context_parallel import ContextParallel, ring_attention, sum_gradients
from regard.distributed.gradients import clip_gradients
from regard.distributed.layouts import Layout, gather_sequence, shard_positions, shard_sequence
from regard.distributed.mesh import make_mesh
from regard.distributed.parallelize import parallelize
from regard.distributed.parameters import gather_model, materialize, set_parameters
from regard.distributed.sharded_checkpoint import CheckpointError, load_sharded, save_sharded

__all__ = [
    "CheckpointError",
    "ContextParallel",
    "Layout",
    "clip_gradients",
    "gather_model",
    "gather_sequence",
    "load_sharded",
    "make_mesh",
    "materialize",
    "parallelize",
    "ring_attention",
    "save_sharded",
    "set_parameters",
    "shard_positions",
    "shard_sequence",
    "sum_gradients",
]
