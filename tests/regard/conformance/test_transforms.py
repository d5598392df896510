"""Law 9 where it takes seconds: torch.compile, and gradgradcheck as torch writes it."""

import pytest
import torch
from engines_here import HERE

import regard
from regard import engines, masks
from regard.testing import Case, CaseCall, Trial, tiny_tiles
from regard.testing.laws.transforms import compiled, function
from regard.testing.trial import keeps_lse

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"lead": (2,), "key_heads": 2, "queries": 6, "keys": 6, "width": 4, "value_width": 3}
CAUSAL = ("causal", "upper_left")
COMPILED = [
    ("sdpa", Case(**SIZES)),
    ("sdpa", Case(**SIZES, mask=CAUSAL, group=2)),
    ("sdpa", Case(**SIZES, mask=("and", CAUSAL, ("padding", False)))),
    ("sdpa", Case(**SIZES, score="gaussian/learned", learned=True)),
    ("streaming", Case(**SIZES, mask=("window", 2, 0, "upper_left"), softcap=2.0)),
    ("streaming", Case(**SIZES, normalizer="sparsemax", mask=CAUSAL)),
    ("streaming", Case(**SIZES, score="additive", learned=True, mask=("alibi", False, "upper_left"))),
    ("streaming", Case(**SIZES, score="score_mod/near")),
    ("reference", Case(**SIZES, normalizer="entmax15", mask=("document", True))),
    ("streaming", Case(**SIZES, normalizer="entmax")),
    ("reference", Case(**SIZES, score="cosine/learned", learned=True, mask=("bias", "BHLS", 0.8))),
]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(("engine", "case"), COMPILED, ids=[f"{engine}-{case}" for engine, case in COMPILED])
def test_compiled_in_one_graph(engine, case):
    compiled(case, engines.TABLE[engine])


@pytest.mark.campaign
@pytest.mark.parametrize("engine", ["sdpa", "streaming"])
def test_compiled_by_inductor(engine):
    compiled(Case(**SIZES, mask=CAUSAL), engines.TABLE[engine], backend="inductor")


TWICE = [
    Case(dtype="float64", queries=3, keys=4, width=2, value_width=2, learned=True, score="general"),
    Case(dtype="float64", queries=3, keys=4, width=2, value_width=2, mask=("causal", "lower_right"), softcap=1.5),
    Case(dtype="float64", queries=3, keys=4, width=2, value_width=2, normalizer="sparsemax"),
    Case(dtype="float64", queries=3, keys=4, width=2, value_width=2, normalizer="sigmoid", group=2),
    Case(dtype="float64", queries=3, keys=4, width=2, value_width=2, score="gaussian/learned", learned=True),
]


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("engine", [name for name, engine in engines.TABLE.items() if engine.twice_differentiable])
@pytest.mark.parametrize("case", TWICE, ids=str)
def test_gradgradcheck_and_forward_mode(engine, case):
    with tiny_tiles(2, 3):
        run, inputs = function(CaseCall.of(case), engines.TABLE[engine])
        assert torch.autograd.gradcheck(run, inputs, check_undefined_grad=False)
        assert torch.autograd.gradgradcheck(run, inputs, check_undefined_grad=False)
        forward = torch.autograd.gradcheck(
            run, inputs, check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False, fast_mode=True
        )
        assert forward


def test_a_gradient_does_not_depend_on_whether_its_graph_is_kept():
    for score in ("general", "additive", "concat", "location", "cosine/learned", "gaussian/learned"):
        call = CaseCall.of(Case(dtype="float64", score=score, queries=5, keys=7, learned=True))
        leaves = list(call.leaves().values())
        with tiny_tiles(2, 3):
            found = [
                torch.autograd.grad(call.run("streaming").square().sum(), leaves, create_graph=keep, allow_unused=True)
                for keep in (False, True)
            ]
        for plain, kept in zip(*found):
            assert (plain is None) == (kept is None), score
            if plain is not None:
                torch.testing.assert_close(plain, kept)


#: Problems of several tiles of the engines' own sizes, and of lengths that no tile divides.
LARGE = [
    Case(lead=(1,), key_heads=1, group=2, queries=300, keys=517, width=8, mask=("causal", "lower_right")),
    Case(lead=(2,), queries=513, keys=258, mask=("and", ("window", 200, 3, "upper_left"), ("padding", False))),
    Case(queries=300, keys=700, score="gaussian", mask=("document", True)),
]


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_tiles_of_their_own_size(engine, case):
    call = CaseCall.of(case)
    if call.refusal(engines.TABLE[engine]) is not None:
        pytest.skip("refused")
    leaves = call.leaves()
    trial = Trial(call, keeps_lse=keeps_lse(engines.TABLE[engine]))
    trial.__dict__["statement"] = type(trial.statement).of(call, 0)  # large enough to be a fair sample by itself
    trial.check_call(call.run(engine), leaves)


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_are_accumulated_in_float32(engine, dtype):
    # 4,096 equal keys: a running sum in bfloat16 stands still at 256, one in float16 at 2,048.
    value = torch.ones(1, 1, 4096, 2, dtype=dtype)
    query, key = torch.zeros(1, 1, 3, 2, dtype=dtype), torch.zeros(1, 1, 4096, 2, dtype=dtype, requires_grad=True)
    value.requires_grad_()
    output = regard.attention(query, key, value, masks.window(-1, 4095, align="upper_left"), engine=engine)
    assert (output == 1).all()
    output.sum().backward()
    torch.testing.assert_close(value.grad, torch.full_like(value, 3 / 4096))
