"""Layers over images: any height and width, maps, gradients, memory formats, identities, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.nn.image.channels import (
    CBAM,
    ECA,
    ChannelAttention,
    MultiheadConvAttention,
    SpatialAttention,
    SqueezeExcitation,
)
from regard.nn.image.non_local import MODES, NonLocalBlock, SelfAttention2d

F64 = torch.float64
#: Smaller than kernels and pools in one direction or both, and what is no multiple of a pool.
SIZES = ((1, 1), (1, 7), (7, 2), (2, 5))

GATES: dict[str, Callable[..., nn.Module]] = {
    "SqueezeExcitation": lambda **how: SqueezeExcitation(6, 2, **how),
    "ECA": lambda **how: ECA(6, **how),
    "ChannelAttention": lambda **how: ChannelAttention(6, 2, **how),
    "SpatialAttention": SpatialAttention,
    "CBAM": lambda **how: CBAM(6, 2, **how),
    "MultiheadConvAttention": lambda **how: MultiheadConvAttention(6, (1, 2, 5), **how),
}
READS: dict[str, Callable[..., nn.Module]] = {
    **{f"NonLocalBlock {mode}": lambda mode=mode, **how: NonLocalBlock(6, mode=mode, **how) for mode in MODES},
    **{
        f"NonLocalBlock {mode}, pooled": lambda mode=mode, **how: NonLocalBlock(6, mode=mode, pool=2, **how)
        for mode in MODES
    },
    "NonLocalBlock with batch norm": lambda **how: NonLocalBlock(6, batch_norm=True, **how),
    "SelfAttention2d": lambda **how: SelfAttention2d(6, 2, **how),
    "SelfAttention2d, pooled": lambda **how: SelfAttention2d(6, pool=3, **how),
}
MAKERS = {**GATES, **READS}
every_layer = pytest.mark.parametrize("name", list(MAKERS))
every_read = pytest.mark.parametrize("name", list(READS))


def picture(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def made(name: str, asleep: bool = False) -> nn.Module:
    """Return a layer, whose zeros are replaced unless it is to be as it begins."""
    torch.manual_seed(1)
    layer = MAKERS[name](dtype=F64)
    for own, parameter in layer.named_parameters():
        if not asleep and own.partition(".")[0] in ("gamma", "w_z", "norm"):
            nn.init.normal_(parameter)
    return layer


def flat(maps: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return maps if isinstance(maps, tuple) else (maps,)


@every_layer
def test_any_height_and_width(name: str) -> None:
    for H, W in SIZES:
        layer, x = made(name), picture(2, 6, H, W).requires_grad_()
        output = layer(x)
        assert output.shape == x.shape and output.isfinite().all()
        output.square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()
        for own, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), own


@every_layer
def test_asking_for_the_map_changes_nothing(name: str) -> None:
    for H, W in SIZES:
        layer, x = made(name).eval(), picture(2, 6, H, W)
        output, maps = layer(x, return_map=True)
        assert torch.equal(output, layer(x))
        for each in flat(maps):
            assert each.shape[0] == 2
            if name in GATES:
                assert each.shape[2:] in ((H, W), (1, 1))
                assert (each > 0).all() and (each < 1).all()
            else:
                assert each.shape[1:3] == (H, W)


@pytest.mark.parametrize("name", list(GATES))
def test_the_output_is_the_input_times_its_gates(name: str) -> None:
    x = picture(2, 6, 5, 7)
    output, maps = made(name)(x, return_map=True)
    for each in flat(maps):
        x = x * each
    torch.testing.assert_close(output, x, rtol=1e-14, atol=0)


@every_read
def test_the_map_tells_what_was_read(name: str) -> None:
    layer, x = made(name).eval(), picture(2, 6, 5, 7)
    output, weights = layer(x, return_map=True)
    k = layer.pool
    assert weights.shape == (2, 5, 7, -(-5 // k), -(-7 // k))
    if not any(mode in name for mode in ("dot", "concat")):
        assert (weights >= 0).all() and (weights <= 1).all()
        torch.testing.assert_close(weights.sum((3, 4)), torch.ones(2, 5, 7, dtype=F64))
    if isinstance(layer, NonLocalBlock):
        value, last = layer.g(x.permute(0, 2, 3, 1)), layer.w_z
    else:
        value, last = layer.h(x.permute(0, 2, 3, 1)), layer.v
    value = torch.nn.functional.max_pool2d(value.permute(0, 3, 1, 2), k, ceil_mode=True)
    added = last(torch.einsum("bijuv,bcuv->bijc", weights, value)).permute(0, 3, 1, 2)
    if isinstance(layer, SelfAttention2d):
        added = layer.gamma * added
    elif layer.norm is not None:
        added = layer.norm(added)
    torch.testing.assert_close(output, x + added, rtol=1e-10, atol=1e-10)


@every_read
@pytest.mark.parametrize("training", [True, False])
def test_what_adds_is_the_identity_at_first_and_can_learn(name: str, training: bool) -> None:
    layer, x = made(name, asleep=True).train(training), picture(2, 6, 5, 7)
    assert torch.equal(layer(x), x)
    layer(x).pow(3).sum().backward()
    first = layer.gamma if isinstance(layer, SelfAttention2d) else (layer.norm or layer.w_z).weight
    assert first.grad is not None and first.grad.any()


@every_layer
def test_the_memory_format_does_not_matter(name: str) -> None:
    layer, x = made(name).eval(), picture(2, 6, 5, 7)
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(last), layer(x), rtol=1e-12, atol=1e-12)
    assert layer(last).is_contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous()
    torch.testing.assert_close(layer(x.mT.contiguous().mT), layer(x), rtol=1e-12, atol=1e-12)


@every_layer
def test_gradients_are_right(name: str) -> None:
    layer, x = made(name), picture(2, 6, 2, 3).requires_grad_()
    parameters = [p.detach().requires_grad_() for p in layer.parameters()]
    names = [own for own, _ in layer.named_parameters()]
    if hasattr(layer, "engine"):
        layer.engine = "reference"

    def call(x: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


@pytest.mark.campaign(keep=1)
@every_layer
def test_maps_come_out_of_a_compiled_layer(name: str) -> None:
    layer, x = made(name).eval(), picture(2, 6, 1, 5)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for a, b in zip(compiled(x, return_map=True), layer(x, return_map=True)):
        for one, other in zip(flat(a), flat(b)):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [*(f"NonLocalBlock {mode}" for mode in MODES), "SelfAttention2d"])
def test_places_have_no_order(name: str) -> None:
    layer, x = made(name), picture(2, 6, 4, 3)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))

    def moved(t: Tensor) -> Tensor:
        return t.flatten(2)[..., order].unflatten(2, (4, 3))

    torch.testing.assert_close(layer(moved(x)), moved(layer(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("C", "k"), [(1, 1), (2, 1), (16, 3), (64, 3), (128, 5), (256, 5), (512, 5), (2048, 7)])
def test_the_kernel_of_eca_grows_with_the_channels(C: int, k: int) -> None:
    assert ECA(C).conv.weight.shape == (1, 1, k)


def test_channel_gates_know_no_place_and_spatial_gates_no_channel() -> None:
    x = picture(2, 6, 4, 3)
    turned = x.flip(2, 3)
    for name in ("SqueezeExcitation", "ECA", "ChannelAttention"):
        torch.testing.assert_close(made(name)(turned), made(name)(x).flip(2, 3), rtol=1e-12, atol=1e-12)
    mixed = x[:, [3, 1, 0, 2, 5, 4]]
    spatial = made("SpatialAttention")
    torch.testing.assert_close(spatial(mixed), spatial(x)[:, [3, 1, 0, 2, 5, 4]], rtol=1e-12, atol=1e-12)


def test_there_is_at_least_one_hidden_feature() -> None:
    assert SqueezeExcitation(4).fc1.weight.shape == (1, 4)
    assert SelfAttention2d(4).f.weight.shape == (1, 4)
    assert NonLocalBlock(1).theta.weight.shape == (1, 1)
    assert MultiheadConvAttention(2, reduction=16).squeeze[0].weight.shape == (1, 2, 1, 1)
    assert MultiheadConvAttention(2).squeeze[0].weight.shape == (4, 2, 1, 1), "below 1 it widens"


def test_inputs_of_conv_attention_are_joined_along_channels() -> None:
    layer, x = made("MultiheadConvAttention"), picture(2, 6, 5, 7)
    assert torch.equal(layer(*x.split([1, 2, 3], 1)), layer(x))


def test_heads_are_added_or_averaged() -> None:
    x = picture(2, 6, 5, 7)
    added = made("MultiheadConvAttention")
    averaged = MultiheadConvAttention(6, (1, 2, 5), combine="mean", dtype=F64)
    averaged.load_state_dict(added.state_dict())
    (_, one), (_, other) = added(x, return_map=True), averaged(x, return_map=True)
    torch.testing.assert_close(one.logit(), 3 * other.logit())


def test_a_head_of_conv_attention_sees_as_far_as_its_kernel() -> None:
    layer = MultiheadConvAttention(1, (3,), 1.0, dtype=F64)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.1, 1.0)  # so that no ReLU is at rest
    x = picture(1, 1, 9, 9).abs().requires_grad_()
    _, gates = layer(x, return_map=True)
    (reached,) = torch.autograd.grad(gates[0, 0, 4, 4], x)
    rows = reached[0, 0].abs().sum(1).nonzero().flatten().tolist()
    assert rows == [2, 3, 4, 5, 6], "two to each side: a kernel of 3, and its transpose"


def test_dot_makes_no_weights_and_concat_does() -> None:
    def saved(mode: str) -> int:
        """Return the size of the largest tensor that waits for the backward pass."""
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            NonLocalBlock(2, mode=mode)(torch.zeros(1, 2, 32, 32))
        return max(sizes)

    assert saved("dot") <= 2 * 32**2
    assert saved("concat") == 32**4


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: SqueezeExcitation(0), ValueError, "SqueezeExcitation: channels must be an int of at least 1, got 0."),
    (lambda: CBAM(4, 0), ValueError, "CBAM: reduction must be an int of at least 1, got 0."),
    (lambda: CBAM(4, kernel_size=4), ValueError, "CBAM: kernel_size must be odd, got 4."),
    (lambda: SpatialAttention(2), ValueError, "SpatialAttention: kernel_size must be odd, got 2."),
    (lambda: ECA(4, 2), ValueError, "ECA: kernel_size must be odd, got 2."),
    (lambda: ECA(4, gamma=0), ValueError, "ECA: gamma must be a positive finite number, got 0."),
    (lambda: ECA(4, b=float("inf")), ValueError, "ECA: b must be a finite number, got inf."),
    (lambda: ECA(4, b="1"), TypeError, "ECA: b must be a finite number, got '1'."),  # type: ignore[arg-type]
    (
        lambda: NonLocalBlock(4, mode="embeded"),
        ValueError,
        "NonLocalBlock: mode must be one of 'concat', 'dot', 'embedded', 'gaussian', got 'embeded' "
        "(did you mean 'embedded'?).",
    ),
    (
        lambda: NonLocalBlock(4, mode=1),  # type: ignore[arg-type]
        TypeError,
        "NonLocalBlock: mode must be one of 'concat', 'dot', 'embedded', 'gaussian', got 1.",
    ),
    (lambda: NonLocalBlock(4, pool=0), ValueError, "NonLocalBlock: pool must be an int of at least 1, got 0."),
    (
        lambda: SelfAttention2d(4, 0.5),  # type: ignore[arg-type]
        TypeError,
        "SelfAttention2d: reduction must be an int of at least 1, got 0.5.",
    ),
    (
        lambda: MultiheadConvAttention(4, ()),
        TypeError,
        "MultiheadConvAttention: kernel_sizes must be a tuple or list of at least one int, got ().",
    ),
    (
        lambda: MultiheadConvAttention(4, (3, 0)),
        ValueError,
        "MultiheadConvAttention: kernel_sizes[1] must be an int of at least 1, got 0.",
    ),
    (
        lambda: MultiheadConvAttention(4, reduction=0),
        ValueError,
        "MultiheadConvAttention: reduction must be a positive finite number, got 0.",
    ),
    (
        lambda: MultiheadConvAttention(4, combine="max"),
        ValueError,
        "MultiheadConvAttention: combine must be one of 'mean', 'sum', got 'max' (did you mean 'mean'?).",
    ),
    (
        MultiheadConvAttention(4),
        TypeError,
        "MultiheadConvAttention: inputs must be at least one image (B, C, H, W), got none.",
    ),
    (
        lambda: MultiheadConvAttention(4)(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 4)),
        ValueError,
        "MultiheadConvAttention: inputs[1] must have batch, height and width of inputs[0] (1, 2, 3, 3), "
        "got (1, 2, 3, 4).",
    ),
    (
        lambda: MultiheadConvAttention(4)(torch.zeros(1, 2, 3, 3), torch.zeros(1, 1, 3, 3)),
        ValueError,
        "MultiheadConvAttention: inputs must have 4 channels together, got (1, 2, 3, 3), (1, 1, 3, 3).",
    ),
    (
        lambda: SqueezeExcitation(4)(torch.zeros(1, 3, 5, 5)),
        ValueError,
        "SqueezeExcitation: x must have shape (B, 4, H, W), got (1, 3, 5, 5).",
    ),
    (
        lambda: ECA(4)(torch.zeros(4, 5, 5)),
        ValueError,
        "ECA: x must have shape (B, 4, H, W), got (4, 5, 5).",
    ),
    (
        lambda: SpatialAttention()(torch.zeros(1, 4, 0, 5)),
        ValueError,
        "SpatialAttention: x must have at least one channel and pixel, got (1, 4, 0, 5).",
    ),
    (
        lambda: SelfAttention2d(4)(torch.zeros(1, 4, 5, 5, dtype=torch.int64)),
        TypeError,
        "SelfAttention2d: x must be a float tensor (B, 4, H, W), got an int64 tensor of shape (1, 4, 5, 5).",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
