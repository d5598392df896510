"""Attention to the keys and values of another layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard._utils.constraints import floats
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines.aux import Aux, AuxRequest
from regard.masks import MaskLike
from regard.nn.heads.self_attention import KeysValues, SelfAttention, SplitProjection
from regard.nn.positions.rotary import Rotation


@mechanism(
    formula="concat_h softmax(R(X W_Qʰ) Kᵍᵀ / √D) Vᵍ · W_O, K and V those of another layer",
    sources=("brandon2024", "sun2024yoco"),
    learned="W_Q (H·D, E), W_O (E, H·D), biases; those of the options",
    cost="O(L·E² + L²·E)",
)
class CrossLayerAttention(SelfAttention):
    """Self-attention whose keys and values are those of another layer, so that only that layer caches any.

    Neighbouring layers share them in cross-layer attention (Brandon 2024, arXiv 2405.12981), the later half of the
    layers in YOCO (Sun 2024, arXiv 2405.05254), and the last layers in Gemma 3n. The other layer is a
    :class:`SelfAttention` with as many key–value heads of the same width; it returns :class:`KeysValues` where asked
    with ``return_keys=True``. This layer projects queries alone.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    **options
        Those of :class:`SelfAttention` but ``value_residual``.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import CrossLayerAttention, KVCache, SelfAttention
    >>> first, second = SelfAttention(16, 4, num_kv_heads=2), CrossLayerAttention(16, 4, num_kv_heads=2)
    >>> x, cache = torch.randn(3, 5, 16), KVCache()
    >>> rows, keys = first(x, is_causal=True, cache=cache, return_keys=True)
    >>> second(x + rows, keys, is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        if options.get("value_residual"):
            expected = "be False: the values are another layer's"
            raise rejected("CrossLayerAttention", "value_residual", expected, options["value_residual"])
        super().__init__(embed_dim, num_heads, **options)
        if self.qk_norm is not None:  # keys come normalized
            self.qk_norm.key = None
        whole = self.qkv
        assert isinstance(whole, nn.Linear)
        self.qkv = nn.Linear(
            self.embed_dim, self.num_heads * self.head_dim, bias=whole.bias is not None, device=whole.weight.device,
            dtype=whole.weight.dtype,
        )  # fmt: skip
        self.reset_parameters()

    @property
    def rows(self) -> tuple[int, int, int]:
        """Number of rows of ``qkv.weight`` for queries, keys and values: the last two are 0."""
        return self.num_heads * self.head_dim, 0, 0

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        keys: KeysValues,
        attn_mask: MaskLike | None = None,
        *,
        is_causal: bool = False,
        rotation: Rotation | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return rows (B, L, E), and the requested auxiliary outputs.

        Parameters
        ----------
        x : Tensor (B, L, E)
        keys : KeysValues
            What the other layer returned for the same rows: their keys and values, and those before them.
        attn_mask, is_causal, return_aux
            See :class:`SelfAttention`.
        rotation : tuple of Tensor, optional
            :meth:`Rotary.rotation` of the rows' positions. By default, the rows are the last ones that have keys.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        key, value, prefix, offset = self._keys(keys, x)
        before = key.shape[2] - x.shape[1] + (0 if prefix is None else prefix[0].shape[2])
        rotation = self._rotation(x, rotation, before)
        projection = self.qkv.get_submodule("q") if isinstance(self.qkv, SplitProjection) else self.qkv
        query: Tensor = projection(x)
        query = query.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        query = query if self.qk_norm is None else self.qk_norm.of_queries(query)
        if self.rotary is not None and rotation is not None:
            query = self.rotary.turn(query, rotation)
        given = KeysValues(key, value, prefix, offset)
        output = self._read(self._scaled(query), given, attn_mask, is_causal, return_aux)
        found: Tensor | tuple[Tensor, Aux] = self._returned(output, value[:, :, -x.shape[1] :], x, return_aux)
        return found

    def _keys(self, keys: Any, x: Tensor) -> KeysValues:
        """Check the other layer's keys and values."""
        name = type(self).__name__
        if not isinstance(keys, KeysValues):
            expected = "be the KeysValues of another layer, which SelfAttention returns with return_keys=True"
            raise rejected(name, "keys", expected, described(keys), TypeError)
        (B, L), G, D = x.shape[:2], self.num_kv_heads, self.head_dim
        for each in keys[:2]:
            if each.shape[0] != B or each.shape[1] != G or each.shape[3] != D or each.shape[2] < L:
                raise rejected(name, "keys", f"have shape ({B}, {G}, {L} or more, {D})", shape(each))
        return keys

    def values(self, x: Tensor) -> Tensor:  # noqa: ARG002
        """Raise: the layer has no values of its own."""
        raise TypeError("CrossLayerAttention: values are another layer's; call its method.")
