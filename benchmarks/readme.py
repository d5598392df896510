"""Fill README and docs with measured numbers, and render the reports: ``python -m benchmarks.readme``.

Numbers come from benchmarks/results; they are never typed. Text between ``<!-- name -->`` and ``<!-- /name -->`` is
replaced, within a line or over lines. README and every page of docs may use the marks of the newest report of
``python -m benchmarks``:

``speed``
    the table of :data:`SPEEDS`: regard and what one would otherwise use
``comparisons``
    the table of all comparisons
``growth``
    pictures of how costs grow with size
``machine``
    where and when it was measured
``demo``
    the scores that ``make demo-training | tee benchmarks/results/demo.txt`` printed
the name of a comparison, such as ``additive-eager``
    its outcome; ``name:time`` and ``name:against`` are the two times

:data:`PAGES` names additional marks of single pages. docs/catalogue.md and docs/coverage.md are written as a whole, and
:data:`REPORTS` are the pages of benchmarks/results that are rendered from the JSON file next to them.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import regard
from benchmarks import (
    alignment,
    beam_search,
    captioning,
    capture,
    coverage,
    decoding,
    encoders,
    hugging_face,
    image_classification,
    kills,
    language_models,
    language_summary,
    large_regression,
    page,
    planning,
    real_report,
    short_runs,
    small_model,
    tables,
    translation,
)
from benchmarks.joeynmt import report as joeynmt
from benchmarks.machine import ROOT
from benchmarks.report import against, ratio, result, seconds
from regard import engines, masks, normalizers, scores

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"

Found = dict[str, Any]
Marks = dict[str, Callable[[], str]]


class Speed(NamedTuple):
    """A row of README's table: a point of a case, and what regard is compared with there."""

    what: str
    case: str
    size: int
    against: str
    shown: str
    backward: bool = False
    variant: str = ""


#: The rows of README's table, each against what one would otherwise use.
SPEEDS = (
    Speed("Additive (Bahdanau) attention, 512 × 512", "additive", 512, "compiled formula", "`torch.compile`"),
    Speed("… forward and backward", "additive", 512, "compiled formula", "`torch.compile`", backward=True),
    Speed("Causal window of 256, 8,192 tokens", "window", 8192, "FlexAttention, compiled", "FlexAttention, compiled"),
    Speed(
        "32 packed documents, 8,192 tokens", "documents", 8192, "torch SDPA, dense mask", "torch SDPA with a dense mask"
    ),
    Speed("Gaussian kernel regression, 20,000 points", "gaussian", 20_000, "KeOps", "KeOps"),
    Speed("Without a mask: 8 heads, 2,048 tokens", "plain", 2048, "torch SDPA", "torch SDPA"),
    Speed("A small causal call: 8 heads, 64 tokens", "small", 64, "torch SDPA", "torch SDPA", variant="is_causal=True"),
)

#: What stands above the catalogue on its page.
CATALOGUE = """# Catalogue

Four independent parts make one operation, `Σ_i α(q, k_i) v_i` with `α = normalize(mask(score(q, k)))`:

{choices}

All mechanisms, as `regard.catalogue()` and `regard catalogue` list them; `regard.cite(layer)` prints BibTeX.
Sizes: L queries, S keys, E width of queries and keys, V width of values, C features, H heads. Costs are per sequence.
*engines* can run a plain call on a CPU; layers without an entry have their own computation."""

#: What completes the choices of a part.
FURTHER = {
    "score": "your own `Score`; a FlexAttention `score_mod`",
    "mask": "composed with `&`, `\\|`, `~`; a `mask_mod`, a `BlockMask`, a tensor",
    "engine": "`auto` chooses by a cost model fitted to measurements",
}


def choices() -> str:
    """Return the table of the four parts, with what each can be."""
    names = {
        "score": ", ".join(_called(name, part) for name, part in scores.base.TABLE.items()),
        "mask": ", ".join(
            f"`{name}`" for name in masks.__all__ if name.islower() and name not in ("as_mask", "everything")
        ),
        "normalizer": ", ".join(_called(name, part) for name, part in normalizers.base.TABLE.items()),
        "engine": ", ".join(f"`{name}`" for name in engines.TABLE),
    }
    rows = [f"| {part} | {'; '.join(filter(None, (each, FURTHER.get(part))))} |" for part, each in names.items()]
    return "\n".join(["| part | choices |", "| --- | --- |", *rows])


def _called(name: str, part: type) -> str:
    """Return a part's name, or its class where it needs arguments."""
    try:
        part()
    except TypeError:
        return f"`{part.__name__}`"
    return f"`{name}`"


def catalogue() -> str:
    """Return the page of all mechanisms."""
    return f"{CATALOGUE.format(choices=choices())}\n\n{regard.catalogue().markdown()}\n"


def newest(case: str) -> Found | None:
    """Return the newest report that has a case, or None."""
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json"))
    found = [report for report in reports if case in report.get("cases", {})]
    return max(found, key=lambda report: report["machine"]["date"], default=None)  # files' own times are of a checkout


def newest_cases(found: Found) -> Found:
    """Return a report with each of its cases from the newest report of its processor that has the case."""
    cases = dict(found["cases"])
    for name in cases:
        latest = newest(name)
        if latest is not None and latest["machine"]["CPU"] == found["machine"]["CPU"]:
            cases[name] = latest["cases"][name]
    return found | {"cases": cases}


def machine(found: Found) -> str:
    """Return where and when a report was measured."""
    facts = found["machine"]
    return f"{facts['CPU']}, {facts['cores']} cores, {facts['date'][:10]}"


def median(case: Found, point: Found, contender: str) -> float | None:
    """Return a contender's median time at a point, or None where it has none."""
    rows = [row for row in _rows(case, point) if row["contender"] == contender and row["timing"]]
    return statistics.median(rows[0]["timing"]["samples"]) if rows else None


def _rows(case: Found, point: Found) -> list[Found]:
    names = ("size", "backward", "variant")
    return next((each["rows"] for each in case["points"] if all(each[name] == point[name] for name in names)), [])


def took(case: Found, point: Found, contender: str) -> str:
    """Return a contender's time at a point, or why there is none."""
    found = median(case, point, contender)
    if found is not None:
        return seconds(found)
    row = next((row for row in _rows(case, point) if row["contender"] == contender), None)
    return "not run" if row is None else f"{row['status']}: {row['reason']}".replace("|", "\\|")


def speed() -> str:
    """Return the table of :data:`SPEEDS`, with where it was measured."""
    lines, machines = ["| | regard | compared with | regard is |", "| --- | ---: | --- | ---: |"], {}
    for row in SPEEDS:
        found = newest(row.case)
        if found is None:
            continue
        machines[machine(found)] = None
        case, point = found["cases"][row.case], row._asdict()
        ours, theirs = median(case, point, "regard"), median(case, point, row.against)
        outcome = "not measured" if ours is None or theirs is None else ratio(theirs / ours)
        other = f"{row.shown}: {took(case, point, row.against)}"
        lines.append(f"| {row.what} | {took(case, point, 'regard')} | {other} | {outcome} |")
    return "\n".join([*lines, "", f"Measured on {'; '.join(machines)}."])


def comparisons(found: Found, cases: str = "") -> str:
    """Return a table of comparisons for each case whose name begins so, without those with the reference engine."""
    lines = []
    for name, case in found["cases"].items():
        verdicts = [each for each in case["targets"] if each["goal"]["against"] != "regard, reference"]
        if not verdicts or not name.startswith(cases):
            continue
        lines += ["", f"**{case['title']}**", "", "| | regard | compared with | result |"]
        lines += ["| --- | ---: | --- | ---: |"]
        for verdict in verdicts:
            goal = verdict["goal"]
            what = f"{goal['size']:,} {case['unit']}"
            what += f", {goal['variant']}" if goal["variant"] else ""
            what += ", forward and backward" if goal["backward"] else ""
            what += f", {goal['contender'].removeprefix('regard, ')}" if goal["contender"] != "regard" else ""
            other = {"memory": "peak memory", "seconds": ""}.get(goal["kind"], against(case, goal))
            shown = f"{other}: {took(case, goal, other)}" if against(case, goal) else other
            outcome = result(case, verdict) if goal["kind"] != "seconds" else ""
            lines.append(f"| {what} | {took(case, goal, goal['contender'])} | {shown} | {outcome} |")
    return "\n".join(lines).strip()


def growth(found: Found, folder: str = "../benchmarks/results") -> str:
    """Return the pictures of how costs grow, of cases with more than two sizes."""
    drawn = [case for case in found["cases"].values() if len({point["size"] for point in case["points"]}) > 2]
    pictures = [(case["title"], case["picture"]) for case in drawn if case["picture"]]
    return "\n\n".join(f"![{title}]({folder}/{name})" for title, name in pictures)


def demo(printed: Path) -> str:
    """Return what the demo printed of its training and its score."""
    lines = printed.read_text(encoding="utf-8").splitlines()
    said = [line.strip() for line in lines if line.startswith(("Trained on", "On "))]
    return "> " + "\n> ".join(said) + f"\n\nFull output: [{printed.name}](../benchmarks/results/{printed.name})."


def measured(found: Found) -> Marks:
    """Return the marks of a report."""
    made: Marks = {
        "speed": speed,
        "comparisons": lambda: comparisons(found),
        "growth": lambda: growth(found),
        "machine": lambda: machine(found),
        "demo": lambda: demo(RESULTS / "demo.txt"),
    }
    for case in found["cases"].values():
        for verdict in case["targets"]:
            goal = verdict["goal"]
            name, other = goal["name"], against(case, goal)
            made[name] = partial(result, case, verdict)
            made[f"{name}:time"] = partial(took, case, goal, goal["contender"])
            if other:
                made[f"{name}:against"] = partial(took, case, goal, other)
    return made


def _numbers(name: str) -> Found:
    found: Found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _table(render: Callable[[Found], str], name: str) -> Callable[[], str]:
    return lambda: render(_numbers(name))


def campaign_figures() -> str:
    """Return how many generated cases broke a law, as the report of the campaign says."""
    report = (RESULTS / "campaign.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## (.+)\n\n([\d,]+) cases, \*\*([\d,]+) wrong\*\*", report, re.MULTILINE)
    rows = [f"| {name[0].lower()}{name[1:]} | {cases} | {wrong} |" for name, cases, wrong in parts]
    facts = _numbers("campaign")["machine"]
    return "\n".join(
        ["| campaign | cases | wrong |", "| --- | ---: | ---: |", *rows, "", f"{facts['CPU']}, {facts['date'][:10]}."]
    )


def of_bandwidths(numbers: Path) -> Marks:
    """Return what `python -m benchmarks.bandwidths` has to say, by the name of its mark; nothing where it never ran."""
    marks = json.loads(numbers.read_text(encoding="utf-8"))["marks"] if numbers.exists() else {}
    return {name: lambda text=text: text for name, text in marks.items()}


def of_regression() -> Marks:
    """Return the marks of docs/regression-results.md."""
    made = real_report.contents(_numbers("real-data"))
    made |= tables.contents(_numbers("tables"))
    if found := newest("regress-predict"):
        made |= {"speeds": lambda: comparisons(found, "regress-"), "speeds:machine": lambda: machine(found)}
    return made


#: Additional marks of single documentation pages, by the name of the page.
PAGES: dict[str, Callable[[], Marks]] = {
    "captions": lambda: {
        "captions": _table(captioning.goodness, "captioning"),
        "looks": _table(captioning.looked, "captioning"),
    },
    "hugging-face": lambda: {"hugging-face": _table(hugging_face.table, "hugging-face")},
    "inspector": lambda: {"page": _table(page.table, "page"), "capture": _table(capture.table, "capture")},
    "language-models": lambda: {"language": language_summary.table},
    "large-regression": lambda: large_regression.contents(_numbers("large-regression")),
    "planning": lambda: {
        "published": planning.published,
        "predicted": _table(planning.summary, "planning"),
        "predicted:machine": _table(planning.machine, "planning"),
    },
    "regression-bandwidths": lambda: of_bandwidths(RESULTS / "bandwidths.json"),
    "regression-results": of_regression,
    "trust": lambda: {"campaign": campaign_figures},
    "translation": lambda: {"translation": _table(translation.summary, "translation")},
    "vision": lambda: {"classifiers": _table(image_classification.summary, "image-classification")},
    "word-alignment": lambda: {"alignment": _table(alignment.summary, "alignment")},
}

#: How pages of benchmarks/results are rendered from the JSON file next to them, by how its name ends.
REPORTS: dict[str, Callable[[Found], str]] = {
    "alignment": alignment.markdown,
    "beam-search": beam_search.report,
    "captioning": captioning.report,
    "capture": capture.report,
    "decoding": decoding.report,
    "encoders": encoders.report,
    "hugging-face": hugging_face.report,
    "image-classification": image_classification.report,
    "joeynmt": lambda found: joeynmt.markdown(found["tables"]),
    "kills": lambda found: kills.document(found, found["machine"]),
    "language-models": lambda found: language_models.report(found["runs"]),
    "large-regression": large_regression.report,
    "page": page.report,
    "planning": planning.report,
    "real-data": real_report.document,
    "short-runs": short_runs.report,
    "small-model": small_model.report,
    "tables": tables.document,
    "translation": translation.markdown,
}


def filled(text: str, made: Marks) -> str:
    """Return a text with what stands between its marks replaced; a mark of no known name is an error."""
    pattern = re.compile(r"<!-- ([\w:-]+) -->(.*?)<!-- /\1 -->", re.DOTALL)

    def fill(match: re.Match[str]) -> str:
        name, old = match[1], match[2]
        if name not in made:
            raise ValueError(f"the page has marks <!-- {name} -->, but there is only {', '.join(made)}")
        new = made[name]()
        return f"<!-- {name} -->" + (f"\n\n{new}\n\n" if "\n" in old + new else new) + f"<!-- /{name} -->"

    return pattern.sub(fill, text)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield README, each page of docs and each rendered report, with the text that it should have."""
    found = newest("additive")
    made = measured(newest_cases(found)) if found else {}
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        yield path, filled(text, made | PAGES.get(path.stem, dict)()) if "<!-- /" in text else text
    yield DOCS / "catalogue.md", catalogue()
    yield DOCS / "coverage.md", coverage.page()
    for path in sorted(RESULTS.glob("*.json")):
        render = next((render for end, render in REPORTS.items() if f"-{path.stem}".endswith(f"-{end}")), None)
        if render is not None:
            yield path.with_suffix(".md"), render(json.loads(path.read_text(encoding="utf-8")))


def main() -> int:
    """Fill in README and docs, render the reports, and return 0."""
    os.environ["REGARD_FLEX"] = "uncompiled"  # what engine flex runs does not depend on this machine's compiler
    for path, text in pages():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
