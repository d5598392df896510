"""The base of causal self-attention layers whose masks follow from their inputs."""

from __future__ import annotations

from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from regard import masks
from regard._utils.constraints import floats, lengths
from regard._utils.errors import described, rejected
from regard.engines import EngineLike
from regard.masks import Mask
from regard.nn._base import non_default, zero_padding
from regard.nn.heads.self_attention import GroupedProjections
from regard.nn.kv_cache import StepCache, cached_steps
from regard.nn.positions.rotary import Rotary, Rotation

# Dimensions: B batch, L queries, S keys, E width, H heads, G groups, D width of a head.


class _SharedOptions(TypedDict, total=False):
    head_dim: int | None
    bias: bool
    engine: EngineLike


class UngroupedOptions(_SharedOptions, total=False):
    """Keyword arguments of causal layers that define their own number of key–value heads."""

    rotary: Rotary | None


class UnrotatedOptions(_SharedOptions, total=False):
    """Keyword arguments of causal layers that define their own positions."""

    num_kv_heads: int | None


class CausalOptions(UngroupedOptions, UnrotatedOptions, total=False):
    """Keyword arguments of all other :class:`CausalSelfAttention` layers."""


class CausalSelfAttention(GroupedProjections):
    """Base of causal self-attention that makes its masks itself. Query i of L is at key S − L + i.

    Subclasses define :meth:`attended`.

    Parameters
    ----------
    embed_dim, num_heads, num_kv_heads, head_dim, device, dtype
        See :class:`GroupedProjections`.
    bias : bool, default False
        Whether the query, key, value and output projections have a bias.
    rotary : Rotary, optional
        Rotary encoding of queries and keys.
    engine : str or Engine, default "auto"
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rotary: Rotary | None = None,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias, **where)
        self.rotary, self.engine = rotary, engine

    def forward(
        self,
        x: Tensor,
        valid_lens: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        cache: StepCache | None = None,
    ) -> Tensor:
        """Return rows (B, L, E), each of which reads the rows before it and itself.

        Parameters
        ----------
        x : Tensor (B, L, E)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows of each sequence; not with a cache.
        rotation : tuple of Tensor, optional
            :meth:`Rotary.rotation` of the rows' positions. By default, positions continue those in the cache.
        cache : KVCache, optional
            Keys and values of earlier steps; those of ``x`` are appended. It must keep all steps.
        """
        x, name = floats(self, "x", x, "B", "L", self.embed_dim), type(self).__name__
        if self.context is not None:
            raise rejected(name, "context", "be None", described(self.context))
        before, window = cached_steps(self, cache), getattr(cache, "window", None)
        if window is not None:
            raise rejected(name, "cache", "keep all steps", f"window={window}")
        visible = masks.causal(align="lower_right")
        if isinstance(valid_lens, Mask):
            expected = "be an integer tensor of lengths, as the layer is causal by itself"
            raise rejected(name, "valid_lens", expected, f"the mask {valid_lens!r}", TypeError)
        if valid_lens is not None:
            if cache is not None:
                raise rejected(name, "valid_lens", "be None with a cache", described(valid_lens))
            x = zero_padding(x, lengths(self, "valid_lens", valid_lens, *x.shape[:2]))
            visible = visible & masks.padding(valid_lens)
        turn = None
        if self.rotary is not None:
            if rotation is None:
                rotation = self.rotary.rotation(torch.arange(before, before + x.shape[1], device=x.device), x.dtype)
            turn = partial(self.rotary.turn, rotation=rotation)
        query, key, value = self.projected(x, turn)
        key = self.kept(x, key)
        if cache is not None:
            key, value = appended(cache, key, value)
        try:
            heads = self.attended(x, query, key, value, visible)
        except BaseException:
            if cache is not None:  # undo the append, so that the call can be retried
                cache.truncate(before)
            raise
        rows: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return rows

    def kept(self, x: Tensor, key: Tensor) -> Tensor:  # noqa: ARG002
        """Return what the cache keeps as keys for rows (B, L, E): by default their keys (B, G, L, D)."""
        return key

    def attended(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Mask) -> Tensor:
        """Return the heads' outputs (B, H, L, D).

        Parameters
        ----------
        x : Tensor (B, L, E)
        query : Tensor (B, H, L, D)
        key : Tensor (B, G, S, ·)
            What :meth:`kept` returned, for all steps.
        value : Tensor (B, G, S, D)
        visible : Mask
            The causal mask, which also hides padding.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        return ", ".join([super().extra_repr(), *non_default(self, "engine", "auto")])


def appended(cache: StepCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Append rows to a cache, and return all of them, those of a shared prefix included."""
    key, value = cache.append(key, value)
    if cache.prefix is None:
        return key, value
    first_key, first_value = (each.expand(key.shape[0], -1, -1, -1) for each in cache.prefix)
    return torch.cat((first_key, key), 2), torch.cat((first_value, value), 2)
