"""The base class of all layers. To ``torch.fx`` they are leaf modules."""

from __future__ import annotations

from torch import nn

#: What layers report as their ``__module__``: ``torch.fx`` treats a module as a leaf if this begins with ``torch.nn``.
_LEAF = "torch.nn (a leaf to torch.fx)"


class Layer(nn.Module):
    """A module that ``torch.fx.symbolic_trace`` records as one ``call_module`` node, like the layers of ``torch.nn``.

    Tracing into a layer would fail: a ``Proxy`` has no shape to check, nor to choose an engine by. fx looks at
    ``module.__module__``, which instances override here. The class keeps its own, which pickle and documentation use.
    A call costs nothing extra.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__module__ = _LEAF
