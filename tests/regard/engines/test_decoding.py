"""The kernels of a step of decoding, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from regard.engines.fused import library
from regard.engines.fused.decoding import largest_sums, log_sums, read_rows

DTYPES = [torch.float32, torch.float64]


def plainly(query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: list[list[int]], scale: float) -> np.ndarray:
    """Return what each query (H, D) reads of the rows that it sees, head by head."""
    made = np.zeros(query.shape)
    heads = query.shape[1] // key.shape[1]
    for r, rows in enumerate(seen):
        for h in range(query.shape[1]):
            if rows:
                scores = scale * key[rows, h // heads] @ query[r, h]
                weights = np.exp(scores - scores.max())
                made[r, h] = weights / weights.sum() @ value[rows, h // heads]
    return made


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    R=st.integers(1, 40),
    G=st.integers(1, 3),
    each=st.integers(1, 2),
    D=st.sampled_from([1, 3, 4, 8, 16, 24, 64]),
    T=st.integers(1, 70),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    dtype=st.sampled_from(DTYPES),
    apart=st.booleans(),
)
def test_queries_read_the_rows_that_a_table_names(
    seed: int, R: int, G: int, each: int, D: int, T: int, size: float, dtype: torch.dtype, apart: bool
) -> None:
    random = np.random.default_rng(seed)
    M, Q, H = int(random.integers(1, 50)), int(random.integers(1, 6)), G * each
    rows = torch.from_numpy(size * random.standard_normal((M, 2, G, D))).to(dtype)
    query = torch.from_numpy(random.standard_normal((R, H, D))).to(dtype)
    if not apart:  # otherwise they lie among others
        query, rows = torch.stack([query, query], 1)[:, 1], rows.transpose(1, 2).contiguous().transpose(1, 2)
    table, counts = random.integers(0, M, (Q, T)), random.integers(0, T + 1, Q)
    which = random.integers(0, Q, R)
    made = read_rows(
        query, rows[:, 0], rows[:, 1], torch.from_numpy(which), torch.from_numpy(table), torch.from_numpy(counts), 0.5
    )
    seen = [table[w, : counts[w]].tolist() for w in which]
    key, value = (rows[:, i].double().numpy() for i in (0, 1))
    expected = plainly(query.double().numpy(), key, value, seen, 0.5)
    # A score's error is that of a sum of D products, and the weights' relative one as large.
    largest = 0.5 * np.abs(query.double().numpy()).max() * np.abs(key).max() * D
    tolerance = 8 * torch.finfo(dtype).eps * (largest + T) * max(np.abs(value).max(), 1e-30)
    np.testing.assert_allclose(made.double().numpy(), expected, rtol=0, atol=tolerance)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    R=st.integers(1, 9),
    N=st.integers(1, 300),
    run=st.integers(1, 70),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
    dtype=st.sampled_from(DTYPES),
    hidden=st.floats(0, 1),
)
def test_sums_and_maxima(seed: int, R: int, N: int, run: int, size: float, dtype: torch.dtype, hidden: float) -> None:
    random = np.random.default_rng(seed)
    x = torch.from_numpy(size * random.standard_normal((R, 2 * N)))[:, :N].to(dtype)
    x[torch.from_numpy(random.random((R, N)) < hidden)] = -torch.inf
    total, maxima = log_sums(x, run)
    expected = x.double().logsumexp(-1)
    torch.testing.assert_close(
        total.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=N * torch.finfo(dtype).eps
    )
    assert torch.equal(maxima, torch.stack([x[:, i : i + run].amax(-1) for i in range(0, N, run)], -1))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_numbers_count_for_the_sums_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(library, "_PROBLEM", "missing")
    x = torch.randn(4, 150, dtype=dtype)
    hidden, before = torch.tensor([0, 70, 149]), x.clone()
    total, maxima = log_sums(x, 64, hidden)
    torch.testing.assert_close(total, before.logsumexp(-1))
    assert torch.equal(x, before.index_fill(1, hidden, -torch.inf))
    assert torch.equal(maxima, torch.stack([x[:, i : i + 64].amax(-1) for i in range(0, 150, 64)], -1))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), B=st.integers(1, 3), K=st.integers(1, 4), N=st.integers(2, 200), run=st.integers(1, 70),
    count=st.integers(1, 12), ties=st.booleans(), hidden=st.floats(0, 1), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_the_largest_sums(
    seed: int, B: int, K: int, N: int, run: int, count: int, ties: bool, hidden: float, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(seed)
    x, offset = (torch.randn(*shape, generator=random).to(dtype) for shape in ((B, K, N), (B, K)))
    if ties:
        x, offset = x.round(), offset.round()
    x[torch.rand(B, K, N, generator=random) < hidden] = -torch.inf
    maxima = torch.stack([x[..., i : i + run].amax(-1) for i in range(0, N, run)], -1)
    count, mark = min(count, K * N), 1
    found, rows, numbers, usual = largest_sums(x, offset, maxima, run, count, mark)
    sums = (x + offset[..., None]).flatten(1)
    # A stable sort keeps the order of equal sums.
    wanted, places = sums.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, wanted[:, :count])
    finite = found > -torch.inf
    assert torch.equal((rows * N + numbers)[finite], places[:, :count][finite])
    assert all(len({*line}) == count for line in (rows * N + numbers).tolist())
    assert usual is bool((finite & (numbers != mark)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_that_is_no_number_comes_first(dtype: torch.dtype) -> None:
    x, offset = torch.randn(2, 3, 70, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    offset[1, 2] = torch.nan
    found, *_, usual = largest_sums(x, offset, x.amax(-1, keepdim=True), 70, 4, -1)
    assert found[0].isfinite().all() and found[1, 0].isnan() and not usual


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_told(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 70, dtype=dtype)
    x[0, 66], x[1, 3] = torch.nan, torch.inf
    total, maxima = log_sums(x, 64)
    assert total[0].isnan()
    assert total[1] == torch.inf
    assert total[2] == pytest.approx(np.log(70))
    assert maxima[0].isnan().tolist() == [False, True]
    rows = torch.ones(2, 1, 8, dtype=dtype)
    rows[1] = torch.nan
    table = torch.tensor([[0, 1], [0, 0]])
    made = read_rows(rows[:1].expand(2, 1, 8), rows, rows, torch.arange(2), table, torch.tensor([2, 1]), 1.0)
    assert made[0].isnan().all()
    assert made[1].tolist() == [[1.0] * 8]


def test_threads_share_the_work() -> None:
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    rows, query = torch.randn(2000, 2, 4, 64, generator=generator), torch.randn(400, 4, 64, generator=generator)
    table = torch.randint(0, 2000, (400, 30), generator=generator)
    x = torch.randn(200, 5000, generator=generator)
    given_ = query, rows[:, 0], rows[:, 1], torch.arange(400), table, torch.full((400,), 30), 0.125
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append((read_rows(*given_), *log_sums(x, 64)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found))
