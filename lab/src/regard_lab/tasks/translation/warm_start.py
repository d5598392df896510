"""Warm start: begin training with the parameters and the vocabularies of a model, and the options that these settle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from regard._utils.errors import rejected
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import EncoderDecoder
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.tasks import SpanCorruption, Translation

#: Fields of a model's config that parameters do not depend on.
_FREE = ("dropout", "attention_dropout", "activation_dropout")


def inherit_options(table: Mapping[str, Any], start: SequenceModel) -> dict[str, Any]:
    """Return a table of options with all that a model settles.

    Raises
    ------
    ValueError
        If the table asks for something else.
    """
    made = dict(table)
    task = start.about.get("task", made["task"])
    # What was learned of texts is for translation; the other way round, there are no sentinels.
    if task != made["task"] and not (task == SpanCorruption.name and made["task"] == Translation.name):
        raise rejected("train", "start", f"be a model for {made['task']}", f"one for {task}")
    if made.setdefault("kind", start.kind) != start.kind:
        raise _settled("kind", start.kind, made["kind"])
    config = start.model.config
    preset = made.setdefault("preset", ExperimentOptions.preset)
    usual = asdict(config.preset(preset, config.sources, config.targets))
    own = {name: value for name, value in asdict(config).items() if value != usual[name]}
    given = made.get("model", {})
    for name, value in own.items():
        if "preset" in table and isinstance(given, dict) and name not in (*given, *_FREE):
            expected = "be that of the model that training starts from, or be left out"
            raise rejected("train", "preset", expected, f"{preset!r}, whose {name} is {usual[name]!r}, not {value!r}")
    vocabularies = _vocabularies(start)
    sections = (("model", asdict(config), own), ("vocabularies", vocabularies, vocabularies))
    for section, known, missing in sections:
        given = made.get(section, {})
        if not isinstance(given, dict):
            continue  # which is told later
        for name, value in given.items():
            if name in known and name not in _FREE and value != known[name]:
                raise _settled(f"{section}.{name}", known[name], value)
        made[section] = {**missing, **given}
    return made


def copy_parameters(model: EncoderDecoder, start: SequenceModel) -> None:
    """Give a model the parameters of another one.

    Raises
    ------
    ValueError
        If their configs differ in what parameters depend on.
    """
    free = {name: value for name, value in asdict(model.config).items() if name in _FREE}
    if replace(start.model.config, **free) != model.config:
        raise rejected("train", "start", f"have the model of the options, {model.config}", start.model.config)
    model.load_state_dict(start.model.state_dict())


def _vocabularies(start: SequenceModel) -> dict[str, Any]:
    source, target = start.source.to_json(), start.target.to_json()
    if target["kind"] == "symbols":
        return {}
    options = {"kind": target["kind"], "joint": source == target, "lowercase": start.target.lowercase}
    return options if target["kind"] == "characters" else options | {"size": len(start.target)}


def _settled(name: str, known: Any, got: Any) -> Exception:
    return rejected("train", name, f"be {known!r}, as the model has it that training starts from", repr(got))
