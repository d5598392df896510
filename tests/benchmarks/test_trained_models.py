"""The report of trained models: what is trained by the command it shows, scored, and compared with thresholds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks import translation
from benchmarks.translation import TOKENIZED, Trial, markdown, measure

pytestmark = pytest.mark.slow

SMALL = (
    "--data {0}/train.tsv --valid {0}/test.tsv --steps 2 --vocabulary-size 40 --set model.width=16 --set model.heads=2 "
    "--set model.feedforward=16 --set model.encoder_layers=1 --set model.decoder_layers=1"
)


@pytest.fixture
def data(tmp_path) -> Path:
    drawn = random.Random(0)
    words = {"One": "Eins", "two": "zwei", "three": "drei"}
    lines = []
    for _ in range(60):
        chosen = [drawn.choice(list(words)) for _ in range(drawn.randint(2, 6))]
        lines.append(f"{' '.join(chosen)}\t{' '.join(words[word] for word in chosen)}")
    folder = tmp_path / "data" / "tiny"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("\n".join(lines[:50]) + "\n", encoding="utf-8")
    (folder / "test.tsv").write_text("\n".join(lines[50:]) + "\n", encoding="utf-8")
    return folder.parent


@pytest.mark.campaign
def test_a_run_is_trained_resumed_with_more_steps_and_scored(data, tmp_path, monkeypatch) -> None:
    trial = Trial("Tiny", "multi30k-transformer", SMALL, "tiny", ("test.tsv",), more=4, language="de")
    monkeypatch.setitem(translation.TRIALS, "tiny", trial)
    # Moses' tokenizer comes with the benchmarks' packages alone.
    asked = []
    monkeypatch.setattr(translation, "_split", lambda texts, language: asked.append(language) or texts)
    found = measure("tiny", data, tmp_path / "runs")
    assert found.training["steps"] == 4
    first, second = found.command.split("; ")
    assert first.startswith("regard train translation --options recipes/multi30k-transformer.toml --data DATA/tiny/")
    assert first.endswith("--out RUN")
    assert second == "regard train translation --out RUN --resume --steps 4"
    assert set(asked) == {found.language} == {"de"}, "split by another language's rules"
    assert set(found.scores) == {"BLEU, lower case", TOKENIZED, "chrF, lower case"}
    assert found.sources == len({line.split("\t")[0] for line in (data / "tiny" / "test.tsv").open(encoding="utf-8")})
    ended = (tmp_path / "runs" / "tiny" / "model.safetensors").stat().st_mtime_ns
    again = measure("tiny", data, tmp_path / "runs")
    assert again.scores == found.scores
    assert (tmp_path / "runs" / "tiny" / "model.safetensors").stat().st_mtime_ns == ended, "trained a second time"


def test_scores_stand_beside_published_ones() -> None:
    shared = {"published": {"WER": "20–24"}, "training": {}, "parameters": 1, "sources": 2, "references": 3}
    shared |= {"command": "x", "where": {"CPU": "a", "torch": "b", "regard": "c", "date": "d"}, "language": "de"}
    shared |= {"signatures": {"BLEU": "nrefs:1|case:lc"}, "source": "Somebody 2020"}
    results = {
        "words": {"title": "Words", "scores": {"WER": 21.0, "PER": 4.5}, "target": {"WER": 20.0, "PER": 4.7}, **shared},
        "texts": {"title": "Texts", "scores": {"BLEU": 39.0}, "target": {"BLEU": 39.5}, **shared},
        "more": {"title": "More", "scores": {"WER": 24.5, "PER": 2.0}, "target": {}, **shared},
    }
    shown = markdown(results)
    assert "| Words | WER | 21.00 | 20–24 |" in shown
    assert "| Words | PER | 4.50 |  |" in shown
    assert "| Texts | BLEU | 39.00 |  |" in shown
    assert [translation.good({name: each}) for name, each in results.items()] == [False, False, True]
    assert "| Texts | Somebody 2020 | de | BLEU: `nrefs:1\\|case:lc` |" in shown
