"""Write what was measured into the README: ``python -m benchmarks.readme``.

The numbers come from the newest report in benchmarks/results, and from what the demo printed (`make demo | tee
benchmarks/results/demo.txt`); they are never typed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results"
UNITS = {"time": "× the time", "speed": "× faster", "overhead": "µs more", "memory": "MB"}


def speeds(report: Path) -> str:
    """Return the table of targets, asked beside measured."""
    found = json.loads(report.read_text(encoding="utf-8"))
    machine = found["machine"]
    lines = [f"{machine['CPU']}, {machine['cores']} cores; {machine['date']}.", ""]
    lines += ["| what | asked | measured |", "| --- | --- | ---: |"]
    for case in found["cases"].values():
        for target in case["targets"]:
            value, kind = target["measured"], target["goal"]["kind"]
            digits = 1 if kind in ("overhead", "memory") else 2
            measured = "not measured" if value is None else f"{value:,.{digits}f} {UNITS[kind]}"
            if value is not None and not target["met"]:
                measured = f"**{measured}** (missed)"
            lines.append(f"| {case['title']} | {target['text']} | {measured} |")
    return "\n".join(lines)


def demo(printed: Path) -> str:
    """Return what the demo printed of its training and its score."""
    lines = printed.read_text(encoding="utf-8").splitlines()
    told = [line.strip() for line in lines if line.startswith(("Trained on", "On "))]
    return "> " + "\n> ".join(told) + f"\n\nThe whole output: [{printed.name}](benchmarks/results/{printed.name})."


def filled(text: str, name: str, content: str) -> str:
    """Return a text with what stands between the marks of this name replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no marks <!-- {name} -->")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n{match[2]}", text)


def main() -> int:
    """Fill in the README and return 0; 1 where there is nothing to fill in."""
    reports = sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        print("no report in benchmarks/results: run `make bench` first", file=sys.stderr)
        return 1
    readme = ROOT / "README.md"
    text = filled(readme.read_text(encoding="utf-8"), "bench", speeds(reports[-1]))
    readme.write_text(filled(text, "demo", demo(RESULTS / "demo.txt")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
