"""What language models say of tokens that they cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard import masks
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, SequenceClassifier, load, save
from regard_lab.planner import shape_of

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


@pytest.mark.parametrize("shared", [False, True])
def test_an_encoder_with_disentangled_positions(shared: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 2, "layers": 2, "positions": "disentangled", "shared": shared}
    config = EncoderLMConfig(9, **sizes, distance_buckets=8, max_distance=6)
    model, tokens = EncoderLM(config).double().eval(), torch.randint(9, (2, 11))
    keep = torch.arange(11) < torch.tensor([[11], [7]])
    for each in model.parameters():  # numbers of float32
        each.data.copy_(0.3 * torch.randn(each.shape))
    rows = model(tokens, attention_mask=keep)
    torch.testing.assert_close(rows[1, :7], model(tokens[1:, :7])[0])
    # The scores of the first layer, written out.
    block, x = model.blocks[0], model.embedding_norm(model.embedding(tokens) + model.segments.weight[0])
    q, k, v = block.attention.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    places = block.attention.disentangled
    table = [torch.nn.functional.linear(places.weight, *pair).unflatten(-1, (2, 8)).transpose(0, 1)
             for pair in ((places.key_weight, places.key_bias), (places.query_weight, places.query_bias))]  # fmt: skip
    scores = torch.zeros(2, 2, 11, 11).double()
    for i in range(11):
        for j in range(11):
            place = places.bucket(i - j)
            pairs = (q[:, :, i], k[:, :, j]), (q[:, :, i], table[0][:, place]), (k[:, :, j], table[1][:, place])
            scores[:, :, i, j] = sum((a * b).sum(-1) for a, b in pairs) / 24**0.5
    read = scores.masked_fill(~keep[:, None, None], -torch.inf).softmax(-1) @ v
    x = block.attention_norm(x + block.attention.out(read.transpose(1, 2).flatten(2)))
    x = block.feed_forward_norm(x + block.feed_forward(x))
    torch.testing.assert_close(x, block(model.embedding_norm(model.embedding(tokens) + model.segments.weight[0]),
                                        masks.key_padding(keep), None).rows)  # fmt: skip
    model.train()(tokens, attention_mask=keep).square().sum().backward()
    learned = [name for name, each in model.named_parameters() if each.grad is not None]
    assert all(f"blocks.0.attention.disentangled.{name}" in learned for name in ("weight", "key_bias", "query_weight"))
    save(model.float(), tmp_path)
    torch.testing.assert_close(load(tmp_path).double()(tokens, attention_mask=keep), rows)
    assert shape_of(config).parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": "rotary", "max_distance": 6},
            "max_distance must be left out unless positions is 'disentangled'",
        ),
        ({"distance_buckets": 10}, "num_buckets must be a multiple of 4, got 10"),
        ({"distance_buckets": 16, "max_distance": 6}, "max_distance must be an int of at least 9, got 6"),
        ({"score": "cosine"}, "disentangled must be None with a score or a scale, which is that of the positions"),
    ],
)
def test_disentangled_positions_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    for config in (EncoderLMConfig, DecoderLMConfig):
        with pytest.raises(ValueError, match=message):
            config(9, **{"positions": "disentangled", "width": 16, **changes})
    with pytest.raises(ValueError, match=r"positions must be others unless a layer is of kind softmax.* or order1"):
        DecoderLMConfig(9, positions="disentangled", attention="mla,gated-delta", width=16)
