"""The Transformer encoder–decoder: reads one sequence, writes another, with attention alone.

Dimensions: B batch, S source steps, E width.
"""

from __future__ import annotations

from torch import Tensor, nn

from regard_lab.models.transformer_config import PRESETS, TransformerConfig
from regard_lab.models.transformer_decoder import Memory, State, TransformerSequenceDecoder

__all__ = ["PRESETS", "Memory", "State", "TransformerConfig", "TransformerEncoderDecoder"]


class TransformerEncoderDecoder(TransformerSequenceDecoder):
    """A stack of self-attention reads the source; another writes, attending to what was read (Vaswani 2017).

    ::

        x = √E · embedding + position
        encoder layer    x ← x + MHA(x, x, x)        x ← x + W₂ φ(W₁ x)

    The decoder is that of :class:`TransformerSequenceDecoder`. Padding never changes a result.

    Parameters
    ----------
    config : TransformerConfig

    Examples
    --------
    >>> import torch
    >>> config = TransformerConfig(sources=30, targets=41, width=16, heads=4, feedforward=32)
    >>> model = TransformerEncoderDecoder(config)
    >>> source, lengths = torch.tensor([[2, 3, 4], [5, 6, 0]]), torch.tensor([3, 2])
    >>> model(source, lengths, target=torch.tensor([[1, 7, 8, 9], [1, 7, 0, 0]])).shape
    torch.Size([2, 4, 41])
    >>> model.maps[:2]
    ('layer 1 head 1', 'layer 1 head 2')
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.source_embedding = None if config.tied == "all" else nn.Embedding(config.sources, config.width)
        self.source_positions = self._positions()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, those of the sources' embeddings as those of the targets'."""
        super().reset_parameters()
        self._draw_rows(self.source_embedding)
        self._draw_rows(self.source_positions)

    def _enter(self, source: Tensor, lengths: Tensor | None) -> Tensor:
        embedding = self.target_embedding if self.source_embedding is None else self.source_embedding
        return self._embed(source, embedding, self.source_positions, 0, lengths)
