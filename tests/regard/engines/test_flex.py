"""Engine ``flex``: the lists of blocks it makes of masks, what it compiles and how often, and when ``auto`` chooses it.

All other tests compute what FlexAttention is documented to; the laws of tests/regard/conformance are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard import AuxRequest, functional, masks, normalizers, scores
from regard._call import plan as _plan
from regard.engines import cost_model, flex, sdpa
from regard.engines.base import KernelError
from regard.engines.flex import MODE, Lowered
from regard.engines.problem import Call, Problem
from regard.masks.base import EMPTY, FULL, MIXED, Mask
from regard.normalizers import SoftmaxSink

B, H, G, E, V = 2, 4, 2, 20, 7


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ends(L: int, S: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return normal(B, H, L, E, seed=seed), normal(B, G, S, E, seed=seed + 1), normal(B, G, S, V, seed=seed + 2)


def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - 0.1 * h * (q_idx - kv_idx).abs()


def third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + kv_idx + h) % 3 == 0


#: Masks of so many queries and keys, by name; each query of the first ones sees one run of keys.
MASKS: dict[str, Callable[[int, int], Any]] = {
    "causal": lambda L, S: masks.causal(align="lower_right"),
    "window": lambda L, S: masks.window(30, 20, offset=-5),
    "padding": lambda L, S: masks.padding(torch.tensor([S, S // 3])),
    "causal & padding": lambda L, S: masks.causal(align="lower_right") & masks.padding(torch.tensor([S // 2, S])),
    "prefix": lambda L, S: masks.prefix(9) | masks.causal(align="upper_left"),
    "documents": lambda L, S: masks.document(torch.arange(L) // 40, torch.arange(S) // 50),
    "empty rows": lambda L, S: masks.window(3, 0, offset=-(L // 2)),
    "dilated": lambda L, S: masks.dilated(3, align="lower_right") & ~masks.window(9, 9, align="lower_right"),
    "sinks": lambda L, S: masks.window(10, 0, align="lower_right") | masks.sinks(4),
    "dense": lambda L, S: masks.dense(normal(H, L, S, seed=5) > 0),
    "others": lambda L, S: ~masks.window(0, 0, align="upper_left"),
    "keys of a sequence": lambda L, S: masks.key_padding(normal(B, S, seed=6) > 0),
    "function": lambda L, S: third,
    "function & causal": lambda L, S: masks.as_mask(third) & masks.causal(align="lower_right"),
    "alibi": lambda L, S: masks.causal(align="lower_right") & masks.alibi(H, align="lower_right"),
    "relative": lambda L, S: masks.relative(normal(H, 9, seed=7), align="upper_left"),
    "bias": lambda L, S: masks.dense(normal(H, L, S, seed=8)),
}
RUNS = ("causal", "window", "padding", "causal & padding", "documents", "empty rows")


def problem(mask: Any, L: int = 37, S: int = 50, **named: Any) -> Problem:
    return Problem.of(Call(*ends(L, S), mask, enable_gqa=True, **named))


def listed(counts: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """Return which blocks (b, h, rows, columns) lists name, one by one."""
    found = torch.zeros(*counts.shape[:2], rows, columns, dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        for column in indices[b, h, row, : int(counts[b, h, row])].tolist():
            found[b, h, row, column] = True
    return found


# Masks become lists of blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), [(37, 50), (5, 64), (64, 7), (1, 33), (33, 1)])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_what_the_pairs_say(name: str, L: int, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 8
    monkeypatch.setattr(flex, "BLOCK", size)
    made = problem(MASKS[name](L, S), L, S)
    lowered = Lowered.of(made, reads=True)
    if lowered is None:
        assert made.mask is None or not made.mask.hides
        return
    assert made.mask is not None
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    pairs = made.mask(b, h, torch.arange(L).unsqueeze(1), torch.arange(S))
    rows, columns = -(-L // size), -(-S // size)
    of_rows = [pairs[:, :, i * size : (i + 1) * size] for i in range(rows)]
    tiles = [[part[..., j * size : (j + 1) * size].flatten(2) for j in range(columns)] for part in of_rows]
    some = torch.stack([torch.stack([tile.any(-1) for tile in row], -1) for row in tiles], -2)
    every = torch.stack([torch.stack([tile.all(-1) for tile in row], -1) for row in tiles], -2)
    sides = max(rows, 2), max(columns, 2)
    mixed, full = (listed(*lowered.lists[i : i + 2], *sides)[:, :, :rows, :columns] for i in (0, 2))
    assert not (mixed & full).any()
    assert not (full & ~every).any(), "a block counts as full although a pair is hidden"
    assert not (some & ~(mixed | full)).any(), "a block is left out although a pair is visible"
    if name in RUNS:
        assert torch.equal(full.expand(B, H, rows, columns), every.expand(B, H, rows, columns))
    for i in (4, 6):  # by key: for the backward pass
        by_key = listed(*lowered.lists[i : i + 2], *sides[::-1])
        assert torch.equal(by_key.mT, listed(*lowered.lists[i - 4 : i - 2], *sides))


@pytest.mark.parametrize("name", RUNS)
def test_masks_of_runs_evaluate_no_pair_and_share_a_predicate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(MASKS[name](37, 50))
    assert made.mask is not None
    for kind in {type(part) for part in (made.mask, *getattr(made.mask, "masks", ()))}:
        monkeypatch.setattr(kind, "visible", None)
    lowered = Lowered.of(made, reads=True)
    assert lowered is not None
    assert lowered.edges is not None
    assert lowered.mask is None


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.selected(torch.arange(64).unsqueeze(-1) // 16 * 4 + torch.tensor([0, 3, 3])), 8),
        (masks.selected(torch.arange(64).view(1, 64, 1) // 32, 8), 8),
        (masks.neighbourhood((64,), 5), 22),
        (masks.neighbourhood((8, 8), 3), 24),
    ],
)
def test_selected_keys_and_neighbourhoods_are_lists_of_blocks(mask: Mask, most: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(flex, "BLOCK", 8)
    lowered = Lowered.of(problem(mask, 64, 64), reads=True)
    assert lowered is not None
    assert int((lowered.lists[0] + lowered.lists[2]).sum(-1).amax(dim=(0, 1)).sum()) <= most  # of 64 blocks of pairs


def test_lists_of_blocks_do_not_grow_with_the_pairs() -> None:
    long = 1 << 19
    query = torch.empty(1, 1, long, 1)
    made = Problem.of(Call(query, query, query, masks.causal(align="upper_left")))
    lowered = Lowered.of(made, reads=True)
    assert lowered is not None
    assert lowered.block > flex.BLOCK
    assert lowered.lists[1].numel() <= flex.MOST_BLOCKS
    assert int(lowered.lists[0].sum()) == lowered.lists[0].shape[2]  # the diagonal alone is mixed


def test_numbers_of_a_mask_become_tensors() -> None:
    mask = masks.dilated(2, offset=3) & ~masks.dilated(3, align="upper_left")
    made = problem(mask).mask
    assert made is not None
    with_tensors = made.in_tensors(torch.float32, torch.device("cpu"))
    assert [t.item() for t in with_tensors.tensors()] == [3, 0]
    index = torch.arange(6)
    assert torch.equal(with_tensors(0, 0, index[:, None], index), made(0, 0, index[:, None], index))
    bias = problem(masks.alibi(H, offset=2)).mask
    assert bias is not None
    same = bias.in_tensors(torch.float32, torch.device("cpu"))
    where = torch.tensor(0), torch.arange(H)[:, None, None], index[:, None], index
    assert len(same.tensors()) == 2
    torch.testing.assert_close(same.bias(*where), bias.bias(*where))


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *MASKS])
def test_it_equals_the_reference(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    args = ends(37, 50)
    mask = None if name is None else MASKS[name](37, 50)
    for score in (None, "cosine", near):
        for options in ({}, {"softcap": 2.0}, {"normalizer": SoftmaxSink(torch.tensor([0.0, 1.0, -1.0, 2.0]))}):
            named = {"enable_gqa": True, "score": score, **options}
            right = regard.attention(
                *(t.double() for t in args), mask_in(mask, torch.float64), engine="reference", **named
            )
            found = regard.attention(*args, mask, engine="flex", **named)
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=2e-6)


def mask_in(mask: Any, dtype: torch.dtype) -> Any:
    return mask.cast(dtype) if isinstance(mask, Mask) else mask


def test_functions_with_tensors_and_block_masks_of_the_caller_run_as_they_are() -> None:
    args, table, ids = ends(37, 50), normal(H, 50, seed=3), torch.arange(50) // 7
    made = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 37, 50, device="cpu", BLOCK_SIZE=16)
    learned = table.clone().requires_grad_()
    for mask in (lambda b, h, q, k: ids[q] != ids[k], made):
        for score in (None, lambda score, b, h, q, k: score + learned[h, k]):
            found, right = (
                regard.attention(*args, mask, score=score, enable_gqa=True, engine=engine)
                for engine in ("flex", "reference")
            )
            torch.testing.assert_close(found, right)
            if score is not None:
                grads = [torch.autograd.grad(output.square().sum(), learned)[0] for output in (found, right)]
                torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_bias_that_leaves_the_log_sum_exp_no_digits_has_right_gradients() -> None:
    leaves = [t.requires_grad_() for t in ends(5, 6)]
    bias = torch.full((5, 6), -1e9)
    grads = []
    for engine in ("flex", "reference"):
        output = regard.attention(*leaves, bias, enable_gqa=True, engine=engine)
        grads.append(torch.autograd.grad(output.square().sum(), leaves))
    for found, right in zip(*grads, strict=True):
        torch.testing.assert_close(found, right)


def test_aux_has_the_log_sum_exp_of_the_same_pass() -> None:
    args = ends(37, 50)
    _, aux = regard.attention(*args, third, enable_gqa=True, engine="flex", return_aux=AuxRequest(lse=True, topk=2))
    right = regard.attention(*args, third, enable_gqa=True, engine="reference", return_aux=AuxRequest(lse=True))[1]
    torch.testing.assert_close(aux.lse, right.lse)


def test_far_points_of_a_gaussian_keep_their_digits() -> None:
    near_zero = normal(1, 1, 40, 3).bfloat16()
    for shift in (0.0, 300.0):
        points = torch.cat((near_zero, near_zero + shift), 2)
        outputs = [regard.attention(points, points, points, score="gaussian", engine=e) for e in ("flex", "reference")]
        torch.testing.assert_close(*outputs, rtol=2e-2, atol=1e-2)


# What it refuses ------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"normalizer": "sparsemax"}, "softmax only, not Sparsemax"),
    ({"normalizer": "sigmoid"}, "softmax only, not Sigmoid"),
    ({"dropout_p": 0.1}, "no dropout"),
    (
        {"score": scores.Additive(torch.ones(E))},
        "Additive is not a dot product of features of the query and of the key",
    ),
    ({"score": scores.Laplacian(1.0)}, "Laplacian is not a dot product of features of the query and of the key"),
    ({"score": scores.Boxcar(1.0)}, "Boxcar is not a dot product of features of the query and of the key"),
    ({"score": scores.ScoreMod(near, scores.Laplacian(1.0))}, "Laplacian is not a dot product of features"),
    ({"score": "gaussian"}, "as a dot product, Gaussian needs a dtype wider than torch.float32"),
    ({"attn_mask": masks.alibi(torch.ones(H, requires_grad=True), align="upper_left")}, "no gradient to a bias"),
    ({"order": 1}, "order=0 only"),
]
ON_A_CPU: list[tuple[dict[str, Any], str]] = [
    ({"grad": True}, "no gradients on a CPU, where FlexAttention has no backward pass"),
    ({"normalizer": SoftmaxSink()}, "no sink on a CPU, where FlexAttention returns no log-sum-exp"),
    ({"dtype": torch.float64}, "float16, bfloat16 and float32 only, not torch.float64"),
]


@pytest.mark.parametrize(("named", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_one_sentence_says_why_not(named: dict[str, Any], reason: str) -> None:
    args = ends(5, 6)
    with pytest.raises(ValueError, match=r"^attention: engine must be able to run this call, got 'flex': ") as error:
        regard.attention(*args, enable_gqa=True, engine="flex", **named)
    assert reason in str(error.value)
    assert reason in regard.explain(*args, enable_gqa=True, **named).others["flex"]


def test_no_compiler_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    expected = "on a CPU, FlexAttention needs a C++ compiler: there is no 'no-such-compiler', which CXX can name"
    assert regard.explain(*ends(5, 6), enable_gqa=True).others["flex"].endswith(expected)


@pytest.mark.parametrize(("named", "reason"), ON_A_CPU, ids=[reason for _, reason in ON_A_CPU])
def test_what_the_compiled_kernel_cannot_do_on_a_cpu(
    named: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MODE)
    args = [t.to(named.get("dtype", torch.float32)) for t in ends(5, 6)]
    args[0].requires_grad_(named.get("grad", False))
    with pytest.raises(ValueError, match=reason):
        regard.attention(*args, enable_gqa=True, engine="flex", normalizer=named.get("normalizer", "softmax"))


def test_wide_rows_derivatives_and_transforms_are_refused() -> None:
    wide = normal(1, 1, 3, 257)
    with pytest.raises(ValueError, match="widths of at most 256"):
        regard.attention(wide, wide, wide, engine="flex")
    query, key, value = ends(5, 6)

    def run(query: Tensor) -> Tensor:
        return regard.attention(query, key, value, enable_gqa=True, engine="flex")

    names = r"\(engines 'streaming' and 'reference' have"
    with pytest.raises(ValueError, match=rf"no transforms of torch.func {names} them\)"):
        torch.func.vmap(run)(query.unsqueeze(0))
    with (
        pytest.raises(ValueError, match=rf"no forward-mode derivative {names} one\)"),
        torch.autograd.forward_ad.dual_level(),
    ):
        run(torch.autograd.forward_ad.make_dual(query, query))
    output = run(query.requires_grad_())
    with pytest.raises(RuntimeError, match="engine 'flex' has no second derivative"):
        torch.autograd.grad(output.sum(), query, create_graph=True)


# What is compiled, and how often --------------------------------------------------------------------------------------


class Counted:
    """A compiler that counts and runs graphs as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.count += 1
        return graph.forward


@contextmanager
def compiled_by(backend: Any, monkeypatch: pytest.MonkeyPatch, dynamic: bool = True) -> Iterator[None]:
    """Compile with another backend inside the block, for all sizes at once if ``dynamic``, as on CUDA devices."""
    monkeypatch.delenv(MODE, raising=False)
    monkeypatch.setattr(flex, "BACKEND", backend)
    monkeypatch.setattr(flex, "has_dynamic_sizes", lambda device: dynamic)
    monkeypatch.setattr(flex, "_kernels", {})
    monkeypatch.setattr(flex, "_failures", {})
    torch.compiler.reset()
    _plan.clear_plans()
    yield
    torch.compiler.reset()


#: Lengths, which differ in whether they fit one block, are multiples of blocks, and equal the numbers of others.
LENGTHS = ((300, 150), (280, 260), (128, 257), (64, 256), (512, 512), (700, 30), (40, 60))


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", [None, *MASKS])
def test_other_lengths_compile_nothing(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    with compiled_by(counted, monkeypatch):
        for i, (L, S) in enumerate(LENGTHS):
            args = ends(L, S, seed=i)
            mask = None if name is None else MASKS[name](L, S)
            found = regard.attention(*args, mask, enable_gqa=True, engine="flex")
            right = regard.attention(*args, mask, enable_gqa=True, engine="reference")
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
            assert counted.count == 1, f"lengths {L, S} compiled again"


@pytest.mark.slow
def test_other_masks_of_runs_compile_nothing_and_lambdas_of_the_same_code_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, args = Counted(), ends(40, 50)

    def run(mask: Any) -> None:
        found, right = (
            regard.attention(*args, mask, enable_gqa=True, engine=engine) for engine in ("flex", "reference")
        )
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)

    with compiled_by(counted, monkeypatch):
        for left in range(3):
            run(masks.window(left, 5, align="upper_left"))
        run(masks.causal(offset=7))
        run(masks.document(torch.arange(40) // 9, torch.arange(50) // 9))
        assert counted.count == 1
        for i in range(3):
            ids = torch.arange(50) // (i + 2)
            run(lambda b, h, q, k, ids=ids: ids[q] != ids[k])
        for offset in range(3):
            run(masks.dilated(2, offset=offset))
        # One for the functions, one for the dilated masks: their numbers are tensors.
        assert counted.count == 3


def test_a_kernel_that_cannot_be_compiled_is_one_sentence_and_auto_chooses_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = ends(40, 50)

    def fails(graph: Any, example: Any) -> Any:
        raise RuntimeError("no shared memory\nand more")

    def quick(names: list[str], problem: Problem) -> dict[str, float]:
        return {name: 0.0 if name == "flex" else 1.0 for name in names}

    with compiled_by(fails, monkeypatch):
        with pytest.raises(
            KernelError, match=r"^attention: torch could not compile FlexAttention for this call \("
        ) as error:
            regard.attention(*args, third, enable_gqa=True, engine="flex")
        assert "\n" not in str(error.value)
        assert "use engine='streaming'" in str(error.value)
        assert "could not compile FlexAttention for such a call before" in str(
            regard.explain(*args, third, enable_gqa=True)
        )
        flex._failures.clear()
        monkeypatch.setattr(flex.Flex, "not_automatic", lambda self, problem: None)
        monkeypatch.setattr(cost_model, "seconds", quick)
        monkeypatch.setattr(cost_model, "is_tiny", lambda problem: False)
        _plan.clear_plans()
        assert regard.explain(*args, third, enable_gqa=True).engine.name == "flex"
        right = regard.attention(*args, third, enable_gqa=True, engine="reference")
        torch.testing.assert_close(regard.attention(*args, third, enable_gqa=True), right)
        plan = regard.explain(*args, third, enable_gqa=True)
        assert plan.engine.name != "flex"
        assert "could not compile" in plan.others["flex"]


#: Calls that torch's compiler for CPUs compiles in the tests; each takes ten seconds or so.
COMPILED = (None, "causal", "padding", "alibi", "dilated", "function & causal", "dense", "documents", "sinks", "bias")


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_kernel_on_a_cpu(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ends(150, 170)
    mask = None if name is None else MASKS[name](150, 170)
    options: dict[str, Any] = {"score": near} if name == "causal" else {"softcap": 3.0} if name == "padding" else {}
    with compiled_by("inductor", monkeypatch, dynamic=False):
        found, aux = regard.attention(
            *args, mask, enable_gqa=True, engine="flex", return_aux=AuxRequest(lse=True), **options
        )
        right, of_right = regard.attention(
            *args, mask, enable_gqa=True, engine="reference", return_aux=AuxRequest(lse=True), **options
        )
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(aux.lse, of_right.lse, rtol=1e-4, atol=1e-5)
        hidden = Problem.of(Call(*args, mask, enable_gqa=True)).mask
        if hidden is None or not hidden.hides or name not in ("padding", "documents"):
            return
        spoiled = [t.clone() for t in args]
        spoiled[1][1, :, -1], spoiled[2][1, :, -1] = torch.nan, torch.inf  # of sequence 1, seen by few or no queries
        rows = regard.attention(*spoiled, mask, enable_gqa=True, engine="flex", **options)
        for_rows = regard.attention(*spoiled, mask, enable_gqa=True, engine="reference", **options)
        torch.testing.assert_close(rows, for_rows, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", [None, "causal", "alibi", "dilated", "dense", "function", "sinks", "padding"])
def test_compilers_trace_into_flex_attention(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA devices: on a CPU, a compiled call is one operator, which runs eagerly."""
    args, counted = ends(37, 50), Counted()
    mask = None if name is None else MASKS[name](37, 50)

    def run(*args: Tensor) -> Tensor:
        return regard.attention(*args, mask, enable_gqa=True, engine="flex")

    right = regard.attention(*args, mask, enable_gqa=True, engine="reference")
    with compiled_by(counted, monkeypatch):
        monkeypatch.setattr(functional, "is_recorded", lambda query: False)
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend=counted)(*args), right)
    assert counted.count == 1


@pytest.mark.slow
def test_compiled_exported_and_autocast_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ends(37, 50)

    class Model(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return regard.attention(*args, masks.causal(align="lower_right"), enable_gqa=True, engine="flex")

    right = Model()(*args)
    with torch.autocast("cpu", torch.bfloat16):
        output = Model()(*args)
    torch.testing.assert_close(torch.compile(Model(), fullgraph=True, backend="aot_eager")(*args), right)
    monkeypatch.delenv(MODE)
    torch.testing.assert_close(torch.export.export(Model(), args).module()(*args), right)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), right, rtol=2e-2, atol=2e-2)


# When auto chooses it -------------------------------------------------------------------------------------------------


def test_explain_says_that_auto_does_not_choose_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE)
    plan = regard.explain(*ends(37, 50), third, enable_gqa=True)
    assert plan.engine.name != "flex"
    assert plan.others["flex"] == (
        "not chosen, its kernel is compiled for seconds at the first call; auto chooses it on CUDA devices only"
    )
    assert plan.basis == ""


def explained(
    monkeypatch: pytest.MonkeyPatch, mask: Any, dtype: torch.dtype = torch.bfloat16, L: int = 8192, **named: Any
) -> Any:
    """Explain a call on a CUDA device that is not there: tensors are fake, and those of masks are on the CPU."""
    monkeypatch.delenv(MODE, raising=False)
    monkeypatch.setattr(_plan, "values_unavailable", lambda tensor: False)
    monkeypatch.setattr(sdpa, "is_traced", lambda tensor: False)
    monkeypatch.setattr(flex, "_cuda_refusal", lambda device: None)
    with FakeTensorMode():
        query = torch.empty(2, 16, L, 64, dtype=dtype, device="cuda")
        return regard.explain(query, query, query, mask, **named)


def test_auto_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    basis = "an estimate from published numbers of an H100, to which nothing was fitted"
    plain = explained(monkeypatch, None)
    assert plain.engine.name == "sdpa"
    assert plain.others["flex"] == "not chosen, torch's own kernel runs this call"
    causal = explained(monkeypatch, masks.causal(align="upper_left"))
    assert causal.engine.name == "sdpa"
    assert "flex" in causal.others
    assert "slower" in causal.others["flex"]
    for mask in (masks.window(1024, 0, align="upper_left"), masks.causal() & masks.alibi(16)):
        plan = explained(monkeypatch, mask)
        assert plan.engine.name == "flex"
        assert plan.basis == basis
        assert f"engine      flex, estimated {1e3 * plan.seconds:.2g} ms ({basis})" in str(plan)
        assert plan.others["sdpa"].startswith("unsupported")
        assert "slower" in plan.others["streaming"]
    assert explained(monkeypatch, None, softcap=30.0).engine.name == "flex"
    assert explained(monkeypatch, None, normalizer="sparsemax").engine.name == "streaming"
    assert explained(monkeypatch, None, score=near).engine.name == "flex"
    monkeypatch.setenv("REGARD_UNMEASURED", "1")
    assert explained(monkeypatch, None, normalizer="sigmoid").engine.name == "triton"
    monkeypatch.delenv("REGARD_UNMEASURED")
    laplacian = explained(monkeypatch, None, score="laplacian")
    assert laplacian.engine.name == "streaming"
    assert laplacian.others["triton"] == (
        "not chosen, it was not measured on this device: see docs/gpu.md, or set REGARD_UNMEASURED=1"
    )


def test_costs_of_a_device_come_from_its_file() -> None:
    assert cost_model.file_name("NVIDIA H100 80GB HBM3") == "costs_nvidia_h100_80gb_hbm3.json"
    assert cost_model.device_name(torch.device("cpu")) == "cpu"
    assert cost_model.device_name(torch.device("meta")) == ""
    lanes = cost_model.table("cuda")
    for lane, rates in lanes.items():
        assert len(rates) == len(cost_model.TERMS), lane
        assert min(rates) >= 0, lane
        assert sum(rates) > 0, lane
    for lane in [lane for lane in lanes if lane.startswith("flex/")]:
        assert lane.replace("flex/", "streaming/") in lanes


def test_states_have_names() -> None:
    assert (EMPTY, MIXED, FULL) == (0, 1, 2)  # what sums of bounds, and torch's lists, rely on


def test_what_it_runs_is_what_explain_names() -> None:
    plan = regard.explain(*ends(37, 50), third, enable_gqa=True, engine="flex", normalizer=normalizers.Softmax())
    assert plan.engine.name == "flex"
    assert not plan.cost.grows


def test_a_score_mod_in_16_bits_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law "budget" found the compiled kernel wrong by 1.8."""
    monkeypatch.setattr("regard.engines.flex.is_compiled", lambda: True)
    query = torch.randn(2, 2, 20, 16, dtype=torch.bfloat16)
    call = {"score": lambda score, b, h, q, k: score + b, "engine": "flex"}
    with pytest.raises(ValueError, match=r"float32 only for a score_mod on a CPU"):
        regard.attention(query, query, query, **call)
