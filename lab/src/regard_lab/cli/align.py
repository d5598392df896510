"""``regard align``: align the words of sentence pairs."""

from __future__ import annotations

from pathlib import Path

from regard._utils.errors import rejected, unknown_name
from regard._utils.files import write_out
from regard_cli.messages import echo, note, report_errors, require_writable
from regard_lab.cli.translate import load
from regard_lab.data.pairs import Pairs, read_pairs
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.translation.alignment.attention import attention_links
from regard_lab.tasks.translation.alignment.links import (
    METHODS,
    Links,
    align_words,
    format_links,
    merge_pieces,
    require_aligner,
)
from regard_lab.text.vocabulary import SubwordVocabulary
from regard_lab.text.words import find_words, is_unspaced, split_at_spaces, split_elisions


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
    """Write one line of alignment links per sentence pair."""
    with report_errors("regard-lab"):
        if model is None and back is not None:
            raise ValueError("align: --back requires --model.")
        if model is not None and aligner is not None:
            raise rejected("align", "--aligner", "be left out with --model", repr(aligner))
        if method not in METHODS:
            raise unknown_name("align", "method", method, METHODS)
        if model is None:
            require_aligner(aligner or "lexical")
        if out is not None and any(given not in (None, "-") and same_file(out, given) for given in (data, targets)):
            raise rejected("align", "--out", "not be the file of the pairs", str(out))
        require_writable(out)
        translator, other = (
            None if folder is None else require_attention(load(folder, "align"), name)
            for folder, name in ((model, "--model"), (back, "--back"))
        )
        pairs = read_pairs(data, targets, max_length=None, words=None, duplicates=True)
        for line in pairs.report():
            note(line)
        unspaced = sum(map(is_unspaced, (*pairs.sources, *pairs.targets)))
        if unspaced and not tokenized:
            note(
                f"each character is a word: {unspaced:,} texts in scripts without spaces, such as Chinese or Japanese; "
                "to align words, separate them by spaces and pass --tokenized"
            )
        if translator is None:
            links = learn_links(pairs, aligner or "lexical", method, tokenized)
        else:
            cut = split_at_spaces if tokenized else find_words
            links = attention_links(translator, pairs.sources, pairs.targets, back=other, method=method, cut=cut)
        without = sum(not each for each in links)
        if without:
            note(f"no links: {without:,} pairs (too long, or no words that match)")
        lines = [""] * pairs.lines
        assert pairs.places is not None
        for place, each in zip(pairs.places, links):
            lines[place] = format_links(each)
        text = "".join(f"{line}\n" for line in lines)
        if out is None:
            echo(text, end="")
            return
        write_out(out, text.encode())


def require_attention(model: SequenceModel, option: str) -> SequenceModel:
    """Return the model if its attention can align words; otherwise raise an error about ``option``."""
    if (
        not model.model.maps
        or not isinstance(model.source, SubwordVocabulary)
        or not isinstance(model.target, SubwordVocabulary)
    ):
        raise rejected("align", option, "be a translation model with attention and subwords", "another model")
    return model


def same_file(one: Path, other: str) -> bool:
    """Return whether two paths name the same existing file."""
    return one.exists() and Path(other).exists() and one.samefile(other)


def learn_links(pairs: Pairs, aligner: str, method: str, tokenized: bool) -> list[Links]:
    """Return the word links of an aligner trained on the pairs alone."""
    sides, owners = [], []
    for texts in (pairs.sources, pairs.targets):
        cuts = [split_elisions(text, split_at_spaces(text) if tokenized else find_words(text)) for text in texts]
        sides.append([[text[start:stop] for start, stop in places] for text, (places, _) in zip(texts, cuts)])
        owners.append([each for _, each in cuts])
    links_of_pieces = align_words(sides[0], sides[1], aligner, method)
    return [merge_pieces(links, *each) for links, *each in zip(links_of_pieces, *owners)]
