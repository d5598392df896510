"""The judges of where words look, on images that leave no doubt."""

import numpy as np
import pytest
import torch
from benchmarks.captioning import judged, table
from benchmarks.where_looked import OBJECTS, Look, colour_places, named_places, object_places


@pytest.mark.parametrize(
    ("word", "colour"),
    [("red", (200, 20, 20)), ("blue", (30, 60, 200)), ("white", (250, 250, 250)), ("black", (9, 9, 9))],
)
def test_a_colour_is_where_its_pixels_are(word: str, colour: tuple[int, int, int]) -> None:
    pixels = np.full((112, 112, 3), 128, np.uint8)
    pixels[:48, :16] = colour
    places = colour_places(pixels, word, (7, 7))
    assert places is not None
    assert [int(each) for each in places.nonzero()[:, 0]] == [0, 7, 14]
    assert colour_places(np.full((112, 112, 3), 128, np.uint8), word, (7, 7)) is None


def test_an_object_is_where_the_classifier_finds_it() -> None:
    classifier = torch.zeros(1000, 4)
    classifier[OBJECTS["dog"][0], 1] = 1.0
    grid = torch.zeros(49, 4)
    grid[[3, 4], 1] = 9.0
    places = object_places(grid, "dog", classifier)
    assert places is not None and set(places.topk(2).indices.tolist()) == {3, 4}
    assert object_places(torch.zeros(49, 4) - grid, "dog", classifier) is None
    assert int(named_places(places).sum()) == 10


def test_means_are_by_kind() -> None:
    found = [Look("a", "a red dog", "red", 1, "colour", 0.5, 0.2, 1.0, 0.1),
             Look("a", "a red dog", "dog", 2, "object", 0.1, 0.2, 0.0, 0.0),
             Look("b", "a dog", "dog", 1, "object", 0.5, 0.2, 1.0, 0.5)]  # fmt: skip
    means = judged(found)
    assert means["captions"] == 2
    assert means["object"]["words"] == 2 and means["object"]["more than the mean word"] == 0.5
    assert means["object"]["on it"] == 0.3 and means["colour"]["falls without attended"] == 1.0
    assert "| 2.2 |" in table({"scores random": {"scores": {"bleu4": 2.2}}})
