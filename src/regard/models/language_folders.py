"""Folders of language models: those of Hugging Face, and our own where a model is none that transformers knows."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard._errors import rejected
from regard._writing import write_together
from regard.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard.models.folders import (
    CONFIG,
    WEIGHTS,
    brief,
    file_error,
    json_bytes,
    load_config,
    load_weights,
    read_header,
    read_json,
    save_model,
)
from regard.models.heads import Head, LanguageModel, PairClassifier, SequenceClassifier, TokenClassifier
from regard.models.hugging_face.reading import FAMILIES, HEADS, head_rules, read_folder, theirs_of, whole_name
from regard.models.hugging_face.rules import Described, Family

FORMAT, VERSION = "regard.language_model", 1
_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "decoder": (DecoderLMConfig, DecoderLM),
    "encoder": (EncoderLMConfig, EncoderLM),
}
_HEADS: dict[str, type[Head]] = {"sequence": SequenceClassifier, "tokens": TokenClassifier, "pairs": PairClassifier}


def load(folder: str | Path, *, dtype: torch.dtype | None = None) -> LanguageModel | Head:
    """Return the language model in a folder, in evaluation mode.

    Folders of Hugging Face of GPT-2, Llama, Mistral, Qwen2, BERT, RoBERTa and ALBERT are read as they are: config.json
    and model.safetensors, or its shards; classifiers of sequences and of tokens on them, too. No
    pickle is ever loaded. What config.json claims is compared with the files' headers before memory is taken.

    Parameters
    ----------
    folder : str or Path
    dtype : torch.dtype, optional
        Of the parameters; as they are stored by default.

    Returns
    -------
    DecoderLM, EncoderLM, SequenceClassifier, TokenClassifier or PairClassifier

    Raises
    ------
    ModelFileError
        If the folder is no such model, is damaged, or does not fit into memory, in one sentence.

    Examples
    --------
    >>> import tempfile
    >>> from regard.models import DecoderLM, DecoderLMConfig, load, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(DecoderLM(DecoderLMConfig(50, width=16, layers=1)), folder)
    ...     load(folder).config.width
    16
    """
    folder = Path(folder)
    described = read_json(folder / CONFIG)
    if isinstance(described, dict) and "model_type" in described:
        return read_folder(folder, dtype)
    config = load_config(folder, kind=FORMAT, version=VERSION)
    model = _built(folder, config)
    load_weights(folder, model, config)
    return model.to(dtype).eval()


def is_language_folder(folder: str | Path) -> bool:
    """Return whether a folder claims to hold a language model or a classifier, which :func:`load` would read."""
    if not (Path(folder) / CONFIG).is_file():
        return False
    described = read_json(Path(folder) / CONFIG)
    return isinstance(described, dict) and ("model_type" in described or described.get("format") == FORMAT)


def save(model: LanguageModel | Head, folder: str | Path) -> None:
    """Write a language model to a folder that transformers reads, if it is one that transformers knows.

    Another score, normalizer or kind of positions than its families have, a window with sinks, and a classifier of
    pairs are kept in a folder that only :func:`load` reads.

    Parameters
    ----------
    model : DecoderLM, EncoderLM, SequenceClassifier, TokenClassifier or PairClassifier
    folder : str or Path
        Made if missing.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    trunk = model.model if isinstance(model, Head) else model
    if not isinstance(trunk, DecoderLM | EncoderLM):
        raise rejected("save", "model", "be a language model", type(model).__name__)
    head = next((name for name, kind in _HEADS.items() if type(model) is kind), None)
    for family in FAMILIES:
        described = family.write(trunk.config) if isinstance(trunk, family.model) else None
        if described is not None and described["model_type"] in family.types and _writes(family, model):
            _write(family, described, model, trunk, Path(folder))
            return
    kind = "decoder" if isinstance(trunk, DecoderLM) else "encoder"
    config = {"format": FORMAT, "version": VERSION, "kind": kind, "model": asdict(trunk.config)}
    if isinstance(model, Head):
        config |= {"head": head, "labels": model.labels, "bias": model.output.bias is not None, "pad": model.pad}
    save_model(folder, model, config)


def _writes(family: Family, model: nn.Module) -> bool:
    """Return whether the family has such a head."""
    if not isinstance(model, Head):
        return True
    # Transformers' scores of sequences have no bias where they stand on decoders.
    bias = family.model is EncoderLM or not isinstance(model, SequenceClassifier)
    return type(model) in HEADS.values() and (model.output.bias is not None) == bias


def _write(family: Family, described: Described, model: nn.Module, trunk: LanguageModel, folder: Path) -> None:
    from safetensors.torch import save as as_bytes

    rules, prefix = list(family.rules(trunk.config)), family.trunk
    if isinstance(model, Head):
        end = next(end for end, kind in HEADS.items() if type(model) is kind)
        rules = head_rules(family, rules, end)
        name = described["architectures"][0].partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
        described["architectures"] = [f"{name}{end}"]
        if family.model is DecoderLM:
            described["pad_token_id"] = model.pad
        described["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
        described["label2id"] = {label: i for i, label in enumerate(model.labels)}
    elif described["architectures"][0].endswith("Model") and family.model is EncoderLM:
        prefix = ""
    rules = [replace(rule, theirs=tuple(whole_name(name, prefix) for name in rule.theirs)) for rule in rules]
    described["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    data = as_bytes(dict(theirs_of(model, rules)), {"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    write_together({folder / WEIGHTS: data, folder / CONFIG: json_bytes(described, 1)})


def _built(folder: Path, config: dict[str, Any]) -> Any:
    """Return the model that our own configuration describes, without parameters."""
    path = folder / CONFIG
    kind, inner, head = config.get("kind"), config.get("model"), config.get("head")
    if kind not in _KINDS or not isinstance(inner, dict) or (head is not None and head not in _HEADS):
        raise file_error(path, "describe a decoder or an encoder", brief(kind))
    known = {each.name for each in fields(_KINDS[kind][0])}
    if set(inner) != known:
        raise file_error(path, f"have a field 'model' with {', '.join(sorted(known))}", "other fields")
    try:
        made = _KINDS[kind][0](**inner)
        if made.layers > (stored := len(read_header(folder / WEIGHTS))):
            raise file_error(path, f"have at most as many layers as {WEIGHTS} has tensors, {stored}", made.layers)
        with torch.device("meta"):
            model = _KINDS[kind][1](made)
            if head is None:
                return model
            # Folders of earlier versions do not say what was always so.
            options = {"bias": config.get("bias", True), "pad": config.get("pad")}
            return _HEADS[head](model, config.get("labels", ()), **options)
    except (ValueError, TypeError) as error:
        raise file_error(path, "describe a model", f"this: {str(error).rstrip('.')}") from None
