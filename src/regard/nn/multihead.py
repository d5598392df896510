"""Multi-head attention: torch's module, with any score and normalizer, fewer key heads, rotary positions, a cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._attention import attention
from regard._aux import Aux, AuxRequest
from regard._catalogue import mechanism
from regard._constraints import probability, size
from regard._errors import rejected
from regard._torch import OutProjection
from regard.engines import EngineLike
from regard.masks import Extent, MaskLike
from regard.nn import _torch_masks
from regard.nn._base import parameter
from regard.nn._input_layout import as_batch_first, batch_and_length, check_inputs, unbatched
from regard.nn._nested import attend_nested
from regard.nn._parts import PartLayer, current
from regard.nn._scored import ScoredAttention
from regard.nn.beam_cache import BeamCache
from regard.nn.kv_cache import KVCache
from regard.nn.row_attention import self_attention_step
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike


@mechanism(
    formula="concat_h softmax(Q W_Qʰ (K W_Kᵍ)ᵀ / √D) V W_Vᵍ · W_O",
    sources=("vaswani2017", "shazeer2019", "ainslie2023"),
    learned="W_Q (E, E), W_K (G·D, Ek), W_V (G·D, Ev), W_O (E, E), biases",
    cost="O((L + S)·E² + L·S·E)",
)
class MultiheadAttention(PartLayer):
    """Attention in several heads; stands in for ``torch.nn.MultiheadAttention``, ``state_dict`` included.

    Head h of width D = E/H is ``softmax(Q W_Qʰ (K W_Kᵍ)ᵀ / √D) V W_Vᵍ``; the heads side by side are projected by W_O
    (Vaswani 2017, arXiv 1706.03762). With fewer key heads G than query heads H, each serves H/G of them: multi-query
    attention for G = 1 (Shazeer 2019, arXiv 1911.02150), grouped-query for others (Ainslie 2023, arXiv 2305.13245).

    Arguments, polarity of masks, results and initial weights are those of torch's module. What differs: a query that
    may attend to nothing gets zeros (then W_O's bias) instead of NaN; weights are returned as they are before dropout;
    ``is_causal=True`` needs no ``attn_mask``, and applies whatever it is given with. docs/differences.md has
    the whole list.

    Parameters
    ----------
    embed_dim, num_heads : int
        E and H; H divides E.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    bias : bool, default True
        Whether the projections have one.
    add_bias_kv : bool, default False
        Append a learned key and value that every query sees.
    add_zero_attn : bool, default False
        Append a key and value of zeros that every query sees.
    kdim, vdim : int, optional
        Widths of keys and values; E where not given.
    batch_first : bool, default False
        Sequences are (B, N, E) rather than (N, B, E).
    device, dtype : optional
        Of the parameters.
    num_kv_heads : int, optional
        G, which divides H; H where not given. If there are fewer, the projections are separate parameters.
    score : str, Score, callable or ScoredAttention, optional
        How queries and keys compare within a head, as :func:`regard.attention` takes it. Of a layer, such as
        ``GeneralAttention(D)``, and of a Score, parameters and other tensors become those of this module. A function
        that learns comes as a module, too: of what a plain function refers to, a layer knows nothing.
    normalizer : str or Normalizer, default "softmax"
        Its tensors become those of this module, too.
    rotary : Module, optional
        ``rotary(x, offset)`` turns queries and keys (B, H, N, D) that stand at positions ``offset`` and on.
    dropped_weights : bool, default False
        Return the weights after dropout, as torch does in training.
    engine : str, default "auto"
        As :func:`regard.attention` takes it.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong, in one sentence.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import MultiheadAttention
    >>> layer = MultiheadAttention(16, 4, num_kv_heads=2, batch_first=True)
    >>> x, padding = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [2], [0]])
    >>> output, weights = layer(x, x, x, key_padding_mask=padding, is_causal=True)
    >>> output.shape, weights.shape, weights.sum(-1)[:, -1].round(decimals=4)
    (torch.Size([3, 5, 16]), torch.Size([3, 5, 5]), tensor([1., 1., 0.], grad_fn=<RoundBackward1>))
    """

    in_proj_weight: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
        score: ScoreLike | ScoredAttention | None = None,
        normalizer: NormalizerLike = "softmax",
        rotary: nn.Module | None = None,
        dropped_weights: bool = False,
        engine: EngineLike = "auto",
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        self.kdim = embed_dim if kdim is None else size(self, "kdim", kdim)
        self.vdim = embed_dim if vdim is None else size(self, "vdim", vdim)
        self.num_kv_heads = num_heads if num_kv_heads is None else size(self, "num_kv_heads", num_kv_heads)
        if embed_dim % num_heads:
            raise rejected("MultiheadAttention", "num_heads", f"divide embed_dim {embed_dim}", num_heads)
        if num_heads % self.num_kv_heads:
            raise rejected("MultiheadAttention", "num_kv_heads", f"divide num_heads {num_heads}", num_kv_heads)
        self.dropout = probability(self, "dropout", dropout)
        self.batch_first, self.add_zero_attn, self.head_dim = batch_first, add_zero_attn, embed_dim // num_heads
        self._extends = bool(add_bias_kv or add_zero_attn)
        self.score, self.normalizer, self.rotary = score, normalizer, rotary
        self.dropped_weights, self.engine = dropped_weights, engine
        self._build(bias, add_bias_kv, {"device": device, "dtype": dtype})
        disable_fast_path(self)

    def _build(self, bias: bool, add_bias_kv: bool, where: dict[str, Any]) -> None:
        """Make the parameters, by torch's names and in its order, and draw them in its order."""
        E, width = self.embed_dim, self.num_kv_heads * self.head_dim
        alike = self.kdim == self.vdim == width == E
        packed, separate = ("in_proj_weight",), ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        shapes = dict(zip(packed + separate, [(3 * E, E), (E, E), (width, self.kdim), (width, self.vdim)]))
        for name in packed + separate if alike else separate + packed:
            used = alike == (name in packed)
            self.register_parameter(name, parameter(*shapes[name], **where) if used else None)
        self.register_parameter("in_proj_bias", parameter(E + 2 * width, **where) if bias else None)
        self.out_proj = OutProjection(E, E, bias=bias, **where)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, parameter(1, 1, width, **where) if add_bias_kv else None)
        self._reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as torch's module does when it is made."""
        self.out_proj.reset_parameters()
        self._reset_parameters()
        if isinstance(self.score, ScoredAttention):
            self.score.reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for row in (self.bias_k, self.bias_v):
            if row is not None:
                nn.init.xavier_normal_(row)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: MaskLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KVCache | BeamCache | None = None,
        return_aux: AuxRequest | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the output and the weights.

        Parameters
        ----------
        query : Tensor (L, B, E), or (B, L, E) if ``batch_first``, or (L, E)
        key, value : Tensor (S, B, Ek) and (S, B, Ev), likewise
        key_padding_mask : Tensor (B, S), or (S,) where there is no batch, optional
            Bool, **True hides** the key, whatever it holds (in self-attention what is not finite there counts as 0 in
            the query, too); or float, added to the scores.
        need_weights : bool, default True
            Whether to return weights. That needs memory for them; ``engine="auto"`` is then the one that makes them,
            so that the output may differ by a rounding from that without.
        attn_mask : Tensor (L, S) or (B·H, L, S), or Mask, optional
            Bool, **True hides** the pair; or float, added. A :mod:`regard.masks` mask shows what it shows anywhere.
        average_attn_weights : bool, default True
            Return the mean of the weights over heads.
        is_causal : bool, default False
            Also hide keys after the query; both are counted from the start, queries after the steps in the cache.
        cache : KVCache or BeamCache, optional
            Holds the keys and values of earlier steps. These come first, and masks speak of all S. A BeamCache knows
            itself what a row sees: with it come no masks, and no weights are told.
        return_aux : AuxRequest, optional
            What to tell instead of the weights, head by head.

        Returns
        -------
        output : Tensor, as the query
        weights : Tensor (B, L, S), or (B, H, L, S) if not averaged, or None
            Without B where there is no batch; S counts appended keys. With ``return_aux``, an :class:`~regard.Aux`.
        """
        if isinstance(cache, BeamCache):
            alike = query is key and key is value and key_padding_mask is None and attn_mask is None
            return self._step(query, cache, alike and not need_weights and return_aux is None), None
        start = 0 if cache is None else len(cache)
        plain = query is key and key is value and key_padding_mask is None and attn_mask is None
        if plain and self._is_usual(query):
            batched, L = True, query.shape[1]
            mask: MaskLike | None = masks.causal(offset=start) if is_causal and L > 1 else None
            q, k, v = self._in_projected(query)
        else:
            if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
                if cache is not None or return_aux is not None:
                    expected = "be dense where there is a cache or return_aux"
                    raise rejected(type(self).__name__, "query", expected, "a nested tensor")
                given = need_weights, attn_mask, average_attn_weights, is_causal
                return attend_nested(self, query, key, value, key_padding_mask, *given)
            widths = self.embed_dim, self.kdim, self.vdim
            batched = check_inputs(type(self).__name__, (query, key, value), widths, self.batch_first)
            if key_padding_mask is not None and not batched and key_padding_mask.dim() == 1:
                key_padding_mask = key_padding_mask.unsqueeze(0)
            (B, L), S = batch_and_length(query, self.batch_first), batch_and_length(key, self.batch_first)[1]
            extent, appended = Extent(B, self.num_heads, L, start + S), self.add_zero_attn + (self.bias_k is not None)
            _torch_masks.check(self, key_padding_mask, attn_mask, extent, appended)
            mask = _torch_masks.combined(key_padding_mask, attn_mask, is_causal, extent, start, appended, query.device)
            q, k, v = self._projected(query, key, value, key_padding_mask, attn_mask, extent)
        if self.rotary is not None:
            q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        if self._extends:
            k, v = self._extended(k, self.bias_k), self._extended(v, self.bias_v)
        try:
            output, extra = self._attend(q, k, v, mask, need_weights, return_aux)
        except BaseException:
            if cache is not None:  # a call that failed has not been: it may be tried again
                cache.truncate(start)
            raise
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if isinstance(extra, Tensor):
            extra = (extra.mean(1) if average_attn_weights else extra).to(output.dtype)
        if not batched:
            return output.squeeze(0), extra.squeeze(0) if isinstance(extra, Tensor) else unbatched(extra)
        return output if self.batch_first else output.transpose(0, 1), extra

    def _step(self, x: Tensor, cache: BeamCache, plain: bool) -> Tensor:
        """Return the output of a step of beams, whose rows are all that is given where ``plain``."""
        batched = check_inputs(type(self).__name__, (x, x, x), (self.embed_dim,) * 3, self.batch_first)
        if not plain or self._extends or not batched or batch_and_length(x, self.batch_first)[1] != 1:
            expected = "be a KVCache where there are masks, several steps, other keys, or weights to tell"
            raise rejected(type(self).__name__, "cache", expected, "a BeamCache")
        steps = 1 if self.batch_first else 0
        return self_attention_step(self, x.squeeze(steps), cache).unsqueeze(steps)

    def _is_usual(self, x: Any) -> bool:
        """Whether a tensor is (B, N, E) and one product makes queries, keys and values of it."""
        return (
            self.batch_first
            and not self._extends
            and self.in_proj_weight is not None
            and isinstance(x, Tensor)
            and not x.is_nested
            and x.dim() == 3
            and x.shape[-1] == self.embed_dim
            and x.is_floating_point()
        )

    def _in_projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, H, N, D) of one input (B, N, E)."""
        assert self.in_proj_weight is not None
        rows = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return rows.view(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    def _projected(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        attn_mask: MaskLike | None,
        extent: Extent,
    ) -> tuple[Tensor, ...]:
        """Return queries (B, H, L, D), keys and values (B, G, S, D), of inputs in which nothing hidden is left."""
        packed, is_self = query is key and key is value, query is key
        new = slice(extent.S - batch_and_length(key, self.batch_first)[1], None)  # what came before is in a cache
        query, key, value = (as_batch_first(x, self.batch_first) for x in (query, key, value))
        if padding is not None and is_self:
            query = _torch_masks.without_garbage(query, padding[:, new])
        if packed:
            key = value = query
        else:
            unseen = _torch_masks.unseen(padding, attn_mask, extent, query.device)
            if unseen is not None:
                hidden = unseen[:, new].unsqueeze(-1)
                key, value = torch.where(hidden, 0.0, key), torch.where(hidden, 0.0, value)
        width = self.num_kv_heads * self.head_dim
        sizes, bias = [self.embed_dim, width, width], self.in_proj_bias
        if packed and self.in_proj_weight is not None:
            ends = list(F.linear(query, self.in_proj_weight, bias).split(sizes, -1))
        else:
            separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights: Any = separate if self.in_proj_weight is None else self.in_proj_weight.split(sizes)
            biases = [None] * 3 if bias is None else bias.split(sizes)
            ends = [F.linear(x, weight, b) for x, weight, b in zip((query, key, value), weights, biases)]
        return tuple([x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in ends])

    def _extended(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return keys or values (B, G, S, D) with the learned one and the zeros after them, where there are such."""
        B, G, _, D = rows.shape
        after = [] if bias is None else [bias.view(1, G, 1, D).expand(B, -1, -1, -1).to(rows.dtype)]
        after += [rows.new_zeros(B, G, 1, D)] if self.add_zero_attn else []
        return torch.cat([rows, *after], 2) if after else rows

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, need_weights: bool, request: AuxRequest | None
    ) -> tuple[Tensor, Tensor | Aux | None]:
        """Return the heads' outputs (B, H, L, D), and weights (B, H, L, S) or what else is asked for."""
        dropout_p = self.dropout if self.training else 0.0
        score = current(self.score.score() if isinstance(self.score, ScoredAttention) else self.score)
        parts: dict[str, Any] = {"score": score, "normalizer": current(self.normalizer), "engine": self.engine}
        if request is not None:
            return attention(q, k, v, mask, dropout_p, enable_gqa=True, return_aux=request, **parts)
        if not need_weights:
            return attention(q, k, v, mask, dropout_p, enable_gqa=True, **parts), None
        if dropout_p and self.dropped_weights:  # they are what is read from an identity matrix next to the values
            eye = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
            both = attention(q, k, torch.cat([v, eye], -1), mask, dropout_p, enable_gqa=True, **parts)
            return both[..., : self.head_dim], both[..., self.head_dim :]
        if self.engine == "auto":  # weights are materialized anyway: what makes them shall make the output of them
            parts["engine"] = "reference"
        request = AuxRequest(weights=True)
        output, aux = attention(q, k, v, mask, dropout_p, enable_gqa=True, return_aux=request, **parts)
        return output, aux.weights

    def extra_repr(self) -> str:
        """Return what the layer prints: sizes first, then what is not the default."""
        settings = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        settings += [f"num_kv_heads={self.num_kv_heads}"] if self.num_kv_heads != self.num_heads else []
        usual: dict[str, Any] = {"dropout": 0.0, "kdim": self.embed_dim, "vdim": self.embed_dim, "batch_first": False}
        usual |= {"add_zero_attn": False, "score": None, "normalizer": "softmax", "dropped_weights": False}
        usual |= {"engine": "auto"}
        for name, default in usual.items():
            value = getattr(self, name)
            settings += [f"{name}={value!r}"] if value != default and not isinstance(value, nn.Module) else []
        return ", ".join(settings)


def disable_fast_path(module: MultiheadAttention) -> None:
    """Keep torch's encoder layers from computing a module's attention without calling it, as they do in evaluation.

    They do so only where this attribute of torch's module says that queries, keys and values are equally wide.
    """
    module._qkv_same_embed_dim = False
