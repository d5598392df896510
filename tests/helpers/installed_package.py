"""Checks of an installation of the package by its wheel: ``python installed_package.py [pure]``.

The package is not the clone's; unless the wheel is the pure one, its compiled kernels run; the code of README runs; the
command line starts; the laws hold. The interpreter needs the package and its extras ``cli`` and ``sklearn``, and no
test framework.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLONE = Path(__file__).parents[2]


def main(*kinds: str) -> None:
    """Run all checks."""
    import torch

    import regard
    from regard.engines.fused import library

    assert CLONE / "src" not in Path(regard.__file__).parents, f"{regard.__file__} is the clone's"
    query = torch.randn(1, 2, 40, 5)
    plan = regard.explain(query, query, query, score="laplacian")
    print(plan)
    if "pure" in kinds:
        assert library.problem() is not None
        assert plan.engine.name != "fused"
    else:
        assert library.problem() is None, library.problem()
        assert plan.engine.name == "fused"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # README's code writes a page
        run_readme()
        os.chdir(CLONE.anchor)
    for command in (["regard", "--help"], ["regard.testing", "--cases", "200"]):
        subprocess.run([sys.executable, "-m", *command], check=True)


def run_readme() -> None:
    """Run README's code in order, on a small model and data of the names that it uses."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    X = torch.rand(50, 2).numpy()
    names: dict[str, Any] = {"model": torch.nn.TransformerEncoder(layer, 2).eval(), "tokens": torch.randn(1, 6, 64)}
    names |= {"X": X, "y": X.sum(1), "X_new": X[:3]}
    blocks = re.findall(r"```python\n(.*?)```", (CLONE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    for number, code in enumerate(blocks, 1):
        if "integrations.transformers" in code:
            print(f"README, block {number}: needs transformers, which is not installed here, and is left out")
            continue
        print(f"README, block {number}")
        exec(compile(code, f"README.md, block {number}", "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
