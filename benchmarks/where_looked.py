"""Check whether words attend to what they name, without using the captioner to locate it.

For a colour word, the target region has that colour by the hue, saturation and brightness of its pixels. For an object
word, it is where the encoder's ImageNet classifier, whose last layer captioners do not use, finds such an object (a
class activation map, Zhou 2016).

A word's attention on its target is the sum over the fifth of the grid where the target is strongest, compared with the
mean of this sum over all words of the caption. A second probe replaces the features of the most attended places, or of
as many others, by the image's mean, and measures by how much the word's log-probability falls.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard_lab.data import plain_caption
from regard_lab.generation import Prediction, pad_to_device
from regard_lab.models import END
from regard_lab.tasks.captioning import Captioner, word_weights
from regard_lab.training import cross_entropy

#: Hues in degrees, from and to; and the least saturation and brightness.
HUES = {
    "red": (345, 15), "orange": (15, 40), "yellow": (40, 70), "green": (70, 165), "blue": (180, 260),
    "purple": (260, 300), "pink": (300, 345),
}  # fmt: skip
LEAST = (0.35, 0.25)
#: Black, white: brightness at most, or at least, and saturation at most.
GREYS = {"black": (0.0, 0.22, 1.0), "white": (0.8, 1.0, 0.18)}
#: Numbers of ImageNet's classes by the words for them.
OBJECTS: dict[str, tuple[int, ...]] = {
    "dog": tuple(range(151, 269)), "dogs": tuple(range(151, 269)), "puppy": tuple(range(151, 269)),
    "ball": (430, 522, 574, 722, 768, 805, 852, 890), "soccer": (805,), "football": (560, 768), "basketball": (430,),
    "tennis": (752, 852), "bike": (444, 671), "bicycle": (444, 671), "motorcycle": (665, 670), "car": (436, 511, 817),
    "horse": (339,), "beach": (977, 978), "ocean": (977, 978), "boat": (472, 484, 554, 576, 625), "swing": (843,),
    "mountain": (970, 979), "sunglasses": (836, 837), "snowboard": (795,), "skier": (795,),
}  # fmt: skip
#: The places that count as the named thing, and those that are replaced.
SHARE, REPLACED = 0.2, 5


@dataclass(frozen=True)
class Look:
    """Where one word looked.

    Attributes
    ----------
    image, caption, word : str
    place : int
        Of the word in the caption.
    kind : str
        "colour" or "object".
    on_it, mean : float
        Attention on the named thing, of the word and of the mean word.
    attended, others : float
        By how many nats the word's log-probability falls without the places it attended to, and without others.
    """

    image: str
    caption: str
    word: str
    place: int
    kind: str
    on_it: float
    mean: float
    attended: float
    others: float


def colour_places(pixels: np.ndarray, word: str, grid: tuple[int, int]) -> Tensor | None:
    """Return how much of each place (S,) has a colour, or None where no place has it."""
    rows, cols = grid
    small = pixels[::4, ::4].reshape(-1, 3) / 255
    hsv = np.array([colorsys.rgb_to_hsv(*each) for each in small])
    if word in GREYS:
        low, high, saturated = GREYS[word]
        has = (hsv[:, 2] >= low) & (hsv[:, 2] <= high) & (hsv[:, 1] <= saturated)
    else:
        first, last = (each / 360 for each in HUES[word])
        hue = (hsv[:, 0] >= first) & (hsv[:, 0] < last) if first < last else (hsv[:, 0] >= first) | (hsv[:, 0] < last)
        has = hue & (hsv[:, 1] >= LEAST[0]) & (hsv[:, 2] >= LEAST[1])
    side = len(pixels[::4])
    maps = torch.from_numpy(has.reshape(1, 1, side, side).astype(np.float32))
    places = torch.nn.functional.adaptive_avg_pool2d(maps, (rows, cols)).flatten()
    return places if float(places.max()) > 0.15 else None


def object_places(grid: Tensor, word: str, classifier: Tensor) -> Tensor | None:
    """Return how likely an object is at each place (S,), or None where the classifier finds none in the image."""
    logits = grid.float() @ classifier.T  # (S, 1000), without the bias, which is the same everywhere
    classes = torch.tensor(OBJECTS[word])
    whole = logits.mean(0)
    if int(whole.argsort(descending=True)[:10].unsqueeze(1).eq(classes).any(1).sum()) == 0:
        return None
    return logits[:, classes].amax(1)


def named_places(strength: Tensor) -> Tensor:
    """Return which places (S,) count as the named thing."""
    count = max(1, round(SHARE * len(strength)))
    return torch.zeros(len(strength), dtype=torch.bool).index_fill(0, strength.topk(count).indices, True)


@torch.no_grad()
def likelihoods(captioner: Captioner, grids: Tensor, numbers: list[int]) -> Tensor:
    """Return the log-probability (B, T) of each token of a caption, for grids (B, S, F)."""
    target, _ = pad_to_device(captioner.model, [[*numbers, END]] * len(grids))
    before = torch.cat([target.new_full((len(grids), 1), END), target[:, :-1]], 1)
    features = captioner.model.features(grids, torch.full((len(grids),), grids.shape[1]), before)
    return cross_entropy(features, captioner.model.projection, target)[1][:, :-1]


def looks_of(
    captioner: Captioner, prediction: Prediction, grid: Tensor, pixels: np.ndarray, classifier: Tensor, seed: int
) -> list[Look]:
    """Return where the colour and object words of a caption looked."""
    shape = (captioner.encoder.rows, captioner.encoder.cols)
    weights = word_weights(prediction)
    found = []
    for place, word in enumerate(prediction.words):
        plain = plain_caption(word.text)
        if plain in HUES or plain in GREYS:
            kind, strength = "colour", colour_places(pixels, plain, shape)
        elif plain in OBJECTS:
            kind, strength = "object", object_places(grid, plain, classifier)
        else:
            continue
        if strength is None:
            continue
        on = weights[:, named_places(strength)].sum(1)
        attended, others = _falls(captioner, prediction, grid, place, weights[place], seed)
        found.append(Look(prediction.source, prediction.text, plain, place, kind, float(on[place]), float(on.mean()),
                          attended, others))  # fmt: skip
    return found


def _falls(
    captioner: Captioner, prediction: Prediction, grid: Tensor, place: int, weights: Tensor, seed: int
) -> tuple[float, float]:
    """Return by how much a word's log-probability falls without the places it attends to, and without others."""
    numbers = captioner.vocabulary.encode(prediction.text)
    tokens = captioner.vocabulary.words(numbers)[place].tokens
    order = weights.argsort(descending=True)
    rest = order[REPLACED:][torch.randperm(len(order) - REPLACED, generator=torch.Generator().manual_seed(seed))]
    grids = grid.float().repeat(3, 1, 1)
    for row, places in ((1, order[:REPLACED]), (2, rest[:REPLACED])):
        grids[row, places] = grid.float().mean(0)
    whole, without, other = likelihoods(captioner, grids, numbers)[:, tokens.start : tokens.stop].sum(1).tolist()
    return whole - without, whole - other
