"""Model folders: saved and loaded to the bit, and every broken one refused with a reason."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard._utils import files as _writing
from regard_lab.data.pairs import Pairs
from regard_lab.models.folders import ModelFileError
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer

PAIRS = Pairs(["cat", "tack"], ["K AE T", "T AE K"])


def made(seed: int = 3) -> Pronouncer:
    return Pronouncer.untrained(PAIRS, seed=seed, embedding=4, encoder=4, decoder=4, features=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made().save(tmp_path / "model")


def test_a_round_trip_is_exact(folder: Path) -> None:
    saved, loaded = made().model, Pronouncer.load(folder).model
    assert loaded.source.to_json() == saved.source.to_json()
    assert loaded.target.to_json() == saved.target.to_json()
    assert loaded.model.config == saved.model.config
    assert not loaded.model.training
    ours, theirs = loaded.model.state_dict(), saved.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.predict(["cat", "tat"]) == saved.predict(["cat", "tat"])
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.safetensors", "source.json", "target.json",
    ]  # fmt: skip


def test_a_loaded_model_can_be_saved_again(folder: Path, tmp_path: Path) -> None:
    again = Pronouncer.load(folder).save(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "source.json", "target.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_a_failed_write_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_writing.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        made(seed=4).save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _edit_config(*, sealed: bool = True, **changes: object) -> Callable[[Path], None]:
    """Change the configuration and, where it is sealed again, its own checksum with it."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        rest = json.dumps({name: config[name] for name in sorted(config) if name != "config_sha256"}, sort_keys=True)
        new = {"config_sha256": hashlib.sha256(rest.encode()).hexdigest()} if sealed else {}
        path.write_text(json.dumps(config | new))

    return edit


def _edit_sizes(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        sizes = json.loads((folder / "config.json").read_text())["model"]
        _edit_config(model=sizes | changes)(folder)

    return edit


def _edit_codec(**changes: object) -> Callable[[Path], None]:
    """Change the letters, and the checksum with them."""

    def edit(folder: Path) -> None:
        path = folder / "source.json"
        data = json.dumps(json.loads(path.read_text()) | changes).encode()
        path.write_bytes(data)
        files = json.loads((folder / "config.json").read_text())["files"]
        _edit_config(files=files | {"source.json": hashlib.sha256(data).hexdigest()})(folder)

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def _cut(name: str, keep: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return cut


def _flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "model.safetensors").write_bytes(data)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle was loaded')",))


def _torch_pickle(folder: Path) -> None:
    torch.save({"w": _Bomb()}, folder / "model.safetensors")


def _swap_for_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


#: A parameter of the model.
W_V = "attending.layer.w_v"

BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json must exist, got no such file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors must exist, got no such file"),
    "broken JSON": (_write("config.json", b'{"format": '), "config.json must be JSON, got invalid JSON"),
    "cut config": (_cut("config.json", 0.5), "config.json must be JSON, got invalid JSON"),
    "binary config": (_write("config.json", b"\x80\x04\x95\xff\xfe"), "config.json must be JSON"),
    "deep JSON": (_write("config.json", b"[" * 100_000), "config.json must be JSON"),
    "a list": (_write("config.json", b"[1]"), "must describe a model of format 'regard.sequences', got [1]"),
    "foreign config": (
        _edit_config(format="bert"),
        "must describe a model of format 'regard.sequences', got 'bert'",
    ),
    "newer version": (_edit_config(version=2), "config.json must be of version 1, got version 2"),
    "no letters": (_edit_codec(symbols=None), "source.json must have a list of strings 'symbols', got None"),
    "odd letters": (_edit_codec(symbols=["a", 1]), "source.json must have a list of strings 'symbols', got ['a', 1]"),
    "double letters": (_edit_codec(symbols=["a", "a"]), "symbols must all be different, got 1 repeated"),
    "other letters": (_edit_codec(symbols=["a"]), "must have sources 4 and targets 6"),
    "words for letters": (
        _edit_codec(separator=" "),
        "must describe a model of letters and phonemes, of task 'pronunciation'",
    ),
    "no sizes": (_edit_config(model={}), "must have the fields of this version of regard_lab in 'model'"),
    "more sizes": (_edit_sizes(layers=3), "got an unknown 'layers'"),
    "wrong size": (_edit_sizes(decoder=8), "must hold"),
    "huge size": (_edit_sizes(decoder=10**12), "decoder must be an int from 1 to 65,536"),
    "large size": (_edit_sizes(decoder=65536, encoder=65536, features=65536), "must hold"),
    "size in words": (_edit_sizes(encoder="four"), "encoder must be an int from 1 to 65,536, got 'four'"),
    "cut weights": (_cut("model.safetensors", 0.7), "model.safetensors must be a complete safetensors file"),
    "cut header": (_cut("model.safetensors", 0.01), "model.safetensors must be a complete safetensors file"),
    "empty weights": (_write("model.safetensors", b""), "model.safetensors must be a complete safetensors file"),
    "a text": (
        _write("model.safetensors", b"hello, world" * 9),
        "model.safetensors must be a complete safetensors file",
    ),
    "a pickle": (
        _write("model.safetensors", pickle.dumps(_Bomb())),
        "got a pickle or zip file, which could run code and is never loaded",
    ),
    "torch's pickle": (_torch_pickle, "got a pickle or zip file, which could run code and is never loaded"),
    "a folder": (_swap_for_folder, "model.safetensors must be a file, got a folder or device"),
    "foreign tensors": (lambda f: save_file({"x": torch.ones(2)}, f / "model.safetensors"), "got"),
    "missing tensor": (_edit_tensors(lambda t: t.pop(W_V)), f"got a missing tensor: '{W_V}'"),
    "extra tensor": (_edit_tensors(lambda t: t.update(z=torch.ones(1))), "an unknown tensor: 'z'"),
    "other dtype": (_edit_tensors(lambda t: t.update({W_V: t[W_V].double()})), f"must hold {W_V} as torch.float32"),
    "other shape": (_edit_tensors(lambda t: t.update({W_V: t[W_V][:2]})), "got torch.float32 of shape (2,)"),
    "nan": (_edit_tensors(lambda t: t[W_V].fill_(torch.nan)), f"must hold finite numbers, got nan or inf in {W_V}"),
    "other weights": (_edit_tensors(lambda t: t[W_V].add_(1)), "got one with another checksum"),
    "another config": (
        _edit_config(sealed=False, about={"task": "pronunciation", "languages": ["en", "fr"]}),
        "config.json must match its checksum, got a file modified after saving",
    ),
    "a flipped bit": (_flip, "got one with another checksum"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_with_a_reason(folder: Path, case: str) -> None:
    breaks, message = BROKEN[case]
    breaks(folder)
    with pytest.raises(ModelFileError) as caught:
        Pronouncer.load(folder)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"load: {folder}")
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere must be a folder with config.json and model.safetensors"):
        Pronouncer.load(tmp_path / "nowhere")


def test_an_unreadable_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # the tests may run as root, who may read everything
    with pytest.raises(ModelFileError, match=r"config.json must be readable, got Permission denied"):
        Pronouncer.load(folder)
