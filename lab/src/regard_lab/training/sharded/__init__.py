"""Language models divided over a mesh of processes: by heads, by parameters, by sequences and by examples."""

from regard_lab.training.sharded.checkpoint import CheckpointError, load_sharded, save_sharded
from regard_lab.training.sharded.parallelize import make_mesh, parallelize
from regard_lab.training.sharded.parameters import clip_gradients, gather_model, materialize, set_parameters

__all__ = [
    "CheckpointError",
    "clip_gradients",
    "gather_model",
    "load_sharded",
    "make_mesh",
    "materialize",
    "parallelize",
    "save_sharded",
    "set_parameters",
]
