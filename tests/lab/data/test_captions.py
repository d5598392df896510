"""Lists of captions, matched with images, and batches of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_images import draw, write_list

from regard_lab.data.captions import (
    CaptionBatches,
    FeatureGrids,
    PixelGrids,
    plain_caption,
    read_captions,
    with_images,
)
from regard_lab.data.images import open_images
from regard_lab.text.ragged import Ragged


def test_captions_are_made_plain() -> None:
    assert plain_caption("  Two dogs , in the\u00a0snow . ") == "two dogs, in the snow"
    assert plain_caption("Wow !", lowercase=False) == "Wow!"
    assert plain_caption(" . ") == "."


def test_only_captions_whose_image_is_there(tmp_path: Path) -> None:
    lines = draw(tmp_path / "images", 1)
    path = write_list(tmp_path / "list.tsv", [*lines, ("lost.png", "a lost one"), ("sub/lost2.png", "another")])
    with open_images(tmp_path / "images") as images:
        pairs, told = with_images(read_captions(str(path)), images)
        assert len(pairs) == len(lines)
        assert told == ["skipped, no such image: 2 captions of 2 images (the first 'lost.png')"]
        assert pairs.references()["red-left-0.png"] == ["a red square on the left", "there is a red one left"]
        other = write_list(tmp_path / "other.tsv", [("lost.png", "a lost one")])
        with pytest.raises(
            ValueError, match=r"other\.tsv must name images in .*images, got none of 1, the first 'lost"
        ):
            with_images(read_captions(str(other)), images)


def test_mirrored_features_are_those_of_other_columns() -> None:
    values = np.arange(2 * 6 * 2, dtype=np.float16).reshape(2, 6, 2)
    grids = FeatureGrids(values, np.array([1, 0]), 2, 3)
    taken = grids.take(np.array([0, 1]), np.array([False, True]))
    assert torch.equal(taken[0], torch.from_numpy(values[1]).float())
    assert taken[1].view(2, 3, 2).tolist() == values[0].reshape(2, 3, 2)[:, ::-1].tolist()


def test_pixels_are_mirrored_too(tmp_path: Path) -> None:
    draw(tmp_path, 1)
    with open_images(tmp_path) as images:
        grids = PixelGrids(images, ["red-left-0.png"], 64, 16)
        both = grids.take(np.array([0, 0]), np.array([False, True]))
    assert both.dtype == torch.uint8
    assert torch.equal(both[0].flip(1), both[1])
    assert (len(grids), grids.places) == (1, 16)


@given(
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    size=st.integers(1, 9),
    each=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_every_epoch_has_each_image_once_with_captions_of_its_own(
    owners: list[int], size: int, each: int, seed: int
) -> None:
    names = {name: row for row, name in enumerate(dict.fromkeys(owners))}
    rows = np.array([names[name] for name in owners])
    captions = Ragged.of([[3 + row] * (1 + i % 3) for i, row in enumerate(rows.tolist())])
    grids = FeatureGrids(np.arange(len(names), dtype=np.float16).reshape(-1, 1, 1), np.arange(len(names)), 1, 1)
    batches = CaptionBatches(grids, captions, rows, size=size, each=each, mirror=True, seed=seed)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(batches.per_epoch):
            batch = batches.batch(epoch * batches.per_epoch + step)
            assert torch.equal(batch.target, batches.batch(epoch * batches.per_epoch + step).target)
            own = batch.source[:, 0, 0].long()
            seen += own.tolist()
            assert batch.target.shape[0] == len(own) * each
            for image, some in zip(own.tolist(), batch.target.view(len(own), each, -1)):
                written = some[(some != 0).any(1)]
                assert len(written) == min(each, int((rows == image).sum()))
                assert set(written.flatten().tolist()) <= {0, 1, 3 + image}
                assert bool((written == 1).sum(1).eq(1).all()), "each ends once"
        assert sorted(seen) == list(range(len(names)))
    alone = [batch.target for batch in batches.once()]
    assert sum(int((target == 1).sum()) for target in alone) == len(owners)
