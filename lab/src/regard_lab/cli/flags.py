"""Flags of the command line, made from the options that are declared, and ``--set`` for the others."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field
from types import MappingProxyType
from typing import Annotated, Any

import typer

from regard._utils.errors import rejected
from regard_lab._options import Options, parsed_toml
from regard_lab.training.options import RunOptions

#: Headings of options in the help of commands, by their sections.
PANELS = MappingProxyType({
    "data": "Data", "augmentation": "Data", "vocabularies": "Vocabulary", "tokenizer": "Vocabulary",
    "training": "Training", "reward": "Training", "search": "Search", "sampling": "Sampling",
})  # fmt: skip
#: The same where other options read other data.
IMAGE_PANELS = PANELS | {"data": "Images", "augmentation": "Images"}


def flagged(options: type[Options], *places: str) -> dict[str, Field[Any]]:
    """Return the options that have a flag, by their places: all of them, or those at these places."""
    return {
        place: each for place, each in options.declared() if each.metadata["flag"] and (not places or place in places)
    }


def with_flags(
    options: type[Options],
    *places: str,
    unset: bool = False,
    without: Collection[str] = (),
    short: Mapping[str, str] = MappingProxyType({}),
    panels: Mapping[str, str] = PANELS,
) -> Callable[[Any], Any]:
    """Let a command take declared options, which reach it as one mapping ``given`` from their places to values.

    A command may be decorated again, for options of another kind.

    Parameters
    ----------
    options : type of Options
    *places : str
        Those that it takes; all that have a flag by default.
    unset : bool, default False
        Give the command only those that were typed, rather than the defaults of others.
    without : collection of str
        Places of options that the command does not take after all.
    short : mapping of str to str
        What the help of the command says of an option, in place of what is declared.
    panels : mapping of str to str
        Headings in the help, by the options' sections.
    """
    chosen = {_name(each): (place, each) for place, each in flagged(options, *places).items() if place not in without}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.name != "given"]
        made = [
            _parameter(name, each, unset, short.get(place, each.metadata["short"]), _panel(options, place, panels))
            for name, (place, each) in chosen.items()
        ]
        required = [each for each in own if each.default is inspect.Parameter.empty]

        def run(**typed: Any) -> None:
            taken = {place: typed.pop(name) for name, (place, _) in chosen.items()}
            given = {place: value for place, value in taken.items() if value is not None or not unset}
            given = typed.pop("given", {}) | given  # of options that were declared before
            command(**typed, given=given)

        parameters = [*required, *made, *(each for each in own if each not in required)]
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        )
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        flags = {place: name for name, (place, _) in chosen.items()}
        run.flags = getattr(command, "flags", {}) | flags  # type: ignore[attr-defined]
        return run

    return decorate


def _name(option: Field[Any]) -> str:
    flag: str = option.metadata["flag"].partition("/")[0]
    return flag.removeprefix("--").replace("-", "_")


def _panel(options: type[Options], place: str, panels: Mapping[str, str]) -> str | None:
    """Return the heading of an option in the help; options of a run outside of sections describe its model."""
    section, dot, _ = place.partition(".")
    return panels.get(section) if dot else "Model" if issubclass(options, RunOptions) else None


def _parameter(name: str, option: Field[Any], unset: bool, short: str, panel: str | None) -> inspect.Parameter:
    declared = option.metadata
    kind: Any = list[str] if declared["kind"] is list else declared["kind"]
    kind = kind | None if unset or option.default is None else kind
    default = option.default
    if unset and default and isinstance(default, str | int | float) and "default" not in short:
        short = f"{short.removesuffix('.')}; {default if isinstance(default, str) else f'{default:,}'} by default."
    annotation = Annotated[kind, typer.Option(declared["flag"], help=short, rich_help_panel=panel)]
    default = None if unset else option.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parse_setting(text: str, example: str = "training.clip=0.5") -> tuple[str, Any]:
    """Return the place and the value of ``NAME=VALUE``; a value that is no TOML is text."""
    name, mark, value = text.partition("=")
    if not mark or not name.strip():
        raise rejected("train", "--set", f"be NAME=VALUE, such as {example}", repr(text))
    try:
        return name.strip(), parsed_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()
