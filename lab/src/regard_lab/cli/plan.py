"""``regard plan``: estimate parameters, FLOPs, memory and training time of a model, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from rich.table import Table

from regard._utils.errors import rejected, unknown_name
from regard_cli.messages import Console, JsonOutput, report_errors, require_writable
from regard_lab._options import Options, option
from regard_lab.cli.flags import parse_setting
from regard_lab.models.decoder_lm import DecoderLMConfig
from regard_lab.models.language_blocks import LanguageConfig
from regard_lab.models.transformer import TransformerConfig
from regard_lab.planner import (
    GB,
    OPTIMIZERS,
    PRECISIONS,
    Choice,
    Cluster,
    Layout,
    Recipe,
    Schedule,
    Shape,
    best,
    cache_memory,
    chinchilla_tokens,
    choices,
    find_config,
    forward_flops,
    logit_memory,
    model_names,
    parameters_by_part,
    parameters_without_embeddings,
    published_rows,
    schedule,
    shape_of,
    training_flops,
    training_memory,
)
from regard_lab.planner.published import Config


@dataclass(frozen=True)
class PlanOptions(Options):
    """What a model is trained on and with. A GB is 10⁹ bytes, a TFLOP/s 10¹² operations a second."""

    function: ClassVar[str] = "plan"
    layers: int | None = option(None, "layers of a model", kind=int, ge=1, flag="--layers")
    width: int | None = option(None, "width (hidden size) of a model", kind=int, ge=1, flag="--width")
    heads: int | None = option(None, "attention heads per layer", kind=int, ge=1, flag="--heads")
    vocabulary: int | None = option(None, "vocabulary size in tokens", kind=int, ge=1, flag="--vocabulary")
    length: int | None = option(None, "tokens per sequence", kind=int, ge=1, flag="--length")
    batch: int = option(1 << 21, "tokens per step, over all GPUs", ge=1, flag="--batch-tokens")
    tokens: float | None = option(
        None, "training tokens in all; by default, 20 per parameter", kind=float, gt=0, flag="--tokens"
    )
    gpus: int = option(1, "GPUs in all", ge=1, le=1 << 20, flag="--gpus")
    memory: float = option(80.0, "memory of a GPU in GB", gt=0, flag="--memory")
    #: Of an A100 in bfloat16.
    peak: float = option(312.0, "peak speed of a GPU in TFLOP/s", gt=0, flag="--peak-tflops")
    share: float = option(0.5, "share of the peak speed that matrix products reach", gt=0, le=1, flag="--share")
    bandwidth: float = option(300.0, "bandwidth between GPUs of a node in GB/s", gt=0, flag="--bandwidth")
    network: float = option(25.0, "bandwidth between nodes in GB/s", gt=0, flag="--network")
    node: int = option(8, "GPUs per node", ge=1, flag="--node")
    precision: str = option(
        "mixed", f"number formats: {', '.join(PRECISIONS)}", choices=tuple(PRECISIONS), flag="--precision"
    )
    optimizer: str = option(
        "adamw", f"optimizer: {', '.join(OPTIMIZERS)}", choices=tuple(OPTIMIZERS), flag="--optimizer"
    )
    watts: float | None = option(
        None, "power of a GPU in watts, to estimate the energy", kind=float, gt=0, flag="--watts"
    )
    pue: float = option(
        1.1, "power usage effectiveness: power of the data center per power of its computers", ge=1, flag="--pue"
    )
    price: float | None = option(
        None, "price of a GPU hour, in any currency, to estimate the cost", kind=float, gt=0, flag="--price"
    )


# Text output ----------------------------------------------------------------------------------------------------------


#: SI prefixes of the powers of 1000.
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
#: Words for the powers of 1000.
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
    _print(console, f"FLOPs per token, sequence length {batch['length']:,}", _operations(found))
    _print(
        console,
        f"Memory to train on one sequence on one GPU ({options.precision}, {options.optimizer})",
        _memory(found),
    )
    where = f"{options.gpus:,} GPU{'s' if options.gpus > 1 else ''} of {options.memory:g} GB"
    _print(console, f"{where}, {batch['sequences']:,} sequences per step", _layouts(found))
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
    """Format a number with three digits and an SI prefix.

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
    """Format a large number with thousand, million, billion or trillion.

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
    """Format a time in days, hours or minutes.

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
    """Format a number with three significant digits; whole and larger numbers keep all digits."""
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
    table.add_row("6 × parameters", "", si(flops["six_times_parameters"], "FLOP"))
    return table


def _memory(found: dict[str, Any]) -> Table:
    table, memory, cache = _table("", "memory"), found["memory_of_one_sequence"], found["cache"]
    for name in ("weights", "gradients", "optimizer", "activations"):
        table.add_row(name, si(memory[name], "B"))
    table.add_row("activations with checkpointing", si(memory["activations_recomputed"], "B"))
    table.add_row("logits, in chunks", si(memory["logits"], "B"))
    table.add_row("logits, all at once", si(memory["logits_at_once"], "B"))
    if cache["token"]:
        table.add_row("key–value cache per token", si(cache["token"], "B"))
        table.add_row("key–value cache per sequence", si(cache["sequence"], "B"))
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
        lines += ["Degrees of data, tensor, pipeline and context parallelism; micro: micro-batch in sequences,"]
        lines += ["* with activation checkpointing; GB and sent GB are per GPU."]
    lines += [""] if lines else []
    rule = "20 per parameter" if options.tokens is None else "--tokens"
    lines.append(f"Run: {counted(run['tokens'])} tokens ({rule}), {si(run['flops'], 'FLOP')}.")
    if "steps" not in run:
        return [*lines, "No layout fits: use more or larger GPUs, or another batch size."]
    row = next(each for each in found["layouts"] if each["kind"] == found["best"])
    parts = ", ".join(f"{name} {value:,.2f} s" for name, value in row["seconds"].items() if value >= 0.005)
    lines.append(f"Fastest: {found['best']}. Time of a step: {parts}.")
    lines.append(f"{run['steps']:,} steps take {duration(run['days'])}, {_three(run['gpu_hours'])} GPU hours.")
    lines.append(
        f"Matrix products run at {options.share:.0%} of {options.peak:g} TFLOP/s; overall utilization is "
        f"{row['utilization']:.0%}."
    )
    if "kilowatt_hours" in run:
        energy = f"{run['kilowatt_hours'] / 1000:,.1f} MWh"
        lines.append(f"Energy: {energy} at {options.watts:g} W per GPU and a PUE of {options.pue:g}.")
    if "money" in run:
        lines.append(f"Cost: {run['money']:,.0f} at {options.price:g} per GPU hour.")
    return lines


# The plan -------------------------------------------------------------------------------------------------------------


#: Default vocabulary size (GPT-2's) and head size of a model described by flags alone.
_VOCABULARY, _HEAD = 50257, 64
_SIZES = ("layers", "width", "heads", "vocabulary")


@dataclass(frozen=True)
class Plan:
    """A model shape, its training recipe, and the parallel layouts compared."""

    shape: Shape
    options: PlanOptions
    recipe: Recipe
    sequences: int
    choices: list[Choice]

    @property
    def best(self) -> Choice | None:
        """Return the fastest layout that fits."""
        return best(self.choices)

    @property
    def tokens(self) -> float:
        """Return the number of training tokens."""
        return chinchilla_tokens(self.shape) if self.options.tokens is None else self.options.tokens

    @property
    def schedule(self) -> Schedule | None:
        """Return the schedule of the whole run with the fastest layout."""
        if self.best is None or self.best.step is None:
            return None
        return schedule(self.tokens, self.sequences * self.recipe.length, self.best.step.total, self.options.gpus)


def run(name: str | None, *, given: dict[str, Any], settings: Sequence[str], table: bool, json: JsonOutput) -> None:
    """Print the plan of a model, or the table of published models."""
    with report_errors("regard-lab"), json:
        require_writable(json.file)
        options = PlanOptions.from_dotted(given)
        if table:
            _check_alone(name, options, settings)
            rows = published_rows()
        else:
            changes = dict(parse_setting(each, "kv_heads=8") for each in settings)
            found = _plan(shape_of_model(name, options, changes), options)
        json.add(rows if table else as_data(found))
    if json.alone:
        return
    if table:
        show_table(rows)
    else:
        show(found.options, as_data(found))


def _check_alone(name: str | None, options: PlanOptions, settings: Sequence[str]) -> None:
    if name is not None:
        raise rejected("plan", "name", "be left out with --table, which lists all models", repr(name))
    if settings:
        raise rejected("plan", "settings", "be left out with --table", settings[0])
    for each in fields(options):
        options.require_default(each.name, "with --table")


def shape_of_model(name: str | None, options: PlanOptions, changes: dict[str, Any]) -> Shape:
    """Return the shape of a named model, or of one described by its sizes, with changes applied."""
    sizes = {each: getattr(options, each) for each in _SIZES if getattr(options, each) is not None}
    if name is None:
        return _shape_of_sizes(options, sizes, changes)
    config = find_config(name)
    if config is None:
        raise unknown_name("plan", "name", name, model_names())
    if isinstance(config, Shape):
        if sizes or changes:
            first = next(iter([*sizes, *changes]))
            raise rejected("plan", first, f"be left out for {name}, which has no config", (sizes | changes)[first])
        return config
    return shape_of(_changed(name, config, sizes, changes), name)


def _shape_of_sizes(options: PlanOptions, sizes: dict[str, Any], changes: dict[str, Any]) -> Shape:
    if options.layers is None or options.width is None:
        raise ValueError("plan: name a model, or pass --layers and --width.")
    made: dict[str, Any] = {"vocabulary": _VOCABULARY, "heads": max(options.width // _HEAD, 1)}
    if options.length is not None:
        made["max_length"] = options.length
    _check_known("plan", DecoderLMConfig, changes)
    return shape_of(DecoderLMConfig(**(made | sizes | changes)), "model")


def _changed(name: str, config: Config, sizes: dict[str, Any], changes: dict[str, Any]) -> Config:
    _check_known(name, type(config), changes)
    if isinstance(config, LanguageConfig):
        return config.with_changes(sizes | changes)
    assert isinstance(config, TransformerConfig)
    if "layers" in sizes:
        expected = f"be left out for {name}: use --set encoder_layers=… and decoder_layers=…"
        raise rejected("plan", "layers", expected, sizes["layers"])
    if "vocabulary" in sizes:
        sizes["sources"] = sizes["targets"] = sizes.pop("vocabulary")
    return config.with_changes(sizes | changes)


def _check_known(name: str, kind: type[Config], changes: dict[str, Any]) -> None:
    known = {each.name for each in fields(kind)}
    for each in changes:
        if each not in known:
            raise unknown_name(name, "settings", each, known)


def _plan(shape: Shape, options: PlanOptions) -> Plan:
    length = shape.max_length if options.length is None else options.length
    if shape.positions and length > shape.max_length:
        expected = f"be at most {shape.max_length:,}, the number of learned positions (--set max_length=… for more)"
        raise rejected("plan", "length", expected, f"{length:,}")
    if options.batch < length:
        raise rejected("plan", "batch", f"be at least {length:,}, the sequence length", f"{options.batch:,}")
    recipe = Recipe(length, options.precision, options.optimizer)
    cluster = Cluster(
        options.gpus, options.memory, options.peak, options.share, options.bandwidth, options.network, options.node
    )
    sequences = options.batch // length
    if sequences > options.gpus:  # divide evenly among the GPUs
        sequences -= sequences % options.gpus
    return Plan(shape, options, recipe, sequences, choices(shape, recipe, cluster, sequences))


def as_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON-compatible data, in bytes, seconds, FLOPs and tokens."""
    shape, recipe, run = plan.shape, plan.recipe, plan.schedule
    forward, training = (count(shape, recipe.length) for count in (forward_flops, training_flops))
    attention = shape.stacks[0].layer.attentions[0]
    alone = training_memory(shape, recipe)
    recomputed = training_memory(shape, recipe, Layout(recompute=True))
    whole = Recipe(recipe.length, recipe.precision, recipe.optimizer, chunk=None)
    return {
        "model": {
            "name": shape.name,
            "layers": shape.depth,
            "width": shape.width,
            "heads": attention.heads,
            "vocabulary": shape.vocabulary,
            "parameters": shape.parameters,
            "without_embeddings": parameters_without_embeddings(shape),
            "by_part": parameters_by_part(shape),
        },
        "flops_per_token": {
            "forward": asdict(forward) | {"total": forward.total},
            "training": training.total,
            "six_times_parameters": 6 * shape.parameters,
        },
        "memory_of_one_sequence": alone.by_kind()
        | {"total": alone.total, "activations_recomputed": recomputed.activations}
        | {"logits_at_once": logit_memory(shape, whole)},
        "cache": {"token": cache_memory(shape, 1), "sequence": cache_memory(shape, recipe.length)},
        "batch": {"sequences": plan.sequences, "length": recipe.length, "tokens": plan.sequences * recipe.length},
        "layouts": [_as_row(each) for each in plan.choices],
        "best": None if plan.best is None else plan.best.kind,
        "run": {"tokens": plan.tokens, "flops": plan.tokens * training.total} | _as_run(run, plan),
    }


def _as_row(choice: Choice) -> dict[str, Any]:
    step = choice.step
    row: dict[str, Any] = {"kind": choice.kind, "fits": choice.fits, "reason": choice.reason}
    if step is None:
        return row
    memory = step.memory.by_kind() | {"total": step.memory.total}
    row |= {"layout": asdict(step.layout), "memory": memory, "sent": step.sent, "seconds": step.seconds}
    return row | {"step_seconds": step.total, "utilization": step.utilization}


def _as_run(run: Schedule | None, plan: Plan) -> dict[str, Any]:
    if run is None:
        return {}
    found = {"steps": run.steps, "days": run.days, "gpu_hours": run.device_hours}
    if plan.options.watts is not None:
        found["kilowatt_hours"] = run.energy(plan.options.watts, plan.options.pue)
    if plan.options.price is not None:
        found["money"] = run.money(plan.options.price)
    return found
