"""The recurrent encoder–decoder: padding changes nothing, steps agree with teacher forcing, gradients arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.models import RecurrentConfig, RecurrentEncoderDecoder

CONFIG = RecurrentConfig(sources=12, targets=9, embedding=6, encoder=5, decoder=7, features=8, dropout=0.0)


@pytest.fixture
def model() -> RecurrentEncoderDecoder:
    torch.manual_seed(0)
    model = RecurrentEncoderDecoder(CONFIG).double().eval()
    torch.nn.init.normal_(model.output.weight)  # it starts at zero, which would hide everything before it
    return model


@pytest.fixture
def source() -> Tensor:
    return torch.randint(1, 12, (3, 6), generator=torch.Generator().manual_seed(1))


LENGTHS = torch.tensor([6, 2, 4])
TARGET = torch.tensor([[1, 3, 4, 5], [1, 8, 2, 0], [1, 2, 0, 0]])


def test_padding_changes_nothing(model: RecurrentEncoderDecoder, source: Tensor) -> None:
    batched = model(source, LENGTHS, TARGET)
    weights = model.align(source, LENGTHS, TARGET)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = source[row : row + 1, :length], LENGTHS[row : row + 1], TARGET[row : row + 1]
        torch.testing.assert_close(batched[row], model(*alone)[0])
        torch.testing.assert_close(weights[row, :, :length], model.align(*alone)[0])
        assert not weights[row, :, length:].any()


def test_nan_behind_the_end_changes_not_one_bit(model: RecurrentEncoderDecoder, source: Tensor) -> None:
    behind = torch.arange(6) >= LENGTHS[:, None]
    clean = model(source.masked_fill(behind, 0), LENGTHS, TARGET)
    with torch.no_grad():
        model.source_embedding.weight[0] = torch.nan
    poisoned = model(source.masked_fill(behind, 0), LENGTHS, TARGET)
    assert torch.equal(clean, poisoned)


def test_weights_are_weights(model: RecurrentEncoderDecoder, source: Tensor) -> None:
    weights = model.align(source, LENGTHS, TARGET)
    assert weights.shape == (3, 4, 6)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, dtype=torch.float64))


def test_the_attention_is_bahdanaus_formula(model: RecurrentEncoderDecoder, source: Tensor) -> None:
    lengths = torch.full((3,), 6)
    memory = model.encode(source, lengths)
    hidden, _ = model.decoder(model.target_embedding(TARGET), memory.start)
    states = memory.states[:, 0]
    scores = torch.empty(3, 4, 6, dtype=torch.float64)
    for b in range(3):
        for t in range(4):
            for s in range(6):
                scores[b, t, s] = model.w_v @ torch.tanh(model.w_q @ hidden[b, t] + model.w_k @ states[b, s])
    torch.testing.assert_close(model.align(source, lengths, TARGET), scores.softmax(-1))


@pytest.mark.parametrize("beams", [1, 3])
def test_steps_agree_with_teacher_forcing(model: RecurrentEncoderDecoder, source: Tensor, beams: int) -> None:
    forced = model(source, LENGTHS, TARGET)
    memory = model.encode(source, LENGTHS)
    state = tuple(part.repeat_interleave(beams, dim=1) for part in memory.start)
    for t in range(TARGET.shape[1]):
        logits, state = model.step(TARGET[:, t, None].expand(-1, beams), memory, state)
        for beam in range(beams):
            torch.testing.assert_close(logits[:, beam], forced[:, t])


def test_later_targets_do_not_reach_earlier_logits(model: RecurrentEncoderDecoder, source: Tensor) -> None:
    changed = TARGET.clone()
    changed[:, 2:] = 7
    torch.testing.assert_close(model(source, LENGTHS, changed)[:, :2], model(source, LENGTHS, TARGET)[:, :2])


def test_every_parameter_gets_a_gradient(model: RecurrentEncoderDecoder, source: Tensor) -> None:
    model(source, LENGTHS, TARGET).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_dropout_obeys_training(source: Tensor) -> None:
    torch.manual_seed(0)
    model = RecurrentEncoderDecoder(RecurrentConfig(sources=12, targets=9, dropout=0.5))
    torch.nn.init.normal_(model.output.weight)
    assert not torch.equal(model(source, LENGTHS, TARGET), model(source, LENGTHS, TARGET))
    model.eval()
    assert torch.equal(model(source, LENGTHS, TARGET), model(source, LENGTHS, TARGET))


@pytest.mark.parametrize(
    ("field", "value"), [("sources", 0), ("decoder", 2.0), ("encoder", True), ("features", 1 << 20), ("targets", "9")]
)
def test_sizes_are_checked(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"RecurrentConfig: {field} must be a whole number from 1 to 65536, got"):
        RecurrentConfig(**{"sources": 12, "targets": 9, field: value})


@pytest.mark.parametrize("dropout", [1.0, -0.1, float("nan"), "0", True])
def test_dropout_is_checked(dropout: object) -> None:
    with pytest.raises(ValueError, match=r"RecurrentConfig: dropout must be a number in \[0, 1\), got"):
        RecurrentConfig(sources=12, targets=9, dropout=dropout)
