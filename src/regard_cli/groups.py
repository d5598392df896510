"""Options of a command in groups: dataclasses whose fields are options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its dataclasses as options, in their place and order.

    A field's annotation and default are what they would be of a parameter.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     height: int
    ...     width: int = 1
    >>> @grouped
    ... def show(name: str, size: Size) -> None:
    ...     print(name, size)
    >>> list(inspect.signature(show).parameters)
    ['name', 'height', 'width']
    >>> show(name="box", height=2)
    box Size(height=2, width=1)
    """
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, each in signature.parameters.items():
        parameters += _options(kinds[name]) if name in kinds else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    def run(**given: Any) -> None:
        groups = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind) if each.name in given})
            for name, kind in kinds.items()
        }
        command(**given, **groups)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    ]
