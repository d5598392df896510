"""Scores of trained models, compared with published scores: ``python -m benchmarks.translation --data DIR [NAME ...]``.

DIR holds ``multi30k`` (train, val and test_2016_flickr, .de.gz and .en.gz), ``cmudict`` (train, valid and test.tsv.gz)
and ``tatoeba`` (en-fr.test.tsv.gz). What is not trained yet in ``--runs`` is trained first, by the command that the
report shows; a run that was stopped goes on. Each result is kept in benchmarks/results/translation.json until the same
is measured again, and translation.md shows all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts
from regard_lab import pretrained
from regard_lab.data import read_pairs
from regard_lab.generation import SequenceModel
from regard_lab.tasks.translation import bleu, chrf, get_task, tokenized_bleu

RESULTS = ROOT / "benchmarks" / "results"
GERMAN = "--data {0}/train.de.gz --targets {0}/train.en.gz --valid {0}/val.de.gz --valid-targets {0}/val.en.gz"
ENGLISH = "--data {0}/train.en.gz --targets {0}/train.de.gz --valid {0}/val.en.gz --valid-targets {0}/val.de.gz"
TOKENIZED = "tokenized, lower case"


@dataclass(frozen=True)
class Trial:
    """A model to train and score.

    Attributes
    ----------
    title : str
    recipe : str
        The options file's name; none for the model in the box.
    arguments : str
        Of ``regard train``, without the recipe; {0} is the folder of the data.
    data : str
        The folder in DIR.
    test : tuple of str
        Sources and targets, or pairs.
    published, target : dict of str to float or str
        By the name of the score; the exit code is 1 where a score is worse than ``target``.
    more : int
        Steps in all, if the finished run is then resumed with more of them.
    source : str
        Where the published scores are from.
    language : str
        Whose rules Moses' tokenizer splits the written texts by; none where they are no sentences.
    """

    title: str
    recipe: str
    arguments: str
    data: str
    test: tuple[str, ...]
    published: dict[str, str] = field(default_factory=dict)
    target: dict[str, float] = field(default_factory=dict)
    more: int = 0
    source: str = ""
    language: str = "en"


_WU = "Wu et al. 2021, arXiv 2105.14462"
_UNKNOWN = "not recorded"
_DE_EN = ("test_2016_flickr.de.gz", "test_2016_flickr.en.gz")
TRIALS = {
    "multi30k-none": Trial(
        "Multi30k German→English, recurrent without attention", "multi30k-recurrent", f"{GERMAN} --attention none",
        "multi30k", _DE_EN, {TOKENIZED: "20.6"}, source=_UNKNOWN,
    ),
    "multi30k-additive": Trial(
        "Multi30k German→English, recurrent with additive attention", "multi30k-recurrent", GERMAN,
        "multi30k", _DE_EN, {TOKENIZED: "28.3"}, {"BLEU": 34.0}, source=_UNKNOWN,
    ),
    "multi30k-transformer": Trial(
        "Multi30k German→English, Transformer", "multi30k-transformer", GERMAN,
        "multi30k", _DE_EN, {TOKENIZED: "36.5"}, {TOKENIZED: 38.0}, source=_UNKNOWN,
    ),
    "multi30k-transformer-en-de": Trial(
        "Multi30k English→German, Transformer", "multi30k-transformer", ENGLISH,
        "multi30k", _DE_EN[::-1], {TOKENIZED: "41.0"}, {TOKENIZED: 41.5}, 7500, _WU, "de",
    ),
    "cmudict": Trial(
        "CMUdict, letters into phonemes, recurrent with additive attention", "pronunciation",
        "--data {0}/train.tsv.gz --valid {0}/valid.tsv.gz", "cmudict", ("test.tsv.gz",),
        {"WER": "20–24", "PER": "4.7–5.9"}, {"WER": 20.0, "PER": 4.7}, language="",
        source="Yao & Zweig 2015, arXiv 1506.00196; Toshniwal & Livescu 2016, arXiv 1610.06540",
    ),
    "english-french": Trial(
        "Tatoeba English→French, the included model", "", "",
        "tatoeba", ("en-fr.test.tsv.gz",), {}, {"BLEU": 45.0}, language="fr",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What was reached: scores by name, and how."""

    title: str
    command: str
    parameters: int
    scores: dict[str, float]
    published: dict[str, str]
    target: dict[str, float]
    sources: int
    references: int
    training: dict[str, Any]
    signatures: dict[str, str]
    where: dict[str, str]
    source: str
    language: str


def trained(trial: Trial, data: Path, run: Path) -> str:
    """Train unless that was done, and return the command as a reader would type it."""
    name = "translation" if trial.data != "cmudict" else "pronunciation"
    words = ["regard", "train", name, "--options", f"recipes/{trial.recipe}.toml"]
    words += [*shlex.split(trial.arguments.format(data / trial.data)), "--out", str(run)]
    resume = ["regard", "train", name, "--out", str(run), "--resume"]
    if not (run / "model.safetensors").exists():
        again = (run / "checkpoints" / "last.ckpt").exists()
        subprocess.run([sys.executable, "-m", *(resume if again else words)], cwd=ROOT, check=True)
    commands = [words]
    if trial.more:
        commands.append([*resume, "--steps", str(trial.more)])
        if SequenceModel.load(run).about["training"]["steps"] < trial.more:
            subprocess.run([sys.executable, "-m", *commands[1]], cwd=ROOT, check=True)
    return "; ".join(map(shlex.join, commands)).replace(str(data), "DATA").replace(str(run), "RUN")


def scored(
    model: SequenceModel, test: Sequence[Path], language: str
) -> tuple[dict[str, float], dict[str, str], int, int]:
    """Return scores and their signatures, and how many sources and references there were; beam search with 5 beams."""
    references = read_pairs(*map(str, test), max_length=None, words=None).references()
    written, listed = [each.text for each in model.predict(references)], list(references.values())
    count = sum(map(len, listed))
    task = get_task(str(model.about["task"]))
    if task.metric != "bleu":
        return (
            {name.upper(): round(value, 2) for name, value in task.scores(written, listed).items()},
            {},
            len(listed),
            count,
        )
    # A model without capitals is scored without them, and the score's name says so.
    lower = model.target.lowercase
    case = ", lower case" if lower else ""
    plain, characters = (score(written, listed, lowercase=lower) for score in (bleu, chrf))
    split = tokenized_bleu(_split(written, language), [_split(each, language) for each in listed])
    found = {f"BLEU{case}": plain, TOKENIZED: split, f"chrF{case}": characters}
    scores = {name: round(score.value, 2) for name, score in found.items()}
    return scores, {name: score.signature for name, score in found.items()}, len(listed), count


def _split(texts: Sequence[str], language: str) -> list[str]:
    """Return texts as older papers scored them: tokenized as Moses does, in lower case."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [tokenizer.tokenize(normalizer.normalize(text), return_str=True, escape=False).lower() for text in texts]


def measure(name: str, data: Path, runs: Path) -> Result:
    """Train where needed, and score."""
    trial = TRIALS[name]
    if trial.recipe:
        command = trained(trial, data, runs / name)
        model = SequenceModel.load(runs / name)
        training = dict(model.about["training"])
    else:
        command, model, training = "make pretrained", pretrained.load(), {}
    test = [data / trial.data / each for each in trial.test]
    scores, signatures, sources, references = scored(model, test, trial.language)
    where = facts() | {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"}
    return Result(
        trial.title, command, sum(each.numel() for each in model.model.parameters()), scores, trial.published,
        trial.target, sources, references, training, signatures, where, trial.source, trial.language,
    )  # fmt: skip


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of scores."""
    lines = ["| model | score | regard | published |", "| --- | --- | ---: | ---: |"]
    for each in results.values():
        for score, value in each["scores"].items():
            lines.append(f"| {each['title']} | {score} | {value:.2f} | {each['published'].get(score, '')} |")
    return "\n".join(lines)


def good(results: dict[str, dict[str, Any]]) -> bool:
    """Return whether no score is worse than it must be; error rates are better where they are lower."""
    pairs = [
        (score, each["scores"][score], least)
        for each in results.values()
        for score, least in each["target"].items()
        if score in each["scores"]
    ]
    return all(value <= least if score in ("WER", "PER") else value >= least for score, value, least in pairs)


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Return the report."""
    lines = [
        "# Trained models and published scores", "",
        "`python -m benchmarks.translation --data DATA`; one run per model, with the seed below. BLEU is "
        f"sacreBLEU's on raw text; *{TOKENIZED}* is BLEU after Moses' tokenizer on both sides, as in the published "
        "Multi30k scores (whose tokenizers differ slightly). Beam search with 5 beams.", "",
        summary(results), "", "## How", "",
        "| model | parameters | steps | minutes | threads | seed | sentences | references | scored on | command |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]  # fmt: skip
    for each in results.values():
        run = each["training"]
        minutes = f"{run['seconds'] / 60:.0f}" if run else "see its card"
        lines.append(
            f"| {each['title']} | {each['parameters']:,} | {run.get('steps', '')} | {minutes} | "
            f"{run.get('threads', '')} | {run.get('seed', '')} | {each['sources']:,} | {each['references']:,} | "
            f"{', '.join(each['where'][name] for name in ('CPU', 'torch', 'regard', 'date'))} | `{each['command']}` |"
        )
    lines += [
        "", "## What the scores are", "",
        "| model | published by | Moses' rules | signatures |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for each in results.values():
        signatures = "; ".join(f"{name}: `{signature}`" for name, signature in each["signatures"].items())
        # A bar ends a cell of a table, in code too.
        signatures = signatures.replace("|", "\\|")
        lines.append(f"| {each['title']} | {each['source']} | {each['language']} | {signatures} |")
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Measure what is named, or all, and write the report; return 1 where a score is worse than its threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRIALS)}")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(given)
    path = arguments.results / "translation.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.names or TRIALS:
        results[name] = asdict(measure(name, arguments.data, arguments.runs))
        results = {known: results[known] for known in TRIALS if known in results}
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
        print(f"{name}: {results[name]['scores']}")
    return int(not good(results))


if __name__ == "__main__":
    sys.exit(main())
