"""Where ours differs from torch on purpose: each row of docs/differences.md, shown on both."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import regard
from regard import masks
from regard.nn import MultiheadAttention, TransformerEncoder, TransformerEncoderLayer

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
INF = float("inf")
B, H, L, S, E = 2, 4, 5, 7, 8

sdpa = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Row:
    """A row of the page: what of, what torch does, what ours does."""

    what: str
    torch: str
    ours: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.torch} | {self.ours} |"


#: The tables by their headings, filled by the decorator below in the order of this file.
TABLES: dict[str, list[Row]] = {}


def differs(heading: str, what: str, torch: str, ours: str) -> Callable[[Any], Any]:
    """Register the difference that a test shows."""
    TABLES.setdefault(heading, []).append(Row(what, torch, ours))
    return lambda test: test


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Let torch warn of what it is about to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(wide: int = E) -> tuple[Tensor, Tensor, Tensor]:
    return normal(B, H, L, E), normal(B, H, S, E, seed=1), normal(B, H, S, wide, seed=2)


def rejects(call: Callable[[], Any], kind: type[Exception], message: str = "") -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert caught.type is kind


FUNCTION = "`regard.attention` and `F.scaled_dot_product_attention`"


@differs(
    FUNCTION,
    "invalid arguments",
    "`RuntimeError`, `IndexError` or `NotImplementedError` from the kernel",
    "`ValueError` or `TypeError` before any computation, naming the argument, what it must be and what it is",
)
def test_classes_of_errors() -> None:
    query, key, value = qkv()
    wrong: list[tuple[tuple[Tensor, ...], type[Exception]]] = [
        ((query[0, 0, 0], key, value), ValueError),
        ((query, key[..., 1:], value[..., 1:]), ValueError),
        ((query, key[:, 1:], value[:, 1:]), ValueError),
        ((query, key.double(), value), TypeError),
        ((query.int(), key.int(), value.int()), TypeError),
        ((query.cfloat(), key.cfloat(), value.cfloat()), TypeError),
        ((query, key, value, torch.ones(L, S).int()), TypeError),
        ((query, key, value, torch.ones(L, S + 1)), ValueError),
        ((query, key, value, torch.ones(L, S).to_sparse()), TypeError),
    ]
    for args, kind in wrong:
        with pytest.raises((RuntimeError, IndexError)):
            sdpa(*args)
        rejects(lambda args=args: regard.attention(*args), kind, r"^attention: \w+ must .*, got ")


@differs(
    FUNCTION,
    "`is_causal=True` together with `attn_mask`",
    "the fused CPU kernel applies both; other kernels, and a `CausalBias`, raise an error",
    "both are applied",
)
def test_causal_with_a_mask() -> None:
    query, key, value = qkv()
    mask, bias = normal(L, S, seed=3), causal_lower_right(L, S)
    want = sdpa(query, key, value, mask.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), -INF))
    torch.testing.assert_close(sdpa(query, key, value, mask, is_causal=True), want)
    torch.testing.assert_close(regard.attention(query, key, value, mask, is_causal=True), want)
    with sdpa_kernel([SDPBackend.MATH]):
        rejects(lambda: sdpa(query, key, value, mask, is_causal=True), RuntimeError, "Explicit attn_mask")
    rejects(lambda: sdpa(query, key, value, bias, is_causal=True), ValueError)
    ours = regard.attention(query, key, value, bias, is_causal=True)
    torch.testing.assert_close(ours, sdpa(query, key, value, is_causal=True))


@differs(
    FUNCTION,
    "masks with fewer than two dimensions",
    "broadcast; `IndexError` if the inputs have four dimensions",
    "`ValueError`: a mask needs queries and keys; pass (1, S) for the same mask in all queries",
)
def test_masks_of_one_dimension() -> None:
    query, key, value = qkv()
    mask = normal(S, seed=3)
    rejects(lambda: sdpa(query, key, value, mask), IndexError)
    rejects(lambda: regard.attention(query, key, value, mask), ValueError)
    rejects(lambda: regard.attention(query[0], key[0], value[0], mask), ValueError)
    ours = regard.attention(query[0], key[0], value[0], mask.unsqueeze(0))
    torch.testing.assert_close(ours, sdpa(query[0], key[0], value[0], mask))


@differs(
    FUNCTION,
    "a mask (N, L, S) for N sequences with N heads",
    "one matrix per head",
    "`ValueError`: pass (1, N, L, S) or (N, 1, L, S)",
)
def test_ambiguous_masks() -> None:
    query, key, value = (x[:, :B] for x in qkv())
    mask = normal(B, L, S, seed=3)
    rejects(lambda: regard.attention(query, key, value, mask), ValueError, r"\(1, H, L, S\) or \(B, 1, L, S\)")
    torch.testing.assert_close(regard.attention(query, key, value, mask[None]), sdpa(query, key, value, mask))


@differs(
    FUNCTION,
    "float masks whose dtype is not the query's",
    "only float32 is accepted",
    "every floating dtype is accepted",
)
def test_dtypes_of_masks() -> None:
    query, key, value = qkv()
    mask = normal(L, S, seed=3)
    rejects(lambda: sdpa(query, key, value, mask.double()), RuntimeError)
    want = sdpa(query, key, value, mask)
    torch.testing.assert_close(regard.attention(query, key, value, mask.double()), want)


@differs(
    FUNCTION,
    "non-finite `scale`, `dropout_p` outside [0, 1], or a bool for either",
    "accepted or an error, depending on the kernel",
    "`ValueError`, `TypeError`",
)
def test_numbers_without_meaning() -> None:
    query, key, value = qkv()
    assert sdpa(query, key, value, scale=float("nan")).shape == query.shape
    for scale in (float("nan"), INF):
        rejects(lambda scale=scale: regard.attention(query, key, value, scale=scale), ValueError)
    assert sdpa(query, key, value, scale=True).isfinite().all()
    rejects(lambda: regard.attention(query, key, value, scale=True), TypeError)
    rejects(lambda: regard.attention(query, key, value, None, True), TypeError)


@differs(
    FUNCTION,
    "NaN or infinity in a masked key or value",
    "reaches the output",
    "has no influence, on gradients either",
)
def test_what_is_hidden_has_no_influence() -> None:
    query, key, value = qkv()
    mask = torch.ones(L, S, dtype=torch.bool).index_fill(1, torch.tensor([S - 1]), False)
    dirty = [x.index_fill(2, torch.tensor([S - 1]), float("nan")) for x in (key, value)]
    assert sdpa(query, *dirty, mask).isnan().any()
    torch.testing.assert_close(regard.attention(query, *dirty, mask), sdpa(query, key, value, mask))


@differs(
    FUNCTION,
    "a NaN query with fewer than 8 keys (16 with AVX-512), values as wide as keys",
    "zeros",
    "NaN",
)
def test_a_query_of_nan_with_few_keys() -> None:
    query, key, value = (x[:, :, :5] for x in qkv())
    query = query.index_fill(2, torch.tensor([1]), float("nan"))
    assert (sdpa(query, key, value)[:, :, 1] == 0).all()
    assert regard.attention(query, key, value)[:, :, 1].isnan().all()


@differs(
    FUNCTION,
    "values above a few percent of the dtype's largest number",
    "overflow in the sum over keys",
    "do not overflow; on a GPU, as in torch",
)
def test_large_values() -> None:
    query, key, value = qkv()
    large = value.sign() * 3e38
    assert not sdpa(query, key, large).isfinite().all()
    assert regard.attention(query, key, large).isfinite().all()


@differs(
    FUNCTION,
    "rows where the mask adds a bias so large (−1e9) that the scores vanish",
    "the mean of the values, with gradients several times too large",
    "the mean of the values, with its exact gradients; on a GPU, as in torch",
)
def test_rows_without_scores() -> None:
    query, key, value = qkv()
    bias = torch.full((L, S), -1e9)
    for function, right in ((sdpa, False), (regard.attention, True)):
        leaf = value.clone().requires_grad_()
        output = function(query, key, leaf, bias)
        torch.testing.assert_close(output, value.mean(2, keepdim=True).expand(output.shape))
        (gradient,) = torch.autograd.grad(output.sum(), leaf)
        assert torch.allclose(gradient, torch.full_like(gradient, L / S)) == right


@differs(
    FUNCTION,
    "nested tensors",
    "accepted",
    "`TypeError`: pad and pass `masks.padding`, or pack and pass `masks.from_cu_seqlens`; `MultiheadAttention` "
    "accepts them",
)
def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([normal(H, n, E) for n in (3, 5)])
    assert sdpa(nested, nested, nested).is_nested
    rejects(lambda: regard.attention(nested, nested, nested), TypeError, "got a nested one")


@differs(
    FUNCTION,
    "random numbers of dropout",
    "those of the kernel that runs",
    "follow torch's default generator; each engine draws its own; `fused` draws the same ones with any number of "
    "threads",
)
def test_random_numbers_of_dropout() -> None:
    query, key, value = qkv()
    drawn = []
    for engine in ("fused", "fused", "streaming"):
        torch.manual_seed(0)
        drawn.append(regard.attention(query, key, value, dropout_p=0.5, engine=engine))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@differs(
    FUNCTION,
    "the kernel on a CPU",
    "its own",
    '`auto` takes the one that it estimates to be the fastest; results agree to rounding, and `engine="sdpa"` has '
    "torch's",
)
def test_kernels_on_cpus() -> None:
    small = normal(1, 2, 16, 8)
    assert regard.explain(small, small, small).engine.name == "fused"
    right = sdpa(small, small, small)
    torch.testing.assert_close(regard.attention(small, small, small), right)
    assert torch.equal(regard.attention(small, small, small, engine="sdpa"), right)
    query, key = normal(1, 8, 1, 64).bfloat16(), normal(1, 8, 2048, 64).bfloat16()
    assert regard.explain(query, key, key).engine.name == "fused"
    right, found = sdpa(query, key, key), regard.attention(query, key, key)
    torch.testing.assert_close(found, right, rtol=2**-7, atol=2**-9)
    assert torch.equal(regard.attention(query, key, key, engine="sdpa"), right)


@differs(
    FUNCTION,
    "second derivatives",
    "only where torch falls back to its formula (values of another width, dropout); otherwise an error",
    'with `engine="streaming"` and `engine="reference"`; otherwise an error that names them',
)
def test_second_derivatives() -> None:
    def twice(function: Callable[..., Tensor], wide: int, **named: Any) -> Tensor:
        query, key, value = qkv(wide)
        query.requires_grad_()
        (first,) = torch.autograd.grad(function(query, key, value, **named).square().sum(), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)[0]

    rejects(lambda: twice(sdpa, E), RuntimeError)
    for wide in (E, E - 1):
        rejects(lambda wide=wide: twice(regard.attention, wide), RuntimeError, "engine='streaming'")
    ours = twice(regard.attention, E - 1, engine="streaming")
    torch.testing.assert_close(ours, twice(sdpa, E - 1), rtol=1e-4, atol=1e-5)


@differs(
    FUNCTION,
    "`torch.nn.attention.sdpa_kernel`",
    "chooses the kernel or raises",
    "affects only calls without a mask that are compiled or on a GPU; `engine=` chooses, `regard.explain` reports",
)
def test_choice_of_a_kernel() -> None:
    query, key, value = qkv()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        for named in ({}, {"is_causal": True}):
            rejects(lambda named=named: sdpa(query, key, value, **named), RuntimeError)
        with pytest.raises(RuntimeError, match="No viable backend"):
            torch.compile(regard.attention, backend="eager")(query, key, value)
        found = regard.attention(query, key, value, is_causal=True, engine="streaming")
    torch.testing.assert_close(found, sdpa(query, key, value, is_causal=True))


@differs(
    FUNCTION,
    "`torch.jit.trace`",
    "records a call; masks built in the traced function keep the example's sizes",
    "records a call as one operator, with masks for any size; `RuntimeError` for function scores and masks, dropout "
    "and random normalizers",
)
def test_tracing_the_function() -> None:
    query, key, value = qkv()
    traced = torch.jit.trace(lambda *a: regard.attention(*a, masks.causal(align="lower_right")), (query, key, value))
    shorter = query[:, :, :2]
    right = sdpa(shorter, key, value, torch.ones(2, S, dtype=torch.bool).tril(S - 2))
    torch.testing.assert_close(traced(shorter, key, value), right)
    rejects(lambda: torch.jit.trace(lambda *a: regard.attention(*a, dropout_p=0.5), (query, key, value)), RuntimeError)


@differs(
    FUNCTION,
    "`torch.jit.script`",
    "can script callers",
    "not supported; use `torch.jit.trace`, `torch.compile` or `torch.export`",
)
def test_scripting_the_function() -> None:
    with pytest.raises(Exception, match="keyword-only arguments"):
        torch.jit.script(regard.attention)
    args = qkv()
    traced = torch.jit.trace(lambda *args: regard.attention(*args, is_causal=True), args)
    torch.testing.assert_close(traced(*args), sdpa(*args, is_causal=True))


MODULE = "`regard.nn.MultiheadAttention` and `torch.nn.MultiheadAttention`"


def twins(**named: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Return torch's module and ours with equal parameters."""
    torch.manual_seed(0)
    right = nn.MultiheadAttention(E, H, **{"batch_first": True, **named})
    ours = MultiheadAttention(E, H, **{"batch_first": True, **named})
    ours.load_state_dict(right.state_dict())
    return right, ours


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


@differs(
    MODULE,
    "a query with nothing to attend to",
    "NaN with `need_weights=True` and on the fast path, otherwise zeros",
    "zeros (plus the bias of W_O), and zero weights",
)
def test_a_query_that_sees_nothing() -> None:
    right, ours = twins()
    x, memory, padding = normal(B, L, E), normal(B, S, E, seed=1), torch.ones(B, S, dtype=torch.bool)
    assert right(x, memory, memory, padding)[0].isnan().all()
    assert right(x, memory, memory, padding, need_weights=False)[0].isfinite().all()
    for need in (True, False):
        output, weights = ours(x, memory, memory, padding, need_weights=need)
        assert torch.equal(output, ours.out_proj.bias.expand_as(output))
        assert weights is None or not weights.any()


@differs(
    MODULE,
    "returned weights",
    "after dropout",
    "before dropout; `dropped_weights=True` returns torch's",
)
def test_weights_and_dropout() -> None:
    right, ours = (module.train() for module in twins(dropout=0.5))
    x = normal(B, 40, E)
    assert (right(x, x, x, average_attn_weights=False)[1] == 0).any()
    assert (ours(x, x, x, average_attn_weights=False)[1] > 0).all()


@differs(
    MODULE,
    "`is_causal=True` without `attn_mask`",
    "`RuntimeError`; ignored on the fast path",
    "the mask is causal",
)
def test_causal_alone() -> None:
    right, ours = (module.eval() for module in twins())
    x = normal(B, L, E)
    want = right(x, x, x, attn_mask=causal(L))
    rejects(lambda: right(x, x, x, is_causal=True), RuntimeError)
    with torch.no_grad():
        assert torch.equal(right(x, x, x, is_causal=True)[0], right(x, x, x)[0])
    for found, each in zip(ours(x, x, x, is_causal=True), want, strict=True):
        torch.testing.assert_close(found, each)


@differs(
    MODULE,
    "`is_causal=True` with a non-causal `attn_mask`",
    "a trusted hint: with `need_weights=False` the mask is ignored",
    "both are applied",
)
def test_a_wrong_hint() -> None:
    right, ours = twins()
    x, mask = normal(B, L, E), normal(L, L, seed=3)
    named: dict[str, Any] = {"need_weights": False, "is_causal": True}
    torch.testing.assert_close(right(x, x, x, attn_mask=mask, **named), right(x, x, x, attn_mask=causal(L), **named))
    both = mask.masked_fill(causal(L), -INF)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, **named)[0], right(x, x, x, attn_mask=both)[0])


@differs(
    MODULE,
    "`is_causal=True` with `add_bias_kv` or `add_zero_attn`",
    "with `need_weights=False` only the last queries see the appended keys",
    "every query sees them, with any `need_weights`",
)
def test_causal_with_appended_rows() -> None:
    right, ours = twins(add_zero_attn=True, bias=False)
    x = normal(B, L, E)
    named: dict[str, Any] = {"attn_mask": causal(L), "is_causal": True}
    want, hidden = (right(x, x, x, need_weights=need, **named)[0] for need in (True, False))
    assert not torch.allclose(want, hidden, atol=1e-3)
    for need in (True, False):
        torch.testing.assert_close(ours(x, x, x, need_weights=need, **named)[0], want)


@differs(
    MODULE,
    "the fast path, a separate kernel for evaluation without gradients (`torch.backends.mha`)",
    "used where possible",
    "none; `convert` also disables it in torch's layers",
)
def test_no_fast_path() -> None:
    right, ours = (module.eval() for module in twins())
    x = normal(B, L, E)
    with patch("torch._native_multi_head_attention", return_value=(x, None)) as kernel, torch.no_grad():
        for module, called in ((right, True), (ours, False)):
            kernel.reset_mock()
            module(x, x, x)
            assert kernel.called == called


@differs(
    MODULE,
    "nested tensors",
    "only on the fast path, otherwise `AssertionError`",
    "also in training and with gradients; both layouts",
)
def test_nested_tensors_in_a_module() -> None:
    right, ours = twins()
    rows = [normal(3, E), normal(L, E, seed=1)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        rejects(lambda nested=nested: right(nested, nested, nested), AssertionError, "NestedTensor")
        output = ours(nested, nested, nested, need_weights=False)[0]
        assert output.layout == layout
        for row, found in zip(rows, output.unbind(), strict=True):
            torch.testing.assert_close(found, right(row, row, row)[0])
        sum(found.sum() for found in output.unbind()).backward()
        assert nested.grad is not None


@differs(
    MODULE,
    "wrong shapes and dtypes of masks and sequences",
    "`AssertionError` or `RuntimeError`",
    "`ValueError`, `TypeError`",
)
def test_classes_of_errors_of_a_module() -> None:
    right, ours = twins()
    x = normal(B, L, E)
    cases: list[tuple[tuple[Any, ...], type[Exception], type[Exception]]] = [
        ((x, x[0], x), AssertionError, ValueError),
        ((x, x[:1], x[:1]), RuntimeError, ValueError),
        ((x, x, x, torch.ones(L, dtype=torch.bool)), AssertionError, ValueError),
        ((x, x, x, torch.ones(B, L).int()), AssertionError, TypeError),
        ((x, x, x, None, True, torch.ones(L, L + 1)), RuntimeError, ValueError),
    ]
    for args, theirs, kind in cases:
        rejects(lambda args=args: right(*args), theirs)
        rejects(lambda args=args: ours(*args), kind, r"^MultiheadAttention: \w+ must ")


@differs(
    MODULE,
    "parameters of mixed dtypes in one module",
    "accepted with `batch_first=True`, due to how linear layers are computed",
    "accepted with `batch_first=False`, for the same reason",
)
def test_parameters_of_several_dtypes() -> None:
    x = normal(B, L, E)
    for first in (True, False):
        right, ours = (module.eval() for module in twins(batch_first=first))
        for module in (right, ours):
            module.in_proj_bias = nn.Parameter(module.in_proj_bias.half())
        with pytest.raises(RuntimeError, match="same dtype") if not first else contextlib.nullcontext():
            right(x, x, x)
        with pytest.raises(RuntimeError, match="same dtype") if first else contextlib.nullcontext():
            ours(x, x, x)


@differs(
    MODULE,
    "`torch.jit.script`",
    "can script the module",
    "not supported; use `torch.jit.trace`, `torch.compile` or `torch.export`",
)
def test_scripting_a_module() -> None:
    right, ours = twins()
    x = normal(B, L, E)
    assert torch.jit.script(right) is not None
    with pytest.raises(Exception, match="Unknown type annotation"):
        torch.jit.script(ours)
    longer = normal(B, L + 3, E)
    torch.testing.assert_close(torch.jit.trace(ours, (x, x, x))(*[longer] * 3), ours(*[longer] * 3))


@differs(
    MODULE,
    "`isinstance(module, torch.nn.MultiheadAttention)`, and the method `merge_masks`",
    "true; merges two masks",
    "false; no such method",
)
def test_it_is_no_subclass() -> None:
    right, ours = twins()
    assert hasattr(right, "merge_masks")
    assert not hasattr(ours, "merge_masks")
    assert not isinstance(ours, nn.MultiheadAttention)


LAYERS = "`regard.nn.TransformerEncoderLayer`, `…Encoder`, `…Decoder` and `torch.nn`'s"


def layers(**named: Any) -> tuple[nn.TransformerEncoderLayer, TransformerEncoderLayer]:
    """Return torch's layer and ours with equal parameters, in evaluation."""
    torch.manual_seed(0)
    right = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, **named).eval()
    ours = TransformerEncoderLayer(E, H, 16, batch_first=True, **named).eval()
    ours.load_state_dict(right.state_dict())
    return right, ours


@differs(
    LAYERS,
    "the fast path in evaluation without gradients",
    "reads a float mask as bool, masking every key with a non-zero bias; NaN where no key is left",
    "none: training and evaluation agree",
)
def test_evaluation_and_training_agree() -> None:
    right, ours = layers()
    x, mask, padding = normal(B, L, E), normal(L, L, seed=3) + 3, torch.ones(B, L, dtype=torch.bool)
    want = right(x, mask)
    with torch.no_grad():
        assert right(x, mask).isnan().all()
        assert right(x, src_key_padding_mask=padding).isnan().all()
        torch.testing.assert_close(ours(x, mask), want)
        assert ours(x, src_key_padding_mask=padding).isfinite().all()


@differs(
    LAYERS,
    "padded rows of an encoder's output",
    "zero on the nested-tensor path, otherwise whatever the layers compute",
    "whatever the layers compute; non-finite padding in the input counts as 0",
)
def test_padded_rows_of_an_encoder() -> None:
    right, ours = layers()
    theirs, stack = nn.TransformerEncoder(right, 1).eval(), TransformerEncoder(ours, 1).eval()
    x, padding = normal(B, L, E), torch.arange(L) >= torch.tensor([[3], [L]])
    with torch.no_grad():
        a, b = theirs(x, src_key_padding_mask=padding), stack(x, src_key_padding_mask=padding)
    assert not a[padding].any()
    assert b[padding].all()
    torch.testing.assert_close(a[~padding], b[~padding])
    dirty = torch.where(padding.unsqueeze(-1), float("nan"), x)
    torch.testing.assert_close(stack(dirty, src_key_padding_mask=padding)[~padding], b[~padding])


@differs(
    LAYERS,
    "`is_causal=True` without a mask, or with a non-causal one",
    "as in `MultiheadAttention`",
    "as in `MultiheadAttention`",
)
def test_causal_in_layers() -> None:
    right, ours = layers()
    x = normal(B, L, E)
    rejects(lambda: right(x, is_causal=True), RuntimeError)
    torch.testing.assert_close(ours(x, is_causal=True), right(x, causal(L)))


@differs(
    LAYERS,
    "`enable_nested_tensor` and `mask_check` of an encoder",
    "choose the nested-tensor path; a warning where it is impossible",
    "accepted without effect or warning",
)
def test_no_warning_about_nested_tensors() -> None:
    for module, warned in ((nn, True), (regard.nn, False)):
        layer = module.TransformerEncoderLayer(E, H, 16, bias=False, batch_first=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.TransformerEncoder(layer, 1)
        assert bool(caught) == warned


@differs(
    LAYERS,
    "`torch.jit.script`",
    "can script them",
    "not supported; use `torch.jit.trace`, `torch.compile` or `torch.export`",
)
def test_scripting_layers() -> None:
    right, ours = layers()
    assert torch.jit.script(right) is not None
    with pytest.raises(Exception, match="Unknown type annotation"):
        torch.jit.script(ours)
    x = normal(B, L, E)
    torch.testing.assert_close(torch.jit.trace(ours, (x,))(x), right(x))


@differs(
    LAYERS,
    "subclasses that override `_sa_block`, `_mha_block` or `_ff_block`",
    "`forward` calls these private methods",
    "no such methods: override `forward`",
)
def test_no_private_blocks() -> None:
    right, ours = layers()
    assert hasattr(right, "_sa_block")
    assert not any(hasattr(ours, name) for name in ("_sa_block", "_mha_block", "_ff_block"))


@differs(
    LAYERS,
    "an unknown `activation`",
    "`RuntimeError`",
    "`ValueError`",
)
def test_unknown_activation() -> None:
    rejects(lambda: nn.TransformerEncoderLayer(E, H, activation="tanh"), RuntimeError)
    rejects(lambda: TransformerEncoderLayer(E, H, activation="tanh"), ValueError)


def test_the_page_is_made_of_these_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("\n## ") == len(TABLES)
    for heading, rows in TABLES.items():
        table = "\n".join(["| what | torch | regard |", "| --- | --- | --- |", *map(str, rows)])
        assert f"\n## {heading}\n\n{table}\n" in page, f"docs/differences.md must have, under {heading!r}:\n{table}"
