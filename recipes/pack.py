"""Package a trained translation model: store it as float16, find out what is unusual to it, score it, write its card.

``python -m recipes.pack TATOEBA PAIRS FOLDER RUN [RUN ...] [--note TEXT]``: TATOEBA holds validation and test pairs,
and ``multi30k`` may lie beside it, for its German sentences; PAIRS is the folder that ``recipes.pairs`` wrote;
each RUN is a folder of ``regard train``, which the next one started from; the note ends the card.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import alignment, included_model
from benchmarks.machine import ROOT, facts

from regard_lab.data import read_pairs, read_texts
from regard_lab.generation import SequenceModel
from regard_lab.pretrained import CARD

#: The share of everyday sentences that may be reported as unusual.
_REPORTED = 0.02
#: At most this share of known words is asked for: a short text may have a rare word.
_KNOWN = 0.6

_CARD = """# English to French

A Transformer (Vaswani et al. 2017, arXiv 1706.03762; norms before each block) with {encoder} encoder and {decoder}
decoder layers of width {width}: {parameters:,} parameters, {subwords:,} subwords for both languages, {megabytes:.1f}
MB. It knows everyday sentences best, and reads one sentence at a time. Capitals are read as marks; names, numbers of
three digits and more, addresses, tags and emoji are copied by placeholders (`rewriting.json`).

| | |
| --- | --- |
{runs}
| made on | {processor} |
| scored on | {sources:,} unseen English sentences with {references:,} French ones, 5 beams, one form of each quote |
| BLEU | {bleu:.2f} (`{bleu_signature}`) |
| chrF | {chrf:.2f} (`{chrf_signature}`) |
| alignment error rate | {attention} by attention, {posterior} by the posterior in both directions (`make alignment`) |
| first words that look at a sign | {signs} % of its own translations |

Other kinds of text, none of them trained on ([all answers](../../../../../benchmarks/results/included-model.md)):

{kinds}

**What it does not know.** A line on standard error says so if a text is unlike those that it learned from: if fewer
than {known:.0%} of its words were known in training, or a token of the translation has a probability of less than
{confidence:.2f} on average. That is so for

{unusual}

**Data.** Sentence pairs of [Tatoeba](https://tatoeba.org), CC-BY 2.0 FR, by its contributors, in the selection of
[manythings.org/anki](https://www.manythings.org/anki/) dated 2019-04-07, and the collections that [NOTICE](NOTICE)
names with their licences: each as often as `recipes/pairs.py` says, with sentences retyped as people type, parts of
sentences, noun phrases put together of their words, and sentences with addresses and emoji. None of the data is in this
folder; the parameters were learned from it.

**Attention.** The map `alignment` is that of one head (`config.json` names it) at the step that reads a word, which
aligns it better than the step that has to choose it (Chen et al. 2020, arXiv 2004.14837). It was guided by the links of
[eflomal](https://github.com/robertostling/eflomal): their cross-entropy was added to the loss (Chen et al. 2016, arXiv
1607.01628). The alignment error rate is against that
aligner's links too, of {aligned} pairs to validate with.

**Made by** `make pretrained`: a run with `recipes/english-french.toml`, one that starts from it with
`recipes/english-french-final.toml`, whose rate falls to 0 and whose pairs have more phrases, short sentences and
numbers, and one with `recipes/english-french-words.toml`, where sentences of one word count most. `recipes.pack` stored
the parameters as float16 and wrote this card. {note}
"""


def limits(model: SequenceModel, sources: Sequence[str]) -> dict[str, float]:
    """Return the least confidence and share of known words of usual texts, from everyday sentences."""
    assert model.rewriting is not None
    confidence = np.quantile([each.confidence for each in model.predict(sources)], _REPORTED)
    known = np.quantile([model.rewriting.known_share(text) for text in sources], _REPORTED)
    return {"confidence": round(float(confidence), 3), "known": round(min(float(known), _KNOWN), 3)}


def reported(model: SequenceModel, texts: Iterable[str]) -> float:
    """Return the share of texts that a model reports as unusual."""
    found = [model.is_unusual(each) for each in model.predict(texts)]
    return sum(found) / len(found)


def described(number: int, training: dict[str, Any]) -> str:
    """Return a row of the card about a run."""
    said = f"{training['pairs']:,} pairs, {training['steps']:,} steps, {training['seconds'] / 60:.0f} minutes"
    return f"| run {number} | {said}, seed {training['seed']}, threads: {training['threads']} |"


def main(given: Sequence[str] | None = None) -> None:
    """Store the model of the last run as float16, score the stored model, and write its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tatoeba", "pairs", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args(given)
    tatoeba, pairs, folder, runs = (getattr(arguments, name) for name in ("tatoeba", "pairs", "folder", "runs"))
    SequenceModel.load(runs[-1]).save(folder, dtype="float16")
    model = SequenceModel.load(folder)
    valid = read_pairs(tatoeba / "en-fr.valid.tsv.gz", max_length=None, words=None)
    model.about["usual"] = limits(model, list(dict.fromkeys(valid.sources)))
    trained = [SequenceModel.load(run).about["training"] for run in runs]
    model.about.pop("training")
    scores = included_model.measured(model, tatoeba, pairs)
    test = read_pairs(tatoeba / "en-fr.test.tsv.gz", max_length=None, words=None).references()
    everyday = scores["kinds"]["everyday: Tatoeba, test"]
    model.about |= {
        "languages": ["en", "fr"],
        "data": "Tatoeba (tatoeba.org), CC-BY 2.0 FR, as selected by manythings.org/anki; others: see NOTICE",
        "pairs": max(each["pairs"] for each in trained),
        "scores": {"sources": len(test), "bleu": round(everyday["bleu"], 2), "chrf": round(everyday["chrf"], 2)},
    }
    model.save(folder, dtype="float16")
    results = ROOT / "benchmarks" / "results"
    included_model.write(scores, results)
    alignment.main(["--data", str(tatoeba), "--models", f"{folder.name}={folder}", "--out", str(results)])
    aligned = json.loads((results / "alignment.json").read_text(encoding="utf-8"))
    found = aligned["models"][folder.name]
    german = tatoeba.parent / "multi30k" / "val.de.gz"
    texts: dict[str, list[str]] = {
        "everyday sentences (Tatoeba, test)": list(test),
        "news and encyclopedia (PUD)": read_pairs(pairs / "pud.tsv", max_length=None, words=None).sources,
        "French sentences": valid.targets[:500],
        **({"German sentences": read_texts(german).sources[:500]} if german.exists() else {}),
    }
    lines = [f"| {name} | {reported(model, some):.1%} |" for name, some in texts.items()]
    config: Any = model.model.config
    card = _CARD.format(
        encoder=config.encoder_layers, decoder=config.decoder_layers, width=config.width,
        parameters=sum(parameter.numel() for parameter in model.model.parameters()),
        megabytes=sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        subwords=len(model.source), runs="\n".join(described(i, each) for i, each in enumerate(trained, start=1)),
        processor=facts()["CPU"],
        sources=len(test), references=sum(map(len, test.values())),
        bleu=everyday["bleu"], bleu_signature=everyday["signatures"][0],
        chrf=everyday["chrf"], chrf_signature=everyday["signatures"][1],
        attention=found["everyday"]["attention"]["aer"],
        posterior=found["everyday"]["posterior, intersection"]["aer"],
        signs=found["signs"]["first"], aligned=aligned["pairs"],
        note=arguments.note, kinds=included_model.table(scores), **model.about["usual"],
        unusual="\n".join(["| texts | reported |", "| --- | ---: |", *lines]),
    )  # fmt: skip
    (folder / CARD).write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
