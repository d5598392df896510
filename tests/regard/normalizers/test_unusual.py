"""Normalizers that most models do without, beside their formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.nn import SelfAttention
from regard.normalizers import (
    Cog,
    Entmax,
    LearnedEntmax,
    ReLU,
    ScalableSoftmax,
    SoftmaxSink,
    StickBreaking,
    TalkingHeads,
)

H = 4


def inputs(L: int = 6, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, H, L, 5), (2, groups, L, 5), (2, groups, L, 3)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def scores(q: Tensor, k: Tensor) -> np.ndarray:
    return np.einsum("bhld,bhsd->bhls", q.numpy(), np.repeat(k.numpy(), H // k.shape[1], 1)) / np.sqrt(5)


def read(weights: np.ndarray, v: Tensor) -> Tensor:
    return torch.from_numpy(weights @ np.repeat(v.numpy(), H // v.shape[1], 1))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x)
    return powers / powers.sum(-1, keepdims=True)


def attended(normalizer: Any, mask: Any, **how: Any) -> Tensor:
    return regard.attention(*inputs(), mask, enable_gqa=True, normalizer=normalizer, **how)


def test_stick_breaking_takes_from_the_nearest_key_back() -> None:
    q, k, v = inputs()
    share = 1 / (1 + np.exp(-scores(q, k)))
    weights = np.zeros_like(share)
    for t in range(6):
        left = 1.0
        for j in reversed(range(t)):  # the own key is hidden, as in the paper
            weights[:, :, t, j] = share[:, :, t, j] * left
            left = left * (1 - share[:, :, t, j])
    found = attended("stick_breaking", masks.causal(offset=-1))
    torch.testing.assert_close(found, read(weights, v))
    assert (found[:, :, 0] == 0).all()


def test_stick_breaking_of_extreme_scores() -> None:
    given = torch.tensor([[1e4, -1e4, 1e4], [-1e4, -1e4, -1e4], [torch.inf, 0.0, torch.inf]], requires_grad=True)
    weights = StickBreaking().weights(given)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    weights[:2].sum().backward()
    assert given.grad is not None and given.grad[:2].isfinite().all()
    assert StickBreaking().weights(torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize("factor", [0.43, torch.tensor([0.2, 0.5, 1.0, 2.0])])
def test_scalable_softmax_counts_visible_keys(factor: Any) -> None:
    q, k, v = inputs()
    a = np.broadcast_to(factor.double().numpy() if isinstance(factor, Tensor) else factor, (H,))
    weights = np.zeros((2, H, 6, 6))
    s = scores(q, k)
    for h in range(H):
        for t in range(6):
            seen = [j for j in range(t + 1) if j != 1 or t == 1]  # key 1 is hidden from later queries
            weights[:, h, t, seen] = softmax(a[h] * np.log(len(seen)) * s[:, h, t, seen])
    hidden = torch.ones(6, 6, dtype=torch.bool)
    hidden[2:, 1] = False
    mask = masks.causal() & masks.dense(hidden)
    torch.testing.assert_close(attended(ScalableSoftmax(factor), mask), read(weights, v), rtol=1e-6, atol=1e-7)


def test_scalable_softmax_is_a_factor_of_queries_in_causal_attention() -> None:
    q, k, v = inputs()
    factor = 0.43 * torch.arange(1, 7).log().double()
    right = regard.attention(q * factor.unsqueeze(-1), k, v, masks.causal(), enable_gqa=True)
    torch.testing.assert_close(attended("scalable_softmax", masks.causal()), right)


def test_talking_heads_mix_scores_and_weights() -> None:
    q, k, v = inputs()
    before, after = torch.randn(2, H, H, dtype=torch.float64)
    mixed = np.einsum("gh,bhls->bgls", before.numpy(), scores(q, k))
    causal = np.tril(np.ones((6, 6), bool))
    weights = np.einsum("gh,bhls->bgls", after.numpy(), softmax(np.where(causal, mixed, -np.inf)))
    found = attended(TalkingHeads(before, after), masks.causal())
    torch.testing.assert_close(found, read(weights, v))
    plain = attended(TalkingHeads(torch.eye(H), torch.eye(H)), masks.causal())
    torch.testing.assert_close(plain, attended("softmax", masks.causal()))


def test_cog_keeps_the_signs_of_scores() -> None:
    q, k, v = inputs()
    s, causal = scores(q, k), np.tril(np.ones((6, 6), bool))
    weights = np.sign(s) * softmax(np.where(causal, np.abs(s), -np.inf))
    torch.testing.assert_close(attended("cog", masks.causal()), read(weights, v))
    with pytest.raises(ValueError, match="Cog declares no streaming rule"):
        attended("cog", masks.causal(), engine="streaming")


LOGITS = torch.tensor([-3.0, -0.5, 0.7, 4.0], dtype=torch.float64)


def test_learned_entmax_is_entmax_of_each_heads_alpha() -> None:
    found = attended(LearnedEntmax(LOGITS), masks.causal())
    for h, alpha in enumerate(1 + torch.sigmoid(LOGITS)):
        right = attended(Entmax(float(alpha)), masks.causal())[:, h]
        torch.testing.assert_close(found[:, h], right, rtol=1e-9, atol=1e-9)
    near = attended(LearnedEntmax(torch.tensor(-30.0)), masks.causal())
    torch.testing.assert_close(near, attended("softmax", masks.causal()), rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="LearnedEntmax declares no streaming rule"):
        attended(LearnedEntmax(), masks.causal(), engine="streaming")
    with pytest.raises(
        ValueError, match="LearnedEntmax: logit must have one number, or one for each of query's 4 heads"
    ):
        attended(LearnedEntmax(torch.zeros(3)), masks.causal())
    with pytest.raises(ValueError, match="LearnedEntmax: logit must be a floating-point tensor of one number"):
        LearnedEntmax(torch.zeros(3, 1))


def test_the_gradient_of_alpha_is_the_published_one() -> None:
    """Proposition 1 of Correia 2019, for one row at a time."""
    s = torch.randn(4, 1, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits, grad = LOGITS.clone().requires_grad_(), torch.randn(4, 1, 9, dtype=torch.float64)
    weights = LearnedEntmax(logits).weights(s)
    weights.backward(grad)
    for h in range(4):
        share = 1 / (1 + np.exp(-float(LOGITS[h])))
        alpha, p = 1 + share, weights[h, 0].detach().numpy()
        skewed = np.where(p > 0, np.where(p > 0, p, 1) ** (2 - alpha), 0)
        skewed /= skewed.sum()
        entropy = np.where(p > 0, -p * np.log(np.where(p > 0, p, 1)), 0)
        slope = (p - skewed) / (alpha - 1) ** 2 + (entropy - skewed * entropy.sum()) / (alpha - 1)
        right = (slope * grad[h, 0].numpy()).sum() * share * (1 - share)
        np.testing.assert_allclose(float(logits.grad[h]), right, rtol=1e-8)


@pytest.mark.parametrize("engine", ["streaming", "reference"])
@pytest.mark.parametrize("power", [1, 2])
def test_relu(engine: Any, power: int) -> None:
    q, k, v = inputs()
    weights = np.maximum(np.tril(scores(q, k)), 0) ** power / 6**power
    found = attended(ReLU(power), masks.causal(), scale=1 / (6 * 5**0.5), engine=engine)
    torch.testing.assert_close(found, read(weights, v))


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "make",
    [
        lambda t: ScalableSoftmax(t[0]),
        lambda t: TalkingHeads(t, t.mT),
        lambda t: LearnedEntmax(t[0]),
        lambda _: Cog(),
        lambda _: StickBreaking(),
        lambda _: ReLU(2),
    ],
)
def test_gradients(make: Any) -> None:
    q, k, v = (t[:1, :, :3].clone().requires_grad_() for t in inputs())
    matrix = (torch.eye(H) + 0.1).double().requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, matrix: Tensor) -> Tensor:
        return regard.attention(q, k, v, masks.causal(), enable_gqa=True, normalizer=make(matrix))

    assert torch.autograd.gradcheck(run, (q, k, v, matrix))
    assert torch.autograd.gradgradcheck(run, (q, k, v, matrix))


@pytest.mark.parametrize(
    "normalizer", ["relu", "stick_breaking", "scalable_softmax", "talking_heads", "cog", "learned_entmax"]
)
def test_rows_that_see_nothing_and_hidden_garbage(normalizer: str) -> None:
    q, k, v = inputs()
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[3] = False
    seen[:, 2] = False
    right = regard.attention(q, k, v, seen, enable_gqa=True, normalizer=normalizer)
    assert (right[:, :, 3] == 0).all()
    k[:, :, 2], v[:, :, 2] = torch.nan, torch.inf
    found = regard.attention(q, k, v, seen, enable_gqa=True, normalizer=normalizer)
    torch.testing.assert_close(found, right)


def test_layers_own_their_tensors() -> None:
    talking = TalkingHeads(nn.Parameter(torch.eye(H)), nn.Parameter(torch.eye(H)))
    for normalizer in (talking, ScalableSoftmax(nn.Parameter(torch.full((H,), 0.43)))):
        layer = SelfAttention(16, H, num_kv_heads=2, normalizer=normalizer)
        layer(torch.randn(2, 5, 16), is_causal=True).square().sum().backward()
        owned = [p.grad for name, p in layer.named_parameters() if name.startswith("normalizer.")]
        assert owned and all(grad is not None and grad.any() for grad in owned)


@pytest.mark.campaign
def test_compiled_tensors_get_gradients_beside_a_dense_mask() -> None:
    """The mask's own tensor and strings are not taken for the normalizer's tensor."""
    q, k, v = inputs(groups=H)
    given, seen = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), torch.ones(6, 6, dtype=torch.bool).tril()

    def run(q: Tensor) -> Tensor:
        return regard.attention(q, k, v, seen, normalizer=SoftmaxSink(given)).square().sum()

    (right,) = torch.autograd.grad(run(q), given)
    torch._dynamo.reset()
    (found,) = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(q), given)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (lambda: ReLU(3), "ReLU: power must be one of 1, 2, got 3."),
        (lambda: ScalableSoftmax(torch.ones(2, 2)), "ScalableSoftmax: factor must be a number, or a floating-point"),
        (
            lambda: attended(ScalableSoftmax(torch.ones(3)), None),
            "ScalableSoftmax: factor must have one number, or one for each of query's 4 heads, got (3,).",
        ),
        (lambda: TalkingHeads(torch.ones(2)), "TalkingHeads: before must have shape (H, H), got (2,)."),
        (
            lambda: attended(TalkingHeads(torch.eye(3)), None),
            "TalkingHeads: before must have shape (4, 4), for query's heads, got (3, 3).",
        ),
    ],
)
def test_arguments_that_do_not_fit(run: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        run()
    assert str(error.value).startswith(sentence)
