"""Deprecate what is public: it works as before, warns, and names what replaces it and the release that removes it."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Named = TypeVar("Named", bound=Callable[..., Any])


def deprecated(instead: str, *, removed_in: str) -> Callable[[Named], Named]:
    """Mark a public function or class as deprecated.

    A call, or making an object of the class or of a subclass, warns. The docstring says so too, and a test fails in the
    release that should have removed it.

    Parameters
    ----------
    instead : str
        What to use, as the warning says it: "regard.masks.window".
    removed_in : str
        The release that removes it, "0.4": at least one minor release after the first that warns.

    Returns
    -------
    callable
        A decorator, which returns the same function or class for its users.

    Examples
    --------
    >>> @deprecated("regard.new", removed_in="99.0")
    ... def old(x):
    ...     '''Return x.'''
    ...     return x
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     old(3)
    3
    >>> caught[0].message.args[0].partition("old")[2]
    ' is deprecated and will be removed in 99.0: use regard.new.'
    """

    def decorate(named: Named) -> Named:
        name = f"{named.__module__}.{named.__qualname__}"
        message = f"{name} is deprecated and will be removed in {removed_in}: use {instead}."
        target: Any = named.__init__ if isinstance(named, type) else named

        @functools.wraps(target)
        def warning(*args: Any, **options: Any) -> Any:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return target(*args, **options)

        changed: Any = warning
        if isinstance(named, type):
            named.__init__ = warning
            changed = named
        changed.__doc__ = (
            f"{named.__doc__ or ''}\n\n.. deprecated:: {removed_in}\n    Use {instead}. Will be removed.\n"
        )
        return changed

    return decorate
