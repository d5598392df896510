"""Beam search of encoder–decoders: beams, finished hypotheses, and the candidates that continue them.

Dimensions: B sources, K beams, C candidates, N target vocabulary, t symbols so far with the start mark, P hypotheses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.torch_private import is_eager
from regard.engines.fused import decoding
from regard_lab._options import Options, option
from regard_lab.models.base import END, PAD
from regard_lab.text.vocabulary import UNKNOWN

# Beams, finished hypotheses and candidates ----------------------------------------------------------------------------


#: Length of the runs of logits; top-k ranks only the runs with the largest maxima.
_RUN = 64


@dataclass(frozen=True)
class Candidates:
    """Continuations of beams.

    Attributes
    ----------
    score : Tensor (B, C)
        Log-probability of the continued beam.
    parent, symbol : Tensor (B, C)
        The continued beam, and the new symbol.
    usual : bool
        All scores are finite, and no candidate ends; if False, that is unknown.
    """

    score: Tensor
    parent: Tensor
    symbol: Tensor
    usual: bool = False

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """Concatenate the candidates of several groups of sources."""
        names = "score", "parent", "symbol"
        score, parent, symbol = (torch.cat([getattr(each, name) for each in parts]) for name in names)
        return cls(score, parent, symbol, all(each.usual for each in parts))

    def first(self, count: int) -> Candidates:
        return Candidates(self.score[:, :count], self.parent[:, :count], self.symbol[:, :count])

    def ends(self) -> Tensor:
        """Return which candidates (B, C) end."""
        return (self.symbol == END) & (self.score > -torch.inf)


@dataclass(frozen=True)
class Beams:
    """The active beams. A score of −inf marks an unused beam.

    Attributes
    ----------
    rows : Tensor (B,)
        Indices of the sources.
    limits : Tensor (B,)
        Maximum number of symbols for each source.
    score : Tensor (B, K)
    tokens : Tensor (B, K, t)
    least : int, optional
        The smallest limit; by default, it is computed.
    """

    rows: Tensor
    limits: Tensor
    score: Tensor
    tokens: Tensor
    least: int = -1

    def __post_init__(self) -> None:
        if self.least < 0 and len(self.limits):
            object.__setattr__(self, "least", int(self.limits.min()))

    @classmethod
    def first(cls, source: Tensor, limits: Tensor, beams: int) -> Beams:
        B = len(source)
        zeros = torch.zeros(B, beams, device=source.device)
        return cls(torch.arange(B, device=source.device), limits, zeros, limits.new_full((B, beams, 1), END))

    def select(self, kept: Tensor | slice) -> Beams:
        return Beams(self.rows[kept], self.limits[kept], self.score[kept], self.tokens[kept])

    def after(self, candidates: Candidates, beams: int | None) -> tuple[Beams, Tensor]:
        """Return the beams of the best candidates that do not end, and their parents (B, K).

        If ``beams`` is None, candidate k continues beam k.
        """
        score, parent, symbol = candidates.score, candidates.parent, candidates.symbol
        if not candidates.usual:
            score = score.masked_fill(symbol == END, -torch.inf)
        if beams is not None and candidates.usual:  # the best come first
            score, parent, symbol = score[:, :beams], parent[:, :beams], symbol[:, :beams]
        elif beams is not None:
            score, best = score.topk(min(beams, score.shape[1]))
            parent, symbol = parent.gather(1, best), symbol.gather(1, best)
        one = self.score.shape[1] == parent.shape[1] == 1
        tokens = torch.cat([self.tokens if one else _rows(self.tokens, parent), symbol[..., None]], -1)
        return Beams(self.rows, self.limits, score, tokens, self.least), parent


@dataclass(frozen=True)
class Finished:
    """The best finished hypotheses so far, best first. A rank of −inf marks an unused entry.

    Attributes
    ----------
    rank, score : Tensor (B, P)
        Log-probability with and without the length penalty.
    length : Tensor (B, P)
        Number of valid tokens, without the end mark.
    tokens : Tensor (B, P, t)
    """

    rank: Tensor
    score: Tensor
    length: Tensor
    tokens: Tensor

    @classmethod
    def none(cls, front: Beams, count: int) -> Finished:
        B = len(front.rows)
        worst = front.score.new_full((B, count), -torch.inf)
        return cls(worst, worst, front.rows.new_zeros(B, count), front.rows.new_zeros(B, count, 0))

    def select(self, kept: Tensor) -> Finished:
        return Finished(self.rank[kept], self.score[kept], self.length[kept], self.tokens[kept])

    def with_more(self, front: Beams, candidates: Candidates, penalty: float) -> Finished:
        """Return the best of these hypotheses and of the candidates that end."""
        ends = candidates.ends()
        if not bool(ends.any()):
            return self
        score = candidates.score.masked_fill(~ends, -torch.inf)
        written = _rows(front.tokens, candidates.parent)[..., 1:]  # without the start mark
        length = torch.full_like(candidates.symbol, written.shape[-1])
        older = F.pad(self.tokens, (0, written.shape[-1] - self.tokens.shape[-1]))
        rank, best = torch.cat([self.rank, score / penalty], 1).topk(self.rank.shape[1])
        return Finished(
            rank,
            torch.cat([self.score, score], 1).gather(1, best),
            torch.cat([self.length, length], 1).gather(1, best),
            _rows(torch.cat([older, written], 1), best),
        )

    def to_lists(self) -> list[list[tuple[tuple[int, ...], float, float]]]:
        """Return the token ids, score and rank of the hypotheses of each source."""
        columns = (part.tolist() for part in (self.rank, self.score, self.length, self.tokens))
        return [
            [(tuple(numbers[:length]), score, rank) for rank, score, length, numbers in zip(*each) if rank > -torch.inf]
            for each in zip(*columns)
        ]


@dataclass(frozen=True)
class Restriction:
    """Symbols that may be written for some sources only.

    Attributes
    ----------
    symbols : Tensor (R,)
    allowed : Tensor (B, R) of bool
    """

    symbols: Tensor
    allowed: Tensor

    def apply(self, logits: Tensor, maxima: Tensor, rows: Tensor) -> None:
        """Exclude symbols from the logits (B, K, N) of sources ``rows``, and update the maxima of runs (B, K, C)."""
        excluded = ~self.allowed[rows][:, None]  # (B, 1, R)
        logits[..., self.symbols] = logits[..., self.symbols].masked_fill(excluded, -torch.inf)
        for run in torch.unique(self.symbols // _RUN).tolist():
            maxima[..., run] = logits[..., run * _RUN : (run + 1) * _RUN].amax(-1)


def allowed_logits(
    logits: Tensor,
    front: Beams,
    *,
    min_length: int,
    no_repeat: int,
    unknown: bool = True,
    restriction: Restriction | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (B, K, N) with −inf for excluded symbols, log Σ exp of the original logits (B, K), and maxima.

    A symbol's log-probability is its logit minus log Σ exp. The maxima (B, K, C) over runs of logits are for
    :func:`top_candidates`. Logits of float32 or float64 are modified in place.
    """
    written = front.tokens.shape[-1] - 1
    logits = (logits if logits.dtype == torch.float64 else logits.float()).contiguous()
    hidden = _hidden(written < min_length, not unknown and logits.shape[-1] > UNKNOWN, logits.device)
    total, maxima = _sums_and_maxima(logits, hidden)
    if no_repeat and written >= no_repeat:
        runs = front.tokens[..., 1:].unfold(-1, no_repeat, 1)  # (B, K, ·, no_repeat)
        latest = front.tokens[..., None, written + 2 - no_repeat :]
        again = (runs[..., :-1] == latest).all(-1)
        logits.scatter_(-1, torch.where(again, runs[..., -1], PAD), -torch.inf)
    if front.least <= written:
        only = torch.full_like(logits[0, 0], -torch.inf)
        only[END] = 0.0
        logits[front.limits <= written] += only
    if no_repeat or front.least <= written:
        maxima = _maxima(logits)
    if restriction is not None:
        restriction.apply(logits, maxima, front.rows)
    return logits, total, maxima


@cache
def _hidden(end: bool, unknown: bool, device: torch.device) -> Tensor:
    """Return the symbols that are never written: padding, and perhaps the end mark and the unknown symbol."""
    return torch.tensor([PAD, *([END] if end else []), *([UNKNOWN] if unknown else [])], device=device)


def _sums_and_maxima(logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Σ exp (B, K) and the maxima (B, K, C) of runs of logits (B, K, N), after hiding some symbols by −inf.

    The sums are those of all logits.
    """
    if not _has_kernels(logits):
        total = logits.logsumexp(-1)
        logits.index_fill_(-1, hidden, -torch.inf)
        return total, _maxima(logits)
    rows = logits.flatten(0, 1)
    total, maxima = decoding.log_sums(rows, _RUN, hidden)
    return total.view(logits.shape[:2]), maxima.view(*logits.shape[:2], -1)


def _has_kernels(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in decoding.DTYPES and is_eager() and logits.is_contiguous()


def _maxima(logits: Tensor) -> Tensor:
    """Return the maxima (..., C) of runs of logits (..., N)."""
    return F.pad(logits, (0, -logits.shape[-1] % _RUN), value=-torch.inf).unflatten(-1, (-1, _RUN)).amax(-1)


def top_candidates(score: Tensor, gains: Tensor, count: int, maxima: Tensor) -> Candidates:
    """Return the candidates with the largest sums of a beam's score (B, K) and a gain (B, K, N), best first.

    They lie in the runs with the largest maxima (B, K, C), so only a few runs need ranking.
    """
    N, runs = gains.shape[-1], maxima.shape[-1]
    if _has_kernels(gains):
        count = min(count, gains[0].numel())
        return Candidates(*decoding.largest_sums(gains, score.contiguous(), maxima, _RUN, count, END))
    if gains.shape[1] * runs <= count:
        best, at = (score[..., None] + gains).flatten(1).topk(min(count, gains[0].numel()))
        return Candidates(best, at // N, at % N)
    chosen = (score[..., None] + maxima).flatten(1).topk(count).indices  # (B, C)
    parent = chosen // runs
    symbol = (chosen % runs * _RUN)[..., None] + torch.arange(_RUN, device=gains.device)  # (B, C, _RUN)
    at = (parent[..., None] * N + symbol.clamp(max=N - 1)).flatten(1)
    total = gains.flatten(1).gather(1, at).unflatten(1, symbol.shape[1:]) + score.gather(1, parent)[..., None]
    best, place = total.masked_fill(symbol >= N, -torch.inf).flatten(1).topk(count)
    at = at.gather(1, place)
    return Candidates(best, at // N, at % N)


def sample_candidates(
    score: Tensor, gains: Tensor, draws: Tensor, *, temperature: float, top_k: int, top_p: float
) -> Candidates:
    """Sample one continuation of each beam from uniform random numbers (B, K) in [0, 1).

    Probabilities are proportional to exp(gains), (B, K, N). A candidate's score is the beam's score (B, K) plus its
    gain.
    """
    B, K, N = gains.shape
    ranked, symbols = gains, None
    if top_k or top_p < 1:
        ranked, symbols = gains.topk(min(top_k or N, N))
    below = (ranked.double() / temperature).softmax(-1).cumsum(-1)
    whole = below[..., -1:]
    if top_p < 1:
        whole = below.gather(-1, torch.searchsorted(below, top_p * whole).clamp(max=below.shape[-1] - 1))
    place = torch.searchsorted(below, draws[..., None] * whole, right=True).clamp(max=below.shape[-1] - 1)
    symbol = place if symbols is None else symbols.gather(-1, place)
    parent = torch.arange(K, device=gains.device).expand(B, K)
    return Candidates(score + gains.gather(-1, symbol)[..., 0], parent, symbol[..., 0])


def uniform_draws(source: Tensor, lengths: Tensor, limits: Tensor, draws: int, seed: int) -> Tensor:
    """Return uniform random numbers (B, draws, t) in [0, 1), determined by each source's symbols and the seed."""
    longest = int(limits.max()) + 1
    uniform = torch.zeros(len(source), draws, longest, dtype=torch.float64)
    for row, length, limit, made in zip(source.tolist(), lengths.tolist(), limits.tolist(), uniform):
        digest = hashlib.blake2b(repr((seed, row[:length])).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        made[:, : limit + 1] = torch.rand(draws, limit + 1, dtype=torch.float64, generator=generator)
    return uniform.to(source.device)


def _rows(tokens: Tensor, which: Tensor) -> Tensor:
    """Return the rows (B, C, t) of tokens (B, K, t) at indices (B, C)."""
    return tokens.gather(1, which[..., None].expand(-1, -1, tokens.shape[-1]))


# Beam search, greedy decoding and sampling for a batch of sources -----------------------------------------------------
# Dimensions: B sources, S source steps, K beams.


#: Maximum number of logits to compute at once on a CPU; each chunk reads the whole output projection.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class SearchOptions(Options):
    """How to search, or to sample."""

    function: ClassVar[str] = "search"
    beams: int = option(5, "beam size of the search; 1 is greedy", ge=1, le=1000, flag="--beams")
    n_best: int = option(1, "results to return, or samples to draw", ge=1, le=10_000, flag="--n-best",
                         short="Show this many results, each after its score.")  # fmt: skip
    #: α: hypotheses are ranked by their log-probability divided by ((5 + n)/6)^α, for n symbols with the end mark
    #: (Wu et al. 2016, arXiv 1609.08144).
    length_penalty: float = option(0.6, "0 favours short results, 1 long ones", ge=0, flag="--length-penalty")
    no_repeat: int = option(
        0, "never write the same run of this many tokens twice; 0 for no limit", ge=0, flag="--no-repeat"
    )
    min_length: int = option(0, "least number of symbols to write", ge=0)
    #: For S source symbols, the output has at most ``ratio · S + extra`` symbols, or ``min_length`` if that is more.
    ratio: float = option(2.0, "most symbols to write per source symbol", ge=0)
    extra: int = option(8, "symbols to add to that limit", ge=0)
    max_length: int = option(0, "most symbols to write in any case; 0 for no limit", ge=0)
    #: When texts are requested, it is generated only if a source word can replace it.
    unknown: bool = option(True, "write the symbol for whatever the vocabulary does not know")
    #: Samples depend only on the source's symbols and the seed: equal sources get equal samples in any batch.
    sample: bool = option(False, "sample at random instead of searching for the best", flag="--sample")
    temperature: float = option(
        1.0, "with --sample: below 1, results are more likely; above 1, more varied", gt=0, flag="--temperature"
    )
    top_k: int = option(0, "with --sample: sample from this many most likely tokens; 0 for all", ge=0, flag="--top-k")
    top_p: float = option(
        1.0,
        "with --sample: sample from the most likely tokens that together have this probability",
        gt=0,
        le=1,
        flag="--top-p",
    )
    seed: int = option(0, "random seed of --sample", ge=0, flag="--seed")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.max_length and self.min_length > self.max_length:
            raise rejected(
                "search", "min_length", f"be at most max_length, which is {self.max_length}", self.min_length
            )
        if not self.sample and self.n_best > self.beams:
            raise rejected("search", "n_best", f"be at most beams, which is {self.beams}", self.n_best)
        if self.sample:
            self.require_effect("beams", "when sampling")
        else:
            for name in ("temperature", "top_k", "top_p", "seed"):
                self.require_effect(name, "in beam search", "sample")

    def limits(self, lengths: Tensor) -> Tensor:
        """Return how many symbols are written at most for sources of these lengths, (B,) int64."""
        limits = ((self.ratio * lengths.double()).long() + self.extra).clamp(min=self.min_length)
        return limits.clamp(max=self.max_length) if self.max_length else limits

    def penalty(self, symbols: Tensor | int) -> Tensor:
        """Return what a log-probability of so many symbols, the end mark included, is divided by."""
        return ((5.0 + torch.as_tensor(symbols, dtype=torch.float64)) / 6.0) ** self.length_penalty


@dataclass(frozen=True)
class Hypothesis:
    """A search result for a source.

    Attributes
    ----------
    numbers : tuple of int
        The symbols, without the end mark.
    score : float
        Log-probability in nats, including the end mark.
    normalized : float
        The score divided by the length penalty, used for ranking.
    """

    numbers: tuple[int, ...]
    score: float
    normalized: float


class Steps(Protocol):
    """The model interface of a search: an encoder–decoder, or a decoder-only model with prompts."""

    @property
    def symbols(self) -> int:
        """The number of symbols N."""

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        """Encode the sources; the result has B rows."""

    def start(self, memory: Any, beams: int) -> Any:
        """Return the initial state for K beams per source, B·K rows."""

    def advance(self, last: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the features (B, K, P) after the symbols ``last`` (B, K), and the new state."""

    def logits(self, rows: Tensor, state: Any) -> Tensor:
        """Return the logits (..., K, N) of features (..., K, P) from this state; the caller may modify them."""


@torch.inference_mode()
def search(
    model: Steps,
    source: Tensor,
    lengths: Tensor,
    options: SearchOptions = SearchOptions(),
    *,
    pool: int | None = None,
    restriction: Restriction | None = None,
) -> list[list[Hypothesis]]:
    """Return the best hypotheses for each source, best first.

    Each step continues all beams of all sources. The K most likely continuations that do not end become the next
    beams; one that ends becomes a hypothesis if it is among the K most likely of all. A source leaves the batch once no
    beam can improve on its worst hypothesis; at its limit, every beam must end. So the result for a source does not
    depend on the others.

    Parameters
    ----------
    model : EncoderDecoder, or an object with the methods of :class:`Steps`
        In evaluation mode.
    source : Tensor (B, S)
    lengths : Tensor (B,)
        Number of real symbols of each source.
    options : SearchOptions
    pool : int, optional
        Number of hypotheses, instead of ``n_best``; may exceed the beam size.
    restriction : Restriction, optional
        Symbols that may be written for some sources only.

    Returns
    -------
    list of list of Hypothesis
        That many for each source, or fewer if the options allow no more.

    Raises
    ------
    ValueError
        If the model returns NaN logits.

    Examples
    --------
    >>> from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
    >>> model = RecurrentEncoderDecoder(RecurrentConfig(sources=30, targets=41, encoder=8, decoder=8)).eval()
    >>> source, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])
    >>> [len(best) for best in search(model, source, lengths, SearchOptions(beams=4, n_best=2))]
    [2, 2]
    """
    hypotheses: list[list[Hypothesis]] = [[] for _ in range(len(source))]
    if not hypotheses:
        return hypotheses
    memory = model.encode(source, lengths)
    width = options.n_best if options.sample else 1  # all beams are equal at first: one is enough
    state = model.start(memory, width)
    front = Beams.first(source, options.limits(lengths), width)
    ended = nothing = Finished.none(front, pool or options.n_best)
    divisor = options.penalty(front.limits + 1)  # the largest
    draws = uniform_draws(source, lengths, front.limits, width, options.seed) if options.sample else None
    for step in range(int(front.limits.max()) + 1):
        rows, state = model.advance(front.tokens[..., -1], memory, state)
        drawn = None if draws is None else draws[front.rows, :, step]
        candidates = _candidates(model, rows, state, front, drawn, options, restriction)
        if not candidates.usual:
            if bool(candidates.score.isnan().any()):
                raise rejected("search", "model", "return logits without NaN", "nan")
            ending = candidates if options.sample else candidates.first(options.beams)
            ended = ended.with_more(front, ending, float(options.penalty(step + 1)))
        before, (front, parent) = front, front.after(candidates, None if options.sample else options.beams)
        # Until a hypothesis is finished, every source continues.
        going = None if candidates.usual and ended is nothing else _unfinished(front, ended, divisor, options)
        if going is None or bool(going.all()):
            if before.score.shape[1] == parent.shape[1] == 1:
                continue
            rows = (_begins(before.score) + parent).flatten()
        else:
            kept, gone = going.nonzero()[:, 0], (~going).nonzero()[:, 0]
            for row, ranked in zip(front.rows[gone].tolist(), ended.select(gone).to_lists()):
                hypotheses[row] = [Hypothesis(*each) for each in ranked]
            if not len(kept):
                break
            front, ended, memory, divisor = front.select(kept), ended.select(kept), memory.select(kept), divisor[kept]
            rows = (_begins(before.score) + parent)[kept].flatten()
        if len(rows) < before.score.numel() or not torch.equal(rows, _numbers(len(rows), rows.device)):
            state = state.select(rows)
    return hypotheses


def _begins(score: Tensor) -> Tensor:
    """Return the first row of each source (B, 1), for scores (B, K) of its rows."""
    return _numbers(score.numel(), score.device)[:: score.shape[1], None]


@lru_cache(maxsize=16)
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _candidates(
    model: Steps,
    rows: Tensor,
    state: Any,
    front: Beams,
    draws: Tensor | None,
    options: SearchOptions,
    restriction: Restriction | None,
) -> Candidates:
    """Return the candidates for features (B, K, P), processing the sources in chunks."""
    some, parts = len(rows), []
    if rows.device.type == "cpu":
        some = max(_AT_ONCE // (rows.shape[1] * model.symbols), 1)
    for first in range(0, len(rows), some):
        kept = slice(first, first + some)
        beams = front if some >= len(rows) else front.select(kept)
        logits, total, maxima = allowed_logits(
            model.logits(rows[kept], state),
            beams,
            min_length=options.min_length,
            no_repeat=options.no_repeat,
            unknown=options.unknown,
            restriction=restriction,
        )
        score = beams.score - total
        if draws is None:
            parts.append(top_candidates(score, logits, 2 * options.beams, maxima))  # at most half of them can end
        else:
            how: Any = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
            parts.append(sample_candidates(score, logits, draws[kept], **how))
    return parts[0] if len(parts) == 1 else Candidates.joined(parts)


def _unfinished(front: Beams, ended: Finished, divisor: Tensor, options: SearchOptions) -> Tensor:
    """Return the sources (B,) for which a beam could still improve the result.

    The divisor (B,) is the length penalty at the limit.
    """
    best = front.score.amax(1)
    if options.sample:
        return best > -torch.inf
    # Log-probabilities only decrease, and the penalty at the limit is the largest.
    hope = best / divisor > ended.rank[:, -1]
    return hope & (ended.rank[:, 0] == -torch.inf) if options.beams == 1 else hope
