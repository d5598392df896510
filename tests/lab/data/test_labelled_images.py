"""Labelled images: folders, IDX files and arrays, what is wrong with them, and what is changed in them at random."""

from __future__ import annotations

import gzip
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiers import examples

from regard_lab.data.batches import Augmentation, ImageBatches
from regard_lab.data.images import PREPROCESSOR, Preprocessing
from regard_lab.data.labelled import LabelledImages, read_labelled_images, split_labelled
from regard_lab.models.folders import ModelFileError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 5), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 10], np.uint8)


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 0x800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def picture(path: Path, shade: int = 0, size: tuple[int, int] = (9, 7), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, 0, 0)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two labels of images of mixed sizes and modes, an empty one, and files that are none."""
    for i, size in enumerate([(9, 7), (1, 1), (200, 3)]):
        picture(tmp_path / "cats" / f"{i}.png", 200, size)
        picture(tmp_path / "dogs" / "more" / f"{i}.jpg", 50, size, "L")
    (tmp_path / "birds").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dogs" / "cut.png").write_bytes((tmp_path / "cats" / "0.png").read_bytes()[:45])
    (tmp_path / "dogs" / "note.txt").write_text("not an image")
    return tmp_path


def test_a_folder_for_each_label(folder: Path) -> None:
    images = read_labelled_images(folder, Preprocessing(4, (4, 4)))
    assert images.pixels.shape == (6, 4, 4, 3) and images.labels == ["cats"] * 3 + ["dogs"] * 3
    assert images.files is not None and images.files[3] == "dogs/more/0.jpg"
    assert images.pixels[0, 0, 0].tolist() == [200, 0, 0] and images.place(0).endswith("/cats/0.png")
    (bad,) = images.left_out
    assert bad[0] == "dogs/cut.png" and "cut short or damaged" in bad[1] and images.empty == ("birds",)
    report = images.report()
    assert report[0].endswith("6 images, 2 labels; 50.0% are 'cats'; 4 × 4 pixels, colour")
    assert report[1:3] == [
        "skipped, a label without images: 'birds'", "skipped, unreadable images: 1"
    ]  # fmt: skip
    assert read_labelled_images(folder, Preprocessing(4, (4, 4), (0.5,), (0.5,))).pixels.shape == (6, 4, 4, 1)
    assert read_labelled_images(folder).pixels.shape == (6, 64, 64, 3)


def test_a_tar_archive_is_a_folder(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        for name in ("cats", "dogs"):
            archive.add(folder / name, name)
    of_archive, of_folder = read_labelled_images(tmp_path / "all.tar.gz"), read_labelled_images(folder)
    assert of_archive.labels == of_folder.labels and np.array_equal(of_archive.pixels, of_folder.pixels)


@pytest.mark.parametrize("kind", ["idx", "gz", "npy", "npz", "float", "colour"])
def test_arrays(kind: str, tmp_path: Path) -> None:
    pixels: Any = PIXELS
    if kind in ("idx", "gz"):
        pack, end = (gzip.compress, ".gz") if kind == "gz" else (bytes, "")
        path = tmp_path / f"t-images-idx3-ubyte{end}"
        path.write_bytes(pack(idx(PIXELS)))
        (tmp_path / f"t-labels-idx1-ubyte{end}").write_bytes(pack(idx(LABELS)))
    elif kind == "npy":
        path = tmp_path / "images.npy"
        np.save(path, PIXELS)
        np.save(tmp_path / "labels.npy", LABELS)
    else:
        path = tmp_path / "both.npz"
        pixels = {"float": PIXELS / 255, "colour": np.stack([PIXELS] * 3, -1)}.get(kind, PIXELS)
        np.savez(path, images=pixels, labels=LABELS.astype(str) if kind == "float" else LABELS[:, None])
    images = read_labelled_images(path)
    assert np.array_equal(images.pixels[..., 0], PIXELS) and images.pixels.shape[-1] == (3 if kind == "colour" else 1)
    assert images.labels == ["0", "1", "2", "0", "1", "10"] and images.names() == ["0", "1", "2", "10"]
    larger = read_labelled_images(path, Preprocessing(10, (10, 10)))
    assert larger.pixels.shape == (6, 10, 10, 3)


def npz(**arrays: Any) -> Any:
    return lambda path: np.savez(path, **arrays)


def pair(images: bytes, labels: bytes | None) -> Any:
    def write(path: Path) -> None:
        path.write_bytes(images)
        if labels is not None:
            path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1")).write_bytes(labels)

    return write


BAD = {
    "truncated": (pair(idx(PIXELS)[:-3], idx(LABELS)), "images-idx3", "have 166 bytes, as its header says of 6 × 5"),
    "longer": (pair(idx(PIXELS) + b"x", idx(LABELS)), "images-idx3", "have 166 bytes"),
    "magic": (pair(idx(PIXELS, 0x0D03), idx(LABELS)), "images-idx3", "begins 0x00000803, got 00 00 0d 03"),
    "swapped": (pair(idx(LABELS), idx(LABELS)), "images-idx3", "3 dimensions"),
    "empty": (pair(b"", idx(LABELS)), "images-idx3", "got an empty file"),
    "gzip": (pair(gzip.compress(idx(PIXELS))[:-9], idx(LABELS)), "images-idx3", "be a whole gzip file"),
    "no labels": (pair(idx(PIXELS), None), "images-idx3", "labels-idx1 must exist, got no such file"),
    "label magic": (pair(idx(PIXELS), idx(PIXELS)), "images-idx3", "1 dimension, which begins 0x00000801"),
    "fewer labels": (pair(idx(PIXELS), idx(LABELS[:4])), "images-idx3", "be 6, as many as images, got 4"),
    "other name": (pair(idx(PIXELS), None), "pictures", "next to its file of labels, got something else"),
    "nothing": (pair(idx(PIXELS[:0]), idx(LABELS[:0])), "images-idx3", "hold at least one image"),
    "dtype": (npz(images=PIXELS.astype(np.int32), labels=LABELS), "a.npz", "of floats from 0 to 1, got int32"),
    "shape": (npz(images=PIXELS[0], labels=LABELS), "a.npz", r"hold images \(N, H, W\)"),
    "channels": (npz(images=np.zeros((6, 5, 5, 4), np.uint8), labels=LABELS), "a.npz", r"got shape \(6, 5, 5, 4\)"),
    "nan": (npz(images=np.full((6, 5, 5), np.nan), labels=LABELS), "a.npz", "image 0 must hold numbers .* got nan"),
    "range": (npz(images=PIXELS.astype(np.float32), labels=LABELS), "a.npz", "hold numbers from 0 to 1"),
    "float labels": (npz(images=PIXELS, labels=LABELS / 2), "a.npz", "be one whole number, or text, .* got float64"),
    "negative": (npz(images=PIXELS, labels=LABELS.astype(int) - 1), "a.npz", "be at least 0, got -1"),
    "no array": (npz(pictures=PIXELS), "a.npz", "have arrays 'images' and 'labels', got pictures"),
    "objects": (npz(images=np.array([None]), labels=LABELS), "a.npz", "hold arrays of numbers"),
    "no zip": (pair(b"PK", None), "a.npz", "must"),
    "no npy": (pair(b"x", None), "images.npy", "be a NumPy array that is whole"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_told_with_their_file(name: str, tmp_path: Path) -> None:
    write, file, message = BAD[name]
    write(tmp_path / file)
    with pytest.raises(ValueError, match=message):
        read_labelled_images(tmp_path / file)


def test_bad_folders(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "exist, got no such file"), (tmp_path, "have files that end in one of")):
        with pytest.raises(ValueError, match=message):
            read_labelled_images(path)
    picture(tmp_path / "a.png")
    with pytest.raises(ValueError, match="have a folder of images for each label, got 1 images in it and none in"):
        read_labelled_images(tmp_path)
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"have images that can be read, got none: cats/a.png must be an image"):
        read_labelled_images(tmp_path)


def test_images_that_are_alike_are_on_one_side(tmp_path: Path) -> None:
    pixels = np.repeat(np.arange(20, dtype=np.uint8), 3)[:, None, None, None] * np.ones((1, 4, 4, 1), np.uint8)
    images = LabelledImages(pixels, ["even" if i // 3 % 2 else "odd" for i in range(60)])
    learn, held = split_labelled(images, 0.3, seed=1)
    assert len(learn) + len(held) == 60 and not set(learn.keys()) & set(held.keys())
    assert images.checksum() != learn.checksum() == split_labelled(images, 0.3, seed=1)[0].checksum()


def batches(augmentation: Augmentation | None = None, **options: Any) -> ImageBatches:
    how = Preprocessing((5, 5), None, (0.0,), (1.0,))
    options = {"size": 4, "classes": 3} | options
    return ImageBatches(PIXELS[..., None], LABELS.astype(np.int64) % 3, how, augmentation=augmentation, **options)


def test_batches_depend_on_seed_and_number_alone() -> None:
    every = Augmentation(flip=True, shift=2, cutout=2, mixup=0.4)
    made = batches(every, seed=3)
    first = [made.batch(k) for k in range(6)]
    again = batches(every, seed=3)
    for k in (5, 0, 3):
        other = again.batch(k)
        assert torch.equal(first[k].images, other.images) and torch.equal(first[k].targets, other.targets)
    assert not torch.equal(batches(every, seed=4).batch(0).images, first[0].images)
    assert sorted(label for each in (batches().batch(0), batches().batch(1)) for label in each.labels.tolist()) == [
        0, 0, 1, 1, 1, 2
    ]  # fmt: skip
    shares = [batches(rank=rank, world=2, size=3).batch(0).examples for rank in range(2)]
    assert shares == [3, 3]
    once = batches().once
    assert len(once) == 2 and sum(each.count for each in once) == 6 and once[0].images.dtype == torch.float32


@settings(deadline=None, max_examples=examples(40))
@given(
    B=st.integers(1, 4), H=st.integers(1, 7), W=st.integers(1, 7), flip=st.booleans(), shift=st.integers(0, 9),
    cutout=st.integers(0, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_what_is_changed_is_what_the_options_say(
    B: int, H: int, W: int, flip: bool, shift: int, cutout: int, seed: int
) -> None:
    """Every image is one of those that a person would write down: mirrored or not, moved, with a square of zeros."""
    images = torch.arange(1.0, B * H * W + 1).view(B, 1, H, W)
    made, _ = Augmentation(flip, shift, cutout).apply(images, torch.zeros(B), np.random.default_rng(seed))
    assert made.shape == images.shape
    for before, after in zip(images[:, 0].numpy(), made[:, 0].numpy()):
        candidates = [
            np.pad(each, shift, mode="edge")[y : y + H, x : x + W]
            for each in ([before, before[:, ::-1]] if flip else [before])
            for y in range(2 * shift + 1)
            for x in range(2 * shift + 1)
        ]
        cut = after == 0
        assert any(np.array_equal(np.where(cut, 0, each), after) for each in candidates)
        rows, columns = cut.any(1), cut.any(0)
        assert np.array_equal(cut, np.outer(rows, columns)) and rows.sum() <= cutout and columns.sum() <= cutout


def test_mixed_images_have_mixed_labels() -> None:
    batch = batches(Augmentation(mixup=1.0), size=6).batch(0)
    plain = batches(size=6).batch(0)
    assert torch.equal(batch.labels, plain.labels)
    torch.testing.assert_close(batch.targets.sum(1), torch.ones(6))
    share = float(batch.targets[batch.targets > 0].min())
    mixed = {tuple(((1 - share) * a + share * b).flatten().tolist()) for a in plain.images for b in plain.images}
    mixed |= {tuple((share * a + (1 - share) * b).flatten().tolist()) for a in plain.images for b in plain.images}
    for each in batch.images:
        assert min((torch.tensor(other) - each.flatten()).abs().max() for other in mixed) < 1e-6


def test_wrong_batches() -> None:
    with pytest.raises(ValueError, match="labels must be as many as images, got 1 for 6 images"):
        ImageBatches(PIXELS[..., None], np.zeros(1, int), Preprocessing((5, 5)), size=2, classes=2)
    for name, value in (("shift", -1), ("cutout", 1 << 20), ("mixup", -0.1)):
        with pytest.raises(ValueError, match=f"{name} must be an? "):
            Augmentation(**{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_resize": False}, "have do_resize true, got False"),
        ({"rescale_factor": 1.0}, "have a rescale_factor of 1/255"),
        ({"resample": 9}, "have a resample from 0 to 5"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_mean and image_std of 1 or 3 channels"),
        ({"image_mean": [0.5, 0.5]}, "1 or 3 channels"),
        ({"image_mean": ["a"]}, "have an image_mean of finite numbers"),
        ({"size": {"height": 4}}, "have a size of height and width"),
        ({"size": 0}, "have a size of height and width"),
        ({"size": {"shortest_edge": 8}, "do_center_crop": False}, "have a crop_size where its size is a shortest_edge"),
    ],
)
def test_damaged_descriptions(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    import json

    path = tmp_path / PREPROCESSOR
    path.write_text(json.dumps(Preprocessing(8, (8, 8)).described() | change))
    with pytest.raises(ModelFileError, match=message):
        Preprocessing.load(tmp_path)
    path.write_text("[]")
    with pytest.raises(ModelFileError, match="describe how images are read"):
        Preprocessing.load(tmp_path)


def test_statistics_are_those_of_all_pixels() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (1500, 3, 3, 3), np.uint8)
    how = Preprocessing((3, 3)).with_statistics(pixels)
    np.testing.assert_allclose(how.mean, (pixels / 255).mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(how.std, (pixels / 255).std((0, 1, 2)), atol=1e-6)
    shown = how.shown(how.normalized(torch.from_numpy(pixels[:2])))
    np.testing.assert_allclose(shown.numpy(), pixels[:2] / 255, atol=1e-6)
