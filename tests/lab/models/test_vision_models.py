"""Vision transformers and residual networks against the formulas written out, and what their configs refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from regard import AuxRequest
from regard_lab.models import ImageClassifier, ResNet, ResNetConfig, VisionTransformer, VisionTransformerConfig
from regard_lab.models.resnet import ATTENTIONS
from regard_lab.models.resnet import PRESETS as NETWORKS
from regard_lab.models.vision_transformer import PRESETS

SMALL: dict[str, Any] = {"image": 12, "patch": 3, "width": 8, "layers": 2, "heads": 2, "channels": 2}


def transformer(**changes: Any) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(VisionTransformerConfig(**SMALL | changes)).double().eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.2 * torch.randn_like(each))
    return model


def by_hand(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return the rows of images, patch by patch and head by head, in the words of the papers."""
    config, state = model.config, model.state_dict()
    p, E, H = config.patch, config.width, config.heads
    x = images
    for stage in range(config.stem):  # of one convolution each
        conv, bn = (f"stem.{4 * stage + i}" for i in range(2))
        x = F.conv2d(x, state[f"{conv}.weight"], padding=1)
        mean, var = state[f"{bn}.running_mean"], state[f"{bn}.running_var"]
        x = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
        x = (x * state[f"{bn}.weight"][:, None, None] + state[f"{bn}.bias"][:, None, None]).clamp(min=0)
        B, C, h, w = x.shape
        x = x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(B, C, h // 2, 2, w // 2, 2).amax((3, 5))
    B, C, h, w = x.shape[0], x.shape[1], x.shape[2] // p, x.shape[3] // p
    places = [(row, column) for row in range(h) for column in range(w)]
    weight = state["patches.weight"].flatten(1)
    rows = [
        x[:, :, row * p : row * p + p, column * p : column * p + p].flatten(1) @ weight.T + state["patches.bias"]
        for row, column in places
    ]
    T = config.leading
    if T:
        rows = [*(state["tokens"][i].expand(B, E) for i in range(T)), *rows]
    x = torch.stack(rows, 1)
    if config.positions == "learned":
        x = x + state["positions"]
    elif config.positions == "sinusoidal":
        for i, place in enumerate(places):
            for axis, at in enumerate(place):
                for j in range(E // 4):
                    angle = at / 10000 ** (2 * j / (E // 2))
                    x[:, T + i, axis * E // 2 + 2 * j] += math.sin(angle)
                    x[:, T + i, axis * E // 2 + 2 * j + 1] += math.cos(angle)
    shown = torch.ones(len(rows), len(rows), dtype=torch.bool)
    for i, (a, b) in enumerate(places):
        for j, (c, d) in enumerate(places):
            if config.window:
                shown[T + i, T + j] = max(abs(a - c), abs(b - d)) <= config.window

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    for i in range(config.layers):
        at = f"blocks.{i}"
        read = norm(x, f"{at}.attention_norm")
        q, k, v = (read @ state[f"{at}.attention.qkv.weight"].T + state[f"{at}.attention.qkv.bias"]).chunk(3, -1)
        heads = []
        for head in range(H):
            of = slice(head * E // H, (head + 1) * E // H)
            scores = q[..., of] @ k[..., of].transpose(1, 2) / (E // H) ** 0.5
            heads.append(scores.masked_fill(~shown, -math.inf).softmax(-1) @ v[..., of])
        x = x + torch.cat(heads, -1) @ state[f"{at}.attention.out.weight"].T + state[f"{at}.attention.out.bias"]
        hidden = norm(x, f"{at}.feed_forward_norm") @ state[f"{at}.feed_forward.up.weight"].T
        hidden = hidden + state[f"{at}.feed_forward.up.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        x = x + hidden @ state[f"{at}.feed_forward.down.weight"].T + state[f"{at}.feed_forward.down.bias"]
    return norm(x, "norm")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"distilled": True, "window": 1},
        {"positions": "sinusoidal", "pooling": "mean"},
        {"positions": "none", "class_token": False, "pooling": "attention"},
        {"stem": 2, "stem_layers": 1, "stem_width": 3, "patch": 1, "class_token": False, "pooling": "attention"},
    ],
)
@torch.no_grad()
def test_rows_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    model = transformer(**changes)
    if model.config.stem:
        model.train()(torch.randn(5, 2, 12, 12).double())  # moves what batch norms know
        model.eval()
    images = torch.randn(3, 2, 12, 12).double()
    expected = by_hand(model, images)
    found = model(images)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    patches = expected[:, model.config.leading :]
    if model.config.pooling == "attention":
        weights = (patches @ model.weigh.weight[0] + model.weigh.bias).softmax(1)
        pooled = torch.einsum("bp,bpe->be", weights, patches)
    else:
        pooled = expected[:, 0] if model.config.pooling == "first" else patches.mean(1)
    torch.testing.assert_close(model.pool(found), pooled, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_attention_is_told_and_changes_no_bit() -> None:
    model, aux = transformer(window=1), []
    images = torch.randn(1, 2, 12, 12).double()
    found = model(images, return_aux=AuxRequest(weights=True), aux=aux)
    assert torch.equal(found, model(images)) and len(aux) == 2
    weights = aux[0].weights
    assert weights.shape == (1, 2, 17, 17) and bool((weights[..., 1, 4] == 0).all())  # the corner's row is 4 wide
    assert bool((weights[..., 0, :] > 0).all())  # the class token sees all


@pytest.mark.parametrize("score", ["cosine", "gaussian", "additive", "general", "location"])
@pytest.mark.parametrize("normalizer", ["softmax", "sparsemax", "sigmoid"])
def test_any_score_and_normalizer_learn(score: str, normalizer: str) -> None:
    model = ImageClassifier(transformer(score=score, normalizer=normalizer, layers=1), ["a", "b"]).double()
    F.cross_entropy(model(torch.randn(3, 2, 12, 12).double()), torch.tensor([0, 1, 0])).backward()
    for name, each in model.named_parameters():
        assert each.grad is not None and bool(each.grad.isfinite().all()), name


@settings(deadline=None, max_examples=examples(15))
@given(st.integers(1, 3), st.integers(3, 20), st.integers(3, 20), st.sampled_from(["learned", "sinusoidal", "none"]))
def test_any_size_of_image(B: int, H: int, W: int, positions: str) -> None:
    model = VisionTransformer(VisionTransformerConfig(**SMALL | {"positions": positions, "layers": 1})).eval()
    with torch.no_grad():
        found = model(torch.randn(B, 2, H, W))
        whole = model(torch.randn(B, 2, H // 3 * 3, W // 3 * 3))
    assert found.shape == whole.shape == (B, 1 + (H // 3) * (W // 3), 8) and bool(found.isfinite().all())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_residual_network_holds_any_mechanism(attention: str) -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(channels=1, features=8, layers=1, attention=attention)).double()
    kinds = [type(block.attention) for block in model.blocks]
    assert len(set(kinds)) == 1 and (kinds[0] is torch.nn.Identity) == (attention == "none")
    images = torch.randn(4, 1, 13, 9, dtype=torch.float64, requires_grad=True)
    found = model(images)
    assert found.shape == (4, 32, 4, 3)
    model.pool(found).square().sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    x = model.stem(images)
    for block in model.blocks:  # the formula, of the mechanism that is in it
        branch = block.second(F.relu(block.first(x)))
        x = F.relu(block.shortcut(x[..., :: block.stride, :: block.stride]) + block.attention(branch))
    torch.testing.assert_close(model.train()(images), x, rtol=1e-10, atol=1e-10)


def test_later_stages_alone_and_wider_blocks() -> None:
    model = ResNet(ResNetConfig(features=8, layers=2, attention="se", attention_from=3, expansion=1.25))
    assert [type(each.attention).__name__ for each in model.blocks] == ["Identity"] * 4 + ["SqueezeExcitation"] * 2
    assert [each.first[0].out_channels for each in model.blocks] == [10, 10, 20, 20, 40, 40]
    assert ResNet(ResNetConfig.preset("large")).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 512, 2, 2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_are_called(name: str) -> None:
    config = VisionTransformerConfig.preset(name)
    if name not in ("tiny", "small", "base"):
        with torch.device("meta"):
            count = sum(each.numel() for each in VisionTransformer(config).parameters())
        published = {"tiny": 5.5e6, "small": 21.7e6, "base": 85.8e6, "large": 303.3e6}[name.partition("-")[2]]
        assert abs(count / published - 1) < 0.01


def test_presets_of_networks() -> None:
    assert all(ResNetConfig.preset(name).width >= 64 for name in NETWORKS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads must divide width 8, got 3"),
        ({"image": 2}, "image must be at least 3 for a patch of 3"),
        ({"class_token": False}, "pooling must be 'mean' or 'attention' without a class token"),
        ({"class_token": False, "pooling": "mean", "distilled": True}, "distilled must be False without a class token"),
        ({"width": 6, "positions": "sinusoidal"}, "width must be a multiple of 4"),
        ({"score": "dott"}, "did you mean 'dot'"),
        ({"pooling": "last"}, "pooling must be one of"),
        ({"window": -1}, "window must be an int from 0 to"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionTransformerConfig(**SMALL | changes)


def test_wrong_networks_and_images() -> None:
    with pytest.raises(ValueError, match="did you mean 'cbam'"):
        ResNetConfig(attention="cban")
    with pytest.raises(ValueError, match="attention_from must be at most stages, 3, got 4"):
        ResNetConfig(attention="se", attention_from=4)
    with pytest.raises(ValueError, match="preset must be one of"):
        ResNetConfig.preset("huge")
    network, model = ResNet(ResNetConfig(features=4, layers=1)), transformer()
    with pytest.raises(ValueError, match=r"images must have shape \(B, 3, H, W\), got \(1, 1, 8, 8\)"):
        network(torch.zeros(1, 1, 8, 8))
    with pytest.raises(ValueError, match="have at least 1 pixel a side"):
        network(torch.zeros(1, 3, 0, 8))
    with pytest.raises(TypeError, match="be a float tensor"):
        model(torch.zeros(1, 2, 12, 12, dtype=torch.uint8))
    with pytest.raises(ValueError, match="have at least 3 pixels a side"):
        model(torch.zeros(1, 2, 12, 2).double())
    with pytest.raises(ValueError, match="labels must be at least two, all different"):
        ImageClassifier(network, ["a", "a"])
    with pytest.raises(ValueError, match="teacher must be False for a model without a distillation token"):
        ImageClassifier(network, ["a", "b"], teacher=True)


def test_a_frozen_network_keeps_what_its_batch_norms_know() -> None:
    model = ImageClassifier(ResNet(ResNetConfig(features=4, layers=1)), ["a", "b"])
    model.model.requires_grad_(False)
    before = {name: each.clone() for name, each in model.model.state_dict().items()}
    model.train()(torch.randn(4, 3, 16, 16))
    assert model.training and not model.model.training
    assert all(torch.equal(each, before[name]) for name, each in model.model.state_dict().items())
