"""Small images with captions: a square of a colour, somewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220)}
PLACES = {"left": 4, "right": 36}


def draw(folder: Path, each: int = 4, side: int = 64, seed: int = 0) -> list[tuple[str, str]]:
    """Write images of each colour at each place, and return lines of file and caption, two for each."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    lines = []
    for number in range(each):
        for colour, rgb in COLOURS.items():
            for place, left in PLACES.items():
                pixels = np.full((side, side, 3), 128, np.uint8) + random.integers(0, 20, (side, side, 3), np.uint8)
                top = int(random.integers(4, 36))
                pixels[top : top + 24, left : left + 24] = rgb
                name = f"{colour}-{place}-{number}.png"
                Image.fromarray(pixels).save(folder / name)
                lines += [(name, f"A {colour} square on the {place} ."), (name, f"there is a {colour} one {place}")]
    return lines


def write_list(path: Path, lines: list[tuple[str, str]]) -> Path:
    """Write a list of captions."""
    path.write_text("".join(f"{name}\t{text}\n" for name, text in lines))
    return path
