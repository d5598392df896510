"""Speculative decoding: a drafter proposes several tokens, and the model checks them in one pass.

Sampling keeps the model's distribution, and greedy decoding gives identical output (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318).

Dimensions: K proposed tokens, N vocabulary size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard._utils.constraints import size
from regard._utils.errors import described, rejected
from regard.nn import KVCache
from regard_lab.generation.continuous_batching import evaluating
from regard_lab.generation.requests import Decoder, Request, StopRules, Stops, Token, checked_prompt, positions_left
from regard_lab.generation.sampling import Draws, GenerationOptions, SamplingOptions, drawn, probabilities
from regard_lab.models import DecoderLM


def acceptance(wanted: Tensor, proposed: Tensor) -> Tensor:
    """Return the acceptance probability of a proposed token, ``min(1, p / q)``.

    Parameters
    ----------
    wanted, proposed : Tensor (..., N)
        The probabilities p of the model and q of the drafter.
    """
    return torch.where(proposed > 0, wanted / proposed, 1.0).clamp(max=1)


def residual(wanted: Tensor, proposed: Tensor) -> Tensor:
    """Return the distribution to sample from after a rejection, ``max(0, p − q)`` up to a factor.

    Token x then has probability ``q(x) min(1, p(x)/q(x)) + (1 − Σ min(p, q)) · residual(x) = p(x)``.

    Examples
    --------
    >>> residual(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25]))
    tensor([0.2500, 0.0000, 0.0000])
    """
    rest = (wanted - proposed).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)  # rounding can leave a sum of 0


def verified(wanted: Tensor, proposed: Tensor, tokens: Sequence[int], draws: Draws) -> list[int]:
    """Return the accepted tokens and one more token.

    Parameters
    ----------
    wanted : Tensor (K + 1, N)
        The model's probabilities before the first proposed token and after each.
    proposed : Tensor (K, N)
        The drafter's probabilities.
    tokens : sequence of int (K,)
    draws : Draws
    """
    for i, token in enumerate(tokens):
        if draws.next() >= float(acceptance(wanted[i, token], proposed[i, token])):
            return [*tokens[:i], int(drawn(residual(wanted[i], proposed[i]), _number(draws)))]
    return [*tokens, int(drawn(wanted[-1], _number(draws)))]


def _check_rewinds(model: DecoderLM) -> None:
    """Raise unless the model's cache can drop rejected tokens."""
    if model.config.recurrent:
        expected = "not use linear attention, whose cache cannot drop rejected tokens"
        got = f"layers of {', '.join(dict.fromkeys(model.config.kinds))}"
        raise rejected("Speculator", "model", expected, got)


class Drafter(ABC):
    """Proposes the next tokens of a sequence."""

    def start(self, model: DecoderLM) -> None:  # noqa: B027
        """Start a new sequence; raise if the drafter does not fit the model."""

    @abstractmethod
    def propose(
        self, tokens: Sequence[int], count: int, sampling: SamplingOptions, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """Return at most ``count`` tokens, and their sampling probabilities (K, N); None if deterministic."""


class ModelDrafter(Drafter):
    """Proposes tokens of a smaller model with the same vocabulary.

    Parameters
    ----------
    model : DecoderLM
    """

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self._caches: list[KVCache] = []

    def start(self, model: DecoderLM) -> None:
        if self.model.config.vocabulary != model.config.vocabulary:
            expected = f"have the model's vocabulary size of {model.config.vocabulary:,} tokens"
            raise rejected("Speculator", "drafter", expected, f"{self.model.config.vocabulary:,}")
        _check_rewinds(self.model)
        self._caches = self.model.caches()

    def propose(
        self, tokens: Sequence[int], count: int, sampling: SamplingOptions, draws: Draws
    ) -> tuple[list[int], Tensor | None]:
        """Return tokens sampled from the smaller model."""
        count = positions_left(self.model.config, tokens, count)
        found: list[int] = []
        weights: list[Tensor] = []
        device = self.model.embedding.weight.device
        with evaluating(self.model):
            while len(found) < count:
                known = [*tokens, *found]
                for cache in self._caches:  # drop rejected tokens
                    cache.truncate(min(len(cache), len(known) - 1))
                new = torch.tensor([known[len(self._caches[0]) :]], device=device)
                logits = self.model.logits(self.model.features(new, caches=self._caches)[0, -1])
                weights.append(probabilities(logits, sampling, known))
                found.append(int(drawn(weights[-1], _number(draws))))
        return found, torch.stack(weights) if weights else None


class NGramDrafter(Drafter):
    """Proposes the continuation of an earlier occurrence of the last tokens (prompt lookup; Saxena 2023).

    Parameters
    ----------
    longest : int, default 3
        Length of the n-gram to look up first; shorter ones follow.
    shortest : int, default 1
        Length of the shortest n-gram.

    Examples
    --------
    >>> NGramDrafter().propose([5, 6, 7, 8, 5, 6], 2, SamplingOptions(), Draws(0, []))
    ([7, 8], None)
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest, self.shortest = size(self, "longest", longest), size(self, "shortest", shortest)

    def propose(
        self,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingOptions,  # noqa: ARG002
        draws: Draws,  # noqa: ARG002
    ) -> tuple[list[int], Tensor | None]:
        """Return the tokens after the latest earlier occurrence of the last tokens."""
        tokens = list(tokens)
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            last = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start] == last[0] and tokens[start : start + length] == last:
                    return tokens[start + length : start + length + count], None
        return [], None


class Speculator:
    """Generates text with a model that checks the proposals of a drafter.

    Parameters
    ----------
    model : DecoderLM
    drafter : Drafter or DecoderLM
    lookahead : int, default 4
        Number of tokens K to propose at a time.
    decoder : callable, optional
        Return the text of each token: called with a prompt, it returns an incremental decoder, as
        ``tokenizer.decode_stream`` does. Stop texts need it.

    Attributes
    ----------
    proposed, accepted : int
        Number of proposed and accepted tokens so far.

    Examples
    --------
    >>> from regard_lab.models import DecoderLM, DecoderLMConfig
    >>> model = DecoderLM(DecoderLMConfig(50, width=16, layers=2))
    >>> speculator = Speculator(model, NGramDrafter())
    >>> from regard_lab.generation.generation import generate
    >>> [token.token for token in speculator.stream([3, 1, 4])] == generate(model, [[3, 1, 4]])[0].numbers
    True
    """

    def __init__(
        self, model: DecoderLM, drafter: Drafter | DecoderLM, lookahead: int = 4, *, decoder: Decoder | None = None
    ) -> None:
        drafter = ModelDrafter(drafter) if isinstance(drafter, DecoderLM) else drafter
        if not isinstance(model, DecoderLM):
            raise rejected("Speculator", "model", "be a DecoderLM", described(model), TypeError)
        if not isinstance(drafter, Drafter):
            raise rejected("Speculator", "drafter", "be a Drafter or a DecoderLM", described(drafter), TypeError)
        _check_rewinds(model)
        drafter.start(model)
        self.model, self.drafter, self.lookahead = model, drafter, size(self, "lookahead", lookahead)
        self.decoder, self.proposed, self.accepted = decoder, 0, 0

    def stream(
        self, prompt: Sequence[int], options: GenerationOptions | None = None, stop: Stops = (), *, sample: int = 0
    ) -> Iterator[Token]:
        """Yield tokens as they are generated.

        Parameters
        ----------
        prompt : sequence of int
        options : GenerationOptions, optional
        stop : sequence of int, str or sequences of int
            Tokens, texts or sequences of tokens at which generation stops; they are not returned.
        sample : int, default 0
            Index of the sample: different values draw different tokens.
        """
        options = GenerationOptions() if options is None else options
        tokens = checked_prompt(prompt, self.model.config)
        most = positions_left(self.model.config, tokens, options.max_new_tokens)
        request = Request(0, tokens, options, StopRules.of(stop, self.decoder), sample, most)
        return self._written(request)

    def _written(self, request: Request) -> Iterator[Token]:
        caches = self.model.caches(len(request.prompt) + request.most - 1 or None)
        self.drafter.start(self.model)
        while True:
            for token in self._step(request, caches):
                for shown in request.take(Token(0, token)):
                    yield shown
                    if shown.end:
                        return

    @torch.inference_mode()
    def _step(self, request: Request, caches: list[KVCache]) -> list[int]:
        """Return the tokens of one model pass."""
        tokens, sampling = [*request.prompt, *request.written], request.options.sampling
        left = request.most - len(request.written)
        drafts, proposed = self.drafter.propose(tokens, min(self.lookahead, left - 1), sampling, request.draws)
        new = [*tokens[len(caches[0]) :], *drafts]
        with evaluating(self.model):
            features = self.model.features(
                torch.tensor([new], device=self.model.embedding.weight.device), caches=caches
            )
            logits = self.model.logits(features[0, -1 - len(drafts) :])  # (K + 1, N)
        if bool(logits.isnan().any()):
            raise rejected("generate", "model", "return logits without NaN", "nan")
        wanted = _probabilities(logits, sampling, tokens, drafts)
        if proposed is None:
            proposed = torch.zeros_like(wanted[:-1])
            proposed[range(len(drafts)), drafts] = 1
        taken = verified(wanted, proposed, drafts, request.draws)
        self.proposed, self.accepted = self.proposed + len(drafts), self.accepted + len(taken) - 1
        for cache in caches:
            cache.truncate(len(tokens) + len(taken) - 1)
        return taken


def _probabilities(logits: Tensor, sampling: SamplingOptions, tokens: list[int], drafts: list[int]) -> Tensor:
    """Return the model's probabilities (K + 1, N), with the repetition penalty for the tokens before each."""
    if sampling.repetition_penalty == 1:
        return probabilities(logits, sampling)
    return torch.stack([probabilities(row, sampling, [*tokens, *drafts[:i]]) for i, row in enumerate(logits.unbind(0))])


def _number(draws: Draws) -> Tensor:
    return torch.tensor(draws.next(), dtype=torch.float64)
