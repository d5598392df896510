"""The base of layers whose state is a matrix: inputs, padding, documents, cache and effective weights.

Dimensions: B batch, L steps, E width, G heads of queries and keys, H heads of values, K width of a key, V of a value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import floats, size
from regard._utils.errors import described, rejected
from regard._utils.tracing import autocast_suspended
from regard.engines.aux import Aux, AuxRequest
from regard.masks import MaskLike
from regard.nn._base import Layer, draw_linear
from regard.nn.linear.gated import gated_recurrence
from regard.nn.linear.layout import Layout, layout_of
from regard.nn.linear.recurrence_weights import gated_recurrence_weights
from regard.nn.linear.self_attention import LinearCache, cache_of
from regard.nn.linear.short_convolution import ShortConvolution
from regard.nn.positions.rotary import Rotation


class RecurrentState(NamedTuple):
    """The state of a recurrent layer after earlier steps.

    Attributes
    ----------
    matrix : Tensor (B, H, K, V)
        The state of each head; in float32 for 16-bit layers.
    past : Tensor (B, w − 1, C)
        The last rows that the short convolution reads; w is 1 where there is none.
    """

    matrix: Tensor
    past: Tensor


class Terms(NamedTuple):
    """The arguments of :func:`gated_recurrence` that a layer computes from its rows, and its output gate."""

    query: Tensor  # (B, G, L, K)
    key: Tensor  # (B, G, L, K)
    value: Tensor  # (B, H, L, V)
    log_decay: Tensor | None = None  # (B, H, L) or (B, H, L, K)
    rate: Tensor | None = None  # (B, H, L); of LaCT and Atlas several for each step
    delta: bool = False
    scale: float | None = None
    gate: Tensor | None = None  # (B, L, H · V)
    erase: tuple[Tensor, Tensor] | None = None  # (B, H, L, K) each
    bonus: Tensor | None = None  # (H, K)
    levels: Tensor | None = None  # (B, H, L, N), weights of log-linear layers
    log_momentum: Tensor | None = None  # (B, H, L), of Titans
    attended: tuple[Tensor, Tensor, Tensor] | None = None  # (B, H, L, D) each, of Titans with attention

    def cleared(self, layout: Layout) -> Terms:
        """Return the terms with zeros in padding, which then neither writes nor decays nor erases."""
        if layout.real is None:
            return self

        def clear(heads: Tensor | None) -> Any:
            return None if heads is None else layout.clear(heads.transpose(1, 2)).transpose(1, 2)

        made = {"log_decay": clear(self.log_decay), "rate": clear(self.rate)}
        erase = None if self.erase is None else (clear(self.erase[0]), clear(self.erase[1]))
        return self._replace(key=clear(self.key), value=clear(self.value), erase=erase, **made)

    @property
    def gates(self) -> dict[str, Any]:
        """The arguments of the recurrence other than queries, keys and values."""
        found = {"log_decay": self.log_decay, "rate": self.rate, "erase": self.erase, "delta": self.delta}
        return found | {"bonus": self.bonus, "scale": self.scale}


#: The terms of some steps, and the past (B, w − 1, C) that the next steps see.
Made = tuple[Terms, Tensor]


class RecurrentAttention(Layer, ABC):
    """Base of layers that read a decaying matrix of keys and values, in constant memory per step.

    Subclasses define :meth:`terms`, what the recurrence is computed from, and modules ``norm`` and ``out``; some change
    what :meth:`finish` makes of its output.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E of the rows and number of heads H.

    Attributes
    ----------
    context : None
        Context parallelism is not supported: a state passes through all steps in order.
    """

    norm: nn.Module
    out: nn.Linear
    #: Steps of the recurrence for each row; a row reads after the last of its own.
    num_steps: int = 1
    #: What a cache keeps: the tensors of :meth:`recur`, and the past of the short convolution.
    state_type: type[Any] = RecurrentState

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size(self, "embed_dim", embed_dim), size(self, "num_heads", num_heads)
        self.context: Any = None

    def head_width(self, argument: str, given: int | None, times: int = 1) -> int:
        """Return the width of a head: what is given, or E/H several times, which must be whole."""
        if given is not None:
            return size(self, argument, given)
        total, H = times * self.embed_dim, self.num_heads
        if total % H:
            named = "embed_dim" if times == 1 else f"{times} · embed_dim"
            raise rejected(type(self).__name__, "num_heads", f"divide {named} {total}", H)
        return total // H

    def reset_parameters(self) -> None:
        """Draw the matrices by Glorot's rule, and reset the convolution and the norm."""
        draw_linear(self)
        for each in self.children():
            if isinstance(each, ShortConvolution | nn.RMSNorm | nn.GroupNorm | nn.LayerNorm):
                each.reset_parameters()

    @abstractmethod
    def terms(self, x: Tensor, past: Tensor | None, layout: Layout, rotation: Rotation | None) -> Made:
        """Return the terms of rows (B, L, E), zeros in padding, and the ``past`` of the next steps (B, w − 1, C)."""

    def normed(self, read: Tensor) -> Tensor:
        """Return what each head read (B, L, H, V), normed per head, as rows (B, L, H · V)."""
        rows: Tensor = self.norm(read).flatten(-2)
        return rows

    def finish(self, read: Tensor, x: Tensor, terms: Terms) -> Tensor:  # noqa: ARG002
        """Return the layer's rows (B, L, E), from what each head read (B, L, H, V): normed, gated and projected."""
        normed = self.normed(read)
        rows: Tensor = self.out(normed if terms.gate is None else normed * terms.gate)
        return rows

    def rotation(self, x: Tensor, layout: Layout, *state: Tensor) -> Rotation | None:  # noqa: ARG002
        """Return the rotation of rows after those that ``state`` sums up; None without rotary positions."""
        return None

    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, valid_lens: Tensor | None = ..., documents: Tensor | None = ..., rotation: Rotation | None = ..., cache: LinearCache | None = ..., return_aux: None = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
    @overload
    def forward(self, x: Tensor, attn_mask: MaskLike | None = ..., *, valid_lens: Tensor | None = ..., documents: Tensor | None = ..., rotation: Rotation | None = ..., cache: LinearCache | None = ..., return_aux: AuxRequest) -> tuple[Tensor, Aux]: ...  # noqa: E501  # fmt: skip
    def forward(
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        valid_lens: Tensor | None = None,
        documents: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: LinearCache | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return rows (B, L, E), each of which reads the rows before it and itself.

        Parameters
        ----------
        x : Tensor (B, L, E)
        attn_mask : Mask, optional
            ``masks.document(ids)``, ``masks.padding(lengths)``, ``masks.key_padding(keep)`` or an intersection of
            these: a recurrence has no scores to mask.
        valid_lens : Tensor (B,) of int, optional
            Number of valid steps per sequence; later steps are ignored.
        documents : Tensor (L,) or (B, L) of int, optional
            Document of each step: runs of equal numbers. A step sees only its own document.
        rotation : tuple of Tensor, optional
            Of layers with rotary positions: :meth:`Rotary.rotation` of the rows' positions.
        cache : LinearCache, optional
            The state after earlier steps; those of ``x`` are added.
        return_aux : AuxRequest, optional
            ``AuxRequest(weights=True)`` also returns the effective weight of each step in each later one, per head
            (B, H, L, L), by :func:`gated_recurrence_weights`. They cover the steps of ``x`` alone.
        """
        return self.run(x, attn_mask, valid_lens, documents, rotation, cache, return_aux, self.terms)

    def layout(
        self,
        x: Tensor,
        attn_mask: MaskLike | None,
        valid_lens: Tensor | None,
        documents: Tensor | None,
        cache: LinearCache | None,
    ) -> Layout:
        """Return which of the rows are real, and their documents."""
        return layout_of(self, x, attn_mask, valid_lens, documents, 0 if cache is None else len(cache))

    def run(
        self,
        x: Tensor,
        attn_mask: MaskLike | None,
        valid_lens: Tensor | None,
        documents: Tensor | None,
        rotation: Rotation | None,
        cache: LinearCache | None,
        return_aux: AuxRequest | None,
        terms_of: Callable[[Tensor, Tensor | None, Layout, Rotation | None], Made],
    ) -> Tensor | tuple[Tensor, Aux]:
        """Implement :meth:`forward` with a function that computes the terms."""
        name = type(self).__name__
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        if self.context is not None:
            raise rejected(name, "context", "be None, as a state passes through all steps", described(self.context))
        if return_aux is not None and replace(return_aux, weights=False) != AuxRequest():
            raise rejected(name, "return_aux", "ask for weights alone, as there are no scores", return_aux)
        before = 0 if cache is None else cache_of(self, cache, x.shape[0])
        layout = self.layout(x, attn_mask, valid_lens, documents, cache)
        *state, past = (None,) if cache is None or cache.state is None else cache.state
        x = layout.clear(x)
        terms, past = terms_of(x, past, layout, self.rotation(x, layout, *state) if rotation is None else rotation)
        steps = layout.repeated(self.num_steps)
        terms = terms.cleared(steps)
        with autocast_suspended(x.device.type):  # the state is summed in single precision
            read, found = self.recur(terms, steps, before, *state)
        read = read[:, :, self.num_steps - 1 :: self.num_steps]
        rows = self.finish(read.transpose(1, 2).to(x.dtype), x, terms)
        if cache is not None:
            cache.advance(self.state_type(*found, past), x.shape[1])
        if return_aux is None:
            return rows
        return rows, Aux(weights=self.weights(terms, steps, *state) if return_aux.weights else None)

    def recur(self, terms: Terms, layout: Layout, before: int, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002
        """Return what each head reads (B, H, L, V), and the state after the last step.

        ``before`` is the number of earlier rows, which ``state`` sums up; before the first there is none.
        """
        read, found = gated_recurrence(
            terms.query,
            terms.key,
            terms.value,
            **terms.gates,
            state=state[0] if state else None,
            documents=layout.runs,
            return_state=True,
        )
        return read, (found,)

    def weights(self, terms: Terms, layout: Layout, *state: Tensor) -> Tensor:  # noqa: ARG002
        """Return the effective weights (B, H, L, L); a row that writes several values has the sum of theirs."""
        heads, n = terms.value.shape[1], self.num_steps
        found = gated_recurrence_weights(terms.query, terms.key, num_heads=heads, **terms.gates, documents=layout.runs)
        return found if n == 1 else found[:, :, n - 1 :: n].unflatten(-1, (-1, n)).sum(-1)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


# What several layers share --------------------------------------------------------------------------------------------


def heads(rows: Tensor, count: int) -> Tensor:
    """Return rows (B, L, count · D) as heads (B, count, L, D)."""
    return rows.unflatten(-1, (count, -1)).transpose(1, 2)


def unit(rows: Tensor) -> Tensor:
    """Return rows divided by their norm, √(Σ x² + 1e-6), in at least float32."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def mamba_decay(rows: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay ``−e^A_log · softplus(rows + dt_bias)`` and the softplus, in at least float32.

    The last dimension of all three is that of heads, or of heads and channels.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    delta = F.softplus(rows.to(wide) + dt_bias.to(wide))
    return -A_log.to(wide).exp() * delta, delta


def draw_decay(A_log: Tensor, dt_bias: Tensor) -> None:
    """Draw e^A_log from U(1, 16), and softplus(dt_bias) log-uniformly from 0.001 to 0.1, as Mamba-2 does."""
    with torch.no_grad():
        A_log.uniform_(1, 16).log_()
        dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        dt_bias.add_(torch.log(-torch.expm1(-dt_bias)))  # the inverse of softplus
