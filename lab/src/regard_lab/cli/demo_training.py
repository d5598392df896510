"""``regard demo --train``: train, evaluate, pronounce, draw, save."""

from __future__ import annotations

import random
import time
from pathlib import Path

from rich.table import Table

from regard.inspect import draw, legend
from regard_cli.messages import Console, ascii_only, fail, report_errors, require, sentence
from regard_lab.cli.pronounce import aligned, write_pictures
from regard_lab.data.pairs import Pairs
from regard_lab.tasks.pronunciation.pronouncer import (
    RECIPE,
    Dictionary,
    Pronouncer,
    load_dictionary,
    pairs_of,
    split_dictionary,
)
from regard_lab.tasks.translation.metrics import edit_distance
from regard_lab.training.options import TrainingOptions

#: Everyday words with treacherous spellings: kept from training to be shown, and out of the score.
EXAMPLES = ("attention", "alignment", "knowledge", "daughter", "physics", "champion", "righteous", "unbelievable")
_DRAWN = 2
_RANDOM = 6
#: Seconds of preparation that are worth a line.
_NOTICED = 2.0


def run(*, deadline: float, out: Path, seed: int) -> None:
    """Run the demonstration; training ends at ``deadline`` on the monotonic clock."""
    console = Console(highlight=False, soft_wrap=True)
    with report_errors("regard-lab[pronunciation]"):
        out.mkdir(parents=True, exist_ok=True)
        require("matplotlib")
        require("lightning")
        recipe = RECIPE.with_changes({"seed": seed})
        entries = load_dictionary()
    shown = {word: entries.pop(word) for word in EXAMPLES if word in entries}
    learn, held_out = split_dictionary(entries)
    console.print("[bold]Learning to pronounce English words, letter by letter, with additive attention.[/bold]")
    console.print(f"{len(learn):,} words of the CMU Pronouncing Dictionary to learn from, {len(held_out):,} held out.")
    pronouncer = _train(console, pairs_of(learn), recipe, deadline=deadline)
    rates, predictions = pronouncer.evaluate(pairs_of(held_out))
    console.print(
        f"\nOn {rates.sequences:,} held-out words: phoneme error rate [bold]{rates.symbol:.2f} %[/bold], "
        f"word error rate [bold]{rates.sequence:.2f} %[/bold] (each word against its nearest pronunciation).\n"
    )
    spoken = pronouncer.pronounce(list(shown))
    predictions.update((each.source, each.tokens) for each in spoken)
    chosen = random.Random(seed).sample(sorted(held_out), _RANDOM)
    console.print(_table(predictions, {**shown, **{word: held_out[word] for word in chosen}}))
    for each in spoken[:_DRAWN]:
        console.print(f"\n{each.source}\n{draw(aligned(each), ascii_only=ascii_only())}", markup=False)
    console.print(f"\n{legend(ascii_only=ascii_only())}")
    with report_errors("regard-lab[pronunciation]"):
        pronouncer.save(out / "model")
    write_pictures(spoken, plot=out / "alignments.png", html=out / "alignments.html")
    _say_where(console, out)


def _warm(console: Console, pairs: Pairs) -> float:
    """Train for a step, so that kernels are there before the clock starts; return the seconds that took."""
    few = Pairs(pairs.sources[:500], pairs.targets[:500])
    began = time.monotonic()
    with console.status("Compiling the kernels of additive attention, once on a machine..."):
        Pronouncer.untrained(few).learn(few, RECIPE.with_changes({"steps": 1}))
    seconds = time.monotonic() - began
    if seconds > _NOTICED:
        console.print(f"Compiled the kernels of additive attention in {seconds:.0f} seconds, once on this machine.")
    return seconds


def _train(console: Console, pairs: Pairs, recipe: TrainingOptions, *, deadline: float) -> Pronouncer:
    from regard_lab.cli.runs import TrainingDisplay
    from regard_lab.training.options import TrainingError

    deadline += _warm(console, pairs)
    pronouncer = Pronouncer.untrained(pairs, seed=recipe.seed)
    recipe = recipe.with_changes({"seconds": max(1.0, deadline - time.monotonic())})
    console.print(f"Training for {recipe.seconds:.0f} seconds; Ctrl-C stops early and keeps what was learned.\n")
    try:
        ended = pronouncer.learn(pairs, recipe, callbacks=[TrainingDisplay(console, recipe, "words")])
    except TrainingError as error:
        raise fail(sentence(error)) from None
    if ended.reason == "interrupt":
        console.print("Training was interrupted; what follows is what the model had learned by then.")
    console.print(
        f"Trained on {ended.pairs:,} words in {ended.seconds:.0f} seconds "
        f"({ended.pairs / max(ended.seconds, 1e-9):,.0f} words/s, {ended.steps:,} steps). Evaluating..."
    )
    return pronouncer


def _table(predictions: dict[str, tuple[str, ...]], entries: Dictionary) -> Table:
    """Show what the model says beside the nearest of what the dictionary says."""
    right, wrong = ("ok", "x") if ascii_only() else ("✓", "✗")
    table = Table(title="Words it never saw", title_justify="left", box=None, pad_edge=False)
    for heading in ("word", "model", "dictionary", ""):
        table.add_column(heading, overflow="fold")
    for word, pronunciations in entries.items():
        nearest = min(pronunciations, key=lambda spoken: edit_distance(predictions[word], spoken))
        same = predictions[word] == nearest
        table.add_row(
            word, " ".join(predictions[word]), " ".join(nearest), right if same else f"[bold red]{wrong}[/bold red]"
        )
    return table


def _say_where(console: Console, out: Path) -> None:
    for path, what in (("model", "the model"), ("alignments.png", "a picture"), ("alignments.html", "a page")):
        console.print(f"  {out / path}  {what}", markup=False)
    option = "" if out == Path("regard-demo") else f" --model {out / 'model'}"
    console.print(f"\nNow try:  regard pronounce serendipity flibbertigibbet --alignment{option}", markup=False)
