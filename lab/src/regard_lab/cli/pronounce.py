"""``regard pronounce``: turn words into phonemes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regard._utils.errors import rejected, rejection
from regard.inspect import Alignment, draw, legend, save_html, save_plot
from regard_cli.messages import JsonOutput, ascii_only, echo, fail, note, report_errors, require_writable
from regard_lab.cli.kinds import require_kind
from regard_lab.generation.predictions import Prediction
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer
from regard_lab.tasks.translation.alignment.maps import alignment as drawn
from regard_lab.tasks.translation.alignment.maps import select_map


def run(
    words: Sequence[str], *, model: Path, alignment: bool, plot: Path | None, html: Path | None, json: JsonOutput
) -> None:
    """Pronounce words and print them; report the words that the model cannot read."""
    if not words:
        raise fail("pronounce: words must not be empty, got none.")
    with report_errors("regard-lab[pronunciation]"):
        require_writable(html, json.file, picture=plot)
        pronouncer = load(model)
        readable = _readable(pronouncer, words)
        if (alignment or plot is not None or html is not None) and not pronouncer.model.model.maps:
            raise rejected("pronounce", str(model), "hold a model with attention to draw alignments", "one without")
    spoken = pronouncer.pronounce(readable)
    write_pictures(spoken, plot=plot, html=html)
    with report_errors("regard-lab[pronunciation]"), json:
        json.add([_record(each) for each in spoken])
    if json.alone:
        return
    width = max(len(each.source) for each in spoken)
    for each in spoken:
        echo(f"{each.source:<{width}}  {' '.join(each.tokens)}")
        if alignment:
            echo(f"\n{draw(aligned(each), ascii_only=ascii_only())}\n")
    if alignment:
        echo(legend(ascii_only=ascii_only()))


def _readable(pronouncer: Pronouncer, words: Sequence[str]) -> list[str]:
    """Return the words that the model can read, and report the others; raise if there are none."""
    readable = []
    for word in words:
        try:
            readable.append(pronouncer.read(word))
        except ValueError as error:
            refused = rejection(error)
            if len(words) == 1 or refused is None:
                raise
            note(f"regard: skipped {refused.got}: a word must {refused.expected}")
    if not readable:
        raise ValueError(f"pronounce: none of the {len(words):,} words can be pronounced.")
    return readable


def load(folder: Path) -> Pronouncer:
    """Load a model; if there is none, explain how to get one."""
    require_kind("pronounce", folder, "pronunciation model")
    if not folder.is_dir():
        raise ValueError(
            f"there is no model at {folder}: train one with `regard demo --train`, or pass its folder as --model."
        )
    return Pronouncer.load(folder)


def aligned(spoken: Prediction) -> Alignment:
    """Return the alignment to draw: the mean of all attention maps."""
    return drawn(spoken, words=False, title=f"{spoken.source}: {' '.join(spoken.tokens)}")


def write_pictures(spoken: Sequence[Prediction], *, plot: Path | None, html: Path | None) -> None:
    """Write the alignments to the given files."""
    if plot is None and html is None:
        return
    alignments = [aligned(each) for each in spoken]
    note = "Columns are letters, rows phonemes. Darker cells mean more attention."
    with report_errors("regard-lab[pronunciation]"):
        if plot is not None:
            save_plot(alignments, plot)
        if html is not None:
            save_html(alignments, html, heading="Which letters each phoneme attended to", note=note)


def _record(spoken: Prediction) -> dict[str, object]:
    weights = None if spoken.alignment is None else select_map(spoken).tolist()
    rounded = None if weights is None else [[round(weight, 6) for weight in row] for row in weights]
    return {"word": spoken.source, "phonemes": list(spoken.tokens), "weights": rounded}
