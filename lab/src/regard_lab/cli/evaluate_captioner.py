"""``regard evaluate captioner``: compare generated captions with references."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from regard._utils.errors import rejected
from regard._utils.files import naming
from regard_cli.messages import note
from regard_lab.cli.kinds import require_kind
from regard_lab.data.captions import read_captions, with_images
from regard_lab.data.images import ImageFileError, Images, open_images
from regard_lab.generation.predictions import Prediction, PredictionOptions
from regard_lab.tasks.captioning.captioner import Captioner
from regard_lab.tasks.captioning.encoders import Features
from regard_lab.tasks.captioning.metrics import caption_scores

#: Batch size, in images.
_TOGETHER = 128


def evaluate(
    data: str, images: str, folder: Path, options: PredictionOptions, *, features: str | None, out: Path | None
) -> dict[str, Any]:
    """Return the scores of the captioner in a folder, on lines of image, tab, caption."""
    require_kind("evaluate", folder, "captioner")
    captioner = Captioner.load(folder)
    with open_images(images, "evaluate") as found:
        pairs = read_captions(data)
        for line in pairs.report():
            note(line)
        pairs, lines = with_images(pairs, found)
        for line in lines:
            note(line)
        references = pairs.references()
        began = time.monotonic()
        written = _written(captioner, found, list(references), options, features)
        seconds = time.monotonic() - began
    if lost := len(references) - len(written):
        note(f"skipped, cannot be read: {lost:,} of {len(references):,} images")
    if not written:
        raise ValueError(f"evaluate: none of the {len(references):,} images in {images} can be read.")
    listed = [references[each.source] for each in written]
    if out is not None:
        with naming(out):
            out.write_text("".join(f"{each.source}\t{each.text}\n" for each in written), encoding="utf-8")
    report: dict[str, Any] = {"images": len(written), "references": sum(map(len, listed))}
    report |= {"seconds": round(seconds, 2), "beams": options.search.beams}
    scores = caption_scores([each.text for each in written], listed)
    del scores["bleu"]
    names = {"chrf": "chrF2", "rouge": "ROUGE-L", "cider": "CIDEr-D"}
    return report | {names.get(name, name.upper().replace("BLEU", "BLEU-")): round(v, 2) for name, v in scores.items()}


def _written(
    captioner: Captioner, images: Images, names: list[str], options: PredictionOptions, features: str | None
) -> list[Prediction]:
    """Return the captions of the images that can be read."""
    kept = None if features is None else Features.load(features, captioner.encoder)
    known = _rows(kept, names) if kept is not None else {}
    made: list[Prediction] = []
    grids: list[torch.Tensor] = []
    some: list[str] = []
    for number, name in enumerate(names, start=1):
        grid = _grid(captioner, images, name) if kept is None else torch.from_numpy(kept.values[known[name]])
        if grid is not None:
            grids.append(grid.float())
            some.append(name)
        if some and (len(some) == _TOGETHER or number == len(names)):
            made += captioner.caption(torch.stack(grids), some, options)
            grids, some = [], []
    return made


def _rows(features: Features, names: list[str]) -> dict[str, int]:
    rows = {name: row for row, name in enumerate(features.names)}
    missing = [name for name in names if name not in rows]
    if missing:
        got = f"none for {len(missing):,}, the first {missing[0]!r}"
        raise rejected("evaluate", str(features.path), "have features for all images", got)
    return rows


def _grid(captioner: Captioner, images: Images, name: str) -> torch.Tensor | None:
    try:
        pixels = images.read(name, side=captioner.encoder.side, function="evaluate")
    except ImageFileError as error:
        note(f"regard: {error}")
        return None
    return captioner.features([captioner.read(pixels)])[0]
