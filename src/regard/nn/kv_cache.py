"""A key–value cache: with the keys and values of the steps so far kept, decoding a step costs one row."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._constraints import Integer
from regard._errors import rejected, shape


class KVCache:
    """The projected keys and values of the steps so far, (B, G, N, D), to which each step appends its own.

    Pass one to every call of a :class:`~regard.nn.MultiheadAttention` that decodes step by step; each layer needs
    its own. Without gradients, steps are written into a buffer: one of ``capacity`` steps, or one that doubles when
    it is full. With gradients enabled, each step makes a new tensor, so that all of them can be differentiated.

    Parameters
    ----------
    capacity : int, optional
        How many steps to make room for at once; more are an error. None grows as needed.

    Raises
    ------
    ValueError, TypeError
        If the capacity is not an int of at least 1; when used, if a step does not fit to those before it.

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

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None:
            Integer(1, ", or None")(self, "capacity", capacity)
        self.capacity = capacity
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
        key, value : Tensor (B, G, len(self), D)
        """
        length = self._length + key.shape[2]
        if self.capacity is not None and length > self.capacity:
            raise rejected("KVCache", "key", f"fit into its capacity of {self.capacity} steps", f"step {length}")
        keys = self._key = self._written("key", self._key, key, length)
        values = self._value = self._written("value", self._value, value, length)
        self._length = length
        return keys.narrow(2, 0, length), values.narrow(2, 0, length)

    @property
    def key(self) -> Tensor:
        """All keys so far, (B, G, len(self), D)."""
        return self._filled(self._key)

    @property
    def value(self) -> Tensor:
        """All values so far, (B, G, len(self), D)."""
        return self._filled(self._value)

    def reorder(self, index: Tensor) -> None:
        """Make sequence b continue what was sequence ``index[b]``: for beam search.

        Parameters
        ----------
        index : Tensor (B',) of int
        """
        if self._key is not None and self._value is not None:
            self._key, self._value = self.key.index_select(0, index), self.value.index_select(0, index)

    def truncate(self, length: int) -> None:
        """Forget all steps but the first ``length``."""
        if not 0 <= length <= self._length:
            raise rejected("KVCache", "length", f"be in [0, {self._length}]", length)
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
        return buffer.narrow(2, 0, self._length)

    def _written(self, name: str, buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Return a buffer with the new steps after the others."""
        if buffer is not None:
            B, G, _, D = buffer.shape
            if new.shape[0] != B or new.shape[1] != G or new.shape[3] != D:
                raise rejected("KVCache", name, f"have the shape ({B}, {G}, N, {D}) of the steps before", shape(new))
            if new.dtype != buffer.dtype or new.device != buffer.device:
                expected = f"have the dtype and device of the steps before, {buffer.dtype} on {buffer.device}"
                raise rejected("KVCache", name, expected, f"{new.dtype} on {new.device}")
        if torch.is_grad_enabled():  # what was returned before may be saved for a backward pass
            return new if buffer is None else torch.cat([buffer[:, :, : self._length], new], 2)
        if buffer is None or buffer.shape[2] < length:
            room = self.capacity or max(length, 2 * self._length)
            larger = new.new_empty(*new.shape[:2], room, new.shape[3])
            if buffer is not None:
                larger[:, :, : self._length] = buffer[:, :, : self._length]
            buffer = larger
        buffer.narrow(2, self._length, new.shape[2]).copy_(new)
        return buffer
