"""Attention maps for display: token weights merged into word weights, one map or a mean of several.

Dimensions: A attention maps, T target tokens, S source tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard._utils.errors import rejected, unknown_name
from regard.inspect import Alignment
from regard_lab.generation.predictions import Prediction
from regard_lab.text.vocabulary import Word
from regard_lab.text.words import normalize

#: Decimals of weights in a record.
_DIGITS = 6


def merge(weights: Tensor, source: Sequence[Word], target: Sequence[Word]) -> Tensor:
    """Return word weights: sums over a source word's tokens, means over a target word's tokens.

    Rows that sum to 1 still do.

    Parameters
    ----------
    weights : Tensor (..., T, S)
    source, target : sequence of Word
        Which tokens make up each word.

    Returns
    -------
    Tensor (..., words of the target, words of the source)

    Examples
    --------
    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    >>> merge(weights, [Word("con-", range(0, 2)), Word("trol", range(2, 3))], [Word("contrôle", range(0, 2))])
    tensor([[0.3750, 0.6250]])
    """
    columns = [weights[..., word.tokens.start : word.tokens.stop].sum(-1) for word in source]
    merged = torch.stack(columns, -1) if columns else weights[..., :0]
    rows = [merged[..., word.tokens.start : word.tokens.stop, :].mean(-2) for word in target]
    return torch.stack(rows, -2) if rows else merged[..., :0, :]


def select_map(prediction: Prediction, name: str | None = None) -> Tensor:
    """Return one map of attention weights (T, S): by name, the one that aligns words, or the mean of all.

    Parameters
    ----------
    prediction : Prediction
    name : str, optional
        One of ``prediction.maps``, or what some of them begin with: "layer 2" is the mean of its heads.

    Raises
    ------
    ValueError
        If there are no weights, or no map has this name.
    """
    if prediction.alignment is None:
        raise rejected("alignment", "written", "have attention weights", "none: ask for them, of a model that attends")
    name = prediction.aligning if name is None else name
    if name is None:
        return prediction.alignment.mean(0)
    meant = [i for i, each in enumerate(prediction.maps) if each == name or each.startswith(f"{name} ")]
    if not meant:
        raise unknown_name("alignment", "map", name, prediction.maps)
    return prediction.alignment[meant].mean(0)


def alignment(
    prediction: Prediction, name: str | None = None, *, words: bool = True, title: str | None = None
) -> Alignment:
    """Return the alignment of a prediction, for pictures.

    Parameters
    ----------
    prediction : Prediction
        Made with its alignment.
    name : str, optional
        The map, as :func:`select_map` takes it.
    words : bool, default True
        Show words rather than tokens.
    title : str, optional
        The source and what was written for it, and the map's name, by default.

    Raises
    ------
    ValueError
        As :func:`select_map`.
    """
    weights = select_map(prediction, name)
    if title is None:
        title = f"{normalize(prediction.source)} → {prediction.text}" + (f" ({name})" if name else "")
    if not words:
        return Alignment(prediction.source_tokens, prediction.tokens, weights, title)
    merged = merge(weights, prediction.source_words, prediction.words)
    return Alignment(_texts(prediction.source_words), _texts(prediction.words), merged, title)


def alignments(prediction: Prediction, *, words: bool = True) -> list[Alignment]:
    """Return each attention map separately, with its name as title."""
    return [alignment(prediction, name, words=words, title=name) for name in prediction.maps]


def record(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction in JSON types.

    Returns
    -------
    dict
        ``source``, ``text``, ``score``, ``normalized``, ``confidence``, ``source_tokens``, ``tokens``; ``note`` and
        ``alternatives`` where there are any. With the alignment also ``source_words`` and ``words``, each with its
        ``text`` and the places of its first and behind its last token; ``maps``, each with its ``name``, the
        ``weights`` of tokens (a row for each step) and those of ``words``; and ``alignment``, the words' weights in the
        map that :func:`select_map` takes by itself, and its name ``aligning``, None for the mean of all.
    """
    data: dict[str, Any] = {
        "source": prediction.source,
        "text": prediction.text,
        "score": _finite(prediction.score),
        "normalized": _finite(prediction.normalized),
        "confidence": prediction.confidence,
        "source_tokens": list(prediction.source_tokens),
        "tokens": list(prediction.tokens),
    }
    if prediction.note:
        data["note"] = prediction.note
    if prediction.alignment is not None:
        merged = merge(prediction.alignment, prediction.source_words, prediction.words)
        data["source_words"], data["words"] = _spans(prediction.source_words), _spans(prediction.words)
        data["alignment"] = _listed(merge(select_map(prediction), prediction.source_words, prediction.words))
        data["aligning"] = prediction.aligning
        data["maps"] = [
            {"name": name, "weights": _listed(weights), "words": _listed(of_words)}
            for name, weights, of_words in zip(prediction.maps, prediction.alignment, merged)
        ]
    if prediction.alternatives:
        data["alternatives"] = [record(each) for each in prediction.alternatives]
    return data


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


def _texts(words: Sequence[Word]) -> tuple[str, ...]:
    return tuple(word.text for word in words)


def _spans(words: Sequence[Word]) -> list[dict[str, Any]]:
    return [{"text": word.text, "tokens": [word.tokens.start, word.tokens.stop]} for word in words]


def _listed(weights: Tensor) -> list[list[float]]:
    return [[round(weight, _DIGITS) for weight in row] for row in weights.tolist()]
