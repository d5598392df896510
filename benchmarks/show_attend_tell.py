"""A plain PyTorch captioner as Xu 2015 has it, the way tutorials write it: what ours is timed against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard_lab.data import Batch


class ShowAttendTell(nn.Module):
    """An LSTM cell that attends before each step, over a loop of steps in which shorter captions drop out."""

    def __init__(self, features: int, vocabulary: int, embedding: int, hidden: int, attention: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.of_features = nn.Linear(features, attention)
        self.of_hidden = nn.Linear(hidden, attention)
        self.score = nn.Linear(attention, 1)
        self.hidden, self.cell = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.gate = nn.Linear(hidden, features)
        self.step = nn.LSTMCell(embedding + features, hidden)
        self.dropout = nn.Dropout(0.3)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, grid: Tensor, captions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, T, N) and weights (B, T, S) for grids (B, S, F) and captions (B, T), longest first."""
        B, T = captions.shape
        mean = grid.mean(1)
        hidden, cell = self.hidden(mean), self.cell(mean)
        logits = grid.new_zeros(B, T, self.output.out_features)
        maps = grid.new_zeros(B, T, grid.shape[1])
        embedded = self.embedding(captions)
        for t in range(T):
            left = int((lengths > t).sum())
            some = grid[:left]
            scores = self.score(torch.relu(self.of_features(some) + self.of_hidden(hidden[:left])[:, None]))
            weights = scores.squeeze(2).softmax(1)
            context = torch.sigmoid(self.gate(hidden[:left])) * (some * weights[..., None]).sum(1)
            hidden, cell = self.step(torch.cat([embedded[:left, t], context], 1), (hidden[:left], cell[:left]))
            logits[:left, t] = self.output(self.dropout(hidden))
            maps[:left, t] = weights
        return logits, maps


def step(model: ShowAttendTell, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Learn from a batch of images with several captions each: every caption has its image."""
    each = len(batch.target) // len(batch.source)
    real = (batch.target != 0).sum(1)
    lengths, order = real[real > 0].sort(descending=True)
    target = batch.target[real > 0][order][:, : int(lengths[0])]
    grid = batch.source.repeat_interleave(each, 0)[real > 0][order]
    before = F.pad(target, (1, 0), value=1)[:, :-1]
    optimizer.zero_grad()
    logits, maps = model(grid, before, lengths)
    shown = target != 0
    loss = F.cross_entropy(logits[shown], target[shown], label_smoothing=0.1)
    loss = loss + 0.5 * (1 - (maps * shown[..., None]).sum(1)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
