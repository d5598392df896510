"""Deformable attention: against transformers, its start, gradients and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.nn import DeformableAttention

F64 = torch.float64
SHAPES = [(5, 4), (3, 2)]


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def built(**where: Any) -> DeformableAttention:
    torch.manual_seed(0)
    layer = DeformableAttention(8, 2, num_levels=2, num_points=3, **{"dtype": F64, **where})
    for part in (layer.sampling_offsets, layer.attention_weights):
        nn.init.normal_(part.weight, std=0.5)
    return layer


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_that_of_transformers(boxes: bool, padded: bool) -> None:
    from transformers import DeformableDetrConfig
    from transformers.models.deformable_detr.modeling_deformable_detr import (
        DeformableDetrMultiscaleDeformableAttention,
    )

    config = DeformableDetrConfig(d_model=8, num_feature_levels=2, disable_custom_kernels=True)
    theirs = DeformableDetrMultiscaleDeformableAttention(config, 2, 3).double()
    ours = built()
    theirs.load_state_dict(ours.state_dict())
    query, maps = numbers(2, 7, 8), numbers(2, 26, 8, seed=2)
    places = numbers(2, 7, 2, 4 if boxes else 2, seed=3).sigmoid()
    keep = torch.arange(26).remainder(4).ne(0).expand(2, 26) if padded else None
    right, weights = theirs(
        query, keep, maps, reference_points=places, spatial_shapes=torch.tensor(SHAPES), spatial_shapes_list=SHAPES
    )
    found, _, shares = ours(query, maps, SHAPES, places, keep=keep, return_points=True)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shares, weights, rtol=1e-12, atol=1e-12)


def test_it_starts_with_the_heads_on_rings_and_equal_weights() -> None:
    layer = DeformableAttention(16, 8, num_levels=1, num_points=2, dtype=F64)
    size, center = torch.tensor([10.0, 20.0], dtype=F64), torch.full((1, 2), 0.5, dtype=F64)
    _, points, weights = layer(numbers(1, 1, 16), numbers(1, 200, 16), [(20, 10)], center, return_points=True)
    moved = (points[0, 0, :, 0] - center) * size  # (H, P, 2), in pixels
    torch.testing.assert_close(moved.abs().amax(-1), torch.tensor([1.0, 2.0], dtype=F64).expand(8, 2))
    torch.testing.assert_close(moved[0], torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=F64))
    assert (weights == 0.5).all()


def test_centers_are_those_of_pixels() -> None:
    found = DeformableAttention.centers([(2, 4)])
    assert found.tolist() == [[x / 8, y / 4] for y in (1, 3) for x in (1, 3, 5, 7)]


def test_a_constant_map_reads_as_itself_inside() -> None:
    layer = built()
    query, center = numbers(1, 3, 8) * 0, torch.full((3, 2), 0.5, dtype=F64)
    nn.init.zeros_(layer.sampling_offsets.bias)
    maps = numbers(1, 1, 8).expand(1, 26, 8)
    torch.testing.assert_close(layer(query, maps, SHAPES, center), layer.output_proj(layer.value_proj(maps[:, :3])))


def test_gradients() -> None:
    layer = built()
    query, maps = numbers(1, 2, 8).requires_grad_(), numbers(1, 26, 8, seed=2).requires_grad_()
    places = (numbers(1, 2, 2, 2, seed=3).sigmoid()).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: layer(*inputs[:2], SHAPES, inputs[2]), (query, maps, places))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    layer, inputs = built(dtype=dtype), (numbers(1, 2, 8).to(dtype), numbers(1, 26, 8, seed=2).to(dtype))
    places = torch.full((2, 2), 0.5)
    found = layer(*inputs, SHAPES, places)
    right = layer.double()(*(each.double() for each in inputs), SHAPES, places.double())
    assert found.dtype == dtype and (found - right).abs().max() <= 40 * torch.finfo(dtype).eps * right.abs().max()


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape)


def called(**changed: Any) -> Tensor:
    given: dict[str, Any] = {"query": rows(2, 7, 8), "maps": rows(2, 26, 8), "shapes": SHAPES, "reference": rows(7, 2)}
    return built(dtype=torch.float32)(**given | changed)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "heads": (lambda: DeformableAttention(8, 3), ValueError, "num_heads must divide embed_dim 8, got 3"),
    "images": (lambda: called(maps=rows(3, 26, 8)), ValueError, "maps must have 2 images, as query, got 3"),
    "maps": (lambda: called(shapes=[(26, 1)]), ValueError, "shapes must have num_levels 2 pairs, got 1"),
    "pixels": (lambda: called(shapes=[(5, 4), (3, 3)]), ValueError, "shapes must have maps' 26 pixels together"),
    "places": (lambda: called(reference=rows(7, 3)), ValueError, r"reference must have shape \(7, 2\) or \(2, 7, 2\)"),
    "kept": (lambda: called(keep=rows(2, 26)), ValueError, r"keep must be a bool tensor \(2, 26\), got"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_bad_input(case: str) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()
