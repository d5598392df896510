"""Writing with a trained model: the likeliest sequence, found by beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.models import RecurrentEncoderDecoder
from regard.tasks.vocabulary import END, PAD


@torch.no_grad()
def beam_search(model: RecurrentEncoderDecoder, source: Tensor, lengths: Tensor, *, beams: int = 4) -> list[list[int]]:
    """Return the likeliest target found for each source, without its end mark.

    At every step each source keeps its ``beams`` likeliest beginnings; one beam is greedy search. A target ends at
    the latest after twice the length of its source and eight more, so the answer for one source does not depend on
    the others in the batch.

    Parameters
    ----------
    model : RecurrentEncoderDecoder
        Should be in evaluation mode.
    source : Tensor (B, S)
    lengths : Tensor (B,)
        How many symbols of each source are real.
    beams : int

    Returns
    -------
    list of list of int
    """
    B, K = len(source), beams
    memory = model.encode(source, lengths)
    hidden, cell = (part.repeat_interleave(K, dim=1) for part in memory.start)  # (1, B·K, Q)
    score = source.new_full((B, K), -torch.inf, dtype=hidden.dtype)
    score[:, 0] = 0.0  # the beams start equal: only one of them may be continued at first
    tokens = source.new_full((B, K, 1), END)
    done = torch.zeros(B, K, dtype=torch.bool, device=source.device)
    limits = 2 * lengths + 8
    for step in range(int(limits.max())):
        logits, (hidden, cell) = model.step(tokens[..., -1], memory, (hidden, cell))
        gains = _gains(logits, done, step >= limits)  # (B, K, N)
        N = gains.shape[-1]
        score, best = (score[..., None] + gains).flatten(1).topk(K, dim=-1)  # (B, K)
        parent, token = best // N, best % N
        tokens = torch.cat([_follow(tokens, parent), token[..., None]], -1)
        done = done.gather(1, parent) | (token == END)
        rows = (parent + K * torch.arange(B, device=source.device)[:, None]).flatten()
        hidden, cell = hidden[:, rows], cell[:, rows]
        if bool(done.all()):
            break
    return [row[: row.index(END)] if END in row else row for row in tokens[:, 0, 1:].tolist()]


def _gains(logits: Tensor, done: Tensor, over: Tensor) -> Tensor:
    """Return the log-probabilities of each next symbol; a finished beam only pads, an overlong one only ends."""
    gains = logits.log_softmax(-1)
    gains[..., PAD] = -torch.inf
    only_pad = torch.full_like(gains[0, 0], -torch.inf)
    only_end = only_pad.clone()
    only_pad[PAD], only_end[END] = 0.0, 0.0
    gains = torch.where(over[:, None, None], only_end, gains)
    return torch.where(done[..., None], only_pad, gains)


def _follow(tokens: Tensor, parent: Tensor) -> Tensor:
    return tokens.gather(1, parent[..., None].expand_as(tokens))
