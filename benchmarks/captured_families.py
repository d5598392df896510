"""Compare what ``regard.inspect.capture`` records of other libraries' models with the weights that they compute.

    python -m benchmarks.captured_families [--only llama bert timm ...] [--workers 2]

Each model class of the installed transformers that can be built from a tiny configuration is recorded with its own
attention, and with "regard" if supported. The recorded weights must equal those that the model returns with its own
attention, or the softmaxes that it computes there, within 1e-5; or a warning must report what is missing. timm's models
(`pip install --no-deps timm`; they need no torchvision) are compared with their softmaxes without fused kernels.
Results go to benchmarks/results/captured-families.json and, with a line for each family, to docs/inspector-families.md;
--only keeps the results of other families, and --page writes the page from the results alone. The exit status is 1 if a
record is wrong or silently incomplete.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.families.processes import alone
from benchmarks.machine import ROOT, facts
from benchmarks.transformers_families import classes

RESULTS = ROOT / "benchmarks/results/captured-families.json"
TABLE = ROOT / "docs/inspector-families.md"
TIMM = "timm"
#: The worst first.
VERDICTS = ("different", "reported", "recorded", "no attention", "not run", "not built")


def families() -> dict[str, list[str]]:
    """Return the modules of each family of transformers."""
    import transformers

    found: dict[str, list[str]] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        found.setdefault(path.parent.name, []).append(f"transformers.models.{path.parent.name}.{path.stem}")
    return found


def examined(module: str, name: str) -> list[dict[str, str]]:
    """Return the results for one class of transformers or one model of timm."""
    warnings.simplefilter("ignore")
    if module == TIMM:
        from benchmarks.families import timm_models

        return [asdict(found) for found in timm_models.checked(name)]
    import transformers

    from benchmarks.families import captured
    from benchmarks.families.checks import Family, Found, reason
    from regard.integrations.transformers import register

    transformers.logging.set_verbosity_error()
    register()
    try:
        family = Family(getattr(importlib.import_module(module), name))
    except Exception as error:
        return [asdict(Found("build", "not built", reason(error)))]
    return [asdict(found) for found in captured.checked(family)]


def tasks(only: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the family, module and class of each model to record; each timm model is a family."""
    for family, modules in families().items():
        if not only or family in only:
            for module in modules:
                try:
                    yield from ((family, module, cls.__name__) for cls in classes(module))
                except ImportError:  # which says what it needs when the class is built
                    yield family, module, "its code"
    if importlib.util.find_spec(TIMM) is not None and (not only or TIMM in only):
        from benchmarks.families.timm_models import MODELS

        yield from ((f"timm: {name}", TIMM, name) for name in MODELS)


def judgement(found: dict[str, list[dict[str, str]]]) -> tuple[str, str, str]:
    """Return the worst verdict on a family's classes, what is recorded, and what is not and why."""
    every = [(name, result) for name, results in found.items() for result in results]
    for verdict in VERDICTS:
        of_it = [(name, result) for name, result in every if result["verdict"] == verdict]
        if not of_it:
            continue
        name, detail = of_it[0][0], of_it[0][1]["detail"]
        if verdict == "recorded":
            from benchmarks.families.captured import RECURRENCES

            linear = any(RECURRENCES in result["detail"] for _, result in of_it)
            return verdict, f"all; {RECURRENCES}" if linear else "all", ""
        if verdict == "reported":
            missing = _missing([result["detail"] for _, result in of_it])
            if not missing and all(result["detail"].startswith("0 matrices") for _, result in of_it):
                others = any(result["verdict"] == "recorded" for _, result in every)
                return ("recorded", "all", "") if others else ("no attention", "no attention in it", "")
            some = any(
                result["verdict"] == "recorded" or not result["detail"].startswith("0 matrices") for _, result in every
            )
            return verdict, "in part" if some else "nothing", missing or f"{name}: {detail}"
        return verdict, verdict if verdict != "different" else "wrong", f"{name}: {detail}" if detail else ""
    return "not built", "not built", "it has no class of its own that is a whole model"


def _missing(details: list[str]) -> str:
    """Return the classes of unrecorded modules with their reasons, from the sentences of coverages."""
    reasons: dict[str, list[str]] = {}
    for detail in details:
        for listed, why in re.findall(r"unrecorded, (.*?): (.*?)\.(?= |$)", detail):
            reasons.setdefault(why, []).extend(re.findall(r"\((\w+)\)", listed))
    return "; ".join(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items())


def table(found: dict[str, dict[str, list[dict[str, str]]]], versions: str, dates: dict[str, str]) -> str:
    """Return the page of docs; each family ran on a date."""
    ran = ", ".join(f"{count} on {day}" for day, count in sorted(Counter(dates.values()).items()))
    lines = {family: judgement(classes) for family, classes in found.items()}
    count = Counter(verdict for verdict, _, _ in lines.values())
    head = [
        "# What `capture` records, by model family",
        "",
        "Each model class of transformers, tiny and with random weights, and models of timm, checked by",
        "`python -m benchmarks.captured_families`. *all*: the record has every matrix, within 1e-5 of the model's own;",
        "effective weights of recurrences are compared with outputs in tests only. *in part*, *nothing*: a warning",
        "lists the missing modules, and everything recorded is correct. *not built*, *not run*: this check has no",
        "inputs for it.",
        "",
        f"{len(lines)} families: of {count['recorded']} all is recorded, of {count['reported']} a part or nothing, "
        f"{count['different']} are wrong or silently incomplete, {count['no attention']} have no attention, "
        f"{count['not built'] + count['not run']} were not built or not run. {versions}; "
        f"{ran}.",
        "",
        "| family | recorded | not recorded, and why |",
        "| --- | --- | --- |",
    ]
    rows = [
        f"| {family} | {kept} | {missing.replace('|', '/')} |" for family, (_, kept, missing) in sorted(lines.items())
    ]
    return "\n".join([*head, *rows]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captured_families", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="families, by the names of their folders, or timm")
    parser.add_argument("--workers", type=int, default=2, help="classes at one time (default 2)")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from the results")
    given = parser.parse_args(arguments)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"found": {}, "dates": {}}
    if given.page:
        TABLE.write_text(table(known["found"], known["versions"], known["dates"]), encoding="utf-8")
        return 0
    unknown = [name for name in given.only if name not in families() and name != TIMM]
    if unknown:
        parser.error(f"--only must name families of transformers, or timm, got {unknown[0]!r}")
    if importlib.util.find_spec(TIMM) is None and (not given.only or TIMM in given.only):
        print("timm is not installed; keeping the results of its models: pip install --no-deps timm", file=sys.stderr)
    every = list(tasks(given.only))
    found: dict[str, dict[str, list[dict[str, str]]]] = {family: {} for family, _, _ in every}
    with ThreadPoolExecutor(given.workers) as pool:
        for i, (task, result) in enumerate(zip(every, pool.map(lambda task: alone(examined, *task[1:]), every))):
            family, _, name = task
            found[family][name] = result
            for each in result:
                if each["verdict"] == "different":
                    print(f"{family} {name}: {each['check']}: {each['detail']}", flush=True)
            if i % 20 == 19:
                print(f"{i + 1} of {len(every)} classes", flush=True)
    if given.only:
        for family, of_it in found.items():
            print(f"{family}: {': '.join(filter(None, judgement(of_it)[1:]))}")
    kept = {family for family in known["found"] if given.only or family.startswith(f"{TIMM}: ")}
    ran = set(found)
    found = {family: of_it for family, of_it in known["found"].items() if family in kept} | found
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    dates = {family: today if family in ran else known["dates"][family] for family in found}
    described = {"facts": facts(), "versions": versions, "dates": dates, "found": found}
    RESULTS.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(table(found, versions, dates), encoding="utf-8")
    return int(any(r["verdict"] == "different" for of_it in found.values() for rs in of_it.values() for r in rs))


if __name__ == "__main__":
    sys.exit(main())
