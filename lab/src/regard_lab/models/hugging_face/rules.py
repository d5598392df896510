"""How the tensors of a Hugging Face folder stand for the parameters of our models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard_lab.models.hugging_face.keys import Described
from regard_lab.models.vision_transformer import VisionTransformer, VisionTransformerConfig


@dataclass(frozen=True)
class Rule:
    """One parameter of ours, and the tensors of theirs that it is made of.

    Attributes
    ----------
    ours : str
    theirs : tuple of str
        One, or several that stand below each other in ours, of ``sizes`` rows.
    sizes : tuple of int
        The rows of each, where there are several.
    transposed : bool
        Whether theirs is (inputs, outputs).
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return theirs of ours."""
        parts = tensor.split(self.sizes) if self.sizes else (tensor,)
        return tuple(part.t() if self.transposed else part for part in parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ours of theirs."""
        turned = [part.t() if self.transposed else part for part in parts]
        return turned[0] if len(turned) == 1 else torch.cat(turned)


def same(names: Mapping[str, str], ends: Sequence[str] = ("weight", "bias"), **options: Any) -> Iterator[Rule]:
    """Yield the rules of modules, ours by theirs, that have these parameters."""
    for ours, theirs in names.items():
        for end in ends:
            yield Rule(f"{ours}.{end}", (f"{theirs}.{end}",), **options)


@dataclass(frozen=True)
class Family:
    """The models of one shape.

    Attributes
    ----------
    types : tuple of str
        What ``model_type`` may be.
    trunk : str
        What the names of tensors begin with where there is a head; they begin without it where there is none.
    read : callable
        ``read(described, names)`` returns our config of one that has every key of its family; ``names`` are those of
        the tensors, without the trunk's prefix. It raises ValueError, whose text says what the config must be, for what
        our models are not.
    write : callable
        ``write(config)`` returns the described config, or None where the family has no such model.
    rules : callable
        ``rules(config)`` yields the rules; theirs are names without the trunk's prefix, or whole names after "/".
    ignored : tuple of str
        Ends of names of tensors that hold nothing of their own.
    model : type
    """

    types: tuple[str, ...]
    trunk: str
    read: Callable[[Described, set[str]], Any]
    write: Callable[[Any], Described | None]
    rules: Callable[[Any], Iterator[Rule]]
    model: type[DecoderLM] | type[EncoderLM] | type[VisionTransformer]
    ignored: tuple[str, ...] = ()


def kept(rules: Iterator[Rule], model: nn.Module) -> list[Rule]:
    """Return the rules whose parameters a model has."""
    names = set(model.state_dict())
    return [rule for rule in rules if rule.ours in names]


class BrokenConfigError(ValueError):
    """A config of which nothing can make a model that computes, transformers neither."""


#: Names of nonlinearities, theirs and ours; the first of theirs is the one that is written.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip


def activation_read(described: Described, key: str = "hidden_act") -> str:
    """Return our name of the nonlinearity that a key names."""
    name = described[key]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"name one of the activations {', '.join(_ACTIVATIONS)} as {key}, got {name!r}")
    return _ACTIVATIONS[name]


def activation_written(name: str) -> str:
    """Return their name of a nonlinearity."""
    return next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == name)


def is_plain(config: DecoderLMConfig | EncoderLMConfig | VisionTransformerConfig) -> bool:
    """Return whether attention is what every family has: the softmax of scaled dot products."""
    return config.score == "scaled_dot" and config.normalizer == "softmax"
