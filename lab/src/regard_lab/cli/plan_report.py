"""What ``regard plan`` prints for readers."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from regard_cli.messages import Console
from regard_lab.cli.plan_options import PlanOptions
from regard_lab.planner import GB

#: Powers of 1000, and what stands before a unit for them.
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
#: The same for counts of things.
_COUNTS = ("", " thousand", " million", " billion", " trillion")


def show(options: PlanOptions, found: dict[str, Any]) -> None:
    """Print a plan."""
    console = Console(highlight=False, markup=False)
    model, batch = found["model"], found["batch"]
    console.print(
        f"{model['name']}: {model['parameters']:,} parameters; {model['layers']} layers of width {model['width']:,}, "
        f"{model['heads']} heads, vocabulary {model['vocabulary']:,}\n"
    )
    _print(console, "Parameters", _parameters(found))
    _print(console, f"Operations a token, in sequences of {batch['length']:,}", _operations(found))
    _print(
        console,
        f"Memory of one GPU for one sequence, all alone ({options.precision}, {options.optimizer})",
        _memory(found),
    )
    where = f"{options.gpus:,} GPU{'s' if options.gpus > 1 else ''} of {options.memory:g} GB"
    _print(console, f"{where}, {batch['sequences']:,} sequences a step", _layouts(found))
    console.print("\n".join(_run(options, found)))


def show_table(rows: list[dict[str, Any]]) -> None:
    """Print the table of published models, and why counts differ."""
    console = Console(highlight=False, markup=False)
    table = _table("model", "layers", "width", "heads", "published", "counted", "ratio")
    for row in rows:
        sizes = (f"{row[each]:,}" for each in ("layers", "width", "heads"))
        table.add_row(row["title"], *sizes, row["published"], f"{row['counted']:,}", f"{row['ratio']:.3f}")
    console.print(table)
    console.print()
    for row in rows:
        console.print(f"{row['title']} ({row['source']}): {row['difference']}.")


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of published models as Markdown."""
    lines = ["| model | layers | width | published | counted | ratio | difference |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        counts = f"{row['published']} | {row['counted']:,} | {row['ratio']:.3f}"
        sizes = f"{row['layers']} | {row['width']:,}"
        lines.append(f"| [{row['title']}]({row['url']}) | {sizes} | {counts} | {row['difference']} |")
    return "\n".join(lines)


def si(value: float, unit: str) -> str:
    """Return a number with three digits and a prefix of its unit.

    Examples
    --------
    >>> si(1.0476e12, "FLOP"), si(950, "B"), si(0, "B")
    ('1.05 TFLOP', '950 B', '0 B')
    """
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{_three(value)} {_PREFIXES[power]}{unit}"


def counted(value: float) -> str:
    """Return a large number in words.

    Examples
    --------
    >>> counted(3.492e12), counted(300e9), counted(12)
    ('3.49 trillion', '300 billion', '12')
    """
    power = 0
    while abs(value) >= 999.5 and power < len(_COUNTS) - 1:
        value, power = value / 1000, power + 1
    return f"{_three(value)}{_COUNTS[power]}"


def duration(days: float) -> str:
    """Return a time in days, hours or minutes.

    Examples
    --------
    >>> duration(23.14), duration(0.5), duration(0.001)
    ('23.1 days', '12 hours', '1.44 minutes')
    """
    for unit, share in (("days", 1.0), ("hours", 24.0)):
        if days * share >= 2:
            return f"{_three(days * share)} {unit}"
    return f"{_three(days * 1440)} minutes"


def _three(value: float) -> str:
    """Return a number with three digits, or all of a whole or larger one."""
    digits = 0 if value == int(value) else max(3 - len(str(int(abs(value)))), 0)
    return f"{value:,.{digits}f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in columns:
        words = column in ("model", "", "parallelism")
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    return table


def _print(console: Console, title: str, table: Table) -> None:
    console.print(title)
    console.print(table)
    console.print()


def _parameters(found: dict[str, Any]) -> Table:
    table, model = _table("", "count", "share"), found["model"]
    for part, count in model["by_part"].items():
        table.add_row(part, f"{count:,}", f"{count / model['parameters']:.1%}")
    return table


def _operations(found: dict[str, Any]) -> Table:
    table, flops = _table("", "forward", "training"), found["flops_per_token"]
    names = {"layers": "weights of layers", "head": "logits", "scores": "queries × keys", "values": "weights × values"}
    for name, text in names.items():
        table.add_row(text, si(flops["forward"][name], "FLOP"), si(3 * flops["forward"][name], "FLOP"))
    table.add_row("all", si(flops["forward"]["total"], "FLOP"), si(flops["training"], "FLOP"))
    table.add_row("6 for each parameter", "", si(flops["six_times_parameters"], "FLOP"))
    return table


def _memory(found: dict[str, Any]) -> Table:
    table, memory, cache = _table("", "memory"), found["memory_of_one_sequence"], found["cache"]
    for name in ("weights", "gradients", "optimizer", "activations"):
        table.add_row(name, si(memory[name], "B"))
    table.add_row("activations where layers run forward again", si(memory["activations_recomputed"], "B"))
    table.add_row("logits, some at a time", si(memory["logits"], "B"))
    table.add_row("logits, all at once", si(memory["logits_at_once"], "B"))
    if cache["token"]:
        table.add_row("keys and values kept for one more token", si(cache["token"], "B"))
        table.add_row("keys and values kept for a whole sequence", si(cache["sequence"], "B"))
    return table


def _layouts(found: dict[str, Any]) -> Table:
    table = _table("parallelism", "D×T×P×C", "micro", "GB", "sent GB", "step s", "peak", "")
    for row in found["layouts"]:
        if "layout" not in row:
            table.add_row(row["kind"], *[""] * 6, "no")
            continue
        layout = row["layout"]
        degrees = "×".join(str(layout[each]) for each in ("data", "tensor", "pipeline", "context"))
        verdict = "best" if row["kind"] == found["best"] else "fits" if row["fits"] else "no"
        table.add_row(
            row["kind"], degrees, f"{layout['micro_batch']}{'*' if layout['recompute'] else ''}",
            f"{row['memory']['total'] / GB:,.1f}", f"{sum(row['sent'].values()) / GB:,.1f}",
            f"{row['step_seconds']:,.2f}", f"{row['utilization']:.0%}", verdict,
        )  # fmt: skip
    return table


def _run(options: PlanOptions, found: dict[str, Any]) -> list[str]:
    run = found["run"]
    lines = [f"{row['kind']}: {row['reason']}." for row in found["layouts"] if row["reason"]]
    if any("layout" in row for row in found["layouts"]):
        lines += ["D data, T tensor, P pipeline, C context; micro: sequences taken at once, * where layers"]
        lines += ["run forward again before they run backward; GB, and what is sent, of one GPU."]
    lines += [""] if lines else []
    rule = "20 for each parameter" if options.tokens is None else "as asked"
    lines.append(f"Run: {counted(run['tokens'])} tokens ({rule}), {si(run['flops'], 'FLOP')}.")
    if "steps" not in run:
        return [*lines, "No layout fits: it takes more or larger GPUs, or another batch."]
    row = next(each for each in found["layouts"] if each["kind"] == found["best"])
    parts = ", ".join(f"{name} {value:,.2f} s" for name, value in row["seconds"].items() if value >= 0.005)
    lines.append(f"Fastest: {found['best']}. What a step waits for: {parts}.")
    lines.append(f"{run['steps']:,} steps take {duration(run['days'])}, {_three(run['gpu_hours'])} GPU hours.")
    lines.append(
        f"Products run at {options.share:.0%} of {options.peak:g} TFLOP/s, and all told at {row['utilization']:.0%}."
    )
    if "kilowatt_hours" in run:
        lines.append(f"Energy: {run['kilowatt_hours'] / 1000:,.1f} MWh, {options.watts:g} W a GPU × {options.pue:g}.")
    if "money" in run:
        lines.append(f"Cost: {run['money']:,.0f}, {options.price:g} for a GPU hour.")
    return lines
