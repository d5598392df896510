"""What may stand where a mask is wanted: a Mask, a mask_mod, a BlockMask, a tensor, torch's CausalBias."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard._errors import described, rejected
from regard.masks.base import Mask


def as_mask(mask: Any, function: str = "masks.as_mask", argument: str = "mask") -> Mask:
    """Return as a Mask what may stand for one.

    Parameters
    ----------
    mask : Mask, callable, BlockMask, CausalBias or Tensor
        A callable is a FlexAttention ``mask_mod``: it is called with index tensors that broadcast against each
        other and must treat every pair by itself. A BlockMask is torch's; both its block lists and its
        ``mask_mod`` are honoured. A tensor becomes :func:`~regard.masks.dense`.
    function, argument : str
        What error messages name.

    Raises
    ------
    TypeError
        If it is none of these, or an integer tensor.

    Examples
    --------
    >>> from regard import masks
    >>> masks.as_mask(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)(0, 0, 1, 2)
    tensor(True)
    """
    # Imported here because these modules use the algebra, which uses this function.
    from regard.masks.band import causal
    from regard.masks.block_sparse import BlockSparse
    from regard.masks.matrix import Dense
    from regard.masks.predicate import Predicate

    if isinstance(mask, Mask):
        return mask
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(mask).__mro__]
    # By name, because importing flex_attention takes seconds; whoever has a BlockMask has imported it.
    if "torch.nn.attention.flex_attention.BlockMask" in names:
        return BlockSparse.of(mask)
    if "torch.nn.attention.bias.CausalBias" in names:
        offset = 0 if mask.variant.name == "UPPER_LEFT" else mask.seq_len_kv - mask.seq_len_q
        return causal(offset=offset)
    if isinstance(mask, Tensor):
        return Dense.of(mask, function, argument)
    if callable(mask) and not isinstance(mask, type):
        return Predicate(mask)
    expected = "be a Mask, a mask_mod(b, h, q_idx, kv_idx), a BlockMask, or a bool or float tensor"
    raise rejected(function, argument, expected, described(mask), TypeError)
