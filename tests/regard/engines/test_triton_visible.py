"""What engine ``triton`` converts masks to: the pairs that they show, without waiting for a device."""

import pytest
import torch
from tests.helpers.no_waiting import NoWaiting
from tests.helpers.stand_in_device import DEVICE, stand_in

from regard import masks
from regard.engines.problem import Call, Problem
from regard.engines.triton import visible
from regard.engines.triton.visible import VisibleKeys

B, H, L, S = 2, 2, 21, 43
TILE = 8, 16


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def lists(blocks):
    drawn = torch.randint(-1, blocks, (B, H, L, 5), generator=torch.Generator().manual_seed(1))
    drawn[0, 0, :8] = torch.arange(5)
    return drawn


MASKS = {
    "causal": lambda: masks.causal(align="lower_right"),
    "window": lambda: masks.window(5, 2, "lower_right"),
    "padding": lambda: masks.padding(torch.tensor([S, 0])),
    "packed": lambda: masks.from_cu_seqlens(torch.tensor([0, 9, 9, L]), torch.tensor([0, 12, 15, S])),
    "selected": lambda: masks.selected(lists(S)),
    "selected blocks": lambda: masks.selected(lists(5), 9),
    "selected and causal": lambda: masks.selected(lists(5), 9) & masks.causal(align="lower_right"),
    "dilated": lambda: masks.dilated(3, "upper_left"),
    "tensor": lambda: masks.dense(normal(B, H, L, S) > 0),
    "padding of an odd shape": lambda: masks.padding(torch.tensor([S, 9])) & masks.dilated(2, "upper_left"),
    "complement of documents": lambda: ~(masks.document(torch.arange(L) // 9, torch.arange(S) // 10)),
    "marked keys": lambda: masks.key_padding(normal(B, S) > 0),
    "bias": lambda: masks.alibi(H, align="lower_right") & masks.causal(align="lower_right"),
}


#: Whether each query sees one run of keys is read on the host for these.
READ = ("complement of documents",)


def pairs(found):
    """Return which pairs are visible, (b, h, L, S), by following lists, intervals, bits and the bias."""
    shown = torch.zeros(B, H, L, S, dtype=torch.bool)
    rows, cols = TILE
    if found.by_query is None:
        shown[:] = True
    else:
        by_query, by_key = (t.expand(B, H, -1, -1) for t in (found.by_query, found.by_key))
        for b in range(B):
            for h in range(H):
                for block, (full, seen, *places) in enumerate(by_query[b, h].tolist()):
                    for order, col in enumerate(places[:seen]):
                        assert block in by_key[b, h, col, 2 : 2 + int(by_key[b, h, col, 1])].tolist()
                        q, k = slice(block * rows, block * rows + rows), slice(col * cols, col * cols + cols)
                        if order < full or found.tiles is None:
                            shown[b, h, q, k] = True
                            continue
                        number = int(found.tiles.expand(B, H, -1, -1)[b, h, block, col])
                        bits = (found.words[number].unsqueeze(-1) >> torch.arange(32)) & 1
                        part = bits.flatten(1)[:, :cols].bool()
                        shown[b, h, q, k] = part[: shown[b, h, q, k].shape[0], : shown[b, h, q, k].shape[1]]
    if found.start is not None:
        k = torch.arange(S)
        shown &= (k >= found.start.unsqueeze(-1)) & (k < found.stop.unsqueeze(-1))
    if found.bias is not None:
        shown &= found.bias > -torch.inf
    return shown


def problem(mask, device="cpu"):
    query, key = (torch.zeros(B, H, n, 4, device=device) for n in (L, S))
    return Problem.of(Call(query, key, key, mask))


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_the_pairs_are_those_of_the_mask(name, step):
    found = VisibleKeys.of(problem(MASKS[name]()), None if step else lambda _: TILE)
    index = [torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate((B, H, L, S))]
    assert torch.equal(pairs(found), MASKS[name]().bind(masks.Extent(B, H, L, S), "cpu")(*index))


@pytest.mark.parametrize("name", MASKS)
def test_many_bits_are_counted(name, monkeypatch):
    whole = pairs(VisibleKeys.of(problem(MASKS[name]()), lambda _: TILE))
    monkeypatch.setattr(visible, "MOST_BITS", 0)
    assert torch.equal(pairs(VisibleKeys.of(problem(MASKS[name]()), lambda _: TILE)), whole)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", [name for name in MASKS if name not in READ])
def test_nothing_waits_for_the_device(name, step):
    mask = MASKS[name]()
    wanted = VisibleKeys.of(problem(mask), None if step else lambda _: TILE)
    with stand_in():
        there = mask.map_tensors(lambda t: t.to(DEVICE))
        given = problem(there, DEVICE)
        with NoWaiting() as mode:
            found = VisibleKeys.of(given, None if step else lambda _: TILE)
        assert mode.names
        for field in ("start", "stop", "by_query", "by_key", "tiles", "words", "bias"):
            a, b = getattr(found, field), getattr(wanted, field)
            assert (a is None) == (b is None), field
            if a is not None:
                assert a.device == DEVICE and torch.equal(a.cpu(), b), field


def test_the_mode_finds_what_waits():
    with stand_in(), NoWaiting():
        there = torch.arange(3).to(DEVICE)
        for waits in (there.nonzero, lambda: int(there[1]), lambda: there[there > 1]):
            with pytest.raises(AssertionError, match="waits for the device"):
                waits()
