"""Beam search, greedy search and sampling with a trained model, for many sources at once.

Dimensions: B sources, S source steps, K beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from regard._utils.errors import rejected
from regard._utils.options import Options, option
from regard_lab.generation.beams import (
    Beams,
    Candidates,
    Finished,
    allowed_logits,
    sample_candidates,
    top_candidates,
    uniform_draws,
)

#: Logits that exist at once on a CPU: each time that some are made, all of the matrix is read that makes them.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class SearchOptions(Options):
    """How to search, or to sample."""

    function: ClassVar[str] = "search"
    beams: int = option(5, "beams of the search; 1 is greedy", least=1, most=1000, flag="--beams")
    n_best: int = option(1, "hypotheses that are wanted, or samples that are drawn", least=1, most=10_000,
                         flag="--n-best", short="Show so many translations, each after its score.")  # fmt: skip
    #: α: what is sought has the greatest log-probability divided by ((5 + n)/6)^α, for n symbols with the end mark
    #: (Wu et al. 2016, arXiv 1609.08144).
    length_penalty: float = option(0.6, "0 favours short translations; 1 long ones", least=0, flag="--length-penalty")
    no_repeat: int = option(0, "write no run of so many tokens twice; 0 allows it", least=0, flag="--no-repeat")
    shortest: int = option(0, "symbols that are written at least", least=0)
    #: For a source of S symbols at most ``ratio · S + extra`` are written, or ``shortest`` where that is more.
    ratio: float = option(2.0, "symbols that are written at most for each of the source", least=0)
    extra: int = option(8, "symbols that are written beyond those", least=0)
    longest: int = option(0, "symbols that are written at most in any case; 0 for no such bound", least=0)
    #: Where texts are wanted it is written, if at all, only where a source word can take its place.
    unknown: bool = option(True, "write the symbol for whatever the vocabulary does not know")
    #: What is drawn for a source is settled by its symbols and the seed: equal sources get equal samples, whatever else
    #: is in the batch.
    sample: bool = option(False, "draw instead of searching", flag="--sample")
    temperature: float = option(1.0, "with --sample: below 1 likelier, above 1 freer", above=0, flag="--temperature")
    top_k: int = option(0, "with --sample: draw from so many; 0 for all", least=0, flag="--top-k")
    top_p: float = option(1.0, "with --sample: draw from what has this probability together", above=0, most=1,
                          flag="--top-p")  # fmt: skip
    seed: int = option(0, "of --sample", least=0, flag="--seed")

    def check(self) -> None:
        """Raise where options contradict each other, or one has no effect."""
        if self.longest and self.shortest > self.longest:
            raise rejected("search", "shortest", f"be at most longest, which is {self.longest}", self.shortest)
        if not self.sample and self.n_best > self.beams:
            raise rejected("search", "n_best", f"be at most beams, which is {self.beams}", self.n_best)
        of_samples = ("temperature", "top_k", "top_p", "seed")
        for name in ("beams",) if self.sample else of_samples:
            unused = getattr(SearchOptions, name)
            if getattr(self, name) != unused:
                where = "where sample is True" if self.sample else "unless sample is True"
                raise rejected("search", name, f"be {unused} {where}", getattr(self, name))

    def limits(self, lengths: Tensor) -> Tensor:
        """Return how many symbols are written at most for sources of these lengths, (B,) int64."""
        limits = ((self.ratio * lengths.double()).long() + self.extra).clamp(min=self.shortest)
        return limits.clamp(max=self.longest) if self.longest else limits

    def penalty(self, symbols: Tensor | int) -> Tensor:
        """Return what a log-probability of so many symbols, the end mark included, is divided by."""
        return ((5.0 + torch.as_tensor(symbols, dtype=torch.float64)) / 6.0) ** self.length_penalty


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that a search has written for a source.

    Attributes
    ----------
    numbers : tuple of int
        The symbols, without the end mark.
    score : float
        Its log-probability in nats, the end mark's included.
    normalized : float
        That divided by the length penalty, which hypotheses are ranked by.
    """

    numbers: tuple[int, ...]
    score: float
    normalized: float


class Steps(Protocol):
    """What a search steps through: an encoder–decoder, or a decoder-only model with its prompts."""

    @property
    def symbols(self) -> int:
        """N, how many symbols there are."""

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        """Read the sources; the result has B rows."""

    def start(self, memory: Any, beams: int) -> Any:
        """Return the first state for K beams of each source, B·K rows."""

    def advance(self, last: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the rows (B, K, P) after the symbols ``last`` (B, K), and the state after them."""

    def logits(self, rows: Tensor, state: Any) -> Tensor:
        """Return the logits (..., K, N), to be changed, of rows (..., K, P) that were made with this state."""


@torch.inference_mode()
def search(
    model: Steps,
    source: Tensor,
    lengths: Tensor,
    options: SearchOptions = SearchOptions(),
    *,
    pool: int | None = None,
) -> list[list[Hypothesis]]:
    """Return the best hypotheses for each source, best first.

    A step continues all beams of all sources at once, and the K likeliest continuations that do not end are the next
    beams; one that ends counts as a hypothesis if it is among the K likeliest of all. A source leaves the batch as soon
    as none of its beams, however it went on, could be better than the worst hypothesis wanted; at its limit, every beam
    must end. So what one source gets does not depend on the others.

    Parameters
    ----------
    model : EncoderDecoder, or what steps like one
        Should be in evaluation mode.
    source : Tensor (B, S)
    lengths : Tensor (B,)
        How many symbols of each source are real.
    options : SearchOptions
    pool : int, optional
        How many hypotheses are wanted, where that is not ``n_best``: there may be more of them than beams.

    Returns
    -------
    list of list of Hypothesis
        So many for each source; fewer where there are no more that the options allow.

    Raises
    ------
    ValueError
        If the model gives logits that are no numbers.

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
    width = options.n_best if options.sample else 1  # beams would be alike at first: one is enough
    state = model.start(memory, width)
    front = Beams.first(source, options.limits(lengths), width)
    ended = Finished.none(front, pool or options.n_best)
    draws = uniform_draws(source, lengths, front.limits, width, options.seed) if options.sample else None
    for step in range(int(front.limits.max()) + 1):
        rows, state = model.advance(front.tokens[..., -1], memory, state)
        drawn = None if draws is None else draws[front.rows, :, step]
        candidates = _candidates(model, rows, state, front, drawn, options)
        if bool(candidates.score.isnan().any()):
            raise rejected("search", "model", "give logits that are numbers", "nan")
        ending = candidates if options.sample else candidates.first(options.beams)
        ended = ended.with_more(front, ending, float(options.penalty(step + 1)))
        before, (front, parent) = front, front.after(candidates, None if options.sample else options.beams)
        going = _unfinished(front, ended, options)
        kept = going.nonzero()[:, 0]
        if len(kept) < len(going):
            gone = (~going).nonzero()[:, 0]
            for row, ranked in zip(front.rows[gone].tolist(), ended.select(gone).to_lists()):
                hypotheses[row] = [Hypothesis(*each) for each in ranked]
            if not len(kept):
                break
            front, ended, memory, parent = front.select(kept), ended.select(kept), memory.select(kept), parent[kept]
        rows = (kept[:, None] * before.score.shape[1] + parent).flatten()
        if len(rows) < before.score.numel() or not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            state = state.select(rows)
    return hypotheses


def _candidates(
    model: Steps, rows: Tensor, state: Any, front: Beams, draws: Tensor | None, options: SearchOptions
) -> Candidates:
    """Return the continuations of beams whose rows (B, K, P) a model has made, of some sources at a time."""
    some, parts = len(rows), []
    if rows.device.type == "cpu":
        some = max(_AT_ONCE // (rows.shape[1] * model.symbols), 1)
    for first in range(0, len(rows), some):
        kept = slice(first, first + some)
        beams = front.select(kept)
        logits, total, maxima = allowed_logits(
            model.logits(rows[kept], state),
            beams,
            shortest=options.shortest,
            no_repeat=options.no_repeat,
            unknown=options.unknown,
        )
        score = beams.score - total
        if draws is None:
            parts.append(top_candidates(score, logits, 2 * options.beams, maxima))  # at most half of them end
        else:
            how: Any = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
            parts.append(sample_candidates(score, logits, draws[kept], **how))
    return parts[0] if len(parts) == 1 else Candidates.joined(parts)


def _unfinished(front: Beams, ended: Finished, options: SearchOptions) -> Tensor:
    """Return for which sources (B,) a beam could still change the answer."""
    best = front.score.amax(1)
    if options.sample:
        return best > -torch.inf
    # Log-probabilities only fall, and the most that they can be divided by is the penalty at the limit.
    hope = best / options.penalty(front.limits + 1) > ended.rank[:, -1]
    return hope & (ended.rank[:, 0] == -torch.inf) if options.beams == 1 else hope
