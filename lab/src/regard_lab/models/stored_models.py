"""Loading and saving language and image models: Hugging Face folders, and regard's format for other models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard._utils.errors import rejected, rejection
from regard._utils.files import write_together
from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard_lab.models.folders import (
    CONFIG,
    WEIGHTS,
    ModelFileError,
    NotMappedError,
    brief,
    check_fields,
    check_finite,
    file_error,
    json_bytes,
    load_config,
    load_weights,
    read_header,
    read_json,
    save_model,
)
from regard_lab.models.heads import Head, LanguageModel, PairClassifier, SequenceClassifier, TokenClassifier
from regard_lab.models.hugging_face.hosted import INSTALL, Hosted, HostedImageClassifier, host
from regard_lab.models.hugging_face.reading import FAMILIES, head_of, head_rules, read_folder, theirs_of, whole_name
from regard_lab.models.hugging_face.rules import Described, Family
from regard_lab.models.image_classifier import ImageClassifier, VisionModel
from regard_lab.models.resnet import ResNet, ResNetConfig
from regard_lab.models.vision_transformer import VisionTransformer, VisionTransformerConfig

#: The models that a folder may hold.
Stored = LanguageModel | Head | VisionModel | ImageClassifier | Hosted | HostedImageClassifier

VERSION = 1


@dataclass(frozen=True)
class Format:
    """A folder format of regard: its kinds of models with their configs, and their heads."""

    noun: str
    kinds: Mapping[str, tuple[type[Any], type[Any]]]
    heads: Mapping[str, type[Any]]


VISION_FORMAT = "regard.vision_model"
#: Formats by their names in config.json.
FORMATS = {
    "regard.language_model": Format(
        "a decoder or an encoder",
        {"decoder": (DecoderLMConfig, DecoderLM), "encoder": (EncoderLMConfig, EncoderLM)},
        {"sequence": SequenceClassifier, "tokens": TokenClassifier, "pairs": PairClassifier},
    ),
    VISION_FORMAT: Format(
        "a transformer or a resnet",
        {"transformer": (VisionTransformerConfig, VisionTransformer), "resnet": (ResNetConfig, ResNet)},
        {"images": ImageClassifier},
    ),
}

#: Options of heads in config.json.
_HEAD_OPTIONS: dict[str, Any] = {"teacher": bool, "bias": bool, "pad": int | None, "problem": str}
_OF_SEQUENCES = {"filters": int, "window": int, "narrowest": int, "means": bool, "both_ways": bool}
_HEAD_OPTIONS |= _OF_SEQUENCES


def load(folder: str | Path, *, dtype: torch.dtype | None = None, hosted: bool = True) -> Stored:
    """Load a language or image model from a folder, in evaluation mode.

    Reads Hugging Face folders of GPT-2, Llama, Mistral, Qwen2, BERT, RoBERTa, ALBERT, ViT and DeiT directly:
    config.json and model.safetensors or its shards, including sequence, token and image classifiers. The config is
    checked against the files' headers before allocating memory. Text models and image classifiers of other families,
    or with unsupported configs, run in transformers with regard's attention, if transformers is installed. Pickles are
    never loaded.

    Parameters
    ----------
    folder : str or Path
    dtype : torch.dtype, optional
        Dtype of the parameters; as stored by default.
    hosted : bool, default True
        Allow models that run in transformers. Training requires a model that regard implements.

    Returns
    -------
    DecoderLM, EncoderLM, SequenceClassifier, TokenClassifier, PairClassifier, VisionTransformer, ResNet,
    ImageClassifier; or, running in transformers, HostedWriter, HostedMaskedLM, HostedClassifier,
    HostedTokenClassifier, HostedImageClassifier or HostedEncoder

    Raises
    ------
    ModelFileError
        If the folder holds no such model, is damaged, or does not fit in memory.

    Examples
    --------
    >>> import tempfile
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig, load, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(DecoderLM(DecoderLMConfig(50, width=16, layers=1)), folder)
    ...     load(folder).config.width
    16
    """
    folder = Path(folder)
    described = read_json(folder / CONFIG)
    if isinstance(described, dict) and "model_type" in described:
        try:
            return read_folder(folder, dtype)
        except NotMappedError as error:
            of_images = any(
                described["model_type"] in each.types and each.model is VisionTransformer for each in FAMILIES
            )
            if not hosted or (of_images and "ForImageClassification" not in brief(described.get("architectures"))):
                raise
            if find_spec("transformers") is None:
                raise _needs_transformers(error) from None
        return host(folder, dtype)
    if (
        isinstance(described, dict)
        and "architecture" in described
        and ("pretrained_cfg" in described or "num_classes" in described)
    ):
        expected = "describe a model of regard or of transformers"
        got = f"one of timm, {brief(described['architecture'])}: timm.create_model('local-dir:{folder}') loads it"
        raise file_error(folder / CONFIG, expected, got)
    kind = _format(described)
    config = load_config(folder, kind=kind or next(iter(FORMATS)), version=VERSION)
    model = _built(folder, FORMATS[config["format"]], config)
    load_weights(folder, model, config)
    return model.to(dtype).eval()


def _needs_transformers(error: NotMappedError) -> Exception:
    """Return the error for a folder that requires transformers."""
    about = rejection(error)
    assert about is not None
    got = f"{about.got}; {INSTALL} lets transformers run it"
    return rejected(about.function, about.argument, about.expected, got, NotMappedError)


def _format(described: Any) -> str | None:
    """Return the entry of :data:`FORMATS` in a config.json, or None."""
    found = described.get("format") if isinstance(described, dict) else None
    return found if isinstance(found, str) and found in FORMATS else None


def save(model: Stored, folder: str | Path) -> None:
    """Save a language or image model, in Hugging Face format if transformers has its architecture.

    Models with scores, normalizers or positions that the Hugging Face families lack, windows with sinks, pair
    classifiers, classifiers with filters, residual networks, and vision transformers with convolutions or windows are
    saved in a format that only :func:`load` reads.

    Parameters
    ----------
    model : DecoderLM, EncoderLM, VisionTransformer, ResNet, or a classifier on one of them
    folder : str or Path
        Created if missing.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    headed = isinstance(model, Head | ImageClassifier)
    trunk: Any = model.model if isinstance(model, Head | ImageClassifier) else model
    found = [(name, form, kind) for name, form in FORMATS.items() for kind in form.kinds if _is(trunk, form, kind)]
    if not found:
        raise rejected("save", "model", "be a language or image model", type(model).__name__)
    for family in FAMILIES:
        described = family.write(trunk.config) if isinstance(trunk, family.model) else None
        if described is not None and described["model_type"] in family.types and (not headed or head_of(family, model)):
            _write(family, described, model, trunk, Path(folder))
            return
    name, form, kind = found[0]
    config: dict[str, Any] = {"format": name, "version": VERSION, "kind": kind, "model": asdict(trunk.config)}
    if headed:
        head = next((each for each, made in form.heads.items() if type(model) is made), None)
        config |= {"head": head, "labels": model.labels}
        if isinstance(model, ImageClassifier):
            config["teacher"] = model.taught is not None
        elif isinstance(model, Head):
            config |= {"bias": model.output.bias is not None, "pad": model.pad}
        if isinstance(model, SequenceClassifier):
            config |= model.filtering
        if isinstance(model, Head) and model.problem != "single_label":
            config["problem"] = model.problem
    save_model(folder, model, config)


def _is(trunk: object, form: Format, kind: str) -> bool:
    return isinstance(trunk, form.kinds[kind][1])


def _write(family: Family, described: Described, model: nn.Module, trunk: Any, folder: Path) -> None:
    from safetensors.torch import save as as_bytes

    rules, prefix = list(family.rules(trunk.config)), family.trunk
    if (end := head_of(family, model)) is not None:
        rules = head_rules(family, rules, end)
        name = described["architectures"][0].partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
        described["architectures"] = [f"{name}{end}"]
        if family.model is DecoderLM:
            described["pad_token_id"] = model.pad
        if isinstance(model, Head):
            described["problem_type"] = model.problem.replace("_label", "_label_classification")
        labels: Any = model.labels
        described["id2label"] = {str(i): label for i, label in enumerate(labels)}
        described["label2id"] = {label: i for i, label in enumerate(labels)}
    elif described["architectures"][0].endswith("Model") and family.model is not DecoderLM:
        prefix = ""
    rules = [replace(rule, theirs=tuple(whole_name(name, prefix) for name in rule.theirs)) for rule in rules]
    described["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    tensors = dict(theirs_of(model, rules))
    check_finite(tensors)
    data = as_bytes(tensors, {"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    write_together({folder / WEIGHTS: data, folder / CONFIG: json_bytes(described, 1)})


def _built(folder: Path, form: Format, config: dict[str, Any]) -> Any:
    """Return the model described by a config in regard's format, on the meta device."""
    path = folder / CONFIG
    kind, inner, head = str(config.get("kind")), config.get("model"), config.get("head")
    headed = head is None or (isinstance(head, str) and head in form.heads)
    if kind not in form.kinds or not isinstance(inner, dict) or not headed:
        raise file_error(path, f"describe {form.noun}", brief(kind))
    check_fields(path, form.kinds[kind][0], inner)
    try:
        made = form.kinds[kind][0](**inner)
        if made.layers > (stored := len(read_header(folder / WEIGHTS))):
            raise file_error(path, f"have at most as many layers as {WEIGHTS} has tensors, {stored}", made.layers)
        with torch.device("meta"):
            model = form.kinds[kind][1](made)
            if head is None:
                return model
            options = {name: config[name] for name in _HEAD_OPTIONS if name in config}
            own = form.heads[str(head)] is SequenceClassifier
            wrong = [name for name in options if name in _OF_SEQUENCES and not own]
            wrong += [name for name, value in options.items() if not isinstance(value, _HEAD_OPTIONS[name])]
            if wrong:
                raise file_error(path, f"have a valid head option {wrong[0]!r}", brief(options[wrong[0]]))
            return form.heads[str(head)](model, config.get("labels", ()), **options)
    except ModelFileError:
        raise
    except (ValueError, TypeError) as error:
        raise file_error(path, "describe a model", f"this: {str(error).rstrip('.')}") from None
