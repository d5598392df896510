"""A sequence divided among processes gives what one process gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from tiers import sized
from torch import Tensor

import regard
from regard import masks, scores
from regard.distributed import ContextParallel, gather_sequence, ring_attention, shard_positions, shard_sequence

B, H, E, V = 2, 4, 8, 6
#: A multiple of twice 2, 3 and 4 ranks.
L = 96
#: Of every so many cases one is compared.
STEP = sized(1, 4)

generator = torch.Generator().manual_seed(11)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


MATRIX = uniform(L, L) < 0.2
MATRIX[7] = False
BIAS = normal(H, L, L)
BIAS[:, :, 11] = -math.inf
IDS = torch.stack([torch.arange(L) // 40, torch.arange(L) // 17])
POSITIONS = normal(L, E)
W = [normal(E, E) for _ in range(2)] + [normal(E)]


def learned(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


SCORES: dict[str, Any] = {
    "dot": lambda: None,
    "additive": lambda: scores.Additive(*learned(W[2], W[0], W[1])),
    "gaussian": lambda: scores.Gaussian(*learned(torch.full((E,), 1.7, dtype=torch.float64))),
    "general": lambda: scores.General(*learned(W[0])),
    "cosine": lambda: scores.Cosine(*learned(torch.tensor(0.3, dtype=torch.float64))),
    "epanechnikov": lambda: scores.Epanechnikov(*learned(torch.full((E,), 4.5, dtype=torch.float64))),
    "location": lambda: scores.Location(*learned(POSITIONS)),
    "score_mod": lambda: lambda score, b, h, q, k: score - 0.1 * (h + 1) * (q - k).abs(),
}
MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.causal() & masks.window(13, 0),
    "sinks": lambda: masks.causal() & (masks.window(9, 0) | masks.sinks(2)),
    "documents": lambda: masks.document(IDS) & masks.causal(),
    "padding": lambda: masks.padding(torch.tensor([61, 0])),
    "matrix": lambda: MATRIX,
    "bias": lambda: masks.dense(*learned(BIAS)),
    "alibi": lambda: masks.causal() & masks.alibi(H),
    "relative": lambda: masks.relative(*learned(BIAS[0, 0, :9].clamp(-2, 2))),
    "function": lambda: lambda b, h, q, k: (q + 2 * k + h) % 3 == 0,
}


@dataclass(frozen=True)
class Case:
    """One comparison."""

    score: str = "dot"
    mask: str = "none"
    layout: str = "zigzag"
    groups: int = H
    normalizer: str = "softmax"
    engine: str = "auto"
    softcap: float | None = None
    keys: int = L


CASES = [
    *(Case(score, "window") for score in SCORES),
    *(Case("dot", mask, layout) for mask in MASKS for layout in ("contiguous", "zigzag")),
    *(Case(score, "none", "contiguous", groups=2) for score in SCORES),
    *(Case("additive", mask, groups=2) for mask in ("bias", "documents", "padding", "relative")),
    *(Case("dot", mask, groups=1, engine=engine) for mask in ("causal", "sinks") for engine in ("fused", "streaming")),
    Case("dot", "alibi", engine="reference", groups=2),
    Case("dot", "causal", softcap=2.0),
    Case("general", "none", keys=192),
    Case("dot", "causal", normalizer="sigmoid"),
    Case("additive", "padding", "contiguous", normalizer="sigmoid", groups=2),
]


@cache
def sample(keys: int, groups: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(keys + groups)
    shapes = (B, H, L, E), (B, groups, keys, E), (B, groups, keys, V), (B, H, L, V)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def call(case: Case, tensors: list[Tensor], attend: Any, **named: Any) -> tuple[Tensor, ...]:
    """Return output, log-sum-exp, and gradients to query, key, value and the parts' tensors."""
    *ends, grad = tensors
    query, key, value = (t.clone().requires_grad_() for t in ends)
    score, mask = SCORES[case.score](), MASKS[case.mask]()
    parts = [p for p in (score, mask) if isinstance(p, (scores.Score, masks.Mask))]
    inside = [t for p in parts for t in p.tensors() if t.requires_grad]
    output, aux = attend(
        query, key, value, mask, enable_gqa=True, score=score, normalizer=case.normalizer, softcap=case.softcap,
        engine=case.engine, return_aux=regard.AuxRequest(lse=True), **named,
    )  # fmt: skip
    return (
        output.detach(),
        aux.lse,
        *torch.autograd.grad(output, [query, key, value, *inside], grad, materialize_grads=True),
    )


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number; rows that see nothing must agree."""
    assert found.shape == expected.shape
    assert torch.equal(found.isneginf(), expected.isneginf())
    found, expected = (torch.where(t.isneginf(), 0.0, t) for t in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def compared(case: Case, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the error of what each rank has its own slice of, and that of the parts' gradients, which are sums."""
    whole = sample(case.keys, case.groups)
    expected = call(case, whole, regard.attention)
    context = ContextParallel(group, case.layout)  # type: ignore[arg-type]
    own = [context.shard(t, 2) for t in whole]
    output, lse, *grads = call(case, own, context.attend)
    for gradient in grads[3:]:
        dist.all_reduce(gradient, group=group)
    found = [context.gather(t, 2) for t in (output, lse, *grads[:3])] + grads[3:]
    assert len(found) == len(expected)
    errors = [error(*pair) for pair in zip(found, expected)]
    return max(errors[:5]), max(errors[5:], default=0.0)


def cases(size: int, step: int) -> list[Case]:
    """Return every case in so many for 4 ranks, and a third of these for 2 and for 3."""
    return CASES[::step] if size == 4 else CASES[size % 2 :: 3 * step]


def compare_all(rank: int, step: int) -> dict[str, float]:
    found = {}
    for size in (2, 3, 4):
        group = dist.new_group(list(range(size)))
        if rank < size:
            for case in cases(size, step):
                found[f"{size} ranks, {case}"], found[f"{size} ranks, {case}, parts"] = compared(case, group)
            found[f"{size} ranks, twice the same bits"] = repeated(group)
            found[f"{size} ranks, not a number"] = hidden_nan(group)
            found |= narrow(group, size)
            found[f"{size} ranks, layouts"] = layouts(group, size)
            errors(group)
    return found


def repeated(group: dist.ProcessGroup) -> float:
    case = Case("additive", "causal")
    own = [shard_sequence(t, 2, group, "zigzag") for t in sample(L, H)]
    first, second = (call(case, own, ring_attention, group=group, layout="zigzag") for _ in range(2))
    return 0.0 if all(torch.equal(a, b) for a, b in zip(first, second)) else math.inf


def hidden_nan(group: dist.ProcessGroup) -> float:
    """What is hidden cannot leak, from whichever rank it comes."""
    whole = [t.clone() for t in sample(L, H)]
    clean = [t.clone() for t in whole]
    for t, bad in ((1, math.nan), (2, math.inf)):
        whole[t][1, :, 70:] = bad
        clean[t][1, :, 70:] = 0.0
    case, worst = Case("dot", "padding", "contiguous"), 0.0
    for case in (Case("dot", "padding", "contiguous"), Case("additive", "padding")):
        results = []
        for tensors in (whole, clean):
            own = [shard_sequence(t, 2, group, case.layout) for t in tensors]  # type: ignore[arg-type]
            results.append(call(case, own, ring_attention, group=group, layout=case.layout))
        worst = max(worst, *(error(a, b) for a, b in zip(*results)))
    return worst


def narrow(group: dist.ProcessGroup, size: int) -> dict[str, float]:
    """Narrow inputs: errors in units of what the eager formula makes of the same, plus a rounding."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = [t.to(dtype) for t in sample(L, H)]
        exact = [t.double() for t in given]
        case = Case("dot", "causal")
        expected = call(case, exact, regard.attention)
        eager = call(Case("dot", "causal"), given, eager_attention)
        own = [shard_sequence(t, 2, group, "zigzag") for t in given]
        output, _, *grads = call(case, own, ring_attention, group=group, layout="zigzag")
        assert output.dtype == grads[1].dtype == dtype
        for name, mine, his, true in zip(
            ("output", "query", "key", "value"), (output, *grads), (eager[0], *eager[2:]), (expected[0], *expected[2:])
        ):
            mine = gather_sequence(mine, 2, group, "zigzag").double()
            budget = 2 * float((his.double() - true).abs().max()) + torch.finfo(dtype).eps * float(true.abs().max())
            found[f"{size} ranks, {dtype}, {name}"] = float((mine - true).abs().max()) / budget * 1e-15
    return found


def eager_attention(query: Tensor, key: Tensor, value: Tensor, _: Any, **named: Any) -> tuple[Tensor, regard.Aux]:
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    products = (query @ key.mT / math.sqrt(E)).masked_fill(hidden, -math.inf)
    return products.softmax(-1) @ value, regard.Aux(lse=products.logsumexp(-1).detach())


def layouts(group: dist.ProcessGroup, size: int) -> float:
    whole = torch.arange(3.0 * L * 2).view(3, L, 2)
    for layout in ("contiguous", "zigzag"):
        positions = shard_positions(L, group, layout)  # type: ignore[arg-type]
        own = shard_sequence(whole, 1, group, layout)  # type: ignore[arg-type]
        assert torch.equal(own, whole[:, positions]) and len(positions) == L // size
        assert torch.equal(gather_sequence(own, 1, group, layout), whole)  # type: ignore[arg-type]
    return 0.0


def rejected(expected: str, function: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=expected) as info:
        function(*arguments, **named)
    assert "\n" not in str(info.value), info.value


def errors(group: dist.ProcessGroup) -> None:
    """What is wrong is said in a sentence, on every rank; and the ring goes on working."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    own = [shard_sequence(t, 2, group) for t in sample(L, H)]
    q, k, v, _ = own
    named = {"group": group}
    rejected("dropout_p must be 0: ranks would drop", ring_attention, q, k, v, None, 0.5, **named)
    for normalizer in ("sparsemax", "entmax15", "argmax", "gumbel"):
        expected = "normalizer must be 'softmax' or 'sigmoid', whose partial results can be merged, got"
        rejected(expected, ring_attention, q, k, v, normalizer=normalizer, **named)
    rejected("layout must be one of 'contiguous', 'zigzag', got 'zig'", ring_attention, q, k, v, layout="zig", **named)
    rejected(r"query must have shape \(B, heads, length", ring_attention, q[0], k[0], v[0], **named)
    request = regard.AuxRequest(lse=True, entropy=True)
    rejected("return_aux must request only lse, got entropy", ring_attention, q, k, v, return_aux=request, **named)
    request = regard.AuxRequest(lse="grad")
    rejected("return_aux must request lse=True: the log-sum-exp", ring_attention, q, k, v, return_aux=request, **named)
    rejected("have an even number of positions", ring_attention, q[:, :, :3], k, v, layout="zigzag", **named)
    rejected(
        "masks.document: ids must have one id per query", ring_attention, q, k, v, masks.document(IDS[:, :9]), **named
    )
    weight = scores.Location(POSITIONS[:-1])
    rejected(
        "Location's weight must have at least one row for each of 96 keys",
        ring_attention,
        q,
        k,
        v,
        score=weight,
        **named,
    )
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    captured = {"score": lambda score, b, h, i, j: score * slope}
    rejected(
        "score and attn_mask must hold tensors that require gradients", ring_attention, q, k, v, **captured, **named
    )
    rejected("score must define Score.at", ring_attention, q, k, v, score=Late(), **named)
    rejected("x must have a multiple of .* positions", shard_sequence, torch.ones(3, 2 * size + 1), 1, group)
    rejected("x must be detached", gather_sequence, q.clone().requires_grad_(), 2, group)
    last = rank == size - 1
    shorter = [t[:, :, :-2] if last else t for t in (q, k, v)]
    rejected(
        "query must have the same shape on all ranks, got .* on rank 0 and .* on rank",
        ring_attention,
        *shorter,
        **named,
    )
    rejected("scale must be the same on all ranks", ring_attention, q, k, v, scale=2.0 if last else 1.0, **named)
    rejected("attn_mask must be the same on all ranks", ring_attention, q, k, v, is_causal=last, **named)
    q = q.clone().requires_grad_()
    output = ring_attention(q, k, v, is_causal=True, **named)
    assert isinstance(output, Tensor)
    rejected("second derivatives", torch.autograd.grad, output.sum(), q, create_graph=True)


class Late(scores.Score):
    """A score that looks at positions, and does not say what it is elsewhere."""

    positional = True

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT + torch.arange(key.shape[-2])


@pytest.mark.slow
def test_ranks_agree_with_one_process() -> None:
    """All of it in one group of processes, as starting them takes longer than what they do."""
    results = ranks.run(partial(compare_all, step=STEP), 4)
    worst: dict[str, float] = {}
    for found in results:
        for name, value in found.items():
            worst[name] = max(worst.get(name, 0.0), value)
    assert len(worst) == sum(2 * len(set(cases(size, STEP))) + 11 for size in (2, 3, 4))
    # What parts get is a sum over all pairs, in which much cancels.
    budget = {name: 2e-13 if name.endswith("parts") else 8e-15 for name in worst}
    assert not {name: value for name, value in worst.items() if not value < budget[name]}
