"""``convert``: a model of torch's multi-head attention becomes one of ours, weights and all."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from regard._utils.errors import described, rejected
from regard.nn.heads.multihead import MultiheadAttention, disable_fast_path


def convert(model: nn.Module, *, dropped_weights: bool = False) -> Any:
    """Replace every ``torch.nn.MultiheadAttention`` in a model by :class:`~regard.nn.MultiheadAttention`, in place.

    The parameters are the same objects, so optimizers, tied weights and checkpoints stay valid; training mode, device,
    hooks and attributes set from outside stay, too. A module that stands in several places stays one module.
    Subclasses of torch's module are left alone, as they may compute something else. Layers of torch that contain
    it, ``nn.TransformerEncoderLayer`` for one, then compute their attention by it in evaluation too, where they
    would otherwise take a fused path of their own.

    Parameters
    ----------
    model : Module
        It is changed; of a bare ``torch.nn.MultiheadAttention`` the replacement is returned instead.
    dropped_weights : bool, default False
        Return attention weights after dropout, as torch does.

    Returns
    -------
    Module
        The model.

    Raises
    ------
    TypeError
        If ``model`` is not a module.

    Examples
    --------
    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> x = torch.randn(3, 5, 16)
    >>> before = model(x)
    >>> type(regard.nn.convert(model).self_attn).__module__
    'regard.nn.heads.multihead'
    >>> torch.allclose(model(x), before, atol=1e-6)
    True
    """
    if not isinstance(model, nn.Module):
        raise rejected("convert", "model", "be a torch.nn.Module", described(model), TypeError)
    made: dict[nn.Module, MultiheadAttention] = {}
    for module in list(model.modules()):
        if type(module) is nn.MultiheadAttention:
            made[module] = _converted(module, dropped_weights)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in made:
                module._modules[name] = made[child]
    return made.get(model, model)


def _converted(old: nn.MultiheadAttention, dropped_weights: bool) -> MultiheadAttention:
    """Return our module with everything that torch's holds."""
    new = MultiheadAttention(
        old.embed_dim,
        old.num_heads,
        old.dropout,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device="meta",
        dropped_weights=dropped_weights,
    )
    # Containers are copied, so that what is done to one module later is not done to the other.
    held = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(old).items()}
    vars(new).update(held)
    new._extends = old.bias_k is not None or old.add_zero_attn
    disable_fast_path(new)
    return new
