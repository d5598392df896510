"""Gradients in weights that nobody has held: the product of an output's gradient with the values that it was read from.

Dimensions: B batch, H query heads, G heads of values, L queries, S keys, V width of a value, C width of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard._errors import rejected

if TYPE_CHECKING:
    from regard.inspect.calls import Attended


class OutputGradient:
    """The gradient of a call's output, once a backward pass has come by it.

    Attributes
    ----------
    value : Tensor (B, H, L, V), optional
        Of the latest backward pass.
    """

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value

    def watch(self, output: Tensor, arranged: Callable[[Tensor], Tensor]) -> None:
        """Keep what an output's gradient becomes when it is arranged as (..., H, L, V)."""

        def keep(gradient: Tensor) -> None:
            found = arranged(gradient.detach())
            self.value = found[(None,) * (4 - found.dim())].flatten(0, -4).to(torch.float32, copy=True)

        output.register_hook(keep)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return 0 if self.value is None else self.value.nbytes


def heads_first(gradient: Tensor) -> Tensor:
    """Return a gradient (B, L, H, V) as (B, H, L, V)."""
    return gradient.transpose(1, 2)


def before_projection(weight: Tensor, heads: int) -> Callable[[Tensor], Tensor]:
    """Return what makes of the gradient (L, B, C) or (L, C) of a projected output that of its heads, (B, H, L, V)."""
    matrix = weight.detach().clone()

    def arranged(gradient: Tensor) -> Tensor:
        rows = gradient @ matrix
        rows = rows.unsqueeze(1) if rows.dim() == 2 else rows
        return rows.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    return arranged


@torch.no_grad()
def gradients_of(call: Attended, first: int, last: int) -> Tensor:
    """Return the gradients (B, H, last − first, S) in a call's weights.

    Raises
    ------
    ValueError
        If values were not kept, or no gradient reached the call.
    """
    if call.given is not None:
        raise rejected("gradients", "record", "hold queries, keys and values of the layer", "its weights alone")
    if call.value is None or call.output is None:
        raise rejected("gradients", "record", "be captured with gradients=True, of a model that runs with them", "none")
    if call.output.value is None:
        raise rejected("gradients", "record", "be of a run that a backward pass went through", "none")
    rows = call.output.value[:, :, first:last]
    groups = rows.unflatten(1, (call.value.shape[1], -1))  # (B, G, H/G, l, V)
    return (groups @ call.value.float().mT.unsqueeze(2)).flatten(1, 2)
