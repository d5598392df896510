"""What filters find in windows of tokens: against loops, whatever is padded, and in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from regard_lab.models import (
    DecoderLM,
    DecoderLMConfig,
    EncoderLM,
    EncoderLMConfig,
    SequenceClassifier,
    TokenClassifier,
    load,
    save,
)
from regard_lab.models.folders import ModelFileError
from regard_lab.models.pooling import WindowFeatures

SMALL = EncoderLMConfig(50, width=16, layers=1, heads=2)


def expected(layer: WindowFeatures, rows: Tensor) -> Tensor:
    """Return the features of one sequence (n, E), window by window, in float64."""
    largest, means = [], []
    for convolution in layer.convolutions:
        k = convolution.weight.shape[2]
        weight, bias = convolution.weight.double(), convolution.bias.double()  # (F, E, k)
        wide = torch.cat([rows.new_zeros(k - 1, rows.shape[1]), rows, rows.new_zeros(k - 1, rows.shape[1])]).double()
        found = [
            torch.stack([(weight[f] * wide[t : t + k].T).sum() + bias[f] for f in range(len(weight))]).clamp(min=0)
            for t in range(len(rows) + k - 1)
        ]
        largest.append(torch.stack(found).max(0).values)
        means.append(torch.stack(found).mean(0))
    return torch.cat(largest + means * layer.means)


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_features_are_those_of_loops_whatever_is_padded(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    width, filters, window = (data.draw(st.integers(1, most)) for most in (5, 4, 5))
    narrowest, means = data.draw(st.integers(1, window)), data.draw(st.booleans())
    layer = WindowFeatures(width, filters, window, narrowest, means=means)
    assert layer.features == (1 + means) * (window - narrowest + 1) * filters
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    size = data.draw(st.sampled_from([1e-3, 1.0, 1e3]))
    L = max(lengths) + data.draw(st.integers(0, 3))
    rows, real = torch.full((len(lengths), L, width), data.draw(st.sampled_from([0.0, 7.0, torch.nan]))), []
    keep = torch.zeros(len(lengths), L, dtype=torch.bool)
    for b, n in enumerate(lengths):
        first = data.draw(st.integers(0, L - n))  # padding on either side
        real.append(size * torch.randn(n, width))
        rows[b, first : first + n], keep[b, first : first + n] = real[-1], True
    with torch.no_grad():
        found = layer(rows, keep)
        wanted = torch.stack([expected(layer, each) for each in real])
    assert found.shape == (len(lengths), layer.features)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5 * size, rtol=1e-5)


def test_a_sequence_without_tokens_has_features_of_zero_and_finite_gradients() -> None:
    layer = WindowFeatures(3, 2, 2)
    rows = torch.randn(2, 4, 3, requires_grad=True)
    keep = torch.tensor([[True, True, False, False], [False] * 4])
    found = layer(rows, keep)
    found.sum().backward()
    assert found[1].abs().max() == 0 and found[0].abs().max() > 0
    assert rows.grad is not None and rows.grad[1].abs().max() == 0 and bool(rows.grad.isfinite().all())


def test_a_classifier_by_filters_comes_back_from_its_folder_which_is_ours(tmp_path: Path) -> None:
    model = SequenceClassifier(EncoderLM(SMALL), ["a", "b", "c"], 0.5, filters=6, window=2, pad=0).eval()
    assert model.output.in_features == 24
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["format"], config["filters"], config["window"]) == ("regard.language_model", 6, 2)
    again = load(tmp_path)
    assert isinstance(again, SequenceClassifier) and (again.filtering["filters"], again.filtering["window"]) == (6, 2)
    tokens = torch.tensor([[3, 1, 4, 0], [1, 5, 9, 2]])
    assert torch.equal(again(tokens, attention_mask=tokens != 0), model(tokens))  # padding is told by its number
    (tmp_path / "config.json").write_text(json.dumps(config | {"filters": "many"}))
    with pytest.raises(ModelFileError, match="have a valid head option 'filters'"):
        load(tmp_path)
    for claim in (
        {"filters": 7},
        {"filters": 10**12},
        {"filters": 10**30},
        {"filters": -1},
        {"filters": True},
        {"window": 10**9},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | claim))
        with pytest.raises(ModelFileError, match=r"(model\.safetensors|config\.json) must"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((0, 1, 1), "width"),
        ((4, 2, 0), "window"),
        ((4, 2, 65), "window"),
        ((4, -1, 1), "filters"),
        ((4, 2, 3, 4), "narrowest"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(given: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"WindowFeatures: {name} must be"):
        WindowFeatures(*given)


def test_shapes_that_do_not_fit_are_refused() -> None:
    found, rows = WindowFeatures(4, filters=3, window=2), torch.zeros(2, 5, 4)
    for wrong in (rows[0], rows[..., :3], rows[None]):
        with pytest.raises(ValueError, match=r"WindowFeatures: rows must have shape \(B, L, 4\), got \("):
            found(wrong)
    for keep in (rows[0, :, 0] == 0, rows[:, :1, 0] == 0):  # either would be broadcast
        with pytest.raises(ValueError, match=r"WindowFeatures: attention_mask must have shape \(2, 5\), got \("):
            found(rows, keep)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"filters": -1}, "filters"),
        ({"filters": False}, "filters"),
        ({"filters": None}, "filters"),
        ({"window": -5}, "window"),
        ({"narrowest": 0}, "narrowest"),
    ],
)
def test_options_of_a_classifier_are_checked_without_filters_too(given: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"SequenceClassifier: {name} must be an int of at least"):
        SequenceClassifier(EncoderLM(SMALL), ["a", "b"], **given)
    with pytest.raises(TypeError, match="filters"):
        TokenClassifier(EncoderLM(SMALL), ["a", "b"], filters=3)


def test_parameters_are_drawn_anew_and_sizes_of_numpy_are_saved(tmp_path: Path) -> None:
    model = SequenceClassifier(EncoderLM(SMALL), ["a", "b"], filters=np.int64(3), window=np.int64(2))
    save(model, tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.reset_parameters()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {
        "output.weight",
        *(f"windows.convolutions.{k}.{part}" for k in (0, 1) for part in ("weight", "bias")),
    }


FORWARD = DecoderLMConfig(50, width=16, layers=1, heads=2, positions="rotary")


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 99))
def test_filters_read_a_text_both_ways_whatever_is_padded(lengths: list[int], padded: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = SequenceClassifier(DecoderLM(FORWARD), ["a", "b"], filters=3, window=2, both_ways=True).double().eval()
    assert model.windows is not None
    L = max(lengths) + padded
    tokens, keep = torch.randint(50, (len(lengths), L)), torch.arange(L) < torch.tensor(lengths).unsqueeze(1)
    found = model.windows(*model.read(tokens, keep))
    for row, (n, text) in enumerate(zip(lengths, tokens)):
        vectors = model.model.embedding.weight[text[:n]]
        centred = vectors - vectors.mean(1, keepdim=True)
        vectors = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        rows = [model.model.features(each[None])[0] for each in (text[:n], text[:n].flip(0))]
        whole = torch.cat([vectors, rows[0], rows[1].flip(0)], 1)  # (n, 3E)
        torch.testing.assert_close(found[row], expected(model.windows, whole), atol=1e-9, rtol=1e-9)


def test_where_blocks_are_frozen_vectors_alone_teach_the_embedding() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(DecoderLM(FORWARD), ["a", "b"], 0.0, filters=3, both_ways=True).double()
    tokens, embedding = torch.tensor([[3, 1, 4, 1]]), model.model.embedding.weight
    logits = model(tokens)
    (all_,) = torch.autograd.grad(logits[0, 0], embedding)
    model.model.blocks.requires_grad_(False)
    frozen = model(tokens)
    torch.testing.assert_close(frozen, logits, atol=1e-9, rtol=1e-9)
    (alone,) = torch.autograd.grad(frozen[0, 0], embedding)
    step, direction = 1e-6, torch.randn_like(embedding)
    vectors = embedding.detach().clone()
    assert model.windows is not None
    with torch.no_grad():  # the same by differences, of vectors that move beside rows that stay
        rows = [model.rows(each, None) for each in (tokens, tokens.flip(1))]
        found = []
        for sign in (1, -1):
            moved = torch.nn.functional.layer_norm((vectors + sign * step * direction)[tokens], (16,))
            read = torch.cat([moved, rows[0], rows[1].flip(1)], -1)
            found.append(model.output(model.windows(read))[0, 0])
    slope = float(found[0] - found[1]) / (2 * step)
    assert float((alone * direction).sum()) == pytest.approx(slope, rel=1e-5)
    assert float((all_ * direction).sum()) != pytest.approx(slope, rel=1e-2)


def test_a_classifier_that_reads_both_ways_comes_back_from_its_folder(tmp_path: Path) -> None:
    model = SequenceClassifier(
        DecoderLM(FORWARD), ["a", "b"], filters=3, window=4, narrowest=2, means=False, both_ways=True, pad=0
    ).eval()
    assert model.output.in_features == 9
    save(model, tmp_path)
    again, tokens = load(tmp_path), torch.tensor([[3, 1, 4, 0], [1, 5, 9, 2]])
    assert isinstance(again, SequenceClassifier) and again.filtering == model.filtering
    assert torch.equal(again(tokens), model(tokens))
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):  # it would be another one backward
        model(tokens, mask=tokens != 0)
    with pytest.raises(ValueError, match="both_ways must be False for an encoder, which sees both sides, got True"):
        SequenceClassifier(EncoderLM(SMALL), ["a", "b"], filters=3, both_ways=True)
    with pytest.raises(ValueError, match="both_ways must be False without filters, got True"):
        SequenceClassifier(DecoderLM(FORWARD), ["a", "b"], both_ways=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for claim, sentence in (
        ({"both_ways": "yes"}, "have a valid head option 'both_ways'"),
        ({"both_ways": False}, r"model\.safetensors must"),
        ({"filters": 0}, "both_ways must be False without filters"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | claim))
        with pytest.raises(ModelFileError, match=sentence):
            load(tmp_path)


@pytest.mark.slow
def test_sequences_of_any_length_are_exported() -> None:
    model = SequenceClassifier(EncoderLM(SMALL), ["a", "b"], filters=4, window=3, pad=0).eval()
    length = torch.export.Dim("length", min=2, max=100)
    made = torch.export.export(
        model, (torch.randint(1, 50, (2, 7)),), dynamic_shapes=({1: length}, None, None)[:1]
    ).module()
    tokens = torch.randint(0, 50, (2, 11))
    torch.testing.assert_close(made(tokens), model(tokens))
