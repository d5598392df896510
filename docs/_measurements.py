"""The benchmark pages of the site: all comparisons, slower ones first, and the reports they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import readme
from benchmarks.report import against, ratio, seconds

#: What is compared with a part of itself says nothing of other libraries.
OURS = ("regard", "its kernels alone")
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def pages() -> dict[str, str]:
    """Return the page of comparisons."""
    reports = [path.name for path in sorted(RESULTS.glob("*.md"))]
    titles = {name: (RESULTS / name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name in reports}
    rows = comparisons()
    slower = [row for row in rows if row["ratio"] < 0.995]
    text = (
        "# Benchmarks\n\n"
        "On your own machine: `python -m regard.bench` takes two minutes and writes a table and a picture.\n\n"
        "Contenders take turns in one process, every result is checked against float64 before it is timed, and times "
        "are medians. [Performance](../performance.md) explains the numbers. Each case is from its newest report.\n\n"
        f"## Slower ({len(slower)} of {len(rows)})\n\n{table(slower)}\n\n"
        f"## As fast, or faster\n\n{table([row for row in rows if row['ratio'] >= 0.995])}\n\n## Reports\n\n"
        + "\n".join(f"- [{titles[name]}]({name})" + machine(name) for name in reports)
        + "\n\n```{toctree}\n:hidden:\n\nPerformance <../performance>\n"
        + "\n".join(name.removesuffix(".md") for name in reports)
        + "\n```\n"
    )
    return {"benchmarks/index.md": text}


def comparisons() -> list[dict[str, Any]]:
    """Return each comparison with another library of the newest report of its case, the slowest first."""
    newest: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        for name in report["cases"] if isinstance(report.get("cases"), dict) else ():
            if name not in newest or report["machine"]["date"] > newest[name]["machine"]["date"]:
                newest[name] = report
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, report in newest.items():
        case = report["cases"][name]
        for verdict in case["targets"]:
            goal = verdict["goal"]
            other = against(case, goal)
            ours = readme.median(case, goal, goal["contender"])
            theirs = readme.median(case, goal, other) if other and not other.startswith(OURS) else None
            if ours is None or theirs is None:
                continue
            size = f"{goal['size']:,} {case['unit']}" + (f", {goal['variant']}" if goal["variant"] else "")
            size += ", forward and backward" if goal["backward"] else ""
            size += f"; {goal['contender']}" if goal["contender"] != "regard" else ""
            row = {"what": case["title"], "size": size, "other": other, "ours": ours, "theirs": theirs}
            row |= {"ratio": theirs / ours, "machine": f"{report['machine']['CPU']}, {report['machine']['date'][:10]}"}
            found[name, size, other] = row
    return sorted(found.values(), key=lambda row: row["ratio"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return comparisons as a table."""
    lines = ["| | size | regard | compared with | regard is | machine |", "| --- | --- | ---: | --- | ---: | --- |"]
    for row in rows:
        what, other = (row[name].replace("|", "\\|") for name in ("what", "other"))
        lines.append(
            f"| {what} | {row['size']} | {seconds(row['ours'])} | {other}: {seconds(row['theirs'])} | "
            f"{ratio(row['ratio'])} | {row['machine']} |"
        )
    return "\n".join(lines)


def machine(name: str) -> str:
    """Return where and when a report was measured, if its numbers say so."""
    numbers = RESULTS / name.replace(".md", ".json")
    facts = json.loads(numbers.read_text(encoding="utf-8")).get("machine") if numbers.exists() else None
    return (
        f": {facts['CPU']}, {facts['date'][:10]}" if isinstance(facts, dict) and {"CPU", "date"} <= set(facts) else ""
    )
