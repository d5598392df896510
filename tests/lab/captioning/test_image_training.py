"""Classifiers of images: trained, stopped and resumed to the bit, begun with other models, and what is refused."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from regard_lab.data.images import Preprocessing
from regard_lab.models import ImageClassifier, VisionTransformer, VisionTransformerConfig, load, save
from regard_lab.models.folders import ModelFileError
from regard_lab.tasks.classification.classifiers import ImageClassificationPipeline
from regard_lab.tasks.classification.options import ImageClassificationOptions
from regard_lab.tasks.classification.training import ImageTraining

pytestmark = pytest.mark.slow

NETWORK = {"kind": "resnet", "model": {"features": 4, "stages": 2, "layers": 1, "attention": "se"}}
TRANSFORMER = {"kind": "transformer", "model": {"width": 8, "heads": 2, "layers": 1, "feedforward": 8, "stem_width": 4}}
TRAINING = {"precision": "float32", "threads": 1, "batch_examples": 16}


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 8, 8) with a bright bar, upright or lying, and which it is."""
    random = np.random.default_rng(seed)
    images, labels = random.integers(0, 90, (count, 8, 8), np.uint8), random.integers(0, 2, count)
    for image, label, at in zip(images, labels, random.integers(0, 8, count)):
        (image.T if label else image)[at] = 220
    return images, np.array(["lying", "upright"])[labels]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "bars.npz"
    images, labels = drawn(200)
    np.savez(path, images=images, labels=labels)
    return path


def options(path: Path, /, **table: Any) -> ImageClassificationOptions:
    table["data"] = {"images": str(path)} | table.get("data", {})
    table["training"] = TRAINING | table.get("training", {})
    return ImageClassificationOptions.from_table(table)


def right(classifier: ImageClassificationPipeline) -> float:
    images, labels = drawn(100, seed=1)
    named = classifier.probabilities(classifier.transform(list(images[..., None]))).argmax(1).tolist()
    return sum(classifier.labels[i] == label for i, label in zip(named, labels)) / 100


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", [NETWORK, TRANSFORMER], ids=["network", "transformer"])
def test_it_learns_and_its_folder_answers_alike(kind: dict[str, Any], data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    asked = options(data, **kind, training={"epochs": 25.0, "learning_rate": 1e-2})
    classifier, ended = ImageTraining(asked, tmp_path / "out", lines.append).train()
    assert right(classifier) > 0.95 and ended.reason == "steps"
    assert lines[0].endswith("'upright'; 8 × 8 pixels, gray") or lines[0].endswith("'lying'; 8 × 8 pixels, gray")
    assert lines[1] == "held out for validation: 20 images" and "images of 8 × 8 pixels" in lines[2]
    again = ImageClassificationPipeline.load(tmp_path / "out")
    pixels = again.transform(list(drawn(9)[0][..., None]))
    assert again.preprocessing == classifier.preprocessing and again.labels == ("lying", "upright")
    assert torch.equal(again.probabilities(pixels), classifier.probabilities(pixels, batch=128))


class StopAfter(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.steps:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("kind", [NETWORK, TRANSFORMER], ids=["network", "transformer"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(kind: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Batch norms, dropout, what is changed in images, and the mean of checkpoints are as in a run in one piece."""
    asked = options(
        data, **kind, dropout=0.2, augmentation={"flip": True, "shift": 2, "cutout": 2, "mixup": 0.3},
        training={"steps": 14, "validate_every": 3, "keep": 2, "average": 2},
    )  # fmt: skip
    whole, _ = ImageTraining(asked, tmp_path / "whole", lambda _: None).train()
    _, ended = ImageTraining(asked, tmp_path / "parts", lambda _: None).train(callbacks=[StopAfter(5)])
    assert ended.reason == "interrupt" and ended.steps == 5 and not (tmp_path / "parts" / "config.json").exists()
    parts, _ = ImageTraining.resumed(tmp_path / "parts", {}, lambda _: None).train(resume=True)
    one, two = (each.model.state_dict() for each in (whole, parts))
    assert all(torch.equal(one[name], two[name]) for name in one)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_a_resumed_run_has_the_options_and_images_it_began_with(data: Path, tmp_path: Path) -> None:
    asked = options(data, **NETWORK, training={"steps": 4})
    own = tmp_path / "own.npz"
    own.write_bytes(data.read_bytes())
    ImageTraining(options(own, **NETWORK, training={"steps": 4}), tmp_path / "a", lambda _: None).train()
    with pytest.raises(ValueError, match="batch_examples must be 16, as the run that is resumed began, got 8"):
        ImageTraining.resumed(tmp_path / "a", {"batch_examples": 8}, lambda _: None)
    edited = tmp_path / "a" / "options.toml"
    edited.write_text(edited.read_text().replace("flip = false", "flip = true"))
    with pytest.raises(ValueError, match=r"augmentation.flip in .* must be False, as when the run started"):
        ImageTraining.resumed(tmp_path / "a", {}, lambda _: None)
    edited.write_text(edited.read_text().replace("flip = true", "flip = false"))
    images, labels = drawn(200, seed=9)
    np.savez(own, images=images, labels=labels)
    with pytest.raises(ValueError, match="data must be the images of the original run, got others"):
        ImageTraining.resumed(tmp_path / "a", {"steps": 6}, lambda _: None).train(resume=True)
    with pytest.raises(ValueError, match="out must be a new folder, or be resumed"):
        ImageTraining(asked, tmp_path / "a", lambda _: None).train()


def test_a_model_to_begin_with(data: Path, tmp_path: Path) -> None:
    first, _ = ImageTraining(
        options(data, **NETWORK, training={"epochs": 20.0, "learning_rate": 1e-2}), tmp_path / "first", lambda _: None
    ).train()
    frozen = options(data, start=str(tmp_path / "first"), tune="frozen", training={"steps": 2, "learning_rate": 1e-9})
    then, _ = ImageTraining(frozen, tmp_path / "then", lambda _: None).train()
    assert right(then) == right(first) > 0.9 and then.preprocessing == first.preprocessing
    one, two = first.model.model.state_dict(), then.model.model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_vit_of_others_is_fine_tuned(data: Path, tmp_path: Path) -> None:
    """A folder as transformers has it, with another size of images, and one without labels."""
    config = VisionTransformerConfig(image=16, patch=4, width=8, layers=1, heads=2, norm_eps=1e-12)
    ImageClassificationPipeline(ImageClassifier(VisionTransformer(config), ["a", "b"]), Preprocessing((16, 16))).save(
        tmp_path / "vit"
    )
    save(VisionTransformer(config), tmp_path / "bare")
    (tmp_path / "bare" / "preprocessor_config.json").write_bytes(
        (tmp_path / "vit" / "preprocessor_config.json").read_bytes()
    )
    for name in ("vit", "bare"):
        asked = options(data, start=str(tmp_path / name), training={"steps": 2})
        ImageTraining(asked, tmp_path / f"{name}-tuned", lambda _: None).train()
        model = load(tmp_path / f"{name}-tuned")
        assert isinstance(model, ImageClassifier) and model.labels == ("lying", "upright")


def test_what_is_refused(data: Path, tmp_path: Path) -> None:
    images, labels = drawn(8)
    np.savez(tmp_path / "one.npz", images=images, labels=np.full(8, "x"))
    np.savez(tmp_path / "other.npz", images=images, labels=np.full(8, "maybe"))
    np.savez(tmp_path / "wide.npz", images=images[:, :6], labels=labels)
    np.savez(tmp_path / "large.npz", images=np.zeros((8, 9, 9), np.uint8), labels=labels)
    cases = {
        r"must have at least two labels, got only 'x'": options(tmp_path / "one.npz"),
        r"other.npz, image 0 must have a label among 'lying', 'upright', got 'maybe'": options(
            data, data={"valid": str(tmp_path / "other.npz")}
        ),
        r"wide.npz must have square images, or be made so by data.side, got 6 × 8": options(tmp_path / "wide.npz"),
        r"no such folder": options(data, start=str(tmp_path / "nowhere")),
        r"images must be given": ImageClassificationOptions(),
        r"image must be at least 16 for a patch of 16": options(data, kind="transformer", preset="vit-tiny"),
    }
    for number, (sentence, asked) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=sentence):
            ImageTraining(asked, tmp_path / f"out{number}", lambda _: None).train()
        assert not (tmp_path / f"out{number}" / "options.toml").exists()
    larger = options(data, **NETWORK, data={"valid": str(tmp_path / "large.npz")}, training={"steps": 1})
    ImageTraining(larger, tmp_path / "larger", lambda _: None).train()  # made of the size of those that are learned


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"kind": "rsnet"}, "did you mean 'resnet'"),
        ({"preset": "huge"}, "preset must be one of"),
        ({"model": {"attention": "cban"}}, "did you mean 'cbam'"),
        ({"model": {"channels": 1}}, "model.channels must be one of"),
        ({"tune": "frozen"}, "tune must be 'full' without start"),
        ({"start": "x", "preset": "base"}, "preset must be left out with start"),
        ({"start": "x", "data": {"side": 8}}, "data.side must be left out with start"),
        ({"data": {"valid": "a", "held_out": 0.2}}, "data.held_out must be left out where valid is given"),
        ({"training": {"guide": 0.1}}, "training.guide must be left out for a classifier of images"),
        ({"training": {"strategy": "fsdp"}}, "training.strategy must be 'auto' or 'ddp'"),
        ({"augmentation": {"shift": -1}}, "augmentation.shift must be an int from 0 to"),
    ],
)
def test_options_that_are_refused(table: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        ImageTraining(ImageClassificationOptions.from_table(table), tmp_path)


def test_labels_by_mirror_images_too(data: Path, tmp_path: Path) -> None:
    asked = options(data, **NETWORK, flip_test=True, training={"epochs": 2.0, "learning_rate": 1e-2})
    made, _ = ImageTraining(asked, tmp_path / "both", lambda _: None).train()
    both = ImageClassificationPipeline.load(tmp_path / "both")
    assert both.preprocessing == made.preprocessing and both.preprocessing.flip_test
    pixels = drawn(12)[0][..., None]
    one = ImageClassificationPipeline(both.model, replace(both.preprocessing, flip_test=False))
    parts = [one.probabilities(each) for each in (pixels, pixels[:, :, ::-1])]
    assert (parts[0] - parts[1]).abs().max() > 1e-4
    torch.testing.assert_close(both.probabilities(pixels), (parts[0] + parts[1]) / 2)
    again, _ = ImageTraining(
        options(data, start=str(tmp_path / "both"), training={"steps": 1}), tmp_path / "then", lambda _: None
    ).train()
    assert again.preprocessing.flip_test, "what the start does is not lost"
    described = tmp_path / "both" / "preprocessor_config.json"
    described.write_text(described.read_text().replace('"flip_test": true', '"flip_test": "yes"'))
    with pytest.raises(ModelFileError, match="have a flip_test that is true or false"):
        ImageClassificationPipeline.load(tmp_path / "both")
