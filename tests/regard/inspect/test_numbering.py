"""Layers are called by the numbers that the page shows, in every function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.inspect import Record, ablate, average, capture, head_effect, plot_heads, rollout, summarize_heads

L = 5


class _Attend(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        heads, read = x.unflatten(-1, (2, 4)).transpose(1, 2), y.unflatten(-1, (2, 4)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(heads, read, read).transpose(1, 2).flatten(2)


class _Model(nn.Module):
    """Runs its layers in the order of their names; a "cross" layer reads the first input."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            owner: nn.Module = self
            for part in name.split("."):
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                before, owner = owner, owner.get_submodule(part)
            before.add_module(part, _Attend())

    def forward(self, x: Tensor) -> Tensor:
        source, y = x, x[:, 1:]
        for name in self.names:
            layer = self.get_submodule(name)
            if "cross" in name or "decoder" in name:
                y = layer(y, source if "cross" in name else y)
            else:
                source = layer(source, source)
        return y + source[:, 1:]


HYBRID = ("model.layers.2.attn", "model.layers.5.attn")
STAGES = ("stages.0.blocks.0.attn", "stages.0.blocks.1.attn", "stages.1.blocks.0.attn")
PAIR = ("encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross")


@torch.no_grad()
def recorded(*names: str, **given: Any) -> tuple[_Model, Tensor, Record]:
    torch.manual_seed(0)
    model, x = _Model(*names), torch.randn(1, L, 8)
    with capture(model, **given) as record:
        model(x)
    return model, x, record


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (HYBRID, ("2", "5")),
        (STAGES, ("0", "1", "2")),
        (PAIR, ("encoder 0", "encoder 1", "decoder 0", "cross 0", "decoder 1", "cross 1")),
    ],
)
def test_numbers_are_those_of_the_page(names: tuple[str, ...], labels: tuple[str, ...]) -> None:
    model, x, record = recorded(*names)
    assert record.layers == names and record.labels == labels
    for name, label in zip(names, labels):
        wanted = [label, name, int(label) if label.isdecimal() else f" {label} "]
        assert all(record[each].name == name for each in wanted)
        with torch.no_grad():
            found = []
            for each in (name, label, wanted[-1]):
                with ablate(model, each, head=1), capture(model, layers=[each]) as one:
                    found.append(model(x))
                assert one.layers == (name,) and not one[name].weights(head=1).any()
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
            assert not torch.equal(found[0], model(x))
        assert head_effect(model, lambda: model(x), label, 1).change > 0
        assert summarize_heads(record, layers=[label])[0].layer == name
        torch.testing.assert_close(average(record, layers=[label]), record[name].weights(batch=0).mean(0))


def test_what_the_page_says_can_be_typed() -> None:
    _, _, record = recorded(*PAIR)
    for spelled, name in (
        ("cross-attention, layer 1", "decoder.1.cross"), ("decoder, layer 0", "decoder.0.self"),
        ("encoder 1", "encoder.1.self"), ("1.cross", "decoder.1.cross"), ("model.encoder.0.self", "encoder.0.self"),
    ):  # fmt: skip
        assert record[spelled].name == name
    _, _, record = recorded(*HYBRID)
    for spelled in ("layer 5", "5", "layers.5.attn", "model.layers.5.attn", "5.attn"):
        assert record[spelled].name == HYBRID[1]


LISTED = r"encoder 0 \(encoder.0.self\), decoder 0 \(decoder.0.self\), cross 0 \(decoder.0.cross\), got "
ALL = r"2 \(model.layers.2.attn\), 5 \(model.layers.5.attn\), got "


@pytest.mark.parametrize(
    ("names", "layer", "message"),
    [
        (PAIR, 0, "layers? must name one of " + LISTED + "0"),
        (PAIR, "self 0", r"must name one of encoder 0 \(encoder.0.self\), decoder 0 \(decoder.0.self\), got 'self 0'"),
        (HYBRID, 0, "layers? must be the number or the name of " + ALL + "0"),
        (HYBRID, "cross 2", "must be the number or the name of " + ALL + "'cross 2'"),
        (HYBRID, "model.layers.5.atn", r"got 'model.layers.5.atn' \(did you mean 'model.layers.5.attn'\?\)"),
        (HYBRID, "attn", "must be the number or the name of " + ALL + "'attn'"),
        (HYBRID, "", "must be the number or the name of " + ALL + "''"),
        (HYBRID, -3, ALL + "-3"),
        (HYBRID, True, "layers? must be a number or a name, got True"),
        (HYBRID, None, "layers? must be a number or a name, got None"),
        (HYBRID, 2.0, "layers? must be a number or a name, got 2.0"),
    ],
)
@torch.no_grad()
def test_errors_list_names_and_numbers(names: tuple[str, ...], layer: Any, message: str) -> None:
    model, x, record = recorded(*names)

    def changed() -> None:
        with ablate(model, layer, 0):
            model(x)

    for function in (
        lambda: record[layer], lambda: rollout(record, layers=[layer]), lambda: head_effect(model, lambda: model(x),
        layer, 0), changed,
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            function()


@torch.no_grad()
def test_a_number_that_is_known_too_late_is_refused() -> None:
    """Layers get numbers from 0 once a second one has the number in its name, when the first ones have run."""
    model, x = _Model("a.3.attn", "a.3.other"), torch.randn(1, L, 8)
    for wanted in (3, 0):
        with pytest.raises(ValueError, match="ablate: layer must be "), ablate(model, wanted):
            model(x)
    with capture(model, layers=[0]) as record:
        model(x)
    assert record.layers == ("a.3.attn",)


def test_a_grid_of_heads_has_the_numbers() -> None:
    figure = plot_heads(recorded(*HYBRID)[2])
    assert [each.get_title().split()[0] for each in figure.axes[:4]] == ["2·0", "2·1", "5·0", "5·1"]


def test_many_layers_are_listed_in_part() -> None:
    _, _, record = recorded(*(f"h.{i}.attn" for i in range(40)))
    with pytest.raises(ValueError, match=r"of 0 \(h.0.attn\), .*, 10 \(h.10.attn\), \.\.\., 39 \(h.39.attn\), got 40"):
        record[40]
