"""What a call of each function that computes attention says: its arguments as one call of attention.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.inspect.calls import Attended, Projected, lengths_of, visible_pairs
from regard.masks import Extent, Submatrix, as_mask
from regard.scores import ScoreMod, ScoreModFunction

#: The side of a block of FlexAttention's that stands for no mask.
_UNLIMITED = 1 << 30


def of_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: ARG001
) -> Attended:  # fmt: skip
    """``scaled_dot_product_attention``."""
    return Attended(query, key, attn_mask, is_causal=is_causal, scale=scale, value=value)


def of_kernel(given: Mapping[str, Any]) -> Attended:
    """One of torch's operators that ``scaled_dot_product_attention`` chooses from, with its arguments by name."""
    mask = given.get("attn_mask", given.get("attn_bias"))
    return Attended(
        given["query"], given["key"], mask, is_causal=bool(given.get("is_causal", False)), scale=given.get("scale"),
        value=given["value"],
    )  # fmt: skip


def of_regard(signature: inspect.Signature, *args: Any, **kwargs: Any) -> Attended:
    """:func:`regard.attention`, whose signature comes first."""
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    names = ("query", "key", "value", "is_causal", "scale", "score", "normalizer", "softcap")
    return Attended(mask=given.arguments["attn_mask"], **{name: given.arguments[name] for name in names})


def of_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreModFunction | None = None, block_mask: Any = None,
    scale: float | None = None, *_: Any, **__: Any,
) -> Attended:  # fmt: skip
    """Torch's ``flex_attention``; a mask of one block of unlimited size hides nothing."""
    score = None if score_mod is None else ScoreMod(score_mod)
    hides = block_mask is not None and max(block_mask.BLOCK_SIZE) < _UNLIMITED
    mask = as_mask(block_mask) if hides else None
    return Attended(query, key, mask, scale=scale, score=score, value=value)


def of_fused_attention(query: Tensor, key: Tensor, *others: Any) -> Projected:
    """Torch's fused attention: (value, width, heads, weight, bias, out, out, mask, needs weights, average, kind)."""
    width, heads, weight, bias = others[1:5]
    mask, kind = others[7], others[10]
    if query.is_nested:
        key = query
    return _projected(query, key, width, heads, weight, bias, mask, kind)


def of_fused_layer(source: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, *others: Any) -> Projected:
    """Torch's fused layer: (out, out, act, first, eps, norm, norm, norm, norm, 4 of the hidden layer, mask, kind)."""
    first, eps, norm, shift = others[3:7]
    mask, kind = (*others[13:15], None, None)[:2]
    rows = F.layer_norm(source, (width,), norm, shift, eps) if first else source
    return _projected(rows, rows, width, heads, weight, bias, mask, kind)


def _projected(
    query: Tensor, key: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Any
) -> Projected:
    if query.is_nested:  # whose padding was taken out
        lengths = lengths_of(query)
        query = key = torch.nested.to_padded_tensor(query, 0.0)
        mask = visible_pairs(lengths, lengths)
    elif mask is not None:  # True hides; kind 0 is of pairs, 1 of keys
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask[:, None, None] if kind == 1 and mask.dim() == 2 else mask
    return Projected(query, key, weight[: 2 * width], bias[: 2 * width], heads, mask)


def of_transformers(
    kind: Literal["eager", "regard", "other"],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *_: Any,
    **kwargs: Any,
) -> Attended | None:
    """Any attention function of transformers; first comes which: a model's own ("eager"), ours, or another.

    None where a keyword may change what is attended to in a way that is not known.
    """
    from regard.integrations.transformers.attention_function import layer_inputs, unknown_keyword
    from regard.integrations.transformers.configuration import parts_of

    if unknown_keyword(kwargs) is not None:
        return None
    causal = kwargs.get("is_causal")
    if kind == "eager":
        causal = False
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:  # which is added like any other
            attention_mask = attention_mask.to(query.dtype)
    elif kind == "other" and causal is None:  # as torch's kernel is called: no mask is a causal one
        causal = bool(getattr(module, "is_causal", True))
    if kind != "regard":  # their masks say what is seen, whatever positions are
        kwargs["packed"] = False
    names = inspect.signature(layer_inputs).parameters.keys() - {"is_causal", "others"}
    inputs = layer_inputs(
        module, query, key, attention_mask, causal, **{name: kwargs[name] for name in names if name in kwargs}
    )
    mask = inputs.mask
    if getattr(module, "is_causal", False):
        key, mask = _seen(query, key, mask)
    parts, scale = parts_of(module), kwargs.get("scaling")
    return Attended(
        query, key, mask, scale=scale, softcap=kwargs.get("softcap"), score=parts.score, normalizer=parts.normalizer,
        sinks=inputs.sink, value=value[:, :, : key.shape[2]], difference=_difference(module),
    )  # fmt: skip


@torch.no_grad()
def _difference(module: nn.Module) -> float | None:
    """Return λ of a differential layer (Ye et al. 2024, arXiv 2410.05258); None of any other."""
    names = [f"lambda_{name}" for name in ("q1", "k1", "q2", "k2", "init")]
    if not all(hasattr(module, name) for name in names):
        return None
    *pairs, start = (getattr(module, name) for name in names)
    first, second = (torch.exp((one * other).sum(dtype=torch.float32)) for one, other in zip(pairs[::2], pairs[1::2]))
    return float(first - second + start)


def _seen(query: Tensor, key: Tensor, mask: Any) -> tuple[Tensor, Any]:
    """Return the keys, and the mask of them, without the room that a static cache has behind those that are there."""
    (B, H, L, _), S = query.shape, key.shape[2]
    if mask is None or S <= L:
        return key, mask
    extent = Extent(B, H, L, S)
    bound = as_mask(mask).bind(extent, query.device)
    if isinstance(mask, Tensor):
        shown = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).flatten(0, -2).any(0)
        stop = int((shown * torch.arange(1, len(shown) + 1, device=mask.device)).max())
    else:
        span = bound.intervals(extent)
        stop = S if span is None else int(span[1].max())
    return (key, mask) if stop >= S else (key[:, :, :stop], Submatrix(bound, extent, 0, 0))
