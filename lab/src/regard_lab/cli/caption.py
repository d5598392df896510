"""``regard caption``: caption images and draw the attention of each word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from regard._utils.errors import rejected
from regard.inspect._view.page import save_html
from regard_cli.messages import JsonOutput, echo, fail, note, report_errors, require, require_writable, sentence
from regard_lab.cli.kinds import require_kind
from regard_lab.data.images import ImageFileError, read_image, resize_image
from regard_lab.generation.predictions import Prediction, PredictionOptions
from regard_lab.models.folders import ModelFileError
from regard_lab.tasks.captioning.captioner import Captioner
from regard_lab.tasks.captioning.pictures import CaptionAttention, save_captions, word_weights

#: Side of an image in the drawings, in pixels.
_SHOWN = 448


def run(
    files: Sequence[str],
    *,
    models: Sequence[Path],
    options: PredictionOptions,
    attention: Path | None,
    html: Path | None,
    json: JsonOutput,
) -> None:
    """Caption each image with each model; report the images that cannot be read."""
    with report_errors("regard-lab[vision]"), json:
        require("PIL")
        require_writable(html, json.file, picture=attention)
        captioners = [_load(folder) for folder in models]
        pictured = attention is not None or html is not None
        options = replace(options, alignment=pictured or json.wanted)
        drawn: list[CaptionAttention] = []
        done = 0
        for file in files:
            try:
                pixels = read_image(file, side=_SHOWN, function="caption")
            except ImageFileError as error:
                note(f"regard: {sentence(error)}")
                continue
            done += 1
            for folder, captioner in zip(models, captioners):
                grids = captioner.features([captioner.read(pixels)])
                (prediction,) = captioner.caption(grids, [file], options)
                _show(prediction, captioner, file if len(files) > 1 else "", json=json, options=options)
                if pictured and prediction.words and prediction.alignment is not None:
                    drawn.append(_looked_at(prediction, captioner, pixels, folder.name if len(models) > 1 else ""))
        if pictured and not drawn and done:
            note("regard: no picture: the captions are empty or the models have no attention")
        elif drawn:
            _draw(drawn, attention, html)
    if not done:
        raise fail(
            f"caption: none of the {len(files):,} images can be read."
            if len(files) > 1
            else "caption: the image cannot be read."
        )
    if done < len(files):
        note(f"regard: {len(files) - done:,} of {len(files):,} images cannot be read")


def _load(folder: Path) -> Captioner:
    require_kind("caption", folder, "captioner")
    if not folder.is_dir():
        got = f"a file, {folder}" if folder.exists() else f"no such folder, {folder}"
        raise rejected("caption", "model", "be the folder of a captioner", got, ModelFileError)
    return Captioner.load(folder)


def _show(
    prediction: Prediction, captioner: Captioner, file: str, *, json: JsonOutput, options: PredictionOptions
) -> None:
    if json.wanted:
        record = {"image": prediction.source, "caption": prediction.text, "score": round(prediction.score, 4)}
        record |= {"alternatives": [each.text for each in prediction.alternatives]}
        if prediction.alignment is not None:
            shares = word_weights(prediction)
            record |= {"grid": [captioner.encoder.rows, captioner.encoder.cols]}
            record |= {"words": [each.text for each in prediction.words]}
            record |= {"attention": [[round(each, 5) for each in row] for row in shares.tolist()]}
        json.add(record)
    if json.alone:
        return
    for each in (prediction, *prediction.alternatives):
        cells = [file] * bool(file) + [f"{each.normalized:.4f}"] * (options.search.n_best > 1) + [each.text]
        echo("\t".join(cells))


def _looked_at(prediction: Prediction, captioner: Captioner, pixels: np.ndarray, name: str) -> CaptionAttention:
    sharp = getattr(captioner.model.config, "hard", "none") != "none"
    return CaptionAttention(
        resize_image(pixels, _SHOWN),
        tuple(each.text for each in prediction.words),
        word_weights(prediction),
        (captioner.encoder.rows, captioner.encoder.cols),
        f"{name}: {prediction.text}" if name else prediction.text,
        sharp,
    )


def _draw(drawn: Sequence[CaptionAttention], attention: Path | None, html: Path | None) -> None:
    if attention is not None:
        save_captions(drawn, attention)
    if html is not None:
        caption = "Rows are words, columns image positions in row-major order. Darker cells mean more attention."
        save_html([each.alignment() for each in drawn], html, heading="Where each word attended", note=caption)
