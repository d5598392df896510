"""Compile kernels for devices that are not there, and print what each needs as JSON, a line each.

    python compile_kernels.py TARGET[,TARGET…] MODULE [NAME…]

MODULE has ``default_launches()``: by name, a kernel, the types of its arguments, its constants and its warps. Run in a
process of its own, without TRITON_INTERPRET.
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

#: By name: the target, and the bytes of shared memory that a block can have there.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90a": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


def spilled(compiled) -> int:
    """Return the bytes that a thread keeps in local memory."""
    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True)
        return max(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", said.stdout + said.stderr))
    return max(int(found) for found in re.findall(r"scratch_memory_size:?\s*(\d+)|private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[0] if found)


def main() -> None:
    """Compile what the arguments name."""
    targets, module, *names = sys.argv[1:]
    launches = importlib.import_module(module).default_launches()
    for name in names or launches:
        kernel, types, constants, warps = launches[name]
        for each in targets.split(","):
            target, _ = TARGETS[each]
            source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
            compiled = triton.compile(source, target=target, options={"num_warps": warps})
            found = {"name": name, "target": each, "spilled": spilled(compiled), "shared": compiled.metadata.shared}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
