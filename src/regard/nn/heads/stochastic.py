"""Hard attention: a query reads one key, sampled in training and the best one in evaluation."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard._utils.constraints import Number, OneOf, TensorOf, probability, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import FIELDS, Aux, AuxRequest
from regard.functional import attention
from regard.masks import MaskLike
from regard.nn._base import Layer, attention_inputs, combined_mask, resolve_part
from regard.nn.heads.scored import (
    AdditiveAttention,
    ConcatAttention,
    DotProductAttention,
    GeneralAttention,
    ScoredAttention,
    without_heads,
)
from regard.normalizers import Argmax, Gumbel, Normalizer, Sampled, Softmax

#: The auxiliary outputs needed to record a draw.
_DRAW = AuxRequest(weights=True, scores=True)


#: Names of scores.
ScorerName = Literal["additive", "concat", "dot", "general"]

Estimator = Literal["reinforce", "gumbel"]


def scorer(layer: object, kind: str, sizes: tuple[int, int, int], **where: Any) -> ScoredAttention:
    """Return the layer for a score; ``sizes`` are those of queries, keys and hidden features."""
    query_size, key_size, hidden_size = sizes
    if kind == "additive":
        return AdditiveAttention(query_size, key_size, hidden_size, **where)
    if kind == "concat":
        return ConcatAttention(query_size, key_size, hidden_size, **where)
    if kind == "general":
        return GeneralAttention(query_size, key_size, **where)
    if query_size != key_size:
        raise rejected(type(layer).__name__, "key_size", f"be query_size {query_size} for score 'dot'", key_size)
    return DotProductAttention(scale=1.0)


@mechanism(
    formula="v_a with a ~ softmax(score(q, K)) in training, a = argmax in evaluation",
    sources=("xu2015", "williams1992", "jang2017"),
    learned="those of the score",
    cost="O(L·S·(E + V))",
)
class HardAttention(Layer):
    """Hard attention: each query reads the value of one key (Xu 2015, arXiv 1502.03044).

    In training the key is sampled, ``a ~ softmax(s)``; in evaluation it is the best, ``a = argmax s``. A draw has no
    gradient to the scores, so add :meth:`surrogate` to the loss (REINFORCE, Williams 1992)::

        −mean_b Σ_l [ (R − baseline) log p(a_l) + entropy · H(p_l) ]

    The expectation of its gradient is that of ``−E[R]``. With ``estimator="gumbel"`` the draw has the gradient of a
    softmax instead, which is biased but needs no surrogate (Jang 2016, arXiv 1611.01144; ICLR 2017).

    Parameters
    ----------
    query_size : int
        Width E of queries.
    key_size : int, optional
        Width of keys; defaults to ``query_size``.
    hidden_size : int, optional
        Features C of an additive or concat score; defaults to ``query_size``.
    dropout : float, default 0.0
        Probability of dropping a draw, in training.
    score : {"additive", "concat", "dot", "general"}, default "additive"
        The score; "dot" is not scaled.
    estimator : {"reinforce", "gumbel"}, default "reinforce"
        Gradient estimator for the scores.
    temperature : float, default 1.0
        Temperature of the straight-through Gumbel gradient.
    momentum : float, default 0.9
        Momentum of the baseline, a moving average of rewards that starts as a plain mean.
    entropy : float, default 0.0
        Weight of the entropy (in nats) in the surrogate; positive values encourage exploration.
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters and buffers.

    Attributes
    ----------
    baseline : Tensor ()
        The moving average of rewards. The ``state_dict`` holds it and ``rewards``, their number.

    Notes
    -----
    In training, ``forward`` keeps its draws and their graph until :meth:`surrogate` or :meth:`forget` is called; a
    decoder may call the layer many times in between. Draws are not copied or pickled with the layer.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import HardAttention
    >>> _ = torch.manual_seed(0)
    >>> layer = HardAttention(4, 6)
    >>> query, key = torch.randn(2, 3, 4), torch.randn(2, 5, 6)
    >>> read = layer(query, key)
    >>> bool((read[0, 0] == key[0]).all(-1).any())
    True
    >>> layer.surrogate(reward=torch.tensor([1.0, 0.0])).backward()
    >>> bool(layer.scorer.w_q.grad.any()), float(layer.baseline)
    (True, 0.5)
    """

    baseline: Tensor
    rewards: Tensor

    def __init__(
        self,
        query_size: int,
        key_size: int | None = None,
        hidden_size: int | None = None,
        dropout: float = 0.0,
        *,
        score: ScorerName = "additive",
        estimator: Estimator = "reinforce",
        temperature: float = 1.0,
        momentum: float = 0.9,
        entropy: float = 0.0,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        given = (("query_size", query_size), ("key_size", key_size), ("hidden_size", hidden_size))
        query_size, key_size, hidden_size = (
            size(self, name, query_size if value is None else value) for name, value in given
        )
        self.dropout, self.momentum = probability(self, "dropout", dropout), probability(self, "momentum", momentum)
        self.estimator = OneOf(get_args(Estimator))(self, "estimator", estimator)
        Number(ge=0)(self, "entropy", entropy)
        self.temperature, self.entropy, self.engine = Gumbel(temperature).temperature, float(entropy), engine
        kind = OneOf(get_args(ScorerName))(self, "score", score)
        self.scorer = scorer(self, kind, (query_size, key_size, hidden_size), device=device, dtype=dtype)
        self.register_buffer("baseline", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("rewards", torch.zeros((), device=device, dtype=torch.long))
        self._draws: list[tuple[Tensor, Tensor, Tensor]] = []

    def reset_parameters(self) -> None:
        """Re-initialize the score's parameters, and clear rewards and draws."""
        self.scorer.reset_parameters()
        nn.init.zeros_(self.baseline)
        nn.init.zeros_(self.rewards)
        self.forget()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: MaskLike | None = None,
        is_causal: bool = False,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the value of one key for each query.

        Parameters
        ----------
        query : Tensor (B, L, E)
        key : Tensor (B, S, Ek), optional
            Defaults to ``query``.
        value : Tensor (B, S, V), optional
            Defaults to ``key``.
        valid_lens : Tensor (B,) or (B, L) of int, optional
            Number of valid keys per sequence, or per query. A query with no visible keys reads zeros and does not enter
            the surrogate: use 0 for padded queries.
        attn_mask : Tensor, Mask or callable, optional
            See :func:`regard.attention`; a tensor (L, S), (B, L, S) or (B, 1, L, S), True where visible.
        is_causal : bool, default False
            Also hide keys after the query.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return. The weights are one-hot.

        Returns
        -------
        output : Tensor (B, L, V)
        aux : Aux
            Only if requested; its fields have no head dimension.
        """
        q, k, v = attention_inputs(self, query, key, value, valid_lens)
        kept = self.training and self.estimator == "reinforce" and torch.is_grad_enabled()
        answer = attention(
            q,
            k,
            v,
            combined_mask(self, valid_lens, attn_mask),
            self.dropout if self.training else 0.0,
            is_causal,
            self.scorer.scale,
            score=resolve_part(self.scorer.score()),
            normalizer=self._normalizer(),
            engine=self.engine,
            return_aux=_with_draw(return_aux) if kept else return_aux,
        )
        if isinstance(answer, Tensor):
            return answer.squeeze(1)
        output, aux = answer[0].squeeze(1), without_heads(answer[1])
        if kept and aux.scores is not None and aux.weights is not None:
            self._record(aux.scores, aux.weights)
        return output if return_aux is None else (output, _only(aux, return_aux))

    def surrogate(self, reward: Tensor, real: Tensor | None = None) -> Tensor:
        """Return a loss with the gradient of the negative expected reward, and clear the draws.

        Add it to the task's loss, which provides the gradient to the values. The reward updates the baseline after this
        call, which keeps the gradient unbiased.

        Parameters
        ----------
        reward : Tensor (B,) or (B, N), float
            Reward of each sequence, or of each of its N choices: all queries of all calls of ``forward`` since the last
            surrogate, in order. Usually the log-likelihood. It is detached.
        real : Tensor (B, N) of bool, optional
            Which choices count; all by default. Exclude those of padding.

        Returns
        -------
        Tensor ()

        Raises
        ------
        RuntimeError
            If there are no draws since the last call.
        TypeError, ValueError
            If the reward has the wrong type or shape.
        """
        who = "HardAttention.surrogate"
        if not self._draws:
            raise RuntimeError(
                f"{who}: there are no draws (training={self.training}, estimator={self.estimator!r}); "
                "call the layer first, in training mode, with gradients enabled and estimator='reinforce'."
            )
        log_p, entropy, drawn = (torch.cat(each, 1) for each in zip(*self._draws))
        B, N = log_p.shape
        reward = TensorOf((B,), (B, N))(who, "reward", reward)
        if real is not None:
            if real.dtype != torch.bool or real.shape != (B, N):
                raise rejected(who, "real", f"be a bool tensor ({B}, {N})", described(real))
            drawn = drawn & real
        self.forget()
        reward = reward.detach().to(log_p).reshape(B, -1).expand(B, N)
        advantage = torch.where(drawn, reward - self.baseline, 0.0)
        self._update_baseline(reward, drawn)
        return -(advantage * log_p + self.entropy * torch.where(drawn, entropy, 0.0)).sum(1).mean()

    def forget(self) -> None:
        """Clear the draws kept for :meth:`surrogate`."""
        self._draws = []

    @torch.no_grad()
    def _update_baseline(self, reward: Tensor, drawn: Tensor) -> None:
        """Move the baseline towards the mean reward of the draws."""
        mean = torch.where(drawn, reward, 0.0).sum() / drawn.sum().clamp(min=1)
        self.rewards += 1
        share = self.rewards.to(mean).reciprocal().clamp(min=1 - self.momentum)
        self.baseline += (share * (mean - self.baseline)).to(self.baseline)

    def _record(self, scores: Tensor, weights: Tensor) -> None:
        """Record the log-probability (B, L) and entropy (B, L) of a draw, and which queries have one."""
        drawn = (weights > 0).any(-1)
        visible = scores > -torch.inf
        finite = torch.where(visible, scores, 0.0)
        shares = Softmax().weights(scores)
        lse = torch.logsumexp(torch.where(drawn.unsqueeze(-1), scores, 0.0), -1)
        entropy = torch.where(drawn, lse - (shares * finite).sum(-1), 0.0)  # −Σ p log p without log 0
        self._draws.append((Sampled.log_probability(scores, weights), entropy, drawn))

    def _normalizer(self) -> Normalizer:
        if not self.training:
            return Argmax()
        return Sampled() if self.estimator == "reinforce" else Gumbel(self.temperature)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": []}  # non-leaf tensors can be neither copied nor pickled

    def extra_repr(self) -> str:
        """Return the settings, without the score's."""
        settings = [f"estimator={self.estimator!r}"]
        settings += [f"temperature={self.temperature}"] if self.estimator == "gumbel" else [f"momentum={self.momentum}"]
        settings += [f"entropy={self.entropy}"] if self.entropy else []
        return ", ".join([*settings, *([f"dropout={self.dropout}"] if self.dropout else [])])


def _with_draw(request: AuxRequest | None) -> AuxRequest:
    """Add the fields needed to record a draw to a request."""
    if request is None:
        return _DRAW
    fields: dict[str, Any] = {name: getattr(request, name) for name in FIELDS}
    return AuxRequest(**{**fields, "weights": True, "scores": True})


def _only(aux: Aux, request: AuxRequest) -> Aux:
    """Return only the requested fields."""
    return Aux(**{name: getattr(aux, name) if getattr(request, name) else None for name in FIELDS})
