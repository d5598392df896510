"""The recurrent encoder–decoder with attention, its config and presets included."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard._utils.torch_private import has_bfloat16_cells
from regard._utils.tracing import autocast_is_active, autocast_suspended
from regard.nn import HardAttention
from regard.nn._base import zero_padding
from regard.nn.positions.encodings import wide
from regard_lab._options import option
from regard_lab.models.attending import (
    DEEPEST,
    DRAWS,
    PLAIN,
    SCOPES,
    SCORES,
    TIES,
    Attending,
    Config,
    Output,
    check_probability,
    find_map,
    scheduled_sampling,
    share,
    size,
)
from regard_lab.models.base import PAD, EncoderDecoder

# The config of a recurrent encoder–decoder, and presets by name -------------------------------------------------------


CELL_NAMES = ("lstm", "gru")
WIRINGS = ("after", "before", "encoder")


@dataclass(frozen=True)
class RecurrentDecoderConfig(Config):
    """What a :class:`~regard_lab.models.recurrent.RecurrentDecoder` is built from, whatever it attends to."""

    function: ClassVar[str] = "RecurrentDecoderConfig"
    embedding: int = size(128, "width of the embeddings")
    decoder: int = size(256, "width of the decoder")
    features: int = size(128, "width of the attention")
    dropout: float = share(0.0, "share zeroed of embeddings, between layers, of states, and of features")
    cell: str = option("lstm", "of recurrent layers", choices=CELL_NAMES)
    decoder_layers: int = size(1, "layers of the decoder", DEEPEST)
    #: With "none", the decoder sees only a summary of the source (Sutskever 2014, arXiv 1409.3215).
    attention: str = option("additive", "the score", choices=(*SCORES, "none"))
    projections: bool = option(False, "project queries, keys and values to features before a score that learns none")
    #: The window is around the query's own position, or a predicted one (Luong 2015).
    scope: str = option("global", "attend to all states or to a window", choices=SCOPES)
    window: int = size(10, "D, states on each side of a local window's centre")
    #: A sample in training, the maximum in evaluation (Xu 2015, arXiv 1502.03044). Gradients are straight-through, or
    #: come from :meth:`~regard_lab.models.recurrent.RecurrentDecoder.surrogate`.
    hard: str = option("none", "read one state", choices=DRAWS)
    #: What attends: the decoder's state after its step (Luong 2015); the one before, whose context then enters the step
    #: (Bahdanau 2014); or the encoder's states, to each other, one row for each step of the decoder.
    wiring: str = option("after", "which state attends", choices=WIRINGS)
    input_feeding: bool = option(False, "give the features of a step to the next one (Luong 2015)")
    max_length: int = size(64, "the longest source that attention 'location' can read")
    #: Press & Wolf 2017, arXiv 1608.05859. With "all", source and target share a vocabulary and the embedding, and
    #: inputs are multiplied by √embedding (Vaswani 2017).
    tied: str = option("none", "whether the target embedding also scores the vocabulary", choices=TIES)

    def check(self) -> None:
        """Raise where fields contradict each other."""
        self.check_tied(self.tied)
        if self.projections and self.attention not in PLAIN:
            scores = ", ".join(map(repr, PLAIN))
            raise self.refused("attention", f"be one of {scores} where projections is True", repr(self.attention))
        if self.hard != "none" and self.scope != "global":
            raise self.refused("scope", f"be 'global' where hard is {self.hard!r}", repr(self.scope))
        if self.input_feeding and self.wiring != "after":
            raise self.refused("wiring", "be 'after' where input_feeding is True", repr(self.wiring))
        plain = {"scope": "global", "hard": "none", "wiring": "after", "input_feeding": False}
        for name, value in plain.items() if self.attention == "none" else ():
            if getattr(self, name) != value:
                raise self.refused(name, f"be {value!r} where attention is 'none'", repr(getattr(self, name)))


@dataclass(frozen=True)
class RecurrentConfig(RecurrentDecoderConfig):
    """Everything that a :class:`~regard_lab.models.RecurrentEncoderDecoder` is built from."""

    function: ClassVar[str] = "RecurrentConfig"
    encoder: int = size(128, "width of the encoder in each direction")
    encoder_layers: int = size(1, "layers of the encoder", DEEPEST)
    bidirectional: bool = option(True, "read the source in both directions")

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS


#: Presets by name. Those named after papers have the papers' sizes, but not their other features, such as maxout.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"embedding": 128, "encoder": 128, "decoder": 256, "features": 128},
    "base": {"embedding": 256, "encoder": 256, "decoder": 512, "features": 256, "dropout": 0.3},
    "sutskever2014": {"embedding": 1000, "encoder": 1000, "decoder": 1000, "encoder_layers": 4, "decoder_layers": 4}
    | {"bidirectional": False, "attention": "none"},
    "bahdanau2014": {"embedding": 620, "encoder": 1000, "decoder": 1000, "features": 1000, "cell": "gru"}
    | {"wiring": "before"},
    "luong2015": {"embedding": 1000, "encoder": 1000, "decoder": 1000, "encoder_layers": 4, "decoder_layers": 4}
    | {"bidirectional": False, "attention": "general", "scope": "local-p", "window": 10, "input_feeding": True}
    | {"dropout": 0.2},
}


# Recurrent layers, as torch has them ----------------------------------------------------------------------------------


class LSTM(nn.LSTM):
    """torch's, which oneDNN refuses to run in bfloat16 on a CPU that has no instructions for it: there in float32."""

    def forward(self, rows: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        native = rows.device.type != "cpu" or not autocast_is_active("cpu") or has_bfloat16_cells()
        with nullcontext() if native else autocast_suspended("cpu"):
            if not native:
                rows, state = rows.float(), None if state is None else (state[0].float(), state[1].float())
            made: tuple[Tensor, tuple[Tensor, Tensor]] = super().forward(rows, state)
        return made


CELLS = {"lstm": LSTM, "gru": nn.GRU}


def reset_cells(cells: nn.Module, kind: str) -> None:
    """Draw a recurrent layer's parameters: orthogonal recurrences, and open forget gates."""
    gates = 4 if kind == "lstm" else 3
    for name, parameter in cells.named_parameters():
        if "weight_hh" in name:
            for gate in parameter.data.chunk(gates):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
            if gates == 4 and "bias_ih" in name:
                nn.init.ones_(parameter.data.chunk(4)[1])


def pick_rows(sequences: Tensor, steps: Tensor) -> Tensor:
    """Return the rows (B, L, C) of sequences (B, S, C) at these steps (B, L)."""
    return sequences.gather(1, steps[..., None].expand(-1, -1, sequences.shape[-1]))


# The state of a recurrent decoder, and the memory that it attends to --------------------------------------------------
# Dimensions: R rows: sequences, or their beams, B sources, S rows of a source, V width of values, Q decoder width, P
# width of the features that logits are made of, G width of what enters every step, Y decoder layers.


@dataclass(frozen=True)
class State:
    """Where the decoder stands, for R rows: sequences, or their beams.

    Attributes
    ----------
    hidden : Tensor (Y, R, Q)
    cell : Tensor (Y, R, Q), or None for GRUs
    fed : Tensor (R, P), or None without input feeding
        The features of the last step.
    time : int
        How many steps have been made.
    """

    hidden: Tensor
    cell: Tensor | None
    fed: Tensor | None
    time: int = 0

    def select(self, rows: Tensor) -> State:
        """Return these rows in this order."""
        cell, fed = self.cell, self.fed
        return State(
            self.hidden.index_select(1, rows),
            None if cell is None else cell.index_select(1, rows),
            None if fed is None else fed.index_select(0, rows),
            self.time,
        )


@dataclass(frozen=True)
class Memory:
    """What was read of B sources, computed once and attended at every step.

    Attributes
    ----------
    keys, values : Tensor (B, S, ·), (B, S, V)
        The rows that were read, as attention compares and reads them; in wiring "encoder" both are what these rows read
        of each other.
    lengths : Tensor (B,)
        How many are real.
    start : State
        The decoder's first state, B rows.
    glimpse : Tensor (B, G), or None
        What enters every step.
    weights : Tensor (B, S, S), or None
        Attention weights between the states, if requested.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    start: State
    glimpse: Tensor | None = None
    weights: Tensor | None = None

    def select(self, rows: Tensor) -> Memory:
        """Return these rows in this order."""
        glimpse, weights = (
            None if part is None else part.index_select(0, rows) for part in (self.glimpse, self.weights)
        )
        keys, values, lengths = (part.index_select(0, rows) for part in (self.keys, self.values, self.lengths))
        return Memory(keys, values, lengths, self.start.select(rows), glimpse, weights)


# A recurrent decoder with attention in every classic wiring: writes a sequence for whatever rows it attends to --------
# Dimensions: B sequences, S rows that are attended to (keys), T target steps, K beams, L queries (T or K), D embedding,
# E width of these rows, V width of values, Q decoder width, P width of the features that logits are made of, G width of
# what enters every step, C attention features, Y decoder layers, N target vocabulary.


#: With at least this share of padding, sequences are processed in this many groups of similar lengths.
_WASTE, _ALIKE = 0.2, 4


class RecurrentDecoder(EncoderDecoder):
    """Recurrent layers write, attending to rows of whatever was read.

    Wirings, with rows m, states h of the decoder, and embeddings y of what was written::

        after    hₜ = RNN(yₜ₋₁, hₜ₋₁)          cₜ = Σᵢ α(hₜ, mᵢ) mᵢ            Luong 2015, arXiv 1508.04025
        before   cₜ = Σᵢ α(hₜ₋₁, mᵢ) mᵢ        hₜ = RNN([yₜ₋₁; cₜ], hₜ₋₁)      Bahdanau 2014, arXiv 1409.0473
        encoder  cₜ = Σᵢ α(mₜ, mᵢ) mᵢ          hₜ = RNN([yₜ₋₁; cₜ], hₜ₋₁)

        fₜ = tanh(U [hₜ; cₜ])                  logitsₜ = W fₜ + b

    With input feeding the RNN reads [yₜ₋₁; fₜ₋₁]; without attention there is no c. With a gate, c is multiplied by
    β = σ(w·h) of the state h that attends (Xu 2015, arXiv 1502.03044). In training, "after" without input feeding,
    "encoder" and no attention run over a whole target in one call.

    Parameters
    ----------
    config : RecurrentDecoderConfig
    width : int
        E.
    glimpse : int, default 0
        G: width of a vector of each source that enters every step.
    gate : bool, default False
        Whether there is β.
    entropy : float, default 0
        Weight of the entropy of draws in the surrogate of hard attention.
    """

    config: RecurrentDecoderConfig

    def __init__(
        self, config: RecurrentDecoderConfig, width: int, *, glimpse: int = 0, gate: bool = False, entropy: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        D, Q, Y = config.embedding, config.decoder, config.decoder_layers
        E, P = width, D if config.tied != "none" else Q
        self.target_embedding = nn.Embedding(config.targets, D)
        self.bridge = nn.Linear(E, Y * Q)
        self.attending: Attending | None = None
        if config.attention != "none":
            sizes = (E if config.wiring == "encoder" else Q, E, config.features)
            options: Any = {name: getattr(config, name) for name in ("projections", "scope", "window", "hard")}
            self.attending = Attending(
                config.attention, sizes, max_length=config.max_length, entropy=entropy, **options
            )
        V = 0 if self.attending is None else self.attending.width
        enters = P if config.input_feeding else V if config.wiring != "after" else 0
        between = config.dropout if Y > 1 else 0.0
        self.decoder = CELLS[config.cell](D + enters + glimpse, Q, Y, batch_first=True, dropout=between)
        self.gate = nn.Linear(Q, 1) if gate else None
        self.combine = nn.Linear(Q + V, P)
        self.output = Output(P, config.targets, config.tied != "none")
        self.dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """Draw new parameters: orthogonal recurrences, open forget gates, and an output that knows nothing yet."""
        reset_cells(self.decoder, self.config.cell)
        for linear in (self.bridge, self.combine, self.gate):
            if linear is not None:
                linear.reset_parameters()
        if self.attending is not None:
            self.attending.reset_parameters()
        std = 0.7 if self.config.tied == "none" else self.config.embedding**-0.5
        nn.init.normal_(self.target_embedding.weight, std=std)
        self.output.reset_parameters()

    def encode(self, source: Tensor, lengths: Tensor) -> Memory:
        """Read the sources, as :meth:`EncoderDecoder.encode` says.

        Raises
        ------
        ValueError
            If attention is "location" and a source is longer than it knows.
        """
        return self._encode(source, lengths)

    @abstractmethod
    def _encode(self, source: Tensor, lengths: Tensor, weights: bool = False) -> Memory:
        """Read the sources; with ``weights`` the memory has those of its rows to each other, if they attend."""

    def _remember(
        self, states: Tensor, summary: Tensor, lengths: Tensor, glimpse: Tensor | None = None, weights: bool = False
    ) -> Memory:
        """Return the memory of rows (B, S, E), with the first state that a summary (B, E) of them makes."""
        hidden = torch.tanh(self.bridge(summary)).unflatten(-1, (self.config.decoder_layers, -1))  # (B, Y, Q)
        hidden = hidden.transpose(0, 1).contiguous()  # (Y, B, Q)
        cell = hidden.new_zeros(hidden.shape, dtype=wide(hidden.dtype)) if self.config.cell == "lstm" else None
        fed = hidden.new_zeros(len(states), self.combine.out_features) if self.config.input_feeding else None
        start, states, attention = State(hidden, cell, fed), self.dropout(states), None
        if self.attending is None:
            return Memory(states, states, lengths, start, glimpse)
        keys, values = self.attending.prepare(states)  # (B, S, ·), (B, S, V)
        if self.config.wiring == "encoder":
            steps = torch.arange(states.shape[1], device=states.device)
            keys, attention = self.attending(states, keys, values, lengths, steps, weights)  # (B, S, V), (B, S, S)
            values = keys
        return Memory(keys, values, lengths, start, glimpse, attention)

    @property
    def maps(self) -> tuple[str, ...]:
        return () if self.attending is None else ("attention",)

    @property
    def projection(self) -> tuple[Tensor, Tensor]:
        return self.output.projection(self.target_embedding)

    def features(self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0) -> Tensor:
        return self._whole(source, lengths, target, teacher_forcing)[0]

    def features_and_attention(
        self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float = 1.0, *, name: str
    ) -> tuple[Tensor, Tensor]:
        find_map(self, name)
        features, weights = self._whole(source, lengths, target, teacher_forcing, weights=True)
        assert weights is not None
        return features, weights

    def _whole(
        self, source: Tensor, lengths: Tensor, target: Tensor, teacher_forcing: float, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        share = check_probability(self, teacher_forcing)
        if self.attending is not None and isinstance(self.attending.layer, HardAttention):
            self.attending.layer.forget()  # samples of earlier passes without a surrogate
        if self.config.wiring == "encoder" and len(target) > len(source):  # its samples are per source
            several = len(target) // len(source)
            source, lengths = source.repeat_interleave(several, 0), lengths.repeat_interleave(several)
        return self._features(self._encode(source, lengths, weights), target, share, weights)

    def start(self, memory: Memory, beams: int) -> State:
        rows = torch.arange(len(memory.lengths), device=memory.lengths.device)
        return memory.start.select(rows.repeat_interleave(beams))

    def advance(self, last: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        features, state, _ = self._decode(last, memory, state)
        return features, state

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        memory = self._encode(source, lengths, weights=True)
        if self.attending is None:
            return memory.values.new_empty(len(target), 0, target.shape[1], memory.values.shape[1])
        _, weights = self._features(memory, target, weights=True)
        assert weights is not None
        return weights[:, None]

    def posterior(self, source: Tensor, lengths: Tensor, target: Tensor, written: Tensor, name: str | None) -> Tensor:
        """Return α(t, s) p(yₜ | hₜ, mₛ), normalized over s: how likely each state alone makes what was written."""
        if self.attending is None or self.config.wiring == "encoder":
            return super().posterior(source, lengths, target, written, name)
        memory = self._encode(source, lengths)
        state, posteriors = memory.start, []
        real = torch.arange(memory.values.shape[1], device=source.device) < memory.lengths[:, None]  # (B, S)
        for t in range(target.shape[1]):
            _, state, attention = self._decode(target[:, t : t + 1], memory, state, weights=True)
            assert attention is not None
            hidden = state.hidden[-1][:, None].expand(-1, memory.values.shape[1], -1)  # (B, S, Q)
            features = torch.tanh(self.combine(torch.cat([hidden, memory.values], -1)))  # (B, S, P)
            logits = self.logits(features)  # (B, S, N)
            likely = logits.gather(-1, written[:, t, None, None].expand(*logits.shape[:2], 1)) - logits.logsumexp(
                -1, True
            )
            scores = attention.squeeze(1).log() + likely.squeeze(-1)
            scores = scores.masked_fill(~real, -torch.inf)
            some = (scores > -torch.inf).any(-1, keepdim=True)  # a kernel may weigh no state at all
            posteriors.append(torch.where(some, scores.masked_fill(~some, 0.0).softmax(-1), 0.0))
        return torch.stack(posteriors, 1)

    @property
    def saturates(self) -> bool:
        return True  # features are tanhs

    @property
    def stochastic(self) -> bool:
        return self.config.hard == "reinforce"

    def surrogate(self, log_likelihood: Tensor, real: Tensor | None = None) -> Tensor:
        """Return what to add to the loss; the draws since the last call are let go.

        Raises
        ------
        ValueError
            If the config's ``hard`` is not "reinforce".
        """
        if self.attending is None or not self.stochastic:
            who = f"{type(self).__name__}.surrogate"
            raise rejected(who, "config.hard", "be 'reinforce'", repr(self.config.hard))
        # In wiring "encoder", one sample serves all steps.
        summed = self.config.wiring == "encoder" and log_likelihood.dim() == 2
        reward = log_likelihood.sum(1) if summed else log_likelihood
        assert isinstance(self.attending.layer, HardAttention)
        return self.attending.layer.surrogate(reward, None if summed else real)

    def _features(
        self, memory: Memory, target: Tensor, share: float = 1.0, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the features (B, T, P) of every step, and the weights (B, T, S) if requested."""
        whole = share == 1 and self.config.wiring != "before" and not self.config.input_feeding
        memory = self._repeated(memory, len(target), whole)
        if whole:
            features, _, attention = self._decode(target, memory, memory.start, whole=True, weights=weights)
            return features, attention
        state, last, steps, maps = memory.start, target[:, :1], [], []
        for t in range(1, target.shape[1] + 1):
            features, state, attention = self._decode(last, memory, state, weights=weights)  # (B, 1, P), …, (B, 1, S)
            steps.append(features)
            maps += [] if attention is None else [attention]
            last = target[:, t : t + 1]  # (B, 1); none after the last step
            if share < 1 and last.numel():
                last = scheduled_sampling(last, self.logits(features.detach()), share)
        return torch.cat(steps, 1), torch.cat(maps, 1) if maps else None

    def _repeated(self, memory: Memory, count: int, whole: bool) -> Memory:
        """Return a memory for so many sequences, where each source has several: those of a source stand together."""
        sources = len(memory.lengths)
        if count == sources:
            return memory
        rows = torch.arange(sources, device=memory.lengths.device).repeat_interleave(count // sources)
        # The targets of one source are then further queries to the same memory.
        if whole and self.config.wiring == "after" and self.config.hard != "reinforce":
            glimpse = None if memory.glimpse is None else memory.glimpse.index_select(0, rows)
            return replace(memory, start=memory.start.select(rows), glimpse=glimpse)
        return memory.select(rows)

    def _target_inputs(self, symbols: Tensor) -> Tensor:
        """Return the vectors (…, D) of symbols; one matrix for all is small, as scores want it and inputs do not."""
        rows: Tensor = self.target_embedding(symbols)
        return rows * self.config.embedding**0.5 if self.config.tied == "all" else rows

    def _decode(
        self, symbols: Tensor, memory: Memory, state: State, *, whole: bool = False, weights: bool = False
    ) -> tuple[Tensor, State, Tensor | None]:
        """Decode symbols (B, L): L steps of each sequence if ``whole``, else one step of each of its L beams.

        Returns features (B, L, P), the new state, and the weights (B, L, S) if requested. With ``whole``, the state is
        returned unchanged.
        """
        (B, L), context, attention = symbols.shape, None, None
        where = torch.arange(L, device=symbols.device) if whole else symbols.new_full((L,), state.time)  # (L,)
        rows = self.dropout(self._target_inputs(symbols))  # (B, L, D)
        if self.config.wiring == "before":
            context, attention = self._attend(state.hidden[-1].view(B, L, -1), memory, where, weights)  # (B, L, V)
        elif self.config.wiring == "encoder":
            where = torch.minimum(where, memory.lengths[:, None] - 1)  # (B, L)
            context = pick_rows(memory.values, where)
            attention = None if memory.weights is None else pick_rows(memory.weights, where)
        entering = context if state.fed is None else state.fed.view(B, L, -1)
        glimpse = None if memory.glimpse is None else memory.glimpse[:, None].expand(-1, L, -1)  # (B, L, G)
        parts = [each for each in (rows, entering, glimpse) if each is not None]
        rows = torch.cat(parts, -1) if len(parts) > 1 else rows  # (B, L, D + V or P + G)
        if whole:
            hidden, last, cell = self._recur(rows, state, self._steps_read(symbols)), state.hidden, state.cell
        else:
            hidden, last, cell = self._advance(rows.flatten(0, 1), state)
            hidden = hidden.view(B, L, -1)  # (B, L, Q)
        if self.config.wiring == "after" and self.attending is not None:
            context, attention = self._attend(hidden, memory, where, weights)
        parts = [self.dropout(hidden)] if context is None else [self.dropout(hidden), context]
        features = self.dropout(torch.tanh(self.combine(torch.cat(parts, -1))))  # (B, L, P)
        fed = None if state.fed is None else features.flatten(0, 1)
        return features, State(last, cell, fed, state.time + (L if whole else 1)), attention

    def _attend(self, query: Tensor, memory: Memory, where: Tensor, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return what queries (B, L, Q) read, (B, L, V), and the weights (B, L, S) if requested."""
        assert self.attending is not None
        (B, L, Q), sources = query.shape, len(memory.lengths)
        asked = query.reshape(sources, -1, Q)  # several sequences of a source are further queries
        context, attention = self.attending(
            asked, memory.keys, memory.values, memory.lengths, where.repeat(B // sources), weights
        )
        context = context.view(B, L, -1)
        if self.gate is not None:
            context = torch.sigmoid(self.gate(query)) * context
        return context, None if attention is None else attention.view(B, L, -1)

    def _steps_read(self, symbols: Tensor) -> Tensor:
        """Return how many of the symbols (B, L) to process; in training, trailing padding is skipped."""
        B, L = symbols.shape
        if not self.training:
            return symbols.new_full((B,), L)
        places = torch.arange(1, L + 1, device=symbols.device)
        return (places * (symbols != PAD)).amax(1).clamp_min(1)

    def _recur(self, rows: Tensor, state: State, lengths: Tensor) -> Tensor:
        """Return the last layer's hidden states (B, L, Q) for rows (B, L, ·), of which so many each are read."""
        L, before = rows.shape[1], [part for part in (state.hidden, state.cell) if part is not None]

        def run(rows: Tensor, before: list[Tensor]) -> Tensor:
            made: Tensor = self.decoder(rows, before[0] if len(before) == 1 else tuple(before))[0]
            return made

        if rows.device.type != "cpu" or int(lengths.sum()) >= (1 - _WASTE) * len(rows) * L:
            return run(rows, before)
        order, parts = lengths.argsort(), []
        for some in order.chunk(_ALIKE):  # of similar lengths, to skip most of the padding
            most = int(lengths[some].max())
            made = run(rows[some, :most], [part[:, some].contiguous() for part in before])
            parts.append(F.pad(made, (0, 0, 0, L - most)))
        return torch.cat(parts)[order.argsort()]

    def _advance(self, rows: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the last layer's hidden state (R, Q) one step after, and all layers' hidden and cell (Y, R, Q)."""
        made: list[tuple[Tensor, ...]] = []
        states = zip(*(part.unbind() for part in (state.hidden, state.cell) if part is not None))
        for number, (weights, before) in enumerate(zip(self.decoder.all_weights, states)):
            rows = self.dropout(rows) if number else rows  # (R, ·)
            lstm = len(before) == 2
            made.append(torch.lstm_cell(rows, before, *weights) if lstm else (torch.gru_cell(rows, *before, *weights),))
            rows = made[-1][0]
        hidden, *cells = (torch.stack(parts) for parts in zip(*made))
        return rows, hidden, cells[0] if cells else None


# A recurrent encoder–decoder with attention in every classic wiring: reads one sequence, writes another ---------------
# Dimensions: B batch, S source steps (keys), D embedding, R encoder width for each direction, E width of its states
# (2R, or R in one direction).


__all__ = ["PRESETS", "Memory", "RecurrentConfig", "RecurrentEncoderDecoder", "State"]


class RecurrentEncoderDecoder(RecurrentDecoder):
    """Recurrent layers read the source; others write, attending to what was read, as in :class:`RecurrentDecoder`.

    Padding never changes a result: the backward layers start at each sequence's own last symbol. In wiring "encoder",
    steps after the source's last are given its last row.

    Parameters
    ----------
    config : RecurrentConfig

    Examples
    --------
    >>> model = RecurrentEncoderDecoder(RecurrentConfig(sources=30, targets=41))
    >>> source, lengths = torch.tensor([[2, 3, 4], [5, 6, 0]]), torch.tensor([3, 2])
    >>> model(source, lengths, target=torch.tensor([[1, 7, 8, 9], [1, 7, 0, 0]])).shape
    torch.Size([2, 4, 41])
    """

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig) -> None:
        D, R = config.embedding, config.encoder
        E, cell = R * (1 + config.bidirectional), CELLS[config.cell]
        super().__init__(config, E)
        self.source_embedding = None if config.tied == "all" else nn.Embedding(config.sources, D)
        inputs = [D, *[E] * (config.encoder_layers - 1)]
        self.onward = nn.ModuleList([cell(width, R, batch_first=True) for width in inputs])
        self.backward = nn.ModuleList([cell(width, R, batch_first=True) for width in inputs * config.bidirectional])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, those of the encoder as those of the decoder."""
        for rnn in (*self.onward, *self.backward):
            reset_cells(rnn, self.config.cell)
        if self.source_embedding is not None:
            nn.init.normal_(self.source_embedding.weight, std=0.7)
        super().reset_parameters()

    def _encode(self, source: Tensor, lengths: Tensor, weights: bool = False) -> Memory:
        if self.config.attention == "location" and source.shape[1] > self.config.max_length:
            expected = f"have at most {self.config.max_length} symbols, the config's max_length"
            raise rejected(type(self).__name__, "source", expected, source.shape[1])
        last = lengths[:, None] - 1  # (B, 1)
        steps = torch.arange(source.shape[1], device=source.device)
        turned = torch.where(steps <= last, last - steps, steps)  # (B, S), real steps in reverse order
        # Padding may hold NaN, which would return through the gradients of the recurrences.
        read = self._target_inputs if self.source_embedding is None else self.source_embedding
        states = zero_padding(read(source), lengths)  # (B, S, D)
        for number, onward in enumerate(self.onward):
            states = self.dropout(states)
            made, _ = onward(states)  # (B, S, R)
            ends = pick_rows(made, last)  # (B, 1, R)
            if self.config.bidirectional:
                read, _ = self.backward[number](pick_rows(states, turned))  # (B, S, R)
                ends = torch.cat([ends, pick_rows(read, last)], -1)  # (B, 1, E)
                made = torch.cat([made, pick_rows(read, turned)], -1)  # (B, S, E)
            states = made
        return self._remember(states, ends.squeeze(1), lengths, weights=weights)
