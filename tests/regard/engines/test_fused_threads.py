"""Engine fused among threads and processes: same bits, no trace of what was broken off, no need of a cache."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_calls import inputs, normal, run
from pairwise import across
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import regard
from regard import AuxRequest, masks, normalizers, scores
from regard.engines.fused import pool

pytestmark = pytest.mark.slow

CALLS: dict[str, dict[str, Any]] = {
    "additive": {"score": scores.Additive(normal(8))},
    "causal": {"score": scores.Additive(normal(8)), "is_causal": True},
    "padding": {"score": scores.Additive(normal(8)), "attn_mask": masks.padding(torch.tensor([200, 3]))},
    "alibi": {"score": scores.Additive(normal(8)), "attn_mask": masks.alibi(4, align="upper_left")},
    "gaussian": {"score": "gaussian"},
    "laplacian": {"score": scores.Laplacian(1.5)},
    "epanechnikov": {"score": scores.Epanechnikov(3.5)},
    "sinks": {"attn_mask": masks.causal("upper_left") & (masks.window(9, 0, align="upper_left") | masks.sinks(4))},
    "relative": {"attn_mask": masks.relative(normal(4, 81), align="upper_left")},
    "bias": {"attn_mask": masks.causal("upper_left") & masks.dense(normal(1, 4, 1, 530))},
    "softcap": {"softcap": 1.5},
    "sparsemax": {"normalizer": "sparsemax", "attn_mask": masks.causal("upper_left") & masks.dense(normal(131, 530))},
    "a sink": {"normalizer": normalizers.SoftmaxSink(normal(4)), "is_causal": True},
}
REQUEST = AuxRequest(lse=True, max=True, entropy=True, topk=2, received=True)


def everything(name: str, **named: Any) -> list[Tensor]:
    """Return all results of one of the calls."""
    leaves = [t.detach().requires_grad_() for t in inputs(2, 4, 2, 131, 530)]
    named = {**CALLS[name], "enable_gqa": True, "engine": "fused", **named}
    found = run(leaves, **named)
    with torch.no_grad():
        aux = regard.attention(*leaves, **named, return_aux=REQUEST)[1]
    return [*found, aux.lse, aux.max, aux.entropy, aux.received, aux.topk.weights, aux.topk.indices]


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_twice_and_the_number_of_threads_changes_rounding_only(name: str) -> None:
    with threads(1):
        alone = everything(name)
        assert same(everything(name), alone)
    for count in (2, 5):
        with threads(count):
            found = everything(name)
            assert count == 5 or same(everything(name), found)
        for a, b in zip(found[:-1], alone[:-1]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_threads_does_not_change_which_weights_are_dropped(name: str) -> None:
    found = []
    for count in (1, 2, 5):
        with threads(count):
            torch.manual_seed(0)
            leaves = [t.detach().requires_grad_() for t in inputs(2, 4, 4, 131, 530)]
            found.append(run(leaves, **CALLS[name], dropout_p=0.4, engine="fused"))
    for other in found[1:]:
        for a, b in zip(other, found[0]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_without_a_team_the_bits_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with threads(2):
        right = everything(name)
        monkeypatch.setattr(pool, "_team", lambda: None)
        assert same(everything(name), right)


def test_a_team_is_found_here() -> None:
    if sys.platform == "linux" and "OpenMP" in torch.__config__.parallel_info():
        with threads(2):
            torch.ones(1 << 16).exp()
            pool._team.cache_clear()
            assert pool._team() is not None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("team", [True, False])
def test_calls_from_four_threads(count: int, team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not team:
        monkeypatch.setattr(pool, "_team", lambda: None)
    with threads(count):
        serial = {name: everything(name) for name in CALLS}

        def one(name: str) -> bool:
            torch.set_num_threads(count)  # a new thread of Python's begins with its own
            return same(everything(name), serial[name])

        with ThreadPoolExecutor(4) as executor:
            assert all(executor.map(one, [*CALLS] * 2))


@pytest.mark.parametrize("count", [1, 2])
def test_modes_of_the_calling_thread(count: int) -> None:
    with threads(count):
        for name, named in CALLS.items():
            leaves = [t.detach() for t in inputs(2, 4, 4, 131, 530)]
            right = regard.attention(*leaves, **named, engine="fused")
            with torch.inference_mode():
                output, _ = regard.attention(*leaves, **named, engine="fused", return_aux=REQUEST)
                assert torch.equal(output, right), name
            assert torch.is_grad_enabled()


# Tasks ----------------------------------------------------------------------------------------------------------------


@across(
    {
        "place": [0, 7, 19],
        "count": [1, 2],
        "team": [True, False],
        "error": [ZeroDivisionError, IndexError, KeyboardInterrupt, SystemExit],
    }
)
def test_an_error_in_a_task_is_raised_once(
    place: int, count: int, team: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not team:
        monkeypatch.setattr(pool, "_team", lambda: None)
    done: list[int] = []

    def task(i: int) -> None:
        if i == place:
            raise error("broken")
        done.append(i)

    with threads(count):
        with pytest.raises(error, match="broken"):
            pool.run([lambda i=i: task(i) for i in range(20)])
        assert len(done) == len(set(done)) <= 19
        done.clear()
        pool.run([lambda i=i: done.append(i) for i in range(20)])
        assert sorted(done) == list(range(20))


@pytest.mark.parametrize("team", [True, False])
def test_no_task_runs_on_after_an_error(team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not team:
        monkeypatch.setattr(pool, "_team", lambda: None)
    begun: list[int] = []
    ended: list[int] = []
    both = threading.Barrier(2, timeout=20)

    def slow() -> None:
        begun.append(1)
        if len(begun) == 1:
            both.wait()
        for _ in range(50):
            torch.ones(1000).sum()
        ended.append(1)

    def broken() -> None:
        both.wait()
        raise IndexError("broken")

    with threads(2):
        with pytest.raises(IndexError):
            pool.run([slow, broken, *[slow] * 5])
        assert len(begun) == len(ended)  # whoever wrote to memory has come to its end


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("error", [IndexError, RuntimeError])
def test_an_error_in_a_mask_is_raised(error: type[Exception], count: int) -> None:
    armed = False

    class Bent(masks.Mask):
        def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            if armed and q_idx.numel() and int(q_idx.max()) >= 64:
                raise error("broken")
            return (q_idx + kv_idx) % 3 > 0

    leaves = [t.detach() for t in inputs(1, 2, 2, 70, 130)]
    mask = Bent()
    with threads(count):
        right = regard.attention(*leaves, mask, engine="fused")
        armed = True
        with pytest.raises(error, match="broken"):
            regard.attention(*leaves, mask, engine="fused")
        armed = False
        assert torch.equal(regard.attention(*leaves, mask, engine="fused"), right)


# Processes ------------------------------------------------------------------------------------------------------------


def _sent(name: str, count: int, queue: Any) -> None:
    torch.set_num_threads(count)
    queue.put([t.numpy() for t in everything(name)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("count", [1, 2])
def test_a_forked_child(count: int) -> None:
    with threads(count):
        right = everything("causal")
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_quick, args=(count, queue))
        child.start()
        child.join(120)
        assert child.exitcode == 0
        torch.testing.assert_close(torch.from_numpy(queue.get()), right[0])
        assert same(everything("causal"), right)


def _quick(count: int, queue: Any) -> None:
    leaves = [t.detach() for t in inputs(2, 4, 2, 131, 530)]
    queue.put(regard.attention(*leaves, **CALLS["causal"], enable_gqa=True, engine="fused").numpy())


@pytest.mark.campaign
def test_a_spawned_child() -> None:
    right = everything("causal")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_sent, args=("causal", torch.get_num_threads(), queue))
    child.start()
    found = queue.get(timeout=120)
    child.join(60)
    assert child.exitcode == 0
    assert same([torch.from_numpy(t) for t in found], right)


class AttentionCall(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        x = normal(1, 1, 90, 8, seed=index)
        return regard.attention(x, x, x, **CALLS["causal"], engine="fused")[0, 0]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method}")
    plain = torch.stack([AttentionCall()[i] for i in range(6)])
    loader = DataLoader(AttentionCall(), batch_size=3, num_workers=2, multiprocessing_context=method, timeout=120)
    torch.testing.assert_close(torch.cat(list(loader)), plain)


# A process of its own -------------------------------------------------------------------------------------------------

INTERRUPTED = """
import signal, sys, time
import torch, regard
from regard import masks, scores

torch.set_num_threads(int(sys.argv[1]))
if sys.argv[2] == "pool":
    from regard.engines.fused import pool
    pool._team = lambda: None
signal.signal(signal.SIGALRM, signal.default_int_handler)
torch.manual_seed(0)
score = scores.Additive(torch.randn(64))
small = torch.randn(1, 2, 100, 64)
mask = masks.sinks(3) | masks.dilated(2, align="upper_left")
if sys.argv[3] == "mask":
    named = {"score": score, "attn_mask": mask}
else:
    named = {"score": score, "is_causal": True}
before = regard.attention(small, small, small, **named, engine="fused")
big = torch.randn(1, 16, 4096, 64)
for delay in (0.02, 0.05, 0.1):
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        regard.attention(big, big, big, **named, engine="fused")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    else:
        print("not interrupted", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    after = regard.attention(small, small, small, **named, engine="fused")
    print(torch.equal(before, after), flush=True)
"""


def script(source: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", source, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.campaign(keep=1)
@pytest.mark.skipif(not hasattr(__import__("signal"), "setitimer"), reason="needs timers")
@pytest.mark.parametrize(
    ("count", "team", "kind"), [("1", "team", "plain"), ("2", "team", "mask"), ("2", "pool", "plain")]
)
def test_an_interrupted_call(count: str, team: str, kind: str) -> None:
    assert script(INTERRUPTED, count, team, kind) == ["interrupted", "True"] * 3
