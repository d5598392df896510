"""Tiles of queries with lists of keys: outputs, gradients and fields against float64, and which calls use them."""

import contextlib

import pytest
import torch
from engine_calls import check_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import regard
from regard import masks
from regard._call.plan import clear_plans
from regard.engines.fused import covers
from regard.engines.problem import Call, Problem
from regard.masks import Extent


@contextlib.contextmanager
def small_tiles(queries=6):
    """Let small images have tiles, all of them."""
    before = covers.QUERIES, covers.FEW
    covers.QUERIES, covers.FEW = queries, 100.0
    clear_plans()
    try:
        yield
    finally:
        covers.QUERIES, covers.FEW = before
        clear_plans()


def pairs(mask, extent):
    """Return the visible pairs of a mask as a bool tensor (B, H, L, S)."""
    b, h, q, k = (torch.arange(n) for n in (extent.B, extent.H, extent.L, extent.S))
    return mask.bind(extent, "cpu")(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q[:, None], k)


def ends(generator, B, H, G, L, C, V, dtype=torch.float64):
    sizes = (B, H, L, C), (B, G, L, C), (B, G, L, V), (B, H, L, V)
    return [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]


def results(query, key, value, weight, mask, **options):
    tensors = [t.clone().requires_grad_() for t in (query, key, value)]
    output = regard.attention(*tensors, mask, enable_gqa=True, **options)
    return output, *torch.autograd.grad((output * weight).sum(), tensors)


IMAGES = {
    "line": masks.neighbourhood(24, 5, 2),
    "image": masks.neighbourhood((4, 6), 3),
    "truncated": masks.neighbourhood((6, 4), (5, 1), border="truncate"),
    "dilated": masks.neighbourhood((6, 4), (3, 1), (2, 3)),
    "causal": masks.neighbourhood((4, 6), (2, 3), (1, 2), (True, False)),
    "video": masks.neighbourhood((2, 3, 4), (1, 3, 3), is_causal=(True, False, False)),
    "whole": masks.neighbourhood((3, 8), (3, 7)),
    "ones": masks.neighbourhood((1, 24, 1), (1, 5, 1), (1, 2, 1)),
    "windows": masks.windows((4, 6), (2, 3)),
    "shifted": masks.windows((6, 4), (3, 3), (1, 2)),
    "rows": masks.axial((4, 6), 1),
    "columns": masks.axial((2, 3, 4), 0),
    "criss-cross": masks.axial((4, 6), (0, 1)),
}
KEEP = torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) < 0.6
OTHERS = {
    "alone": lambda mask: mask,
    "padding": lambda mask: mask & masks.key_padding(KEEP),
    "causal": lambda mask: mask & masks.causal(),
    "empty rows": lambda mask: mask & masks.padding(torch.tensor([7, 0])),
    "two": lambda mask: mask & masks.windows((3, 8), 3),
    "function": lambda mask: mask & (lambda b, h, q, k: (q + k + b + h) % 3 > 0),
    "or": lambda mask: mask | masks.sinks(2),
    "not": lambda mask: ~mask,
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", IMAGES)
def test_outputs_and_gradients(name, other):
    """In float64, against every pair; composed with others, too."""
    mask = OTHERS[other](IMAGES[name])
    generator = torch.Generator().manual_seed(1)
    B, H, G = 2, 4, 2
    arrays = ends(generator, B, H, G, 24, 5, 7)
    wanted = results(*arrays, pairs(mask, Extent(B, H, 24, 24)), engine="reference")
    with small_tiles():
        found = results(*arrays, mask, engine="fused")
    for one, two in zip(found, wanted):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.data())
def test_any_mask_and_tile(data):
    pick = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    B, G, group, L = pick(1, 2), pick(1, 2), pick(1, 3), pick(1, 12, 30, 49, 64, 90)
    extent = Extent(B, G * group, L, L)
    mask = pick(masks.Neighbourhood, masks.Windows, masks.Axial).sample(extent, generator)
    arrays = ends(generator, B, G * group, G, L, pick(1, 4, 17), pick(1, 5, 20))
    with small_tiles(pick(1, 4, 16, 64)):
        found = results(*arrays, mask, engine="fused")
    for one, two in zip(found, results(*arrays, pairs(mask, extent), engine="reference")):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["image", "shifted", "criss-cross", "columns"])
@pytest.mark.parametrize("score", ["additive", "gaussian", "epanechnikov", "cosine"])
def test_scores_and_their_parameters(score, name):
    generator = torch.Generator().manual_seed(2)
    query, key, value, weight = ends(generator, 2, 2, 2, 24, 3, 4)
    weights = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    made = {
        "additive": regard.scores.Additive,
        "gaussian": lambda w: regard.scores.Gaussian(w.abs() + 0.5),
        "epanechnikov": lambda w: regard.scores.Epanechnikov(w.abs() + 2),
        "cosine": lambda w: regard.scores.Cosine(w[:1, 0].abs() + 1),
    }[score]
    if score in ("gaussian", "epanechnikov"):
        weights = weights[0]

    def run(mask, engine):
        leaves = [t.clone().requires_grad_() for t in (query, key, value, weights)]
        output = regard.attention(*leaves[:3], mask, score=made(leaves[3]), engine=engine)
        return output, *torch.autograd.grad((output * weight).sum(), leaves)

    with small_tiles():
        found = run(IMAGES[name], "fused")
    for one, two in zip(found, run(pairs(IMAGES[name], Extent(2, 2, 24, 24)), "reference")):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalizer", ["sigmoid", "entmax15", "sparsemax", "sink"])
@pytest.mark.parametrize("name", ["image", "shifted", "criss-cross"])
def test_normalizers(normalizer, name):
    generator = torch.Generator().manual_seed(3)
    arrays = ends(generator, 2, 2, 1, 24, 3, 4)
    logits = torch.randn(2, generator=generator, dtype=torch.float64)
    option = regard.normalizers.SoftmaxSink(logits) if normalizer == "sink" else normalizer
    with small_tiles():
        found = results(*arrays, IMAGES[name], normalizer=option, engine="fused", softcap=2.0)
    wanted = pairs(IMAGES[name], Extent(2, 2, 24, 24))
    for one, two in zip(found, results(*arrays, wanted, normalizer=option, engine="reference", softcap=2.0)):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["image", "windows", "criss-cross"])
def test_gradients_of_biases(name):
    """A learned bias, one for each head and distance, under a mask of an image."""
    generator = torch.Generator().manual_seed(4)
    query, key, value, weight = ends(generator, 2, 2, 2, 24, 3, 4)
    table = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    visible = pairs(IMAGES[name], Extent(2, 2, 24, 24))

    def run(mask, engine):
        leaf = table.clone().requires_grad_()
        output = regard.attention(query, key, value, mask & masks.relative(leaf), engine=engine)
        return output, *torch.autograd.grad((output * weight).sum(), leaf)

    with small_tiles():
        found = run(IMAGES[name], "fused")
    for one, two in zip(found, run(masks.dense(visible), "reference")):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", IMAGES)
def test_fields(name):
    """Asking for fields changes no bit of the output, and keys are named as in the sequence."""
    generator = torch.Generator().manual_seed(5)
    query, key, value, _ = ends(generator, 2, 4, 2, 24, 5, 7)
    mask, visible = IMAGES[name], pairs(IMAGES[name], Extent(2, 4, 24, 24))
    request = regard.AuxRequest(lse=True, max=True, entropy=True, received=True, topk=3)
    with small_tiles():
        alone = regard.attention(query, key, value, mask, enable_gqa=True, engine="fused")
        output, aux = regard.attention(query, key, value, mask, enable_gqa=True, engine="fused", return_aux=request)
    assert torch.equal(output, alone)
    wanted = regard.attention(query, key, value, visible, enable_gqa=True, engine="reference", return_aux=request)[1]
    for field in ("lse", "max", "entropy", "received"):
        torch.testing.assert_close(getattr(aux, field), getattr(wanted, field), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(aux.topk.weights, wanted.topk.weights, rtol=1e-11, atol=1e-11)
    assert torch.equal(aux.topk.indices, wanted.topk.indices)


def test_gradient_of_the_log_sum_exp():
    generator = torch.Generator().manual_seed(6)
    query, key, value, _ = ends(generator, 1, 2, 2, 24, 5, 7)

    def run(mask, engine):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        output, aux = regard.attention(*leaves, mask, engine=engine, return_aux=regard.AuxRequest(lse="grad"))
        return torch.autograd.grad(output.sum() + aux.lse.square().sum(), leaves)

    with small_tiles():
        found = run(IMAGES["image"], "fused")
    for one, two in zip(found, run(pairs(IMAGES["image"], Extent(1, 2, 24, 24)), "reference")):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs(dtype):
    """Computed in float32, and rounded once."""
    arrays = ends(torch.Generator().manual_seed(7), 1, 2, 2, 24, 8, 8, dtype)
    with small_tiles():
        found = results(*arrays, IMAGES["image"], engine="fused")
    wanted = results(*(t.double() for t in arrays), pairs(IMAGES["image"], Extent(1, 2, 24, 24)), engine="reference")
    for one, two in zip(found, wanted):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), two, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_hidden_keys_do_not_leak(bad):
    """A key that padding hides stands in the tiles of its neighbours."""
    query, key, value, weight = ends(torch.Generator().manual_seed(8), 1, 2, 2, 24, 8, 8, torch.float32)
    keep = torch.arange(24) % 5 != 0
    mask = IMAGES["image"] & masks.key_padding(keep)
    with small_tiles():
        clean = results(query, key, value, weight, mask, engine="fused")
        key[:, :, ~keep], value[:, :, ~keep] = bad, bad
        for one, two in zip(clean, results(query, key, value, weight, mask, engine="fused")):
            torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_threads_agree():
    """Gradients of a key that stands in several tiles are summed in a fixed order."""
    arrays = ends(torch.Generator().manual_seed(9), 1, 3, 1, 40 * 40, 16, 16)
    mask = masks.neighbourhood((40, 40), 5)
    check_threads(lambda: results(*arrays, mask, engine="fused"))


def cover(mask, L, **options):
    query = torch.zeros(1, 2, L, 8)
    return covers.useful_cover(Problem.of(Call(query, query, query, mask, **options)))


def test_which_calls_have_tiles():
    image = masks.neighbourhood((40, 40), 5)
    assert cover(image, 1600) is not None and cover(image & masks.causal(), 1600) is not None
    assert cover(image & masks.alibi(2), 1600) is not None and cover(image, 1600, score="gaussian") is not None
    assert cover(image | masks.sinks(1), 1600) is None and cover(~image, 1600) is None
    assert cover(image, 1600, dropout_p=0.5) is None  # by a key's own place
    assert cover(masks.neighbourhood(1600, 5), 1600) is None  # intervals suffice
    assert cover(masks.neighbourhood((8, 8), 7), 64) is None  # one tile


def test_few_kinds_of_tiles_share_a_matrix():
    """What is kept of a mask follows its windows, not the image."""
    image = masks.neighbourhood((64, 64), 7)
    visible = covers.visible_keys(cover(image, 64 * 64), image, Extent(1, 2, 64 * 64, 64 * 64), torch.float32)
    assert visible.bias.shape[0] <= 9 and visible.planes.shape == (visible.extent.B,)
    columns = masks.axial((64, 64), 0)
    whole = covers.visible_keys(cover(columns, 64 * 64), columns, Extent(1, 2, 64 * 64, 64 * 64), torch.float32)
    assert whole.bias is None


def test_auto_chooses_the_tiles():
    query = torch.zeros(1, 4, 56 * 56, 32)
    explained = regard.explain(query, query, query, masks.neighbourhood((56, 56), 7))
    assert explained.engine.name == "fused" and "1.56 % of the pairs" in str(explained)
    assert not explained.cost.grows


def test_compiled():
    torch._dynamo.reset()
    arrays = ends(torch.Generator().manual_seed(10), 1, 2, 2, 400, 8, 8, torch.float32)[:3]
    mask = masks.neighbourhood((20, 20), 5)
    compiled = torch.compile(lambda q, k, v: regard.attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arrays), regard.attention(*arrays, mask), rtol=1e-5, atol=1e-5)


def test_gradcheck():
    leaves = [t.requires_grad_() for t in ends(torch.Generator().manual_seed(11), 1, 2, 1, 12, 3, 2)[:3]]
    mask = masks.neighbourhood((3, 4), (1, 3)) & masks.causal()
    with small_tiles(4):
        assert torch.autograd.gradcheck(
            lambda *t: regard.attention(*t, mask, enable_gqa=True, engine="fused"), leaves, fast_mode=True
        )
