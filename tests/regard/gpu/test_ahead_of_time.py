"""Every Triton kernel of the default shapes compiles for devices that are not here, without spills, and fits them."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiers import sized

pytestmark = pytest.mark.slow

#: Bytes of shared memory that a program can have on a device, by target.
SHARED = {"sm_80": 163 << 10, "gfx942": 64 << 10, "sm_100": 227 << 10, "sm_90a": 227 << 10}
#: Each case compiles one in so many kernels.
PARTS = sized(8, 24)
#: Modules with lists of kernels; that of the attention engine is there once its package is.
MODULES = [
    name
    for name in ("regard.nn.linear.triton_kernels", "regard.engines.triton.compiled")
    if name.startswith("regard.nn") or find_spec("regard.engines.triton") is not None
]
#: Rows that no default shape has; their gradients may spill so many bytes of a thread.
WIDE = re.compile(r"(additive|distance 0) fp32 (128|256)×")
WIDE_SPILLS = 32


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no packages for this platform")
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("target", SHARED)
def test_kernels_compile_without_spills(target, module, part):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("compile_kernels.py"), target, module, f"{part}/{PARTS}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert found
    spilling = [each for each in found if each["spilled"] > (WIDE_SPILLS if WIDE.search(each["name"]) else 0)]
    assert not spilling, f"kernels that spill on {target}: {spilling}"
    large = [each for each in found if each["shared"] > SHARED[target]]
    assert not large, f"kernels with more shared memory than {target} has: {large}"
