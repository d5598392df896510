"""Names that a package imports from its modules at their first use, so that importing the package costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, table: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose names are imported at their first use (PEP 562).

    Type checkers and editors do not read the table, so the package imports the same names under ``TYPE_CHECKING`` and
    calls this function otherwise; tests/regard/test_public_names.py holds both, and ``__all__``, equal.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    table : mapping of str to str
        For each module, by its full name, the names that the package takes from it, with spaces between them; "" where
        the module itself is what is public.

    Returns
    -------
    getter : callable
        Imports what a name stands for, and keeps it as an attribute of the package.
    names : callable
        Returns the package's ``__all__``: what ``dir`` shows.

    Examples
    --------
    >>> getter, _ = lazy("regard", {"regard.nn": "", "regard.nn.kv_cache": "KVCache"})
    >>> getter("nn").KVCache is getter("KVCache")
    True
    """
    homes = {name: (module, name) for module, names in table.items() for name in names.split()}
    homes |= {module.rpartition(".")[2]: (module, "") for module, names in table.items() if not names}

    def getter(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        home, public = homes[name]
        module = import_module(home)
        value = getattr(module, public) if public else module
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return getter, names
