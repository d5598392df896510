"""What each head does, in words with a number: where its weight goes, by published definitions.

Dimensions: H query heads, L queries, S keys, M measures.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard.inspect._record.calls import entropy_of
from regard.inspect._record.layer_record import AttentionRecord, LayerRecord
from regard.inspect._record.recording import Recording
from regard.inspect._record.summary import AttentionSummary
from regard.inspect._record.texts import SPECIAL, Text

#: What the weight of a head goes to, from the simplest to the most specific: label and words.
SHARES = {
    "self": "the token itself",
    "previous": "the previous token",
    "next": "the next token",
    "first": "the first token",
    "separator": "separators (special tokens and punctuation)",
    "duplicate": "other occurrences of the same token",
    "induction": "the token after another occurrence of the same token",
}
#: Shares that need the queries to be among the keys, and shares that need tokens.
_WITHIN, _TOKENS = ("self", "previous", "next", "duplicate", "induction"), ("separator", "duplicate", "induction")
#: A share has a label from this part of the way between evenly spread weights and all weight.
HALF = 0.5
#: A share is a second label if it is at least this part of what the first leaves, this share of all weight, and so many
#: times that of evenly spread weights; if it is no more than the first leaves, since then their keys are others; and if
#: most of the first label's queries count for it.
_OF_REST, _LEAST, _TIMES, _MOST, _SLACK = 1 / 3, 0.1, 2, 0.8, 0.02
#: The share of queries with one offset of a positional head, and the share of the largest entropy of an even one.
POSITIONAL, EVEN = 0.9, 0.95
#: The probability, at most, that weights placed at random would reach the score of a label.
CHANCE = 0.001
#: The fewest queries of an even head; queries read together; weights held at once.
_FEWEST, _TOGETHER, _AT_ONCE = 8, 16, 1 << 22


@dataclass(frozen=True)
class Measure:
    """One number about a head.

    Attributes
    ----------
    score : float
        In [0, 1].
    chance : float
        The score of weights that are spread evenly over the visible keys.
    queries : int
        How many queries it is a mean of.
    """

    score: float
    chance: float
    queries: int

    @property
    def is_supported(self) -> bool:
        """Whether weights placed at random reach the score with a probability of at most 0.001."""
        return self.log_probability() <= math.log(CHANCE)

    def log_probability(self) -> float:
        """Return a bound of the logarithm of the probability that weights placed at random reach the score.

        ``−n · KL(score ‖ chance)``, for n independent numbers in [0, 1] (Hoeffding 1963, theorem 1).
        """
        score, chance = min(self.score, 1.0), max(self.chance, 1e-12)
        if score <= chance:
            return 0.0
        rest = (1 - score) * math.log((1 - score) / (1 - chance)) if score < 1 else 0.0
        return -self.queries * (score * math.log(score / chance) + rest)


@dataclass(frozen=True)
class HeadSummary:
    """What a head does, in words.

    Attributes
    ----------
    layer : str
        The layer's name in the model.
    head : int
    label : str
        "self", "previous", "next", "first", "separator", "duplicate", "induction", "positional", "uniform", the name
        of a relation, or "" if no definition fits.
    score : float
        The number of the label, in [0, 1]; 0 without one.
    text : str
        One sentence, which names the second label, too.
    second : str
        Where a good part of the weight goes that the first label leaves; "" if nowhere.
    measures : dict of str to Measure
        All that was measured, by label.
    """

    layer: str
    head: int
    label: str
    score: float
    text: str
    second: str = ""
    measures: Mapping[str, Measure] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.layer}, head {self.head}: {self.text}" if self.layer else f"head {self.head}: {self.text}"


def summarize_heads(
    record: Recording, *, layers: Sequence[int | str] | None = None, batch: int | None = None, queries: int = 256,
    relations: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> list[HeadSummary]:  # fmt: skip
    """Return what each head of a record does on its text, in words with a number.

    With w_ij the weights of query i, a share is the mean over queries of ``Σ_j w_ij`` over the keys that it names:

    * "previous", "next" (Clark et al. 2019, arXiv 1906.04341), "self" (Kovaleva et al. 2019, arXiv 1908.08593);
    * "first": the first token, often a sink (Xiao et al. 2023, arXiv 2309.17453);
    * "separator": special tokens and punctuation after the first token (Clark et al. 2019);
    * "duplicate": other occurrences of the query's token (Wang et al. 2022, arXiv 2211.00593);
    * "induction": tokens that follow another occurrence of the query's token, the prefix matching score of Olsson et
      al. (2022, arXiv 2209.11895), here on the text of the record.

    A query counts if it sees such keys and others, and is no padding. "positional" is the share of queries whose
    largest weight is at the most frequent distance from the query, 0.9 at least (Voita et al. 2019, arXiv 1905.09418).
    "uniform" is the entropy of the weights divided by that of even weights, 0.95 at least: a broad head of Clark et al.
    (2019, section 3.3), with a threshold of ours.

    The label is the largest share that is at least halfway from the share of even weights to 1, and that weights placed
    at random among the visible keys reach with a probability of at most 0.001; so short texts have fewer labels. A
    label says where weights go on this text, not why: test it with :func:`regard.inspect.ablate`. A second label is the
    largest other share that is at least a third of what the first leaves, 0.1 of all, and twice that of even weights.

    Parameters
    ----------
    record : Record
        With texts (:meth:`Record.describe`) for what depends on tokens. In a record of ``keep="summaries"``, shares are
        lower bounds from the kept weights, and the text says "at least".
    layers : sequence of int or str, optional
        All by default.
    batch : int, optional
        Which sequence; by default the one that the texts describe.
    queries : int
        How many queries to read at most, in runs of 16 spread evenly over the text.
    relations : dict of str to sequence of (int, int), optional
        Linguistic relations as pairs of a query and a key, by their names, such as the arcs of a parser: "its subject".
        A head gets such a label if the key of its largest weight is right for at least half of the queries, and more
        often than the best fixed distance (Clark et al. 2019, section 4.2), with the same probability. Layers of
        self-attention only.

    Returns
    -------
    list of HeadSummary
        Layer by layer, head by head.

    Raises
    ------
    ValueError
        If there is no such layer or sequence, or a relation names a token that is not there.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, summarize_heads
    >>> tokens = torch.eye(24)
    >>> with capture() as record:  # each query is like the key of the token before it
    ...     out = torch.nn.functional.scaled_dot_product_attention(
    ...         30 * tokens.roll(-1, 1)[None, None], tokens[None, None], tokens[None, None], is_causal=True)
    >>> print(summarize_heads(record)[0])
    head 0: attends to the previous token: 0.97 of its weight
    """
    if isinstance(queries, bool) or not isinstance(queries, int) or queries < 1:
        raise rejected("summarize_heads", "queries", "be an int of at least 1", repr(queries))
    batch = record.sequence if batch is None else batch
    runs = list(record) if layers is None else [record[each] for each in layers]
    return [
        each for run in runs for each in summaries_of(run, record.texts_of(run, batch), batch, queries, relations or {})
    ]


def summaries_of(
    run: LayerRecord, texts: tuple[Text, Text], batch: int, queries: int,
    relations: Mapping[str, Sequence[tuple[int, int]]] = {},
) -> list[HeadSummary]:  # fmt: skip
    """Return the summaries of the heads of one layer; the arguments are those of :func:`summarize_heads`."""
    B, H, L, S = run.shape
    if not 0 <= batch < B:
        raise rejected("summarize_heads", "batch", f"be below {B}, the batch size", batch)
    known = _Measures(run, texts, batch)
    if min(H, L, S):
        known.read(queries)
    is_bound = isinstance(run, AttentionSummary)
    within = {name: _relation(run, batch, name, pairs) for name, pairs in relations.items() if known.is_within}
    found = []
    for head in range(H):
        measures = known.of(head)
        bound = "at least " if is_bound else ""
        label, score, text = _named(measures, known.offset_of(head), bound)
        second = _second(measures, label)
        if second:
            text = f"{text}, then to {SHARES[second]}: {bound}{measures[second].score:.2f}"
        for name, heads in within.items():
            measures[name] = heads[head]
            if heads[head].score >= HALF and heads[head].is_supported:
                label, score, second = name, heads[head].score, ""
                text = f"attends to {name}: its largest weight, for {score:.2f} of {heads[head].queries} tokens"
        found.append(HeadSummary(run.name, head, label, score, text, second, measures))
    return found


def _named(measures: Mapping[str, Measure], offset: int, bound: str) -> tuple[str, float, str]:
    """Return the label, its score and its sentence."""
    fit = [
        name for name in SHARES
        if (one := measures.get(name)) and one.score >= one.chance + HALF * (1 - one.chance) and one.is_supported
    ]  # fmt: skip
    if fit:
        label = max(fit, key=lambda name: round(measures[name].score, 2))  # of equals, the simplest
        score = measures[label].score
        return label, score, f"attends to {SHARES[label]}: {bound}{score:.2f} of its weight"
    one = measures.get("positional")
    if one is not None and one.score >= POSITIONAL and one.is_supported:
        place = f"{abs(offset)} token{'s' * (abs(offset) != 1)} {'before' if offset < 0 else 'after'} the query"
        place = place if offset else "the token itself"
        return (
            "positional",
            one.score,
            f"depends on position: its largest weight is {place} for {one.score:.2f} of queries",
        )
    one = measures.get("uniform")
    if one is not None and one.score >= EVEN and one.queries >= _FEWEST:
        return "uniform", one.score, f"spreads its weight evenly: {one.score:.2f} of the largest possible entropy"
    return "", 0.0, _unnamed(measures, bound)


def _second(measures: Mapping[str, Measure], label: str) -> str:
    """Return where a good part of the weight goes that a label leaves; "" if nowhere."""
    if label not in SHARES:
        return ""
    first = measures[label]
    rest = 1 - first.score
    others = [
        name for name in SHARES
        if name != label and (one := measures.get(name)) and one.queries >= _MOST * first.queries
        and max(rest * _OF_REST, _LEAST, _TIMES * one.chance) <= one.score <= rest + _SLACK
    ]  # fmt: skip
    return max(others, key=lambda name: round(measures[name].score, 2), default="")


def _unnamed(measures: Mapping[str, Measure], bound: str) -> str:
    shares = {name: one.score for name, one in measures.items() if name in SHARES and one.queries}
    if not shares:
        return "no known pattern: too few tokens"
    most = max(shares, key=lambda name: round(shares[name], 2))
    return f"no known pattern: {bound}{shares[most]:.2f} of its weight goes to {SHARES[most]}"


class _Measures:
    """The measures of all heads of a layer, summed over queries that are read some at a time."""

    def __init__(self, run: LayerRecord, texts: tuple[Text, Text], batch: int) -> None:
        _, H, L, S = run.shape
        self.run, self.batch = run, batch
        #: Where the first query stands among the keys.
        self.lead = S - L
        self.is_within = run.kind == "self" and run.windows == 1 and L <= S
        keys = texts[1]
        has_tokens = not keys.patches and keys.tokens != tuple(map(str, range(S)))
        missing = {*(() if self.is_within else _WITHIN), *(() if has_tokens else _TOKENS)}
        self.names = [name for name in SHARES if name not in missing]
        numbers: dict[str, int] = {}
        self._tokens = torch.tensor([numbers.setdefault(each, len(numbers)) for each in keys.tokens], dtype=torch.long)
        is_mark = [has_tokens and _is_mark(token) for token in numbers]
        self._separators = torch.tensor(is_mark, dtype=torch.bool)[self._tokens]
        self._separators[list(keys.special)] = True
        self._separators[:1] = False
        self._scores, self._chances, self._counts = (torch.zeros(len(self.names), H) for _ in range(3))
        self._offsets: list[Counter[int]] = [Counter() for _ in range(H)]
        self._even, self._seen, self._inverse = torch.zeros(H), torch.zeros(H), torch.zeros(H)

    def read(self, queries: int) -> None:
        """Read at most so many queries."""
        _, H, L, S = self.run.shape
        parts = list(_parts(L, queries, max(_AT_ONCE // (H * S), 1)))
        spans = _spans(self.run, self.batch)
        used, is_causal = (None, False) if spans is not None else self._used(parts)
        cols = torch.arange(S)
        padding = _padding(spans, S) if spans is not None and self.is_within else None
        entropies = self.run.entropy()[self.batch] if isinstance(self.run, AttentionSummary) else None
        for first, last in parts:
            weights = _rows(self.run, self.batch, first, last)
            at = torch.arange(first, last)[:, None] + self.lead
            if spans is not None:
                visible = (cols >= spans[0][first:last, None]) & (cols < spans[1][first:last, None])
            else:
                assert used is not None
                visible = used & ((cols <= at) | (not is_causal))
            if padding is not None:
                weights[:, padding[at[:, 0]]] = 0.0
            entropy = entropy_of(weights[None])[0] if entropies is None else entropies[:, first:last]
            self._add(weights, entropy, visible, self._targets(at, cols) & visible, at[:, 0])

    def _used(self, parts: list[tuple[int, int]]) -> tuple[Tensor, bool]:
        """Return which keys have weight anywhere, and whether none is after its query."""
        S = self.run.shape[3]
        used, is_causal, cols = torch.zeros(S, dtype=torch.bool), self.is_within, torch.arange(S)
        for first, last in parts:
            some = _rows(self.run, self.batch, first, last).any(0)
            used |= some.any(0)
            is_causal = is_causal and not bool((some & (cols > torch.arange(first, last)[:, None] + self.lead)).any())
        if isinstance(self.run, AttentionSummary):
            used = (self.run.received()[self.batch] > 0).any(0)
        return used, is_causal

    def _targets(self, at: Tensor, cols: Tensor) -> Tensor:
        """Return which keys (M, l, S) each measure names, for queries at places (l, 1)."""
        made: dict[str, Tensor] = {
            "first": (cols == 0).expand(len(at), -1),
            "separator": self._separators.expand(len(at), -1),
        }
        if self.is_within:
            made |= {"self": cols == at, "previous": cols == at - 1, "next": cols == at + 1}
            other = (self._tokens[at] == self._tokens) & ~made["self"]
            follows = torch.zeros_like(other)
            follows[:, 1:] = other[:, :-1]
            made |= {"duplicate": other, "induction": follows & ~made["self"]}
        return torch.stack([made[name] for name in self.names])

    def _add(self, weights: Tensor, entropy: Tensor, visible: Tensor, targets: Tensor, at: Tensor) -> None:
        total, few = weights.sum(-1), visible.sum(-1)  # (H, l), (l,)
        counts = targets.sum(-1)
        alive = total > 0
        counted = (((counts > 0) & (counts < few))[:, None] & alive).float()  # (M, H, l)
        shares = torch.einsum("hls,mls->mhl", weights, targets.float())
        self._scores += (shares * counted).sum(-1)
        self._chances += ((counts / few.clamp_min(1))[:, None] * counted).sum(-1)
        self._counts += counted.sum(-1)
        several = alive & (few > 1)
        self._seen += several.sum(-1)
        self._even += torch.where(several, entropy / few.clamp_min(2).log(), 0.0).sum(-1)
        self._inverse += torch.where(several, 1 / few.clamp_min(1), 0.0).sum(-1)
        if self.is_within:
            offsets = weights.argmax(-1) - at
            for head, chosen in enumerate(several):
                self._offsets[head].update(offsets[head][chosen].tolist())

    def of(self, head: int) -> dict[str, Measure]:
        """Return the measures of a head."""
        found = {
            name: _measure(self._scores[i, head], self._chances[i, head], self._counts[i, head])
            for i, name in enumerate(self.names)
        }
        if self._offsets[head]:
            count = self._offsets[head].most_common(1)[0][1]
            found["positional"] = _measure(count, self._inverse[head], self._seen[head])
        found["uniform"] = _measure(self._even[head], 1.0 * self._seen[head], self._seen[head])
        return found

    def offset_of(self, head: int) -> int:
        """Return the most frequent distance from a query to the key of its largest weight."""
        return self._offsets[head].most_common(1)[0][0] if self._offsets[head] else 0


def _padding(spans: tuple[Tensor, Tensor], S: int) -> Tensor:
    """Return which keys (S,) no query sees: padding, whose queries count for nothing either."""
    starts, stops = (torch.bincount(each.clamp(0, S), minlength=S + 1)[:S] for each in spans)
    return (starts - stops).cumsum(0) == 0


def _measure(score: Tensor | float, chance: Tensor | float, count: Tensor) -> Measure:
    n = max(int(count), 1)
    return Measure(min(float(score) / n, 1.0), min(float(chance) / n, 1.0), int(count))


def _parts(L: int, queries: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of queries: all of them, or runs spread evenly."""
    together = min(_TOGETHER, queries)
    if queries >= L:
        starts = list(range(0, L, together))
    else:
        count = max(queries // together, 1)
        starts = [round(i * (L - together) / max(count - 1, 1)) for i in range(count)]
    for start in starts:
        stop = min(start + together, L)
        for first in range(start, stop, most):
            yield first, min(first + most, stop)


def _rows(run: LayerRecord, batch: int, first: int, last: int) -> Tensor:
    """Return the weights (H, last − first, S) of some queries as shares; of a summary, those that it keeps."""
    if isinstance(run, AttentionSummary):
        return run.kept(batch, first, last)
    weights = run.weights(batch=batch, rows=slice(first, last)).float().cpu()
    if bool((weights < 0).any()):  # a difference of two softmaxes: shares of its size
        weights = weights.abs() / weights.abs().sum(-1, keepdim=True).clamp_min(1e-30)
    return weights


def visible_counts(run: LayerRecord, batch: int) -> Tensor | None:
    """Return how many keys each query (L,) of a sequence sees; None if the record does not say."""
    spans = _spans(run, batch)
    return None if spans is None else spans[1] - spans[0]


def _spans(run: LayerRecord, batch: int) -> tuple[Tensor, Tensor] | None:
    """Return the first visible key of each query and the one after its last (L,); None if the record does not say."""
    if not isinstance(run, AttentionRecord):
        return None
    starts, stops = [], []
    for call in run.calls:
        found = call.intervals()
        if found is None or call.normalizer != "softmax":
            return None
        starts.append(found[0][batch].cpu() + call.first)
        stops.append(found[1][batch].cpu() + call.first)
    return torch.cat(starts), torch.cat(stops)


def _is_mark(token: str) -> bool:
    """Whether a token is special or punctuation."""
    bare = token.strip().lstrip("▁Ġ").removeprefix("##")
    punctuation = bool(bare) and all(unicodedata.category(each).startswith("P") for each in bare)
    return punctuation or bool(SPECIAL.fullmatch(token))


# Linguistic relations -------------------------------------------------------------------------------------------------


def _relation(run: LayerRecord, batch: int, name: str, pairs: Sequence[tuple[int, int]]) -> list[Measure]:
    """Return how often the largest weight of each head is at a right key, against the best fixed distance."""
    _, H, L, S = run.shape
    lead = S - L
    right: dict[int, set[int]] = {}
    for query, key in pairs:
        if not (0 <= query < S and 0 <= key < S):
            raise rejected("summarize_heads", f"relations[{name!r}]", f"be tokens below {S}", (query, key))
        right.setdefault(query, set()).add(key)
    right = {query: keys for query, keys in right.items() if query >= lead}
    distances = Counter(key - query for query, keys in right.items() for key in keys)
    count = len(right)
    best = max(distances.values(), default=0)
    hits = torch.zeros(H)
    for query, keys in right.items():
        at = _rows(run, batch, query - lead, query - lead + 1)[:, 0].argmax(-1)
        hits += torch.isin(at, torch.tensor(sorted(keys)))
    return [_measure(hits[head], best, torch.tensor(count)) for head in range(H)]
