"""LASER: attention that averages exponentials of values, and returns the logarithm."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.engines.aux import AuxRequest
from regard.masks import MaskLike
from regard.nn.heads.self_attention import KeysValues, SelfAttention
from regard.nn.positions.encodings import wide
from regard.normalizers import Cog, TalkingHeads

#: Values are limited to ± this: e^60 times any number of keys is far from float32's largest, 1/e^60 from its least.
LIMIT: Final = 60.0


@mechanism(
    formula="concat_h log(softmax(R(X W_Qʰ) R(X W_Kᵍ)ᵀ / √D) exp(X W_Vᵍ)) · W_O",
    sources=("duvvuri2024",),
    learned="W_QKV ((H + 2·G)·D, E), W_O (E, H·D), biases; those of the options",
    cost="O(L·E² + L²·E)",
    cache="2·G·D per token",
)
class LaserAttention(SelfAttention):
    """Self-attention that reads ``log Σ_j α_j exp(v_j)`` in each channel: LASER (Duvvuri 2024, arXiv 2411.03493).

    A key of small weight but large value changes the output, and gets a larger gradient than from ``Σ_j α_j v_j``,
    which is never more than the output. A row that sees nothing reads 0.

    The paper subtracts each channel's largest value before the exponential. That is the largest over all tokens, hidden
    ones included: they would change how results are rounded, and one of them could make all others vanish. Here,
    values are limited to ±60 instead. In float32 and float64 nothing in this range overflows or vanishes; 16-bit types
    are computed in float32. Steps and whole sequences agree, and the cache holds the values themselves.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    **options
        Those of :class:`SelfAttention` but ``order``. Weights must not be negative.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, LaserAttention, Rotary
    >>> layer, cache = LaserAttention(16, 4, num_kv_heads=2, rotary=Rotary(4)).eval(), KVCache()
    >>> x = torch.randn(3, 5, 16)
    >>> steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, is_causal=True), atol=1e-5)
    True
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        if options.get("order", 0) != 0:
            raise rejected("LaserAttention", "order", "be 0: a line's value may be negative", options["order"])
        normalizer = options.get("normalizer")
        if isinstance(normalizer, Cog | TalkingHeads) or normalizer in ("cog", "talking_heads"):
            raise rejected("LaserAttention", "normalizer", "have no negative weights, as softmax", normalizer)
        super().__init__(embed_dim, num_heads, **options)

    def _read(
        self, q: Tensor, keys: KeysValues, mask: MaskLike | None, is_causal: bool, request: AuxRequest | None
    ) -> Any:
        """Return the heads' outputs (B, H, L, D), and the requested auxiliary outputs."""
        dtype = q.dtype
        prefix = None if keys.prefix is None else (keys.prefix[0].to(wide(dtype)), _exponential(keys.prefix[1]))
        powers = KeysValues(keys.key.to(wide(dtype)), _exponential(keys.value), prefix, keys.offset)
        with autocast_suspended(q.device.type):  # it would narrow exponentials
            answer = super()._read(q.to(wide(dtype)), powers, mask, is_causal, request)
        sums, aux = (answer, None) if request is None else answer
        heads = torch.where(sums == 0, 1.0, sums).log().to(dtype)
        return heads if aux is None else (heads, aux)


def _exponential(value: Tensor) -> Tensor:
    return value.to(wide(value.dtype)).clamp(-LIMIT, LIMIT).exp()
