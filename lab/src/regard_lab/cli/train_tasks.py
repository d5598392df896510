"""The commands of ``regard train``, one per task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.scores.kernels import kernels
from regard_cli.app import Commands
from regard_cli.messages import Command
from regard_lab._options import Options
from regard_lab.cli.flags import IMAGE_PANELS, flagged, with_flags
from regard_lab.tasks.captioning.options import CaptionOptions
from regard_lab.tasks.classification.options import ClassificationOptions, ImageClassificationOptions
from regard_lab.tasks.language.options import LanguageOptions
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import TASKS, Task

train = typer.Typer(cls=Commands, help="Train a model on your own data.", no_args_is_help=True)
_ATTENTION = (
    "--attention is additive, dot, scaled_dot, general, concat, location, cosine, local, hard, none, "
    f"{', '.join(name for name, kernel in kernels().items() if kernel.smooth)} or constant. "
    "--show-options prints all options."
)

_Out = Annotated[Path | None, typer.Option(help="Folder for the model and its checkpoints.")]
_OptionsFile = Annotated[Path | None, typer.Option(help="TOML file with options, such as --show-options prints.")]
_Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set any option of --show-options, such as training.clip=0.5."),
]
_ShowOptions = Annotated[
    bool, typer.Option("--show-options", help="Print all options with their meanings as TOML, and exit.")
]
_Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]


class _Training(Command):
    """A training command: with ``--show-options``, which prints and exits, ``--out`` is not required."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        next(each for each in self.params if each.name == "out").required = "--show-options" not in args
        return super().parse_args(ctx, args)


def _train_on_pairs(task: Task, text: str, **short: str) -> None:
    """Define the training command of a task on pairs; ``short`` overrides the help of data options."""
    kind = f"Type of the model: rnn or transformer; {'rnn' if task.kind == 'recurrent' else task.kind} by default."

    @train.command(task.name, cls=_Training, epilog=_ATTENTION, help=text)
    @with_flags(
        ExperimentOptions,
        unset=True,
        without=task.refused,
        short={f"data.{name}": text for name, text in short.items()} | {"kind": kind},
    )
    def command(
        out: _Out,
        given: dict[str, Any],
        attention: Annotated[
            str | None, typer.Option(help="Attention score of the model; see below.", rich_help_panel="Model")
        ] = None,
        options: _OptionsFile = None,
        settings: _Settings = None,
        show_options: _ShowOptions = False,
        resume: _Resume = False,
    ) -> None:
        from regard_lab.cli.runs import TrainingCall
        from regard_lab.cli.train import train_on_pairs

        given = given if attention is None else given | {"attention": attention}
        train_on_pairs(task.name, TrainingCall(out or Path(), resume, show_options, options, given, settings or []))


_train_on_pairs(TASKS["translation"], "Train a translation model on pairs of sentences.")
_train_on_pairs(
    TASKS["span-corruption"],
    "Pretrain an encoder–decoder by span corruption on lines of text.",
    data="File of lines of text; - is standard input.",
    valid="File of lines to validate with; by default, some of --data are held out.",
)
_train_on_pairs(
    TASKS["pronunciation"],
    "Train a pronunciation model on words and their phonemes.",
    data="File of words, word TAB phonemes separated by spaces; with --targets, of words; - is standard input.",
    targets="File of phonemes, one line per word.",
    valid="File of words and phonemes to validate with; by default, some of --data are held out.",
    valid_targets="File of phonemes, one line per word of --valid.",
)


def _train_on_others(task: str, declared: type[Options], text: str, other: type[Options] | None = None) -> None:
    """Define the training command of a task that has no pairs of lines.

    It also takes the flags of the ``other`` options that ``declared`` does not have.
    """

    @with_flags(declared, unset=True)
    def command(
        out: _Out,
        given: dict[str, Any],
        options: _OptionsFile = None,
        settings: _Settings = None,
        show_options: _ShowOptions = False,
        resume: _Resume = False,
    ) -> None:
        from regard_lab.cli.runs import TrainingCall
        from regard_lab.cli.train import OTHERS

        OTHERS[task](TrainingCall(out or Path(), resume, show_options, options, given, settings or []))

    if other is not None:
        taken = {each.metadata["flag"] for each in flagged(declared).values()}
        rest = [place for place, each in flagged(other).items() if each.metadata["flag"] not in taken]
        command = with_flags(other, *rest, unset=True, panels=IMAGE_PANELS)(command)
    train.command(task, cls=_Training, epilog="--show-options prints all options.", help=text)(command)


_train_on_others(
    "language-model", LanguageOptions, "Train a causal language model on text, or with --masked a masked one."
)
_train_on_others(
    "classifier", ClassificationOptions, "Train a classifier of texts, best from a language model, or of --images.",
    ImageClassificationOptions,
)  # fmt: skip
_train_on_others("captioner", CaptionOptions, "Train an image captioner.")
