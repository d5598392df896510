"""Checks of an installation of the package by its wheel: ``python installed_package.py [pure]``.

The package is not the clone's; unless the wheel is the pure one, its compiled kernels run; the command line starts; the
laws hold. The interpreter needs the package and its extra ``cli``, and no test framework.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(*kinds: str) -> None:
    """Run all checks."""
    import torch

    import regard
    from regard.engines.fused import library

    clone = Path(__file__).parents[2]
    assert clone / "src" not in Path(regard.__file__).parents, f"{regard.__file__} is the clone's"
    query = torch.randn(1, 2, 40, 5)
    plan = regard.explain(query, query, query, score="laplacian")
    print(plan)
    if "pure" in kinds:
        assert library.problem() is not None
        assert plan.engine.name != "fused"
    else:
        assert library.problem() is None, library.problem()
        assert plan.engine.name == "fused"
    for command in (["regard", "--help"], ["regard.testing", "--cases", "200"]):
        subprocess.run([sys.executable, "-m", *command], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
