"""``regard train classifier --images``, ``classify``, ``evaluate`` and ``compare`` of images, as a user has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard_lab.cli.train import KINDS

pytestmark = pytest.mark.slow

TINY = [
    "--side", "8", "--set", "model.features=4", "--set", "model.stages=2", "--set", "model.layers=1", "--batch", "8",
    "--set", "training.threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of red and blue pictures, and a file that is no image."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(16):
        for label, channel in (("blue", 2), ("red", 0)):
            pixels = random.integers(0, 60, (7 + i, 12, 3), np.uint8)
            pixels[..., channel] += 150
            (folder / label).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / label / f"{i}.png")
    (folder / "red" / "broken.jpg").write_bytes(b"nothing")
    return folder


def test_from_a_folder_of_photos_to_their_labels(regard, photos, tmp_path) -> None:
    out = tmp_path / "out"
    result = regard("train", "classifier", "--images", photos, "--out", out, "--epochs", "6", "--flip", "--shift", "1",
                    *TINY, "--learning-rate", "0.01")  # fmt: skip
    assert result.code == 0, result.err
    assert "32 images, 2 labels" in result.out and "unreadable images: 1" in result.out
    assert "red/broken.jpg must be an image" in result.out and "images/s" in result.out
    assert f"regard classify --model {out} photo.jpg" in result.out
    result = regard("classify", "--model", out, photos / "red" / "3.png")
    label, share = result.out.split("\t")
    assert result.code == 0 and label == "red" and 0.5 < float(share) <= 1
    listed = regard("classify", "--model", out, "--data", photos, "--top", "2")
    assert listed.code == 0 and len(listed.out.splitlines()) == 32
    assert "unreadable images: 1" in listed.err
    first = listed.out.splitlines()[0].split("\t")
    assert first[:2] == ["blue/0.png", "blue"] and first[3] == "red"
    as_json = regard("classify", "--model", out, "--json", photos / "blue" / "0.png", photos / "red" / "broken.jpg")
    record = json.loads(as_json.out)
    assert record["label"] == "blue" and sum(record["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert as_json.code == 0 and "broken.jpg must be an image" in as_json.err
    scored = regard("evaluate", "classifier", photos, "--model", out, "--json", "--out", tmp_path / "named.txt")
    report = json.loads(scored.out)
    assert report["images"] == 32 and report["accuracy"] == report["f1"] == 1.0
    assert (tmp_path / "named.txt").read_text().split() == ["blue"] * 16 + ["red"] * 16
    again = regard("train", "classifier", "--out", out, "--resume", "--steps", "30")
    assert again.code == 0 and "resuming after step" in again.out, again.err
    other = regard("train", "classifier", "--out", out, "--resume", "--flip")
    assert other.code == 2 and "--flip must be left out with --resume: a resumed run keeps its options" in other.err


def test_what_cannot_be_classified(regard, photos, tmp_path) -> None:
    out = tmp_path / "out"
    assert regard("train", "classifier", "--images", photos, "--out", out, "--steps", "1", *TINY).code == 0
    broken = photos / "red" / "broken.jpg"
    (tmp_path / "none").mkdir()
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "0.png").write_bytes((photos / "red" / "0.png").read_bytes())
    for arguments, sentence in (
        (["classify", "--model", out, broken], "broken.jpg must be an image"),
        (["classify", "--model", out, broken, broken], "none of the images can be read"),
        (["classify", "--model", out, tmp_path / "no.png"], "no.png must exist, got no such file"),
        (["classify", "--model", out], "name image files, or pass --data"),
        (["classify", "--model", out, "--pairs", broken], "--pairs must be left out for an image classifier"),
        (["classify", "--model", out, "--data", tmp_path / "none"], "have files that end in one of"),
        (
            ["evaluate", "classifier", tmp_path, "--model", out],
            "cats/0.png must have a label among 'blue', 'red', got 'cats'",
        ),
        (
            ["evaluate", "classifier", photos, "--model", out, "--pairs"],
            "--pairs must be left out for an image classifier",
        ),
        (
            ["train", "language-model", "--data", broken, "--start", out, "--out", tmp_path / "l"],
            "of a language model, got an image classifier",
        ),
        (
            ["train", "classifier", "--data", broken, "--start", out, "--out", tmp_path / "t"],
            "be the folder of a language model or a masked language model",
        ),
    ):
        result = regard(*arguments)
        assert result.code == 2 and sentence in result.err and "Traceback" not in result.err, (arguments, result.err)
    assert not (tmp_path / "l").exists() and not (tmp_path / "t").exists()


def test_options_of_texts_and_of_images_are_told_apart(regard, photos, tmp_path) -> None:
    for arguments, sentence in (
        (["--images", photos, "--length", "9"], "length must be one of"),
        (["--images", photos, "--data", "x.tsv"], "data must be one of"),
        (["--images", tmp_path / "gone"], "gone must exist, got no such file"),
        (["--images", photos, "--kind", "encoder"], "--kind must be one of 'resnet', 'transformer', got 'encoder'"),
        (["--data", "x.tsv", "--flip"], "augmentation must be one of"),
        (["--images", photos, "--options", tmp_path / "text.toml"], "be 'image-classification' with --images"),
    ):
        (tmp_path / "text.toml").write_text('task = "classifier"\n')
        result = regard("train", "classifier", "--out", tmp_path / "out", *arguments)
        assert result.code == 2 and sentence in result.err and "Traceback" not in result.err, result.err
    shown = regard("train", "classifier", "--out", tmp_path / "out", "--images", photos, "--show-options", "--flip")
    assert shown.code == 0 and "flip = true" in shown.out and "# attention = " in shown.out
    assert "channels" not in shown.out.partition("What else")[2]
    (tmp_path / "shown.toml").write_text(shown.out)
    again = regard("train", "classifier", "--out", tmp_path / "out", "--options", tmp_path / "shown.toml",
                   "--show-options")  # fmt: skip
    assert again.out == shown.out and set(KINDS) == {"classifier", "image-classification"}


@pytest.mark.campaign
def test_mechanisms_side_by_side(regard, photos, tmp_path) -> None:
    out = tmp_path / "out"
    result = regard("compare", "image-classification", "--attention", "se,transformer", "--images", photos,
                    "--out", out, "--epochs", "3", *TINY)  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads((out / "compared.json").read_text())
    assert [each["name"] for each in found] == ["se", "transformer"]
    assert all(each["unit"] == "images" and each["per_second"] > 0 for each in found)
    assert found[0]["parameters"] > 1000 and set(found[0]["scores"]) == {"accuracy", "f1"}
    for name in ("accuracy", "f1", "images/s", "memory (MB)"):
        assert name in result.out
    assert (out / "compared.png").read_bytes().startswith(b"\x89PNG")
    for attention, sentence in (
        ("none,sse", "--attention must be one of"),
        ("se", "name at least two mechanisms"),
        ("se,transformer", "--out must be a new folder"),
    ):
        result = regard("compare", "image-classification", "--attention", attention, "--images", photos, "--out", out,
                        *TINY)  # fmt: skip
        assert result.code == 2 and sentence in result.err and "Traceback" not in result.err, result.err
