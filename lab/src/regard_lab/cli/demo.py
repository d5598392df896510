"""``regard demo``: translate with the included model and show what each word attended to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.inspect import draw, legend, save_html, save_plot
from regard_cli.messages import Console, ascii_only, report_errors, require
from regard_lab import pretrained
from regard_lab.generation.predictions import Prediction, PredictionOptions
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.translation.alignment.maps import alignment as aligned

#: Sentences to draw word by word.
DRAWN = ("the zone of international control", "I love you", "My sister has never seen the sea.")
#: Sentences to translate without a drawing.
MORE = (
    "Where is the nearest station?",
    "It is too late to change your mind.",
    "I would like a cup of tea without sugar.",
    "He speaks English better than I do.",
)
#: The most words in a terminal drawing.
_WIDEST = 40
_OPTIONS = PredictionOptions(alignment=True)
_HEADING, _NOTE = (
    "What each French word attended to",
    "Columns are English words, rows French words. Darker cells mean more attention.",
)


def run(sentences: Sequence[str], *, out: Path) -> None:
    """Translate the examples and the user's sentences, and draw the alignments."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("regard-lab"):
        require("tokenizers")
        require("matplotlib")
        out.mkdir(parents=True, exist_ok=True)
        translator = pretrained.load()
    _introduce(console, translator.about)
    drawn = translator.predict([*DRAWN, *sentences], _OPTIONS)
    for each in drawn:
        _show(console, each)
    console.print(f"{legend(ascii_only=ascii_only())}\n")
    with report_errors("regard-lab"):
        pictures = [aligned(each) for each in drawn if each.tokens]
        save_plot(pictures, out / "alignments.png")
        save_html(pictures, out / "alignments.html", heading=_HEADING, note=_NOTE)
    if not sentences:
        for each in translator.predict(MORE):
            _say(console, each)
        console.print()
    for path, what in (("alignments.png", "picture"), ("alignments.html", "web page")):
        console.print(f"  {out / path}  {what} of these alignments")
    console.print("\nNow try:")
    console.print('  regard translate "I have lost my keys." --alignment')
    console.print("  regard demo --train    train a pronunciation model in three minutes")
    console.print("  regard train translation --data pairs.tsv --out DIR    train your own translation model")
    if not sentences:
        _ask(console, translator)


def _introduce(console: Console, about: dict[str, Any]) -> None:
    scores = about.get("scores", {})
    console.print("English to French with a small model whose attention was guided by word links.", style="bold")
    console.print(
        f"Trained on {about['pairs']:,} sentence pairs; BLEU {scores['bleu']:.1f} on {scores['sources']:,} held-out "
        "sentences of tatoeba.org.\n"
    )


def _show(console: Console, prediction: Prediction) -> None:
    _say(console, prediction)
    if prediction.tokens and max(len(prediction.source_words), len(prediction.words)) <= _WIDEST:
        console.print(f"\n{draw(aligned(prediction), ascii_only=ascii_only())}\n")


def _say(console: Console, prediction: Prediction) -> None:
    console.print(prediction.source)
    console.print(f"  {prediction.text or '(nothing)'}", style="bold")
    if prediction.note:
        console.print(f"  ({prediction.note})")


def _ask(console: Console, translator: SequenceModel) -> None:
    """Translate typed sentences until an empty line."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    while True:
        console.print("\nType an English sentence (Return ends):", end=" ")
        line = sys.stdin.readline().strip()
        if not line:
            return
        _show(console, *translator.predict([line], _OPTIONS))
