"""Two models on one text, or one model on two texts, compared token by token.

Dimensions: H query heads, L queries, S keys, M matched queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from regard._utils.errors import described, rejected
from regard.inspect._record.layer_record import LayerRecord
from regard.inspect._record.recording import Recording


@dataclass(frozen=True)
class ComparedLayer:
    """How one layer differs between two records.

    Attributes
    ----------
    names : (str, str)
        The layer's names in the two models.
    tokens : tuple of str
        The M queries that both records have.
    places : tuple of (int, int)
        The positions of these queries in the two records.
    distance : Tensor (H, M)
        The total variation distance ½ Σ |w − w′| of their weights over the tokens of both texts, in [0, 1]; H is 1, the
        mean of the heads, if the models have different numbers of heads.
    largest : tuple of ((str, float), (str, float))
        For the head that differs most at each query: the token with the largest weight in each record, and that weight;
        empty for layers without heads or keys.
    """

    names: tuple[str, str]
    tokens: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    distance: Tensor
    largest: tuple[tuple[tuple[str, float], tuple[str, float]], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            "names": list(self.names), "tokens": list(self.tokens), "places": [list(each) for each in self.places],
            "distance": self.distance.tolist(), "largest": [[list(each) for each in pair] for pair in self.largest],
        }  # fmt: skip


def compare_tokens(
    first: Recording, second: Recording, *, batch: tuple[int | None, int | None] = (None, None)
) -> list[ComparedLayer]:
    """Return how differently two models attend on one text, or one model on two texts, token by token.

    The texts of the records are matched: the tokens that both have, in their order. A query that both have is compared
    by the total variation distance of its weights, in which tokens of one text alone count fully: 0 if it attends to
    the same tokens, 1 if it attends to others. Layers are matched by their names if these are the same, otherwise by
    their numbers.

    Parameters
    ----------
    first, second : Record
        With their texts (:meth:`Record.describe`); without, positions are matched.
    batch : (int, int), optional
        Which sequences; by default those that the texts describe.

    Returns
    -------
    list of ComparedLayer
        In the order of the first record.

    Raises
    ------
    TypeError, ValueError
        If the two are not records, or they have different names and numbers of layers.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, compare_tokens
    >>> found = []
    >>> for causal in (True, False):
    ...     with capture() as record:
    ...         x = torch.zeros(1, 1, 2, 4)
    ...         out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)
    ...     found.append(record.describe(["the", "cat"]))
    >>> (layer,) = compare_tokens(*found)
    >>> layer.tokens, layer.distance
    (('the', 'cat'), tensor([[0.5000, 0.0000]]))
    """
    for each in (first, second):
        if not isinstance(each, Recording):
            raise rejected("compare_tokens", "records", "be two Records", described(each), TypeError)
    if set(first.layers) == set(second.layers):
        pairs = [(name, name) for name in first.layers]
    elif len(first) == len(second):
        pairs = list(zip(first.layers, second.layers))
    else:
        got = f"{len(first)} and {len(second)}"
        raise rejected("compare_tokens", "records", "have layers of the same names or number", got)
    at = tuple(record.sequence if row is None else row for record, row in zip((first, second), batch))
    return [_compared(first, second, pair, at) for pair in pairs]


def _compared(first: Recording, second: Recording, names: tuple[str, str], at: tuple[int, ...]) -> ComparedLayer:
    runs = (first[names[0]], second[names[1]])
    texts = [record.texts_of(run, row) for record, run, row in zip((first, second), runs, at)]
    queries = _matched(*(side[0].tokens for side in texts))
    keys = _matched(*(side[1].tokens for side in texts))
    weights = [_weights(run, row, [pair[i] for pair in queries]) for i, (run, row) in enumerate(zip(runs, at))]
    if weights[0].shape[0] != weights[1].shape[0]:
        weights = [each.mean(0, keepdim=True) for each in weights]
    shared = [each[..., [pair[i] for pair in keys]] for i, each in enumerate(weights)]
    alone = sum(each.sum(-1) - both.sum(-1) for each, both in zip(weights, shared))
    distance = ((shared[0] - shared[1]).abs().sum(-1) + alone).mul(0.5).clamp(0, 1)
    largest = []
    for i in range(len(queries) if distance.shape[0] and min(len(side[1].tokens) for side in texts) else 0):
        head = int(distance[:, i].argmax())
        rows = [each[head, i] for each in weights]
        one, other = ((side[1].tokens[int(row.argmax())], float(row.max())) for side, row in zip(texts, rows))
        largest.append((one, other))
    tokens = tuple(texts[0][0].tokens[one] for one, _ in queries)
    return ComparedLayer(names, tokens, tuple(queries), distance, tuple(largest))


def _weights(run: LayerRecord, batch: int, rows: Sequence[int]) -> Tensor:
    """Return weights (H, M, S) of some queries."""
    return run.weights(batch=batch).float().cpu()[:, list(rows)] if rows else torch.zeros(run.shape[1], 0, run.shape[3])


def _matched(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of the tokens that two texts have in common, in their order."""
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
