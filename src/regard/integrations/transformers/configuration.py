"""Other scores, normalizers and masks in a model's layers, one by one, and back."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

import regard
from regard._utils.errors import described, rejected
from regard.masks import Extent, Mask, MaskLike, Submatrix, as_mask
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike

#: Where a layer keeps the parts that it was configured with, and what the code of every attention layer names.
_ATTRIBUTE, _INTERFACE = "regard_parts", "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class Parts:
    """What a layer has in place of its model's own."""

    score: ScoreLike | None = None
    normalizer: NormalizerLike = "softmax"
    mask: Mask | None = None
    packed: bool | None = None

    @property
    def are_the_models(self) -> bool:
        """Whether nothing is in place of the model's own."""
        return self.score is None and self.mask is None and self.normalizer == "softmax"

    def part_of_mask(self, query: Tensor, S: int, first_query: int, first_key: int) -> MaskLike | None:
        """Return the mask of these queries and S keys, where so many came before the first of each."""
        if self.mask is None or ((first_query, first_key) == (0, 0) and query.shape[2] == S):
            return self.mask
        B, H, L, _ = query.shape
        length = max(first_query + L, first_key + S)
        whole = Extent(B, H, length, length)
        return Submatrix(self.mask.bind(whole, query.device), whole, first_query, first_key)


_OWN = Parts()


def parts_of(module: nn.Module) -> Parts:
    """Return the parts of a layer."""
    found: Parts = module.__dict__.get(_ATTRIBUTE, _OWN)  # in a tenth of the time that a missing attribute takes
    return found


class Configured:
    """Layers with other parts, until :meth:`restore` or the end of a ``with`` block.

    Attributes
    ----------
    layers : dict of str to Module
        The layers, by their names in the model.
    """

    def __init__(self, model: Any, layers: dict[str, nn.Module], parts: dict[str, Parts]) -> None:
        self.layers = layers
        self._model, self._implementation = model, model.config._attn_implementation
        self._before = {name: vars(layer).get(_ATTRIBUTE) for name, layer in layers.items()}
        for name, layer in layers.items():
            setattr(layer, _ATTRIBUTE, parts[name])
        if self._implementation != "regard":
            model.set_attn_implementation("regard")

    def restore(self) -> None:
        """Give the layers the parts, and the model the implementation, that they had before."""
        for name, layer in self.layers.items():
            if self._before[name] is None:
                vars(layer).pop(_ATTRIBUTE, None)
            else:
                setattr(layer, _ATTRIBUTE, self._before[name])
        if self._model.config._attn_implementation != self._implementation:
            self._model.set_attn_implementation(self._implementation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Configured({', '.join(self.layers)})"


def configure(
    model: Any,
    *,
    score: ScoreLike | None = None,
    normalizer: NormalizerLike | None = None,
    mask: MaskLike | None = None,
    packed: bool | None = None,
    layers: Iterable[int | str] | None = None,
) -> Configured:
    """Give a model's attention layers another score, normalizer or mask.

    The model runs on "regard" from then on. What is not given stays as it is; calls add up.

    Parameters
    ----------
    model : PreTrainedModel
    score : str, Score or callable, optional
        As :func:`regard.attention` takes it, for rows as wide as a head.
    normalizer : str or Normalizer, optional
    mask : Mask, callable or Tensor, optional
        Shown is what it and the model's own mask show, which knows of causality and padding. It speaks of positions in
        the whole sequence, also where keys are in a cache.
    packed : bool, optional
        Whether ``position_ids`` that start again from 0 are those of sequences packed into one row, which may not see
        each other. Without it they are kept apart where that is certain: not where there is a mask (B, 1, L, S) of your
        own, and not where positions go on behind a cache.
    layers : iterable of int or str, optional
        Which attention layers: their numbers in the order of the model's modules, or names of modules that they are or
        that hold them. All by default.

    Returns
    -------
    Configured
        The layers; its ``restore()`` takes everything back, and so does the end of a ``with`` block.

    Raises
    ------
    ValueError
        If the model has no attention that goes through transformers' interface, or no such layers.
    TypeError, ValueError
        If a part is wrong, as :func:`regard.attention` says.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from regard import masks
    >>> from regard.integrations.transformers import configure, register
    >>> register()
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with configure(model, normalizer="entmax15", mask=masks.window(1, 0), layers=[1]) as configured:
    ...     found = model(torch.tensor([[3, 1, 4]]), output_attentions=True).attentions
    >>> configured, int((found[1][0, 0] > 0).sum(-1).max())
    (Configured(model.layers.1.self_attn), 2)
    """
    known = attention_layers(model)
    if not known:
        expected = "be a model of transformers whose attention goes through its AttentionInterface"
        raise rejected("configure", "model", expected, type(model).__name__)
    chosen = known if layers is None else _chosen(known, list(layers))
    if not (packed is None or isinstance(packed, bool)):
        raise rejected("configure", "packed", "be a bool or None", described(packed), TypeError)
    given = {
        "score": score,
        "normalizer": normalizer,
        "mask": None if mask is None else as_mask(mask, "configure"),
        "packed": packed,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    parts = {name: replace(parts_of(layer), **changes) for name, layer in chosen.items()}
    for name, layer in chosen.items():
        _check(layer, parts[name])
    return Configured(model, chosen, parts)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's attention layers by name: the modules whose code asks transformers' interface.

    Examples
    --------
    >>> from transformers import BloomConfig, BloomModel, GPT2Config, GPT2Model
    >>> sizes = {"vocab_size": 20, "hidden_size": 8, "n_head": 2, "n_layer": 2}
    >>> list(attention_layers(GPT2Model(GPT2Config(**sizes)))), list(attention_layers(BloomModel(BloomConfig(**sizes))))
    (['h.0.attn', 'h.1.attn'], [])
    """
    return {name: module for name, module in model.named_modules() if _INTERFACE in _names_in(type(module).forward)}


def _names_in(function: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def _chosen(known: dict[str, nn.Module], layers: list[int | str]) -> dict[str, nn.Module]:
    names = list(known)
    found: dict[str, nn.Module] = {}
    for each in layers:
        if isinstance(each, str):
            within = [name for name in names if name == each or name.startswith(f"{each}.")]
        else:
            within = [names[each]] if isinstance(each, int) and -len(names) <= each < len(names) else []
        if not within:
            expected = f"be numbers below {len(names)} or names such as {names[0]!r}"
            raise rejected("configure", "layers", expected, repr(each))
        found |= {name: known[name] for name in within}
    return found


def _check(layer: nn.Module, parts: Parts) -> None:
    """Raise where :func:`regard.attention` would not take the parts."""
    width = getattr(layer, "head_dim", 1)
    rows = torch.zeros(1, 1, 1, width if isinstance(width, int) else 1)
    if isinstance(parts.normalizer, str) or not isinstance(parts.normalizer, regard.normalizers.Normalizer):
        regard.explain(rows, rows, rows, normalizer=parts.normalizer)
    if parts.score is not None and (isinstance(parts.score, str) or not isinstance(parts.score, nn.Module)):
        regard.explain(rows, rows, rows, score=parts.score, normalizer=parts.normalizer)
