"""``regard generate``: continue a text with a language model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard.inspect import draw, legend, save_html, save_plot
from regard_cli.messages import JsonOutput, ascii_only, echo, note, report_errors, require_writable
from regard_lab.cli.kinds import require_kind
from regard_lab.generation.continuous_batching import AttentionRequest
from regard_lab.generation.sampling import GenerationOptions
from regard_lab.generation.speculative import Drafter, NGramDrafter
from regard_lab.models import DecoderLM
from regard_lab.models.hugging_face.hosted import HostedWriter
from regard_lab.tasks.language.text_generator import GeneratedText, TextGenerator, earlier_tokens

#: The replacement character for invalid UTF-8.
_BROKEN = "\ufffd"
#: The value of ``--draft`` for prompt lookup: n-grams of the text so far.
LOOKUP = "lookup"


def run(
    prompts: Sequence[str],
    *,
    model: Path,
    given: dict[str, Any],
    stop: Sequence[str],
    beams: int,
    draft: str | None,
    int8: bool,
    alignment: bool,
    plot: Path | None,
    html: Path | None,
    json: JsonOutput,
    max_unknown: float,
) -> None:
    """Continue each prompt; ``-`` reads it from standard input, and without prompts the model starts a text."""
    drawn = alignment or plot is not None or html is not None
    with report_errors("regard-lab[train]"), json:
        require_writable(html, json.file, picture=plot)
        options = GenerationOptions.from_dotted(given)
        _check(options, beams, stop, draft, drawn)
        texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts or [""]]
        for folder in (model, "" if draft is None or draft == LOOKUP else draft):
            require_kind("generate", folder, "language model")
        generator = TextGenerator.load(model, int8=int8)
        drafter = _drafter(draft)
        alone = len(texts) * options.samples == 1 and not json.alone and beams == 1
        begun = False

        def stream(_: int, text: str) -> None:
            nonlocal begun
            echo(text if begun or generator.answers else f"{texts[0]}{text}", end="")
            begun = True
            sys.stdout.flush()

        if beams > 1:
            written = generator.search(texts, beams, options, max_unknown=max_unknown)
        else:
            written = generator.generate(
                texts, options, stop=stop, attention=AttentionRequest() if drawn else None, drafter=drafter,
                say=stream if alone else None, max_unknown=max_unknown,
            )  # fmt: skip
        if alone:
            echo("" if begun or generator.answers else texts[0])
        for each in () if alone or json.alone else written:
            echo(each.text if generator.answers else f"{each.prompt}{each.text}")
        for each in written:
            json.add(_record(each))
        _explain_broken(written, generator.tokenizer.unknown)
        if drawn:
            _draw(written, generator, alignment and not json.alone, plot, html)


def _explain_broken(written: Sequence[GeneratedText], unknown: int | None) -> None:
    """Explain � if the model generated it; ``unknown`` is the token for characters that the vocabulary lacks."""
    broken = [each for each in written if _BROKEN in each.text and _BROKEN not in each.prompt]
    if not broken:
        return
    if any(unknown in each.numbers for each in broken):
        note(f"regard: {_BROKEN} is a character that the model's vocabulary lacks")
    elif all(each.end == "length" and each.text.find(_BROKEN) == len(each.text) - 1 for each in broken):
        note(f"regard: {_BROKEN} is an incomplete character: increase --max-new-tokens to complete it")
    else:
        note(f"regard: {_BROKEN} marks bytes in the model's output that are not valid UTF-8")


def _check(options: GenerationOptions, beams: int, stop: Sequence[str], draft: str | None, drawn: bool) -> None:
    """Raise if options contradict each other."""
    if beams > 1:
        unused = {"--stop": bool(stop), "--draft": draft is not None, "--alignment, --plot and --html": drawn}
        unused |= {"--samples": options.samples > 1, "--temperature": not options.sampling.is_greedy}
        unused |= {"--repetition-penalty": options.sampling.repetition_penalty != 1}
        for name, used in unused.items():
            if used:
                raise rejected("generate", name, "be left out with --beams", "both")
    if draft is not None and drawn:
        raise rejected("generate", "--draft", "be left out with --alignment, --plot and --html", draft)


def _drafter(draft: str | None) -> Drafter | DecoderLM | HostedWriter | None:
    if draft is None:
        return None
    return NGramDrafter() if draft == LOOKUP else TextGenerator.load(draft).model


def _record(written: GeneratedText) -> dict[str, Any]:
    record: dict[str, Any] = {"prompt": written.prompt, "text": written.text, "end": written.end}
    record |= {"tokens": len(written.numbers), "log_probability": written.log_probability}
    if written.attended:
        record["attention"] = [[round(float(w), 4) for w in each.weights] for each in written.attended]
    return record


def _draw(
    written: Sequence[GeneratedText], generator: TextGenerator, shown: bool, plot: Path | None, html: Path | None
) -> None:
    pictures = [earlier_tokens(each, generator.tokenizer) for each in written if each.attended]
    if not pictures:
        note("regard: no token was generated, so there is no picture")
        return
    for each in pictures if shown else ():
        echo(f"\n{draw(each, ascii_only=ascii_only())}\n")
    if shown:
        echo(legend(ascii_only=ascii_only()))
    if plot is not None:
        save_plot(pictures, plot)
    if html is not None:
        caption = "Columns are earlier tokens, rows generated tokens; attention is the mean over layers and heads."
        save_html(pictures, html, heading="What each token attended to", note=caption)
