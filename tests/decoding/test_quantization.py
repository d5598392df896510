"""Models in int8 say nearly the same; laid-out weights say the same."""

from __future__ import annotations

import pytest
import torch
from language_models import small_model

from regard.decoding.generation import generate
from regard.decoding.quantization import arrange_weights, quantize
from regard.models import DecoderLM


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_logits_in_int8_are_near(tied: bool) -> None:
    model, tokens = small_model(width=64, tied=tied, std=0.1), torch.randint(50, (2, 9))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made, wanted = quantize(model)(tokens), model(tokens)
    assert float((made - wanted).norm() / wanted.norm()) < 0.05
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(generate(quantize(model), tokens.tolist())) == 2


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_arranged_weights_mean_the_same(tied: bool) -> None:
    model, tokens = small_model(tied=tied), torch.randint(50, (2, 9))
    wanted, weights = model(tokens), {name: value.clone() for name, value in model.state_dict().items()}
    rounded = quantize(model)(tokens)
    arrange_weights(model)
    torch.testing.assert_close(quantize(model)(tokens), rounded, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens), wanted, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_wrong_models_are_one_sentence() -> None:
    with pytest.raises(TypeError, match="quantize: model must be a DecoderLM, got"):
        quantize(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantize: model must be on the CPU in float32, got"):
        quantize(small_model().bfloat16())
    assert isinstance(quantize(small_model()), DecoderLM)
