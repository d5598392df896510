"""A drop-in replacement of ``torch.nn.MultiheadAttention``, including its masks and nested tensors.

Dimensions: B batch, N rows, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard import masks
from regard._utils.constraints import probability, size
from regard._utils.errors import described, rejected, shape
from regard._utils.mechanism import mechanism
from regard._utils.torch_private import OutProjection
from regard._utils.tracing import values_unavailable
from regard.engines import EngineLike
from regard.engines.aux import FIELDS, Aux, AuxRequest, TopK
from regard.functional import attention
from regard.masks import Extent, Mask, MaskLike, as_mask
from regard.nn._base import PartLayer, parameter, resolve_part
from regard.nn.heads.scored import ScoredAttention
from regard.nn.kv_cache import AttendingCache, KVCache
from regard.nn.positions.rotary import HeadPositions
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike

# Input layouts of torch's module: with or without a batch dimension, batch first or second ----------------------------


def check_inputs(layer: str, inputs: Sequence[Any], widths: Sequence[int], batch_first: bool) -> bool:
    """Check query, key and value against these widths; return whether they have a batch dimension."""
    query, key, value = inputs
    same = query is key and key is value and isinstance(query, Tensor)
    if same and query.dim() == 3 and query.is_floating_point() and query.shape[2] == min(widths) == max(widths):
        return True  # fast path for self-attention
    dims = query.dim() if isinstance(query, Tensor) and query.dim() in (2, 3) else 3
    for name, width, x in zip(("query", "key", "value"), widths, inputs):
        wanted = f"(N, {width})" if dims == 2 else f"(B, N, {width})" if batch_first else f"(N, B, {width})"
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise rejected(layer, name, f"be a float tensor {wanted}", described(x), TypeError)
        if (
            x.dim() != dims
            or x.shape[-1] != width
            or batch_and_length(x, batch_first)[0] != batch_and_length(query, batch_first)[0]
        ):
            context = "" if name == "query" else f" (query {shape(query)})"
            raise rejected(layer, name, f"have shape {wanted}", f"{shape(x)}{context}")
    if batch_and_length(key, batch_first) != batch_and_length(value, batch_first):
        raise rejected(layer, "value", f"have the batch size and length of key {shape(key)}", shape(value))
    return dims == 3


def batch_and_length(x: Tensor, batch_first: bool) -> tuple[int, int]:
    """Return B and N of an input."""
    if x.dim() == 2:
        return 1, x.shape[0]
    return (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])


def as_batch_first(x: Tensor, batch_first: bool) -> Tensor:
    """Return an input as (B, N, E)."""
    return x.unsqueeze(0) if x.dim() == 2 else x if batch_first else x.transpose(0, 1)


def unbatched(aux: Aux | None) -> Aux | None:
    """Remove the batch dimension of size 1 from the fields."""
    found: dict[str, Any] = {}
    for name in FIELDS if aux is not None else ():
        field = getattr(aux, name)
        if isinstance(field, Tensor):
            found[name] = field.squeeze(0)
        elif isinstance(field, TopK):
            found[name] = TopK(field.weights.squeeze(0), field.indices.squeeze(0))
    return None if aux is None else replace(aux, **found)


# Conversion of torch's masks, in which True hides, to masks in which True shows ---------------------------------------


def combined_mask(
    padding: Tensor | None,
    attn_mask: MaskLike | None,
    is_causal: bool,
    extent: Extent,
    start: int,
    appended: int,
    device: torch.device,
) -> MaskLike | None:
    """Combine the masks of a call of multi-head attention.

    Parameters
    ----------
    padding : Tensor (B, S), optional
        Bool, True hides; or float, added.
    attn_mask : Tensor (L, S) or (B·H, L, S), or Mask, optional
        A tensor as ``padding``, or a Mask.
    is_causal : bool
    extent : Extent
        B, H, L and S, without the appended keys.
    start : int
        Number of keys before the first query.
    appended : int
        Number of appended keys, which every query sees.
    device : torch.device
    """
    found: list[Mask] = []
    if is_causal and not start and is_causal_matrix(attn_mask):
        attn_mask = None
    if padding is not None:
        keep = _extended(padding, appended)
        if attn_mask is None and not is_causal and extent.L * extent.S <= _SMALL:
            return keep[:, None, None]
        found.append(masks.key_padding(keep) if keep.dtype == torch.bool else masks.dense(keep[:, None, None]))
    if isinstance(attn_mask, Tensor):
        keep = _extended(attn_mask, appended)
        found.append(masks.dense(keep if keep.dim() == 2 else keep.unflatten(0, (extent.B, extent.H))))
    elif attn_mask is not None:
        found.append(masks.as_mask(attn_mask))
    if is_causal and start + 1 < extent.S:  # else there is nothing to hide
        causal = masks.causal(offset=start)
        if appended:
            causal = causal | masks.key_padding(torch.arange(extent.S + appended, device=device) >= extent.S)
        found.append(causal)
    return reduce(and_, found) if found else None


def check_masks(layer: object, padding: Any, attn_mask: MaskLike | None, extent: Extent, appended: int) -> None:
    """Raise if a mask has the wrong type or shape for the call."""
    name, (B, H, L, S) = type(layer).__name__, extent
    shapes = {"(L, S)": (L, S), "(B·H, L, S)": (B * H, L, S)}
    for argument, mask, fits in (("key_padding_mask", padding, {"(B, S)": (B, S)}), ("attn_mask", attn_mask, shapes)):
        if argument == "attn_mask" and isinstance(mask, Mask):
            if appended:
                expected = "be a tensor with add_bias_kv or add_zero_attn"
                raise rejected(name, argument, expected, described(mask), TypeError)
            continue
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            kinds = "be a bool tensor (True hides) or a float tensor (added to the score)"
            kinds += ", or a Mask" if argument == "attn_mask" else ""
            raise rejected(name, argument, kinds, described(mask), TypeError)
        if tuple(mask.shape) not in fits.values():
            expected = " or ".join(f"{legend} = {sizes}" for legend, sizes in fits.items())
            raise rejected(name, argument, f"have shape {expected}", shape(mask))


def hidden(mask: Tensor) -> Tensor:
    """Return the hidden positions of a mask."""
    return mask if mask.dtype == torch.bool else mask.isneginf()


def hidden_keys(
    padding: Tensor | None, attn_mask: MaskLike | None, extent: Extent, device: torch.device
) -> Tensor | None:
    """Return which keys (B or 1, S) are hidden from all queries of the call."""
    found = None if padding is None else hidden(padding)
    if attn_mask is None:
        return found
    if not isinstance(attn_mask, Tensor):
        visible = as_mask(attn_mask).bind(extent, device).visible_keys(extent).to(device)
        return ~visible.any(1) if found is None else found | ~visible.any(1)
    unused = hidden(attn_mask).all(-2)  # (S,) or (B·H, S)
    unused = unused.unsqueeze(0) if unused.dim() == 1 else unused.unflatten(0, (extent.B, extent.H)).all(1)
    return unused if found is None else found | unused


def without_garbage(rows: Tensor, padding: Tensor | None) -> Tensor:
    """Zero non-finite values of rows (B, N, E) in padding, where ``padding`` (B, N) is True or −inf."""
    if padding is None:
        return rows
    return torch.where(hidden(padding).unsqueeze(-1) & ~rows.isfinite(), 0.0, rows)


def is_causal_matrix(mask: Any) -> bool:
    """Whether a mask is the causal matrix; False if its values cannot be read cheaply."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.requires_grad or mask.device.type != "cpu":
        return False
    if values_unavailable(mask):
        return False
    later = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype != torch.bool:
        later = torch.zeros(mask.shape, dtype=mask.dtype).masked_fill(later, -torch.inf)
    return torch.equal(mask, later)


def _extended(mask: Tensor, appended: int) -> Tensor:
    """Invert a bool mask so that True shows, and append visible keys."""
    if mask.dtype == torch.bool:
        return F.pad(~mask, (0, appended), value=True) if appended else ~mask
    return F.pad(mask, (0, appended)) if appended else mask


# Nested tensors: pad them, attend, and nest the output ----------------------------------------------------------------
# Dimensions: B batch, N rows of a sequence, E width.


def attend_nested(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: MaskLike | None,
    *given: Any,
) -> tuple[Tensor, Any]:
    """Run a multi-head layer on nested tensors; ``given`` are the remaining arguments of the call."""
    name = type(layer).__name__
    if key_padding_mask is not None or not (query.is_nested and key.is_nested and value.is_nested):
        expected = "be either all nested, without a key_padding_mask, or all dense"
        raise rejected(name, "query, key and value", expected, "a mixture")
    if not layer.batch_first:
        raise rejected(name, "query", "be dense if batch_first is False", "a nested tensor")
    rows: dict[int, list[Tensor]] = {}
    inputs = ("query", query, layer.embed_dim), ("key", key, layer.kdim), ("value", value, layer.vdim)
    for argument, x, width in inputs:
        if id(x) not in rows:  # keep the identity of inputs: the layer checks for self-attention
            rows[id(x)] = sequences(name, argument, x, width)
    lengths, ours, theirs = ([len(row) for row in rows[id(x)]] for x in (query, key, value))
    if len(ours) != len(lengths):
        raise rejected(name, "key", f"hold as many sequences as query, {len(lengths)}", len(ours))
    if theirs != ours:
        raise rejected(name, "value", f"hold sequences of key's lengths {ours}", theirs)
    dense = {which: pad_sequence(each, batch_first=True) for which, each in rows.items()}
    ends = [dense[id(x)] for x in (query, key, value)]
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        counts = (torch.tensor(each, device=query.device) for each in (lengths, ours))
        attn_mask = as_mask(attn_mask).for_lengths(*counts)
    output, extra = layer.forward(*ends, _padding(ours, key.device), need_weights, attn_mask, *given)
    if isinstance(extra, Tensor):  # zero the weights (B, L, S) or (B, H, L, S) of padded queries
        none = _padding(lengths, key.device).unflatten(0, (-1,) + (1,) * (extra.dim() - 3)).unsqueeze(-1)
        extra = torch.where(none, 0.0, extra)
    return _nested_like(query, [row[:length] for row, length in zip(output, lengths)], name), extra


def sequences(function: str, argument: str, nested: Tensor, width: int) -> list[Tensor]:
    """Return the sequences (N, E) of a non-empty nested tensor of this width, or raise."""
    if nested.layout == torch.jagged:
        if nested.dim() != 3 or isinstance(nested.shape[1], int):
            raise rejected(function, argument, f"have shape (B, N, {width}) with jagged N", shape(nested))
        rows = [_values(nested).narrow(0, start, length) for start, length in zip(*_spans(nested))]
    else:
        rows = list(nested.unbind())
    if not rows:
        raise rejected(function, argument, "hold at least one sequence", "an empty nested tensor")
    for row in rows:
        if row.dim() != 2 or row.shape[1] != width:
            raise rejected(function, argument, f"hold sequences of shape (N, {width})", described(row))
    return rows


def without_holes(layer: Any, argument: str, x: Tensor) -> Tensor:
    """Make a Transformer layer's nested input contiguous, as linear layers require.

    Torch's ``contiguous`` does the same but is not differentiable. Contiguous inputs are returned unchanged.
    """
    rows = sequences(type(layer).__name__, argument, x, layer.self_attn.embed_dim)
    if x.is_contiguous() and (x.layout != torch.jagged or sum(map(len, rows)) == _values(x).shape[0]):
        return x
    if x.layout != torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    lengths = torch.tensor([0, *map(len, rows)], device=x.device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), lengths.cumsum(0))


def _values(nested: Any) -> Tensor:
    found: Tensor = nested.values()
    return found


def _spans(nested: Any) -> tuple[list[int], list[int]]:
    """Return the start of each sequence in the values of a jagged tensor, and its length."""
    offsets, lengths = nested.offsets(), nested.lengths()
    return offsets[:-1].tolist(), (offsets.diff() if lengths is None else lengths).tolist()


def _padding(lengths: list[int], device: torch.device) -> Tensor:
    """Return which rows of padded sequences are padding: (B, N)."""
    return torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device).unsqueeze(1)


def _nested_like(query: Any, rows: list[Tensor], name: str) -> Tensor:
    """Nest rows with the structure of the query, so that the two can be added."""
    if query.layout != torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    packed, count = torch.cat(rows), _values(query).shape[0]
    starts, lengths = _spans(query)
    stops = [start + length for start, length in zip(starts, lengths)]
    if any(stop > start for stop, start in zip(stops, starts[1:])):
        raise rejected(name, "query", "hold sequences that do not overlap", "a jagged tensor with overlapping ones")
    if len(packed) != count:  # zeros between the sequences
        places = [torch.arange(start, stop, device=packed.device) for start, stop in zip(starts, stops)]
        packed = packed.new_zeros(count, packed.shape[1]).index_copy(0, torch.cat(places), packed)
    return torch.nested.nested_tensor_from_jagged(packed, query.offsets(), query.lengths())


# Multi-head attention -------------------------------------------------------------------------------------------------


_WEIGHTS = AuxRequest(weights=True)
#: Maximum number of (query, key) pairs for which key padding is passed as a dense matrix.
_SMALL = 256 * 256


@mechanism(
    formula="concat_h softmax(Q W_Qʰ (K W_Kᵍ)ᵀ / √D) V W_Vᵍ · W_O",
    sources=("vaswani2017", "shazeer2019", "ainslie2023"),
    learned="W_Q (E, E), W_K (G·D, Ek), W_V (G·D, Ev), W_O (E, E), biases",
    cost="O((L + S)·E² + L·S·E)",
    cache="2·G·D per token",
)
class MultiheadAttention(PartLayer):
    """Multi-head attention; a drop-in replacement of ``torch.nn.MultiheadAttention`` with the same ``state_dict``.

    Head h of width D = E/H is ``softmax(Q W_Qʰ (K W_Kᵍ)ᵀ / √D) V W_Vᵍ``; W_O projects the concatenated heads (Vaswani
    2017, arXiv 1706.03762). With fewer key–value heads G than query heads H, each serves H/G query heads: multi-query
    attention for G = 1 (Shazeer 2019, arXiv 1911.02150), grouped-query otherwise (Ainslie 2023, arXiv 2305.13245).

    Arguments, mask polarity, results and initial weights match torch's module, with these differences: the heads of a
    query with no visible keys are zero (so its output is W_O's bias) instead of NaN; returned weights are those before
    dropout; ``is_causal=True`` needs no ``attn_mask`` and always applies. docs/differences.md has the full list.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H, which divides E.
    dropout : float, default 0.0
        Probability of dropping a weight, in training.
    bias : bool, default True
        Whether the projections have a bias.
    add_bias_kv : bool, default False
        Append a learned key and value that every query sees.
    add_zero_attn : bool, default False
        Append a key and value of zeros that every query sees.
    kdim, vdim : int, optional
        Widths of keys and values; default to E.
    batch_first : bool, default False
        Sequences are (B, N, E) rather than (N, B, E).
    device, dtype : optional
        Device and dtype of the parameters.
    num_kv_heads : int, optional
        Number of key–value heads G, which divides H; defaults to H. If G < H, the projections are separate parameters.
    score : str, Score, callable or ScoredAttention, optional
        The score within a head; see :func:`regard.attention`. The parameters and buffers of a Score, or of a layer such
        as ``GeneralAttention(D)``, are registered in this module. Pass a learned function as a module: tensors in the
        closure of a plain function cannot be found.
    normalizer : str or Normalizer, default "softmax"
        Its tensors are registered in this module.
    rotary : Module, optional
        ``rotary(x, offset)`` rotates queries and keys (B, H, N, D) at positions ``offset``, ``offset + 1``, … A
        :class:`HeadPositions` whose ``of_keys`` differs, such as :class:`XPos`, rotates keys by that.
    dropped_weights : bool, default False
        Return the weights after dropout, as torch does in training.
    engine : str, default "auto"
        See :func:`regard.attention`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

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
        """Create the parameters with torch's names, and create and initialize them in torch's order."""
        E, width = self.embed_dim, self.num_kv_heads * self.head_dim
        self._is_packed = is_packed = self.kdim == self.vdim == width == E
        packed, separate = ("in_proj_weight",), ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        shapes = dict(zip(packed + separate, [(3 * E, E), (E, E), (width, self.kdim), (width, self.vdim)]))
        for name in packed + separate if is_packed else separate + packed:
            used = is_packed == (name in packed)
            self.register_parameter(name, parameter(*shapes[name], **where) if used else None)
        self.register_parameter("in_proj_bias", parameter(E + 2 * width, **where) if bias else None)
        self.out_proj = OutProjection(E, E, bias=bias, **where)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, parameter(1, 1, width, **where) if add_bias_kv else None)
        self._reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the parameters as torch's module does."""
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
        cache: KVCache | AttendingCache | None = None,
        return_aux: AuxRequest | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the output and the weights.

        Parameters
        ----------
        query : Tensor (L, B, E), or (B, L, E) if ``batch_first``, or (L, E)
        key, value : Tensor (S, B, Ek) and (S, B, Ev), likewise
        key_padding_mask : Tensor (B, S), or (S,) where there is no batch, optional
            Bool, **True hides** the key, even if it is NaN (in self-attention, non-finite values there also count as 0
            in the query); or float, added to the scores.
        need_weights : bool, default True
            Whether to return the weights, which takes O(L·S) memory. ``engine="auto"`` then uses the engine that
            materializes them, so the output may differ by rounding from a call without weights.
        attn_mask : Tensor (L, S) or (B·H, L, S), or Mask, optional
            Bool, **True hides** the pair; or float, added. A :mod:`regard.masks` mask keeps its own polarity.
        average_attn_weights : bool, default True
            Return the mean of the weights over heads.
        is_causal : bool, default False
            Also hide keys after the query. Query 0 is at key 0, or follows the steps in the cache.
        cache : KVCache, optional
            Keys and values of earlier steps. They come first, and masks cover all S keys. An object with a method
            ``attend(layer, rows)`` computes a step itself, without masks and weights.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return instead of the weights, per head.

        Returns
        -------
        output : Tensor, as the query
        weights : Tensor (B, L, S), or (B, H, L, S) if not averaged, or None
            Without B for unbatched inputs; S includes appended keys. With ``return_aux``, an :class:`~regard.Aux`.
        """
        if cache is not None and not isinstance(cache, KVCache):
            is_self = query is key and key is value and key_padding_mask is None and attn_mask is None
            return self._step(query, cache, is_self and not need_weights and return_aux is None), None
        start = 0 if cache is None else len(cache)
        plain = query is key and key is value and key_padding_mask is None and attn_mask is None
        if plain and self._is_usual(query):
            batched, L = True, query.shape[1]
            upper_left = is_causal and not start
            mask: MaskLike | None = masks.causal(offset=start) if is_causal and start and L > 1 else None
            q, k, v = self._in_projected(query)
        else:
            upper_left = False
            nested = isinstance(query, Tensor) and query.is_nested
            if key is not query or value is not query:
                nested = nested or any(isinstance(x, Tensor) and x.is_nested for x in (key, value))
            if nested:
                if cache is not None or return_aux is not None:
                    expected = "be dense with a cache or return_aux"
                    raise rejected(type(self).__name__, "query", expected, "a nested tensor")
                given = need_weights, attn_mask, average_attn_weights, is_causal
                return attend_nested(self, query, key, value, key_padding_mask, *given)
            widths = self.embed_dim, self.kdim, self.vdim
            batched = check_inputs(type(self).__name__, (query, key, value), widths, self.batch_first)
            if key_padding_mask is not None and not batched and key_padding_mask.dim() == 1:
                key_padding_mask = key_padding_mask.unsqueeze(0)
            B, L = batch_and_length(query, self.batch_first)
            S = L if key is query else batch_and_length(key, self.batch_first)[1]
            extent, appended = Extent(B, self.num_heads, L, start + S), self.add_zero_attn + (self.bias_k is not None)
            check_masks(self, key_padding_mask, attn_mask, extent, appended)
            mask = combined_mask(key_padding_mask, attn_mask, is_causal, extent, start, appended, query.device)
            q, k, v = self._projected(query, key, value, key_padding_mask, attn_mask, extent, start)
        if self.rotary is not None:
            of_keys = self.rotary.of_keys if isinstance(self.rotary, HeadPositions) else self.rotary
            q, k = self.rotary(q, start), of_keys(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        if self._extends:
            k, v = self._extended(k, self.bias_k), self._extended(v, self.bias_v)
        try:
            output, extra = self._attend(q, k, v, mask, need_weights, return_aux, upper_left)
        except BaseException:
            if cache is not None:  # undo the append, so that the call can be retried
                cache.truncate(start)
            raise
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if isinstance(extra, Tensor):
            extra = (extra.mean(1) if average_attn_weights else extra).to(output.dtype)
        if not batched:
            return output.squeeze(0), extra.squeeze(0) if isinstance(extra, Tensor) else unbatched(extra)
        return output if self.batch_first else output.transpose(0, 1), extra

    def _step(self, x: Tensor, cache: AttendingCache, plain: bool) -> Tensor:
        """Return the output of one step computed by the cache; ``plain`` says that there are no masks or weights."""
        batched = check_inputs(type(self).__name__, (x, x, x), (self.embed_dim,) * 3, self.batch_first)
        if not plain or self._extends or not batched or batch_and_length(x, self.batch_first)[1] != 1:
            expected = "be a KVCache for calls with masks, several steps, other keys, or returned weights"
            raise rejected(type(self).__name__, "cache", expected, f"a {type(cache).__name__}")
        steps = 1 if self.batch_first else 0
        return cache.attend(self, x.squeeze(steps)).unsqueeze(steps)

    def _is_usual(self, x: Any) -> bool:
        """Whether a tensor is (B, N, E) and one matrix product gives queries, keys and values."""
        return (
            self.batch_first
            and not self._extends
            and self._is_packed
            and isinstance(x, Tensor)
            and not x.is_nested
            and x.dim() == 3
            and x.shape[-1] == self.embed_dim
            and x.is_floating_point()
        )

    def _in_projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, H, N, D) of one input (B, N, E)."""
        weight: Any = self.in_proj_weight
        rows = F.linear(x, weight, self.in_proj_bias)
        return rows.view(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    def _projected(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        attn_mask: MaskLike | None,
        extent: Extent,
        start: int,
    ) -> tuple[Tensor, ...]:
        """Return queries (B, H, L, D), keys and values (B, G, S, D), after zeroing hidden inputs.

        The keys before ``start`` are in a cache; masks cover them, too.
        """
        packed, is_self = query is key and key is value, query is key
        new = slice(start, None)
        query = as_batch_first(query, self.batch_first)
        if padding is not None and is_self:
            query = without_garbage(query, padding[:, new])
        if packed:
            key = value = query
            if self._is_packed:
                return self._in_projected(query)
        else:
            key, value = as_batch_first(key, self.batch_first), as_batch_first(value, self.batch_first)
            unused = hidden_keys(padding, attn_mask, extent, query.device)
            if unused is not None:
                hidden = unused[:, new].unsqueeze(-1)
                key, value = torch.where(hidden, 0.0, key), torch.where(hidden, 0.0, value)
        width = self.num_kv_heads * self.head_dim
        sizes, bias = [self.embed_dim, width, width], self.in_proj_bias
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights: Any = separate if self.in_proj_weight is None else self.in_proj_weight.split(sizes)
        biases = [None] * 3 if bias is None else bias.split(sizes)
        ends = [F.linear(x, weight, b) for x, weight, b in zip((query, key, value), weights, biases)]
        return tuple([x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in ends])

    def _extended(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Append the learned row and the row of zeros, if any, to keys or values (B, G, S, D)."""
        B, G, _, D = rows.shape
        after = [] if bias is None else [bias.view(1, G, 1, D).expand(B, -1, -1, -1).to(rows.dtype)]
        after += [rows.new_zeros(B, G, 1, D)] if self.add_zero_attn else []
        return torch.cat([rows, *after], 2) if after else rows

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike | None,
        need_weights: bool,
        request: AuxRequest | None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | Aux | None]:
        """Return the heads' outputs (B, H, L, D), and weights (B, H, L, S) or the requested auxiliary outputs."""
        dropout_p = self.dropout if self.training else 0.0
        parts: dict[str, Any] = {"engine": self.engine, "is_causal": is_causal, "enable_gqa": True}
        if (score := self.score) is not None:
            parts["score"] = resolve_part(score.score() if isinstance(score, ScoredAttention) else score)
        if self.normalizer != "softmax":
            parts["normalizer"] = resolve_part(self.normalizer)
        if request is not None:
            return attention(q, k, v, mask, dropout_p, return_aux=request, **parts)
        if not need_weights:
            return attention(q, k, v, mask, dropout_p, **parts), None
        if dropout_p and self.dropped_weights:  # append an identity matrix to the values to read off the weights
            eye = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
            both = attention(q, k, torch.cat([v, eye], -1), mask, dropout_p, **parts)
            return both[..., : self.head_dim], both[..., self.head_dim :]
        if self.engine == "auto":  # weights are materialized anyway, so compute the output from them
            parts["engine"] = "reference"
        output, aux = attention(q, k, v, mask, dropout_p, return_aux=_WEIGHTS, **parts)
        return output, aux.weights

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
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
    """Prevent torch's encoder layers from using their fused path instead of calling this module.

    They use it only if this attribute says that queries, keys and values have the same width.
    """
    module._qkv_same_embed_dim = False
