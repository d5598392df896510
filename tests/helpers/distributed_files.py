"""Checks of the files in what is published: ``python distributed_files.py dist``. It needs no other package."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

#: Nothing like this belongs into a wheel.
FOREIGN = re.compile(
    r"(^|/)(tests?|benchmarks|node_modules|__pycache__|\.[a-z_]+_cache|\.git)(/|$)|\.py[co]$|conftest\.py$"
)
#: The most megabytes of a file, by how its name begins: the lab brings a model along.
MOST = {"regard-": 12, "regard_lab-": 40}
#: What a wheel must hold.
NEEDED = {
    "regard-": ("regard/__init__.py", "regard/py.typed", "regard_cli/__init__.py", "regard/references.bib",
                "regard/inspect/bundle/page.js", "/licenses/LICENSE", "/licenses/licenses/preact.txt"),
    "regard_lab-": ("regard_lab/__init__.py", "regard_lab/py.typed", "/licenses/LICENSE"),
}  # fmt: skip


def faults(path: Path) -> list[str]:
    """Return what is wrong with a wheel or an archive of sources."""
    kind = next((kind for kind in MOST if path.name.startswith(kind)), None)
    if kind is None:
        return [f"{path.name}: no file of ours"]
    found = []
    if path.stat().st_size > MOST[kind] * 1e6:
        found.append(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, more than {MOST[kind]}")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
        found += [f"{path.name} lacks {each}" for each in NEEDED[kind] if not any(n.endswith(each) for n in names)]
        kernels = any(name.endswith("_kernels.so") or name.endswith("_kernels.dylib") for name in names)
        if kind == "regard-" and kernels == path.name.endswith("none-any.whl"):
            found.append(f"{path.name} has {'' if kernels else 'no '}kernels")
        found += [f"{path.name} has {name}" for name in names if FOREIGN.search(name)]
    else:
        with tarfile.open(path) as archive:
            names = archive.getnames()
        found += [f"{path.name} has {name}" for name in names if FOREIGN.search(name.partition("/")[2])]
    return found


def main(folder: str) -> int:
    """Check every file in a folder."""
    paths = sorted(path for path in Path(folder).iterdir() if path.name.endswith((".whl", ".tar.gz")))
    wrong = [fault for path in paths for fault in faults(path)]
    print("\n".join(wrong) or f"{len(paths)} files, as they should be")
    return 1 if wrong or not paths else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
