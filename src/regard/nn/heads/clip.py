"""QK-clip: scale the weights of queries and keys so that scores stay below a threshold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._utils.constraints import TensorOf, positive
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.nn.heads.latent import MultiheadLatentAttention
from regard.nn.heads.self_attention import GroupedProjections


@mechanism(formula="W_q, W_k rows of head h ← · √(min(1, τ / max s_h))", sources=("kimi2025k2",), cost="O(E·H·D)")
@torch.no_grad()
def qk_clip_(layer: nn.Module, max_scores: Tensor, threshold: float = 100.0) -> Tensor:
    """Scale a layer's query and key weights in place, so that each head's largest score is at most the threshold.

    With ``γ_h = min(1, threshold / max_scores[h])``, the rows of queries and of keys of head h are multiplied by √γ_h
    each (Kimi K2, 2025, arXiv 2507.20534). Keys that heads share are left alone, and their queries multiplied by γ_h:
    those of groups of heads, and the rotary keys of latent attention. Call it after an optimizer step, with the largest
    scores of that step.

    Parameters
    ----------
    layer : SelfAttention, MultiheadLatentAttention, or a layer derived from these
    max_scores : Tensor (H,)
        The largest score of each head, after the scale: ``AuxRequest(max=True)`` returns them by query.
    threshold : float, default 100.0

    Returns
    -------
    Tensor (H,)
        γ, the factor of each head's scores.

    Raises
    ------
    TypeError
        If the layer is another one, or projects queries and keys with other modules than linear layers.
    ValueError
        If ``max_scores`` has another shape, or the threshold is not positive.

    Examples
    --------
    >>> import torch
    >>> import regard
    >>> from regard.nn import SelfAttention, qk_clip_
    >>> layer, x = SelfAttention(8, 2, bias=False), 20 * torch.randn(1, 6, 8)
    >>> _, aux = layer(x, return_aux=regard.AuxRequest(max=True))
    >>> largest = aux.max.amax((0, 2))
    >>> gamma = qk_clip_(layer, largest, threshold=1.0)
    >>> _, aux = layer(x, return_aux=regard.AuxRequest(max=True))
    >>> torch.allclose(aux.max.amax((0, 2)), gamma * largest, rtol=1e-4)
    True
    """
    positive("qk_clip_", "threshold", threshold)
    if isinstance(layer, GroupedProjections):
        projections = [layer.qkv]
    elif isinstance(layer, MultiheadLatentAttention):
        projections = [layer.query, layer.key_value]
    else:
        expected = "be a SelfAttention or MultiheadLatentAttention, or derived from these"
        raise rejected("qk_clip_", "layer", expected, described(layer), TypeError)
    if not all(isinstance(each, nn.Linear) for each in projections):
        expected = "project queries and keys by linear layers"
        raise rejected("qk_clip_", "layer", expected, ", ".join(type(each).__name__ for each in projections), TypeError)
    TensorOf((layer.num_heads,))("qk_clip_", "max_scores", max_scores)
    scores = max_scores.to(next(projections[0].parameters()))
    gamma = torch.where(scores > threshold, threshold / scores, torch.ones_like(scores))
    if isinstance(layer, MultiheadLatentAttention):
        # Rows of a head: those compared with its own keys, then those compared with the shared rotary key.
        half = gamma.sqrt().unsqueeze(1)
        parts = (half.expand(-1, layer.head_dim), gamma.unsqueeze(1).expand(-1, layer.rotary_dim))
        _scale_rows(layer.query, torch.cat(parts, 1).flatten())
        values = torch.ones_like(half).expand(-1, layer.value_dim)
        _scale_rows(layer.key_value, torch.cat((half.expand(-1, layer.head_dim), values), 1).flatten())
        return gamma
    groups, width = layer.num_kv_heads, layer.head_dim
    alone = groups == layer.num_heads and layer.rows[1] > 0
    queries = gamma.sqrt() if alone else gamma
    factors = torch.cat((queries, queries if alone else gamma.new_ones(groups), gamma.new_ones(groups)))
    factors = factors if layer.rows[1] else queries  # keys that are another layer's stay
    _scale_rows(layer.qkv, factors.repeat_interleave(width))
    return gamma


def _scale_rows(layer: nn.Module, factors: Tensor) -> None:
    """Multiply the outputs of a linear layer by factors, in place."""
    assert isinstance(layer, nn.Linear)
    layer.weight.mul_(factors.unsqueeze(1))
    if layer.bias is not None:
        layer.bias.mul_(factors)
