"""Kinds of attention in a decoder: causal, the same step by step, and refused where they would ignore something."""

from __future__ import annotations

import pytest
import torch

from regard import AuxRequest, masks
from regard_lab.models import DecoderLM, DecoderLMConfig
from regard_lab.models.mixers import MIXERS
from regard_lab.models.slot_cache import Slots

KINDS = sorted(MIXERS)


def model(kind: str, **changes: object) -> DecoderLM:
    torch.manual_seed(0)
    turned = "rotary" if MIXERS[kind].rotary else "none"
    sizes: dict[str, object] = {
        "width": 32,
        "layers": 2,
        "heads": 4,
        "block": 4,
        "blocks_chosen": 3,
        "positions": turned,
    }
    return DecoderLM(DecoderLMConfig(50, attention=kind, **{**sizes, **changes})).eval().double()


def tokens(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_knows_none_that_comes_later(kind) -> None:
    made, text = model(kind), tokens(13)
    other = text.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 50
    first, second = made(text), made(other)
    torch.testing.assert_close(first[:, :9], second[:, :9], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(first[:, 9:], second[:, 9:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_are_the_whole(kind) -> None:
    made, text = model(kind), tokens(13)
    caches = made.caches()
    steps = [made(part, caches=caches) for part in text.split([6, 1, 1, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), made(text), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind) -> None:
    made = model(kind).train()
    made(tokens(13)).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("kind", ["fox", "moba", "nsa"])
def test_masks_that_would_be_ignored_are_refused(kind) -> None:
    made, text = model(kind), tokens(6)
    with pytest.raises(ValueError, match=r"DecoderLM: mask must be None with .*, which makes its mask itself"):
        made(text, mask=masks.document(torch.tensor([0, 0, 0, 1, 1, 1])))
    with pytest.raises(ValueError, match=r"DecoderLM: return_aux must be None with"):
        made.features(text, aux=[], return_aux=AuxRequest(weights=True))
    for changes in ({"window": 4}, {"positions": "alibi"}, {"attention_dropout": 0.5}):
        with pytest.raises(ValueError, match=r"DecoderLMConfig: (window|positions|attention_dropout) must be"):
            model(kind, **changes)


@torch.no_grad()
def test_sequences_of_other_lengths_are_refused() -> None:
    made, slots = model("nsa"), Slots()
    slots.lengths = [3, 2]
    caches = made.slot_caches(slots)
    for row, length in enumerate(slots.lengths):
        own = made.caches()
        made(tokens(length, 1), caches=own)
        for slot, cache in zip(caches, own):
            slot.load(row, *cache.sequence(0))
    with pytest.raises(ValueError, match=r"DecoderLM: caches must be sequences of one length with native sparse"):
        made(tokens(1), caches=caches)


def test_the_planner_refuses_what_it_does_not_count() -> None:
    from regard_lab.planner.shapes import shape_of

    with pytest.raises(ValueError, match=r"plan: attention must be one of those whose work is planned \(softmax"):
        shape_of(model("nsa").config, "model")
