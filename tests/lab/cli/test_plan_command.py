"""``regard plan``."""

from __future__ import annotations

import json

import pytest

from regard_lab.planner import PUBLISHED


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_plan_of_gpt3(regard) -> None:
    outcome = regard("plan", "gpt3", "--gpus", "1024", "--memory", "80")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("gpt3: 174,604,259,328 parameters;")
    for text in ("FLOPs per token, sequence length 2,048", "1,024 GPUs of 80 GB", "DDP: needs 2,8", "best"):
        assert text in outcome.out
    assert "Energy" not in outcome.out and "Cost" not in outcome.out, "as asked"
    assert max(map(len, outcome.out.splitlines())) <= 80 and "…" not in outcome.out


def test_json_has_the_same(regard) -> None:
    outcome = regard("plan", "gpt3", "--gpus", 1024, "--tokens", "3e11", "--watts", 400, "--price", 2, "--json")
    found = json.loads(outcome.out)
    assert found["model"]["parameters"] == sum(found["model"]["by_part"].values()) == 174_604_259_328
    assert found["run"]["tokens"] == 3e11
    assert found["run"]["money"] == pytest.approx(2 * found["run"]["gpu_hours"])
    assert found["run"]["kilowatt_hours"] == pytest.approx(0.4 * 1.1 * found["run"]["gpu_hours"])
    chosen = next(row for row in found["layouts"] if row["kind"] == found["best"])
    assert chosen["fits"] and chosen["memory"]["total"] <= 80e9
    assert found["run"]["steps"] * chosen["step_seconds"] == pytest.approx(86400 * found["run"]["days"])


def test_the_table(regard) -> None:
    outcome = regard("plan", "--table")
    assert (outcome.code, outcome.err) == (0, "")
    for each in PUBLISHED.values():
        assert (
            each.title in outcome.out and each.printed in outcome.out and f"{each.shape().parameters:,}" in outcome.out
        )
    rows = json.loads(regard("plan", "--table", "--json").out)
    assert [row["counted"] for row in rows] == [each.shape().parameters for each in PUBLISHED.values()]


def test_sizes_without_a_name(regard) -> None:
    found = json.loads(regard("plan", "--layers", 12, "--width", 768, "--length", 1024, "--json").out)
    assert found["model"]["parameters"] == 124_439_808 and found["model"]["heads"] == 12
    assert found["run"]["tokens"] == 20 * 124_439_808, "Chinchilla's rule"


@pytest.mark.parametrize("name", ["transformer-big", "xlnet-large", "bert-base", "mistral-7b"])
def test_every_kind_of_model(regard, name: str) -> None:
    for gpus in (1, 8):
        outcome = regard("plan", name, "--gpus", gpus)
        assert (outcome.code, outcome.err) == (0, "")


def test_names_are_changed_by_flags_and_settings(regard) -> None:
    given = ("--layers", 2, "--vocabulary", 100, "--set", "kv_heads=8", "--set", "positions=rotary", "--length", 64)
    found = json.loads(regard("plan", "llama-7b", *given, "--json").out)
    assert found["model"]["layers"] == 2 and found["model"]["vocabulary"] == 100
    assert found["cache"]["token"] == 2 * 2 * 8 * 128 * 2
    found = json.loads(
        regard("plan", "transformer-base", "--vocabulary", 100, "--set", "encoder_layers=2", "--json").out
    )
    assert found["model"]["layers"] == 8 and found["model"]["vocabulary"] == 100


def test_nothing_fits(regard) -> None:
    outcome = regard("plan", "gpt3", "--batch-tokens", 2048)
    assert outcome.code == 0 and "No layout fits" in outcome.out
    outcome = regard("plan", "gpt2", "--gpus", 64, "--batch-tokens", 10240)
    assert outcome.code == 0 and "10 sequences of a batch are no multiple of 64 devices" in outcome.out


def test_a_batch_is_rounded_to_the_gpus(regard) -> None:
    found = json.loads(regard("plan", "gpt2", "--gpus", 7, "--json").out)
    assert found["batch"]["sequences"] == 2048 - 2048 % 7 and found["best"] == "DDP"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["gpt33"], "got 'gpt33' (did you mean 'gpt3'?)."),
        ([], "plan: name a model, or pass --layers and --width."),
        (["--layers", "2"], "plan: name a model, or pass --layers and --width."),
        (["gpt3", "--table"], "plan: [NAME] must be left out with --table, which lists all models, got 'gpt3'."),
        (["--table", "--gpus", "2"], "plan: --gpus must be left out with --table, got 2."),
        (["--table", "--set", "a=1"], "plan: --set must be left out with --table, got a=1."),
        (["gpt3", "--gpus", "0"], "plan: --gpus must be an int from 1 to 1,048,576, got 0."),
        (["gpt3", "--share", "1.5"], "plan: --share must be a number in (0, 1], got 1.5."),
        (["gpt3", "--precision", "mixd"], "got 'mixd' (did you mean 'mixed'?)."),
        (["gpt3", "--heads", "7"], "plan: --heads must divide width 12288, got 7."),
        (["gpt3", "--length", "4096"], "plan: --length must be at most 2,048, the number of learned positions"),
        (["gpt3", "--batch-tokens", "100"], "plan: --batch-tokens must be at least 2,048, the sequence length,"),
        (["gpt3", "--set", "kv_head=8"], "got 'kv_head' (did you mean 'kv_heads'?)."),
        (["gpt3", "--set", "kv_heads"], "plan: --set must be NAME=VALUE, such as kv_heads=8, got 'kv_heads'."),
        (["xlnet-large", "--layers", "2"], "plan: --layers must be left out for xlnet-large, which has no config"),
        (["transformer-base", "--layers", "2"], "plan: --layers must be left out for transformer-base: use --set"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(regard, given: list[str], sentence: str) -> None:
    outcome = regard("plan", *given)
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
    assert sentence in outcome.err


def test_help_fits_on_a_screen(regard) -> None:
    assert max(map(len, regard("plan", "--help").out.splitlines())) <= 80
