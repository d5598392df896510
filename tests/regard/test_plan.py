"""Calls are planned once: what is kept, for which calls, and that it holds nothing of a user's."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from python_calls import python_calls
from torch import Tensor

import regard
from regard import masks, normalizers, scores
from regard._call import plan as _plan
from regard.engines.base import EngineOutput, Runner
from regard.engines.fused import pool, prepared
from regard.engines.problem import Call, Problem
from regard.engines.sdpa import Sdpa
from regard.testing.conformance import tiny_tiles


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


Q, K, V = (normal(2, 4, 20, 8, seed=i) for i in range(3))
GROUPED = normal(2, 2, 20, 8, seed=3)


def bool_mask() -> Tensor:
    return torch.ones(20, 20, dtype=torch.bool).tril()


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "is_causal": lambda: {"is_causal": True},
    "causal": lambda: {"attn_mask": masks.causal()},
    "window": lambda: {"attn_mask": masks.causal() & masks.window(16, 0)},
    "bool": lambda: {"attn_mask": bool_mask()},
    "padding": lambda: {"attn_mask": masks.padding(torch.tensor([20, 7]))},
    "gaussian": lambda: {"score": "gaussian"},
    "additive": lambda: {"score": scores.Additive(normal(8))},
    "learned width": lambda: {"score": scores.Gaussian(torch.tensor(0.7, requires_grad=True))},
    "bias": lambda: {"attn_mask": masks.alibi(torch.ones(4), align="upper_left")},
    "sparsemax": lambda: {"normalizer": "sparsemax"},
    "entmax": lambda: {"normalizer": normalizers.Entmax(1.3)},
    "softcap": lambda: {"softcap": 3.0},
    "grouped": lambda: {"key": GROUPED, "value": GROUPED, "enable_gqa": True},
}
EVERY = pytest.mark.parametrize("name", CALLS)


def call(name: str, **changes: Any) -> Tensor:
    output = regard.attention(**{"query": Q, "key": K, "value": V, **CALLS[name](), **changes})
    assert isinstance(output, Tensor)
    return output


@EVERY
def test_a_call_is_planned_once(name: str) -> None:
    assert not _plan._plans
    first = call(name)
    assert len(_plan._plans) == 1
    kept = next(iter(_plan._plans.values()))
    assert torch.equal(call(name), first)
    assert [kept] == list(_plan._plans.values())


@EVERY
@pytest.mark.parametrize("engine", ["auto", "reference", "streaming"])
def test_later_tensors_are_read(name: str, engine: str) -> None:
    call(name, engine=engine)
    query = normal(2, 4, 20, 8, seed=9)
    later = call(name, query=query, engine=engine)
    _plan.clear_plans()
    assert torch.equal(later, call(name, query=query, engine=engine))


@pytest.mark.parametrize(
    "change",
    [
        {"query": normal(2, 4, 21, 8)},
        {"query": Q.double(), "key": K.double(), "value": V.double()},
        {"query": normal(2, 4, 20, 8).requires_grad_()},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"score": "cosine"},
        {"score": scores.Gaussian(2.0)},
        {"normalizer": "sparsemax"},
        {"attn_mask": masks.window(3, 0, align="upper_left")},
        {"attn_mask": masks.window(4, 0, align="upper_left")},
        {"engine": "streaming"},
        {"return_aux": regard.AuxRequest(lse=True)},
        {"query": Q.transpose(1, 2).contiguous().transpose(1, 2)},
        {"dropout_p": 0.1},
    ],
    ids=str,
)
def test_what_differs_in_structure_is_planned_anew(change: dict[str, Any]) -> None:
    regard.attention(Q, K, V, is_causal=True)
    regard.attention(**{"query": Q, "key": K, "value": V, "is_causal": True, **change})
    assert len(_plan._plans) == 2


def test_threads_and_gradients_are_part_of_the_structure() -> None:
    query, before = Q.clone().requires_grad_(), torch.get_num_threads()
    regard.attention(query, K, V, score="gaussian")
    with torch.no_grad():
        regard.attention(query, K, V, score="gaussian")
    torch.set_num_threads(before + 1)
    try:
        regard.attention(query, K, V, score="gaussian")
    finally:
        torch.set_num_threads(before)
    assert len(_plan._plans) == 3


@EVERY
@pytest.mark.parametrize("engine", ["auto", "reference", "streaming"])
def test_a_plan_keeps_no_tensor_alive(name: str, engine: str) -> None:
    gc.freeze()  # what is there already need not be gone through
    given = {"query": Q.clone(), "key": K.clone(), "value": V.clone(), **CALLS[name]()}
    given |= {what: t.clone() for what, t in given.items() if what in ("query", "key", "value")}
    watched = [weakref.ref(t) for t in given.values() if isinstance(t, Tensor)]
    for part in given.values():
        if isinstance(part, regard._utils.part.Part):
            watched += [weakref.ref(t) for t in part.tensors()]
            del part
    output = regard.attention(**given, engine=engine)
    assert _plan._plans
    given.clear()
    part = None
    del output
    gc.collect()
    gc.unfreeze()
    assert not [kept for kept in watched if kept() is not None]


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "MAX_PLANS", 5)
    for length in range(2, 14):
        regard.attention(Q, K[:, :, :length], V[:, :, :length], score="cosine")
    assert len(_plan._plans) == 5


def test_threads_may_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "MAX_PLANS", 3)
    lengths = [3, 5, 8, 13, 20]
    right = {n: regard.attention(Q, K[:, :, :n], V[:, :, :n], score="gaussian") for n in lengths}

    def run(n: int) -> bool:
        return torch.equal(regard.attention(Q, K[:, :, :n], V[:, :, :n], score="gaussian"), right[n])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, lengths * 40))
    assert len(_plan._plans) <= 3


@pytest.mark.parametrize("named", [{"scale": True}, {"is_causal": 1}, {"enable_gqa": 0}, {"dropout_p": False}], ids=str)
def test_what_equals_a_planned_argument_is_still_checked(named: dict[str, Any]) -> None:
    regard.attention(Q, K, V, is_causal=True, scale=1.0, score="cosine")
    with pytest.raises(TypeError):
        regard.attention(
            **{"query": Q, "key": K, "value": V, "is_causal": True, "scale": 1.0, "score": "cosine", **named}
        )


LEFT = 3


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & (kv_idx >= q_idx - LEFT)


def test_a_mask_mod_of_positions_alone_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(masks.Predicate, "visible", _watched(masks.Predicate.visible, asked))
    first = regard.attention(Q, K, V, near)
    after = len(asked)
    assert after and torch.equal(regard.attention(Q, K, V, near), first)
    assert len(asked) == after and len(_plan._plans) == 1
    torch.testing.assert_close(first, regard.attention(Q, K, V, masks.window(3, 0, align="upper_left")))
    monkeypatch.setitem(globals(), "LEFT", 1)
    later = regard.attention(Q, K, V, near)
    torch.testing.assert_close(later, regard.attention(Q, K, V, masks.window(1, 0, align="upper_left")))


def _watched(function: Any, asked: list[int]) -> Any:
    def watched(*args: Tensor) -> Any:
        asked.append(1)
        return function(*args)

    return watched


def test_what_a_mask_mod_closes_over_may_change() -> None:
    left, shown = 3, torch.ones(20, dtype=torch.bool)

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= q_idx - left

    def of_a_tensor(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return shown[kv_idx]

    for mask in (window, of_a_tensor, masks.as_mask(window) & masks.causal("upper_left")):
        left, shown[:] = 3, True
        first = regard.attention(Q, K, V, mask)
        left, shown[3:] = 1, False
        assert not torch.equal(regard.attention(Q, K, V, mask), first)


def test_a_class_that_may_hold_anything_is_not_kept() -> None:
    shown = torch.ones(20, dtype=torch.bool)

    class Shown(masks.Mask):
        def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return shown[kv_idx]

    first = regard.attention(Q, K, V, Shown())
    shown[3:] = False
    assert not torch.equal(regard.attention(Q, K, V, Shown()), first)
    assert not _plan._plans


def test_a_mask_whose_tensor_changes_is_looked_at_each_time() -> None:
    lengths = torch.tensor([20, 20])
    first = regard.attention(Q, K, V, masks.padding(lengths))
    lengths[1] = 3
    later = regard.attention(Q, K, V, masks.padding(lengths))
    assert torch.equal(later[0], first[0]) and not torch.equal(later[1], first[1])
    torch.testing.assert_close(later[1], regard.attention(Q[1:], K[1:, :, :3], V[1:, :, :3])[0])


def test_a_registered_engine_is_taken_into_account() -> None:
    class Twin(regard.engines.Reference):
        name = "twin"

    regard.attention(Q, K, V, is_causal=True)
    regard.engines.register(Twin())
    try:
        assert not _plan._plans
    finally:
        del regard.engines.TABLE["twin"]


def test_an_engine_defines_run_or_prepare() -> None:
    class Nothing(regard.engines.Engine):
        name = "nothing"

        def refusal(self, problem: Any) -> None:
            return None

        grows = cost = refusal  # type: ignore[assignment]

    with pytest.raises(NotImplementedError, match=r"^Nothing must define run or prepare$"):
        regard.attention(Q, K, V, is_causal=True, engine=Nothing())


def test_a_name_stands_for_what_is_registered_now(monkeypatch: pytest.MonkeyPatch) -> None:
    first = regard.attention(Q, K, V, score="gaussian")
    monkeypatch.setitem(scores.base.TABLE, "gaussian", scores.Laplacian)
    assert torch.equal(regard.attention(Q, K, V, score="gaussian"), regard.attention(Q, K, V, score="laplacian"))
    assert not torch.equal(regard.attention(Q, K, V, score="gaussian"), first)


@EVERY
def test_a_plan_made_in_inference_mode_serves_other_calls(name: str) -> None:
    query = Q.clone().requires_grad_()
    with torch.inference_mode():
        first = call(name, query=query)
    with torch.no_grad():
        assert torch.equal(call(name, query=query), first)
    call(name, query=query).sum().backward()
    assert query.grad is not None and bool(query.grad.isfinite().all())


def test_a_plan_made_with_gradients_in_inference_mode_is_not_kept() -> None:
    """Tensors of inference mode cannot be saved for a backward pass, of later calls either."""
    query = normal(2, 4, 20, 8).requires_grad_()
    call: dict[str, Any] = {"score": "gaussian", "engine": "fused", "softcap": 1.75}
    with torch.inference_mode(), torch.enable_grad(), suppress(RuntimeError):
        regard.attention(query, K, V, **call)
    regard.attention(query, K, V, **call).sum().backward()


def test_other_tile_sizes_are_planned_anew() -> None:
    regard.attention(Q, K, V, is_causal=True, engine="streaming")
    with tiny_tiles():
        assert not _plan._plans
        regard.attention(Q, K, V, is_causal=True, engine="streaming")
    assert not _plan._plans


#: Calls of Python's within the package; a mask with tensors is looked at each time.
MOST = dict.fromkeys(CALLS, 55) | {"sparsemax": 70, "entmax": 90, "softcap": 60, "additive": 75, "learned width": 60}
MOST |= {"padding": 90, "bias": 90}


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_a_later_call_is_few_calls_of_python(name: str, most: int) -> None:
    given = {"query": Q, "key": K, "value": V, **CALLS[name]()}
    assert 0 < python_calls(lambda: regard.attention(**given)) <= most


@pytest.mark.parametrize(
    "mask", [masks.causal(align="lower_right"), masks.causal(offset=8), masks.window(-1, 0, offset=8)]
)
def test_a_mask_that_hides_nothing_is_no_part_of_a_plan(mask: masks.Mask) -> None:
    query, key = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 9, 4)
    call = Call(query, key, key, mask)
    plan, problem = _plan.plan_call(call, call.structure())
    assert not plan.masked
    assert problem.mask is None
    padded = mask & masks.key_padding(torch.arange(9) < 5)
    call = Call(query, key, key, padded)
    _, problem = _plan.plan_call(call, call.structure())
    assert isinstance(problem.mask, type(masks.key_padding(torch.ones(9, dtype=torch.bool))))
    torch.testing.assert_close(
        regard.attention(query, key, key, padded), regard.attention(query, key[:, :, :5], key[:, :, :5])
    )


def test_the_causal_mask_of_one_query_at_the_last_key_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 17, 4)
    mask = masks.causal(align="lower_right")
    two = regard.attention(query.expand(1, 2, 2, 4), key, key, mask)
    alone = regard.attention(query, key, key)
    monkeypatch.setattr("regard.functional.plan_call", lambda *_: pytest.fail("the call must not be planned"))
    output = regard.attention(query, key, key, mask)
    assert torch.equal(output, alone)
    torch.testing.assert_close(output, two[:, :, 1:])


BOTH = pytest.mark.parametrize("engine", ["sdpa", "fused"])
SHORT = pytest.mark.parametrize("name", ["is_causal", "causal", "window", "bool", "grouped"])


@BOTH
@SHORT
def test_the_shortcut_of_a_later_call_gives_the_same_bits(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call(name, engine=engine)
    monkeypatch.setattr("regard.functional.plan_call", lambda *_: pytest.fail("there must be a shortcut"))
    assert torch.equal(call(name, engine=engine), first)


@BOTH
@SHORT
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_without_a_finite_output_there_is_no_shortcut(name: str, engine: str, bad: float) -> None:
    call(name, engine=engine)
    key, value = (CALLS[name]().get(end, like).clone() for end, like in (("key", K), ("value", V)))
    value[:, :, 3] = bad
    expected = call(name, key=key, value=value, engine="reference")
    torch.testing.assert_close(call(name, key=key, value=value, engine=engine), expected, equal_nan=True)
    key[:, :, 3] = bad
    expected = call(name, key=key, value=value, engine="reference")
    torch.testing.assert_close(call(name, key=key, value=value, engine=engine), expected, equal_nan=True)


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the tensor with other strides."""
    if layout == "tokens":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "spread":
        return torch.stack((tensor, tensor), -1)[..., 0]
    return tensor.double() if layout == "double" else tensor.contiguous()


@pytest.mark.parametrize("layout", ["plain", "tokens", "spread", "double"])
@pytest.mark.parametrize(
    "name", ["is_causal", "bool", "grouped", "softcap", "float", "expanded", "step", "padded step", "scaled"]
)
def test_prepared_kernels_read_what_a_call_is_given(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls, on other tensors, against the definition in float64."""
    bias = torch.where(bool_mask(), normal(20, 20), -torch.inf)
    others: dict[str, dict[str, Any]] = {
        "float": {"attn_mask": bias},
        "expanded": {"attn_mask": bias[:1, :1].expand(20, 20)},
        "step": {"query": Q[:, :, :1], "key": GROUPED, "value": GROUPED, "enable_gqa": True},
        "padded step": {
            "query": Q[:, :, :1],
            "key": GROUPED,
            "value": GROUPED,
            "enable_gqa": True,
            "attn_mask": bool_mask()[3:4],
        },
        "scaled": {"is_causal": True, "scale": -0.5, "value": V[..., :3]},
    }
    given = {"query": Q, "key": K, "value": V, **(others[name] if name in others else CALLS[name]())}
    ends = {end: _laid_out(given[end], layout) for end in ("query", "key", "value")}
    first = regard.attention(**{**given, **ends}, engine="fused")
    monkeypatch.setattr("regard.functional.plan_call", lambda *_: pytest.fail("there must be a shortcut"))
    assert torch.equal(regard.attention(**{**given, **ends}, engine="fused"), first)
    later = {end: _laid_out(t.detach().flip(-2), layout) for end, t in ends.items()}
    changed = given if given.get("attn_mask") is None else given | {"attn_mask": given["attn_mask"].clone()}
    output = regard.attention(**{**changed, **later}, engine="fused")
    monkeypatch.undo()
    exact = regard.attention(**{**given, **{end: t.double() for end, t in later.items()}}, engine="reference")
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("team", ["torch_parallel_for", "GOMP_parallel", "none"])
@pytest.mark.parametrize("name", ["is_causal", "bool", "grouped"])
def test_threads_that_share_a_prepared_kernel_change_no_bit(
    name: str, team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = call(name, engine="fused")
    _plan.clear_plans()
    monkeypatch.setattr(prepared, "WORTH", 1)
    found = pool._team()
    if team == "GOMP_parallel":
        found = ctypes.CDLL(None).GOMP_parallel
        found.argtypes, found.restype = (pool._OldBody, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    monkeypatch.setattr(pool, "_team", lambda: None if team == "none" else found)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(3):
            assert torch.equal(call(name, engine="fused"), alone)
    finally:
        torch.set_num_threads(threads)
        _plan.clear_plans()


def test_a_subclass_that_runs_otherwise_gets_no_shortcut() -> None:
    class Doubled(Sdpa):
        name = "doubled"

        def prepare(self, problem: Problem, request: regard.AuxRequest | None) -> Runner:
            run = super().prepare(problem, request)
            return lambda problem: EngineOutput(2 * run(problem).output)

    for _ in range(2):
        assert torch.equal(call("is_causal", engine=Doubled()), 2 * call("is_causal", engine="sdpa"))


@pytest.mark.parametrize("name", ["is_causal", "causal", "window", "bool", "grouped"])
def test_tiny_calls_run_on_the_engine_with_the_least_to_do(name: str) -> None:
    given = {"query": Q, "key": K, "value": V, **CALLS[name]()}
    assert regard.explain(**given).engine.name == "fused"
    query = Q.clone().requires_grad_()
    assert regard.explain(**{**given, "query": query, "engine": "auto"}).engine.name == "sdpa"


@pytest.mark.parametrize("engine", ["fused", "sdpa", "streaming", "auto"])
def test_views_of_negatives_count_as_what_they_show(engine: str) -> None:
    """``z.conj().imag`` is a view of the memory of z whose numbers have the other sign."""
    for shape in ((2, 4, 6, 8), (1, 1, 1, 1)):
        given = [torch.view_as_complex(normal(*shape, 2)).conj().imag for _ in range(3)]
        assert all(t.is_neg() for t in given)
        plain = [t.resolve_neg().detach().requires_grad_() for t in given]
        leaves = [t.detach().requires_grad_() for t in given]
        for _ in range(2):  # the second call would follow the plan of the first
            call: dict[str, Any] = {"engine": engine, "softcap": None if engine == "sdpa" else 5.0}
            found, expected = (regard.attention(*each, **call) for each in (leaves, plain))
            torch.testing.assert_close(found, expected)
            grad = torch._neg_view(normal(*shape))  # such gradients come from complex numbers
            grads = [torch.autograd.grad(out, each, grad) for out, each in ((found, leaves), (expected, plain))]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("engine", ["fused", "sdpa", "streaming", "auto"])
def test_masks_that_are_views_of_negatives_add_what_they_show(engine: str) -> None:
    query, bias = normal(1, 2, 20, 8), normal(1, 2, 20, 20, seed=1)
    expected = regard.attention(query, query, query, bias, engine=engine)
    for _ in range(3):  # the later calls follow the plan of the first
        found = regard.attention(query, query, query, torch._neg_view(-bias), engine=engine)
        torch.testing.assert_close(found, expected)
    if engine != "sdpa":  # which has no gradient to a bias
        given = torch._neg_view(-bias).requires_grad_()
        torch.testing.assert_close(regard.attention(query, query, query, given, engine=engine), expected)


def test_kernels_of_lines_and_of_lists_read_negatives_as_they_show() -> None:
    rows, bias, grad = normal(1, 2, 20, 8), normal(20, 20, seed=1), normal(1, 2, 20, 8, seed=2)
    lines: dict[str, Any] = {"order": 1, "engine": "fused"}
    found = regard.attention(rows, rows, rows, torch._neg_view(-bias), **lines)
    torch.testing.assert_close(found, regard.attention(rows, rows, rows, bias, **lines))
    lists: dict[str, Any] = {"attn_mask": masks.selected(torch.arange(20).view(20, 1)), "engine": "fused"}
    for call in (lines, lists):
        leaf = rows.clone().requires_grad_()
        output = regard.attention(leaf, leaf, leaf, **call)
        wanted, given = (
            torch.autograd.grad(output, leaf, each, retain_graph=True) for each in (grad, torch._neg_view(-grad))
        )
        torch.testing.assert_close(given, wanted)
