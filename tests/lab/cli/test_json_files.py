"""The option ``--json`` of every command: alone it prints, with FILE.json it writes what it would print to the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_images import draw
from tests.lab.cli.test_caption_commands import untrained
from tiers import sized
from typer.main import get_group

from regard_cli.app import sources
from regard_lab.cli.evaluate_tasks import evaluate
from regard_lab.cli.train_tasks import train
from regard_lab.models import (
    DecoderLM,
    DecoderLMConfig,
    EncoderLM,
    EncoderLMConfig,
    SequenceClassifier,
    TokenClassifier,
    save,
)
from regard_lab.text.tokenizer import Tokenizer

SIZES: dict[str, Any] = {"width": 16, "layers": 1, "max_length": 32}
#: Commands that can give JSON, with arguments that name files of the fixture.
COMMANDS = {
    "catalogue": ["catalogue", "additive"],
    "plan": ["plan", "bert-large"],
    "regress": ["regress", "table.csv", "--target", "y", "--predict", "table.csv"],
    "translate": ["translate", "I love you.", "Thank you."],
    "pronounce": ["pronounce", "cat", "dog", "--model", "model"],
    "generate": ["generate", "a", "b", "--model", "decoder", "--max-new-tokens", "3", "--temperature", "0"],
    "generate one": ["generate", "a", "--model", "decoder", "--max-new-tokens", "3", "--temperature", "0"],
    "fill-mask": ["fill-mask", "a <|mask|>", "", "--model", "encoder"],
    "embed": ["embed", "a", "b", "--model", "decoder"],
    "classify": ["classify", "a", "b", "--model", "classifier", "--top", "2"],
    "classify tokens": ["classify", "a", "b", "--model", "tokens"],
    "evaluate translation": ["evaluate", "translation", "pairs.tsv"],
    "evaluate alignment": ["evaluate", "alignment", "pairs.tsv", "--links", "links.txt"],
    "evaluate pronunciation": ["evaluate", "pronunciation", "words.tsv", "--model", "model"],
    "evaluate language-model": ["evaluate", "language-model", "pairs.tsv", "--model", "decoder"],
    "evaluate classifier": ["evaluate", "classifier", "labels.tsv", "--model", "classifier"],
    "evaluate captioner": ["evaluate", "captioner", "captions.tsv", "--images", "images", "--model", "captioner"],
    "caption": ["caption", "images/red-left-0.png", "images/red-right-0.png", "--model", "captioner"],
}


@pytest.fixture
def files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with small models of every kind, and data for them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "mask", "cls", "sep"))
    decoder = DecoderLM(DecoderLMConfig(len(tokenizer), **SIZES))
    encoder = EncoderLM(EncoderLMConfig(len(tokenizer), **SIZES))
    made = {"decoder": decoder, "encoder": encoder, "classifier": SequenceClassifier(encoder, ["x", "y", "z"]),
            "tokens": TokenClassifier(encoder, ["x", "y"])}  # fmt: skip
    for name, each in made.items():
        save(each, tmp_path / name)
        tokenizer.save(tmp_path / name)
    untrained(tmp_path / "captioner")
    draw(tmp_path / "images", 1)
    (tmp_path / "table.csv").write_text("x,y\n" + "".join(f"{i},{i * i}\n" for i in range(12)))
    (tmp_path / "pairs.tsv").write_text("I love you.\tJe t'aime.\nThank you.\tMerci.\n")
    (tmp_path / "links.txt").write_text("0-0 1-2\n0-0 1-0\n")
    (tmp_path / "words.tsv").write_text("cab\tAH B\nace\tK\n")
    (tmp_path / "labels.tsv").write_text("a cat\tx\na dog\ty\nno pet\tz\n")
    (tmp_path / "captions.tsv").write_text("red-left-0.png\tred\nred-right-0.png\tred\n")
    return tmp_path


def records(text: str) -> list[Any]:
    """Return lines of JSON without what differs between two runs."""
    found = json.loads(text) if text.startswith("[\n") else [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in each.items() if k != "seconds"} if isinstance(each, dict) else each for each in found]


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_gets_what_is_printed_without_one(regard, files, name: str) -> None:
    words = COMMANDS[name]
    text = regard(*words)
    printed = regard(*words, "--json")
    assert text.code == printed.code == 0, printed.err
    assert records(printed.out), "it is JSON alone"
    for file in ("out.json", "OUT.JSONL"):
        written = regard(*words, "--json", file)
        assert written.code == 0, written.err
        if words[0] != "evaluate":  # which says how long it took
            assert written.out == text.out, "text is printed, as with --plot and --html"
        assert records((files / file).read_text(encoding="utf-8")) == records(printed.out)
    assert regard(*words, f"--json={files / 'other'}").code == 0
    assert records((files / "other").read_text(encoding="utf-8")) == records(printed.out)
    for place in (".", "nowhere"):
        refused = regard(*words, "--json", f"{place}/none/out.json")
        assert refused.code == 2 and "none/out.json cannot be used: No such file or directory" in refused.err
        assert refused.out == ""


@pytest.mark.slow
def test_a_text_after_the_option_is_a_text(regard, files) -> None:
    for text in ("I love you.", "my.json is here", "-"):
        shown = regard("translate", "--json", text, stdin="I love you.\n")
        assert [each["source"] for each in records(shown.out)] == [text.replace("-", "I love you.")]
    shown = regard("translate", "--json", "--", "notes.json")
    assert [each["source"] for each in records(shown.out)] == ["notes.json"]
    assert not list(files.glob("*.json"))


@pytest.mark.slow
def test_pictures_pages_and_json_side_by_side(regard, files) -> None:
    for name in ("translate", "pronounce", "generate", "caption")[:: sized(1, 2)]:
        words = COMMANDS[name]
        drawn = [*words, "--plot", "a.png", "--html", "a.html"]
        done = regard(*drawn, "--json", "a.json")
        assert done.code == 0, done.err
        assert done.out == regard(*words).out, "only the texts are answered"
        assert records((files / "a.json").read_text(encoding="utf-8")) == records(regard(*drawn, "--json").out)
        for name in ("a.png", "a.html", "a.json"):
            assert (files / name).stat().st_size > 0
            (files / name).unlink()


@pytest.mark.slow
def test_every_command_with_json_is_tried(regard, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    groups = {"train": get_group(train).commands, "evaluate": get_group(evaluate).commands}
    names = [f"{name} {task}".rstrip() for name in sources() for task in groups.get(name, [""])]
    shown = {name: regard(*name.split(), "--help").out for name in names}
    having = {name for name, text in shown.items() if "--json" in text}
    assert having == {" ".join(words[: 1 + (words[0] in groups)]) for words in COMMANDS.values()}
    assert all(
        "[FILE.json]" in shown[name] and "with FILE.json, write it there and print text." in shown[name]
        for name in having
    )
    for text in shown.values():
        lines = [line for line in text.splitlines() if line.split()[1:2] in (["--plot"], ["--html"])]
        assert all("<path>" in line for line in lines)
