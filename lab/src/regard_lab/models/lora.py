"""LoRA: low-rank adapters for frozen linear layers (Hu 2021).

Dimensions: I inputs, O outputs, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.constraints import probability, size
from regard._utils.errors import rejected

#: Default targets: all linear layers of a language model's blocks (Dettmers 2023, arXiv 2305.14314).
TARGETS = ("attention.qkv", "attention.out", "feed_forward.gate", "feed_forward.up", "feed_forward.down")


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank adapter: ``y = W x + b + α/r · B A drop(x)`` (Hu 2021, arXiv 2106.09685).

    W and b are frozen. A is random and B is 0, so that the adapter initially changes nothing.

    Parameters
    ----------
    layer : nn.Linear
        The layer to adapt; its parameters are shared, not copied.
    rank : int, default 8
        r, at most min(I, O).
    alpha : float, default 16.0
        α.
    dropout : float, default 0.0
        Dropout probability of the adapter's input.

    Raises
    ------
    ValueError, TypeError
        If an argument is out of its range.

    Examples
    --------
    >>> layer = nn.Linear(6, 4)
    >>> adapted, x = LoRALinear(layer, rank=2), torch.randn(3, 6)
    >>> torch.equal(adapted(x), layer(x)), [each.shape for each in (adapted.A, adapted.B)]
    (True, [torch.Size([2, 6]), torch.Size([4, 2])])
    """

    def __init__(self, layer: nn.Linear, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        most = min(self.in_features, self.out_features)
        if size(self, "rank", rank) > most:
            raise rejected("LoRALinear", "rank", f"be at most {most}, the rank of the matrix", rank)
        if not 0 < alpha < math.inf:
            raise rejected("LoRALinear", "alpha", "be above 0 and finite", alpha)
        self.weight, self.bias = layer.weight, layer.bias
        for each in (self.weight, self.bias):
            if each is not None:
                each.requires_grad_(False)
        self.rank, self.scale, self.dropout = rank, alpha / rank, probability(self, "dropout", dropout)
        self.A = nn.Parameter(self.weight.new_empty(rank, self.in_features))
        self.B = nn.Parameter(self.weight.new_zeros(self.out_features, rank))
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Reinitialize A like torch's linear layers, and set B to 0."""
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        nn.init.zeros_(self.B)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., O) of (..., I)."""
        read = F.dropout(x, self.dropout) if self.dropout and self.training else x
        return super().forward(x) + self.scale * F.linear(F.linear(read, self.A), self.B)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return an equivalent linear layer with the weight ``W + α/r · B A``."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        added = self.scale * (self.B.double() @ self.A.double())
        layer.weight = nn.Parameter((self.weight.double() + added).to(self.weight.dtype))
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone())
        return layer.train(self.training)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.scale * self.rank:g}"


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
    *,
    dropout: float = 0.0,
) -> list[str]:
    """Add low-rank adapters to a model's linear layers, and freeze all other parameters.

    Parameters
    ----------
    model : Module
        Modified in place.
    rank, alpha, dropout
        As in :class:`LoRALinear`; smaller layers get a smaller rank.
    targets : sequence of str
        Suffixes of layer names, such as ``"attention.qkv"``.

    Returns
    -------
    list of str
        The names of the layers.

    Raises
    ------
    ValueError
        If there is no such layer, or the model already has adapters.

    Examples
    --------
    >>> from regard_lab.models import EncoderLM, EncoderLMConfig
    >>> model = EncoderLM(EncoderLMConfig(50, width=16, layers=1))
    >>> add_lora(model, rank=2, targets=["attention.qkv"])
    ['blocks.0.attention.qkv']
    >>> sum(each.numel() for each in model.parameters() if each.requires_grad)  # 2 · (16 + 48)
    128
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if any(isinstance(module, LoRALinear) for _, module in layers):
        raise rejected("add_lora", "model", "have no adapters yet", "one with adapters")
    chosen = [(name, module) for name, module in layers if f".{name}".endswith(tuple(f".{each}" for each in targets))]
    if not layers:
        raise rejected("add_lora", "model", "have linear layers for adapters", "none")
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name, _ in layers})
        raise rejected("add_lora", "targets", f"name linear layers, such as {', '.join(known[:8])}", list(targets))
    model.requires_grad_(False)
    for name, layer in chosen:
        least = min(rank, layer.in_features, layer.out_features)
        _replace(model, name, LoRALinear(layer, least, alpha * least / rank, dropout))
    return [name for name, _ in chosen]


def merge_lora(model: nn.Module) -> None:
    """Merge adapters into the linear layers, and unfreeze all parameters."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            _replace(model, name, module.merged())
    model.requires_grad_(True)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    inside, _, last = name.rpartition(".")
    setattr(model.get_submodule(inside), last, layer)
