"""Messages of the command line: errors in one sentence, and text that every terminal can show.

Whatever a command prints passes here, so that nothing in a file, a model or data can give orders to a terminal.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rich.console
import typer
from rich.text import Text
from typer.core import TyperCommand

from regard._utils.errors import RegardWarning, rejection
from regard_cli.printing import printable

#: The exit code after wrong input.
WRONG = 2
#: Another process of a run died.
LOST = 1
#: Control characters that lines of text are made of.
_LAYOUT = "\n\t"
#: What a message of the library begins with: the name of a function or class.
_LIBRARY = re.compile(r"^[A-Za-z_][\w.]*: ")
#: What was typed.
_CONTEXT: ContextVar[typer.Context] = ContextVar("context")


class Command(TyperCommand):
    """A command that remembers what was typed, so that errors are in its words."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        token = _CONTEXT.set(ctx)
        try:
            with show_warnings():
                return super().invoke(ctx)
        finally:
            _CONTEXT.reset(token)


_FULL = "memory is full: a smaller model, batch or length takes less"


class Console(rich.console.Console):
    """A console on which texts cannot do more than its own styles."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is shown: everything that is given as a str comes here."""
        return super().render_str(printable(text, _LAYOUT), **options)


def echo(text: str = "", *, end: str = "\n") -> None:
    """Print text on stdout."""
    typer.echo(printable(text, _LAYOUT) + end, nl=False)


def note(text: str) -> None:
    """Print a line on stderr, whatever the text holds."""
    typer.echo(printable(text), err=True)


def fail(message: str, code: int = WRONG) -> typer.Exit:
    """Print a sentence on stderr and return the exit to raise."""
    note(f"regard: {message}")
    return typer.Exit(code)


@contextmanager
def report_errors(package: str = "regard[cli]") -> Iterator[None]:
    """Turn the errors that a user can cause into one sentence and exit code 2.

    To be held around calls that check what the user gave, not around everything: elsewhere a ValueError is a bug.

    Parameters
    ----------
    package : str
        What pip installs for all that the command needs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise fail(f"{error.name} is missing: pip install '{package}'") from None
    except BrokenPipeError:  # nobody reads on: typer ends it without a word
        raise
    except OSError as error:
        if error.filename is None:  # a standard stream: all files are named
            raise
        raise fail(f"{os.fsdecode(error.filename)} cannot be used: {error.strerror or error}") from None
    except (ValueError, MemoryError) as error:
        raise fail(sentence(error) or _FULL) from None
    except RuntimeError as error:
        from regard._utils.errors import is_memory_error

        if not is_memory_error(error):
            raise
        raise fail(_FULL) from None
    except TypeError as error:
        if rejection(error) is None:
            raise
        raise fail(sentence(error)) from None


def sentence(error: BaseException) -> str:
    """Return what an error says, in the words of the command: its name and its options, not functions' arguments."""
    rejected, context = rejection(error), _CONTEXT.get(None)
    if context is None:
        return str(error)
    if rejected is None:
        return _LIBRARY.sub(f"{_command_name(context)}: ", str(error))
    name = _command_name(context)
    return f"{name}: {_typed(context, rejected.argument)} must {rejected.expected}, got {rejected.got}."


def _command_name(context: typer.Context) -> str:
    """Return the first word behind ``regard``."""
    while context.parent is not None and context.parent.parent is not None:
        context = context.parent  # type: ignore[assignment]
    return str(context.info_name)


def _typed(context: typer.Context, argument: str) -> str:
    """Return the option of a command that an argument of the library is, or an entry of a table of options."""
    flags: dict[str, str] = getattr(context.command.callback, "flags", {})
    name = flags.get(argument, argument)
    source = context.get_parameter_source(name)
    typed = source is not None and source.name == "COMMANDLINE"
    elsewhere = any(context.params.get(each) for each in ("options", "resume")) or any(
        each.startswith(f"{argument}=") for each in context.params.get("settings") or ()
    )
    if argument in flags and elsewhere and not typed:
        return argument
    for parameter in context.command.params:
        if parameter.name == name:
            is_option = parameter.param_type_name == "option"
            return parameter.opts[0] if is_option else getattr(parameter, "metavar", None) or name.upper()
    return argument


@contextmanager
def show_warnings() -> Iterator[None]:
    """Show warnings of the library as notes, without the line of code that they come from."""

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if isinstance(message, RegardWarning):
            note(f"regard: {_LIBRARY.sub('', str(message))}")
        else:
            others(printable(str(message), _LAYOUT), category, *rest)

    others, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = others


def require(package: str) -> None:
    """Raise ModuleNotFoundError now, rather than after minutes of work, if an optional package is missing."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def require_writable(*paths: Path | None, picture: Path | None = None) -> None:
    """Raise now, rather than after minutes of work, if a file cannot be there, or a picture not be of its name."""
    if picture is not None:
        from regard.inspect._view.plots import checked_format

        checked_format(picture, "--plot")
    for path in (*paths, picture):
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))


def ascii_only() -> bool:
    """Return whether standard output cannot show block characters."""
    try:
        "░▒▓█✓✗".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
