"""A recurrent encoder–decoder with additive attention: reads one sequence, writes another.

Dimensions: B batch, S source steps (keys), T target steps (queries), K beams, D embedding, R encoder width for each
direction, E = 2R key and value width, Q decoder width, C attention features, N target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from regard import AuxRequest, attention, masks
from regard._errors import rejected
from regard.masks import Mask
from regard.scores import Additive

#: A recurrent state: hidden and cell, (1, B, Q) each.
State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes of a :class:`RecurrentEncoderDecoder`.

    Attributes
    ----------
    sources, targets : int
        Size of the vocabularies that are read and written, padding and end mark included.
    embedding, encoder, decoder, features : int
        Widths of the embeddings, of the encoder in each direction, of the decoder, and of the additive score.
    dropout : float
        Share of activations zeroed in training, in [0, 1).
    """

    sources: int
    targets: int
    embedding: int = 128
    encoder: int = 128
    decoder: int = 256
    features: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dropout":
                if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < 1:
                    raise rejected("RecurrentConfig", "dropout", "be a number in [0, 1)", repr(value))
            elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 16:
                raise rejected("RecurrentConfig", field.name, "be a whole number from 1 to 65536", repr(value))


@dataclass(frozen=True)
class Memory:
    """What the encoder made of the sources, computed once and attended at every step.

    Attributes
    ----------
    states : Tensor (B, 1, S, E)
        The encoder's states: keys and values of the attention.
    mask : Mask
        Hides the states behind each sequence's end.
    start : (Tensor (1, B, Q), Tensor (1, B, Q))
        The decoder's first state.
    """

    states: Tensor
    mask: Mask
    start: State


class RecurrentEncoderDecoder(nn.Module):
    """Two LSTMs read the source in both directions; a third writes, attending to what they read.

    The score is additive (Bahdanau 2014, arXiv 1409.0473) and the attention comes after the recurrence (Luong 2015,
    arXiv 1508.04025), so that in training the decoder runs over a whole target in one call::

        hₜ = LSTM(yₜ₋₁, hₜ₋₁)     cₜ = Σ α(hₜ, mᵢ) mᵢ     logitsₜ = W tanh(U [hₜ; cₜ])

    Padding never changes a result: the backward LSTM starts at each sequence's own last symbol.

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

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        D, R, Q, C = config.embedding, config.encoder, config.decoder, config.features
        E = 2 * R
        self.source_embedding = nn.Embedding(config.sources, D)
        self.target_embedding = nn.Embedding(config.targets, D)
        self.forward_encoder = nn.LSTM(D, R, batch_first=True)
        self.backward_encoder = nn.LSTM(D, R, batch_first=True)
        self.bridge = nn.Linear(E, Q)
        self.decoder = nn.LSTM(D, Q, batch_first=True)
        self.w_q = nn.Parameter(torch.empty(C, Q))
        self.w_k = nn.Parameter(torch.empty(C, E))
        self.w_v = nn.Parameter(torch.empty(C))
        self.combine = nn.Linear(Q + E, Q)
        self.output = nn.Linear(Q, config.targets)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters: orthogonal recurrences, open forget gates, and an output that knows nothing yet."""
        for name, parameter in self.named_parameters():
            if "weight_hh" in name:
                for gate in parameter.data.chunk(4):
                    nn.init.orthogonal_(gate)
            elif "weight_ih" in name or name in ("w_q", "w_k"):
                nn.init.xavier_uniform_(parameter)
            elif "bias_" in name:
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    nn.init.ones_(parameter.data.chunk(4)[1])
            elif "embedding" in name:
                nn.init.normal_(parameter, std=0.7)
        nn.init.normal_(self.w_v, std=self.config.features**-0.5)
        nn.init.zeros_(self.output.weight)

    def encode(self, source: Tensor, lengths: Tensor) -> Memory:
        """Read the sources.

        Parameters
        ----------
        source : Tensor (B, S)
            Numbers of the symbols; whatever stands behind a sequence's end is ignored.
        lengths : Tensor (B,)
            How many symbols of each sequence are real, at least 1.

        Returns
        -------
        Memory
        """
        embedded = self.dropout(self.source_embedding(source))  # (B, S, D)
        turned = _turn(embedded, lengths)  # (B, S, D)
        onward, _ = self.forward_encoder(embedded)  # (B, S, R)
        backward, _ = self.backward_encoder(turned)  # (B, S, R)
        last = (lengths - 1)[:, None, None].expand(-1, 1, onward.shape[-1])  # (B, 1, R)
        ends = torch.cat([onward.gather(1, last), backward.gather(1, last)], -1)  # (B, 1, E)
        hidden = torch.tanh(self.bridge(ends)).transpose(0, 1).contiguous()  # (1, B, Q)
        states = torch.cat([onward, _turn(backward, lengths)], -1)  # (B, S, E)
        return Memory(self.dropout(states)[:, None], masks.padding(lengths), (hidden, torch.zeros_like(hidden)))

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the logits (B, T, N) of every next symbol, given the symbols before it (teacher forcing).

        Parameters
        ----------
        source : Tensor (B, S)
        lengths : Tensor (B,)
        target : Tensor (B, T)
            The symbols so far, beginning with the start mark.
        """
        memory = self.encode(source, lengths)
        hidden, _ = self.decoder(self.dropout(self.target_embedding(target)), memory.start)  # (B, T, Q)
        return self._read(hidden, memory)

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the attention weights (B, T, S) that :meth:`forward` uses for the same arguments."""
        memory = self.encode(source, lengths)
        hidden, _ = self.decoder(self.dropout(self.target_embedding(target)), memory.start)  # (B, T, Q)
        _, weights = self._attend(hidden, memory, AuxRequest(weights=True))
        assert weights is not None
        return weights

    def step(self, last: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        """Write one symbol more, for K beams of every sequence.

        Parameters
        ----------
        last : Tensor (B, K)
            The symbol each beam wrote last; the start mark at first.
        memory : Memory
        state : State
            Hidden and cell, (1, B·K, Q) each; ``memory.start`` repeated K times at first.

        Returns
        -------
        logits : Tensor (B, K, N)
        state : State
        """
        embedded = self.dropout(self.target_embedding(last))  # (B, K, D)
        hidden, state = self.decoder(embedded.flatten(0, 1)[:, None], state)  # (B·K, 1, Q)
        return self._read(hidden.view(*last.shape, -1), memory), state

    def _read(self, hidden: Tensor, memory: Memory) -> Tensor:
        context, _ = self._attend(hidden, memory)  # (B, T, E)
        combined = torch.tanh(self.combine(torch.cat([self.dropout(hidden), context], -1)))  # (B, T, Q)
        return self.output(self.dropout(combined))  # (B, T, N)

    def _attend(
        self, hidden: Tensor, memory: Memory, request: AuxRequest | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the contexts (B, T, E) of decoder states (B, T, Q), and the weights (B, T, S) if requested."""
        score = Additive(self.w_v, self.w_q, self.w_k)
        query, states = hidden[:, None], memory.states  # (B, 1, T, Q), (B, 1, S, E)
        answer = attention(query, states, states, attn_mask=memory.mask, score=score, return_aux=request)
        context, weights = (answer, None) if isinstance(answer, Tensor) else (answer[0], answer[1].weights)
        return context[:, 0], None if weights is None else weights[:, 0]


def _turn(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, S, C) with the first ``lengths`` steps of each sequence in reverse order, the others in place."""
    steps = torch.arange(rows.shape[1], device=rows.device)
    turned = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)  # (B, S)
    return rows.gather(1, turned[..., None].expand_as(rows))
