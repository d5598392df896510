"""Write what was measured into README and docs, and the catalogue there, too: ``python -m benchmarks.readme``.

The numbers come from the newest report in benchmarks/results, and from what the demo printed (`make demo-training |
tee benchmarks/results/demo.txt`); they are never typed. What stands between ``<!-- name -->`` and ``<!-- /name -->`` is
replaced, within a line or over lines:

``bench``
    the table of all goals, asked beside measured
``headline``
    the table of :data:`HEADLINE`, with the times of both sides
``growth``
    the pictures of how costs grow
``machine``
    where and when it was measured
``catalogue``
    every mechanism with formula and source
``demo``
    what the demo printed of its training and its score
``bandwidth-loo``, ``bandwidth-learned``
    how near to the least leave-one-out error "loo" comes, and by how much "learned" is ahead of it
the name of a goal
    what was measured for it, with its unit; ``name:time`` and ``name:against`` are the two times

``translation``
    the scores of trained models, in docs/translation.md
``alignment``
    how well attention aligns words, there, too
``published``, ``predicted``, ``predicted:machine``
    big models beside their published counts, and small ones beside predictions, in docs/planning.md
``language``
    what language models were asked to reach, and reached, in docs/language-models.md
``hugging-face``
    how fast models of transformers run, in docs/hugging-face.md
``asked``, ``table``
    how long kernel regressions of millions of points take, in docs/large-regression.md
``classifiers``
    how well classifiers of images do, in docs/vision.md
``captions``, ``looks``
    how good captions are and where their words look, in docs/vision.md
``page``, ``capture``
    how fast the inspector's page is, and what recording costs, in docs/inspector.md

The marks of docs/regression.md are filled from benchmarks/results/real-data.json; ``benchmarks.real_report.contents``
says what they are.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import regard
from benchmarks import (
    captioning,
    capture,
    hugging_face,
    image_classification,
    language_goals,
    large_regression,
    page,
    planning,
)
from benchmarks.alignment import summary as of_alignment
from benchmarks.bench import LIMIT_NAMES
from benchmarks.machine import ROOT
from benchmarks.real_report import contents as of_real_data
from benchmarks.report import seconds
from benchmarks.translation import summary
from regard import engines, masks, normalizers, scores

RESULTS = ROOT / "benchmarks" / "results"
#: What `python -m benchmarks.bandwidths` writes.
BANDWIDTHS = RESULTS / "bandwidths.json"
#: The comparison on real data, and the page that shows it.
REAL, REGRESSION = RESULTS / "real-data.json", ROOT / "docs" / "regression.md"
#: Regressions of millions of points, and the page that shows them.
LARGE, LARGE_REGRESSION = RESULTS / "large-regression.json", ROOT / "docs" / "large-regression.md"
#: The scores of trained models, and the page that shows them.
TRAINED, TRANSLATION = RESULTS / "translation.json", ROOT / "docs" / "translation.md"
#: How well attention aligns words.
ALIGNED = RESULTS / "alignment.json"
#: What small models take, beside what was predicted, and the page that shows it.
PLANNED, PLANNING = RESULTS / "planning.json", ROOT / "docs" / "planning.md"
#: The page that shows what language models reach.
LANGUAGE = ROOT / "docs" / "language-models.md"
#: How fast models of transformers run, and the page that shows it.
INSPECTOR = ROOT / "docs" / "inspector.md"
#: How good captioners and classifiers of images are, and the page that shows it.
CAPTIONED, VISION = RESULTS / "captioning.json", ROOT / "docs" / "vision.md"
CLASSIFIED = RESULTS / "image-classification.json"
HUGGED, HUGGING_FACE = RESULTS / "hugging-face.json", ROOT / "docs" / "hugging-face.md"
UNITS = {"time": "× the time", "speed": "× faster", "overhead": "µs more", "backward": "× the forward", "memory": "MB"}
#: The goals that a reader sees first.
HEADLINE = (
    "additive-eager", "additive-compiled", "additive-backward", "additive-sdpa", "gaussian-keops", "gaussian-cdist",
    "boxcar", "epanechikov", "window-flex", "window-backward", "documents", "decode", "first-call", "aux",
)  # fmt: skip

#: What stands above the catalogue on its page.
PAGE = """# Catalogue

Every mechanism of `regard`, as `regard.catalogue()` and `regard catalogue` give it; `regard.cite(layer)` gives BibTeX.
Sizes: L queries, S keys, E width of queries and keys, V of values, C features, H heads; costs are those of a sequence.
Engines are those that run a plain call on a CPU; a layer without any has a read of its own."""

Target = dict[str, Any]


def value(case: dict[str, Any], target: Target) -> str:
    """Return what was measured for a goal, with its unit."""
    measured, kind = target["measured"], target["goal"]["kind"]
    if measured is None:
        return "not measured"
    if kind == "seconds":
        return seconds(measured)
    digits = 1 if kind in ("overhead", "memory") or measured >= 10 else 2
    text = f"{measured:,.{digits}f} {UNITS[kind]}"
    return text if target["share"] is None else f"{text}, {target['share']:.0%} of {LIMIT_NAMES[case['bound']]}"


def _judged(case: dict[str, Any], target: Target) -> str:
    text = value(case, target)
    return text if target["met"] or target["measured"] is None else f"**{text}** (missed)"


def row(case: dict[str, Any], target: Target, contender: str) -> dict[str, Any] | None:
    """Return what a contender did at a goal's point."""
    goal = target["goal"]
    for point in case["points"]:
        if all(point[name] == goal[name] for name in ("size", "backward", "variant")):
            return next((row for row in point["rows"] if row["contender"] == contender), None)
    return None


def took(case: dict[str, Any], target: Target, contender: str) -> str:
    """Return a contender's time at a goal's point, or why there is none."""
    found = row(case, target, contender)
    if found is None:
        return "not run"
    if found["timing"] is None:
        return f"{found['status']}: {found['reason']}".replace("|", "\\|")
    return seconds(statistics.median(found["timing"]["samples"]))


def _goals(found: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Target]]:
    return {target["goal"]["name"]: (case, target) for case in found["cases"].values() for target in case["targets"]}


def _against(case: dict[str, Any], target: Target) -> str:
    kind = target["goal"]["kind"]
    return "" if kind in ("seconds", "memory") else target["goal"]["against"] or case["baseline"]


def machine(found: dict[str, Any]) -> str:
    """Return where and when it was measured."""
    facts = found["machine"]
    return f"{facts['CPU']}, {facts['cores']} cores; {facts['date']}."


#: What stands behind the names of a part in the README, and before those of engines.
FURTHER = {
    "score": "your own `Score`; a FlexAttention `score_mod`",
    "mask": "composed with `&`, `\\|`, `~`; a `mask_mod`, a `BlockMask`, a tensor",
    "engine": "`auto` chooses by a cost model fitted on measurements",
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


def speeds(found: dict[str, Any], cases: str = "") -> str:
    """Return the table of all goals, of cases whose names begin so."""
    lines = [machine(found), "", "| what | asked | measured |", "| --- | --- | ---: |"]
    lines += [
        f"| {case['title']} | {target['text']} | {_judged(case, target)} |"
        for name, (case, target) in _goals(found).items()
        if name.startswith(cases)
    ]
    return "\n".join(lines)


def headline(found: dict[str, Any]) -> str:
    """Return the table of the goals that matter most, with times."""
    lines = [
        machine(found),
        "",
        "| what | regard | against | regard is | asked |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    goals = _goals(found)
    for name in HEADLINE:
        if name not in goals:
            continue
        case, target = goals[name]
        goal, other = target["goal"], _against(case, target)
        what = f"{case['title']}, {goal['size']:,} {case['unit']}"
        what += f", {goal['variant']}" if goal["variant"] else ""
        what += ", forward and backward" if goal["backward"] else ""
        against = f"{other}: {took(case, target, other)}" if other else ""
        ours = took(case, target, goal["contender"])
        measured = "" if goal["kind"] == "seconds" and target["met"] else _judged(case, target)
        lines.append(f"| {what} | {ours} | {against} | {measured} | {_asked(case, goal)} |")
    return "\n".join(lines)


def _asked(case: dict[str, Any], goal: dict[str, Any]) -> str:
    unit = {"speed": "×", "seconds": "s"}.get(goal["kind"], UNITS.get(goal["kind"], ""))
    sign = "≥" if goal["kind"] == "speed" else "≤"
    share = "" if goal["share"] is None else f", or {goal['share']:.0%} of {LIMIT_NAMES[case['bound']]}"
    return f"{sign} {goal['limit']:g} {unit}{share}"


def growth(found: dict[str, Any]) -> str:
    """Return the pictures of how costs grow, of cases with more than two sizes."""
    drawn = [case for case in found["cases"].values() if len({point["size"] for point in case["points"]}) > 2]
    pictures = [(case["title"], case["picture"]) for case in drawn if case["picture"]]
    return "\n\n".join(f"![{title}](benchmarks/results/{name})" for title, name in pictures)


def demo(printed: Path) -> str:
    """Return what the demo printed of its training and its score."""
    lines = printed.read_text(encoding="utf-8").splitlines()
    told = [line.strip() for line in lines if line.startswith(("Trained on", "On "))]
    return "> " + "\n> ".join(told) + f"\n\nThe whole output: [{printed.name}](benchmarks/results/{printed.name})."


def contents(found: dict[str, Any], printed: Path) -> dict[str, Callable[[], str]]:
    """Return what can be filled in, by the name of its mark."""
    made: dict[str, Callable[[], str]] = {
        "bench": lambda: speeds(found),
        "choices": choices,
        "headline": lambda: headline(found),
        "growth": lambda: growth(found),
        "machine": lambda: machine(found),
        "catalogue": lambda: regard.catalogue().markdown(("name", "formula", "source"), level=4),
        "demo": lambda: demo(printed),
    }
    # Small calls have a report of their own where they were measured since.
    for name, (case, target) in (_goals(found) | _goals(newest("small") or found)).items():
        goal = target["goal"]
        other = _against(case, target)
        made[name] = lambda case=case, target=target: value(case, target)
        made[f"{name}:time"] = lambda case=case, target=target, goal=goal: took(case, target, goal["contender"])
        if other:
            made[f"{name}:against"] = lambda case=case, target=target, other=other: took(case, target, other)
    return made


def of_bandwidths(numbers: Path) -> dict[str, Callable[[], str]]:
    """Return what `python -m benchmarks.bandwidths` has to say, by the name of its mark; nothing where it never ran."""
    marks = json.loads(numbers.read_text(encoding="utf-8"))["marks"] if numbers.exists() else {}
    return {name: lambda text=text: text for name, text in marks.items()}


def filled(text: str, made: dict[str, Callable[[], str]]) -> str:
    """Return a text with what stands between its marks replaced; a mark of no known name is an error."""
    pattern = re.compile(r"<!-- ([\w:-]+) -->(.*?)<!-- /\1 -->", re.DOTALL)

    def fill(match: re.Match[str]) -> str:
        name, old = match[1], match[2]
        if name not in made:
            raise ValueError(f"the page has marks <!-- {name} -->, but there is only {', '.join(made)}")
        new = made[name]()
        return f"<!-- {name} -->" + (f"\n\n{new}\n\n" if "\n" in old else new) + f"<!-- /{name} -->"

    return pattern.sub(fill, text)


def regression() -> str:
    """Return the page on kernel regression with what was measured last."""
    made = of_real_data(json.loads(REAL.read_text(encoding="utf-8"))) | of_bandwidths(BANDWIDTHS)
    if found := newest("regress-predict"):
        made |= {"speeds": lambda: speeds(found, "regress-"), "speeds:machine": lambda: machine(found)}
    return filled(REGRESSION.read_text(encoding="utf-8"), made)


def of_large_regression() -> str:
    """Return the page on kernel regression of many points with what was measured last."""
    made = large_regression.contents(json.loads(LARGE.read_text(encoding="utf-8")))
    return filled(LARGE_REGRESSION.read_text(encoding="utf-8"), made)


def translation() -> str:
    """Return the page on translation with what was measured last."""
    made = {
        "translation": lambda: summary(json.loads(TRAINED.read_text(encoding="utf-8"))),
        "alignment": lambda: of_alignment(json.loads(ALIGNED.read_text(encoding="utf-8"))),
    }
    return filled(TRANSLATION.read_text(encoding="utf-8"), made)


def of_planning() -> str:
    """Return the page on planning, with counts as they are and what was measured last."""
    numbers = json.loads(PLANNED.read_text(encoding="utf-8"))
    made = {
        "published": planning.published,
        "predicted": lambda: planning.summary(numbers),
        "predicted:machine": lambda: planning.machine(numbers),
    }
    return filled(PLANNING.read_text(encoding="utf-8"), made)


def of_language() -> str:
    """Return the page on language models with what was measured last."""
    return filled(LANGUAGE.read_text(encoding="utf-8"), {"language": language_goals.table})


def of_hugging_face() -> str:
    """Return the page on models of transformers with what was measured last."""
    numbers = json.loads(HUGGED.read_text(encoding="utf-8"))
    return filled(HUGGING_FACE.read_text(encoding="utf-8"), {"hugging-face": lambda: hugging_face.table(numbers)})


def of_vision() -> str:
    """Return the page on images with what was measured last."""
    tables = {"captions": (captioning.goodness, CAPTIONED), "looks": (captioning.looked, CAPTIONED)}
    tables |= {"classifiers": (image_classification.summary, CLASSIFIED)}
    made = {name: partial(_measured, *each) for name, each in tables.items()}
    return filled(VISION.read_text(encoding="utf-8"), made)


def _measured(table: Callable[[dict[str, Any]], str], path: Path) -> str:
    return table(json.loads(path.read_text(encoding="utf-8")))


def of_inspector() -> str:
    """Return the page on the inspector with what was measured last."""
    told = {"page": page.table, "capture": capture.table}
    results = {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in told}
    marks = {name: partial(table, results[name]) for name, table in told.items()}
    return filled(INSPECTOR.read_text(encoding="utf-8"), marks)


def newest(case: str) -> dict[str, Any] | None:
    """Return the newest report that has a case, or None."""
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json"))
    found = [report for report in reports if case in report.get("cases", {})]
    return max(found, key=lambda report: report["machine"]["date"], default=None)  # files' own times are of a checkout


def main() -> int:
    """Fill in README and docs and return 0; 1 where there is nothing to fill in."""
    if REAL.exists():
        REGRESSION.write_text(regression(), encoding="utf-8")
    if LARGE.exists():
        LARGE_REGRESSION.write_text(of_large_regression(), encoding="utf-8")
    if TRAINED.exists():
        TRANSLATION.write_text(translation(), encoding="utf-8")
    if PLANNED.exists():
        PLANNING.write_text(of_planning(), encoding="utf-8")
    LANGUAGE.write_text(of_language(), encoding="utf-8")
    HUGGING_FACE.write_text(of_hugging_face(), encoding="utf-8")
    INSPECTOR.write_text(of_inspector(), encoding="utf-8")
    if CAPTIONED.exists():
        VISION.write_text(of_vision(), encoding="utf-8")
    readme, found = ROOT / "README.md", newest("additive")
    if found is None:
        print("no report in benchmarks/results: run `make bench` first", file=sys.stderr)
        return 1
    readme.write_text(
        filled(readme.read_text(encoding="utf-8"), contents(found, RESULTS / "demo.txt")), encoding="utf-8"
    )
    (ROOT / "docs" / "catalogue.md").write_text(f"{PAGE}\n\n{regard.catalogue().markdown()}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
