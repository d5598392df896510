"""The Differentiable Neural Computer: a memory that tracks free rows and the order of writes."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from regard._utils.constraints import floats, size
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.nn.memory.addressing import MemoryHead, MemoryMachine, similar, weigh


def allocation(usage: Tensor) -> Tensor:
    """Return allocation weights ``a[φ_j] = (1 − u[φ_j]) Π_{i<j} u[φ_i]``, where φ sorts rows by usage.

    Ties keep their order. The order has no gradient.

    Parameters
    ----------
    usage : Tensor (..., N)
        In [0, 1].

    Returns
    -------
    Tensor (..., N)
        ≥ 0, with sum ``1 − Π u`` ≤ 1: zero if every row is fully used.

    Examples
    --------
    >>> import torch
    >>> allocation(torch.tensor([1.0, 0.5, 0.0, 0.5])), allocation(torch.tensor([1.0, 0.5, 1.0, 0.8]))
    (tensor([0., 0., 1., 0.]), tensor([0.0000, 0.5000, 0.0000, 0.1000]))
    """
    ordered, rows = usage.sort(dim=-1, stable=True)
    before = pad(ordered[..., :-1], (1, 0), value=1.0) if usage.shape[-1] else ordered
    # Cumulative products by doubling: the backward pass of torch's cumprod divides by the factors, which may be 0.
    reach = 1
    while reach < before.shape[-1]:
        before = before * pad(before[..., :-reach], (reach, 0), value=1.0)
        reach *= 2
    return torch.zeros_like(usage).scatter(-1, rows, (1 - ordered) * before)


def linked(links: Tensor, precedence: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the temporal links and the precedence after a write.

    ``L[i, j] ← (1 − w[i] − w[j]) L[i, j] + w[i] p[j]``, 0 on the diagonal, and ``p ← (1 − Σ w) p + w``: L[i, j] is the
    degree to which row i was written right after row j, and p that to which each row was written last.

    Parameters
    ----------
    links : Tensor (B, N, N)
    precedence, weights : Tensor (B, N)

    Returns
    -------
    links : Tensor (B, N, N)
        Its rows and columns are ≥ 0 and sum to at most 1.
    precedence : Tensor (B, N)
    """
    after = weights.unsqueeze(-1)
    # Clamp: rounding may make the sum of weights exceed 1 slightly.
    links = (1 - after - weights.unsqueeze(-2)).clamp(min=0) * links + after * precedence.unsqueeze(-2)
    itself = torch.eye(weights.shape[-1], dtype=torch.bool, device=weights.device)
    rest = (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
    return torch.where(itself, 0, links), rest * precedence + weights


@mechanism(
    formula="M_i ← M_i (1 − w_i e) + w_i v; w = g_w (g_a a(u) + (1 − g_a) softmax(β cos(k, M_i)))",
    sources=("graves2016",),
    learned="W (3E + R + 3, C), bias",
    cost="O(C·(E + R) + N·(E + R + log N))",
)
class DNCWriteHead(MemoryHead):
    """The write head of the Differentiable Neural Computer (Graves 2016, Nature).

    From a control vector c come, by one linear map, a key k, its strength β = 1 + softplus(·), an erase vector
    e = sigmoid(·), a vector v to write, free gates f_r = sigmoid(·), one for each read head, an allocation gate g_a
    and a write gate g_w, both sigmoid(·). Then, with the write and read weights w' and w'_r of the step before,

        u ← (u + w' − u w') Π_r (1 − f_r w'_r)                    usage: what was written and not freed
        w = g_w (g_a a(u) + (1 − g_a) softmax(β cos(k, M_i)))     a(u): :func:`allocation`
        M_i ← M_i (1 − w_i e) + w_i v

    Parameters
    ----------
    input_size : int
        Width C of the control vector.
    width : int
        Width E of the memory.
    read_heads : int, default 1
        Number of read heads R, which may free rows.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.dnc import DNCWriteHead
    >>> memory, usage, weights = DNCWriteHead(8, 4)(torch.randn(3, 8), torch.zeros(3, 10, 4))
    >>> memory.shape, usage.shape, weights.shape
    (torch.Size([3, 10, 4]), torch.Size([3, 10]), torch.Size([3, 10]))
    """

    def __init__(
        self, input_size: int, width: int, read_heads: int = 1, *, device: Any = None, dtype: Any = None
    ) -> None:
        read_heads = size(self, "read_heads", read_heads)
        super().__init__(input_size, width, 1, (width, width, read_heads, 1, 1), device, dtype)
        self.read_heads = read_heads

    def forward(
        self,
        control: Tensor,
        memory: Tensor,
        usage: Tensor | None = None,
        weights: Tensor | None = None,
        read_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the memory after writing, as a new tensor, and the write weights.

        Parameters
        ----------
        control : Tensor (B, C)
        memory : Tensor (B, N, E)
        usage : Tensor (B, N), optional
            Usage before this step; this and the following default to 0.
        weights : Tensor (B, N), optional
            Write weights of the previous step.
        read_weights : Tensor (B, R, N), optional
            Read weights of the previous step.

        Returns
        -------
        memory : Tensor (B, N, E)
        usage : Tensor (B, N)
            Usage before this write, which the next step adds.
        weights : Tensor (B, N)
            ≥ 0, with a sum of at most 1.
        """
        B, N = self._check(control, memory)
        nowhere = memory.new_zeros(B, N)
        usage = nowhere if usage is None else floats(self, "usage", usage, B, N)
        weights = nowhere if weights is None else floats(self, "weights", weights, B, N)
        if read_weights is not None:
            floats(self, "read_weights", read_weights, B, self.read_heads, N)
        key, strength, erase, vector, free, allocate, write = self._emitted(control, memory)
        with autocast_suspended(memory.device.type):
            usage = usage + weights * (1 - usage)
            if read_weights is not None:
                for gate, each in zip(torch.sigmoid(free).unbind(-1), read_weights.unbind(1)):
                    usage = usage * (1 - gate * each)
            content = similar(key, memory, 1 + softplus(strength).squeeze(-1)).squeeze(1)
            allocate, write = torch.sigmoid(allocate).squeeze(1), torch.sigmoid(write).squeeze(1)
            weights = write * (allocate * allocation(usage) + (1 - allocate) * content)
            column = weights.unsqueeze(-1)
            return memory * (1 - column * torch.sigmoid(erase)) + column * vector, usage, weights

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"input_size={self.input_size}, width={self.width}, read_heads={self.read_heads}"


@mechanism(
    formula="r = Σ_i w_i M_i; w = π_b Lᵀw' + π_c softmax(β cos(k, M_i)) + π_f L w'",
    sources=("graves2016",),
    learned="W (R·(E + 4), C), bias",
    cost="O(R·(C·E + N·E + N²))",
)
class DNCReadHead(MemoryHead):
    """Read heads of the Differentiable Neural Computer (Graves 2016, Nature).

    A linear map of a control vector c gives each head a key k, its strength β = 1 + softplus(·), and the shares
    π = softmax(·) of three modes: backward, to the row written before the last row read; content, to the row most
    similar to the key; and forward, to the row written after. With the weights w' of the previous step and the links L,
    ``w = π_b Lᵀw' + π_c softmax(β cos(k, M_i)) + π_f L w'`` and ``r = Σ_i w_i M_i``.

    Parameters
    ----------
    input_size : int
        Width C of the control vector.
    width : int
        Width E of the memory.
    heads : int, default 1
        Number of heads R.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.dnc import DNCReadHead
    >>> reads, weights = DNCReadHead(8, 4, heads=2)(torch.randn(3, 8), torch.randn(3, 10, 4))
    >>> reads.shape, weights.shape
    (torch.Size([3, 2, 4]), torch.Size([3, 2, 10]))
    """

    def __init__(self, input_size: int, width: int, heads: int = 1, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(input_size, width, heads, (3,), device, dtype)

    def forward(
        self, control: Tensor, memory: Tensor, weights: Tensor | None = None, links: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the values read and the read weights.

        Parameters
        ----------
        control : Tensor (B, C)
        memory : Tensor (B, N, E)
        weights : Tensor (B, R, N), optional
            Weights of the previous step; this and ``links`` default to 0.
        links : Tensor (B, N, N), optional
            ``links[:, i, j]`` is the degree to which row i was written right after row j; see :func:`linked`.

        Returns
        -------
        reads : Tensor (B, R, E)
        weights : Tensor (B, R, N)
            ≥ 0, with a sum of at most 1.
        """
        B, N = self._check(control, memory)
        if weights is not None:
            floats(self, "weights", weights, B, self.heads, N)
        if links is not None:
            floats(self, "links", links, B, N, N)
        key, strength, modes = self._emitted(control, memory)
        with autocast_suspended(memory.device.type):
            back, content, on = weigh(modes).split(1, -1)
            found = content * similar(key, memory, 1 + softplus(strength).squeeze(-1))
            if weights is not None and links is not None:
                found = found + back * (weights @ links) + on * (weights @ links.mT)
            return found @ memory, found


class DNCState(NamedTuple):
    """Everything that a :class:`DifferentiableNeuralComputer` carries from step to step, with R read heads.

    ``state._asdict()`` is a dict of tensors to save.
    """

    memory: Tensor  #: (B, N, E)
    usage: Tensor  #: (B, N)
    links: Tensor  #: (B, N, N)
    precedence: Tensor  #: (B, N)
    read_weights: Tensor  #: (B, R, N)
    write_weights: Tensor  #: (B, N)
    reads: Tensor  #: (B, R, E)
    hidden: Tensor  #: (B, C)
    cell: Tensor  #: (B, C); (B, 0) of a feedforward controller

    def detach(self) -> Self:
        """Return the same state with no past to backpropagate into."""
        return type(self)(*(each.detach() for each in self))


@mechanism(
    formula="c_t = f(x_t, r_{t−1}); M_t = write(c_t, M_{t−1}); r_t = read(c_t, M_t, L_t); y_t = W [c_t; r_t] + b",
    sources=("graves2016",),
    learned="controller, W of each head, W (O, C + R·E), b",
    cost="O(T·(C·(C + I + R·E) + R·N·E + R·N²)), state O(N² + N·E)",
)
class DifferentiableNeuralComputer(MemoryMachine[DNCState]):
    """The Differentiable Neural Computer (Graves 2016, Nature): a controller with heads on a memory M (N, E).

    At each step ``c_t = f(x_t, r_{t−1})``; the write head (:class:`DNCWriteHead`) finds free rows or known content
    and writes; the links between rows in the order of their writing are kept (:func:`linked`); the read heads
    (:class:`DNCReadHead`) find content or follow links, and ``y_t = W [c_t; r_t] + b``. Everything starts at 0.
    The links take N² numbers for each sequence, and for each step where there is a gradient. No parameter depends on
    N: weights trained with one memory load into a machine with another.

    Parameters
    ----------
    input_size, output_size : int
        Widths I of inputs and O of outputs.
    hidden_size : int, default 64
        Width C of the controller.
    memory_rows, memory_width : int, default 16
        The memory's size, N rows of width E.
    read_heads : int, default 1
    controller : {"lstm", "feedforward"}, default "lstm"
        A feedforward controller has no memory of its own.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch
    >>> from regard.nn.memory.dnc import DifferentiableNeuralComputer
    >>> layer = DifferentiableNeuralComputer(5, 3, 16, memory_rows=10, memory_width=4, read_heads=2)
    >>> outputs, state = layer(torch.randn(2, 6, 5), valid_lens=torch.tensor([4, 6]))
    >>> outputs.shape, state.links.shape
    (torch.Size([2, 6, 3]), torch.Size([2, 10, 10]))
    >>> outputs, state, maps = layer(torch.randn(2, 1, 5), state, return_maps=True)  # one step more
    >>> maps.read.shape, maps.write.shape
    (torch.Size([2, 1, 2, 10]), torch.Size([2, 1, 1, 10]))
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_size: int = 64,
        memory_rows: int = 16,
        memory_width: int = 16,
        read_heads: int = 1,
        *,
        controller: str = "lstm",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes = (input_size, output_size, hidden_size, memory_rows, memory_width, read_heads)
        super().__init__(*sizes, controller, device, dtype)
        self.write = DNCWriteHead(hidden_size, memory_width, read_heads, device=device, dtype=dtype)
        self.read = DNCReadHead(hidden_size, memory_width, read_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def initial_state(self, batch: int) -> DNCState:
        N, E, R, C = self.memory_rows, self.memory_width, self.read_heads, self.hidden_size
        sizes = ((N, E), (N,), (N, N), (N,), (R, N), (N,), (R, E), (C,), (self.controller.cell_size,))
        return DNCState(*(self.output.weight.new_zeros(batch, *each) for each in sizes))

    def _step(self, inputs: Tensor, state: DNCState) -> DNCState:
        hidden, cell = self._controlled(inputs, state)
        memory, usage, w = self.write(hidden, state.memory, state.usage, state.write_weights, state.read_weights)
        with autocast_suspended(memory.device.type):
            links, precedence = linked(state.links, state.precedence, w)
        reads, read_weights = self.read(hidden, memory, state.read_weights, links)
        return DNCState(memory, usage, links, precedence, read_weights, w, reads, hidden, cell)
