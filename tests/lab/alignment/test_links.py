"""Links of words: read, written, symmetrized and scored as the definitions say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard_lab.data.pairs import read_pairs
from regard_lab.tasks.translation.alignment.links import (
    METHODS,
    Agreement,
    Gold,
    format_links,
    merge_pieces,
    parse_links,
    read_links,
    read_pair_links,
    symmetrize,
)
from regard_lab.text.words import find_words, split_at_spaces, split_elisions

LINKS = st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14)


@settings(derandomize=True, deadline=None)
@given(LINKS)
def test_links_come_back_from_their_line(links):
    gold = parse_links(format_links(links), "line 1")
    assert gold.sure == gold.possible == links


def test_possible_links_are_not_sure():
    assert parse_links("0-0 1?2 3p4", "line 1") == Gold(frozenset({(0, 0)}), frozenset({(0, 0), (1, 2), (3, 4)}))


@pytest.mark.parametrize("text", ["0", "0-", "a-b", "0-0,1-1", "-1-0", "0--1", "1.5-2", "0-0-0", "٣-٤"])
def test_what_is_no_link_is_refused_with_its_line(tmp_path, text):
    path = tmp_path / "links"
    path.write_text(f"0-0\n{text}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"links, line 2 must have links such as 0-0"):
        read_links(path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0-0\n", "must have a line for each of the 3 lines of .*, got 1"),
        ("0-0\n0-0\n0-0\n0-0\n", "must have a line for each of the 3 lines of .*, got 4"),
        ("0-0\n2-0\n0-0\n", "line 2 must link words 0 to 1 of the source, got 2-0"),
        ("0-0\n0-0\n0-3\n", "line 3 must link words 0 to 1 of the target, got 0-3"),
    ],
)
def test_links_that_do_not_fit_their_pairs_are_refused(tmp_path, lines, said):
    (tmp_path / "pairs").write_text("a b\tc d\ne f\tg h\ni j\tk l\n", encoding="utf-8")
    (tmp_path / "links").write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_pair_links(tmp_path / "links", read_pairs(tmp_path / "pairs"), find_words)


def test_links_stay_with_their_lines_where_lines_are_left_out(tmp_path):
    (tmp_path / "pairs").write_text("a b\tc d\n\tx\na b\tc d\ne\tf g\n", encoding="utf-8")
    (tmp_path / "links").write_text("0-0\n\n1-1\n0-1\n", encoding="utf-8")
    pairs = read_pairs(tmp_path / "pairs")
    found = [each.sure for each in read_pair_links(tmp_path / "links", pairs, split_at_spaces)]
    assert list(zip(pairs.sources, found)) == [("a b", {(0, 0)}), ("e", {(0, 1)})]


@settings(derandomize=True, deadline=None)
@given(LINKS, LINKS)
def test_symmetrized_links_lie_between_intersection_and_union(forward, backward):
    for method in METHODS:
        found = symmetrize(forward, backward, method)
        assert forward & backward <= found <= forward | backward
        mirrored = symmetrize(*(frozenset((j, i) for i, j in side) for side in (forward, backward)), method)
        if method in ("intersection", "union"):
            assert mirrored == {(j, i) for i, j in found}


def _words(links):
    return {i for i, _ in links}, {j for _, j in links}


@settings(derandomize=True, deadline=None)
@given(LINKS, LINKS)
def test_what_grows_grows_by_words_without_a_link(forward, backward):
    least = forward & backward
    grown = symmetrize(forward, backward, "grow-diag")
    final = symmetrize(forward, backward, "grow-diag-final-and")
    assert least <= grown <= final and grown <= symmetrize(forward, backward, "grow-diag-final")
    # Every added link is next to another, and nothing more can be added by the rule.
    for i, j in grown - least:
        assert any(max(abs(i - k), abs(j - n)) == 1 for k, n in grown)
    sources, targets = _words(grown)
    for i, j in (forward | backward) - grown:
        near = any(max(abs(i - k), abs(j - n)) == 1 for k, n in grown)
        assert not near or (i in sources and j in targets)
    sources, targets = _words(final)
    assert all(i in sources or j in targets for i, j in forward | backward)


def test_an_unknown_method_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'intersect'.*intersection"):
        symmetrize(frozenset(), frozenset(), "intersect")


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(LINKS, LINKS, LINKS), max_size=5))
def test_agreement_is_what_its_definition_says(cases):
    found, gold = [a for a, _, _ in cases], [Gold(s, s | p) for _, s, p in cases]
    told = Agreement.of(found, gold)
    pairs = list(zip(found, gold))
    a, s = sum(map(len, found)), sum(len(each.sure) for each in gold)
    hits = sum(link in g.sure for f, g in pairs for link in f), sum(link in g.possible for f, g in pairs for link in f)
    assert told.aer == pytest.approx(1 - sum(hits) / (a + s) if a + s else 0)
    assert told.precision == pytest.approx(hits[1] / a if a else 1) and told.recall == pytest.approx(
        hits[0] / s if s else 1
    )
    assert Agreement.of([g.sure for g in gold], gold).aer == 0


def test_as_many_links_as_gold_are_wanted():
    with pytest.raises(ValueError, match="zip"):
        Agreement.of([frozenset()], [])


@settings(derandomize=True, deadline=None)
@given(st.text(alphabet="ab ’'-.é1", max_size=30))
def test_pieces_make_up_words(text):
    words = find_words(text)
    places, owners = split_elisions(text, words)
    for number, (start, stop) in enumerate(words):
        mine = [place for place, owner in zip(places, owners) if owner == number]
        assert mine[0].start == start and mine[-1].stop == stop
        assert all(one.stop == two.start for one, two in pairwise(mine))
    assert sorted(owners) == owners


def test_links_of_pieces_are_links_of_their_words():
    assert merge_pieces({(0, 0), (1, 0), (2, 1)}, [0, 0, 1], [0, 1]) == {(0, 0), (1, 1)}
