"""Key–value caches of sequences of unequal lengths, one to a slot, that join and leave one by one.

Dimensions: B slots in use, G heads of keys and values, S keys, D width of a head, P steps of a shared prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import rejected, shape
from regard.nn import KVCache, LinearCache


class Slots:
    """How long the sequences in the slots are: what the caches of all layers of a model share.

    The slots in use are always the first ones, so that a step computes no others.

    Parameters
    ----------
    window : int, optional
        Number of steps that each step attends to, itself included; older ones are overwritten.
    sinks : int, default 0
        Number of first steps to keep in addition to the window.
    prefix : int, default 0
        Length of a common prefix of all sequences, which is stored once.
    device : torch.device, optional

    Attributes
    ----------
    lengths : list of int
        Steps of each sequence in use, without the prefix.
    finished : int
        Steps of tokens that all layers have made.
    """

    def __init__(
        self, *, window: int | None = None, sinks: int = 0, prefix: int = 0, device: torch.device | None = None
    ) -> None:
        if prefix and window is not None:
            raise rejected("Slots", "prefix", "be 0 where there is a window", prefix)
        self._ring = KVCache(window=window, sinks=sinks)  # maps steps to places in the buffer
        self.prefix, self.device = prefix, device
        self.lengths: list[int] = []
        self.finished = 0
        self._begun: tuple[int, ...] | None = None

    def begin(self) -> None:
        """Prepare a step of one token for every sequence in use; nothing where that was done."""
        lengths = self.lengths
        if not lengths:
            raise rejected("Slots", "slots", "be in use where a step is made", "none")
        if self._begun == (now := tuple(lengths)):
            return
        places = [self._ring.place(length) for length in lengths]
        most = self._ring.most
        filled = [length + 1 if most is None else min(length + 1, most) for length in lengths]
        #: Number of keys of the longest sequence; places of the new step, a single one if all are equal.
        self.keys = max(filled)
        self.place: int | Tensor = places[0] if min(places) == max(places) else self._tensor(places)
        self.rows = torch.arange(len(lengths), device=self.device)
        self._visible: Tensor | None = None
        if min(filled) < self.keys:
            self._visible = torch.arange(self.keys, device=self.device) < self._tensor(filled)[:, None]
        self.offsets = self._tensor(lengths)
        self.positions = (self.offsets + self.prefix)[:, None]
        self._begun = now

    @property
    def visible(self) -> Tensor | None:
        """Which keys each sequence has in the step begun, (B, 1, 1, S) of bool; None for all."""
        return None if self._visible is None else self._visible[:, None, None]

    @property
    def slides(self) -> bool:
        """Whether older steps are overwritten."""
        return self._ring.most is not None

    def kept(self, length: int) -> int:
        """Return how many steps of a sequence are kept."""
        return length if self._ring.most is None else min(length, self._ring.most)

    def columns(self, length: int) -> tuple[Tensor, Tensor]:
        """Return which steps of a sequence are kept, the prefix's among them, and in which columns of the keys.

        Parameters
        ----------
        length : int
            Its steps, without the prefix.
        """
        kept, prefix = self.kept(length), self.prefix
        steps = torch.arange(kept)
        steps = torch.where(steps < self._ring.sinks, steps, steps + (length - kept))
        places = self._ring.places(steps)
        first = torch.arange(prefix)
        return torch.cat([first, steps + prefix]), torch.cat([first, places + prefix])

    def finish(self) -> None:
        """Count the step that every layer has written."""
        self.lengths = [length + 1 for length in self.lengths]
        self.finished += 1

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)


class SlotCache:
    """The keys and values of one layer for sequences in slots; :class:`Slots` knows their lengths.

    Memory that no step has written holds zeros, as what a mask hides must be finite.

    Parameters
    ----------
    slots : Slots
        The same for all layers.
    prefix : (Tensor, Tensor), optional
        Keys and values (1, G, P, D) of the steps that stand before every sequence.

    Examples
    --------
    >>> import torch
    >>> slots = Slots()
    >>> cache, (a, b) = SlotCache(slots), torch.randn(2, 1, 2, 5, 8)
    >>> cache.load(0, a, a), cache.load(1, b[:, :, :3], b[:, :, :3])
    (None, None)
    >>> slots.lengths = [5, 3]
    >>> slots.begin()
    >>> key, value = cache.append(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8))
    >>> key.shape, slots.visible[:, 0, 0].sum(-1)
    (torch.Size([2, 2, 6, 8]), tensor([6, 4]))
    """

    def __init__(self, slots: Slots, prefix: tuple[Tensor, Tensor] | None = None) -> None:
        self.slots, self.prefix = slots, prefix
        self._buffers: list[Tensor] | None = None

    @property
    def offset(self) -> Tensor:
        """Number of keys (B,) before the step begun, with the prefix."""
        return self.slots.offsets + self.slots.prefix

    def __len__(self) -> int:
        """Return the steps of the longest sequence, with the prefix."""
        return self.slots.prefix + max(self.slots.lengths, default=0)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step that was begun and return all keys and values (B, G, S, D), without the prefix."""
        slots, B = self.slots, key.shape[0]
        if len(slots.lengths) != B or key.shape[2] != 1:
            raise rejected("SlotCache", "key", f"have the shape ({len(slots.lengths)}, G, 1, D)", shape(key))
        keys, values = self._with_room(key, value, B, slots.keys)
        if isinstance(slots.place, int):
            keys[:B, :, slots.place], values[:B, :, slots.place] = key[:, :, 0], value[:, :, 0]
        else:
            keys[slots.rows, :, slots.place] = key[:, :, 0]
            values[slots.rows, :, slots.place] = value[:, :, 0]
        return keys[:B, :, : slots.keys], values[:B, :, : slots.keys]

    def by_length(self) -> list[SlotGroup]:
        """Return the sequences in groups of one length, for the step that was begun."""
        lengths = self.slots.lengths
        rows = {each: [row for row, length in enumerate(lengths) if length == each] for each in sorted(set(lengths))}
        return [SlotGroup(self, torch.tensor(own, device=self.slots.device), length) for length, own in rows.items()]

    def append_to(self, rows: Tensor, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step (R, G, 1, D) of sequences of this length; return their keys and values (R, G, S, D)."""
        both = self._with_room(key, value, len(self.slots.lengths), self.slots.keys)
        for buffer, new in zip(both, (key, value)):
            buffer[rows, :, length] = new[:, :, 0]
        keys, values = (buffer[:, :, : length + 1].index_select(0, rows) for buffer in both)
        return keys, values

    def load(self, slot: int, key: Tensor, value: Tensor) -> None:
        """Put a sequence into a slot.

        Parameters
        ----------
        slot : int
        key, value : Tensor (1, G, N, D)
            Of the steps that are kept, as a buffer has them.
        """
        buffers = self._with_room(key, value, slot + 1, key.shape[2])
        for buffer, new in zip(buffers, (key, value)):
            buffer[slot, :, : new.shape[2]] = new[0]
            buffer[slot, :, new.shape[2] :] = 0

    def move(self, source: int, target: int) -> None:
        """Put the sequence of one slot into another."""
        for buffer in self._buffers or ():
            buffer[target] = buffer[source]

    def reorder(self, index: Tensor) -> None:
        """Make sequence b continue what was sequence ``index[b]``: for beam search."""
        if self._buffers is not None:
            self._buffers = [buffer.index_select(0, index) for buffer in self._buffers]

    def truncate(self, length: int) -> None:
        """Do nothing: a step that failed is written again, where it was."""

    def _with_room(self, key: Tensor, value: Tensor, rows: int, keys: int) -> list[Tensor]:
        """Return the buffers, with room for so many rows and keys."""
        old = self._buffers
        if old is not None and old[0].shape[0] >= rows and old[0].shape[2] >= keys:
            return old
        if old is not None:
            rows = max(rows, old[0].shape[0])
            keys = old[0].shape[2] if old[0].shape[2] >= keys else self.slots.kept(max(keys, 2 * old[0].shape[2]))
        made = [each.new_zeros(rows, each.shape[1], keys, each.shape[3]) for each in (key, value)]
        for new, before in zip(made, old or ()):
            new[: before.shape[0], :, : before.shape[2]] = before
        self._buffers = made
        return made


class SlotGroup:
    """Sequences of one length in a :class:`SlotCache` without a window, as layers see them that make their own masks.

    Attributes
    ----------
    rows : Tensor (R,) of int
        Their slots.
    """

    #: The last step is the last key.
    offset = None

    def __init__(self, cache: SlotCache, rows: Tensor, length: int) -> None:
        self.rows, self.prefix = rows, cache.prefix
        self._cache, self._length = cache, length

    def __len__(self) -> int:
        """Return the steps of each sequence, with the prefix."""
        return self._cache.slots.prefix + self._length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step that was begun and return all keys and values (R, G, S, D), without the prefix."""
        return self._cache.append_to(self.rows, self._length, key, value)

    def truncate(self, length: int) -> None:
        """Do nothing: a step that failed is written again, where it was."""


class LinearSlotCache(LinearCache):
    """The states of linear attention or another recurrence for sequences in slots; :class:`Slots` knows their lengths.

    Parameters
    ----------
    slots : Slots
        The same for all layers.
    """

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots
        self._begun: tuple[int, tuple[Tensor, ...]] | None = None

    def __len__(self) -> int:
        """Return how many steps there are, of the longest sequence."""
        return max(self.slots.lengths, default=0)

    @property
    def state(self) -> tuple[Tensor, ...] | None:
        """The state of the sequences in use; None before the first step."""
        self._settle()
        if self._sums is None:
            return None
        lengths = self.slots.lengths
        self._make_room(len(lengths))
        fresh = [row for row, length in enumerate(lengths) if not length]
        for each in self._sums if fresh else ():
            each[fresh] = 0  # clear what an earlier sequence left in the slot
        return tuple(each[: len(lengths)] for each in self._sums)

    def advance(self, state: tuple[Tensor | None, ...], steps: int) -> None:  # noqa: ARG002
        """Replace the state by the one after another step, as soon as all layers have finished it."""
        self._settle()
        self._begun = (self.slots.finished, tuple(each for each in state if each is not None))

    def load(self, slot: int, *state: Tensor) -> None:
        """Put the state (1, ...) of a sequence into a slot."""
        self._settle()
        if self._sums is None:
            self._sums = tuple(each.new_zeros(0, *each.shape[1:]) for each in state)
        self._make_room(slot + 1)
        for each, new in zip(self._sums, state):
            each[slot] = new[0]

    def move(self, source: int, target: int) -> None:
        """Put the sequence of one slot into another."""
        self._settle()
        self._make_room(source + 1)
        for each in self._sums or ():
            each[target] = each[source]

    def reorder(self, index: Tensor) -> None:
        """Make sequence b continue what was sequence ``index[b]``: for beam search."""
        self._settle()
        self._make_room(int(index.max()) + 1 if len(index) else 0)
        super().reorder(index)

    def truncate(self, length: int) -> None:
        """Do nothing: a step that failed is computed again."""

    def _settle(self) -> None:
        """Take over the step begun, if it was finished; one that failed is computed again."""
        if self._begun is None:
            return
        (begun, sums), self._begun = self._begun, None
        if self.slots.finished > begun:
            self._sums = sums

    def _make_room(self, rows: int) -> None:
        """Let there be so many rows; new ones are 0."""
        if self._sums is not None and (missing := rows - len(self._sums[0])) > 0:
            self._sums = tuple(F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in self._sums)
