"""Windows of an image are put back where they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import SwinConfig, SwinModel

from regard.inspect import capture, merge_windows


@pytest.mark.parametrize(("rows", "cols"), [(8, 8), (8, 12), (6, 9)])
def test_a_patch_attends_where_it_looks(rows: int, cols: int) -> None:
    """A patch that changes is seen by those of its window, and by no others: Swin's two layers, one of them shifted."""
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=(4 * rows, 4 * cols), patch_size=4, embed_dim=8, depths=[2], num_heads=[2], window_size=4
    )
    model, x = SwinModel(config).eval(), torch.randn(1, rows * cols, 8)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for number, block in enumerate(model.encoder.layers[0].blocks):
        with capture(model) as record, torch.no_grad():
            before = block(x, (rows, cols))[0]
        weights = merge_windows(record[0].weights(), (rows, cols), shift=block.shift_size)
        assert weights.shape == (1, 2, rows * cols, rows * cols)
        if rows % 4 == cols % 4 == 0:
            torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, rows * cols))
        for patch in (0, rows * cols // 2 + 3, rows * cols - 1):
            other = x.clone()
            other[0, patch] = torch.randn(8)
            with torch.no_grad():
                changed = (block(other, (rows, cols))[0] - before).abs().amax(-1).flatten() > 1e-6
            assert torch.equal(changed, weights[0, :, :, patch].sum(0) > 1e-20), (number, patch)  # masked by −100


def test_windows_that_do_not_fit() -> None:
    for weights, grid, shift, message in (
        (torch.zeros(4, 1, 3, 3), (4, 4), 0, r"be those of square windows \(B·W, H, M², M²\), got"),
        (torch.zeros(4, 1, 4, 4), (4, 4), 2, "be at least 1, and a shift below 2, got"),
        (torch.zeros(3, 1, 4, 4), (4, 4), 0, "be the 4 windows of 4 × 4 patches, of each image, got 3 windows"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_windows(weights, grid, shift)
