"""What was found, in words, in numbers and in a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bench import LIMIT_NAMES, Finding, Row, Table, share
from benchmarks.machine import slug
from benchmarks.plot import plot
from benchmarks.registry import CASES, Case, Point

LEGEND = """\
Contenders take turns (A B A B) in one process; every result is checked before timing, and wrong results are not timed.
*time* is the median over rounds. *speed* is the baseline's median time over the contender's, with the smallest and
largest ratio within a round; above 1 is faster. *memory* is the peak beyond the inputs for one call in a fresh process,
output and gradients included. *error* is the largest absolute error against float64, for the quantity that is furthest
off; the plain formula's error in float32 follows in parentheses. *limit* is the share of this machine's sgemm rate (or
copy bandwidth), measured just before each case. The engine that regard chose follows its name in parentheses.
"""


def markdown(findings: list[Finding], facts: dict[str, str], pictures: dict[str, str]) -> str:
    """Return the report; ``pictures`` maps the name of a case to a file in the same folder."""
    lines = [f"# Benchmarks on {facts['CPU']}", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += [LEGEND]
    if any(finding.verdicts for finding in findings):
        lines += ["## Summary", "", summary(raw(findings, facts, pictures)), ""]
    for finding in findings:
        lines += [*_finding(finding, pictures.get(finding.case.name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def summary(found: dict[str, Any]) -> str:
    """Return the comparisons of a report as a table."""
    lines = ["| case | size | contender | against | result |", "| --- | --- | --- | --- | ---: |"]
    for name, case in found["cases"].items():
        for verdict in case["targets"]:
            goal = verdict["goal"]
            size = Point(goal["size"], goal["backward"], goal["variant"]).label
            lines.append(
                f"| `{name}` | {size} | {goal['contender']} | {against(case, goal)} | {result(case, verdict)} |"
            )
    return "\n".join(lines)


def against(case: dict[str, Any], goal: dict[str, Any]) -> str:
    """Return the contender of a comparison, or nothing where there is none."""
    return "" if goal["kind"] in ("seconds", "memory") else goal["against"] or case["baseline"]


def result(case: dict[str, Any], verdict: dict[str, Any]) -> str:
    """Return the outcome of a comparison, with its unit."""
    goal, measured = verdict["goal"], verdict["measured"]
    if measured is None:
        return "not measured"
    if goal["kind"] == "seconds":
        return seconds(measured)
    if goal["kind"] == "memory":
        return f"{measured:,.1f} MB"
    if goal["kind"] == "overhead":
        return f"{abs(measured):,.1f} µs {'more' if measured >= 0 else 'less'}"
    if goal["kind"] == "backward":
        return f"{measured:.2f} × the forward"
    if goal["kind"] == "time" and against(case, goal).startswith("regard"):
        return f"{measured:.2f} × the time"
    text = ratio(measured if goal["kind"] == "speed" else 1 / measured)
    return text if verdict["share"] is None else f"{text}, {verdict['share']:.0%} of {LIMIT_NAMES[case['bound']]}"


def ratio(speed: float) -> str:
    """Return how many times faster or slower something is.

    >>> ratio(34.51), ratio(2.114), ratio(1.002), ratio(0.543)
    ('34.5 × faster', '2.11 × faster', 'as fast', '1.84 × slower')
    """
    times = max(speed, 1 / speed)
    text = f"{times:,.{1 if times >= 10 else 2}f}"
    return "as fast" if text == "1.00" else f"{text} × {'faster' if speed > 1 else 'slower'}"


def _finding(finding: Finding, picture: str | None) -> list[str]:
    case, limits = finding.case, finding.limits
    about = f"{case.title}. Size: {case.unit}. Baseline: {case.baseline}. {case.notes}".strip()
    lines = [
        f"## `{case.name}`",
        "",
        about,
        "",
        f"sgemm {limits.flops / 1e9:,.0f} GFLOP/s, copy {limits.bytes / 1e9:,.1f} GB/s.",
        "",
    ]
    lines += ["| size | contender | time | speed | memory | error | limit |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for table in finding.tables:
        lines += [_row(finding, table, row) for row in table.rows]
    sampled = [table for table in finding.tables if table.checked != "all rows"]
    if sampled:
        checked = "; ".join(f"{table.point.label}: {table.checked}" for table in sampled)
        lines += ["", f"Checked on a sample ({checked}), gradients for an output gradient at those rows."]
    if picture:
        lines += ["", f"![Cost of {case.name} over size]({picture})"]
    return lines


def _row(finding: Finding, table: Table, row: Row) -> str:
    start = f"| {table.point.label} | {row.contender}{f' ({row.engine})' if row.engine else ''} |"
    if row.status != "ok":
        reason = row.reason.replace("|", "\\|").replace("\n", " ")
        return f"{start} {'**wrong**' if row.status == 'wrong' else row.status}: {reason} | | | {_error(row)} | |"
    assert row.timing is not None
    cells = [seconds(row.timing.median), _speed(row, finding.case), _memory(row), _error(row)]
    cells.append(_limit(finding, row))
    return f"{start} {' | '.join(cells)} |"


def seconds(value: float) -> str:
    """Return a duration with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:,.0f} {unit}"
    return f"{value * 1e6:.1f} µs"


def _speed(row: Row, case: Case) -> str:
    if row.contender == case.baseline:
        return "1"
    if row.speed is None:
        return "–"
    return f"{row.speed.value:.2f} ({row.speed.low:.2f}–{row.speed.high:.2f})"


def _memory(row: Row) -> str:
    if row.peak is None:
        return row.peak_reason.replace("|", "\\|").replace("\n", " ") or "–"
    return f"{row.peak / 2**20:,.1f} MiB"


def _error(row: Row) -> str:
    if row.worst is None:
        return ""
    name, error = row.worst
    return f"{error.found:.1e} ({error.eager:.1e})" + ("" if name == "output" else f" {name}")


def _limit(finding: Finding, row: Row) -> str:
    reached = share(finding.case, finding.limits, row)
    return "–" if reached is None else f"{reached:.0%}"


def raw(findings: list[Finding], facts: dict[str, str], pictures: dict[str, str]) -> dict[str, Any]:
    """Return all numbers, for a machine to read."""
    cases = {}
    for finding in findings:
        case = finding.case
        tables = [
            {
                **asdict(table.point),
                "checked": table.checked,
                "rows": [asdict(row) for row in table.rows],
            }
            for table in finding.tables
        ]
        verdicts = [asdict(verdict) for verdict in finding.verdicts]
        cases[case.name] = {
            "title": case.title,
            "unit": case.unit,
            "baseline": case.baseline,
            "bound": case.bound,
            "picture": pictures.get(case.name),
            "limits": asdict(finding.limits),
            "seconds": finding.seconds,
            "points": tables,
            "targets": verdicts,
        }
    return {"machine": facts, "cases": cases}


def write(findings: list[Finding], facts: dict[str, str], folder: Path) -> list[Path]:
    """Write the report, the numbers and the pictures, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join(filter(None, (slug(facts["CPU"]), facts.get("name", ""))))
    pictures = {}
    for finding in findings:
        name = f"{stem}-{finding.case.name}.png"
        if plot(finding, folder / name):
            pictures[finding.case.name] = name
    if {finding.case.name for finding in findings} == set(CASES):  # a case that is gone leaves its picture
        for old in set(folder.glob(f"{stem}-*.png")) - {folder / name for name in pictures.values()}:
            old.unlink()
    text, numbers = folder / f"{stem}.md", folder / f"{stem}.json"
    text.write_text(markdown(findings, facts, pictures), encoding="utf-8")
    numbers.write_text(
        json.dumps(raw(findings, facts, pictures), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return [text, numbers, *(folder / name for name in pictures.values())]
