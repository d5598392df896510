"""Operators of ``torch.library``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

#: What holds them: one library, because torch otherwise makes one for each definition, which takes longer.
_LIBRARY = torch.library.Library("regard", "FRAGMENT")


def define(
    name: str,
    function: Callable[..., Any],
    shapes: Callable[..., Any],
    keys: str = "CompositeExplicitAutograd",
    batch: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator of :data:`torch.ops.regard`, with its fake kernel, and return it.

    Parameters
    ----------
    name : str
    function, shapes : callable
        The implementation, whose annotations are the operator's schema, and one for tensors without values.
    keys : str
        The dispatch keys of its devices, with spaces between them; by default those of all.
    batch : callable, optional
        For ``vmap``.
    backward, setup_context : callable, optional
        The derivative.
    """
    full = f"regard::{name}"
    _LIBRARY.define(name + torch.library.infer_schema(unwrap(function), mutates_args=()))
    for key in keys.split():
        _LIBRARY.impl(name, function, key)
    # ``register_fake`` does the same, after a search of all modules for the file that called it.
    _LIBRARY.impl(name, shapes, "Meta")
    if batch is not None:
        torch.library.register_vmap(full, batch, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.regard, name)


def keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Set up no context: of an operator whose derivative raises."""
