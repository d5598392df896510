"""Links between words, read off a translator's attention: in one direction or in both, symmetrized.

Dimensions: J words of a target, I words of its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from regard._errors import rejected
from regard.alignment.aligners import lexical, lowered
from regard.alignment.links import Agreement, Gold, Links, symmetrized
from regard.alignment.maps import chosen, merge
from regard.data.batches import by_length
from regard.data.pairs import Pairs
from regard.decoding.forced import attended, posteriors
from regard.decoding.predictions import WritingOptions, Written
from regard.decoding.sequence_model import SequenceModel
from regard.text.normalization import normalize
from regard.text.subwords import SubwordCodec
from regard.text.vocabulary import Word
from regard.text.words import Cut, words_of

#: Pairs of sentences that go through a model together, and the most tokens of a side.
_BATCH, _LONGEST = 32, 512
#: Pairs by which an attention map is chosen, and that an aligner learns from for that.
_CHECKED, _LEARNED = 300, 20_000


def linked(
    model: SequenceModel,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    back: SequenceModel | None = None,
    method: str = "grow-diag-final-and",
    name: str | None = None,
    cut: Cut = words_of,
) -> list[Links]:
    """Return the links between the words of sentences and those of their translations, as a translator sees them.

    Each target word is linked to the source word that it is most due to (:meth:`EncoderDecoder.posterior`); each source
    word to the target word that is most due to it, or, with ``back``, that a translator of the other direction finds.
    Then both are symmetrized.

    Parameters
    ----------
    model : SequenceModel
        That attends, and writes texts.
    sources, targets : sequence of str
        As many of the one as of the other. Where either is empty, or has more than 512 tokens, there are no links.
    back : SequenceModel, optional
        That writes sources for targets.
    method : str
        As :func:`regard.alignment.links.symmetrized` takes it.
    name : str, optional
        The attention map; by default the one that the model says aligns, or the mean of all.
    cut : callable, optional
        Finds the words of a text.

    Examples
    --------
    >>> from regard import pretrained
    >>> (links,) = linked(pretrained.load(), ["I love you."], ["Je t'aime."])
    >>> (3, 2) in links
    True
    """
    if len(sources) != len(targets):
        raise rejected("align", "targets", f"be as many as sources, {len(sources):,}", f"{len(targets):,}")
    forward = shares(model, sources, targets, name=name, cut=cut)
    backward = [None] * len(forward) if back is None else shares(back, targets, sources, cut=cut)
    return [both_ways(ours, theirs, method) for ours, theirs in zip(forward, backward)]


def both_ways(ours: Tensor | None, theirs: Tensor | None, method: str) -> Links:
    """Return the symmetrized links of target words' shares (J, I), and source words' (I, J) or else the same shares."""
    columns = ours.mT if theirs is None and ours is not None else theirs
    return symmetrized(strongest(ours), frozenset((i, j) for j, i in strongest(columns)), method)


def strongest(weights: Tensor | None) -> Links:
    """Return the link of each target word to the source word with the largest of its weights (J, I), if it has any."""
    if weights is None or not weights.numel():
        return frozenset()
    largest, places = weights.max(-1)
    return frozenset((i, j) for j, (i, most) in enumerate(zip(places.tolist(), largest.tolist())) if most > 0)


def shares(
    model: SequenceModel,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    name: str | None = None,
    cut: Cut = words_of,
    posterior: bool = True,
) -> list[Tensor | None]:
    """Return how much of each word of targets is due to each word of their sources.

    Parameters
    ----------
    model : SequenceModel
        That attends, and writes texts.
    sources, targets : sequence of str
    name : str, optional
        The attention map; by default the one that the model says aligns, or the mean of all.
    cut : callable, optional
        Finds the words of a text.
    posterior : bool, default True
        Reckon with what was written; else what the model attended to before it wrote it, as pictures show it.

    Returns
    -------
    list of Tensor (J, I), or None
        None for a pair with an empty side, or more than 512 tokens.

    Raises
    ------
    ValueError
        If the model does not attend, or its symbols are no texts.
    """
    if not model.model.maps:
        raise rejected("align", "model", "attend", "one without attention")
    source, target = model.source, model.target
    if not isinstance(source, SubwordCodec) or not isinstance(target, SubwordCodec):
        raise rejected("align", "model", "read and write texts", "one of other symbols")
    codecs = source, target
    texts = [[normalize(text, codec.lowercase) for text in each] for codec, each in zip(codecs, (sources, targets))]
    name = model.aligning if name is None else name
    numbers = [codec.encode_all(each) for codec, each in zip(codecs, texts)]
    lengths = [min(both) and max(both) for both in zip(*(each.lengths.tolist() for each in numbers))]
    longest = min([_LONGEST, *(most for most in model.longest if most)])
    found: list[Tensor | None] = [None] * len(sources)
    told = posteriors if posterior else attended
    training = model.model.training
    model.model.eval()
    for rows in by_length([length if length <= longest else 0 for length in lengths], _BATCH):
        pairs = [(numbers[0][i].tolist(), numbers[1][i].tolist()) for i in rows]
        for i, both, weights in zip(rows, pairs, told(model.model, pairs, name)):
            words = [
                [Word("", tokens) for tokens in codec.covering(each[i], side, cut(each[i]))]
                for codec, each, side in zip(codecs, texts, both)
            ]
            found[i] = merge(weights, *words)
    model.model.train(training)
    return found


def best_map(model: SequenceModel, learn: Pairs, held_out: Pairs) -> str:
    """Return the attention map whose strongest words agree best with the links that our aligner finds in new pairs.

    Parameters
    ----------
    model : SequenceModel
    learn, held_out : Pairs
        Some of both are aligned; the first of those held out count.

    Returns
    -------
    str
        Empty for a model with one map or none, or one that does not read and write texts.
    """
    if len(model.model.maps) < 2 or not all(isinstance(each, SubwordCodec) for each in (model.source, model.target)):
        return ""
    sources, targets = held_out.sources[:_CHECKED], held_out.targets[:_CHECKED]
    sides = sources + learn.sources[:_LEARNED], targets + learn.targets[:_LEARNED]
    words = ([[text[start:stop] for start, stop in words_of(text)] for text in side] for side in sides)
    links = list(islice(lexical(*lowered(*words)), len(sources)))
    gold = [Gold(forward & backward, forward | backward) for forward, backward in links]
    found: dict[str, list[Links]] = {name: [] for name in model.model.maps}
    for written in model.align(sources, targets, WritingOptions(split=False)):
        for name, each in found.items():
            each.append(strongest(shown(written, name)))
    return min(found, key=lambda name: Agreement.of(found[name], gold).aer)


def shown(written: Written, name: str | None) -> Tensor | None:
    """Return the attention of words (J, I) that was told, or None where nothing was written or read."""
    if written.alignment is None:
        return None
    return merge(chosen(written, name), written.source_words, written.words)
