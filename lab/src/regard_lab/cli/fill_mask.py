"""``regard fill-mask``: predict the masked tokens of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regard._utils.errors import fitting, rejected
from regard_cli.messages import JsonOutput, echo, note, report_errors, require_writable
from regard_lab.cli.kinds import require_kind
from regard_lab.cli.lines import Lines
from regard_lab.tasks.language.mask_filler import FilledText, MaskFiller
from regard_lab.text.unknown import UnknownCharacters


def run(texts: Sequence[str], *, model: Path, data: str | None, top: int, batch: int, json: JsonOutput) -> None:
    """Print the most likely tokens, one line per mask, or one line of JSON per text."""
    with report_errors("regard-lab"), json:
        require_writable(json.file)
        lines = Lines.of("fill-mask", texts, data)
        require_kind("fill-mask", model, "masked language model")
        filler = MaskFiller.load(model, "fill-mask")
        full = f"fill-mask: out of memory: lower --batch (now {batch})."
        count, unknown = 0, UnknownCharacters()
        for block in lines.blocks():
            given = [(lines.where(number), text) for number, text in block if text]
            with fitting(full, MemoryError):
                filled = iter(
                    filler.fill([text for _, text in given], top=top, batch=batch, names=[name for name, _ in given])
                )
            for _, text in block:
                _show(next(filled) if text else FilledText("", (), ""), json)
            count += len(given)
            unknown += UnknownCharacters.of(filler.tokenizer, (text for _, text in given), parse_specials=True)
        if not count:
            expected = f"hold a text with the model's mask, {filler.mask}"
            raise rejected("fill-mask", lines.name or "TEXT", expected, "none")
        if unknown:
            note(f"regard: {unknown}")


def _show(filled: FilledText, json: JsonOutput) -> None:
    """Print the tokens for each mask of a text; an empty line for an empty text."""
    if json.wanted:
        masks = [
            [{"token": each.token, "number": each.number, "probability": round(each.probability, 6)} for each in mask]
            for mask in filled.masks
        ]
        json.add({"text": filled.text, "filled": filled.filled, "masks": masks})
    if json.alone:
        return
    for mask in filled.masks or ((),):
        echo("\t".join(f"{each.token}\t{each.probability:.4f}" for each in mask))
