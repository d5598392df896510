"""Messages of the command line: errors in one sentence, and text that is safe for any terminal.

All output passes through here, so that no control sequence from a file, a model or data reaches the terminal. As with
``ls``, a pipe or file gets each character as it is.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import rich.console
import typer
from rich.text import Text
from typer.core import TyperCommand

from regard._utils.errors import RegardWarning, rejection
from regard._utils.files import write_out
from regard_cli.printing import encodable, printable

#: The exit code for invalid input.
WRONG = 2
#: The exit code if another process of a distributed run died.
LOST = 1
#: Control characters that text may contain.
_LAYOUT = "\n\t"
#: The prefix of the library's messages: the name of a function or class.
_LIBRARY = re.compile(r"^[A-Za-z_][\w.]*: ")
#: The running command and its arguments.
_CONTEXT: ContextVar[typer.Context] = ContextVar("context")


class Command(TyperCommand):
    """A command whose errors name its options instead of function arguments; ``--json`` may have a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        has_json = any(_JSON in parameter.opts for parameter in self.params)
        return super().parse_args(ctx, attach_file(args) if has_json else args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        token = _CONTEXT.set(ctx)
        try:
            with show_warnings():
                return super().invoke(ctx)
        finally:
            _CONTEXT.reset(token)


_FULL = "out of memory; use a smaller model, batch or length"


class Console(rich.console.Console):
    """A console that escapes control characters in texts."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text for display; rich calls this for every str."""
        return super().render_str(printable(text, _LAYOUT), **options)


def echo(text: str = "", *, end: str = "\n") -> None:
    """Print text on stdout; on a terminal with control characters escaped."""
    typer.echo((printable(text, _LAYOUT) if sys.stdout.isatty() else encodable(text)) + end, nl=False)


# The option --json: alone it prints JSON instead of text; with a file it also writes that -----------------------------


_JSON, _PRINTED = "--json", "--json=-"
#: Ends of names of files for JSON; anything else behind ``--json`` is an argument of the command.
_ENDS = (".json", ".jsonl")


def json_option(what: str) -> Any:
    """Return the option of a command that can give ``what`` as JSON."""
    text = f"Print {what}; with FILE.json, write it there and print text."
    return typer.Option(_JSON, metavar="[FILE.json]", help=text)


def attach_file(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with a value attached to ``--json``: the file after it, or ``-``.

    Examples
    --------
    >>> attach_file(["--json", "a text"]), attach_file(["--json", "out.json", "a text"])
    (['--json=-', 'a text'], ['--json=out.json', 'a text'])
    """
    attached: list[str] = []
    for number, each in enumerate(arguments):
        if each == "--":
            return [*attached, *arguments[number:]]
        if number and arguments[number - 1] == _JSON and each.lower().endswith(_ENDS):
            attached[-1] = f"{_JSON}={each}"
        else:
            attached.append(_PRINTED if each == _JSON else each)
    return attached


class JsonOutput:
    """Where JSON goes: to standard output instead of text, to a file in addition to the text, or nowhere.

    As a context manager, it writes the file at the end, unless there was an error.

    Parameters
    ----------
    value : str or None
        Of ``--json``.

    Attributes
    ----------
    wanted, alone : bool
        Whether there is any JSON; whether it replaces text.
    file : Path or None
    """

    def __init__(self, value: str | None) -> None:
        self.wanted, self.alone = value is not None, value == "-"
        self.file = None if value is None or self.alone else Path(value)
        self._lines: list[str] = []

    def add(self, record: Any) -> None:
        """Print a record in one line, or keep it for the file."""
        if self.wanted:
            self.add_text(printable(json.dumps(record, ensure_ascii=False)))

    def add_text(self, text: str) -> None:
        """Print JSON, or keep it for the file."""
        if self.alone:
            echo(text)
        elif self.wanted:
            self._lines.append(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.file is not None:
            write_out(self.file, "".join(f"{line}\n" for line in self._lines).encode())


# Messages -------------------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    """Print a line on stderr with control characters escaped."""
    typer.echo(printable(text), err=True)


def fail(message: str, code: int = WRONG) -> typer.Exit:
    """Print a sentence on stderr and return the exit to raise."""
    note(f"regard: {message}")
    return typer.Exit(code)


@contextmanager
def report_errors(package: str = "regard[cli]") -> Iterator[None]:
    """Turn errors caused by the user into one sentence and exit code 2.

    Use it around calls that check the user's input, not around everything: elsewhere a ValueError is a bug.

    Parameters
    ----------
    package : str
        The pip requirement that installs everything the command needs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:  # transformers says so of modules that are there but cannot be imported
            raise fail(f"a package cannot be imported: {sentence(error.__cause__ or error)}") from None
        name = error.name.partition(".")[0]
        raise fail(f"{name} is missing: pip install '{package}'") from None
    except BrokenPipeError:  # typer exits silently
        raise
    except OSError as error:
        if error.filename is None:  # a standard stream; errors of files have a name
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
    """Return an error's message with the names of the command and its options instead of function arguments."""
    rejected, context = rejection(error), _CONTEXT.get(None)
    if context is None:
        return str(error)
    if rejected is None:
        return _LIBRARY.sub(f"{_command_name(context)}: ", str(error))
    return rejected.worded(_command_name(context), partial(_typed, context))


def _command_name(context: typer.Context) -> str:
    """Return the first word after ``regard``."""
    while context.parent is not None and context.parent.parent is not None:
        context = context.parent  # type: ignore[assignment]
    return str(context.info_name)


def _typed(context: typer.Context, argument: str) -> str:
    """Return the option of a command that sets an argument of the library, or its name in an options file."""
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
    """Show warnings of the library as notes, without their source line."""

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
    """Raise ModuleNotFoundError early if an optional package is missing, not after minutes of work."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def require_writable(*paths: Path | None, picture: Path | None = None) -> None:
    """Raise early if a file cannot be written or a picture has an unknown suffix, not after minutes of work."""
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
