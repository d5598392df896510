"""Adversarial training of classifiers of texts: its cost and gradient by other means, and in runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from regard_lab.data.batches import LabelBatch
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, SequenceClassifier
from regard_lab.tasks.classification.options import ClassificationOptions
from regard_lab.tasks.classification.training import AdversarialLabels, ClassificationObjective, FineTuning, uphill

LABELS = ["bad", "fair", "good"]


def classifier(kind: str, seed: int = 0) -> SequenceClassifier:
    """Return a model in float64 that drops nothing, whose labels depend on its texts."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "dropout": 0.0}
    trunk: EncoderLM | DecoderLM
    if kind in ("decoder", "both ways"):
        trunk = DecoderLM(DecoderLMConfig(30, **fields, pooling="mean", positions="rotary"))
    else:
        trunk = EncoderLM(EncoderLMConfig(30, **(fields | {"layers": 0} if kind == "filters" else fields)))
    model = SequenceClassifier(
        trunk, LABELS, 0.0, filters=4 * (kind in ("filters", "both ways")), both_ways=kind == "both ways"
    )
    torch.nn.init.normal_(model.output.weight)
    return model.double().train()


def batch(lengths: list[int], padded: int = 0, seed: int = 0) -> LabelBatch:
    drawn = torch.Generator().manual_seed(seed)
    L = max(lengths) + padded
    keep = torch.arange(L) < torch.tensor(lengths).unsqueeze(1)
    tokens = torch.randint(30, (len(lengths), L), generator=drawn) * keep
    labels = torch.randint(len(LABELS), (len(lengths),), generator=drawn)
    return LabelBatch(tokens, labels, None if bool(keep.all()) else keep)


def expected(model: SequenceClassifier, texts: LabelBatch, step: float) -> Tensor:
    """Return the cost: each text by itself, its vectors as an argument."""
    B, cost = len(texts.tokens), torch.tensor(0.0, dtype=torch.float64)
    real = torch.ones_like(texts.tokens).bool() if texts.attention_mask is None else texts.attention_mask
    for b in range(B):
        text = texts.tokens[b : b + 1, real[b]]
        made, loss = (_by_rows if model.windows is not None else _by_embedding)(model, text, texts.labels[b : b + 1])
        x = made.detach().requires_grad_()
        plain = loss(x)
        (g,) = torch.autograd.grad(plain, x)
        moved = x + step * torch.linalg.vector_norm(x) * g / torch.linalg.vector_norm(g)
        cost = cost + (plain + loss(moved)).detach() / (2 * B)
    return cost


def _by_rows(model: SequenceClassifier, text: Tensor, label: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    kept: list[Tensor] = []
    with torch.no_grad():
        hook = model.windows.register_forward_hook(lambda *given: kept.append(given[1][0]))
        model(text)
        hook.remove()
    return kept[0], lambda rows: F.cross_entropy(model.output(model.windows(rows)), label)


def _by_embedding(model: SequenceClassifier, text: Tensor, label: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Give each token of the text a row of its own in the vocabulary."""
    own, apart = torch.arange(text.shape[1])[None], copy.deepcopy(model)
    del apart.model.embedding

    def loss(rows: Tensor) -> Tensor:
        apart.model.embedding = lambda tokens: rows[tokens]
        return F.cross_entropy(apart(own), label)

    return model.model.embedding.weight.detach()[text[0]], loss


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(30))
@given(
    st.sampled_from(["encoder", "filters", "both ways"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([1e-6, 0.02, 0.5]),
)
def test_the_cost_is_that_of_texts_and_of_texts_moved(kind: str, lengths: list[int], padded: int, step: float) -> None:
    model, texts = classifier(kind), batch(lengths, padded)
    found = AdversarialLabels(LABELS, step).loss(model, texts)
    plain = ClassificationObjective(LABELS).loss(model, texts)
    torch.testing.assert_close(found.value.double(), expected(model, texts, step), atol=3e-6, rtol=3e-6)
    assert found.shown == plain.shown and found.count == plain.count


def test_a_decoder_is_moved_at_its_embedding() -> None:
    model, texts = classifier("decoder"), batch([5, 5, 5])
    found = AdversarialLabels(LABELS, 0.1).loss(model, texts)
    torch.testing.assert_close(found.value.double(), expected(model, texts, 0.1), atol=3e-6, rtol=3e-6)
    assert found.value > found.shown  # uphill


@pytest.mark.parametrize("kind", ["encoder", "filters", "both ways"])
def test_its_gradient_takes_the_step_for_a_constant(kind: str) -> None:
    model, texts = classifier(kind), batch([3, 6])
    AdversarialLabels(LABELS, 0.05).loss(model, texts).value.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert "model.embedding.weight" in found
    # The same by differences of the cost of a step that stays.
    kept: list[Tensor] = []
    place = model.model.embedding if model.windows is None else model.windows
    at = (lambda given: given[2]) if model.windows is None else (lambda given: given[1][0])
    hook = place.register_forward_hook(lambda *given: kept.append(at(given)))
    plain = ClassificationObjective(LABELS).loss(model, texts).value
    hook.remove()
    by = uphill(kept[0], torch.autograd.grad(plain, kept[0])[0], 0.05).double()
    if model.windows is None:
        hook = place.register_forward_hook(lambda *given: given[2] + by)
    else:
        hook = place.register_forward_pre_hook(lambda _, given: (given[0] + by, *given[1:]))
    worse = ClassificationObjective(LABELS).loss(model, texts).value
    hook.remove()
    model.zero_grad()
    ((ClassificationObjective(LABELS).loss(model, texts).value + worse) / 2).backward()
    for name, each in found.items():
        torch.testing.assert_close(each, model.get_parameter(name).grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("kind", ["decoder", "filters", "both ways"])
def test_what_is_frozen_has_no_gradient(kind: str) -> None:
    model, texts = classifier(kind), batch([4, 4])
    model.model.requires_grad_(False)
    found = AdversarialLabels(LABELS, 0.05).loss(model, texts)
    assert found.value > found.shown
    found.value.backward()
    assert {name.partition(".")[0] for name, each in model.named_parameters() if each.grad is not None} <= {
        "output", "windows",
    }  # fmt: skip


def test_what_filters_read_is_made_once() -> None:
    model, texts, seen = classifier("both ways"), batch([3, 5]), []
    model.model.norm.register_forward_hook(lambda *given: seen.append(given[2].shape))
    AdversarialLabels(LABELS, 0.05).loss(model, texts)
    assert len(seen) == 2  # forward and backward


def test_an_embedding_is_let_go_of_where_a_cost_fails() -> None:
    model, texts = classifier("filters"), batch([3])
    wrong = LabelBatch(texts.tokens + 100, texts.labels)
    with pytest.raises(ValueError, match="below the vocabulary"):
        AdversarialLabels(LABELS, 0.05).loss(model, wrong)
    assert not model.model.embedding._forward_hooks


@settings(deadline=None, max_examples=examples(50))
@given(st.integers(-150, 30), st.integers(-20, 10), st.floats(1e-4, 1.0), st.integers(0, 9))
def test_a_step_is_a_share_of_each_text_at_any_scale(small: int, scale: int, step: float, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    rows, gradient = (torch.randn(3, 4, 5, generator=drawn) for _ in range(2))
    gradient[1, 2:] = 0  # padding
    gradient[2] = 0  # a text that nothing depends on
    rows, gradient = rows * 2.0**scale, gradient * 2.0 ** max(small, -120)
    by = uphill(rows, gradient, step)
    counted = [rows[0].norm(), rows[1, :2].norm(), torch.tensor(0.0)]
    torch.testing.assert_close(by.flatten(1).norm(dim=1), step * torch.stack(counted), rtol=1e-5, atol=0)
    along = F.cosine_similarity(by[:2].double().flatten(1), gradient[:2].double().flatten(1), eps=1e-300)
    torch.testing.assert_close(along, torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=0)
    assert by[1, 2:].eq(0).all() and by[2].eq(0).all()


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("tune", ["full", "frozen", "lora"])
def test_runs_learn_by_it(tune: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.tsv"
    path.write_text("".join(f"{a} {b} {c}\t{'yes' if 'red' in (a, b, c) else 'no'}\n" for a in _WORDS for b in _WORDS
                            for c in _WORDS))  # fmt: skip
    table: dict[str, Any] = {
        "data": {"data": str(path)},
        "training": {"threads": 1, "epochs": 3.0, "adversarial": 0.02},
    }
    start = tmp_path / "start"
    model = {"width": 32, "layers": 1, "heads": 2}
    FineTuning(ClassificationOptions.from_table(table | {"model": model}), start, lambda _: None).train()
    if tune != "full":
        table |= {"start": str(start), "tune": tune}
        table["training"] = {"threads": 1, "epochs": 1.0, "adversarial": 0.02}
        _, ended = FineTuning(ClassificationOptions.from_table(table), tmp_path / tune, lambda _: None).train()
    else:
        _, ended = FineTuning(ClassificationOptions.from_table(table | {"model": model}), tmp_path / "again").train()
    assert ended.best > 0.9


_WORDS = ["red", "blue", "one", "two", "cat", "dog"]
