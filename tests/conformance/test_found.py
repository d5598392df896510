"""Cases that campaigns found to be wrong, one for each fault that was behind them."""

import pytest

from regard.testing import Case, judge

FOUND = {
    # 1 − s near the rim of a compact kernel magnifies the last digit of the distance: 1/width must not be rounded.
    ("aux", "fused"): Case(
        score="epanechikov", lead=(3,), key_heads=2, group=2, queries=5, keys=7, width=3, value_width=4,
        mask=("packed",), scale=-1.0, layout="transposed", tile=(3, 5), seed=60233,
    ),
    ("budget", "fused"): Case(
        score="epanechikov", lead=(3,), queries=67, keys=6, width=3, value_width=8,
        mask=("bias", "BHLS", 0.8, "sliced", 0.0), scale=0.5, layout="broadcast", rows="twins", tile=(8, 2), seed=62528,
    ),
    # Weights that are even because float32 holds no score beside −1e9 meet the slope of a key near the rim.
    ("gradient budget", "fused"): Case(
        score="triangular/features", dtype="bfloat16", lead=(2, 2), keys=67, width=8, value_width=2,
        mask=("bias", "LS", 1.0, "plain", -1000000000.0), scale=0.5, layout="expanded", rows="zeros", wide=True,
        tile=(8, 2), seed=10682,
    ),
    # Eager's equal weights are powers of two in float16: its error is nothing, and a sum in float32 has two roundings.
    ("convexity", "sdpa"): Case(
        score="gaussian/learned", dtype="float16", lead=(2, 2), key_heads=2, group=2, queries=2, keys=8, width=1,
        value_width=8, magnitude=0.001, learned=True, wide=True, seed=10795,
    ),
    # Without features there was no query of the lifted form.
    ("vmap", "sdpa"): Case(
        score="gaussian/features", key_heads=2, group=3, queries=5, keys=9, width=0, value_width=1, scale=2.0,
        magnitude=0.001, wide=True, tile=(3, 5), seed=40918,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("law", "engine"), FOUND)
def test_a_case_that_was_wrong_holds(law, engine):
    verdict = judge(law, engine, FOUND[law, engine])
    assert verdict.outcome == "held", verdict.reason
