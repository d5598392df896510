"""Shared code of all layers: the base class, input checks, masks from lengths, and parts that hold parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import TensorOf, floats, size
from regard._utils.errors import rejected, shape
from regard._utils.keywords import name_unexpected
from regard._utils.part import Part
from regard.masks import Mask, MaskLike
from regard.masks.matrix import is_matrix

# The base class of layers, which are leaf modules to ``torch.fx`` -----------------------------------------------------


#: ``__module__`` of layer instances: ``torch.fx`` treats a module as a leaf if this begins with ``torch.nn``.
_LEAF = "torch.nn (a leaf to torch.fx)"


class Layer(nn.Module):
    """A module that ``torch.fx.symbolic_trace`` records as one ``call_module`` node, like the layers of ``torch.nn``.

    Tracing into a layer would fail: a ``Proxy`` has no shape to check or to choose an engine by. fx reads
    ``module.__module__``, which instances override here. The class keeps its own, for pickle and documentation.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_unexpected(cls)

    def __init__(self) -> None:
        super().__init__()
        self.__module__ = _LEAF


# Inputs and masks of a call -------------------------------------------------------------------------------------------


def sequences(layer: object, argument: str, value: Any, width: int | None = None) -> Tensor:
    """Check that ``value`` is a float tensor (B, N, E), of this width if given, and return it."""
    return floats(layer, argument, value, "B", "N", "E" if width is None else width)


def combined_mask(layer: object, valid_lens: Any, attn_mask: MaskLike | None) -> Mask | None:
    """Combine lengths (B,) or (B, L) with a mask or tensor (L, S), (B, L, S) or (B, H, L, S).

    Parameters
    ----------
    layer : Module
        For error messages.
    valid_lens : Tensor of int, or None
        Number of valid keys per sequence, or per query.
    attn_mask : Tensor, Mask, callable or None
        See :func:`regard.attention`; three dimensions are (B, L, S).
    """
    mask: Mask | None = None
    if valid_lens is not None:
        mask = masks.padding(TensorOf(("B",), ("B", "L"), integer=True)(layer, "valid_lens", valid_lens))
    if attn_mask is not None:
        if is_matrix(attn_mask) and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        other = masks.as_mask(attn_mask)
        mask = other if mask is None else mask & other
    return mask


def attention_inputs(layer: object, query: Any, key: Any, value: Any, valid_lens: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, 1, N, E) of one head; keys default to the queries, values to the keys.

    Widths must match the layer's ``query_size`` and ``key_size``, if it has them. In self-attention, queries and keys
    share their padding; it is zeroed so that its contents cannot affect outputs or gradients.
    """
    query = sequences(layer, "query", query, getattr(layer, "query_size", None))
    keys = sequences(layer, "key", query if key is None else key, getattr(layer, "key_size", None))
    values = keys if value is None else sequences(layer, "value", value)
    if isinstance(valid_lens, Tensor):
        B, L, _ = query.shape
        TensorOf((B,), (B, L), integer=True)(layer, "valid_lens", valid_lens)
        if keys is query and L:
            lengths = valid_lens if valid_lens.dim() == 1 else valid_lens.amax(1)
            clear = zero_padding(query, lengths)
            query, keys, values = clear, clear, clear if values is query else values
    return query.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1)


def zero_padding(sequences: Tensor, lengths: Tensor | None) -> Tensor:
    """Zero sequences (B, N, E) beyond their lengths (B,), even if they hold NaN there."""
    if lengths is None:
        return sequences
    real = torch.arange(sequences.shape[1], device=sequences.device) < lengths.to(sequences.device).unsqueeze(1)
    return torch.where(real.unsqueeze(2), sequences, 0.0)


def parameter(*sizes: int, device: Any = None, dtype: Any = None) -> nn.Parameter:
    """Return an uninitialized parameter of this shape, to be filled by ``reset_parameters``."""
    return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))


def head_sizes(layer: object, embed_dim: Any, num_heads: Any, head_dim: Any = None) -> tuple[int, int, int]:
    """Return E, H and D; the width D of a head is by default E/H, which must then be an integer."""
    E, H = size(layer, "embed_dim", embed_dim), size(layer, "num_heads", num_heads)
    if head_dim is None and E % H:
        raise rejected(type(layer).__name__, "num_heads", f"divide embed_dim {E}", H)
    return E, H, E // H if head_dim is None else size(layer, "head_dim", head_dim)


def reset_children(layer: nn.Module) -> None:
    """Re-initialize all submodules of a layer, each by its own rule."""
    for each in layer.children():
        reset: Any = each.reset_parameters
        reset()


def draw_linear(*modules: nn.Module | None) -> None:
    """Draw the weights of all linear layers in these modules by Glorot's rule, and set their biases to 0."""
    for module in modules:
        for each in () if module is None else module.modules():
            if isinstance(each, nn.Linear):
                nn.init.xavier_uniform_(each.weight)
                if each.bias is not None:
                    nn.init.zeros_(each.bias)


# Scores and normalizers with tensors, which become parameters and buffers of their layer ------------------------------


class PartModule(nn.Module):
    """A module that wraps a score or normalizer with tensors, so that these train, save, move and copy with its layer.

    Parameters of the part are registered under the names of its attributes, other tensors as buffers, and its modules
    as submodules. The wrapper does not keep the original part, whose tensors could become stale.

    Parameters
    ----------
    layer : Module
        For error messages.
    argument : str
        The layer's name for the part.
    part : Part

    Raises
    ------
    ValueError
        If a tensor of the part cannot be registered.
    """

    def __init__(self, layer: nn.Module, argument: str, part: Part) -> None:
        super().__init__()
        who = type(layer).__name__
        for path in _unlisted(part):
            expected = "hold tensors and modules as attributes or in tuples"
            raise rejected(who, argument, expected, f"the container {type(part).__name__}.{path}")
        self._paths = []
        for path, tensor in part.named_tensors():
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                expected = "hold nn.Parameters and tensors that require no gradient"
                raise rejected(who, argument, expected, f"{type(part).__name__}.{path} {shape(tensor)}")
            module, name = self._owner(path)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module.register_buffer(name, tensor)
            self._paths.append(path)
        for path, inner in _modules_of(part):
            module, name = self._owner(path)
            module.add_module(name, inner)
        self._template = part.map_tensors(lambda tensor: torch.empty_like(tensor, device="meta", requires_grad=False))

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        """Return the module that owns a dotted path, creating it if needed, and the name in it."""
        module: nn.Module = self
        *outer, name = path.split(".")
        for each in outer:
            if each not in module._modules:
                module.add_module(each, nn.Module())
            module = module.get_submodule(each)
        return module, name

    def part(self) -> Any:
        """Return the part with the current parameters and buffers."""
        return self._template.with_tensors([self._tensor(path) for path in self._paths])

    def _tensor(self, path: str) -> Tensor:
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name)
        return found

    def __repr__(self) -> str:
        return repr(self._template)


class PartLayer(Layer):
    """A layer whose attributes may be scores and normalizers with tensors; these are wrapped in modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), PartModule):
            delattr(self, name)  # torch only lets a module replace a module
        if isinstance(value, Part) and (value.tensors() or any(_modules_of(value)) or any(_unlisted(value))):
            value = PartModule(self, name, value)
        super().__setattr__(name, value)


def resolve_part(part: Any) -> Any:
    """Return an attribute of a :class:`PartLayer` in the form that :func:`regard.attention` takes."""
    return part.part() if isinstance(part, PartModule) else part


def non_default(layer: nn.Module, name: str, usual: object) -> list[str]:
    """Format an attribute for ``extra_repr``; empty for the default, and for a module, which torch prints itself."""
    value = getattr(layer, name)
    return [] if value == usual or isinstance(value, nn.Module) else [f"{name}={value!r}"]


def _modules_of(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a part holds, with their paths."""
    for path, item in _items(value):
        if isinstance(item, nn.Module):
            yield path, item
        elif isinstance(item, (Part, tuple)):
            yield from ((f"{path}.{inner}", module) for inner, module in _modules_of(item))


def _unlisted(value: Any) -> Iterator[str]:
    """Yield the paths of containers in a part whose tensors :meth:`Part.tensors` does not find."""
    for path, item in _items(value):
        if isinstance(item, (Part, tuple)):
            yield from (f"{path}.{inner}" for inner in _unlisted(item))
        elif isinstance(item, (list, set, dict)):
            inside = item.values() if isinstance(item, dict) else item
            if any(isinstance(each, (Tensor, nn.Module, Part)) for each in inside):
                yield path


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Part):
        yield from vars(value).items()
    elif isinstance(value, tuple):
        yield from ((str(i), item) for i, item in enumerate(value))
