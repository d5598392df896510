"""Conversion of transformers' mask functions to structured masks, whose hidden tiles engines skip.

Dimensions: B batch, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from regard import masks
from regard.integrations.transformers._interfaces import takes_bools
from regard.integrations.transformers.model_mask import ModelMask, Structure, as_numbers
from regard.masks import Mask

#: transformers' mask functions: (batch, head, query, key) indices to whether the pair is visible.
MaskFunction = Callable[..., Any]


def model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """Return a model's mask (B, 1, L, S); parameters are those of transformers' ``eager_mask``.

    It is a :class:`~regard.integrations.transformers.model_mask.ModelMask`, except for user functions that require
    ``torch.vmap``, in compiled models, and in generation with a static cache (which may be compiled): there it is an
    ordinary tensor. None shows everything, except in compiled models, where it means a causal mask.
    """
    compiling = torch.compiler.is_compiling()
    if use_vmap or compiling or (isinstance(q_offset, Tensor) and q_length == 1):
        given: dict[str, Any] = {"mask_function": mask_function, "attention_mask": attention_mask, "device": device}
        given |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        given |= {"allow_is_causal_skip": allow_is_causal_skip and compiling, "use_vmap": use_vmap, **others}
        seen = masking_utils.sdpa_mask(batch_size, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **given)
        return seen if seen is None or takes_bools(config) else as_numbers(seen, dtype)
    q_offset, kv_offset = int(q_offset), int(kv_offset)  # a static cache has it as a tensor
    where = _Where(q_length, kv_length, q_offset, kv_offset, torch.device(device))
    real = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if real is not None:
        real = real[:, kv_offset : kv_offset + kv_length]
        real = None if not real.is_meta and bool(real.all()) else real
    structure = where.structure(mask_function)
    mask: Mask | Tensor | None = structure
    if q_length == 1:
        mask = where.row(structure, real, batch_size)
    elif real is not None:
        mask = structure & masks.key_padding(real)
    elif not structure.hides:
        mask = None
    if mask is None and allow_is_bidirectional_skip:
        return None
    parts = set(_names(mask_function))
    found = Structure(
        mask, q_offset, kv_offset, real, "causal_mask_function" in parts, bool(parts & set(_PACKED)), from_model=True
    )
    dtype = torch.bool if takes_bools(config) else dtype
    return ModelMask(found, (batch_size, 1, q_length, kv_length), dtype, where.device)


@dataclass(frozen=True)
class _Where:
    """The positions of the queries and keys of a mask."""

    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    device: torch.device

    @property
    def offset(self) -> int:
        return self.q_offset - self.kv_offset

    def structure(self, function: MaskFunction) -> Mask:
        """Convert a mask function to a Mask.

        transformers composes masks from closures, whose variables can be read. Other functions are evaluated tile by
        tile.
        """
        name, held = _closure(function)
        match name:
            case "causal_mask_function":
                return masks.causal(offset=self.offset)
            case "bidirectional_mask_function":
                return masks.everything()
            case "and_masks" | "or_masks":
                return reduce(and_ if name == "and_masks" else or_, map(self.structure, held["mask_functions"]))
            case "sliding_window_overlay":
                return masks.window(held["sliding_window"] - 1, -1, offset=self.offset)
            case "sliding_window_bidirectional_overlay":
                return masks.window(held["sliding_window"], held["sliding_window"], offset=self.offset)
            case "chunked_overlay":
                return self._chunks(held["chunk_size"], held["left_padding"])
            case "blockwise_overlay":
                return self._blocks(held["block_sequence_ids"])
            case "padding_mask_function":
                return masks.key_padding(held["padding_mask"][:, self._key_positions()].bool())
            case "packed_sequence_mask_function":
                return masks.document(held["packed_sequence_mask"])
            case "remap_positions_for_packed_sequence" if not _depends_on_starts(held["mask_function"]):
                # Pairs meet only within sequences, in which differences of positions and of indices agree.
                return self.structure(held["mask_function"])
        return masks.as_mask(self._shifted(function))

    def row(self, structure: Mask, real: Tensor | None, batch: int) -> Tensor | None:
        """Return the keys visible to a single query, (B, 1, 1, S), or None for all."""
        low, high = structure.as_band(masks.Extent(batch, 1, 1, self.keys)) or (1, None)
        if (low is None or low <= 0) and (high is None or high >= self.keys - 1):
            return None if real is None else real[:, None, None]
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        b = torch.arange(batch, device=self.device)[:, None, None, None]
        seen = (
            structure.visible(b, zero, zero, torch.arange(self.keys, device=self.device)) if structure.hides else None
        )
        seen = None if seen is None or bool(seen.all()) else seen.expand(batch, 1, 1, self.keys)
        if real is None:
            return seen
        return real[:, None, None] if seen is None else seen & real[:, None, None]

    def _chunks(self, size: int, left_padding: Tensor) -> Mask:
        ids = [
            (positions.to(left_padding.device) - left_padding[:, None]).div(size, rounding_mode="floor")
            for positions in (self._query_positions(), self._key_positions())
        ]
        return masks.document(*ids)

    def _blocks(self, ids: Tensor) -> Mask:
        queries, keys = ids[:, self._query_positions()], ids[:, self._key_positions()]
        return masks.document(queries, keys) & masks.key_padding(keys >= 0)

    def _query_positions(self) -> Tensor:
        return torch.arange(self.q_offset, self.q_offset + self.queries, device=self.device)

    def _key_positions(self) -> Tensor:
        return torch.arange(self.kv_offset, self.kv_offset + self.keys, device=self.device)

    def _shifted(self, function: MaskFunction) -> MaskFunction:
        def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            found: Tensor = function(b, h, q_idx + self.q_offset, kv_idx + self.kv_offset)
            return found

        return shifted


#: Mask functions that separate packed sequences.
_PACKED = ("packed_sequence_mask_function", "remap_positions_for_packed_sequence")


def _names(function: MaskFunction) -> Iterator[str]:
    """Yield the names of the transformers functions whose conjunction a mask function is."""
    name, held = _closure(function)
    yield name
    inner = held["mask_functions"] if name == "and_masks" else [held["mask_function"]] if name == _PACKED[1] else []
    for each in inner:
        yield from _names(each)


def _closure(function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """Return the transformers function that created a mask function, and its closure variables; else ""."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return "", {}
    cells = function.__closure__ or ()
    return function.__qualname__.partition(".")[0], {
        name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)
    }


def _depends_on_starts(function: MaskFunction) -> bool:
    """Whether a mask depends on absolute positions rather than only on their differences."""
    name, held = _closure(function)
    if name in ("and_masks", "or_masks"):
        return any(_depends_on_starts(each) for each in held["mask_functions"])
    return name not in (
        "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
    )  # fmt: skip
