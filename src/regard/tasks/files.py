"""Model folders: ``config.json`` and ``model.safetensors``, written whole or not at all, and checked when read.

Nothing here can run code that a file carries: JSON and safetensors hold data only, and pickles are refused unread.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import rejected

CONFIG, WEIGHTS = "config.json", "model.safetensors"
#: What pickles, and the zip files that torch wraps them in, begin with.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
#: No model here comes near this many bytes; a larger file is not read.
_LARGEST = 1 << 31


class ModelFileError(ValueError):
    """A model folder that cannot be used; the message says which file and why."""


def save_model(folder: str | Path, model: nn.Module, config: Mapping[str, Any]) -> Path:
    """Write a model's parameters, and a configuration that says how to rebuild it.

    Each file appears whole or not at all. The configuration also keeps a checksum of the parameters, so that a pair
    left half replaced by a crash is noticed when it is read.

    Parameters
    ----------
    folder : str or Path
        Made if missing.
    model : Module
    config : mapping
        Anything JSON can hold.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = save({name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()})
    described = {**config, "sha256": hashlib.sha256(weights).hexdigest()}
    _write_atomically(folder / WEIGHTS, weights)
    _write_atomically(folder / CONFIG, (json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode())
    return folder


def load_config(folder: str | Path, *, kind: str, version: int) -> dict[str, Any]:
    """Read the configuration of a model folder.

    Parameters
    ----------
    folder : str or Path
    kind : str
        What its field ``format`` must say.
    version : int
        What its field ``version`` must say.

    Raises
    ------
    ModelFileError
        If it is missing, unreadable, not JSON, or of another format or version.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise _bad(path, "be JSON", f"something else ({error})") from None
    if not isinstance(config, dict) or config.get("format") != kind:
        found = config.get("format") if isinstance(config, dict) else config
        raise _bad(path, f"describe a model of format {kind!r}", _brief(found))
    if config.get("version") != version:
        raise _bad(path, f"be of version {version}", f"version {_brief(config.get('version'))}")
    return config


def load_weights(folder: str | Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Fill a model with the parameters in a model folder.

    Parameters
    ----------
    folder : str or Path
    model : Module
        May be on the meta device; its parameters are replaced.
    config : mapping
        What :func:`load_config` returned.

    Raises
    ------
    ModelFileError
        If the file is missing, unreadable, truncated, not safetensors, or if any parameter is missing, unknown, of
        another shape or dtype, or not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(folder) / WEIGHTS
    data = _read(path)
    if data.startswith(_PICKLES):
        raise _bad(path, "be a safetensors file", "a pickle or zip file, which is never loaded because it can run code")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise _bad(path, "be a whole safetensors file", f"one that is cut short or something else ({error})") from None
    _check_tensors(path, tensors, model.state_dict())
    if hashlib.sha256(data).hexdigest() != config.get("sha256"):
        raise _bad(path, f"be the file that {CONFIG} was saved with", "one with another checksum")
    model.load_state_dict(tensors, assign=True)


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name in sorted(expected.keys() ^ tensors.keys()):
        found = "no such tensor" if name in expected else "one that this model does not have"
        raise _bad(path, f"hold the parameters that {CONFIG} describes", f"{found}: {_brief(name)}")
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            expectation = f"hold {name} as {want.dtype} of shape {tuple(want.shape)}"
            raise _bad(path, expectation, f"{tensor.dtype} of shape {tuple(tensor.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise _bad(path, "hold finite numbers", f"nan or inf in {name}")


def _read(path: Path) -> bytes:
    if not path.parent.is_dir():
        raise _bad(path.parent, f"be a folder with {CONFIG} and {WEIGHTS}", "no such folder")
    try:
        if path.exists() and not path.is_file():
            raise _bad(path, "be a file", "a folder or device")
        if path.stat().st_size > _LARGEST:
            raise _bad(path, f"have at most {_LARGEST} bytes", path.stat().st_size)
        return path.read_bytes()
    except FileNotFoundError:
        raise _bad(path, "exist", "no such file") from None
    except OSError as error:
        raise _bad(path, "be readable", error.strerror or type(error).__name__) from None


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)  # mkstemp's own mode would hide the file from other users
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bad(path: Path, expected: str, got: object) -> Exception:
    return rejected("load", str(path), expected, got, ModelFileError)
