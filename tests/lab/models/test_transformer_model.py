"""The Transformer: torch's own with the same parameters, its maps, and caches that are not filled twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from model_cases import LENGTHS, SOURCE, TARGET, made
from torch import nn

from regard.nn import MultiheadAttention
from regard_lab.generation.sequence_model import attention_maps
from regard_lab.models import TransformerConfig, TransformerEncoderDecoder


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*nested.tensor")
@pytest.mark.parametrize("case", ["post", "pre"])
def test_it_is_torchs_transformer(case: str) -> None:
    model = made(f"transformer {case}")
    assert isinstance(model, TransformerEncoderDecoder)
    pre, where = case == "pre", {"batch_first": True, "dtype": torch.float64}
    options: dict[str, Any] = {"norm_first": pre, "activation": "gelu" if pre else "relu", "dropout": 0.0}
    twin = nn.Transformer(8, 2, 2, 2, 12, **options, **where).eval()
    for mine, other in ((model.encoder, twin.encoder), (model.decoder, twin.decoder)):
        for layer, theirs in zip(mine, other.layers):
            theirs.load_state_dict(layer.state_dict())
        other.norm = nn.LayerNorm(8, dtype=torch.float64) if pre else None
    waves = model.source_positions.encoding(8, dtype=torch.float64)
    source = model.source_embedding(SOURCE) * math.sqrt(8) + waves[:6]
    target = model.target_embedding(TARGET) * math.sqrt(8) + waves
    behind, later = torch.arange(6) >= LENGTHS[:, None], torch.ones(8, 8).triu(1).bool()
    masks = {"src_key_padding_mask": behind, "memory_key_padding_mask": behind}
    rows = twin(source, target, tgt_mask=later, **masks)
    logits = rows @ model.target_embedding.weight.mT + model.output.bias
    torch.testing.assert_close(model(SOURCE, LENGTHS, TARGET), logits)


def test_each_share_of_dropout_goes_where_it_says() -> None:
    model = made("transformer post", dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    assert isinstance(model, TransformerEncoderDecoder) and model.dropout.p == 0.3
    for layer in (*model.encoder, *model.decoder):
        shares = {name: child.p for name, child in layer.named_children() if name.startswith("dropout")}
        attentions = [child.dropout for child in layer.children() if isinstance(child, MultiheadAttention)]
        assert shares.pop("dropout") == 0.1
        assert set(shares.values()) == {0.3} and len(shares) == 1 + len(attentions)
        assert set(attentions) == {0.2}


@torch.no_grad()
def test_maps_are_those_of_every_layer_and_head() -> None:
    model = made("transformer post")
    assert model.maps == ("layer 1 head 1", "layer 1 head 2", "layer 2 head 1", "layer 2 head 2")
    weights = model.align(SOURCE, LENGTHS, TARGET)
    layer = model.decoder[1].multihead_attn
    seen: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, args: seen.extend(args[:2]))
    model(SOURCE, LENGTHS, TARGET)
    hook.remove()
    query, states = seen
    behind = torch.arange(6) >= LENGTHS[:, None]
    _, expected = layer(query, states, states, key_padding_mask=behind, average_attn_weights=False)
    torch.testing.assert_close(weights[:, 2:], expected)


@torch.no_grad()
def test_steps_project_the_memory_once() -> None:
    model = made("transformer post")
    memory = model.encode(SOURCE, LENGTHS)
    before = [(rows.key.data_ptr(), rows.key.clone()) for rows in memory.layers]
    state = model.start(memory, 2)
    for t in range(4):
        _, state = model.step(TARGET[:, t : t + 1].expand(-1, 2), memory, state)
    assert state.time == 4
    assert [len(cache) for cache in state.caches] == [4, 4]
    for rows, (place, key) in zip(memory.layers, before):
        assert rows.key.data_ptr() == place
        assert len(rows.key) == sum(LENGTHS)
        assert torch.equal(rows.key, key)


@pytest.mark.parametrize("name", ["transformer post", "transformer pre"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_models_in_half_precision_write_step_by_step(name: str, dtype: torch.dtype) -> None:
    model = made(name).to(dtype).eval()
    memory = model.encode(SOURCE, LENGTHS)
    state, whole = model.start(memory, 1), model(SOURCE, LENGTHS, TARGET)
    bound = 3 * torch.finfo(dtype).eps * float(whole.abs().max())
    for t in range(TARGET.shape[1]):
        logits, state = model.step(TARGET[:, t : t + 1], memory, state)
        assert logits.dtype == dtype
        torch.testing.assert_close(logits[:, 0].float(), whole[:, t].float(), rtol=0, atol=bound)


def test_learned_positions_end() -> None:
    model = made("transformer learned", max_length=7)
    with pytest.raises(ValueError, match=r"LearnedPositions: offset must keep positions in \[0, 7\)"):
        model(SOURCE, LENGTHS, TARGET)


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_all_tied_is_one_matrix(kind: str) -> None:
    names = [name for name, _ in made(f"{kind} all tied").named_parameters()]
    assert [name for name in names if "embedding" in name or "output" in name] == [
        "target_embedding.weight",
        "output.bias",
    ]


def test_an_untied_model_begins_knowing_nothing() -> None:
    config = TransformerConfig.preset("small", 12, 9, tied="none", width=16, feedforward=8)
    logits = TransformerEncoderDecoder(config)(SOURCE, LENGTHS, TARGET)
    assert torch.equal(logits, torch.zeros_like(logits))


@torch.no_grad()
def test_the_map_alignment_is_that_of_the_step_that_reads_the_word() -> None:
    model = made("transformer post", alignment="layer 2 head 1")
    assert model.maps[-1] == "alignment" and len(model.maps) == 5
    target = torch.tensor([[1, 5, 6, 7, 8], [1, 5, 6, 1, 0], [1, 5, 0, 0, 0]])
    weights = model.align(SOURCE, LENGTHS, target)
    head, aligned = weights[:, 2], weights[:, 4]
    for row, words in enumerate((4, 2, 1)):
        # Step t writes the word that step t + 1 reads. What nothing reads has the weights of the step that writes it.
        torch.testing.assert_close(aligned[row, :words], head[row, 1 : words + 1])
        torch.testing.assert_close(aligned[row, words], head[row, words])


@torch.no_grad()
def test_the_last_word_is_aligned_by_the_step_that_reads_it_alone_and_in_a_batch() -> None:
    model = made("transformer post", alignment="layer 1 head 2")
    pairs = [([5, 6, 3, 4], [6, 7]), ([4, 3], [7, 5, 6])]
    together = [each[-1] for each in attention_maps(model, pairs)]
    for (source, target), found in zip(pairs, together):
        steps = model.align(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[1, *target]]))[0, 1]
        torch.testing.assert_close(found, steps[1:])
        torch.testing.assert_close(attention_maps(model, [(source, target)])[0][-1], found)


def test_a_head_that_there_is_not_cannot_align() -> None:
    with pytest.raises(ValueError) as caught:
        TransformerConfig(sources=9, targets=9, width=8, heads=2, decoder_layers=1, alignment="layer 2 head 1")
    wanted = "alignment must be one of layer 1 head 1, layer 1 head 2, got layer 2 head 1."
    assert str(caught.value).endswith(wanted)
