"""Private names of transformers that are used, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache, wraps
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

# Gather the private names of transformers that are used, each with its reason -----------------------------------------


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


class _Table(dict[str, type[nn.Module]]):
    """A model's table of attention layers, one class for each implementation, that explains what it does not have."""

    def __missing__(self, name: str) -> NoReturn:
        classes = ", ".join(sorted({f"'{known}'" for known in self}))
        raise ValueError(
            f"attn_implementation={name!r} cannot run {next(iter(self.values())).__name__}, whose model has "
            f"a layer class of its own for each implementation; use one of {classes}, for this part of a model alone "
            "by a dict such as attn_implementation={'vision_config': 'eager'}."
        )


def explain_missing_layers(name: str) -> None:
    """Let models that choose a layer class by the implementation's name say so, and not fail with a ``KeyError``.

    The constructor of every model checks the implementation before it makes layers: that is where their tables, which
    are globals of the model's module, are found.
    """
    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "names"):
        original.names.add(name)
        return

    @wraps(original)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention in names:
            module = sys.modules[type(self).__module__]
            for key, value in list(vars(module).items()):
                if type(value) is dict and "eager" in value and all(map(_is_layer, value.values())):
                    setattr(module, key, _Table(value))
        return original(self, requested_attention, *args, **kwargs)

    names = {name}
    checked.names = names  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


def takes_bools(config: Any) -> bool:
    """Whether models of a configuration take masks of bools, as for "sdpa"; those that do not know it take numbers."""
    kind: Any = type(config)
    return _supports_sdpa(kind)


@lru_cache(1024)
def _supports_sdpa(kind: Any) -> bool:
    models = [cls for cls in _subclasses(PreTrainedModel) if cls.config_class is kind]
    return not models or any(cls._supports_sdpa for cls in models)


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


# How models of transformers generate ----------------------------------------------------------------------------------


def beam_search_name(mixin: type) -> str | None:
    """Return the name of the method that runs a beam search and says which beams its answers came by, if there is one.

    Examples
    --------
    >>> from transformers.generation import GenerationMixin
    >>> callable(getattr(GenerationMixin, beam_search_name(GenerationMixin)))
    True
    """
    return BEAM_SEARCH if BEAM_SEARCH in vars(mixin) else None
