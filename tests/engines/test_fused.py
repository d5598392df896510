"""Engine fused: problems of several tiles, blocks and groups against float64, features of every size, care for NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import AuxRequest, masks, scores

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ASKED = AuxRequest(lse=True, max=True, entropy=True, topk=3, received=True)
Parts = Callable[..., tuple[Any, list[Tensor]]]

#: Shapes B, H, G, L, S that are multiples of nothing: of several tiles of 512 keys, blocks of 64 rows, groups of 4.
SHAPES = {
    "tiles and blocks": (1, 2, 2, 130, 1100),
    "just over": (2, 2, 1, 67, 515),
    "one row": (1, 4, 2, 1, 1000),
    "few": (3, 6, 2, 5, 3),
}
SMALL_SHAPES = ["just over", "few"]


# What a call is made of: functions of a maker of parameters, which are float64 copies for the oracle ------------------


def additive(new: Callable[..., Tensor], E: int, H: int, per_head: bool = False) -> tuple[Any, list[Tensor]]:
    w_v = new(H, E) if per_head else new(E)
    return scores.Additive(w_v), [w_v]


def projected(new: Callable[..., Tensor], E: int, H: int) -> tuple[Any, list[Tensor]]:
    parts = [new(7), new(7, E), new(7, E, shift=0.1)]
    return scores.Additive(*parts), parts


def per_head(new: Callable[..., Tensor], E: int, H: int) -> tuple[Any, list[Tensor]]:
    return additive(new, E, H, True)


def concat(new: Callable[..., Tensor], E: int, H: int) -> tuple[Any, list[Tensor]]:
    parts = [new(5), new(5, 2 * E)]
    return scores.Concat(*parts), parts


def general(new: Callable[..., Tensor], E: int, H: int) -> tuple[Any, list[Tensor]]:
    weight = new(E, E)
    return scores.General(weight), [weight]


def cosine(new: Callable[..., Tensor], E: int, H: int) -> tuple[Any, list[Tensor]]:
    temperature = new(1)
    return scores.Cosine(temperature), [temperature]


def radial(kind: Any, reach: float) -> Parts:
    def make(new: Callable[..., Tensor], E: int, H: int) -> tuple[Any, list[Tensor]]:
        width = new(E, scale=0.0, shift=reach * E**0.5)
        return kind(width), [width]

    return make


SCORES: dict[str, Parts] = {
    "additive": additive,
    "per head": per_head,
    "projected": projected,
    "concat": concat,
    "gaussian": radial(scores.Gaussian, 1.1),
    "boxcar": radial(scores.Boxcar, 0.93),
    "triangular": radial(scores.Triangular, 0.93),
    "epanechikov": radial(scores.Epanechikov, 0.93),
    "scaled dot": lambda new, E, H: (None, []),
    "general": general,
    "cosine": cosine,
}
COMPACT = ("boxcar", "triangular", "epanechikov")

Shape = tuple[int, int, int, int, int]


def marks(*shape: int, share: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < share


def relative(new: Callable[..., Tensor], shape: Shape) -> tuple[Any, list[Tensor]]:
    table = new(shape[1], 2 * 40 + 1)
    return masks.relative(table, align="upper_left"), [table]


def dense_bias(new: Callable[..., Tensor], shape: Shape) -> tuple[Any, list[Tensor]]:
    _, H, _, L, S = shape
    bias = new(1, H, L, S)
    return masks.dense(bias) & masks.dense(marks(L, S, share=0.7)), [bias]


MASKS: dict[str, Callable[[Callable[..., Tensor], Shape], tuple[Any, list[Tensor]]]] = {
    "none": lambda new, s: (None, []),
    "causal": lambda new, s: (masks.causal("lower_right" if s[3] <= s[4] else "upper_left"), []),
    "window": lambda new, s: (masks.causal("upper_left") & masks.window(37, 5, align="upper_left"), []),
    "padding": lambda new, s: (masks.padding(torch.tensor([s[4] - 2, s[4] // 2, 0][: s[0]])), []),
    "documents": lambda new, s: (
        masks.document(torch.arange(s[3]).expand(s[0], -1) // 50, torch.arange(s[4]).expand(s[0], -1) // 90),
        [],
    ),
    "dilated": lambda new, s: (masks.dilated(3, align="upper_left"), []),
    "sinks": lambda new, s: (
        masks.causal("upper_left") & (masks.window(9, 0, align="upper_left") | masks.sinks(4)),
        [],
    ),
    "alibi": lambda new, s: (masks.alibi(s[1], align="upper_left") & masks.causal("upper_left"), []),
    "relative": relative,
    "dense": lambda new, s: (masks.dense(marks(s[0], 1, s[3], s[4])), []),
    "bias": dense_bias,
}

NAMES = ("output", "d query", "d key", "d value")


def call(
    dtype: torch.dtype,
    wide: bool,
    shape: Shape,
    E: int,
    V: int,
    score: str,
    mask: str,
    engine: str,
    scale: float | None,
    neighbour: int = 0,
) -> tuple[dict[str, Tensor], Any]:
    """Return everything that a call yields, of the problem or of a neighbour of it, in float64 where ``wide``."""
    B, H, G, L, S = shape
    held = F64 if dtype == F64 else F32
    moved = 1 + 0.0137 * neighbour

    def new(*sizes: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        made = ((normal(*sizes, seed=len(sizes) + 11, dtype=F64) * scale + shift) * moved).to(held)
        return (made.double() if wide else made).requires_grad_()

    leaves = []
    for i, size in enumerate(((B, H, L, E), (B, G, S, E), (B, G, S, V))):
        made = normal(*size, seed=i, dtype=torch.float64)
        # Of compact kernels, no pair lies on the border by a rounding.
        made = (made * 4).round() / 4 if score in COMPACT and i < 2 else made * moved
        made = made.to(dtype)
        leaves.append((made.double() if wide else made).requires_grad_())
    part, inside = SCORES[score](new, E, H)
    attn_mask, added = MASKS[mask](new, shape)
    named = {"score": part, "attn_mask": attn_mask, "scale": scale, "enable_gqa": H != G, "engine": engine}
    asked = AuxRequest(lse=True, max=True, entropy=True, topk=3, received=True, weights=wide)
    output, aux = regard.attention(*leaves, **named, return_aux=asked)
    assert torch.equal(output, regard.attention(*leaves, **named)), "asking changed the output"
    upstream = normal(*output.shape, seed=7).to(dtype).to(output.dtype)
    extra = [*inside, *added]
    found = torch.autograd.grad(output, [*leaves, *extra], upstream, materialize_grads=True, allow_unused=True)
    told = dict(zip((*NAMES, *(f"d parameter {i}" for i in range(9))), (output.detach(), *found)))
    told |= {name: getattr(aux, name) for name in ("lse", "max", "entropy", "received")}
    return told | {"top": aux.topk.weights}, aux


def off(found: Tensor, right: Tensor) -> float:
    """Return the largest error; equal infinities differ by nothing."""
    found, right = found.detach().double(), right.detach()
    assert found.shape == right.shape
    apart = torch.where(found == right, 0.0, (found - right).abs())
    return float(apart.nan_to_num(torch.inf).max()) if apart.numel() else 0.0


def amplitudes(
    shape: Shape, E: int, V: int, score: str, mask: str, scale: float | None, weights: Tensor
) -> list[float]:
    """Return how large the terms are whose sums are the gradients to query and key.

    They may cancel to nothing, as where a row has one key, but their roundings do not.
    """
    B, H, G, L, S = shape
    query, key, value = (
        normal(*size, seed=i, dtype=F64) for i, size in enumerate(((B, H, L, E), (B, G, S, E), (B, G, S, V)))
    )
    key, value = (t.repeat_interleave(H // G, 1) for t in (key, value))
    each = weights.detach() * (normal(B, H, L, V, seed=7, dtype=F64).abs() @ value.abs().mT)
    if score in COMPACT:
        return [16 * float(each.sum(-1).max()), 16 * float(each.sum(-2).max())]
    part, _ = SCORES[score](
        lambda *n, scale=1.0, shift=0.0: normal(*n, seed=len(n) + 11, dtype=F64) * scale + shift, E, H
    )
    part = scores.ScaledDot() if part is None else part
    query, key = query.requires_grad_(), key.requires_grad_()
    factor = scale if scale is not None else E**-0.5 if isinstance(part, scores.ScaledDot) else 1.0
    found = part.compare(*part.project(query, key)) * factor
    largest = [0.0, 0.0]
    for seed in range(3):
        signs = normal(*each.shape, seed=seed, dtype=F64).sign()
        for i, gradient in enumerate(
            torch.autograd.grad((found * each * signs).sum(), (query, key), retain_graph=True)
        ):
            largest[i] = max(largest[i], float(gradient.abs().max()))
    return largest


def judge(
    dtype: torch.dtype, shape: Shape, E: int, V: int, score: str, mask: str = "none", scale: float | None = None
) -> None:
    """Compare with float64: twice eager's error is fair, and a few roundings of the terms of each result."""
    rest = shape, E, V, score, mask
    right, known = call(dtype, True, *rest, "reference", scale)
    found, aux = call(dtype, False, *rest, "fused", scale)
    # Float64 has no better oracle: its error is float32's, in proportion to their precision.
    sized = F32 if dtype == F64 else dtype
    errors = dict.fromkeys(right, 0.0)
    for neighbour in range(2 if shape[3] * shape[4] > 10_000 else 8):  # a small problem may be lucky
        base = call(sized, True, *rest, "reference", scale, neighbour)[0]
        eager = call(sized, False, *rest, "reference", scale, neighbour)[0]
        errors = {name: max(errors[name], off(eager[name], base[name])) for name in errors}
    ratio = torch.finfo(dtype).eps / torch.finfo(sized).eps
    terms = dict(zip(("d query", "d key"), amplitudes(*rest, scale, known.weights)))
    terms["entropy"] = 1.0  # a difference of logarithms
    for name, expected in right.items():
        finite = expected.detach()[expected.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 1.0
        # Statistics, and gradients of parameters, are held in the wider dtype of the computation.
        size = max(
            size, terms.get(name, 0.0), max(terms["d query"], terms["d key"]) if "parameter" in name else 0.0, 0.1
        )
        limit = 2 * ratio * errors[name] + 8 * torch.finfo(found[name].dtype).eps * size
        error = off(found[name], expected)
        assert error <= limit, f"{name} is off by {error:.3g}, where {limit:.3g} is fair ({size=:.3g})"
    keys = aux.topk.indices
    seen = torch.take_along_dim(known.weights.detach(), keys.clamp(min=0), -1)
    rough = dtype == BF16
    torch.testing.assert_close(
        torch.where(keys < 0, 0.0, seen), right["top"].detach(), rtol=1e-2 if rough else 1e-4, atol=1e-6
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", SCORES)
def test_every_score(score: str, shape: str) -> None:
    judge(F32, SHAPES[shape], 4, 5, score)


@pytest.mark.parametrize("mask", [m for m in MASKS if m != "none"])
@pytest.mark.parametrize("score", ["additive", "gaussian", "triangular", "scaled dot"])
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_every_mask(score: str, mask: str, shape: str) -> None:
    judge(F32, SHAPES[shape], 3, 5, score, mask)


@pytest.mark.parametrize("mask", ["causal", "window", "alibi", "relative", "bias", "sinks"])
def test_masks_over_tiles_and_blocks(mask: str) -> None:
    judge(F32, SHAPES["tiles and blocks"], 4, 12, "additive", mask)


@pytest.mark.parametrize(("E", "V"), [(1, 1), (3, 130), (4, 12), (20, 70), (65, 5)])
@pytest.mark.parametrize("score", ["per head", "gaussian", "epanechikov", "general"])
def test_widths(score: str, E: int, V: int) -> None:
    judge(F32, (1, 2, 1, 67, 515), E, V, score)
    judge(F32, (1, 2, 2, 9, 130), E, V, score, "causal")


@pytest.mark.parametrize("dtype", [F64, BF16])
@pytest.mark.parametrize("mask", ["none", "window", "bias"])
@pytest.mark.parametrize("score", ["additive", "concat", "gaussian", "boxcar", "epanechikov", "scaled dot", "cosine"])
def test_dtypes(score: str, mask: str, dtype: torch.dtype) -> None:
    judge(dtype, SHAPES["just over"], 5, 13, score, mask)


@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0, 2.5])
@pytest.mark.parametrize("score", ["additive", "gaussian", "triangular", "epanechikov", "scaled dot"])
def test_scale(score: str, scale: float) -> None:
    if score in ("triangular", "epanechikov") and scale <= 0:
        pytest.skip("a scale that turns −inf into NaN or +inf")
    judge(F32, SHAPES["just over"], 3, 4, score, scale=scale)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 2), st.sampled_from([(1, 1), (4, 2)]), st.integers(1, 140), st.integers(1, 700)),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 20)),
    score=st.sampled_from(list(SCORES)),
    mask=st.sampled_from(list(MASKS)),
)
def test_any_problem(shape: Any, widths: tuple[int, int], score: str, mask: str) -> None:
    B, (H, G), L, S = shape
    judge(F32, (B, H, G, L, S), *widths, score, mask)


# Magnitudes -----------------------------------------------------------------------------------------------------------

SIZES = {
    "tiny": [1e-30],
    "small": [1e-3],
    "ordinary": [1.0],
    "huge": [1e4],
    "mixed": [1e-30, 1e-3, 0.5, 1.0, 6.0, 50.0, 1e4],
}


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("by_key", list(SIZES))
@pytest.mark.parametrize("by_query", list(SIZES))
def test_additive_features_of_every_size(by_query: str, by_key: str, dtype: torch.dtype) -> None:
    L, S, E = 21, 37, 6

    def scaled(N: int, sizes: list[float], seed: int) -> Tensor:
        return normal(1, 1, N, E, seed=seed) * torch.tensor(sizes).repeat(N)[:N].unsqueeze(1)

    # A large weight shows the relative error of small features.
    size = 1e3 if {by_query, by_key} <= {"tiny", "small"} else 1.0
    plain = [scaled(L, SIZES[by_query], 0), scaled(S, SIZES[by_key], 1), normal(1, 1, S, 3, seed=2), normal(E, seed=3)]

    def run(dtype: torch.dtype, engine: str) -> list[Tensor]:
        query, key, value, w_v = (t.to(dtype).requires_grad_() for t in plain)
        output, aux = regard.attention(
            query,
            key,
            value,
            score=scores.Additive(w_v),
            scale=size,
            engine=engine,
            return_aux=AuxRequest(lse=True, max=True),
        )
        found = torch.autograd.grad(output, [query, key, value, w_v], normal(*output.shape, seed=7).to(dtype))
        return [output.detach(), *found, aux.lse, aux.max]

    right, base, found = run(F64, "reference"), run(F32, "reference"), run(dtype, "fused")
    ratio = torch.finfo(dtype).eps / torch.finfo(F32).eps
    for i, (a, b, c) in enumerate(zip(found, right, base)):
        assert a.isfinite().all()
        # Terms of the gradients, which may cancel, are as large as the weights; those of w_v's as the features, too.
        term = (1.0, size, size, 1.0, size * min(max(SIZES[by_query] + SIZES[by_key]), 1.0), 0.0, 0.0)[i]
        limit = 2 * ratio * off(c, b) + 16 * torch.finfo(dtype).eps * max(float(b.abs().max()), term)
        assert off(a, b) <= limit, i


@pytest.mark.parametrize("dtype", [F32, F64])
def test_an_infinite_key_saturates(dtype: torch.dtype) -> None:
    key = normal(1, 1, 40, 4, seed=1, dtype=dtype)
    key[0, 0, 3] = torch.inf
    key[0, 0, 20, 1] = -torch.inf
    query, value = normal(1, 1, 9, 4, dtype=dtype), normal(1, 1, 40, 3, seed=2, dtype=dtype)
    score = scores.Additive(normal(4, seed=3, dtype=dtype))
    found, right = (regard.attention(query, key, value, score=score, engine=e) for e in ("fused", "reference"))
    assert right.isfinite().all()
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("score", ["additive", "gaussian", "boxcar", "scaled dot", "cosine"])
@pytest.mark.parametrize("size", [1e-30, 0.1, 5.0, 1e4])
def test_what_comes_later_changes_no_bit_of_what_came_before(score: str, size: float) -> None:
    L, E = 150, 5
    part, _ = SCORES[score](lambda *n, scale=1.0, shift=0.0: normal(*n, seed=3) * scale + shift, E, 2)
    before = [normal(1, 2, L, E, seed=i) for i in range(3)]
    after = [t.clone() for t in before]
    for t in after:
        t[:, :, 70:] *= size
    plain, other = (regard.attention(*t, is_causal=True, score=part, engine="fused") for t in (before, after))
    assert torch.equal(plain[:, :, :70], other[:, :, :70])


@pytest.mark.parametrize("size", [1e4, 1e-30])
@pytest.mark.parametrize("mask", ["none", "causal", "alibi"])
@pytest.mark.parametrize("score", SCORES)
def test_large_and_small_inputs(score: str, mask: str, size: float) -> None:
    L, E = 70, 4
    part, _ = SCORES[score](lambda *n, scale=1.0, shift=0.0: normal(*n, seed=3) * scale + shift, E, 2)
    attn_mask, _ = MASKS[mask](normal, (1, 2, 2, L, L))
    leaves = [(normal(1, 2, L, E, seed=i) * (size if i < 2 else 1)).requires_grad_() for i in range(3)]

    def run(engine: str, dtype: torch.dtype) -> list[Tensor]:
        wide = [t.detach().to(dtype).requires_grad_() for t in leaves]
        output = regard.attention(*wide, attn_mask, score=part, engine=engine)
        return [
            output,
            *torch.autograd.grad(output, wide, normal(*output.shape, seed=7).to(dtype), materialize_grads=True),
        ]

    right, base, found = run("reference", F64), run("reference", F32), run("fused", F32)
    for name, a, b, c in zip(NAMES, found, right, base):
        if not c.isfinite().all():
            continue  # eager overflows here
        assert a.isfinite().all(), name
        # A gradient to a query is a sum of terms as large as keys, which cancel where one key has all weight.
        term = 1.0 if name in ("output", "d value") else 10 * max(size, 1.0)
        limit = 2 * off(c, b) + 16 * torch.finfo(F32).eps * max(float(b.abs().max()), term)
        assert off(a, b) <= limit, f"{name}: {off(a, b):.3g} > {limit:.3g}"


# Layouts --------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda t: torch.stack((t, t + 1), -1)[..., 0],
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda t: t.mT.contiguous().mT,
    "expanded heads": lambda t: t[:, :1].expand_as(t),
    "expanded batch": lambda t: t[:1].expand_as(t),
    "expanded rows": lambda t: t[:, :, :1].expand_as(t),
    "a slice": lambda t: torch.nn.functional.pad(t, (1, 2, 3, 1))[:, :, 3:-1, 1:-2],
}


@pytest.mark.parametrize("score", ["additive", "gaussian", "epanechikov", "scaled dot"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, score: str) -> None:
    part, _ = SCORES[score](lambda *n, scale=1.0, shift=0.0: normal(*n, seed=3) * scale + shift, 4, 2)

    def run(contiguous: bool, which: int) -> list[Tensor]:
        leaves = [normal(2, 2, 67, 4, seed=i) for i in range(3)]
        leaves[which] = LAYOUTS[layout](leaves[which])
        if contiguous:
            leaves[which] = leaves[which].contiguous()
        leaves = [t.requires_grad_() for t in leaves]
        output = regard.attention(*leaves, score=part, is_causal=True, engine="fused")
        upstream = LAYOUTS[layout](normal(*output.shape, seed=7))
        return [output, *torch.autograd.grad(output, leaves, upstream.contiguous() if contiguous else upstream)]

    for which in range(3):
        for a, b in zip(run(False, which), run(True, which)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("size", ["B", "H", "L", "S", "V", "E"])
@pytest.mark.parametrize("score", ["additive", "gaussian", "boxcar", "scaled dot"])
@pytest.mark.parametrize("mask", [None, "causal", "alibi"])
def test_sizes_of_zero(size: str, score: str, mask: str | None) -> None:
    n = {"B": 2, "H": 2, "L": 5, "S": 6, "V": 3, "E": 4} | {size: 0}
    shapes = ((n["B"], n["H"], n["L"], n["E"]), (n["B"], n["H"], n["S"], n["E"]), (n["B"], n["H"], n["S"], n["V"]))
    attn_mask = {
        None: lambda: None,
        "causal": lambda: masks.causal("upper_left"),
        "alibi": lambda: masks.alibi(torch.ones(n["H"]), align="upper_left"),
    }[mask]()
    kinds = {"additive": scores.Additive(normal(n["E"])), "gaussian": "gaussian", "boxcar": scores.Boxcar(2.0)}

    def run(engine: str) -> list[Tensor]:
        leaves = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        output, aux = regard.attention(*leaves, attn_mask, score=kinds.get(score), engine=engine, return_aux=ASKED)
        found = torch.autograd.grad(output.sum(), leaves, materialize_grads=True)
        return [output, *found, aux.lse, aux.max, aux.entropy, aux.received]

    for a, b in zip(run("fused"), run("reference")):
        torch.testing.assert_close(a, b)


# What is not finite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("score", ["additive", "gaussian", "triangular", "scaled dot"])
def test_what_is_masked_cannot_leak(score: str, where: int, bad: float) -> None:
    part, _ = SCORES[score](lambda *n, scale=1.0, shift=0.0: normal(*n, seed=3) * scale + shift, 4, 2)
    hidden = {
        "padding": (masks.padding(torch.tensor([61])), slice(61, None)),
        "window": (masks.window(80, 0, align="upper_left"), slice(73, None)),
        "bias": (masks.alibi(2, align="upper_left") & masks.padding(torch.tensor([61])), slice(61, None)),
    }
    for name, (mask, rows) in hidden.items():

        def run(value: float, mask: Any = mask, rows: slice = rows) -> list[Tensor]:
            leaves = [normal(1, 2, 73 if i == 0 else 200, 4, seed=i) for i in range(3)]
            leaves[where][:, :, rows] = value
            leaves = [t.requires_grad_() for t in leaves]
            with torch.no_grad():
                aux = regard.attention(*leaves, mask, score=part, engine="fused", return_aux=ASKED)[1]
            output = regard.attention(*leaves, mask, score=part, engine="fused")
            found = torch.autograd.grad(output, leaves, normal(*output.shape, seed=7))
            return [output, *found, aux.lse, aux.max, aux.entropy, aux.received, aux.topk.weights, aux.topk.indices]

        for a, b in zip(run(bad), run(0.0)):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "alibi"])
@pytest.mark.parametrize("score", ["additive", "gaussian", "triangular", "scaled dot", "cosine"])
def test_a_nan_that_is_seen_shows_as_it_does_in_eager(score: str, mask: str, where: int) -> None:
    part, _ = SCORES[score](lambda *n, scale=1.0, shift=0.0: normal(*n, seed=3) * scale + shift, 4, 2)
    attn_mask, _ = MASKS[mask](normal, (1, 2, 2, 70, 70))

    def run(engine: str) -> list[Tensor]:
        leaves = [normal(1, 2, 70, 4, seed=i) for i in range(3)]
        leaves[where][0, 1, 65, 2] = torch.nan
        leaves = [t.requires_grad_() for t in leaves]
        output = regard.attention(*leaves, attn_mask, score=part, engine=engine)
        with torch.no_grad():
            assert torch.equal(
                regard.attention(*leaves, attn_mask, score=part, engine=engine).isnan(), output.isnan()
            ), "without gradients"
        return [output, *torch.autograd.grad(output.sum(), leaves)]

    for name, a, b in zip(NAMES, run("fused"), run("reference")):
        if score == "triangular":  # nor over rows that are out of a kernel's reach
            assert (b.isnan() | ~a.isnan()).all(), name
        elif where == 0 and mask != "none" and name in ("d key", "d value"):
            # Eager spreads a row's NaN over the gradients of keys that it does not see; it need not be spread so far.
            assert (b.isnan().any(-1) | ~a.isnan().any(-1)).all(), name
            assert torch.equal(a[:, :, :66].isnan(), b[:, :, :66].isnan()), name
        else:
            assert torch.equal(a.isnan(), b.isnan()), name
        both = a.isnan() | b.isnan()
        torch.testing.assert_close(a[~both], b[~both], rtol=1e-3, atol=1e-4)


def test_a_causal_nan_shows_only_where_it_is_seen() -> None:
    value = normal(1, 1, 600, 4)
    value[0, 0, 550] = torch.nan
    query = normal(1, 1, 600, 4, seed=1)
    output = regard.attention(query, query, value, is_causal=True, score=scores.Additive(normal(4)), engine="fused")
    assert torch.equal(output.isnan().any(-1)[0, 0], torch.arange(600) >= 550)


def test_random_orders_of_keys_change_rounding_only() -> None:
    # Compact kernels without a mask bring points into an order: nothing may depend on where they stood.
    query, key, value = normal(1, 2, 130, 2), normal(1, 2, 1100, 2, seed=1), normal(1, 2, 1100, 3, seed=2)
    order = torch.randperm(1100, generator=torch.Generator().manual_seed(0))
    for kind in (scores.Boxcar, scores.Triangular, scores.Epanechikov):
        plain, aux = regard.attention(query, key, value, score=kind(0.5), engine="fused", return_aux=ASKED)
        other, told = regard.attention(
            query, key[:, :, order], value[:, :, order], score=kind(0.5), engine="fused", return_aux=ASKED
        )
        torch.testing.assert_close(plain, other)
        torch.testing.assert_close(aux.received[..., order], told.received, rtol=1e-4, atol=1e-5)


def test_an_additive_call_holds_no_matrix() -> None:
    # Peak memory of torch and of the kernels' scratch, all of which torch allocates.
    N, C = 4096, 32
    leaves = [normal(1, 1, N, C, seed=i).requires_grad_() for i in range(3)]
    score = scores.Additive(normal(C, seed=3))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        regard.attention(*leaves, is_causal=True, score=score, engine="fused").sum().backward()
    held = peak = 0
    for event in sorted((e for e in seen.events() if e.name == "[memory]"), key=lambda e: e.time_range.start):
        held += event.cpu_memory_usage if hasattr(event, "cpu_memory_usage") else event.self_cpu_memory_usage
        peak = max(peak, held)
    total = sum(max(e.self_cpu_memory_usage, 0) for e in seen.key_averages())
    assert 0 < max(peak, 1) < N * N * 4 // 4
    assert 0 < total < N * N * 4 // 2
