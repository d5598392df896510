"""A key–value cache: with the keys and values of the steps so far kept, decoding a step costs one row."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from regard._utils.constraints import Integer, count
from regard._utils.errors import rejected, shape


class StepCache(Protocol):
    """What a layer needs of a cache of keys and values; :class:`KVCache` is one.

    Attributes
    ----------
    prefix : (Tensor, Tensor) or None
        Keys and values (1, G, P, D) of steps that come before those of every sequence.
    """

    prefix: tuple[Tensor, Tensor] | None

    def __len__(self) -> int:
        """Return how many steps there are, the prefix included."""
        ...

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add steps (B, G, N, D) and return all keys and values that queries may see, without the prefix."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all steps but the first ``length``."""
        ...


class AttendingCache(Protocol):
    """A cache that computes a step of attention itself, from rows that it lays out in its own way."""

    def __len__(self) -> int:
        """Return how many steps there are."""
        ...

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        """Add the keys and values of a step of rows (R, E), and return what the layer reads of all steps, (R, E)."""
        ...


class KVCache:
    """The projected keys and values of the steps so far, (B, G, N, D), to which each step appends its own.

    Pass one to every call of a :class:`~regard.nn.MultiheadAttention` that decodes step by step; each layer needs
    its own. Without gradients, steps are written into a buffer: one of ``capacity`` steps, or one that doubles when
    it is full. With gradients enabled, each step makes a new tensor, so that all of them can be differentiated.

    With a ``window``, the cache slides: it keeps the last ``window`` steps and the first ``sinks`` ones, in a ring, and
    its memory does not grow. One new step gets the keys that it may see, in the ring's order, and needs no mask;
    several at once get those before them and their own in order of time, for a mask aligned at the lower right.

    Parameters
    ----------
    capacity : int, optional
        How many steps to make room for at once; more are an error. None grows as needed.
    window : int, optional
        How many steps each one sees, itself included; all by default.
    sinks : int, default 0
        First steps that are kept beside the window.

    Raises
    ------
    ValueError, TypeError
        If a count is no int or too small; when used, if a step does not fit to those before it, or gradients are
        enabled where the window is full.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import KVCache, MultiheadAttention
    >>> layer, cache, x = MultiheadAttention(8, 2, batch_first=True).eval(), KVCache(), torch.randn(3, 5, 8)
    >>> whole, _ = layer(x, x, x, is_causal=True)
    >>> steps = [layer(t, t, t, is_causal=True, cache=cache)[0] for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-6), len(cache)
    (True, 5)
    """

    #: No steps come before those of every sequence.
    prefix = None

    def __init__(self, capacity: int | None = None, *, window: int | None = None, sinks: int = 0) -> None:
        for name, steps in {"capacity": capacity, "window": window}.items():
            if steps is not None:
                Integer(ge=1, note=", or None")(self, name, steps)
        self.capacity, self.window, self.sinks = capacity, window, count(self, "sinks", sinks)
        if sinks and window is None:
            raise rejected("KVCache", "sinks", "be 0 without a window", sinks)
        #: The most steps that are kept; None for all.
        self.most = None if window is None else window + sinks
        self.reset()

    def reset(self) -> None:
        """Forget all steps; the next may have another batch size."""
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append steps and return all keys and values so far.

        Parameters
        ----------
        key, value : Tensor (B, G, N, D)
            Of the new steps; D may differ between the two.

        Returns
        -------
        key, value : Tensor (B, G, S, D)
            S is ``len(self)`` unless a window is full.
        """
        length = self._length + key.shape[2]
        if self.capacity is not None and length > self.capacity:
            raise rejected("KVCache", "key", f"fit into its capacity of {self.capacity} steps", f"step {length}")
        if self.most is not None and length > self.most:
            return self._slid(key, value, length)
        keys = self._key = self._written("key", self._key, key, length)
        values = self._value = self._written("value", self._value, value, length)
        self._length = length
        return keys.narrow(2, 0, length), values.narrow(2, 0, length)

    def _slid(self, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Append steps where the window is full, or they fill it."""
        if torch.is_grad_enabled():
            raise rejected("KVCache", "a window that is full", "be used under torch.no_grad()", "gradients enabled")
        assert self.most is not None and self.window is not None
        kept, new = self.kept, key.shape[2]
        if kept < self.most or self._key is None or self._key.shape[2] < self.most:  # room for the whole ring
            for name, each in (("_key", key), ("_value", value)):
                old = getattr(self, name)
                ring = each.new_zeros(*each.shape[:2], self.most, each.shape[3])
                if old is not None:
                    _check_fit(name[1:], old, each)
                    ring[:, :, :kept] = old[:, :, :kept]
                setattr(self, name, ring)
        assert self._key is not None and self._value is not None
        outcome = []
        for name, ring, each in (("key", self._key, key), ("value", self._value, value)):
            _check_fit(name, ring, each)
            if new == 1:
                ring[:, :, self.place(self._length)] = each[:, :, 0]
                outcome.append(ring)
                continue
            outcome.append(torch.cat([ring.index_select(2, self.order(ring.device)), each], 2))
            steps = torch.arange(self._length, length, device=ring.device)
            last = (steps < self.sinks) | (steps >= length - self.window)
            ring[:, :, self.places(steps[last])] = each[:, :, last]
        self._length = length
        return outcome[0], outcome[1]

    @property
    def kept(self) -> int:
        """How many steps are kept: all of them, unless a window is full."""
        return self._length if self.most is None else min(self._length, self.most)

    def place(self, step: int) -> int:
        """Return where in the buffer a step stands, or stood."""
        return step if self.window is None or step < self.sinks else self.sinks + (step - self.sinks) % self.window

    def places(self, steps: Tensor) -> Tensor:
        """Return where in the buffer steps stand."""
        if self.window is None:
            return steps
        return torch.where(steps < self.sinks, steps, self.sinks + (steps - self.sinks) % self.window)

    def order(self, device: torch.device | None = None) -> Tensor:
        """Return where in the buffer the steps that are kept stand, in order of time."""
        kept = self.kept
        steps = torch.arange(kept, device=device)
        return self.places(torch.where(steps < self.sinks, steps, steps + (self._length - kept)))

    @property
    def key(self) -> Tensor:
        """All keys that are kept, (B, G, S, D)."""
        return self._filled(self._key)

    @property
    def value(self) -> Tensor:
        """All values that are kept, (B, G, S, D)."""
        return self._filled(self._value)

    def sequence(self, row: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values (1, G, N, D) of one sequence, from step ``first`` to before ``last`` of the buffer."""
        rows = slice(row, row + 1)
        return self.key[rows, :, first:last], self.value[rows, :, first:last]

    def reorder(self, index: Tensor) -> None:
        """Make sequence b continue what was sequence ``index[b]``: for beam search.

        Parameters
        ----------
        index : Tensor (B',) of int
        """
        if self._key is not None and self._value is not None:
            self._key, self._value = self._selected(self._key, index), self._selected(self._value, index)

    def truncate(self, length: int) -> None:
        """Forget all steps but the first ``length``."""
        if not 0 <= length <= self._length:
            raise rejected("KVCache", "length", f"be in [0, {self._length}]", length)
        if 0 < length < self._length and self.most is not None and self._length > self.most:
            raise rejected("KVCache", "length", "be 0 or all where a window is full", length)
        self._length = length
        if length == 0:
            self.reset()

    def __len__(self) -> int:
        """Return how many steps there are."""
        return self._length

    def __repr__(self) -> str:
        return f"KVCache({'' if self.capacity is None else f'capacity={self.capacity}'}): {self._length} steps"

    def _filled(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise rejected("KVCache", "key and value", "have been appended before they are read", "an empty cache")
        return buffer.narrow(2, 0, self.kept)

    def _selected(self, buffer: Tensor, index: Tensor) -> Tensor:
        """Return these sequences of a buffer, with its room for more steps: without, the next append would copy all."""
        filled = self._filled(buffer)
        if torch.is_grad_enabled():
            return filled.index_select(0, index)
        made = buffer.new_empty(len(index), *buffer.shape[1:])
        torch.index_select(filled, 0, index, out=made.narrow(2, 0, self.kept))
        return made

    def _written(self, name: str, buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Return a buffer with the new steps after the others."""
        if buffer is not None:
            _check_fit(name, buffer, new)
        if torch.is_grad_enabled():  # what was returned before may be saved for a backward pass
            return new if buffer is None else torch.cat([buffer[:, :, : self._length], new], 2)
        if buffer is None or buffer.shape[2] < length:
            room = max(length, 2 * self._length) if self.capacity is None else self.capacity
            room = room if self.most is None else min(room, self.most)
            larger = new.new_empty(*new.shape[:2], room, new.shape[3])
            if buffer is not None:
                larger[:, :, : self._length] = buffer[:, :, : self._length]
            buffer = larger
        buffer.narrow(2, self._length, new.shape[2]).copy_(new)
        return buffer


def _check_fit(name: str, buffer: Tensor, new: Tensor) -> None:
    """Raise where new steps are of another shape, dtype or device than those before."""
    B, G, _, D = buffer.shape
    if new.shape[0] != B or new.shape[1] != G or new.shape[3] != D:
        raise rejected("KVCache", name, f"have the shape ({B}, {G}, N, {D}) of the steps before", shape(new))
    if new.dtype != buffer.dtype or new.device != buffer.device:
        expected = f"have the dtype and device of the steps before, {buffer.dtype} on {buffer.device}"
        raise rejected("KVCache", name, expected, f"{new.dtype} on {new.device}")
