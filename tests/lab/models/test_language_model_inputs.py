"""What language models say of tokens that they cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, SequenceClassifier, load, save

MODELS = [
    DecoderLM(DecoderLMConfig(50, width=16, max_length=4)),
    EncoderLM(EncoderLMConfig(50, width=16, max_length=4)),
]


@pytest.mark.parametrize("model", MODELS, ids=["decoder", "encoder"])
@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (torch.zeros(2, 3), r"tokens must be an integer tensor \(B, L\), got a float32 tensor of shape \(2, 3\)"),
        (torch.zeros(3).long(), r"tokens must be an integer tensor \(B, L\)"),
        (torch.tensor([[1, 60]]), "tokens must be ids from 0 to 49, below the vocabulary size, got 60"),
        (torch.tensor([[-1]]), "tokens must be ids from 0 to 49, below the vocabulary size, got -1"),
        (torch.zeros(1, 5).long(), "tokens must have positions below 4, the number of learned positions, got 4"),
    ],
)
def test_tokens_that_cannot_be_read(model: torch.nn.Module, tokens: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        model(tokens)


@pytest.mark.parametrize("pooling", ["last", "mean", "max"])
def test_what_stands_for_a_sequence_of_a_decoder_leaves_padding_out(pooling: str) -> None:
    torch.manual_seed(0)
    config = DecoderLMConfig(9, width=16, heads=2, layers=2, pooling=pooling)
    model = SequenceClassifier(DecoderLM(config), ["a", "b"]).double().eval()
    tokens, keep = torch.randint(9, (3, 7)), torch.ones(3, 7, dtype=torch.bool)
    keep[1, 5:] = keep[2, 1:] = False
    logits = model(tokens, attention_mask=keep)
    for i, length in enumerate((7, 5, 1)):
        rows = model.model.features(tokens[i : i + 1, :length])[0]
        row = {"last": rows[-1], "mean": sum(rows) / length, "max": rows.max(0).values}[pooling]
        torch.testing.assert_close(logits[i], model.output(row), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(tokens[:1]), logits[:1], rtol=1e-12, atol=1e-12)
    assert model(tokens, attention_mask=torch.zeros_like(keep)).isfinite().all()


@pytest.mark.parametrize("pooled", [False, True])
def test_the_mean_of_a_sequences_rows_leaves_padding_out(pooled: bool) -> None:
    torch.manual_seed(0)
    config = EncoderLMConfig(9, width=16, heads=2, layers=2, pooling="mean", pooled=pooled)
    model = SequenceClassifier(EncoderLM(config), ["a", "b"]).double().eval()
    tokens, keep = torch.randint(9, (3, 7)), torch.ones(3, 7, dtype=torch.bool)
    keep[1, 5:] = keep[2, 1:] = False
    logits = model(tokens, attention_mask=keep)
    for i, length in enumerate((7, 5, 1)):
        row = sum(model.model(tokens[i : i + 1, :length])[0]) / length
        row = torch.tanh(model.model.pooler(row)) if pooled else row
        torch.testing.assert_close(logits[i], model.output(row), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(tokens[:1]), logits[:1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_without_blocks_is_its_embedding(shared: bool, norm_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = EncoderLMConfig(9, width=8, heads=2, layers=0, max_length=4, shared=shared, norm_first=norm_first)
    model = EncoderLM(config).eval()
    assert not [name for name in model.state_dict() if name.startswith("blocks")]
    tokens = torch.tensor([[3, 1, 3, 8]])
    rows = model.embedding(tokens) + model.positions.learned.weight + model.segments.weight[0]
    norm = model.norm if norm_first else model.embedding_norm
    torch.testing.assert_close(model(tokens), norm(rows))
    save(model, tmp_path)
    again = load(tmp_path)
    assert isinstance(again, EncoderLM) and torch.equal(again(tokens), model(tokens))
    with pytest.raises(ValueError, match="layers must be an int from 0 to 200, got -1"):
        EncoderLMConfig(9, layers=-1)
    with pytest.raises(ValueError, match="layers must be an int from 1 to 200, got 0"):
        DecoderLMConfig(9, layers=0)
