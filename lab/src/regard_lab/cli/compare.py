"""``regard compare``: train attention mechanisms on the same data, steps and seed; print a table, draw a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from regard._utils.errors import rejected, unknown_name
from regard_cli.messages import Console, fail, report_errors, require, sentence
from regard_lab.cli.flags import parse_setting
from regard_lab.cli.runs import change_options, read_model_options, read_options
from regard_lab.cli.train import options_table
from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.mixers import MIXERS
from regard_lab.models.registry import MODELS
from regard_lab.models.resnet import ATTENTIONS
from regard_lab.tasks.classification.options import IMAGE_MODELS, IMAGE_TASK, ImageClassificationOptions
from regard_lab.tasks.classification.training import ImageTraining
from regard_lab.tasks.language.options import LanguageOptions
from regard_lab.tasks.language.pretraining import Pretraining
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import TASKS, get_task
from regard_lab.tasks.translation.training import Experiment
from regard_lab.training.comparison import ComparedRun, compare, picture
from regard_lab.training.options import RunOptions

#: Share of the parameters by which compared language models may differ before a line says so.
_TOLERANCE = 0.01
#: Returns a variant's options from its name, an options file and changes.
_Table = Callable[[str, Path | None, dict[str, Any]], dict[str, Any]]
#: Tasks that models of one text at a time learn.
_LANGUAGE = "language-model"
#: A score that is left out of the table, as it is exp(loss).
_REDUNDANT = "perplexity"


def run(
    task: str, attention: str, *, out: Path, options: Path | None, given: dict[str, Any], settings: list[str]
) -> None:
    """Train a model for each name in the comma-separated ``attention``; "transformer" is also a name."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with report_errors("regard-lab[train]"):
        require("matplotlib")
        if task not in (known := {IMAGE_TASK, _LANGUAGE, *TASKS}):
            raise unknown_name("compare", "TASK", task, known)
        metric = {IMAGE_TASK: "accuracy", _LANGUAGE: "loss"}.get(task) or get_task(task).metric
        names = [name.strip() for name in attention.split(",") if name.strip()]
        if len(names) < 2:
            raise rejected("compare", "attention", "name at least two mechanisms, separated by commas", repr(attention))
        if len(set(names)) != len(names):
            raise rejected("compare", "--attention", "name each mechanism once", repr(attention))
        changes = {**given, **dict(parse_setting(each) for each in settings)}
        for place in ("kind", "attention", "model.attention", "model.score"):
            if place in changes:
                raise rejected("compare", place, "be left out: --attention sets it", changes[place])
        if task == IMAGE_TASK:
            variants = _variants(names, ImageClassificationOptions, IMAGE_MODELS, _image_table, options, changes)
        elif task == _LANGUAGE:
            variants = _language_variants(names, options, changes, console.print)
        else:

            def table(name: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
                own = {"kind": "transformer"} if name == "transformer" else {"attention": name}
                return options_table(task, options, {**changes, **own})

            variants = _variants(names, ExperimentOptions, MODELS, table, options, changes)
            if any(each.data.data == "-" for each in variants.values()):
                raise rejected("compare", "--data", "be a file, because each run reads it again", "standard input")
        from regard_lab.training.options import TrainingError

        kind: Any = {IMAGE_TASK: ImageTraining, _LANGUAGE: Pretraining}.get(task, Experiment)
        try:
            runs = compare(kind, variants, out, lambda each: console.print(_summary(each, metric)), console.print)
        except TrainingError as error:
            raise fail(sentence(error)) from None
        console.print()
        sequences = kind is Experiment
        console.print(_table(runs, 2 if sequences else 4))
        label = f"validation {metric}{' (greedy)' * sequences}"
        console.print(f"\nPicture: {picture(runs, label, out / 'compared.png')}")


def _variants(
    names: list[str],
    kind: type[RunOptions],
    models: dict[str, tuple[type[Any], type[Any]]],
    table_of: _Table,
    options: Path | None,
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of each variant; each takes the model options that its kind of model has."""
    variants: dict[str, Any] = {}
    asked: set[str] = set()
    known: set[str] = set()
    for name in names:
        table = table_of(name, options, changes)
        fields_of = {each.name for each in fields(models[table["kind"]][0])}
        fields_of -= {"sources", "targets", "channels", "image"}
        if isinstance(table.get("model"), dict):
            asked.update(table["model"])
            table["model"] = {key: value for key, value in table["model"].items() if key in fields_of}
        known |= fields_of
        variants[name] = kind.from_table(table)
    for each in asked:
        if each not in known:
            raise unknown_name("compare", f"model.{each}", each, known)
    return variants


def _image_table(name: str, options: Path | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a residual network with this attention, or of a vision transformer."""
    table = read_options(IMAGE_TASK, options)
    change_options(table, changes, options)
    if name == "transformer":
        return table | {"kind": name}
    if name not in ATTENTIONS:
        raise unknown_name("compare", "--attention", name, {*ATTENTIONS, "transformer"})
    table["kind"] = "resnet"
    model = table.setdefault("model", {})
    if isinstance(model, dict):
        model["attention"] = name
    return table


def _language_variants(
    names: list[str], options: Path | None, changes: dict[str, Any], say: Callable[[str], None]
) -> dict[str, LanguageOptions]:
    """Return the options of a decoder with each kind of attention, all with about as many parameters as the first.

    Their feed-forward networks differ in width, unless it is set. Kinds that take no rotary positions have none.
    """
    lists = {place: [value] for place, value in changes.items() if place in ("data.data", "data.valid")}
    variants: dict[str, LanguageOptions] = {}
    target = 0
    for name in names:
        table = read_model_options(_LANGUAGE, options, {**changes, **lists})
        model = table.setdefault("model", {})
        if not isinstance(model, dict):
            raise rejected("compare", "model", "be a table", repr(model))
        model["attention"] = name
        if name not in MIXERS:
            raise unknown_name("compare", "--attention", name, MIXERS)
        if not MIXERS[name].rotary:
            model.setdefault("positions", "none")
        chosen = LanguageOptions.from_table(table)
        if chosen.masked or chosen.start:
            place = "masked" if chosen.masked else "start"
            raise rejected("compare", place, "be left out: decoders are trained from nothing", getattr(chosen, place))
        if "-" in [*chosen.data.data, *chosen.data.valid]:
            raise rejected("compare", "--data", "be a file, because each run reads it again", "standard input")
        target = target or _parameters(chosen.model_config())
        if "feedforward" not in model:
            model["feedforward"] = _feedforward(name, chosen.model_config(), target)
            chosen = LanguageOptions.from_table(table)
        count = _parameters(chosen.model_config())
        if abs(count - target) > _TOLERANCE * target:
            say(f"{name}: {count:,} parameters beside the embedding of 1,000 tokens, {names[0]}: {target:,}")
        variants[name] = chosen
    return variants


def _feedforward(name: str, config: DecoderLMConfig, target: int) -> int:
    """Return the width of feed-forward networks with which a model has about so many parameters."""
    narrow, wide = (_parameters(replace(config, feedforward=width)) for width in (1, 2))
    width = 1 + round((target - narrow) / (wide - narrow))
    if width < 1:
        expected = f"leave parameters for a feed-forward network, of {target:,} that the first one has"
        raise rejected("compare", "--attention", expected, f"{name}, {narrow:,}; set model.feedforward")
    return width


def _parameters(config: DecoderLMConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DecoderLM(config).parameters())


def _summary(each: ComparedRun, metric: str) -> str:
    return f"{each.name}: {metric} {each.scores[metric]:.4g} after {each.steps:,} steps, {each.seconds:.0f} seconds"


def _table(runs: list[ComparedRun], decimals: int) -> Table:
    cached = all(each.cache_per_token is not None for each in runs)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("attention", no_wrap=True, overflow="fold", min_width=max(len(each.name) for each in runs))
    scores = [name for name in runs[0].scores if name != _REDUNDANT]
    headings = [*(name.replace("_", " ") for name in scores), "parameters", f"{runs[0].unit}/s", "memory (MB)"]
    for heading in (*headings, *(("cached bytes",) if cached else ())):
        words = max(map(len, heading.split()))
        table.add_column(heading, justify="right", overflow="fold", min_width=words)
    for each in runs:
        shown = (f"{each.scores[name]:.{decimals}f}" for name in scores)
        counts = (f"{number:,.0f}" for number in (each.parameters, each.per_second, each.memory))
        table.add_row(each.name, *shown, *counts, *((_cached(each),) if cached else ()))
    return table


def _cached(each: ComparedRun) -> str:
    """Return what decoding caches: bytes per token of a sequence, and bytes however long it is."""
    parts = (each.cache_per_token, "/token"), (each.cache_fixed, "")
    return " + ".join(f"{number:,.0f}{unit}" for number, unit in parts if number) or "0"
