"""What kind of model a folder holds, and the command that uses it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from regard._utils.errors import rejected
from regard_lab import pretrained
from regard_lab.models.folders import CONFIG, ModelFileError, read_json

#: Kinds of models, each with the command that uses its folder.
COMMANDS = {
    "translation model": "regard translate --model {}",
    "pronunciation model": "regard pronounce --model {}",
    "span-corruption model": "regard train translation --start {}",
    "captioner": "regard caption --model {}",
    "language model": "regard generate --model {}",
    "masked language model": "regard fill-mask --model {}",
    "text encoder": "regard embed --model {}",
    "text-pair classifier": "regard embed --model {}",
    "text classifier": "regard classify --model {}",
    "token classifier": "regard classify --model {}",
    "image classifier": "regard classify --model {}",
    "image model": "regard look {} --image",
}
#: Kinds of models with the tasks of ``regard evaluate`` that score them.
EVALUATIONS = {
    "translation model": "translation",
    "pronunciation model": "pronunciation",
    "captioner": "captioner",
    "language model": "language-model",
    "masked language model": "language-model",
    "text classifier": "classifier",
    "image classifier": "classifier",
}
#: Kinds of models of single texts.
TEXTS = ("language model", "masked language model", "text encoder", "text classifier", "token classifier",
         "text-pair classifier")  # fmt: skip
#: Heads of models in regard's own formats.
_HEADS = {"sequence": "text classifier", "tokens": "token classifier", "pairs": "text-pair classifier",
          "images": "image classifier"}  # fmt: skip
#: Ends of the names of Hugging Face architectures.
_ENDS = {
    "ForCausalLM": "language model",
    "LMHeadModel": "language model",
    "ForMaskedLM": "masked language model",
    "ForSequenceClassification": "text classifier",
    "ForTokenClassification": "token classifier",
    "ForImageClassification": "image classifier",
}


def find(folder: str | Path) -> Path:
    """Return a model's folder; included models are known by their names."""
    included = str(folder) in pretrained.names() and not (Path(folder) / CONFIG).exists()
    return pretrained.path(str(folder)) if included else Path(folder)


def kind_of(folder: str | Path) -> str:
    """Return what a folder's config.json describes, a key of :data:`COMMANDS`; empty if that is unknown.

    Examples
    --------
    >>> kind_of("english-french"), kind_of("no-such-folder")
    ('translation model', '')
    """
    try:
        described = read_json(find(folder) / CONFIG)
    except ModelFileError:  # the loader reports it
        return ""
    return _described(described) if isinstance(described, dict) else ""


def _described(config: dict[str, Any]) -> str:
    form, kind, head = (str(config.get(name)) for name in ("format", "kind", "head"))
    model, about, architectures = (config.get(name) for name in ("model", "about", "architectures"))
    if form == "regard.sequences":
        task = about.get("task", "translation") if isinstance(about, dict) else ""
        return f"{task} model" if f"{task} model" in COMMANDS else ""
    if form == "regard.captioner":
        return "captioner"
    if form in ("regard.language_model", "regard.vision_model") and head in _HEADS:
        return _HEADS[head]
    if form == "regard.vision_model":
        return "image model"
    if form == "regard.language_model" and kind == "decoder":
        return "language model"
    if form == "regard.language_model":
        return "masked language model" if isinstance(model, dict) and model.get("masked_head") else "text encoder"
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return next((kind for end, kind in _ENDS.items() if name.endswith(end)), "")


def used_by(command: str) -> tuple[str, ...]:
    """Return the kinds of models that a command is for.

    Examples
    --------
    >>> used_by("classify")
    ('text classifier', 'token classifier', 'image classifier')
    """
    return tuple(kind for kind, line in COMMANDS.items() if line.startswith(f"regard {command} "))


def require_kind(command: str, folder: str | Path, *accepted: str) -> None:
    """Raise ValueError with the command to use instead if a folder, unless it is "", holds a model of another kind."""
    kind = kind_of(folder) if folder else ""
    if not kind or kind in accepted:
        return
    if command == "train":
        expected = f"be the folder of {' or '.join(map(_one, accepted))}"
        raise rejected(command, "start", expected, f"{_one(kind)}, {folder}")
    use = COMMANDS[kind]
    if command == "evaluate" and kind in EVALUATIONS:
        use = f"regard evaluate {EVALUATIONS[kind]} DATA --model {{}}"
    use = use.format(shlex.quote(str(folder)))
    raise ValueError(f"{command}: {folder} is {_one(kind)}: use `{use}`.")


def _one(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
