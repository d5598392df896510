"""Every model class of the installed transformers, tiny, on "regard" and on its own attention.

    python -m benchmarks.transformers_families [--only llama bert ...] [--workers 2]

A class is built from a tiny configuration with random weights. Compared are its outputs, without padding, with padding
on either side and with images in a text, its gradients, greedy generation from a batch padded on the left with dynamic
and static caches, both of which keep a window of the past where a layer slides, and sequences that are packed into one
row, which must be what each is alone, or what transformers makes of them. Each class runs in a process of its own.
Results go to benchmarks/results/transformers-families.json and, a line for each family, to
docs/hugging-face-families.md; with --only, those of other families stay. The exit status is 1 if one class is silently
different.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.processes import alone
from benchmarks.machine import ROOT, facts

RESULTS = ROOT / "benchmarks/results/transformers-families.json"
TABLE = ROOT / "docs/hugging-face-families.md"
#: What the code of a model names that asks transformers for its attention.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def families() -> dict[str, list[str]]:
    """Return the modules of each family that has the attention interface."""
    import transformers

    found: dict[str, list[str]] = {}
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        if INTERFACE in path.read_text(encoding="utf-8"):
            found.setdefault(path.parent.name, []).append(f"transformers.models.{path.parent.name}.{path.stem}")
    return found


def classes(module: str) -> Iterator[type[Any]]:
    """Yield the model classes of a module that can be made from a configuration."""
    from transformers import PreTrainedModel

    for cls in vars(importlib.import_module(module)).values():
        made = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module
        if made and cls.config_class is not None and not cls.__name__.endswith("PreTrainedModel"):
            yield cls


def examined(module: str, name: str) -> list[dict[str, str]]:
    """Return what the checks of one class found."""
    import transformers

    from benchmarks.families.checks import Family, Found, reason
    from regard.integrations.transformers import register

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    try:
        family = Family(getattr(importlib.import_module(module), name))
    except Exception as error:
        return [asdict(Found("build", "not built", reason(error)))]
    return [asdict(found) for found in family.checks()]


def judgement(found: dict[str, list[dict[str, str]]]) -> str:
    """Return a family's line: what is different, what is refused, that all is equal, or why nothing was built."""
    every = [(name, result) for name, results in found.items() for result in results]
    for verdict in ("different", "refused"):
        of_it = [(name, result) for name, result in every if result["verdict"] == verdict]
        if of_it:
            messages = list(dict.fromkeys(result["detail"] for _, result in of_it))
            names = list(dict.fromkeys(f"{name}, {result['check']}" for name, result in of_it))
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            return f"{verdict}: {messages[0]} ({'; '.join(names[:2])}{more})"
    equal = sorted({result["check"] for _, result in every if result["verdict"] == "equal"})
    if equal:
        ended = [f"{name} {result['detail']}" for name, result in every if result["check"] == "run"]
        return f"equal to 1e-5: {', '.join(equal)}" + "".join(f"; not compared: {each}" for each in ended)
    name, result = next(
        ((n, r) for n, r in every if r["verdict"] in ("not built", "no attention")), every[0] if every else ("", {})
    )
    return f"not built: {name}: {result.get('detail', 'no class')}" if result else "not built: no class"


def table(found: dict[str, dict[str, list[dict[str, str]]]], versions: str) -> str:
    """Return the page of docs."""
    lines = {family: judgement(classes) for family, classes in found.items()}
    kinds = {
        kind: sum(line.startswith(kind) for line in lines.values())
        for kind in ("equal", "refused", "different", "not built")
    }
    built = {
        family: sum(any(r["verdict"] in ("equal", "different") for r in rs) for rs in classes.values())
        for family, classes in found.items()
    }
    head = [
        "# Families of Hugging Face models",
        "",
        "Each model class with transformers' attention interface, tiny and with random weights, on "
        '"regard" and on its own',
        "attention, compared by `python -m benchmarks.transformers_families`.",
        "",
        f"{len(lines)} families: {kinds['equal']} equal to 1e-5, {kinds['refused']} rejected with an error, "
        f"{kinds['different']} different, {kinds['not built']} not built. {versions}.",
        "",
        "| family | classes compared | result |",
        "| --- | --- | --- |",
    ]
    rows = [
        f"| {family} | {built[family]} of {len(found[family])} | {line.replace('|', '/')} |"
        for family, line in sorted(lines.items())
    ]
    return "\n".join([*head, *rows]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transformers_families", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", default=[], help="families, by the names of their folders")
    parser.add_argument("--workers", type=int, default=2, help="classes at one time (default 2)")
    given = parser.parse_args(arguments)
    import transformers

    known = families()
    unknown = [name for name in given.only if name not in known]
    if unknown:
        parser.error(f"--only must name families with the attention interface, got {unknown[0]!r}")
    tasks = [
        (family, module, cls.__name__)
        for family, modules in known.items()
        if not given.only or family in given.only
        for module in modules
        for cls in classes(module)
    ]
    found: dict[str, dict[str, list[dict[str, str]]]] = {family: {} for family, _, _ in tasks}
    with ThreadPoolExecutor(given.workers) as pool:
        results = pool.map(lambda task: alone(examined, *task[1:]), tasks)
        for i, ((family, _, name), result) in enumerate(zip(tasks, results)):
            found[family][name] = result
            worst = [r for r in result if r["verdict"] in ("different", "refused")]
            for each in worst:
                print(f"{family} {name}: {each['check']} {each['verdict']}: {each['detail']}", flush=True)
            if i % 20 == 19:
                print(f"{i + 1} of {len(tasks)} classes", flush=True)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    for family, of_it in found.items() if given.only else ():
        print(f"{family}: {judgement(of_it)}")
    if not given.only or RESULTS.exists():
        before = json.loads(RESULTS.read_text(encoding="utf-8"))["found"] if given.only else {}
        every = before | found
        RESULTS.write_text(json.dumps({"facts": facts(), "found": every}, indent=1) + "\n", encoding="utf-8")
        TABLE.write_text(table(every, versions), encoding="utf-8")
    return int(any(r["verdict"] == "different" for of_it in found.values() for rs in of_it.values() for r in rs))


if __name__ == "__main__":
    sys.exit(main())
