"""The tables of classifiers of images, and networks that are equally large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import image_classification

from regard_lab.models import ResNet, ResNetConfig


@pytest.mark.parametrize("attention", ["se", "eca", "cbam"])
def test_blocks_are_widened_to_as_many_parameters(attention: str) -> None:
    def size(**fields: Any) -> int:
        with torch.device("meta"):
            return sum(each.numel() for each in ResNet(ResNetConfig.preset("tiny", channels=1, **fields)).parameters())

    ratio = size(**image_classification.widened(attention)) / size(attention=attention)
    assert abs(ratio - 1) < 0.006  # a feature more in the smallest block


def test_differences_are_seed_by_seed() -> None:
    rows = {
        f"{kind}-{seed}": {
            "recipe": "fashion-mnist-networks", "attention": kind, "seed": seed, "accuracy": accuracy, "parameters": 10,
        }
        for kind, seed, accuracy in (("se", 1, 0.5), ("none", 1, 0.4), ("se", 2, 0.7), ("none", 2, 0.8), ("se", 3, 0.6))
    }  # fmt: skip
    machine = {"CPU": "a processor", "vector instructions": "AVX2"}
    text = image_classification.summary({"rows": rows, "machine": machine, "date": "2026-11-24"})
    assert "| se | 10 | 50.00 % | 70.00 % | 60.00 % | 60.00 % |" in text
    assert "| none, wider blocks | 10 | 40.00 % | 80.00 % | not run | 60.00 % |" in text
    assert "se − none, seed by seed: +0.00 points, from -10.00 to +10.00, standard deviation 14.14." in text
