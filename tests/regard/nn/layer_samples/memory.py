"""Samples of layers with a memory: the recurrences written out, one sequence, step, head and row after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.regard.nn.layer_samples.sample import Array, LayerCall, Padded, array, sample, softmax
from torch import Tensor

from regard.nn.memory.addressing import ContentAddressing
from regard.nn.memory.dnc import DifferentiableNeuralComputer, DNCReadHead, DNCState, DNCWriteHead
from regard.nn.memory.ntm import NeuralTuringMachine, NTMReadHead, NTMState, NTMWriteHead

LENGTHS = torch.tensor([2, 3])
ROWS = torch.tensor([3, 5])
Numbers = Callable[..., Tensor]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def _linear(layer: Any, x: Array) -> Array:
    return array(layer.weight) @ x + array(layer.bias)


def _told(layer: Any, control: Array, heads: int, *sizes: int) -> list[list[Array]]:
    """Return, for each head, the parts of what its layer makes of one control vector."""
    numbers = _linear(layer.emit, control).reshape(heads, -1)
    return [np.split(row, np.cumsum(sizes)[:-1]) for row in numbers]


def _content(key: Array, memory: Array, strength: Any) -> Array:
    lengths = np.linalg.norm(memory, axis=1) * np.linalg.norm(key)
    return softmax(strength * np.where(lengths > 0, memory @ key / np.where(lengths > 0, lengths, 1), 0))


def _turing_weights(told: list[Array], memory: Array, before: Array, reach: int) -> Array:
    key, strength, gate, shift, power = told[:5]
    g, s, N = _sigmoid(gate), softmax(shift), len(memory)
    mixed = g * _content(key, memory, _softplus(strength)) + (1 - g) * before
    moved = np.array([sum(s[d + reach] * mixed[(i - d) % N] for d in range(-reach, reach + 1)) for i in range(N)])
    powers = moved ** (1 + _softplus(power))
    return np.asarray(powers / powers.sum())


def _turing_sizes(head: Any) -> list[int]:
    return [head.width, 1, 1, 2 * head.shift + 1, 1]


def _turing_read(head: Any, control: Array, memory: Array, before: Array) -> tuple[Array, Array]:
    told = _told(head, control, head.heads, *_turing_sizes(head))
    weights = np.stack([_turing_weights(each, memory, w, head.shift) for each, w in zip(told, before)])
    return weights @ memory, weights


def _turing_write(head: Any, control: Array, memory: Array, before: Array) -> tuple[Array, Array]:
    told = _told(head, control, head.heads, *_turing_sizes(head), head.width, head.width)
    weights = np.stack([_turing_weights(each, memory, w, head.shift) for each, w in zip(told, before)])
    new = memory.copy()
    for i in range(len(memory)):
        for h in range(head.heads):
            new[i] *= 1 - weights[h, i] * _sigmoid(told[h][5])
        for h in range(head.heads):
            new[i] += weights[h, i] * told[h][6]
    return new, weights


def _allocation(usage: Array) -> Array:
    found = np.zeros(len(usage))
    left = 1.0
    for row in sorted(range(len(usage)), key=lambda i: (usage[i], i)):
        found[row] = (1 - usage[row]) * left
        left *= usage[row]
    return found


def _computer_write(head: Any, control: Array, memory: Array, usage: Array, before: Array, reads: Array) -> Any:
    width = head.width
    told = _told(head, control, 1, width, 1, width, width, head.read_heads, 1, 1)[0]
    key, strength, erase, vector, free, allocate, write = told
    usage = (usage + before - usage * before) * np.prod(1 - _sigmoid(free)[:, None] * reads, 0)
    g = _sigmoid(allocate)
    w = _sigmoid(write) * (g * _allocation(usage) + (1 - g) * _content(key, memory, 1 + _softplus(strength)))
    return memory * (1 - np.outer(w, _sigmoid(erase))) + np.outer(w, vector), usage, w


def _computer_read(head: Any, control: Array, memory: Array, before: Array, links: Array) -> tuple[Array, Array]:
    weights = []
    for (key, strength, modes), w in zip(_told(head, control, head.heads, head.width, 1, 3), before):
        back, content, on = softmax(modes)
        found = content * _content(key, memory, 1 + _softplus(strength))
        weights.append(back * links.T @ w + found + on * links @ w)
    return np.stack(weights) @ memory, np.stack(weights)


def _links(links: Array, precedence: Array, w: Array) -> Array:
    new = np.zeros_like(links)
    for i in range(len(w)):
        for j in range(len(w)):
            if i != j:
                new[i, j] = (1 - w[i] - w[j]) * links[i, j] + w[i] * precedence[j]
    return new


def _control(layer: Any, inputs: Array, hidden: Array, cell: Array) -> tuple[Array, Array]:
    net = layer.controller.net
    if layer.controller.kind == "feedforward":
        return np.tanh(_linear(net, inputs)), cell
    numbers = array(net.weight_ih) @ inputs + array(net.bias_ih) + array(net.weight_hh) @ hidden + array(net.bias_hh)
    into, keep, new, out = np.split(numbers, 4)
    cell = _sigmoid(keep) * cell + _sigmoid(into) * np.tanh(new)
    return _sigmoid(out) * np.tanh(cell), cell


def _machine(start: Callable[[Any], tuple[Array, ...]], step: Callable[..., tuple[Array, ...]]) -> Callable[..., Array]:
    """Return the formula of a machine: ``step`` maps a state, which ends in reads, hidden and cell, to the next."""

    def formula(layer: Any, inputs: Tensor, state: Any = None, valid_lens: Tensor | None = None) -> Array:
        outputs = np.zeros((*inputs.shape[:2], layer.output_size))
        ends = array(valid_lens) if valid_lens is not None else np.full(len(inputs), inputs.shape[1])
        for b in range(len(inputs)):
            now = start(layer) if state is None else tuple(array(each)[b] for each in state)
            for t in range(int(ends[b])):
                now = step(layer, array(inputs)[b, t], *now)
                outputs[b, t] = _linear(layer.output, np.concatenate([now[-2], now[-3].ravel()]))
        return outputs

    return formula


def _turing_start(layer: Any) -> tuple[Array, ...]:
    N, E, R, H, C = layer.memory_rows, layer.memory_width, layer.read_heads, layer.write_heads, layer.hidden_size
    first = np.eye(N)[0]
    return (
        np.full((N, E), 1e-6),
        np.tile(first, (R, 1)),
        np.tile(first, (H, 1)),
        np.zeros((R, E)),
        np.zeros(C),
        np.zeros(C),
    )


def _turing_step(layer: Any, x: Array, memory: Array, w_r: Array, w_w: Array, reads: Array, *inside: Array) -> Any:
    hidden, cell = _control(layer, np.concatenate([x, reads.ravel()]), *inside)
    memory, w_w = _turing_write(layer.write, hidden, memory, w_w)
    reads, w_r = _turing_read(layer.read, hidden, memory, w_r)
    return memory, w_r, w_w, reads, hidden, cell


def _computer_start(layer: Any) -> tuple[Array, ...]:
    N, E, R, C = layer.memory_rows, layer.memory_width, layer.read_heads, layer.hidden_size
    sizes: tuple[Any, ...] = ((N, E), N, (N, N), N, (R, N), N, (R, E), C, C)
    return tuple(np.zeros(each) for each in sizes)


def _computer_step(
    layer: Any,
    x: Array,
    memory: Array,
    usage: Array,
    links: Array,
    precedence: Array,
    w_r: Array,
    w_w: Array,
    reads: Array,
    *inside: Array,
) -> Any:
    hidden, cell = _control(layer, np.concatenate([x, reads.ravel()]), *inside)
    memory, usage, w_w = _computer_write(layer.write, hidden, memory, usage, w_w, w_r)
    links, precedence = _links(links, precedence, w_w), (1 - w_w.sum()) * precedence + w_w
    reads, w_r = _computer_read(layer.read, hidden, memory, w_r, links)
    return memory, usage, links, precedence, w_r, w_w, reads, hidden, cell


def _each(step: Callable[..., Any]) -> Callable[..., Array]:
    """Return the formula of a head, from that of one sequence; the first of its answers."""

    def formula(layer: Any, *batch: Tensor) -> Array:
        return np.stack([step(layer, *(array(each)[b] for each in batch))[0] for b in range(len(batch[0]))])

    return formula


def _content_read(layer: Any, control: Array, memory: Array, rows: Array) -> tuple[Array]:
    memory = memory[: int(rows)]
    told = _told(layer, control, layer.heads, layer.width, 1)
    return (np.stack([_content(key, memory, 1 + _softplus(strength)) @ memory for key, strength in told]),)


def _weights(new: Numbers, *sizes: int) -> Tensor:
    """Return weights that sum to less than 1, all different."""
    return torch.softmax(new(*sizes), -1) * 0.9


def _between(new: Numbers, batch: int, rows: int) -> Tensor:
    """Return links whose rows and columns sum to less than 1."""
    links = _weights(new, batch, rows, rows) / rows
    return torch.where(torch.eye(rows, dtype=torch.bool), 0, links)


def _turing_call(new: Numbers) -> LayerCall:
    state = NTMState(
        new(2, 6, 4), _weights(new, 2, 2, 6), _weights(new, 2, 2, 6), new(2, 2, 4), new(2, 7).tanh(), new(2, 7)
    )
    return (new(2, 3, 3), state, LENGTHS), {}


def _computer_call(cell: int) -> Callable[[Numbers], LayerCall]:
    def call(new: Numbers) -> LayerCall:
        state = DNCState(
            new(2, 6, 4),
            torch.sigmoid(new(2, 6)),
            _between(new, 2, 6),
            _weights(new, 2, 6),
            _weights(new, 2, 2, 6),
            _weights(new, 2, 6),
            new(2, 2, 4),
            new(2, 7).tanh(),
            new(2, cell),
        )
        return (new(2, 3, 3), state, LENGTHS), {}

    return call


padded = Padded((0,), LENGTHS)
sample(
    "ContentAddressing",
    lambda **where: ContentAddressing(7, 4, heads=2, **where),
    lambda new: ((new(2, 7), new(2, 5, 4), ROWS), {}),
    _each(_content_read),
    Padded((1,), ROWS),
)
sample(
    "NTMReadHead",
    lambda **where: NTMReadHead(7, 4, heads=2, shift=2, **where),
    lambda new: ((new(2, 7), new(2, 6, 4), _weights(new, 2, 2, 6)), {}),
    _each(_turing_read),
)
sample(
    "NTMWriteHead",
    lambda **where: NTMWriteHead(7, 4, heads=2, **where),
    lambda new: ((new(2, 7), new(2, 6, 4), _weights(new, 2, 2, 6)), {}),
    _each(_turing_write),
)
sample(
    "NeuralTuringMachine",
    lambda **where: NeuralTuringMachine(3, 2, 7, 6, 4, 2, 2, **where),
    _turing_call,
    _machine(_turing_start, _turing_step),
    padded,
)
sample(
    "NeuralTuringMachine",
    lambda **where: NeuralTuringMachine(3, 2, 7, 6, 4, shift=2, controller="feedforward", **where),
    lambda new: ((new(2, 3, 3), None, LENGTHS), {}),
    _machine(_turing_start, _turing_step),
    padded,
    variant="feedforward",
)
sample(
    "DNCReadHead",
    lambda **where: DNCReadHead(7, 4, heads=2, **where),
    lambda new: ((new(2, 7), new(2, 6, 4), _weights(new, 2, 2, 6), _between(new, 2, 6)), {}),
    _each(_computer_read),
)
sample(
    "DNCWriteHead",
    lambda **where: DNCWriteHead(7, 4, read_heads=2, **where),
    lambda new: (
        (new(2, 7), new(2, 6, 4), new(2, 6).sigmoid(), _weights(new, 2, 6), _weights(new, 2, 2, 6)),
        {},
    ),
    _each(_computer_write),
)
sample(
    "DifferentiableNeuralComputer",
    lambda **where: DifferentiableNeuralComputer(3, 2, 7, 6, 4, 2, **where),
    _computer_call(7),
    _machine(_computer_start, _computer_step),
    padded,
)
sample(
    "DifferentiableNeuralComputer",
    lambda **where: DifferentiableNeuralComputer(3, 2, 7, 6, 4, 2, controller="feedforward", **where),
    _computer_call(0),
    _machine(_computer_start, _computer_step),
    padded,
    variant="feedforward",
)
sample(
    "DifferentiableNeuralComputer",
    lambda **where: DifferentiableNeuralComputer(3, 2, 7, 6, 4, 2, **where),
    lambda new: ((new(2, 3, 3), None, LENGTHS), {}),
    _machine(_computer_start, _computer_step),
    padded,
    variant="fresh",
)
