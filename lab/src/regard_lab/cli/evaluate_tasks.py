"""The commands of ``regard evaluate``, one per task."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from regard_cli.app import Commands
from regard_cli.messages import Command, JsonOutput, echo, fail, json_option, report_errors, require_writable
from regard_lab.cli.flags import with_flags
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.tasks.translation.tasks import TASKS, Task


class EvaluationCommands(Commands):
    """The commands of ``regard evaluate``; anything else in the place of a task is answered with the form to use."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a task."""
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        if close := get_close_matches(args[0], self.commands, 1):
            raise fail(f"evaluate: there is no task {args[0]!r}. Did you mean {close[0]!r}?")
        *others, last = self.commands
        use = f"regard evaluate TASK {shlex.join(args)}"
        raise fail(f"evaluate: name the task first: `{use}`; TASK is {', '.join(others)} or {last}.")


evaluate = typer.Typer(
    cls=EvaluationCommands,
    help="Evaluate a model on test data.",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True},  # they are quoted where the task is missing
)
#: Options of predictions that have flags: of a search, and of models that only read.
_BATCH = ("precision", "batch")
_SEARCH = ("search.beams", "search.length_penalty", *_BATCH)
_Targets = Annotated[str | None, typer.Option(help="File of target texts, one line per source in DATA.")]
_Out = Annotated[Path | None, typer.Option(help="File for the model's output, one line per distinct source.")]
_Json = Annotated[str | None, json_option("JSON")]
#: The included model.
_TRANSLATOR = Path("english-french")


@contextmanager
def _evaluation(as_json: str | None, out: Path | None = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Report errors of an evaluation; yield the function that prints its scores."""
    json = JsonOutput(as_json)

    def show(report: dict[str, Any]) -> None:
        json.add(report)
        for name, value in () if json.alone else report.items():
            echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")

    with report_errors("regard-lab[train]"), json:
        require_writable(json.file, out)
        yield show


# Tasks on pairs -------------------------------------------------------------------------------------------------------


@evaluate.command(cls=Command)
@with_flags(PredictionOptions, *_SEARCH)
def translation(
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="File of sentence pairs, source TAB target; with --targets, of sources."),
    ],
    given: dict[str, Any],
    targets: _Targets = None,
    model: Annotated[
        Path, typer.Option(help="Folder of a translation model; english-french is included.")
    ] = _TRANSLATOR,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="Also report BLEU of the words that spaces separate.")
    ] = False,
    out: _Out = None,
    as_json: _Json = None,
) -> None:
    """Translate sentences, and compare with their translations: BLEU and chrF."""
    with _evaluation(as_json, out) as show:
        from regard_lab.cli.evaluate import evaluate_pairs

        options = PredictionOptions.from_dotted(given)
        show(evaluate_pairs("translation", data, targets, model, options, tokenized=tokenized, out=out))


@evaluate.command(cls=Command)
def alignment(
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="File of sentence pairs, source TAB target; with --targets, of sources."),
    ],
    links: Annotated[
        str, typer.Option(help="File of correct word alignments, one line per pair, in Pharaoh format: 0-0 1-2.")
    ],
    targets: _Targets = None,
    model: Annotated[
        Path, typer.Option(help="Folder of a translation model; english-french is included.")
    ] = _TRANSLATOR,
    back: Annotated[Path | None, typer.Option(help="Folder of a model for the other direction.")] = None,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="Words are what spaces separate; --links counts these words.")
    ] = False,
    as_json: _Json = None,
) -> None:
    """Compare a translation model's attention with word alignments: precision, recall and error rate (AER)."""
    with _evaluation(as_json) as show:
        from regard_lab.cli.evaluate import evaluate_alignment

        show(evaluate_alignment(data, targets, model, links, back=back, tokenized=tokenized))


def _evaluate_pairs(task: Task, text: str) -> None:
    """Define the evaluation command of a task that is scored by its own metrics."""

    @evaluate.command(task.name, cls=Command, help=text)
    @with_flags(PredictionOptions, *_SEARCH)
    def command(
        data: Annotated[
            str, typer.Argument(metavar="DATA", help="File of pairs, source TAB target; with --targets, of sources.")
        ],
        given: dict[str, Any],
        model: Annotated[Path, typer.Option(help="Folder of a model for this task.")],
        targets: _Targets = None,
        out: _Out = None,
        as_json: _Json = None,
    ) -> None:
        with _evaluation(as_json, out) as show:
            from regard_lab.cli.evaluate import evaluate_pairs

            options = PredictionOptions.from_dotted(given)
            show(evaluate_pairs(task.name, data, targets, model, options, tokenized=False, out=out))


_evaluate_pairs(
    TASKS["pronunciation"],
    "Pronounce words, and compare with their phonemes, which spaces separate: phoneme and word error rates.",
)

# Text -----------------------------------------------------------------------------------------------------------------


@evaluate.command("language-model", cls=Command)
@with_flags(PredictionOptions, *_BATCH)
def language_model(
    data: Annotated[str, typer.Argument(metavar="DATA", help="File or folder of plain text; - is standard input.")],
    given: dict[str, Any],
    model: Annotated[Path, typer.Option(help="Folder of a causal or masked language model.")],
    per: Annotated[str, typer.Option(help="What a document is: a file, line or paragraph.")] = "file",
    length: Annotated[
        int | None, typer.Option(help="Tokens that the model reads at once, in a sliding window.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens by which the window advances; by default, half of --length.")
    ] = None,
    as_json: _Json = None,
) -> None:
    """Score text under a causal or masked language model: perplexity and bits per byte."""
    with _evaluation(as_json) as show:
        from regard_lab.cli.evaluate import evaluate_language_model

        options = PredictionOptions.from_dotted(given)
        show(
            evaluate_language_model(
                data, model, per=per, length=length, stride=stride, batch=options.batch, precision=options.precision
            )
        )


# Labels ---------------------------------------------------------------------------------------------------------------


@evaluate.command(cls=Command)
@with_flags(PredictionOptions, *_BATCH)
def classifier(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="File of labelled texts, text TAB label; or folder or tar archive of images with one folder per "
            "label.",
        ),
    ],
    given: dict[str, Any],
    model: Annotated[Path, typer.Option(help="Folder of a classifier of texts or images.")],
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Lines hold two texts and a label: text TAB text TAB label.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File for the predicted labels, one line per input.")] = None,
    as_json: _Json = None,
) -> None:
    """Classify texts or images, and compare with their labels: accuracy, F1 and Matthews correlation."""
    with _evaluation(as_json, out) as show:
        from regard_lab.cli.evaluate import evaluate_classifier

        options = PredictionOptions.from_dotted(given)
        show(evaluate_classifier(data, model, pairs=pairs, batch=options.batch, precision=options.precision, out=out))


# Captions -------------------------------------------------------------------------------------------------------------


@evaluate.command(cls=Command)
@with_flags(PredictionOptions, *_SEARCH)
def captioner(
    data: Annotated[str, typer.Argument(metavar="DATA", help="File of captions, image TAB caption.")],
    given: dict[str, Any],
    images: Annotated[str, typer.Option(help="Folder or tar archive of the images in DATA.")],
    model: Annotated[Path, typer.Option(help="Folder of a captioner.")],
    features: Annotated[
        str | None, typer.Option(help="File of precomputed image features, from regard train captioner --features.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the captions, image TAB caption.")] = None,
    as_json: _Json = None,
) -> None:
    """Caption images, and compare with their captions: BLEU, chrF, ROUGE-L and CIDEr-D."""
    with _evaluation(as_json, out) as show:
        from regard_lab.cli.evaluate import evaluate_captioner

        show(evaluate_captioner(data, images, model, PredictionOptions.from_dotted(given), features=features, out=out))
