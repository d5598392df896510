"""Convert what may stand where a mask is wanted: a Mask, a mask_mod, a BlockMask, a tensor, torch's CausalBias."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor

from regard._errors import described, rejected
from regard.masks.base import Mask, MaskLike

_BLOCK_MASK = "torch.nn.attention.flex_attention.BlockMask"
_CAUSAL_BIAS = "torch.nn.attention.bias.CausalBias"


def as_mask(mask: MaskLike, function: str = "masks.as_mask", argument: str = "mask") -> Mask:
    """Return as a Mask what may stand for one.

    Parameters
    ----------
    mask : Mask, callable, BlockMask, CausalBias or Tensor
        A callable is a FlexAttention ``mask_mod``: it is called for one pair, with 0-d tensors, and must work
        under ``torch.vmap``. A BlockMask is torch's; both its block lists and its ``mask_mod`` are honoured. A
        tensor becomes :func:`~regard.masks.dense`.
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
    if isinstance(mask, Mask):
        return mask
    # Imported here because these modules use the algebra, which uses this function.
    from regard.masks.band import Band
    from regard.masks.block_sparse import BlockSparse
    from regard.masks.matrix import Dense
    from regard.masks.predicate import Predicate

    if _is_a(_BLOCK_MASK, mask):
        return BlockSparse.of(mask)
    if _is_a(_CAUSAL_BIAS, mask):
        bias: Any = mask
        if bias.variant.name == "UPPER_LEFT":
            return Band("causal", -1, 0, None, 0)
        lengths = bias.seq_len_q, bias.seq_len_kv
        return Band("causal", -1, 0, None, lengths[1] - lengths[0], lengths)
    if isinstance(mask, Tensor):
        return Dense.of(mask, function, argument)
    if callable(mask) and not isinstance(mask, type):
        return Predicate(mask)
    expected = "be a Mask, a mask_mod(b, h, q_idx, kv_idx), a BlockMask, or a bool or float tensor"
    raise rejected(function, argument, expected, described(mask), TypeError)


def is_matrix(mask: Any) -> TypeGuard[Tensor]:
    """Whether a mask is written out in a tensor; torch's CausalBias is a tensor by its class alone."""
    return isinstance(mask, Tensor) and not _is_a(_CAUSAL_BIAS, mask)


def _is_a(name: str, value: Any) -> bool:
    """Whether a value is of a class of torch's, which is not imported for it (flex_attention takes seconds)."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == name for kind in type(value).__mro__)
