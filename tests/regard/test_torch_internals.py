"""The private names of torch that the package uses mean what they are used for."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard._utils import torch_private as _torch

ASKED = (
    _torch.in_functorch, _torch.in_forward_mode, _torch.is_dispatched, _torch.is_proxied, _torch.is_jit_tracing
)  # fmt: skip


def answers() -> set[str]:
    found = {ask.__name__ for ask in ASKED if ask()}
    assert _torch.is_eager() == (not found)
    return found


def test_nothing_is_going_on() -> None:
    assert answers() == set()
    assert not _torch.is_fake(torch.zeros(2))


def test_transforms_forward_mode_and_modes_are_noticed() -> None:
    seen: dict[str, set[str]] = {}

    def look(name: str, x: Tensor) -> Tensor:
        seen[name] = answers()
        return x * 2

    torch.func.vmap(lambda x: look("vmap", x))(torch.ones(3))
    torch.func.grad(lambda x: look("grad", x).sum())(torch.ones(3))
    with torch.autograd.forward_ad.dual_level():
        look("forward", torch.ones(3))
    with FlopCounterMode(display=False):
        look("counted", torch.ones(3))
    make_fx(lambda x: look("recorded", x))(torch.ones(3))
    torch.jit.trace(lambda x: look("traced", x), torch.ones(3), check_trace=False)
    assert seen["vmap"] == seen["grad"] == {"in_functorch"}
    assert seen["forward"] == {"in_forward_mode"}
    assert seen["counted"] == {"is_dispatched"}
    assert "is_proxied" in seen["recorded"]
    assert seen["traced"] == {"is_jit_tracing"}
    with FakeTensorMode():
        assert _torch.is_fake(torch.zeros(2))


def test_an_observer_sees_operators_and_changes_nothing() -> None:
    seen: list[str] = []

    class Names(_torch.Observer):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    query = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda x: (x @ x.mT).softmax(-1) @ x, backend="eager")
    alone, ours = compiled(query), regard.attention(query, query, query, softcap=2.0)
    with Names():
        assert answers() == set() and _torch.is_eager()
        assert torch.equal(compiled(query), alone)
        assert torch.equal(regard.attention(query, query, query, softcap=2.0), ours)
        with FlopCounterMode(display=False):
            assert _torch.is_dispatched()
    assert "aten::_softmax" in seen and answers() == set()


def test_cells_run_in_bfloat16_where_it_says_so() -> None:
    cell, rows = nn.LSTM(4, 4), torch.zeros(2, 1, 4)
    with torch.autocast("cpu", torch.bfloat16), ExitStack() as stack:
        if not _torch.has_bfloat16_cells():
            stack.enter_context(pytest.raises(RuntimeError))
        assert cell(rows)[0].dtype == torch.bfloat16


def test_the_kernel_is_torchs_attention_and_tells_its_log_sum_exp() -> None:
    query, key, value = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    added = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf)[None, None]
    output, lse = _torch.flash_attention(query, key, value, 0.0, False, attn_mask=added, scale=0.3)
    right = F.scaled_dot_product_attention(query, key, value, added, scale=0.3)
    scores = query.double() @ key.double().mT * 0.3 + added
    torch.testing.assert_close(output, right)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    ends = [t.clone().requires_grad_() for t in (query, key, value)]
    grads = torch.autograd.grad(F.scaled_dot_product_attention(*ends, added, scale=0.3).sum(), ends)
    found = _torch.flash_attention_backward(
        torch.ones_like(output), query, key, value, output, lse, 0.0, False, attn_mask=added, scale=0.3
    )
    for mine, theirs in zip(found, grads):
        torch.testing.assert_close(mine, theirs)


def test_tensors_count_what_changes_them_and_their_views() -> None:
    tensor = torch.zeros(3, 4)
    before = _torch.changes_of(tensor)
    tensor[1].add_(1)
    assert _torch.changes_of(tensor) == before + 1


def test_a_tensor_without_storage_has_its_facts() -> None:
    class Named(torch.Tensor):
        __torch_dispatch__ = None

    made = _torch.without_storage(Named, (2, 3), torch.bool, torch.device("cpu"))
    with _torch.as_plain_tensors():
        assert type(made) is Named and tuple(made.shape) == (2, 3) and made.dtype == torch.bool
    assert _torch.replaced(int, lambda n: n + 1, {"a": [1, (2, "x")]}) == {"a": [2, (3, "x")]}


def test_an_assertion_is_checked_when_a_compiled_function_runs() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        _torch.assert_when_it_runs((x > 0).all(), "x must be positive")
        return x + 1

    compiled = torch.compile(positive, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="x must be positive"):
        compiled(-torch.ones(2))


def test_the_output_projection_is_that_of_torchs_module() -> None:
    assert type(nn.MultiheadAttention(4, 2).out_proj) is _torch.OutProjection


def test_no_private_name_of_torch_is_used_elsewhere() -> None:
    folder = Path(regard.__file__).parent
    private = re.compile(r"torch(?:\.\w+)*\._[a-zA-Z]|from torch\._|aten\._|ops\.mkldnn")
    found = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        if path.name != "torch_private.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if private.search(line.split("#")[0])
    ]
    assert not found, "\n".join(found)


def test_what_the_compiler_raises_and_takes_for_equal() -> None:
    def fails(graph: object, example: object) -> object:
        raise RuntimeError("no")

    with pytest.raises(_torch.compilation_errors()):
        torch.compile(lambda x: x + 1, backend=fails, fullgraph=True)(torch.ones(3))
    graphs: list[object] = []
    for context, compiled in ((ExitStack(), 2), (_torch.distinct_sizes(), 1)):
        graphs.clear()
        torch.compiler.reset()
        summed = torch.compile(lambda x, y: x.sum() + y.sum(), backend=lambda g, _: graphs.append(g) or g, dynamic=True)
        with context:
            summed(torch.ones(3), torch.ones(3, 5))
            summed(torch.ones(4), torch.ones(6, 5))
        assert len(graphs) == compiled
    assert _torch.is_view(torch.ones(3)[:2])
    assert not _torch.is_view(torch.ones(3))
