"""``regard pronounce``: words in, phonemes out, by a model trained before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from regard.cli.messages import ascii_only, explained, fail
from regard.inspect import Alignment, draw, legend, save_html, save_png
from regard.tasks import Pronouncer, Pronunciation


def run(
    words: Sequence[str], *, model: Path, alignment: bool, png: Path | None, html: Path | None, as_json: bool
) -> None:
    """Pronounce the words and show them as asked. A bad word or model ends it before anything is shown."""
    if not words:
        raise fail("pronounce: words must not be empty, got none.")
    with explained():
        pronouncer = load(model)
        for word in words:
            pronouncer.read(word)
    spoken = pronouncer.pronounce(words)
    write_pictures(spoken, png=png, html=html)
    if as_json:
        typer.echo(json.dumps([_record(each) for each in spoken], ensure_ascii=False))
        return
    width = max(len(each.word) for each in spoken)
    for each in spoken:
        typer.echo(f"{each.word:<{width}}  {' '.join(each.phonemes)}")
        if alignment:
            typer.echo(f"\n{draw(aligned(each), ascii_only=ascii_only())}\n")
    if alignment:
        typer.echo(legend(ascii_only=ascii_only()))


def load(folder: Path) -> Pronouncer:
    """Load a model, and say where models come from if there is none."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no model at {folder}: train one with `regard demo`, or name its folder with --model."
        )
    return Pronouncer.load(folder)


def aligned(spoken: Pronunciation) -> Alignment:
    """Return what the pictures need of a pronunciation."""
    title = f"{spoken.word}: {' '.join(spoken.phonemes)}"
    return Alignment(tuple(spoken.word), spoken.phonemes, spoken.weights, title)


def write_pictures(spoken: Sequence[Pronunciation], *, png: Path | None, html: Path | None) -> None:
    """Write the alignments of words to the files asked for."""
    alignments = [aligned(each) for each in spoken]
    note = "Letters across, phonemes down. The stronger a cell, the more of the phoneme's attention went to the letter."
    with explained():
        if png is not None:
            save_png(alignments, png)
        if html is not None:
            save_html(alignments, html, heading="How each phoneme looks at the letters", note=note)


def _record(spoken: Pronunciation) -> dict[str, object]:
    weights = [[round(weight, 6) for weight in row] for row in spoken.weights.tolist()]
    return {"word": spoken.word, "phonemes": list(spoken.phonemes), "weights": weights}
