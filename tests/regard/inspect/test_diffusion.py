"""The steps of a diffusion model are runs of its layers, and a word has a map over them.

A small denoiser stands for diffusers, which the tests do not need: cross-attention of pixels to words, with
classifier-free guidance, in a loop. With diffusers' own ``UNet2DConditionModel`` it is the same.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.inspect import Patches, Record, Text, capture

SIDE, WORDS, STEPS = 4, 5, 3


class Denoiser(nn.Module):
    """One layer of cross-attention, which keeps its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        given = (self.to_q(x), self.to_k(encoder_hidden_states), self.to_v(encoder_hidden_states))
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in given)
        self.weights.append((q.double() @ k.double().mT / 2).softmax(-1))
        return x + scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_map_of_a_word_for_each_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, words = Denoiser().eval(), torch.randn(2, WORDS, 8)
    x = torch.randn(1, SIDE * SIDE, 8)
    with torch.no_grad(), capture(model) as record:
        for _ in range(STEPS):
            plain, guided = model(torch.cat((x, x)), encoder_hidden_states=words).chunk(2)
            x = plain + 2 * (guided - plain)
    steps = record.runs(0)
    assert len(steps) == STEPS and {run.kind for run in steps} == {"cross"}
    maps = torch.stack([run.weights(batch=1, cols=2).mean(0).view(SIDE, SIDE) for run in steps])
    expected = torch.stack([each[1, :, :, 2].mean(0).view(SIDE, SIDE) for each in model.weights])
    torch.testing.assert_close(maps.double(), expected, rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    pixels = Text([f"patch {i}" for i in range(SIDE * SIDE)], patches=Patches(file.getvalue(), SIDE, SIDE))
    record.describe(Text(list("abcde")), pixels, sequence=1)
    queries, keys = record.texts_of(record[0], 1)
    assert queries == pixels and keys.tokens == tuple("abcde")
    again = Record.load(record.save(tmp_path / "steps.regard"))
    assert len(again.runs(0)) == STEPS and again.texts == record.texts
