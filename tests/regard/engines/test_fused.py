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
from tiers import sized
from torch import Tensor

import regard
from regard import AuxRequest, engines, masks, scores
from regard.engines import cost_model
from regard.engines.fused import run
from regard.engines.fused.arguments import RADIAL
from regard.engines.fused.kernel_call import KernelCall
from regard.engines.fused.run import Dropout
from regard.engines.fused.visible_keys import VisibleKeys
from regard.engines.problem import Call, Problem
from regard.scores import Score
from regard.scores.kernels import kernels
from regard.scores.own_width import OwnWidth
from regard.testing import case as samples
from regard.testing.case import Case, CaseCall, Recipe
from regard.testing.conformance import judge
from regard.testing.guarded_memory import guarded_kernels
from regard.testing.laws.base import LAWS as LAWS_BY_NAME
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
    "bias by query": ("bias", "BhLs", 1.0),
    "bias and window": ("and", ("bias", "bHLS", 1.0), ("window", 37, 5, "upper_left")),
    "bias and alibi": ("and", ("bias", "BhlS", 1.0), ("alibi", False, "upper_left")),
    "bias and dilated": ("and", ("bias", "bhLS", 0.9), ("dilated", 3, "upper_left")),
}


def holds(law: str, **case: Any) -> None:
    adapted = LAWS_BY_NAME[law].adapt(Case(**case))  # those of dropout drop
    assert adapted is not None
    verdict = judge(law, "fused", adapted)
    assert verdict.outcome == "held", str(verdict)


def part(name: str, E: int, H: int = 2) -> Score:
    """Return a score; its tensors are the same for the same sizes."""
    widths = samples.Widths(query=E, key=E, keys=1, heads=H, key_heads=H)
    return samples.make_score(name, widths, torch.Generator().manual_seed(3))


@pytest.mark.campaign(keep=14)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("score", SCORES)
def test_every_score(score: str, shape: str, law: str) -> None:
    # What additive scores learn takes the oracle seconds where pairs are many.
    learned = shape in ("one row", "few") or not score.startswith(("additive", "concat"))
    holds(law, score=score, width=4, value_width=5, learned=learned, **SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize("score", ["additive", "concat"])
def test_what_an_additive_score_learns_over_tiles_and_blocks(score: str) -> None:
    holds("gradient budget", score=score, width=3, value_width=12, learned=True, queries=67, keys=515)


def has_pair_bias(mask: str) -> bool:
    """Return whether a mask of this name has a bias for each query and key."""
    return mask in ("bias", "bias and window", "bias and dilated")


@pytest.mark.campaign(keep=20)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", ["additive", "gaussian", "laplacian", "triangular", "scaled_dot"])
def test_every_mask(score: str, mask: str, law: str) -> None:
    # The oracle's derivative of a bias is (L·S)² numbers, and slow for an additive score.
    learned = score != "additive" and not has_pair_bias(mask)
    holds(law, score=score, mask=MASKS[mask], width=3, value_width=5, learned=learned, queries=67, keys=515)
    holds(law, score=score, mask=MASKS[mask], width=3, learned=True, **SHAPES["few"])


@pytest.mark.campaign(keep=3)
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


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize(("E", "V"), [(1, 1), (3, 130), (4, 12), (20, 70), (65, 5)])
@pytest.mark.parametrize("score", ["additive/heads", "gaussian", "laplacian", "epanechnikov", "general"])
def test_widths(score: str, E: int, V: int) -> None:
    for law in LAWS:
        holds(law, score=score, width=E, value_width=V, queries=9, keys=515)
        holds(law, score=score, width=E, value_width=V, queries=9, keys=130, group=2, mask=MASKS["causal"])


@pytest.mark.campaign(keep=14)
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


@pytest.mark.campaign(keep=30)
@pytest.mark.parametrize("mask", [None, "others named", "causal"])
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("kernel", RADIAL)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax15", "sigmoid"])
def test_widths_of_queries(normalizer: str, kernel: str, width: int, mask: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(2, 2, n, width, generator=generator) for n in (90, 700))
    value = torch.randn(2, 2, 700, 3, generator=generator)
    own = 0.3 + torch.rand(2, 2, 90, 1, generator=generator)
    score = OwnWidth(kernels()[kernel](0.5 * width**0.5))
    hidden = {
        None: None,
        "others named": masks.leave_one_out(torch.arange(90) * 7),
        "causal": masks.causal("lower_right"),
    }
    rows = [torch.cat([query, own], -1), key, value]

    def outputs(engine: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ends = [t.to(dtype) for t in rows]
        named: dict[str, Any] = {"score": score, "normalizer": normalizer, "engine": engine}
        found, aux = regard.attention(*ends, hidden[mask], **named, return_aux=AuxRequest(lse=True))
        return found, aux.lse

    for found, eager, oracle in zip(outputs("fused", F32), outputs("reference", F32), outputs("reference", F64)):
        known = oracle.isfinite()
        assert bool((found.isfinite() == known).all())
        scale = float(oracle[known].abs().max())
        allowed = 2 * float((eager - oracle)[known].abs().max()) + torch.finfo(F32).eps * scale
        assert float((found - oracle)[known].abs().max()) <= allowed


def test_no_derivative_with_widths_of_queries() -> None:
    query, key = torch.ones(3, 3, requires_grad=True), torch.ones(4, 2)
    plan = regard.explain(query, key, key, score=OwnWidth(scores.Gaussian(1.0)))
    assert "no derivative with a width per query" in str(plan)
    regard.attention(query, key, key, score=OwnWidth(scores.Gaussian(1.0))).sum().backward()
    assert query.grad is not None


#: Steps of decoding, whose keys and values are read in place: several tiles, widths that fill no vector, all groups.
STEPS: dict[str, dict[str, Any]] = {
    "one query": {"key_heads": 2, "group": 4, "queries": 1, "keys": 1030, "width": 64, "value_width": 64},
    "odd widths": {"lead": (2,), "group": 3, "queries": 1, "keys": 515, "width": 35, "value_width": 71},
    "a few queries": {"key_heads": 2, "group": 2, "queries": 5, "keys": 130, "width": 20, "value_width": 130},
    "short": {"lead": (3,), "key_heads": 2, "queries": 2, "keys": 3, "width": 7, "value_width": 1},
}


@pytest.mark.campaign(keep=16)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", [None, "causal", "window", "padding", "documents", "alibi", "dense", "bias"])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_decoding(step: str, mask: str | None, dtype: str) -> None:
    recipe = None if mask is None else MASKS[mask]
    for layout in ("plain", "transposed"):
        case = Case(score="scaled_dot", mask=recipe, dtype=dtype, layout=layout, **STEPS[step])
        with torch.no_grad():
            assert CaseCall.of(case).problem().is_step
        with guarded_kernels():
            for law in ("budget", "aux"):
                verdict = judge(law, "fused", case)
                assert verdict.outcome == "held", str(verdict)


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("law", ["no leak", "contained", "bad queries", "determinism"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_laws_of_steps_in_16_bits(law: str, dtype: str) -> None:
    for step in STEPS.values():
        case = Case(score="scaled_dot", mask=MASKS["causal"], dtype=dtype, **step)
        adapted = LAWS_BY_NAME[law].adapt(case)
        assert adapted is not None
        verdict = judge(law, "fused", adapted)
        assert verdict.outcome == "held", str(verdict)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_exactly(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 96)]).view(1, 1, -1, 96)
    for row in numbers.split(1, 2):  # a weight of 1
        assert torch.equal(regard.attention(torch.zeros_like(row), row, row, engine="fused"), row)
    one = torch.zeros_like(numbers[:, :, :1])
    for column in (0, 1, 37, 95):
        one[..., column] = 1.0
        chosen = numbers[..., column].float()
        _, aux = regard.attention(one, numbers, numbers, scale=1.0, engine="fused", return_aux=AuxRequest(max=True))
        assert aux.max is not None and float(aux.max) == float(chosen.max())
        one.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_is_read_where_it_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = normal(2, 600, 2, 3, 2, 32).to(dtype)  # (sequence, token, key or value, head, unused, width)
    key, value = (cache[:, :, i, :, 1].transpose(1, 2)[:, :, :500] for i in range(2))
    query = normal(2, 6, 1, 32, seed=1).to(dtype)
    called: list[Tensor] = []
    filled = KernelCall.filled

    def watched(call: KernelCall, arrays: Any, *rest: Any) -> Any:
        called.extend(arrays[name] for name in ("key", "value") if name in arrays)
        return filled(call, arrays, *rest)

    monkeypatch.setattr(KernelCall, "filled", watched)
    found = regard.attention(query, key, value, enable_gqa=True, engine="fused")
    assert {t.data_ptr() for t in called} == {key.data_ptr(), value.data_ptr()}
    apart = regard.attention(query, key.contiguous(), value.contiguous(), enable_gqa=True, engine="fused")
    assert torch.equal(found, apart)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("G", [2, 8])
def test_auto_reads_a_long_cache_of_16_bits_in_place(G: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(cost_model, "_has_amx", lambda: False)  # where torch's kernels are about as fast
    query, key = normal(1, 8, 1, 64).to(dtype), normal(1, G, 2048, 64, seed=1).to(dtype)
    assert regard.explain(query, key, key, enable_gqa=True).engine.name == "fused"
    found = regard.attention(query, key, key, enable_gqa=True)
    assert torch.equal(found, regard.attention(query, key, key, enable_gqa=True, engine="fused"))
    observed, _ = regard.attention(query, key, key, enable_gqa=True, return_aux=ASKED)
    assert torch.equal(found, observed)


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0, 2.5])
@pytest.mark.parametrize("score", ["additive", *RADIAL, "scaled_dot"])
def test_scale(score: str, scale: float) -> None:
    if scores.base.TABLE[score].can_return_neg_inf:
        scale = abs(scale) or 1.5  # a scale that turns −inf into NaN or +inf is no kernel's
    for law in LAWS:
        holds(law, score=score, width=3, value_width=4, scale=scale, queries=67, keys=515)


# Softcap, sinks and dropout ------------------------------------------------------------------------------------------

EXTRAS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "a wide softcap": {"softcap": 20.0, "magnitude": 4.0},
    "sinks": {"normalizer": "softmax_sink/heads"},
    "plus one": {"normalizer": "softmax_sink/plus one", "scale": 3.0},
    "both": {"softcap": 0.5, "normalizer": "softmax_sink/heads", "dtype": "float64"},
}


@pytest.mark.campaign(keep=14)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mask", [None, "window", "padding", "others", "alibi", "bias"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(
    "score", ["additive", "concat", "gaussian", "laplacian", "boxcar", "triangular/features", "scaled_dot", "cosine"]
)
def test_softcap_and_sinks(score: str, extra: str, mask: str | None, law: str) -> None:
    recipe, named = None if mask is None else MASKS[mask], dict(EXTRAS[extra])
    if score.startswith("triangular"):  # the few points within reach are on the rim, where one rounding is everything
        named.pop("magnitude", None)
    for shape in ({"queries": 67, "keys": 515}, SHAPES["few"]):
        # The oracle's derivative of a bias is (L·S)² numbers, and slow for an additive score.
        learned = shape is SHAPES["few"] or (score not in ("additive", "concat") and mask not in ("alibi", "bias"))
        holds(law, **{"score": score, "mask": recipe, "width": 3, "learned": learned, **named, **shape})


DROPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "both": EXTRAS["both"],
    "alibi": {"mask": MASKS["alibi"]},
    "padding": {"mask": MASKS["padding"], "dtype": "bfloat16"},
}


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize("law", ["dropout", "dropout gradient"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", DROPPED)
@pytest.mark.parametrize("score", ["additive", "gaussian", "epanechnikov", "scaled_dot"])
def test_dropout(score: str, extra: str, shape: str, law: str) -> None:
    # The law's values are as wide as keys are many, and the oracle of float64 multiplies 80-bit numbers.
    sizes = SHAPES[shape] | {"queries": min(SHAPES[shape]["queries"], 67), "keys": min(SHAPES[shape]["keys"], 515)}
    named = dict(DROPPED[extra])
    if named.get("dtype") == "float64" and shape != "few":
        named["dtype"] = "float32"
    holds(law, **{"score": score, "width": 3, **sizes, **named})


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("score", ["scaled_dot", "epanechnikov"])
@pytest.mark.parametrize("normalizer", ["softmax", *NORMALIZERS])
def test_which_weights_are_dropped_follows_from_seed_head_query_and_key(
    normalizer: str, score: str, dtype: torch.dtype
) -> None:
    named: dict[str, Any] = {"score": part(score, 3), "normalizer": normalizer}
    leaves = [normal(2, 2, n, 3, seed=i, dtype=dtype) for i, n in enumerate((70, 1100, 1100))]
    if normalizer == "sigmoid":
        leaves[2] /= 1100  # weights do not sum to 1
    leaves = [t.requires_grad_() for t in leaves]
    plain = [t.detach().clone().requires_grad_() for t in leaves]
    torch.manual_seed(5)
    output = regard.attention(*leaves, None, 0.3, **named, engine="fused")
    torch.manual_seed(5)
    dropout = Dropout(int(torch.randint(2**62, ())), 0.3)
    _, aux = regard.attention(*plain, **named, engine="reference", return_aux=AuxRequest(weights=True))
    right = dropout.drop(aux.weights, 0, 70) @ plain[2]
    upstream = normal(*output.shape, seed=7, dtype=dtype)
    torch.testing.assert_close(output, right)
    for a, b in zip(torch.autograd.grad(output, leaves, upstream), torch.autograd.grad(right, plain, upstream)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_random_bits_are_fair_and_independent() -> None:
    # 4 · 512 rows of 512 keys: means of rows, columns and products of neighbours within 6 standard deviations.
    kept = Dropout(1234567, 0.25).drop(torch.full((2, 2, 512, 512), 0.75), 0, 512)
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    apart = kept.double() - 0.75
    for dims in ((0, 1, 2, 3), (3,), (2,), (0, 1)):
        mean, count = apart.mean(dims), apart.numel() / apart.mean(dims).numel()
        assert mean.abs().max() < 6 * (0.1875 / count) ** 0.5, dims
    for dim in range(4):
        product = apart.narrow(dim, 1, apart.shape[dim] - 1) * apart.narrow(dim, 0, apart.shape[dim] - 1)
        assert abs(product.mean()) < 6 * 0.1875 / product.numel() ** 0.5, dim
    assert abs((apart * (Dropout(1234568, 0.25).drop(torch.full_like(kept, 0.75), 0, 512) - 0.75)).mean()) < 1e-3


def test_dropout_is_repeated_where_values_are_computed_by_definition() -> None:
    query, key, value = (normal(1, 2, n, 3, seed=i) for i, n in enumerate((9, 13, 13)))
    outputs = []
    for bad in (False, True):
        value[0, 0, 12] = torch.inf if bad else 0.0  # no query of the first rows sees it
        torch.manual_seed(3)
        outputs.append(regard.attention(query, key, value, masks.causal(offset=0), 0.4, engine="fused"))
    torch.testing.assert_close(*outputs)


@pytest.mark.slow
@settings(max_examples=sized(40, 12), deadline=None, derandomize=True)
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
    softcap=st.sampled_from([None, None, 1.5, 20.0]),
    normalizer=st.sampled_from(["softmax", "softmax", "softmax_sink/heads", *NORMALIZERS]),
    law=st.sampled_from(LAWS),
)
def test_any_problem(sizes: dict[str, Any], **case: Any) -> None:
    holds(**case, **sizes)


# The gradient of a bias -----------------------------------------------------------------------------------------------

B, H, L, S, E = 3, 4, 131, 530, 8
HIDING: dict[str, Callable[[], masks.Mask]] = {
    "nothing": masks.everything,
    "causal": lambda: masks.causal("lower_right"),
    "dilated": lambda: masks.dilated(3, align="upper_left"),
}


def call_with_bias(size: tuple[int, ...], dtype: torch.dtype, hidden: float = 0.0) -> tuple[list[Tensor], Tensor]:
    """Return leaves (query, key, value and a bias of this size), and the gradient of the output."""
    bias = normal(*size, seed=4)
    bias = bias.masked_fill(torch.rand(size, generator=torch.Generator().manual_seed(5)) < hidden, -torch.inf)
    given = [normal(B, H, L, E, seed=1), normal(B, 2, S, E, seed=2), normal(B, 2, S, 13, seed=3), bias]
    return [t.to(dtype).requires_grad_() for t in given], normal(B, H, L, 13, seed=6).to(dtype)


def gradients(
    leaves: list[Tensor],
    grad: Tensor,
    hiding: str = "nothing",
    engine: str = "fused",
    normalizer: str = "softmax",
) -> list[Tensor]:
    query, key, value, bias = leaves
    mask = HIDING[hiding]() & masks.dense(bias)
    output = regard.attention(query, key, value, mask, normalizer=normalizer, enable_gqa=True, engine=engine)
    return list(torch.autograd.grad(output, leaves, grad))


@across(
    {
        "b": [1, B],
        "h": [1, H],
        "q": [1, L],
        "k": [1, S],
        "hidden": [0.0, 0.3],
        "hiding": list(HIDING),
        "normalizer": ["softmax", *NORMALIZERS],
    }
)
def test_the_gradient_of_a_bias(b: int, h: int, q: int, k: int, hidden: float, hiding: str, normalizer: str) -> None:
    leaves, grad = call_with_bias((b, h, q, k), F64, hidden)
    right = gradients(leaves, grad, hiding, "reference", normalizer)
    for found, expected in zip(gradients(leaves, grad, hiding, normalizer=normalizer), right):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.campaign(keep=8)
@across({"b": [1, B], "h": [1, H], "q": [1, L], "hiding": list(HIDING), "normalizer": ["softmax", *NORMALIZERS]})
def test_the_number_of_threads_changes_no_bit_of_it(b: int, h: int, q: int, hiding: str, normalizer: str) -> None:
    leaves, grad = call_with_bias((b, h, q, S), F32, 0.1)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(gradients(leaves, grad, hiding, normalizer=normalizer)[3])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_gradient_of_a_narrow_bias_is_summed_in_float32() -> None:
    leaves, grad = call_with_bias((1, 1, 1, S), torch.bfloat16)
    exact = gradients([t.detach().double().requires_grad_() for t in leaves], grad.double(), engine="reference")[3]
    found = gradients(leaves, grad)[3]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2**-8 * exact.abs().max().item())


@pytest.mark.parametrize("score", ["scaled_dot", "gaussian", "laplacian"])
def test_rows_that_a_bias_hides_get_zeros(score: str) -> None:
    query, key, value = (normal(2, 2, 70, 4, seed=i).requires_grad_() for i in range(3))
    bias = normal(2, 70, 70).index_fill(1, torch.tensor([0, 5, 69]), -torch.inf).requires_grad_()
    output = regard.attention(query, key, value, masks.dense(bias.unsqueeze(0)), score=score, engine="fused")
    found = torch.autograd.grad(output, (query, key, value, bias), normal(*output.shape))
    assert not output[:, :, [0, 5, 69]].any()
    assert not found[0][:, :, [0, 5, 69]].any()
    assert not found[3][:, [0, 5, 69]].any()
    assert all(gradient.isfinite().all() for gradient in found)


def test_a_learned_bias_that_hides_everything_gives_zeros() -> None:
    query, slopes = normal(1, 2, 5, 4).requires_grad_(), torch.rand(2, requires_grad=True)
    bias = torch.full((5, 5), -torch.inf, requires_grad=True)
    mask = masks.alibi(slopes, align="upper_left") & masks.dense(bias)
    output = regard.attention(query, query, query, mask, engine="fused")
    for gradient in torch.autograd.grad(output.sum(), (query, slopes, bias)):
        assert not gradient.any()


def test_auto_takes_this_engine_for_a_bias_that_needs_a_gradient() -> None:
    query = normal(8, 4, 256, 32).requires_grad_()
    plan = regard.explain(query, query, query, normal(1, 4, 256, 256).requires_grad_())
    assert plan.engine.name == "fused"
    assert "sdpa: unsupported, no gradient to a bias" in str(plan)


# Normalizers other than softmax ---------------------------------------------------------------------------------------


@pytest.mark.campaign(keep=10)
@pytest.mark.parametrize("law", LAWS[:2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", SCORES)
def test_every_normalizer(score: str, normalizer: str, shape: str, law: str) -> None:
    learned = shape in ("one row", "few") or not score.startswith(("additive", "concat"))
    holds(law, score=score, normalizer=normalizer, width=4, value_width=5, learned=learned, **SHAPES[shape])


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize("law", LAWS[:2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", ["additive", "laplacian", "triangular", "scaled_dot"])
def test_every_normalizer_and_mask(score: str, normalizer: str, mask: str, law: str) -> None:
    learned = score != "additive" and not has_pair_bias(mask)
    sizes = {"width": 3, "value_width": 13, "queries": 67, "keys": 515}
    holds(law, score=score, normalizer=normalizer, mask=MASKS[mask], learned=learned, **sizes)


@pytest.mark.campaign(keep=10)
@pytest.mark.parametrize("law", ["budget", "gradient budget", "dropout", "dropout gradient"])
@pytest.mark.parametrize("mask", [None, "window", "others", "bias"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", ["additive", "epanechnikov", "scaled_dot"])
def test_every_normalizer_with_softcap_and_dropout(
    score: str, normalizer: str, softcap: float | None, mask: str | None, law: str
) -> None:
    recipe = None if mask is None else MASKS[mask]
    case = {"score": score, "normalizer": normalizer, "mask": recipe, "softcap": softcap}
    holds(law, **case, width=3, value_width=5, group=2, queries=67, keys=515)


@pytest.mark.campaign(keep=9)
@pytest.mark.parametrize("law", LAWS[:2])
@pytest.mark.parametrize("magnitude", [0.03, 1.0, 30.0])
@pytest.mark.parametrize("V", [1, 16, 70])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_many_and_few_keys_with_weight(normalizer: str, dtype: str, V: int, magnitude: float, law: str) -> None:
    sizes = {"group": 2, "queries": 70, "keys": 530, "width": 9, "value_width": V}
    holds(law, score="scaled_dot", normalizer=normalizer, dtype=dtype, magnitude=magnitude, **sizes)


@pytest.mark.campaign(keep=4)
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


@pytest.mark.campaign(keep=10)
@pytest.mark.parametrize("magnitude", [0.03, 1.0])
@pytest.mark.parametrize("mask", [None, "window", "others", "bias"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("score", ["additive", "boxcar", "scaled_dot"])
def test_no_kernel_leaves_its_memory(score: str, normalizer: str, mask: str | None, magnitude: float) -> None:
    recipe = None if mask is None else MASKS[mask]
    case = {"width": 3, "value_width": 17, "queries": 67, "keys": 600, "magnitude": magnitude}
    with guarded_kernels():
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
    "large": [4.0, 35.0],
    "huge": [1e4],
    "mixed": [1e-30, 1e-3, 0.5, 1.0, 6.0, 50.0, 1e4],
}


@pytest.mark.campaign(keep=12)
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


@pytest.mark.parametrize("size", [0.1, 2.0, 5.0])
def test_additive_gradients_scale_with_the_upstream_gradient(size: float) -> None:
    leaves = [(normal(1, 1, 33, 8, seed=i) * size).requires_grad_() for i in range(2)]
    leaves += [normal(1, 1, 33, 3, seed=2).requires_grad_(), normal(8, seed=3).requires_grad_()]

    def run(unit: float) -> tuple[Tensor, ...]:
        output = regard.attention(*leaves[:3], score=scores.Additive(leaves[3]), engine="fused")
        return torch.autograd.grad(output, leaves, normal(*output.shape, seed=7) * unit)

    for unit in (2.0**-80, 2.0**80):
        for a, b in zip(run(unit), run(1.0)):
            torch.testing.assert_close(a / unit, b)


@pytest.mark.parametrize("score", [scores.Gaussian, scores.Laplacian])
def test_distances_whose_squares_overflow_without_the_width(score: Callable[[float], Score]) -> None:
    query, key, value = torch.zeros(1, 1, 5, 6), normal(1, 1, 40, 6, seed=1) * 3e19, normal(1, 1, 40, 2, seed=2)
    found, right = (
        regard.attention(query, key, value, score=score(1e8), engine=engine, return_aux=AuxRequest(max=True))
        for engine in ("fused", "reference")
    )
    torch.testing.assert_close(found[0], right[0])
    assert right[1].max.isfinite().all()
    torch.testing.assert_close(found[1].max, right[1].max)


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


@pytest.mark.parametrize("width", [0, 1])
def test_the_stride_of_a_single_number_may_be_any(width: int) -> None:
    # One key of width 1, as a transposed view has it: contiguous for torch, with a last stride of 5.
    query, key = normal(2, 5, 1, 1), torch.empty_strided((2, 5, 1, 1), (5, 1, 5, 5)).normal_()
    value = key[..., :width]
    output, aux = regard.attention(query, key, value, scale=1.0, engine="fused", return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(output, value)
    torch.testing.assert_close(aux.lse, (query * key).flatten(2))


def test_parameters_can_still_be_resized() -> None:
    """FSDP frees the storage of gathered parameters; a view by ``Tensor.numpy`` would forbid it."""
    q, k, v = (torch.randn(1, 1, 5, 8) for _ in range(3))
    w_v, w_q, w_k, width = torch.randn(8), torch.randn(8, 8), torch.randn(8, 8), torch.rand(8) + 0.5
    for score in (scores.Additive(w_v, w_q, w_k), scores.Gaussian(width), "dot"):
        regard.attention(q, k, v, score=score, engine="fused")
    assert all(each.untyped_storage().resizable() for each in (q, k, v, w_v, w_q, w_k, width))


def test_marked_keys_are_a_bias_beside_intervals() -> None:
    """Key padding with holes is not evaluated block by block, unless most keys within it are hidden."""
    keep = torch.arange(9) % 4 != 2
    q, k, v = (torch.randn(2, 2, 9, 4) for _ in range(3))
    for padding, is_bias in ((keep, True), (~keep, False)):
        mask = masks.key_padding(padding) & masks.causal()
        found = VisibleKeys.of(Problem.of(Call(q, k, v, mask)))
        assert (found.mask is None and found.bias is not None and found.start is not None) == is_bias
        right = regard.attention(q, k, v, mask, engine="reference")
        torch.testing.assert_close(regard.attention(q, k, v, mask, engine="fused"), right)


def test_a_bias_beside_intervals_that_end_before_a_tile_begins() -> None:
    """Some rows of a block see keys of the next tile, and others do not."""
    query, key = normal(1, 1, 540, 4), normal(1, 1, 560, 4, seed=1)
    mask = masks.key_padding(normal(1, 560) > -0.5) & masks.causal(offset=8)
    found = regard.attention(query, key, key, mask, engine="fused")
    exact = regard.attention(query.double(), key.double(), key.double(), mask, engine="reference")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_marked_keys_in_a_row_are_an_interval(causal: bool) -> None:
    keep = torch.tensor([[False, True, True, False, False], [False] * 5, [True] * 5])
    q, k, v = (torch.randn(3, 2, 5, 4) for _ in range(3))
    mask = masks.key_padding(keep) & masks.key_padding(torch.tensor([True] * 4 + [False]))
    mask = mask & masks.causal() if causal else mask
    found = VisibleKeys.of(Problem.of(Call(q, k, v, mask)))
    assert found.bias is None and found.mask is None
    start, stop = found.start, found.stop
    assert start is not None and stop is not None
    assert bool(((start >= 0) & (start <= stop) & (stop <= 5)).all())
    right = regard.attention(q, k, v, mask, engine="reference")
    torch.testing.assert_close(regard.attention(q, k, v, mask, engine="fused"), right)
    assert keep.untyped_storage().resizable()


@across({"value": [torch.inf, -torch.inf, torch.nan], "at": [(0, 0, 0, 0), (1, 1, 70, 16)],
         "normalizer": ["softmax", "sparsemax", "sigmoid"]})  # fmt: skip
def test_kernels_see_an_output_that_is_not_finite(value: float, at: tuple[int, ...], normalizer: str) -> None:
    q, k, v = (torch.randn(2, 2, 71, 17) for _ in range(3))
    problem = Problem.of(Call(q, k, v, normalizer=normalizer))
    attend = engines.TABLE["fused"].prepare(problem, None)
    assert attend(problem).is_finite is True
    v[at] = value
    assert attend(problem).is_finite is False
