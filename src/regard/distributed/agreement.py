"""Whether all ranks ask for the same: who does not would compute something else, or wait for ever."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from regard._errors import rejected
from regard.distributed.ring import Ring


def check_agreement(ring: Ring, tensors: Mapping[str, Tensor], facts: Mapping[str, object]) -> None:
    """Raise on every rank, in one sentence, unless shapes and facts are the same on all.

    Parameters
    ----------
    ring : Ring
    tensors : dict of str to Tensor (B, H, N, E)
        Of which the shapes are compared; they have equally many dimensions.
    facts : dict of str to object
        What prints the same on all ranks.
    """
    device = next(iter(tensors.values())).device
    shapes = [size for tensor in tensors.values() for size in tensor.shape]
    codes = [crc32(str(fact).encode()) for fact in facts.values()]
    own = torch.tensor([*shapes, *codes], dtype=torch.int64, device=device)
    rows = [found.tolist() for found in ring.gathered(own)]
    place = 0
    for name, tensor in tensors.items():
        span = slice(place, place + tensor.dim())
        place = span.stop
        for rank, row in enumerate(rows):
            if row[span] != rows[0][span]:
                came = f"{tuple(rows[0][span])} on rank 0 and {tuple(row[span])} on rank {rank}"
                raise rejected("ring_attention", name, "have the same shape on all ranks", came)
    for column, (name, fact) in enumerate(facts.items(), place):
        for rank, row in enumerate(rows):
            if row[column] != rows[0][column]:
                came = f"{fact} on rank {ring.rank}, and ranks 0 and {rank} differ"
                raise rejected("ring_attention", name, "be the same on all ranks", came)
