"""Where training begins, and what a model that learns nothing else loses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from regard_lab.data.batches import Batches
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder, TransformerConfig, TransformerEncoderDecoder
from regard_lab.models.base import END, PAD
from regard_lab.text.ragged import Ragged
from regard_lab.training.learner import Learner, Stream
from regard_lab.training.loop import train
from regard_lab.training.objectives import Frequencies, Seq2SeqObjective
from regard_lab.training.options import TrainingOptions

SYMBOLS, PAIRS = 2000, 3000


def pairs() -> tuple[Ragged, Ragged]:
    """Return sequences of symbols as frequent as words are, and the same symbols under other numbers."""
    drawn = np.random.default_rng(0)
    shares = 1 / np.arange(1, SYMBOLS - 1)
    words = [drawn.choice(SYMBOLS - 2, drawn.integers(3, 9), p=shares / shares.sum()) + 2 for _ in range(PAIRS)]
    turned = np.concatenate([[0, 1], drawn.permutation(np.arange(2, SYMBOLS))])
    return Ragged.of([each.tolist() for each in words]), Ragged.of([turned[each].tolist() for each in words])


def test_the_loss_is_that_of_the_shares() -> None:
    targets = Ragged.of([[2, 3, 2], [], [3]])
    frequencies = Frequencies.of(targets, 5)
    counts = {PAD: 0, END: 3, 2: 2, 3: 2, 4: 0}
    assert frequencies.shares.tolist() == pytest.approx([(counts[i] + 1) / 12 for i in range(5)])
    other = Ragged.of([[4, 2]])
    assert frequencies.loss(other) == pytest.approx(-(math.log(1 / 12) + math.log(3 / 12) + math.log(4 / 12)) / 3)


def test_a_model_that_saturates_begins_at_that_loss() -> None:
    sources, targets = pairs()
    frequencies = Frequencies.of(targets, SYMBOLS)
    sizes = {"embedding": 8, "encoder": 8, "decoder": 8, "features": 8}
    model = RecurrentEncoderDecoder(RecurrentConfig(SYMBOLS, SYMBOLS, **sizes))
    frequencies.set_bias(model)
    learner = Learner(model, TrainingOptions(precision="float32"), Stream(lambda _: None), Seq2SeqObjective())
    for number, batch in enumerate(Batches(sources, targets, size=1000).once()):
        learner.validation_step(batch, number)
    total, count = learner._sums.tolist()
    assert total / count == pytest.approx(frequencies.loss(targets), abs=1e-4)
    other = TransformerEncoderDecoder(TransformerConfig(30, SYMBOLS, width=8, heads=2, feedforward=8))
    frequencies.set_bias(other)
    assert not other.output.bias.any()


@pytest.mark.slow
def test_a_short_warm_up_learns_more_than_frequencies() -> None:
    """A recurrent model stands at the loss of guessing after a short warm-up, unless it begins there."""
    sources, targets = pairs()
    frequencies = Frequencies.of(targets, SYMBOLS)
    batches = Batches(sources, targets, size=50)
    sizes = {"embedding": 32, "encoder": 32, "decoder": 64, "features": 32}
    options = TrainingOptions(steps=60, warmup=3, schedule="inverse_sqrt", precision="float32", validate_every=60)
    losses, guessing = [], []
    for begun in (True, False):
        torch.manual_seed(0)
        model = RecurrentEncoderDecoder(RecurrentConfig(SYMBOLS, SYMBOLS, **sizes))
        if begun:
            frequencies.set_bias(model)
        learner = Learner(
            model, options, Stream(batches.batch), Seq2SeqObjective.of(options), guess=frequencies.loss(targets)
        )
        guessing.append(train(learner, [batches.batch(0)], options, None).at_frequency_baseline)
        losses.append(learner.valid_loss)
    assert guessing == [False, True]
    assert losses[0] < losses[1] - 0.3
