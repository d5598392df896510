"""External memories: content addressing, and the base of recurrent networks with a memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from regard import masks, scores
from regard._utils.constraints import OneOf, floats, lengths, size
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.engines.aux import AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, draw_linear
from regard.normalizers import Softmax

_COSINE, _SOFTMAX = scores.Cosine(), Softmax()


def weigh(numbers: Tensor) -> Tensor:
    """Return the softmax over the last axis."""
    return _SOFTMAX.weights(numbers)


def _directions(key: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize keys and memory rows to length 1; rows that are too small for a finite gradient become 0."""
    least = torch.finfo(memory.dtype).tiny ** 0.5
    large = memory.detach().abs().amax(-1, keepdim=True) >= least
    return _COSINE.project(key, torch.where(large, memory, 0))


def similar(key: Tensor, memory: Tensor, strength: Tensor) -> Tensor:
    """Return :func:`content_weights` without checks."""
    return weigh(strength.unsqueeze(-1) * _COSINE.compare(*_directions(key, memory)))


def content_weights(key: Tensor, memory: Tensor, strength: Tensor) -> Tensor:
    """Return ``softmax(β cos(key, memory rows))``: the weights of content addressing.

    A row of zeros has cosine 0 with every key and gradient 0. Rows whose entries are all below the square root of the
    dtype's smallest normal number (1e-19 in float32) count as zeros, as their gradient, 1 / length, would overflow.

    Parameters
    ----------
    key : Tensor (B, H, E)
        The key of each head.
    memory : Tensor (B, N, E)
    strength : Tensor (B, H)
        The sharpness β > 0.

    Returns
    -------
    Tensor (B, H, N)
        Weights ≥ 0 that sum to 1.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape.

    References
    ----------
    Graves, Wayne, Danihelka 2014, arXiv 1410.5401.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.addressing import content_weights
    >>> memory = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]]])
    >>> content_weights(torch.tensor([[[0.0, 3.0]]]), memory, torch.tensor([[2.0]]))
    tensor([[[0.1065, 0.1065, 0.7870]]])
    """
    B, _, E = floats("content_weights", "memory", memory, "B", "N", "E").shape
    H = floats("content_weights", "key", key, B, "H", E).shape[1]
    return similar(key, memory, floats("content_weights", "strength", strength, B, H))


class MemoryHead(Layer):
    """Base of memory heads: a linear map of a control vector gives the parameters of each head.

    Parameters
    ----------
    input_size : int
        Width C of the control vector.
    width : int
        Width E of the memory.
    heads : int
    more : tuple of int
        Widths of parameters in addition to the key (E) and its strength (1).
    """

    def __init__(self, input_size: int, width: int, heads: int, more: tuple[int, ...], device: Any, dtype: Any) -> None:
        super().__init__()
        self.input_size, self.width = size(self, "input_size", input_size), size(self, "width", width)
        self.heads = size(self, "heads", heads)
        self.parts = [self.width, 1, *more]
        self.emit = nn.Linear(self.input_size, self.heads * sum(self.parts), device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize the projection by Glorot's rule, and biases to 0."""
        draw_linear(self.emit)

    def _check(self, control: Tensor, memory: Tensor) -> tuple[int, int]:
        """Check shapes; return B and N."""
        B, N, _ = floats(self, "memory", memory, "B", "N", self.width).shape
        floats(self, "control", control, B, self.input_size)
        return B, N

    def _emitted(self, control: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters (B, H, ·) of each head from control vectors (B, C), in the memory's dtype."""
        return self.emit(control).to(memory.dtype).unflatten(-1, (self.heads, -1)).split(self.parts, -1)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"input_size={self.input_size}, width={self.width}, heads={self.heads}"


@mechanism(
    formula="softmax(β cos(W_k c, M_i)) M, β = 1 + softplus(w_βᵀ c)",
    sources=("graves2014", "graves2016"),
    learned="W_k (H·E, C), w_β (H, C), biases",
    cost="O(H·(C·E + N·E))",
)
class ContentAddressing(MemoryHead):
    """Content addressing of a memory, with keys and sharpness from a control vector.

    ``w = softmax(β cos(k, M_i))`` and ``r = Σ_i w_i M_i``, with ``k = W_k c + b`` and ``β = 1 + softplus(·)``
    (Graves 2014, arXiv 1410.5401, and Graves 2016). A row of zeros has cosine 0 with every key.

    Parameters
    ----------
    input_size : int
        Width C of the control vector.
    width : int
        Width E of the memory.
    heads : int, default 1
        Number of keys H.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.addressing import ContentAddressing
    >>> reads, weights = ContentAddressing(8, 4, heads=2)(torch.randn(3, 8), torch.randn(3, 10, 4))
    >>> reads.shape, weights.shape
    (torch.Size([3, 2, 4]), torch.Size([3, 2, 10]))
    """

    def __init__(self, input_size: int, width: int, heads: int = 1, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(input_size, width, heads, (), device, dtype)

    def forward(self, control: Tensor, memory: Tensor, valid_lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the values read and the read weights.

        Parameters
        ----------
        control : Tensor (B, C)
        memory : Tensor (B, N, E)
        valid_lens : Tensor (B,) of int, optional
            Number of valid rows per memory; later rows are ignored.

        Returns
        -------
        reads : Tensor (B, H, E)
        weights : Tensor (B, H, N)
        """
        B, N = self._check(control, memory)
        mask = None
        if valid_lens is not None:
            mask = masks.padding(lengths(self, "valid_lens", valid_lens, B))
            real = torch.arange(N, device=memory.device) < valid_lens.unsqueeze(-1)
            memory = torch.where(real.unsqueeze(-1), memory, 0)
        key, strength = self._emitted(control, memory)
        with autocast_suspended(memory.device.type):
            query, rows = _directions(key, memory)
            query = query * (1 + softplus(strength))
            q, k, v = (each.unsqueeze(1) for each in (query, rows, memory))
            # All weights are needed, so an engine that avoids materializing them saves nothing.
            request = AuxRequest(weights=True)
            reads, aux = attention(q, k, v, mask, scale=1.0, score="dot", engine="reference", return_aux=request)
        assert aux.weights is not None
        return reads.squeeze(1), aux.weights.squeeze(1)


class Controller(nn.Module):
    """The controller of a memory: ``"lstm"``, or ``"feedforward"``, a stateless tanh layer.

    Parameters
    ----------
    owner : Module
        For error messages.
    kind : str
    input_size, hidden_size : int
    """

    def __init__(self, owner: object, kind: str, input_size: int, hidden_size: int, device: Any, dtype: Any) -> None:
        super().__init__()
        kinds = {"lstm": nn.LSTMCell, "feedforward": nn.Linear}
        OneOf(kinds)(owner, "controller", kind)
        self.kind, self.cell_size = kind, hidden_size if kind == "lstm" else 0
        self.net: nn.Module = kinds[kind](input_size, hidden_size, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the parameters as torch does; a feedforward layer's by Glorot's rule."""
        if isinstance(self.net, nn.Linear):
            draw_linear(self.net)
        elif isinstance(self.net, nn.LSTMCell):
            self.net.reset_parameters()

    def forward(self, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return the control vector (B, C) and the cell (B, C), or (B, 0) for a feedforward controller."""
        if self.kind == "lstm":
            new, inside = self.net(inputs, (hidden, cell))
            return new.to(hidden.dtype), inside.to(cell.dtype)
        return torch.tanh(self.net(inputs)).to(hidden.dtype), cell


class MemoryMaps(NamedTuple):
    """Addressing weights of each step: ``read`` (B, T, R, N) and ``write`` (B, T, H, N); zeros in padding."""

    read: Tensor
    write: Tensor


_S = TypeVar("_S", bound=tuple[Tensor, ...])


class MemoryMachine(Layer, ABC, Generic[_S]):
    """Base of recurrent networks with a controller and a memory; a subclass defines the heads and one step.

    Parameters
    ----------
    input_size, output_size, hidden_size : int
        Widths of inputs, of outputs and of the controller.
    memory_rows, memory_width : int
        The memory's size N × E.
    read_heads : int
    controller : str
        ``"lstm"`` or ``"feedforward"``.
    """

    input_size: int
    write: MemoryHead
    read: MemoryHead

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_size: int,
        memory_rows: int,
        memory_width: int,
        read_heads: int,
        controller: str,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = size(self, "input_size", input_size), size(self, "output_size", output_size)
        self.hidden_size = size(self, "hidden_size", hidden_size)
        self.memory_rows = size(self, "memory_rows", memory_rows)
        self.memory_width = size(self, "memory_width", memory_width)
        self.read_heads = size(self, "read_heads", read_heads)
        read_size = self.read_heads * self.memory_width
        self.controller = Controller(self, controller, self.input_size + read_size, self.hidden_size, device, dtype)
        self.output = nn.Linear(self.hidden_size + read_size, self.output_size, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Re-initialize the parameters of all parts."""
        self.controller.reset_parameters()
        self.write.reset_parameters()
        self.read.reset_parameters()
        draw_linear(self.output)

    @abstractmethod
    def initial_state(self, batch: int) -> _S:
        """Return the state of ``batch`` sequences before their first step."""

    @abstractmethod
    def _step(self, inputs: Tensor, state: _S) -> _S:
        """Return the state after one step of inputs (B, I)."""

    def _controlled(self, inputs: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Return the controller's new hidden state and cell, given inputs and what was read before."""
        hidden, cell = self.controller(torch.cat([inputs, state.reads.flatten(1)], -1), state.hidden, state.cell)
        return hidden, cell

    def forward(
        self, inputs: Tensor, state: _S | None = None, valid_lens: Tensor | None = None, *, return_maps: bool = False
    ) -> tuple[Tensor, _S] | tuple[Tensor, _S, MemoryMaps]:
        """Run the network over sequences, step by step.

        Parameters
        ----------
        inputs : Tensor (B, T, I)
        state : optional
            State to continue from; None is :meth:`initial_state`.
        valid_lens : Tensor (B,) of int, optional
            Number of valid steps per sequence. Later steps output 0 and do not change the state.
        return_maps : bool, default False
            Whether to also return the addressing weights of the heads.

        Returns
        -------
        outputs : Tensor (B, T, O)
        state : NamedTuple of Tensor
            State after each sequence's last valid step.
        maps : MemoryMaps
            Only if requested.
        """
        B, T, _ = floats(self, "inputs", inputs, "B", "T", self.input_size).shape
        start = self.initial_state(B)
        state = start if state is None else self._fitting(state, start)
        live = None
        if valid_lens is not None:
            live = torch.arange(T, device=inputs.device) < lengths(self, "valid_lens", valid_lens, B, T).unsqueeze(-1)
            inputs = torch.where(live.unsqueeze(-1), inputs, 0)
        states: list[Any] = []
        for t, each in enumerate(inputs.unbind(1)):
            new = self._step(each, state)
            state = new if live is None else _select(live[:, t], new, state)
            states.append(state)
        outputs = self.output(_along([torch.cat([s.hidden, s.reads.flatten(1)], -1) for s in states], self._blank(B)))
        outputs = outputs if live is None else torch.where(live.unsqueeze(-1), outputs, 0)
        if not return_maps:
            return outputs, state
        return outputs, state, self._maps(states, start, live)

    def _maps(self, states: list[Any], start: Any, live: Tensor | None) -> MemoryMaps:
        read = _along([s.read_weights for s in states], start.read_weights)
        write = _along([s.write_weights for s in states], start.write_weights)
        write = write if write.dim() == 4 else write.unsqueeze(2)
        if live is not None:
            read, write = (torch.where(live[..., None, None], each, 0) for each in (read, write))
        return MemoryMaps(read, write)

    def _blank(self, batch: int) -> Tensor:
        return self.output.weight.new_zeros(batch, self.output.in_features)

    def _fitting(self, state: Any, start: _S) -> _S:
        """Check a state against the shapes of an initial one, and return it."""
        if type(state) is not type(start):
            expected = f"be of type {type(start).__name__}"
            raise rejected(type(self).__name__, "state", expected, described(state), TypeError)
        for name, given, fresh in zip(start._fields, state, start):  # type: ignore[attr-defined]
            floats(self, f"state.{name}", given, *fresh.shape)
        return state

    def extra_repr(self) -> str:
        """Return the sizes."""
        names = ("input_size", "output_size", "hidden_size", "memory_rows", "memory_width", "read_heads")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _along(steps: list[Tensor], like: Tensor) -> Tensor:
    """Stack the steps to (B, T, ...); (B, 0, ...) if there are none."""
    return torch.stack(steps, 1) if steps else like.unsqueeze(1)[:, :0]


def _select(live: Tensor, new: Any, old: Any) -> Any:
    """Return the new state of live sequences (B,), and the old state of finished ones."""
    return type(new)(*(torch.where(live.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(new, old)))
