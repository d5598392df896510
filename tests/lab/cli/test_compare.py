"""``regard compare``: a table and a picture of several mechanisms."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from concurrent.futures import Future

import pytest

from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.tasks.translation.training import Experiment
from regard_lab.training import comparison
from regard_lab.training.comparison import compare

pytestmark = pytest.mark.slow

SMALL = [
    "--preset", "small", "--steps", "12", "--set", "vocabularies.kind=characters", "--set", "training.batch_tokens=400",
    "--set", "training.validate_every=6", "--set", "data.held_out=10", "--set", "model.dropout=0.0",
]  # fmt: skip


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(f"{a}{b}\t{b}{a}" for a in "abcdefgh" for b in "klmnopqr") + "\n\t\n", encoding="utf-8")
    return path


@pytest.mark.campaign
def test_a_table_a_picture_and_numbers(regard, pairs, tmp_path) -> None:
    out = tmp_path / "out"
    result = regard(
        "compare", "translation", "--attention", "none,transformer", "--data", pairs, "--out", out, *SMALL,
        "--set", "model.width=32", "--set", "model.heads=2", "--set", "model.encoder=24",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.out.count("skipped, one side is empty: 1") == 1
    options = {name: tomllib.loads((out / name / "options.toml").read_text()) for name in ("none", "transformer")}
    assert options["none"]["model"]["encoder"] == 24 and "width" not in options["none"]["model"]
    assert options["transformer"]["model"] == {"width": 32, "heads": 2, "dropout": 0.0}
    for name in ("none", "transformer", "bleu", "tokens/s", "memory"):
        assert name in result.out
    found = json.loads((out / "compared.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in found] == ["none", "transformer"]
    for each in found:
        assert each["steps"] == 12 and each["per_second"] > 0
        assert [step for step, _ in each["curve"]] == [6, 12] and each["memory"] > 50
        learned = SequenceModel.load(out / each["name"]).model.parameters()
        assert each["parameters"] == sum(parameter.numel() for parameter in learned)
    assert (out / "compared.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--attention", "additive"],
            "--attention must name at least two mechanisms, separated by commas, got",
        ),
        (["--attention", "dot,dot"], "--attention must name each mechanism once"),
        (["--attention", "dot,aditive"], "did you mean 'additive'"),
        (["--attention", "dot,additive", "--steps", "0"], "steps must be an int of at least 1"),
        (["--attention", "dot,additive", "--set", "training.steps=abc"], "steps must be an int of at least 1"),
        (["--attention", "dot,additive", "--data", "-"], "--data must be a file"),
        (["--attention", "dot,additive", "--set", "attention=dot"], "attention must be left out: --attention sets it"),
        (["--attention", "dot,transformer", "--set", "kind=recurrent"], "kind must be left out: --attention sets it"),
        (["--attention", "dot,none", "--set", "model.score=dot"], "model.score must be left out: --attention sets it"),
        (["--attention", "dot,none", "--set", "model.heads=4"], "model.heads must be one of"),
        (["--attention", "dot,transformer", "--set", "model.head=4"], "did you mean 'heads'"),
        (["--attention", "dot,transformer", "--set", "model=4"], "model must be a table"),
    ],
)
def test_wrong_options(regard, pairs, tmp_path, arguments, message) -> None:
    result = regard("compare", "translation", "--data", pairs, "--out", tmp_path / "out", *SMALL, *arguments)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.campaign
def test_what_is_done_is_kept_where_the_next_cannot_be(pairs, tmp_path) -> None:
    shared = {"preset": "small", "data": {"data": str(pairs), "held_out": 10}, "vocabularies": {"kind": "characters"}}
    shared["training"] = {"steps": 2, "batch_tokens": 400, "validate_every": 2}
    variants = {
        name: ExperimentOptions.from_table({**shared, "model": {"attention": name}}) for name in ("dot", "none")
    }

    def stop(found) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(Experiment, variants, tmp_path / "out", report=stop)
    (found,) = json.loads((tmp_path / "out" / "compared.json").read_text(encoding="utf-8"))
    assert found["name"] == "dot" and found["steps"] == 2


def test_what_is_there_is_said_before_anything_is_trained(regard, pairs, tmp_path) -> None:
    (tmp_path / "out" / "additive").mkdir(parents=True)
    (tmp_path / "out" / "additive" / "config.json").touch()
    options = ["--data", pairs, "--out", tmp_path / "out", *SMALL]
    result = regard("compare", "translation", "--attention", "dot,additive", *options)
    assert result.code == 2
    assert f"out must be a new folder, got {tmp_path / 'out' / 'additive'}, which has a model." in result.err
    assert not (tmp_path / "out" / "dot").exists()


LANGUAGE = [
    "--preset", "tiny", "--steps", "6", "--set", "tokenizer.kind=characters", "--set", "data.length=16",
    "--set", "training.batch_tokens=128", "--set", "training.validate_every=3", "--set", "model.width=16",
    "--set", "model.layers=1", "--set", "model.heads=2", "--set", "training.precision=float32",
]  # fmt: skip


class Here:
    """A pool that runs in this process: one of its own measures memory, which is another test's."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function, *arguments) -> Future:
        done: Future = Future()
        done.set_result(function(*arguments))
        return done


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    code = (
        "import multiprocessing, os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from regard_lab.training.comparison import _end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), initializer=_end_with_parent)\n"
        "    pool.submit(print, 'ready', flush=True).result()\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ""  # the end of the stream: the worker, which also holds it, is gone


def test_language_models_of_equal_size(regard, tmp_path, monkeypatch) -> None:
    """A cache of keys and values grows by 2 · 16 numbers a token; a state of 2 heads of 8 × 16 does not."""
    monkeypatch.setattr(comparison, "ProcessPoolExecutor", Here)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("a rose is " * 60)
    names = ["softmax", "gated-delta"]
    result = regard(
        "compare", "language-model", "--attention", ",".join(names), "--data", text, "--out", out, *LANGUAGE
    )
    assert result.code == 0, result.err
    first, second = json.loads((out / "compared.json").read_text(encoding="utf-8"))
    assert [first["name"], second["name"]] == names
    assert abs(second["parameters"] / first["parameters"] - 1) < 0.01
    assert (first["cache_per_token"], first["cache_fixed"]) == (2 * 16 * 4, 0)
    assert second["cache_per_token"] == 0 and second["cache_fixed"] >= 2 * 8 * 16 * 4
    for each in (first, second):
        assert [step for step, _ in each["curve"]] == [3, 6]
        assert each["scores"]["loss"] == pytest.approx(each["curve"][-1][1], rel=1e-4)
        assert each["per_second"] > 0  # though there are few steps
    assert (
        "cached bytes" in result.out
        and "128/token" in result.out
        and (out / "compared.png").read_bytes().startswith(b"\x89PNG")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "softmax,gated"], "--attention must be one of"),
        (["--attention", "softmax,linear", "--data", "-"], "--data must be a file"),
        (["--attention", "softmax,linear", "--set", "masked=true"], "masked must be left out"),
        (["--attention", "softmax,linear", "--set", "model.attention=linear"], "--attention sets it"),
        (["--attention", "softmax,linear", "--set", "model.withd=16"], "model.withd"),
    ],
)
def test_wrong_options_of_language_models(regard, tmp_path, arguments, message) -> None:
    (tmp_path / "text.txt").write_text("a rose")
    given = ["--data", tmp_path / "text.txt", "--out", tmp_path / "out", *LANGUAGE, *arguments]
    result = regard("compare", "language-model", *given)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_task_names_all_tasks(regard, tmp_path) -> None:
    result = regard("compare", "language-modl", "--attention", "softmax,mla", "--out", tmp_path / "out")
    assert result.code == 2 and "did you mean 'language-model'?" in result.err
    assert all(f"'{name}'" in result.err for name in ("translation", "pronunciation", "image-classification"))
