"""Write what was measured into the README: ``python -m benchmarks.readme``.

The numbers come from the newest report in benchmarks/results and from the pronunciation results beside it; they are
never typed.
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
    lines = [f"{machine['CPU']}, {machine['cores']}; {machine['date']}.", ""]
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


def pronunciation(results: list[Path]) -> str:
    """Return one line for each pronunciation result."""
    lines = []
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        where = "the papers' test split" if path.stem.endswith("papers") else "words held out as the demo does"
        lines.append(
            f"- {where}: phoneme error rate {found['phoneme_error_rate']} %, word error rate "
            f"{found['word_error_rate']} % on {found['test_words']:,} words, after {found['training_seconds']:.0f} "
            f"seconds of training on {found['threads']} threads ({found['words_per_second']:,} words/s)."
        )
    return "\n".join(lines)


def filled(text: str, name: str, content: str) -> str:
    """Return a text with what stands between the marks of this name replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no marks <!-- {name} -->")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n{match[2]}", text)


def main() -> int:
    """Fill in the README and return 0; 1 where there is nothing to fill in."""
    spoken = sorted(RESULTS.glob("pronunciation*.json"))
    reports = sorted(set(RESULTS.glob("*.json")) - set(spoken), key=lambda path: path.stat().st_mtime)
    if not reports:
        print("no report in benchmarks/results: run `make bench` first", file=sys.stderr)
        return 1
    readme = ROOT / "README.md"
    text = filled(readme.read_text(encoding="utf-8"), "bench", speeds(reports[-1]))
    readme.write_text(filled(text, "demo", pronunciation(spoken)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
