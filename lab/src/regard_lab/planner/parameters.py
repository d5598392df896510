"""Parameters by what they belong to."""

from __future__ import annotations

from regard_lab.planner.shapes import PARTS, Shape


def parameters_by_part(shape: Shape) -> dict[str, int]:
    """Count the parameters of embeddings, attention, feed-forward networks, norms, and what makes logits.

    Their sum is that of the built model: ``sum(p.numel() for p in model.parameters())``. A matrix that is used twice
    counts once, as an embedding.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> parameters_by_part(shape_of(DecoderLMConfig(50, width=16, layers=2, heads=4, longest=8)))
    {'embeddings': 928, 'attention': 2176, 'feed-forward': 4256, 'norms': 160, 'head': 0}
    """
    found = dict.fromkeys(PARTS, 0)
    for weight in shape.rest:
        found[weight.part] += weight.parameters
    for stack in shape.stacks:
        for weight in stack.layer.weights:
            found[weight.part] += weight.parameters * (1 if stack.shared else stack.depth)
    return found


def parameters_without_embeddings(shape: Shape) -> int:
    """Count what is learned beside the embeddings: N of Kaplan 2020 (arXiv 2001.08361)."""
    return shape.parameters - parameters_by_part(shape)["embeddings"]
