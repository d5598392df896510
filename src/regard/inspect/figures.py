"""Pictures of many heads, and of attention over an image.

Dimensions: H heads, L queries, S keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard._errors import described, rejected, unknown_name
from regard.inspect.layer_record import LayerRecord
from regard.inspect.plots import color_bar, fonts, shades
from regard.inspect.record import Record
from regard.inspect.scales import as_shown, pooled, scaled

#: Inches of a small matrix, and cells along its side at most.
_SIDE, _CELLS = 1.25, 160
ORDERS = ("number", "entropy")


def plot_heads(
    heads: Record | LayerRecord | Tensor, *, batch: int = 0, scale: str = "row", order: str = "number",
    figure: Any = None,
) -> Any:  # fmt: skip
    """Draw the matrices of many heads as a grid: a row for each layer of a record, or the heads of one layer.

    Above each stand its layer, its head and the mean entropy of its rows in nats.

    Parameters
    ----------
    heads : Record, LayerRecord or Tensor (H, L, S)
    batch : int
        Which sequence of a record's batch.
    scale : {"absolute", "row", "log"}
        What colours stand for: weights, shares of the largest of their row, or logarithms from 0.0001 to 1.
    order : {"number", "entropy"}
        "entropy" sorts heads from the sharpest to the most spread, over all layers.
    figure : matplotlib.figure.Figure, optional
        Where to draw; a new one by default.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If there is nothing to draw.

    Examples
    --------
    >>> import torch
    >>> figure = plot_heads(torch.rand(6, 5, 5).softmax(-1), order="entropy")
    >>> len(figure.axes)  # six heads, and the colour bar
    7
    """
    from matplotlib import pyplot, rc_context

    if order not in ORDERS:
        raise unknown_name("plot_heads", "order", order, ORDERS)
    found, across = _heads(heads, batch)
    if not found:
        raise rejected("plot_heads", "heads", "have at least one", "none")
    spread = [float(torch.special.entr(weights.abs()).sum(-1).mean()) for _, weights in found]
    if order == "entropy":
        ranks = sorted(range(len(found)), key=spread.__getitem__)
        found, spread = [found[i] for i in ranks], [spread[i] for i in ranks]
    down = math.ceil(len(found) / across)
    with rc_context({"font.family": fonts()}):
        if figure is None:
            size = (across * _SIDE + 2.0, down * (_SIDE + 0.2) + 0.2)
            figure = pyplot.figure(figsize=size, layout="constrained")
        panels = figure.subplots(down, across, squeeze=False)
        for panel in panels.flat:
            panel.set_axis_off()
        for panel, (name, weights), entropy in zip(panels.flat, found, spread):
            panel.set_axis_on()
            small, _ = pooled(weights, _CELLS)
            image = shades(panel, small, scale, (small.shape[1], small.shape[0]))
            panel.set(xticks=[], yticks=[])
            panel.set_title(f"{name}  {entropy:.2f}", fontsize=7, pad=2)
            for spine in panel.spines.values():
                spine.set_color("0.75")
        color_bar(figure, image, scale, ax=list(panels.flat), fraction=0.02, aspect=20, shrink=0.5, anchor=(0.0, 1.0))
    return figure


def _heads(heads: Record | LayerRecord | Tensor, batch: int) -> tuple[list[tuple[str, Tensor]], int]:
    """Return heads with what they are called, and how many stand side by side."""
    if isinstance(heads, Record):
        rows = [run.weights(batch=batch) for run in heads]
        found = [(f"{layer}·{head}", as_shown(each)) for layer, row in enumerate(rows) for head, each in enumerate(row)]
        return found, max((len(row) for row in rows), default=1)
    weights = heads.weights(batch=batch) if isinstance(heads, LayerRecord) else heads
    if not isinstance(weights, Tensor) or weights.dim() != 3:
        got = described(heads) if not isinstance(weights, Tensor) else f"{weights.dim()} dimensions"
        raise rejected("plot_heads", "heads", "be a record, or a tensor (H, L, S)", got, TypeError)
    return [(str(head), as_shown(each)) for head, each in enumerate(weights)], math.ceil(math.sqrt(len(weights)))


def plot_image(
    weights: Tensor, image: Any, grid: tuple[int, int], ax: Any = None, *, scale: str = "row", smooth: bool = False
) -> Any:
    """Draw what the patches of an image are given: what is not attended to lies in the dark.

    Parameters
    ----------
    weights : Tensor (rows · cols,)
        Of the patches alone: the last of a vision transformer's keys, a rollout, or a caption's word.
    image : array (height, width, 3), or PIL image
    grid : (int, int)
        Rows and columns of patches.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    scale : {"absolute", "row", "log"}
        What brightness stands for: weights, shares of the largest, or logarithms from 0.0001 to 1.
    smooth : bool, default False
        Go from patch to patch smoothly; by default each is seen as it is.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        If there are not as many weights as patches.

    Examples
    --------
    >>> import torch
    >>> ax = plot_image(torch.eye(4)[1], torch.ones(8, 8, 3).numpy(), (2, 2))
    >>> ax.images[1].get_alpha().round(1).tolist()  # how dark: nothing of the second patch
    [[0.8, 0.0], [0.8, 0.8]]
    """
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    rows, cols = grid
    if not isinstance(weights, Tensor) or weights.numel() != rows * cols:
        got = f"{weights.numel()}" if isinstance(weights, Tensor) else described(weights)
        raise rejected("plot_image", "weights", f"be a tensor of {rows * cols}, as many as there are patches", got)
    picture = np.asarray(image)
    if picture.ndim not in (2, 3):
        raise rejected("plot_image", "image", "have a height, a width and colours", f"{picture.ndim} dimensions")
    along = scaled(as_shown(weights).reshape(1, -1), scale, "plot_image").abs().reshape(rows, cols).numpy()
    if ax is None:
        ax = pyplot.figure(figsize=(4, 4 * picture.shape[0] / picture.shape[1]), layout="constrained").add_subplot()
    height, width = picture.shape[:2]
    extent = (0, width, height, 0)
    ax.imshow(picture, extent=extent, cmap="gray" if picture.ndim == 2 else None)
    dark = 0.8 * (1 - along)
    if smooth:
        enlarged = torch.nn.functional.interpolate(
            torch.from_numpy(dark)[None, None], scale_factor=16, mode="bicubic", align_corners=False
        )
        dark = enlarged[0, 0].clamp(0, 0.8).numpy()
    ax.imshow(np.zeros_like(dark), cmap=ListedColormap(["black"]), alpha=dark, extent=extent, interpolation="nearest")
    ax.set_axis_off()
    return ax
