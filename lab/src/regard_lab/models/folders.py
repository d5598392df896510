"""Model folders with ``config.json`` and ``model.safetensors``: written atomically, and validated when read.

Loading never runs code from a file: JSON and safetensors hold only data, and pickles are rejected unread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard._utils.files import write_together

CONFIG, WEIGHTS = "config.json", "model.safetensors"
#: A training run writes this file when it starts, and the model when it ends.
OPTIONS = "options.toml"
#: The first bytes of pickles, and of the zip files that torch puts them in.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
#: Size limits in bytes. Parsed JSON takes many times its file size in memory.
_LARGEST, _LARGEST_JSON, _LARGEST_HEADER = 1 << 36, 1 << 25, 1 << 24
#: Bound on parameters, so that sums of products of three of them stay finite in float32.
_BOUND = 1e10
#: safetensors' names of the dtypes of parameters.
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


class ModelFileError(ValueError):
    """A model folder that cannot be loaded; the message names the file and the reason."""


class NotMappedError(ModelFileError):
    """A Hugging Face folder of a model that regard does not implement; transformers may."""


def save_model(
    folder: str | Path,
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    others: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a model's parameters and the configuration to rebuild it.

    All files are written under temporary names before the first old file is replaced. The configuration stores
    checksums, so that loading detects a folder left half replaced by a crash.

    Parameters
    ----------
    folder : str or Path
        Created if missing.
    model : Module
    config : mapping
        JSON-serializable.
    others : mapping, optional
        Names of additional files, with the JSON-serializable content of each.
    dtype : torch.dtype, optional
        Storage dtype of floating-point parameters; their own by default.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    OSError
        If it cannot be written.
    ValueError
        If a parameter is not finite in ``dtype``, or too large to compute with.
    """
    from safetensors.torch import save

    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in model.state_dict().items()
    }
    check_finite(tensors)
    files = {name: json_bytes(data) for name, data in (others or {}).items()} | {WEIGHTS: save(tensors)}
    sums = {name: _checksum(data) for name, data in files.items()}
    described = {**config, "sha256": sums.pop(WEIGHTS)} | ({"files": sums} if sums else {})
    described |= {"config_sha256": _sealed(described)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_together({folder / name: data for name, data in {**files, CONFIG: json_bytes(described, 1)}.items()})
    return folder


def load_json(folder: str | Path, name: str, config: Mapping[str, Any]) -> Any:
    """Read one of the additional files of a model folder.

    Parameters
    ----------
    folder : str or Path
    name : str
    config : mapping
        From :func:`load_config`.

    Raises
    ------
    ModelFileError
        If it is missing, unreadable, not JSON, or not the file that was saved with the configuration.
    """
    path, sums = Path(folder) / name, config.get("files")
    data = _read(path)
    if not isinstance(sums, dict) or _checksum(data) != sums.get(name):
        raise file_error(path, f"be the file that {CONFIG} was saved with", "one with another checksum")
    return _parsed(path, data)


def load_config(folder: str | Path, *, kind: str, version: int) -> dict[str, Any]:
    """Read the configuration of a model folder.

    Parameters
    ----------
    folder : str or Path
    kind : str
        The expected value of its field ``format``.
    version : int
        The expected value of its field ``version``.

    Raises
    ------
    ModelFileError
        If it is missing, unreadable, not JSON, or of another format or version.
    """
    path = Path(folder) / CONFIG
    if not path.exists() and path.with_name(OPTIONS).exists():
        got = "an unfinished training run, which writes its model at the end: resume it with `regard train … --resume`"
        raise file_error(path.parent, "hold a model", got)
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != kind:
        stored_format = config.get("format") if isinstance(config, dict) else config
        raise file_error(path, f"describe a model of format {kind!r}", brief(stored_format))
    if config.get("version") != version:
        raise file_error(path, f"be of version {version}", f"version {brief(config.get('version'))}")
    return config


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    ModelFileError
        If it is missing, unreadable, not JSON, or too large.
    """
    return _parsed(path, _read(path))


def load_weights(folder: str | Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Fill a model with the parameters in a model folder.

    Parameters
    ----------
    folder : str or Path
    model : Module
        May be on the meta device; its parameters are replaced.
    config : mapping
        From :func:`load_config`.

    Raises
    ------
    ModelFileError
        If the file is missing, unreadable, truncated or not safetensors, or if a parameter is missing, unknown, of
        another shape or dtype, or not finite.
    """
    from safetensors.torch import load

    path = Path(folder) / WEIGHTS
    _check_shapes(path, read_header(path), model.state_dict())  # before allocating memory for the tensors
    data = _read(path, _LARGEST)
    with reading_safetensors(path):
        tensors = load(data)
    for name, tensor in tensors.items():
        if (problem := unusable(tensor)) is not None:
            raise file_error(path, "hold finite numbers", f"{problem} in {name}")
    if _checksum(data) != config.get("sha256"):
        raise file_error(path, f"be the file that {CONFIG} was saved with", "one with another checksum")
    if _sealed(config) != config.get("config_sha256"):
        raise file_error(path.with_name(CONFIG), "match its checksum", "a file modified after saving")
    model.load_state_dict(tensors, assign=True)


def check_fields(path: Path, config: type[Any], described: Any) -> None:
    """Raise unless a configuration's field ``"model"`` has the fields of a class, and no others."""
    known = {each.name for each in fields(config)}
    if not isinstance(described, dict):
        raise file_error(path, "have an object 'model'", type(described).__name__)
    wrong = [f"no {name!r}" for name in sorted(known - set(described))]
    wrong += [f"an unknown {str(name)!r}" for name in sorted(set(described) - known, key=str)]
    if wrong:
        expected = "have the fields of this version of regard_lab in 'model' (train the model again with it)"
        raise file_error(path, expected, ", ".join(wrong))


def build_model(path: Path, config: type[Any], model: type[Any], described: Any) -> Any:
    """Return the model that a configuration describes, on the meta device."""
    check_fields(path, config, described)
    try:
        made = config(**described)
        # Building modules takes time even on the meta device. Every layer has at least one tensor.
        layers, stored = made.encoder_layers + made.decoder_layers, len(read_header(path.with_name(WEIGHTS)))
        if layers > stored:
            raise file_error(path, f"have at most as many layers as {WEIGHTS} has tensors, {stored}", layers)
        with torch.device("meta"):
            return model(made)
    except ModelFileError:
        raise
    except (ValueError, TypeError) as error:
        raise file_error(path, "describe a model", f"this: {str(error).rstrip('.')}") from None


def read_header(path: Path, most: int = _LARGEST) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor in a safetensors file; check that the file is complete."""
    from safetensors import safe_open

    with _opened(path, most) as file:
        begin = file.read(8)
    # A 640-byte header starts like a pickle. Read as a length, the start of a pickle exceeds any file size.
    if begin.startswith(_PICKLES) and int.from_bytes(begin, "little") > path.stat().st_size:
        raise file_error(
            path, "be a safetensors file", "a pickle or zip file, which could run code and is never loaded"
        )
    if int.from_bytes(begin, "little") > _LARGEST_HEADER:
        expected = f"be a complete safetensors file, with a header of at most {_LARGEST_HEADER:,} bytes"
        raise file_error(path, expected, f"{int.from_bytes(begin, 'little'):,}")
    with reading_safetensors(path), safe_open(path, framework="pt") as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


@contextmanager
def reading_safetensors(path: Path) -> Iterator[None]:
    """Turn safetensors' errors into a :class:`ModelFileError` about a damaged file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, ValueError, KeyError, RuntimeError, OSError) as error:
        got = f"one that is truncated or of another format ({brief(error)})"
        raise file_error(path, "be a complete safetensors file", got) from None


def _check_shapes(
    path: Path, stored: Mapping[str, tuple[str, tuple[int, ...]]], expected: Mapping[str, Tensor]
) -> None:
    for name in sorted(expected.keys() ^ stored.keys()):
        what = "a missing tensor" if name in expected else "an unknown tensor"
        raise file_error(path, f"hold the parameters that {CONFIG} describes", f"{what}: {brief(name)}")
    for name, want in expected.items():
        dtype, shape = DTYPES.get(stored[name][0], stored[name][0]), stored[name][1]
        if (dtype, shape) != (want.dtype, tuple(want.shape)):
            wanted = f"hold {name} as {want.dtype} of shape {tuple(want.shape)}"
            raise file_error(path, wanted, f"{dtype} of shape {brief(shape)}")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise if a tensor to save is not finite or too large."""
    for name, tensor in tensors.items():
        if (problem := unusable(tensor)) is not None:
            raise rejected("save", "model", f"have finite parameters in {tensor.dtype}", f"{problem} in {name}")


def unusable(tensor: Tensor) -> str | None:
    """Return why a tensor is unusable: non-finite or too large values; None if it is fine."""
    if not bool(torch.isfinite(tensor).all()):
        return "nan or inf"
    if tensor.numel() and float(largest := tensor.abs().max()) >= _BOUND:
        return f"{float(largest):.3g}, above {_BOUND:g},"
    return None


@contextmanager
def _opened(path: Path, most: int) -> Iterator[BinaryIO]:
    """Open a regular file that is not too large."""
    if not path.parent.is_dir():
        raise file_error(path.parent, f"be a folder with {CONFIG} and {WEIGHTS}", "no such folder")
    try:
        if path.exists() and not path.is_file():
            raise file_error(path, "be a file", "a folder or device")
        if path.stat().st_size > most:
            raise file_error(path, f"have at most {most:,} bytes", f"{path.stat().st_size:,}")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise file_error(path, "exist", "no such file") from None
    except OSError as error:
        raise file_error(path, "be readable", error.strerror or type(error).__name__) from None


def _read(path: Path, most: int = _LARGEST_JSON) -> bytes:
    with _opened(path, most) as file:
        return file.read(min(most, path.stat().st_size))  # read() allocates as much memory as requested


def json_bytes(data: object, indent: int | None = None) -> bytes:
    """Return data as the bytes of a JSON file."""
    return (json.dumps(data, indent=indent, ensure_ascii=False) + "\n").encode()


def _parsed(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise file_error(path, "be JSON", f"invalid JSON ({error})") from None


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(config: Mapping[str, Any]) -> str:
    """Return the checksum of a configuration, independent of its JSON formatting."""
    rest = {name: value for name, value in config.items() if name != "config_sha256"}
    return _checksum(json.dumps(json.loads(json.dumps(rest)), sort_keys=True).encode())


def brief(value: object) -> str:
    """Format a value for an error message, in at most 60 characters."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def file_error(path: Path, expected: str, got: object) -> Exception:
    """Return a :class:`ModelFileError` about a file."""
    return rejected("load", str(path), expected, got, ModelFileError)


def not_mapped(path: Path, expected: str, got: object) -> Exception:
    """Return a :class:`NotMappedError` about a config.json."""
    return rejected("load", str(path), expected, got, NotMappedError)
