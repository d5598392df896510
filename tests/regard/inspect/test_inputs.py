"""What each token of a model's inputs is; its part of an image is checked by changing the image there."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.helpers.vision_language import FAMILIES, family, tokenizer_of
from torch import Tensor, nn

from regard.inspect import Patches, Record, Text, capture, input_texts
from regard.inspect._record.inputs import _boxes as boxes_of

#: Modules that let patches of a vision tower mix; the ends of their names.
MIXING = ("attn.proj", "out_proj", "o_proj", "fc2", "linear_fc2", "down_proj", "projection_layer")
#: Pixels by which resizing may spread a change, at the sizes used here.
SPREAD = 5


def sized(*shapes: tuple[int, int]) -> list[np.ndarray]:
    """Return random images of these heights and widths."""
    drawn = np.random.default_rng(0)
    return [drawn.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes]


def read(processor: Any, images: list[np.ndarray], **options: Any) -> dict[str, Any]:
    marks = "b".join([processor.image_token] * len(images))
    made = processor(text=[f"a{marks} cat?"], images=[images], return_tensors="pt", **options)
    return {name: each for name, each in made.items() if name != "labels"}


def without_mixing(model: nn.Module) -> nn.Module:
    """Make every layer of the vision tower add nothing, so that a token depends on its own pixels alone."""
    towers = [each for name, each in model.named_modules() if name.rpartition(".")[2].startswith(("vis", "vision"))]
    for name, module in towers[0].named_modules():
        if name.endswith(MIXING) and "merger" not in name and isinstance(module, nn.Linear):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
    return model


def seen(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return what the language model is given for each token, or attends to (S, C)."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        crossed = given.get("cross_attention_states")
        found.append((given["inputs_embeds"] if crossed is None else crossed).flatten(0, 1))

    handle = model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return found[0]


def changed_tokens(model: Any, processor: Any, images: list[np.ndarray], before: Tensor) -> set[int]:
    after = seen(model, read(processor, images))
    return set(((after - before).abs().amax(1) > 1e-5).nonzero().flatten().tolist())


def rectangles(text: Text, image: int) -> Iterator[tuple[int, float, float, float, float]]:
    for patches in text.patches:
        if patches.name == f"image {image + 1}":
            for place in patches.places():
                yield place.token, place.x, place.y, place.x + place.width, place.y + place.height


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_has_the_place_of_the_pixels_that_change_it(name: str) -> None:
    model, processor = family(name)
    without_mixing(model)
    images = sized((45, 60), (70, 30))
    inputs = read(processor, images)
    text = input_texts(model, processor, inputs, images=images)[0]
    before = seen(model, inputs)
    for image, (x, y) in ((0, (3, 2)), (0, (25, 20)), (0, (50, 38)), (1, (10, 30)), (1, (20, 60))):
        side, other = 4, [each.copy() for each in images]
        other[image][y : y + side, x : x + side] ^= 255
        changed = changed_tokens(model, processor, other, before)
        near, within = set(), set()
        for token, left, top, right, bottom in rectangles(text, image):
            if x - SPREAD < right and left < x + side + SPREAD and y - SPREAD < bottom and top < y + side + SPREAD:
                near.add(token)
            if left <= x + 1 and x + side - 1 <= right and top <= y + 1 and y + side - 1 <= bottom:
                within.add(token)
        assert within <= changed <= near, (name, image, x, y)
        cropped = name.startswith("llava")
        assert changed or (cropped and not near), (name, image, x, y)


@pytest.mark.parametrize("name", FAMILIES)
def test_words_and_patches_of_a_record(name: str, tmp_path: Path) -> None:
    model, processor = family(name)
    images = sized((45, 60), (70, 30))
    inputs = read(processor, images)
    decoder = [each for each, module in model.named_modules() if module is model.get_decoder()]
    with capture(model, layers=decoder) as record, torch.no_grad():
        model(**inputs)
    assert record.coverage.complete
    record.describe(*input_texts(model, processor, inputs, images=images, names=["a.jpg"]))
    page = str(record.to_html())
    texts = json.loads(re.search(r'id="page">(.*?)</script>', page, re.DOTALL)[1])["texts"]  # type: ignore[index]
    (shown,) = [each for each in texts if "places" in each]
    assert [(each["name"], each["width"], each["height"]) for each in shown["images"]] == [
        ("a.jpg", 60, 45), ("image 2", 30, 70),
    ]  # fmt: skip
    assert len(shown["places"]) == len(shown["tokens"])
    for token, place in zip(shown["tokens"], shown["places"]):
        if place is None:
            assert not re.fullmatch(r".* \d+,\d+", token)
        else:
            assert token.startswith(shown["images"][place["image"]]["name"])
            width, height = (shown["images"][place["image"]][side] for side in ("width", "height"))
            assert place["x"] + place["width"] <= width + 0.01 and place["y"] + place["height"] <= height + 0.01
    again = Record.load(record.save(tmp_path / "both.regard"))
    assert again.texts == record.texts


def test_the_whole_image_is_covered_once_by_a_level_of_tiles() -> None:
    model, processor = family("internvl")
    images = sized((45, 60))
    (text,) = input_texts(model, processor, read(processor, images), images=images)
    whole, *_ = [each for each in text.patches if each.box is None]
    tiles = [each for each in text.patches if each.box is not None]
    assert len(tiles) == 6 and whole.first > tiles[-1].first
    area = sum(place.width * place.height for each in tiles for place in each.places())
    assert area == pytest.approx(60 * 45, rel=0.01)


def test_crops_of_options() -> None:
    """Gemma 3 reads an image and crops of it if the processor is asked to."""
    model, processor = family("gemma3")
    images, options = sized((40, 80)), {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    inputs = read(processor, images, **options)
    (text,) = input_texts(model, processor, inputs, images=images, options=options)
    boxes = [each.box for each in text.patches]
    assert boxes[0] is None and [tuple(round(each) for each in box) for box in boxes[1:]] == [
        (0, 0, 40, 40), (40, 0, 40, 40),
    ]  # fmt: skip
    expected = "images must be cut into the 3 tiles that the model read, by the same processor and options, got 1"
    with pytest.raises(ValueError, match=expected):
        input_texts(model, processor, inputs, images=images)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_frames_of_a_video(name: str) -> None:
    """Two frames make one step of time; each step shows its first frame."""
    model, processor = family(name)
    frames, (rows, cols) = sized(*[(16, 24)] * 4), (2, 3)
    patches = processor.image_processor(images=frames, return_tensors="pt")
    assert patches["image_grid_thw"].tolist() == [[1, 4, 6]] * 4
    pixels = patches["pixel_values"].view(4, 24, 3, 2, 4, 4)[:, :, :, 0]  # frames are repeated in time
    joined = torch.stack((pixels[::2], pixels[1::2]), 3).reshape(2 * 24, -1)
    mark, start, end = (
        model.config.video_token_id,
        model.config.vision_start_token_id,
        model.config.vision_end_token_id,
    )
    step = [start, *[mark] * rows * cols, end]
    ids = [[40, *step, 41, *step, 42]] if name == "qwen3_vl" else [[40, start, *[mark] * 2 * rows * cols, end, 42]]
    inputs = {
        "input_ids": torch.tensor(ids), "pixel_values_videos": joined, "video_grid_thw": torch.tensor([[2, 4, 6]]),
        "mm_token_type_ids": torch.tensor([[2 if each == mark else 0 for each in ids[0]]]),
    }  # fmt: skip
    if name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([0.5])
    (text,) = input_texts(model, processor, inputs, videos=[frames])
    assert [each.name for each in text.patches] == ["video 1, frame 1", "video 1, frame 3"]
    assert [each.seconds for each in text.patches] == ([0.0, 0.5] if name == "qwen2_5_vl" else [None, None])
    without_mixing(model)
    before = seen(model, inputs)
    joined.view(2, 24, -1)[1, -1] += 1.0  # the last patch of the second step
    changed = set(((seen(model, inputs) - before).abs().amax(1) > 1e-5).nonzero().flatten().tolist())
    assert changed == {text.patches[1].end - 1}
    with pytest.raises(ValueError, match=r"video 1 must have the 4 frames that the model read, got 2"):
        input_texts(model, processor, inputs, videos=[frames[:2]])
    with pytest.raises(ValueError, match=r"videos must be the 1 that the model read, got 0"):
        input_texts(model, processor, inputs)


def test_the_tiles_of_a_photo_to_half_a_pixel() -> None:
    """InternVL's own sizes: tiles of 448 pixels, as many as fit the shape, and the whole image at the end."""
    _, processor = family("internvl")
    processor.image_processor.size = {"height": 448, "width": 448}
    height, width = 700, 1003
    boxes = list(boxes_of(processor, sized((height, width))[0], {}))
    rows, cols = 2, 3
    assert len(boxes) == rows * cols + 1 and boxes[-1] == (0, 0, 1, 1)
    for i, box in enumerate(boxes[:-1]):
        assert box is not None
        row, col = divmod(i, cols)
        exact = (col * width / cols, row * height / rows, width / cols, height / rows)
        scaled = (box[0] * width, box[1] * height, box[2] * width, box[3] * height)
        assert scaled == pytest.approx(exact, abs=0.5), i


def test_inputs_that_do_not_match() -> None:
    images = sized((45, 60), (70, 30))
    for name, message in (
        ("qwen3_vl", "images must be the 2 that the model read, got 1"),
        (
            "llava",
            "images must be cut into the 2 tiles that the model read, by the same processor and options, got 1 im",
        ),
        ("mllama", "images must be the 2 that the model read, got 1"),
    ):
        model, processor = family(name)
        with pytest.raises(ValueError, match=re.escape(message)):
            input_texts(model, processor, read(processor, images), images=images[:1])
    model, processor = family("llava")
    inputs = read(processor, images)
    with pytest.raises(ValueError, match=r"hold input_ids of one text as a tensor \(1, L\), got \(2, 39\)"):
        input_texts(model, processor, inputs | {"input_ids": inputs["input_ids"].repeat(2, 1)}, images=images)
    with pytest.raises(ValueError, match=r"images must be PIL images or arrays \(H, W, 3\) of uint8, got float64"):
        input_texts(model, processor, inputs, images=[each / 255 for each in images])
    with pytest.raises(ValueError, match=r"the same number of tokens for each of its 2 tiles .*, got 31 tokens"):
        input_texts(model, processor, inputs | {"input_ids": inputs["input_ids"][:, 2:]}, images=images)
    for part, kind in ((None, "NoneType"), (processor.image_processor, "CLIPImageProcessorPil")):
        expected = (
            f"processor must be the processor that made the inputs, with a tokenizer and an image token, got {kind}"
        )
        with pytest.raises(ValueError, match=expected):
            input_texts(model, part, inputs, images=images)
    model.config.model_type = "blip-2"
    expected = r"be of a family with a known layout of image tokens \(name tokens yourself with .*\), got blip-2"
    with pytest.raises(ValueError, match=expected):
        input_texts(model, processor, inputs, images=images)


def test_grids_of_patches() -> None:
    file = io.BytesIO()
    Image.new("RGB", (60, 40)).save(file, "PNG")
    image = file.getvalue()
    spaced = Patches(image, 2, 3, first=1, step=4, box=(-10, 0, 60, 80))
    assert spaced.end == 8
    assert [(each.token, each.x, each.y, each.width, each.height) for each in spaced.places()] == [
        (1, 0, 0, 10, 40), (2, 10, 0, 20, 40), (3, 30, 0, 20, 40),
    ]  # fmt: skip
    text = Text(tuple("abcdefgh"), (0,), spaced, [(i, i + 1) for i in range(8)])
    assert (
        text.last(7).patches[0].first == 0 and text.last(4).patches == () and text.last(2).seconds == ((6, 7), (7, 8))
    )
    for wrong, message in (
        (lambda: Patches(image, 2, 3, step=2), "Patches: step must be at least 3, the number of columns, got 2"),
        (
            lambda: Patches(image, 2, 3, box=(0, 0, 0, 1)),
            "Patches: box must be x, y, width and height, the latter above",
        ),
        (lambda: Text(("a", "b"), seconds=[(0, 1)]), "Text: seconds must be 2, one for each token, got 1"),
        (lambda: list(Patches(image[:20], 1, 1).places()), "be a file with a width and a height, got a damaged one"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            wrong()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}])
def test_the_size_of_an_image_file(kind: str, options: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (301, 77), "red").save(file, kind, **options)
    assert Patches(file.getvalue(), 1, 1).size == (301, 77)


def test_records_of_the_first_kind_of_patches_still_load(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    with capture(layer) as record:
        layer(x, x, x)
    file = io.BytesIO()
    Image.new("RGB", (6, 4)).save(file, "PNG")
    path = record.describe(Text(["a", "b", "c"], (), Patches(file.getvalue(), 1, 2, 1))).save(tmp_path / "new.regard")
    with safe_open(str(path), "pt") as saved:
        about = json.loads(saved.metadata()["regard"])
        tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    tensors["image.0"] = tensors.pop("image.0.0")
    about["texts"][0] = {"tokens": ["a", "b", "c"], "special": [], "patches": [1, 2, 1]}
    save_file(tensors, str(tmp_path / "old.regard"), {"regard": json.dumps(about)})
    assert Record.load(tmp_path / "old.regard").texts == record.texts


def test_seconds_of_a_recording(tmp_path: Path) -> None:
    """An encoder's token stands for two frames of a spectrogram, whose hops are known."""
    sizes = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1}
    sizes |= {"decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 140}
    config = transformers.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=100, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    processor = SimpleNamespace(feature_extractor=extractor, tokenizer=tokenizer_of())
    sound = np.random.default_rng(0).normal(size=2 * 16000).astype(np.float32)
    inputs = dict(extractor(sound, sampling_rate=16000, return_tensors="pt"))
    inputs["decoder_input_ids"] = torch.tensor([[40, 41, 42]])
    with capture(model) as record, torch.no_grad():
        model(**inputs)
    record.describe(*input_texts(model, processor, inputs))
    crossed = next(run for run in record if run.kind == "cross")
    queries, keys = record.texts_of(crossed, 0)
    assert len(keys.tokens) == 100 and keys.seconds[0] == (0.0, 0.02) and keys.seconds[-1][1] == pytest.approx(2.0)
    assert len(queries.tokens) == 3 and queries.seconds == ()
    assert Record.load(record.save(tmp_path / "heard.regard")).texts == record.texts
    # A click in the middle of the recording changes the features of the tokens at that time.
    model.model.encoder.conv1.weight.data.abs_()
    clicked = sound.copy()
    clicked[16000] += 50
    heard = []
    for each in (sound, clicked):
        given = extractor(each, sampling_rate=16000, return_tensors="pt").input_features
        with torch.no_grad():
            heard.append(model.model.encoder.conv2(model.model.encoder.conv1(given))[0])
    loudest = int((heard[0] - heard[1]).abs().sum(0).argmax())
    assert keys.seconds[loudest][0] - 0.02 <= 1.0 <= keys.seconds[loudest][1] + 0.02  # type: ignore[index]


def test_a_model_that_hears_in_another_way() -> None:
    expected = r"model and processor must be of a speech model .*, got Linear and object"
    with pytest.raises(ValueError, match=expected):
        input_texts(nn.Linear(2, 2), object(), {"input_features": torch.zeros(1, 2, 4)})
