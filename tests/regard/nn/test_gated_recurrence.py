"""Gated recurrences against a loop over steps in float64, and against transformers' own."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import itertools
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import across
from tiers import examples
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from regard import masks, nn
from regard.engines.fused import library, pool
from regard.nn.linear import kernels
from regard.nn.linear.fast_weights import fast_weights
from regard.nn.linear.steps import Steps

#: Untyped: its overloads do not take options as a dictionary.
gated_recurrence: Any = nn.gated_recurrence
FORMS = ("parallel", "chunked", "recurrent", "auto")
F64 = torch.float64
every_form = pytest.mark.parametrize("form", FORMS)

#: Options of a call by the name of the mechanism: the gates it has, and which rule it follows.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sum": ("", {}),
    "retention": ("decay", {}),
    "gla": ("channels", {}),
    "mamba2": ("decay rate", {"scale": 1.0}),
    "delta": ("rate", {"delta": True}),
    "gated-delta": ("decay rate", {"delta": True}),
    "kda": ("channels rate", {"delta": True}),
    "rwkv6": ("channels bonus", {}),
    "rwkv7": ("channels erase rate", {"scale": 1.0}),
    "erase": ("decay erase bonus", {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def call(
    kind: str, B: int, G: int, H: int, L: int, K: int, V: int, *, strength: float = 0.3, unit: bool = True
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the tensors and options of a call; with unit keys, the delta rule is stable."""
    gates, options = KINDS[kind]
    q, k, v = numbers(B, G, L, K), numbers(B, G, L, K, seed=1), numbers(B, H, L, V, seed=2)
    k = k / k.norm(dim=-1, keepdim=True) if unit else k
    options = dict(options)
    if "decay" in gates:
        options["log_decay"] = -strength * numbers(B, H, L, seed=3).square()
    if "channels" in gates:
        options["log_decay"] = -strength * numbers(B, H, L, K, seed=3).square()
    if "rate" in gates:
        options["rate"] = 2 * numbers(B, H, L, seed=4).sigmoid()
    if "bonus" in gates:
        options["bonus"] = numbers(H, K, seed=5)
    if "erase" in gates:
        e = numbers(B, H, L, K, seed=6)
        e = e / e.norm(dim=-1, keepdim=True)
        options["erase"] = (e * numbers(B, H, L, 1, seed=7).sigmoid(), e)
    return (q, k, v), options


def by_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    rate: Tensor | None = None,
    erase: tuple[Tensor, Tensor] | None = None,
    delta: bool = False,
    bonus: Tensor | None = None,
    scale: float | None = None,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and state as they are defined, in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    B, H, L, V = value.shape
    K = key.shape[-1]
    query, key = (x.repeat_interleave(H // x.shape[1], 1) for x in (query, key))
    S = torch.zeros(B, H, K, V, dtype=F64) if state is None else state.double()
    scale = 1 / math.sqrt(K) if scale is None else scale
    found = []
    for t in range(L):
        q, k, v = query[:, :, t], key[:, :, t], value[:, :, t]
        S = S if starts is None else S * (~starts[:, t]).double()[:, None, None, None]
        D = S
        if log_decay is not None:
            d = log_decay[:, :, t].double().exp()
            D = S * (d[..., None, None] if d.dim() == 2 else d[..., None])
        beta = torch.ones(B, H, dtype=F64) if rate is None else rate[:, :, t].double()
        new = v - torch.einsum("bhk,bhkv->bhv", k, D) if delta else v
        after = D + torch.einsum("bh,bhk,bhv->bhkv", beta, k, new)
        if erase is not None:
            a, e = (x[:, :, t].double() for x in erase)
            after = after - torch.einsum("bhk,bhc,bhcv->bhkv", a, e, S)
        read = after
        if bonus is not None:
            read = S + torch.einsum("bh,hk,bhk,bhv->bhkv", beta, bonus.double(), k, v)
        found.append(scale * torch.einsum("bhk,bhkv->bhv", q, read))
        S = after
    return torch.stack(found, 2) if L else value, S


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def near(found: Tensor, right: Tensor, tolerance: float = 5e-6) -> None:
    """Compare float32 with float64, relative to the largest number."""
    assert found.shape == right.shape and found.isfinite().all()
    if right.numel():
        assert (found.double() - right).abs().max() <= tolerance * max(float(right.abs().max()), 1e-30)


def cast(options: dict[str, Any], change: Any) -> dict[str, Any]:
    """Return options with their tensors changed."""
    return {
        name: change(x) if isinstance(x, Tensor) else tuple(map(change, x)) if isinstance(x, tuple) else x
        for name, x in options.items()
    }


def test_the_kernels_are_there() -> None:
    assert library.problem() is None
    (q, _, _), _ = call("sum", 1, 1, 1, 3, 2, 2)
    assert kernels.applies(Steps(q, q, q), None)


@every_kind
def test_auto_is_a_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = call(kind, 1, 2, 2, 20, 4, 4, strength=0.1)
    run, names = library.load, []

    def load(name: str, dtype: torch.dtype) -> Any:
        names.append(name)
        return run(name, dtype)

    monkeypatch.setattr(library, "load", load)
    gated_recurrence(*tensors, **options)
    assert names == ["recurrence.forward"]


def test_what_is_erased_before_a_strong_decay_is_read_without_a_kernel() -> None:
    q, e = (numbers(1, 1, 8, 4, seed=seed) for seed in (0, 1))
    erase = (e / 4, e)
    for gate, expected in ((-19.0, True), (-21.0, False), (-math.inf, False), (math.nan, False)):
        decay = torch.full((1, 1, 8, 4), -0.1, dtype=F64)
        decay[..., 2, 1] = gate
        assert kernels.applies(Steps(q, q, q, decay, erase=erase), None) is expected


# Definitions ------------------------------------------------------------------------------------------------------------


@pytest.mark.campaign(keep=5)
@every_kind
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(data=st.data())
def test_every_form_is_the_loop(kind: str, data: st.DataObject) -> None:
    B, G, R = (data.draw(st.integers(low, 2), label=name) for name, low in (("B", 0), ("G", 1), ("R", 1)))
    K, V = (data.draw(st.sampled_from([1, 3, 8, 17]), label=name) for name in "KV")
    L = data.draw(st.sampled_from([0, 1, 2, 5, 15, 16, 17, 63, 64, 65, 200]), label="L")
    form, chunk = data.draw(st.sampled_from(FORMS), label="form"), data.draw(st.sampled_from([1, 7, 16, 40, 64]))
    strength = data.draw(st.sampled_from([1e-3, 0.3, 10.0, 1e3]), label="strength")
    tensors, options = call(kind, B, G, G * R, L, K, V, strength=strength)
    if data.draw(st.booleans(), label="own queries"):
        tensors = (numbers(B, G * R, L, K, seed=8), *tensors[1:])
    if data.draw(st.booleans(), label="state"):
        options["state"] = numbers(B, G * R, K, V, seed=9)
    found = gated_recurrence(*tensors, form=form, chunk=chunk, return_state=True, **options)
    close(found, by_steps(*tensors, **options))


@pytest.mark.campaign(keep=20)
@every_kind
@pytest.mark.parametrize("length", [1, 4, 5, 63, 64, 200])
def test_single_precision(kind: str, length: int) -> None:
    tensors, options = call(kind, 2, 2, 4, length, 33, 20)
    options["state"] = numbers(2, 4, 33, 20, seed=9)
    right = by_steps(*tensors, **options)
    for form in FORMS:
        found = gated_recurrence(
            *(x.float() for x in tensors), form=form, return_state=True, **cast(options, lambda x: x.float())
        )
        near(found[0], right[0])
        near(found[1], right[1])


@across({"form": FORMS, "kind": KINDS, "gate": [-1e3, -math.inf, -90.0, -30.0], "dtype": [torch.float32, F64]})
def test_strong_decays(form: str, kind: str, gate: float, dtype: torch.dtype) -> None:
    tensors, options = call(kind, 1, 1, 2, 150, 9, 10, strength=0.01)
    if "log_decay" in options:
        strong = numbers(*options["log_decay"].shape, seed=11) > 1.0
        options["log_decay"] = torch.where(strong, gate, options["log_decay"])
    options["state"] = numbers(1, 2, 9, 10, seed=9)
    tensors, options = tuple(x.to(dtype) for x in tensors), cast(options, lambda x: x.to(dtype))
    right = by_steps(*tensors, **options)
    found = gated_recurrence(*tensors, form=form, return_state=True, **options)
    for one, other in zip(found, right):
        near(one, other, 5e-6 if dtype == torch.float32 else 1e-10)


@every_form
@pytest.mark.parametrize("rate", [0.0, 1.0, 2.0])
def test_keys_all_alike(form: str, rate: float) -> None:
    key = torch.nn.functional.normalize(numbers(1, 1, 1, 16), dim=-1).expand(1, 1, 200, 16).float()
    value = numbers(1, 1, 200, 8, seed=1, dtype=torch.float32)
    options: dict[str, Any] = {"rate": torch.full((1, 1, 200), rate), "delta": True}
    found = gated_recurrence(key, key, value, form=form, **options)
    near(found, by_steps(key, key, value, **options)[0], 2e-5)


@across({"form": FORMS, "kind": KINDS, "factor": [1e-15, 1e15]})
def test_huge_and_tiny_values(form: str, kind: str, factor: float) -> None:
    tensors, options = call(kind, 1, 1, 1, 70, 8, 8)
    tensors = (*tensors[:2], factor * tensors[2])
    right = by_steps(*tensors, **options)
    found = gated_recurrence(
        *(x.float() for x in tensors), form=form, return_state=True, **cast(options, lambda x: x.float())
    )
    near(found[0], right[0], 1e-5)
    near(found[1], right[1], 1e-5)


@every_kind
def test_strided_and_broadcast_inputs(kind: str) -> None:
    (q, k, v), options = call(kind, 2, 3, 3, 40, 8, 5)
    options["log_decay"] = torch.full((1, 3, 1), -0.1, dtype=F64).expand(2, 3, 40)
    right = by_steps(q, k, v, **options)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = torch.cat([q, k, v], -1).requires_grad_()
    for tensors in (strided, wide.split([8, 8, 5], -1), [q, k, v.mT.contiguous().mT]):
        close(gated_recurrence(*tensors, return_state=True, **options), right)
    same = q[:, :1].expand(2, 3, 40, 8)
    close(gated_recurrence(same, k, v, **options), by_steps(same, k, v, **options)[0])


def test_layouts_are_kept() -> None:
    (q, k, v), options = call("gated-delta", 2, 3, 3, 40, 8, 5)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert gated_recurrence(q, k, v, **options).stride() == v.stride()


def test_the_erasing_rule_is_the_delta_rule() -> None:
    (q, k, v), options = call("kda", 1, 2, 2, 70, 8, 5)
    rate, gate = options["rate"], options["log_decay"]
    erase = (rate.unsqueeze(-1) * k, k * gate.exp())
    found = gated_recurrence(q, k, v, log_decay=gate, rate=rate, erase=erase)
    close(found, gated_recurrence(q, k, v, **options))


def test_fast_weights_is_a_special_case() -> None:
    (q, k, v), options = call("delta", 1, 2, 2, 70, 8, 5)
    found = gated_recurrence(q, k, v, scale=1.0, **options)
    close(found, fast_weights(q, k, v, options["rate"], rule="delta"))


# States, documents, padding ---------------------------------------------------------------------------------------------


@across({"form": FORMS, "kind": KINDS, "cuts": [[1, 39], [16, 24], [0, 40], [3, 30, 7]]})
def test_a_state_continues_a_sequence(form: str, kind: str, cuts: list[int]) -> None:
    tensors, options = call(kind, 2, 1, 2, 40, 5, 4)
    bonus = {"bonus": options.pop("bonus")} if "bonus" in options else {}
    whole = gated_recurrence(*tensors, form=form, chunk=16, return_state=True, **options, **bonus)
    found, state, first = [], None, 0
    for count in cuts:
        part = slice(first, first + count)
        own = cast(options, lambda x, part=part: x[:, :, part])
        end, state = gated_recurrence(
            *(x[:, :, part] for x in tensors), form=form, state=state, return_state=True, **own, **bonus
        )
        found.append(end)
        first += count
    close((torch.cat(found, 2), state), whole)


@across({"form": FORMS, "kind": KINDS, "seed": [0, 1, 2]})
def test_documents_start_with_nothing(form: str, kind: str, seed: int) -> None:
    tensors, options = call(kind, 2, 1, 2, 50, 5, 4)
    options["state"] = numbers(2, 2, 5, 4, seed=9)
    documents = torch.randint(3, (2, 50), generator=torch.Generator().manual_seed(seed))
    documents = documents.sort(-1).values if seed else documents
    starts = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    found = gated_recurrence(*tensors, documents=documents, form=form, chunk=20, return_state=True, **options)
    close(found, by_steps(*tensors, starts=starts, **options))


def test_packed_sequences() -> None:
    tensors, options = call("gated-delta", 1, 2, 2, 50, 5, 4)
    cu = torch.tensor([0, 7, 7, 30, 50])
    ids = torch.tensor([0] * 7 + [2] * 23 + [3] * 20)
    right = gated_recurrence(*tensors, documents=ids, **options)
    for documents in (masks.from_cu_seqlens(cu), masks.document(ids), ids[None].int()):
        assert torch.equal(gated_recurrence(*tensors, documents=documents, **options), right)
    alone = [
        gated_recurrence(*(x[:, :, a:b] for x in tensors), **cast(options, lambda x, a=a, b=b: x[:, :, a:b]))
        for a, b in itertools.pairwise(cu.tolist())
    ]
    close(right, torch.cat(alone, 2))


@across({"garbage": [math.nan, math.inf, 1e300], "form": FORMS, "kind": KINDS})
def test_padding_has_no_influence(form: str, kind: str, garbage: float) -> None:
    lengths = torch.tensor([20, 0, 33])
    beyond = torch.arange(33)[:, None] >= lengths[:, None, None, None]

    def everything(value: float) -> list[Tensor]:
        tensors, options = call(kind, 3, 1, 2, 33, 5, 4)

        def hidden(x: Tensor) -> Tensor:
            if x.dim() == 2:
                return x.requires_grad_()
            return torch.where(beyond if x.dim() == 4 else beyond[..., 0], value, x).requires_grad_()

        tensors, options = tuple(map(hidden, tensors)), cast(options, hidden)
        output, state = gated_recurrence(
            *tensors, form=form, chunk=16, valid_lens=lengths, return_state=True, **options
        )
        (output.square().sum() + state.square().sum()).backward()
        leaves = [*tensors, *(x for each in options.values() for x in (each if isinstance(each, tuple) else (each,)))]
        return [output, state, *(x.grad for x in leaves if isinstance(x, Tensor) and x.grad is not None)]

    for a, b in zip(everything(garbage), everything(-0.5), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


@across({"part": ["query", "key", "value", "gates"], "form": FORMS, "kind": KINDS})
def test_a_nan_changes_no_earlier_step_and_no_other_document(form: str, kind: str, part: str) -> None:
    (q, k, v), options = call(kind, 2, 1, 2, 33, 5, 4)
    documents = torch.arange(33) // 27
    right, end = gated_recurrence(q, k, v, form=form, chunk=16, documents=documents, return_state=True, **options)
    if part == "gates":
        broken = {name: each for name in ("log_decay", "rate", "erase") if (each := options.get(name)) is not None}
        for each in broken.values():
            (each[0] if isinstance(each, tuple) else each)[0, :, 20] = torch.nan
    else:
        {"query": q, "key": k, "value": v}[part][0, :, 20] = torch.nan
    q.requires_grad_()
    found, state = gated_recurrence(q, k, v, form=form, chunk=16, documents=documents, return_state=True, **options)
    torch.testing.assert_close(found[1], right[1])
    torch.testing.assert_close(found[0, :, :20], right[0, :, :20])
    torch.testing.assert_close(found[0, :, 27:], right[0, :, 27:])
    torch.testing.assert_close(state, end)
    found[1].sum().backward()
    assert q.grad is not None


@across({"form": FORMS, "kind": KINDS})
def test_the_state_after_padding_is_that_after_the_last_valid_step(form: str, kind: str) -> None:
    tensors, options = call(kind, 1, 1, 2, 40, 5, 4)
    found = gated_recurrence(*tensors, form=form, valid_lens=torch.tensor([23]), return_state=True, **options)
    bonus = {"bonus": options.pop("bonus")} if "bonus" in options else {}
    cut = gated_recurrence(
        *(x[:, :, :23] for x in tensors), form=form, return_state=True, **cast(options, lambda x: x[:, :, :23]), **bonus
    )
    close((found[0][:, :, :23], found[1]), cut)
    assert found[0][:, :, 23:].eq(0).all()


def test_documents_of_a_single_padded_sequence() -> None:
    tensors, options = call("retention", 1, 1, 2, 40, 5, 4)
    documents = torch.arange(40) // 10
    found = gated_recurrence(*tensors, valid_lens=torch.tensor([23]), documents=documents, **options)
    right = gated_recurrence(*tensors, documents=documents, **options)
    close(found[:, :, :23], right[:, :, :23])
    assert found[:, :, 23:].eq(0).all()


def test_no_steps_have_gradients() -> None:
    tensors = [torch.zeros(1, 2, 0, 3, requires_grad=True) for _ in range(3)]
    gated_recurrence(*tensors).sum().backward()
    assert tensors[2].grad is not None


# Gradients --------------------------------------------------------------------------------------------------------------


def leaves_of(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    rest = [x for each in options.values() for x in (each if isinstance(each, tuple) else (each,))]
    return [*tensors, *(x for x in rest if isinstance(x, Tensor))]


def gradients(function: Any, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the gradients of a sum of outputs and of the last state to all tensors."""
    ready = lambda x: x.detach().requires_grad_()  # noqa: E731
    tensors, options = tuple(map(ready, tensors)), cast(options, ready)
    output, state = function(*tensors, **options)
    sums = [(x * numbers(*x.shape, seed=20 + i).to(x.dtype)).sum() for i, x in enumerate((output, state))]
    leaves = leaves_of(tensors, options)
    return list(torch.autograd.grad(sums[0] + sums[1], leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.campaign(keep=16)
@across({"form": FORMS, "kind": KINDS, "length": [1, 16, 37, 150], "R": [1, 3], "own": [False, True]})
def test_gradients(form: str, kind: str, length: int, R: int, own: bool) -> None:
    tensors, options = call(kind, 2, 2, 2 * R, length, 9, 5)
    options["state"] = numbers(2, 2 * R, 9, 5, seed=9)
    if own:
        tensors = (numbers(2, 2 * R, length, 9, seed=8), *tensors[1:])
    run = partial(gated_recurrence, form=form, chunk=32, return_state=True)
    right = gradients(by_steps, tensors, options)
    close(gradients(run, tensors, options), right, 1e-8)
    single = gradients(run, tuple(x.float() for x in tensors), cast(options, lambda x: x.float()))
    for a, b in zip(single, right, strict=True):
        near(a, b, 2e-5)


@every_kind
def test_activation_checkpointing(kind: str) -> None:
    tensors, options = call(kind, 1, 1, 2, 5, 4, 3)
    run = partial(gated_recurrence, return_state=True)
    again = gradients(partial(checkpoint, run, use_reentrant=False), tensors, options)
    assert all(map(torch.equal, again, gradients(run, tensors, options)))


@across({"kind": ["gated-delta", "kda", "mamba2", "gla"], "gate": [-1e3, -math.inf, -30.0]})
def test_gradients_of_strong_decays(kind: str, gate: float) -> None:
    tensors, options = call(kind, 1, 1, 2, 100, 9, 5, strength=0.01)
    strong = numbers(*options["log_decay"].shape, seed=11) > 1.0
    options["log_decay"] = torch.where(strong, gate, options["log_decay"])
    right = gradients(by_steps, tensors, options)
    run = partial(gated_recurrence, return_state=True)
    for form in ("auto", "chunked"):
        found = gradients(partial(run, form=form), tensors, options)
        close(found, right, 1e-8)


@every_kind
def test_gradients_of_outputs_or_states_alone(kind: str) -> None:
    tensors, options = call(kind, 1, 1, 1, 20, 4, 3)
    for i in (0, 1):
        found = gradients(lambda *t, i=i, **o: (gated_recurrence(*t, return_state=True, **o)[i],) * 2, tensors, options)
        right = gradients(lambda *t, i=i, **o: (by_steps(*t, **o)[i],) * 2, tensors, options)
        close(found, right, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated-delta", "kda", "mamba2"])
def test_second_derivatives(kind: str) -> None:
    tensors, options = call(kind, 1, 1, 2, 5, 3, 2)
    tensors, options = tuple(x.requires_grad_() for x in tensors), cast(options, lambda x: x.requires_grad_())
    names = [name for name, x in options.items() if isinstance(x, Tensor)]
    fixed = {name: x for name, x in options.items() if name not in names}

    def function(*given: Tensor) -> tuple[Tensor, Tensor]:
        return gated_recurrence(*given[:3], return_state=True, **dict(zip(names, given[3:])), **fixed)

    assert torch.autograd.gradgradcheck(function, (*tensors, *(options[name] for name in names)))


@every_kind
def test_transforms(kind: str) -> None:
    tensors, options = call(kind, 1, 1, 2, 20, 4, 3)

    def loss(value: Tensor) -> Tensor:
        return gated_recurrence(*tensors[:2], value, **options).square().sum()

    value = tensors[2].clone().requires_grad_()
    loss(value).backward()
    close(torch.func.grad(loss)(tensors[2]), value.grad)
    batch = torch.stack([tensors[2], -tensors[2]])
    close(torch.func.vmap(loss)(batch), torch.stack([loss(x) for x in batch]))
    _, tangent = torch.func.jvp(loss, (tensors[2],), (tensors[2],))
    assert value.grad is not None
    close(tangent, (value.grad * tensors[2]).sum())


@every_kind
def test_nothing_flows_back_in_time(kind: str) -> None:
    tensors, options = call(kind, 1, 1, 2, 40, 4, 3)
    tensors = tuple(x.requires_grad_() for x in tensors)
    gated_recurrence(*tensors, **options)[:, :, :25].square().sum().backward()
    for x in tensors:
        assert x.grad is not None and x.grad[:, :, 25:].eq(0).all() and x.grad[:, :, :24].ne(0).any()


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated-delta", "kda", "rwkv7"])
def test_compiled(kind: str) -> None:
    torch._dynamo.reset()
    tensors, options = call(kind, 1, 1, 2, 40, 4, 3)
    compiled = torch.compile(gated_recurrence, fullgraph=True, backend="aot_eager")
    close(compiled(*tensors, return_state=True, **options), gated_recurrence(*tensors, return_state=True, **options))


# How it runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gated-delta", "kda", "mamba2"])
def test_any_number_of_threads_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = call(kind, 2, 2, 6, 150, 20, 17)
    monkeypatch.setattr(kernels, "_WORTH", 0)
    run, before = partial(gated_recurrence, return_state=True), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([*run(*tensors, **options), *gradients(run, tensors, options)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    tensors, options = call("kda", 2, 2, 2, 50, 8, 8)
    monkeypatch.setattr(kernels, "_WORTH", 0)
    monkeypatch.setattr(pool, "run", interrupted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        gated_recurrence(*tensors, **options)


@every_kind
def test_half_precision_is_summed_in_single(kind: str) -> None:
    tensors, options = call(kind, 1, 1, 2, 300, 8, 4)
    narrow = tuple(x.to(torch.bfloat16) for x in tensors)
    gates = cast(options, lambda x: x.to(torch.bfloat16))
    found, state = gated_recurrence(*narrow, return_state=True, **gates)
    right, _ = by_steps(*(x.double() for x in narrow), **cast(gates, lambda x: x.double()))
    assert found.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert ((found.double() - right).abs() <= right.abs() * 2.0**-8 + right.abs().max() * 1e-5).all()


def test_autocast() -> None:
    tensors, options = call("gated-delta", 1, 1, 2, 30, 8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_recurrence(*(x.float() for x in tensors), **cast(options, lambda x: x.float()))
    assert found.dtype == torch.bfloat16


@every_form
def test_the_inputs_are_left_alone(form: str) -> None:
    tensors, options = call("gated-delta", 1, 1, 2, 3, 8, 4)
    options["state"] = numbers(1, 2, 8, 4, seed=9)
    kept = [x.clone() for x in leaves_of(tensors, options)]
    gated_recurrence(*tensors, form=form, return_state=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(leaves_of(tensors, options), kept, strict=True))


# Others' implementations ------------------------------------------------------------------------------------------------


def singles(kind: str, L: int, G: int = 2, H: int = 4, K: int = 16, V: int = 24) -> tuple[Any, Any]:
    tensors, options = call(kind, 2, G, H, L, K, V)
    if "rate" in options:
        options["rate"] = options["rate"] / 2
    return tuple(x.float() for x in tensors), cast(options, lambda x: x.float())


@pytest.mark.parametrize("length", [1, 64, 100])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_transformers_gated_delta_rule(name: str, length: int) -> None:
    (q, k, v), options = singles("gated-delta", length)
    state = numbers(2, 4, 16, 24, seed=9, dtype=torch.float32)
    turned = (x.transpose(1, 2) for x in (q, k, v, options["log_decay"], options["rate"]))
    right, end = getattr(qwen, name)(*turned, initial_state=state.clone(), output_final_state=True)
    found = gated_recurrence(q, k, v, state=state, return_state=True, **options)
    near(found[0], right.transpose(1, 2).double(), 1e-5)
    near(found[1], end.double(), 1e-5)


@pytest.mark.parametrize("length", [1, 64, 100])
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_transformers_kimi_delta_attention(name: str, length: int) -> None:
    (q, k, v), options = singles("kda", length, G=3, H=3)
    state = numbers(2, 3, 16, 24, seed=9, dtype=torch.float32)
    turned = (x.transpose(1, 2) for x in (q, k, v, options["log_decay"], options["rate"]))
    right, end = getattr(kimi, name)(*turned, initial_state=state.clone(), output_final_state=True)
    found = gated_recurrence(q, k, v, state=state, return_state=True, **options)
    near(found[0], right.transpose(1, 2).double(), 1e-5)
    near(found[1], end.double(), 1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_transformers_mamba2(groups: int) -> None:
    c, b, x = (
        numbers(2, 70, n, w, seed=i, dtype=torch.float32)
        for i, (n, w) in enumerate(((groups, 16), (groups, 16), (4, 8)))
    )
    dt = numbers(2, 70, 4, seed=4, dtype=torch.float32).exp()
    a = -numbers(4, seed=5, dtype=torch.float32).exp()
    right, end = mamba.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=32, return_final_states=True)
    q, k, v, rate, gate = (t.transpose(1, 2) for t in (c, b, x, dt, dt * a))
    found, state = gated_recurrence(q, k, v, log_decay=gate, rate=rate, scale=1.0, return_state=True)
    near(found, right.transpose(1, 2).double(), 1e-5)
    near(state, end.mT.double(), 1e-5)  # theirs is (V, K)
    time = dt[:, 0, :, None].expand(-1, -1, 8)
    one = mamba.mamba2_selective_state_update(end, x[:, 0], time, a[:, None, None], b[:, 0], c[:, 0])
    step = (t[:, :, :1] for t in (q, k, v))
    found = gated_recurrence(*step, log_decay=gate[:, :, :1], rate=rate[:, :, :1], scale=1.0, state=state)
    near(found[:, :, 0], one.double(), 1e-5)


# Bad input --------------------------------------------------------------------------------------------------------------

Q, V = torch.zeros(2, 3, 4, 5), torch.zeros(2, 6, 4, 7)
GATE, CHANNELS = torch.zeros(2, 6, 4), torch.zeros(2, 6, 4, 5)


def bad(query: Any = Q, key: Any = Q, value: Any = V, **options: Any) -> Any:
    return lambda: gated_recurrence(query, key, value, **options)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (bad(None), TypeError, "query must be a float tensor (B, H, L, width), got None."),
    (bad(key=Q.long()), TypeError, "key must be a float tensor (B, H, L, width), got an int64 tensor of shape (2, 3, 4, 5)."),
    (bad(key=Q[0]), ValueError, "key must have shape (B, H, L, width), got (3, 4, 5)."),
    (bad(key=Q.to("meta")), ValueError, "key must be on query's device cpu, got meta."),
    (bad(value=V[:, :, 1:]), ValueError, "value must have query's batch and length, got (2, 6, 3, 7) (query (2, 3, 4, 5))."),
    (bad(value=V[:, :5]), ValueError, "value must have a multiple of key's 3 heads, got 5."),
    (bad(Q[:, :2]), ValueError, "query must have as many heads as key or value, 3 or 6, got 2."),
    (bad(key=Q[..., :2]), ValueError, "key must have query's head width 5, got 2 (query (2, 3, 4, 5), key (2, 3, 4, 2))."),
    (bad(value=V.double()), TypeError, "value must have query's dtype torch.float32, got torch.float64."),
    (bad(log_decay=1.0), TypeError, "log_decay must be a float tensor (2, 6, 4) or (2, 6, 4, 5), got 1.0."),
    (bad(log_decay=GATE[:1]), ValueError, "log_decay must have shape (2, 6, 4) or (2, 6, 4, 5), got (1, 6, 4)."),
    (bad(log_decay=GATE + 0.5), ValueError, "log_decay must be at most 0, got 0.5."),
    (bad(log_decay=CHANNELS + 0.5, form="chunked"), ValueError, "log_decay must be at most 0, got 0.5."),
    (bad(log_decay=CHANNELS + 0.5), ValueError, "log_decay must be at most 0, got 0.5."),
    (bad(rate=Q), ValueError, "rate must have shape (2, 6, 4), got (2, 3, 4, 5)."),
    (bad(rate=GATE - 0.5, delta=True), ValueError, "rate must be in [0, 2] with the delta rule, got -0.5."),
    (bad(rate=GATE + 2.5, delta=True), ValueError, "rate must be in [0, 2] with the delta rule, got 2.5."),
    (bad(rate=GATE + 2.5, delta=True, form="recurrent"), ValueError, "rate must be in [0, 2] with the delta rule, got 2.5."),
    (bad(delta=1), TypeError, "delta must be a bool, got 1."),
    (bad(erase=CHANNELS), TypeError, "erase must be a pair (a, e) of tensors, got a float32 tensor of shape (2, 6, 4, 5)."),
    (bad(erase=(CHANNELS, GATE)), ValueError, "erase[1] must have shape (2, 6, 4, 5), got (2, 6, 4)."),
    (bad(erase=(CHANNELS, CHANNELS), delta=True), ValueError, "erase must be None with the delta rule, got a pair."),
    (bad(bonus=GATE), ValueError, "bonus must have shape (6, 5), got (2, 6, 4)."),
    (bad(scale="1"), TypeError, "scale must be a finite number, got '1'."),
    (bad(scale=math.inf), ValueError, "scale must be a finite number, got inf."),
    (bad(state=Q), ValueError, "state must have shape (2, 6, 5, 7), got (2, 3, 4, 5)."),
    (bad(state=(Q, None)), TypeError, "state must be a float tensor (2, 6, 5, 7), got an object of type tuple."),
    (bad(valid_lens=torch.ones(3).long()), ValueError, "valid_lens must have shape (2,), got (3,)."),
    (bad(documents=torch.ones(2, 3).long()), ValueError, "documents must be an integer tensor (L,) or (B, L), here (2, 4), got an int64 tensor of shape (2, 3)."),
    (bad(form="fast"), ValueError, "form must be one of 'auto', 'chunked', 'parallel', 'recurrent', got 'fast' (did you mean 'auto'?)."),
    (bad(chunk=0), ValueError, "chunk must be an int of at least 1, got 0."),
]  # fmt: skip


@pytest.mark.parametrize(("function", "kind", "message"), WRONG, ids=[message[:60] for *_, message in WRONG])
def test_errors(function: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(f'gated_recurrence: {message}')}$"):
        function()


@pytest.mark.parametrize("form", FORMS)
def test_a_step_checks_its_gates_too(form: str) -> None:
    one = (Q[:, :, :1], Q[:, :, :1], V[:, :, :1])
    with pytest.raises(ValueError, match=r"log_decay must be at most 0, got 1\.0\."):
        gated_recurrence(*one, log_decay=GATE[:, :, :1] + 1, form=form)
    with pytest.raises(ValueError, match=r"rate must be in \[0, 2\] with the delta rule, got 3\.0\."):
        gated_recurrence(*one, rate=GATE[:, :, :1] + 3, delta=True, form=form)
    assert gated_recurrence(*one, rate=GATE[:, :, :1] + 3, form=form).isfinite().all()


# Compiled and exported ------------------------------------------------------------------------------------------------


def made(B: int, L: int, *, channels: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key, value, log decay and rate that need gradients."""
    generator = torch.Generator().manual_seed(L)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    q, k = (torch.nn.functional.normalize(draw(B, 2, L, 6), dim=-1) for _ in range(2))
    decay = -draw(B, 4, L, 6).exp() if channels else -draw(B, 4, L).exp()
    return [t.requires_grad_() for t in (q, k, draw(B, 4, L, 5), decay, draw(B, 4, L).sigmoid())]


def by_parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and state of the delta rule, with documents of 37 steps."""
    documents = torch.arange(q.shape[2]) // 37
    return gated_recurrence(q, k, v, log_decay=g, rate=rate, delta=True, documents=documents, return_state=True)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("channels", [False, True])
def test_a_compiled_call_runs_the_kernels_at_any_length(channels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("forward", "backward"):
        whole = getattr(kernels._Call, name)
        monkeypatch.setattr(kernels._Call, name, lambda *a, w=whole, n=name, **k: (ran.append(n), w(*a, **k))[1])
    torch._dynamo.reset()
    compiled = torch.compile(by_parts, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, (B, L) in enumerate([(3, 70), (2, 150), (5, 41)]):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            found = []
            for run in (compiled, by_parts):
                given = made(B, L, channels=channels)
                ran.clear()
                output, end = run(*given)
                (output.square().sum() + (end * torch.arange(5)).sum()).backward()
                assert ran == ["forward", "backward"]
                found.append([output, end, *(t.grad for t in given)])
            torch.testing.assert_close(*found)
    with torch.no_grad(), torch.compiler.set_stance("default"):
        torch.testing.assert_close(compiled(*made(2, 9, channels=channels)), by_parts(*made(2, 9, channels=channels)))


def test_a_compiled_call_refuses_what_an_eager_one_does() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(by_parts, fullgraph=True, backend="aot_eager")
    q, k, v, g, rate = made(2, 7, channels=False)
    with pytest.raises(ValueError, match="gated_recurrence: log_decay must be at most 0"):
        compiled(q, k, v, -g, rate)
    from regard.nn.linear.operator import recur
    from regard.nn.linear.steps import Steps

    def traced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return recur(Steps(q, k, v), None, form="auto", chunk=64)[0]

    recorded = torch.jit.trace(traced, (q, k, v[:, :2]), check_trace=False)
    longer = [t[:, :2].detach().requires_grad_() for t in made(3, 11, channels=False)[:3]]
    torch.testing.assert_close(recorded(*longer), traced(*longer))
    (grad,) = torch.autograd.grad(recorded(*longer).square().sum(), longer[0], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        grad.sum().backward()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("channels", [False, True])
def test_an_exported_program_takes_any_length(channels: bool) -> None:
    class Parts(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
            return by_parts(*given)

    free = torch.export.Dim.DYNAMIC
    given = made(3, 70, channels=channels)
    program = torch.export.export(
        Parts(), tuple(given), dynamic_shapes={"given": tuple({0: free, 2: free} for _ in given)}
    )
    names = {str(node.target) for node in program.graph.nodes}
    assert not any("regard" in name for name in names)  # it runs where this library is not installed
    for B, L in ((2, 150), (5, 33)):
        given = made(B, L, channels=channels)
        torch.testing.assert_close(program.module()(*given), by_parts(*given))


def test_views_of_negatives_count_as_what_they_show() -> None:
    """``torch.imag`` of a conjugate is a view whose memory holds the other sign."""
    (q, k, v), options = call("gated-delta", 2, 2, 4, 20, 8, 6)
    views = [torch._neg_view(each).requires_grad_() for each in (q, k, v)]
    plain = [(-each).requires_grad_() for each in (q, k, v)]
    grad = torch._neg_view(numbers(2, 4, 20, 6, seed=9))
    found, expected = (gated_recurrence(*each, **options) for each in (views, plain))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o, each, grad) for o, each in ((found, views), (expected, plain))))
