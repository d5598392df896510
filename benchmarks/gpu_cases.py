"""What is timed on a GPU: the work, how to check it in float64, and those who do it.

Dimensions: B batch, H query heads, G key heads, L queries, S keys, E and V widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from benchmarks.registry import MissingError
from regard import masks, scores

Tensors = dict[str, Tensor]
#: ``truth(tensors, rows)``: the output (B, H, rows, V), in the dtype of the tensors.
Truth = Callable[[Tensors, Tensor], Tensor]
#: ``make(tensors)`` returns the forward pass to time, or raises :class:`MissingError`.
Make = Callable[[Tensors], Callable[[], Tensor]]
OURS = "regard"
#: Backward passes cost this many forward passes of a dot product.
BACKWARD = 2.5


@dataclass(frozen=True)
class Task:
    """Work at one setting.

    Attributes
    ----------
    row : str
        The row of the table, by which it is chosen.
    setting : str
    tensors : dict of str to Tensor
        The inputs; gradients are taken to all of them.
    truth : callable
    contenders : dict of str to callable
        ``"regard"`` and those it is compared with.
    rows : Tensor
        Places along the third dimension of the output that are checked.
    work : float
        Operations, or bytes that must move, of a call.
    limit : {"bf16", "float32", "bytes", "tanh"}
        Which of the device's limits ``work`` is compared with.
    backward : bool
    exact : float
        An error up to this share of the largest right value is never called wrong.
    """

    row: str
    setting: str
    tensors: Tensors
    truth: Truth
    contenders: dict[str, Make]
    rows: Tensor
    work: float
    limit: Literal["bf16", "float32", "bytes", "tanh"]
    backward: bool = False
    exact: float = 1e-5


@dataclass(frozen=True)
class Sizes:
    """A device, and by how much lengths are divided: 1, or more for a trial run."""

    device: str
    divisor: int = 1
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator(self.device).manual_seed(0))

    def length(self, n: int) -> int:
        """Return a length."""
        return max(n // self.divisor, 16)

    def new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normal numbers."""
        made = torch.empty(shape, device=self.device, dtype=dtype)
        return made.normal_(generator=self.generator)

    def some(self, count: int, of: int) -> Tensor:
        """Return some places, with the first and the last."""
        drawn = torch.randperm(of, device=self.device, generator=self.generator)[:count]
        return torch.cat((drawn, drawn.new_tensor([0, of - 1]))).unique()


def imported(name: str) -> Any:
    """Return a module, or raise :class:`MissingError` if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingError(f"{name} cannot be imported: {error}") from error


def on_gpu(make: Make) -> Make:
    """Return a contender that needs a GPU."""

    def checked(t: Tensors) -> Callable[[], Tensor]:
        if not next(iter(t.values())).is_cuda:
            raise MissingError("needs a GPU")
        return make(t)

    return checked


def ours(**options: Any) -> Make:
    """Return ``regard.attention`` with further arguments; those that are functions are called with the tensors."""

    def make(t: Tensors) -> Callable[[], Tensor]:
        made = {name: each(t) if isinstance(each, FunctionType) else each for name, each in options.items()}
        return lambda: regard.attention(t["query"], t["key"], t["value"], **made)

    return make


def backend(which: SDPBackend, **options: Any) -> Make:
    """Return torch's SDPA on one backend."""

    def make(t: Tensors) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(t["query"], t["key"], t["value"], **options)

        return call

    return on_gpu(make)


def backends(**options: Any) -> dict[str, Make]:
    """Return torch's backends."""
    named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    named["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    return {f"torch SDPA, {name}": backend(which, **options) for name, which in named.items()}


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by torch, once for all sizes."""
    return torch.compile(function, dynamic=False)


def flex(predicate: Callable[..., Tensor] | None, **options: Any) -> Make:
    """Return compiled FlexAttention with a mask."""

    def make(t: Tensors) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        L, S = t["query"].shape[2], t["key"].shape[2]
        device = t["query"].device
        block = None if predicate is None else compiled(create_block_mask)(predicate, None, None, L, S, device=device)
        run = compiled(flex_attention)
        return lambda: run(t["query"], t["key"], t["value"], block_mask=block, **options)

    return on_gpu(make)


def dot_truth(visible: Callable[[Tensor, Tensor], Tensor] | None = None) -> Truth:
    """Return dot-product attention, ``visible(q_idx, kv_idx)`` given."""

    def truth(t: Tensors, rows: Tensor) -> Tensor:
        key, value = t["key"].unsqueeze(2), t["value"].unsqueeze(2)
        query = t["query"][:, :, rows].unflatten(1, (key.shape[1], -1))  # (B, G, H / G, rows, E): no copies of keys
        found = query @ key.mT / math.sqrt(query.shape[-1])
        if visible is not None:
            seen = visible(rows.unsqueeze(-1), torch.arange(key.shape[3], device=rows.device))
            found = found.masked_fill(~seen, -torch.inf)
        return (found.softmax(-1) @ value).flatten(1, 2)

    return truth


def _pairs_flops(pairs: float, heads: int, width: int, backward: bool) -> float:
    return 4.0 * pairs * heads * width * (1 + BACKWARD * backward)


def _three(s: Sizes, B: int, H: int, L: int, E: int, G: int = 0, S: int = 0) -> Tensors:
    G, S = G or H, S or L
    return {"query": s.new(B, H, L, E), "key": s.new(B, G, S, E), "value": s.new(B, G, S, E)}


def dots(s: Sizes) -> Iterator[Task]:
    """Yield plain and causal dot products."""
    for length, E, causal in ((4096, 64, 0), (4096, 128, 1), (16384, 128, 0), (32768, 128, 1), (32768, 64, 1)):
        L = s.length(length)
        B, H = (4, 16) if length == 4096 else (1, 16)
        pairs = B * L * (L + 1) / 2 if causal else float(B * L * L)
        visible = (lambda q, k: k <= q) if causal else None
        yield Task(
            "dot", f"{'causal' if causal else 'plain'}, L {L:,}, E {E}", _three(s, B, H, L, E), dot_truth(visible),
            {OURS: ours(is_causal=bool(causal)), **backends(is_causal=bool(causal))},
            s.some(16, L), _pairs_flops(pairs, H, E, False), "bf16",
        )  # fmt: skip


def masked(s: Sizes) -> Iterator[Task]:
    """Yield structured masks, forward and backward."""
    L, H, E = s.length(32768), 16, 128
    W, N, P = max(L // 32, 2), 64 if s.divisor == 1 else 4, L // 8
    size = L // N
    documents = torch.arange(L, device=s.device) // size
    settings: dict[str, tuple[Any, Callable[..., Tensor], float]] = {
        f"causal window of {W:,}": (
            masks.window(W - 1, 0),
            lambda b, h, q, k: (k <= q) & (q - k < W),  # noqa: ARG005
            float(L * W),
        ),
        f"{N} documents": (masks.document(documents), lambda b, h, q, k: q // size == k // size, float(L * size)),  # noqa: ARG005
        f"causal with a prefix of {P:,}": (
            masks.causal(align="upper_left") | masks.prefix(P),
            lambda b, h, q, k: (k <= q) | (k < P),  # noqa: ARG005
            L * L / 2 + P * P / 2,
        ),
    }
    for name, (mask, predicate, pairs) in settings.items():
        for backward in (False, True):
            yield Task(
                "masks", f"{name}, L {L:,}, E {E}", _three(s, 1, H, L, E),
                dot_truth(lambda q, k, p=predicate: p(None, None, q, k)),
                {OURS: ours(attn_mask=mask), "FlexAttention, compiled": flex(predicate)},
                s.some(16, L), _pairs_flops(pairs, H, E, backward), "bf16", backward,
            )  # fmt: skip


def additive(s: Sizes) -> Iterator[Task]:
    """Yield additive attention, forward and backward."""
    B, H, L, C = (4, 16, s.length(4096), 64) if s.divisor == 1 else (1, 2, s.length(4096), 8)
    tensors = {**_three(s, B, H, L, C), "w_v": s.new(C)}

    def rows(query: Tensor, key: Tensor, value: Tensor, w_v: Tensor) -> Tensor:
        return (torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ w_v).softmax(-1) @ value

    def truth(t: Tensors, at: Tensor) -> Tensor:
        parts = [rows(t["query"][:, :, i : i + 1], t["key"], t["value"], t["w_v"]) for i in at.tolist()]
        return torch.cat(parts, 2)

    def by_head(function: Callable[..., Tensor]) -> Make:
        """One sequence and head at a time: all features of all heads take 137 GB."""

        def make(t: Tensors) -> Callable[[], Tensor]:
            def call() -> Tensor:
                heads = zip(*(t[name].flatten(0, 1) for name in ("query", "key", "value")))
                checkpoint = torch.utils.checkpoint.checkpoint
                found = [checkpoint(function, *each, t["w_v"], use_reentrant=False) for each in heads]
                return torch.stack(found).unflatten(0, (B, H))

            return call

        return make

    def dot(t: Tensors) -> Callable[[], Tensor]:
        return lambda: F.scaled_dot_product_attention(t["query"], t["key"], t["value"]) + 0 * t["w_v"].sum()

    yield Task(
        "additive", f"B {B}, H {H}, L {L:,}, C {C}", tensors, truth,
        {
            OURS: ours(score=lambda t: scores.Additive(t["w_v"])), "eager, head by head": by_head(rows),
            "compiled, head by head": on_gpu(by_head(compiled(rows))),
            "torch SDPA (dot products: other work)": dot,
        },
        s.some(4, L), 3.0 * B * H * L * L * C, "tanh", True,
    )  # fmt: skip


def gaussian(s: Sizes) -> Iterator[Task]:
    """Yield Gaussian kernel regression in three dimensions."""
    L, S = s.length(1_000_000), s.length(100_000)
    f32 = torch.float32
    shapes = {"query": (1, 1, L, 3), "key": (1, 1, S, 3), "value": (1, 1, S, 1)}
    tensors = {name: s.new(*shape, dtype=f32) for name, shape in shapes.items()}

    def truth(t: Tensors, at: Tensor) -> Tensor:
        apart = t["query"][:, :, at].unsqueeze(-2) - t["key"].unsqueeze(-3)
        return (-apart.square().sum(-1) / 2).softmax(-1) @ t["value"]

    def keops(t: Tensors) -> Callable[[], Tensor]:
        lazy = imported("pykeops.torch").LazyTensor
        query, key, value = (t[name][0, 0].contiguous() for name in ("query", "key", "value"))
        square = ((lazy(query[:, None]) - lazy(key[None])) ** 2).sum(-1)
        return lambda: (-square / 2).sumsoftmaxweight(lazy(value[None]), 1)[None, None]

    yield Task(
        "gaussian", f"{L:,} × {S:,}, 3-D, float32", tensors, truth,
        {
            OURS: ours(score=scores.Gaussian(1.0)),
            "regard, streaming": ours(score=scores.Gaussian(1.0), engine="streaming"),
            "KeOps": on_gpu(keops),
        },
        s.some(64, L), 13.0 * L * S, "float32",
    )  # fmt: skip


def _threshold(found: Tensor, alpha: float) -> Tensor:
    """Return weights of α-entmax by bisection in the dtype of the scores."""
    x = (alpha - 1) * found
    peak = x.amax(-1, keepdim=True)
    low, high = peak - 1, peak - float(x.shape[-1]) ** (1 - alpha)
    for _ in range(60):
        middle = (low + high) / 2
        total = (x - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(-1, keepdim=True)
        low, high = torch.where(total >= 1, middle, low), torch.where(total >= 1, high, middle)
    weights = (x - low).clamp(min=0).pow(1 / (alpha - 1))
    return weights / weights.sum(-1, keepdim=True)


def sparse(s: Sizes) -> Iterator[Task]:
    """Yield sparse normalizers."""
    L, H, E = s.length(16384), 4, 64
    for name, alpha, causal in (("sparsemax", 2.0, 0), ("entmax15", 1.5, 0), ("entmax15", 1.5, 1), ("entmax", 1.3, 1)):
        normalizer = regard.normalizers.Entmax(alpha) if name == "entmax" else name

        def truth(t: Tensors, at: Tensor, alpha: float = alpha, causal: int = causal) -> Tensor:
            found = t["query"][:, :, at] @ t["key"].mT / math.sqrt(E)
            if causal:
                found = found.masked_fill(torch.arange(L, device=at.device) > at.unsqueeze(-1), -1e9)
            return _threshold(found, alpha) @ t["value"]

        def eager(t: Tensors, normalizer: Any = normalizer, causal: int = causal) -> Callable[[], Tensor]:
            return ours(normalizer=normalizer, is_causal=bool(causal), engine="reference")(t)

        def splash(t: Tensors, alpha: float = alpha, causal: int = causal) -> Callable[[], Tensor]:
            run = imported("adasplash").adasplash
            return lambda: run(t["query"], t["key"], t["value"], alpha=alpha, is_causal=bool(causal))

        pairs = L * (L + 1) / 2 if causal else float(L * L)
        yield Task(
            "sparse", f"{name}{f' {alpha}' if name == 'entmax' else ''}, {'causal' if causal else 'plain'}, L {L:,}",
            _three(s, 1, H, L, E), truth,
            {
                OURS: ours(normalizer=normalizer, is_causal=bool(causal)), "eager (engine reference)": eager,
                "AdaSplash": on_gpu(splash),
            },
            s.some(16, L), _pairs_flops(pairs, H, E, False), "bf16",
        )  # fmt: skip


def observed(s: Sizes) -> Iterator[Task]:
    """Yield a call with top-k and entropy."""
    L, H, E = s.length(32768), 16, 64

    def asking(t: Tensors) -> Callable[[], Tensor]:
        request = regard.AuxRequest(topk=8, entropy=True)
        return lambda: regard.attention(t["query"], t["key"], t["value"], return_aux=request)[0]

    yield Task(
        "aux", f"top-k 8 and entropy, L {L:,}, E {E}", _three(s, 1, H, L, E), dot_truth(),
        {OURS: asking, "regard, the plain call": ours()},
        s.some(16, L), _pairs_flops(float(L * L), H, E, False), "bf16",
    )  # fmt: skip


def decoding(s: Sizes) -> Iterator[Task]:
    """Yield steps over a long cache."""
    S, H, G, E = s.length(65536), 32, 8, 128
    for B in (1, 32) if s.divisor == 1 else (1, 2):
        tensors = _three(s, B, H, 1, E, G, S)
        moved = float(sum(t.numel() * t.element_size() for t in tensors.values()))
        yield Task(
            "decoding", f"batch {B}, cache {S:,}, {H} over {G} heads", tensors, dot_truth(),
            {
                OURS: ours(enable_gqa=True),
                "regard, triton": on_gpu(ours(enable_gqa=True, engine="triton")),
                "torch SDPA": lambda t: lambda: F.scaled_dot_product_attention(
                    t["query"], t["key"], t["value"], enable_gqa=True
                ),
                "FlexAttention, compiled": flex(None, enable_gqa=True),
            },
            torch.zeros(1, dtype=torch.long, device=s.device), moved, "bytes",
        )  # fmt: skip


def paged(s: Sizes) -> Iterator[Task]:
    """Yield a step over caches of different lengths, in pages of 16 steps."""
    B, S, H, G, E, size = 8, s.length(65536), 32, 8, 128, 16
    N = S // size
    lengths = torch.linspace(S // 4, S, B, device=s.device).to(torch.int32)
    table = torch.randperm(B * N, device=s.device, generator=s.generator).to(torch.int32).view(B, N)
    tensors = {"query": s.new(B, H, 1, E), "key": s.new(B * N, G, size, E), "value": s.new(B * N, G, size, E)}

    def rows(t: Tensors, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query and the cache of a sequence, (1, H, 1, E) and (1, G, n, E)."""
        key, value = (t[name][table[b].long()].transpose(0, 1).flatten(1, 2)[None] for name in ("key", "value"))
        return t["query"][b : b + 1], key[:, :, : int(lengths[b])], value[:, :, : int(lengths[b])]

    def truth(t: Tensors, at: Tensor) -> Tensor:
        found = [dot_truth()(dict(zip(("query", "key", "value"), rows(t, b))), at) for b in range(B)]
        return torch.cat(found)

    def run(engine: str) -> Make:
        def make(t: Tensors) -> Callable[[], Tensor]:
            given = t["query"], t["key"], t["value"], table, lengths
            return lambda: regard.nn.paged_attention(*given, engine=engine)

        return make

    def one_by_one(t: Tensors) -> Callable[[], Tensor]:
        caches = [rows(t, b) for b in range(B)]
        return lambda: torch.cat([F.scaled_dot_product_attention(*each, enable_gqa=True) for each in caches])

    moved = 2.0 * float(lengths.sum()) * G * E * tensors["key"].element_size()
    yield Task(
        "paged", f"batch {B}, caches of {S // 4:,} to {S:,} in pages of {size}, {H} over {G} heads", tensors, truth,
        {
            OURS: run("auto"), "regard, triton": on_gpu(run("triton")),
            "torch SDPA, one dense cache after another": one_by_one,
        },
        torch.zeros(1, dtype=torch.long, device=s.device), moved, "bytes",
    )  # fmt: skip


def recurrences(s: Sizes) -> Iterator[Task]:
    """Yield linear attention and the gated delta family, forward and backward."""
    L, H, E = s.length(16384), 16 if s.divisor == 1 else 2, 128 if s.divisor == 1 else 8
    modules = {
        "linear attention": ("fla.ops.linear_attn", "chunk_linear_attn", {"normalize": False}),
        "delta rule": ("fla.ops.delta_rule", "chunk_delta_rule", {}),
        "gated delta rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {}),
        "Kimi delta attention": ("fla.ops.kda", "chunk_kda", {}),
    }
    for name, (module, function, options) in modules.items():
        tensors = _three(s, 1, H, L, E)
        tensors["key"] = F.normalize(tensors["key"], dim=-1)
        delta = name != "linear attention"
        if delta:
            tensors["rate"] = s.new(1, H, L).sigmoid()
        if name == "gated delta rule":
            tensors["log_decay"] = F.logsigmoid(3 + s.new(1, H, L, dtype=torch.float32))
        if name == "Kimi delta attention":
            tensors["log_decay"] = F.logsigmoid(3 + s.new(1, H, L, E, dtype=torch.float32))

        def truth(t: Tensors, at: Tensor, delta: bool = delta) -> Tensor:
            options: dict[str, Any] = {**t, "delta": delta, "form": "chunked"}
            output: Tensor = regard.nn.gated_recurrence(**options)
            return output[:, :, at]

        def run(t: Tensors, delta: bool = delta, form: str = "auto") -> Callable[[], Tensor]:
            options: dict[str, Any] = {**t, "delta": delta, "form": form}
            return lambda: regard.nn.gated_recurrence(**options)

        def rival(
            t: Tensors, module: str = module, function: str = function, options: dict[str, Any] = options
        ) -> Callable[[], Tensor]:
            call = getattr(imported(module), function)

            def forward() -> Tensor:
                q, k, v = (t[each].transpose(1, 2) for each in ("query", "key", "value"))
                gates = {
                    ours_: t[theirs].transpose(1, 2)
                    for ours_, theirs in (("g", "log_decay"), ("beta", "rate"))
                    if theirs in t
                }
                output: Tensor = call(q, k, v, scale=E**-0.5, **gates, **options)[0]
                return output.transpose(1, 2)

            return forward

        yield Task(
            "linear", f"{name}, L {L:,}, {H} heads of {E}", tensors, truth,
            {
                OURS: run, "regard, plain torch": lambda t, run=run: run(t, form="chunked"),
                "flash-linear-attention": on_gpu(rival),
            },
            s.some(64, L), 3.5 * 2 * (3 if delta else 2) * H * L * E * E, "bf16", True,
        )  # fmt: skip


#: The rows of the table, in the order in which they are timed.
ROWS: dict[str, Callable[[Sizes], Iterator[Task]]] = {
    "dot": dots,
    "masks": masked,
    "additive": additive,
    "sparse": sparse,
    "aux": observed,
    "decoding": decoding,
    "paged": paged,
    "linear": recurrences,
    "gaussian": gaussian,
}
