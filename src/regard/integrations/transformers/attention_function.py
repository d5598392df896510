"""The attention function that transformers calls in each layer, and its registration.

Dimensions: B batch, H query heads, G key–value heads, L queries, S keys, E and V widths of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from regard import AuxRequest, attention, masks
from regard._utils.errors import described, rejected
from regard.integrations.transformers._interfaces import collects_weights, explain_missing_layers
from regard.integrations.transformers.configuration import parts_of
from regard.integrations.transformers.mask_function import model_mask
from regard.integrations.transformers.model_mask import ModelMask, Structure, packed_mask
from regard.masks import MaskLike
from regard.normalizers import SoftmaxSink

#: Required arguments of the mask function; a version of transformers without them would lose a part of the mask.
_REQUIRED = ("q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "use_vmap")
#: Keywords that models pass to their attention function and that do not affect its result.
HARMLESS = frozenset(
    (
        # for other implementations
        "max_length_q", "max_length_k", "deterministic",
        # for the model as a whole
        "input_ids", "inputs_embeds", "labels", "logits_to_keep", "cache_position",
        "use_cache", "return_dict", "output_hidden_states", "output_router_logits", "num_items_in_batch",
        # for other layers: the sizes of images, which attention gets one at a time
        "grid_thw",
    )
)  # fmt: skip


def register(name: str = "regard") -> None:
    """Let transformers run models on :func:`regard.attention`: ``attn_implementation="regard"``.

    Calling it again changes nothing.

    Parameters
    ----------
    name : str, default "regard"
        Name of the implementation.

    Raises
    ------
    ImportError
        If this version of transformers is not supported.

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
    sdpa_mask = getattr(masking_utils, "sdpa_mask", None)
    parameters = () if sdpa_mask is None else inspect.signature(sdpa_mask).parameters
    if interface is None or not all(each in parameters for each in _REQUIRED):
        raise ImportError(
            f"register: transformers {transformers.__version__} is not supported: its mask interface is too old or has "
            "changed; install transformers 5.20."
        )
    explain_missing_layers(name)
    transformers.AttentionInterface.register(name, attention_function)
    interface.register(name, model_mask)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = False,
    cache: Any = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's output (B, L, H, V), and its weights (B, H, L, S) if requested.

    Parameters
    ----------
    module : Module
        The layer.
    query : Tensor (B, H, L, E)
    key, value : Tensor (B, G, S, E) and (B, G, S, V)
    attention_mask : ModelMask, Tensor (B, 1 or H, L, S) or None
        The result of :func:`model_mask`, or a tensor from the user.
    dropout : float
    scaling : float, optional
    softcap : float, optional
        As in Gemma 2.
    output_attentions : bool
    **keywords
        See :func:`layer_inputs`.

    Raises
    ------
    ValueError
        If packed sequences would see each other, the layer is configured with incompatible parts, or the model passes
        an unknown keyword.
    """
    if cache is not None:
        raise rejected("regard", "cache", "be None: paged caches are not supported", described(cache))
    parts, L = parts_of(module), query.shape[2]
    inputs = layer_inputs(module, query, key, attention_mask, **keywords)
    mask, sink = inputs.mask, inputs.sink
    wanted = bool(output_attentions) or collects_weights()
    grouped = query.shape[1] != key.shape[1]
    common = mask is None or (isinstance(mask, Tensor) and mask.shape[1:3] == (1, 1))
    if grouped and L == 1 and common and sink is None and not wanted and parts.are_the_models:
        # Treat the heads of a group as queries of its key head: one product per group.
        rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        output = attention(rows, key, value, mask, dropout, scale=scaling, softcap=softcap)
        return output.reshape(len(query), 1, query.shape[1], -1), None
    if sink is not None and parts.normalizer != "softmax":
        expected = "be 'softmax' in a layer with learned sinks"
        raise rejected("configure", "normalizer", expected, str(parts.normalizer))
    # A sink per head is a normalizer's; one per query takes its share afterwards.
    normalizer = SoftmaxSink(sink) if sink is not None and sink.dim() == 1 else parts.normalizer
    by_query = None if sink is None or sink.dim() == 1 else sink
    lse: Any = by_query is not None and ("grad" if torch.is_grad_enabled() else True)
    request = AuxRequest(lse=lse, weights=wanted) if wanted or lse else None
    found: Any = attention(
        query,
        key,
        value,
        mask,
        dropout,
        scale=scaling,
        enable_gqa=grouped,
        score=parts.score,
        normalizer=normalizer,
        softcap=softcap,
        return_aux=request,
    )
    if request is None:
        return found.transpose(1, 2).contiguous(), None
    output, aux = found
    weights = aux.weights
    if by_query is not None:  # a key without a value takes a share of the weight
        share = torch.sigmoid(aux.lse - by_query.to(aux.lse.dtype)).unsqueeze(-1).to(output.dtype)
        output, weights = output * share, None if weights is None else weights * share
    return output.transpose(1, 2).contiguous(), weights


@dataclass
class LayerInputs:
    """The mask and sink of a layer's attention.

    Attributes
    ----------
    mask : MaskLike or None
        The mask and biases.
    sink : Tensor (H,) or (B, H, L), or None
        The score of an additional key without a value, per head or per query.
    """

    mask: MaskLike | None
    sink: Tensor | None


def layer_inputs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    packed: bool | None = None,
    **others: Any,
) -> LayerInputs:
    """Interpret the keywords that a model passes to its attention function.

    Parameters
    ----------
    module, query, key, attention_mask : see :func:`attention_function`
    is_causal : bool, optional
        Used only without a mask. By default False, or the layer's ``is_causal`` in compiled models.
    position_bias : Tensor (B or 1, H, L, S), optional
        Added to the scores, as in T5.
    sliding_window : int, optional
        Used only without a mask, which already includes it.
    s_aux : Tensor (H,), optional
        Learned score per head of a key without a value, as in gpt-oss.
    sinks : Tensor (B, H, L, 1), optional
        The same per query, as in Inkling 2.
    indices : Tensor (B, L, K) of int, optional
        The only keys visible to each query, as in the indexer of DeepSeek 3.2; negative ones are ignored.
    block_indices : Tensor (B, H or a divisor of it, L, K) of int, optional
        The only blocks of keys visible to each query, as in the indexer of MiniMax M3; negative ones are ignored.
    position_ids : Tensor (B or 1, L), optional
        Positions, which restart at 0 for each packed sequence.
    cu_seq_lens_q, cu_seq_lens_k : Tensor (N + 1,), optional
        Cumulative lengths of packed sequences.
    packed : bool, optional
        Whether ``position_ids`` describe packed sequences; None detects it.
    **others
        Must be in :data:`HARMLESS`, or None.
    """
    unknown = next((name for name, value in others.items() if value is not None and name not in HARMLESS), None)
    if unknown is not None:
        raise ValueError(
            f"regard: {_name(module)} passes the keyword {unknown!r} to its attention, "
            "which regard does not support; use attn_implementation='eager'."
        )
    L, S, parts = query.shape[2], key.shape[2], parts_of(module)
    given = attention_mask.structure if isinstance(attention_mask, ModelMask) else _of_tensor(attention_mask)
    mask: MaskLike | None = given.mask
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    # As in eager attention, no mask means no masking; only in compiled models it means a causal mask.
    if attention_mask is None and L > 1 and causal and (is_causal or torch.compiler.is_compiling()):
        # Queries start at key 0; a static cache may have room for more keys.
        mask = masks.causal(offset=0) if sliding_window is None else masks.window(sliding_window - 1, 0, offset=0)
    if isinstance(mask, Tensor) and mask.shape[-1] > S:  # the size of a static cache
        mask = mask[..., :S]
    if indices is not None:
        mask = _together(mask, masks.selected(indices.clamp(min=-1).unsqueeze(1)))
    if block_indices is not None:
        mask = _together(mask, masks.selected(block_indices.clamp(min=-1), _block_size(module)))
    packed = parts.packed if packed is None else packed
    causal = given.causal if isinstance(attention_mask, ModelMask) else causal
    apart = packed_mask(given, position_ids, cu_seq_lens_q, cu_seq_lens_k, packed, causal, query, S)
    if apart is not None and not (indices is None and block_indices is None):
        expected = "be increasing in a model that selects keys (or use use_cache=False)"
        raise rejected("regard", "position_ids", expected, "several sequences")
    mask = _together(mask, apart)
    if parts.mask is not None:
        mask = _together(mask, parts.part_of_mask(query, S, _first_query(given), given.first_key))
    mask = _together(mask, None if position_bias is None else position_bias[..., :S])
    if s_aux is not None:
        return LayerInputs(mask, s_aux)
    return LayerInputs(mask, None if sinks is None else sinks.squeeze(-1))


def unknown_keyword(keywords: Mapping[str, Any]) -> str | None:
    """Return the first of a layer's keywords whose effect is unknown, or None."""
    supported = _supported() | HARMLESS
    return next((name for name, value in keywords.items() if value is not None and name not in supported), None)


@cache
def _supported() -> frozenset[str]:
    functions = attention_function, layer_inputs
    return frozenset(name for function in functions for name in inspect.signature(function).parameters)


def _of_tensor(mask: Tensor | None) -> Structure:
    return Structure(mask, from_model=mask is None)


def _name(module: nn.Module) -> str:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ + (f" of {kind}" if kind else "")


def _block_size(module: nn.Module) -> int:
    """Return the number of keys in a block of the layer's own indexer."""
    found = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(found, int):
        expected = "come from a layer whose indexer has a block_size"
        raise rejected("regard", "block_indices", expected, _name(module))
    return found


def _together(mask: MaskLike | None, other: MaskLike | None) -> MaskLike | None:
    """Combine two masks; a single one is returned unchanged."""
    if mask is None or other is None:
        return other if mask is None else mask
    return masks.as_mask(mask) & masks.as_mask(other)


def _first_query(given: Structure) -> int:
    """Return the position of query 0; in a causal mask of unknown offset, the last key that it sees."""
    if given.first_query >= 0 or not isinstance(given.mask, Tensor):
        return max(given.first_query, 0)
    seen = given.mask if given.mask.dtype == torch.bool else given.mask > torch.finfo(given.mask.dtype).min
    row = seen[:, :, 0].any(0).any(0)
    return int((row * torch.arange(len(row), device=row.device)).max())
