"""LASER, PaTH, tensor product, grouped-tied and multi-matrix factorization attention: limits, caches, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.nn import (
    ForgettingAttention,
    GroupedTiedAttention,
    KVCache,
    LaserAttention,
    MultiMatrixFactorizationAttention,
    PathAttention,
    Rotary,
    SelfAttention,
    TensorProductAttention,
    qk_clip_,
)
from regard.nn.linear import path

LAYERS: dict[str, Callable[[], Any]] = {
    "laser": lambda: LaserAttention(16, 4, num_kv_heads=2, rotary=Rotary(4)),
    "path": lambda: PathAttention(16, 4, num_kv_heads=2, forget=True),
    "tpa": lambda: TensorProductAttention(16, 4, rotary=Rotary(4)),
    "gta": lambda: GroupedTiedAttention(16, 4, num_kv_heads=2, rotary=Rotary(2)),
    "mfa": lambda: MultiMatrixFactorizationAttention(16, 4, head_dim=8, rotary=Rotary(8)),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return LAYERS[name]().double().eval()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
def test_pieces_of_a_sequence_give_what_the_whole_gives(name: str) -> None:
    layer, x, cache = made(name), rows(3, 7, 16), KVCache()
    whole = layer(x, is_causal=True) if name == "laser" else layer(x)
    first = layer(x[:, :4], cache=cache, **({"is_causal": True} if name == "laser" else {}))
    steps = [layer(t, cache=cache) for t in x[:, 4:].split(1, 1)]
    torch.testing.assert_close(torch.cat([first, *steps], 1), whole)


@pytest.mark.parametrize(("name", "numbers"), [("tpa", 4 * (4 + 4)), ("gta", 2 * 4 + 2), ("mfa", 2 * 8)])
def test_what_a_token_takes_in_a_cache(name: str, numbers: int) -> None:
    layer, cache = made(name), KVCache()
    layer(rows(2, 5, 16), cache=cache)
    assert cache.key[:, :, 0].numel() + cache.value[:, :, 0].numel() == 2 * numbers


def test_laser_reads_the_logarithm_of_averaged_exponentials() -> None:
    layer, plain = made("laser"), SelfAttention(16, 4, num_kv_heads=2, rotary=Rotary(4)).double()
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(16))
        plain.out.weight.copy_(torch.eye(16))
        x = rows(2, 6, 16)
        assert (layer(x) >= plain(x) - 1e-12).all()  # Jensen
        layer.qkv.weight *= 1e4  # values of thousands are limited, and stay finite
        found = layer(x, masks.causal())
    assert found.isfinite().all() and found.abs().max() <= 60 + 1e-9


def test_hidden_values_do_not_change_what_laser_reads() -> None:
    layer, x = made("laser"), rows(1, 6, 16)
    seen = masks.key_padding(torch.arange(6) < 4)
    right = layer(x, seen)[:, :4]
    for garbage in (1e30, torch.nan):
        other = x.clone()
        other[:, 4:] = garbage
        torch.testing.assert_close(layer(other, seen)[:, :4], right)
    x.requires_grad_()
    empty = layer(x, torch.zeros(6, 6, dtype=torch.bool))
    torch.testing.assert_close(empty, layer.out.bias.expand_as(empty))
    (gradient,) = torch.autograd.grad(empty.sum(), x)
    assert gradient.isfinite().all()


def test_laser_under_autocast_keeps_exponentials() -> None:
    layer = made("laser").float()
    x = 8 * rows(2, 6, 16).float()
    with torch.autocast("cpu", torch.float16):  # e^12 is more than its largest number
        narrow = layer(x, is_causal=True)
    torch.testing.assert_close(narrow.float(), layer(x, is_causal=True), rtol=0.05, atol=0.2)


def test_without_reflections_path_is_forgetting_attention() -> None:
    layer, plain = made("path"), ForgettingAttention(16, 4, num_kv_heads=2).double()
    with torch.no_grad():
        layer.rate.bias.fill_(-1e4)  # β = 0
        for name in ("qkv", "out"):
            getattr(plain, name).load_state_dict(getattr(layer, name).state_dict())
        plain.gate.load_state_dict(layer.forget.state_dict())
        torch.testing.assert_close(layer(rows(2, 6, 16)), plain(rows(2, 6, 16)))


def test_path_in_blocks_is_path_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lengths, found = made("path"), torch.tensor([10, 4]), []
    for size in (128, 3):
        monkeypatch.setattr(path, "_BLOCK", size)
        x, cache = rows(2, 10, 16).requires_grad_(), KVCache()
        with torch.no_grad():
            steps = torch.cat([layer(part, cache=cache) for part in x.split([2, 1, 5, 1, 1], 1)], 1)
            torch.testing.assert_close(steps, layer(x))
        padded = layer(x, lengths)
        layer.zero_grad()
        padded[1, :4].square().sum().backward()
        found.append([steps, padded, x.grad, *(each.grad.clone() for each in layer.parameters())])
    torch.testing.assert_close(*found)


def test_what_is_not_finite_changes_no_earlier_row_of_path() -> None:
    layer, x = made("path"), rows(2, 7, 16)
    right = layer(x)
    x[0, 4] = torch.inf
    found = layer(x)
    torch.testing.assert_close(found[1], right[1])
    torch.testing.assert_close(found[0, :4], right[0, :4])
    assert found[0, 4:].isnan().all()


def test_path_gradients() -> None:
    layer, x = made("path"), rows(1, 4, 16).requires_grad_()
    names = [name for name, _ in layer.named_parameters() if not name.startswith(("qkv", "out"))]
    values = [layer.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: LaserAttention(16, 4, order=1),
            "LaserAttention: order must be 0: a line's value may be negative, got",
        ),
        (lambda: GroupedTiedAttention(12, 4), "GroupedTiedAttention: head_dim must be even, got 3"),
        (lambda: GroupedTiedAttention(16, 4, rotary=Rotary(4)), "rotary must have width head_dim / 2, 2, got 4"),
        (lambda: TensorProductAttention(16, 4, key_rank=0), "TensorProductAttention: key_rank must be"),
        (lambda: MultiMatrixFactorizationAttention(16, 4, query_rank=0), "query_rank must be"),
        (lambda: PathAttention(16, 4, conv_size=0), "width must be"),
    ],
)
def test_settings(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", ["tpa", "gta", "mfa"])
def test_factors_have_no_rows_of_heads_to_clip(name: str) -> None:
    with pytest.raises(TypeError, match="qk_clip_: layer must project queries and keys by linear layers"):
        qk_clip_(made(name), torch.ones(4))


def test_a_capture_sees_their_attention() -> None:
    for name in LAYERS:
        layer = made(name)
        with regard.inspect.capture() as calls:
            layer(rows(1, 5, 16))
        assert len(calls) == 1, name


@pytest.mark.parametrize("normalizer", ["cog", "talking_heads"])
def test_laser_refuses_negative_weights(normalizer: str) -> None:
    with pytest.raises(ValueError, match="LaserAttention: normalizer must have no negative weights"):
        LaserAttention(16, 4, normalizer=normalizer)
