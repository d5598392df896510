"""What each token of a model's inputs is: a piece of text, a part of an image or of a frame, or a span of a recording.

Dimensions: N tiles, H and W pixels of a tile, T tokens of a tile, L tokens, S keys.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard.inspect._record.recording import looks_like_attention
from regard.inspect._record.texts import Patches, Text

#: Families whose tokens are the patches of square tiles, row by row, merged or not; with the tiles of an image in the
#: order of their pixels. Each is tested. Other families may resample patches, so that a token has no place.
TILED = ("gemma3", "idefics3", "internvl", "llava", "paligemma")
#: Families whose text attends to the image in cross-attention layers, in tiles with one leading token each.
CROSSED = ("mllama",)
#: The longest side of a kept image in pixels; and the most pixels of one that is kept without loss.
_LONGEST, _LOSSLESS = 1024, 1 << 16
_WAY_OUT = "name tokens yourself with describe(Text(tokens, patches=…))"


@dataclass(frozen=True)
class _Picture:
    """An image that was read, small enough for a page."""

    name: str
    file: bytes
    width: int
    height: int


@dataclass(frozen=True)
class _Grid:
    """Tokens that stand for a grid of patches of an image.

    Attributes
    ----------
    picture : _Picture
    rows, cols : int
    box : tuple of 4 float, optional
        The part of the image that it covers, relative to its width and height; None for the whole.
    lead : int
        Tokens before the first patch that stand for no part of the image.
    seconds : float, optional
        The time of a frame.
    """

    picture: _Picture
    rows: int
    cols: int
    box: tuple[float, float, float, float] | None = (0.0, 0.0, 1.0, 1.0)
    lead: int = 0
    seconds: float | None = None

    @property
    def count(self) -> int:
        return self.lead + self.rows * self.cols


def input_texts(
    model: nn.Module, processor: Any, inputs: Mapping[str, Any], *, images: Sequence[Any] = (),
    videos: Sequence[Sequence[Any]] = (), names: Sequence[str] = (), options: Mapping[str, Any] | None = None,
) -> tuple[Text, ...]:  # fmt: skip
    """Return what each token of a transformers model's inputs is, for :meth:`Record.describe`.

    An image token gets the rectangle of the image that its patch shows. Where an image is cut into tiles, cropped or
    padded, the rectangles are found by passing images of known coordinates through the same processor, not by repeating
    its arithmetic. So they hold for any size, crop and number of tiles.

    Parameters
    ----------
    model : Module
        A vision–language or speech model of transformers: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and others with
        ``image_grid_thw``; LLaVA, InternVL, Gemma 3, PaliGemma, Idefics 3; Mllama; Whisper, Speech2Text, Moonshine,
        wav2vec 2.0, HuBERT, WavLM and others whose tokens follow from convolutions over time.
    processor : transformers.ProcessorMixin
        The processor that made ``inputs``.
    inputs : mapping
        What the processor returned for one text, as tensors.
    images : sequence of PIL.Image.Image or ndarray (H, W, 3) of uint8
        The images, in the order of the text.
    videos : sequence of sequences of the same
        The frames of each video, as many as the model read.
    names : sequence of str
        The names of the images, and then of the videos.
    options : mapping, optional
        Keyword arguments that the processor was called with besides texts and images, such as ``do_pan_and_scan``.

    Returns
    -------
    tuple of Text
        One; or what is attended to and the text, for models with cross-attention.

    Raises
    ------
    ValueError
        If images and tokens do not match, or the family's layout is unknown.

    Examples
    --------
    >>> import torch
    >>> from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperModel
    >>> from regard.inspect import input_texts
    >>> sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    >>> model = WhisperModel(WhisperConfig(**sizes, decoder_attention_heads=2, vocab_size=60, pad_token_id=0))
    >>> (heard,) = input_texts(model, WhisperFeatureExtractor(), {"input_features": torch.zeros(1, 80, 3000)})
    >>> len(heard.tokens), heard.tokens[50], heard.seconds[1]
    (1500, '1.00 s', (0.02, 0.04))
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    if ("input_features" in inputs or "input_values" in inputs) and "input_ids" not in inputs:
        return _recorded(model, processor, inputs)
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise rejected("input_texts", "inputs", "hold input_ids of one text as a tensor (1, L)", got)
    if getattr(processor, "tokenizer", None) is None or (images and not hasattr(processor, "image_token")):
        expected = "be the processor that made the inputs, with a tokenizer and an image token"
        raise rejected("input_texts", "processor", expected, type(processor).__name__)
    names = [*names, *(f"image {i + 1}" for i in range(len(names), len(images)))]
    names += [f"video {i - len(images) + 1}" for i in range(len(names), len(images) + len(videos))]
    pictures = [_picture(each, name) for each, name in zip(images, names)]
    if model_type in CROSSED:
        return _crossed(model, processor, inputs, images, pictures, options or {})
    grids = list(_images(model, model_type, processor, inputs, images, pictures, options or {}))
    found = _placed(ids[0], _mark(model, "image"), grids, "images")
    frames = list(_frames(model, inputs, videos, names[len(images) :]))
    found += _placed(ids[0], _mark(model, "video"), frames, "videos")
    return (_text(processor, ids[0], found),)


def _text(processor: Any, ids: Tensor, found: list[Patches]) -> Text:
    """Return a text with its tokens; those with a place are named after it."""
    tokenizer = processor.tokenizer
    tokens = [_spelled(each) for each in tokenizer.convert_ids_to_tokens(ids.tolist())]
    special = {at for at, each in enumerate(ids.tolist()) if each in set(tokenizer.all_special_ids)}
    for at, name in _cells(found):
        tokens[at] = name
        special.discard(at)
    return Text(tokens, sorted(special), found)


def _cells(found: Sequence[Patches]) -> Iterator[tuple[int, str]]:
    """Yield the position and name of each token that has a place."""
    alone = len(found) == 1
    for patches in found:
        for place in patches.places():
            row, col = divmod(place.token - patches.first, patches.step or patches.cols)
            yield place.token, f"{'patch' if alone else patches.name} {row},{col}"


def _spelled(token: str | None) -> str:
    """Return a token with its space marker replaced by a space."""
    token = token or ""
    return f" {token[1:]}" if token[:1] in ("▁", "Ġ") else token


def _mark(model: Any, kind: str) -> int | None:
    """Return the id of the tokens that stand for an image or a video; None if the model has none."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if (found := getattr(model.config, name, None)) is not None:
            return int(found)
    return None


def _placed(ids: Tensor, mark: int | None, grids: Sequence[_Grid], kind: str) -> list[Patches]:
    """Give grids the tokens that stand for them, in order."""
    at = [] if mark is None else (ids == mark).nonzero().flatten().tolist()
    count = sum(each.count for each in grids)
    if len(at) != count:
        expected = f"match the text, whose {len(at)} tokens stand for {kind}"
        raise rejected("input_texts", kind, expected, f"{len(grids)} grids of {count} patches")
    found = []
    for grid in grids:
        own, at = at[: grid.count], at[grid.count :]
        if own[-1] - own[0] != len(own) - 1:
            raise rejected("input_texts", kind, f"have their tokens side by side ({_WAY_OUT})", "other tokens between")
        found += _patches(grid, own[0])
    return found


def _patches(grid: _Grid, first: int) -> list[Patches]:
    """Return a grid at a token; none if the grid is all padding."""
    if grid.box is None:
        return []
    width, height = grid.picture.width, grid.picture.height
    box = None
    if grid.box != (0.0, 0.0, 1.0, 1.0):
        box = (grid.box[0] * width, grid.box[1] * height, grid.box[2] * width, grid.box[3] * height)
    first += grid.lead
    made = Patches(grid.picture.file, grid.rows, grid.cols, first, None, box, grid.picture.name, grid.seconds)
    return [made] if any(True for _ in made.places()) else []


# Images: whole ones, whose grid is part of the inputs; and tiles ------------------------------------------------------


def _images(
    model: Any, model_type: str, processor: Any, inputs: Mapping[str, Any], images: Sequence[Any],
    pictures: Sequence[_Picture], options: Mapping[str, Any],
) -> Iterator[_Grid]:  # fmt: skip
    """Yield the grids of the images."""
    if (packed := inputs.get("image_grid_thw")) is not None:
        if len(packed) != len(images):
            raise rejected("input_texts", "images", f"be the {len(packed)} that the model read", len(images))
        for picture, (_, rows, cols) in zip(pictures, _merged(model, packed)):
            yield _Grid(picture, rows, cols)
        return
    pixels = inputs.get("pixel_values")
    if pixels is None:
        if images:
            raise rejected("input_texts", "images", "be left out for inputs without pixel_values", len(images))
        return
    if model_type not in TILED:
        expected = f"be of a family with a known layout of image tokens ({_WAY_OUT})"
        raise rejected("input_texts", "model", expected, model_type or type(model).__name__)
    N, _, height, width = _flat(pixels).shape
    boxes = [list(_boxes(processor, image, options)) for image in images]
    if (count := sum(map(len, boxes))) != N:
        expected = f"be cut into the {N} tiles that the model read, by the same processor and options"
        raise rejected("input_texts", "images", expected, f"{len(images)} images of {count} tiles")
    tokens = int((inputs["input_ids"] == _mark(model, "image")).sum())
    if N == 0 or tokens % N:
        expected = f"have the same number of tokens for each of its {N} tiles ({_WAY_OUT})"
        raise rejected("input_texts", "model", expected, f"{tokens} tokens")
    rows, cols, lead = _grid_of(model, (height, width), tokens // N)
    for picture, own in zip(pictures, boxes):
        for box in own:
            yield _Grid(picture, rows, cols, box, lead)


def _merged(model: Any, packed: Tensor) -> list[tuple[int, int, int]]:
    """Return the steps, rows and columns of tokens of grids (N, 3) of patches, which are merged in squares."""
    side = int(getattr(model.config.vision_config, "spatial_merge_size", 1))
    return [(int(t), int(rows) // side, int(cols) // side) for t, rows, cols in packed.tolist()]


def _grid_of(model: Any, pixels: tuple[int, int], T: int) -> tuple[int, int, int]:
    """Return the rows and columns of the T tokens of a tile, and how many stand before them."""
    size = model.config.vision_config.patch_size
    tall, wide = (size, size) if isinstance(size, int) else size
    rows, cols = pixels[0] // tall, pixels[1] // wide
    if rows * cols + 1 == T:
        return rows, cols, 1
    side = max(round(math.sqrt(rows * cols / max(T, 1))), 1)  # patches merged along each side
    rows, cols = rows // side, cols // side
    if rows * cols != T:
        expected = f"have one token for each square of patches ({_WAY_OUT})"
        raise rejected("input_texts", "model", expected, f"{T} tokens for {pixels[0] // tall} × {pixels[1] // wide}")
    return rows, cols, 0


def _frames(
    model: Any, inputs: Mapping[str, Any], videos: Sequence[Sequence[Any]], names: Sequence[str]
) -> Iterator[_Grid]:
    """Yield the grids of the videos, one for each step of time, which shows the first of its frames."""
    packed = inputs.get("video_grid_thw")
    if packed is None:
        if videos:
            expected = "be left out for inputs without video_grid_thw (frames that a model reads as images are images)"
            raise rejected("input_texts", "videos", expected, len(videos))
        return
    if len(packed) != len(videos):
        raise rejected("input_texts", "videos", f"be the {len(packed)} that the model read", len(videos))
    each_step = int(getattr(model.config.vision_config, "temporal_patch_size", 1))
    seconds = inputs.get("second_per_grid_ts")
    for number, (video, name, (steps, rows, cols)) in enumerate(zip(videos, names, _merged(model, packed))):
        if -(-len(video) // each_step) != steps:
            expected = f"have the {steps * each_step} frames that the model read"
            raise rejected("input_texts", name, expected, len(video))
        for step in range(steps):
            at = None if seconds is None else float(seconds[number]) * step
            picture = _picture(video[step * each_step], f"{name}, frame {step * each_step + 1}")
            yield _Grid(picture, rows, cols, seconds=at)


def _crossed(
    model: Any, processor: Any, inputs: Mapping[str, Any], images: Sequence[Any], pictures: Sequence[_Picture],
    options: Mapping[str, Any],
) -> tuple[Text, ...]:  # fmt: skip
    """Return the keys of cross-attention, which are tiles with a leading token, and the text."""
    text = _text(processor, inputs["input_ids"][0], [])
    pixels = inputs.get("pixel_values")  # (1, images, tiles, 3, H, W)
    if pixels is None:
        return (text,)
    if pixels.shape[1] != len(images):
        raise rejected("input_texts", "images", f"be the {pixels.shape[1]} that the model read", len(images))
    size = int(model.config.vision_config.patch_size)
    rows, cols = pixels.shape[-2] // size, pixels.shape[-1] // size
    found, at = [], 0
    for image, picture in zip(images, pictures):
        boxes = list(_boxes(processor, image, options))
        if len(boxes) != pixels.shape[2]:
            expected = f"be cut into {pixels.shape[2]} tiles by the same processor and options"
            raise rejected("input_texts", "images", expected, len(boxes))
        for box in boxes:
            grid = _Grid(picture, rows, cols, box, lead=1)
            found += _patches(grid, at)
            at += grid.count
    tokens = ["[padding]"] * at
    for token, name in _cells(found):
        tokens[token] = name
    placed = {token for token, _ in _cells(found)}
    return Text(tokens, [each for each in range(at) if each not in placed], found), text


# Where the tiles of an image are: images of known coordinates pass through the processor ------------------------------


#: Edges closer than this to those of the image are those of the image.
_NEAR = 0.004
#: Coordinates outside this range are near the image's edges, where resizing changes them.
_INNER = 0.02


def _boxes(
    processor: Any, image: Any, options: Mapping[str, Any]
) -> Iterator[tuple[float, float, float, float] | None]:
    """Yield what each tile of an image covers: x, y, width and height relative to the image; None for padding."""
    height, width = _array(image).shape[:2]
    rows, cols = (np.rint(255 * (np.arange(side) + 0.5) / side) for side in (height, width))
    across, down = np.broadcast_arrays(cols[None], rows[:, None])
    coordinates = np.stack((across, down, across), -1).astype(np.uint8)
    black, white = (np.full_like(coordinates, level) for level in (0, 255))
    read = [_tiles(processor, each, options) for each in (coordinates, black, white)]
    for tile, none, full in zip(*read):
        inside = (full - none).abs() > 1e-6
        relative = (tile - none) / torch.where(inside, full - none, 1.0)
        shown = inside.all(0)
        spans = [_span(relative[i], shown, dim) for i, dim in ((0, 1), (1, 0))]
        if spans[0] is None or spans[1] is None:
            yield None
        else:
            yield spans[0][0], spans[1][0], spans[0][1], spans[1][1]


def _tiles(processor: Any, image: np.ndarray, options: Mapping[str, Any]) -> Tensor:
    """Return an image as the tiles (N, 3, H, W) that a processor makes of it."""
    made = processor(text=[processor.image_token], images=[image], return_tensors="pt", **options)
    return _flat(made["pixel_values"])


def _flat(pixels: Tensor) -> Tensor:
    """Return pixels (…, 3, H, W) as tiles (N, 3, H, W)."""
    return pixels.flatten(0, -4).float()


def _span(relative: Tensor, shown: Tensor, dim: int) -> tuple[float, float] | None:
    """Return where a tile begins and how long it is along a dimension, in units of the image; None for padding."""
    counts = shown.sum(1 - dim)
    used = (counts > 0).nonzero().flatten()
    if len(used) < 2:
        return None
    values = (relative * shown).sum(1 - dim)[used] / counts[used]
    inner = (values > _INNER) & (values < 1 - _INNER)
    if int(inner.sum()) > 3:
        used, values = used[inner], values[inner]
    at = torch.stack((torch.ones(len(used)), used + 0.5), 1).double()
    start, slope = torch.linalg.lstsq(at, values.double()[:, None]).solution.flatten().tolist()
    end = start + slope * relative.shape[dim]
    start, end = (next((edge for edge in (0.0, 1.0) if abs(each - edge) < _NEAR), each) for each in (start, end))
    return start, end - start


def _array(image: Any) -> np.ndarray:
    """Return an image as an array (H, W, 3) of uint8."""
    convert = getattr(image, "convert", None)
    array = np.asarray(image if convert is None else convert("RGB"))
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or min(array.shape) < 1:
        got = f"{array.dtype} of shape {array.shape}"
        raise rejected("input_texts", "images", "be PIL images or arrays (H, W, 3) of uint8", got)
    return array


def _picture(image: Any, name: str) -> _Picture:
    """Return an image as a file for a page."""
    from PIL import Image

    made = Image.fromarray(_array(image))
    made.thumbnail((_LONGEST, _LONGEST))
    file = io.BytesIO()
    if made.width * made.height <= _LOSSLESS:
        made.save(file, "PNG")
    else:
        made.save(file, "JPEG", quality=90)
    return _Picture(name, file.getvalue(), made.width, made.height)


# Recordings -----------------------------------------------------------------------------------------------------------


#: How many tokens the length of a recording may differ from: convolutions without padding read less than all of it.
_SHORT = 3


class _ReachedError(Exception):
    """The first attention of a model reads so many positions."""

    def __init__(self, count: int) -> None:
        self.count = count


def _recorded(model: Any, processor: Any, inputs: Mapping[str, Any]) -> tuple[Text, ...]:
    """Return the spans of a recording that an encoder's tokens stand for, and the text that was written."""
    extractor = getattr(processor, "feature_extractor", processor)
    rate = getattr(extractor, "sampling_rate", None)
    if rate is None or not isinstance(model, nn.Module):
        got = f"{type(model).__name__} and {type(processor).__name__}"
        raise rejected("input_texts", "model and processor", f"be of a speech model ({_WAY_OUT})", got)
    if "input_features" in inputs:  # of a spectrogram, whose hops are 10 ms in Kaldi's, which have no such attribute
        frame, given = getattr(extractor, "hop_length", None) or rate // 100, inputs["input_features"]
        frame *= getattr(extractor, "stride", 1)
        length = given.shape[-1 if given.shape[1] == extractor.feature_size else 1]
    else:
        frame, length = 1, inputs["input_values"].shape[-1]
    step, count = frame * _stride(model), _positions(model, inputs)
    if abs(count * step - length * frame) > max(_SHORT * step, frame):
        expected = f"have one token for each {step / rate:.3f} s of a recording ({_WAY_OUT})"
        raise rejected("input_texts", "model", expected, f"{count} tokens for {length * frame / rate:.2f} s")
    spans = [(i * step / rate, (i + 1) * step / rate) for i in range(count)]
    heard = Text([f"{start:.2f} s" for start, _ in spans], seconds=spans)
    written = inputs.get("decoder_input_ids")
    return (heard,) if written is None else (heard, _text(processor, written[0], []))


def _stride(model: nn.Module) -> int:
    """Return how many frames a token stands for: the product of the strides of the encoder's convolutions."""
    found = 1
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d) and not re.search(r"decoder|adapter|vocoder", name):
            found *= module.stride[0]
    return found


@torch.no_grad()
def _positions(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return how many positions the first attention reads; the model stops there."""

    def stop(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        for each in (*given, *named.values()):
            if isinstance(each, Tensor) and each.dim() == 3:
                raise _ReachedError(each.shape[1])

    hooks = [
        module.register_forward_pre_hook(stop, with_kwargs=True)
        for name, module in model.named_modules() if looks_like_attention(module, name)
    ]  # fmt: skip
    try:
        model(**inputs)
    except _ReachedError as reached:
        return reached.count
    finally:
        for hook in hooks:
            hook.remove()
    raise rejected("input_texts", "model", f"attend to a recording ({_WAY_OUT})", type(model).__name__)
