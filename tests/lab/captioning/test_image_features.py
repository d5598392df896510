"""Encoders of images, and features on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from small_images import draw
from torch import Tensor

from regard_lab.data.images import ImageFileError, open_images, resize_image
from regard_lab.models.efficientnet import EfficientNetLite, read_efficientnet, stages
from regard_lab.models.folders import ModelFileError
from regard_lab.tasks.captioning.encoders import (
    ConvolutionalEncoder,
    EfficientNetEncoder,
    Features,
    HuggingFaceEncoder,
    build_encoder,
    efficientnet_file,
    open_encoder,
    write_features,
)

WEIGHTS = [efficientnet_file(f"efficientnet-lite{number}") for number in range(3)]


def as_published(images: Tensor, number: int) -> Tensor:
    """Return the features by torch's own batch norms, and convolutions of images padded beforehand, in float64."""
    state = {name: tensor.double() for name, tensor in torch.load(WEIGHTS[number], weights_only=True).items()}

    def norm(x: Tensor, name: str) -> Tensor:
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts, eps=1e-3)

    def conv(x: Tensor, name: str, stride: int = 1, groups: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        pad = [max((-(-size // stride) - 1) * stride + weight.shape[-1] - size, 0) for size in x.shape[:1:-1]]
        x = F.pad(x, [each for total in pad for each in (total // 2, total - total // 2)])
        return F.conv2d(x, weight, None, stride, groups=groups)

    x = F.relu6(norm(conv((images.double() - 127) / 128, "_conv_stem", 2), "_bn0"))
    block = 0
    for count, _, stride, expansion, _ in stages(number):
        for repeat in range(count):
            place, y = f"_blocks.{block}.", x
            if expansion > 1:
                y = F.relu6(norm(conv(y, f"{place}_expand_conv"), f"{place}_bn0"))
            y = conv(y, f"{place}_depthwise_conv", 1 if repeat else stride, y.shape[1])
            y = norm(conv(F.relu6(norm(y, f"{place}_bn1")), f"{place}_project_conv"), f"{place}_bn2")
            x, block = (x + y if repeat else y), block + 1
    return F.relu6(norm(conv(x, "_conv_head"), "_bn1"))


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("size", [(64, 64), (65, 97)])
def test_the_network_is_the_published_one(size: tuple[int, int], number: int) -> None:
    images = torch.randint(0, 256, (2, 3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        wanted, wide = as_published(images, number), EfficientNetLite(number).double()
        wide.load_unfolded(torch.load(WEIGHTS[number], weights_only=True))
        torch.testing.assert_close(wide(images), wanted)
        error = (read_efficientnet(WEIGHTS[number], number)(images).double() - wanted).abs().max()
    assert float(error) < 200 * torch.finfo(torch.float32).eps * 6, "some 50 layers in float32, of numbers up to 6"


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run"),)

    path = tmp_path / "some.pth"
    torch.save(Evil(), path)
    with pytest.raises(
        ModelFileError, match=r"some\.pth must be a file of EfficientNet-Lite0's parameters, got Unpick"
    ):
        read_efficientnet(path)
    assert not (tmp_path / "run").exists(), "no code of it is run"
    for state, got in (({}, "_conv_stem.weight"), ({"_conv_stem.weight": torch.zeros(2)}, "of shape"), ([1], "list")):
        torch.save(state, path)
        with pytest.raises(ModelFileError, match=f"must hold EfficientNet-Lite0's parameters, got others .*{got}"):
            read_efficientnet(path)
    path.write_bytes(WEIGHTS[0].read_bytes()[:5000])
    with pytest.raises(ModelFileError, match="must be a file of EfficientNet-Lite0's parameters"):
        read_efficientnet(path)
    with pytest.raises(ModelFileError, match=r"must hold EfficientNet-Lite2's parameters, got others .*of shape"):
        read_efficientnet(WEIGHTS[1], 2)


@pytest.mark.slow
def test_encoders_by_name() -> None:
    pixels = torch.randint(0, 256, (1, 64, 64, 3), dtype=torch.uint8)
    for encoder in (open_encoder("cnn"), open_encoder("efficientnet-lite0", 64), open_encoder("efficientnet-lite2")):
        square = pixels if encoder.side == 64 else pixels.repeat(1, 5, 5, 1)[:, : encoder.side, : encoder.side]
        assert encoder(square).shape == (1, encoder.rows * encoder.cols, encoder.width)
        again = build_encoder(encoder.config, Path("config.json"))
        again.load_state_dict(encoder.state_dict())
        assert again.checksum() == encoder.checksum()
    assert [open_encoder(f"efficientnet-lite{number}").rows for number in range(3)] == [7, 8, 9]
    with pytest.raises(ValueError, match=r"data\.side must be from 32 to 2048, got 9"):
        open_encoder("cnn", 9)
    with pytest.raises(
        ModelFileError, match=r"encoder must be 'efficientnet-lite0', .*, 'cnn', or the folder of a vision"
    ):
        open_encoder("resnet")
    for config in (None, {"kind": "vgg"}, {"kind": "cnn", "side": 1 << 40}, {"kind": "hugging-face", "config": {}}):
        with pytest.raises(ModelFileError, match=r"config\.json must describe an encoder of images, got "):
            build_encoder(config, Path("config.json"))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=48, patch_size=16
    )
    ViTModel(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 48, "width": 48}, image_mean=[0.4] * 3, image_std=[0.3] * 3).save_pretrained(
        folder
    )
    return folder


def test_a_folder_of_hugging_face(vit: Path, tmp_path: Path) -> None:
    from transformers import ViTModel

    encoder = open_encoder(str(vit))
    assert isinstance(encoder, HuggingFaceEncoder)
    assert (encoder.rows, encoder.cols, encoder.width, encoder.side) == (3, 3, 16, 48)
    pixels = torch.randint(0, 256, (2, 48, 48, 3), dtype=torch.uint8)
    with torch.no_grad():
        whole = ViTModel.from_pretrained(vit)((pixels.permute(0, 3, 1, 2) / 255 - 0.4) / 0.3).last_hidden_state
        torch.testing.assert_close(encoder(pixels), whole[:, 1:])
    again = build_encoder(encoder.config, Path("config.json"))
    again.load_state_dict(encoder.state_dict())
    assert again.checksum() == encoder.checksum()
    with pytest.raises(ValueError, match=r"data\.side must be left out for a folder"):
        open_encoder(str(vit), 64)
    with pytest.raises(ModelFileError, match=r"preprocessor_config\.json must exist"):
        open_encoder(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 9, "width": 8}}')
    with pytest.raises(ModelFileError, match="must describe squares of colour, up to 2048 pixels, got 9 × 8 × 3"):
        open_encoder(str(tmp_path))


def test_features_come_back_as_they_were_made(tmp_path: Path) -> None:
    draw(tmp_path / "images", 1)
    (tmp_path / "images" / "bad.png").write_bytes(b"no image")
    torch.manual_seed(0)
    encoder, told, done = ConvolutionalEncoder(), [], []
    with open_images(tmp_path / "images") as images:
        bad = write_features(
            tmp_path / "some.features", images, images.names, encoder, say=told.append,
            progress=lambda count, of: done.append((count, of)),
        )  # fmt: skip
        features = Features.load(tmp_path / "some.features", encoder)
        assert features.bad == ("bad.png",) == tuple(bad)
        (line,) = told
        assert line.startswith("skipped: bad.png must be an image (JPEG, PNG, ")
        assert done[-1] == (7, 7)
        # In one batch, as they were made: alone, an image is summed up in another order.
        pixels = torch.stack([torch.from_numpy(resize_image(images.read(name), 64)) for name in features.names])
        with torch.no_grad():
            np.testing.assert_array_equal(features.values, encoder(pixels).half().numpy())
    assert isinstance(features.values, np.memmap)
    assert len(set(features.marks)) == 6
    with safe_open(tmp_path / "some.features", "pt") as others:  # as any program reads it
        assert torch.equal(others.get_tensor("features"), torch.from_numpy(np.array(features.values)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "some.features"]


def test_features_of_another_encoder_are_told(tmp_path: Path) -> None:
    draw(tmp_path / "images", 1)
    torch.manual_seed(0)
    encoder, other = ConvolutionalEncoder(), ConvolutionalEncoder()
    path = tmp_path / "some.features"
    with open_images(tmp_path / "images") as images:
        write_features(path, images, images.names, encoder)
    for each in (other, EfficientNetEncoder("efficientnet-lite0", 64)):
        with pytest.raises(
            ModelFileError, match=r"some\.features must have features of this encoder, .*, got another one"
        ):
            Features.load(path, each)
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(ModelFileError, match=r"some\.features must be a complete safetensors file"):
        Features.load(path, encoder)
    path.write_bytes(b"\x80\x02pickle")
    with pytest.raises(ModelFileError, match="could run code and is never loaded"):
        Features.load(path, encoder)


def test_nothing_is_left_half_written(tmp_path: Path) -> None:
    draw(tmp_path / "images", 1)
    encoder = ConvolutionalEncoder()
    path = tmp_path / "some.features"
    with open_images(tmp_path / "images") as images:

        def interrupt(done: int, of: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_features(path, images, images.names, encoder, progress=interrupt)
        assert [each.name for each in tmp_path.iterdir()] == ["images"]
        for name in images.names:
            (tmp_path / "images" / name).write_bytes(b"")
        with pytest.raises(ImageFileError, match=r"train: none of the 6 images in .*images can be read"):
            write_features(path, images, images.names, encoder, say=lambda _: None)
        assert [each.name for each in tmp_path.iterdir()] == ["images"]
