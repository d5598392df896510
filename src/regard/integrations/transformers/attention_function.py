"""The function that transformers calls for a layer's attention, and its registration.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E and V widths of a head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from regard import AuxRequest, attention, masks
from regard._errors import described, rejected, shape
from regard.integrations.transformers._interfaces import collects_weights
from regard.integrations.transformers.configuration import Parts, parts_of
from regard.integrations.transformers.mask_function import ModelMask, model_mask
from regard.masks import Mask, MaskLike

#: What the mask function is called with; a transformers that does not know these would lose a part of the mask.
_KNOWN = ("q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "use_vmap")


def register(name: str = "regard") -> None:
    """Let transformers run models on :func:`regard.attention`: ``attn_implementation="regard"``.

    Calling it again changes nothing.

    Parameters
    ----------
    name : str, default "regard"
        What the implementation is called.

    Raises
    ------
    ImportError
        If this version of transformers hands masks over in another way than those that are known.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from regard.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                      num_attention_heads=4, attn_implementation="regard")
    >>> LlamaForCausalLM(config)(torch.tensor([[3, 1, 4]])).logits.shape
    torch.Size([1, 3, 50])
    """
    interface = getattr(masking_utils, "AttentionMaskInterface", None)
    known = getattr(masking_utils, "sdpa_mask", None)
    parameters = () if known is None else inspect.signature(known).parameters
    if interface is None or not all(each in parameters for each in _KNOWN):
        raise ImportError(
            f"register: transformers must be 5.20 or a later one whose masks are known, got {transformers.__version__}."
        )
    transformers.AttentionInterface.register(name, attention_function)
    interface.register(name, model_mask)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | MaskLike | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = False,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's rows (B, L, H, V), and its weights (B, H, L, S) where they are asked for.

    Parameters
    ----------
    module : Module
        The layer.
    query : Tensor (B, H, L, E)
    key, value : Tensor (B, G, S, E) and (B, G, S, V)
    attention_mask : ModelMask, Tensor (B, 1 or H, L, S) or None
        What :func:`model_mask` made, or a tensor of the user's.
    dropout : float
    scaling : float, optional
    is_causal : bool, optional
        Where there is no mask; by default as the layer says.
    softcap : float, optional
        As Gemma 2 has it.
    s_aux : Tensor (H,), optional
        Scores of a key without a value, learned for each head, as gpt-oss has it.
    position_bias : Tensor (B or 1, H, L, S), optional
        Added to the scores, as T5 has it.
    sliding_window : int, optional
        Where there is no mask, which holds it already.
    position_ids : Tensor (B, L), optional
        Which start again from 0 where several sequences are packed into one.
    cu_seq_lens_q, cu_seq_lens_k : Tensor (N + 1,), optional
        Where sequences begin that are packed.
    output_attentions : bool

    Raises
    ------
    ValueError
        If packed sequences would see each other, or the layer was configured with parts that do not go together.
    """
    if cache is not None:
        raise rejected("regard", "cache", "be None: paged caches are not supported", described(cache))
    parts, L = parts_of(module), query.shape[2]
    packing = {"position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    mask = layer_mask(module, query, key, attention_mask, is_causal, position_bias, sliding_window, **packing)
    wanted = bool(output_attentions) or collects_weights()
    asked = AuxRequest(lse=s_aux is not None, weights=wanted) if wanted or s_aux is not None else None
    grouped = query.shape[1] != key.shape[1]
    common = mask is None or (isinstance(mask, Tensor) and mask.shape[1:3] == (1, 1))
    if grouped and L == 1 and common and asked is None and parts.are_the_models:
        # The heads of a group are queries of its key head: one product for each group.
        rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        output = attention(rows, key, value, mask, dropout, scale=scaling, softcap=softcap)
        return output.reshape(len(query), 1, query.shape[1], -1), None
    found: Any = attention(
        query,
        key,
        value,
        mask,
        dropout,
        scale=scaling,
        enable_gqa=grouped,
        score=parts.score,
        normalizer=parts.normalizer,
        softcap=softcap,
        return_aux=asked,
    )
    if asked is None:
        return found.transpose(1, 2).contiguous(), None
    output, aux = found
    weights = aux.weights
    if s_aux is not None:
        lse = _differentiable(aux.lse, query, key, mask, scaling, softcap, parts)
        share = torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None]).unsqueeze(-1).to(output.dtype)
        output, weights = output * share, None if weights is None else weights * share
    return output.transpose(1, 2).contiguous(), weights


def layer_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: ModelMask | MaskLike | None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    *,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
) -> MaskLike | None:
    """Return what a layer's queries may see, and what is added to scores; arguments as :func:`attention_function`."""
    given = attention_mask if isinstance(attention_mask, ModelMask) else ModelMask(attention_mask)  # type: ignore[arg-type]
    L, S, parts = query.shape[2], key.shape[2], parts_of(module)
    mask: MaskLike | None = given.mask
    if attention_mask is None and L > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        # The first of S keys, where a static cache has room for more, stand beside the queries.
        mask = masks.causal(offset=0) if sliding_window is None else masks.window(sliding_window - 1, 0, offset=0)
    if isinstance(mask, Tensor) and mask.shape[-1] > S:  # as a static cache had room for
        mask = mask[..., :S]
    mask = _together(mask, _packed(given, position_ids, cu_seq_lens_q, cu_seq_lens_k, L, S))
    if parts.mask is not None:
        mask = _together(mask, parts.part_of_mask(query, S, _first_query(given), given.first_key))
    return _together(mask, None if position_bias is None else position_bias[..., :S])


def _together(mask: MaskLike | None, other: MaskLike | None) -> MaskLike | None:
    """Return what both show, with what both add; a mark without a bias stays a tensor."""
    if mask is None or other is None:
        return other if mask is None else mask
    return masks.as_mask(mask) & masks.as_mask(other)


def _first_query(given: ModelMask) -> int:
    """Return how many positions come before query 0: it sees itself, and nothing behind, in a mask that is causal."""
    if given.first_query >= 0 or not isinstance(given.mask, Tensor):
        return max(given.first_query, 0)
    seen = given.mask if given.mask.dtype == torch.bool else given.mask > torch.finfo(given.mask.dtype).min
    row = seen[:, :, 0].any(0).any(0)
    return int((row * torch.arange(len(row), device=row.device)).max())


def _packed(
    given: ModelMask, positions: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, L: int, S: int
) -> Mask | None:
    """Return what keeps packed sequences apart, if there are some and the mask does not.

    transformers tells its mask function of them only where there is no cache and no padding.
    """
    if given.packed:
        return None
    if cu_q is not None and len(cu_q) > 2:
        return masks.from_cu_seqlens(cu_q, cu_k)
    if positions is None or positions.dim() != 2 or L == 1 or positions.shape[1] != L or torch.compiler.is_compiling():
        return None
    if "packed" not in given.kept:
        given.kept["packed"] = _documents(given, positions, S)
    kept: Mask | None = given.kept["packed"]
    return kept


def _documents(given: ModelMask, positions: Tensor, S: int) -> Mask | None:
    L, first = positions.shape[1], max(given.first_query, 0)
    real = torch.ones_like(positions, dtype=torch.bool)
    if given.real is not None:  # positions of padding mean nothing
        real = given.real[:, first - given.first_key :][:, :L]
    begins = (positions == 0) & real
    if not first:
        begins = begins & (real.cumsum(1) > 1)  # the first one begins what there is in any case
    if not bool(begins.any()):
        return None
    if first or L != S:
        expected = "rise throughout where a cache holds earlier keys, of which nothing says which sequence they are of"
        raise rejected("regard", "position_ids", expected, f"several sequences in {shape(positions)}")
    return masks.document(begins.cumsum(1))


def _differentiable(
    lse: Tensor, query: Tensor, key: Tensor, mask: Any, scale: float | None, softcap: float | None, parts: Parts
) -> Tensor:
    """Return the log-sum-exp (B, H, L) with its gradient, ``Σ_j α_ij ∂s_ij``, in the queries and the keys.

    For scores q·k it is that of ``scale · q · Σ_j α_ij k_j`` with constant weights: attention to the keys themselves.
    """
    if parts.score is not None or parts.normalizer != "softmax":
        got = ", ".join(map(str, (parts.score, parts.normalizer)))
        raise rejected("configure", "score and normalizer", "be the model's own where it has learned sinks", got)
    if not torch.is_grad_enabled() or not (query.requires_grad or key.requires_grad):
        return lse
    if softcap is not None:
        raise rejected("regard", "softcap", "be None in training where there are learned sinks", softcap)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = query.shape[1] != key.shape[1]
    read: Any = attention(query.detach(), key.detach(), key, mask, scale=scale, enable_gqa=grouped)
    change = (query * read).sum(-1) * factor
    return lse + (change - change.detach()).to(lse.dtype)
