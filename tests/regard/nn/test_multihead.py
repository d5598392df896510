"""Multi-head attention: torch's in everything that torch gets right, and what it gets wrong."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from pairwise import across
from python_calls import python_calls
from torch import Tensor, nn

import regard
from regard import AuxRequest, masks
from regard.nn import GeneralAttention, Rotary, TransformerEncoderLayer
from regard.nn.heads.multihead import MultiheadAttention
from regard.nn.kv_cache import KVCache

B, L, S, E, H = 2, 4, 5, 12, 3
INF = float("inf")

#: Constructors' arguments, each checked with every mask and layout below.
BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 7, "vdim": 5},
    "width of keys": {"kdim": 7},
    "learned rows": {"add_bias_kv": True},
    "zero row": {"add_zero_attn": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7, "vdim": 5},
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(kind: str, batched: bool) -> dict[str, Any]:
    """Return masks of one kind; no row is hidden entirely, of which torch makes NaN."""
    pairs = torch.ones(L, S, dtype=torch.bool).triu(2)
    each = pairs ^ (normal(B * H if batched else H, L, S, seed=4) > 1)
    each[..., 0] = False
    padding = torch.tensor([[False, False, False, True, True], [False] * S])
    padding = padding if batched else padding[0]
    added, some = normal(L, S, seed=5), torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -INF)
    return {
        "none": {},
        "bool pairs": {"attn_mask": pairs},
        "float pairs": {"attn_mask": added.masked_fill(pairs, -INF)},
        "bool pairs of heads": {"attn_mask": each},
        "float pairs of heads": {"attn_mask": normal(*each.shape, seed=6).masked_fill(each, -INF)},
        "bool padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": some + normal(*some.shape, seed=7)},
        "bool both": {"key_padding_mask": padding, "attn_mask": pairs},
        "float both": {"key_padding_mask": some, "attn_mask": added},
    }[kind]


def twins(**named: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Return torch's module and ours with the same parameters, none of them zero."""
    torch.manual_seed(0)
    right = nn.MultiheadAttention(E, H, dtype=torch.float64, **named)
    for i, parameter in enumerate(right.parameters()):
        parameter.data = normal(*parameter.shape, seed=10 + i) / 2
    ours = MultiheadAttention(E, H, dtype=torch.float64, **named)
    ours.load_state_dict(right.state_dict())
    return right, ours


def inputs(layer: Any, layout: str) -> list[Tensor]:
    found = [normal(B, n, width, seed=i) for i, (n, width) in enumerate([(L, E), (S, layer.kdim), (S, layer.vdim)])]
    found = [x[0] if layout == "unbatched" else x if layer.batch_first else x.transpose(0, 1) for x in found]
    return [x.clone().requires_grad_() for x in found]


def gradients(layer: nn.Module, ends: list[Tensor], output: Tensor) -> list[Tensor]:
    total = (output * normal(*output.shape, seed=3)).sum()
    return list(torch.autograd.grad(total, [*ends, *layer.parameters()], materialize_grads=True))


@across(
    {
        "build": BUILDS,
        "kind": [
            "none",
            "bool pairs",
            "float pairs",
            "bool pairs of heads",
            "float pairs of heads",
            "bool padding",
            "float padding",
            "bool both",
            "float both",
        ],
        "layout": ["batch first", "batch second", "unbatched"],
    }
)
def test_it_agrees_with_torch(build: str, kind: str, layout: str) -> None:
    right, ours = twins(**BUILDS[build], batch_first=layout == "batch first")
    called = given(kind, layout != "unbatched")
    ends, others = inputs(right, layout), inputs(right, layout)
    a, a_weights = right(*ends, **called)
    b, b_weights = ours(*others, **called)
    assert a.shape == b.shape and a_weights.shape == b_weights.shape
    torch.testing.assert_close(b, a)
    torch.testing.assert_close(b_weights, a_weights)
    for x, y in zip(gradients(ours, others, b), gradients(right, ends, a)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("layout", ["batch second", "unbatched"])
def test_weights_as_torch_returns_them(layout: str, need: bool, average: bool) -> None:
    right, ours = twins(add_zero_attn=True)
    ends = inputs(right, layout)
    named = {"need_weights": need, "average_attn_weights": average}
    (a, a_weights), (b, b_weights) = right(*ends, **named), ours(*ends, **named)
    torch.testing.assert_close(b, a)
    assert (a_weights is None) == (b_weights is None) == (not need)
    if need:
        assert a_weights.shape == b_weights.shape
        torch.testing.assert_close(b_weights, a_weights)


@pytest.mark.parametrize("training", [True, False])
def test_self_attention_agrees_with_torch(training: bool) -> None:
    right, ours = (module.train(training) for module in twins(batch_first=True))
    for x, context in itertools.product([normal(B, S, E), normal(B, S, E, seed=1)], [torch.no_grad, torch.enable_grad]):
        with context():
            torch.testing.assert_close(ours(x, x, x)[0], right(x, x, x)[0])
    memory = normal(B, S, E, seed=2)
    torch.testing.assert_close(ours(x, memory, memory)[0], right(x, memory, memory)[0])
    torch.testing.assert_close(ours(x, x, memory)[0], right(x, x, memory)[0])


@pytest.mark.parametrize("build", BUILDS)
def test_state_dict_and_seed_are_torchs(build: str) -> None:
    torch.manual_seed(5)
    right = nn.MultiheadAttention(E, H, **BUILDS[build])
    torch.manual_seed(5)
    ours = MultiheadAttention(E, H, **BUILDS[build])
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in right.named_parameters()]
    for (name, a), b in zip(ours.state_dict().items(), right.state_dict().values()):
        assert torch.equal(a, b), name
    torch.manual_seed(6)
    other = nn.MultiheadAttention(E, H, **BUILDS[build])
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), ours.parameters()))


@pytest.mark.parametrize("need", [True, False])
def test_a_row_that_sees_nothing_is_zero(need: bool) -> None:
    _, ours = twins(batch_first=True)
    x = normal(B, S, E).requires_grad_()
    padding = torch.tensor([[True] * S, [False] * S])
    output, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need)
    torch.testing.assert_close(output[0], ours.out_proj.bias.expand(S, E))
    assert output.isfinite().all()
    if need:
        assert torch.equal(weights[0], torch.zeros_like(weights[0]))
    assert all(g.isfinite().all() for g in gradients(ours, [x], output))


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF])
@pytest.mark.parametrize("kind", ["self", "keys", "keys and queries"])
def test_garbage_in_padding_reaches_nothing(garbage: float, kind: str) -> None:
    _, ours = twins()
    padding = torch.tensor([[False, False, True, True, True], [False] * S])
    gone = padding.T.unsqueeze(-1)

    def all_of(value: float) -> list[Tensor]:
        rows, other, memory = (torch.where(gone, value, normal(S, B, E, seed=i)).requires_grad_() for i in range(3))
        query = {"self": rows, "keys": normal(S, B, E, seed=9), "keys and queries": rows}[kind]
        value_rows = rows if kind == "self" else memory
        output, weights = ours(query, other if kind == "keys" else rows, value_rows, key_padding_mask=padding)
        if kind != "keys":
            output = torch.where(gone, 0.0, output)
        return [output.sum(), weights[:, 0], *gradients(ours, [rows, other, memory], output)]

    for a, b in zip(all_of(garbage), all_of(0.0)):
        assert torch.equal(a, b)


def test_garbage_in_keys_that_a_matrix_hides_reaches_nothing() -> None:
    _, ours = twins(batch_first=True)
    pairs = torch.zeros(L, S, dtype=torch.bool)
    pairs[:, 3:] = True
    query, key = normal(B, L, E), normal(B, S, E, seed=1)
    dirty = torch.where(pairs[0].unsqueeze(-1), torch.nan, key)
    for mask in (pairs, pairs.expand(B * H, L, S), torch.zeros(L, S).masked_fill(pairs, -INF)):
        found = [gradients(ours, [], ours(query, k, k, attn_mask=mask)[0]) for k in (dirty, key)]
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("build", ["plain", "all"])
def test_is_causal_means_it(build: str, need: bool) -> None:
    right, ours = twins(**BUILDS[build], batch_first=True)
    ends = inputs(right, "batch first")
    later = torch.ones(L, S, dtype=torch.bool).triu(1)
    want = right(*ends, attn_mask=later)[0]
    torch.testing.assert_close(ours(*ends, is_causal=True, need_weights=need)[0], want)
    torch.testing.assert_close(ours(*ends, is_causal=True, attn_mask=later, need_weights=need)[0], want)
    added = normal(L, S, seed=8)
    want = right(*ends, attn_mask=added.masked_fill(later, -INF))[0]
    torch.testing.assert_close(ours(*ends, is_causal=True, attn_mask=added, need_weights=need)[0], want)


def test_weights_are_those_before_dropout_unless_torchs_are_asked_for() -> None:
    torch.manual_seed(0)
    ours = MultiheadAttention(E, H, dropout=0.5, batch_first=True, bias=False).train()
    x = torch.randn(B, 40, E)
    _, weights = ours(x, x, x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 40))
    torch.testing.assert_close(weights, ours.eval()(x, x, x)[1])
    theirs = MultiheadAttention(E, H, dropout=0.5, batch_first=True, bias=False, dropped_weights=True).train()
    theirs.load_state_dict(ours.state_dict())
    output, dropped = theirs(x, x, x, average_attn_weights=False)
    kept = dropped != 0
    assert 0.45 < kept.double().mean() < 0.55
    full = ours(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(dropped[kept], 2 * full[kept])
    values = (x @ ours.in_proj_weight[2 * E :].T).unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close(output, (dropped @ values).transpose(1, 2).flatten(2) @ ours.out_proj.weight.T)
    torch.testing.assert_close(theirs.eval()(x, x, x)[1], weights)


def repeated(rows: Tensor, groups: int) -> Tensor:
    """Return the rows of four heads of width 4, where as many groups share theirs."""
    return rows.unflatten(0, (groups, 4)).repeat_interleave(4 // groups, 0).flatten(0, 1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries_are_keys_repeated(groups: int) -> None:
    torch.manual_seed(0)
    grouped = MultiheadAttention(16, 4, batch_first=True, num_kv_heads=groups, dtype=torch.float64)
    right = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(grouped.in_proj_bias)
    state = dict(grouped.state_dict())
    if groups < 4:
        width, bias = 4 * groups, state["in_proj_bias"]
        assert state["k_proj_weight"].shape == (width, 16) and len(bias) == 16 + 2 * width
        parts = [(state.pop(f"{name}_proj_weight"), part) for name, part in zip("qkv", bias.split([16, width, width]))]
        each = [parts[0], *(tuple(repeated(t, groups) for t in pair) for pair in parts[1:])]
        state["in_proj_weight"], state["in_proj_bias"] = (torch.cat(rows) for rows in zip(*each))
    right.load_state_dict(state)
    x, memory = normal(B, L, 16), normal(B, S, 16, seed=1)
    for got, want in zip(grouped(x, memory, memory), right(x, memory, memory)):
        torch.testing.assert_close(got, want)


class Turn(nn.Module):
    """A rotary encoding of one angle: pairs of features turn by the position."""

    def forward(self, x: Tensor, offset: int) -> Tensor:
        angle = torch.arange(offset, offset + x.shape[2], dtype=x.dtype).unsqueeze(-1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@across(
    {
        "capacity": [None, 7],
        "grad": [True, False],
        "steps": [[1] * 7, [3, 1, 3]],
        "named": [
            {},
            {"num_kv_heads": 1},
            {"rotary": Turn()},
            {"rotary": Rotary(4)},
            {"add_bias_kv": True, "add_zero_attn": True},
            {"score": "cosine", "normalizer": "sparsemax"},
        ],
    }
)
def test_decoding_step_by_step_is_the_whole_call(
    named: Any, steps: list[int], grad: bool, capacity: int | None
) -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **named)
    x, cache = normal(B, 7, 16), KVCache(capacity)
    padding = torch.tensor([[True, True] + [False] * 5, [False] * 7])
    with torch.set_grad_enabled(grad):
        want, want_weights = layer(x, x, x, key_padding_mask=padding, is_causal=True)
        found, done = [], 0
        for part in x.split(steps, 1):
            done += part.shape[1]
            output, weights = layer(part, part, part, key_padding_mask=padding[:, :done], is_causal=True, cache=cache)
            extra = weights.shape[-1] - done
            rows = want_weights[:, done - part.shape[1] : done]
            torch.testing.assert_close(weights, torch.cat([rows[..., :done], rows[..., 7 : 7 + extra]], -1))
            found.append(output)
    torch.testing.assert_close(torch.cat(found, 1), want)
    assert len(cache) == 7 and cache.key.shape == (B, named.get("num_kv_heads", 4), 7, 4)
    if grad:
        for a, b in zip(gradients(layer, [], torch.cat(found, 1)), gradients(layer, [], want)):
            torch.testing.assert_close(a, b)
    cache.reset()
    one = x[:1], x[:1], x[:1]
    torch.testing.assert_close(layer(*one, is_causal=True, cache=cache)[0], layer(*one, is_causal=True)[0])


def test_a_cache_can_be_reordered_and_says_what_does_not_fit() -> None:
    cache = KVCache(3)
    assert repr(cache) == "KVCache(capacity=3): 0 steps"
    with torch.no_grad():
        key = torch.arange(4.0).view(2, 1, 2, 1)
        cache.append(key, -key)
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.key[:, 0, :, 0].tolist() == [[2, 3], [2, 3], [0, 1]]
    assert cache.value[:, 0, :, 0].tolist() == [[-2, -3], [-2, -3], [0, -1]]
    for wrong, error in [
        (torch.zeros(3, 1, 2, 1), "KVCache: key must fit into its capacity of 3 steps, got step 4."),
        (torch.zeros(2, 1, 1, 1), "KVCache: key must have the shape (3, 1, N, 1) of earlier steps, got (2, 1, 1, 1)."),
        (torch.zeros(3, 1, 1, 1, dtype=torch.float64), "KVCache: key must have the dtype and device of earlier steps, torch.float32 on cpu, got torch.float64 on cpu."),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as caught:
            cache.append(wrong, wrong)
        assert str(caught.value) == error
    with pytest.raises(ValueError, match="the cache is empty"):
        _ = KVCache().key
    for capacity, kind in [(0, ValueError), (1.5, TypeError), (True, TypeError)]:
        with pytest.raises(kind, match="KVCache: capacity must be an int of at least 1, or None, got"):
            KVCache(capacity)  # type: ignore[arg-type]


def test_rotary_sees_positions() -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(E, H, batch_first=True, rotary=Turn(), dtype=torch.float64)
    x = normal(B, S, E)
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (x @ layer.in_proj_weight.T).chunk(3, -1))
    turn = Turn()
    want = regard.attention(turn(q, 0), turn(k, 0), v).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x, x, x)[0], want)


def test_scores_that_learn_are_part_of_it() -> None:
    layer = MultiheadAttention(E, H, score=GeneralAttention(4), batch_first=True)
    assert "score.weight" in layer.state_dict()
    x = torch.randn(B, S, E)
    layer(x, x, x)[0].square().sum().backward()
    assert layer.score.weight.grad.abs().sum() > 0
    assert "normalizer='sparsemax'" in repr(MultiheadAttention(E, H, normalizer="sparsemax"))


def test_aux_is_told_instead_of_weights() -> None:
    right, ours = twins(batch_first=True)
    ends = inputs(right, "batch first")
    output, aux = ours(*ends, return_aux=AuxRequest(entropy=True, topk=2, weights=True))
    assert torch.equal(output, ours(*ends, need_weights=False)[0])
    assert aux.entropy.shape == (B, H, L) and aux.topk.indices.shape == (B, H, L, 2)
    torch.testing.assert_close(aux.weights.mean(1), right(*ends)[1])
    _, aux = ours(*(x[0] for x in ends), return_aux=AuxRequest(lse=True, topk=2))
    assert aux.lse.shape == (H, L) and aux.topk.weights.shape == (H, L, 2)


def test_masks_of_this_library_show_rather_than_hide() -> None:
    _, ours = twins()
    x = normal(S, B, E)
    far = (torch.arange(S).unsqueeze(1) - torch.arange(S)).abs() > 1
    torch.testing.assert_close(ours(x, x, x, attn_mask=masks.window(1, 1)), ours(x, x, x, attn_mask=far))


def test_nested_tensors() -> None:
    right, ours = twins(batch_first=True)
    rows = [normal(3, E), normal(5, E, seed=1)]
    nested = torch.nested.nested_tensor(rows)
    output, weights = ours(nested, nested, nested)
    for row, found in zip(rows, output.unbind()):
        torch.testing.assert_close(found, right(row, row, row)[0])
    assert weights.shape == (2, 5, 5) and torch.equal(weights[0, :, 3:], torch.zeros(5, 2, dtype=torch.float64))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("lengths", [[0], [0, 0], [3, 0, 1], [4, 2]], ids=str)
def test_nested_tensors_through_a_layer(lengths: list[int], layout: torch.layout) -> None:
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64)
    rows = [normal(n, E, seed=i) for i, n in enumerate(lengths)]
    nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
    output = layer(nested)
    assert output.layout == layout
    for row, found in zip(rows, output.unbind(), strict=True):
        torch.testing.assert_close(found, layer(row) if len(row) else row)
    sum(found.sum() for found in output.unbind()).backward()
    assert nested.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    right, ours = twins(batch_first=True)
    x = normal(B, S, E)
    narrow = copy.deepcopy(ours).to(dtype)
    output, weights = narrow(*[x.to(dtype)] * 3, key_padding_mask=torch.zeros(B, S, dtype=torch.bool))
    assert output.dtype == weights.dtype == dtype
    accuracy = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), right(x, x, x)[0], rtol=accuracy, atol=accuracy)


def test_autocast_gives_torchs_dtypes() -> None:
    torch.manual_seed(0)
    right = nn.MultiheadAttention(E, H, batch_first=True)
    ours = MultiheadAttention(E, H, batch_first=True)
    ours.load_state_dict(right.state_dict())
    x = torch.randn(B, S, E)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(ours(x, x, x), right(x, x, x)):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_empty_calls() -> None:
    _, ours = twins(batch_first=True)
    for b, n, s in [(0, 3, 3), (2, 0, 3), (2, 3, 0)]:
        output, weights = ours(normal(b, n, E), normal(b, s, E), normal(b, s, E))
        assert output.shape == (b, n, E) and weights.shape == (b, n, s)


X = torch.zeros(B, S, E)


def called(*args: Any, **named: Any) -> Any:
    first = named.pop("batch_first", True)
    return lambda: MultiheadAttention(E, H, batch_first=first)(*args, **named)


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda: MultiheadAttention(10, 3), ValueError, "num_heads must divide embed_dim 10, got 3."),
    (lambda: MultiheadAttention(12, 4, num_kv_heads=3), ValueError, "num_kv_heads must divide num_heads 4, got 3."),
    (lambda: MultiheadAttention(0, 1), ValueError, "embed_dim must be an int of at least 1, got 0."),
    (lambda: MultiheadAttention(8.0, 1), TypeError, "embed_dim must be an int of at least 1, got 8.0."),
    (lambda: MultiheadAttention(8, 2, dropout=2), ValueError, "dropout must be a probability in [0, 1], got 2."),
    (called(X[..., 1:], X, X), ValueError, "query must have shape (B, N, 12), got (2, 5, 11)."),
    (called(X[..., 1:], X, X, batch_first=False), ValueError, "query must have shape (N, B, 12), got (2, 5, 11)."),
    (called(X[0], X, X), ValueError, "key must have shape (N, 12), got (2, 5, 12) (query (5, 12))."),
    (called(X, X[:1], X[:1]), ValueError, "key must have shape (B, N, 12), got (1, 5, 12) (query (2, 5, 12))."),
    (called(X, X, X[:, 1:]), ValueError, "value must have the batch size and length of key (2, 5, 12), got (2, 4, 12)."),
    (called(X, X, None), TypeError, "value must be a float tensor (B, N, 12), got None."),
    (called(X, X, X, X[..., 0].bool().T), ValueError, "key_padding_mask must have shape (B, S) = (2, 5), got (5, 2)."),
    (called(X, X, X, X[..., 0].long()), TypeError, "key_padding_mask must be a bool tensor (True hides) or a float tensor (added to the score), got an int64 tensor of shape (2, 5)."),
    (called(X, X, X, attn_mask=X[..., 0]), ValueError, "attn_mask must have shape (L, S) = (5, 5) or (B·H, L, S) = (6, 5, 5), got (2, 5)."),
    (lambda: MultiheadAttention(E, H, batch_first=True)(*[torch.nested.nested_tensor([])] * 3), ValueError, "query must hold at least one sequence, got an empty nested tensor."),
    (called(X, X, X, attn_mask="causal"), TypeError, "attn_mask must be a bool tensor (True hides) or a float tensor (added to the score), or a Mask, got 'causal'."),
    (lambda: MultiheadAttention(E, H, add_zero_attn=True)(X, X, X, attn_mask=masks.causal()), TypeError, "attn_mask must be a tensor with add_bias_kv or add_zero_attn, got an object of type Band."),
])  # fmt: skip
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == f"MultiheadAttention: {message}"


@pytest.mark.parametrize(
    ("rows", "padding", "gradients", "most"),
    [(16, False, False, 12), (16, False, True, 16), (4, False, False, 13), (16, True, False, 32)],
)
def test_a_small_call_is_few_calls_of_python(rows: int, padding: bool, gradients: bool, most: int) -> None:
    layer, x = MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, rows, 32)
    hidden = torch.arange(rows) >= torch.tensor([[rows], [3]]) if padding else None
    with torch.set_grad_enabled(gradients):
        assert 0 < python_calls(lambda: layer(x, x, x, key_padding_mask=hidden, need_weights=False)) <= most
