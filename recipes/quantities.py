"""Sentences with ages, amounts, ordinals, dates and parts of an hour, put together of templates.

Sentence pairs have few of them, and a small model confuses what it has seen a few times only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_MONTHS = (
    ("January", "janvier"), ("February", "février"), ("March", "mars"), ("April", "avril"), ("May", "mai"),
    ("June", "juin"), ("July", "juillet"), ("August", "août"), ("September", "septembre"), ("October", "octobre"),
    ("November", "novembre"), ("December", "décembre"),
)  # fmt: skip
_DAYS = (
    ("Monday", "lundi"), ("Tuesday", "mardi"), ("Wednesday", "mercredi"), ("Thursday", "jeudi"), ("Friday", "vendredi"),
    ("Saturday", "samedi"), ("Sunday", "dimanche"),
)  # fmt: skip
#: Who is of an age.
_PERSONS = (
    ("I am", "J'ai"), ("I'm", "J'ai"), ("You are", "Tu as"), ("He is", "Il a"), ("He's", "Il a"), ("She is", "Elle a"),
    ("She's", "Elle a"), ("Tom is", "Tom a"), ("Mary is", "Marie a"), ("My mother is", "Ma mère a"),
    ("My father is", "Mon père a"), ("My brother is", "Mon frère a"), ("My sister is", "Ma sœur a"),
    ("His son is", "Son fils a"), ("Her daughter is", "Sa fille a"), ("Our dog is", "Notre chien a"),
    ("My grandfather is", "Mon grand-père a"), ("My aunt is", "Ma tante a"), ("Their cat is", "Leur chat a"),
)  # fmt: skip
#: Things in the plural.
_THINGS = (
    ("eggs", "œufs"), ("books", "livres"), ("apples", "pommes"), ("chairs", "chaises"), ("dogs", "chiens"),
    ("cats", "chats"), ("children", "enfants"), ("friends", "amis"), ("houses", "maisons"), ("letters", "lettres"),
    ("people", "personnes"), ("students", "étudiants"), ("tickets", "billets"), ("bottles", "bouteilles"),
    ("oranges", "oranges"), ("roses", "roses"), ("pages", "pages"), ("words", "mots"), ("men", "hommes"),
    ("women", "femmes"), ("shirts", "chemises"), ("questions", "questions"), ("pencils", "crayons"),
)  # fmt: skip
_HAVE = (
    ("I have", "J'ai"), ("We have", "Nous avons"), ("They have", "Ils ont"), ("There are", "Il y a"),
    ("I bought", "J'ai acheté"), ("She sold", "Elle a vendu"), ("He found", "Il a trouvé"),
    ("We need", "Nous avons besoin de"), ("I saw", "J'ai vu"), ("She has", "Elle a"),
)  # fmt: skip
#: Spans of time; the first French word is what "dans" and "pendant" stand before.
_SPANS = (
    ("half an hour", "une demi-heure"), ("a quarter of an hour", "un quart d'heure"),
    ("an hour and a half", "une heure et demie"), ("three quarters of an hour", "trois quarts d'heure"),
    ("a year and a half", "un an et demi"), ("an hour", "une heure"), ("a week", "une semaine"),
    ("half a day", "une demi-journée"), ("half a century", "un demi-siècle"),
)  # fmt: skip
_WHEN = (
    ("{}", "{}"), ("{}.", "{}."), ("in {}", "dans {}"), ("{} ago", "il y a {}"), ("for {}", "pendant {}"),
    ("{} later", "{} plus tard"), ("I waited for {}.", "J'ai attendu {}."), ("It takes {}.", "Il faut {}."),
    ("I'll be back in {}.", "Je reviens dans {}."), ("She left {} ago.", "Elle est partie il y a {}."),
    ("We talked for {}.", "Nous avons parlé pendant {}."), ("The train leaves in {}.", "Le train part dans {}."),
)  # fmt: skip
#: Sentences with an ordinal; "{r}" is a French century.
_ORDINALS = (
    ("This is the {o} time.", "C'est la {f} fois."), ("the {o} time", "la {f} fois"), ("the {o} day", "le {m} jour"),
    ("He finished {o}.", "Il a fini {m}."), ("She finished {o}.", "Elle a fini {f}."),
    ("I came {o}.", "J'ai fini {m}."),
    ("He lives on the {o} floor.", "Il habite au {m} étage."),
    ("We live on the {o} floor.", "Nous habitons au {m} étage."),
    ("on the {o} floor", "au {m} étage"), ("the {o} century", "le {r} siècle"), ("in the {o} century", "au {r} siècle"),
    ("He was born in the {o} century.", "Il est né au {r} siècle."),
    ("It's her {o} birthday.", "C'est son {m} anniversaire."),
    ("the {o} chapter", "le {m} chapitre"), ("the {o} page", "la {f} page"),
)  # fmt: skip
_DATES = (
    ("Today is {e}.", "Aujourd'hui, nous sommes le {f}."), ("It's {e}.", "Nous sommes le {f}."),
    ("My birthday is on {e}.", "Mon anniversaire est le {f}."), ("It was {w}, {e}.", "C'était le {v} {f}."),
    ("Tomorrow is {w}, {e}.", "Demain, nous serons le {v} {f}."),
    ("The deadline is {e}.", "La date limite est le {f}."),
    ("I was born on {e}.", "Je suis né le {f}."), ("The party is on {e}.", "La fête est le {f}."),
)  # fmt: skip
_DECADES = (
    ("in the {}s", "dans les années {}"), ("the {}s", "les années {}"),
    ("the music of the {}s", "la musique des années {}"),
    ("He grew up in the {}s.", "Il a grandi dans les années {}."), ("a song from the {}s", "une chanson des années {}"),
)  # fmt: skip
_ONES = (
    ("one", "un"), ("two", "deux"), ("three", "trois"), ("four", "quatre"), ("five", "cinq"), ("six", "six"),
    ("seven", "sept"), ("eight", "huit"), ("nine", "neuf"), ("ten", "dix"), ("eleven", "onze"), ("twelve", "douze"),
    ("fifteen", "quinze"), ("twenty", "vingt"), ("thirty", "trente"), ("forty", "quarante"), ("fifty", "cinquante"),
    ("sixty", "soixante"), ("eighty", "quatre-vingts"), ("a hundred", "cent"), ("one hundred", "cent"),
    ("two hundred", "deux cents"), ("a thousand", "mille"), ("one thousand", "mille"), ("two thousand", "deux mille"),
)  # fmt: skip
_TIMES = (("once", "une fois"), ("twice", "deux fois"))
_DID = (
    ("I called her", "Je l'ai appelée"), ("He tried", "Il a essayé"), ("We went there", "Nous y sommes allés"),
    ("She asked me", "Elle m'a demandé"), ("I told you", "Je te l'ai dit"), ("It rained", "Il a plu"),
)  # fmt: skip


def roman(number: int) -> str:
    """Return a whole number below 40 in Roman numerals.

    Examples
    --------
    >>> roman(4), roman(19), roman(21)
    ('IV', 'XIX', 'XXI')
    """
    tens, ones = divmod(number, 10)
    return "X" * tens + ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")[ones]


def ordinal(number: int) -> str:
    """Return an English ordinal in digits.

    Examples
    --------
    >>> [ordinal(number) for number in (1, 2, 3, 11, 22)]
    ['1st', '2nd', '3rd', '11th', '22nd']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def elided(before: str, word: str) -> str:
    """Return a French "de" before a word.

    Examples
    --------
    >>> elided("une douzaine de", "œufs"), elided("une douzaine de", "pommes")
    ("une douzaine d'œufs", 'une douzaine de pommes')
    """
    return f"{before[:-1]}'{word}" if word[0] in "aeiouœhéè" else f"{before} {word}"


def quantities(count: int, drawn: random.Random) -> Iterator[tuple[str, str]]:
    """Yield pairs of English and French sentences and phrases with quantities.

    Examples
    --------
    >>> made = list(quantities(200, random.Random(0)))
    >>> len(made), all(source and target for source, target in made)
    (200, True)
    """
    kinds = (_age, _things, _dozen, _span, _ordinal, _date, _decade, _word, _times)
    for _ in range(count):
        yield drawn.choice(kinds)(drawn)


def _age(drawn: random.Random) -> tuple[str, str]:
    (source, target), number = drawn.choice(_PERSONS), drawn.randrange(2, 100)
    ending = drawn.choice(("", " years old"))
    return f"{source} {number}{ending}.", f"{target} {number} ans."


def _things(drawn: random.Random) -> tuple[str, str]:
    (have, avoir), (things, choses) = drawn.choice(_HAVE), drawn.choice(_THINGS)
    digits = str(drawn.randrange(2, 1000))
    number, nombre = drawn.choice([(digits, digits), drawn.choice(_ONES[1:])])
    return f"{have} {number} {things}.", f"{avoir} {nombre} {choses}."


def _dozen(drawn: random.Random) -> tuple[str, str]:
    (have, avoir), (things, choses) = drawn.choice(_HAVE), drawn.choice(_THINGS)
    dozen = elided("une douzaine de", choses)
    if drawn.random() < 0.5 or avoir.endswith(" de"):
        return f"a dozen {things}", dozen
    return f"{have} a dozen {things}.", f"{avoir} {dozen}."


def _span(drawn: random.Random) -> tuple[str, str]:
    (when, quand), (span, temps) = drawn.choice(_WHEN), drawn.choice(_SPANS)
    source, target = when.format(span), quand.format(temps)
    if when.endswith("."):
        source, target = source[0].upper() + source[1:], target[0].upper() + target[1:]
    return source, target


def _ordinal(drawn: random.Random) -> tuple[str, str]:
    source, target = drawn.choice(_ORDINALS)
    number = drawn.randrange(1, 22)
    masculine, feminine = ("1er", "1re") if number == 1 else (f"{number}e", f"{number}e")
    century = f"{roman(number)}{'er' if number == 1 else 'e'}"
    return source.format(o=ordinal(number)), target.format(m=masculine, f=feminine, r=century)


def _date(drawn: random.Random) -> tuple[str, str]:
    (source, target), (month, mois) = drawn.choice(_DATES), drawn.choice(_MONTHS)
    (weekday, jour), day = drawn.choice(_DAYS), drawn.randrange(1, 29)
    date = f"{'1er' if day == 1 else day} {mois}"
    return source.format(e=f"{month} {day}", w=weekday), target.format(f=date, v=jour)


def _decade(drawn: random.Random) -> tuple[str, str]:
    source, target = drawn.choice(_DECADES)
    decade = drawn.choice(
        (f"19{drawn.randrange(0, 10)}0", f"18{drawn.randrange(0, 10)}0", f"{drawn.randrange(2, 10)}0")
    )
    return source.format(decade), target.format(decade)


def _word(drawn: random.Random) -> tuple[str, str]:
    (number, nombre), (things, choses) = drawn.choice(_ONES), drawn.choice(_THINGS)
    mark = drawn.choice(("", "."))
    if drawn.random() < 0.5 or number == "one":
        return (number.capitalize() + mark, nombre.capitalize() + mark) if mark else (number, nombre)
    return f"{number} {things}", f"{nombre} {choses}"


def _times(drawn: random.Random) -> tuple[str, str]:
    (did, fait), (number, nombre) = drawn.choice(_DID), drawn.choice(_ONES[2:12])
    times, fois = drawn.choice([(f"{number} times", f"{nombre} fois"), drawn.choice(_TIMES)])
    return f"{did} {times}.", f"{fait} {fois}."
