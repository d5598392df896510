"""``regard demo`` with the model that comes along."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from pages import Page

from regard_lab import pretrained
from regard_lab.cli import demo


@pytest.mark.slow
def test_it_translates_at_once_and_shows_what_was_looked_at(regard, tmp_path: Path) -> None:
    outcome = regard("demo", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    shown = outcome.out
    for sentence in (*demo.DRAWN, *demo.MORE):
        assert f"{sentence}\n  " in shown
    assert "Ma sœur n'a jamais vu la mer." in shown
    assert "je t'aime" in shown
    assert "la zone de contrôle international" in shown
    assert "█" in shown
    assert f"BLEU {pretrained.load().about['scores']['bleu']:.1f} on 1,189 held-out sentences" in shown
    assert shown.index("regard translate") < shown.index("regard demo --train")
    assert (tmp_path / "alignments.png").read_bytes().startswith(b"\x89PNG")
    page = Page((tmp_path / "alignments.html").read_text(encoding="utf-8"))
    assert len(page.described["heads"]) == len(demo.DRAWN)


@pytest.mark.slow
def test_sentences_of_ones_own(regard, tmp_path: Path) -> None:
    outcome = regard("demo", "I am tired.", "a [bold] [/cat] <b>", "", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "I am tired.\n  Je suis fatigu" in outcome.out
    assert "a [bold] [/cat] <b>\n" in outcome.out
    assert "(nothing)" in outcome.out
    assert demo.MORE[0] not in outcome.out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_a_terminal_is_asked_for_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("Thank you.\n\nnever read\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    demo.run([], out=tmp_path)
    shown = sys.stdout.getvalue()
    assert "Type an English sentence" in shown
    assert "Merci" in shown
    assert "never read" not in shown


@pytest.mark.campaign
def test_a_long_sentence_is_not_drawn_and_a_cut_one_told(regard, tmp_path: Path) -> None:
    outcome = regard("demo", "the cat " * 300, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "(truncated to the first 512 of 600 tokens" in outcome.out
    assert outcome.out.count("█") == regard("demo", "", "--out", tmp_path).out.count("█")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["I see.", "--train"], "demo: sentences cannot be combined with --train, got 'I see.'."),
        (["--seconds", "20"], "demo: --seconds requires --train."),
        (["--seed", "1"], "demo: --seed requires --train."),
    ],
)
def test_what_has_no_effect_is_refused(regard, arguments: list[str], said: str) -> None:
    outcome = regard("demo", *arguments)
    assert (outcome.code, outcome.err) == (2, f"regard: {said}\n")


def test_a_folder_that_cannot_be_made(regard, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = regard("demo", "--out", tmp_path / "file")
    assert outcome.code == 2
    assert "cannot be used" in outcome.err


def test_a_missing_package_is_named(regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard_cli.messages.find_spec", lambda name: None)
    outcome = regard("demo", "--out", tmp_path)
    assert outcome.code == 2
    assert "tokenizers is missing: pip install 'regard-lab'" in outcome.err


@pytest.mark.slow
def test_translate_knows_the_model_by_name(regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, named = regard("translate", "Thank you."), regard("translate", "Thank you.", "--model", "english-french")
    assert default.code == 0, default.err
    assert default.out == named.out == "Merci.\n"
    monkeypatch.chdir(tmp_path)
    Path("english-french").mkdir()  # not a model
    assert regard("translate", "Thank you.").out == "Merci.\n"
    (Path("english-french") / "config.json").write_text("{}")  # a model of the user's comes first
    assert regard("translate", "Thank you.").code == 2
