"""The Neural Turing Machine and its heads, which address a memory by content and by shifts."""

from __future__ import annotations

from abc import ABC
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

from regard._utils.constraints import count, floats, size
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.nn.memory.addressing import MemoryHead, MemoryMachine, similar, weigh

#: Initial value of every memory entry: small, but not zero, so that rows have a direction.
FRESH = 1e-6


def circular_shift(weights: Tensor, shift: Tensor) -> Tensor:
    """Return ``Σ_d s(d) w(i − d)``, indices modulo N: weights moved by each distance d, in the shares s(d).

    Parameters
    ----------
    weights : Tensor (..., N)
    shift : Tensor (..., 2·D + 1)
        The shares of the distances −D, ..., D; +1 moves row 0's weight to row 1.

    Returns
    -------
    Tensor (..., N)

    Examples
    --------
    >>> import torch
    >>> circular_shift(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.25, 0.75]))
    tensor([0.7500, 0.0000, 0.2500])
    """
    reach = shift.shape[-1] // 2
    moved = torch.stack([weights.roll(d, -1) for d in range(-reach, reach + 1)], -1)
    return (moved * shift.unsqueeze(-2)).sum(-1)


def sharpened(weights: Tensor, power: Tensor) -> Tensor:
    """Return ``w_i^γ / Σ_j w_j^γ``; weights that are all zero stay zero.

    Parameters
    ----------
    weights : Tensor (..., N)
        ≥ 0.
    power : Tensor (...)
        γ ≥ 1.

    Returns
    -------
    Tensor (..., N)

    Examples
    --------
    >>> import torch
    >>> sharpened(torch.tensor([0.25, 0.5, 0.25, 0.0]), torch.tensor(2.0))
    tensor([0.1667, 0.6667, 0.1667, 0.0000])
    """
    # Divide by the largest first, so that not all powers underflow. The factor cancels and needs no gradient.
    peak = weights.detach().amax(-1, keepdim=True)
    powers = (weights / torch.where(peak == 0, 1, peak)) ** power.unsqueeze(-1)
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total == 0, 1, total)


class TuringHead(MemoryHead, ABC):
    """Base of the heads, which address a memory; a subclass reads or writes it.

    From a control vector c each head gets, by one linear map, a key k, its strength β = softplus(·), a gate
    g = sigmoid(·), shares s = softmax(·) of the shifts −D..D, and a power γ = 1 + softplus(·). Then

        w_c = softmax(β cos(k, M_i))
        w_g = g w_c + (1 − g) w'
        w_s(i) = Σ_d s(d) w_g(i − d)
        w(i) = w_s(i)^γ / Σ_j w_s(j)^γ

    with w' the head's weights at the previous step.

    Parameters
    ----------
    input_size : int
        Width C of the control vector.
    width : int
        Width E of the memory.
    heads : int
    shift : int
        The largest distance D.
    more : tuple of int
        Widths of further parameters of a head.
    """

    def __init__(
        self, input_size: int, width: int, heads: int, shift: int, more: tuple[int, ...], device: Any, dtype: Any
    ) -> None:
        shift = count(self, "shift", shift)
        super().__init__(input_size, width, heads, (1, 2 * shift + 1, 1, *more), device, dtype)
        self.shift = shift

    def _before(self, control: Tensor, memory: Tensor, weights: Tensor | None) -> Tensor:
        """Check and return the weights of the previous step, which start on row 0."""
        B, N = self._check(control, memory)
        if weights is None:
            return on_first_row(B, self.heads, N, memory)
        return floats(self, "weights", weights, B, self.heads, N)

    def _address(
        self, memory: Tensor, weights: Tensor, key: Tensor, strength: Tensor, gate: Tensor, shift: Tensor, power: Tensor
    ) -> Tensor:
        """Return the new weights (B, H, N)."""
        content = similar(key, memory, softplus(strength).squeeze(-1))
        gate = torch.sigmoid(gate)
        mixed = gate * content + (1 - gate) * weights
        return sharpened(circular_shift(mixed, weigh(shift)), 1 + softplus(power).squeeze(-1))

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{super().extra_repr()}, shift={self.shift}"


def on_first_row(batch: int, heads: int, rows: int, like: Tensor) -> Tensor:
    """Return weights (B, H, N) that are 1 on row 0."""
    hot = torch.arange(rows, device=like.device) == 0
    return hot.to(like.dtype).expand(batch, heads, rows)


@mechanism(
    formula="r = Σ_i w_i M_i; w = sharpen(shift(g softmax(β cos(k, M_i)) + (1 − g) w'))",
    sources=("graves2014",),
    learned="W (H·(E + 2D + 4), C), bias",
    cost="O(H·(C·(E + D) + N·(E + D)))",
)
class NTMReadHead(TuringHead):
    """Read heads of the Neural Turing Machine (Graves 2014, arXiv 1410.5401): ``r = Σ_i w_i M_i``.

    The weights w come from content, from those of the step before, and from a shift; :class:`TuringHead` has the
    formulas.

    Parameters
    ----------
    input_size : int
        Width C of the control vector.
    width : int
        Width E of the memory.
    heads : int, default 1
        How many heads H.
    shift : int, default 1
        The largest distance D that weights move in a step.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.ntm import NTMReadHead
    >>> reads, weights = NTMReadHead(8, 4, heads=2)(torch.randn(3, 8), torch.randn(3, 10, 4))
    >>> reads.shape, weights.shape
    (torch.Size([3, 2, 4]), torch.Size([3, 2, 10]))
    """

    def __init__(
        self, input_size: int, width: int, heads: int = 1, *, shift: int = 1, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, width, heads, shift, (), device, dtype)

    def forward(self, control: Tensor, memory: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the values read and the read weights.

        Parameters
        ----------
        control : Tensor (B, C)
        memory : Tensor (B, N, E)
        weights : Tensor (B, H, N), optional
            Weights of the previous step; by default all weight is on row 0.

        Returns
        -------
        reads : Tensor (B, H, E)
        weights : Tensor (B, H, N)
        """
        weights = self._before(control, memory, weights)
        parts = self._emitted(control, memory)
        with autocast_suspended(memory.device.type):
            weights = self._address(memory, weights, *parts)
            return weights @ memory, weights


@mechanism(
    formula="M_i ← M_i Π_h (1 − w_hi e_h) + Σ_h w_hi a_h, w as NTMReadHead has it",
    sources=("graves2014",),
    learned="W (H·(3E + 2D + 4), C), bias",
    cost="O(H·(C·(E + D) + N·(E + D)))",
)
class NTMWriteHead(TuringHead):
    """Write heads of the Neural Turing Machine (Graves 2014, arXiv 1410.5401): erase, then add.

    ``M_i ← M_i (1 − w_i e) + w_i a`` with e = sigmoid(·) and a from the control vector. All heads erase before any
    adds, so their order does not matter. :class:`TuringHead` has the formulas of the weights w.

    Parameters
    ----------
    input_size, width, heads, shift, device, dtype
        See :class:`NTMReadHead`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.ntm import NTMWriteHead
    >>> memory, weights = NTMWriteHead(8, 4)(torch.randn(3, 8), torch.zeros(3, 10, 4))
    >>> memory.shape, weights.shape
    (torch.Size([3, 10, 4]), torch.Size([3, 1, 10]))
    """

    def __init__(
        self, input_size: int, width: int, heads: int = 1, *, shift: int = 1, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, width, heads, shift, (width, width), device, dtype)

    def forward(self, control: Tensor, memory: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the memory after writing, as a new tensor, and the write weights.

        Parameters
        ----------
        control, memory, weights
            See :meth:`NTMReadHead.forward`.

        Returns
        -------
        memory : Tensor (B, N, E)
        weights : Tensor (B, H, N)
        """
        weights = self._before(control, memory, weights)
        *parts, erase, add = self._emitted(control, memory)
        with autocast_suspended(memory.device.type):
            weights = self._address(memory, weights, *parts)
            return written(memory, weights, torch.sigmoid(erase), add), weights


def written(memory: Tensor, weights: Tensor, erase: Tensor, add: Tensor) -> Tensor:
    """Return ``M_i Π_h (1 − w_hi e_h) + Σ_h w_hi a_h`` (B, N, E), for weights (B, H, N) and e, a (B, H, E)."""
    for w, e in zip(weights.unbind(1), erase.unbind(1)):
        memory = memory * (1 - w.unsqueeze(-1) * e.unsqueeze(-2))
    return memory + weights.mT @ add


class NTMState(NamedTuple):
    """Everything that a :class:`NeuralTuringMachine` carries from step to step: R read, H write heads.

    ``NTMState(*(t.detach() for t in state))`` cuts the graph; ``state._asdict()`` is a dict of tensors to save.
    """

    memory: Tensor  #: (B, N, E)
    read_weights: Tensor  #: (B, R, N)
    write_weights: Tensor  #: (B, H, N)
    reads: Tensor  #: (B, R, E)
    hidden: Tensor  #: (B, C)
    cell: Tensor  #: (B, C); (B, 0) of a feedforward controller

    def detach(self) -> Self:
        """Return the same state with no past to backpropagate into."""
        return type(self)(*(each.detach() for each in self))


@mechanism(
    formula="c_t = f(x_t, r_{t−1}); M_t = write(c_t, M_{t−1}); r_t = read(c_t, M_t); y_t = W [c_t; r_t] + b",
    sources=("graves2014",),
    learned="controller, W of each head, W (O, C + R·E), b",
    cost="O(T·(C·(C + I + (R + H)·E) + (R + H)·N·E))",
)
class NeuralTuringMachine(MemoryMachine[NTMState]):
    """The Neural Turing Machine (Graves 2014, arXiv 1410.5401): a controller with heads on a memory M (N, E).

    At each step ``c_t = f(x_t, r_{t−1})``, then the write heads change the memory, ``M_t = write(c_t, M_{t−1})``
    (:class:`NTMWriteHead`), then the read heads read it, ``r_t = read(c_t, M_t)`` (:class:`NTMReadHead`), and
    ``y_t = W [c_t; r_t] + b``. A memory starts with 1e-6 in every entry and all weights on row 0. No parameter
    depends on N: weights trained with one memory load into a machine with another.

    Parameters
    ----------
    input_size, output_size : int
        Widths I of inputs and O of outputs.
    hidden_size : int, default 100
        Width C of the controller.
    memory_rows, memory_width : int, default 128 and 20
        The memory's size, N rows of width E.
    read_heads, write_heads : int, default 1
    shift : int, default 1
        The largest distance that weights move in a step.
    controller : {"lstm", "feedforward"}, default "lstm"
        A feedforward controller has no memory of its own.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.ntm import NeuralTuringMachine
    >>> layer = NeuralTuringMachine(5, 3, 16, memory_rows=10, memory_width=4)
    >>> outputs, state = layer(torch.randn(2, 6, 5), valid_lens=torch.tensor([4, 6]))
    >>> outputs.shape, state.memory.shape
    (torch.Size([2, 6, 3]), torch.Size([2, 10, 4]))
    >>> outputs, state, maps = layer(torch.randn(2, 1, 5), state, return_maps=True)  # one step more
    >>> maps.read.shape
    torch.Size([2, 1, 1, 10])
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_size: int = 100,
        memory_rows: int = 128,
        memory_width: int = 20,
        read_heads: int = 1,
        write_heads: int = 1,
        *,
        shift: int = 1,
        controller: str = "lstm",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes = (input_size, output_size, hidden_size, memory_rows, memory_width, read_heads)
        super().__init__(*sizes, controller, device, dtype)
        self.write_heads, self.shift = size(self, "write_heads", write_heads), count(self, "shift", shift)
        where: dict[str, Any] = {"shift": shift, "device": device, "dtype": dtype}
        self.write = NTMWriteHead(hidden_size, memory_width, write_heads, **where)
        self.read = NTMReadHead(hidden_size, memory_width, read_heads, **where)
        self.reset_parameters()

    def initial_state(self, batch: int) -> NTMState:
        like, N, E = self.output.weight, self.memory_rows, self.memory_width
        return NTMState(
            like.new_full((batch, N, E), FRESH),
            on_first_row(batch, self.read_heads, N, like),
            on_first_row(batch, self.write_heads, N, like),
            like.new_zeros(batch, self.read_heads, E),
            like.new_zeros(batch, self.hidden_size),
            like.new_zeros(batch, self.controller.cell_size),
        )

    def _step(self, inputs: Tensor, state: NTMState) -> NTMState:
        hidden, cell = self._controlled(inputs, state)
        memory, write_weights = self.write(hidden, state.memory, state.write_weights)
        reads, read_weights = self.read(hidden, memory, state.read_weights)
        return NTMState(memory, read_weights, write_weights, reads, hidden, cell)
