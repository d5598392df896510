"""Partial results over some of the keys: merged, and differentiated by what is known of all keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard import _plan, _problem
from regard._attention import attention
from regard._aux import AuxRequest
from regard._errors import rejected
from regard._problem import Problem
from regard.distributed.schedule import Region
from regard.engines import EngineLike
from regard.engines.online_softmax import OnlineSoftmax
from regard.masks import submatrix
from regard.masks.base import Extent, Mask
from regard.normalizers import Normalizer
from regard.scores import Score


@dataclass(frozen=True)
class Parts:
    """What an attention consists of beside its tensors; the mask is bound to the whole problem.

    Attributes
    ----------
    score, mask, normalizer : the parts
    scale, softcap : float or None
    engine : str or Engine
    extent : Extent
        The size of the whole problem.
    """

    score: Score
    mask: Mask | None
    normalizer: Normalizer
    scale: float | None
    softcap: float | None
    engine: EngineLike
    extent: Extent

    @property
    def names_engine(self) -> bool:
        """Whether the caller names an engine, which may refuse; "auto" always finds one for what merges."""
        return _plan.resolve(self.engine) is not None

    @property
    def moves(self) -> bool:
        """Whether the score depends on positions, and so differs between regions."""
        return self.score.at(0, 1) is not self.score

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all parts."""
        held = (self.score, self.mask, self.normalizer)
        return [tensor for part in held if part is not None for tensor in part.tensors()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Parts:
        """Return the same parts around other tensors, in the order of :meth:`tensors`."""
        remaining = list(tensors)

        def take(_: Tensor) -> Tensor:
            return remaining.pop(0)

        score = self.score.map_tensors(take)
        mask = None if self.mask is None else self.mask.map_tensors(take)
        return replace(self, score=score, mask=mask, normalizer=self.normalizer.map_tensors(take))

    def at(self, region: Region) -> tuple[Score, Mask | None]:
        """Return score and mask for a region."""
        score = self.score.at(region.first_query, region.first_key)
        if score is None:
            expected = "know what it is in a part of the sequence (define Score.at), as it looks at positions"
            raise rejected("ring_attention", "score", expected, repr(self.score))
        if self.mask is None or not region.masked:
            return score, None
        rows = region.first_query, region.rows[1] - region.rows[0]
        keys = region.first_key, region.keys[1] - region.keys[0]
        return score, submatrix(self.mask, self.extent, rows, keys)

    def attend(
        self, region: Region, query: Tensor, key: Tensor, value: Tensor, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, H, l, V) of a region, and the log-sum-exp (B, H, l) of its scores."""
        score, mask = self.at(region)
        output, aux = attention(
            query, key, value, mask, scale=self.scale, enable_gqa=True, score=score, normalizer=self.normalizer,
            softcap=self.softcap, engine=self.engine, return_aux=AuxRequest(lse=wants_lse),
        )  # fmt: skip
        return output, aux.lse

    def attached(self, region: Region, ends: Sequence[Tensor], output: Tensor, lse: Tensor) -> Tensor:
        """Return a region's rows of the whole output, with the derivative of the region's part in them.

        ``ends`` are its queries, keys and values.
        """
        problem = self._problem(region, ends)
        made = _plan.with_graph(problem, _plan.choose(problem, self.engine), output, lse)
        assert made is not None  # engine 'streaming' differentiates what merges
        return made

    def check_engine(self, region: Region, ends: Sequence[Tensor]) -> None:
        """Raise if the named engine refuses a region; ``ends`` are tensors like its queries, keys and values."""
        _plan.choose(self._problem(region, ends), self.engine)

    def _problem(self, region: Region, ends: Sequence[Tensor]) -> Problem:
        (query, key, value), (score, mask) = ends, self.at(region)
        return _problem.build(
            query, key, value, mask, 0.0, False, self.scale, True, score, self.normalizer, self.softcap
        )


class Merged:
    """The rows of a rank, merged from the regions that were computed so far.

    Parameters
    ----------
    query : Tensor (B, H, L, E)
        Of the dtype to calculate in.
    width : int
        That of the values.
    online : bool
        Whether parts merge by their log-sum-exp, and not as a plain sum.
    pieces : int
        Pieces that the rows consist of; a region has some of them.
    """

    def __init__(self, query: Tensor, width: int, online: bool, pieces: int) -> None:
        self.online = online
        self.step = query.shape[2] // pieces
        self.sum = query.new_zeros(*query.shape[:3], 0 if online else width)
        self.states = [
            OnlineSoftmax(query.new_zeros(*query.shape[:2], self.step, 1), width if online else 0)
            for _ in range(pieces)
        ]

    def add(self, region: Region, output: Tensor, lse: Tensor | None) -> None:
        """Add a region's output (B, H, l, V) and log-sum-exp (B, H, l)."""
        first, stop = region.rows
        if not self.online:
            self.sum[:, :, first:stop] += output
            output = output[..., :0]
        if lse is None:
            return
        for row in range(first, stop, self.step):
            part = slice(row - first, row - first + self.step)
            self.states[row // self.step].merge(output[:, :, part], lse[:, :, part].unsqueeze(-1))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, L, V), 0 in rows that see nothing, and the log-sum-exp (B, H, L)."""
        found = [state.finish() for state in self.states]
        output, lse = (torch.cat(each, 2) for each in zip(*found))
        return output if self.online else self.sum, lse.squeeze(-1)
