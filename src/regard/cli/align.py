"""``regard align``: pairs of lines in, the links between their words out."""

from __future__ import annotations

from pathlib import Path

from regard._errors import rejected
from regard._writing import naming, write_atomically
from regard.cli.messages import echo, explained, note, require_writable
from regard.cli.translate import load
from regard.tasks.aligners import aligned
from regard.tasks.attention_links import linked
from regard.tasks.links import Links, of_words, pharaoh
from regard.tasks.pairs import Pairs, read_pairs
from regard.tasks.words import pieces_of, spaced, words_of


def run(
    data: str,
    targets: str | None,
    *,
    model: Path | None,
    back: Path | None,
    aligner: str | None,
    method: str,
    tokenized: bool,
    out: Path | None,
) -> None:
    """Write a line of links for each line of the pairs."""
    with explained("align"):
        if model is None and back is not None:
            raise rejected("align", "--back", "come with --model", "it alone")
        if model is not None and aligner is not None:
            raise rejected("align", "--aligner", "be left out with --model", repr(aligner))
        require_writable(out)
        pairs = read_pairs(data, targets, longest=None, words=None, duplicates=True)
        for line in pairs.report():
            note(line)
        if model is None:
            links = learned(pairs, aligner or "lexical", method, tokenized)
        else:
            other = None if back is None else load(back)
            cut = spaced if tokenized else words_of
            links = linked(load(model), pairs.sources, pairs.targets, back=other, method=method, cut=cut)
        lines = [""] * pairs.lines
        assert pairs.places is not None
        for place, each in zip(pairs.places, links):
            lines[place] = pharaoh(each)
        text = "".join(f"{line}\n" for line in lines)
        if out is None:
            echo(text, end="")
            return
        with naming(out):
            write_atomically(out, text.encode())


def learned(pairs: Pairs, aligner: str, method: str, tokenized: bool) -> list[Links]:
    """Return the links of words that an aligner finds, which learns from the pairs alone."""
    sides, owners = [], []
    for texts in (pairs.sources, pairs.targets):
        cuts = [pieces_of(text, spaced(text) if tokenized else words_of(text)) for text in texts]
        sides.append([[text[start:stop] for start, stop in places] for text, (places, _) in zip(texts, cuts)])
        owners.append([each for _, each in cuts])
    found = aligned(sides[0], sides[1], aligner, method)
    return [of_words(links, *each) for links, *each in zip(found, *owners)]
