"""Kernels in a program without Python, as `make emulated` and `make sanitize` run them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_kernels import Driver, driven
from tiers import sized
from torch import Tensor, nn

import regard
from regard import masks
from regard.engines.fused import decoding, library
from regard.engines.fused.layers import Layers, LayerWeights, Linear, Stored, Table
from regard.engines.fused.panels import Panels
from regard.nn.linear.gated import gated_recurrence
from regard.testing.campaign import Plan, run
from regard.testing.laws import LAWS

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[3] / "csrc" / "driver.cpp"
#: Sizes at and beside those of vectors and blocks.
SIZES = (1, 1, 2, 3, 5, 16, 17, 33, 64, 70)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the driver's command but for the processor: that of REGARD_DRIVER, or one that is compiled here."""
    if given := os.environ.get("REGARD_DRIVER"):
        return shlex.split(given)[:-1]
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    file = tmp_path_factory.mktemp("driver") / "driver"
    subprocess.run([compiler, "-std=c++17", "-O1", "-pthread", SOURCE, "-o", file, "-ldl"], check=True)
    return [str(file), str(library.FILE)]


@pytest.fixture
def start(command: list[str]) -> Iterator[Callable[..., Driver]]:
    started = list[Driver]()

    def made(threads: int, processor: str = "") -> Driver:
        given = shlex.split(os.environ.get("REGARD_DRIVER", ""))
        started.append(Driver([*command, processor or (given[-1] if given else library.processor())], threads))
        return started[-1]

    before = torch.get_num_threads()
    yield made
    torch.set_num_threads(before)
    for each in started:
        each.process.kill()
        each.process.wait()


class Drawn:
    """Random sizes and numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def pick(self, *among: int) -> int:
        among = among or SIZES
        return among[int(torch.randint(len(among), (), generator=self.generator))]

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def integers(self, least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=self.generator)


def pulled(output: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output.sin().sum(), leaves)]


def ends(draw: Drawn) -> list[Tensor]:
    """Return query, key and value, of grouped heads."""
    B, G, R, L, S, C, V = (draw.pick(1, 2), draw.pick(1, 2), draw.pick(1, 3), *(draw.pick() for _ in range(4)))
    shapes = (B, G * R, L, C), (B, G, S, C), (B, G, S, V)
    return [draw.numbers(*shape).requires_grad_() for shape in shapes]


def attended(draw: Drawn) -> list[Tensor]:
    rows = ends(draw)
    score: Any = ["dot", "gaussian", "triangular", "additive"][draw.pick(0, 1, 2, 3)]
    if score == "additive":
        score = regard.scores.Additive(draw.numbers(rows[0].shape[-1]))
    biases = masks.alibi(torch.full((rows[0].shape[1],), 0.5, dtype=draw.dtype), align="upper_left")
    mask = [None, masks.window(3, 2, align="upper_left"), biases]
    normalizer = ["softmax", "sparsemax", "sigmoid"][draw.pick(0, 1, 2)]
    options = {"score": score, "attn_mask": mask[draw.pick(0, 1, 2)], "normalizer": normalizer}
    return pulled(regard.attention(*rows, enable_gqa=True, engine="fused", **options), *rows)


def read_in_place(draw: Drawn) -> list[Tensor]:
    query, key, value = (t.detach() for t in ends(draw))
    options = {"enable_gqa": True, "engine": "fused"}
    found = [regard.attention(query[:, :, :1], key, value, **options)]
    if draw.dtype == torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            narrow = (t.to(dtype) for t in (query[:, :, :1], key, value))
            found.append(regard.attention(*narrow, **options))
    return found


def lines(draw: Drawn) -> list[Tensor]:
    rows = ends(draw)
    score = ["dot", "gaussian"][draw.pick(0, 1)]
    matrix = draw.numbers(rows[0].shape[2], rows[1].shape[2]) > -1
    mask = [None, masks.window(7, 4, align="upper_left"), matrix][draw.pick(0, 1, 2)]
    order = regard.LocalLinear(ridge=0.1)  # without, rounding shows where keys are fewer than features
    made = regard.attention(*rows, mask, enable_gqa=True, score=score, order=order, engine="fused")
    return pulled(made, *rows)


def selected(draw: Drawn) -> list[Tensor]:
    query, key, _ = rows = ends(draw)
    B, H, L, _ = query.shape
    listed = draw.integers(-1, key.shape[2], B, draw.pick(1, H), L, draw.pick(1, 2, 3))
    mask = masks.selected(listed)
    return pulled(regard.attention(*rows, mask, enable_gqa=True, engine="fused"), *rows)


def gathered(draw: Drawn) -> list[Tensor]:
    sizes = 15, 17
    B, G, R, C, V = draw.pick(1, 2), draw.pick(1, 2), draw.pick(1, 3), draw.pick(), draw.pick()
    shapes = (B, G * R, 255, C), (B, G, 255, C), (B, G, 255, V)
    rows = [draw.numbers(*shape).requires_grad_() for shape in shapes]
    mask = [masks.neighbourhood(sizes, 3, is_causal=True), masks.windows(sizes, 4), masks.axial(sizes, 0)]
    score: Any = ["dot", "gaussian", regard.scores.Additive(draw.numbers(C))][draw.pick(0, 1, 2)]
    options = {"score": score, "normalizer": ["softmax", "sparsemax"][draw.pick(0, 1)]}
    made = regard.attention(*rows, mask[draw.pick(0, 1, 2)], enable_gqa=True, engine="fused", **options)
    return pulled(made, *rows)


def recurrent(draw: Drawn) -> list[Tensor]:
    B, G, R, L = draw.pick(1, 2), draw.pick(1, 2), draw.pick(1, 3), draw.pick(5, 16, 37)
    K, V = draw.pick(), draw.pick()
    delta, kind = bool(draw.pick(0, 1)), draw.pick(0, 1, 2)
    query, key, value = draw.numbers(B, G * R, L, K), draw.numbers(B, G, L, K), draw.numbers(B, G * R, L, V)
    key = nn.functional.normalize(key, dim=-1)
    decay = None if kind == 0 else -draw.numbers(B, G * R, L, *[K][: kind - 1]).abs()
    leaves = [t.requires_grad_() for t in (query, key, value, *(() if decay is None else (decay,)))]
    rate = draw.numbers(B, G * R, L).sigmoid() if delta else None
    channels = nn.functional.normalize(draw.numbers(B, G * R, L, K), dim=-1)
    erase = None if delta or draw.pick(0, 1) else (channels * channels.detach().sigmoid(), channels)
    bonus = draw.numbers(G * R, K) if draw.pick(0, 1) else None
    output, state = gated_recurrence(
        query, key, value, log_decay=decay, delta=delta, rate=rate, erase=erase, bonus=bonus, return_state=True
    )
    with torch.no_grad():
        few = [t[:, :, :1] for t in (query, key, value)]
        rate = None if rate is None else rate[:, :, :1]
        erase = None if erase is None else (erase[0][:, :, :1], erase[1][:, :, :1])
        one = {"log_decay": None if decay is None else decay[:, :, :1], "delta": delta, "rate": rate, "erase": erase}
        step = gated_recurrence(*few, **one, bonus=bonus, state=state)
    return [*pulled(output, *leaves), state, step]


def product(draw: Drawn) -> list[Tensor]:
    N, E, rows = draw.pick(), draw.pick(), draw.pick(1, 2, 9, 20)
    weight, x, bias = draw.numbers(N, E).float(), draw.numbers(rows, 2 * E).float()[:, :E], draw.numbers(N).float()
    return [Panels.of(weight, int8=int8).product(x, given) for int8 in (False, True) for given in (None, bias)]


def packed(draw: Drawn) -> list[Tensor]:
    H, D, F, R, T = draw.pick(1, 3), draw.pick(1, 2, 8, 17), draw.pick(), draw.pick(1, 2, 5), draw.pick(1, 4, 20)
    E, M, int8 = H * D, T + R, bool(draw.pick(0, 1))

    def linear(N: int, inputs: int) -> Linear:
        return Linear(Panels.of(draw.numbers(N, inputs).float(), int8=int8), draw.numbers(N).float())

    norms = [nn.LayerNorm(E) for _ in range(3)]
    cross = bool(draw.pick(0, 1))
    crossing = [norms[1], linear(E, E), linear(E, E)] if cross else [None] * 3
    weights = LayerWeights(norms[0], linear(3 * E, E), linear(E, E), *crossing, norms[2], linear(F, E), linear(E, F))
    stored = draw.numbers(M, 2, E).float()
    x, seen = draw.numbers(R, E).float(), draw.integers(0, T, R, T)
    own = Stored(stored, Table(None, seen, draw.integers(0, T + 1, R)), 0)
    other = draw.numbers(2, M, H, D).float()
    crossed = [type("Pair", (), {"key": other[0], "value": other[1]})] if cross else []
    table = Table(draw.integers(0, 2, R), draw.integers(0, M, 2, T), None) if cross else None
    with torch.no_grad():
        Layers([weights], H, norm_first=bool(draw.pick(0, 1)), last_norm=None).run(x, own, T, crossed, table)
    return [x, stored]


def decoded(draw: Drawn) -> list[Tensor]:
    R, M, G, repeat = draw.pick(1, 2, 9), draw.pick(1, 50), draw.pick(1, 2), draw.pick(1, 3)
    D, T = draw.pick(), draw.pick()
    query, rows = draw.numbers(R, G * repeat, D), draw.numbers(M, 2, G, D)
    table, counts = draw.integers(0, M, R, T), draw.integers(0, T + 1, R)
    read = decoding.read_rows(query, rows[:, 0], rows[:, 1], torch.arange(R), table, counts, 0.25)
    B, K, N, length = draw.pick(1, 3), draw.pick(1, 4), draw.pick(), draw.pick(1, 8, 64)
    x = draw.numbers(B * K, N)
    hidden = draw.integers(0, N, 1)
    total, maxima = decoding.log_sums(x, length, hidden if draw.pick(0, 1) else None)
    of_sentences = x.view(B, K, N), draw.numbers(B, K), maxima.view(B, K, -1)
    *found, _ = decoding.largest_sums(*of_sentences, length, draw.pick(1, min(4, K * N)), 0)
    return [read, total, maxima, *found]


CALLS = (attended, read_in_place, gathered, lines, selected, recurrent, product, packed, decoded)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_kernel_gives_the_same_numbers(start: Callable[..., Driver], threads: int) -> None:
    torch.set_num_threads(threads)
    driver = start(threads)
    # Threads divide small problems there alone, and other processors add in another order.
    is_same = threads == 1 and "REGARD_DRIVER" not in os.environ
    for call in CALLS:
        for seed in range(sized(24, 8)):
            dtype = (torch.float32, torch.float64)[seed % 2]
            right = call(Drawn(seed, dtype))
            with driven(driver):
                found = call(Drawn(seed, dtype))
            for one, other in zip(found, right, strict=True):
                near = 0.0 if is_same else 1e-9 if one.dtype == torch.float64 else 1e-3
                torch.testing.assert_close(one, other, rtol=near, atol=near / 10, equal_nan=True, msg=f"{call} {seed}")
    every = {*library.SIGNATURES, "rows.forward", "additive.prepare"}
    every |= {f"{family}.{kind}" for family in ("dot", "radial", "additive") for kind in ("forward", "backward")}
    assert driver.names == every
    driver.close()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_laws_hold(start: Callable[..., Driver], threads: int) -> None:
    driver = start(threads)
    torch.set_num_threads(threads)
    with driven(driver):
        tally = run(sized(40, 15), Plan(5, tuple(LAWS), ("fused",)), progress=False)
    assert tally.broken == []
    assert driver.count > sized(40, 15)
    driver.close()


def test_a_program_that_fails_is_an_error(start: Callable[..., Driver]) -> None:
    with driven(start(1, "v9")), pytest.raises(RuntimeError, match="the driver of the kernels ended with code 2"):
        decoding.log_sums(torch.zeros(2, 3), 2)
