"""Order 1: lines against least squares written by other means, limits, options, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard
from regard import AuxRequest, LocalLinear, engines, masks, scores
from regard.engines.problem import Call, Problem

ENGINES = ["reference", "streaming", "fused"]
SCORES = {
    "scaled_dot": scores.ScaledDot(),
    "dot": scores.Dot(),
    "cosine": scores.Cosine(0.5),
    "general": scores.General(torch.eye(3, dtype=torch.float64) + 0.2),
    "gaussian": scores.Gaussian(0.8),
    "gaussian per feature": scores.Gaussian(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)),
    "laplacian": scores.Laplacian(1.5),
    "epanechnikov": scores.Epanechnikov(3.0),
}
FUSED = {"scaled_dot", "dot", "cosine", "general", "gaussian", "gaussian per feature"}


def drawn(*sizes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def least_squares(query, key, value, weights, ridge):
    """One query: the constant of an augmented least squares problem, by numpy's lstsq."""
    keep = weights > 0
    if not keep.any():
        return np.zeros(value.shape[-1])
    apart, w = (key - query)[keep], weights[keep]
    D = apart.shape[-1]
    size = ridge / D * (w * (apart**2).sum(-1)).sum()
    rows = np.sqrt(w)[:, None] * np.concatenate((np.ones((len(w), 1)), apart), 1)
    rows = np.concatenate((rows, np.sqrt(size) * np.eye(D + 1)[1:]))
    right = np.concatenate((np.sqrt(w)[:, None] * value[keep], np.zeros((D, value.shape[-1]))))
    return np.linalg.lstsq(rows, right, rcond=None)[0][0]


def expected(q, k, v, score, mask, ridge):
    """The definition, one row at a time, with the weights that order 0 has."""
    _, aux = regard.attention(
        q, k, v, mask, score=score, engine="reference", enable_gqa=True, return_aux=regard.AuxRequest(weights=True)
    )
    place, at = score.positions(q, k)
    R = q.shape[1] // k.shape[1]
    place, at, v = place.numpy(), at.repeat_interleave(R, 1).numpy(), v.repeat_interleave(R, 1).numpy()
    weights = aux.weights.numpy()
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        out[b, h, i] = least_squares(place[b, h, i], at[b, h], v[b, h], weights[b, h, i], ridge)
    return torch.from_numpy(out)


def made_masks(B, L, S):
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(B, 1, L, S, generator=generator, dtype=torch.float64)
    bias[:, :, 1] = -torch.inf
    seen = torch.rand(L, S, generator=generator) < 0.6
    seen[0] = False
    return {
        "none": None,
        "causal": masks.causal(align="upper_left"),
        "padding": masks.padding(torch.tensor([S - 3, 0])),
        "window": masks.window(3, 1, align="upper_left"),
        "bool matrix": seen,
        "bias": bias,
        "causal and bias": masks.causal(align="upper_left") & masks.dense(bias),
    }


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", made_masks(2, 4, 5))
@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_weighted_least_squares(engine, name, mask):
    if engine == "fused" and (name not in FUSED or mask == "causal and bias"):
        pytest.skip("the kernels have no such score or mask; the refusal is tested below")
    q, k, v = drawn((2, 4, 11, 3), (2, 2, 13, 3), (2, 2, 13, 2))
    given, score = made_masks(2, 11, 13)[mask], SCORES[name]
    out = regard.attention(q, k, v, given, score=score, engine=engine, enable_gqa=True, order=LocalLinear(0.05))
    torch.testing.assert_close(out, expected(q, k, v, score, given, 0.05), atol=1e-9, rtol=1e-9)


@pytest.mark.campaign(keep=45)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["dot", "gaussian", "gaussian per feature"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bool matrix", "bias"])
@pytest.mark.parametrize("sizes", [(11, 13, 3, 2), (70, 150, 5, 17)])
def test_gradients_are_those_of_the_definition(engine, name, mask, sizes):
    L, S, E, V = sizes
    widths = {"gaussian": torch.tensor(1.3).double(), "gaussian per feature": 1 + 0.1 * torch.arange(E).double()}
    given = made_masks(2, L, S)[mask]
    found = []
    for each in ("reference", engine):
        ends = drawn((2, 4, L, E), (2, 2, S, E), (2, 2, S, V))
        leaves = [t.clone().requires_grad_() for t in (*ends, *([widths[name]] if name in widths else []))]
        score = scores.Gaussian(leaves[3]) if name in widths else scores.Dot()
        out = regard.attention(*leaves[:3], given, score=score, engine=each, enable_gqa=True, order=1)
        grad = drawn(out.shape, seed=1)[0]
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for right, got in zip(*found):
        torch.testing.assert_close(got, right, atol=1e-9, rtol=1e-9)
        assert got.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 8, 16, 33, 64])
def test_narrow_dtypes(engine, dtype, width):
    q, k, v = drawn((1, 2, 40, width), (1, 2, 300, width), (1, 2, 300, 8), dtype=dtype)
    out = regard.attention(q, k, v, engine=engine, order=1)
    assert out.dtype == dtype
    right = regard.attention(q.double(), k.double(), v.double(), engine="reference", order=1)
    limit = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert (out.double() - right).abs().max() < limit * right.abs().max()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_affine_function_comes_back_up_to_the_ridge(engine):
    q, k = drawn((1, 1, 30, 3), (1, 1, 200, 3))
    slope = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    right = q @ slope + 3
    errors = []
    for ridge in (1e-2, 1e-4, 1e-6):
        out = regard.attention(q, k, k @ slope + 3, score="gaussian", engine=engine, order=LocalLinear(ridge))
        errors.append(float((out - right).abs().max()))
    # Far from most keys the mean squared distance, and so the ridge, is large.
    assert errors[0] < 1 and errors[1] < errors[0] / 50 and errors[2] < errors[1] / 50, errors
    mean = regard.attention(q, k, k @ slope + 3, score="gaussian", engine=engine)
    assert errors[0] < float((mean - right).abs().max()) / 5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_keys(engine, dtype):
    q, k, v = drawn((1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 2), dtype=dtype)
    out = regard.attention(q, k, v, is_causal=True, engine=engine, order=1)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])  # one key: its value
    assert out.isfinite().all()
    same = k[:, :, :1].expand(k.shape).contiguous()  # keys that coincide, with the query and without: the mean
    for each in (q, same):
        out = regard.attention(each, same, v, engine=engine, order=1)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(out.shape), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_narrow_kernel_stays_bounded(engine):
    """A ridge relative to the spread alone would give 1e62: one key has nearly all of the weight."""
    q, k, v = drawn((1, 1, 200, 4), (1, 1, 300, 4), (1, 1, 300, 3), dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for width in (0.02, 0.1, 0.5):
        out = regard.attention(*leaves, score=scores.Gaussian(width), engine=engine, order=1)
        assert out.abs().max() < 100
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_far_from_the_origin(engine):
    q, k, v = drawn((1, 1, 50, 4), (1, 1, 300, 4), (1, 1, 300, 3), dtype=torch.float32)
    near = regard.attention(q, k, v, score="gaussian", engine=engine, order=1)
    far = regard.attention(q + 128, k + 128, v, score="gaussian", engine=engine, order=1)
    assert (far - near).abs().max() < 2e-3  # the inputs themselves lose 7 bits


@pytest.mark.parametrize("name", ["gaussian", "gaussian per feature", "dot"])
@pytest.mark.parametrize("mask", [None, masks.window(190, 60)])
@pytest.mark.parametrize("spread", [1.0, 0.1, 0.01, 0.001])
def test_groups_of_keys_far_apart(spread, mask, name):
    """Wide groups of keys are summed by products; narrow ones, 500 widths from the mean of all, by differences."""
    corner, noise, q_noise, v, grad = drawn((1, 1, 400, 5), *[(1, 2, 400, 5)] * 2, *[(1, 2, 400, 3)] * 2)
    query = q_noise / spread if name == "dot" else corner.sign() + spread * q_noise
    given = [t.float() for t in (query, corner.sign() + spread * noise, v)]

    def fitted(engine, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in given]
        width = torch.full((5,), 2 * spread, dtype=dtype) if name == "gaussian per feature" else 2 * spread
        score = scores.Dot() if name == "dot" else scores.Gaussian(width)
        output = regard.attention(*leaves, mask, score=score, engine=engine, order=1)
        return [t.detach().double() for t in (output, *torch.autograd.grad(output, leaves, grad.to(dtype)))]

    right, eager, narrow = (
        fitted("reference", torch.float64),
        *(fitted(e, torch.float32) for e in ("reference", "fused")),
    )
    for exact, plain, got, same in zip(right, eager, narrow, fitted("fused", torch.float64)):
        torch.testing.assert_close(same, exact, atol=1e-9 * float(exact.abs().max()), rtol=0)
        rounding = torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert (got - exact).abs().max() < 4 * ((plain - exact).abs().max() + 2 * rounding)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_and_other_fields(engine):
    q, k, v = drawn((1, 2, 7, 3), (1, 2, 9, 3), (1, 2, 9, 2))
    mask = masks.causal(align="upper_left")
    request = regard.AuxRequest(lse=True, max=True, topk=2, received=True, weights=True, scores=True)
    out, aux = regard.attention(q, k, v, mask, engine=engine, order=1, return_aux=request)
    torch.testing.assert_close(aux.weights @ v, out)
    torch.testing.assert_close(aux.weights.sum(-1), torch.ones(1, 2, 7, dtype=torch.float64))
    assert (aux.weights < 0).any() and (aux.weights[aux.scores == -torch.inf] == 0).all()
    torch.testing.assert_close(aux.received, aux.weights.sum(-2))
    ranked = aux.weights.masked_fill(aux.scores == -torch.inf, -torch.inf).topk(2, -1).values  # hidden keys come last
    torch.testing.assert_close(aux.topk.weights, ranked.clamp(min=-1e9) * (ranked > -torch.inf))
    assert aux.topk.indices[0, 0, 0].tolist() == [0, -1]
    torch.testing.assert_close(aux.lse, torch.logsumexp(aux.scores, -1))
    small = regard.AuxRequest(lse=True, max=True, topk=2, received=True)
    same, row = regard.attention(q, k, v, mask, engine=engine, order=1, return_aux=small)
    assert torch.equal(same, out)
    for name in ("lse", "max", "received"):
        torch.testing.assert_close(getattr(row, name), getattr(aux, name))
    torch.testing.assert_close(row.topk.weights, aux.topk.weights)
    assert torch.equal(row.topk.indices, aux.topk.indices)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("name", ["scaled_dot", "gaussian"])
def test_steps_approximate(engine, name):
    q, k, v = drawn((1, 2, 20, 6), (1, 2, 60, 6), (1, 2, 60, 2))
    right, mean = (regard.attention(q, k, v, score=name, engine=engine, order=order) for order in (1, 0))
    errors = []
    for steps in (1, 3, 6):
        order = LocalLinear(solver="cg", steps=steps, tolerance=0)
        out = regard.attention(q, k, v, score=name, engine=engine, order=order)
        errors.append(float((out - right).abs().max()))
    assert errors[2] < 1e-9 and errors[2] < errors[1] < errors[0] < float((mean - right).abs().max())
    loose = LocalLinear(solver="cg", steps=60, tolerance=0.5)
    off = float((regard.attention(q, k, v, score=name, engine=engine, order=loose) - right).abs().max())
    assert off > errors[2]


def test_gradients_of_steps():
    leaves = [t.requires_grad_() for t in drawn((1, 1, 4, 3), (1, 1, 6, 3), (1, 1, 6, 2))]
    order = LocalLinear(solver="cg", steps=2)
    assert torch.autograd.gradcheck(
        lambda *rows: regard.attention(*rows, score="gaussian", engine="streaming", order=order), leaves
    )


def test_order_0_is_unchanged():
    q, k, v = drawn((1, 2, 20, 6), (1, 2, 60, 6), (1, 2, 60, 2))
    assert torch.equal(regard.attention(q, k, v, order=0), regard.attention(q, k, v))
    assert torch.equal(regard.attention(q, k, v, order=1), regard.attention(q, k, v, order=LocalLinear()))


def test_auto_and_explain():
    q, k, v = drawn((1, 2, 20, 6), (1, 2, 60, 6), (1, 2, 60, 2))
    plan = regard.explain(q, k, v, order=1)
    assert plan.engine.name == "fused"
    assert "order LocalLinear(ridge=0.01)" in str(plan)
    assert plan.others["sdpa"] == "unsupported, order=0 only"
    assert regard.explain(q, k, v, order=1, score="laplacian").engine.name == "streaming"
    assert "laplacian" not in regard.explain(q, k, v, order=1).call


def test_memory_does_not_grow_with_the_product():
    for name in ("streaming", "fused"):
        q, k = torch.zeros(1, 1, 100, 8), torch.zeros(1, 1, 50_000, 8)
        cost = engines.TABLE[name].cost(Problem.of(Call(q, k, k, order=1)))
        assert not cost.grows and cost.workspace < 200e6


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"order": 2}, ValueError, "order must be 0, 1 or a LocalLinear, got 2"),
        ({"order": "line"}, TypeError, "order must be 0, 1 or a LocalLinear, got 'line'"),
        ({"order": True}, TypeError, "order must be 0, 1 or a LocalLinear, got True"),
        ({"order": 1, "normalizer": "sparsemax"}, ValueError, "normalizer must be softmax with order=1"),
        ({"order": 1, "dropout_p": 0.1}, ValueError, "dropout_p must be 0 with order=1, whose weights may be negative"),
        ({"order": 1, "score": "constant"}, ValueError, "score must be a kernel of a distance or a dot product"),
        ({"order": 1, "engine": "sdpa"}, ValueError, "'sdpa': order=0 only"),
        ({"order": 1, "engine": "fused", "score": "laplacian"}, ValueError, "lines with dot products and the Gaussian"),
        ({"order": 1, "engine": "fused", "softcap": 2.0}, ValueError, "no softcap with lines"),
        ({"order": LocalLinear(solver="cg"), "engine": "fused"}, ValueError, "lines by the exact solver only"),
        (
            {"order": 1, "return_aux": regard.AuxRequest(entropy=True)},
            ValueError,
            "return_aux must ask for no entropy with order=1, whose weights may be negative",
        ),
    ],
)
def test_refusals(options, kind, message):
    q, k, v = drawn((1, 2, 5, 3), (1, 2, 6, 3), (1, 2, 6, 2))
    with pytest.raises(kind) as caught:
        regard.attention(q, k, v, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"ridge": 0.0}, ValueError, "LocalLinear: ridge must be a positive finite number, got 0.0"),
        ({"ridge": "a"}, TypeError, "LocalLinear: ridge must be a positive finite number, got 'a'"),
        ({"solver": "qr"}, ValueError, "LocalLinear: solver must be one of"),
        ({"solver": "cg", "steps": 0}, ValueError, "LocalLinear: steps must be an int of at least 1, got 0"),
        ({"solver": "cg", "tolerance": 1.0}, ValueError, "LocalLinear: tolerance must be a number in [0, 1), got 1.0"),
        ({"steps": 4}, ValueError, "LocalLinear: steps has no effect with the exact solver; set solver='cg'."),
    ],
)
def test_options_are_checked(options, kind, message):
    with pytest.raises(kind) as caught:
        LocalLinear(**options)
    assert message in str(caught.value)


def test_an_engine_that_knows_no_order_is_not_used():
    class Own(engines.Streaming):
        name, fits_lines = "own", False

    q, k, v = drawn((1, 2, 5, 3), (1, 2, 6, 3), (1, 2, 6, 2))
    with pytest.raises(ValueError, match="'own': order=0 only"):
        regard.attention(q, k, v, order=1, engine=Own())


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("engine", ["auto", "reference", "streaming", "fused"])
def test_compiled(engine):
    q, k, v = drawn((1, 2, 20, 6), (1, 2, 60, 6), (1, 2, 60, 2), dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def call(q, k, v):
        return regard.attention(q, k, v, is_causal=True, order=LocalLinear(0.02), engine=engine)

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        out = function(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
    for eager, compiled in zip(*found):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("engine", ["reference", "streaming"])
def test_transforms(engine):
    q, k, v = drawn((3, 2, 5, 3), (3, 2, 6, 3), (3, 2, 6, 2))

    def call(q, k, v):
        return regard.attention(q, k, v, score="gaussian", order=1, engine=engine).square().sum()

    each = torch.vmap(torch.func.grad(call, (0, 1, 2)))(q, k, v)
    for i in range(3):
        for got, right in zip(each, torch.func.grad(call, (0, 1, 2))(q[i], k[i], v[i])):
            torch.testing.assert_close(got[i], right)


def test_threads_agree():
    q, k, v = drawn((1, 3, 100, 6), (1, 1, 200, 6), (1, 1, 200, 5), dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = regard.attention(*leaves, engine="fused", order=1, enable_gqa=True)
            found.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for one, many in zip(*found):
        torch.testing.assert_close(one, many, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["reference", "streaming", "fused", "auto"])
def test_fields_of_rows_that_see_nothing_have_all_keys(engine: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    asked = AuxRequest(weights=True, scores=True, lse=True, received=True, topk=2)
    output, aux = regard.attention(q, k, v, masks.padding(torch.tensor([0])), order=1, engine=engine, return_aux=asked)
    assert not output.any() and aux.weights.shape == (1, 2, 6, 6) and not aux.weights.any()
    assert (aux.scores == -torch.inf).all() and (aux.lse == -torch.inf).all() and not aux.received.any()
    assert (aux.topk.indices == -1).all() and not aux.topk.weights.any()
    alone = AuxRequest(lse=True, received=True, topk=2)
    _, aux = regard.attention(q, k, v, masks.padding(torch.tensor([0])), order=1, engine=engine, return_aux=alone)
    assert aux.received.shape == (1, 2, 6) and (aux.topk.indices == -1).all()
