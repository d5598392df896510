"""What commands print: nothing that a terminal obeys, no traceback, and their own words rather than the library's."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard as package
import regard_cli
import regard_lab.cli
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.text.vocabulary import SymbolVocabulary

CLI = Path(regard_cli.__file__).parent, Path(regard_lab.cli.__file__).parent
EVIL = "\x1b[2J\x9b31m\u202e"


def test_everything_printed_passes_one_place() -> None:
    for path in [path for folder in CLI for path in folder.glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if path.name in ("messages.py", "app.py") and path.parent == CLI[0]:
            continue
        escaped = {"__init__.py": {"print"}, "regress.py": {"print"}, "startup.py": {"sys.stderr.write"}}
        allowed = escaped.get(path.name, set())
        assert not called & {"print", "typer.echo", "sys.stdout.write", "sys.stderr.write"} - allowed, path
        assert "rich.console" not in imported, path


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a model of one word, which a terminal would obey."""
    words = SymbolVocabulary(["a", EVIL], " ")
    torch.manual_seed(0)
    config = RecurrentConfig(len(words), len(words), embedding=4, encoder=4, decoder=4, features=4)
    model = RecurrentEncoderDecoder(config)
    model.output.bias.data[4] = 9.0
    return SequenceModel(model, words, words, {"task": "translation"}).save(tmp_path / EVIL)


@pytest.mark.slow
def test_nothing_in_a_model_a_table_or_pairs_is_obeyed(
    regard, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table, pairs, options = (tmp_path / f"{EVIL}.{ending}" for ending in ("csv", "tsv", "toml"))
    table.write_text(f"{EVIL},y,z{EVIL}\n" + "".join(f"{i},{i * i},{EVIL}{i % 2}\n" for i in range(9)), "utf-8")
    pairs.write_text(f"a\ta\n{EVIL}\t{EVIL}\t{EVIL}\n", "utf-8")
    options.write_text('"\\u001b[2J" = 1\n', "utf-8")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in hostile.iterdir():
        (broken / path.name).write_bytes(path.read_bytes().replace(b'"F32"', b'"\x1b[2"'))
    runs = [
        ["translate", f"a {EVIL}", "--model", hostile, "--alignment", "--beams", "1"],
        ["translate", f"a {EVIL}", "--model", hostile, "--json", "--beams", "1"],
        ["translate", "a", "--model", broken],
        ["translate", "a", "--model", tmp_path / f"no{EVIL}"],
        ["evaluate", "translation", pairs, "--model", hostile, "--beams", "1"],
        ["evaluate", "translation", pairs, "--model", hostile, "--beams", "1", "--out", tmp_path / EVIL / EVIL / EVIL],
        ["regress", table, "--target", "y"],
        ["regress", table, "--target", EVIL + "no"],
        ["train", "translation", "--out", tmp_path / "run", "--options", options],
        ["train", "translation", "--out", tmp_path / "run", "--data", "x", "--set", f"{EVIL}={EVIL}"],
        ["compare", "translation", "--attention", EVIL, "--out", tmp_path / "run"],
        ["compare", "translation", EVIL],
        ["translate", "a", "--beams", EVIL],
        [EVIL],
        [f"--{EVIL}"],
    ]
    for arguments in runs:
        outcome = regard(*arguments)
        printed = outcome.out + outcome.err
        assert not set(printed) & set("\x1b\x9b\u202e"), arguments
        assert outcome.code in (0, 2) and "Traceback" not in printed, printed
        if "--json" in arguments:
            assert EVIL in json.loads(outcome.out)["source"], "escaped as JSON escapes: the data is the same"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    piped = regard("translate", "a", "--model", hostile, "--beams", "1")
    assert set(piped.out.split()) == {"\x9b31m\u202e"}, "a pipe gets the characters as they are"
    named = regard("translate", "a \udcff", "--model", hostile, "--beams", "1", "--json")
    assert r'"source": "a \udcff"' in named.out, "but for halves of pairs, which no encoding can hold"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["train", "translation", "--data", "no.tsv", "--out", "x"],
            "train: {here}/no.tsv must exist, got no such file.",
        ),
        (
            ["train", "translation", "--data", "no.tsv", "--out", __file__],
            f"train: --out must be a new folder, got a file, {__file__}.",
        ),
        (["evaluate", "translation", "no.tsv"], "evaluate: no.tsv must exist, got no such file."),
        (["translate", "a", "--beams", "0"], "translate: --beams must be an int from 1 to 1,000, got 0."),
        (
            ["translate", "a", "--model", __file__],
            f"translate: --model must be a model folder, got a file, {__file__}.",
        ),
        (["translate", "a", "--batch", "0"], "translate: --batch must be an int of at least 1, got 0."),
        (
            ["compare", "translation", "--attention", "dot", "--out", "x"],
            "compare: --attention must name at least two",
        ),
        (
            ["train", "translation", "--out", "x", "--steps", "99999999999999999999"],
            "train: --steps must be below 2,147,483,648, got 99999999999999999999.",
        ),
        (["train", "translation", "--out", "x", "--set", "model.x=" + "[" * 9000], "train: model.x must be one of"),
        (["train", "translation", "--out", "x", "--set", "a.b.c=1"], "train: --set must be NAME=VALUE or SECTION.NAME"),
        (
            ["train", "translation", "--out", "x", "--set", "kind={a=1}"],
            "train: kind must be a string, got",
        ),
        (
            ["train", "translation", "--out", "x", "--set", "model.encoder=-1"],
            "train: model.encoder must be an int from 1 to 65,536, got -1.",
        ),
        (
            ["train", "translation", "--out", "x", "--data", "circle"],
            "train: {here}/circle must be readable, got Too",
        ),
        (["regress", "circle", "--target", "y"], "regress: circle must be readable, got Too many levels"),
        (["regress", "full.csv", "--target", "y", "--out", "/dev/full"], None),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_are_in_the_words_of_the_command(
    regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    outcome = regard(*arguments)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
    if sentence is not None:
        assert outcome.err.startswith(f"regard: {sentence.format(here=tmp_path)}"), outcome.err


def _command(*arguments: str, **named: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "regard_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **named,
    )  # type: ignore[call-overload, no-any-return]


def test_without_a_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"
    code += f"os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'regard_cli', '--version'])"
    # A relative path there would end Python itself.
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    sentence = "regard: the current directory no longer exists. Change to another one.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_an_interrupt_while_packages_are_imported_is_one_line(tmp_path: Path) -> None:
    """The module that is imported behind the handler tells when it is there: the interrupt then hits an import."""
    (tmp_path / "torch.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    process = _command("catalogue", env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(package.__file__).parents[1]}"})
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "\nregard: interrupted\n")


def test_a_full_disk_behind_standard_output_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "regard_cli", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "regard: standard output cannot be used: No space left on device\n")
