"""A recurrent encoder–decoder with attention in every classic wiring: reads one sequence, writes another.

Dimensions: B batch, S source steps (keys), D embedding, R encoder width for each direction, E width of its states (2R,
or R in one direction).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard.nn._base import cleared
from regard_lab.models.recurrent_cells import CELLS, pick_rows, reset_cells
from regard_lab.models.recurrent_config import PRESETS, RecurrentConfig
from regard_lab.models.recurrent_decoder import RecurrentDecoder
from regard_lab.models.recurrent_state import Memory, State

__all__ = ["PRESETS", "Memory", "RecurrentConfig", "RecurrentEncoderDecoder", "State"]


class RecurrentEncoderDecoder(RecurrentDecoder):
    """Recurrent layers read the source; others write, attending to what was read, as in :class:`RecurrentDecoder`.

    Padding never changes a result: the backward layers start at each sequence's own last symbol. In wiring "encoder",
    steps after the source's last are given its last row.

    Parameters
    ----------
    config : RecurrentConfig

    Examples
    --------
    >>> model = RecurrentEncoderDecoder(RecurrentConfig(sources=30, targets=41))
    >>> source, lengths = torch.tensor([[2, 3, 4], [5, 6, 0]]), torch.tensor([3, 2])
    >>> model(source, lengths, target=torch.tensor([[1, 7, 8, 9], [1, 7, 0, 0]])).shape
    torch.Size([2, 4, 41])
    """

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig) -> None:
        D, R = config.embedding, config.encoder
        E, cell = R * (1 + config.bidirectional), CELLS[config.cell]
        super().__init__(config, E)
        self.source_embedding = None if config.tied == "all" else nn.Embedding(config.sources, D)
        inputs = [D, *[E] * (config.encoder_layers - 1)]
        self.onward = nn.ModuleList([cell(width, R, batch_first=True) for width in inputs])
        self.backward = nn.ModuleList([cell(width, R, batch_first=True) for width in inputs * config.bidirectional])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, those of the encoder as those of the decoder."""
        for rnn in (*self.onward, *self.backward):
            reset_cells(rnn, self.config.cell)
        if self.source_embedding is not None:
            nn.init.normal_(self.source_embedding.weight, std=0.7)
        super().reset_parameters()

    def _encode(self, source: Tensor, lengths: Tensor, weights: bool = False) -> Memory:
        if self.config.attention == "location" and source.shape[1] > self.config.longest:
            expected = f"have at most {self.config.longest} symbols, the config's longest"
            raise rejected(type(self).__name__, "source", expected, source.shape[1])
        last = lengths[:, None] - 1  # (B, 1)
        steps = torch.arange(source.shape[1], device=source.device)
        turned = torch.where(steps <= last, last - steps, steps)  # (B, S), real steps in reverse order
        # What is cleared can be anything: NaN would come back through the gradients of the recurrences.
        read = self._target_inputs if self.source_embedding is None else self.source_embedding
        states = cleared(read(source), lengths)  # (B, S, D)
        for number, onward in enumerate(self.onward):
            states = self.dropout(states)
            made, _ = onward(states)  # (B, S, R)
            ends = pick_rows(made, last)  # (B, 1, R)
            if self.config.bidirectional:
                read, _ = self.backward[number](pick_rows(states, turned))  # (B, S, R)
                ends = torch.cat([ends, pick_rows(read, last)], -1)  # (B, 1, E)
                made = torch.cat([made, pick_rows(read, turned)], -1)  # (B, S, E)
            states = made
        return self._remember(states, ends.squeeze(1), lengths, weights=weights)
