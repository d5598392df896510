"""Vectors of tokens by skip-gram with negative sampling (Mikolov 2013, arXiv 1310.4546): where an embedding begins.

Dimensions: N tokens of the vocabulary, E width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard_lab.data.shards import TokenShards
from regard_lab.tasks.language.options import SkipGramOptions

#: The root of the mean square of a vector's elements: blocks that have learned nothing yet add less than this.
SCALE = 0.3
#: Tokens that are gone through at once: between two blocks a run may be interrupted.
_BLOCK = 1 << 20
#: Places of the table that tokens are drawn from in place of true neighbours, by their frequency to this power.
_TABLE, _POWER = 1 << 22, 0.75


def token_vectors(
    shards: TokenShards,
    width: int,
    options: SkipGramOptions,
    *,
    skip: tuple[int, ...] = (),
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Tensor:
    """Return a vector for each token, from which the tokens around it are told apart from others.

    For a token c, its neighbours o and tokens n that are drawn by their frequency to the power 0.75, the cost is::

        −Σ_o log σ(u_o · v_c) − k/m Σ_n log σ(−u_n · v_c),   m draws, which stand for k of each neighbour

    whose gradient is followed from token to token at a rate that falls to 0. Frequent tokens are left out at random
    (Mikolov 2013). What is returned is v, scaled to a root mean square of 0.3; tokens that the text does not have stay
    as they are drawn. The same text, options and seed give the same vectors on one machine.

    Parameters
    ----------
    shards : TokenShards
        No token has neighbours in another document.
    width : int
        E.
    options : SkipGramOptions
    skip : tuple of int
        Tokens that are no text, such as marks of ends.
    seed : int, default 0
    say : callable
        Called with a line for each pass.

    Returns
    -------
    Tensor (N, E) of float32

    Examples
    --------
    >>> shards = TokenShards.of([[0, 1] * 50, [2, 3] * 50])
    >>> token_vectors(shards, 8, SkipGramOptions(epochs=1), say=lambda line: None).shape
    torch.Size([4, 8])
    """
    drawn = np.random.default_rng(seed)
    counts = np.zeros(shards.vocabulary, np.int64)
    for first in range(0, shards.tokens, _BLOCK):
        counts += np.bincount(_block(shards, first), minlength=shards.vocabulary)
    counts[list(skip)] = 0
    table, keep = _negatives(counts), _kept(counts, options.sample)
    vectors = ((drawn.random((shards.vocabulary, width), np.float32) - 0.5) / width).astype(np.float32)
    outputs = np.zeros_like(vectors)
    learn = _kernel()
    total = options.epochs * shards.tokens
    for epoch in range(options.epochs):
        cost, terms = 0.0, 0
        for first in range(0, shards.tokens, _BLOCK):
            numbers = _block(shards, first)
            documents = np.searchsorted(shards.ends, np.arange(first, first + len(numbers)), side="right")
            shown = keep[numbers] > drawn.random(len(numbers))
            done = (epoch * shards.tokens + first) / total
            found = learn(
                numbers[shown], documents[shown], table, vectors, outputs,
                np.float32(options.learning_rate * (1 - done)), options.window, options.draws,
                np.float32(options.negatives / options.draws), int(drawn.integers(1 << 31)),
            )  # fmt: skip
            cost, terms = cost + found[0], terms + found[1]
        say(f"token vectors, pass {epoch + 1} of {options.epochs}: {cost / max(terms, 1):.3f} nats a neighbour")
    made = torch.from_numpy(vectors)
    return made * (SCALE / made[torch.from_numpy(counts > 0)].square().mean().sqrt())


def _block(shards: TokenShards, first: int) -> np.ndarray:
    return shards.gather(np.arange(first, min(first + _BLOCK, shards.tokens)))


def _negatives(counts: np.ndarray) -> np.ndarray:
    """Return tokens, each as often as it is to be drawn."""
    shares = counts.astype(np.float64) ** _POWER
    ends = np.round(shares.cumsum() / shares.sum() * _TABLE).astype(np.int64)
    return np.repeat(np.arange(len(counts)), np.diff(ends, prepend=0)).astype(np.int32)


def _kept(counts: np.ndarray, sample: float) -> np.ndarray:
    """Return with which probability each token counts where it stands."""
    shares = counts / counts.sum()
    return np.where(counts > 0, np.sqrt(sample / np.maximum(shares, 1e-12)), 0.0) if sample else counts > 0


@cache
def _kernel() -> Any:
    """Return the compiled pass over a block of tokens, which returns the sum of costs and the number of neighbours."""
    import numba

    @numba.njit(fastmath=True, error_model="numpy", nogil=True)
    def learn(  # type: ignore[no-untyped-def]
        numbers, documents, table, vectors, outputs, rate, window, draws, weight, seed
    ):
        np.random.seed(seed)
        width = vectors.shape[1]
        step = np.empty(width, np.float32)
        cost, terms = 0.0, 0
        for place in range(len(numbers)):
            center = vectors[numbers[place]]
            reach = 1 + int(np.random.random() * window)  # the nearer, the more often
            step[:] = 0
            found = 0
            for other in range(max(0, place - reach), min(len(numbers), place + reach + 1)):
                if other == place or documents[other] != documents[place]:
                    continue
                output = outputs[numbers[other]]
                score = np.float32(0)
                for e in range(width):
                    score += center[e] * output[e]
                share = np.float32(1) / (np.float32(1) + np.exp(-score))
                cost -= np.log(share + 1e-9)
                found += 1
                slope = rate * (np.float32(1) - share)
                for e in range(width):
                    step[e] += slope * output[e]
                    output[e] += slope * center[e]
            if found == 0:
                continue
            terms += found
            for _ in range(draws):
                output = outputs[table[int(np.random.random() * len(table))]]
                score = np.float32(0)
                for e in range(width):
                    score += center[e] * output[e]
                share = np.float32(1) / (np.float32(1) + np.exp(-score))
                cost -= np.log(1 - share + 1e-9) * weight * found
                slope = -rate * weight * np.float32(found) * share
                for e in range(width):
                    step[e] += slope * output[e]
                    output[e] += slope * center[e]
            for e in range(width):
                center[e] += step[e]
        return cost, terms

    return learn
