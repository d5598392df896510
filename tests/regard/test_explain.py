"""The plan: what it prints, its reasons, and that what it says is what runs."""

# ruff: noqa: E501 (reasons are read best whole)

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from engines_here import HERE
from tiers import sized
from torch import Tensor

import regard
from regard import AuxRequest, engines, masks, scores
from regard._call.plan import clear_plans, is_torch_call
from regard.engines import Engine, EngineOutput, cost_model
from regard.engines.problem import Call, Problem
from regard.engines.sdpa import SMALL
from regard.normalizers.base import TABLE as NORMALIZERS


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q = normal(1, 8, 128, 64)

PRINTED = """\
attention of B 1, H 8 over 2 key heads, L 128, S 96, E 64, V 16, torch.float32: \
score Gaussian({width}=2.0), normalizer Entmax15(), mask causal(align='upper_left') & window(16, 0, align='upper_left'), \
softcap 30, dropout 0.1
  engine      fused
  compiled    streaming, traced into torch operations because it draws random numbers
  visible     13.3 % of the pairs
  operations  {operations} MFLOP forward
  reads       316 KiB
  workspace   {workspace} does not grow with L×S
  sdpa: unsupported, softmax only, not Entmax15
  triton: unsupported, GPUs only, not cpu
  streaming: not chosen, fused is preferred where there are no time estimates
  flex: unsupported, softmax only, not Entmax15
  reference: not chosen, its workspace grows with L×S"""


def test_a_plan_prints_all_it_knows() -> None:
    plan = regard.explain(
        Q, normal(1, 2, 96, 64), normal(1, 2, 96, 16), masks.window(16, 0, align="upper_left"), 0.1, True, None, True,
        score=scores.Gaussian(2.0), normalizer="entmax15", softcap=30.0,
    )  # fmt: skip
    told = str(plan).split("\n")
    operations, (workspace, unit) = told[4].split()[1], told[6].split()[1:3]
    width = "bandwidth" if "bandwidth" in told[0] else "width"
    assert str(plan) == PRINTED.format(operations=operations, workspace=f"{workspace} {unit}", width=width)
    assert 1 < float(operations) < 2000
    assert unit in ("KiB,", "MiB,")


def test_a_plan_says_that_times_leave_out_functions() -> None:
    odd = regard.explain(Q, Q, Q, masks.causal() & masks.as_mask(lambda b, h, i, j: (i - j) % 2 == 0))
    assert odd.seconds is not None and "do not include the evaluation of the mask's function" in str(odd)
    assert str(odd).split("\n")[2].startswith("  left out  ")
    named = regard.explain(Q, Q, Q, masks.causal() & masks.dilated(2))
    assert named.left_out == "" and "left out" not in str(named)
    untimed = regard.explain(Q, Q, Q, lambda b, h, i, j: i >= j, normalizer="argmax")
    assert untimed.seconds is None and untimed.left_out == ""


def test_amounts_are_told_in_the_unit_that_fits() -> None:
    small = str(regard.explain(Q[:, :1, :1], Q[:, :1, :1], Q[:, :1, :1]))
    assert "kFLOP" in small or " FLOP" in small
    huge = str(regard.explain(*[torch.empty(8, 64, 1 << 17, 128, device="meta")] * 3))
    assert "PFLOP" in huge
    assert "GiB" in huge
    empty = str(regard.explain(Q[:0], Q[:0], Q[:0]))
    assert "operations  0 FLOP" in empty


REASONS: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "sdpa", "streaming", "not chosen, torch's own kernel runs this call"),
    ({}, "sdpa", "fused", "not chosen, torch's own kernel runs this call"),
    ({}, "sdpa", "reference", "not chosen, its workspace grows with L×S"),
    ({"engine": "streaming"}, "streaming", "sdpa", "not chosen, engine='streaming' was given"),
    ({"engine": engines.Reference(torch.float64)}, "reference", "sdpa", "not chosen, engine='reference' was given"),
    ({"engine": "reference", "softcap": 1.0}, "reference", "sdpa", "unsupported, no softcap"),
    ({"normalizer": "sparsemax"}, "fused", "sdpa", "unsupported, softmax only, not Sparsemax"),
    ({"normalizer": "sparsemax"}, "fused", "streaming", "not chosen, estimated #× slower (# ms)"),
    ({"normalizer": "entmax15"}, "fused", "reference", "not chosen, its workspace grows with L×S"),
    ({"normalizer": "argmax"}, "streaming", "fused", "unsupported, softmax, sigmoid and entmax only, not Argmax"),
    ({"softcap": 1.0}, "fused", "sdpa", "unsupported, no softcap"),
    ({"softcap": 1.0}, "fused", "streaming", "not chosen, estimated #× slower (# ms)"),
    ({"normalizer": "softmax_sink"}, "fused", "sdpa", "not chosen, estimated #× slower (# ms)"),
    ({"normalizer": "gumbel"}, "reference", "streaming", "unsupported, Gumbel declares no streaming rule (Normalizer.streams)"),
    ({"score": "boxcar"}, "fused", "sdpa", "unsupported, Boxcar is not a dot product of features of the query and of the key"),
    ({"score": lambda s, *_: s}, "streaming", "sdpa", "unsupported, a score_mod changes the dot product"),
    ({"attn_mask": torch.zeros(128, 128, requires_grad=True)}, "fused", "sdpa", "unsupported, no gradient to a bias"),
    ({"attn_mask": masks.window(3, 0), "dropout_p": 0.5}, "fused", "sdpa", "unsupported, dropout needs the whole mask as a matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "chosen", "other", "reason"), REASONS)
def test_reasons(named: dict[str, Any], chosen: str, other: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "multiplies_slowly", lambda _: False)
    plan = regard.explain(Q, Q, Q, **named)
    assert plan.engine.name == chosen
    assert re.sub(r"[\d.,e+-]+(×| ms)", r"#\1", plan.others[other]) == reason
    assert set(plan.others) == set(engines.TABLE) - {chosen}
    assert f"  {other}: {plan.others[other]}" in str(plan)


def test_products_that_torch_computes_slowly_are_left_to_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "multiplies_slowly", lambda query: query.itemsize >= 4)
    plan = regard.explain(Q, Q, Q)
    assert plan.engine.name == "fused" and plan.compiled.startswith("sdpa, torch's own function")
    assert re.fullmatch(r"not chosen, estimated [\d.]+× slower \([\d.]+ ms\)", plan.others["sdpa"])
    assert regard.explain(Q.bfloat16(), Q.bfloat16(), Q.bfloat16()).engine.name == "sdpa"


def test_only_amd_processors_with_avx_512_are_known_to_multiply_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for name, wide, slow in (
        ("AMD EPYC", True, True),
        ("AMD Ryzen 7 5800X", False, False),
        ("Intel Xeon", True, False),
        (None, None, False),
    ):
        monkeypatch.setattr(
            cost_model, "_capabilities", lambda name=name, wide=wide: {"cpu_name": name, "avx512_f": wide}
        )
        assert cost_model.multiplies_slowly(Q) is slow
        assert not cost_model.multiplies_slowly(Q.bfloat16())
    assert not cost_model.multiplies_slowly(Q.to("meta"))


def test_estimates_count_what_masks_without_tensors_hide() -> None:
    padding, causal = masks.padding(torch.tensor([100])), masks.causal()
    for mask, share in ((None, 1.0), (padding, 1.0), (causal, 129 / 256), (padding & causal, 129 / 256)):
        assert Problem.of(Call(Q, Q, Q, mask)).fixed_share == pytest.approx(share)
    window = Problem.of(Call(Q, Q, Q, causal & masks.window(9, 0) & masks.alibi(8)))
    assert window.fixed_share == pytest.approx((45 + 119 * 10) / 128**2)


def test_a_gradient_that_nobody_wants_is_no_reason() -> None:
    bias = torch.zeros(128, 128, requires_grad=True)
    with torch.no_grad():
        assert regard.explain(Q, Q, Q, bias).engine.name == "sdpa"
    assert regard.explain(Q, Q, Q, bias.detach()).engine.name == "sdpa"


GRID = {
    "shape": [(2, 2, 5, 7), (1, 4, 300, 260), (1, 1, 2, 70000)],
    "normalizer": list(NORMALIZERS),
    "score": [None, "gaussian", "cosine", "epanechnikov", scores.Additive(normal(8)), lambda s, *_: s],
    "attn_mask": [None, "causal", "window", "padding", "dense", "bias"],
    "dropout_p": [0.0, 0.5],
    "softcap": [None, 2.0],
}


def arguments(shape: tuple[int, ...], **named: Any) -> dict[str, Any]:
    B, H, L, S = shape
    query, key = torch.empty(B, H, L, 8), torch.empty(B, H, S, 8)
    made = {
        None: lambda: None,
        "causal": lambda: masks.causal("lower_right"),
        "window": lambda: masks.window(3, 0, offset=0),
        "padding": lambda: masks.padding(torch.full((B,), S // 2)),
        "dense": lambda: torch.ones(1, S, dtype=torch.bool),
        "bias": lambda: torch.zeros(L, 1).requires_grad_(),
    }
    return {"query": query, "key": key, "value": key, **named, "attn_mask": made[named["attn_mask"]]()}


@pytest.mark.slow
def test_auto_never_grows_where_it_need_not() -> None:
    grew = 0
    for values in itertools.islice(itertools.product(*GRID.values()), 0, None, sized(1, 5)):
        named = arguments(**dict(zip(GRID, values)))
        plan = regard.explain(**named)
        workspace = str(plan).split("\n")[6]
        assert plan.cost.grows == ("does not grow" not in workspace)
        if not plan.cost.grows:
            continue
        grew += 1
        for other, reason in plan.others.items():
            if not reason.startswith("unsupported"):
                again = regard.explain(**named, engine=other)
                assert again.cost.grows, f"{plan.engine} grows, {other} does not: {plan.call}"
    assert grew > 0


def test_dropout_in_a_matrix_counts_as_growth_only_where_it_is_large() -> None:
    side = int(SMALL**0.5)
    for L, grows in ((side, False), (side + 1, True)):
        query = torch.empty(1, 1, L, 8)
        assert regard.explain(query, query, query, None, 0.5, engine="sdpa").cost.grows == grows
        assert regard.explain(query, query, query, None, 0.5).engine.name == "fused"


class Told(Engine):
    """Stands in for an engine and notes that it ran."""

    def __init__(self, engine: Engine, ran: list[str]) -> None:
        self.engine, self.ran = engine, ran
        self.name = engine.name  # type: ignore[misc]
        self.twice_differentiable = engine.twice_differentiable  # type: ignore[misc]
        self.refusal, self.grows, self.cost = engine.refusal, engine.grows, engine.cost  # type: ignore[method-assign]

    def refusal(self, problem: Any) -> str | None:
        raise NotImplementedError

    grows = cost = refusal  # type: ignore[assignment]

    def run(self, problem: Any) -> EngineOutput:
        self.ran.append(self.name)
        return self.engine.run(problem)


@pytest.mark.parametrize("return_aux", [None, AuxRequest(weights=True, lse=True), AuxRequest(topk=2)])
def test_what_is_explained_is_what_runs(return_aux: AuxRequest | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(cost_model, "multiplies_slowly", lambda _: False)
    clear_plans()
    for name, engine in list(engines.TABLE.items()):
        monkeypatch.setitem(engines.TABLE, name, Told(engine, ran))
    for named, chosen, _, _ in REASONS:
        if isinstance(named.get("engine"), Engine):
            continue
        plan = regard.explain(Q, Q, Q, **named, return_aux=return_aux)
        ran.clear()
        regard.attention(Q, Q, Q, **named, return_aux=return_aux)
        assert plan.engine.name == chosen
        assert ran == [chosen]
    clear_plans()


def test_the_plainest_call_is_torchs_own_in_a_compiler() -> None:
    for shape, layout in (
        ((2, 3, 5, 8), "plain"),
        ((2, 3, 5, 8), "strided"),
        ((3, 5, 8), "plain"),
        ((2, 3, 0, 8), "plain"),
    ):
        query = normal(*shape) if layout == "plain" else normal(*shape, 2)[..., 0]
        assert is_torch_call(Call(query, query, query), eager=False) == (
            len(shape) == 4 and 0 not in shape and layout == "plain"
        )


CALLS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": masks.padding(torch.tensor([20, 0]))},
    {"attn_mask": masks.alibi(torch.ones(4), align="upper_left") & masks.causal("upper_left")},
    {"score": "gaussian"},
    {"score": scores.Additive(normal(8))},
    {"normalizer": "sparsemax"},
    {"normalizer": "sampled"},
    {"dropout_p": 0.4},
]

ASKED: list[AuxRequest] = [
    AuxRequest(),
    AuxRequest(lse=True),
    AuxRequest(max=True, entropy=True),
    AuxRequest(topk=3, received=True),
    AuxRequest(weights=True),
    AuxRequest(scores=True, topk=1),
]


@pytest.mark.parametrize("engine", ["auto", *HERE])
@pytest.mark.parametrize("named", CALLS, ids=lambda named: "-".join(named) or "plain")
def test_asking_changes_neither_the_plan_nor_a_bit(engine: str, named: dict[str, Any]) -> None:
    sizes = (2, 4, 23, 8), (2, 4, 29, 8), (2, 4, 29, 5)

    def run(return_aux: AuxRequest | None) -> list[Tensor]:
        leaves = [normal(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]
        torch.manual_seed(1)
        output = regard.attention(*leaves, **named, engine=engine, return_aux=return_aux)
        output = output if isinstance(output, Tensor) else output[0]
        return [output, *torch.autograd.grad(output.square().sum(), leaves, materialize_grads=True)]

    tensors = [normal(*size) for size in sizes]
    try:
        plain, plan = run(None), str(regard.explain(*tensors, **named, engine=engine))
    except ValueError as refused:
        assert "engine must be able to run this call" in str(refused)
        return
    for request in ASKED:
        assert str(regard.explain(*tensors, **named, engine=engine, return_aux=request)) == plan
        for a, b in zip(run(request), plain, strict=True):
            assert torch.equal(a, b), request


def test_explaining_runs_nothing_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    meta = Q.to("meta")
    for named, _, _, _ in REASONS:
        regard.explain(Q, Q, Q, **named)
        if "attn_mask" not in named:
            regard.explain(meta, meta, meta, **named)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_engine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    own = Told(engines.TABLE["reference"], ran)
    own.name = "own"  # type: ignore[misc]
    monkeypatch.delitem(engines.TABLE, "own", raising=False)
    assert torch.equal(regard.attention(Q, Q, Q, engine=own), regard.attention(Q, Q, Q, engine="reference"))
    assert ran == ["own"]
    with pytest.raises(ValueError, match="got 'own'"):
        regard.attention(Q, Q, Q, engine="own")
    monkeypatch.setattr(engines, "TABLE", dict(engines.TABLE))
    assert engines.register(own) is own
    assert regard.explain(Q, Q, Q, engine="own").engine is own
    assert "own" in regard.explain(Q, Q, Q).others


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
def test_an_empty_call_has_a_plan(shape: tuple[int, ...]) -> None:
    query = torch.zeros(shape)
    lengths = torch.full(shape[:1], min(shape[2], 1))
    for mask in (None, masks.padding(lengths), masks.causal(), masks.prefix(lengths), masks.window(1, 0)):
        told = regard.explain(query, query, query, mask)
        assert {told.engine.name, *told.others} == set(engines.TABLE)


def test_a_notebook_shows_a_plan_as_print_does() -> None:
    plan = regard.explain(Q, Q, Q)
    assert repr(plan) == str(plan)


def test_an_answer_shows_what_was_asked_for_alone() -> None:
    _, aux = regard.attention(Q, Q, Q, return_aux=AuxRequest(lse=True))
    assert repr(aux) == f"Aux(lse={aux.lse!r})"
    assert repr(regard.Aux()) == "Aux()"
