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

from inspect import ismodule as _ismodule

from regard.masks.band import Aligned as Aligned
from regard.masks.band import Band as Band
from regard.masks.band import Dilated as Dilated
from regard.masks.band import causal as causal
from regard.masks.band import dilated as dilated
from regard.masks.band import window as window
from regard.masks.base import EMPTY as EMPTY
from regard.masks.base import FULL as FULL
from regard.masks.base import MIXED as MIXED
from regard.masks.base import AndMask as AndMask
from regard.masks.base import Everything as Everything
from regard.masks.base import Extent as Extent
from regard.masks.base import Mask as Mask
from regard.masks.base import MaskLike as MaskLike
from regard.masks.base import MaskMod as MaskMod
from regard.masks.base import NotMask as NotMask
from regard.masks.base import OrMask as OrMask
from regard.masks.base import Predicate as Predicate
from regard.masks.base import Tiling as Tiling
from regard.masks.base import as_mask as as_mask
from regard.masks.base import everything as everything
from regard.masks.biases import Alibi as Alibi
from regard.masks.biases import Forgetting as Forgetting
from regard.masks.biases import Relative as Relative
from regard.masks.biases import alibi as alibi
from regard.masks.biases import forgetting as forgetting
from regard.masks.biases import relative as relative
from regard.masks.chunked import Chunked as Chunked
from regard.masks.chunked import chunked as chunked
from regard.masks.documents import Documents as Documents
from regard.masks.documents import Packed as Packed
from regard.masks.documents import document as document
from regard.masks.documents import from_cu_seqlens as from_cu_seqlens
from regard.masks.images import Axial as Axial
from regard.masks.images import Neighbourhood as Neighbourhood
from regard.masks.images import Windows as Windows
from regard.masks.images import axial as axial
from regard.masks.images import neighbourhood as neighbourhood
from regard.masks.images import windows as windows
from regard.masks.leave_one_out import LeaveOneOut as LeaveOneOut
from regard.masks.leave_one_out import leave_one_out as leave_one_out
from regard.masks.matrix import BlockSparse as BlockSparse
from regard.masks.matrix import Dense as Dense
from regard.masks.matrix import Submatrix as Submatrix
from regard.masks.matrix import dense as dense
from regard.masks.matrix import submatrix as submatrix
from regard.masks.padding import FirstKeys as FirstKeys
from regard.masks.padding import KeyPadding as KeyPadding
from regard.masks.padding import key_padding as key_padding
from regard.masks.padding import padding as padding
from regard.masks.padding import prefix as prefix
from regard.masks.padding import sinks as sinks
from regard.masks.selected import Selected as Selected
from regard.masks.selected import selected as selected

__all__ = [name for name, value in sorted(globals().items()) if name[0] != "_" and not _ismodule(value)]
