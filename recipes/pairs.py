"""Training pairs of the included model, from several collections, and held-out pairs of other kinds.

``python -m recipes.pairs TATOEBA COLLECTIONS FOLDER`` writes ``train.tsv``, for ``regard train translation``, and files
of held-out pairs of each kind of text. TATOEBA holds ``en-fr.train.tsv.gz`` and its like, COLLECTIONS a file
``<name>.tsv`` for each collection of :data:`WEIGHTS`. Besides the pairs, each as often as its collection counts, the
training pairs are

- sentences as users type them: without the last mark and the first capital, or all in small letters;
- sentences of one to three words several times: there are few of them, and users type them first;
- parts of sentences, and noun phrases put together of their words, so that a rare word is met in more than one place;
- sentences with addresses, tags and emoji, which are copied;
- synthetic ages, amounts, ordinals, dates and parts of an hour, but for those that the benchmark of the included model
  asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.included_model import NUMBERS, SENTENCE

from recipes.fragments import fragments
from recipes.phrases import adjectives, nouns, phrases
from recipes.quantities import quantities
from regard_lab.data import Pairs, read_pairs

#: How often each pair of a collection counts, in expectation. Everyday texts and numbers are weighted up, parliament
#: and law down.
WEIGHTS = {
    "phrases_everyday": 12.0,
    "numbers_dates_times": 3.0,
    "templates_dates_numbers": 1.5,
    "capitals_countries": 1.0,
    "cldr_names": 4.0,
    "osm_names": 1.0,
    "mgsm": 2.0,
    "africanstorybook": 2.0,
    "udhr": 2.0,
    "europarl_sample": 0.7,
    "europarl_dates_numbers": 0.5,
    "canada_laws": 0.2,
    "canada_laws_headings": 0.1,
    "canada_digital": 1.0,
    "covid_alert": 1.0,
    "gc_design_docs": 1.0,
    "opensource_guide": 1.0,
    "debian_handbook": 1.0,
    "gnome_help": 1.0,
    "mozilla_legal": 1.0,
    "mozilla_www": 1.0,
    "python_docs": 0.7,
    "react_docs": 1.0,
    "rustbook": 1.0,
    "raspberrypi_projects": 1.0,
    "scratch": 1.0,
    "android_apps": 0.5,
    "element_web": 0.5,
    "home_assistant_frontend": 0.7,
    "python_packages_ui": 0.5,
    "wikipedia_android": 0.7,
}
#: Those that ``--everyday`` weights further up.
EVERYDAY = ("phrases_everyday", "numbers_dates_times", "templates_dates_numbers", "capitals_countries")
#: Collections that are never trained on, and shares of others that are not.
HELD_OUT = {
    "pud": 1.0,
    "tico19": 1.0,
    "phrases_everyday": 0.2,
    "numbers_dates_times": 0.1,
    "templates_dates_numbers": 0.1,
}
#: How often a sentence of so many words is repeated.
SHORT = {1: 20, 2: 4, 3: 2}

#: Shares of sentences with something to copy: those that have two such things, and signs that stand before the text.
_TWICE, _BEFORE = 0.25, 0.2

_END = re.compile(r"\s*[.!?…]+$")
_WORD = re.compile(r"[^\W\d_]+")
#: Number of most frequent words to exclude as nouns and adjectives: they are function words or ambiguous.
_COMMON = 80
_EMOJI = "😀😂🙂😉😍😢😡👍👎🙏🎉❤🔥✨🚀☕🐱🌍🎂✅"
_DOMAINS = ("example.com", "example.org", "mairie.fr", "news.net", "shop.co.uk")
#: What stands before addresses of pages and of people.
_SEE = (
    ("See", "Voir"), ("Visit", "Visitez"), ("Go to", "Allez sur"), ("Read", "Lisez"), ("Source:", "Source :"),
    ("More information:", "Plus d'informations :"),
)  # fmt: skip
_WRITE = (
    ("Write to", "Écrivez à"), ("Send an e-mail to", "Envoyez un e-mail à"), ("Contact:", "Contact :"),
    ("My e-mail address is", "Mon adresse e-mail est"),
)  # fmt: skip
_STEMS = ("info", "contact", "anna", "paul.martin", "help", "docs", "photos", "blog", "index", "page")


def usual(texts: Iterable[str]) -> Counter[str]:
    """Count words inside sentences, where capitalization is meaningful."""
    return Counter(word for text in texts for word in _WORD.findall(text)[1:])


def plain(text: str, inside: Counter[str]) -> str:
    """Return a sentence without final punctuation, with its first word capitalized as inside sentences.

    Examples
    --------
    >>> inside = usual(["Do they know it?", "So do I.", "Is that Tom?"])
    >>> plain("They do !", inside), plain("I do.", inside), plain("Tom?", inside)
    ('they do', 'I do', 'Tom')
    """
    text = _END.sub("", text)
    first = _WORD.match(text)
    if first is None:
        return text
    word = first[0]
    lower = word[0].lower() + word[1:]
    return lower + text[len(word) :] if inside[lower] > inside[word] else text


def is_held_out(name: str, source: str) -> bool:
    """Return whether a pair of a collection is held out, which its source alone decides.

    Examples
    --------
    >>> is_held_out("pud", "Hello."), is_held_out("mgsm", "Hello.")
    (True, False)
    """
    digest = hashlib.blake2b(source.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < HELD_OUT.get(name, 0.0) * 2**32


def times(weight: float, drawn: random.Random) -> int:
    """Return a whole number of times whose expectation is the weight.

    Examples
    --------
    >>> drawn = random.Random(0)
    >>> times(2.0, drawn), 450 < sum(times(0.5, drawn) for _ in range(1000)) < 550
    (2, True)
    """
    return int(weight) + (drawn.random() < weight % 1)


def with_copies(pairs: Sequence[tuple[str, str]], count: int, drawn: random.Random) -> Iterator[tuple[str, str]]:
    """Yield pairs with addresses, tags and emoji at the same place of both sides, some with two of them.

    Examples
    --------
    >>> made = list(with_copies([("Hello.", "Bonjour.")], 30, random.Random(0)))
    >>> next(pair for pair in made if pair[0].endswith("</b>"))
    ('<b>Hello.</b>', '<b>Bonjour.</b>')
    """
    for _ in range(count):
        pair = _with_copy(drawn.choice(pairs), drawn)
        yield _with_copy(pair, drawn) if drawn.random() < _TWICE else pair


def _with_copy(pair: tuple[str, str], drawn: random.Random) -> tuple[str, str]:
    """Return a pair with something to copy; for addresses, another pair."""
    source, target = pair
    kind = drawn.randrange(8)
    stem, domain = drawn.choice(_STEMS), drawn.choice(_DOMAINS)
    name = stem.partition(".")[0]
    if kind == 0:
        tag = drawn.choice(("b", "i", "em", "strong", "p", "h1", "span"))
        return f"<{tag}>{source}</{tag}>", f"<{tag}>{target}</{tag}>"
    if kind < 6:
        sign = (drawn.choice(_EMOJI), drawn.choice(_EMOJI), drawn.choice(_EMOJI), f"#{name}", f"@{name}")[kind - 1]
        if drawn.random() < _BEFORE:
            return f"{sign} {source}", f"{sign} {target}"
        return f"{source} {sign}", f"{target} {sign}"
    if kind == 6:
        before, what = drawn.choice(_SEE), f"https://{domain}/{stem}" if drawn.random() < 0.5 else f"www.{domain}"
    else:
        before, what = drawn.choice(_WRITE), f"{stem}@{domain}"
    mark = drawn.choice(("", "."))
    return f"{before[0]} {what}{mark}", f"{before[1]} {what}{mark}"


def main(given: Sequence[str] | None = None) -> None:
    """Write the files of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tatoeba", type=Path, help="folder of en-fr.train.tsv.gz, en-fr.valid.tsv.gz, en-fr.test.tsv.gz"
    )
    parser.add_argument("collections", type=Path, help="folder of the other collections, a file each")
    parser.add_argument("folder", type=Path, help="where the files are written")
    parser.add_argument("--typed", type=float, default=0.3, help="share repeated without marks and capitals; 0.3")
    parser.add_argument("--small", type=float, default=0.2, help="share repeated with a source in small letters; 0.2")
    parser.add_argument(
        "--everyday", type=float, default=1.0, help="factor for phrases, numbers and short sentences; 1"
    )
    parser.add_argument("--words", type=float, default=1.0, help="factor for sentences of one word, besides; 1")
    parser.add_argument("--share", type=float, default=1.0, help="share of all other pairs that is written; 1")
    parser.add_argument("--phrases", type=int, default=40_000, help="number of synthetic noun phrases; 40,000")
    parser.add_argument("--copies", type=int, default=12_000, help="number of pairs with addresses and emoji; 12,000")
    parser.add_argument("--quantities", type=int, default=4_000, help="number of synthetic quantities; 4,000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    drawn = random.Random(arguments.seed)
    tatoeba = {part: _read(arguments.tatoeba / f"en-fr.{part}.tsv.gz") for part in ("train", "valid", "test")}
    collections = {name: _read(arguments.collections / f"{name}.tsv") for name in {**WEIGHTS, **HELD_OUT}}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    never = {_key(source) for part in ("valid", "test") for source in tatoeba[part].sources}
    for name, pairs in collections.items():
        held = [(source, target) for source, target in pairs if is_held_out(name, source)]
        if held:
            never.update(_key(source) for source, _ in held)
            _write(arguments.folder / f"{name}.tsv", held)
    everyday = list(tatoeba["train"])
    short = {words: count * arguments.everyday for words, count in SHORT.items()}
    short[1] *= arguments.words
    counted = [(pair, short.get(len(pair[0].split()), 1.0)) for pair in everyday]
    for name, weight in WEIGHTS.items():
        weight *= arguments.everyday if name in EVERYDAY else 1.0
        counted += [
            (pair, max(weight, short[1]) if SENTENCE.fullmatch(pair[0]) else weight) for pair in collections[name]
        ]
    counted = [(pair, weight) for pair, weight in counted if _key(pair[0]) not in never]
    made: list[tuple[str, str]] = []
    inside = usual(tatoeba["train"].sources), usual(tatoeba["train"].targets)
    for pair, weight in counted:
        made += [pair] * times(weight, drawn)
        if drawn.random() < arguments.typed * min(weight, 2):
            made.append((plain(pair[0], inside[0]), plain(pair[1], inside[1])))
        if drawn.random() < arguments.small * min(weight, 2):
            made.append((pair[0].lower(), pair[1]))
    typed = [(plain(source, inside[0]), plain(target, inside[1])) for source, target in everyday]
    words = Counter(word for text, _ in everyday for word in {each.lower() for each in _WORD.findall(text)})
    common = {word for word, _ in words.most_common(_COMMON)}
    parts = fragments(*zip(*typed))
    names = nouns(parts, (target for _, target in typed), inside[0], common)
    qualities = adjectives(parts, names, inside[1], common)
    made += phrases(names, qualities, arguments.phrases, drawn)
    made += [pair for pair, count in parts.items() if count > 1]
    made += with_copies([pair for pair in everyday if len(pair[0].split()) < 10], arguments.copies, drawn)
    asked = {_key(source) for source, _ in NUMBERS}
    made += [pair for pair in quantities(arguments.quantities, drawn) if _key(pair[0]) not in asked]
    made = [
        pair
        for pair in made
        if _key(pair[0]) not in never and (SENTENCE.fullmatch(pair[0]) or drawn.random() < arguments.share)
    ]
    _write(arguments.folder / "train.tsv", made)
    print(f"{len(made):,} pairs to train on", file=sys.stderr)


def _read(path: Path) -> Pairs:
    return read_pairs(path, max_length=None, words=None)


def _key(source: str) -> str:
    """Return the words and numbers of a source: what differs in signs and capitals alone is the same."""
    return " ".join(re.findall(r"\w+", source.lower()))


def _write(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")


if __name__ == "__main__":
    main()
