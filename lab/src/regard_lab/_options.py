"""Options that are declared once: from a field come its check, its line of TOML, its flag and its help.

Dataclasses, checked by the constraints that all arguments have. Other libraries were tried and would not shorten this:
pydantic checks the same in as many lines, most of which turn its errors into sentences, takes 0.1 s to import, and
would be a second validator, as :mod:`regard` needs only torch and NumPy; tyro and jsonargparse check no bounds or name
flags by their place (``--training.learning-rate``), and print errors of several lines.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from regard._utils.constraints import Constraint, Integer, Number, Of, OneOf, Texts, flag
from regard._utils.errors import described, in_section, rejected, unknown_name, without_effect
from regard._utils.files import read_bytes

#: Descriptions in error messages of the types of options that are not numbers.
_KINDS: dict[type, Constraint] = {
    bool: flag, str: Of(str, "a string"), list: Texts(), dict: Of(dict, "a table of options")
}  # fmt: skip
#: Maximum count, which no run reaches, and maximum seed of torch.
_COUNTS = 1 << 31


def option(
    default: Any,
    text: str,
    *,
    ge: Any = None,
    gt: float | None = None,
    le: Any = None,
    lt: float | None = None,
    choices: Collection[str] = (),
    kind: type | None = None,
    flag: str = "",
    short: str = "",
    resumable: bool = False,
) -> Any:
    """Declare an option.

    Parameters
    ----------
    default : object
    text : str
        What it means.
    ge, gt, le, lt : float, optional
        Its bounds: at least, above, at most, below. A whole number has ``ge`` and ``le`` alone.
    choices : collection of str, optional
        The names it may have.
    kind : type, optional
        Where the default is None.
    flag : str, optional
        Its name on the command line.
    short : str, optional
        What the command line's help says of it in place of ``text``.
    resumable : bool, default False
        Whether a run that is resumed may change it.
    """
    kind = kind or type(default)
    constraint: Constraint
    if choices:
        constraint = OneOf(choices)
    elif kind is int:
        constraint = Integer(ge, le)
    elif kind is float:
        constraint = Number(ge=ge, gt=gt, le=le, lt=lt)
    else:
        constraint = _KINDS[kind]
    metadata = {"kind": kind, "constraint": constraint, "choices": tuple(choices), "text": text, "flag": flag}
    metadata |= {"short": short or f"{text[:1].upper()}{text[1:]}.", "resumable": resumable}
    if isinstance(default, dict | list):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def redeclared(options: type[Options], name: str, default: Any) -> Any:
    """Declare an option of other options again, with another default."""
    declared = next(each for each in fields(options) if each.name == name)
    return field(default=default, metadata=declared.metadata)


def section(kind: type[Options], text: str) -> Any:
    """Declare options of their own kind, a table of TOML."""
    return field(default_factory=kind, metadata={"section": kind, "text": text})


@dataclass(frozen=True)
class Options:
    """Options that are checked when they are made."""

    #: Prefix of error messages.
    function: ClassVar[str] = "options"
    #: Earlier names of options in files, with their current names.
    renamed: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for each in fields(self):
            if "constraint" in each.metadata:
                object.__setattr__(self, each.name, _checked(self.function, each, getattr(self, each.name)))
        self.check()

    def check(self) -> None:
        """Raise ValueError where options contradict each other."""

    def with_changes(self, changes: dict[str, Any]) -> Self:
        """Return the same options but for these, or raise where a name is unknown or a value wrong."""
        known = {each.name for each in fields(self)}
        for name in changes:
            if name not in known:
                raise unknown_name(self.function, name, name, known)
        return replace(self, **changes)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Self:
        """Return the options that a table of TOML holds, or raise where a name is unknown or a value wrong."""
        known = {each.name: each for each in fields(cls)}
        made = {}
        for name, value in table.items():
            name = cls.renamed.get(name, name)
            if name not in known:
                raise unknown_name(cls.function, name, name, known)
            inner = known[name].metadata.get("section")
            if inner is not None:
                if not isinstance(value, dict):
                    raise rejected(cls.function, name, "be a table of options", described(value))
                with in_section(name):
                    value = inner.from_table(value)
            made[name] = value
        return cls(**made)

    @classmethod
    def from_dotted(cls, values: dict[str, Any]) -> Self:
        """Return the options with these values at places such as ``search.beams``."""
        table: dict[str, Any] = {}
        for place, value in values.items():
            *sections, name = place.split(".")
            inner = table
            for each in sections:
                inner = inner.setdefault(each, {})
            inner[name] = value
        return cls.from_table(table)

    @classmethod
    def declared(cls, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
        """Yield every option with its place, such as ``training.clip``."""
        for each in fields(cls):
            inner = each.metadata.get("section")
            if inner is not None:
                yield from inner.declared(f"{prefix}{each.name}.")
            elif each.metadata:
                yield f"{prefix}{each.name}", each

    def to_table(self) -> dict[str, Any]:
        """Return a table of TOML."""
        return asdict(self)

    def flat(self) -> dict[str, Any]:
        """Return all options by their places, such as ``training.clip``."""
        flat: dict[str, Any] = {}
        for name, value in self.to_table().items():
            flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        return flat

    def require_default(self, name: str, where: str) -> None:
        """Raise where an option is given that would have no effect."""
        if not self._is_default(name):
            raise rejected(self.function, name, f"be left out {where}", repr(getattr(self, name)))

    def require_effect(self, name: str, where: str, needed: str = "") -> None:
        """Raise if an option is given that has no effect; ``needed`` is the option to set, if any."""
        if not self._is_default(name):
            raise without_effect(self.function, name, where, repr(getattr(self, name)), needed)

    def _is_default(self, name: str) -> bool:
        default = next(each.default for each in fields(self) if each.name == name)
        return bool(getattr(self, name) == default)


def _checked(function: str, option: Field[Any], value: Any) -> Any:
    if value is None and option.default is None:
        return value
    value = option.metadata["constraint"](function, option.name, value)
    if type(value) is int and value >= _COUNTS:
        raise rejected(function, option.name, f"be below {_COUNTS:,}", value)
    return value


# TOML files of options, read with limits ------------------------------------------------------------------------------


#: Maximum size of an options file in bytes; maximum nesting of tables and arrays.
_LARGEST, _DEPTH = 1 << 20, 8


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file says, or raise ValueError in one sentence."""
    try:
        return parsed_toml(read_bytes(path, "options", _LARGEST).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise rejected("options", str(path), "be TOML", f"something else ({error})") from None


def parsed_toml(text: str) -> dict[str, Any]:
    """Return what TOML says; raise tomllib.TOMLDecodeError where it is none, or nested beyond all options there are."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None
    except ValueError as error:  # such as an integer of thousands of digits
        raise tomllib.TOMLDecodeError(str(error)) from None
    level: list[Any] = [table]
    for _ in range(_DEPTH):
        level = [each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer)]
        if any(isinstance(each, int) and each.bit_length() > 63 for each in level):
            raise tomllib.TOMLDecodeError("an integer of more than 64 bits")
        level = [each for each in level if isinstance(each, (dict, list))]
    if level:
        raise tomllib.TOMLDecodeError("nested too deeply")
    return table
