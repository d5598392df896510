"""Attention to a window of steps, beside or behind a memory that learns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import masks
from regard.functional import attention
from regard.nn.linear.layout import Layout
from regard.nn.linear.recurrent_attention import heads
from regard.nn.positions.rotary import Rotary


def window_attention(
    rows: tuple[Tensor, Tensor, Tensor],
    window: int,
    layout: Layout,
    past: Tensor | None,
    rotary: Rotary,
    persistent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what attention to a window reads (B, H, L, D), and the keys that the next steps see.

    These are (B, window − 1, 2·E + 1), ``past`` for this call: keys, values, and 1 for those that are real and of the
    last document. ``persistent`` keys and values (2, H, N, D) are seen by every step. They have no position: they meet
    queries as they are, in columns of their own.
    """
    query, key, value = rows
    (B, H, L, D), before = query.shape, window - 1
    pair = [each.transpose(1, 2).flatten(2) for each in (key, value)]
    own = layout.clear(torch.cat([*pair, torch.ones_like(query[:, 0, :, :1])], -1))
    past = own.new_zeros(B, before, own.shape[-1]) if past is None else past.to(own.dtype)
    known = torch.cat([past, own], 1)
    key, value = (heads(each, H) for each in known[..., :-1].chunk(2, -1))
    turn = rotary.rotation(torch.arange(before + L, device=query.device), query.dtype)
    turned, key = rotary.turn(query, tuple(each[before:] for each in turn)), rotary.turn(key, turn)
    N = 0 if persistent is None else persistent.shape[2]
    if persistent is not None:
        first = [each.to(key.dtype).expand(B, -1, -1, -1) for each in persistent]
        turned = torch.cat([turned, query], -1)
        key = torch.cat([F.pad(first[0], (D, 0)), F.pad(key, (0, D))], 2)
        value = torch.cat([first[1], value], 2)
    runs = torch.zeros(B, L, dtype=torch.long, device=query.device) if layout.runs is None else layout.runs
    ids = F.pad(torch.where(known[..., -1] > 0, F.pad(runs, (before, 0)), -1), (N, 0))
    near = masks.window(before, 0, offset=N + before) & masks.document(runs, ids)
    read = attention(turned, key, value, masks.sinks(N) | near if N else near, scale=D**-0.5)
    return layout.clear(read.transpose(1, 2)).transpose(1, 2), layout.last(known, before)
