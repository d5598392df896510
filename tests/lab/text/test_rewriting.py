"""What a translation model reads in place of a text, and what users see in place of what it writes."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from regard_lab.models.folders import ModelFileError
from regard_lab.text.rewriting import CAPITAL, CAPITALS, Copy, Rewriting, Rewritten, uniform
from regard_lab.text.vocabulary import MARKS, group_tokens
from regard_lab.text.words import Span, find_words, normalize

LETTERS = "".join(map(chr, range(32, 127))) + "«»àâçéèêëîïôùûœ°€£"
KNOWN = frozenset(
    {
        "the", "a", "an", "i", "am", "you", "he", "she", "it", "was", "is", "are", "in", "on", "at", "of", "to", "for",
        "go", "ask", "call", "met", "lives", "born", "paris", "hello", "don", "t", "s", "people", "came",
        "price", "see", "no", "costs", "from", "and", "or", "yes", "usa", "help", "me", "love", "with", "name",
    }
)  # fmt: skip
ENGLISH = Rewriting(("en", "en"), LETTERS, KNOWN)
FRENCH = Rewriting(("en", "fr"), LETTERS, KNOWN)


def restored(rewriting: Rewriting, text: str) -> str:
    read = rewriting.read(text)
    return rewriting.write(read.placed.text, Rewritten(read.placed, read.copies, capitals=read.capitals)).text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello!", "⇧ hello!"),
        ("I don’t", "⇧ i don't"),
        ("the USA", "the ⇪ usa"),
        ("l'Amérique", "l'⇧ amérique"),
        ("He met McDonald", "⇧ he met {name 1}"),
        ("HELP ME, PLEASE!", "help me, please!"),
        ("USA", "⇪ usa"),
        ("i dont know, im here", "i don't know, i'm here"),
        ("DONT", "⇪ don't"),
        ("Youre, thats, couldnt", "⇧ you're, that's, couldn't"),
        ("its, were, wont, cant, hes", "its, were, wont, can't, he's"),
        ("call 555-867-5309 on 2020-01-31", "call {other 1} on {other 2}"),
        ("in 1987", "in {number 1}"),
        ("1,234,567.5 people", "{number 1} people"),
        ("2 people, 17 people", "2 people, 17 people"),
        ("at 7:30", "at 7:30"),
        ("the 1990s", "the {number 1}s"),
        ("H1N1 and CO2", "{other 1} and {other 2}"),
        ("see https://a.org/b?c=d.", "see {other 1}."),
        ("a@b.org", "{other 1}"),
        ("<b>Hello</b>", "{other 1}⇧ hello{other 2}"),
        ("hello {name}, %s", "hello {other 1}, {other 2}"),
        ("@anna #paris", "{other 1} {other 2}"),
        ("see foo_bar in x.py --all", "see {other 1} in {other 2} {other 3}"),
        ("hello 😀👍🏽", "hello {other 1}{other 2}"),
        ("she met Zuzana's", "she met {name 1}'s"),
        ("she met Привет", "she met {other 1}"),
        ("from Zuzana to Zuzana", "from {name 1} to {name 1}"),
        ("“Hello” – she said…", '"⇧ hello" - she said...'),
        ("3.10.2 and 10.0.0.1", "{other 1} and {other 2}"),
        ("", ""),
    ],
)
def test_what_a_model_reads(text: str, shown: str) -> None:
    assert Rewriting.shown(ENGLISH.read(text).placed.text) == shown


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("3,500", "3 500"), ("1,234,567", "1 234 567"), ("5.99", "5,99"), ("1,234.5", "1 234,5"), ("1987", "1987"),
        ("0.05", "0,05"),
    ],
)  # fmt: skip
def test_numbers_are_written_as_in_french(source: str, target: str) -> None:
    read = FRENCH.read(f"from {source} to")
    assert FRENCH.write("de \ue010 à", read).text == f"de {target} à"
    ours, theirs = FRENCH.read_pair(f"from {source} to", f"de {target} à")
    assert (ours.placed.text, theirs.placed.text) == ("from \ue010 to", "de \ue010 à")


def test_pairs_share_only_what_both_have() -> None:
    source, target = FRENCH.read_pair("In 1987 Zuzana met 1,500 people", "En 1987, Zuzana rencontra des gens", shift=7)
    assert Rewriting.shown(source.placed.text) == "⇧ in {number 8} {name 8} met 1,500 people"
    assert Rewriting.shown(target.placed.text) == "⇧ en {number 8}, {name 8} rencontra des gens"
    source, target = FRENCH.read_pair("from 200 to 255, 255", "de 200 à 255, 255")
    assert source.placed.text.count("\ue011") == target.placed.text.count("\ue011") == 2


def test_typography_comes_back_where_it_was() -> None:
    read = FRENCH.read("“Don’t go”")
    written = FRENCH.write("« n'y va pas ! » ... oui", read).text
    assert written == "«\u00a0n’y va pas\u202f!\u00a0» … oui"
    assert FRENCH.write("n'y va pas !", FRENCH.read("Don't go!")).text == "n'y va pas !"


def test_a_text_in_capitals_is_translated_in_capitals() -> None:
    read = FRENCH.read("GO TO http://X.org FROM PARIS!")
    assert read.capitals and Rewriting.shown(read.placed.text) == "go to {other 1} from paris!"
    assert FRENCH.write("va à \ue030 de \ue000 paris !", read).text == "VA À http://X.org DE PARIS !"
    assert not FRENCH.read("I").capitals and not FRENCH.read("NASA").capitals and FRENCH.read("HELLO").capitals


def test_what_a_model_writes_wrongly_stays_readable() -> None:
    read = FRENCH.read("from 1987")
    written = FRENCH.write(f"{CAPITAL} \ue010 {CAPITALS} {CAPITAL}, \ue025 a{CAPITAL}", read).text
    assert not any(chr(mark) in written for mark in MARKS) and "1987" in written


def test_tags_stay_where_they_were() -> None:
    read = FRENCH.read("<b>hello</b> you")
    assert FRENCH.write("\ue030 salut \ue031 toi", read).text == "<b>salut</b> toi"
    apart = FRENCH.read("<b> hello </b>")
    assert FRENCH.write("\ue030 salut \ue031", apart).text == "<b> salut </b>"


def test_a_user_may_write_private_characters() -> None:
    text = f"hello {CAPITAL} \ue010 \uf000"
    assert normalize(restored(ENGLISH, text)) == normalize(text)


@example("IM")
@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=examples(400))
def test_any_text_comes_back(text: str) -> None:
    """But for the apostrophes of contractions, which are added where they are missing."""
    returned, expected = (uniform(each).replace("'", "") for each in (restored(ENGLISH, text), normalize(text)))
    assert returned == expected


_PARTS = st.sampled_from(
    [
        *("Hello", "I", "don't", "McDonald", "iPhone", "USA", "O'Brien", "Zuzana", "Zuzana's", "(Hello)", "Jean-Paul"),
        *("1,234.56", "1987", "12", "7:30", "$5.99", "50%", "A1", "1990s", "3rd", "x_y", "_", "U.S.", "...", "…", "-"),
        *("a@b.org", "https://x.org", "<i>", "</i>", "ПРИВЕТ", "日本", "😀", "“oui”", "L'ÉTÉ", "l'Été", "ſ", "ß"),
        *("İstanbul", "ŉ", "ﬁn", "e\u0301"),
    ]
)


@pytest.mark.slow
@given(st.lists(_PARTS, max_size=12))
@settings(max_examples=examples(400))
def test_any_words_come_back(parts: list[str]) -> None:
    text = " ".join(parts)
    assert uniform(restored(ENGLISH, text)) == uniform(normalize(text))


@pytest.mark.slow
@given(st.lists(_PARTS, min_size=1, max_size=12))
@settings(max_examples=examples(200))
def test_every_character_is_placed(parts: list[str]) -> None:
    text = normalize(" ".join(parts))
    read = ENGLISH.read(text)
    spans = [read.placed.origin(i, i + 1) for i in range(len(read.placed.text))]
    assert all(0 <= span.start <= span.stop <= len(text) for span in spans)
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    # Each letter lies in the word that it is shown in.
    for i, letter in enumerate(read.placed.text):
        if letter.isalpha() and text.isascii():
            assert letter in text[spans[i].start : spans[i].stop].lower()


def test_words_are_those_that_users_see() -> None:
    read = FRENCH.read("I met “Zuzana” in 1987")
    text = normalize("I met “Zuzana” in 1987")
    places = [read.placed.origin(i, i + 1) for i in range(len(read.placed.text))]
    assert [word.text for word in group_tokens(text, places)] == [
        text[word.start : word.stop] for word in find_words(text)
    ]
    written = FRENCH.write("\ue000 zut, \ue000 paris en \ue010", read)
    assert written.text == "Zut, Paris en 1987"
    assert written.text[slice(*written.image(len("\ue000 zut, "), len("\ue000 zut, \ue000 paris")))] == "Paris"
    assert written.image(0, 0).start == 0 and written.image(0, 10**6) == Span(0, len(written.text))


def test_it_is_learned_from_pairs() -> None:
    pairs = [("Ann went to Oslo.", "Ann alla à Oslo."), ("They went home.", "Ils rentrèrent.")] * 3
    learned = Rewriting.learn([*pairs, ("He saw a rare 猫.", "Il vit un rare 猫.")] * 30, ("en", "fr"), rare=0.01)
    assert {"went", "they", "home"} <= learned.known and "猫" not in learned.letters
    few = Rewriting.learn(pairs, ("en", "fr"))
    assert "oslo" not in few.known and "to" in few.known
    assert few.read("We went to Oslo").copies == {"\ue020": Copy("name", "Oslo")}


def test_it_is_stored_as_json() -> None:
    assert Rewriting.from_json(FRENCH.to_json()) == FRENCH
    for wrong in (
        None,
        [],
        {"languages": ["en"]},
        FRENCH.to_json() | {"languages": ["en"]},
        FRENCH.to_json() | {"known": 1},
    ):
        with pytest.raises(ModelFileError, match=r"rewriting\.json"):
            Rewriting.from_json(wrong, "rewriting.json")


def test_uniform_texts_stay_as_they_are() -> None:
    for text in ("« Oui », dit-il.", "Il n'y a rien...", "a - b"):
        assert uniform(text, "fr") == text
    assert uniform('“Oui” et "non"', "fr") == "« Oui » et « non »"
    assert re.fullmatch(r"fi ABC - \.\.\.", uniform(unicodedata.normalize("NFC", "ﬁ ＡＢＣ — …")))
