"""Linear attention and fast weights: forms that agree, states that go on, padding that is not there."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import io
import itertools
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import across
from tiers import examples
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from regard.nn.linear.attention import LinearAttention, linear_attention
from regard.nn.linear.fast_weights import FastWeights, fast_weights
from regard.nn.linear.recurrence import LinearState

FORMS = ("parallel", "chunked", "recurrent", "auto")
F64 = torch.float64
every_form = pytest.mark.parametrize("form", FORMS)

#: Calls of both functions: name, function, options.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (linear_attention, {"is_causal": True}),
    "linear-relu": (linear_attention, {"is_causal": True, "feature_map": "relu"}),
    "linear-identity": (linear_attention, {"is_causal": True, "feature_map": "identity", "normalize": False}),
    "linear-both-ways": (linear_attention, {}),
    "sum": (fast_weights, {"rule": "sum"}),
    "delta": (fast_weights, {"rule": "delta", "feature_map": "elu", "feature_norm": "l1"}),
    "delta-unit": (fast_weights, {"rule": "delta", "feature_norm": "l2"}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_causal_kind = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linear-both-ways"])


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def ends(B: int, H: int, L: int, E: int, V: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(B, H, L, E, seed=seed), numbers(B, H, L, E, seed=seed + 1), numbers(B, H, L, V, seed=seed + 2)


def arguments(kind: str, tensors: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
    """Return function, tensors and options; the delta rule gets a β."""
    function, options = KINDS[kind]
    if kind.startswith("delta"):
        tensors = (*tensors, numbers(*tensors[1].shape[:3], seed=9).sigmoid())
    return function, tensors, options


def start(kind: str, B: int, H: int, E: int, V: int) -> LinearState:
    normalized = kind.startswith("linear") and "identity" not in kind
    return LinearState(numbers(B, H, E, V, seed=7), numbers(B, H, E, seed=8).abs() if normalized else None)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def flat(answer: Any) -> list[Tensor]:
    """Return output, matrix and, where there is one, normalizer."""
    return [t for t in (answer[0], *answer[1]) if t is not None]


def same(a: Any, b: Any) -> None:
    close(flat(a), flat(b))


@pytest.mark.campaign(keep=4)
@every_kind
@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(data=st.data())
def test_the_forms_agree(kind: str, data: st.DataObject) -> None:
    B, H, E, V = (data.draw(st.integers(least, 3), label=label) for label, least in zip("BHEV", (0, 1, 1, 0)))
    L, chunk = data.draw(st.integers(0, 11), label="L"), data.draw(st.integers(1, 12), label="chunk")
    function, tensors, options = arguments(kind, ends(B, H, L, E, V))
    if data.draw(st.booleans(), label="state"):
        options = options | {"state": start(kind, B, H, E, V)}
    if data.draw(st.booleans(), label="padded"):
        lengths = data.draw(st.lists(st.integers(0, L), min_size=B, max_size=B), label="lengths")
        options = options | {"valid_lens": torch.tensor(lengths, dtype=torch.int64)}
    right = function(*tensors, form="recurrent", return_state=True, **options)
    assert right[0].shape == (B, H, L, V) and right[0].isfinite().all()
    for form in FORMS:
        same(function(*tensors, form=form, chunk=chunk, return_state=True, **options), right)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_documents_are_as_if_each_were_alone(data: st.DataObject) -> None:
    B, L = data.draw(st.integers(1, 3), label="B"), data.draw(st.integers(0, 14), label="L")
    form, chunk = data.draw(st.sampled_from(FORMS), label="form"), data.draw(st.integers(1, 15), label="chunk")
    rows = st.lists(st.integers(-1, 2), min_size=L, max_size=L)
    documents = torch.tensor([data.draw(rows) for _ in range(B)], dtype=torch.int64).view(B, L)
    tensors, state = ends(B, 2, L, 3, 4), start("linear", B, 2, 3, 4) if data.draw(st.booleans()) else None
    call = partial(linear_attention, is_causal=True, return_state=True)
    found, end = call(*tensors, documents=documents, state=state, form=form, chunk=chunk)
    for b in range(B):
        cuts = [0, *(t for t in range(1, L) if documents[b, t] != documents[b, t - 1]), L]
        for first, last in itertools.pairwise(cuts):
            before = None if state is None or first else LinearState(*(each[b : b + 1] for each in state))
            alone = call(*(each[b : b + 1, :, first:last] for each in tensors), state=before)
            close(found[b : b + 1, :, first:last], alone[0])
            if last == L:
                same((found[:0], [each[b : b + 1] for each in end]), (found[:0], alone[1]))


@every_form
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
def test_linear_attention_is_the_quadratic_formula(form: str, feature_map: str) -> None:
    q, k, v = numbers(2, 3, 4, 5), numbers(2, 3, 7, 5, seed=1), numbers(2, 3, 7, 6, seed=2)
    phi = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    phi = phi if feature_map == "elu" else (q.relu(), k.relu())
    weights = torch.einsum("bhle,bhse->bhls", *phi)
    call = partial(linear_attention, q, k, v, feature_map=feature_map, form=form)
    close(call(), weights / weights.sum(-1, keepdim=True) @ v)
    close(call(normalize=False), weights @ v)


@across({"with_beta": [False, True], "rule": ["sum", "delta"], "form": FORMS})
def test_fast_weights_is_the_rule_step_by_step(form: str, rule: str, with_beta: bool) -> None:
    q, k, v = ends(2, 2, 9, 4, 3)
    k = k / k.norm(dim=-1, keepdim=True)
    beta = numbers(2, 2, 9, seed=5).sigmoid() if with_beta else None
    found, state = fast_weights(q, k, v, beta, rule=rule, form=form, chunk=4, return_state=True)
    for b, h in np.ndindex(2, 2):
        fast = np.zeros((3, 4))
        for t in range(9):
            key, value = k[b, h, t].numpy(), v[b, h, t].numpy()
            rate = 1.0 if beta is None else float(beta[b, h, t])
            fast += rate * np.outer(value - fast @ key if rule == "delta" else value, key)
            np.testing.assert_allclose(found[b, h, t].numpy(), fast @ q[b, h, t].numpy(), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(state.matrix[b, h].numpy(), fast.T, rtol=1e-10, atol=1e-10)


@every_form
def test_the_delta_rule_overwrites_what_the_sum_rule_mixes(form: str) -> None:
    key = torch.linalg.qr(numbers(4, 4)).Q[[0, 1, 2, 0, 2]].view(1, 1, 5, 4)
    value = numbers(1, 1, 5, 3, seed=1)
    _, state = fast_weights(key, key, value, rule="delta", form=form, chunk=2, return_state=True)
    close(key @ state.matrix, value[:, :, [3, 1, 4, 3, 4]])
    _, state = fast_weights(key, key, value, rule="sum", form=form, chunk=2, return_state=True)
    close(key[:, :, :1] @ state.matrix, value[:, :, :1] + value[:, :, 3:4])


@across(
    {
        "cuts": [[1, 10], [4, 7], [0, 11], [3, 3, 5]],
        "kind": [kind for kind in KINDS if kind != "linear-both-ways"],
        "form": FORMS,
    }
)
def test_a_state_goes_on_where_a_sequence_is_cut(form: str, kind: str, cuts: list[int]) -> None:
    function, tensors, options = arguments(kind, ends(2, 2, 11, 4, 3))
    whole = function(*tensors, form=form, chunk=3, return_state=True, **options)
    found, state = [], None
    for part in zip(*(t.split(cuts, 2) for t in tensors)):
        end, state = function(*part, form=form, chunk=3, state=state, return_state=True, **options)
        found.append(end)
    assert state is not None
    same((torch.cat(found, 2), state), whole)


def test_a_state_without_causality_adds_the_keys_before() -> None:
    q, k, v = ends(1, 2, 6, 4, 3)
    _, state = linear_attention(q, k[:, :, :2], v[:, :, :2], return_state=True)
    for form in FORMS:
        close(linear_attention(q, k[:, :, 2:], v[:, :, 2:], state=state, form=form), linear_attention(q, k, v))


def test_a_state_can_be_saved_and_detached() -> None:
    q, k, v = (t.requires_grad_() for t in ends(1, 2, 4, 3, 3))
    _, state = linear_attention(q, k, v, is_causal=True, return_state=True)
    assert state.matrix.requires_grad and not state.detach().matrix.requires_grad
    assert state.normalizer is not None and not state.detach()[1].requires_grad
    right = linear_attention(q, k, v, is_causal=True, state=state)
    for saved, load in ((tuple(state.detach()), True), (state.detach(), False)):
        file = io.BytesIO()
        torch.save(saved, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=load)
        assert torch.equal(linear_attention(q, k, v, is_causal=True, state=loaded), right)
    assert isinstance(loaded, LinearState)


@pytest.mark.campaign(keep=12)
@every_form
@every_kind
def test_gradients(form: str, kind: str) -> None:
    function, tensors, options = arguments(kind, ends(2, 1, 5, 3, 2))
    options = options | {"form": form, "chunk": 2, "valid_lens": torch.tensor([3, 5]), "return_state": True}
    carried = [t for t in start(kind, 2, 1, 3, 2) if t is not None]
    inputs = tuple(t.requires_grad_() for t in (*tensors, *carried))

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        own, state = given[: len(tensors)], LinearState(*given[len(tensors) :])
        return tuple(flat(function(*own, state=state, **options)))

    assert torch.autograd.gradcheck(call, inputs)


@across({"garbage": [math.nan, math.inf, 1e300], "kind": KINDS, "form": FORMS})
def test_padding_has_no_influence(form: str, kind: str, garbage: float) -> None:
    lengths = torch.tensor([2, 0, 5])

    def everything(value: float) -> list[Tensor]:
        function, tensors, options = arguments(kind, ends(3, 2, 5, 4, 3))
        beyond = torch.arange(5).view(5, 1) >= lengths.view(3, 1, 1, 1)
        hidden = [beyond if t.dim() == 4 else beyond[..., 0] for t in tensors[1:]]
        leaves = [tensors[0], *(torch.where(where, value, t) for t, where in zip(tensors[1:], hidden))]
        leaves = [t.requires_grad_() for t in leaves]
        output, state = function(*leaves, form=form, chunk=2, valid_lens=lengths, return_state=True, **options)
        (output.square().sum() + state.matrix.square().sum()).backward()
        grads = [t.grad for t in leaves if t.grad is not None]
        assert len(grads) == len(leaves)
        assert all((grad * where).eq(0).all() for grad, where in zip(grads[1:], hidden))
        return [*flat((output, state)), *grads]

    for a, b in zip(everything(garbage), everything(0.0)):
        assert torch.equal(a, b) and a.isfinite().all()


@every_form
@every_kind
def test_the_state_after_padding_is_that_after_the_last_real_key(form: str, kind: str) -> None:
    function, tensors, options = arguments(kind, ends(1, 2, 7, 4, 3))
    output, state = function(*tensors, form=form, chunk=2, valid_lens=torch.tensor([4]), return_state=True, **options)
    cut = function(*(t[:, :, :4] for t in tensors), form=form, chunk=2, return_state=True, **options)
    same((output[:, :, :4], state), cut)


@every_form
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_that_sees_nothing_reads_zeros(form: str, is_causal: bool) -> None:
    q, k, v = (t.requires_grad_() for t in ends(2, 2, 4, 3, 3))
    found = linear_attention(q, k, v, is_causal=is_causal, form=form, chunk=3, valid_lens=torch.tensor([0, 4]))
    assert found[0].eq(0).all() and found[1].ne(0).any()
    found.sum().backward()
    for t in (q, k, v):
        assert t.grad is not None and t.grad.isfinite().all() and t.grad[0].eq(0).all()


@every_form
def test_weights_that_are_all_zero_read_zeros(form: str) -> None:
    q, k, v = ends(1, 1, 6, 4, 3)
    q[:, :, 2] = -q[:, :, 2].abs()
    q.requires_grad_()
    found = linear_attention(q, k, v, feature_map="relu", is_causal=True, form=form, chunk=4)
    assert found[:, :, 2].eq(0).all() and found.isfinite().all()
    found.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_no_keys_at_all() -> None:
    q, empty = numbers(2, 3, 4, 5), numbers(2, 3, 0, 5)
    for form in FORMS:
        assert linear_attention(q, empty, empty, form=form).eq(0).all()
        assert linear_attention(q[:, :, :0], empty, empty, is_causal=True, form=form).shape == (2, 3, 0, 5)
        found, state = fast_weights(empty, empty, empty, rule="delta", form=form, return_state=True)
        assert found.shape == (2, 3, 0, 5) and state.matrix.eq(0).all()


@every_form
@every_causal_kind
def test_nothing_flows_back_in_time(form: str, kind: str) -> None:
    function, tensors, options = arguments(kind, ends(1, 2, 9, 4, 3))
    tensors = tuple(t.requires_grad_() for t in tensors)
    function(*tensors, form=form, chunk=4, **options)[:, :, :6].square().sum().backward()
    for t in tensors:
        assert t.grad is not None and t.grad[:, :, 6:].eq(0).all()
        assert t.grad[:, :, :6].ne(0).any()


@every_kind
def test_half_precision_is_summed_in_single(kind: str) -> None:
    function, tensors, options = arguments(kind, ends(1, 2, 300, 8, 4))
    narrow = tuple(t.to(torch.bfloat16) for t in tensors)
    found, state = function(*narrow, return_state=True, **options)
    right = function(*(t.double() for t in narrow), **options)
    assert found.dtype == torch.bfloat16 and state.matrix.dtype == torch.float32
    assert ((found.double() - right).abs() <= right.abs() * 2.0**-8 + right.abs().max() * 1e-5).all()


def test_features_far_below_zero_keep_their_proportions() -> None:
    q, k, v = ends(1, 1, 4, 2, 3)
    far = linear_attention(q.float(), k.float() - 40, v.float())  # elu(−40) + 1 is 0 in float32, and e^−40 is not
    torch.testing.assert_close(far.double(), linear_attention(q, k - 40, v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "sum", "delta"])
def test_chunks_have_no_loop_over_time(kind: str) -> None:
    counts = set()
    for length in (32, 128):
        function, tensors, options = arguments(kind, ends(1, 1, length, 3, 3))
        traced = make_fx(partial(function, form="chunked", chunk=length // 2, **options))(*tensors)
        counts.add(len(traced.graph.nodes))
    assert len(counts) == 1


def test_the_delta_rule_stays_bounded_over_a_long_sequence() -> None:
    torch.manual_seed(0)
    layer = FastWeights(8, 2)
    assert layer.feature_norm == "l1"
    output, state = layer(5 * numbers(1, 3000, 8, dtype=torch.float32), return_state=True)
    assert output.abs().max() < 100 and state.matrix.isfinite().all()


@every_kind
def test_transforms(kind: str) -> None:
    function, tensors, options = arguments(kind, ends(3, 2, 5, 4, 3))
    call = lambda *each: function(*(t.unsqueeze(0) for t in each), chunk=2, **options).squeeze(0)  # noqa: E731
    close(torch.func.vmap(call)(*tensors), function(*tensors, chunk=2, **options))
    grad = torch.func.grad(lambda v: function(*tensors[:2], v, *tensors[3:], chunk=2, **options).square().sum())
    tensors[2].requires_grad_()
    function(*tensors, chunk=2, **options).square().sum().backward()
    close(grad(tensors[2].detach()), tensors[2].grad)


@pytest.mark.campaign
@pytest.mark.slow
def test_a_compiled_step_carries_its_state() -> None:
    layer = FastWeights(8, 2, dtype=F64)
    torch._dynamo.reset()
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = numbers(2, 4, 8)
    state = None
    for t in range(4):
        found, state = step(x[:, t : t + 1], state=state, return_state=True)
    assert isinstance(state, LinearState)
    close(found, layer(x)[:, -1:])


@pytest.mark.parametrize("kind", [LinearAttention, FastWeights])
def test_a_feature_map_that_is_a_module_is_trained_along(kind: Any) -> None:
    learned = torch.nn.Sequential(torch.nn.Linear(4, 6, dtype=F64), torch.nn.Softplus())
    layer = kind(8, 2, feature_map=learned, dtype=F64)
    output, state = layer(numbers(2, 5, 8), return_state=True)
    assert state.matrix.shape == (2, 2, 6, 4)
    output.square().sum().backward()
    assert learned[0].weight.grad.ne(0).any()
    assert "feature_map='Sequential'" in repr(layer)


def test_layers_print_what_they_are() -> None:
    told = repr(LinearAttention(8, 2, feature_map="relu", form="chunked"))
    assert "LinearAttention(\n  8, num_heads=2, feature_map='relu', form='chunked'\n" in told
    assert "8, num_heads=2, feature_map='elu', rule='sum'" in repr(FastWeights(8, 2, rule="sum"))
    assert FastWeights(8, 2, rule="sum").beta_proj is None and FastWeights(8, 2, rule="sum").feature_norm is None
    assert all("bias" not in name for name in LinearAttention(8, 2, bias=False).state_dict())


Q, K, V = numbers(2, 3, 4, 5), numbers(2, 3, 4, 5), numbers(2, 3, 4, 6)
STATE = LinearState(numbers(2, 3, 5, 6), numbers(2, 3, 5))


def linear(query: Any = Q, key: Any = K, value: Any = V, **options: Any) -> Any:
    return lambda: linear_attention(query, key, value, **options)


def fast(*beta: Any, **options: Any) -> Any:
    return lambda: fast_weights(Q, K, V, *beta, **options)


def layer(kind: Any, *shape: int, heads: Any = 2, lens: Tensor | None = None, **options: Any) -> Any:
    return lambda: kind(8, heads, **options)(numbers(*shape), valid_lens=lens)


FLOATS, MAPS = (
    "be a float tensor (B, H, length, width), got",
    "feature_map must be one of 'elu', 'identity', 'relu', got",
)
Row = tuple[Any, type[Exception], str]
LINEAR: list[Row] = [
    (linear(None), TypeError, f"query must {FLOATS} None."),
    (linear(key=K.long()), TypeError, f"key must {FLOATS} an int64 tensor of shape (2, 3, 4, 5)."),
    (linear(key=K[0]), ValueError, "key must have shape (B, H, length, width), got (3, 4, 5)."),
    (linear(key=K.to("meta")), ValueError, "key must be on query's device cpu, got meta."),
    (linear(value=V[:1]), ValueError, "value must have query's batch and heads (2, 3), got (1, 3) (query (2, 3, 4, 5), value (1, 3, 4, 6))."),
    (linear(key=K[..., :2]), ValueError, "key must have query's head width 5, got 2 (query (2, 3, 4, 5), key (2, 3, 4, 2))."),
    (linear(value=V[:, :, :2]), ValueError, "value must have key's length 4, got 2 (key (2, 3, 4, 5), value (2, 3, 2, 6))."),
    (linear(Q[:, :, 1:], is_causal=True), ValueError, "key must have query's length 3, one key for each query of a causal call, got 4 (query (2, 3, 3, 5), key (2, 3, 4, 5))."),
    (linear(value=V.float()), TypeError, "value must have query's dtype torch.float64, got torch.float32."),
    (linear(is_causal=1), TypeError, "is_causal must be a bool, got 1."),
    (linear(feature_map=3), TypeError, "feature_map must be a name or a function, got 3."),
    (linear(feature_map="rel"), ValueError, f"{MAPS} 'rel' (did you mean 'relu'?)."),
    (linear(feature_map=torch.sum), ValueError, "feature_map must return a torch.float64 tensor (..., F) for an input of shape (2, 3, 4, 5), got a float64 tensor of shape ()."),
    (linear(is_causal=True, documents=torch.ones(2, 3).long()), ValueError, "documents must be an integer tensor (L,) or (B, L), here (2, 4), got an int64 tensor of shape (2, 3)."),
    (linear(documents=torch.ones(2, 4).long()), ValueError, "documents must be None in a non-causal call, got (2, 4)."),
    (linear(form="fast"), ValueError, "form must be one of 'auto', 'chunked', 'parallel', 'recurrent', got 'fast' (did you mean 'auto'?)."),
    (linear(chunk=0), ValueError, "chunk must be an int of at least 1, got 0."),
    (linear(valid_lens=torch.ones(2, 4).long()), ValueError, "valid_lens must have shape (2,), got (2, 4)."),
    (linear(valid_lens=[1, 2]), TypeError, "valid_lens must be an integer tensor (2,), got an object of type list."),
    (linear(state=Q), TypeError, "state must be a LinearState, or a pair (matrix, normalizer), got a float64 tensor of shape (2, 3, 4, 5)."),
    (linear(state=(Q, Q)), ValueError, "state must hold a matrix (B, H, E, V) = (2, 3, 5, 6), got (2, 3, 4, 5)."),
    (linear(state=(STATE[0], None)), ValueError, "state must hold a normalizer (B, H, E) = (2, 3, 5), got None."),
    (linear(state=STATE, normalize=False), ValueError, "state must hold no normalizer: this call does not normalize, got a float64 tensor of shape (2, 3, 5)."),
]  # fmt: skip
FAST: list[Row] = [
    (fast(rule="dleta"), ValueError, "rule must be one of 'delta', 'sum', got 'dleta' (did you mean 'delta'?)."),
    (fast(feature_norm="l3"), ValueError, "feature_norm must be one of 'l1', 'l2', None, got 'l3'."),
    (fast(1.0), TypeError, "beta must be a float tensor (2, 3, 4), got 1.0."),
    (fast(Q), ValueError, "beta must have shape (2, 3, 4), got (2, 3, 4, 5)."),
]  # fmt: skip
LAYER: list[Row] = [
    (layer(LinearAttention, 2, 5, 8, heads=3), ValueError, "LinearAttention: num_heads must divide embed_dim 8, got 3."),
    (layer(LinearAttention, 2, 5, 8, feature_map="exp"), ValueError, f"LinearAttention: {MAPS} 'exp'."),
    (layer(FastWeights, 2, 5, 8, rule="hebb"), ValueError, "FastWeights: rule must be one of 'delta', 'sum', got 'hebb'."),
    (layer(FastWeights, 2, 5, 7), ValueError, "FastWeights: query must have shape (B, N, 8), got (2, 5, 7)."),
    (layer(LinearAttention, 2, 5, 8, kdim=6), ValueError, "LinearAttention: key must have shape (B, N, 6), got (2, 5, 8)."),
    (layer(LinearAttention, 2, 5, 8, lens=torch.ones(3).long()), ValueError, "LinearAttention: valid_lens must have shape (2,), got (3,)."),
]  # fmt: skip
WRONG = [(call, kind, f"linear_attention: {message}") for call, kind, message in LINEAR]
WRONG += [(call, kind, f"fast_weights: {message}") for call, kind, message in FAST] + LAYER


@pytest.mark.parametrize(("call", "kind", "message"), WRONG, ids=[message[:60] for _, _, message in WRONG])
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()
