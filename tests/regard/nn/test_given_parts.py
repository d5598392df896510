"""Scores and normalizers with tensors, given to a layer: these are the layer's, in everything that torch does."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.regard.nn.layer_samples import SAMPLES, Sample
from tests.regard.nn.test_layers import built, numbers, outputs
from torch import Tensor, nn

import regard
from regard.nn import DotProductAttention, MultiheadAttention, ScoredAttention, Transformer, TransformerEncoderLayer
from regard.nn._base import PartLayer
from regard.normalizers import Normalizer, Softmax
from regard.scores import Score, ScoreMod


class Bilinear(Score):
    """``qᵀ W k + c``, which also has a buffer."""

    def __init__(self, weight: Tensor, shift: Tensor) -> None:
        self.weight, self.shift = weight, (shift,)

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query @ self.weight, key + self.shift[0]

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT


class Tempered(Normalizer):
    def __init__(self, heat: Tensor) -> None:
        self.heat = heat

    def weights(self, scores: Tensor) -> Tensor:
        hidden = scores == -torch.inf  # −inf times a learned number has no gradient
        return Softmax().weights(torch.where(hidden, -torch.inf, torch.where(hidden, 0.0, scores) * self.heat))


def bilinear(width: int = 4) -> Bilinear:
    draw = numbers(seed=1)
    return Bilinear(nn.Parameter(draw(width, width)), draw(width))


def tempered() -> Tempered:
    return Tempered(nn.Parameter(torch.ones(1)))


def layers_of(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(getattr(m, "normalizer", None), (str, Normalizer))]


#: One sample of each layer with a normalizer; these two have a layer inside for its score alone.
NORMALIZING = {sample.name: sample for sample in SAMPLES if layers_of(built(sample))}
for name in ("HardAttention", "LocalAttention"):
    del NORMALIZING[name]


@pytest.mark.parametrize("sample", NORMALIZING.values(), ids=str)
def test_every_layer_owns_the_tensors_of_its_normalizer(sample: Sample) -> None:
    layer, heat = built(sample), nn.Parameter(torch.tensor(1.5))
    normalizing = layers_of(layer)
    for inner in normalizing:
        inner.normalizer = Tempered(heat)
    args, kwargs = sample.call(numbers())
    assert any(each is heat for each in layer.parameters())
    out = sum(each.square().sum() for each in outputs(layer(*args, **kwargs)) if each.is_floating_point())
    (gradient,) = torch.autograd.grad(out, [heat])
    assert gradient.isfinite() and gradient != 0
    for inner in normalizing:
        inner.normalizer = "softmax"
    assert not any(each is heat for each in layer.parameters())


def attended(layer: nn.Module) -> Tensor:
    x = numbers()(2, 5, 8).to(next(layer.parameters()).dtype)
    return layer(x, x, x, need_weights=False)[0]


def layer_with_both() -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(8, 2, batch_first=True, score=bilinear(), normalizer=tempered())


def test_a_layer_trains_and_saves_what_it_is_given() -> None:
    layer, other = layer_with_both(), layer_with_both()
    assert {"score.weight", "normalizer.heat"} <= set(dict(layer.named_parameters()))
    assert "score.shift.0" in dict(layer.named_buffers())
    before = attended(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    before.square().sum().backward()
    optimizer.step()
    assert not torch.equal(attended(layer), before)
    with torch.no_grad():
        layer.get_buffer("score.shift.0").add_(1.0)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(attended(other), attended(layer))
    other.load_state_dict({name: each.clone() for name, each in layer.state_dict().items()}, assign=True)
    assert torch.equal(attended(other), attended(layer))


def test_a_layer_moves_and_copies_what_it_is_given() -> None:
    layer = layer_with_both()
    expected = attended(layer)
    twin = copy.deepcopy(layer).double()
    assert {each.dtype for each in (*twin.parameters(), *twin.buffers())} == {torch.float64}
    torch.testing.assert_close(attended(twin).float(), expected)
    with torch.no_grad():
        twin.get_parameter("score.weight").zero_()
        twin.get_buffer("score.shift.0").zero_()
    assert not torch.allclose(attended(twin).float(), expected, atol=1e-3)
    assert torch.equal(attended(layer), expected)
    assert regard.nn.convert(nn.Sequential(layer))[0] is layer
    state = dict(layer.state_dict())
    state["score.weight"] = torch.zeros_like(state["score.weight"])
    x = numbers()(2, 5, 8)
    swapped = torch.func.functional_call(layer, state, (x, x, x), {"need_weights": False})[0]
    assert not torch.allclose(swapped, expected, atol=1e-3)
    elsewhere = layer_with_both().to("meta").to_empty(device="cpu")
    elsewhere.load_state_dict(layer.state_dict())
    assert torch.equal(attended(elsewhere), expected)
    assert "Bilinear(weight=tensor[4, 4]" in repr(layer)


def test_layers_of_layers_hand_parts_on() -> None:
    model = Transformer(8, 2, 2, 1, 8, batch_first=True, score=bilinear(), normalizer=tempered())
    names = [name for name, _ in model.named_parameters() if name.endswith(("score.weight", "normalizer.heat"))]
    assert len(names) == 2 * 4, names  # two encoder layers, and two attentions of the decoder's: none shares
    layer = TransformerEncoderLayer(8, 2, 8, batch_first=True, score=bilinear())
    assert torch.equal(layer.self_attn.score.weight, bilinear().weight)


def test_modules_inside_parts_are_modules_of_the_layer() -> None:
    class Deep(Score):
        def __init__(self) -> None:
            self.net = nn.Linear(4, 4)

        def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(query), key

        def compare(self, query: Tensor, key: Tensor) -> Tensor:
            return query @ key.mT

    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - self.slope * (q_idx - kv_idx).abs()

    found = {"score.net.weight": Deep(), "score.slope": Distance(), "score.score_mod.slope": ScoreMod(Distance())}
    for name, score in found.items():
        layer = MultiheadAttention(8, 2, batch_first=True, score=score)
        attended(layer).square().sum().backward()
        assert layer.get_parameter(name).grad.abs().sum() > 0


def test_a_layer_of_ones_own_owns_its_score() -> None:
    class Mine(ScoredAttention):
        def __init__(self) -> None:
            super().__init__()
            self.mine = bilinear()

        def score(self) -> Any:
            return self.mine

        def reset_parameters(self) -> None: ...

    layer = Mine()
    assert "mine.weight" in dict(layer.named_parameters())
    layer(numbers()(2, 5, 4)).sum().backward()
    assert layer.mine.weight.grad is not None


def test_what_cannot_be_owned_is_refused() -> None:
    free = torch.ones(4, 4, requires_grad=True)
    expected = "MultiheadAttention: score must hold nn.Parameters and tensors that require no gradient, got "
    for weight in (free, nn.Parameter(torch.ones(4, 4)) * 2):
        with pytest.raises(ValueError) as error:
            MultiheadAttention(8, 2, score=Bilinear(weight, torch.zeros(4)))
        assert str(error.value) == expected + "Bilinear.weight (4, 4)."
    listed = bilinear()
    listed.more = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match=r"must hold tensors and modules as attributes or in tuples, got the "):
        DotProductAttention(normalizer=listed)
    assert not isinstance(MultiheadAttention(8, 2), ScoredAttention) and issubclass(MultiheadAttention, PartLayer)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("trace", ["compile", "export"])
def test_traced_layers_own_their_parts(trace: str) -> None:
    layer = layer_with_both().eval()
    x = numbers()(2, 5, 8)
    expected = attended(layer)
    if trace == "compile":
        torch._dynamo.reset()
        traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(traced(x, x, x, need_weights=False)[0], expected)
        with torch.no_grad():
            layer.get_parameter("score.weight").zero_()
            layer.get_buffer("score.shift.0").zero_()
        torch.testing.assert_close(traced(x, x, x, need_weights=False)[0], attended(layer))
    else:
        program = torch.export.export(layer, (x, x, x), {"need_weights": False})
        assert {"score.weight", "score.shift.0", "normalizer.heat"} <= set(program.state_dict)
        torch.testing.assert_close(program.module()(x, x, x, need_weights=False)[0], expected)
