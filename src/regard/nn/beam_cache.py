"""Keys and values of a beam search, each kept once for all beams that come from it.

Dimensions: B sequences, K beams, R = B·K rows, G key–value heads, N keys of a sequence, D width of a head.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._errors import rejected, shape

#: Keys that no beam comes from any more are dropped where they are as many as the others.
_SLACK = 2
#: Steps that there is room for behind what was kept.
_ROOM = 8


class BeamCache:
    """The projected keys and values of the steps so far, for the beams of B sequences.

    A step of K beams adds K keys to those of its sequence, which all of its beams have before them; a mask says which
    ones a beam comes from. So when beams are chosen anew the mask alone changes, and what several beams have in common
    is read once. Keys that no beam comes from any more are dropped now and then.

    Pass one to every call of a :class:`~regard.nn.MultiheadAttention` that decodes one step of R rows, a sequence's
    beams together; each layer needs its own.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import BeamCache, KVCache, MultiheadAttention
    >>> layer = MultiheadAttention(8, 2, batch_first=True).eval()
    >>> beams, rows, chosen = BeamCache(), KVCache(), torch.tensor([1, 1, 2, 3])   # of two sequences with two beams
    >>> for t, x in enumerate(torch.randn(3, 4, 1, 8)):
    ...     if t:
    ...         beams.reorder(chosen, 2)
    ...         rows.reorder(chosen)
    ...     else:
    ...         beams.reorder(None, 2)
    ...     ours, theirs = (layer(x, x, x, is_causal=True, cache=each)[0] for each in (beams, rows))
    >>> torch.allclose(ours, theirs, atol=1e-6), len(beams)
    (True, 3)
    """

    def __init__(self) -> None:
        self._sequences = 0
        self._key: Tensor | None = None  # (B, G, room, D)
        self._value: Tensor | None = None
        self._seen: Tensor | None = None  # (B, K, N), which keys a beam comes from
        self._ends: list[int] = []  # N after each step; 0 where it is no longer known
        self._written = [0]  # keys in the buffers, which copies of this cache may share

    def __len__(self) -> int:
        """Return how many steps there are."""
        return len(self._ends)

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__ | {"_ends": list(self._ends)}
        return twin

    def truncate(self, length: int) -> None:
        """Forget all steps but the first ``length``, which are no fewer than there were at the last reordering."""
        if length == len(self):
            return
        count = self._ends[length - 1] if length else 0
        if not 0 <= length < len(self) or (length and not count):
            raise rejected("BeamCache", "length", f"be at most {len(self)}, and not before a reordering", length)
        self._ends = self._ends[:length]
        self._seen = None if self._seen is None or not length else self._seen[..., :count]
        if not length:
            self._key = self._value = None

    def reorder(self, index: Tensor | None, sequences: int) -> None:
        """Make row r continue what was row ``index[r]``.

        Parameters
        ----------
        index : Tensor (R',) of int, or None
            A sequence's beams together; None for the rows as they are.
        sequences : int
            How many sequences B' there are from now on.
        """
        self._sequences = sequences
        if index is None or self._seen is None:
            return
        beams = self._seen.shape[1]
        rows = index.view(sequences, -1)
        source, parent = rows // beams, rows % beams
        kept = source[:, 0]
        if bool((source != kept[:, None]).any()):
            raise rejected("BeamCache", "index", "have a sequence's beams together", index.tolist()[:10])
        self._seen = self._seen[kept[:, None], parent]
        self._ends = [*([0] * (len(self) - 1)), self._seen.shape[2]]
        alive = self._seen.any(1)  # (B', N)
        most = int(alive.sum(1).max())
        same = torch.equal(kept, torch.arange(0 if self._key is None else len(self._key), device=kept.device))
        if not same or self._seen.shape[2] > _SLACK * most:
            self._compact(kept, alive, most)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append a step, and return what its rows may see.

        Parameters
        ----------
        key, value : Tensor (R, G, 1, D)

        Returns
        -------
        key, value : Tensor (B, G, N, D)
        mask : Tensor (B, 1, K, N) or None
            −inf for keys that a beam does not come from, else 0; None where there are no such.
        """
        B = self._sequences
        if key.shape[2] != 1 or not B or len(key) % B:
            raise rejected("BeamCache", "key", f"be a step of the beams of {B} sequences, (R, G, 1, D)", shape(key))
        K, N = len(key) // B, 0 if self._seen is None else self._seen.shape[2]
        self._key, self._value = (
            self._grown(buffer, new.reshape(B, K, new.shape[1], new.shape[3]).transpose(1, 2), N)
            for buffer, new in ((self._key, key), (self._value, value))
        )
        self._written = self._written if self._written[0] == N else [N]
        self._written[0] = N + K
        own = torch.eye(K, dtype=torch.bool, device=key.device).expand(B, K, K)
        self._seen = own if self._seen is None else torch.cat([self._seen, own], 2)
        self._ends.append(N + K)
        mask = None
        if K > 1:
            mask = torch.zeros(B, 1, K, N + K, device=key.device).masked_fill_(~self._seen.unsqueeze(1), -torch.inf)
        return self._key[:, :, : N + K], self._value[:, :, : N + K], mask

    def fold(self, rows: Tensor) -> Tensor:
        """Return rows (R, H, 1, D) as K queries of each sequence, (B, H, K, D)."""
        return rows.squeeze(2).unflatten(0, (self._sequences, -1)).transpose(1, 2)

    def unfold(self, queries: Tensor) -> Tensor:
        """Return queries (B, H, K, D) as rows (R, H, 1, D)."""
        return queries.transpose(1, 2).flatten(0, 1).unsqueeze(2)

    def _grown(self, buffer: Tensor | None, new: Tensor, count: int) -> Tensor:
        """Return a buffer (B, G, room, D) whose first ``count`` keys of each sequence are followed by new ones."""
        B, G, K, D = new.shape
        if torch.is_grad_enabled():  # what was returned before may be saved for a backward pass
            return new if buffer is None else torch.cat([buffer[:, :, :count], new], 2)
        if buffer is None or buffer.shape[2] < count + K or self._written[0] != count:  # full, or a copy has gone on
            larger = new.new_empty(B, G, 2 * count + _ROOM * K, D)
            if buffer is not None:
                larger[:, :, :count] = buffer[:, :, :count]
            buffer = larger
        buffer[:, :, count : count + K] = new
        return buffer

    def _compact(self, kept: Tensor, alive: Tensor, most: int) -> None:
        """Keep of sequences ``kept`` the keys (B', N) that are alive, of each as many as ``most``."""
        assert self._seen is not None
        assert self._key is not None and self._value is not None
        places = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]  # (B', most), in order
        self._seen = self._seen.gather(2, places[:, None].expand(-1, self._seen.shape[1], -1))
        room = 0 if torch.is_grad_enabled() else most + _ROOM * self._seen.shape[1]
        places = F.pad(places, (0, room - most)) if room else places
        G, old = self._key.shape[1:3]
        heads = kept[:, None] * G + torch.arange(G, device=kept.device)  # (B', G)
        flat = (heads[..., None] * old + places[:, None]).flatten()
        self._key, self._value = (
            each.flatten(0, 2).index_select(0, flat).unflatten(0, (len(kept), G, -1))
            for each in (self._key, self._value)
        )
        self._written = [most]
        self._ends = [*([0] * (len(self) - 1)), most]


def continued(cache: BeamCache, steps: int, rows: Tensor | None, sequences: int) -> BeamCache:
    """Return a cache of the first steps whose rows go on from others; the one that is given stays as it is."""
    twin = copy.copy(cache)
    twin.truncate(steps)
    twin.reorder(rows, sequences)
    return twin
