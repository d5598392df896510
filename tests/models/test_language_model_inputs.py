"""What language models say of tokens that they cannot read."""

from __future__ import annotations

import pytest
import torch

from regard.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig

MODELS = [DecoderLM(DecoderLMConfig(50, width=16, longest=4)), EncoderLM(EncoderLMConfig(50, width=16, longest=4))]


@pytest.mark.parametrize("model", MODELS, ids=["decoder", "encoder"])
@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (torch.zeros(2, 3), r"tokens must be an integer tensor \(B, L\), got a float32 tensor of shape \(2, 3\)"),
        (torch.zeros(3).long(), r"tokens must be an integer tensor \(B, L\)"),
        (torch.tensor([[1, 60]]), "tokens must be numbers from 0 to 49, below the vocabulary, got 60"),
        (torch.tensor([[-1]]), "tokens must be numbers from 0 to 49, below the vocabulary, got -1"),
        (torch.zeros(1, 5).long(), "tokens must stand below 4, as many positions as the model has learned, got 4"),
    ],
)
def test_tokens_that_cannot_be_read(model: torch.nn.Module, tokens: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        model(tokens)
