"""Scaled, multi-axis and decaying rotary positions, beside transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLVisionRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import regard
from regard import masks
from regard.nn import (
    LongRopeScaling,
    MultiAxisRotary,
    NTKScaling,
    PolarPositions,
    Rotary,
    RotaryScaling,
    SelfAttention,
    XPos,
    YarnScaling,
)

D, BASE, LENGTH = 16, 500.0, 64
SHORT, LONG = [1.0 + i / 20 for i in range(8)], [2.0**i for i in range(8)]

#: A scaling, and the settings of the same in transformers.
SCALINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (RotaryScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RotaryScaling(8.0, original_length=LENGTH),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": LENGTH},
    ),
    "dynamic": (NTKScaling(2.0, LENGTH), {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (
        YarnScaling(4.0, LENGTH),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    ),
    "yarn settings": (
        YarnScaling(40.0, LENGTH, 8.0, 2.0, attention_factor=1.7, truncate=False),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": LENGTH, "beta_fast": 8.0,
         "beta_slow": 2.0, "attention_factor": 1.7, "truncate": False},
    ),
    "longrope": (
        LongRopeScaling(SHORT, LONG, original_length=LENGTH, factor=4.0),
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": LENGTH, "short_factor": SHORT,
         "long_factor": LONG},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [50, 64, 65, 150])
def test_scalings_are_those_of_transformers(name: str, length: int) -> None:
    scaling, settings = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": BASE, **settings},
    )  # fmt: skip
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = Rotary(D, BASE, scaling=scaling).rotation(positions, torch.float32)
    for ours, theirs in zip(found, (cos, sin)):
        torch.testing.assert_close(ours, theirs[0, :, : D // 2], rtol=1e-4, atol=5e-5)  # its angles are float32


def test_static_ntk_is_a_larger_base() -> None:
    positions = torch.arange(40)
    found = Rotary(D, BASE, scaling=NTKScaling(4.0)).rotation(positions, torch.float64)
    right = Rotary(D, BASE * 4.0 ** (D / (D - 2))).rotation(positions, torch.float64)
    torch.testing.assert_close(found, right)
    assert NTKScaling(4.0).factors(torch.ones(1)) == 1, "a single pair is kept"


def test_a_dynamic_scaling_depends_on_each_sequence_alone() -> None:
    rotary = Rotary(D, BASE, scaling=NTKScaling(2.0, LENGTH))
    positions = torch.stack([torch.arange(10), torch.arange(90, 100)])
    both = rotary.rotation(positions, torch.float64)
    for i in range(2):
        alone = rotary.rotation(positions[i], torch.float64)
        for a, b in zip(both, alone):
            torch.testing.assert_close(a[i, 0], b)
    whole = rotary.rotation(torch.arange(100), torch.float64)
    longer = rotary.rotation(positions[0], torch.float64, length=100)
    torch.testing.assert_close(longer, tuple(each[:10] for each in whole))
    assert rotary.rotation(torch.arange(0), torch.float32)[0].shape == (0, D // 2)


def test_steps_of_a_cache_know_their_length() -> None:
    """The step at position 9 turns as position 9 of a sequence of ten does."""
    scaling = NTKScaling(2.0, 4)
    layer = SelfAttention(D, 1, rotary=Rotary(D, BASE, scaling=scaling)).double()
    seen = []
    layer.rotary.turn = lambda x, rotation: seen.append(rotation) or x  # type: ignore[method-assign]
    cache = regard.nn.KVCache()
    with torch.no_grad():
        layer(torch.zeros(1, 9, D, dtype=torch.float64), cache=cache)
        layer(torch.zeros(1, 1, D, dtype=torch.float64), cache=cache)
    right = Rotary(D, BASE, scaling=scaling).rotation(torch.arange(10), torch.float64)
    torch.testing.assert_close(seen[-1], tuple(each[9:] for each in right))


# Several axes ---------------------------------------------------------------------------------------------------------


def test_m_rope_is_that_of_qwen2_vl() -> None:
    sections = (2, 3, 3)
    parameters = {"rope_type": "default", "rope_theta": BASE, "mrope_section": list(sections)}
    config = Qwen2VLTextConfig(hidden_size=4 * D, num_attention_heads=4, rope_parameters=parameters)
    positions = torch.randint(0, 40, (2, 9, 3), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions.movedim(-1, 0))
    found = MultiAxisRotary(D, sections, "sections", base=BASE).rotation(positions, torch.float32)
    for ours, theirs in zip(found, (cos, sin)):
        torch.testing.assert_close(ours[:, 0], theirs[..., : D // 2], rtol=1e-4, atol=1e-5)


def test_m_rope_is_that_of_qwen3_vl() -> None:
    sections = (4, 2, 2)
    parameters = {"rope_type": "default", "rope_theta": BASE, "mrope_section": list(sections)}
    config = Qwen3VLTextConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D, rope_parameters=parameters)
    positions = torch.randint(0, 40, (2, 9, 3), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions.movedim(-1, 0))
    found = MultiAxisRotary(D, sections, "interleaved", base=BASE).rotation(positions, torch.float32)
    for ours, theirs in zip(found, (cos, sin)):
        torch.testing.assert_close(ours[:, 0], theirs[..., : D // 2], rtol=1e-4, atol=1e-5)


def test_two_axes_are_those_of_qwen2_vl_images() -> None:
    config = Qwen2VLVisionConfig(embed_dim=4 * D, num_heads=4)
    config.num_attention_heads, base = 4, config.rope_parameters["rope_theta"]
    rotary = MultiAxisRotary(D, (D // 4, D // 4), "axial", base=base)
    grid = rotary.grid(5, 6)
    cos, sin = Qwen2VLVisionRotaryEmbedding(config)(torch.zeros(1), grid)
    for ours, theirs in zip(rotary.rotation(grid, torch.float32), (cos, sin)):
        torch.testing.assert_close(ours, theirs[..., : D // 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["sections", "interleaved"])
def test_text_is_rotated_as_by_rotary(layout: Any) -> None:
    rotary, plain = MultiAxisRotary(D, (4, 2, 2), layout, base=BASE), Rotary(D, BASE)
    x = torch.randn(2, 3, 7, D, dtype=torch.float64)
    for offset in (5, torch.tensor([0, 9])):
        torch.testing.assert_close(rotary(x, offset), plain(x, offset))
    layer = SelfAttention(D, 1, rotary=rotary).double()
    rows = x[:, 0]
    whole = layer(rows)
    layer.rotary = plain
    torch.testing.assert_close(whole, layer(rows))


def test_products_depend_on_the_distance_along_each_axis() -> None:
    rotary = MultiAxisRotary(24, (4, 4, 4), "axial", base=BASE)
    places = rotary.grid(3, 4, 5)
    moved = places + torch.tensor([7, -2, 3])
    q, k = torch.randn(2, 1, 1, 60, 24, dtype=torch.float64)
    scores, others = (rotary(q, positions=where) @ rotary(k, positions=where).mT for where in (places, moved))
    torch.testing.assert_close(scores, others)


# xPos, PoPE -----------------------------------------------------------------------------------------------------------


def test_xpos_products_decay_with_distance() -> None:
    rotary, plain = XPos(D, BASE, decay=20.0, center=6), Rotary(D, BASE)
    q, k = torch.randn(2, 1, 1, 12, D, dtype=torch.float64)
    zeta = (torch.arange(0, D, 2, dtype=torch.float64) / D + 0.4) / 1.4
    right = torch.empty(12, 12, dtype=torch.float64)
    turned_q, turned_k = plain(q)[0, 0], plain(k)[0, 0]
    for i in range(12):
        for j in range(12):
            shrink = (zeta ** ((i - j) / 20)).repeat(2)
            right[i, j] = (turned_q[i] * turned_k[j] * shrink).sum()
    torch.testing.assert_close((rotary(q) @ rotary.of_keys(k).mT)[0, 0], right)
    other = XPos(D, BASE, decay=20.0)
    torch.testing.assert_close((other(q) @ other.of_keys(k).mT)[0, 0], right, msg="the centre has no effect")


def test_polar_phases_stay_within_their_bounds() -> None:
    polar = PolarPositions(2, 4).double()
    k = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        polar.phase.fill_(1.0)
        above = polar.of_keys(k)
        polar.phase.zero_()
        torch.testing.assert_close(above, polar.of_keys(k))
    assert polar(k).shape == (1, 2, 5, 8)


# Chunks ---------------------------------------------------------------------------------------------------------------


def test_chunked_masks_are_those_of_llama_4() -> None:
    from transformers.masking_utils import chunked_causal_mask_function

    theirs = chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    ours = (masks.causal() & masks.chunked(3)).bind(masks.Extent(1, 1, 8, 8), torch.device("cpu"))
    for q in range(8):
        for k in range(8):
            where = [torch.tensor(i) for i in (0, 0, q, k)]
            assert bool(ours(*where)) == bool(theirs(*where))
    x = torch.randn(1, 2, 8, 4)
    whole = regard.attention(x, x, x, masks.causal() & masks.chunked(3))
    step = regard.attention(x[:, :, 7:], x, x, masks.chunked(3, offset=7))
    torch.testing.assert_close(whole[:, :, 7:], step)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rotary(8, scaling=2.0), "Rotary: scaling must be an AngleScaling or None, got 2.0."),
        (lambda: NTKScaling(0.5), "NTKScaling: factor must be a finite number of at least 1, got 0.5."),
        (lambda: NTKScaling(2.0, 0), "NTKScaling: original_length must be an int of at least 1, got 0."),
        (lambda: YarnScaling(2.0, 10, 1.0, 1.0), "YarnScaling: fast must be above slow, 1, got 1.0."),
        (lambda: LongRopeScaling("ab", [1.0], 10), "LongRopeScaling: short must be a sequence of numbers, got 'ab'."),
        (lambda: LongRopeScaling([1.0], [1.0, 2.0], 10), "LongRopeScaling: long must have as many numbers as short, 1"),
        (
            lambda: Rotary(8, scaling=LongRopeScaling([1.0], [2.0], 10))(torch.ones(1, 1, 2, 8)),
            "LongRopeScaling: short must have one number for each of 4 frequencies, got 1.",
        ),
        (lambda: MultiAxisRotary(8, (3, 2), "axial"), "MultiAxisRotary: sections must have a sum of at most 4 pairs"),
        (lambda: MultiAxisRotary(8, (), "axial"), "MultiAxisRotary: sections must be a sequence of ints, got "),
        (lambda: MultiAxisRotary(8, (2, 2), "rows"), "MultiAxisRotary: layout must be one of 'axial', 'interleaved'"),
        (
            lambda: MultiAxisRotary(12, (1, 4, 1), "interleaved"),
            "MultiAxisRotary: sections must leave room to deal 6 pairs in turn (the first axis gets the rest), got ",
        ),
        (
            lambda: MultiAxisRotary(8, (2, 2), "axial", scaling=NTKScaling(2.0)),
            "MultiAxisRotary: scaling must be None for layout 'axial', got ",
        ),
        (
            lambda: MultiAxisRotary(8, (2, 2), "axial")(torch.ones(1, 1, 2, 8), positions=torch.ones(2, 3).long()),
            "MultiAxisRotary: positions must have shape (2, 2) or (1, 2, 2), got (2, 3).",
        ),
        (lambda: XPos(8, decay=0.0), "XPos: decay must be a positive finite number, got 0.0."),
        (lambda: masks.chunked(0), "masks.chunked: size must be an int of at least 1, got 0."),
    ],
)
def test_arguments_that_do_not_fit(make: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert str(error.value).startswith(sentence)
