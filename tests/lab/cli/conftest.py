"""A tiny model in a folder, for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import regard

from regard_lab.data.pairs import Pairs
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer
from regard_lab.text.vocabulary import UNKNOWN

__all__ = ["model", "regard"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pairs = Pairs(["abcdefghijklm", "nopqrstuvwxyz'-.", "nopqrstuvwxyz'-."], ["AH B", "K", "T S"])
    pronouncer = Pronouncer.untrained(pairs, embedding=8, encoder=8, decoder=8, features=8)
    torch.manual_seed(0)
    torch.nn.init.normal_(pronouncer.model.model.output.weight, std=3.0)
    pronouncer.model.model.output.bias.data[UNKNOWN] = -99.0
    return pronouncer.save(tmp_path / "model")
