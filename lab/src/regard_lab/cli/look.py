"""``regard look``: what a model attends to in a text or an image."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from regard._utils.errors import rejected, unknown_name
from regard.inspect import Alignment, Record, capture, draw, legend, save_plot
from regard.inspect._record.texts import texts_of
from regard.inspect._view.plots import SCALES
from regard_cli.messages import ascii_only, echo, note, report_errors, require_writable
from regard_cli.view import serve
from regard_lab.cli.look_models import subject

#: Heads whose entropies stand side by side.
_SHOWN = 16


def run(
    path: str,
    *,
    text: str | None,
    image: Path | None,
    target: str | None,
    layer: int | None,
    head: int | None,
    plot: Path | None,
    scale: str,
    html: Path | None,
    out: Path | None,
    browser: bool,
) -> None:
    """Tell how spread the attention of each head is, draw that of one head, or of a layer's mean, or show the page."""
    with report_errors("regard-lab[hf]"):
        require_writable(html, out, picture=plot)
        if scale not in SCALES:
            raise unknown_name("look", "--scale", scale, SCALES)
        if head is not None and layer is None:
            raise rejected("look", "--head", "come with --layer", "it alone")
        looked = subject(path, text, image, target)
        with capture(looked.model, layers=looked.layers) as record, torch.no_grad():
            looked.run()
        if not len(record):
            raise rejected("look", "MODEL", "be a model that attends to something", type(looked.model).__name__)
        record.describe(*looked.texts, title=looked.title)
        chosen = _drawn(record, layer, head) if layer is not None or plot is not None else None
        if chosen is None:
            _tell(record)
        else:
            echo(draw(chosen, ascii_only=ascii_only(), scale=scale))
            echo(f"\n{legend(ascii_only=ascii_only(), scale=scale)}; {chosen.title}")
    with report_errors("regard-lab"):
        if plot is not None and chosen is not None:
            save_plot([chosen], plot, scale=scale)
            note(f"regard: {plot} is written")
        if html is not None:
            record.to_html(html)
            note(f"regard: {html} is written")
        if out is not None:
            record.save(out)
            note(f"regard: {out} is written; regard view {out} shows it")
        if browser:
            serve([record], browser=True)


def _drawn(record: Record, layer: int | None, head: int | None) -> Alignment:
    """Return the picture of a head, or of a layer's mean; of the layer with the least spread where none is named."""
    if layer is None:
        layer = min(range(len(record)), key=lambda each: float(record[each].entropy().mean()))
    run = record[layer]
    if head is not None and not 0 <= head < run.shape[1]:
        raise rejected("look", "--head", f"be below {run.shape[1]}, as many as the layer has", head)
    weights: Tensor = run.weights(batch=0).mean(0) if head is None else run.weights(batch=0, head=head)
    which = "mean of its heads" if head is None else f"head {head}"
    queries, keys = texts_of(record.texts, run)
    return Alignment(keys.tokens, queries.tokens, weights.clamp(0, 1), f"layer {layer} ({run.name}), {which}")


def _tell(record: Record) -> None:
    """Print how spread the attention of each head is."""
    heads = max(run.shape[1] for run in record)
    tokens = " and ".join(str(len(each.tokens)) for each in record.texts) or str(record[0].shape[3])
    echo(f"{len(record)} layers of {heads} heads, {tokens} tokens; entropy in nats, mean over queries")
    echo("layer" + "".join(f"{f'h{i}':>5}" for i in range(min(heads, _SHOWN))) + ("  ..." if heads > _SHOWN else ""))
    mixed = len({run.kind for run in record}) > 1
    for i, run in enumerate(record):
        entropies = run.entropy().mean((0, 2)).tolist()
        echo(f"{i:>5}" + "".join(f"{each:5.2f}" for each in entropies[:_SHOWN]) + (f"  {run.name}" if mixed else ""))
    echo("\nLow is sharp. -b shows all of it in the browser, --html FILE on a page to keep, --out FILE as a record;")
    echo("--layer 0 --head 0 draws a head here, --plot FILE a picture of it.")
