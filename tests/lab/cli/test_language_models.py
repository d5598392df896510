"""``regard train language-model`` and ``regard generate``, as a new user runs them on a text of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from regard_lab.models import DecoderLM, DecoderLMConfig, load, save
from regard_lab.text.tokenizer import Tokenizer

SETTINGS = (
    "model.width=32", "model.layers=2", "model.heads=2", "training.precision=float32", "training.learning_rate=0.01",
    "training.validate_every=20", "training.save_every=10",
)  # fmt: skip
SMALL = ["--tokenizer", "characters", "--preset", "tiny", "--length", "32", "--batch-tokens", "512"]
SMALL += [each for setting in SETTINGS for each in ("--set", setting)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a rose is " * 1200)
    return path


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import regard_cli

    out = tmp_path_factory.mktemp("model") / "out"
    with pytest.raises(SystemExit) as caught:
        regard_cli.main(["train", "language-model", "--data", str(text), "--out", str(out), "--steps", "60", *SMALL])
    assert not caught.value.code
    return out


def test_from_a_text_to_more_of_it(regard, model) -> None:
    result = regard("generate", "--model", model, "a rose is", "--max-new-tokens", "18")
    assert (result.code, result.out) == (0, "a rose is a rose is a rose \n"), result.err
    piped = regard("generate", "--model", model, "-", "--max-new-tokens", "5", stdin="a rose")
    assert piped.out == "a rose is a\n"
    torn = regard("generate", "--model", model, "\udcff a")
    assert torn.code == 2 and not torn.out and "half a surrogate pair" in torn.err


def test_several_texts_as_json(regard, model) -> None:
    result = regard("generate", "--model", model, "a ro", "is a", "--max-new-tokens", "6", "--json", "--alignment")
    first, second = map(json.loads, result.out.splitlines())
    assert first["text"] == "se is " and second["text"] == " rose "
    assert [len(row) for row in first["attention"]] == [5 + i for i in range(6)]
    assert first["log_probability"] < 0 and first["end"] == "length"


def test_what_each_token_looked_at(regard, model, tmp_path) -> None:
    pictures = ["--plot", tmp_path / "a.png", "--html", tmp_path / "a.html"]
    result = regard("generate", "--model", model, "a rose", "--max-new-tokens", "4", "--alignment", *pictures)
    assert result.code == 0 and "attention:" in result.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "What each token attended to" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_sampling_goes_by_the_seed(regard, model) -> None:
    drawn = ["generate", "--model", model, "a", "--temperature", "2", "--max-new-tokens", "20", "--seed"]
    assert regard(*drawn, "1").out == regard(*drawn, "1").out != regard(*drawn, "2").out


def test_beams_and_lookup_write_the_same(regard, model) -> None:
    texts = [
        regard("generate", "--model", model, "a rose is", "--max-new-tokens", "9", *more).out
        for more in ([], ["--beams", "2"], ["--draft", "lookup"], ["--draft", model])
    ]
    assert set(texts) == {"a rose is a rose i\n"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--samples", "2"], "--samples has no effect at temperature 0; set --temperature."),
        (["--beams", "2", "--alignment"], "--alignment, --plot and --html must be left out with --beams, got both."),
        (
            ["--draft", "lookup", "--alignment"],
            "--draft must be left out with --alignment, --plot and --html, got lookup.",
        ),
        (["--top-k", "5"], "--top-k has no effect at temperature 0; set --temperature."),
        (["--top-p", "0.5"], "--top-p has no effect at temperature 0; set --temperature."),
        (["--min-p", "0.5"], "--min-p has no effect at temperature 0; set --temperature."),
        (["--seed", "5", "--temperature", "0"], "--seed has no effect at temperature 0; set --temperature."),
        (["--temperature", "-1"], "--temperature must be a finite number of at least 0, got -1.0."),
        (["--stop", ""], "--stop must not be empty, got ''."),
        (
            ["--stop", "ros", "--stop", "жук"],
            "--stop must be text that the model's vocabulary can spell, got 'жук', which it spells '���'.",
        ),
        (["--max-unknown", "2"], "--max-unknown must be a number in [0, 1], got 2.0."),
        (["--plot", "/nowhere/a.png"], "/nowhere/a.png cannot be used: No such file or directory"),
    ],
)
def test_options_that_do_not_fit(regard, model, given, sentence) -> None:
    result = regard("generate", "--model", model, "a", *given)
    assert (
        result.code == 2
        and not result.out
        and result.err.strip() == f"regard: {sentence}".replace("regard: --", "regard: generate: --")
    )


@pytest.mark.parametrize("more", [[], ["--draft", "lookup"], ["--temperature", "0.01"]])
def test_a_text_stops_within_a_word(regard, model, more) -> None:
    write = ["generate", "--model", model, "--max-new-tokens", "30", *more]
    assert regard(*write, "a rose is", "--stop", "rose").out == "a rose is a \n"
    assert regard(*write, "a rose is", "--stop", "ose is", "--stop", "se i").out == "a rose is a ro\n"
    assert regard(*write, "a rose", "--stop", "a r", "--stop", "rise").out == "a rose is \n"
    both = regard(*write, "a rose is", "is", "--stop", "se", "--json").out
    assert [json.loads(line)["text"] for line in both.splitlines()] == [" a ro", " a ro"]
    assert {json.loads(line)["end"] for line in both.splitlines()} == {"stop"}
    nothing = regard(*write, "a rose is", "--stop", " a")
    assert (nothing.code, nothing.out) == (0, "a rose is\n")


def test_a_prompt_with_characters_that_the_vocabulary_lacks(regard, model) -> None:
    write = ["generate", "--model", model, "--max-new-tokens", "2"]
    few = regard(*write, "a rose !s a ros?")
    assert few.code == 0 and few.out.startswith("a rose !s a ros?")
    assert few.err == "regard: the model's vocabulary lacks 2 of 16 characters: '!', '?'\n"
    many = regard(*write, "Привет")
    assert (many.code, many.out) == (2, "")
    assert many.err == (
        "regard: generate: the model's vocabulary lacks 6 of 6 characters: 'П', 'р', 'и', 'в', 'е' and 1 more; to "
        "generate anyway, raise --max-unknown (max_unknown), which is 0.2.\n"
    )
    assert regard(*write, "Привет", "--beams", "2").code == 2
    anyway = regard(*write, "Привет", "--max-unknown", "1")
    assert anyway.code == 0 and anyway.err.startswith("regard: the model's vocabulary lacks 6 of 6 characters")
    evaluated = regard(
        "evaluate", "language-model", "-", "--model", model, "--json", stdin="a rose ж is a rose is a rose"
    )
    assert evaluated.err.startswith("regard: the model's vocabulary lacks 1 of 28 characters: 'ж'\n")
    assert "bits_per_byte" not in json.loads(evaluated.out) and json.loads(evaluated.out)["perplexity"] > 0


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_reach_a_pipe_and_no_terminal(regard, tmp_path, monkeypatch, terminal) -> None:
    tokenizer = Tokenizer.learn([], kind="bytes")
    model = DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # the first token, a zero, is generated
    save(model, tmp_path)
    tokenizer.save(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    zeros = r"\u0000\u0000" if terminal else "\0\0"
    result = regard("generate", "--model", tmp_path, "a\n\tb", "--max-new-tokens", "2")
    assert (result.code, result.out) == (0, f"a\n\tb{zeros}\n")
    several = regard("generate", "--model", tmp_path, "a", "b\x9b", "--max-new-tokens", "2")
    assert several.out == f"a{zeros}\nb{chr(92) + 'u009b' if terminal else chr(0x9B)}{zeros}\n"
    listed = regard("generate", "--model", tmp_path, "a\x9b", "--max-new-tokens", "2", "--json")
    assert json.loads(listed.out)["prompt"] == "a\x9b" and json.loads(listed.out)["text"] == "\0\0"


def test_characters_that_a_model_cannot_spell_are_explained(regard, tmp_path) -> None:
    engine = tokenizers.Tokenizer(BPE(vocab={"\ufffd": 0, "a": 1}, merges=[], unk_token="\ufffd"))
    engine.decoder = Fuse()
    tokenizer = Tokenizer(engine, {"unknown": "\ufffd"})
    model = DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # the first token, the unknown one, is generated
    save(model, tmp_path)
    tokenizer.save(tmp_path)
    result = regard("generate", "--model", tmp_path, "a", "--max-new-tokens", "2")
    assert result.out == "a\ufffd\ufffd\n"
    assert result.err == "regard: \ufffd is a character that the model's vocabulary lacks\n"


def test_folders_without_a_model(regard, text, model, tmp_path) -> None:
    result = regard("generate", "--model", tmp_path, "a")
    assert result.code == 2 and "config.json" in result.err
    result = regard("train", "language-model", "--data", text, "--out", model)
    assert result.code == 2 and "must be a new folder" in result.err
    result = regard("train", "language-model", "--data", tmp_path / "none.txt", "--out", tmp_path / "out")
    assert result.code == 2 and "none.txt" in result.err and not (tmp_path / "out").exists()
    save(DecoderLM(DecoderLMConfig(10, width=16, layers=1, normalizer="entmax15")), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head": ["sequence"]}))
    result = regard("generate", "--model", tmp_path, "a")
    assert result.code == 2 and "must describe a decoder or an encoder" in result.err


def test_an_attempt_that_failed_is_no_obstacle(regard, text, tmp_path) -> None:
    options = ["--data", text, "--out", tmp_path / "out", "--steps", "1", *SMALL]
    (tmp_path / "empty.txt").write_text("\n")
    result = regard("train", "language-model", *options, "--valid", tmp_path / "empty.txt")
    assert result.code == 2 and "empty.txt" in result.err and not (tmp_path / "out").exists()
    result = regard("train", "language-model", *options, "--valid", text)
    assert result.code == 0, result.err
    result = regard("train", "classifier", "--out", tmp_path / "out", "--resume")
    assert result.code == 2 and "must be a run of classifier, got one of language-model" in result.err


def test_memory_that_is_not_there(regard, model, monkeypatch) -> None:
    from regard_lab.tasks.language.text_generator import TextGenerator

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(TextGenerator, "generate", full)
    result = regard("generate", "--model", model, "a")
    assert (result.code, result.err) == (2, "regard: out of memory; use a smaller model, batch or length\n")


def test_a_folder_of_sixteen_bits_in_eight(regard, model, tmp_path) -> None:
    save(load(model).bfloat16(), tmp_path)
    for file in model.glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    result = regard("generate", "--model", tmp_path, "a rose is", "--max-new-tokens", "9", "--int8")
    assert (result.code, result.out) == (0, "a rose is a rose i\n"), result.err


def test_all_options_are_shown(regard) -> None:
    result = regard("train", "language-model", "--out", "none", "--show-options", "--masked")
    assert result.code == 0 and "masked = true" in result.out and "# kv_heads" not in result.out
    assert "learning_rate = 0.001" in result.out


@pytest.mark.campaign
def test_an_interrupt_is_no_loss(text, tmp_path) -> None:
    """A run that is interrupted says how it goes on, and does."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "regard_cli", "train", "language-model", "--out", str(out)]
    begin = [*command, "--data", str(text), "--steps", "100000", *SMALL]
    process = subprocess.Popen(begin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    last = out / "checkpoints" / "last.ckpt"
    while not last.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate()
    assert process.returncode == 130 and f"regard train language-model --out {out} --resume" in told, told
    again = subprocess.run([*command, "--resume", "--seconds", "1"], capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "resuming after step" in again.stdout and (out / "model.safetensors").exists()
