"""The report on how well attention aligns words, over a few pairs."""

import gzip
import json

import pytest
from benchmarks import alignment

from regard_lab.tasks.translation.alignment.links import lexical

pytestmark = pytest.mark.slow

WORDS = {"I": "je", "see": "vois", "the": "le", "dog": "chien", "cat": "chat", "and": "et", "a": "un", "man": "homme"}


def test_a_report_of_a_few_pairs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alignment, "eflomal", lexical)
    names = ["the dog", "a man", "the cat and a dog", "I see a man", "I see the cat and the dog and a man"]
    long = [f"I see the {one} and a {two} and the man" for one in ("dog", "cat") for two in ("dog", "cat")]
    pairs = [f"{text} .\t{' '.join(WORDS[word] for word in text.split())} ." for text in (*names, *long)]
    for part in ("train", "valid"):
        with gzip.open(tmp_path / f"en-fr.{part}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{pair}\n" for pair in pairs))
    assert alignment.main(["--data", str(tmp_path), "--pairs", "3", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "alignment.json").read_text(encoding="utf-8"))
    model = found["models"]["english-french"]
    assert found["lexical"]["everyday"]["intersection"]["aer"] == 0
    assert set(model) == {"everyday", "longer", "signs"} and 0 <= model["everyday"]["attention"]["aer"] <= 100
    table = alignment.summary(found)
    assert table in capsys.readouterr().out and table in (tmp_path / "alignment.md").read_text(encoding="utf-8")
    assert table.count("| lexical aligner |") == 2 and "first words at punctuation" in table
