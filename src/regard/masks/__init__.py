"""Masks: the (query, key) pairs that are visible, and biases added to their scores.

Masks are predicates with FlexAttention's signature. Compose them with ``&``, ``|`` and ``~``:

>>> from regard import masks
>>> print((masks.causal() & masks.window(1, 0)).draw(3))
causal() & window(1, 0)
3 queries ↓, 3 keys →; █ visible, · not
  0
0 █··
1 ██·
2 ·██
"""

from regard.masks.band import Aligned, Band, Dilated, causal, dilated, window
from regard.masks.base import (
    EMPTY,
    FULL,
    MIXED,
    AndMask,
    Everything,
    Extent,
    Mask,
    MaskLike,
    MaskMod,
    NotMask,
    OrMask,
    Predicate,
    Tiling,
    as_mask,
    everything,
)
from regard.masks.biases import Alibi, Relative, alibi, relative
from regard.masks.documents import Documents, Packed, document, from_cu_seqlens
from regard.masks.leave_one_out import LeaveOneOut, leave_one_out
from regard.masks.matrix import BlockSparse, Dense, Submatrix, dense, submatrix
from regard.masks.padding import FirstKeys, KeyPadding, key_padding, padding, prefix, sinks

__all__ = [
    "EMPTY",
    "FULL",
    "MIXED",
    "Alibi",
    "Aligned",
    "AndMask",
    "Band",
    "BlockSparse",
    "Dense",
    "Dilated",
    "Documents",
    "Everything",
    "Extent",
    "FirstKeys",
    "KeyPadding",
    "LeaveOneOut",
    "Mask",
    "MaskLike",
    "MaskMod",
    "NotMask",
    "OrMask",
    "Packed",
    "Predicate",
    "Relative",
    "Submatrix",
    "Tiling",
    "alibi",
    "as_mask",
    "causal",
    "dense",
    "dilated",
    "document",
    "everything",
    "from_cu_seqlens",
    "key_padding",
    "leave_one_out",
    "padding",
    "prefix",
    "relative",
    "sinks",
    "submatrix",
    "window",
]
