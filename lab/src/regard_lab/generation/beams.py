"""The tensors of a search: beams, finished hypotheses, and the candidates that continue them.

Dimensions: B sources, K beams, C candidates, N target vocabulary, t symbols so far with the start mark, P hypotheses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.torch_private import is_eager
from regard.engines.fused import decoding
from regard_lab.models.base import END, PAD
from regard_lab.text.vocabulary import UNKNOWN

#: Logits are looked through in runs of so many: of most runs, the greatest is all that must be known.
_RUN = 64


@dataclass(frozen=True)
class Candidates:
    """Continuations of beams.

    Attributes
    ----------
    score : Tensor (B, C)
        Log-probability of the beam so continued.
    parent, symbol : Tensor (B, C)
        Which beam, with which symbol.
    """

    score: Tensor
    parent: Tensor
    symbol: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """Return the continuations of several groups of sources."""
        return cls(*(torch.cat([getattr(each, name) for each in parts]) for name in ("score", "parent", "symbol")))

    def first(self, count: int) -> Candidates:
        return Candidates(self.score[:, :count], self.parent[:, :count], self.symbol[:, :count])

    def ends(self) -> Tensor:
        """Return which ones (B, C) end."""
        return (self.symbol == END) & (self.score > -torch.inf)


@dataclass(frozen=True)
class Beams:
    """The beams that go on. A beam of score −inf is none.

    Attributes
    ----------
    rows : Tensor (B,)
        Which sources these are.
    limits : Tensor (B,)
        How many symbols each gets at most.
    score : Tensor (B, K)
    tokens : Tensor (B, K, t)
    """

    rows: Tensor
    limits: Tensor
    score: Tensor
    tokens: Tensor

    @classmethod
    def first(cls, source: Tensor, limits: Tensor, beams: int) -> Beams:
        B = len(source)
        zeros = torch.zeros(B, beams, device=source.device)
        return cls(torch.arange(B, device=source.device), limits, zeros, limits.new_full((B, beams, 1), END))

    def select(self, kept: Tensor | slice) -> Beams:
        return Beams(self.rows[kept], self.limits[kept], self.score[kept], self.tokens[kept])

    def after(self, candidates: Candidates, beams: int | None) -> tuple[Beams, Tensor]:
        """Return the beams that the best candidates make that do not end, and their parents (B, K).

        Without a number of beams, every candidate continues the beam that stands where it does.
        """
        score = candidates.score.masked_fill(candidates.symbol == END, -torch.inf)
        parent, symbol = candidates.parent, candidates.symbol
        if beams is not None:
            score, best = score.topk(min(beams, score.shape[1]))
            parent, symbol = parent.gather(1, best), symbol.gather(1, best)
        tokens = torch.cat([_rows(self.tokens, parent), symbol[..., None]], -1)
        return Beams(self.rows, self.limits, score, tokens), parent


@dataclass(frozen=True)
class Finished:
    """The best hypotheses so far, best first. One of rank −inf is none.

    Attributes
    ----------
    rank, score : Tensor (B, P)
        Log-probability with and without the length penalty.
    length : Tensor (B, P)
        How many of the tokens are its own, without the end mark.
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
        """Return the best of these and of the candidates that end."""
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
        """Return numbers, score and rank of the hypotheses of each source."""
        columns = (part.tolist() for part in (self.rank, self.score, self.length, self.tokens))
        return [
            [(tuple(numbers[:length]), score, rank) for rank, score, length, numbers in zip(*each) if rank > -torch.inf]
            for each in zip(*columns)
        ]


def allowed_logits(
    logits: Tensor, front: Beams, *, shortest: int, no_repeat: int, unknown: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (B, K, N) with −inf for each symbol that may not come next, and log Σ exp of all (B, K).

    The difference is a symbol's log-probability. With them come the maxima (B, K, C) of runs of those logits, as
    :func:`top_candidates` takes them. Logits of float32 or float64 are changed where they are.
    """
    written = front.tokens.shape[-1] - 1
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total, maxima = _sums_and_maxima(logits)
    logits[..., PAD] = -torch.inf
    if not unknown:
        logits[..., UNKNOWN : UNKNOWN + 1] = -torch.inf
    if written < shortest:
        logits[..., END] = -torch.inf
    if no_repeat and written >= no_repeat:
        runs = front.tokens[..., 1:].unfold(-1, no_repeat, 1)  # (B, K, ·, no_repeat)
        latest = front.tokens[..., None, written + 2 - no_repeat :]
        again = (runs[..., :-1] == latest).all(-1)
        logits.scatter_(-1, torch.where(again, runs[..., -1], PAD), -torch.inf)
    over = front.limits <= written
    if bool(over.any()):
        only = torch.full_like(logits[0, 0], -torch.inf)
        only[END] = 0.0
        logits[over] += only
    if no_repeat or bool(over.any()):
        maxima = _maxima(logits)
    else:
        maxima[..., 0] = logits[..., :_RUN].amax(-1)
    return logits, total, maxima


def _sums_and_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Σ exp (B, K) and the maxima (B, K, C) of runs of logits (B, K, N)."""
    if logits.device.type != "cpu" or logits.dtype not in decoding.DTYPES or not is_eager():
        return logits.logsumexp(-1), _maxima(logits)
    total, maxima = decoding.log_sums(logits.flatten(0, 1), _RUN)
    return total.view(logits.shape[:2]), maxima.view(*logits.shape[:2], -1)


def _maxima(logits: Tensor) -> Tensor:
    """Return the maxima (..., C) of runs of logits (..., N)."""
    return F.pad(logits, (0, -logits.shape[-1] % _RUN), value=-torch.inf).unflatten(-1, (-1, _RUN)).amax(-1)


def top_candidates(score: Tensor, gains: Tensor, count: int, maxima: Tensor) -> Candidates:
    """Return the continuations with the greatest sums of a beam's score (B, K) and a gain (B, K, N), best first.

    They lie in the runs with the greatest maxima (B, K, C), so that few runs are ranked.
    """
    N, runs = gains.shape[-1], maxima.shape[-1]
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
    """Return one continuation of each beam, drawn by numbers (B, K) that are uniform in [0, 1).

    Its score is the sum of the beam's (B, K) and the gain (B, K, N), whose exponentials the probabilities are
    proportional to.
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
    """Return numbers (B, draws, t) uniform in [0, 1) that each source's own symbols and the seed settle."""
    longest = int(limits.max()) + 1
    uniform = torch.zeros(len(source), draws, longest, dtype=torch.float64)
    for row, length, limit, made in zip(source.tolist(), lengths.tolist(), limits.tolist(), uniform):
        digest = hashlib.blake2b(repr((seed, row[:length])).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        made[:, : limit + 1] = torch.rand(draws, limit + 1, dtype=torch.float64, generator=generator)
    return uniform.to(source.device)


def _rows(tokens: Tensor, which: Tensor) -> Tensor:
    """Return the rows (B, C, t) of tokens (B, K, t) that numbers (B, C) name."""
    return tokens.gather(1, which[..., None].expand(-1, -1, tokens.shape[-1]))
