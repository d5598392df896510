"""The private names of transformers that regard uses, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache, wraps
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

try:
    #: The collector of a running model's outputs: not every model passes ``output_attentions`` to its layers.
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # older versions pass it to layers
    _active_collector: Any = None  # type: ignore[no-redef]

#: The beam search method of a model; its public caller does not return the beam indices.
BEAM_SEARCH = "_beam_search"


def collects_weights() -> bool:
    """Whether the running call requests ``output_attentions``."""
    collected = None if _active_collector is None else _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


class _Table(dict[str, type[nn.Module]]):
    """A model's table of attention layer classes by implementation, with an error that explains missing entries."""

    def __missing__(self, name: str) -> NoReturn:
        classes = ", ".join(sorted({f"'{each}'" for each in self}))
        raise ValueError(
            f"attn_implementation={name!r} cannot run {next(iter(self.values())).__name__}, because its model has "
            f"a separate layer class per implementation; use one of {classes}. To set it for this part of the model "
            "only, pass a dict such as attn_implementation={'vision_config': 'eager'}."
        )


def explain_missing_layers(name: str) -> None:
    """Make models that choose a layer class by implementation raise a clear error instead of a ``KeyError``.

    Every model's constructor checks the implementation before it creates layers. The patched check wraps the tables of
    layer classes, which are globals of the model's module.
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
    """Whether models of a configuration take bool masks, as for "sdpa"; models without "sdpa" take float masks."""
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
