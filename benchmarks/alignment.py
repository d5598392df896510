"""How well attention aligns words: of models, of the lexical aligner, and of what a model wrote itself.

    python -m benchmarks.alignment --data TATOEBA [--pairs 200] [--models english-french NAME=FOLDER ...] [--out DIR]

The reference links come from eflomal (`pip install 'regard-lab[align]'`), which aligns all training and validation
pairs. For a random sample of the validation pairs, links found in both directions are sure, and links of
grow-diag-final-and are possible. No person made these links, so no aligner can score better than eflomal. eflomal is
random: figures vary by a few tenths between runs.

``everyday`` are any sentences, ``longer`` those of 6 to 14 words. "attention" links each word to the source word with
the most attention in the map that pictures show: that of the step before the word was written, or, in a Transformer
with a map "alignment", of the step that reads it. "posterior" also uses how likely a recurrent model was to write the
word, and links both ways (`regard align --model`). "punctuation" counts the words that attend most to a punctuation
mark, among all words and among first words, in the model's own translations of the everyday sentences.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT, facts
from regard_lab import pretrained
from regard_lab.data import Pairs, read_pairs
from regard_lab.generation import PredictionOptions, SequenceModel
from regard_lab.tasks.translation.alignment import (
    Agreement,
    Gold,
    Links,
    eflomal,
    lexical,
    lowercase,
    merge_pieces,
    predicted_attention,
    strongest_links,
    symmetrize,
    symmetrize_attention,
    word_attention,
)
from regard_lab.text import find_words, split_elisions

SEED, LENGTHS = 5, (6, 14)
SETS = ("everyday", "longer")


class Material:
    """Pairs to learn from and to check, with the links of all of them.

    Parameters
    ----------
    folder : Path
        With ``en-fr.train.tsv.gz`` and ``en-fr.valid.tsv.gz``.
    count : int
        Pairs of each set.
    """

    def __init__(self, folder: Path, count: int) -> None:
        learn, valid = (read_pairs(folder / f"en-fr.{part}.tsv.gz") for part in ("train", "valid"))
        pairs = Pairs([*valid.sources, *learn.sources], [*valid.targets, *learn.targets])
        sides, self._owners = [], []
        for texts in (pairs.sources, pairs.targets):
            cuts = [split_elisions(text, find_words(text)) for text in texts]
            sides.append([[text[start:stop] for start, stop in places] for text, (places, _) in zip(texts, cuts)])
            self._owners.append([owners for _, owners in cuts])
        self.pairs, words = pairs, lowercase(*sides)
        self._found = {"eflomal": list(eflomal(*words)), "lexical": list(lexical(*words))}
        rows = list({source: row for row, source in reversed(list(enumerate(valid.sources)))}.values())
        drawn = random.Random(SEED)
        everyday = drawn.sample(rows, count)
        least, most = LENGTHS
        longer = [row for row in rows if row not in set(everyday) and least <= len(pairs.sources[row].split()) <= most]
        self.rows = dict(zip(SETS, (everyday, drawn.sample(longer, count))))

    def links(self, aligner: str, row: int, method: str) -> Links:
        """Return the links between the words of a pair."""
        owners = (side[row] for side in self._owners)
        return merge_pieces(symmetrize(*self._found[aligner][row], method), *owners)

    def gold(self, row: int) -> Gold:
        """Return the links that count as right."""
        sure = self.links("eflomal", row, "intersection")
        return Gold(sure, sure | self.links("eflomal", row, "grow-diag-final-and"))


def measured(model: SequenceModel, material: Material) -> dict[str, Any]:
    """Return the scores of a model's attention."""
    found: dict[str, Any] = {}
    for name, rows in material.rows.items():
        sides = [material.pairs.sources[row] for row in rows], [material.pairs.targets[row] for row in rows]
        gold = [material.gold(row) for row in rows]
        before, after = word_attention(model, *sides, posterior=False), word_attention(model, *sides)
        ways = {"attention": [strongest_links(each) for each in before]} | {
            f"posterior, {method}": [symmetrize_attention(each, None, method) for each in after]
            for method in ("intersection", "grow-diag-final-and")
        }
        found[name] = {way: _rates(links, gold) for way, links in ways.items()}
    written = model.predict(
        [material.pairs.sources[row] for row in material.rows["everyday"]], PredictionOptions(alignment=True)
    )
    counts = {"all": [0, 0], "first": [0, 0]}
    for each in written:
        for i, j in strongest_links(predicted_attention(each, None)):
            if _is_sign(each.words[j].text):
                continue
            for which in ("all", "first")[: 2 - bool(j)]:
                counts[which][0] += _is_sign(each.source_words[i].text)
                counts[which][1] += 1
    found["signs"] = {which: round(100 * signs / max(words, 1), 1) for which, (signs, words) in counts.items()}
    return found


def of_lexical(material: Material) -> dict[str, Any]:
    """Return the scores of the lexical aligner."""
    return {
        name: {
            method: _rates(
                [material.links("lexical", row, method) for row in rows], [material.gold(row) for row in rows]
            )
            for method in ("intersection", "grow-diag-final-and")
        }
        for name, rows in material.rows.items()
    }


def _rates(links: Sequence[Links], gold: Sequence[Gold]) -> dict[str, float]:
    agreement = Agreement.of(links, gold)
    return {name: round(100 * getattr(agreement, name), 1) for name in ("precision", "recall", "aer")}


def _is_sign(text: str) -> bool:
    return not any(character.isalnum() for character in text)


def summary(found: dict[str, Any]) -> str:
    """Return the tables of results."""
    lines = ["| aligner | links | AER, everyday | AER, longer | precision | recall |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for name, each in {**found["models"], "lexical aligner": found["lexical"]}.items():
        for way, rates in each["everyday"].items():
            longer = each["longer"][way]["aer"]
            lines.append(f"| {name} | {way} | {rates['aer']} | {longer} | {rates['precision']} | {rates['recall']} |")
    lines += [
        "",
        "| own translations | first words at punctuation | all words at punctuation |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| {name} | {each['signs']['first']} % | {each['signs']['all']} % |" for name, each in found["models"].items()
    ]
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    said = (__doc__ or "").split("\n\n", 2)[2]
    lines = ["# How well attention aligns words", "", said.strip(), "", summary(found), ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found["machine"].items())]
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Measure the models, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "tatoeba")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["english-french"], metavar="[NAME=]FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    chosen = parser.parse_args(given)
    material = Material(chosen.data, chosen.pairs)
    found: dict[str, Any] = {
        "models": {}, "lexical": of_lexical(material), "pairs": chosen.pairs,
        "machine": facts() | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"},
    }  # fmt: skip
    torch.manual_seed(SEED)
    for each in chosen.models:
        name, _, folder = each.rpartition("=")
        model = pretrained.load(folder) if folder in pretrained.names() else SequenceModel.load(folder)
        found["models"][name or folder] = measured(model, material)
    path = chosen.out / "alignment.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
