"""Intra-attention: an LSTM that stores all its states and attends to them at each step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import flag, lengths, probability, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest, TopK
from regard.functional import attention
from regard.nn._base import Layer, parameter, sequences
from regard.nn.heads.scored import without_heads
from regard.scores import Additive


class IntraState(NamedTuple):
    """The tapes of an :class:`IntraAttention`: the states of all steps so far.

    Attributes
    ----------
    hidden, cell : Tensor (B, N, C)
        The hidden and the memory tape, one slot for each step so far.
    summary : Tensor (B, C)
        The last weighted sum of hidden states, h̃.
    real : Tensor (B, N), bool
        Which slots are steps of the sequence rather than padding.
    """

    hidden: Tensor
    cell: Tensor
    summary: Tensor
    real: Tensor


@mechanism(
    formula="LSTM step from [h̃_t; c̃_t] = Σ_{i<t} softmax_i(vᵀ tanh(W_h h_i + W_x x_t + W_s h̃_{t−1})) [h_i; c_i]",
    sources=("cheng2016",),
    learned="v (A), W_h, W_s (A, C), W_x (A, E), W (4 C, C + E), b (4 C)",
    cost="O(T·(C + A)·(C + E) + T²·(A + C))",
    reads="additive",
)
class IntraAttention(Layer):
    """The LSTMN: an LSTM whose steps attend to all earlier ones (Cheng 2016, arXiv 1601.06733).

    Each step t appends its h_t and c_t to two tapes. It uses a weighted sum over them in place of the previous state::

        a_i = vᵀ tanh(W_h h_i + W_x x_t + W_s h̃_{t−1})                       for i < t
        [h̃_t; c̃_t] = Σ_i softmax(a)_i [h_i; c_i]                              zeros at the first step
        i, f, o, g = σ, σ, σ, tanh of the quarters of W [h̃_t; x_t] + b
        c_t = f ⊙ c̃_t + i ⊙ g                    h_t = o ⊙ tanh(c_t)

    Steps depend on each other, so they run one after another; the reads are :func:`regard.attention`.

    Parameters
    ----------
    input_size : int
        Width E of inputs.
    hidden_size : int
        Width C of states.
    attention_size : int, optional
        Features A of the score; defaults to ``hidden_size``.
    dropout : float, default 0.0
        Probability of dropping a weight of the attention, in training.
    bias : bool, default True
        Whether the gates have a bias b.
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import IntraAttention
    >>> layer, x = IntraAttention(4, 6), torch.randn(2, 5, 4)
    >>> hidden, state = layer(x)
    >>> hidden.shape, state.cell.shape
    (torch.Size([2, 5, 6]), torch.Size([2, 5, 6]))
    >>> first, state = layer(x[:, :3])
    >>> rest, state = layer(x[:, 3:], state)
    >>> torch.allclose(torch.cat([first, rest], 1), hidden, atol=1e-6)
    True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        attention_size: int | None = None,
        dropout: float = 0.0,
        *,
        bias: bool = True,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = size(self, "input_size", input_size), size(self, "hidden_size", hidden_size)
        E, C = self.input_size, self.hidden_size
        self.attention_size = A = C if attention_size is None else size(self, "attention_size", attention_size)
        self.dropout, self.engine = probability(self, "dropout", dropout), engine
        flag(self, "bias", bias)
        where = {"device": device, "dtype": dtype}
        self.w_v, self.w_h = parameter(A, **where), parameter(A, C, **where)
        self.w_x, self.w_s = parameter(A, E, **where), parameter(A, C, **where)
        self.weight = parameter(4 * C, C + E, **where)
        self.bias = parameter(4 * C, **where) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the attention's matrices by Glorot's rule, v in ±1/√A, the gates in ±1/√C as ``nn.LSTM`` does."""
        for matrix in (self.w_h, self.w_x, self.w_s):
            nn.init.xavier_uniform_(matrix)
        score, gate = 1 / math.sqrt(self.attention_size), 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.w_v, -score, score)
        nn.init.uniform_(self.weight, -gate, gate)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -gate, gate)

    def forward(
        self,
        x: Tensor,
        state: IntraState | None = None,
        valid_lens: Tensor | None = None,
        *,
        return_aux: AuxRequest | None = None,
    ) -> tuple[Tensor, IntraState] | tuple[Tensor, IntraState, Aux]:
        """Run over a sequence.

        Parameters
        ----------
        x : Tensor (B, T, E)
        state : IntraState, optional
            The tapes so far; empty at first.
        valid_lens : Tensor (B,) of int, optional
            Number of valid steps per sequence. Hidden states of later steps are 0, and later calls with the returned
            state ignore them.
        return_aux : AuxRequest, optional
            Auxiliary outputs of the attention to return.

        Returns
        -------
        hidden : Tensor (B, T, C)
        state : IntraState
            The tapes, with this sequence's T steps appended.
        aux : Aux
            Only if requested; one row per step, and N + T keys for a state with N steps: weights (B, T, N + T), which
            are 0 for the step itself and later ones.
        """
        sequences(self, "x", x, self.input_size)
        real = self._real(x, valid_lens)
        masked = valid_lens is not None or state is not None
        x = torch.where(real.unsqueeze(-1), x, 0.0)
        tape = self._start(x) if state is None else self._checked(state, x)
        queries, gated = x @ self.w_x.mT, F.linear(x, self.weight[:, self.hidden_size :], self.bias)
        keys, steps = tape.hidden @ self.w_h.mT, []
        for t in range(x.shape[1]):
            now = real[:, t, None]  # (B, 1)
            query = queries[:, t] + tape.summary @ self.w_s.mT  # (B, A)
            mask = masks.key_padding(tape.real & now) if masked else None
            summary, memory, aux = self._read(query, keys, tape, mask, return_aux)
            i, f, o, g = (gated[:, t] + summary @ self.weight[:, : self.hidden_size].mT).chunk(4, -1)
            cell = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            hidden, cell = (torch.where(now, each, 0.0).unsqueeze(1) for each in (hidden, cell))
            keys = torch.cat([keys, hidden @ self.w_h.mT], 1)
            tape = IntraState(
                torch.cat([tape.hidden, hidden], 1),
                torch.cat([tape.cell, cell], 1),
                torch.where(now, summary, tape.summary),
                torch.cat([tape.real, now], 1),
            )
            steps.append(aux)
        output = tape.hidden[:, tape.hidden.shape[1] - x.shape[1] :]
        if return_aux is None:
            return output, tape
        return output, tape, _stacked([aux for aux in steps if aux is not None], tape.hidden.shape[:2], x, return_aux)

    def _read(
        self, query: Tensor, keys: Tensor, tape: IntraState, mask: Any, request: AuxRequest | None
    ) -> tuple[Tensor, Tensor, Aux | None]:
        """Return h̃ and c̃ (B, C) of one step, zeros for empty tapes, and its auxiliary outputs."""
        answer = attention(
            query[:, None, None],
            keys.unsqueeze(1),
            torch.cat([tape.hidden, tape.cell], -1).unsqueeze(1),
            mask,
            self.dropout if self.training else 0.0,
            score=Additive(self.w_v),
            engine=self.engine,
            return_aux=request,
        )
        output, aux = (answer, None) if isinstance(answer, Tensor) else (answer[0], without_heads(answer[1]))
        summary, memory = output[:, 0, 0].chunk(2, -1)
        return summary, memory, aux

    def _start(self, x: Tensor) -> IntraState:
        """Return empty tapes."""
        empty = x.new_zeros(x.shape[0], 0, self.hidden_size)
        return IntraState(empty, empty, x.new_zeros(x.shape[0], self.hidden_size), empty[..., 0].bool())

    def _real(self, x: Tensor, valid_lens: Any) -> Tensor:
        """Check the lengths and return which steps (B, T) are valid."""
        if valid_lens is None:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        valid_lens = lengths(self, "valid_lens", valid_lens, *x.shape[:2])
        return torch.arange(x.shape[1], device=x.device) < valid_lens.unsqueeze(1)

    def _checked(self, state: Any, x: Tensor) -> IntraState:
        """Check the state of an earlier call, and return it."""
        if not isinstance(state, IntraState):
            raise rejected("IntraAttention", "state", "be an IntraState or None", described(state), TypeError)
        B, N, C = x.shape[0], state.hidden.shape[1], self.hidden_size
        wanted = ((B, N, C), (B, N, C), (B, C), (B, N))
        came = tuple(tuple(tensor.shape) for tensor in state)
        if came != wanted:
            raise rejected("IntraAttention", "state", f"have tensors of shapes {wanted}", came)
        return state

    def extra_repr(self) -> str:
        """Return the sizes and the settings that differ from the defaults."""
        settings = f"input_size={self.input_size}, hidden_size={self.hidden_size}, attention_size={self.attention_size}"
        settings += f", dropout={self.dropout}" if self.dropout else ""
        return settings if self.bias is not None else f"{settings}, bias=False"


def _stacked(steps: list[Aux], slots: torch.Size, x: Tensor, request: AuxRequest) -> Aux:
    """Stack the auxiliary outputs of all steps as rows, over all slots of the tape."""
    B, N = slots

    def rows_of(parts: list[Tensor], fill: float, width: int) -> Tensor:
        padded = [F.pad(part, (0, width - part.shape[-1]), value=fill) for part in parts]
        return torch.cat(padded, 1) if padded else x.new_full((B, 0, width), fill)

    found: dict[str, Any] = {}
    for name, fill in (("weights", 0.0), ("scores", -torch.inf), ("received", 0.0)):
        if getattr(request, name):
            parts = [getattr(step, name) for step in steps]
            found[name] = rows_of([p.unsqueeze(1) for p in parts] if name == "received" else parts, fill, N)
    if request.received:
        found["received"] = found["received"].sum(1)
    for name in ("lse", "max", "entropy"):
        if getattr(request, name):
            found[name] = rows_of([getattr(step, name).unsqueeze(-1) for step in steps], 0.0, 1).squeeze(-1)
    if request.topk:
        tops = [step.topk for step in steps if step.topk is not None]
        k = request.topk
        weights, indices = rows_of([t.weights for t in tops], 0.0, k), rows_of([t.indices for t in tops], -1, k)
        found["topk"] = TopK(weights, indices.long())
    return Aux(**found)
