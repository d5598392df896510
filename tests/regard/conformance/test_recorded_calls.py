"""Compiled and traced calls: one operator, which plans and runs as an eager call does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks, scores
from regard._call import operator as _operator
from regard.masks import Extent
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.testing import Case, CaseCall, case

pytestmark = pytest.mark.filterwarnings("ignore:.*lru_cache:UserWarning")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ends(L: int = 12, S: int = 12) -> list[Tensor]:
    return [normal(2, 4, n, 8, seed=n) for n in (L, S, S)]


RECIPES: list[case.Recipe] = [
    ("causal", "upper_left"), ("causal", 2), ("causal", "each"), ("window", 1, 2, "lower_right"), ("padding", False),
    ("padding", True), ("key_padding", True), ("prefix", 2), ("prefix", "each"), ("sinks", 1), ("document", True),
    ("packed",), ("packed", 1, 0, "lower_right"), ("dilated", 2, "upper_left"), ("dense", "LS", 0.5, "plain"),
    ("everything",), ("others", True), ("others", False), ("bias", "LS", 1.0, "plain", 0.0),
    ("alibi", True, "upper_left"), ("alibi", False, 2), ("relative", 1, False, "upper_left"), ("not", ("causal", 1)),
    ("or", ("sinks", 1), ("window", 1, 1, 0)), ("part", ("causal", 0), 1, 2),
]  # fmt: skip


def _returned(part: Any) -> Any:
    packed = _operator._Packed()
    packed.add(part)
    assert packed.complete, part
    return _operator._Unpacking(packed.text, packed.tensors, packed.ints, packed.floats).next()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_mask_travels_as_a_text(recipe: case.Recipe) -> None:
    mask = case.build_mask(recipe, Extent(2, 4, 6, 6), torch.Generator().manual_seed(0), torch.float32)
    back = _returned(mask)
    assert repr(back) == repr(mask)
    assert back.structure() == mask.structure()


@pytest.mark.parametrize("name", [name for name in case.score_names() if not name.startswith("score_mod")])
def test_a_score_travels_as_a_text(name: str) -> None:
    score = CaseCall.of(Case(name, key_heads=2)).score
    assert repr(_returned(score)) == repr(score)
    assert all(torch.equal(a, b) for a, b in zip(_returned(score).tensors(), score.tensors(), strict=True))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_travels_as_a_text(name: str) -> None:
    normalizer = NORMALIZERS[name].sample(torch.Generator().manual_seed(0))
    assert repr(_returned(normalizer)) == repr(normalizer)


KINDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "gaussian": {"score": "gaussian"},
    "lower right": {"attn_mask": masks.causal(align="lower_right")},
    "window": {"attn_mask": masks.causal(align="lower_right") & masks.window(7, 0, align="lower_right")},
    "alibi": {"attn_mask": masks.alibi(4, align="lower_right")},
    "sparsemax": {"normalizer": "sparsemax"},
    "entmax": {"normalizer": "entmax"},
    "sigmoid": {"normalizer": "sigmoid"},
    "argmax": {"normalizer": "argmax"},
    "softcap": {"softcap": 2.0},
    "laplacian": {"score": "laplacian"},
    "additive": {"score": scores.Additive(normal(8, seed=7))},
}


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_calls_have_the_bits_of_eager_ones_at_every_length(kind: str, dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v: regard.attention(q, k, v, **KINDS[kind]), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for L, S in ((12, 12), (9, 17), (5, 30)):
        given = [t.requires_grad_() for t in ends(L, S)]
        output, right = compiled(*given), regard.attention(*given, **KINDS[kind])
        assert torch.equal(output, right)
        if kind != "argmax":  # whose weights have no gradient
            for a, b in zip(*(torch.autograd.grad(out.sin().sum(), given) for out in (output, right)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_traced_calls_are_right_at_other_lengths(kind: str) -> None:
    traced = torch.jit.trace(lambda q, k, v: regard.attention(q, k, v, **KINDS[kind]), ends(), check_trace=False)
    for L, S in ((12, 12), (9, 17), (5, 30)):
        given = [t.requires_grad_() for t in ends(L, S)]
        output, right = traced(*given), regard.attention(*given, **KINDS[kind])
        torch.testing.assert_close(output, right)
        if kind != "argmax":
            for a, b in zip(*(torch.autograd.grad(out.sin().sum(), given) for out in (output, right)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_trace_is_stored_and_loaded(tmp_path: Any) -> None:
    class Model(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return regard.attention(query, key, value, masks.causal(align="lower_right"), score="gaussian")

    torch.jit.save(torch.jit.trace(Model(), tuple(ends())), tmp_path / "model.pt")
    given = ends(3, 20)
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(*given), Model()(*given))


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"score": lambda s, b, h, q_idx, kv_idx: s}, "<lambda> is a function"),
        ({"attn_mask": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx}, "<lambda> is a function"),
        ({"dropout_p": 0.5}, "it draws random numbers"),
        ({"normalizer": "gumbel"}, "it draws random numbers"),
        ({"engine": regard.engines.Reference(torch.float64)}, "the engine is an object, not a name"),
    ],
)
def test_what_cannot_be_traced_says_why(named: dict[str, Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"torch.jit.trace cannot record this call because {reason}; use"):
        torch.jit.trace(lambda q, k, v: regard.attention(q, k, v, **named), ends(), check_trace=False)


def test_a_hidden_nan_does_not_leak_in_a_compiled_call() -> None:
    torch.compiler.reset()
    query, key, value = ends(16, 16)
    key[:, :, 8], value[:, :, 12] = torch.nan, torch.inf
    mask = masks.causal() & masks.window(9, 0)
    compiled = torch.compile(lambda q, k, v: regard.attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    output = compiled(query, key, value)
    assert output[:, :, :8].isfinite().all()
    assert torch.equal(output.nan_to_num(), regard.attention(query, key, value, mask).nan_to_num())


def test_gradients_reach_the_tensors_of_compiled_parts() -> None:
    torch.compiler.reset()
    slopes, w_v = torch.rand(4).requires_grad_(), normal(8).requires_grad_()
    given = ends()

    def call(slopes: Tensor, w_v: Tensor) -> Tensor:
        mask = masks.alibi(slopes) & masks.causal()
        return regard.attention(*given, mask, score=scores.Additive(w_v))

    output = torch.compile(call, fullgraph=True, backend="aot_eager")(slopes, w_v)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), (slopes, w_v)) for o in (output, call(slopes, w_v)))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_in_a_compiled_call() -> None:
    torch.compiler.reset()

    def call(*given: Tensor) -> Tensor:
        return regard.attention(*given, masks.causal())

    with torch.autocast("cpu", torch.bfloat16):
        output, right = torch.compile(call, fullgraph=True, backend="aot_eager")(*ends()), call(*ends())
    assert output.dtype == right.dtype == torch.bfloat16
    assert torch.equal(output, right)


def test_a_second_derivative_of_a_trace_is_an_error_that_names_engines() -> None:
    traced = torch.jit.trace(lambda q, k, v: regard.attention(q, k, v, score="laplacian"), ends(), check_trace=False)
    given = [t.requires_grad_() for t in ends()]
    first = torch.autograd.grad(traced(*given).sin().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative .*engine='streaming' or engine='reference'"):
        torch.autograd.grad(first[0].square().sum(), given)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.func.vmap(f, in_dims=0)], ids=["grad", "vmap"])
def test_transforms_inside_what_is_compiled(transform: Callable[..., Any]) -> None:
    torch.compiler.reset()
    query, key, value = ends()

    def loss(query: Tensor) -> Tensor:
        return regard.attention(query, key, value, score="laplacian").sin().sum()

    given = query[None] if transform is not torch.func.grad else query
    found = torch.compile(transform(loss), fullgraph=True, backend="aot_eager")(given)
    torch.testing.assert_close(found, transform(loss)(given), rtol=1e-4, atol=1e-5)
    assert found.abs().max() > 0.01


def test_explain_says_what_a_compiled_call_runs() -> None:
    query, key, value = ends()
    assert regard.explain(query, key, value, masks.causal(), score="gaussian").compiled == ""
    assert "compiled    the same engine" in str(regard.explain(query, key, value, masks.causal()))
    assert "compiled    sdpa, torch's own function" in str(regard.explain(query, key, value))


def test_fx_records_a_call() -> None:
    traced = torch.fx.symbolic_trace(lambda q, k, v: regard.attention(q, k, v, softcap=2.0))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls == [regard.attention]
    torch.testing.assert_close(traced(*ends()), regard.attention(*ends(), softcap=2.0))


SCORES: dict[str, Any] = {
    "scaled_dot": None, "gaussian": "gaussian", "laplacian": "laplacian", "cosine": "cosine",
    "epanechnikov": "epanechnikov", "additive": scores.Additive(normal(8, seed=7)),
}  # fmt: skip
MASKS: dict[str, Any] = {
    "none": None,
    "window": masks.causal() & masks.window(5, 0),
    "documents": masks.document(torch.arange(12) // 5) & masks.causal(),
    "key padding": masks.key_padding(torch.arange(12) % 3 > 0) & masks.causal(),
    "alibi": masks.alibi(4) & masks.causal(),
    "matrix": torch.ones(12, 12, dtype=torch.bool).tril(),
}


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_every_score_and_mask_compiles_to_the_plan_of_an_eager_call(score: str, mask: str) -> None:
    torch.compiler.reset()
    recorded: list[str] = []

    def watch(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        recorded.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def call(*given: Tensor) -> Tensor:
        return regard.attention(*given, MASKS[mask], score=SCORES[score])

    output = torch.compile(call, fullgraph=True, backend=watch)(*ends())
    plainest = score == "scaled_dot" and mask == "none"  # is torch's own function, if compiled
    right = regard.attention(*ends(), engine="sdpa") if plainest else call(*ends())
    assert torch.equal(output, right)
    assert any(("scaled_dot_product_attention" if plainest else "regard.attend") in name for name in recorded)
    told = regard.explain(*ends(), MASKS[mask], score=SCORES[score])
    assert told.compiled.partition(",")[0] == ("sdpa" if plainest and told.engine.name != "sdpa" else "")


def gradients(function: Callable[..., Tensor], given: list[Tensor], times: int = 1) -> list[tuple[Tensor, ...]]:
    output = function(*given)
    weight = normal(*output.shape, seed=9)
    return [torch.autograd.grad(output, given, weight, retain_graph=i + 1 < times) for i in range(times)]


@pytest.mark.parametrize("normalizer", ["softmax", "sparsemax"])
def test_a_compiled_backward_pass_does_not_repeat_the_forward_pass(
    normalizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    runs: list[weakref.ref[Any]] = []
    original = _operator._run

    def counted(*arguments: Any) -> Any:
        run = original(*arguments)
        runs.append(weakref.ref(run))
        return run

    def call(*given: Tensor) -> Tensor:
        return regard.attention(*given, MASKS["documents"], normalizer=normalizer, score="gaussian")

    monkeypatch.setattr(_operator, "_run", counted)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = [end.requires_grad_() for end in ends()]
    right = gradients(call, given)[0]
    for found in gradients(compiled, given, times=2):
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert len(runs) == 1 and runs[0]() is None, "the graph must be freed with the output"

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        found = gradients(compiled, given)[0]
    assert len(runs) == 3 and all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_a_trace_of_one_query_is_right_at_other_lengths() -> None:
    mask = masks.causal(align="lower_right")

    def call(*given: Tensor) -> Tensor:
        return regard.attention(*given, mask)

    traced = torch.jit.trace(call, tuple(ends(1, 12)))
    torch.testing.assert_close(traced(*ends(5, 12)), call(*ends(5, 12)))
