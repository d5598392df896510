"""Engine ``triton``: its kernels in Triton's interpreter, and what it says where there is no device for it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiers import sized

import regard

#: Checks of ``interpreted_attention.py``.
CHECKS = (
    f"families {sized(1, 3)}", f"masks_of_every_kind {sized(1, 4)}", f"dtypes {sized(1, 2)}", "normalizers",
    f"thresholds {sized(1, 2)}", "tiles_without_weight", "argmax", f"auxiliary_outputs {sized(1, 2)}", "learned_parts",
    "dropout", "compiled", "saved_programs", f"decoding {sized(1, 2)}", "paged", "refusals",
)  # fmt: skip

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no packages for this platform")


def interpreted(*arguments):
    script = Path(__file__).with_name("interpreted_attention.py")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter():
    interpreted(*CHECKS)


@needs_triton
@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("part", range(40))
def test_laws_in_the_interpreter(part):
    interpreted(f"laws {10 * part} {sized(10, 3)}")


def test_without_a_device():
    query = torch.zeros(1, 1, 3, 4)
    reason = regard.explain(query, query, query).others["triton"]
    wanted = "GPUs only, not cpu"
    assert reason == f"unsupported, {wanted}"
    with pytest.raises(ValueError, match=f"attention: engine must be able to run this call, got 'triton': {wanted}"):
        regard.attention(query, query, query, engine="triton")
