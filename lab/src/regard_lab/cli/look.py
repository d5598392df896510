"""``regard look``: show the attention of a model in a folder or from a Python function."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.errors import rejected, unknown_name
from regard.inspect import (
    Alignment,
    HeadEffect,
    Record,
    capture,
    compare_tokens,
    draw,
    head_effect,
    input_texts,
    legend,
    save_plot,
    summarize_heads,
)
from regard.inspect._record.head_summary import visible_counts
from regard.inspect._record.numbering import labels_of
from regard.inspect._record.texts import Patches, Text, texts_of
from regard.inspect._view.plots import SCALES, clipped
from regard_cli.messages import ascii_only, echo, note, report_errors, require_writable
from regard_cli.view import serve
from regard_lab.cli.kinds import COMMANDS, find, require_kind
from regard_lab.data.images import Preprocessing, read_image
from regard_lab.data.sound import read_sound
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import DecoderLM, EncoderLM, VisionTransformer, load
from regard_lab.models.base import END
from regard_lab.models.folders import CONFIG, brief, read_json
from regard_lab.models.hugging_face.hosted import Hosted, load_module
from regard_lab.models.hugging_face.processors import load_feature_extractor, load_processor
from regard_lab.models.hugging_face.reading import FAMILIES, module_names
from regard_lab.models.registry import MODELS
from regard_lab.models.stored_models import VISION_FORMAT
from regard_lab.text.ragged import pad
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import UnknownCharacters

# The model to inspect: a model folder, or a function in a file --------------------------------------------------------


#: The most tokens that an encoder–decoder generates.
_LONGEST = 128
#: Frames of a video.
_FRAMES = (".png", ".jpg", ".jpeg", ".webp")
#: Speech models of transformers whose inputs are texts, or texts with recordings in them.
_NOT_RECORDINGS = ("dia", "granite_speech", "granite_speech_plus", "qwen3_asr", "vibevoice", "vibevoice_asr", "voxtral")
#: Default mean and standard deviation of pixels.
_MEAN_AND_STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ModelRun:
    """A model, a function that runs it, and its inputs."""

    model: nn.Module
    run: Callable[[], object]
    texts: tuple[Text, ...]
    title: str = ""
    #: The modules whose attention to show; None for all.
    layers: tuple[str, ...] | None = None
    #: The names of modules in transformers, by ours.
    names: dict[str, str] = field(default_factory=dict)
    #: The name of each token or class whose logit the model returns, by its index.
    output_names: Callable[[int], str] | None = None

    def without_head(self, layer: str, head: int) -> HeadEffect:
        """Return how the model's output changes without a head of a layer, given by the name that is shown."""
        ours = {theirs: name for name, theirs in reversed(self.names.items())}  # of several, the module itself
        module, sign, number = layer.partition("#")
        name = ours.get(module, module) + sign + number
        return head_effect(self.model, self.run, name, head, names=self.output_names)


def model_run(
    path: str, text: str | None, images: Sequence[Path], target: str | None, audio: Path | None = None,
    video: Path | None = None,
) -> ModelRun:  # fmt: skip
    """Return the model at a path with its inputs.

    Raises
    ------
    ValueError
        If there is no such model, or it needs other inputs.
    """
    file, colon, function = path.rpartition(":")
    if colon and file.endswith(".py"):
        files = [*images, *(each for each in (audio, video) if each is not None)]
        given: list[str | Path] = [*([] if text is None else [text]), *files]
        return _of_function(Path(file), function, given)
    if path.endswith(".py"):
        raise rejected("look", "MODEL", f"name a function of the file: write {path}:FUNCTION", f"only {path}")
    require_kind("look", path, *(kind for kind in COMMANDS if kind != "captioner"))
    folder = find(path)
    config = read_json(folder / CONFIG)
    config = config if isinstance(config, dict) else {}
    if (auto := _speech_auto_class(config)) is not None or audio is not None:
        return _of_recording(folder, config, auto, audio, target, {"--text": text, "--image": images, "--video": video})
    if isinstance(config.get("vision_config"), dict):
        return _of_images_and_text(folder, images, text, video)
    if video is not None:
        raise rejected("look", "--video", "be left out unless the model reads videos and text", video)
    ours = config.get("format") == VISION_FORMAT
    vision = ours or ("image_size" in config and "patch_size" in config)
    if vision and len(images) != 1:
        raise ValueError(f"look: an image model requires {'one --image' if images else '--image'}.")
    if images and not vision:
        raise rejected("look", "--image", "be left out for a text model", images[0])
    if vision:
        (image,) = images
        return _of_image_with_ours(folder, image) if ours else _of_image(folder, config, image)
    if text is None:
        raise ValueError("look: a text model requires --text.")
    if config.get("kind") in MODELS and "model_type" not in config:
        return _of_sequence_model(folder, text, target)
    kind = config.get("model_type")
    names: dict[str, str] = {}
    if kind is None or any(kind in family.types for family in FAMILIES):
        loaded = load(folder, dtype=torch.float32)
        model: Any = loaded if isinstance(loaded, EncoderLM | DecoderLM | Hosted) else loaded.model
        if isinstance(model, Hosted):
            names = {f"module.{name}": name for name, _ in model.module.named_modules()}
        elif kind is not None:
            names = module_names(folder, model)
    else:
        model = _hugging_face(folder, "AutoModel")
        if model.config.is_encoder_decoder:
            return _of_encoder_decoder(folder, text, target)
    if target is not None:
        raise rejected("look", "--target", "be left out unless the model is an encoder–decoder", repr(target))
    ids, read = _tokens(folder, text)
    output_names = _token_names(folder) if isinstance(model, DecoderLM) else None
    return ModelRun(model, lambda: model(torch.tensor([ids])), (read,), text, names=names, output_names=output_names)


def _hugging_face(folder: Path, kind: str) -> Any:
    """Load a model with transformers; never downloads, unpickles, or runs code from the folder."""
    return load_module(folder, kind, torch.float32)


def _tokens(folder: Path, text: str, argument: str = "--text") -> tuple[list[int], Text]:
    """Return the token ids of a text, and the tokens."""
    tokenizer = Tokenizer.load(folder)
    plain, ids = tokenizer.encode(text), tokenizer.encode(text, specials=True)
    if unknown := UnknownCharacters.of(tokenizer, [text]):
        note(f"regard: {unknown}")
    if not plain:
        raise rejected("look", argument, "have at least one token", repr(text))
    at = next(at for at in range(len(ids)) if ids[at : at + len(plain)] == plain)
    special = [*range(at), *range(at + len(plain), len(ids))]
    return ids, Text(tuple(map(_readable, tokenizer.tokens(ids))), tuple(special))


def _readable(token: str) -> str:
    """Return a token with its space marker replaced by a space."""
    return f" {token[1:]}" if token[:1] in ("▁", "Ġ") else token


def _token_names(folder: Path) -> Callable[[int], str]:
    """Return the function that spells the token of a number."""
    tokenizer = Tokenizer.load(folder)
    return lambda number: _readable(tokenizer.tokens([number])[0])


def _of_encoder_decoder(folder: Path, text: str, target: str | None) -> ModelRun:
    """Inspect a transformers encoder–decoder on a text and its generated or given target."""
    model = _hugging_face(folder, "AutoModelForSeq2SeqLM")
    ids, read = _tokens(folder, text)
    source = torch.tensor([ids])
    begins = (model.config, model.generation_config)
    if all(getattr(each, "decoder_start_token_id", None) is None for each in begins):
        raise rejected("look", "MODEL", "have a decoder_start_token_id in its config", "none")
    if target is None:
        with torch.no_grad():
            decoder_ids = model.generate(source, max_new_tokens=_LONGEST, do_sample=False, num_beams=1)[:, :-1]
    else:
        labels = torch.tensor([_tokens(folder, target, "--target")[0]])
        decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
    tokens = tuple(map(_readable, Tokenizer.load(folder).tokens(decoder_ids[0].tolist())))
    texts = (read, Text(tokens, (0,)))
    return ModelRun(
        model,
        lambda: model(input_ids=source, decoder_input_ids=decoder_ids),
        texts,
        text,
        output_names=_token_names(folder),
    )


def _of_sequence_model(folder: Path, text: str, target: str | None) -> ModelRun:
    """Inspect a regard encoder–decoder on a text and its generated or given target."""
    translator = SequenceModel.load(folder)
    if not text.strip():
        raise rejected("look", "--text", "not be empty", repr(text))
    if target is None and not (target := translator.predict([text])[0].text):
        raise ValueError(f"look: the model generates nothing for {text[:60]!r}: pass another --text, or --target.")
    if not target.strip():
        raise rejected("look", "--target", "not be empty", repr(target))
    (source, show_source), (decoder_ids, show_target) = translator.tokenize_pair(text, target)
    read, lengths = pad([source])
    before, _ = pad([[END, *decoder_ids]])
    # A recurrent decoder's row belongs to the token it generates, a Transformer's to the token it has just read.
    rows = [*decoder_ids, END] if translator.kind == "recurrent" else [END, *decoder_ids]
    end = rows.index(END)
    tokens = [tuple(map(_readable, each)) for each in (show_source(source), show_target(rows))]
    texts = (Text(tokens[0]), Text(tokens[1], (end,)))
    return ModelRun(translator.model, lambda: translator.model.features(read, lengths, before), texts, text)


def _of_image_with_ours(folder: Path, path: Path) -> ModelRun:
    """Inspect a regard vision transformer, or a classifier on one."""
    from PIL import Image

    loaded: Any = load(folder, dtype=torch.float32)
    model = getattr(loaded, "model", loaded)
    if not isinstance(model, VisionTransformer):
        raise rejected("look", "MODEL", "be a vision transformer", f"a {type(model).__name__}")
    how = Preprocessing.load(folder)
    pixels = how.transform(read_image(path, function="look"))  # (height, width, channels)
    rows, cols = ((side >> model.config.stem) // model.config.patch for side in pixels.shape[:2])
    png, special = io.BytesIO(), tuple(range(model.config.leading))
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(png, "PNG")
    names = [f"[{i}]" for i in special] + _patch_names(rows, cols)
    text = Text(tuple(names), special, Patches(png.getvalue(), rows, cols, len(special)))
    values = how.normalized(torch.from_numpy(pixels.copy())[None])
    return ModelRun(model, lambda: model(values), (text,), path.name)


def _of_image(folder: Path, config: Mapping[str, Any], path: Path) -> ModelRun:
    """Inspect a vision transformer of transformers."""
    model = _hugging_face(folder, "AutoModel")
    values, png, (rows, cols) = _pixels(folder, config, path)
    with torch.no_grad():
        first = model(values).last_hidden_state.shape[1] - rows * cols  # [CLS], distillation and register tokens
    names = [f"[{i}]" for i in range(max(first, 0))] + _patch_names(rows, cols)
    text = Text(tuple(names), tuple(range(max(first, 0))), Patches(png, rows, cols, max(first, 0)))
    return ModelRun(model, lambda: model(values), (text,), path.name)


def _of_images_and_text(folder: Path, paths: Sequence[Path], text: str | None, video: Path | None) -> ModelRun:
    """Inspect the language model of a vision–language model, on images, the frames of a video and a text."""
    if text is None or not (paths or video):
        raise ValueError("look: a vision–language model requires both --image and --text.")
    model = _hugging_face(folder, "AutoModelForImageTextToText")
    processor = load_processor(folder)
    images = [read_image(path, function="look") for path in paths]
    frames = [] if video is None else [read_image(path, function="look") for path in _frames(video, processor)]
    counts = ({"image": len(images)} if images else {}) | ({"video": 1} if frames else {})
    prompt = _prompt(processor, text, counts)
    begin = processor.tokenizer.bos_token
    given: dict[str, Any] = {"images": [images]} if images else {}
    given |= {"videos": [frames], "do_sample_frames": False} if frames else {}
    try:
        made = processor(
            text=[prompt],
            return_tensors="pt",
            add_special_tokens=begin is None or not prompt.startswith(begin),
            **given,
        )
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        got = " ".join(str(error).split())[:200]
        options = " and ".join(
            f"--{name.removesuffix('s')}" for name in (*given, "texts") if name != "do_sample_frames"
        )
        raise rejected("look", options, "be inputs that the processor accepts", got) from None
    inputs = {name: each for name, each in made.items() if name != "labels"}
    names = [path.name for path in (*paths, *([video] if video else []))]
    texts = input_texts(model, processor, inputs, images=images, videos=[frames] if frames else [], names=names)
    layers = tuple(name for name, module in model.named_modules() if module is model.get_decoder())
    return ModelRun(model, lambda: model(**inputs), texts, f"{', '.join(names)}: {text}", layers)


def _frames(folder: Path, processor: Any) -> list[Path]:
    """Return the images in a folder, in the order of their names, for a processor that reads videos."""
    if getattr(processor, "video_processor", None) is None:
        if find_spec("torchvision") is None and hasattr(processor, "video_token"):
            expected = "be left out without torchvision, by which transformers reads videos; pass frames as --image"
        else:
            expected = "be left out unless the model reads videos (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)"
        raise rejected("look", "--video", expected, folder)
    if not folder.is_dir():
        raise rejected("look", "--video", "be a folder with the frames as images", folder)
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _FRAMES)
    if not found:
        raise rejected("look", "--video", f"hold frames as images ({', '.join(_FRAMES)})", f"none in {folder}")
    return found


def _prompt(processor: Any, text: str, counts: Mapping[str, int]) -> str:
    """Return a text with a mark for each image and video: as it is, in the processor's chat template, or after them.

    Parameters
    ----------
    counts : mapping
        How many of each kind there are, by "image" and "video".

    Raises
    ------
    ValueError
        If the text has marks, but not one for each.
    """
    marks = {kind: getattr(processor, f"{kind}_token") for kind in counts}
    found = {kind: text.count(mark) for kind, mark in marks.items()}
    if found == counts:
        return text
    for kind, count in counts.items():
        if any(found.values()) and found[kind] != count:
            expected = f"have {marks[kind]} once for each of the {count} {kind}s, or not at all"
            raise rejected("look", "--text", expected, found[kind])
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    if getattr(processor, "chat_template", None) is None:
        return "\n".join(marks[kind] for kind in kinds) + f"\n{text}"
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    prompt: str = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return prompt


def _speech_auto_class(config: Mapping[str, Any]) -> str | None:
    """Return the ``Auto`` class of a speech model that reads recordings alone; None for other models."""
    if find_spec("transformers") is None:
        return None
    from transformers.models.auto import modeling_auto

    kind = config.get("model_type")
    if kind in _NOT_RECORDINGS:
        return None
    if kind in modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return "AutoModelForSpeechSeq2Seq"
    others = {**modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES, **modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES}
    return "AutoModel" if kind in others else None


def _of_recording(
    folder: Path, config: Mapping[str, Any], auto: str | None, audio: Path | None, target: str | None,
    others: Mapping[str, Any],
) -> ModelRun:  # fmt: skip
    """Inspect a speech model of transformers on a recording and, of an encoder–decoder, its text.

    ``others`` are options that such a model does not take.
    """
    if auto is None:
        expected = "be left out unless the model reads recordings alone (Whisper, wav2vec 2.0 and others)"
        raise rejected("look", "--audio", expected, brief(config.get("model_type")))
    if audio is None:
        raise ValueError("look: a speech model requires --audio.")
    if given := next((option for option, each in others.items() if each), None):
        expected = "be left out for a speech model (--target is what it writes)"
        raise rejected("look", given, expected, repr(others[given]))
    model, extractor = _hugging_face(folder, auto), load_feature_extractor(folder)
    rate = extractor.sampling_rate
    sound = read_sound(audio, rate, function="look")
    try:
        inputs = dict(extractor(sound, sampling_rate=rate, return_tensors="pt"))
        (recording,) = input_texts(model, extractor, inputs)
    except (TypeError, RuntimeError, LookupError) as error:
        got = " ".join(str(error).split())[:200]
        raise rejected("look", "--audio", "be a recording that the model reads", got) from None
    seconds = len(sound) / rate
    ends = [each[1] for each in recording.seconds if each is not None]
    if seconds > ends[-1] + 1:
        note(f"regard: the model reads the first {ends[-1]:.0f} of {seconds:.0f} seconds")
    padding = [at for at, end in enumerate(ends) if end > seconds + 0.1]
    recording = Text(recording.tokens, padding, seconds=recording.seconds)
    if not model.config.is_encoder_decoder:
        if target is not None:
            raise rejected("look", "--target", "be left out for a model without a decoder", repr(target))
        return ModelRun(model, lambda: model(**inputs), (recording,), audio.name)
    decoder_ids, output_names = _transcript(folder, model, inputs, target), _token_names(folder)
    texts = (recording, Text([output_names(each) for each in decoder_ids[0].tolist()], (0,)))
    return ModelRun(
        model,
        lambda: model(**inputs, decoder_input_ids=decoder_ids),
        texts,
        audio.name,
        output_names=output_names,
    )


def _transcript(folder: Path, model: Any, inputs: Mapping[str, Any], target: str | None) -> Tensor:
    """Return the tokens (1, L) that a speech model's decoder reads: those of a target, or what it writes."""
    start = model.generation_config.decoder_start_token_id or model.config.decoder_start_token_id
    if target is not None:
        ids = _tokens(folder, target, "--target")[0]
        ids = ids if ids[0] == start else [start, *ids]
        return torch.tensor([ids[:-1] if len(ids) > 1 and ids[-1] == model.config.eos_token_id else ids])
    most = min(_LONGEST, (getattr(model.config, "max_target_positions", None) or 2 * _LONGEST) // 2)
    # Whisper returns the tokens before its text only if it reads the recording in one go.
    once = {"force_unique_generate_call": True} if model.config.model_type == "whisper" else {}
    with torch.no_grad():
        found = model.generate(
            **inputs, max_new_tokens=most, do_sample=False, num_beams=1, return_dict_in_generate=True, **once
        ).sequences
    tokens: Tensor = found[:, :-1] if found.shape[1] > 1 else found
    return tokens


def _patch_names(rows: int, cols: int) -> list[str]:
    return [f"patch {i // cols},{i % cols}" for i in range(rows * cols)]


def _pixels(folder: Path, config: Mapping[str, Any], path: Path) -> tuple[Tensor, bytes, tuple[int, int]]:
    """Return an image as model input (1, 3, height, width), as a PNG file, and its rows and columns of patches."""
    from PIL import Image, UnidentifiedImageError

    (height, width), (tall, wide) = (_pair_of(config[name]) for name in ("image_size", "patch_size"))
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise rejected("look", "--image", "be a readable image", error) from None
    file = folder / "preprocessor_config.json"
    prepared = read_json(file) if file.exists() else {}
    mean, deviation = (
        torch.tensor(prepared.get(name, _MEAN_AND_STD))[:, None, None] for name in ("image_mean", "image_std")
    )
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)
    values: Tensor = ((pixels.float() / 255 - mean) / deviation)[None]
    png = io.BytesIO()
    picture.save(png, "PNG")
    return values, png.getvalue(), (height // tall, width // wide)


def _pair_of(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _of_function(file: Path, name: str, given: Sequence[str | Path]) -> ModelRun:
    """Inspect the model that a function returns with its inputs and optionally its tokens."""
    if not file.is_file():
        raise rejected("look", "MODEL", "be a folder or FILE.py:FUNCTION", f"{file}, which does not exist")
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))  # as python FILE.py does
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise rejected("look", "MODEL", f"name a function in {file.name}", repr(name))
    answer = function(*given)
    if not isinstance(answer, tuple) or not 2 <= len(answer) <= 3 or not isinstance(answer[0], nn.Module):
        expected = "return a module, its inputs and optionally its tokens"
        raise rejected("look", f"{file.name}:{name}", expected, type(answer).__name__)
    model, inputs, *tokens = answer
    texts: tuple[Text, ...] = ()
    if tokens:
        one = all(isinstance(each, str) for each in tokens[0]) or isinstance(tokens[0], Text)
        texts = tuple(each if isinstance(each, Text) else Text(tuple(each)) for each in (tokens if one else tokens[0]))
    if isinstance(inputs, Mapping):
        return ModelRun(model, lambda: model(**inputs), texts, name)
    several = isinstance(inputs, tuple | list)
    return ModelRun(model, lambda: model(*(inputs if several else (inputs,))), texts, name)


# The command ----------------------------------------------------------------------------------------------------------


#: The most heads in the entropy table.
_SHOWN = 16


def run(
    path: str,
    *,
    text: str | None,
    images: Sequence[Path],
    target: str | None,
    layer: str | None,
    head: int | None,
    plot: Path | None,
    scale: str | None,
    compare: Path | None,
    audio: Path | None,
    video: Path | None,
    html: Path | None,
    out: Path | None,
    browser: bool,
    recurrences: bool,
) -> None:
    """Print the attention entropy of each head, draw a head or a layer's mean, or open the inspector."""
    with report_errors("regard-lab[hf]"):
        require_writable(html, out, picture=plot)
        if scale is not None and scale not in SCALES:
            raise unknown_name("look", "--scale", scale, SCALES)
        if head is not None and layer is None:
            raise ValueError("look: --head requires --layer.")
        other = None if compare is None else Record.load(compare)
        shown = model_run(path, text, images, target, audio, video)
        with capture(shown.model, layers=shown.layers, recurrences=recurrences) as record, torch.no_grad():
            record.names = {key: shown.names.get(name, name) for key, name in record.names.items()}
            shown.run()
        if not len(record):
            raise rejected("look", "MODEL", "be a model with attention", type(shown.model).__name__)
        record.describe(*shown.texts, title=shown.title)
        chosen = _alignment(record, layer, head) if layer is not None or plot is not None else None
        if chosen is None:
            _print_entropies(record)
            _print_patterns(record)
        else:
            used = chosen.scale_or(scale)
            echo(draw(chosen, ascii_only=ascii_only(), scale=used))
            echo(f"\n{legend(ascii_only=ascii_only(), scale=used)}; {chosen.title}")
            if layer is not None and head is not None:
                if record[layer].kind == "linear":
                    echo("Heads of recurrences cannot be removed.")
                else:
                    effect = shown.without_head(record[layer].name, head)
                    echo(effect.text[0].upper() + effect.text[1:] + ".")
        if other is not None:
            _print_comparison(record, other)
    with report_errors("regard-lab"):
        if plot is not None and chosen is not None:
            save_plot([chosen], plot, scale=scale)
            note(f"regard: wrote {plot}")
        if html is not None:
            record.to_html(html)
            note(f"regard: wrote {html}")
        if out is not None:
            record.save(out)
            note(f"regard: wrote {out}; open it with: regard view {out}")
        if browser:
            serve([record], browser=True, without=shown.without_head)


def _alignment(record: Record, layer: str | None, head: int | None) -> Alignment:
    """Return the attention of a head, or a layer's mean over heads; by default the layer with the lowest entropy."""
    run = min(record, key=lambda each: float(each.entropy().mean())) if layer is None else record[layer]
    if head is not None and not 0 <= head < run.shape[1]:
        raise rejected("look", "--head", f"be below {run.shape[1]}, the number of heads", head)
    weights: Tensor = run.weights(batch=0).mean(0) if head is None else run.weights(batch=0, head=head)
    which = "mean of its heads" if head is None else f"head {head}"
    if head is not None:
        summary = summarize_heads(record, layers=[run.name])[head]
        which += f": {summary.text}" if summary.label else ""
    queries, keys = texts_of(record.texts, run)
    place = labels_of(record.named())[record.layers.index(run.name)].text
    return Alignment(
        keys.tokens, queries.tokens, weights.clamp(0, 1), f"{place} ({run.name}), {which}",
        visible=visible_counts(run, 0),
    )  # fmt: skip


def _print_entropies(record: Record) -> None:
    """Print the attention entropy of each head."""
    heads = max(run.shape[1] for run in record)
    tokens = " and ".join(str(len(each.tokens)) for each in record.texts) or str(next(iter(record)).shape[3])
    echo(f"{len(record)} layers of {heads} heads, {tokens} tokens; attention entropy in nats, mean over queries")
    more = "  ..." if heads > _SHOWN else ""
    wide = max(map(len, ("layer", *record.labels)))
    echo(f"{'layer':>{wide}}" + "".join(f"{f'h{i}':>5}" for i in range(min(heads, _SHOWN))) + more)
    for label, run in zip(record.labels, record):
        entropies = run.entropy().mean((0, 2)).tolist()[:_SHOWN]
        cells = "".join(f"{each:5.2f}" for each in entropies)
        echo(f"{label:>{wide}}{cells:<{5 * min(heads, _SHOWN)}}{' ' * len(more)}  {run.name}".rstrip())
    echo("\nLow entropy means sharp attention.")


def _print_comparison(record: Record, other: Record) -> None:
    """Print how differently each token that two records have attends, and where most."""
    layers, labels = compare_tokens(record, other), dict(zip(record.layers, record.labels))
    echo(f"\nHow differently tokens attend than in {other.title or 'the other record'!r}: 0 alike, 1 to other tokens")
    for queries in dict.fromkeys((each.tokens, each.places) for each in layers):
        same = [each for each in layers if (each.tokens, each.places) == queries]
        for i, token in enumerate(queries[0]):
            most = max(same, key=lambda each: float(each.distance[:, i].max()))
            distance = torch.cat([each.distance[:, i] for each in same])
            (here, one), (there, two) = most.largest[i]
            place = f"layer {labels[most.names[0]]} head {int(most.distance[:, i].argmax())}"
            echo(
                f"{clipped(token, 16):>16} {float(distance.mean()):5.2f}  most at {place} "
                f"({float(distance.max()):.2f}): {here!r} {one:.2f}, there {there!r} {two:.2f}"
            )


def _print_patterns(record: Record) -> None:
    """Print, for each pattern that some head has, how many have it and which one shows it best."""
    found, labels = [each for each in summarize_heads(record) if each.label], dict(zip(record.layers, record.labels))
    if found:
        echo("\nWhat heads do on this text:")
    for label in dict.fromkeys(each.label for each in found):
        same = sorted((each for each in found if each.label == label), key=lambda each: -each.score)
        best = same[0]
        count = "1 head" if len(same) == 1 else f"{len(same)} heads, best"
        echo(f"{label:>12}  {count}: layer {labels[best.layer]} head {best.head} {best.text}")
    echo("\n-b opens the inspector in the browser, --html FILE saves it as a page, --out FILE saves the record;")
    first = record.labels[0] if record.labels[0].isdecimal() else f'"{record.labels[0]}"'
    echo(f"--layer {first} --head 0 draws a head here, --plot FILE draws it to a file. --layer also takes names.")
