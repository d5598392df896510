"""The kernels for lists of keys: outputs and gradients against float64, and which calls use them."""

from unittest.mock import patch

import pytest
import torch
from engine_calls import check_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import regard
from regard import masks
from regard.engines.fused import selected
from regard.masks import Extent


def dense(lists: torch.Tensor, heads: int, S: int, block: int = 1) -> torch.Tensor:
    """Return which keys are in blocks in the lists, (B, H, L, S), key by key."""
    found = (lists.unsqueeze(-1) == torch.arange(S) // block).any(-2)
    return found.repeat_interleave(heads // found.shape[1], 1) if found.shape[1] > 1 else found


def ends(generator, B, H, G, L, S, C, V, dtype=torch.float64):
    sizes = (B, H, L, C), (B, G, S, C), (B, G, S, V), (B, H, L, V)
    return [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]


def results(query, key, value, weight, mask, **options):
    tensors = [t.clone().requires_grad_() for t in (query, key, value)]
    output = regard.attention(*tensors, mask, enable_gqa=True, **options)
    return output, *torch.autograd.grad((output * weight).sum(), tensors)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_outputs_and_gradients(data):
    """In float64, for sizes on both sides of vectors, buckets and parts."""
    pick = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    G, group, B, L = pick(1, 2), pick(1, 3), pick(1, 2), pick(1, 7, 129)
    H, S, C, V = G * group, pick(40, 512, 1100), pick(1, 7, 16, 32, 64), pick(1, 5, 16, 36, 64)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    block = pick(1, 3, 130)
    size = pick(1, B), pick(1, G, H), L, pick(1, 3, 12)
    lists = torch.randint(-1, -(-S // block), size, generator=generator)
    lists[..., : L // 3, :] = -1
    mask, extent = masks.selected(lists, block), Extent(B, H, L, S)
    mask, wanted = pick((mask, dense(lists, H, S, block)), (
        mask & masks.causal(align="lower_right"),
        dense(lists, H, S, block) & masks.causal(align="lower_right").bind(extent, "cpu")(
            0, 0, torch.arange(L)[:, None], torch.arange(S)
        ),
    ))  # fmt: skip
    arrays = ends(generator, B, H, G, L, S, C, V)
    with patch.object(selected, "_ROWS", pick(50, 512)):
        found = results(*arrays, mask, engine="fused")
    for one, other in zip(found, results(*arrays, wanted, engine="reference")):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_kernels_run(monkeypatch):
    """For few listed keys, without other results, under masks that hide and add nothing."""
    calls = []
    forward = selected.SelectedKeys.forward
    monkeypatch.setattr(selected.SelectedKeys, "forward", staticmethod(lambda *a: calls.append(1) or forward(*a)))
    query, key, value, _ = ends(torch.Generator().manual_seed(0), 1, 2, 2, 5, 64, 8, 8, torch.float32)
    few = masks.selected(torch.arange(5)[:, None] * 3)

    def count(mask, **options):
        calls.clear()
        regard.attention(query, key, value, mask, engine="fused", **options)
        return len(calls)

    assert count(few) == count(few & masks.key_padding(torch.arange(64) < 9)) == count(few, score="cosine") == 1
    assert count(few & masks.alibi(2, "upper_left")) == count(few, score="gaussian") == 0
    assert count(few | masks.sinks(1)) == count(masks.selected(torch.arange(60).expand(5, 60))) == 0
    assert count(few, return_aux=regard.AuxRequest(entropy=True)) == 0


def test_log_sum_exp_of_empty_and_full_rows():
    query, key, value, _ = ends(torch.Generator().manual_seed(1), 1, 1, 1, 3, 40, 4, 4)
    mask = masks.selected(torch.tensor([[-1, -1], [5, 5], [1, 30]]))
    _, aux = regard.attention(query, key, value, mask, engine="fused", return_aux=regard.AuxRequest(lse=True))
    scores = query @ key.mT / 2
    wanted = torch.stack([torch.tensor(-torch.inf), scores[0, 0, 1, 5], scores[0, 0, 2, [1, 30]].logsumexp(0)])
    torch.testing.assert_close(aux.lse[0, 0], wanted.double())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_unlisted_keys_do_not_leak(bad):
    query, key, value, weight = ends(torch.Generator().manual_seed(2), 1, 2, 1, 4, 50, 8, 8, torch.float32)
    mask = masks.selected(torch.tensor([[0, 1, 2], [3, 4, -1], [-1, -1, -1], [49, 48, 3]]))
    clean = results(query, key, value, weight, mask, engine="fused")
    key[:, :, 10:40], value[:, :, 10:40] = bad, bad
    for one, other in zip(clean, results(query, key, value, weight, mask, engine="fused")):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_block_larger_than_all_keys_is_all_keys():
    """In time that does not follow its size."""
    query, key, value, _ = ends(torch.Generator().manual_seed(0), 1, 2, 2, 3, 5, 4, 4)
    for engine in ("fused", "streaming", "reference"):
        found = regard.attention(query, key, value, masks.selected(torch.zeros(3, 1).long(), 1 << 40), engine=engine)
        torch.testing.assert_close(found, regard.attention(query, key, value))


def test_a_second_derivative_raises():
    query, key, value, _ = ends(torch.Generator().manual_seed(3), 1, 1, 1, 2, 40, 4, 4)
    query.requires_grad_()
    output = regard.attention(query, key, value, masks.selected(torch.tensor([[0, 1], [2, 3]])), engine="fused")
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(output.square().sum(), query, create_graph=True)


def test_threads_agree():
    """Gradients of keys that several threads share are summed in a fixed order."""
    arrays = ends(torch.Generator().manual_seed(4), 1, 1, 1, 300, 600, 16, 16)
    mask = masks.selected(torch.randint(0, 600, (300, 40), generator=torch.Generator().manual_seed(5)))
    check_threads(lambda: results(*arrays, mask, engine="fused"))


def test_few_queries_with_short_lists_do_not_read_all_keys():
    """The cost of other engines is that of all pairs, however few the queries are."""
    query, key = torch.empty(1, 8, 16, 64), torch.empty(1, 8, 16384, 64)
    lists = torch.zeros(1, 1, 16, 2048, dtype=torch.int64)
    assert regard.explain(query, key, key, masks.selected(lists)).engine.name == "fused"


@pytest.mark.parametrize("index", [5, 1 << 20])
def test_lists_that_change_before_the_backward_pass_raise(index):
    """It reads them again, and an index of no key would let it write to other memory."""
    query, key, value = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (64, 512, 512))
    lists = torch.randint(0, 512, (64, 20))
    for mask in (masks.selected(lists), masks.selected(lists) & masks.causal(align="lower_right")):
        output = regard.attention(query, key, value, mask, engine="fused")
        kept = lists.clone()
        lists.fill_(index)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        lists.copy_(kept)
