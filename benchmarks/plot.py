"""Plot the cost of a case over its size."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench import Finding

SECOND, BYTE = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")), ((2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"))
OURS = "#d1495b"
OTHERS = ("#30638e", "#7a9e3f", "#8d6cab", "#e08e29", "#5f6b6d")


def plot(finding: Finding, path: Path) -> bool:
    """Draw time and memory over size, where a case has sizes and matplotlib is there; return whether it did."""
    sizes = sorted({table.point.size for table in finding.tables})
    if len(sizes) < 2:
        return False
    try:
        from matplotlib.figure import Figure  # no pyplot: it draws without a display, and keeps no state
        from matplotlib.ticker import FuncFormatter, LogLocator
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    contenders = finding.case.contenders
    others = iter(OTHERS * len(contenders))
    colors = {name: OURS if name == "regard" else next(others) for name in contenders}
    backward = any(table.point.backward for table in finding.tables)
    for name, color in colors.items():
        if contenders[name].does or contenders[name].build:  # a part of the work, or other work
            continue
        for both in (False, True):
            rows = [(t.point.size, t.row(name)) for t in finding.tables if t.point.backward == both]
            style = {
                "color": color,
                "linestyle": "--" if both else "-",
                "linewidth": 2.4 if name == "regard" else 1.4,
                "marker": "o",
                "markersize": 5,
                "label": f"{name}, {'forward + backward' if both else 'forward'}" if backward else name,
            }
            times = sorted((size, row.timing.median) for size, row in rows if row and row.timing)
            peaks = sorted((size, row.peak) for size, row in rows if row and row.peak)
            for axis, found in zip(axes, (times, peaks)):
                if found:
                    axis.plot(*zip(*found), **style)
    for axis, label, units in ((axes[0], "time of a call", SECOND), (axes[1], "peak memory beyond the inputs", BYTE)):
        axis.set(xlabel=finding.case.unit, xscale="log", yscale="log")
        axis.set_title(label, fontsize=10)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        if len(sizes) > 5:
            axis.tick_params("x", labelrotation=30)
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(10.0 if units is SECOND else 4.0, numticks=12))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _, units=units: measure(value, units)))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    labels = {label: line for line, label in zip(*axes[0].get_legend_handles_labels())}
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(finding.case.title, fontsize=11)
    figure.savefig(path, dpi=110)
    return True


def measure(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a value in the largest unit that it fills."""
    size, unit = next(((size, unit) for size, unit in reversed(units) if value >= size * 0.999), units[0])
    return f"{value / size:.3g} {unit}"
