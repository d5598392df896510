"""``regard.attention`` in the place of ``F.scaled_dot_product_attention``: the same results, throughout a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_calls import normal
from engines_here import HERE
from pairwise import across
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard import AuxRequest, engines, masks
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores.base import TABLE as SCORES

sdpa = F.scaled_dot_product_attention

#: A unit in the last place of each dtype: two engines may round differently, once at the end.
CLOSE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


def triple(lead: tuple[int, ...], L: int, S: int, V: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = (L, 8), (S, 8), (S, V)
    return [normal(*lead, *size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


def same(*args: Any, **named: Any) -> Tensor:
    """Return what ours answers, after comparing it with what torch answers."""
    ours, theirs = regard.attention(*args, **named), sdpa(*args, **named)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, **CLOSE[ours.dtype])
    return ours


class Decoder(nn.Module):
    """A block as a language model writes it: grouped queries, torch's function called by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, mask is None, scale=query.size(-1) ** -0.5, enable_gqa=True
        )
        return x + self.out(read.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """torch's own layer, which calls the function from ``F.multi_head_attention_forward``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x, None if mask is None else ~mask)


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Put ours in torch's place, and count the calls."""

    def put() -> list[int]:
        calls: list[int] = []

        def ours(*args: Any, **named: Any) -> Tensor:
            calls.append(1)
            return regard.attention(*args, **named)

        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        return calls

    return put


@across({"model": [Encoder, Decoder], "masked": [False, True], "dtype": [torch.float32, torch.float64, torch.bfloat16]})
def test_in_a_model(model: Any, masked: bool, dtype: torch.dtype, swap: Callable[[], list[int]]) -> None:
    torch.manual_seed(0)
    network = model().to(dtype).train()
    x = normal(2, 7, 16, dtype=dtype)
    mask = (normal(7, 7, seed=5) > -0.5) | torch.eye(7, dtype=torch.bool) if masked else None

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        output = network(leaf, mask)
        return [output, *torch.autograd.grad(output.square().mean(), [leaf, *network.parameters()])]

    theirs = run()
    calls = swap()
    ours = run()
    assert calls == [1]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE[dtype])


def test_dropout_in_a_model_draws_the_same(swap: Callable[[], list[int]]) -> None:
    network, x = Encoder(dropout=0.3).train(), normal(2, 7, 16)

    def run() -> Tensor:
        torch.manual_seed(1)
        return network(x)

    theirs = run()
    calls = swap()
    assert torch.equal(run(), theirs)
    network.eval()
    with torch.inference_mode(False):
        assert not torch.equal(run(), theirs)
    assert len(calls) == 2


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), (6, 7)), ((), (1, 7)),
    ((4,), (6, 7)), ((4,), (4, 6, 7)), ((4,), (4, 1, 7)), ((4,), (1, 6, 1)),
    ((2, 4), (6, 7)), ((2, 4), (1, 1)), ((2, 4), (4, 6, 7)), ((2, 4), (2, 4, 6, 7)), ((2, 4), (2, 1, 1, 7)),
    ((2, 4), (1, 4, 6, 1)),
    ((3, 2, 4), (6, 7)), ((3, 2, 4), (4, 6, 7)), ((3, 2, 4), (2, 4, 6, 7)), ((3, 2, 4), (2, 1, 1, 7)),
    ((3, 2, 4), (3, 2, 4, 6, 7)), ((3, 2, 4), (3, 1, 1, 6, 7)), ((3, 2, 4), (1, 2, 1, 1, 7)),
]  # fmt: skip


@pytest.mark.parametrize(("lead", "mask"), SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_every_shape(lead: tuple[int, ...], mask: tuple[int, ...], kind: str) -> None:
    query, key, value = triple(lead, 6, 7, V=5)
    bias = normal(*mask, seed=9)
    same(query, key, value, bias > -0.5 if kind == "bool" else bias)


@across(
    {
        "is_causal": [False, True],
        ("L", "S"): [(6, 6), (6, 9), (9, 6), (1, 5), (5, 1)],
        "lead": [(), (4,), (2, 4), (3, 2, 4)],
    }
)
def test_inputs_of_every_shape(lead: tuple[int, ...], L: int, S: int, is_causal: bool) -> None:
    for V in (8, 5):
        same(*triple(lead, L, S, V), is_causal=is_causal)


LEADS = [(), (1,), (4,), (1, 1), (2, 4), (2, 1), (1, 4), (3, 2, 4), (3, 1, 1)]


@across({"V": [8, 5], "of_key": LEADS, "of_query": LEADS})
def test_leading_dimensions_broadcast(of_query: tuple[int, ...], of_key: tuple[int, ...], V: int) -> None:
    query, key, value = triple(of_query, 6, 7)[0], *triple(of_key, 6, 7, V)[1:]
    for named in ({}, {"is_causal": True}, {"attn_mask": normal(6, 7, seed=9)}):
        same(query, key, value, **named)


def test_a_number_may_be_a_tensor() -> None:
    args = triple((2, 4), 6, 7)
    for scale in (torch.tensor(0.3), torch.tensor(2), torch.tensor(0.3, dtype=torch.float64)):
        same(*args, scale=scale)
    same(*args, dropout_p=torch.tensor(0.0))
    learned = nn.Parameter(torch.tensor(0.3))
    for function in (regard.attention, sdpa):
        with pytest.raises(TypeError, match=r"scale'? must be"):
            function(*args, scale=learned)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"attn_mask": normal(7, 7) > -0.5}, {"scale": -0.3}])
def test_dtypes(dtype: torch.dtype, named: dict[str, Any]) -> None:
    same(*triple((2, 4), 7, 7, dtype=dtype), **named)


@pytest.mark.parametrize("mask", [None, (6, 7), (4, 6, 7), (2, 4, 6, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_queries(mask: tuple[int, ...] | None, heads: int) -> None:
    query, _, _ = triple((2, 4), 6, 7)
    _, key, value = triple((2, heads), 6, 7, V=5)
    same(query, key, value, None if mask is None else normal(*mask), enable_gqa=True)
    if mask is None:
        same(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("shape", [(0, 4, 6, 8), (2, 0, 6, 8), (2, 4, 0, 8), (2, 4, 6, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sizes(shape: tuple[int, ...], is_causal: bool) -> None:
    query = torch.ones(shape, requires_grad=True)
    output = same(query, query, query, is_causal=is_causal)
    (gradient,) = torch.autograd.grad(output.sum(), query)
    assert gradient.shape == shape
    assert gradient.isfinite().all()


def test_no_keys_at_all_answers_zero() -> None:
    query, key, value = triple((2, 4), 6, 0)
    assert (same(query, key, value) == 0).all()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads after length": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "width first": lambda t: t.mT.contiguous().mT,
    "every other feature": lambda t: torch.stack((t, t.flip(-1)), -1)[..., 0],
    "slice of a longer buffer": lambda t: torch.cat((t, t), 2)[:, :, : t.shape[2]],
    "shared by heads": lambda t: t[:, :1].expand_as(t),
    "odd offset": lambda t: F.pad(t, (1, 0))[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"attn_mask": normal(2, 1, 1, 7) > -1}])
def test_layouts_in_memory(layout: str, named: dict[str, Any]) -> None:
    leaves = triple((2, 4), 7, 7)
    views = [LAYOUTS[layout](t) for t in leaves]
    assert views[0].shape == leaves[0].shape
    same(*views, **named)
    grads = []
    for function in (regard.attention, sdpa):
        fresh = [t.clone().requires_grad_() for t in leaves]
        grads.append(torch.autograd.grad(function(*map(LAYOUTS[layout], fresh), **named).square().sum(), fresh))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_bit_for_bit_where_the_same_kernel_runs(dtype: torch.dtype) -> None:
    query, key, value = triple((2, 4), 7, 9, dtype=dtype)
    attention = partial(regard.attention, engine="sdpa")
    for named in ({}, {"score": "scaled_dot"}):
        assert torch.equal(attention(query, key, value, **named), sdpa(query, key, value))
    assert torch.equal(attention(query, key, value, scale=0.3), sdpa(query, key, value, scale=0.3))
    for L, S in ((9, 7), (7, 7)):  # of more keys than queries, ours reads only those that some query sees
        args = triple((2, 4), L, S, dtype=dtype)
        assert torch.equal(attention(*args, is_causal=True), sdpa(*args, is_causal=True))
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in triple((2, 4), 7, 7, dtype=dtype)]
    assert torch.equal(attention(*strided), sdpa(*strided))


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"attn_mask": normal(7, 7) > -0.5}])
def test_dropout_is_the_fifth_argument_and_draws_as_torch_does(named: dict[str, Any]) -> None:
    query, key, value = triple((2, 4), 7, 7)
    mask, rest = named.get("attn_mask"), [named["is_causal"]] if "is_causal" in named else []
    for p in (0.0, 0.4, 1.0):
        outputs = []
        for function in (partial(regard.attention, engine="sdpa"), sdpa):
            torch.manual_seed(3)
            outputs.append(function(query, key, value, mask, p, *rest))
        torch.testing.assert_close(*outputs, **CLOSE[torch.float32])


def test_a_mask_that_hides_a_whole_row() -> None:
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[2] = False
    query, key, value = triple((2, 4), 6, 7)
    assert (same(query, key, value, mask)[:, :, 2] == 0).all()
    same(query, key, value, torch.zeros(6, 7).masked_fill(~mask, -torch.inf))


def test_autocast() -> None:
    query, key, value = triple((2, 4), 7, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(query, key, value).dtype == torch.bfloat16
        assert same(query, key.bfloat16(), value.half(), is_causal=True).dtype == torch.bfloat16
        assert same(query.double(), key.double(), value.double()).dtype == torch.float64
        same(query, key, value, normal(7, 7))
        for engine in HERE:
            assert regard.attention(query, key, value, engine=engine).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"attention: key must have query's dtype torch.float64"):
            regard.attention(query.double(), key, value)


@pytest.mark.parametrize("engine", ["auto", *HERE])
def test_meta_tensors(engine: str) -> None:
    query, key, value = (t.to("meta") for t in triple((2, 4), 6, 7, V=5))
    lengths = torch.empty(2, dtype=torch.long, device="meta")
    if engine == "fused":
        with pytest.raises(ValueError, match=r"'fused': CPU only, not meta"):
            regard.attention(query, key, value, engine=engine)
        return
    for mask in (None, torch.empty(6, 7, dtype=torch.bool, device="meta"), masks.padding(lengths), masks.sinks(1)):
        output, aux = regard.attention(
            query, key, value, mask, engine=engine, return_aux=AuxRequest(lse=True, topk=2, received=True)
        )
        assert output.device.type == "meta"
        assert output.shape == (2, 4, 6, 5)
        assert aux.topk is not None
        assert aux.topk.indices.shape == (2, 4, 6, 2)
    assert regard.attention(query, key, value, is_causal=True).shape == sdpa(query, key, value, is_causal=True).shape


TRANSFORMED = ["auto", *(name for name in HERE if engines.TABLE[name].has_transforms)]


@pytest.mark.parametrize("engine", TRANSFORMED)
def test_vmap(engine: str) -> None:
    query, key, value = triple((3, 2, 4), 6, 7, V=5)
    mask = normal(3, 6, 7, seed=9)

    def ours(*args: Tensor, **named: Any) -> Tensor:
        return regard.attention(*args, **named, engine=engine)

    vmap = torch.func.vmap
    torch.testing.assert_close(vmap(ours)(query, key, value), sdpa(query, key, value))
    torch.testing.assert_close(
        vmap(ours)(query, key, value, mask > 0), sdpa(query, key, value, mask[:, None, None] > 0)
    )
    torch.testing.assert_close(vmap(ours)(query, key, value, mask), sdpa(query, key, value, mask[:, None, None]))
    mapped = vmap(ours, in_dims=(None, 0, 0))(query[0], key, value)
    torch.testing.assert_close(mapped, sdpa(query[:1].expand_as(query), key, value))

    def loss(function: Any) -> Callable[..., Tensor]:
        return lambda *args: function(*args, is_causal=True).square().sum()

    ours_grad = vmap(torch.func.grad(loss(ours), argnums=(0, 1, 2)))(query, key, value)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    theirs_grad = torch.autograd.grad(loss(sdpa)(*leaves), leaves)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", TRANSFORMED)
def test_aux_under_vmap(engine: str) -> None:
    query, key, value = triple((3, 2, 4), 6, 7)
    request = AuxRequest(lse=True, entropy=True, max=True, received=True, topk=2)

    def look(*args: Tensor) -> tuple[Tensor, ...]:
        aux = regard.attention(*args, is_causal=True, engine=engine, return_aux=request)[1]
        return aux.lse, aux.entropy, aux.max, aux.received, aux.topk.weights, aux.topk.indices

    for mapped, whole in zip(torch.func.vmap(look)(query, key, value), look(query, key, value), strict=True):
        torch.testing.assert_close(mapped, whole)


CALLS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda f, q, k, v, m: f(q, k, v),
    "same shapes": lambda f, q, k, v, m: f(k, k, k),
    "causal": lambda f, q, k, v, m: f(q, k, v, is_causal=True),
    "mask": lambda f, q, k, v, m: f(q, k, v, m),
    "scale": lambda f, q, k, v, m: f(q, k, v, scale=q.size(-1) ** -0.5),
}


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_compile_without_a_graph_break(call: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    args = [*triple((2, 4), 6, 7, V=5), normal(6, 7) > -0.5]

    def run(*args: Tensor) -> Tensor:
        return CALLS[call](regard.attention, *args)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(*args), CALLS[call](sdpa, *args))
    args = [*triple((2, 4), 5, 9, V=5), normal(5, 9) > -0.5]
    torch.testing.assert_close(compiled(*args), CALLS[call](sdpa, *args))


@pytest.mark.slow
def test_compile_with_gradients(swap: Callable[[], list[int]]) -> None:
    torch._dynamo.reset()
    network, x = Decoder(), normal(2, 7, 16)
    theirs = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    swap()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x).square().sum(), list(network.parameters()))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"lse": True, "max": True}, {"topk": 2}, {"entropy": True, "received": True}])
def test_compile_with_aux(asked: dict[str, Any]) -> None:
    torch._dynamo.reset()
    query, key, value = triple((2, 4), 6, 7)

    def look(*args: Tensor) -> list[Tensor]:
        output, aux = regard.attention(*args, is_causal=True, return_aux=AuxRequest(**asked))
        found = [aux.lse, aux.max, aux.entropy, aux.received, None if aux.topk is None else aux.topk.weights]
        return [output, *(t for t in found if t is not None)]

    compiled = torch.compile(look, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, value), look(query, key, value))


@pytest.mark.parametrize("masked", [False, True])
def test_export(masked: bool, swap: Callable[[], list[int]]) -> None:
    network, x = Decoder().eval(), normal(2, 7, 16)
    args = (x, normal(7, 7) > -0.5) if masked else (x,)
    theirs = network(*args)
    swap()
    exported = torch.export.export(network, args)
    torch.testing.assert_close(exported.module()(*args), theirs)
    if not masked:
        length = torch.export.Dim("length", min=2, max=64)
        dynamic = torch.export.export(network, args, dynamic_shapes={"x": {1: length}})
        longer = normal(2, 11, 16)
        torch.testing.assert_close(dynamic.module()(longer), network(longer))


def test_make_fx() -> None:
    args = triple((2, 4), 6, 7)
    from torch.fx.experimental.proxy_tensor import make_fx

    for named in ({}, {"is_causal": True}, {"attn_mask": normal(6, 7) > -0.5}):
        traced = make_fx(lambda *a, named=named: regard.attention(*a, **named))(*args)
        torch.testing.assert_close(traced(*args), sdpa(*args, **named))


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"normalizer": "sparsemax"}, {"attn_mask": masks.sinks(3)}])
def test_activation_checkpointing(named: dict[str, Any]) -> None:
    def run(wrapped: bool) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in triple((2, 4), 6, 7)]
        call = lambda *args: regard.attention(*args, **named)  # noqa: E731
        output = checkpoint(call, *leaves, use_reentrant=False) if wrapped else call(*leaves)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_inference_mode_and_parameters() -> None:
    parameter = nn.Parameter(normal(2, 4, 6, 8))
    with torch.inference_mode():
        for named in ({}, {"attn_mask": masks.window(2, 0)}, {"normalizer": "sparsemax"}):
            assert not regard.attention(parameter, parameter, parameter, **named).requires_grad
    output = regard.attention(parameter, parameter, parameter)
    output.sum().backward()
    assert parameter.grad is not None


def test_tensor_subclasses_stay_what_they_are() -> None:
    class Named(Tensor):
        pass

    query = normal(2, 4, 6, 8).as_subclass(Named)
    for named in ({}, {"is_causal": True}, {"normalizer": "sparsemax"}, {"score": "gaussian"}):
        assert type(regard.attention(query, query, query, **named)) is Named


def test_a_default_dtype_or_device_changes_nothing() -> None:
    args = triple((1, 2), 6, 6)
    calls: list[dict[str, Any]] = [
        {"normalizer": normalizer, "score": score, "attn_mask": mask}
        for normalizer in ("softmax", "sparsemax", "argmax")
        for score in ("dot", "gaussian", "boxcar")
        for mask in (None, masks.causal(), masks.window(2, 0))
    ]
    request = AuxRequest(lse=True, entropy=True, received=True, topk=2)
    plain = [regard.attention(*args, **named, return_aux=request) for named in calls]
    for outer in (torch.device("meta"), None):
        try:
            torch.set_default_dtype(torch.float64 if outer is None else torch.float32)
            with outer or torch.device("cpu"):
                for named, (output, aux) in zip(calls, plain, strict=True):
                    again, other = regard.attention(*args, **named, return_aux=request)
                    assert torch.equal(again, output)
                    assert again.dtype == torch.float32
                    for field in ("lse", "entropy", "received"):
                        assert torch.equal(getattr(other, field), getattr(aux, field))
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("engine", ["fused", "streaming"])
def test_dropout_draws_the_same_under_another_default_device(engine: str) -> None:
    args = triple((1, 2), 6, 6)
    torch.manual_seed(0)
    plain = regard.attention(*args, dropout_p=0.5, engine=engine)
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(regard.attention(*args, dropout_p=0.5, engine=engine), plain)


PARTS: list[tuple[str, Any]] = [
    *(("score", kind.sample(8, 8, 7, torch.Generator().manual_seed(0))) for kind in SCORES.values()),
    *(("normalizer", kind.sample(torch.Generator().manual_seed(0))) for kind in NORMALIZERS.values()),
    *(
        ("attn_mask", mask)
        for mask in (
            masks.causal("upper_left"), masks.window(2, 1, offset=0), masks.padding(torch.tensor([3, 7])),
            masks.key_padding(normal(2, 7) > 0),
            masks.document(torch.arange(12).view(2, 6) // 4, torch.arange(14).view(2, 7) // 5),
            masks.prefix(3), masks.sinks(2), masks.dilated(2, align="upper_left"), masks.dense(normal(6, 7)),
            masks.alibi(torch.ones(4), align="upper_left"),
            masks.causal("upper_left") & ~masks.sinks(1) | masks.prefix(2),
        )
    ),
    *(("engine", engines.TABLE[name]) for name in HERE),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "part"), PARTS, ids=lambda p: p if isinstance(p, str) else repr(p)[:24])
def test_parts_can_be_pickled_and_copied(argument: str, part: Any) -> None:
    args = triple((2, 4), 6, 7)

    def run(part: Any) -> Tensor:
        torch.manual_seed(0)
        return regard.attention(*args, **{argument: part})

    whole = run(part)
    for twin in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part), copy.copy(part)):
        assert type(twin) is type(part)
        assert torch.equal(run(twin), whole)
        if argument != "engine":
            assert repr(twin) == repr(part)


def test_a_deep_copy_has_tensors_of_its_own() -> None:
    weight = nn.Parameter(normal(8, 8))
    twin = copy.deepcopy(regard.scores.General(weight))
    (copied,) = twin.tensors()
    assert isinstance(copied, nn.Parameter)
    assert copied.data_ptr() != weight.data_ptr()
    (kept,) = copy.copy(regard.scores.General(weight)).tensors()
    assert kept is weight
