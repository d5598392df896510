"""A key–value cache for step-by-step decoding."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from regard._utils.constraints import Integer, count
from regard._utils.errors import described, rejected, shape


class StepCache(Protocol):
    """The interface of a cache of keys and values; :class:`KVCache` implements it.

    Attributes
    ----------
    prefix : (Tensor, Tensor) or None
        Keys and values (1, G, P, D) of a prefix shared by all sequences.
    offset : Tensor (B,) of int or None
        Number of keys before the step that was appended last, the prefix included; None if it is the last one.
    """

    prefix: tuple[Tensor, Tensor] | None
    offset: Tensor | None

    def __len__(self) -> int:
        """Return the number of steps, including the prefix."""
        ...

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append steps (B, G, N, D) and return all keys and values that queries may see, without the prefix."""
        ...

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` steps."""
        ...


class AttendingCache(Protocol):
    """A cache with its own memory layout that computes attention for a step itself."""

    def __len__(self) -> int:
        """Return the number of steps."""
        ...

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        """Append the keys and values of one step of rows (R, E), and return the attention output (R, E)."""
        ...


class KVCache:
    """Cached keys and values (B, G, N, D) of the steps so far.

    Pass a cache to every call of a :class:`~regard.nn.MultiheadAttention` or :class:`~regard.nn.SelfAttention` when
    decoding step by step; each layer needs its own. Without gradients, steps are written into a buffer of ``capacity``
    steps, or into one that doubles when full. With gradients enabled, each step allocates new tensors, so that all
    steps can be differentiated.

    With a ``window`` the cache is a ring buffer of constant size: it keeps the last ``window`` steps and the first
    ``sinks`` steps. A single new step gets the keys it may see, in the order of the ring, and needs no mask. Several
    new steps get the cached keys and their own in chronological order, for a mask with lower-right alignment.

    Parameters
    ----------
    capacity : int, optional
        Number of steps to allocate; exceeding it is an error. None grows as needed.
    window : int, optional
        Number of steps that each step sees, including itself; all by default.
    sinks : int, default 0
        Number of first steps to keep in addition to the window.

    Raises
    ------
    ValueError, TypeError
        If a count is not an int or too small. When used, if a step does not match earlier steps in shape, dtype or
        device, or if gradients are enabled and the window is full.

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

    #: There is no shared prefix, and the last steps are the last keys.
    prefix = offset = None

    def __init__(self, capacity: int | None = None, *, window: int | None = None, sinks: int = 0) -> None:
        for name, steps in {"capacity": capacity, "window": window}.items():
            if steps is not None:
                Integer(ge=1, note=", or None")(self, name, steps)
        self.capacity, self.window, self.sinks = capacity, window, count(self, "sinks", sinks)
        if sinks and window is None:
            raise rejected("KVCache", "sinks", "be 0 without a window", sinks)
        #: Maximum number of steps kept; None for all.
        self.most = None if window is None else window + sinks
        self.reset()

    def reset(self) -> None:
        """Clear the cache; the next step may have another batch size."""
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append steps and return all keys and values so far.

        Parameters
        ----------
        key, value : Tensor (B, G, N, D)
            The new steps; D may differ between keys and values.

        Returns
        -------
        key, value : Tensor (B, G, S, D)
            S is ``len(self)`` unless the window is full.
        """
        length = self._length + key.shape[2]
        if self.capacity is not None and length > self.capacity:
            raise rejected("KVCache", "key", f"fit into its capacity of {self.capacity} steps", f"step {length}")
        if self.most is not None and length > self.most:
            return self._append_to_ring(key, value, length)
        keys = self._key = self._written("key", self._key, key, length)
        values = self._value = self._written("value", self._value, value, length)
        self._length = length
        return keys.narrow(2, 0, length), values.narrow(2, 0, length)

    def _append_to_ring(self, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Append steps to a window that is full, or that they fill."""
        if torch.is_grad_enabled():
            raise ValueError(
                "KVCache: a full window overwrites old steps, which gradients may need; decode under torch.no_grad()."
            )
        assert self.most is not None and self.window is not None
        kept, new = self.kept, key.shape[2]
        if kept < self.most or self._key is None or self._key.shape[2] < self.most:  # allocate the whole ring
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
        """Number of steps kept: all, unless the window is full."""
        return self._length if self.most is None else min(self._length, self.most)

    def place(self, step: int) -> int:
        """Return the buffer index of a step."""
        return step if self.window is None or step < self.sinks else self.sinks + (step - self.sinks) % self.window

    def places(self, steps: Tensor) -> Tensor:
        """Return the buffer indices of steps."""
        if self.window is None:
            return steps
        return torch.where(steps < self.sinks, steps, self.sinks + (steps - self.sinks) % self.window)

    def order(self, device: torch.device | None = None) -> Tensor:
        """Return the buffer indices of the kept steps, in chronological order."""
        kept = self.kept
        steps = torch.arange(kept, device=device)
        return self.places(torch.where(steps < self.sinks, steps, steps + (self._length - kept)))

    @property
    def key(self) -> Tensor:
        """The kept keys, (B, G, S, D)."""
        return self._filled(self._key)

    @property
    def value(self) -> Tensor:
        """The kept values, (B, G, S, D)."""
        return self._filled(self._value)

    def sequence(self, row: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values (1, G, N, D) of one sequence, for buffer indices ``first`` to ``last - 1``."""
        rows = slice(row, row + 1)
        return self.key[rows, :, first:last], self.value[rows, :, first:last]

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence ``index[b]``, for beam search.

        Parameters
        ----------
        index : Tensor (B',) of int
        """
        if self._key is not None and self._value is not None:
            self._key, self._value = self._selected(self._key, index), self._selected(self._value, index)

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` steps."""
        if not 0 <= length <= self._length:
            raise rejected("KVCache", "length", f"be in [0, {self._length}]", length)
        if 0 < length < self._length and self.most is not None and self._length > self.most:
            raise rejected("KVCache", "length", f"be 0 or {self._length} if the window is full", length)
        self._length = length
        if length == 0:
            self.reset()

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._length

    def __repr__(self) -> str:
        return f"KVCache({'' if self.capacity is None else f'capacity={self.capacity}'}): {self._length} steps"

    def _filled(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise ValueError("KVCache: the cache is empty; append keys and values before reading them.")
        return buffer.narrow(2, 0, self.kept)

    def _selected(self, buffer: Tensor, index: Tensor) -> Tensor:
        """Return these sequences of a buffer, keeping its spare capacity so that the next append does not copy."""
        filled = self._filled(buffer)
        if torch.is_grad_enabled():
            return filled.index_select(0, index)
        made = buffer.new_empty(len(index), *buffer.shape[1:])
        torch.index_select(filled, 0, index, out=made.narrow(2, 0, self.kept))
        return made

    def _written(self, name: str, buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Return a buffer with the new steps appended."""
        if buffer is not None:
            _check_fit(name, buffer, new)
        if torch.is_grad_enabled():  # tensors returned earlier may be saved for a backward pass
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


def cached_steps(layer: object, cache: StepCache | None) -> int:
    """Return the number of steps in a layer's cache, 0 without one; raise if it is another kind of cache."""
    if cache is None:
        return 0
    if not hasattr(cache, "prefix"):
        raise rejected(type(layer).__name__, "cache", "be a KVCache or None", described(cache), TypeError)
    return len(cache)


def _check_fit(name: str, buffer: Tensor, new: Tensor) -> None:
    """Raise if new steps differ from earlier ones in shape, dtype or device."""
    B, G, _, D = buffer.shape
    if new.shape[0] != B or new.shape[1] != G or new.shape[3] != D:
        raise rejected("KVCache", name, f"have the shape ({B}, {G}, N, {D}) of earlier steps", shape(new))
    if new.dtype != buffer.dtype or new.device != buffer.device:
        expected = f"have the dtype and device of earlier steps, {buffer.dtype} on {buffer.device}"
        raise rejected("KVCache", name, expected, f"{new.dtype} on {new.device}")
