"""Classifiers of images that transformers computes: its own numbers by its own image processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.lab.cli.test_other_families import SIZES as TEXT_SIZES
from torch import nn
from transformers import AutoModelForImageClassification

from regard_lab.models import load
from regard_lab.models.hugging_face.hosted import HostedImageClassifier

transformers.utils.logging.set_verbosity_error()
LABELS = {0: "cat", 1: "dog", 2: "fox"}
SIDE: dict[str, Any] = {"size": {"height": 16, "width": 16}}
EDGE: dict[str, Any] = {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}
SEEING: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SEEING |= {"image_size": 16, "patch_size": 4}
STAGES: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "num_channels": 3}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
#: A class, its config, its processor, and how that makes sizes.
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "SwinForImageClassification": (SWIN, "ViT", SIDE),
    "Swinv2ForImageClassification": (SWIN, "ViT", SIDE),
    "BeitForImageClassification": (SEEING, "Beit", {**EDGE, "size": {"height": 20, "width": 20}}),
    "SiglipForImageClassification": ({"vision_config": SEEING}, "Siglip", SIDE),
    "CLIPForImageClassification": ({"vision_config": SEEING}, "CLIP", EDGE),
    "Dinov2ForImageClassification": (SEEING, "Bit", EDGE),
    "ViTMSNForImageClassification": (SEEING, "ViT", SIDE),
    "ViTForImageClassification": (SEEING | {"problem_type": "multi_label_classification"}, "ViT", SIDE),
    "ResNetForImageClassification": (STAGES | {"embedding_size": 8}, "ConvNext", {"size": {"shortest_edge": 16}}),
    "ConvNextForImageClassification": (STAGES, "ConvNext", {"size": {"shortest_edge": 16}}),
}


def folder_of(path: Path, name: str) -> Path:
    """Write the folder of a small random classifier of images with its processor."""
    made: Any = getattr(transformers, name)
    sizes, kind, processing = MODELS[name]
    torch.manual_seed(0)
    model = made(made.config_class(**sizes, id2label=LABELS, label2id={name: i for i, name in LABELS.items()}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.eval().save_pretrained(path)
    getattr(transformers, f"{kind}ImageProcessorPil")(**processing).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of photos, in a folder for each label."""
    folder, drawn = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i, (height, width) in enumerate(((50, 70), (300, 20), (16, 16), (90, 90))):
        path = folder / LABELS[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return folder


@pytest.mark.campaign(keep=5)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::regard._utils.errors.RegardWarning")
@pytest.mark.parametrize("name", MODELS)
def test_labels_are_those_of_transformers(regard, name: str, photos: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, name)
    theirs = AutoModelForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
    processor = getattr(transformers, f"{MODELS[name][1]}ImageProcessorPil").from_pretrained(folder)
    files = sorted(photos.glob("*/*.png"))
    images = [Image.open(path).convert("RGB") for path in files]
    logits = torch.cat([theirs(**processor(image, return_tensors="pt")).logits for image in images])
    expected = logits.sigmoid() if "problem_type" in MODELS[name][0] else logits.softmax(1)
    for batch in (1, 3):
        outcome = regard("classify", "--model", folder, *files, "--batch", batch, "--json")
        assert outcome.code == 0, outcome.err
        shown = [json.loads(line)["probabilities"] for line in outcome.out.splitlines()]
        found = torch.tensor([[each[label] for label in LABELS.values()] for each in shown])
        assert float((found - expected).abs().max()) < 1e-5
    outcome = regard("evaluate", "classifier", photos, "--model", folder, "--json")
    if "problem_type" in MODELS[name][0]:
        assert outcome.code == 2 and "be a single-label classifier, got one of problem_type" in outcome.err
    else:
        assert outcome.code == 0, outcome.err
        true = torch.tensor([0 if path.parent.name == "cat" else 1 for path in files])
        assert json.loads(outcome.out)["accuracy"] == pytest.approx(float((logits.argmax(1) == true).float().mean()))


def test_attention_is_ours_where_a_model_takes_it(tmp_path: Path) -> None:
    model = load(folder_of(tmp_path, "SiglipForImageClassification"))
    assert isinstance(model, HostedImageClassifier)
    assert model.module.config.vision_config._attn_implementation == "regard"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::regard._utils.errors.RegardWarning")
def test_what_cannot_be_read_is_explained(regard, photos: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "SwinForImageClassification")
    path, photo = folder / "preprocessor_config.json", photos / "cat" / "0.png"
    described = json.loads(path.read_text())

    def refused(sentence: str, *photos_: Path) -> None:
        outcome = regard("classify", "--model", folder, *(photos_ or (photo,)))
        assert outcome.code == 2 and sentence in outcome.err and "Traceback" not in outcome.err, outcome.err

    path.unlink()
    refused("preprocessor_config.json must exist, got no such file")
    path.write_text("{")
    refused("preprocessor_config.json must be JSON")
    path.write_text(json.dumps({"image_processor_type": "FutureImageProcessor"}))
    refused("describe an image processor that transformers has for Pillow, got Unrecognized image processor")
    path.write_text(json.dumps({"auto_map": {"AutoImageProcessor": "code.Processor"}}))
    refused("describe how images are read, without auto_map, which names code that is never run, got")
    path.write_text(json.dumps({"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": 9}))
    refused(
        "describe a processor that makes one array of pixels of an image, got Siglip2ImageProcessorPil, which makes"
    )
    other = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False, "size": {"shortest_edge": 16}}
    path.write_text(json.dumps(other))
    refused("describe a processor that makes all images one size, got CLIPImageProcessorPil, which makes 16 × 21 and")
    path.write_text(json.dumps(described))
    outcome = regard("classify", "--model", folder, photo, "--pairs")
    assert outcome.code == 2 and "--pairs must be left out for an image classifier" in outcome.err
    made = transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXT_SIZES))
    made.save_pretrained(tmp_path / "questions")
    outcome = regard("classify", "--model", tmp_path / "questions", "a")
    assert (
        outcome.code == 2
        and "a classifier of texts, tokens or images, or a model without a head, got BertForQ" in outcome.err
    )
