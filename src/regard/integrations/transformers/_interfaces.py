"""Gather the private names of transformers that are used, each with its reason."""

from __future__ import annotations

from typing import Any

try:
    #: What a model's outputs are collected in while it runs: not every model tells its layers what was asked for.
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # a version without it tells its layers
    _active_collector: Any = None  # type: ignore[no-redef]

#: The method of a model that runs its beam search, whose public caller does not say which beams its answers came by.
BEAM_SEARCH = "_beam_search"


def collects_weights() -> bool:
    """Whether the call that runs was asked for ``output_attentions``."""
    collected = None if _active_collector is None else _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)
