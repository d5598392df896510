"""Approximations of softmax attention: against transformers, their errors, and what they must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn import LinformerAttention, LSHAttention, NystromAttention, PerformerAttention
from regard.nn.approximate.base import ApproximateAttention

F64 = torch.float64


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(layer: ApproximateAttention, x: Tensor, **options: Any) -> float:
    exact = layer.exact(x, **options)
    return float((layer(x, **options) - exact).norm() / exact.norm())


# Against transformers -------------------------------------------------------------------------------------------------


def of_theirs(layer: ApproximateAttention, theirs: Any, names: dict[str, str]) -> None:
    """Copy parameters, and let the output projection be the identity, which their modules have elsewhere."""
    with torch.no_grad():
        for name, other in names.items():
            layer.get_parameter(name).copy_(theirs.get_parameter(other))
        layer.out_proj.weight.copy_(torch.eye(layer.embed_dim))


@pytest.mark.parametrize("conv", [None, 5])
def test_nystrom_is_that_of_transformers(conv: int | None) -> None:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=12, num_attention_heads=3, num_landmarks=4, segment_means_seq_len=20, conv_kernel_size=5,
        inv_coeff_init_option=False, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.conv_kernel_size = conv
    theirs.init_option = "exact"  # per matrix, as the paper defines it
    ours = NystromAttention(12, 3, num_landmarks=4, conv_size=conv, dtype=F64)
    names = {
        f"{a}_proj.{part}": f"{b}.{part}"
        for a, b in zip("qkv", ("query", "key", "value"))
        for part in ("weight", "bias")
    }
    of_theirs(ours, theirs, names | ({} if conv is None else {"conv.weight": "conv.weight"}))
    x = numbers(2, 20, 12)
    torch.testing.assert_close(ours(x), theirs(x)[0], rtol=1e-6, atol=1e-6)  # their identity matrix is in float32


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [8, 24])
def test_lsh_is_that_of_transformers(rounds: int, is_causal: bool, length: int) -> None:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    torch.manual_seed(0)
    config = ReformerConfig(
        hidden_size=12, num_attention_heads=3, attention_head_size=4, lsh_attn_chunk_length=8, num_hashes=rounds,
        num_buckets=4, lsh_num_chunks_before=1, lsh_num_chunks_after=0, is_decoder=is_causal, hash_seed=7,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = LSHSelfAttention(config).double().eval()
    ours = LSHAttention(12, 3, num_buckets=4, chunk=8, rounds=rounds, bias=False, dtype=F64)
    of_theirs(ours, theirs, {"q_proj.weight": "query_key.weight", "v_proj.weight": "value.weight"})
    torch.manual_seed(7)
    ours.rotations.copy_(torch.randn(3, 4, rounds, 2, dtype=F64).transpose(1, 2))
    x = numbers(2, length, 12)
    torch.testing.assert_close(ours(x, is_causal=is_causal), theirs(x).hidden_states, rtol=1e-10, atol=1e-10)


# Errors against exact attention ---------------------------------------------------------------------------------------


def test_performer_converges_and_orthogonal_features_are_better() -> None:
    def mean(features: int, orthogonal: bool) -> float:
        found = []
        for seed in range(8):
            torch.manual_seed(seed)
            layer = PerformerAttention(16, 2, num_features=features, orthogonal=orthogonal, dtype=F64)
            found.append(error(layer, numbers(1, 64, 16) / 2))
        return sum(found) / len(found)

    assert mean(4096, True) < 0.3 * mean(64, True)
    assert mean(64, True) < mean(64, False)


def test_random_features_are_unbiased() -> None:
    """The mean of φ(q)·φ(k) over many features is exp(q·k / √E)."""
    torch.manual_seed(0)
    layer = PerformerAttention(6, 1, num_features=400_000, dtype=F64)
    q, k = numbers(1, 1, 1, 6), numbers(1, 1, 3, 6, seed=2)
    moved = q * 6**-0.25
    shift = (moved @ layer.projection.mT).amax() - moved.square().sum() / 2
    found = (layer.features(q, is_query=True) @ layer.features(k).mT).flatten() * shift.exp() * layer.num_features**-0.5
    torch.testing.assert_close(found, ((q @ k.mT) * 6**-0.5).exp().flatten(), rtol=0.03, atol=0)


def test_enough_landmarks_projections_or_rounds_are_exact() -> None:
    torch.manual_seed(0)
    x, lengths = numbers(2, 12, 8), torch.tensor([12, 7])
    assert error(NystromAttention(8, 2, num_landmarks=12, dtype=F64), x, valid_lens=lengths) < 1e-12
    assert error(LSHAttention(8, 2, chunk=12, dtype=F64), x, valid_lens=lengths, is_causal=True) < 1e-12
    whole = LinformerAttention(8, 2, 12, num_projected=12, share=True, dtype=F64)
    torch.nn.init.eye_(whole.key_mix)
    assert error(whole, x) < 1e-12
    # Fewer rows than landmarks: each is its own landmark, and the iteration nearly inverts the weights.
    many = NystromAttention(8, 2, num_landmarks=8, iterations=0, dtype=F64)
    assert error(many, x[:1], valid_lens=torch.tensor([6])) < 1e-6


def test_the_iteration_finds_the_inverse_by_singular_values() -> None:
    torch.manual_seed(0)
    x = 3 * numbers(2, 24, 8)
    few, many, exact = (NystromAttention(8, 2, num_landmarks=6, iterations=n, dtype=F64) for n in (4, 40, 0))
    for layer in (few, many):
        layer.load_state_dict(exact.state_dict())
    torch.testing.assert_close(many(x), exact(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(few(x), exact(x), atol=1e-6)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_performer_sees_no_later_row(kernel: Any) -> None:
    """Not even by a bit: no maximum over keys is taken."""
    torch.manual_seed(0)
    layer, x = PerformerAttention(8, 2, kernel=kernel), numbers(2, 70, 8, dtype=torch.float32)
    other = x.clone()
    other[:, 30:] = 30.0
    assert torch.equal(layer(x, is_causal=True)[:, :30], layer(other, is_causal=True)[:, :30])


def test_lsh_sees_no_later_row() -> None:
    """A later row may change which earlier rows are near, but its own numbers have no gradient."""
    torch.manual_seed(0)
    layer, x = LSHAttention(8, 2, num_buckets=4, chunk=4, dtype=F64), numbers(1, 16, 8).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x, is_causal=True)[:, :9].square().sum(), x)
    assert not grad[:, 9:].any() and grad[:, :9].any()


# Gradients, 16 bits, no rows, bad input -------------------------------------------------------------------------------

BUILT: dict[str, Callable[..., ApproximateAttention]] = {
    "performer": lambda **where: PerformerAttention(6, 2, num_features=8, **where),
    "nystrom": lambda **where: NystromAttention(6, 2, num_landmarks=3, **where),
    "linformer": lambda **where: LinformerAttention(6, 2, 16, num_projected=3, **where),
    "lsh": lambda **where: LSHAttention(6, 2, num_buckets=4, chunk=4, **where),
}


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", list(BUILT))
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    layer = BUILT[name](dtype=F64)
    x = numbers(2, 7, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, torch.tensor([7, 5])), (x,))


@pytest.mark.parametrize("name", list(BUILT))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = BUILT[name](dtype=dtype), numbers(2, 7, 6).to(dtype)
    found = layer(x, torch.tensor([7, 5]))
    right = layer.double()(x.double(), torch.tensor([7, 5]))
    assert found.dtype == dtype and (found - right).abs().max() <= 20 * torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("name", list(BUILT))
@pytest.mark.parametrize("sizes", [(0, 7), (2, 0), (2, 1)])
def test_few_rows(name: str, sizes: tuple[int, int]) -> None:
    found = BUILT[name]()(torch.randn(*sizes, 6))
    assert found.shape == (*sizes, 6) and found.isfinite().all()


def test_redrawing_changes_the_features() -> None:
    for layer, name in ((PerformerAttention(6, 2), "projection"), (LSHAttention(6, 2), "rotations")):
        before = layer.get_buffer(name).clone()
        layer.redraw()
        assert not torch.equal(layer.get_buffer(name), before)


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "heads": (lambda: PerformerAttention(8, 3), ValueError, "num_heads must divide embed_dim 8, got 3"),
    "kernel": (lambda: PerformerAttention(8, 2, kernel="softmx"), ValueError, r"did you mean 'softmax'\?"),  # type: ignore[arg-type]
    "features": (
        lambda: PerformerAttention(8, 2, num_features=0),
        ValueError,
        "num_features must be an int of at least 1",
    ),
    "causal landmarks": (
        lambda: NystromAttention(8, 2)(rows(1, 4, 8), is_causal=True),
        ValueError,
        "is_causal must be False, as landmarks average over the whole sequence, got True",
    ),
    "causal, exact": (
        lambda: LinformerAttention(8, 2, 4).exact(rows(1, 4, 8), is_causal=True),
        ValueError,
        "is_causal must be False, as each projected row mixes the whole sequence, got True",
    ),
    "longer": (
        lambda: LinformerAttention(8, 2, 4)(rows(1, 5, 8)),
        ValueError,
        "x must have at most max_length 4 rows, got 5 rows",
    ),
    "conv_size": (lambda: NystromAttention(8, 2, conv_size=4), ValueError, "conv_size must be odd, got 4"),
    "buckets": (lambda: LSHAttention(8, 2, num_buckets=5), ValueError, "num_buckets must be even, got 5"),
    "rows": (lambda: LSHAttention(8, 2)(rows(1, 5, 6)), ValueError, r"x must have shape \(B, N, 8\)"),
    "lengths": (
        lambda: LSHAttention(8, 2)(rows(1, 5, 8), torch.tensor([1.0])),
        TypeError,
        "valid_lens must be an integer tensor",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_bad_input(case: str) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()
