"""Attention over pages: every sequence gets what it would get alone, and what is wrong gets its message."""

import pytest
import torch

import regard
from regard import masks
from regard.nn import paged_attention
from regard.normalizers import SoftmaxSink

B, H, G, E, V, SIZE = 3, 6, 2, 8, 5, 3
TABLE = torch.tensor([[3, 0, -1], [5, 1, 2], [4, 99, -7]])
LENGTHS = torch.tensor([4, 9, 0])


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def pages(dtype=torch.float64):
    """Return keys and values in the layout of vLLM; the last page, which no sequence has, is NaN."""
    key, value = (normal(7, SIZE, G, width, dtype=dtype).transpose(1, 2) for width in (E, V))
    key[6], value[6] = torch.nan, torch.nan
    return key, value


def alone(x, b):
    """Return the keys or values (1, G, n, ·) of one sequence."""
    rows = [x[TABLE[b, j // SIZE], :, j % SIZE] for j in range(LENGTHS[b])]
    return torch.stack(rows, 1)[None] if rows else x[:1, :, :0]


CASES = {
    "plain": (None, {}),
    "causal": (masks.causal(align="lower_right"), {}),
    "window and softcap": (masks.window(2, 0, align="lower_right"), {"softcap": 2.0}),
    "ALiBi": (masks.alibi(H, align="lower_right"), {}),
    "sinks": (None, {"normalizer": SoftmaxSink(normal(H)), "scale": 0.2}),
    "cosine": (None, {"score": "cosine"}),
}


@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_sequences_get_what_they_would_get_alone(case, L):
    mask, named = CASES[case]
    key, value = pages()
    query = normal(B, H, L, E)
    output, lse = paged_attention(query, key, value, TABLE, LENGTHS, mask, return_lse=True, **named)
    assert torch.equal(output, paged_attention(query, key, value, TABLE, LENGTHS, mask, **named))
    for b in range(B):
        wanted, aux = regard.attention(
            query[b : b + 1], alone(key, b), alone(value, b), mask, enable_gqa=True, engine="reference",
            return_aux=regard.AuxRequest(lse=True), **named,
        )  # fmt: skip
        torch.testing.assert_close(output[b : b + 1], wanted)
        torch.testing.assert_close(lse[b : b + 1], aux.lse)


def test_softmax_by_hand():
    key, value = pages()
    query = normal(B, H, 1, E)
    k, v = (alone(x, 1)[0].repeat_interleave(H // G, 0) for x in (key, value))
    wanted = torch.softmax(query[1] @ k.mT / E**0.5, -1) @ v
    torch.testing.assert_close(paged_attention(query, key, value, TABLE, LENGTHS)[1], wanted)


def test_gradients_reach_the_pages():
    key, value = (x.nan_to_num().requires_grad_() for x in pages())
    query = normal(B, H, 1, E)
    paged_attention(query, key, value, TABLE, LENGTHS).sum().backward()
    reached = value.grad.abs().sum((1, 3)) > 0
    expected = torch.zeros(7, SIZE, dtype=torch.bool)
    for b in range(B):
        for j in range(LENGTHS[b]):
            expected[TABLE[b, j // SIZE], j % SIZE] = True
    assert torch.equal(reached, expected)


def test_compiled():
    torch._dynamo.reset()
    key, value = pages(torch.float32)
    query = normal(B, H, 1, E, dtype=torch.float32)
    run = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        run(query, key, value, TABLE, LENGTHS), paged_attention(query, key, value, TABLE, LENGTHS)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": normal(B, H, E)}, r"query must be a tensor \(B, H, L, E\), got \(3, 6, 8\)"),
        ({"key": normal(7, G, SIZE)}, r"key must have shape \(pages, G, size, E\), got"),
        ({"value": normal(7, G, SIZE + 1, V)}, r"value must have key's pages, heads and size \(7, 2, 3\), got"),
        ({"table": TABLE.double()}, r"table must be an integer tensor \(B, N\), got"),
        ({"table": TABLE[:2]}, r"table must have one row for each sequence, \(3, N\), got \(2, 3\)"),
        ({"table": TABLE + 4}, r"table must hold pages from 0 to 6, got 7"),
        ({"lengths": LENGTHS[:2]}, r"lengths must have one row for each sequence, \(3,\), got \(2,\)"),
        ({"lengths": LENGTHS.to("meta")}, r"lengths must be on the device of query, cpu, got meta"),
        ({"lengths": LENGTHS + 1}, r"lengths must be from 0 to 9, the keys of a row of table, got 10"),
        ({"lengths": LENGTHS - 9}, r"lengths must be from 0 to 9, the keys of a row of table, got -"),
        ({"attn_mask": 3}, "paged_attention: attn_mask must be"),
        ({"engine": "triton"}, "'triton': GPUs only, not cpu"),
        ({"return_lse": 1}, "return_lse must be"),
    ],
)
def test_bad_arguments(change, message):
    key, value = pages()
    given = {"query": normal(B, H, 1, E), "key": key, "value": value, "table": TABLE, "lengths": LENGTHS} | change
    with pytest.raises((ValueError, TypeError), match=message):
        paged_attention(**given)
