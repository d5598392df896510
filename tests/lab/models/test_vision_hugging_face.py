"""Folders of ViT and DeiT: transformers' numbers to rounding, and folders that transformers reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard_lab.data.images import PREPROCESSOR, Preprocessing
from regard_lab.models import (
    ImageClassifier,
    ResNet,
    ResNetConfig,
    VisionTransformer,
    VisionTransformerConfig,
    load,
    save,
)
from regard_lab.models.folders import ModelFileError

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
SIZES |= {"image_size": 12, "patch_size": 4, "initializer_range": 0.4}


def theirs(name: str, kind: str, folder: Path, **changes: Any) -> Any:
    """Return a random model of transformers' whose numbers are of the order of one, saved to a folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes, id2label={0: "a", 1: "b", 2: "c"})
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    model.save_pretrained(folder)
    return model


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Two float32 models that add in other orders differ by some roundings of the largest number."""
    assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(min=1)


CASES = [
    ("ViTModel", "ViT", {}),
    ("ViTForImageClassification", "ViT", {"qkv_bias": False, "num_channels": 1, "hidden_act": "gelu_new"}),
    ("DeiTModel", "DeiT", {"image_size": [12, 12]}),
    ("DeiTForImageClassification", "DeiT", {}),
    ("DeiTForImageClassificationWithTeacher", "DeiT", {}),
]


@pytest.mark.parametrize(("name", "kind", "changes"), CASES)
@torch.no_grad()
def test_numbers_are_those_of_transformers_and_folders_go_back(
    name: str, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    expected = theirs(name, kind, tmp_path / "theirs", **changes)
    model: Any = load(tmp_path / "theirs")
    images = torch.randn(2, changes.get("num_channels", 3), 12, 12)
    larger = torch.randn(2, changes.get("num_channels", 3), 20, 16)  # their positions are interpolated

    def check(found: Any, reference: Any) -> None:
        for given in (images, larger):
            told = reference(given, interpolate_pos_encoding=given is larger)
            if isinstance(found, ImageClassifier):
                close(found(given), told.logits)
            else:
                close(found(given), told.last_hidden_state)
                close(found.pool(found(given)), told.pooler_output)

    check(model, expected)
    save(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours/config.json").read_text())["architectures"] == [name]
    again, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), expected.state_dict().values()))
    check(load(tmp_path / "ours"), again.eval())
    if isinstance(model, ImageClassifier):
        assert model.labels == ("a", "b", "c") and again.config.id2label == {0: "a", 1: "b", 2: "c"}


@torch.no_grad()
def test_without_a_pooler(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = transformers.ViTModel(transformers.ViTConfig(**SIZES), add_pooling_layer=False).eval()
    expected.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, VisionTransformer) and model.pooler is None
    images = torch.randn(2, 3, 12, 12)
    told = expected(images).last_hidden_state
    close(model(images), told)
    close(model.pool(model(images)), told[:, 0])


@pytest.mark.parametrize(
    "changes",
    [
        {"score": "cosine"},
        {"normalizer": "sparsemax"},
        {"window": 1},
        {"positions": "sinusoidal"},
        {"pooling": "mean"},
        {"class_token": False, "pooling": "attention", "stem": 1, "patch": 2, "stem_width": 4},
    ],
)
@torch.no_grad()
def test_what_transformers_knows_not_is_kept_in_a_folder_of_ours(changes: dict[str, Any], tmp_path: Path) -> None:
    fields: dict[str, Any] = {"image": 12, "patch": 4, "width": 16, "layers": 1, "heads": 2} | changes
    model = ImageClassifier(VisionTransformer(VisionTransformerConfig(**fields)), ["a", "b"]).eval()
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["format"] == "regard.vision_model"
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(load(tmp_path)(images), model(images))


@torch.no_grad()
def test_other_models_of_images_and_heads_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = ResNet(ResNetConfig(features=4, layers=1, attention="cbam"))
    network(torch.randn(4, 3, 16, 16))  # moves what batch norms know
    deit = VisionTransformer(
        VisionTransformerConfig(image=16, patch=4, width=16, layers=1, heads=2, distilled=True, window=1)
    )
    for i, model in enumerate(
        [network, ImageClassifier(network, ["a", "b"]), ImageClassifier(deit, ["a", "b"], teacher=True)]
    ):
        save(model.eval(), tmp_path / str(i))
        loaded = load(tmp_path / str(i))
        images = torch.randn(2, 3, 16, 16)
        assert type(loaded) is type(model) and torch.equal(loaded(images), model(images))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": [12, 16]}, "square image_size"),
        ({"pooler_act": "relu"}, "pooler_act"),
        ({"image_size": 2}, "must be at least 4 for a patch of 4"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "have an architecture that ends in"),
        ({"num_attention_heads": 5}, "divide width 24"),
    ],
)
def test_what_is_not_read_is_told(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    theirs("ViTModel", "ViT", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("kind", "sizes"), [("ViT", {}), ("DeiT", {"size": {"height": 40, "width": 40}})])
def test_images_are_read_as_transformers_reads_them(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Beside the processor that resizes by Pillow, as ours; sizes shrink, grow and are cropped."""
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**sizes)
    processor.save_pretrained(tmp_path)
    ours = Preprocessing.load(tmp_path)
    drawn = np.random.default_rng(0)
    for height, width in ((50, 70), (300, 20), (224, 224), (1, 1)):
        pixels = drawn.integers(0, 256, (height, width, 3), np.uint8)
        expected = processor(pixels, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        found = ours.normalized(torch.from_numpy(ours.transform(pixels)[None]))
        assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5
    (tmp_path / PREPROCESSOR).write_text(json.dumps(ours.described()))
    assert Preprocessing.load(tmp_path) == ours
