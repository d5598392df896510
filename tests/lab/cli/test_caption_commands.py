"""``regard caption``, and ``train captioner`` and ``evaluate`` of captions, as a new user runs them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from small_images import draw, write_list

from regard_lab.models.base import END
from regard_lab.models.captioner import CAPTIONERS
from regard_lab.tasks.captioning.captioner import Captioner
from regard_lab.tasks.captioning.encoders import ConvolutionalEncoder
from regard_lab.tasks.captioning.pictures import CaptionAttention, save_captions
from regard_lab.text.vocabulary import UNKNOWN, SymbolVocabulary


def untrained(folder: Path, kind: str = "recurrent", **fields: Any) -> Path:
    """Save a captioner that writes whatever its first parameters say, a few words long."""
    torch.manual_seed(0)
    encoder = ConvolutionalEncoder()
    vocabulary = SymbolVocabulary(["red", "dog", "a", "left"], " ")
    config, model = CAPTIONERS[kind]
    small = (
        {"embedding": 8, "decoder": 8, "features": 8, "states": 8} if kind == "recurrent" else {"width": 8, "heads": 2}
    )
    captioner = Captioner(
        model(config(256, len(vocabulary), places=16, **small, **fields)), encoder, vocabulary, {"training": {}}
    )
    _, bias = captioner.model.projection
    torch.nn.init.normal_(captioner.model.target_embedding.weight, std=2.0)
    bias.data[[0, UNKNOWN]] = -9.0
    bias.data[END] = 0.0
    captioner.save(folder)
    return folder


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("model") / "soft")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_list(folder / "list.tsv", draw(folder / "images", 1))
    return folder


@pytest.mark.slow
def test_a_sentence_and_where_its_words_looked(regard, captioner, images, tmp_path) -> None:
    file, hard = images / "images" / "red-left-0.png", untrained(tmp_path / "hard", hard="gumbel")
    done = regard("caption", file, "--model", captioner)
    assert done.code == 0 and len(done.out.splitlines()) == 1, done.err
    out = tmp_path / "attention.png"
    both = regard(
        "caption", file, "--model", captioner, "--model", hard, "--attention", out, "--html", tmp_path / "a.html"
    )
    assert both.code == 0 and len(both.out.splitlines()) == 2, both.err
    assert both.out.splitlines()[0] == done.out.strip()
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    page = (tmp_path / "a.html").read_text()
    assert "data:image/jpeg;base64" in page and "Where each word attended" in page
    told = json.loads(regard("caption", file, "--model", captioner, "--json").out)
    assert told["caption"] == done.out.strip() and told["grid"] == [4, 4]
    assert " ".join(told["words"]) == told["caption"]
    assert [len(row) for row in told["attention"]] == [16] * len(told["words"])
    assert all(abs(sum(row) - 1) < 1e-3 for row in told["attention"])


@pytest.mark.slow
def test_headings_and_words_keep_clear_of_the_images(tmp_path, monkeypatch) -> None:
    figures: list[Figure] = []
    real = Figure.savefig

    def kept(figure: Figure, *given: Any, **options: Any) -> None:
        figures.append(figure)
        real(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    words = ("a", "young", "girl", "jumps", "playfully,", "going", "up", "a", "gray", "set", "of", "stairs")
    weights = torch.full((len(words), 4), 0.25)
    drawn = [
        CaptionAttention(np.zeros((8, 8, 3), np.uint8), words[:count], weights[:count], (2, 2), title)
        for count, title in ((12, " ".join(words)), (3, "a young girl"), (12, f"model: {' '.join(words)}"), (9, ""))
    ]
    save_captions(drawn, tmp_path / "drawn.png")
    (figure,) = figures
    images = [axes.get_window_extent() for axes in figure.axes]
    texts = [
        text.get_window_extent() for text in (*figure.texts, *(axes.title for axes in figure.axes)) if text.get_text()
    ]
    assert len(images) == 40 and len(texts) == 3 + 36
    for text in texts:
        assert text.y1 <= figure.bbox.y1, "it is on the page"
        assert not any(text.overlaps(image) for image in images)
        above = [
            image.y0 - text.y1 for image in images if image.y0 >= text.y1 and image.x0 < text.x1 and text.x0 < image.x1
        ]
        assert min(above, default=9) >= 0.08 * figure.dpi, "it stands apart from the row above"


def test_a_transformer_and_samples(regard, images, tmp_path) -> None:
    model = untrained(tmp_path / "transformer", "transformer")
    files = sorted((images / "images").glob("*.png"))[:2]
    done = regard("caption", *files, "--model", model, "--sample", "--n-best", "3", "--seed", "1")
    assert done.code == 0, done.err
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert [Path(row[0]).name for row in rows] == [files[0].name] * 3 + [files[1].name] * 3
    assert done.out == regard("caption", *files, "--model", model, "--sample", "--n-best", "3", "--seed", "1").out


def test_images_that_cannot_be_used_are_told(regard, captioner, images, tmp_path) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    good = images / "images" / "red-left-0.png"
    done = regard("caption", bad, good, tmp_path / "none.png", "--model", captioner)
    assert done.code == 0
    assert done.out.startswith(f"{good}\t")
    assert f"regard: caption: {bad} must be an image (JPEG, PNG," in done.err
    assert f"caption: {tmp_path / 'none.png'} must exist, got no such file." in done.err
    assert "regard: 2 of 3 images cannot be read" in done.err
    none = regard("caption", bad, "--model", captioner, "--attention", tmp_path / "a.png")
    assert none.code == 2 and none.out == ""
    assert "regard: caption: the image cannot be read." in none.err
    assert not (tmp_path / "a.png").exists()
    piped = regard("caption", "-", "--model", captioner, stdin=good.read_bytes())
    assert piped.code == 0 and piped.out


def test_what_is_no_captioner(regard, captioner, images, tmp_path, model) -> None:
    file = images / "images" / "red-left-0.png"
    for folder, message in (
        (tmp_path / "none", "--model must be the folder of a captioner, got no such folder"),
        (model, f"caption: {model} is a pronunciation model: use `regard pronounce --model {model}`."),
    ):
        done = regard("caption", file, "--model", folder)
        assert done.code == 2 and message in done.err, done.err
    done = regard("caption", file, "--model", captioner, "--attention", "a.bmp")
    assert done.code == 2 and "path must end in .png, .svg, .pdf, got 'a.bmp'" in done.err


def test_evaluate_scores_what_is_decoded(regard, captioner, images, tmp_path) -> None:
    archive = tmp_path / "images.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(images / "images", "some")
        bad = tarfile.TarInfo("some/bad.png")
        tar.addfile(bad)
    lines = (images / "list.tsv").read_text() + "bad.png\tdamaged\nlost.png\tnot there\n"
    (tmp_path / "list.tsv").write_text(lines)
    out = tmp_path / "written.tsv"
    evaluate = ["evaluate", "captioner", tmp_path / "list.tsv", "--model", captioner]
    done = regard(*evaluate, "--images", archive, "--json", "--out", out)
    assert done.code == 0, done.err
    scores = json.loads(done.out)
    assert {"BLEU-1", "BLEU-4", "chrF2", "ROUGE-L", "CIDEr-D"} < set(scores)
    assert (scores["images"], scores["references"]) == (6, 12)
    written = [line.split("\t") for line in out.read_text().splitlines()]
    assert sorted(name for name, _ in written) == sorted(f"some/{path.name}" for path in (images / "images").iterdir())
    assert "skipped, no such image: 1 captions of 1 images (the first 'lost.png')" in done.err
    assert "skipped, cannot be read: 1 of 7 images" in done.err
    for arguments, message in (
        ((), "Missing option '--images'"),
        (("--images", archive, "--links", "x"), "No such option: --links"),
    ):
        refused = regard(*evaluate, *arguments)
        assert refused.code == 2 and message in refused.err, refused.err


@pytest.mark.slow
def test_training_by_the_readme(regard, images, tmp_path) -> None:
    small = [f"model.{name}=8" for name in ("embedding", "decoder", "features", "states")]
    settings = [each for name in (*small, "training.batch_images=4") for each in ("--set", name)]
    out = tmp_path / "out"
    done = regard(
        "train", "captioner", "--data", images / "list.tsv", "--images", images / "images", "--out", out,
        "--encoder", "cnn", "--tune", "full", "--steps", "2", "--vocabulary", "characters", *settings,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "held out for validation: 1 images" in done.out
    assert f"regard caption photo.jpg --model {out} --plot attention.png" in done.out
    again = regard("train", "captioner", "--data", images / "list.tsv", "--images", images / "images", "--out", out)
    assert again.code == 2 and "--out must be a new folder" in again.err
    assert regard("caption", images / "images" / "red-left-0.png", "--model", out).code == 0
    shown = regard("train", "captioner", "--show-options", "--out", tmp_path / "new", "--model", "transformer")
    assert shown.code == 0 and "[training]" in shown.out and "# decoder_layers = 3" in shown.out
    refused = regard("train", "captioner", "--data", images / "list.tsv", "--out", tmp_path / "new")
    assert refused.code == 2 and "--images is required: a folder or tar archive" in refused.err
    assert not (tmp_path / "new").exists()
