"""Read a Hugging Face folder: what it claims is checked before memory is taken, and nothing in it can run code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.errors import available_memory, fitting, rejection
from regard_lab.models.decoder_lm import DecoderLM
from regard_lab.models.encoder_lm import EncoderLM
from regard_lab.models.folders import (
    CONFIG,
    DTYPES,
    WEIGHTS,
    ModelFileError,
    brief,
    file_error,
    not_mapped,
    read_header,
    read_json,
    reading_safetensors,
    unusable,
)
from regard_lab.models.heads import Head, LanguageModel, SequenceClassifier, TokenClassifier
from regard_lab.models.hugging_face.bert import ALBERT, BERT, ROBERTA
from regard_lab.models.hugging_face.gpt2 import GPT2
from regard_lab.models.hugging_face.llama import LLAMA
from regard_lab.models.hugging_face.recurrent import KIMI_LINEAR, MAMBA2, OLMO_HYBRID, QWEN3_5, QWEN3_NEXT
from regard_lab.models.hugging_face.rules import Described, Family, Rule, completed, same
from regard_lab.models.hugging_face.vit import DEIT, VIT
from regard_lab.models.image_classifier import ImageClassifier
from regard_lab.models.vision_transformer import VisionTransformer

INDEX = "model.safetensors.index.json"
FAMILIES = (GPT2, LLAMA, QWEN3_NEXT, QWEN3_5, KIMI_LINEAR, OLMO_HYBRID, MAMBA2, BERT, ROBERTA, ALBERT, VIT, DEIT)
#: Supported heads by the end of an architecture's name, with the functions that build them from a model and labels.
HEADS: dict[str, Callable[..., Head | ImageClassifier]] = {
    "ForSequenceClassification": SequenceClassifier,
    "ForTokenClassification": TokenClassifier,
    "ForImageClassification": ImageClassifier,
    "ForImageClassificationWithTeacher": partial(ImageClassifier, teacher=True),
}
_LABELS = ("ForSequenceClassification", "ForTokenClassification")
#: The heads of each kind of model; of other architectures, only the bare model is read.
_HEADS_OF: dict[type[Any], tuple[str, ...]] = {
    DecoderLM: _LABELS,
    EncoderLM: _LABELS,
    VisionTransformer: ("ForImageClassification", "ForImageClassificationWithTeacher"),
}
_MODELS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining", "Model")
#: Maximum size of a file of parameters in bytes; its header is checked before the tensors are read.
_LARGEST = 1 << 40
#: A tensor's file, dtype, shape, and name in the file.
_Place = tuple[Path, str, tuple[int, ...], str]


def read_folder(
    folder: Path, dtype: torch.dtype | None = None
) -> LanguageModel | Head | VisionTransformer | ImageClassifier:
    """Return the model in a folder, in evaluation mode.

    Parameters
    ----------
    folder : Path
    dtype : torch.dtype, optional
        Of the parameters; as they are stored by default.

    Raises
    ------
    ModelFileError
        If it is not such a folder, is of another architecture, or tensors are missing, unknown or of another shape.
    """
    path = folder / CONFIG
    described = read_json(path)
    if not isinstance(described, dict):
        raise file_error(path, "describe a model", brief(described))
    family = _family(path, described)
    architecture = _architecture(path, family, described)
    places = {family.name(name): place for name, place in _places(folder).items()}
    prefix = family.trunk if any(name.startswith(family.trunk) for name in places) else ""
    names = {name.removeprefix(prefix) if name.startswith(prefix) else f"/{name}" for name in places}
    if not prefix:
        names = set(places)
    described = _completed(path, described)
    config = _config(path, family, described, names)
    if architecture in HEADS and family.model is DecoderLM:
        config = replace(config, tied=True)  # nothing scores the vocabulary
    if architecture == "Model" and family.model is DecoderLM and not config.tied and "lm_head.weight" not in places:
        raise not_mapped(
            path, "name an architecture with a head that scores tokens", brief(described.get("architectures"))
        )
    if config.layers > len(places):
        expected = f"have at most as many layers as there are tensors, {len(places)}"
        raise file_error(path, expected, config.layers)
    rules = list(family.rules(config))
    with torch.device("meta"):
        model: nn.Module = family.model(config)
        if architecture in HEADS:
            labels = labels_of(path, described)
            options = _head(path, family, architecture, described, len(labels))
            if options.get("problem") == "single_label" and len(labels) < 2:
                raise file_error(path, "have at least 2 labels of which one is right", len(labels))
            if len(set(labels)) < len(labels):
                raise file_error(path, "have id2label whose names differ", brief(labels))
            model = HEADS[architecture](model, labels, **options)
            rules = head_rules(family, rules, architecture)
    rules = [replace(rule, theirs=tuple(whole_name(name, prefix) for name in rule.theirs)) for rule in rules]
    _check(folder, family, model, rules, places)
    _fill(folder, model, rules, places, dtype)
    return model.eval()  # type: ignore[return-value]


def module_names(folder: Path, model: nn.Module) -> dict[str, str]:
    """Return transformers' name of each module of a model without a head that :func:`read_folder` read, by ours.

    A module of ours whose parts are in several of theirs has the name of the module that contains them.
    """
    path = folder / CONFIG
    described = read_json(path)
    family = _family(path, described)
    prefix = "" if _architecture(path, family, described) == "Model" else family.trunk
    parts: dict[str, list[list[str]]] = {}
    for rule in family.rules(model.config):
        ours = rule.ours.split(".")
        for end in range(1, len(ours)):
            parts.setdefault(".".join(ours[:end]), []).extend(
                whole_name(each, prefix).split(".")[:-1] for each in rule.theirs
            )
    common = {name: takewhile(lambda level: len(set(level)) == 1, zip(*theirs)) for name, theirs in parts.items()}
    found = {name: ".".join(level[0] for level in levels) for name, levels in common.items()}
    return {name: theirs for name, theirs in found.items() if theirs}


def head_rules(family: Family, rules: list[Rule], architecture: str) -> list[Rule]:
    """Return the rules of a classifier: those of its model, and of what stands on it."""
    inner = [replace(rule, ours=f"model.{rule.ours}") for rule in rules]
    if family is ROBERTA and architecture == "ForSequenceClassification":
        inner = [rule for rule in inner if not rule.ours.startswith("model.pooler.")]
        return [*inner, *same({"model.pooler": "/classifier.dense", "output": "/classifier.out_proj"})]
    if architecture == "ForImageClassificationWithTeacher":
        return [*inner, *same({"output": "/cls_classifier", "taught": "/distillation_classifier"})]
    if family.model is DecoderLM and (family is not GPT2 or architecture == "ForSequenceClassification"):
        return [*inner, *same({"output": "/score"})]
    return [*inner, *same({"output": "/classifier"})]


def head_of(family: Family, model: nn.Module) -> str | None:
    """Return the end of the name of the architecture that has such a head; None where the family has none."""
    trunk = getattr(model, "model", None)
    for end in _HEADS_OF[family.model]:
        if isinstance(model, ImageClassifier):
            # Their heads score the row directly.
            fits = (model.taught is not None) == end.endswith("WithTeacher") and not model.model.config.pooled  # type: ignore[union-attr]
        else:
            # Their sequence classifiers have no bias on decoders.
            bias = family.model is EncoderLM or end != "ForSequenceClassification"
            fits = type(model) is HEADS[end] and (model.output.bias is not None) == bias  # type: ignore[union-attr]
            fits = fits and not getattr(model, "filters", 0)
        if fits and isinstance(trunk, family.model):
            return end
    return None


def whole_name(name: str, prefix: str) -> str:
    """Return the name of a tensor in a file."""
    return name[1:] if name.startswith("/") else f"{prefix}{name}"


def _family(path: Path, described: Described) -> Family:
    kind = described.get("model_type")
    for family in FAMILIES:
        if kind in family.types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.types))
    raise not_mapped(path, f"have one of the model_types {known}", brief(kind))


def _architecture(path: Path, family: Family, described: Described) -> str:
    """Return the end of the architecture's name."""
    if described.get("auto_map"):
        raise file_error(path, "be without auto_map, which names code that is never run", brief(described["auto_map"]))
    if described.get("quantization_config"):
        raise not_mapped(path, "be without quantization_config", brief(described["quantization_config"]))
    given = described.get("architectures") or ["Model"]
    name = str(given[0]) if isinstance(given, list) else str(given)
    known = (*_MODELS, *_HEADS_OF[family.model])
    for end in known:
        if name.endswith(end):
            return end
    raise not_mapped(path, f"have an architecture that ends in {', '.join(known)}", brief(name))


def _completed(path: Path, described: Described) -> Described:
    """Return a config with every key of its family."""
    try:
        return completed(described, described["model_type"])
    except ValueError as error:
        raise not_mapped(path, "describe a model that can be built here", str(error)) from None


def _config(path: Path, family: Family, described: Described, names: set[str]) -> Any:
    """Return our config of a described one."""
    try:
        return family.read(described, names)
    except KeyError as error:
        raise file_error(path, f"have a field {error.args[0]!r}", "none") from None
    except (ValueError, TypeError, OverflowError) as error:
        # Our configs reject invalid values; families reject valid ones that we do not support.
        refuse = not_mapped if type(error) is ValueError and rejection(error) is None else file_error
        raise refuse(path, "describe a model that can be built here", str(error).rstrip(".")) from None


def _head(path: Path, family: Family, architecture: str, described: Described, labels: int) -> dict[str, Any]:
    """Return the options of a head: those of transformers' heads of this name."""
    if HEADS[architecture] is not SequenceClassifier:
        if labels < 2:
            raise not_mapped(path, "have at least 2 labels in id2label or num_labels", labels)
        if described["problem_type"] not in (None, "single_label_classification"):
            expected = "have problem_type None or 'single_label_classification' here"
            raise not_mapped(path, expected, repr(described["problem_type"]))
        return {}
    options: dict[str, Any] = {"problem": problem_of(path, described, labels)}
    if family.model is DecoderLM:
        pad = described["pad_token_id"]
        if pad is not None and (not isinstance(pad, int) or not 0 <= pad < described["vocab_size"]):
            raise file_error(path, "have a pad_token_id in the vocabulary, or null", repr(pad))
        options |= {"bias": False, "pad": pad}
    return options


def problem_of(path: Path, described: Described, labels: int) -> str:
    """Return what scores of so many labels mean, as transformers' pipelines read it from a config."""
    given = described.get("problem_type")
    if given is None:
        return "single_label" if labels > 1 else "multi_label"
    known = {f"{name}_classification": name for name in ("single_label", "multi_label")} | {"regression": "regression"}
    if not isinstance(given, str) or given not in known:
        raise file_error(path, f"have a problem_type of {', '.join(known)}", brief(given))
    return known[given]


def labels_of(path: Path, described: Described) -> list[str]:
    """Return the names of labels in the order of their numbers."""
    labels = described.get("id2label")
    if labels is None:
        labels = {str(i): f"LABEL_{i}" for i in range(described.get("num_labels") or 2)}
    if not isinstance(labels, dict) or set(labels) != {str(i) for i in range(len(labels))}:
        raise file_error(path, "have id2label that numbers its labels from 0", brief(labels))
    return [str(labels[str(i)]) for i in range(len(labels))]


def _places(folder: Path) -> dict[str, _Place]:
    """Return where each tensor lies: in one file, or in the shards of an index."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists() and any(folder.glob("pytorch_model*.bin")):
            got = "pickles, which are never loaded because they can run code; save the model as safetensors"
            raise file_error(folder, f"hold {WEIGHTS}", got)
        return {name: (folder / WEIGHTS, *place, name) for name, place in _header(folder / WEIGHTS).items()}
    index = read_json(folder / INDEX)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise file_error(folder / INDEX, "have a weight_map of names and files", brief(index))
    found: dict[str, _Place] = {}
    for name in sorted(set(table.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise file_error(folder / INDEX, "name safetensors files of its own folder", brief(name))
        found |= {tensor: (folder / name, *place, tensor) for tensor, place in _header(folder / name).items()}
    if found.keys() != table.keys():
        odd = sorted(found.keys() ^ table.keys())[0]
        raise file_error(folder / INDEX, "list the tensors that its files hold", f"another list: {brief(odd)}")
    return found


def _header(path: Path) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return read_header(path, _LARGEST)


def _check(folder: Path, family: Family, model: nn.Module, rules: list[Rule], places: Mapping[str, _Place]) -> None:
    """Raise where tensors are missing, unknown, of another shape, or more than memory holds."""
    parameters = model.state_dict()
    covered = {rule.ours for rule in rules}
    assert not parameters.keys() - covered, sorted(parameters.keys() - covered)
    needed = {name for rule in rules if rule.ours in parameters for name in rule.theirs}
    tied = {name for rule in rules for name in rule.theirs}
    if missing := sorted(needed - places.keys()):
        raise file_error(folder, f"hold the {len(needed):,} tensors that {CONFIG} describes", f"no {brief(missing[0])}")
    extra = sorted(name for name in places.keys() - tied if not name.endswith(family.ignored))
    if extra:
        raise file_error(folder, f"hold only tensors that {CONFIG} describes", brief(extra[0]))
    for rule in rules:
        if rule.ours not in parameters:
            continue
        found = [places[name][2] for name in rule.theirs]
        for name, wanted in zip(rule.theirs, rule.expected(parameters[rule.ours], found)):
            path, stored, shape, _ = places[name]
            if shape != wanted or stored not in DTYPES or not DTYPES[stored].is_floating_point:
                raise file_error(path, f"hold {name} of floats and shape {wanted}", f"{stored} of {shape}")
    free, most = available_memory(), sum(4 * tensor.numel() for tensor in parameters.values())
    if free is not None and most > free:
        raise file_error(folder, f"fit into the {free / 1e9:.1f} GB of memory that are free", f"{most / 1e9:.1f} GB")


def _fill(
    folder: Path, model: nn.Module, rules: list[Rule], places: Mapping[str, _Place], dtype: torch.dtype | None
) -> None:
    """Give a model on the meta device its parameters, tensor by tensor."""
    parameters = model.state_dict()
    with fitting(f"load: {folder} must fit into memory, got an allocation that failed.", ModelFileError):
        with _opened(places) as tensor:
            made = {
                rule.ours: rule.join([tensor(name) for name in rule.theirs]).to(dtype).contiguous()
                for rule in rules
                if rule.ours in parameters
            }
        for rule in rules:
            if rule.ours in made and (problem := unusable(made[rule.ours])) is not None:
                raise file_error(places[rule.theirs[0]][0], "hold finite numbers", f"{problem} in {rule.theirs[0]}")
        model.load_state_dict(made, assign=True)


@contextmanager
def _opened(places: Mapping[str, _Place]) -> Iterator[Callable[[str], Tensor]]:
    """Yield what reads a tensor by its name; files are opened when they are needed, and closed together."""
    from safetensors import safe_open

    files: dict[Path, Any] = {}
    with ExitStack() as stack:

        def tensor(name: str) -> Tensor:
            path, *_, name = places[name]
            with reading_safetensors(path):
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, framework="pt"))
                return files[path].get_tensor(name)

        yield tensor


def theirs_of(model: nn.Module, rules: list[Rule]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder, by name, of a model's parameters."""
    for name, parameter in model.state_dict().items():
        rule = next(rule for rule in rules if rule.ours == name)
        for theirs, part in zip(rule.theirs, rule.split(parameter)):
            yield theirs, part.detach().cpu().contiguous()
