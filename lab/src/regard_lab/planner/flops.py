"""Operations of a token: products with weights, and of queries with keys and weights with values, counted by the mask.

A multiplication and an addition are two operations. What is linear in width (norms, activations, softmax) is not
counted, as in Kaplan 2020 (arXiv 2001.08361) and in torch's own counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard._utils.errors import rejected
from regard_lab.planner.shapes import AttentionShape, Shape


@dataclass(frozen=True)
class Flops:
    """Operations of one token, on average over a sequence.

    Where one sequence is read and another written, they are those of one token of each.

    Attributes
    ----------
    layers : float
        Of products with the weights of layers.
    head : float
        Of products with what is outside them, most of all of logits.
    scores, values : float
        Of queries with keys, and of weights with values.
    """

    layers: float
    head: float
    scores: float
    values: float

    @property
    def attention(self) -> float:
        """Operations of all pairs of tokens."""
        return self.scores + self.values

    @property
    def total(self) -> float:
        """Operations of all kinds."""
        return self.layers + self.head + self.scores + self.values


def visible_pairs(length: int, attention: AttentionShape, documents: Sequence[int] | None = None) -> int:
    """Count the pairs of a query and a key that it sees, in a sequence of so many tokens.

    Parameters
    ----------
    length : int
        Tokens L of the sequence, and of another that is read.
    attention : AttentionShape
    documents : sequence of int, optional
        Tokens of each of the documents that the sequence is packed with; a query sees its own alone. They sum to L.

    Raises
    ------
    ValueError
        If the documents do not fill the sequence.

    Examples
    --------
    >>> visible_pairs(4, AttentionShape(1, 1, 8, causal=True)), visible_pairs(4, AttentionShape(1, 1, 8))
    (10, 16)
    """
    documents = [length] if documents is None else documents
    if sum(documents) != length:
        raise rejected("visible_pairs", "documents", f"have {length:,} tokens together", f"{sum(documents):,}")
    pairs, start = 0, 0
    for size in documents:
        pairs += _document_pairs(size, attention, max(attention.sinks - start, 0))
        start += size
    return pairs


def _document_pairs(size: int, attention: AttentionShape, sinks: int) -> int:
    """Return the visible pairs of one document, whose first ``sinks`` keys every later query sees."""
    if not attention.causal:
        return size * size
    window = size if attention.window is None else min(attention.window, size)
    beyond = size - window  # queries from which some earlier key is hidden by the window
    return _triangle(window) + beyond * window + _ramp(beyond, sinks)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _ramp(count: int, most: int) -> int:
    """Return 1 + 2 + … of so many terms, none of them above ``most``."""
    most = min(count, most)
    return _triangle(most) + (count - most) * most


def forward_flops(shape: Shape, length: int | None = None, documents: Sequence[int] | None = None) -> Flops:
    """Count the operations of a token on the way forward.

    A head's scores take 2·D operations for every visible pair, and its weighted values as many; a matrix of n numbers
    takes 2·n for every token (Kaplan 2020, arXiv 2001.08361, table 1). Of linear attention, each token writes a product
    to a head's matrix, 2·D² operations that are told as scores, and reads it, as many that are told as values.

    Parameters
    ----------
    shape : Shape
    length : int, optional
        Tokens L of a sequence; the longest by default.
    documents : sequence of int, optional
        Tokens of each document that the sequence is packed with.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> flops = forward_flops(shape_of(DecoderLMConfig(100, width=8, layers=2, heads=2)), 3)
    >>> flops.layers == 2 * 2 * 12 * 8**2, flops.head == 2 * 100 * 8, flops.scores == 2 * 2 * 8 * (1 + 2 + 3) / 3
    (True, True, True)
    """
    L = shape.longest if length is None else length
    layers = scores = 0.0
    for stack in shape.stacks:
        layers += stack.depth * sum(each.flops for each in stack.layer.weights)
        for attention in stack.layer.attentions:
            pairs = attention.head_width if attention.linear else visible_pairs(L, attention, documents) / L
            scores += stack.depth * 2 * attention.heads * attention.head_width * pairs
    head = sum(each.flops / (L if each.multiplies == "sequences" else 1) for each in shape.rest)
    return Flops(layers, head, scores, scores)


def training_flops(shape: Shape, length: int | None = None, documents: Sequence[int] | None = None) -> Flops:
    """Count the operations of a token in a training step: one pass forward, and two products for each one backward.

    These are the operations that the model asks for, whose share of what a device could do is known as MFU; what is
    computed again is not among them.

    Parameters are those of :func:`forward_flops`.
    """
    once = forward_flops(shape, length, documents)
    return Flops(3 * once.layers, 3 * once.head, 3 * once.scores, 3 * once.values)


def executed_flops(
    shape: Shape,
    length: int | None = None,
    documents: Sequence[int] | None = None,
    *,
    recompute: bool = False,
    keeps_scores: bool = False,
) -> Flops:
    """Count the operations of a token in a training step as they are executed.

    Parameters
    ----------
    shape, length, documents
        As :func:`forward_flops` has them.
    recompute : bool, default False
        Whether layers keep their input alone and run forward again before they run backward.
    keeps_scores : bool, default False
        Whether attention keeps its L×S weights. Otherwise its backward pass computes the scores again: five products
        rather than four.
    """
    once = forward_flops(shape, length, documents)
    passes = 4 if recompute else 3
    again = 0 if keeps_scores else 1
    return Flops(passes * once.layers, 3 * once.head, (passes + again) * once.scores, passes * once.values)
