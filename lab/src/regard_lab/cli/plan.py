"""``regard plan``: what a model would take, before anybody builds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from regard._utils.errors import rejected, unknown_name
from regard_cli.messages import echo, report_errors
from regard_lab.cli import plan_report
from regard_lab.cli.plan_options import PlanOptions
from regard_lab.cli.settings import parse_setting
from regard_lab.models.decoder_lm import DecoderLMConfig
from regard_lab.models.language_config import LanguageConfig
from regard_lab.models.transformer import TransformerConfig
from regard_lab.planner import (
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

#: The vocabulary, GPT-2's, and the width of a head of a model that flags alone describe.
_VOCABULARY, _HEAD = 50257, 64
_SIZES = ("layers", "width", "heads", "vocabulary")


@dataclass(frozen=True)
class Plan:
    """What was found: a shape, how it is trained, and the layouts that were compared."""

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
        """Return the tokens of the whole run."""
        return chinchilla_tokens(self.shape) if self.options.tokens is None else self.options.tokens

    @property
    def schedule(self) -> Schedule | None:
        """Return how long the fastest layout takes for the whole run."""
        if self.best is None or self.best.step is None:
            return None
        return schedule(self.tokens, self.sequences * self.recipe.length, self.best.step.total, self.options.gpus)


def run(name: str | None, *, given: dict[str, Any], settings: Sequence[str], table: bool, as_json: bool) -> None:
    """Print the plan of a model, or the table of published ones."""
    with report_errors("regard-lab"):
        options = PlanOptions.from_places(given)
        if table:
            _check_alone(name, options, settings)
            rows = published_rows()
        else:
            changes = dict(parse_setting(each, "kv_heads=8") for each in settings)
            found = _plan(shape_of_model(name, options, changes), options)
    if as_json:
        echo(json.dumps(rows if table else as_data(found), ensure_ascii=False))
    elif table:
        plan_report.show_table(rows)
    else:
        plan_report.show(found.options, as_data(found))


def _check_alone(name: str | None, options: PlanOptions, settings: Sequence[str]) -> None:
    if name is not None:
        raise rejected("plan", "name", "be left out with --table, which has every model", repr(name))
    if settings:
        raise rejected("plan", "settings", "be left out with --table", settings[0])
    for each in fields(options):
        options.leave_out(each.name, "with --table")


def shape_of_model(name: str | None, options: PlanOptions, changes: dict[str, Any]) -> Shape:
    """Return the shape of a model by its name, or of sizes alone, with what was changed."""
    sizes = {each: getattr(options, each) for each in _SIZES if getattr(options, each) is not None}
    if name is None:
        return _shape_of_sizes(options, sizes, changes)
    config = find_config(name)
    if config is None:
        raise unknown_name("plan", "name", name, model_names())
    if isinstance(config, Shape):
        if sizes or changes:
            first = next(iter([*sizes, *changes]))
            raise rejected(
                "plan", first, f"be left out for {name}, which no config describes", (sizes | changes)[first]
            )
        return config
    return shape_of(_changed(name, config, sizes, changes), name)


def _shape_of_sizes(options: PlanOptions, sizes: dict[str, Any], changes: dict[str, Any]) -> Shape:
    if options.layers is None or options.width is None:
        raise rejected("plan", "name", "be given, or --layers and --width", "neither")
    made: dict[str, Any] = {"vocabulary": _VOCABULARY, "heads": max(options.width // _HEAD, 1)}
    if options.length is not None:
        made["longest"] = options.length
    _check_known("plan", DecoderLMConfig, changes)
    return shape_of(DecoderLMConfig(**(made | sizes | changes)), "model")


def _changed(name: str, config: Config, sizes: dict[str, Any], changes: dict[str, Any]) -> Config:
    _check_known(name, type(config), changes)
    if isinstance(config, LanguageConfig):
        return config.with_changes(sizes | changes)
    assert isinstance(config, TransformerConfig)
    if "layers" in sizes:
        expected = f"be left out for {name}: --set encoder_layers=… and decoder_layers=… say how many"
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
    length = shape.longest if options.length is None else options.length
    if shape.positions and length > shape.longest:
        expected = f"be at most {shape.longest:,}, the positions that the model learns (--set longest=… for more)"
        raise rejected("plan", "length", expected, f"{length:,}")
    if options.batch < length:
        raise rejected("plan", "batch", f"be at least {length:,}, the tokens of a sequence", f"{options.batch:,}")
    recipe = Recipe(length, options.precision, options.optimizer)
    cluster = Cluster(
        options.gpus, options.memory, options.peak, options.share, options.bandwidth, options.network, options.node
    )
    sequences = options.batch // length
    if sequences > options.gpus:  # so that they can be shared evenly
        sequences -= sequences % options.gpus
    return Plan(shape, options, recipe, sequences, choices(shape, recipe, cluster, sequences))


def as_data(plan: Plan) -> dict[str, Any]:
    """Return everything that was found as JSON can hold it: bytes, seconds, operations, tokens."""
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
