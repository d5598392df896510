"""Classifiers of text: from scratch, from a language model, resumed, and in folders that transformers reads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import StopAt

from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, SequenceClassifier, load, save
from regard_lab.tasks.classification.classifiers import TextClassifier, bare
from regard_lab.tasks.classification.options import ClassificationOptions, ClassifierTrainingOptions
from regard_lab.tasks.classification.training import FineTuning
from regard_lab.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "red", "blue", "cat", "dog", "sees", "good"]
SMALL = {"width": 32, "layers": 1, "heads": 2, "dropout": 0.0}
TRAINING = {"precision": "float32", "threads": 1}


def sentences(count: int, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choice(WORDS) for _ in range(drawn.randint(2, 6))) for _ in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "labelled.tsv"
    path.write_text("".join(f"{text}\t{'yes' if 'good' in text else 'no'}\n" for text in sentences(160)))
    return path


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that has learned nothing, but whose rows tell tokens apart."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    specials = ("end", "pad", "mask", "cls", "sep") if request.param == "encoder" else ("end", "pad")
    tokenizer = Tokenizer.learn(sentences(99), 280, specials=specials)
    fields = SMALL | {"vocabulary": 300, "positions": "rotary", "max_length": 32}
    model: EncoderLM | DecoderLM
    if request.param == "encoder":
        model = EncoderLM(EncoderLMConfig(**fields, norm_first=True, pooled=False))
    else:
        model = DecoderLM(DecoderLMConfig(**fields, tied=False))
    torch.nn.init.normal_(model.embedding.weight, std=0.5)
    save(model, folder)
    tokenizer.save(folder)
    return folder


def options(path: Path, /, **table: Any) -> ClassificationOptions:
    table["data"] = {"data": str(path)} | table.get("data", {})
    table["training"] = TRAINING | table.get("training", {})
    return ClassificationOptions.from_table(table)


def right(classifier: TextClassifier, seed: int = 1) -> float:
    texts = sentences(100, seed)
    named = classifier.probabilities(classifier.read(texts)).argmax(1).tolist()
    return sum((classifier.labels[i] == "yes") == ("good" in text) for i, text in zip(named, texts)) / 100


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_from_scratch_it_learns_all_of_a_tiny_task(kind: str, data: Path, tmp_path: Path) -> None:
    asked = options(
        data, kind=kind, model=SMALL, tokenizer={"size": 290},
        training={"epochs": 12.0, "learning_rate": 6e-3, "batch_examples": 16},
    )  # fmt: skip
    said: list[str] = []
    classifier, ended = FineTuning(asked, tmp_path, said.append).train()
    assert ended.best == 1.0 and right(classifier) == 1.0
    assert any("held out for validation: 16 texts" in line for line in said)
    assert any("2 labels; " in line for line in said)
    again = TextClassifier.load(tmp_path)
    read = again.read(["a good cat", "red"])
    assert torch.equal(again.probabilities(read), classifier.probabilities(read)) and again.length == 256
    assert "masked_head" not in "".join(load(tmp_path).state_dict())


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("tune", ["full", "embedding", "frozen", "lora"])
def test_from_a_language_model(tune: str, start: Path, data: Path, tmp_path: Path) -> None:
    before = load(start).state_dict()
    rate = {"full": 6e-3, "embedding": 6e-3, "lora": 2e-2, "frozen": 2e-2}[tune]
    epochs = 12.0 if tune in ("full", "lora") else 1.0  # of the others it is checked what changes
    asked = options(data, start=str(start), tune=tune, training={"epochs": epochs, "learning_rate": rate})
    said: list[str] = []
    classifier, _ = FineTuning(asked, tmp_path, said.append).train()
    # The blocks of this model have learned nothing: what scores its rows needs them to.
    assert tune in ("frozen", "embedding") or right(classifier) > 0.99
    model = load(tmp_path)
    assert isinstance(model, SequenceClassifier)
    after = model.model.state_dict()
    assert after.keys() == {name for name in before if not name.startswith(("masked_head.", "output."))}
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    if tune == "frozen":
        assert not changed
    elif tune == "lora":
        assert changed and all(".attention." in name or ".feed_forward." in name for name in changed)
    elif tune == "embedding":
        assert changed == {"embedding.weight"}
    else:
        assert {"embedding.weight"} < changed
    assert (tune == "full") == (not any("trainable" in line for line in said if "parameters" in line))


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_resumed_run_goes_on_to_the_same_bits(tune: str, start: Path, data: Path, tmp_path: Path) -> None:
    asked = options(
        data, start=str(start), tune=tune, training={"epochs": 2.0, "learning_rate": 5e-3, "batch_examples": 32}
    )
    whole, _ = FineTuning(asked, tmp_path / "whole", lambda _: None).train()
    _, ended = FineTuning(asked, tmp_path / "cut", lambda _: None).train(callbacks=[StopAt(6)])
    assert ended.reason == "interrupt" and not (tmp_path / "cut" / "config.json").exists()
    resumed, ended = FineTuning.resumed(tmp_path / "cut", {}, lambda _: None).train(resume=True)
    assert ended.steps == 10 and ended.reason == "steps"
    one, other = whole.model.state_dict(), resumed.model.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    data_path, content = Path(asked.data.data), Path(asked.data.data).read_text()
    try:
        data_path.write_text(content + "another good one\tyes\n")
        with pytest.raises(ValueError, match="data must be the texts of the original run"):
            FineTuning.resumed(tmp_path / "cut", {}, lambda _: None).train(resume=True)
    finally:
        data_path.write_text(content)


@torch.no_grad()
def test_a_classifier_of_berts_shape_is_one_of_transformers(data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    fields = SMALL | {"max_length": 16, "attention_dropout": 0.0}
    asked = options(data, preset="bert-tiny", model=fields, data={"length": 16}, training={"steps": 4})
    classifier, _ = FineTuning(asked, tmp_path / "scratch", lambda _: None).train()
    # What masked tokens were learned with has no layer behind the first row; a classifier gets one.
    torch.manual_seed(0)
    masked = EncoderLM(EncoderLMConfig(len(classifier.tokenizer), **SMALL, max_length=16, pooled=False))
    save(masked, tmp_path / "masked")
    classifier.tokenizer.save(tmp_path / "masked")
    asked = options(data, start=str(tmp_path / "masked"), tune="lora", training={"steps": 4})
    said: list[str] = []
    FineTuning(asked, tmp_path / "tuned", said.append).train()
    assert any("texts are truncated to 16 tokens, the number of learned positions" in line for line in said)
    texts = ["a good cat", "red", "one two red blue cat dog sees good " * 9]
    for folder in (tmp_path / "scratch", tmp_path / "tuned"):
        ours, theirs = TextClassifier.load(folder), AutoModelForSequenceClassification.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        given = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        assert given["input_ids"].shape[1] == 16 and theirs.config.id2label == {0: "no", 1: "yes"}
        expected = theirs(given["input_ids"], attention_mask=given["attention_mask"]).logits.softmax(1)
        read = ours.read(texts)
        assert read.cut.tolist() == [False, False, True]
        torch.testing.assert_close(ours.probabilities(read), expected, rtol=1e-4, atol=1e-6)


def test_a_head_goes_on_where_labels_are_the_same(data: Path, tmp_path: Path) -> None:
    first = options(data, model=SMALL, training={"epochs": 10.0, "learning_rate": 6e-3, "batch_examples": 16})
    FineTuning(first, tmp_path / "first", lambda _: None).train()
    then = options(data, start=str(tmp_path / "first"), tune="frozen", training={"steps": 1, "learning_rate": 1e-9})
    classifier, _ = FineTuning(then, tmp_path / "then", lambda _: None).train()
    assert right(classifier) == right(TextClassifier.load(tmp_path / "first")) > 0.95


def test_pairs(tmp_path: Path) -> None:
    drawn, path = random.Random(0), tmp_path / "pairs.tsv"
    rows = [(drawn.choice(WORDS[:3]), drawn.choice(WORDS[:3])) for _ in range(90)]
    path.write_text("".join(f"{a} cat\t{b} cat\t{'same' if a == b else 'other'}\n" for a, b in rows))
    asked = options(
        path, model=SMALL, tokenizer={"kind": "characters"}, data={"pairs": True, "valid": str(path)},
        training={"steps": 150, "learning_rate": 5e-3, "label_smoothing": 0.05, "batch_examples": 32},
    )  # fmt: skip
    classifier, ended = FineTuning(asked, tmp_path / "out", lambda _: None).train()
    assert ended.best == 1.0
    read = classifier.read(["one cat", "one cat"], ["one cat", "two cat"])
    assert classifier.probabilities(read).argmax(1).tolist() == [1, 0] and classifier.labels == ("other", "same")


def test_what_is_refused(start: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "alike.tsv").write_text("a\tx\nb\tx\nc\tx\n")
    (tmp_path / "other.tsv").write_text("a\tyes\nb\tmaybe\n")
    (tmp_path / "wrong").mkdir()
    save(load(start), tmp_path / "wrong")
    Tokenizer.learn([f"{text}{i}" for i, text in enumerate(sentences(999))], 340).save(tmp_path / "wrong")
    cases = {
        r"must have at least two labels, got only 'x'": options(tmp_path / "alike.tsv"),
        r"other.tsv, line 2 must have a label among 'no', 'yes', got 'maybe'": options(
            data, data={"valid": str(tmp_path / "other.tsv")}, model=SMALL
        ),
        r"wrong must have a tokenizer of at most 300 tokens, the model's vocabulary size, got": options(
            data, start=str(tmp_path / "wrong")
        ),
        r"nowhere must be a folder|no such folder": options(data, start=str(tmp_path / "nowhere")),
        r"--data is required": ClassificationOptions(),
    }
    for number, (sentence, asked) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=sentence):
            FineTuning(asked, tmp_path / f"out{number}", lambda _: None).train()
        assert not (tmp_path / f"out{number}" / "options.toml").exists()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"tune": "lora"}, "tune must be 'full' without start"),
        ({"start": "x", "preset": "base"}, "preset must be left out with start"),
        ({"start": "x", "model": {"width": 8}}, r"model.width must be left out .*, pooling, window may differ\)"),
        ({"start": "x", "tokenizer": {"size": 999}}, "tokenizer must be left out with start"),
        ({"start": "x", "lora": {"rank": 2}}, "lora must be left out unless tune is 'lora'"),
        ({"training": {"batch_tokens": 9}}, "training.batch_tokens must be left out for a classifier"),
        ({"training": {"metric": "bleu"}}, "metric must be one of"),
        ({"tune": "half"}, "tune must be one of"),
    ],
)
def test_options_that_are_refused(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ClassificationOptions.from_table(table)


def test_rates_and_steps() -> None:
    narrow, wide = (EncoderLM(EncoderLMConfig(9, width=width, layers=1, heads=2)) for width in (128, 768))
    scratch, full = ClassificationOptions(), ClassificationOptions(start="x")
    assert full.suitable_rate(wide) == pytest.approx(5e-5) and full.suitable_rate(narrow) == pytest.approx(3e-4)
    assert scratch.suitable_rate(narrow) > full.suitable_rate(narrow)
    planned = ClassifierTrainingOptions(epochs=2.0, accumulate=2).planned(9, 1e-3)
    assert (planned.steps, planned.validate_every) == (9, 5)
    assert ClassifierTrainingOptions(steps=7, learning_rate=0.1).planned(9, 1e-3).learning_rate == 0.1


def test_a_bare_model_has_the_same_rows() -> None:
    tokens = torch.tensor([[3, 1, 4]])
    decoder = DecoderLM(DecoderLMConfig(9, width=8, heads=2, tied=False)).eval()
    assert torch.equal(bare(decoder).features(tokens), decoder.features(tokens)) and bare(decoder).output is None
    encoder = EncoderLM(EncoderLMConfig(9, width=8, heads=2, tied=False)).eval()
    assert torch.equal(bare(encoder)(tokens), encoder(tokens)) and bare(encoder).masked_head is None
    changed = bare(encoder, {"dropout": 0.3, "pooling": "mean"}).eval()
    assert isinstance(changed, EncoderLM) and torch.equal(changed(tokens), encoder(tokens))
    assert (changed.config.dropout, changed.config.pooling) == (0.3, "mean")
    assert bare(decoder, {"pooling": "mean"}).config.pooling == "mean"
    tokens, windowed = torch.arange(12)[None] % 9, bare(decoder, {"window": 3}).eval()
    full, near = decoder.eval().features(tokens), windowed.features(tokens)
    torch.testing.assert_close(near[:, :3], full[:, :3])
    assert not torch.allclose(near[:, 3:], full[:, 3:])  # the first token is out of sight
    with pytest.raises(ValueError, match=r"model\.window must be one of"):
        bare(encoder, {"window": 3})
    with pytest.raises(ValueError, match=r"model\.pooling must be one of"):
        bare(decoder, {"pooling": "first"})
    with pytest.raises(ValueError, match=r"model\.pooling must be one of"):
        bare(encoder, {"pooling": "last"})


@pytest.mark.campaign(keep=1)
def test_filters_of_windows_learn_and_go_on_in_another_classifier(start: Path, data: Path, tmp_path: Path) -> None:
    asked = options(
        data, start=str(start), head={"filters": 8, "window": 2, "dropout": 0.1},
        training={"epochs": 12.0, "learning_rate": 6e-3},
    )  # fmt: skip
    first, _ = FineTuning(asked, tmp_path / "first", lambda _: None).train()
    assert right(first) > 0.99 and first.model.windows is not None
    still = {"steps": 1, "learning_rate": 1e-12}
    other = tmp_path / "other.tsv"
    other.write_text(data.read_text().replace("\tyes", "\tfine"))
    for name, source, same in (("second", data, True), ("third", other, False)):
        begun = options(
            source, start=str(tmp_path / "first"), head={"filters": 8, "window": 2, "dropout": 0.1}, training=still
        )
        made, _ = FineTuning(begun, tmp_path / name, lambda _: None).train()
        assert made.model.windows is not None
        for one, two in zip(made.model.windows.parameters(), first.model.windows.parameters()):
            torch.testing.assert_close(one, two)
        assert torch.allclose(made.model.output.weight, first.model.output.weight) == same
    asked = options(data, start=str(tmp_path / "first"), training=still)
    same, _ = FineTuning(asked, tmp_path / "fourth", lambda _: None).train()  # it goes on as it was
    assert (same.model.filters, same.model.filtering["window"]) == (8, 2)
    for one, two in zip(same.model.parameters(), first.model.parameters()):
        torch.testing.assert_close(one, two)
    more, _ = FineTuning(
        options(data, start=str(tmp_path / "first"), head={"filters": 3}, training=still), tmp_path / "fifth"
    ).train()
    assert (more.model.filters, more.model.filtering["window"]) == (3, 3)
    with pytest.raises(ValueError, match=r"model\.pooling must be left out where filters score labels"):
        options(data, start=str(tmp_path / "first"), head={"filters": 3}, model={"pooling": "mean"})
    with pytest.raises(ValueError, match=r"head\.window must be left out without filters, got 4"):
        options(data, head={"window": 4})


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("tune", ["full", "embedding", "frozen"])
def test_filters_that_read_both_ways_learn_and_go_on(tune: str, start: Path, data: Path, tmp_path: Path) -> None:
    head = {"filters": 16, "window": 4, "narrowest": 2, "means": False, "both_ways": True, "dropout": 0.1}
    asked = options(data, start=str(start), tune=tune, head=head, training={"epochs": 12.0, "learning_rate": 6e-3})
    if isinstance(load(start), EncoderLM):
        with pytest.raises(ValueError, match=r"head\.both_ways must be left out with an encoder"):
            FineTuning(asked, tmp_path / "first", lambda _: None).train()
        return
    first, _ = FineTuning(asked, tmp_path / "first", lambda _: None).train()
    assert right(first) > 0.97 and right(TextClassifier.load(tmp_path / "first")) == right(first)
    still = options(data, start=str(tmp_path / "first"), training={"steps": 1, "learning_rate": 1e-12})
    same, _ = FineTuning(still, tmp_path / "second", lambda _: None).train()  # it goes on as it was
    assert same.model.filtering == first.model.filtering and not same.model.filtering["means"]
    for one, two in zip(same.model.parameters(), first.model.parameters()):
        torch.testing.assert_close(one, two)
    with pytest.raises(ValueError, match=r"head\.narrowest must be at most window, which is 3, got 4"):
        options(data, head={"filters": 3, "narrowest": 4})
    with pytest.raises(ValueError, match=r"head\.both_ways must be left out without filters, got True"):
        options(data, head={"both_ways": True})


def test_filters_leave_no_layer_behind_rows_that_nothing_uses(data: Path, tmp_path: Path) -> None:
    model = EncoderLM(EncoderLMConfig(300, width=16, layers=0, heads=2, segments=0))  # norms last: of BERT's shape
    save(model, tmp_path / "start")
    tokenizer = Tokenizer.learn(sentences(99), 280, specials=("end", "pad", "mask", "cls", "sep"))
    tokenizer.save(tmp_path / "start")
    still = {"steps": 1}
    for start in (str(tmp_path / "start"), ""):
        own = {} if start else {"preset": "bert-tiny", "model": {"layers": 1}}
        asked = options(data, start=start, head={"filters": 4}, training=still, **own)
        made, _ = FineTuning(asked, tmp_path / f"out{len(start) > 0}", lambda _: None).train()
        assert isinstance(made.model.model, EncoderLM) and made.model.model.pooler is None
    with pytest.raises(
        ValueError, match="tune must be 'full', 'embedding' or 'frozen' for a model without blocks, got 'lora'"
    ):
        FineTuning(options(data, start=str(tmp_path / "start"), tune="lora", training=still), tmp_path / "l").train()


def test_texts_that_the_tokenizer_cannot_spell_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.learn(sentences(99), kind="characters")
    save(DecoderLM(DecoderLMConfig(len(tokenizer), **SMALL, max_length=32)), tmp_path / "start")
    tokenizer.save(tmp_path / "start")
    path = tmp_path / "russian.tsv"
    path.write_text("one\tno\n" + "".join(f"кошка {number}\t{number % 2}\n" for number in range(40)), encoding="utf-8")
    said: list[str] = []
    with pytest.raises(
        ValueError, match=r"^train: texts: .*first in .*russian\.tsv \(training\), line 2: 'к', 'о', 'ш'"
    ):
        FineTuning(options(path, start=str(tmp_path / "start")), tmp_path / "out", said.append).train()
    assert not (tmp_path / "out").exists()
    asked = options(path, start=str(tmp_path / "start"), data={"max_unknown": 1.0}, training={"steps": 2})
    FineTuning(asked, tmp_path / "out", said.append).train()
    assert sum("unknown to the vocabulary" in line for line in said) == 2
    with pytest.raises(ValueError, match=r"data\.max_unknown must be a number in \[0, 1\], got 1\.5"):
        options(path, data={"max_unknown": 1.5})


def test_what_looks_wrong_is_told_and_training_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "doubtful.tsv"
    path.write_text(
        "sentence\tlabel\n" + "".join(f"{text}\t{'good' in text:d}\n" for text in sentences(40)) + "a\t0\na\t1\n"
    )
    said: list[str] = []
    asked = options(path, model=SMALL, tokenizer={"kind": "bytes"}, training={"steps": 1})
    classifier, _ = FineTuning(asked, tmp_path / "out", said.append).train()
    assert "looks like a header row, read as a text and its label: 1 (first in line 1)" in said
    assert f"one text under two labels: 1 (first in {path}, line 43)" in said
    assert classifier.labels == ("0", "1", "label")
