"""What was found, in words, in numbers and in a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bench import LIMIT_NAMES, Finding, Row, Table, Verdict, share
from benchmarks.machine import slug
from benchmarks.plot import plot
from benchmarks.registry import CASES, Case

LEGEND = """\
How to read the tables: contenders ran in turn (A B A B) in one process. *time* is the median of the rounds. *speed* is
the baseline's median over the contender's, with the smallest and largest ratio within a round; above 1 is faster.
*memory* is the peak beyond the inputs of one call in a fresh process, output and gradients included. *error* is the
largest absolute error against float64 of the quantity that is furthest off, and in brackets what the plain formula in
float32 errs there. *limit* is the share of this machine's sgemm rate that the operations of the visible pairs come to
(or of its copy bandwidth, the bytes that must be read), measured before each case. In brackets behind regard stands the
engine it chose. Results were checked before anything was timed; what is wrong is not timed.
"""


def markdown(findings: list[Finding], facts: dict[str, str], pictures: dict[str, str]) -> str:
    """Return the report; ``pictures`` maps a case's name to a file beside it."""
    lines = [f"# Benchmarks on {facts['CPU']}", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += [LEGEND]
    verdicts = [verdict for finding in findings for verdict in finding.verdicts]
    if verdicts:
        lines += ["## Targets", "", *_verdicts(findings), ""]
    for finding in findings:
        lines += [*_finding(finding, pictures.get(finding.case.name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(findings: list[Finding]) -> list[str]:
    lines = ["| case | target | measured | |", "| --- | --- | --- | --- |"]
    for finding in findings:
        for verdict in finding.verdicts:
            met = "met" if verdict.met else "not measured" if verdict.measured is None else "**missed**"
            measured = _measured(finding.case, verdict)
            lines.append(f"| `{finding.case.name}` | {verdict.text} | {measured} | {met} |")
    return lines


def _measured(case: Case, verdict: Verdict) -> str:
    if verdict.measured is None:
        return "–"
    if verdict.goal.kind == "seconds":
        return seconds(verdict.measured)
    unit = {"overhead": "µs", "memory": "MB"}.get(verdict.goal.kind, "×")
    share = "" if verdict.share is None else f", {verdict.share:.0%} of {LIMIT_NAMES[case.bound]}"
    return f"{verdict.measured:,.{2 if unit == '×' else 1}f} {unit}{share}"


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
