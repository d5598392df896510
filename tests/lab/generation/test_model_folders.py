"""A model's folder: what is saved comes back, and whatever was done to the files is explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_models import ENGLISH, LINES, MAKERS, SOURCE, TARGET, recurrent
from tabled import Tabled

from regard._utils import files as _writing
from regard_lab.generation import sequence_model as sequences
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.models import folders as files
from regard_lab.models.folders import ModelFileError
from regard_lab.text.vocabulary import SubwordVocabulary, SymbolVocabulary


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    return MAKERS[request.param]()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recurrent().save(tmp_path / "model")


def test_what_is_saved_comes_back(model: SequenceModel, tmp_path: Path) -> None:
    expected = model.predict(LINES)
    again = SequenceModel.load(model.save(tmp_path / "deep" / "model"))
    assert again.predict(LINES) == expected
    assert (again.kind, again.about) == (model.kind, model.about)
    names = sorted(path.name for path in (tmp_path / "deep" / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "source.json", "target.json"]
    again.save(tmp_path / "deep" / "model")
    assert SequenceModel.load(tmp_path / "deep" / "model").predict(LINES) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_may_be_stored_in_half_the_bytes(model: SequenceModel, tmp_path: Path, dtype: str) -> None:
    sizes = [
        (model.save(tmp_path / name, dtype=name) / "model.safetensors").stat().st_size for name in (dtype, "float32")
    ]
    assert sizes[0] < 0.7 * sizes[1]
    for (name, mine), other in zip(
        model.model.state_dict().items(), SequenceModel.load(tmp_path / dtype).model.state_dict().values()
    ):
        torch.testing.assert_close(other, mine.to(getattr(torch, dtype)).float(), rtol=0, atol=0, msg=name)


def test_parameters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = recurrent()
    model.model.target_embedding.weight.data[5, 1] = 1e6
    with pytest.raises(
        ValueError, match=r"save: model must have finite parameters in torch.float16, got nan or inf in"
    ):
        model.save(tmp_path / "model", dtype="float16")
    assert not (tmp_path / "model").exists()


def test_a_full_disk_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for count in range(4):
        calls = iter(range(100))

        def full(descriptor: int, calls: Iterator[int] = calls, count: int = count) -> None:
            if next(calls) == count:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(_writing.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            recurrent(cell="gru").save(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def edited(change: Callable[[dict], object], name: str = "config.json") -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / name).read_text("utf-8"))
        change(data)
        (folder / name).write_text(json.dumps(data), "utf-8")

    return edit


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-20])


def other_vocabulary(folder: Path) -> None:
    torch.manual_seed(0)
    larger = SubwordVocabulary.train(ENGLISH, "characters")
    config = RecurrentConfig(len(larger), len(TARGET), embedding=8, encoder=6, decoder=8, features=6)
    other = SequenceModel(RecurrentEncoderDecoder(config), larger, TARGET).save(folder.parent / "other")
    (folder / "source.json").write_bytes((other / "source.json").read_bytes())


def claim(name: str) -> Callable[[Path], object]:
    """Break a vocabulary's file and correct the checksum."""

    def change(folder: Path) -> None:
        edited(lambda data: data.update(lowercase="no"), name)(folder)
        checksum = files._checksum((folder / name).read_bytes())
        edited(lambda data: data["files"].update({name: checksum}))(folder)

    return change


TAMPERED = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), r"must be a folder with config\.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json must exist, got no such file"),
    "a run": (
        lambda folder: (folder / "config.json").rename(folder / "options.toml"),
        r"must hold a model, got an unfinished training run, .*`regard train … --resume`\.$",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors must exist"),
    "no source": (lambda folder: (folder / "source.json").unlink(), r"source\.json must exist, got no such file"),
    "no target": (lambda folder: (folder / "target.json").unlink(), r"target\.json must exist, got no such file"),
    "cut config": (cut("config.json"), r"config\.json must be JSON"),
    "cut weights": (cut("model.safetensors"), r"safetensors must be a complete safetensors file"),
    "cut source": (cut("source.json"), r"source\.json must be the file that config\.json was saved with"),
    "cut target": (cut("target.json"), r"target\.json must be the file that config\.json was saved with"),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        r"must describe a model of format 'regard.seq",
    ),
    "format": (edited(lambda c: c.update(format="other")), r"must describe a model of format .*, got 'other'"),
    "version": (edited(lambda c: c.update(version=99)), r"must be of version 1, got version 99"),
    "kind": (edited(lambda c: c.update(kind="rnn")), r"must have a 'kind' among recurrent, transformer, got 'rnn'"),
    "kind list": (edited(lambda c: c.update(kind=["x"])), r"must have a 'kind' among"),
    "other kind": (edited(lambda c: c.update(kind="transformer")), r"must have the fields of .*no 'activation'"),
    "dtype": (edited(lambda c: c.update(dtype="int8")), r"must have a 'dtype' among bfloat16, float16, float32"),
    "half": (edited(lambda c: c.update(dtype="float16")), r"must hold .* as torch\.float16"),
    "about": (edited(lambda c: c.update(about=3)), r"must have an object 'about', got 3"),
    "field": (edited(lambda c: c["model"].pop("cell")), r"got no 'cell'"),
    "more": (edited(lambda c: c["model"].update(evil=1)), r"got an unknown 'evil'"),
    "size": (
        edited(lambda c: c["model"].update(encoder=-1)),
        r"must describe a model, got this: RecurrentConfig: encoder",
    ),
    "type": (edited(lambda c: c["model"].update(encoder="a")), r"must describe a model, got this"),
    "depth": (
        edited(lambda c: c["model"].update(encoder_layers=60_000)),
        r"this: RecurrentConfig: encoder_layers must be an int from 1 to 100, got 60000",
    ),
    "layers": (
        edited(lambda c: c["model"].update(decoder_layers=99)),
        r"must have at most as many layers as model\.safetensors has tensors, \d\d, got 100",
    ),
    "width": (edited(lambda c: c["model"].update(encoder=7)), r"model\.safetensors must hold"),
    "vocabulary": (
        edited(lambda c: c["model"].update(sources=7)),
        rf"have sources {len(SOURCE)} and targets {len(TARGET)}, the sizes of source\.json and target\.json, got 7",
    ),
    "no sums": (edited(lambda c: c.pop("files")), r"source\.json must be the file that config\.json was saved with"),
    "dropout": (
        edited(lambda c: c["model"].update(dropout=0.123)),
        r"config\.json must match its checksum, got a file modified after saving",
    ),
    "no sum of its own": (edited(lambda c: c.pop("config_sha256")), r"config\.json must match its checksum"),
    "weights sum": (edited(lambda c: c.update(sha256="0")), r"with another checksum"),
    "other vocabulary": (other_vocabulary, r"source\.json must be the file that config\.json was saved with"),
    "edited vocabulary": (edited(lambda c: c.update(lowercase=True), "target.json"), r"target\.json must be the file"),
    "wrong vocabulary": (claim("source.json"), r"source\.json must say true or false for 'lowercase'"),
    "pickle": (
        lambda folder: torch.save({}, folder / "model.safetensors"),
        r"model\.safetensors must be a safetensors file, got a pickle or zip file",
    ),
    "a folder": (
        lambda folder: ((folder / "source.json").unlink(), (folder / "source.json").mkdir()),
        r"source\.json must be a file, got a folder or device",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_folder_that_was_tampered_with_is_explained(folder: Path, name: str) -> None:
    change, message = TAMPERED[name]
    change(folder)
    with pytest.raises(ModelFileError, match=message) as caught:
        SequenceModel.load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_model_that_was_never_saved_is_not_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in memory, where the configuration claims widths, nor layer by layer."""
    edited(lambda c: c["model"].update(encoder=60_000, decoder=60_000, embedding=60_000))(folder)
    with pytest.raises(ModelFileError, match=r"model\.safetensors must hold .* of shape \(.*(60|120)000"):
        SequenceModel.load(folder)

    def build(config: object) -> None:
        raise AssertionError("built")

    monkeypatch.setitem(sequences.MODELS, "recurrent", (RecurrentConfig, build))
    edited(lambda c: c["model"].update(encoder_layers=99))(folder)
    with pytest.raises(ModelFileError, match="must have at most as many layers"):
        SequenceModel.load(folder)


def test_a_model_of_another_class_cannot_be_saved(tmp_path: Path) -> None:
    words = SymbolVocabulary.train(["a b"], " ")
    model = SequenceModel(Tabled(len(words), len(words)), words, words)
    with pytest.raises(TypeError, match="save: model must be a RecurrentEncoderDecoder or TransformerEncoderDecoder"):
        model.save(tmp_path)
