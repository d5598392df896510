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

#: Common words with irregular spellings, shown at the end; neither trained on nor scored.
EXAMPLES = ("attention", "alignment", "knowledge", "daughter", "physics", "champion", "righteous", "unbelievable")
_DRAWN = 2
_RANDOM = 6
#: Report compilation if it takes longer than this, in seconds.
_NOTICED = 2.0


def run(*, deadline: float, out: Path, seed: int) -> None:
    """Run the demo; training ends at ``deadline`` on the monotonic clock."""
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
    console.print(f"{len(learn):,} training words from the CMU Pronouncing Dictionary, {len(held_out):,} held out.")
    pronouncer = _train(console, pairs_of(learn), recipe, deadline=deadline)
    rates, predictions = pronouncer.evaluate(pairs_of(held_out))
    console.print(
        f"\nOn {rates.sequences:,} held-out words: phoneme error rate [bold]{rates.symbol:.2f} %[/bold], "
        f"word error rate [bold]{rates.sequence:.2f} %[/bold] (against the closest reference pronunciation).\n"
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
    """Train for one step, to compile the kernels before the clock starts; return the seconds it took."""
    few = Pairs(pairs.sources[:500], pairs.targets[:500])
    began = time.monotonic()
    with console.status("Compiling the additive attention kernels (once per machine)..."):
        Pronouncer.untrained(few).learn(few, RECIPE.with_changes({"steps": 1}))
    seconds = time.monotonic() - began
    if seconds > _NOTICED:
        console.print(f"Compiled the additive attention kernels in {seconds:.0f} seconds (once per machine).")
    return seconds


def _train(console: Console, pairs: Pairs, recipe: TrainingOptions, *, deadline: float) -> Pronouncer:
    from regard_lab.cli.training_display import TrainingDisplay
    from regard_lab.training.options import TrainingError

    deadline += _warm(console, pairs)
    pronouncer = Pronouncer.untrained(pairs, seed=recipe.seed)
    recipe = recipe.with_changes({"seconds": max(1.0, deadline - time.monotonic())})
    console.print(f"Training for {recipe.seconds:.0f} seconds; Ctrl-C stops early and keeps the model.\n")
    try:
        ended = pronouncer.learn(pairs, recipe, callbacks=[TrainingDisplay(console, recipe, "words")])
    except TrainingError as error:
        raise fail(sentence(error)) from None
    if ended.reason == "interrupt":
        console.print("Training was interrupted; the results below use the model so far.")
    console.print(
        f"Trained on {ended.pairs:,} words in {ended.seconds:.0f} seconds "
        f"({ended.pairs / max(ended.seconds, 1e-9):,.0f} words/s, {ended.steps:,} steps). Evaluating..."
    )
    return pronouncer


def _table(predictions: dict[str, tuple[str, ...]], entries: Dictionary) -> Table:
    """Compare the model's pronunciations with the closest ones in the dictionary."""
    right, wrong = ("ok", "x") if ascii_only() else ("✓", "✗")
    table = Table(title="Held-out words", title_justify="left", box=None, pad_edge=False)
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
    for path, what in (("model", "model"), ("alignments.png", "picture"), ("alignments.html", "web page")):
        console.print(f"  {out / path}  {what}", markup=False)
    option = "" if out == Path("regard-demo") else f" --model {out / 'model'}"
    console.print(f"\nNow try:  regard pronounce serendipity flibbertigibbet --alignment{option}", markup=False)
