"""Nested tensors of every layout in torch, built from padded tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from regard.engines import Engine
from regard.nn import MultiheadAttention
from regard.testing.case import Case, CaseCall, Recipe
from regard.testing.case_generator import CaseSampler
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law
from regard.testing.trial import Trial, keeps_lse

#: The start and length of each sequence in a padded tensor.
Places = Sequence[tuple[int, int]]

#: Builds a nested tensor from padded sequences (B, N, E), as a view or a copy.
Maker = Callable[[Tensor, Places], Tensor]


def rows(padded: Tensor, places: Places) -> list[Tensor]:
    """Return the sequences."""
    return [each[start : start + length] for each, (start, length) in zip(padded, places)]


def narrowed(padded: Tensor, places: Places) -> Tensor:
    """Return sequences in place, with gaps between them, as ``torch.nested.narrow`` should.

    In torch 2.13 that function returns wrong rows if the first sequence ends at the end of its row and the last one
    begins after the start of its own.
    """
    starts, lengths = (torch.tensor(column, device=padded.device) for column in zip(*places))
    starts = starts + padded.shape[1] * torch.arange(len(padded), device=padded.device)
    return nested_tensor_from_jagged(padded.flatten(0, 1), torch.cat((starts, (starts + lengths)[-1:])), lengths)


def with_exact_lengths(padded: Tensor, places: Places) -> Tensor:
    """Return sequences without gaps, but with explicit lengths."""
    lengths = torch.tensor([length for _, length in places], device=padded.device)
    return nested_tensor_from_jagged(torch.cat(rows(padded, places)), _offsets(lengths), lengths)


def with_ends(padded: Tensor, places: Places) -> Tensor:
    """Return contiguous sequences, with extra rows before the first and after the last."""
    offsets = _offsets(torch.tensor([length for _, length in places], device=padded.device)) + 2
    ends = padded[0, :1].expand(2, -1), padded[0, :1].expand(3, -1)
    return nested_tensor_from_jagged(torch.cat((ends[0], *rows(padded, places), ends[1])), offsets)


def turned(padded: Tensor, places: Places) -> Tensor:
    """Return sequences as a transposed view of a (features, rows) tensor."""
    offsets = _offsets(torch.tensor([length for _, length in places], device=padded.device))
    return nested_tensor_from_jagged(torch.cat(rows(padded, places)).T, offsets, jagged_dim=2).transpose(1, 2)


def strided(padded: Tensor, places: Places) -> Tensor:
    """Return sequences in torch's strided layout."""
    return torch.nested.as_nested_tensor(rows(padded, places))


def jagged(padded: Tensor, places: Places) -> Tensor:
    """Return contiguous sequences in torch's jagged layout."""
    return torch.nested.as_nested_tensor(rows(padded, places), layout=torch.jagged)


#: All layouts.
MAKERS: tuple[Maker, ...] = (narrowed, with_exact_lengths, with_ends, turned, strided, jagged)


def sequences(nested: Any) -> list[Tensor]:
    """Return the sequences of a nested tensor; torch's ``unbind`` rejects rows outside all sequences."""
    if nested.layout == torch.strided or nested.lengths() is not None:
        return list(nested.unbind())
    return [nested.values()[start:stop] for start, stop in itertools.pairwise(nested.offsets().tolist())]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


# Sequences of different lengths in one call: nested tensors in the multi-head layer -----------------------------------


#: Masks of positions only, which mean the same for each sequence alone.
_POSITIONS = {"causal", "window", "dilated", "chunked", "alibi", "relative", "sinks", "everything", "prefix", "others"}


def _ragged(case: Case) -> Case | None:
    if 0 in (case.extent.B, case.extent.H, case.queries, case.keys, case.width) or case.dropout_p:
        return None
    if case.score in ("location", "score_mod/sequence"):  # these depend on the number of keys or the sequence index
        return None
    return judged(
        case.but(
            lead=(case.extent.B,), layout="plain", learned=False, key_width=0, value_width=case.width,
            scale=None, softcap=None, ridge=0.0, rows="random", mask=case.mask if _is_of_positions(case.mask) else None,
        )
    )  # fmt: skip


def _is_of_positions(recipe: Recipe | None) -> bool:
    if recipe is None:
        return True
    if recipe[0] in ("and", "or", "not"):
        return all(map(_is_of_positions, recipe[1:]))
    return recipe[0] in _POSITIONS and "each" not in recipe and recipe != ("others", True)


@law(
    "nested",
    "Each sequence of a nested tensor has the same output and gradients as alone, for every layout.",
    _ragged,
    share=0.3,
)
def ragged(case: Case, engine: Engine) -> None:
    """Run a multi-head layer without projections on sequences cut from a case, some of them empty."""
    call, dice = CaseCall.of(case), CaseSampler(case.seed)
    make = dice.pick(MAKERS)
    inputs = {name: getattr(call, name).detach() for name in ("query", "key", "value")}  # (B, H or G, N, E) each
    places = {name: _places(dice, case.extent.B, inputs[name].shape[-2]) for name in ("query", "key")}
    lengths = [length for _, length in places["key"]]
    places["value"] = [(dice.pick(range(case.keys - length + 1)), length) for length in lengths]
    sources = {name: x.transpose(1, 2).flatten(2).requires_grad_() for name, x in inputs.items()}
    layer = _without_projections(call, engine)
    ends = [make(x, places[name]) for name, x in sources.items()]
    outputs = sequences(layer(*ends, need_weights=False, attn_mask=call.mask)[0])
    trials, upstreams = [], []
    for i, output in enumerate(outputs):
        own = {name: x[i : i + 1, :, slice(*_span(places[name][i]))] for name, x in inputs.items()}
        trial = Trial(call.but(**own, enable_gqa=True), keeps_lse=keeps_lse(engine))
        heads = output.unflatten(-1, (case.extent.H, -1)).transpose(0, 1).unsqueeze(0)
        trial.check_output(heads, f"the output of sequence {i}")
        trials.append(trial)
        upstreams.append(trial.upstream(heads))
    flat = [upstream[0].transpose(0, 1).flatten(1) for upstream in upstreams]
    found = torch.autograd.grad(outputs, list(sources.values()), flat, allow_unused=True)
    for i, trial in enumerate(trials):
        if trial.undecided.any():
            continue
        grads = {
            name: _of(torch.zeros_like(x) if gradient is None else gradient, i, places[name][i], inputs[name])
            for (name, x), gradient in zip(sources.items(), found)
        }
        trial.check_gradients(grads, upstreams[i])


def _places(dice: CaseSampler, count: int, rows: int) -> list[tuple[int, int]]:
    """Return random starts and lengths of sequences, with at least one row in total."""
    lengths = [dice.pick(range(rows + 1)) for _ in range(count)]
    lengths[-1] = max(lengths[-1], 1)
    return [(dice.pick(range(rows - length + 1)), length) for length in lengths]


def _span(place: tuple[int, int]) -> tuple[int, int]:
    return place[0], place[0] + place[1]


def _of(gradient: Tensor, i: int, place: tuple[int, int], like: Tensor) -> Tensor:
    """Return a sequence's part (1, H, N, E) of the gradient (B, N, H·E) of padded sequences."""
    return gradient[i : i + 1, slice(*_span(place))].unflatten(-1, (like.shape[1], -1)).transpose(1, 2)


def _without_projections(call: CaseCall, engine: Engine) -> MultiheadAttention:
    """Return a multi-head layer with a call's parts and identity projections."""
    _, heads, _, width = call.query.shape
    wide, narrow = heads * width, call.key.shape[1] * width
    layer = MultiheadAttention(
        wide, heads, bias=False, kdim=narrow, vdim=narrow, num_kv_heads=call.key.shape[1], batch_first=True,
        score=call.score, normalizer=call.normalizer, engine=engine,
        dtype=call.query.dtype, device=call.query.device,
    )  # fmt: skip
    for parameter in layer.parameters():
        rows, columns = parameter.shape
        parameter.data = torch.eye(columns, dtype=parameter.dtype, device=parameter.device).repeat(rows // columns, 1)
    return layer.requires_grad_(requires_grad=False)
