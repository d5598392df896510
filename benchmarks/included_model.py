"""What the included translator does with texts of all kinds, as users type them.

    python -m benchmarks.included_model [--model FOLDER] [--tatoeba DIR] [--pairs DIR] [--out DIR]

``--pairs`` is the folder that ``python -m recipes.pairs`` wrote: it holds the pairs of each collection that were not
trained on. "small letters" and "capitals" are the Tatoeba validation sentences retyped: in small letters against the
references as they are, in capitals against references in capitals. "typographic signs" has curly apostrophes and
no-break spaces. All texts are compared in one form of each quote, dash and apostrophe. Of the numbers, one is right if
its translation has a French form of it. An utterance is a validation or test sentence of five words at most; it
is right if its translation is one of Tatoeba's references, of which most have few, but for the last mark. So is each
sentence of one word; these alone were trained on.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts
from regard_lab import pretrained
from regard_lab.data import read_pairs
from regard_lab.generation import SequenceModel
from regard_lab.tasks.translation import bleu, chrf
from regard_lab.text import uniform

#: Sentences with numbers, each with the forms of them that are right in French.
NUMBERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("I have 2 dogs.", ("2", "deux")),
    ("She has 3 children.", ("3", "trois")),
    ("There are 12 eggs.", ("12", "douze", "douzaine")),
    ("He is 25 years old.", ("25", "vingt-cinq")),
    ("I am 30.", ("30", "trente")),
    ("We need 48 chairs.", ("48", "quarante-huit")),
    ("My grandmother is 91.", ("91", "quatre-vingt-onze")),
    ("Page 17, please.", ("17", "dix-sept")),
    ("There are 365 days in a year.", ("365",)),
    ("It costs 150 euros.", ("150",)),
    ("He was born in 1987.", ("1987",)),
    ("The war ended in 1945.", ("1945",)),
    ("In 2019, we moved to Paris.", ("2019",)),
    ("The year 1492 is famous.", ("1492",)),
    ("It happened between 1914 and 1918.", ("1914", "1918")),
    ("I was there from 2001 to 2005.", ("2001", "2005")),
    ("3,500 people came.", ("3 500", "3500")),
    ("The town has 12,345 inhabitants.", ("12 345", "12345")),
    ("The population is 1,234,567.", ("1 234 567",)),
    ("About 10,000 people live here.", ("10 000",)),
    ("The price is 5.99 euros.", ("5,99",)),
    ("Pi is about 3.14.", ("3,14",)),
    ("The temperature is 37.5 degrees.", ("37,5",)),
    ("Only 0.5 percent agreed.", ("0,5",)),
    ("Sales grew by 12.5%.", ("12,5",)),
    ("50% of the students passed.", ("50 %", "50%", "cinquante")),
    ("There is a 20% discount.", ("20 %", "20%")),
    ("100% of them agreed.", ("100 %", "100%")),
    ("It costs $20.", ("20",)),
    ("The ticket costs $15.50.", ("15,50",)),
    ("He earns $2,000 a month.", ("2 000", "2000")),
    ("I paid 40 pounds.", ("40", "quarante")),
    ("The meeting is at 7:30.", ("7 h 30", "7 heures 30", "7 heures et demie", "sept heures et demie")),
    ("The train leaves at 10:45.", ("10 h 45", "10 heures 45")),
    ("It's 3:15 p.m.", ("15 h 15", "3 h 15", "15 heures 15")),
    ("Come at 8 o'clock.", ("8 h", "8 heures", "huit heures")),
    ("The shop opens at 9 a.m.", ("9 h", "9 heures", "neuf heures")),
    ("He arrived at 11:20 PM.", ("23 h 20", "23 heures 20")),
    ("We have lunch at 12:00.", ("12 h", "midi", "12 heures")),
    ("The film starts at 9:05 p.m.", ("21 h 05", "21 heures 05", "21 h 5")),
    ("My birthday is on March 5.", ("5 mars",)),
    ("Today is October 31.", ("31 octobre",)),
    ("She was born on May 1, 1990.", ("1er mai 1990",)),
    ("He died on 14 July 2003.", ("14 juillet 2003",)),
    ("The deadline is December 24, 2021.", ("24 décembre 2021",)),
    ("It was Monday, January 8.", ("8 janvier",)),
    ("the 1st of April", ("1er avril", "premier avril")),
    ("This is the 3rd time.", ("3e", "3ème", "troisième")),
    ("He finished 2nd.", ("2e", "2ème", "deuxième", "second")),
    ("the 21st century", ("XXIe", "21e", "21ème", "vingt et unième", "vingt-et-unième")),
    ("She lives on the 5th floor.", ("5e", "5ème", "cinquième")),
    ("in the 1990s", ("1990",)),
    ("the music of the 80s", ("80", "quatre-vingt")),
    ("seven", ("sept",)),
    ("thirteen", ("treize",)),
    ("twenty-three", ("vingt-trois",)),
    ("forty-two", ("quarante-deux",)),
    ("seventy", ("soixante-dix", "70")),
    ("eighty-one", ("quatre-vingt-un", "81")),
    ("ninety-nine", ("quatre-vingt-dix-neuf", "99")),
    ("one hundred", ("cent", "100")),
    ("two hundred and fifty", ("deux cent cinquante", "250")),
    ("one thousand", ("mille", "1 000", "1000")),
    ("five million people", ("cinq millions", "5 millions")),
    ("two billion dollars", ("deux milliards", "2 milliards")),
    ("a dozen eggs", ("douzaine",)),
    ("half an hour", ("demi-heure", "demi heure")),
    ("a quarter of an hour", ("quart d'heure",)),
    ("I called you three times.", ("trois fois", "3 fois")),
    ("Twenty people were invited.", ("vingt", "20", "vingtaine")),
    ("I have ten fingers.", ("dix", "10")),
    ("My phone number is 555-0199.", ("555-0199",)),
    ("Room 204 is free.", ("204",)),
    ("Bus 42 goes downtown.", ("42",)),
    ("The code is 8675309.", ("8675309",)),
    ("Two plus two is four.", ("quatre",)),
)
#: What is answered right or not: its title, and its name in the report.
ANSWERS = (("Numbers", "numbers"), ("Sentences of one word", "words"), ("Everyday utterances", "utterances"))
#: A sentence of one word.
SENTENCE = re.compile(r"[A-Z][^\W\d_]*[.!?]+")
#: The most utterances, and the most words of one.
UTTERANCES, SHORT = 400, 5


def kinds(tatoeba: Path, pairs: Path) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return the sources of each kind of text, with the references of each."""
    valid = read_pairs(tatoeba / "en-fr.valid.tsv.gz", max_length=None, words=None).references()
    test = read_pairs(tatoeba / "en-fr.test.tsv.gz", max_length=None, words=None).references()
    sources, references = list(valid), list(valid.values())
    curly = [text.replace("'", "\u2019").replace(" ?", "\u202f?").replace("...", "\u2026") for text in sources]
    found = {
        "everyday: Tatoeba, validation": (sources, references),
        "everyday: Tatoeba, test": (list(test), list(test.values())),
        "the validation sentences in small letters": ([text.lower() for text in sources], references),
        "the validation sentences in capitals": (
            [text.upper() for text in sources],
            [[text.upper() for text in each] for each in references],
        ),
        "the validation sentences with typographic signs": (curly, references),
    }
    pud = list(read_pairs(pairs / "pud.tsv", max_length=None, words=None))
    half = len(pud) // 2
    collections = {
        "news: PUD, first half": pud[:half],
        "encyclopedia: PUD, second half": pud[half:],
        "health: TICO-19": list(read_pairs(pairs / "tico19.tsv", max_length=None, words=None)),
        "dates, numbers and times": list(read_pairs(pairs / "numbers_dates_times.tsv")),
        "sentences with dates and numbers": list(read_pairs(pairs / "templates_dates_numbers.tsv")),
        "phrases": list(read_pairs(pairs / "phrases_everyday.tsv")),
    }
    for name, some in collections.items():
        found[name] = [source for source, _ in some], [[target] for _, target in some]
    return found


def has_number(text: str, forms: Sequence[str]) -> bool:
    """Return whether a text has one of these forms of a number, or all of several numbers."""
    plain = re.sub(r"\s", " ", text.lower())
    found = [re.search(rf"(?<![\w,]){re.escape(form.lower())}(?![\w]|,\d)", plain) is not None for form in forms]
    several = len(forms) > 1 and all(form.isdigit() and len(form) == 4 for form in forms)
    return all(found) if several else any(found)


def utterances(tatoeba: Path) -> dict[str, list[str]]:
    """Return short sentences that were not trained on, with their references."""
    pairs = [
        pair
        for part in ("valid", "test")
        for pair in read_pairs(tatoeba / f"en-fr.{part}.tsv.gz", max_length=None, words=None).references().items()
    ]
    return dict(
        sorted((pair for pair in pairs if len(pair[0].split()) <= SHORT), key=lambda pair: len(pair[0]))[:UTTERANCES]
    )


def single_words(pairs: Path) -> dict[str, list[str]]:
    """Return the training sentences of one word, with their references."""
    every = read_pairs(pairs / "train.tsv", max_length=None, words=None).references()
    return {source: references for source, references in every.items() if SENTENCE.fullmatch(source)}


def bare(text: str) -> str:
    """Return a text without the signs that end it, in one typography and small letters."""
    return uniform(re.sub(r"\s", " ", text), "fr").lower().rstrip(" .!?")


def measured(model: SequenceModel, tatoeba: Path, pairs: Path) -> dict[str, Any]:
    """Return the scores of a model."""
    found: dict[str, Any] = {"kinds": {}, "numbers": {}, "words": {}, "utterances": {}}
    for name, (sources, references) in kinds(tatoeba, pairs).items():
        written = [uniform(re.sub(r"\s", " ", each.text), "fr") for each in model.predict(sources)]
        plain = [[uniform(text, "fr") for text in each] for each in references]
        scores = bleu(written, plain), chrf(written, plain)
        found["kinds"][name] = {
            "sources": len(sources),
            "bleu": scores[0].value,
            "chrf": scores[1].value,
            "signatures": [each.signature for each in scores],
        }
    texts = [text for text, _ in NUMBERS]
    for (text, forms), prediction in zip(NUMBERS, model.predict(texts)):
        found["numbers"][text] = {"text": prediction.text, "right": has_number(prediction.text, forms)}
    for name, asked in (("words", single_words(pairs)), ("utterances", utterances(tatoeba))):
        for (text, references), prediction in zip(asked.items(), model.predict(list(asked))):
            right = bare(prediction.text) in {bare(each) for each in references}
            found[name][text] = {"text": prediction.text, "right": right}
    return found


def share(answers: dict[str, dict[str, Any]]) -> str:
    """Return how many answers are right, of how many."""
    return f"{sum(each['right'] for each in answers.values())} of {len(answers)}"


def table(found: dict[str, Any]) -> str:
    """Return the scores of each kind of text, and how many answers are right."""
    lines = ["| kind of text | sentences | BLEU | chrF |", "| --- | ---: | ---: | ---: |"]
    for name, each in found["kinds"].items():
        lines.append(f"| {name} | {each['sources']:,} | {each['bleu']:.1f} | {each['chrf']:.1f} |")
    shares = [f"{title}: {share(found[name])} right." for title, name in ANSWERS]
    return "\n".join([*lines, "", " ".join(shares)])


def markdown(found: dict[str, Any]) -> str:
    """Return the report."""
    said = (__doc__ or "").split("\n\n", 2)[2]
    lines = ["# The included translator on texts of all kinds", "", said.strip(), "", table(found)]
    for title, name in ANSWERS:
        lines += ["", f"## {title}", "", "| | | |", "| --- | --- | --- |"]
        lines += [
            f"| {text} | {each['text']} | {'right' if each['right'] else 'other'} |"
            for text, each in found[name].items()
        ]
    lines += ["", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found["machine"].items())]
    return "\n".join(lines) + "\n"


def write(found: dict[str, Any], out: Path) -> None:
    """Write the report of :func:`measured`."""
    found["machine"] = facts() | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    path = out / "included-model.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(found), encoding="utf-8")


def main(given: Iterable[str] | None = None) -> int:
    """Measure the model, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="by default, the included model")
    parser.add_argument("--tatoeba", type=Path, default=ROOT.parent / "shared" / "data" / "tatoeba")
    parser.add_argument("--pairs", type=Path, default=ROOT / "build" / "english-french-pairs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    chosen = parser.parse_args(None if given is None else list(given))
    model = pretrained.load() if chosen.model is None else SequenceModel.load(chosen.model)
    found = measured(model, chosen.tatoeba, chosen.pairs)
    write(found, chosen.out)
    print(markdown(found).partition("## Numbers")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
