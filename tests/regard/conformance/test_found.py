"""Cases that campaigns found to be wrong, one for each fault that was behind them."""

import pytest

from regard.testing import LAWS, Case, judge

FOUND = [
    # 1 − s near the rim of a compact kernel magnifies the last digit of the distance: 1/width must not be rounded.
    ("aux", "fused", Case(
        score="epanechnikov", lead=(3,), key_heads=2, group=2, queries=5, keys=7, width=3, value_width=4,
        mask=("packed",), scale=-1.0, layout="transposed", tile=(3, 5), seed=60233,
    )),
    ("budget", "fused", Case(
        score="epanechnikov", lead=(3,), queries=67, keys=6, width=3, value_width=8,
        mask=("bias", "BHLS", 0.8, "sliced", 0.0), scale=0.5, layout="broadcast", rows="twins", tile=(8, 2), seed=62528,
    )),
    # Weights that are even because float32 holds no score beside −1e9 meet the slope of a key near the rim.
    ("gradient budget", "fused", Case(
        score="triangular/features", dtype="bfloat16", lead=(2, 2), keys=67, width=8, value_width=2,
        mask=("bias", "LS", 1.0, "plain", -1000000000.0), scale=0.5, layout="expanded", rows="zeros", wide=True,
        tile=(8, 2), seed=10682,
    )),
    # Eager's equal weights are powers of two in float16: its error is nothing, and a sum in float32 has two roundings.
    ("convexity", "sdpa", Case(
        score="gaussian/learned", dtype="float16", lead=(2, 2), key_heads=2, group=2, queries=2, keys=8, width=1,
        value_width=8, magnitude=0.001, learned=True, wide=True, seed=10795,
    )),
    # Without features there was no query of the lifted form.
    ("vmap", "sdpa", Case(
        score="gaussian/features", key_heads=2, group=3, queries=5, keys=9, width=0, value_width=1, scale=2.0,
        magnitude=0.001, wide=True, tile=(3, 5), seed=40918,
    )),
    # Sums of 1 − 2 / (1 + e^{2x}) round numbers as large as 1 where the tanh itself is small, or cancels another.
    ("gradient budget", "fused", Case(
        score="additive/heads", lead=(1, 2, 1), key_heads=2, queries=8, keys=4, width=2, value_width=4,
        mask=("not", ("dense", "bhlS", 0.2, "plain")), wide=True, tile=(8, 2), seed=17464,
    )),
    # A gradient that exceeds float16 is infinite there: entmax with α = 8 gives weights of ⅙ a slope of 6⁶.
    ("no leak", "streaming", Case(
        score="concat/heads", normalizer="entmax", dtype="float16", key_heads=2, group=3, queries=2, keys=9, width=2,
        mask=("and", ("not", ("dense", "LS", 0.2, "expanded")), ("hidden_keys",)), softcap=1.5, magnitude=0.0,
        layout="transposed", rows="twins", tile=(8, 2), seed=28785,
    )),
    # Eager's log-sum-exp of an only key is its score; a logarithm of a sum near 1 has a rounding of that sum.
    ("aux", "fused", Case(
        score="epanechnikov/features", lead=(1, 2, 1), key_heads=2, group=2, queries=6, keys=1, width=3, value_width=2,
        mask=("and", ("and", ("sinks", 4), ("padding", False)), ("not", ("padding", True))), magnitude=0.001,
        learned=True, wide=True, tile=(8, 2), seed=25544,
    )),
    # Rows of a large bias are calculated again, which was done in float16: 0 times an infinite product is NaN.
    ("no leak", "sdpa", Case(
        score="cosine/learned", dtype="float16", lead=(), group=3, queries=7, keys=9, width=2, value_width=4,
        mask=("and", ("and", ("causal", "upper_left"), ("bias", "bHLs", 1.0, "transposed", -1e9)), ("hidden_keys",)),
        scale=0.0, layout="broadcast query", tile=(8, 2), seed=1822,
    )),
    # What a function hides of a short sequence was evaluated with the bias beside it, whose gradient was lost.
    ("gradient budget", "fused", Case(
        score="general", dtype="float64", key_heads=2, queries=1, keys=4, width=2, key_width=1, value_width=1,
        mask=("and", ("relative", 1, True, "each"), ("predicate", 2)), scale=2.0, magnitude=0.5, learned=True,
        tile=(2, 3), seed=18192,
    )),
    # Autograd recorded a product with the width in the kernels' operator, which then led to no query and no key: a
    # second derivative through ``torch.func.grad`` and autograd was silently none.
    ("composed derivatives", "fused", Case(
        score="gaussian/features", dtype="float64", key_heads=2, group=2, queries=3, keys=4, width=2, value_width=2,
        mask=("not", ("and", ("causal", "lower_right"), ("causal", 2))), magnitude=0.5, learned=True, tile=(2, 3),
        seed=40273,
    )),
    # Without a sequence the eager log-sum-exp has no graph; its gradient to a shared parameter is 0 for each problem.
    ("lse gradient", "reference", Case(
        score="score_mod/third", normalizer="entmax15", dtype="bfloat16", lead=(0,), key_heads=2, group=3, queries=7,
        keys=67, value_width=1, scale=0.5, magnitude=4.0, layout="matrix", rows="zeros", learned=True, seed=213,
    )),
    # A stored threshold rounds by more than float16 can hold: the gradient may be infinite in either direction.
    ("dropout gradient", "streaming", Case(
        score="gaussian/features", normalizer="entmax", dtype="float16", lead=(2, 2), key_heads=2, group=3, queries=9,
        keys=7, width=1, layout="broadcast query", learned=True, dropout_p=0.1, tile=(8, 2), seed=37881,
    )),
    # Two equal numbers are subtracted in the derivative of a cosine of width 1: the amplitude is theirs, not 0.
    ("dropout gradient", "streaming", Case(
        score="cosine/learned", lead=(3,), group=3, queries=9, keys=1, width=1, value_width=1, scale=2.0, values=1e-36,
        layout="expanded", dropout_p=0.1, tile=(2, 8), seed=40713,
    )),
    # Inside a transform torch does not see that a sink needs a gradient, and chose a kernel that has none.
    ("composed derivatives", "sdpa", Case(
        score="location", normalizer="softmax_sink", dtype="float64", group=2, queries=3, keys=3, width=2,
        value_width=2, magnitude=0.5, learned=True, tile=(2, 3), seed=9330,
    )),
    # Gradients near the least normal number lost digits to a factor below it, which a large one then multiplied.
    ("vmap", "fused", Case(
        score="concat/heads", normalizer="softmax_sink", queries=5, keys=2, width=3, key_width=1, value_width=2,
        values=1e-36, tile=(2, 8), seed=3171,
    )),
    # Without features all neighbours had the same scores, of which eager happens to make exact weights.
    ("vmap", "fused", Case(
        score="boxcar/features", normalizer="entmax", dtype="float64", key_heads=2, queries=6, keys=13, width=0,
        value_width=4, softcap=20.0, magnitude=4.0, wide=True, tile=(3, 5), seed=16994,
    )),
    # The feature of ones was cut from the keys' first, which keys without features do not have.
    ("asking", "fused", Case(
        normalizer="entmax15", lead=(), group=2, queries=3, keys=8, width=0, value_width=2, layout="sliced", wide=True,
        tile=(3, 5), seed=62091,
    )),
    # The constant score reads no features, so that eager was exact by luck for all neighbours.
    ("budget", "flex", Case(
        score="constant", normalizer="softmax_sink/plus one", lead=(), group=3, queries=2, keys=8, width=8,
        value_width=8, mask=("part", ("and", ("bias", "BhlS", 1.0, "plain", -40.0), ("document", True)), 0, 0),
        magnitude=0.1, tile=(8, 2), seed=33465,
    )),
    # Lines are the same in every unit of length, but their part of the gradient of a width was summed up to a rounding.
    ("gradient budget", "fused", Case(
        score="gaussian/learned", lead=(3,), keys=6, value_width=4,
        mask=("and", ("causal", "upper_left"), ("padding", False)), scale=0.0, layout="expanded", learned=True,
        ridge=0.1, seed=42281,
    )),
]  # fmt: skip

# Cases of which a law says nothing.
OUT_OF_SCOPE = [
    # A feature of a query and a key is 1e-6 apart: differences straddle the kink of the Manhattan distance.
    ("second derivatives", Case(
        score="laplacian/features", normalizer="sigmoid", dtype="float64", group=2, queries=3, keys=4, width=2,
        value_width=2, magnitude=0.5, wide=True, tile=(2, 3), seed=62499,
    )),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("law", "engine", "case"), FOUND)
def test_a_case_that_was_wrong_holds(law, engine, case):
    verdict = judge(law, engine, case)
    assert verdict.outcome == "held", verdict.reason


@pytest.mark.parametrize(("law", "case"), OUT_OF_SCOPE)
def test_a_case_of_which_the_law_says_nothing_is_not_drawn(law, case):
    assert LAWS[law].adapt(case) is None
