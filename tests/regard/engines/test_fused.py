"""Engine fused: the laws on problems of several tiles, blocks and groups; features of every size, care for NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import across
from torch import Tensor

import regard
from regard import AuxRequest, masks, scores
from regard.engines.fused import run
from regard.engines.fused.arguments import RADIAL
from regard.scores import Score
from regard.scores.kernels import kernels
from regard.testing import case as samples
from regard.testing.case import Case, CaseCall, Recipe
from regard.testing.conformance import judge
from regard.testing.guarded_memory import guarded_kernels
from regard.testing.trial import Trial

F32, F64 = torch.float32, torch.float64
ASKED = AuxRequest(lse=True, max=True, entropy=True, topk=3, received=True)
NAMES = ("output", "d query", "d key", "d value")
LAWS = ("budget", "gradient budget", "aux")

#: Sizes that are multiples of nothing: of several tiles of 512 keys, blocks of 64 rows, groups of 4.
SHAPES: dict[str, dict[str, Any]] = {
    "tiles and blocks": {"key_heads": 2, "queries": 130, "keys": 600},
    "just over": {"group": 2, "queries": 67, "keys": 515},
    "one row": {"key_heads": 2, "group": 2, "queries": 1, "keys": 1000},
    "few": {"lead": (3,), "key_heads": 2, "group": 3, "queries": 5, "keys": 3},
}
SCORES = (
    "additive", "additive/heads", "additive/projected", "concat", "gaussian/features", "laplacian",
    "laplacian/features", "boxcar", "triangular/features", "epanechnikov/learned", "scaled_dot", "general",
    "cosine/learned",
)  # fmt: skip
NORMALIZERS = ("sparsemax", "entmax15", "entmax", "sigmoid")
MASKS: dict[str, Recipe] = {
    "causal": ("causal", "lower_right"),
    "window": ("and", ("causal", "upper_left"), ("window", 37, 5, "upper_left")),
    "padding": ("padding", False),
    "documents": ("document", True),
    "dilated": ("dilated", 3, "upper_left"),
    "others": ("others", False),
    "others named": ("others", True),
    "sinks": ("and", ("causal", "upper_left"), ("or", ("window", 9, 0, "upper_left"), ("sinks", 4))),
    "alibi": ("and", ("alibi", False, "upper_left"), ("causal", "upper_left")),
    "relative": ("relative", 40, True, "upper_left"),
    "dense": ("dense", "BhLS", 0.5),
    "bias": ("and", ("bias", "bHLS", 1.0), ("dense", "LS", 0.7)),
    "bias by key": ("bias", "bHlS", 0.9),
}


def holds(law: str, **case: Any) -> None:
    verdict = judge(law, "fused", Case(**case))
    assert verdict.outcome == "held", str(verdict)


def part(name: str, E: int, H: int = 2) -> Score:
    """Return a score; its tensors are the same for the same sizes."""
    widths = samples.Widths(query=E, key=E, keys=1, heads=H, key_heads=H)
    return samples.make_score(name, widths, torch.Generator().manual_seed(3))


@pytest.mark.campaign(keep=20)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", SCORES)
def test_every_score(score: str, shape: str, law: str) -> None:
    # What additive scores learn takes the oracle seconds where pairs are many.
    learned = shape in ("one row", "few") or not score.startswith(("additive", "concat"))
    holds(law, score=score, width=4, value_width=5, learned=learned, **SHAPES[shape])


@pytest.mark.parametrize("score", ["additive", "concat"])
def test_what_an_additive_score_learns_over_tiles_and_blocks(score: str) -> None:
    holds("gradient budget", score=score, width=3, value_width=12, learned=True, queries=67, keys=515)


@pytest.mark.campaign(keep=24)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", ["additive", "gaussian", "laplacian", "triangular", "scaled_dot"])
def test_every_mask(score: str, mask: str, law: str) -> None:
    # The oracle's derivative of a bias is (L·S)² numbers, and slow for an additive score.
    learned = score != "additive" and mask != "bias"
    holds(law, score=score, mask=MASKS[mask], width=3, value_width=5, learned=learned, queries=67, keys=515)
    holds(law, score=score, mask=MASKS[mask], width=3, learned=True, **SHAPES["few"])


@pytest.mark.parametrize("mask", ["causal", "window", "alibi", "relative", "bias", "sinks"])
def test_masks_over_tiles_and_blocks(mask: str) -> None:
    for law in LAWS:
        holds(
            law,
            score="scaled_dot",
            mask=MASKS[mask],
            learned=mask != "bias",
            value_width=12,
            **SHAPES["tiles and blocks"],
        )


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize(("E", "V"), [(1, 1), (3, 130), (4, 12), (20, 70), (65, 5)])
@pytest.mark.parametrize("score", ["additive/heads", "gaussian", "laplacian", "epanechnikov", "general"])
def test_widths(score: str, E: int, V: int) -> None:
    for law in LAWS:
        holds(law, score=score, width=E, value_width=V, queries=9, keys=515)
        holds(law, score=score, width=E, value_width=V, queries=9, keys=130, group=2, mask=MASKS["causal"])


@pytest.mark.campaign(keep=18)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", [None, "window", "bias"])
@pytest.mark.parametrize(
    "score",
    ["additive", "concat", "gaussian", "laplacian/learned", "boxcar", "epanechnikov", "scaled_dot", "cosine/learned"],
)
def test_dtypes(score: str, mask: str | None, dtype: str) -> None:
    learned = not score.startswith(("additive", "concat")) and mask != "bias"
    recipe = None if mask is None else MASKS[mask]
    sizes = {"group": 2, "queries": 9, "keys": 515, "width": 5, "value_width": 13}
    for law in LAWS:
        holds(law, score=score, mask=recipe, dtype=dtype, learned=learned, **sizes)


@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0, 2.5])
@pytest.mark.parametrize("score", ["additive", *RADIAL, "scaled_dot"])
def test_scale(score: str, scale: float) -> None:
    if scores.base.TABLE[score].can_return_neg_inf:
        scale = abs(scale) or 1.5  # a scale that turns −inf into NaN or +inf is no kernel's
    for law in LAWS:
        holds(law, score=score, width=3, value_width=4, scale=scale, queries=67, keys=515)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.fixed_dictionaries(
        {
            "lead": st.sampled_from([(1,), (2,)]),
            "key_heads": st.integers(1, 2),
            "group": st.integers(1, 2),
            "queries": st.integers(1, 140),
            "keys": st.integers(1, 700),
            "width": st.integers(1, 9),
            "value_width": st.integers(1, 20),
            "seed": st.integers(0, 1000),
        }
    ),
    score=st.sampled_from(SCORES),
    mask=st.sampled_from([None, *MASKS.values()]),
    normalizer=st.sampled_from(["softmax", *NORMALIZERS]),
    law=st.sampled_from(LAWS),
)
def test_any_problem(sizes: dict[str, Any], score: str, mask: Recipe | None, normalizer: str, law: str) -> None:
    holds(law, score=score, mask=mask, normalizer=normalizer, **sizes)


# Normalizers other than softmax ---------------------------------------------------------------------------------------


@pytest.mark.campaign(keep=20)
@pytest.mark.parametrize("law", LAWS[:2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", SCORES)
def test_every_normalizer(score: str, normalizer: str, shape: str, law: str) -> None:
    learned = shape in ("one row", "few") or not score.startswith(("additive", "concat"))
    holds(law, score=score, normalizer=normalizer, width=4, value_width=5, learned=learned, **SHAPES[shape])


@pytest.mark.campaign(keep=20)
@pytest.mark.parametrize("law", LAWS[:2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", ["additive", "laplacian", "triangular", "scaled_dot"])
def test_every_normalizer_and_mask(score: str, normalizer: str, mask: str, law: str) -> None:
    learned = score != "additive" and mask != "bias"
    sizes = {"width": 3, "value_width": 13, "queries": 67, "keys": 515}
    holds(law, score=score, normalizer=normalizer, mask=MASKS[mask], learned=learned, **sizes)


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize("magnitude", [0.03, 1.0, 30.0])
@pytest.mark.parametrize("V", [1, 16, 70])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_many_and_few_keys_with_weight(normalizer: str, dtype: str, V: int, magnitude: float) -> None:
    sizes = {"group": 2, "queries": 70, "keys": 530, "width": 9, "value_width": V}
    for law in LAWS[:2]:
        holds(law, score="scaled_dot", normalizer=normalizer, dtype=dtype, magnitude=magnitude, **sizes)


@pytest.mark.parametrize("mask", [None, "window", "others", "bias"])
@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax"])
@pytest.mark.parametrize("score", ["scaled_dot", "epanechnikov"])
def test_rows_whose_scores_are_held_in_parts(
    score: str, normalizer: str, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "HELD", 12 * 700)
    assert run.held_scores(600)[0] == 12
    recipe = None if mask is None else MASKS[mask]
    for law in LAWS[:2]:
        holds(law, score=score, normalizer=normalizer, mask=recipe, width=3, value_width=5, queries=90, keys=600)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", ["additive", "boxcar", "scaled_dot"])
def test_no_kernel_leaves_its_memory(score: str, normalizer: str) -> None:
    with guarded_kernels():
        for recipe in (None, MASKS["window"], MASKS["others"], MASKS["bias"]):
            for magnitude in (0.03, 1.0):
                case = {"width": 3, "value_width": 17, "queries": 67, "keys": 600, "magnitude": magnitude}
                holds("gradient budget", score=score, normalizer=normalizer, mask=recipe, **case)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("flat", [False, True])
def test_a_nan_without_weight_is_seen_all_the_same(flat: bool, normalizer: str) -> None:
    query, key, value = (normal(1, 2, 130, 4, seed=i) for i in range(3))
    value[0, 1, 77, 1] = torch.nan
    query = query * 0.01 if flat else query
    for mask in (None, masks.causal("upper_left")):
        found, right = (
            regard.attention(query, key, value, mask, normalizer=normalizer, engine=engine)
            for engine in ("fused", "reference")
        )
        assert torch.equal(found.isnan(), right.isnan())


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite(bad: float, normalizer: str) -> None:
    query, key, value = (normal(1, 1, n, 1, seed=i) for i, n in enumerate((70, 600, 600)))
    key[0, 0, 333] = bad
    for score in ("dot", "gaussian"):
        found, right = (
            regard.attention(query, key, value, score=score, normalizer=normalizer, engine=engine)
            for engine in ("fused", "reference")
        )
        torch.testing.assert_close(found, right, equal_nan=True)


def test_a_call_with_a_threshold_holds_no_matrix() -> None:
    N = 8192
    leaves = [normal(1, 1, N, 8, seed=i).requires_grad_() for i in range(3)]
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        regard.attention(*leaves, normalizer="entmax15", engine="fused").sum().backward()
    total = sum(max(e.self_cpu_memory_usage, 0) for e in seen.key_averages())
    assert leaves[0].nbytes < total < N * N * 4 // 4


# Magnitudes -----------------------------------------------------------------------------------------------------------

SIZES = {
    "tiny": [1e-30],
    "small": [1e-3],
    "ordinary": [1.0],
    "huge": [1e4],
    "mixed": [1e-30, 1e-3, 0.5, 1.0, 6.0, 50.0, 1e4],
}


@across({"by_query": list(SIZES), "by_key": list(SIZES), "dtype": ["float32", "float64"]})
def test_additive_features_of_every_size(by_query: str, by_key: str, dtype: str) -> None:
    L, S, E = 21, 37, 6

    def scaled(N: int, sizes: list[float], seed: int) -> Tensor:
        return normal(1, 1, N, E, seed=seed) * torch.tensor(sizes).repeat(N)[:N].unsqueeze(1)

    # A large factor shows the relative error of small features.
    scale = 1e3 if {by_query, by_key} <= {"tiny", "small"} else 1.0
    call = CaseCall.of(Case(score="additive", dtype=dtype, queries=L, keys=S, width=E, learned=True, scale=scale))
    kind = call.query.dtype
    call = call.but(query=scaled(L, SIZES[by_query], 0).to(kind), key=scaled(S, SIZES[by_key], 1).to(kind))
    leaves = call.leaves()
    Trial(call).check_call(call.run("fused"), leaves)


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


@pytest.mark.parametrize("score", ["additive", "gaussian", "laplacian", "boxcar", "scaled_dot", "cosine"])
@pytest.mark.parametrize("size", [1e-30, 0.1, 5.0, 1e4])
def test_what_comes_later_changes_no_bit_of_what_came_before(score: str, size: float) -> None:
    L, E = 150, 5
    before = [normal(1, 2, L, E, seed=i) for i in range(3)]
    after = [t.clone() for t in before]
    for t in after:
        t[:, :, 70:] *= size
    plain, other = (regard.attention(*t, is_causal=True, score=part(score, E), engine="fused") for t in (before, after))
    assert torch.equal(plain[:, :, :70], other[:, :, :70])


@pytest.mark.campaign(keep=30)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mask", [None, "causal", "alibi"])
@pytest.mark.parametrize("score", SCORES)
def test_large_and_small_inputs(score: str, mask: str | None, law: str) -> None:
    for magnitude in (1e4, 1e-30):
        recipe = None if mask is None else MASKS[mask]
        holds(law, score=score, mask=recipe, magnitude=magnitude, key_heads=2, queries=70, keys=70)


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


@pytest.mark.parametrize("score", ["additive/projected", "gaussian", "laplacian", "epanechnikov", "scaled_dot"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, score: str) -> None:
    def run(contiguous: bool, which: int) -> list[Tensor]:
        leaves = [normal(2, 2, 67, 4, seed=i) for i in range(3)]
        leaves[which] = LAYOUTS[layout](leaves[which])
        if contiguous:
            leaves[which] = leaves[which].contiguous()
        leaves = [t.requires_grad_() for t in leaves]
        output = regard.attention(*leaves, score=part(score, 4), is_causal=True, engine="fused")
        upstream = LAYOUTS[layout](normal(*output.shape, seed=7))
        return [output, *torch.autograd.grad(output, leaves, upstream.contiguous() if contiguous else upstream)]

    for which in range(3):
        for a, b in zip(run(False, which), run(True, which)):
            assert torch.equal(a, b)


@across(
    {
        "mask": [None, "causal", "alibi"],
        "score": ["additive", "gaussian", "boxcar", "scaled_dot"],
        "size": ["B", "H", "L", "S", "V", "E"],
    }
)
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


@across(
    {
        "score": ["additive", "gaussian", "laplacian", "triangular", "scaled_dot"],
        "where": [1, 2],
        "bad": [torch.nan, torch.inf, -torch.inf],
    }
)
def test_what_is_masked_cannot_leak(score: str, where: int, bad: float) -> None:
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
                aux = regard.attention(*leaves, mask, score=part(score, 4), engine="fused", return_aux=ASKED)[1]
            output = regard.attention(*leaves, mask, score=part(score, 4), engine="fused")
            found = torch.autograd.grad(output, leaves, normal(*output.shape, seed=7))
            return [output, *found, aux.lse, aux.max, aux.entropy, aux.received, aux.topk.weights, aux.topk.indices]

        for a, b in zip(run(bad), run(0.0)):
            assert torch.equal(a, b), name


@across(
    {
        "score": ["additive", "gaussian", "laplacian", "triangular", "scaled_dot", "cosine"],
        "mask": ["none", "causal", "alibi"],
        "where": [0, 1, 2],
    }
)
def test_a_nan_that_is_seen_shows_as_it_does_in_eager(score: str, mask: str, where: int) -> None:
    causal = masks.causal("upper_left")
    attn_mask = {"none": None, "causal": causal, "alibi": masks.alibi(2, align="upper_left") & causal}[mask]

    def run(engine: str) -> list[Tensor]:
        leaves = [normal(1, 2, 70, 4, seed=i) for i in range(3)]
        leaves[where][0, 1, 65, 2] = torch.nan
        leaves = [t.requires_grad_() for t in leaves]
        output = regard.attention(*leaves, attn_mask, score=part(score, 4), engine=engine)
        with torch.no_grad():
            assert torch.equal(
                regard.attention(*leaves, attn_mask, score=part(score, 4), engine=engine).isnan(), output.isnan()
            ), "without gradients"
        return [output, *torch.autograd.grad(output.sum(), leaves)]

    for name, a, b in zip(NAMES, run("fused"), run("reference")):
        if score == "triangular":  # nor over rows that are out of a kernel's reach
            assert (b.isnan() | ~a.isnan()).all(), name
        elif where == 0 and mask != "none" and name in ("d key", "d value"):
            # Eager spreads a row's NaN over the gradients of keys that it does not see; it need not be spread so far.
            # Not so for the Laplacian, as torch's sign of NaN is 0; the kernels treat it like all others.
            assert score == "laplacian" or (b.isnan().any(-1) | ~a.isnan().any(-1)).all(), name
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
    for kind in [kernel for kernel in kernels().values() if kernel.compact]:
        plain, aux = regard.attention(query, key, value, score=kind(0.5), engine="fused", return_aux=ASKED)
        other, told = regard.attention(
            query, key[:, :, order], value[:, :, order], score=kind(0.5), engine="fused", return_aux=ASKED
        )
        torch.testing.assert_close(plain, other)
        torch.testing.assert_close(aux.received[..., order], told.received, rtol=1e-4, atol=1e-5)


def test_an_additive_call_holds_no_matrix() -> None:
    # All that torch allocates, the kernels' scratch memory included; more is never held at one time.
    N, C = 4096, 32
    leaves = [normal(1, 1, N, C, seed=i).requires_grad_() for i in range(3)]
    score = scores.Additive(normal(C, seed=3))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        regard.attention(*leaves, is_causal=True, score=score, engine="fused").sum().backward()
    total = sum(max(e.self_cpu_memory_usage, 0) for e in seen.key_averages())
    assert leaves[0].nbytes < total < N * N * 4 // 4
