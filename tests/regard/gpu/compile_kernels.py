"""Compile the kernels of a module for a device that is not there, and print what each needs, a JSON line each.

    python compile_kernels.py TARGET MODULE PART/PARTS

MODULE has ``kernels_to_compile(target)``, of which every so many are one part. Run in a process of its own, without
TRITON_INTERPRET.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def spilled(compiled) -> int:
    """Return the bytes of a thread that did not fit into registers."""
    if "amdgcn" in compiled.asm:
        return int(re.findall(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[0])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return max(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", said))


def main(target: str, module: str, share: str) -> None:
    """Compile one part of a module's kernels for a target."""
    part, parts = map(int, share.split("/"))
    for each in importlib.import_module(module).kernels_to_compile(target)[part::parts]:
        constants = {(each.kernel.arg_names.index(name),): value for name, value in each.constants.items()}
        source = ASTSource(each.kernel, each.signature, constants, each.attributes)
        options = {"num_warps": each.warps, "num_stages": each.stages}
        compiled = triton.compile(source, target=TARGETS[target], options=options)
        found = {"name": each.name, "spilled": spilled(compiled), "shared": compiled.metadata.shared}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
