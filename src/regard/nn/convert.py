"""``convert``: replace torch's multi-head attention in a model, keeping its weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from regard._utils.errors import described, rejected
from regard.nn.heads.multihead import MultiheadAttention, disable_fast_path


def convert(model: nn.Module, *, dropped_weights: bool = False) -> Any:
    """Replace every ``torch.nn.MultiheadAttention`` in a model by :class:`~regard.nn.MultiheadAttention`, in place.

    The parameters are the same objects, so optimizers, tied weights and checkpoints stay valid. Training mode, device,
    hooks and user-set attributes are kept. A module that is used in several places stays one module. Subclasses of
    torch's module are not replaced, because they may compute something else. In evaluation, layers of torch that
    contain a replaced module, such as ``nn.TransformerEncoderLayer``, call it instead of their own fused path.

    Parameters
    ----------
    model : Module
        Changed in place, unless it is itself a ``torch.nn.MultiheadAttention``.
    dropped_weights : bool, default False
        Return attention weights after dropout, as torch does.

    Returns
    -------
    Module
        The model, or the replacement of a bare ``torch.nn.MultiheadAttention``.

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
    replacements: dict[nn.Module, MultiheadAttention] = {}
    for module in list(model.modules()):
        if type(module) is nn.MultiheadAttention:
            replacements[module] = _converted(module, dropped_weights)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in replacements:
                module._modules[name] = replacements[child]
    return replacements.get(model, model)


def _converted(old: nn.MultiheadAttention, dropped_weights: bool) -> MultiheadAttention:
    """Return a regard module with the parameters, buffers and state of torch's."""
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
    # Copy containers, so that later changes of one module do not affect the other.
    state = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(old).items()}
    vars(new).update(state)
    new._extends = old.bias_k is not None or old.add_zero_attn
    disable_fast_path(new)
    return new
