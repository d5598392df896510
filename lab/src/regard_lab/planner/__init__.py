"""What a model takes before it is built: parameters, operations, memory, communication, time, energy and money."""

from regard_lab.planner.flops import Flops, executed_flops, forward_flops, training_flops, visible_pairs
from regard_lab.planner.memory import (
    GB,
    OPTIMIZERS,
    PRECISIONS,
    Layout,
    Memory,
    Recipe,
    activation_memory,
    cache_memory,
    layer_activations,
    logit_memory,
    training_memory,
)
from regard_lab.planner.parallelism import Choice, Cluster, Step, best, choices, training_step
from regard_lab.planner.parameters import parameters_by_part, parameters_without_embeddings
from regard_lab.planner.published import PUBLISHED, Published, find_config, model_names, published_rows
from regard_lab.planner.schedule import Schedule, chinchilla_tokens, schedule
from regard_lab.planner.shapes import AttentionShape, Layer, Shape, Stack, Weight, shape_of

__all__ = [
    "GB",
    "OPTIMIZERS",
    "PRECISIONS",
    "PUBLISHED",
    "AttentionShape",
    "Choice",
    "Cluster",
    "Flops",
    "Layer",
    "Layout",
    "Memory",
    "Published",
    "Recipe",
    "Schedule",
    "Shape",
    "Stack",
    "Step",
    "Weight",
    "activation_memory",
    "best",
    "cache_memory",
    "chinchilla_tokens",
    "choices",
    "executed_flops",
    "find_config",
    "forward_flops",
    "layer_activations",
    "logit_memory",
    "model_names",
    "parameters_by_part",
    "parameters_without_embeddings",
    "published_rows",
    "schedule",
    "shape_of",
    "training_flops",
    "training_memory",
    "training_step",
    "visible_pairs",
]
