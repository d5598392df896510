"""Package a trained translation model: store it as float16, score it, and write its model card.

``python -m recipes.pack WHOLE TYPED TATOEBA FOLDER``: WHOLE and TYPED are the run folders of ``regard train``, first on
whole sentences, then on sentences as users type them; TATOEBA holds the training, validation and test pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import alignment
from benchmarks.machine import ROOT, facts

from regard_lab.data import read_pairs
from regard_lab.generation import SequenceModel
from regard_lab.pretrained import CARD
from regard_lab.tasks.translation import bleu, chrf

_CARD = """# English to French

A recurrent encoder–decoder with additive attention (Bahdanau, Cho & Bengio 2014, arXiv 1409.0473; wiring "after" of
Luong 2015, arXiv 1508.04025): {parameters:,} parameters, {subwords:,} subwords for both languages. Everyday sentences,
as learners of a language exchange them; it knows little of anything else, and reads one sentence at a time.

| | |
| --- | --- |
| learned from | {pairs:,} pairs, {steps:,} steps, {minutes:.0f} minutes, seed {seed} |
| then from | {then_pairs:,} pairs, {then_steps:,} steps, {then_minutes:.0f} minutes, seed {then_seed} |
| made on | {processor}, threads: {threads} |
| scored on | {sources:,} English sentences that it never saw, with {references:,} French ones, 5 beams |
| BLEU | {bleu:.2f} (`{bleu_signature}`) |
| chrF | {chrf:.2f} (`{chrf_signature}`) |
| alignment error rate | {attention} by attention, {posterior} by the posterior in both directions (`make alignment`) |
| first words that look at a sign | {signs} % of its own translations |

**Data.** Sentence pairs of [Tatoeba](https://tatoeba.org), CC-BY 2.0 FR, by its contributors, in the selection of
[manythings.org/anki](https://www.manythings.org/anki/) dated 2019-04-07: first as they are; then with most of them
again without last marks and first capitals, as people type, with parts of them alone, what has a rare word several
times, and with noun phrases put together of words in those parts (`recipes/pairs.py`). None of the data is in this
folder; the parameters were learned from it.

**Attention** was guided by the links of [eflomal](https://github.com/robertostling/eflomal): their cross-entropy was
added to the loss, 0.3 times (Chen et al. 2016, arXiv 1607.01628). The alignment error rate is against that aligner's
links too, of {aligned} pairs to validate with.

**Made by** `make pretrained`, which trains with `recipes/english-french.toml` and `recipes/english-french-typed.toml`,
stores the parameters as float16 and writes this card.
"""


def main(whole: Path, typed: Path, data: Path, folder: Path) -> None:
    """Store the model of the second run as float16, score the stored model, and write its card."""
    SequenceModel.load(typed).save(folder, dtype="float16")
    model = SequenceModel.load(folder)
    references = read_pairs(data / "en-fr.test.tsv.gz", longest=None, words=None).references()
    texts = [each.text for each in model.predict(references)]
    listed = list(references.values())
    scores = bleu(texts, listed), chrf(texts, listed)
    training, then = SequenceModel.load(whole).about["training"], model.about.pop("training")
    about: dict[str, Any] = {
        "languages": ["en", "fr"],
        "data": "Tatoeba (tatoeba.org), CC-BY 2.0 FR, as selected by manythings.org/anki",
        "pairs": training["pairs"],
        "scores": {"sources": len(references), **{each.name.lower(): round(each.value, 2) for each in scores}},
    }
    model.about |= about
    model.save(folder, dtype="float16")
    results = ROOT / "benchmarks" / "results"
    alignment.main(["--data", str(data), "--models", f"{folder.name}={folder}", "--out", str(results)])
    aligned = json.loads((results / "alignment.json").read_text(encoding="utf-8"))
    found = aligned["models"][folder.name]
    card = _CARD.format(
        parameters=sum(parameter.numel() for parameter in model.model.parameters()),
        subwords=len(model.source), minutes=training["seconds"] / 60, **training,
        then_pairs=then["pairs"], then_steps=then["steps"], then_minutes=then["seconds"] / 60,
        then_seed=then["seed"], processor=facts()["CPU"],
        sources=len(references), references=sum(map(len, listed)),
        bleu=scores[0].value, bleu_signature=scores[0].signature,
        chrf=scores[1].value, chrf_signature=scores[1].signature,
        attention=found["everyday"]["attention"]["aer"],
        posterior=found["everyday"]["posterior, intersection"]["aer"],
        signs=found["signs"]["first"], aligned=aligned["pairs"],
    )  # fmt: skip
    (folder / CARD).write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
