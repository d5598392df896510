"""What happens where ranks are missing: one sentence, in bounded time."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist

import regard
from regard.distributed import ContextParallel, ring_attention, shard_positions, sum_gradients

#: Seconds that a group waits for a rank that does not answer.
PATIENCE = 3


def attend(group: dist.ProcessGroup | None = None, **named: object) -> torch.Tensor:
    q = torch.ones(1, 2, 8, 4, requires_grad=True)
    output = ring_attention(q, q, q, group=group, **named)  # type: ignore[arg-type]
    assert isinstance(output, torch.Tensor)
    return output


def failure(group: dist.ProcessGroup | None, **named: object) -> tuple[str, float]:
    start = time.monotonic()
    try:
        attend(group, **named).sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def alone(rank: int) -> float:
    """A group of one is a plain call; who is in no group is told so."""
    own = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="group must be a ProcessGroup that this process is a member of"):
            attend(own)
        return 0.0
    q = torch.randn(1, 2, 8, 4)
    context = ContextParallel(own, "zigzag")
    assert torch.equal(context.attend(q, q, q, is_causal=True), regard.attention(q, q, q, is_causal=True))
    assert context.positions(8).tolist() == list(range(8))
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    context.sum_gradients([weight, torch.ones(2, requires_grad=True)])
    return float(weight.grad.sum())


def sums(rank: int) -> list[object]:
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    weights[0].grad = torch.full((2,), float(rank + 1))
    if rank:
        weights[1].grad = torch.ones(2)
    sum_gradients(weights)
    sum_gradients([])
    empty = ring_attention(*(torch.ones(1, 2, 0, 4) for _ in range(3)))
    assert isinstance(empty, torch.Tensor) and empty.shape == (1, 2, 0, 4)
    return [None if w.grad is None else w.grad.tolist() for w in weights]


def lose_ranks(rank: int) -> tuple[list[object], tuple[str, float], tuple[str, float]]:
    """The third rank sleeps, and the fourth dies."""
    alone(rank)
    summed = sums(rank)
    wait = timedelta(seconds=PATIENCE)  # a new group does not take it from the others
    first, second = dist.new_group([0, 1, 2], timeout=wait), dist.new_group([0, 1, 3], timeout=wait)
    attend().sum().backward()
    if rank == 2:
        time.sleep(40 * PATIENCE)
    if rank == 3:
        attend(second, check=False).sum().backward()
        os._exit(1)
    attend(second, check=False).sum().backward()
    return summed, failure(second, check=False), failure(first, check=False)


@pytest.mark.campaign
def test_a_lost_rank_is_an_error_in_bounded_time() -> None:
    """And before, small groups and sums of gradients work: starting processes takes longer than all of it."""
    found = ranks.run(lose_ranks, 4, answers=2)
    for summed, died, slept in found[:2]:
        assert summed == [[10.0, 10.0], [3.0, 3.0], None]
        for message, seconds in (died, slept):
            assert message.startswith("ring_attention: "), message
            assert "of the group died, or passed its timeout (" in message
            assert "\n" not in message
            assert seconds < 4 * PATIENCE


def test_without_a_group_nothing_can_be_done() -> None:
    q = torch.ones(1, 2, 8, 4)
    expected = "ring_attention: group must belong to an initialized torch.distributed"
    with pytest.raises(ValueError, match=expected):
        ring_attention(q, q, q)
    with pytest.raises(ValueError, match="shard_positions: group must belong to an initialized"):
        shard_positions(8)
    with pytest.raises(
        ValueError, match="ContextParallel: layout must be one of 'contiguous', 'zigzag', got 'striped'"
    ):
        ContextParallel(layout="striped")  # type: ignore[arg-type]
