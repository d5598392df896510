"""Which steps of a sequence are real, and which document each belongs to, for layers with a state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._utils.constraints import lengths
from regard._utils.errors import described, rejected
from regard.masks import Mask, MaskLike
from regard.masks.base import AndMask
from regard.masks.documents import Documents, Packed
from regard.masks.padding import FirstKeys, KeyPadding
from regard.nn.linear.recurrence import document_starts, real_rows


class Layout(NamedTuple):
    """The real steps of sequences, and the run of equal document ids that each step belongs to.

    A step that is not real leaves every state as it is, and has zeros in convolutions.

    Attributes
    ----------
    real : Tensor (B, L) of bool, or None
        None if all steps are real.
    runs : Tensor (B, L) of int, or None
        Index of each step's run of equal ids, from 0; an initial state belongs to run 0. None for one document.
    """

    real: Tensor | None = None
    runs: Tensor | None = None

    def clear(self, rows: Tensor) -> Tensor:
        """Return rows (B, L, ...) with zeros in the steps that are not real, whatever they hold."""
        if self.real is None:
            return rows
        return torch.where(self.real.view(*self.real.shape, *[1] * (rows.dim() - 2)), rows, 0.0)

    def repeated(self, times: int) -> Layout:
        """Return the layout of sequences in which each step is there so many times."""
        if times == 1:
            return self
        return Layout(*(None if each is None else each.repeat_interleave(times, 1) for each in self))

    def places(self, rows: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of each step (B, L) within its document, and the length (B,) of the last document.

        Padding does not count. ``rows`` (B, H, L, D) tells sizes, and ``length`` (B,) is that of earlier steps.
        """
        B, _, L, _ = rows.shape
        length = torch.zeros(B, dtype=torch.long, device=rows.device) if length is None else length
        ones = torch.ones(B, L, dtype=torch.long, device=rows.device) if self.real is None else self.real.long()
        place = ones.cumsum(1) - ones
        starts = document_starts("Layout", self.runs, rows)
        if starts is None or self.runs is None:
            place = place + length.unsqueeze(1)
        else:
            place = place - torch.where(starts, place, 0).cummax(1).values
            place = place + torch.where(self.runs == 0, length.unsqueeze(1), 0)
        return place, torch.cat([length.unsqueeze(1), place + ones], 1)[:, -1]

    def last(self, rows: Tensor, count: int) -> Tensor:
        """Return what the next steps see of the past: ``count`` rows that end with the last real step.

        Parameters
        ----------
        rows : Tensor (B, count + L, C)
            The rows before these steps, and theirs.
        count : int

        Returns
        -------
        Tensor (B, count, C)
            Zeros in place of rows of earlier documents.
        """
        B, length = rows.shape[0], rows.shape[1] - count
        if count == 0 or (self.real is None and self.runs is None):
            return rows[:, length:]
        steps = torch.arange(length, device=rows.device)
        if self.real is None or not length:
            end = torch.full((B, 1), length, device=rows.device)
        else:
            end = torch.where(self.real, steps + 1, 0).amax(1, keepdim=True)
        places = end + torch.arange(count, device=rows.device)  # (B, count)
        kept = rows.gather(1, places.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
        if self.runs is None:
            return kept
        runs = torch.nn.functional.pad(self.runs, (count, 0)).gather(1, places)
        return torch.where((runs == runs[:, -1:]).unsqueeze(-1), kept, 0.0)


def layout_of(
    layer: object,
    x: Tensor,
    attn_mask: MaskLike | None = None,
    valid_lens: Any = None,
    documents: Any = None,
    before: int = 0,
) -> Layout:
    """Return the steps of rows (B, L, E).

    Parameters
    ----------
    layer : Module
        For error messages.
    x : Tensor (B, L, E)
    attn_mask : Mask, optional
        ``masks.document(ids)``, ``masks.padding(lengths)``, ``masks.key_padding(keep)`` or an intersection of these.
    valid_lens : Tensor (B,) of int, optional
    documents : Tensor (L,) or (B, L) of int, optional
    before : int, default 0
        Number of earlier steps, which masks of padding cover too.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or the mask is another.
    """
    name, (B, L) = type(layer).__name__, x.shape[:2]
    real = None if valid_lens is None else _until(name, valid_lens, x)
    for mask in attn_mask.masks if isinstance(attn_mask, AndMask) else (attn_mask,):
        found: Tensor | None = None
        if isinstance(mask, Documents | Packed) and documents is None:
            documents = mask
        elif isinstance(mask, KeyPadding):
            if mask.keep.shape not in ((before + L,), (B, before + L)):
                raise rejected(name, "attn_mask", f"keep keys of shape ({B}, {before + L})", tuple(mask.keep.shape))
            found = mask.keep[..., before:].expand(B, L)
        elif (
            isinstance(mask, FirstKeys) and mask.name == "padding" and isinstance(mask.n, Tensor) and mask.n.dim() == 1
        ):
            until = lengths(name, "lengths of attn_mask", mask.n, B, before + L)
            found = real_rows(name, (until - before).clamp(min=0), x)[..., 0]
        elif mask is not None:
            expected = "be None, masks.document(ids), a padding mask, or both, as a recurrence has no scores to mask"
            got = repr(attn_mask) if isinstance(attn_mask, Mask) else described(attn_mask)
            raise rejected(name, "attn_mask", expected, got)
        if found is not None:
            real = found if real is None else real & found
    starts = document_starts(name, documents, x)
    if starts is None:
        return Layout(real)
    runs = starts.cumsum(1)
    return Layout(real, runs if real is None or not L else _without_padding(runs, real))


def _until(name: str, lengths: Any, x: Tensor) -> Tensor:
    """Return which steps (B, L) of rows (B, L, E) lie within these lengths (B,)."""
    return real_rows(name, lengths, x)[..., 0].expand(x.shape[:2])


def _without_padding(runs: Tensor, real: Tensor) -> Tensor:
    """Return runs (B, L) in which padding belongs to the document before it, or to the first one."""
    steps = torch.arange(runs.shape[1], device=runs.device)
    before = torch.where(real, steps, -1).cummax(1).values  # the last real step up to each
    first = real.int().argmax(1, keepdim=True)
    runs = runs.gather(1, torch.where(before < 0, first, before))
    return runs - runs[:, :1]
