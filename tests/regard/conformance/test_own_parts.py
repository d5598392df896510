"""Parts of a caller's own: changed after a call, made by subclassing, or holding what a plan does not see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, normalizers, scores
from regard.masks import Mask
from regard.normalizers import Normalizer
from regard.scores import Score

ENGINES = ("auto", "streaming", "reference")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (normal(1, 2, 9, 4, seed=seed) for seed in range(3))


class Stretched(Score):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return self.factor * (query @ key.mT)


class Every(Mask):
    def __init__(self, step: int) -> None:
        self.step = step

    def visible(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % self.step == 0


class Cooled(Normalizer):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores / self.factor, -1)


class Slotted(Stretched):
    __slots__ = ("power",)

    def __init__(self, power: int) -> None:
        super().__init__(1.0)
        self.power = power

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.mT) ** self.power


@pytest.mark.parametrize("engine", ENGINES)
def test_a_part_that_was_changed_changes_no_other(engine: str) -> None:
    score, mask, normalizer = Stretched(1.0), Every(2), Cooled(1.0)
    for argument, part, name, value, fresh in (
        ("score", score, "factor", 4.0, Stretched(1.0)),
        ("attn_mask", mask, "step", 3, Every(2)),
        ("normalizer", normalizer, "factor", 5.0, Cooled(1.0)),
        ("attn_mask", masks.causal() & mask, None, 3, masks.causal() & Every(2)),
    ):
        if argument == "normalizer" and engine == "streaming":
            continue
        right = regard.attention(Q, K, V, **{argument: part}, engine=engine)
        if name is not None:
            setattr(part, name, value)
            assert not torch.equal(regard.attention(Q, K, V, **{argument: part}, engine=engine), right)
            assert torch.equal(regard.attention(Q, K, V, **{argument: fresh}, engine=engine), right)


def test_slots_are_no_part_of_a_structure() -> None:
    assert Slotted(1).structure() is None
    once, cubed = (regard.attention(Q, K, V, score=Slotted(power), scale=0.1) for power in (1, 3))
    assert not torch.equal(once, cubed)


def _of(cls: type[Score]) -> type[Score]:
    class Cubed(cls):  # type: ignore[valid-type]
        def compare(self, query: Tensor, key: Tensor) -> Tensor:
            return super().compare(query, key) ** 3

    return Cubed


@pytest.mark.parametrize("engine", [*ENGINES, "sdpa", "fused"])
@pytest.mark.parametrize(
    "cls", [scores.Dot, scores.ScaledDot, scores.Cosine, scores.Gaussian, scores.Laplacian], ids=lambda c: c.__name__
)
def test_an_override_of_compare_is_what_is_computed(engine: str, cls: type[Score]) -> None:
    score = _of(cls)()
    right = score.compare(*score.project(Q, K)) * score.default_scale(4)
    expected = torch.softmax(right, -1) @ V
    if engine in ("sdpa", "fused"):
        with pytest.raises(ValueError, match="Cubed"):
            regard.attention(Q, K, V, score=score, engine=engine)
        return
    torch.testing.assert_close(regard.attention(Q, K, V, score=score, engine=engine), expected)


def test_an_override_of_project_in_a_dot_product_keeps_the_fast_engines() -> None:
    class Shifted(scores.Dot):
        def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return query + 1, key * 2

    expected = torch.softmax((Q + 1) @ (2 * K).mT, -1) @ V
    for engine in (*ENGINES, "sdpa", "fused"):
        torch.testing.assert_close(regard.attention(Q, K, V, score=Shifted(), engine=engine), expected)


def test_an_override_of_weights_is_what_is_computed() -> None:
    class Doubled(normalizers.Softmax):
        def weights(self, scores: Tensor) -> Tensor:
            return super().weights(2 * scores)

    right = regard.attention(Q, K, V, scale=1.0)
    assert not Doubled.streams
    assert not Doubled.online
    for engine in ("auto", "reference"):
        torch.testing.assert_close(regard.attention(Q, K, V, normalizer=Doubled(), engine=engine), right)
    for engine in ("sdpa", "fused", "streaming"):
        with pytest.raises(ValueError, match="Doubled"):
            regard.attention(Q, K, V, normalizer=Doubled(), engine=engine)


def test_a_mask_that_is_final_is_not_subclassed() -> None:
    with pytest.raises(TypeError, match="Band is final and cannot be subclassed; subclass Mask"):
        type("Own", (type(masks.causal()),), {})
