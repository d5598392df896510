"""Engine fused under compilers, exporters and transforms, its derivatives, and the plans that name it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_calls import normal
from torch import Tensor, nn

import regard
from regard import masks, normalizers, scores
from regard.engines.fused import operators
from regard.engines.fused.arguments import ENTMAX, SIGMOID, SOFTMAX
from regard.normalizers import SoftmaxSink

F64 = torch.float64
E = 4


def additive(dtype: torch.dtype = torch.float32) -> scores.Additive:
    return scores.Additive(normal(E, seed=5, dtype=dtype))


MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"score": additive()},
    "causal": lambda: {"score": additive(), "is_causal": True},
    "padding": lambda: {"score": additive(), "attn_mask": masks.padding(torch.tensor([50, 0]))},
    "alibi": lambda: {
        "score": additive(),
        "attn_mask": masks.alibi(2, align="upper_left") & masks.causal("upper_left"),
    },
    "dense": lambda: {"score": additive(), "attn_mask": normal(70, 75, seed=6) > 0},
    "bias": lambda: {"score": additive(), "attn_mask": normal(1, 2, 70, 75, seed=6)},
    "gaussian": lambda: {"score": "gaussian", "is_causal": True},
    "dot": lambda: {"attn_mask": masks.dilated(3, align="upper_left")},
    "laplacian": lambda: {"score": "laplacian"},
    "softcap": lambda: {"score": additive(), "softcap": 1.5},
    "sinks": lambda: {"normalizer": SoftmaxSink(normal(2)), "attn_mask": masks.alibi(2, align="upper_left")},
    "epanechnikov": lambda: {"score": scores.Epanechnikov(2.5)},
    "sparsemax": lambda: {"normalizer": "sparsemax", "is_causal": True},
    "entmax": lambda: {"score": additive(), "normalizer": normalizers.Entmax(1.3)},
    "sigmoid": lambda: {"normalizer": "sigmoid", "attn_mask": normal(1, 2, 70, 75, seed=6)},
    "sparsemax and softcap": lambda: {
        "normalizer": "sparsemax",
        "softcap": 0.5,
        "attn_mask": masks.dense(normal(70, 75, seed=6)) & masks.causal("upper_left"),
    },
}


def leaves(dtype: torch.dtype = torch.float32, L: int = 70, S: int = 75) -> list[Tensor]:
    sizes = (2, 2, L, E), (2, 2, S, E), (2, 2, S, 3)
    return [normal(*size, seed=i, dtype=dtype).requires_grad_() for i, size in enumerate(sizes)]


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MADE)
def test_compiled(name: str, backend: str) -> None:
    torch._dynamo.reset()
    named = MADE[name]()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, **named, engine="fused")

    args = leaves()
    right, found = call(*args), torch.compile(call, fullgraph=True, backend=backend)(*args)
    torch.testing.assert_close(found, right)
    upstream = normal(*right.shape, seed=7)
    for a, b in zip(torch.autograd.grad(found, args, upstream), torch.autograd.grad(right, args, upstream)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("wanted", [(), (0,), (2,), (0, 1)])
def test_compiled_where_few_gradients_are_wanted(name: str, wanted: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    named, args = MADE[name](), [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves())]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, **named, engine="fused")

    right, found = call(*args), torch.compile(call, fullgraph=True, backend="eager")(*args)
    torch.testing.assert_close(found, right)
    ends = [args[i] for i in wanted]
    if ends:
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), ends) for t in (found, right))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_with_one_tensor_in_every_place() -> None:
    torch._dynamo.reset()
    x = normal(1, 2, 70, E).requires_grad_()
    for made in (MADE["causal"], MADE["alibi"]):
        named = made()

        def call(x: Tensor, named: dict[str, Any] = named) -> Tensor:
            return regard.attention(x, x, x, **named, engine="fused")

        right, found = call(x), torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(right.sum(), x))


@pytest.mark.slow
def test_compiled_gradients_to_parameters() -> None:
    torch._dynamo.reset()
    w_v, bias = normal(2, E, seed=5).requires_grad_(), normal(1, 2, 70, 75, seed=6).requires_grad_()
    args = [t.detach() for t in leaves()]

    def call(w_v: Tensor, bias: Tensor) -> Tensor:
        return regard.attention(*args, bias, score=scores.Additive(w_v), engine="fused")

    right, found = call(w_v, bias), torch.compile(call, fullgraph=True, backend="aot_eager")(w_v, bias)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (w_v, bias)) for t in (found, right))):
        assert b.abs().sum() > 0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_v = nn.Parameter(normal(E))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        score = scores.Additive(self.w_v)
        return regard.attention(query, key, value, is_causal=True, score=score, engine="fused")


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict: bool) -> None:
    torch._dynamo.reset()
    module, args = Attend(), tuple(t.detach() for t in leaves())
    exported = torch.export.export(module, args, strict=strict)
    assert "fused_forward" in exported.graph_module.print_readable(False)  # submodules included
    torch.testing.assert_close(exported.module()(*args), module(*args))
    other = tuple(t * 2 for t in args)
    torch.testing.assert_close(exported.module()(*other), module(*other))


@pytest.mark.parametrize("name", MADE)
def test_vmap_and_grad(name: str) -> None:
    named, args = MADE[name](), [torch.stack((t.detach(), 2 * t.detach(), t.detach() + 1)) for t in leaves()]

    def call(*one: Tensor) -> Tensor:
        return regard.attention(*one, **named, engine="fused")

    def loss(*one: Tensor) -> Tensor:
        return call(*one).square().sum()

    found = torch.func.vmap(call)(*args)
    torch.testing.assert_close(found, torch.stack([call(*one) for one in zip(*args)]))
    shared = torch.func.vmap(call, in_dims=(0, None, None))(args[0], args[1][0], args[2][0])
    torch.testing.assert_close(shared, torch.stack([call(q, args[1][0], args[2][0]) for q in args[0]]))
    gradients = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*args)
    for i, one in enumerate(zip(*args)):
        plain = [t.clone().requires_grad_() for t in one]
        for a, b in zip(gradients, torch.autograd.grad(loss(*plain), plain)):
            torch.testing.assert_close(a[i], b, rtol=1e-4, atol=1e-4)


def test_vmap_over_parameters() -> None:
    args = [t.detach() for t in leaves()]
    weights, bias = normal(3, E, seed=5), normal(3, 70, 75, seed=6)

    def call(w_v: Tensor, added: Tensor) -> Tensor:
        return regard.attention(*args, added, score=scores.Additive(w_v), engine="fused").square().sum()

    found = torch.func.vmap(torch.func.grad(call, (0, 1)))(weights, bias)
    for i in range(3):
        parts = weights[i].clone().requires_grad_(), bias[i].clone().requires_grad_()
        for a, b in zip(found, torch.autograd.grad(call(*parts), parts)):
            torch.testing.assert_close(a[i], b, rtol=1e-4, atol=1e-4)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("family", ["additive", "radial", "dot"])
@pytest.mark.parametrize("seen", ["all", "interval", "added"])
@pytest.mark.parametrize("rule", [(SOFTMAX, 0.0), (SIGMOID, 0.0), (ENTMAX, 1.5)])
def test_operators_keep_their_promises(family: str, seen: str, rule: tuple[int, float]) -> None:
    query, key, value = (t.detach() for t in leaves(L=9, S=10))
    weight = {"additive": normal(2, E), "radial": torch.ones(2, E), "dot": torch.empty(2, 0)}[family]
    start = stop = added = None
    if seen == "interval":
        start, stop = torch.zeros(1, 1, 9, dtype=torch.int64), torch.arange(9).view(1, 1, 9)
    if seen == "added":
        added = normal(1, 2, 9, 10)
    rest = (family, 0, 0.5, 1.5, *rule)
    sink = normal(2, 2, 1) if seen != "all" and rule[0] == SOFTMAX else None
    ends = (query, key, value, weight, start, stop, added, sink)
    torch.library.opcheck(operators.fused_forward.default, (*ends, *rest))
    output, peak, total = operators.fused_forward(*ends, *rest)
    torch.library.opcheck(
        operators.fused_backward.default, (normal(*output.shape), *ends, output, peak, total, added is not None, *rest)
    )


CHECKED: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "additive": lambda w: {"score": scores.Additive(w), "attn_mask": masks.window(3, 1, align="upper_left")},
    "concat": lambda w: {"score": scores.Concat(w, normal(E, 2 * E, dtype=F64)), "is_causal": True},
    "gaussian": lambda w: {"score": scores.Gaussian(w.abs() + 0.5), "attn_mask": masks.padding(torch.tensor([5, 0]))},
    "laplacian": lambda w: {"score": scores.Laplacian(w.abs() + 0.5), "is_causal": True},
    "epanechnikov": lambda w: {"score": scores.Epanechnikov(w.abs() + 4.0), "is_causal": True},
    "triangular": lambda w: {
        "score": scores.Triangular(w.abs() + 4.0),
        "attn_mask": masks.dilated(2, align="upper_left"),
    },
    "general": lambda w: {"score": scores.General(w.diag()), "attn_mask": masks.sinks(3)},
    "cosine": lambda w: {"score": scores.Cosine(w[:1].exp()), "attn_mask": masks.alibi(2, align="upper_left")},
    "bias": lambda w: {
        "attn_mask": masks.dense(w.view(1, 1, 1, E).repeat(1, 1, 6, 2)[..., :7]) & masks.causal("upper_left")
    },
    "relative": lambda w: {"attn_mask": masks.relative(w[:3].expand(2, 3), align="upper_left")},
    "softcap": lambda w: {
        "score": scores.Additive(w),
        "softcap": 0.7,
        "attn_mask": masks.alibi(w[:2], align="upper_left"),
    },
    "sinks": lambda w: {"normalizer": SoftmaxSink(w[:2]), "attn_mask": masks.padding(torch.tensor([5, 0]))},
    "sinks of a kernel": lambda w: {"normalizer": SoftmaxSink(w[:2]), "score": scores.Triangular(w.abs() + 4.0)},
    "dropout": lambda w: {"score": scores.Gaussian(w.abs() + 0.5), "dropout_p": 0.4, "normalizer": SoftmaxSink(w[0])},
    "sparsemax": lambda w: {"score": scores.General(w.diag()), "normalizer": "sparsemax", "is_causal": True},
    "entmax15": lambda w: {"score": scores.Additive(w), "normalizer": "entmax15"},
    "entmax": lambda w: {"score": scores.Gaussian(w.abs() + 0.5), "normalizer": normalizers.Entmax(1.3)},
    "sigmoid": lambda w: {"score": scores.Laplacian(w.abs() + 0.5), "normalizer": "sigmoid"},
    "sparse bias": lambda w: {
        "attn_mask": masks.dense(w.view(1, 1, 1, E).repeat(1, 1, 6, 2)[..., :7]),
        "normalizer": "entmax15",
    },
    "sparse softcap": lambda w: {
        "score": scores.General(w.diag()),
        "normalizer": "entmax15",
        "softcap": 0.7,
        "attn_mask": masks.dense(w.view(1, 1, 1, E).repeat(1, 1, 6, 2)[..., :7]) & masks.causal("upper_left"),
    },
    "sparse dropout": lambda w: {"score": scores.General(w.diag()), "normalizer": "entmax15", "dropout_p": 0.4},
}


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", CHECKED)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    args, weight = leaves(F64, 6, 7), normal(E, seed=9, dtype=F64).requires_grad_()

    def call(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(0)
        return regard.attention(query, key, value, **CHECKED[name](weight), engine="fused")

    assert torch.autograd.gradcheck(call, (*args, weight))


@pytest.mark.parametrize("name", MADE)
def test_second_derivatives_name_engines_that_have_them(name: str) -> None:
    args = leaves()
    output = regard.attention(*args, **MADE[name](), engine="fused")
    with pytest.raises(RuntimeError, match=r"engine 'fused' has no second derivative .*'streaming' or .*'reference'"):
        torch.autograd.grad(output.sum(), args, create_graph=True)
    torch.autograd.grad(output.sum(), args)  # the first is still to be had


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"normalizer": "argmax"}, "softmax, sigmoid and entmax only, not Argmax"),
        ({"score": lambda s, *_: s}, "no kernel for ScoreMod"),
    ],
)
def test_refusals(named: dict[str, Any], reason: str) -> None:
    args = leaves()
    with pytest.raises(ValueError, match=rf"engine must be able to run this call, got .*'fused': {reason}"):
        regard.attention(*args, **named, engine="fused")
    assert regard.explain(*args, **named).others["fused"] == f"unsupported, {reason}"


def test_dropout_is_explained_where_calls_are_traced() -> None:
    args, score = leaves(L=150, S=150), additive()
    assert "streaming, traced into torch operations" in str(regard.explain(*args, None, 0.5, score=score))
    assert "an error, as fused has no dropout" in str(regard.explain(*args, None, 0.5, score=score, engine="fused"))


def test_forward_mode_is_refused() -> None:
    args = tuple(t.detach() for t in leaves())
    with pytest.raises(ValueError, match=r"no forward-mode derivative .engines 'streaming' and 'reference' have"):
        torch.func.jvp(lambda *t: regard.attention(*t, score=additive(), engine="fused"), args, args)
    torch.func.jvp(lambda *t: regard.attention(*t, score=additive()), args, args)  # auto finds one that can


# Plans ----------------------------------------------------------------------------------------------------------------


def test_auto_takes_it_where_it_is_fastest() -> None:
    long, heads, tiny = normal(1, 1, 2048, 64), normal(1, 8, 2048, 64), normal(1, 1, 3, 2)
    assert regard.explain(long, long, long, score=scores.Additive(normal(64))).engine.name == "fused"
    local = masks.causal() & masks.window(128, 0)
    assert regard.explain(heads, heads, heads, local).engine.name == "fused"
    assert (
        regard.explain(heads[:, :, :32], heads[:, :, :32], heads[:, :, :32]).engine.name == "fused"
    )  # a prepared call
    assert regard.explain(tiny, tiny, tiny, score=scores.Additive(normal(2))).engine.name in ("streaming", "fused")


def test_a_plan_tells_how_much_slower_others_are() -> None:
    long = normal(1, 1, 2048, 64)
    told = str(regard.explain(long, long, long, score=scores.Additive(normal(64))))
    assert re.search(r"engine      fused, estimated [\d.,]+ ms", told)
    assert "does not grow with L×S" in told
    times = re.findall(r"  streaming: not chosen, estimated ([\d.e+]+)× slower \(([\d.,]+) ms\)", told)
    assert len(times) == 1
    assert float(times[0][0]) > 1
