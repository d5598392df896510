"""The command ``regard``: installed packages provide its commands, which are imported when they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard_cli import startup
from regard_cli.printing import printable

#: The exit code after a keyboard interrupt.
INTERRUPTED = 130
#: Typer's exception for invalid arguments.
_UsageError: Any = typer.BadParameter.__mro__[1]
#: The entry point group for commands; each entry point is ``(typer app, help of each command)``.
GROUP = "regard.commands"
#: Commands of packages that may be missing, and how to install them.
ELSEWHERE = dict.fromkeys(
    ("align", "caption", "classify", "compare", "demo", "embed", "evaluate", "fill-mask", "generate", "look", "plan",
     "pronounce", "train", "translate"),
    "regard-lab (pip install ./lab in a clone of the repository)",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where a command is defined.

    Attributes
    ----------
    app : str
        ``module:attribute`` of the command's typer app.
    help : str
        The command's line in ``regard --help``.
    """

    app: str
    help: str


@contextmanager
def printable_usage() -> Iterator[None]:
    """Escape control characters in error messages that quote the arguments."""
    try:
        yield
    except _UsageError as error:
        error.message = printable(error.message)
        raise


@cache
def sources() -> dict[str, Source]:
    """Return the commands of all installed packages, by name."""
    found: dict[str, Source] = {}
    for entry in entry_points(group=GROUP):
        try:
            app, helps = entry.load()
        except ImportError as error:
            typer.echo(f"regard: skipped the commands of {entry.name}: {error}", err=True)
            continue
        found |= {name: Source(app, text) for name, text in helps.items()}
    return found


@cache
def _commands(app: typer.Typer) -> Mapping[str, Any]:
    return typer.main.get_group(app).commands


class Commands(TyperGroup):
    """All commands. Errors quote arguments safely, which may be untrusted file names from a shell's ``*``."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        """Parse the options before a command."""
        with printable_usage():
            return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's arguments and run it; a keyboard interrupt exits with code 130, without a traceback."""
        try:
            with printable_usage():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("\nregard: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


class InstalledCommands(Commands):
    """Commands by name, imported when they run; listing their help lines needs no import."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return all names."""
        return sorted(sources())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command; for a help listing, a stub with its help line."""
        source = sources().get(cmd_name)
        if source is None:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=source.help)
        module, _, name = source.app.partition(":")
        app = getattr(import_module(module), name)
        startup.finish()
        return _commands(app)[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of all commands."""
        with self._listed():
            super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the requested command, or suggest one with a similar name."""
        if args and args[0] not in sources() and args[0] in ELSEWHERE:
            text = f"regard: {args[0]} is a command of {ELSEWHERE[args[0]]}, which is not installed."
            typer.echo(text, err=True)
            raise typer.Exit(2)
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            close = get_close_matches(args[0], {*sources(), *ELSEWHERE}, 1)
            error.message += f" Did you mean {close[0]!r}?" if close else ""
            raise

    @contextmanager
    def _listed(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


app = typer.Typer(
    cls=InstalledCommands,
    help="Attention: one function, many mechanisms, and tools around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {installed_version('regard')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the options before a command."""
