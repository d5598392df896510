"""Set and restore scores, normalizers and masks in the layers of a model."""

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

#: Attribute of a layer that holds its configured parts, and the name that the code of every attention layer uses.
_ATTRIBUTE, _INTERFACE = "regard_parts", "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class Parts:
    """The configured parts of a layer, which replace the model's own."""

    score: ScoreLike | None = None
    normalizer: NormalizerLike = "softmax"
    mask: Mask | None = None
    packed: bool | None = None

    @property
    def are_the_models(self) -> bool:
        """Whether the model's own parts are used."""
        return self.score is None and self.mask is None and self.normalizer == "softmax"

    def part_of_mask(self, query: Tensor, S: int, first_query: int, first_key: int) -> MaskLike | None:
        """Return the mask for a slice of queries and S keys that starts at these positions."""
        if self.mask is None or ((first_query, first_key) == (0, 0) and query.shape[2] == S):
            return self.mask
        B, H, L, _ = query.shape
        length = max(first_query + L, first_key + S)
        whole = Extent(B, H, length, length)
        return Submatrix(self.mask.bind(whole, query.device), whole, first_query, first_key)


_OWN = Parts()


def parts_of(module: nn.Module) -> Parts:
    """Return the parts of a layer."""
    found: Parts = module.__dict__.get(_ATTRIBUTE, _OWN)  # ten times faster than a missing attribute
    return found


class Configured:
    """Layers with configured parts, until :meth:`restore` or the end of a ``with`` block.

    Attributes
    ----------
    layers : dict of str to Module
        The layers by name.
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
        """Restore the layers' parts and the model's implementation."""
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
    """Set another score, normalizer or mask in a model's attention layers.

    This also sets the attention implementation to "regard". Omitted arguments keep their current values, so several
    calls can be combined.

    Parameters
    ----------
    model : PreTrainedModel
    score : str, Score or callable, optional
        See :func:`regard.attention`; it compares rows of a head's width.
    normalizer : str or Normalizer, optional
    mask : Mask, callable or Tensor, optional
        Combined with the model's own causal and padding mask. Positions are those in the whole sequence, including
        cached keys.
    packed : bool, optional
        Whether ``position_ids`` that restart at 0 denote packed sequences, which must not see each other. By default,
        sequences are separated if this is certain: not with a user-defined mask (B, 1, L, S), and not if a cache holds
        earlier positions.
    layers : iterable of int or str, optional
        Attention layers, as indices in module order, or as names of the layers or of modules that contain them. All by
        default.

    Returns
    -------
    Configured
        The layers. Its ``restore()``, or the end of a ``with`` block, undoes the changes.

    Raises
    ------
    ValueError
        If the model does not use transformers' attention interface, or has no layers of these names or indices.
    TypeError, ValueError
        If a part is invalid; see :func:`regard.attention`.

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
    found = attention_layers(model)
    if not found:
        expected = "be a transformers model that uses AttentionInterface"
        raise rejected("configure", "model", expected, type(model).__name__)
    chosen = found if layers is None else _chosen(found, list(layers))
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
    """Return a model's attention layers by name: the modules whose code uses transformers' attention interface.

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


def _chosen(available: dict[str, nn.Module], layers: list[int | str]) -> dict[str, nn.Module]:
    names = list(available)
    found: dict[str, nn.Module] = {}
    for each in layers:
        if isinstance(each, str):
            within = [name for name in names if name == each or name.startswith(f"{each}.")]
        else:
            within = [names[each]] if isinstance(each, int) and -len(names) <= each < len(names) else []
        if not within:
            expected = f"be indices below {len(names)} or names like {names[0]!r}"
            raise rejected("configure", "layers", expected, repr(each))
        found |= {name: available[name] for name in within}
    return found


def _check(layer: nn.Module, parts: Parts) -> None:
    """Raise if :func:`regard.attention` would reject the parts."""
    width = getattr(layer, "head_dim", 1)
    rows = torch.zeros(1, 1, 1, width if isinstance(width, int) else 1)
    if isinstance(parts.normalizer, str) or not isinstance(parts.normalizer, regard.normalizers.Normalizer):
        regard.explain(rows, rows, rows, normalizer=parts.normalizer)
    if parts.score is not None and (isinstance(parts.score, str) or not isinstance(parts.score, nn.Module)):
        regard.explain(rows, rows, rows, score=parts.score, normalizer=parts.normalizer)
