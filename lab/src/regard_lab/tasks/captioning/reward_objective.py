"""Learning from rewards: a model draws targets, and those that earn more than others of the source get likelier.

Dimensions: B sources, K draws of each, T steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard_lab.data.batches import Batch
from regard_lab.generation.sampling import drawn
from regard_lab.models.base import END, PAD, EncoderDecoder
from regard_lab.training.losses import cross_entropy
from regard_lab.training.objectives import Loss, WriteTargets, shifted

#: What K targets of B sources, (B · K, T) with padding behind their end marks, earn, (B, K): of the sources' rows (B,).
Reward = Callable[[Tensor, Tensor], Tensor]


class EarnRewards(WriteTargets):
    """Write what earns rewards, by the gradient of their expectation (Williams 1992; Rennie 2017, arXiv 1612.00563).

    Of each source K targets y are drawn from the model. Each is compared with the mean of what the others earn (Luo
    2020, arXiv 2003.09971)::

        −1/N Σ_k (r_k − mean of r_j over j ≠ k) Σ_t log p(y_kt),  N symbols of all that were drawn

    p is the softmax of the logits divided by the temperature.

    What is logged is what the draws earn on average, negative.

    Parameters
    ----------
    reward : callable
        ``reward(written, rows)`` returns what targets earn.
    draws : int
        K, at least 2.
    longest : int
        T: symbols of a target at most, with the end mark.
    temperature : float, default 1.0
        Below 1, draws are closer to what a search finds.
    likelihood : float, default 0.0
        Weight of the loss of :class:`WriteTargets`, which is added where it is above 0.
    smoothing, guided, coverage
        Of that.
    """

    def __init__(
        self,
        reward: Reward,
        draws: int,
        longest: int,
        temperature: float = 1.0,
        likelihood: float = 0.0,
        *,
        smoothing: float = 0.0,
        guided: str = "",
        coverage: float = 0.0,
    ) -> None:
        super().__init__(smoothing=smoothing, guided=guided, coverage=coverage)
        self.reward, self.draws, self.longest = reward, draws, longest
        self.temperature, self.likelihood = temperature, likelihood

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert isinstance(model, EncoderDecoder)
        assert batch.rows is not None
        learning = model.training
        written = draw_targets(model.eval(), batch.source, batch.lengths, self.draws, self.longest, self.temperature)
        model.train(learning)
        earned = self.reward(written, batch.rows)  # (B, K)
        others = (earned.sum(1, keepdim=True) - earned) / (self.draws - 1)
        gain = (earned - others).to(batch.lengths.device, torch.float32).flatten()[:, None].expand(written.shape)
        features = model.features(batch.source, batch.lengths, shifted(written)) / self.temperature
        weight, bias = model.projection
        value, log_likelihood = cross_entropy(features, (weight, bias / self.temperature), written, weight=gain)
        if model.stochastic:
            value = value + model.surrogate(gain * log_likelihood, written != PAD)
        if self.likelihood:
            value = value + self.likelihood * super().loss(model, batch).value
        return Loss(value, -float(earned.mean()), int((written != PAD).sum()))


@torch.no_grad()
def draw_targets(
    model: EncoderDecoder, source: Tensor, lengths: Tensor, draws: int, longest: int, temperature: float = 1.0
) -> Tensor:
    """Return targets (B · K, T) drawn from a model, each with an end mark and padding behind it.

    Draws are those of torch's generator, and a model in evaluation mode drops nothing.

    Examples
    --------
    >>> from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
    >>> model = RecurrentEncoderDecoder(RecurrentConfig(sources=30, targets=41, encoder=8, decoder=8)).eval()
    >>> draw_targets(model, torch.tensor([[3, 4], [5, 0]]), torch.tensor([2, 1]), draws=3, longest=6).shape[0]
    6
    """
    memory = model.encode(source, lengths)
    state = model.start(memory, draws)
    last = torch.full((len(source), draws), END, device=source.device)
    going, written = torch.ones_like(last, dtype=torch.bool), []
    for step in range(longest):
        if step == longest - 1:
            written.append(torch.where(going, END, PAD))
            break
        logits, state = model.step(last, memory, state)
        logits = logits.float() / temperature
        logits[..., PAD] = -torch.inf
        last = drawn(logits.softmax(-1), torch.rand(last.shape, dtype=torch.float64, device=last.device))
        written.append(torch.where(going, last, PAD))
        going = going & (last != END)
        if not bool(going.any()):
            break
    return torch.stack(written, -1).flatten(0, 1)
