"""Check that a tag is the version of both packages, and in the changelog: ``python released_version.py v1.2.3``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATED = {
    "src/regard/__init__.py": r'^__version__ = "([^"]+)"',
    "lab/src/regard_lab/__init__.py": r'^__version__ = "([^"]+)"',
    "packaging/conda-forge/recipe.yaml": r'^  version: "([^"]+)"',
}


def versions() -> dict[str, str]:
    """Return the version that each file states."""
    found = {}
    for name, pattern in STATED.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def main(tag: str) -> int:
    """Return 0 if everything states the version of the tag, or 1 with what does not."""
    version = tag.removeprefix("v")
    wrong = [f"{name} states {stated}" for name, stated in versions().items() if stated != version]
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        wrong.append(f"CHANGELOG.md has no section [{version}]")
    print(f"the tag is {tag}, but " + "; ".join(wrong) if wrong else f"{version} everywhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
