"""The commands of ``regard train``, one per task."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.scores.kernels import kernels
from regard_cli.app import Commands
from regard_cli.messages import Command
from regard_lab._options import Options
from regard_lab.cli.flags import flagged, with_flags
from regard_lab.tasks.captioning.options import CaptionOptions
from regard_lab.tasks.classification.image_options import ImageClassificationOptions
from regard_lab.tasks.classification.text_options import ClassificationOptions
from regard_lab.tasks.language.options import LanguageOptions
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import TASKS, Task

train = typer.Typer(cls=Commands, help="Train a model on your own data.", no_args_is_help=True)
_ATTENTION = (
    "--attention may be additive, dot, scaled_dot, general, concat, location, cosine, local, hard, none, "
    f"{', '.join(name for name, kernel in kernels().items() if kernel.smooth)} or constant. "
    "--show-options prints all options."
)


def _train_on_pairs(task: Task, text: str, **short: str) -> None:
    """Define the training command of a task on pairs; ``short`` overrides the help of data options."""

    @train.command(task.name, cls=Command, epilog=_ATTENTION, help=text)
    @with_flags(
        ExperimentOptions,
        unset=True,
        without=task.refused,
        short={f"data.{name}": text for name, text in short.items()},
    )
    def command(
        out: Annotated[Path, typer.Option(help="Folder of the run.")],
        given: dict[str, Any],
        attention: Annotated[str | None, typer.Option(help="additive, dot, local, ...")] = None,
        options: Annotated[Path | None, typer.Option(help="A TOML file of options.")] = None,
        settings: Annotated[
            list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any, as training.clip=0.5.")
        ] = None,
        show_options: Annotated[bool, typer.Option("--show-options", help="Print all options as TOML.")] = False,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    ) -> None:
        from regard_lab.cli.train import run

        given = given if attention is None else given | {"attention": attention}
        run(
            task.name, out=out, resume=resume, options=options, given=given, settings=settings or [],
            show_options=show_options,
        )  # fmt: skip


_train_on_pairs(TASKS["translation"], "Train a translation model on pairs of sentences.")
_train_on_pairs(
    TASKS["span-corruption"],
    "Pretrain an encoder–decoder by span corruption on lines of text.",
    data="Lines of text; - for stdin.",
    valid="Lines for validation.",
)
_train_on_pairs(TASKS["pronunciation"], "Train a pronunciation model on words and their phonemes.")


def _train_on_text(task: str, declared: type[Options], text: str, other: type[Options] | None = None) -> None:
    """Define the training command of a text task, in the module named after the task.

    It also takes the flags of the ``other`` options that ``declared`` does not have.
    """

    @with_flags(declared, unset=True)
    def command(
        out: Annotated[Path, typer.Option(help="Folder of the run.")],
        given: dict[str, Any],
        options: Annotated[Path | None, typer.Option(help="A TOML file of options.")] = None,
        settings: Annotated[
            list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any, as training.clip=0.5.")
        ] = None,
        show_options: Annotated[bool, typer.Option("--show-options", help="Print all options as TOML.")] = False,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    ) -> None:
        run = import_module(f"regard_lab.cli.train_{task.replace('-', '_')}").run
        run(out=out, resume=resume, options=options, given=given, settings=settings or [], show_options=show_options)

    if other is not None:
        taken = {each.metadata["flag"] for each in flagged(declared).values()}
        rest = [place for place, each in flagged(other).items() if each.metadata["flag"] not in taken]
        command = with_flags(other, *rest, unset=True)(command)
    train.command(task, cls=Command, epilog="--show-options prints all options.", help=text)(command)


_train_on_text(
    "language-model", LanguageOptions, "Train a causal language model on text, or with --masked a masked one."
)
_train_on_text(
    "classifier", ClassificationOptions, "Train a classifier of texts, best from a language model, or of --images.",
    ImageClassificationOptions,
)  # fmt: skip
_train_on_text("captioner", CaptionOptions, "Train an image captioner.")
