"""Captioners from images and captions: learned, resumed, begun with another, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import StopAt
from lightning.pytorch import Callback
from small_images import draw, write_list

from regard_lab.data.images import open_images, resize_image
from regard_lab.generation.beam_search import SearchOptions
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.models.folders import ModelFileError
from regard_lab.tasks.captioning.captioner import Captioner, is_captioner
from regard_lab.tasks.captioning.encoders import ConvolutionalEncoder, write_features
from regard_lab.tasks.captioning.options import CaptionOptions
from regard_lab.tasks.captioning.pictures import word_weights
from regard_lab.tasks.captioning.training import Captioning

SMALL = {"embedding": 16, "decoder": 32, "features": 16, "states": 32, "dropout": 0.0}
TRAINING = {"threads": 1, "precision": "float32", "batch_images": 8, "captions": 2, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, captions, and features of a small network, in place of EfficientNet's, which would take long."""
    folder = tmp_path_factory.mktemp("data")
    lines = draw(folder / "images", 8)
    write_list(folder / "train.tsv", lines[12:])
    write_list(folder / "valid.tsv", lines[:12])
    return folder


class Stand(ConvolutionalEncoder):  # type: ignore[misc]
    """A small network with parameters that are always the same."""

    def __init__(self) -> None:
        before = torch.get_rng_state()
        torch.manual_seed(5)
        super().__init__()
        torch.set_rng_state(before)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard_lab.tasks.captioning.training.open_encoder", lambda name, side: Stand())


def options(data: Path, /, **table: Any) -> CaptionOptions:
    table["data"] = {"data": str(data / "train.tsv"), "valid": str(data / "valid.tsv"), "images": str(data / "images"),
                     "mirror": False} | table.get("data", {})  # fmt: skip
    table.setdefault("model", SMALL)
    table["vocabularies"] = {"kind": "characters"} | table.get("vocabularies", {})
    table["training"] = TRAINING | table.get("training", {})
    return CaptionOptions.from_table(table)


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.mark.campaign
@pytest.mark.slow
def test_a_small_network_and_its_captioner_learn_together(data: Path, tmp_path: Path) -> None:
    asked = options(
        data, encoder="cnn", tune="full", vocabularies={"kind": "bpe", "size": 60},
        training={"epochs": 30.0, "coverage": 0.1, "validate_every": 40, "learning_rate": 0.005},
    )  # fmt: skip
    captioner, ended = Captioning(asked, tmp_path / "out", quiet).train()
    assert ended.best > 300, "of 1000"
    assert is_captioner(tmp_path / "out")
    loaded = Captioner.load(tmp_path / "out")
    with open_images(data / "images") as images:
        names = [name for name in images.names if name.endswith("-0.png")]
        pixels = [resize_image(images.read(name), 64) for name in names]
    search = PredictionOptions(SearchOptions(beams=3), alignment=True)
    written = loaded.caption(loaded.features(pixels), names, search)
    again = captioner.caption(captioner.features(pixels), names, search)
    assert [each.text for each in written] == [each.text for each in again]
    for each in written:
        colour, place, _ = each.source.split("-")
        assert colour in each.text and place in each.text
        weights = word_weights(each)
        assert weights.shape == (len(each.words), 16)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))


@pytest.mark.campaign(keep=1)
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("kind", ["soft", "reinforce", "transformer"])
def test_a_resumed_run_goes_on_to_the_same_bits(kind: str, data: Path, tmp_path: Path) -> None:
    model: dict[str, Any] = {**SMALL, "dropout": 0.2, **({"hard": kind} if kind == "reinforce" else {})}
    if kind == "transformer":
        model = {"width": 16, "heads": 2, "feedforward": 16, "decoder_layers": 1}
    asked = options(
        data, kind="transformer" if kind == "transformer" else "recurrent", model=model,
        data={"mirror": True, "features": str(tmp_path / "features")},
        training={"epochs": 2.0, "coverage": 0.5 * (kind == "soft")},
    )  # fmt: skip
    said: list[str] = []
    whole, _ = Captioning(asked, tmp_path / "whole", said.append).train()
    _, ended = Captioning(asked, tmp_path / "cut", said.append).train(callbacks=[StopAt(7)])
    assert ended.reason == "interrupt" and not is_captioner(tmp_path / "cut")
    resumed, ended = Captioning.resumed(tmp_path / "cut", {}, said.append).train(resume=True)
    assert ended.reason == "steps"
    one, other = whole.model.state_dict(), resumed.model.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert sum("computing features of" in line for line in said) == 1, "features are computed once"
    lines = (data / "train.tsv").read_text()
    try:
        (data / "train.tsv").write_text(lines + "red-left-7.png\tanother\n")
        with pytest.raises(ValueError, match="data must be the captions of the original run, got others"):
            Captioning.resumed(tmp_path / "cut", {}, quiet).train(resume=True)
    finally:
        (data / "train.tsv").write_text(lines)


@pytest.mark.usefixtures("frozen")
def test_hard_attention_begins_with_soft(data: Path, tmp_path: Path) -> None:
    soft, _ = Captioning(options(data, training={"steps": 3}), tmp_path / "soft", quiet).train()
    features = str(tmp_path / "soft" / "features.safetensors")
    begin = {"start": str(tmp_path / "soft"), "data": {"features": features}}
    tiny = {"steps": 1, "learning_rate": 1e-12}
    hard, _ = Captioning(
        options(data, model=SMALL | {"hard": "reinforce"}, training=tiny, **begin), tmp_path / "hard", quiet
    ).train()
    assert hard.vocabulary.to_json() == soft.vocabulary.to_json()
    for one, other in zip(hard.model.parameters(), soft.model.parameters()):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(hard.model.attending.layer.scorer.w_v, soft.model.attending.layer.w_v)
    with pytest.raises(ValueError, match=r"start must have the parameter .* as in the options, got of shape"):
        Captioning(options(data, model=SMALL | {"decoder": 16}, **begin), tmp_path / "other", quiet).train()
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("frozen")
def test_a_glimpse_that_is_new_changes_nothing_at_first(data: Path, tmp_path: Path) -> None:
    plain = SMALL | {"glimpse": False}
    Captioning(options(data, model=plain, training={"steps": 3}), tmp_path / "first", quiet).train()
    begun = options(
        data, model=SMALL | {"glimpse": True}, start=str(tmp_path / "first"),
        data={"features": str(tmp_path / "first" / "features.safetensors")},
        training={"steps": 1, "learning_rate": 1e-12},
    )  # fmt: skip
    glimpsing, _ = Captioning(begun, tmp_path / "second", quiet).train()
    first = Captioner.load(tmp_path / "first")
    source = torch.rand(2, glimpsing.model.config.places, glimpsing.model.config.sources)
    lengths = torch.full((2,), glimpsing.model.config.places)
    written = torch.tensor([[1, 3, 4], [1, 5, 6]])
    with torch.no_grad():
        one, other = (each.model.eval()(source, lengths, written) for each in (glimpsing, first))
    assert one.std() > 0
    torch.testing.assert_close(one, other)
    begun = options(data, model=SMALL | {"glimpse": True, "gate": False}, start=str(tmp_path / "first"))
    with pytest.raises(
        ValueError, match=r"start must have no parameters other than those in the options, got gate\.bias, gate\.weight"
    ):
        Captioning(begun, tmp_path / "third", quiet).train()


@pytest.mark.usefixtures("frozen")
def test_what_is_wrong_with_the_data_is_told_and_counted(data: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    shutil.copytree(data / "images", images)
    (images / "red-left-3.png").write_bytes(b"no image")
    shutil.copy(images / "red-left-0.png", images / "copy.png")  # of one to validate with
    (images / "unused.png").write_bytes((images / "red-left-1.png").read_bytes())
    lines = (data / "train.tsv").read_text()
    lines += "copy.png\ta copy\nlost.png\ta lost one\nred-left-0.png\tin both lists\n\n"
    (tmp_path / "train.tsv").write_text(lines)
    said: list[str] = []
    asked = options(data, data={"data": str(tmp_path / "train.tsv"), "images": str(images)}, training={"steps": 1})
    captioner, _ = Captioning(asked, tmp_path / "out", said.append).train()
    assert captioner.about["training"]["images"] == 41
    for expected in (
        "skipped, one side is empty: 1",
        "skipped, no such image: 1 captions of 1 images (the first 'lost.png')",
        "skipped in training: 1 images that are also in the validation data (the first 'red-left-0.png')",
        "images: 1 of 50 images have no caption (the first 'unused.png')",
        "skipped: red-left-3.png must be an image",
        "skipped: 1 of 49 images, which cannot be read",
        "1 images that are identical to validation images (the first 'copy.png')",
    ):
        assert any(expected in line for line in said), (expected, said)


@pytest.mark.usefixtures("frozen")
def test_nothing_left_is_an_error_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    empty = write_list(tmp_path / "lost.tsv", [("lost.png", "a lost one")])
    for changes, message in (
        ({"data": str(empty)}, r"lost\.tsv must name images in .*images, got none of 1"),
        ({"data": str(data / "valid.tsv")}, "the validation data contains all training images"),
        ({"data": ""}, "--data is required: a file of image names, tabs and captions"),
        ({"images": ""}, "--images is required: a folder or tar archive"),
        ({"images": str(tmp_path / "nowhere")}, "nowhere must be a folder of images, or a tar archive of them"),
    ):
        with pytest.raises(ValueError, match=message):
            Captioning(options(data, data=changes), tmp_path / "out", quiet).train()
        assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("frozen")
def test_no_image_that_can_be_used_leaves_nothing(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "images", tmp_path / "images")
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"none")
    said: list[str] = []
    with pytest.raises(ValueError, match=r"train: none of the 48 images in .*images can be read"):
        Captioning(options(data, data={"images": str(tmp_path / "images")}), tmp_path / "out", said.append).train()
    assert sum("must be an image" in line for line in said) == 10, "the first of them are told"
    assert not (tmp_path / "out").exists()


def test_features_of_another_encoder_are_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "features"
    with open_images(data / "images") as images:
        write_features(path, images, images.names, ConvolutionalEncoder(), say=quiet)
    monkeypatch.setattr("regard_lab.tasks.captioning.training.open_encoder", lambda name, side: Stand())
    with pytest.raises(ModelFileError, match=r"features must have features of this encoder, .*, got another one"):
        Captioning(options(data, data={"features": str(path)}), tmp_path / "out", quiet).train()
    assert not (tmp_path / "out").exists()


def test_options_that_contradict_each_other() -> None:
    for table, message in (
        ({"encoder": "cnn"}, "tune must be 'full' where encoder is 'cnn', which is not pretrained, got 'frozen'"),
        ({"tune": "full", "data": {"features": "x"}}, r"data\.features must be left out where the encoder learns"),
        ({"data": {"valid": "x", "held_out": 3}}, r"data\.held_out must be left out where valid is given"),
        ({"vocabularies": {"joint": True}}, r"vocabularies\.joint must be left out for captions"),
        ({"training": {"guide": 0.5}}, r"training\.guide must be left out for captions"),
        ({"training": {"metric": "wer"}}, r"training\.metric must be one of 'bleu', 'chrf', 'cider', 'loss', 'rouge'"),
    ):
        with pytest.raises(ValueError, match=message):
            CaptionOptions.from_table(table)
    with pytest.raises(ValueError, match=r"model\.width must be one of"):
        Captioning(CaptionOptions.from_table({"model": {"width": 3}}), "out", quiet)


@pytest.mark.usefixtures("frozen")
def test_a_damaged_folder_is_told(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    Captioning(options(data, training={"steps": 1}), out, quiet).train()
    config = (out / "config.json").read_text()
    for right, wrong, message in (
        ('"recurrent"', '"convolutional"', "have a 'kind' among recurrent, transformer, got 'convolutional'"),
        ('"side": 64', '"side": 96', "must describe a model, an encoder and a vocabulary that fit"),
        ('"cnn"', '"vgg"', "must describe an encoder of images"),
        ('"gate": true', '"gate": false', "must hold the parameters that config.json describes"),
        ('"steps": 1', '"steps": 2', "must match its checksum"),
    ):
        assert right in config
        (out / "config.json").write_text(config.replace(right, wrong))
        with pytest.raises(ModelFileError, match=message):
            Captioner.load(out)


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("hard", ["none", "reinforce"])
def test_scores_are_learned_from(data: Path, tmp_path: Path, frozen: None, hard: str) -> None:
    first = options(data, training={"epochs": 2.0, "validate_every": 8})
    Captioning(first, tmp_path / "first", quiet).train()
    asked = options(
        data, start=str(tmp_path / "first"), model=SMALL | {"hard": hard},
        reward={"cider": 1.0, "bleu": 0.5, "draws": 3, "temperature": 0.7},
        training={"epochs": 6.0, "validate_every": 100, "learning_rate": 0.003, "save_every": 4},
    )  # fmt: skip
    told: list[str] = []

    class Losses(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, learner: Any, *_: Any) -> None:
            told.append(learner.loss)

    _, ended = Captioning(asked, tmp_path / "out", quiet).train(callbacks=[Losses()])
    assert ended.steps == len(told)
    half = len(told) // 2
    assert sum(told[half:]) / (len(told) - half) < sum(told[:half]) / half < 0, "what is earned, negative"
    again = Captioning.resumed(tmp_path / "out", {}, quiet)
    assert again.options.reward.draws == 3


def test_rewards_that_make_no_sense_are_refused(data: Path) -> None:
    for table, expected in (
        ({"reward": {"cider": 1.0}}, "start must be the folder of a trained captioner where only rewards count"),
        ({"reward": {"draws": 3}}, r"draws must be left out where no score has a weight, got 3"),
        ({"reward": {"cider": -1.0}}, "cider must be a finite number of at least 0"),
        ({"reward": {"cider": 1.0, "draws": 1}}, "draws must be an int of at least 2"),
        ({"reward": {"bleu": 1.0, "temperature": 0.0}}, "temperature must be a positive finite number"),
        ({"reward": {"bleu": 1.0}, "start": "a", "training": {"coverage": 0.5}},
         "coverage must be left out where rewards count, got 0.5"),
        ({"reward": {"bleu": 1.0, "likelihood": 1.0}, "training": {"teacher_forcing": 0.5}},
         "teacher_forcing must be left out where rewards count, got 0.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            options(data, **table)


def test_a_start_that_does_not_fit_is_told_before_features_are_made(
    data: Path, tmp_path: Path, frozen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Captioning(options(data, training={"epochs": 1.0}), tmp_path / "first", quiet).train()

    def never(*_: Any, **__: Any) -> None:
        pytest.fail("features take minutes")

    monkeypatch.setattr("regard_lab.tasks.captioning.training.write_features", never)
    other = SMALL | {"decoder": 16}
    with pytest.raises(ValueError, match="train: start must have "):
        Captioning(options(data, start=str(tmp_path / "first"), model=other), tmp_path / "out", quiet).train()
    with pytest.raises(ModelFileError, match="nowhere"):
        Captioning(options(data, start=str(tmp_path / "nowhere")), tmp_path / "out", quiet).train()
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("frozen")
def test_captions_that_the_vocabulary_cannot_spell_are_refused(data: Path, tmp_path: Path) -> None:
    asked = options(data, data={"features": str(tmp_path / "features")}, training={"steps": 1})
    Captioning(asked, tmp_path / "start", quiet).train()
    path = tmp_path / "russian.tsv"
    names = [line.split("\t")[0] for line in (data / "train.tsv").read_text().splitlines()]
    path.write_text(
        "".join(f"{name}\tкрасный квадрат {number}\n" for number, name in enumerate(names)), encoding="utf-8"
    )
    table: dict[str, Any] = {"data": {"data": str(path)}, "start": str(tmp_path / "start"), "training": {"steps": 1}}
    with pytest.raises(
        ValueError, match=r"^train: captions: .* symbols \(\d\d\.\d%\).* row 1: 'к', 'р', .*data\.max_unknown=1"
    ):
        Captioning(options(data, **table), tmp_path / "out", quiet).train()
    assert not (tmp_path / "out").exists(), "before features are computed"
    table["data"] |= {"max_unknown": 1.0, "features": str(tmp_path / "features")}
    said: list[str] = []
    Captioning(options(data, **table), tmp_path / "out", said.append).train()
    assert sum("unknown to the vocabulary" in line for line in said) == 1, "those to validate with are known"


@pytest.mark.usefixtures("frozen")
def test_a_vocabulary_that_is_smaller_than_asked_names_the_captions(data: Path, tmp_path: Path) -> None:
    asked = options(data, vocabularies={"kind": "bpe", "size": 3000}, training={"steps": 1})
    said: list[str] = []
    Captioning(asked, tmp_path / "out", said.append).train()
    file = data / "train.tsv"
    assert any(f"size 3,000 is more than the captions of {file} support: " in line for line in said)
