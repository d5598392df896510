"""The Triton kernels of gated recurrences in Triton's interpreter, and which calls go to them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from regard.nn import gated_recurrence
from regard.nn.linear import gpu


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no packages for this platform")
@pytest.mark.slow
def test_the_kernels_are_right_in_the_interpreter():
    file = Path(__file__).with_name("interpreted_recurrences.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]


def tensors(dtype=torch.float32, K=4, L=9):
    return tuple(torch.randn(1, 2, L, K).to(dtype) for _ in range(3))


def test_why_a_call_does_not_run_on_the_kernels():
    assert gpu.why_not(*tensors(), None, None) == "tensors on a GPU only"


def test_importing_the_library_imports_no_triton():
    code = "import sys, regard, regard.nn; regard.nn.gated_recurrence; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
