"""What is changed in place between the passes is an error, as anywhere in torch, or has no influence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import inputs, normal
from engines_here import HERE
from torch import Tensor

import regard
from regard import masks, scores

B, H, L, S = 2, 4, 23, 29

#: What makes a tensor, what makes arguments of it, and how it is changed.
HELD: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], dict[str, Any]], Callable[[Tensor], Any]]] = {
    "lengths": (lambda: torch.tensor([12, 25]), lambda t: {"attn_mask": masks.padding(t)}, lambda t: t.sub_(5)),
    "keep": (lambda: normal(B, S) > 0, lambda t: {"attn_mask": masks.key_padding(t)}, lambda t: t.logical_not_()),
    "offset": (lambda: torch.tensor([3, 5]), lambda t: {"attn_mask": masks.causal(offset=t)}, lambda t: t.add_(9)),
    "ids": (
        lambda: torch.arange(L + S).view(1, -1).repeat(B, 1) // 9,
        lambda t: {"attn_mask": masks.document(t[:, :L], t[:, -S:])},
        lambda t: t.zero_(),
    ),
    "dense": (lambda: normal(L, S) > 0, lambda t: {"attn_mask": t}, lambda t: t.fill_(True)),
    "bias": (lambda: normal(L, S), lambda t: {"attn_mask": t}, lambda t: t.zero_()),
    "slopes": (lambda: torch.ones(H), lambda t: {"attn_mask": masks.alibi(t, align="upper_left")}, lambda t: t.zero_()),
    "both": (
        lambda: torch.tensor([12, 25]),
        lambda t: {"attn_mask": masks.causal("upper_left") & (masks.padding(t) | masks.sinks(2))},
        lambda t: t.sub_(5),
    ),
    "bandwidth": (lambda: torch.tensor(1.0), lambda t: {"score": scores.Gaussian(t)}, lambda t: t.mul_(3)),
    "weight": (lambda: normal(8, 8), lambda t: {"score": scores.General(t)}, lambda t: t.zero_()),
}


def raised_or_right(output: Tensor, leaves: list[Tensor], right: tuple[Tensor, ...]) -> None:
    try:
        found = torch.autograd.grad(output.square().sum(), leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a, b), "a gradient silently belongs to other numbers than the output"


#: All but a Gaussian of float32, which engine flex does not run.
PAIRS = [(name, engine) for name in HELD for engine in HERE if (name, engine) != ("bandwidth", "flex")]


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_a_tensor_that_a_part_holds(
    name: str, engine: str, small_tiles: Callable[..., None], small_strips: Callable[..., None]
) -> None:
    small_tiles()
    small_strips()
    make, arguments, change = HELD[name]
    leaves, held = inputs(B, H, H, L, S), make()
    output = regard.attention(*leaves, **arguments(held), engine=engine)
    right = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
    change(held)
    raised_or_right(output, leaves, right)


@pytest.mark.parametrize("engine", ["auto", *HERE])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_input(index: int, engine: str, small_tiles: Callable[..., None], small_strips: Callable[..., None]) -> None:
    small_tiles()
    small_strips()
    for named in ({}, {"is_causal": True}, {"attn_mask": masks.sinks(5)}):
        leaves = [t * 1 for t in inputs(B, H, H, L, S)]
        output = regard.attention(*leaves, **named, engine=engine)
        right = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
        with torch.no_grad():
            leaves[index].mul_(2)
        raised_or_right(output, leaves, right)


@pytest.mark.parametrize("engine", ["auto", *HERE])
@pytest.mark.parametrize("V", [3, 8, 11])
def test_an_output_can_be_viewed_flat(V: int, engine: str) -> None:
    query, key, value = inputs(B, H, H, L, S, V=V)
    for named in ({}, {"is_causal": True}, {"attn_mask": normal(L, S) > 0}):
        output = regard.attention(query, key, value, **named, engine=engine)
        assert output.view(B, H, L * V).shape == (B, H, L * V)


@pytest.mark.parametrize("engine", ["auto", *HERE])
def test_arguments_are_left_as_they_came(engine: str) -> None:
    leaves, mask = inputs(B, H, H, L, S), normal(L, S)
    before = [t.detach().clone() for t in (*leaves, mask)]
    output = regard.attention(*leaves, mask, engine=engine)
    output.square().sum().backward()
    for a, b in zip((*leaves, mask), before, strict=True):
        assert torch.equal(a.detach(), b)
        assert a._version == 0
    assert output.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in leaves}
