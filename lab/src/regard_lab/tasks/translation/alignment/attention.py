"""Links between words, read off a translator's attention: in one direction or in both, symmetrized.

Dimensions: J words of a target, I words of its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from regard._utils.errors import rejected
from regard_lab.data.batches import length_batches
from regard_lab.data.pairs import Pairs
from regard_lab.generation.predictions import Prediction, PredictionOptions
from regard_lab.generation.sequence_model import SequenceModel, attention_weights, posteriors
from regard_lab.tasks.translation.alignment.links import Agreement, Gold, Links, lexical, lowercase, symmetrize
from regard_lab.tasks.translation.alignment.maps import merge, select_map
from regard_lab.text.vocabulary import SubwordVocabulary, Word
from regard_lab.text.words import WordFinder, find_words, normalize

#: Batch size in sentence pairs, and maximum number of tokens of a side.
_BATCH, _LONGEST = 32, 512
#: Number of pairs to select an attention map on, and to train an aligner on for that.
_CHECKED, _LEARNED = 300, 20_000


def attention_links(
    model: SequenceModel,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    back: SequenceModel | None = None,
    method: str = "grow-diag-final-and",
    name: str | None = None,
    cut: WordFinder = find_words,
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
        As :func:`regard_lab.tasks.translation.alignment.links.symmetrize` takes it.
    name : str, optional
        The attention map; by default the one that the model says aligns, or the mean of all.
    cut : callable, optional
        Finds the words of a text.

    Examples
    --------
    >>> from regard_lab import pretrained
    >>> (links,) = attention_links(pretrained.load(), ["I love you."], ["Je t'aime."])
    >>> (3, 2) in links
    True
    """
    if len(sources) != len(targets):
        raise rejected("align", "targets", f"be as many as sources, {len(sources):,}", f"{len(targets):,}")
    forward = word_attention(model, sources, targets, name=name, cut=cut)
    backward = [None] * len(forward) if back is None else word_attention(back, targets, sources, cut=cut)
    return [symmetrize_attention(ours, theirs, method) for ours, theirs in zip(forward, backward)]


def symmetrize_attention(ours: Tensor | None, theirs: Tensor | None, method: str) -> Links:
    """Return the symmetrized links of target words' shares (J, I), and source words' (I, J) or else the same shares."""
    columns = ours.mT if theirs is None and ours is not None else theirs
    return symmetrize(strongest_links(ours), frozenset((i, j) for j, i in strongest_links(columns)), method)


def strongest_links(weights: Tensor | None) -> Links:
    """Return the link of each target word to the source word with the largest of its weights (J, I), if it has any."""
    if weights is None or not weights.numel():
        return frozenset()
    largest, places = weights.max(-1)
    return frozenset((i, j) for j, (i, most) in enumerate(zip(places.tolist(), largest.tolist())) if most > 0)


def word_attention(
    model: SequenceModel,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    name: str | None = None,
    cut: WordFinder = find_words,
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
        Also use how likely each state was to write the word, where a model can say; else the map that pictures show.

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
    if not isinstance(source, SubwordVocabulary) or not isinstance(target, SubwordVocabulary):
        raise rejected("align", "model", "read and write texts", "one of other symbols")
    vocabularies = source, target
    texts = [
        [normalize(text, vocabulary.lowercase) for text in each]
        for vocabulary, each in zip(vocabularies, (sources, targets))
    ]
    name = model.aligning if name is None else name
    numbers = [vocabulary.encode_all(each) for vocabulary, each in zip(vocabularies, texts)]
    lengths = [min(both) and max(both) for both in zip(*(each.lengths.tolist() for each in numbers))]
    max_length = min([_LONGEST, *(most for most in model.max_lengths if most)])
    matrices: list[Tensor | None] = [None] * len(sources)
    attention = posteriors if posterior else attention_weights
    training = model.model.training
    model.model.eval()
    for rows in length_batches([length if length <= max_length else 0 for length in lengths], _BATCH):
        pairs = [(numbers[0][i].tolist(), numbers[1][i].tolist()) for i in rows]
        for i, both, weights in zip(rows, pairs, attention(model.model, pairs, name)):
            words = [
                [Word("", tokens) for tokens in vocabulary.covering(each[i], side, cut(each[i]))]
                for vocabulary, each, side in zip(vocabularies, texts, both)
            ]
            matrices[i] = merge(weights, *words)
    model.model.train(training)
    return matrices


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
    if len(model.model.maps) < 2 or not all(
        isinstance(each, SubwordVocabulary) for each in (model.source, model.target)
    ):
        return ""
    sources, targets = held_out.sources[:_CHECKED], held_out.targets[:_CHECKED]
    sides = sources + learn.sources[:_LEARNED], targets + learn.targets[:_LEARNED]
    words = ([[text[start:stop] for start, stop in find_words(text)] for text in side] for side in sides)
    links = list(islice(lexical(*lowercase(*words)), len(sources)))
    gold = [Gold(forward & backward, forward | backward) for forward, backward in links]
    links_by_map: dict[str, list[Links]] = {name: [] for name in model.model.maps}
    for prediction in model.align(sources, targets, PredictionOptions(split=False)):
        for name, each in links_by_map.items():
            each.append(strongest_links(predicted_attention(prediction, name)))
    return min(links_by_map, key=lambda name: Agreement.of(links_by_map[name], gold).aer)


def predicted_attention(prediction: Prediction, name: str | None) -> Tensor | None:
    """Return a prediction's attention between words (J, I), or None if its source or output is empty."""
    if prediction.alignment is None:
        return None
    return merge(select_map(prediction, name), prediction.source_words, prediction.words)
