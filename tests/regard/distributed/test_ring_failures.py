"""What happens where ranks are missing: one sentence, in bounded time."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard import engines, masks, normalizers, scores
from regard.distributed import ContextParallel, ring_attention, shard_positions, sum_gradients
from regard.engines.problem import Problem

#: Seconds that a group waits for a rank that does not answer.
PATIENCE = 3
#: Seconds in which a call that is refused, and the next call, are done.
PROMPT = 20


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
        with pytest.raises(ValueError, match="group must be a ProcessGroup that contains this process"):
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
            assert "of the group died or timed out (" in message
            assert "\n" not in message
            assert seconds < 4 * PATIENCE


class Picky(engines.Streaming):
    """An engine that refuses all problems, or those with gradients."""

    name = "picky"

    def __init__(self, refuses: str) -> None:
        self.refuses = refuses

    def refusal(self, problem: Problem) -> str | None:
        refused = self.refuses == "all" or (self.refuses == "gradients" and problem.wants_grad)
        return f"it refuses {self.refuses}" if refused else None


class Near(scores.Score):
    """A score that knows what it is where the keys begin, and nowhere else."""

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def at(self, first_query: int, first_key: int) -> scores.Score | None:
        return None if first_key > 1 else Near()


class Coupled(normalizers.Sigmoid):
    """A normalizer whose weights depend on all scores of a row: sums over some of the keys cannot be added up."""

    row_normalized = True

    def weights(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) / torch.sigmoid(scores).sum(-1, keepdim=True)


def bias(learned: bool) -> masks.Mask:
    return masks.dense(torch.linspace(-1, 1, 24 * 24).view(24, 24).requires_grad_(learned))


def refusals() -> dict[str, tuple[dict[str, Any], str]]:
    """The arguments of calls that a rank refuses, and what it says."""
    able = "attention: engine must be able to run this call, got "
    q = torch.ones(1, 2, 8, 4)
    return {
        "sdpa": ({"engine": "sdpa", "softcap": 2.0}, f"{able}'sdpa': no softcap"),
        "sdpa, score": ({"engine": "sdpa", "score": "laplacian"}, f"{able}'sdpa': Laplacian is not a dot product"),
        "sdpa, gradients": (
            {"engine": "sdpa", "attn_mask": bias(True)},
            f"{able}'sdpa': no gradient to a bias",
        ),
        "fused": ({"engine": "fused", "score": lambda s, *_: s}, f"{able}'fused': no kernel for ScoreMod"),
        "engine": ({"engine": Picky("all")}, f"{able}'picky': it refuses all"),
        "engine, gradients": ({"engine": Picky("gradients")}, f"{able}'picky': it refuses gradients"),
        "no engine": ({"engine": "sdpaa"}, "attention: engine must be one of .*, got 'sdpaa'"),
        "no engine's name": ({"engine": 3}, "attention: engine must be a name or an Engine, got 3"),
        "score": ({"score": Near()}, "ring_attention: score must define Score.at"),
        "normalizer": ({"normalizer": Coupled()}, "ring_attention: normalizer must be 'softmax' or 'sigmoid'"),
        "unmergeable, named": (
            {"normalizer": "sparsemax", "engine": "streaming"},
            "ring_attention: normalizer must be 'softmax' or 'sigmoid'",
        ),
        "mask": ({"attn_mask": masks.padding(torch.tensor([25]))}, "masks.padding: lengths must be at most 24"),
        "dropout": ({"dropout_p": 0.5}, "ring_attention: dropout_p must be 0"),
        "layout": ({"layout": "zig"}, "ring_attention: layout must be one of"),
        "flag": ({"is_causal": 1}, "attention: is_causal must be a bool, got 1"),
        "key": ({"key": None}, "attention: key must be a tensor, got None"),
        "dimensions": ({"key": q[0], "value": q[0]}, "ring_attention: key must have shape "),
        "empty": ({"value": q[:, :, :0]}, "attention: value must have key's length 8, got 0"),
    }


def refuse(rank: int) -> dict[str, float]:
    """Each refusal is said on every rank, and the next call on the group is right; return how long both took."""
    size = dist.get_world_size()
    last = rank == size - 1
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    seconds = {}
    for name, (named, expected) in refusals().items():
        for who in ("all", "all, unchecked", "one"):
            start = time.monotonic()
            refuses = who != "one" or last
            given: dict[str, Any] = {"query": q, "key": k, "value": v, "check": who != "all, unchecked"} | (
                named if refuses else {}
            )
            if not refuses and name == "sdpa, gradients":
                given["attn_mask"] = bias(False)
            if not refuses:
                expected = rf"ring_attention: rank {size - 1} cannot run this call, so no rank does \({expected}"
            kind = TypeError if name in ("no engine's name", "flag", "key") else ValueError
            with pytest.raises(kind, match=expected) as info:
                ring_attention(**given)
            assert type(info.value) is kind and "\n" not in str(info.value), info.value
            engine = ("auto", "sdpa", "fused", "streaming", "reference")[len(seconds) % 5]
            attend(engine=engine, is_causal=True).sum().backward()
            seconds[f"{name}, {who}"] = time.monotonic() - start
    return seconds


def allowed(rank: int) -> None:
    """What is refused with gradients alone runs without; and shapes that differ are named rather than refusals."""
    q = torch.randn(1, 2, 8, 4)
    able: list[dict[str, Any]] = [{"engine": "sdpa", "attn_mask": bias(True)}, {"engine": Picky("gradients")}]
    for named in able:
        with torch.no_grad():
            found = ring_attention(q, q, q, **named)
        torch.testing.assert_close(found, ring_attention(q, q, q, **named | {"engine": "auto"}).detach())
    expected = r"query must have the same shape on all ranks, got \(1, 2, 8, 4\) on rank 0 and \(1, 2, 0, 4\) on rank"
    with pytest.raises(ValueError, match=expected):
        last = rank == dist.get_world_size() - 1
        ring_attention(q[:, :, :0] if last else q, q, q, bias(False), engine="sdpa", softcap=1.0 if last else None)
    attend().sum().backward()


def refuse_all(rank: int) -> dict[str, float]:
    allowed(rank)
    return refuse(rank)


@pytest.mark.slow
def test_a_refusal_is_said_on_all_ranks_and_the_next_call_works() -> None:
    for seconds in ranks.run(refuse_all, 3):
        assert len(seconds) == 3 * len(refusals())
        assert not {name: time for name, time in seconds.items() if time > PROMPT}


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
