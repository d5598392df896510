"""Triton's interpreter in half of its time: its language is patched once for a launch, not for each function call.

The interpreter patches it again in every call of a function by a kernel, which changes nothing.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from triton import language
from triton.runtime import interpreter


def patch_once() -> None:
    """Leave out what is patched already, in the process that this is called in."""
    whole: Callable[[FunctionType], Any] = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: FunctionType) -> Any:
        modules = {id(each) for each in function.__globals__.values() if each is language or each is language.core}
        if modules <= patched:  # in a launch, whose patches end with it
            return None
        begins, scope = not patched, whole(function)
        patched.update(modules)
        if begins:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch
