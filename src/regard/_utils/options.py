"""Options that are declared once: from a field come its check, its line of TOML, its flag and its help."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from regard._utils.errors import described, in_section, rejected, unknown_name


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    known: Collection[str] = (),
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
    least, above, most, below : float, optional
        Its bounds, the first and the third included.
    known : collection of str, optional
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
    bounds = {"least": least, "above": above, "most": most, "below": below}
    rest = {"text": text, "known": known, "flag": flag, "short": short or f"{text[:1].upper()}{text[1:]}."}
    metadata = {"kind": kind or type(default), "resumable": resumable, **bounds, **rest}
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

    #: What error messages begin with.
    function: ClassVar[str] = "options"

    def __post_init__(self) -> None:
        for each in fields(self):
            if "kind" in each.metadata:
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

    def leave_out(self, name: str, where: str) -> None:
        """Raise where an option is given that would have no effect."""
        default = next(each.default for each in fields(self) if each.name == name)
        if getattr(self, name) != default:
            raise rejected(self.function, name, f"be left out {where}", repr(getattr(self, name)))


def _checked(function: str, option: Field[Any], value: Any) -> Any:
    declared = option.metadata
    kind, known = declared["kind"], declared["known"]
    if value is None and option.default is None:
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        expected = {dict: "be a table of options", list: "be a list of texts"}.get(kind, f"be of type {kind.__name__}")
        raise rejected(function, option.name, expected, described(value), TypeError)
    if kind is list and not all(isinstance(each, str) for each in value):
        raise rejected(function, option.name, "be a list of texts", described(value), TypeError)
    if known and value not in known:
        raise unknown_name(function, option.name, value, known)
    if kind in (int, float) and not _within(value, declared):
        raise rejected(function, option.name, f"be {' and '.join(_bounds(value, declared))}", value)
    return value


#: Counts that no run reaches, and torch has no larger seeds.
_COUNTS = 1 << 31


def _within(value: float, declared: Any) -> bool:
    least, above, most, below = (declared[name] for name in ("least", "above", "most", "below"))
    return (
        (least is None or value >= least)
        and (above is None or value > above)
        and (value < math.inf if most is None else value <= most)
        and value < (below if below is not None else _COUNTS if type(value) is int else math.inf)
    )


def _bounds(value: float, declared: Any) -> Iterator[str]:
    for name, word in {"least": "at least", "above": "above", "most": "at most", "below": "below"}.items():
        if declared[name] is not None:
            yield f"{word} {declared[name]:,}"
    if declared["most"] is None and declared["below"] is None and not value < _COUNTS:
        yield f"below {_COUNTS:,}" if type(value) is int else "finite"
