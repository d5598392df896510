"""Test cases: scores, masks as recipes, and the calls of attention built from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard
from regard import masks, scores
from regard._utils.part import Part
from regard.engines import Engine
from regard.engines.local_linear import LocalLinear
from regard.engines.problem import Call, Problem
from regard.masks import Extent, Mask
from regard.normalizers import LearnedEntmax, ScalableSoftmax, SoftmaxSink, TalkingHeads
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.normalizers.base import Normalizer
from regard.scores import Score
from regard.scores.base import TABLE
from regard.scores.kernels import Distance, kernels
from regard.testing.formulas import POSITIONS, Array

# Scores for cases: the sample of every registered class, and further variants -----------------------------------------


@dataclass(frozen=True)
class Widths:
    """The sizes for a score: query and key widths, the number of keys, query heads H and key heads G."""

    query: int
    key: int
    keys: int
    heads: int
    key_heads: int


Maker = Callable[[Widths, torch.Generator], Score]


def near_is_more(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """Subtract a quarter of the distance from a score."""
    return score - 0.25 * (q_idx - kv_idx).abs()


def by_sequence(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """Add the square of a score, times a factor that depends on the sequence and the head."""
    return score + 0.125 * (b + 2 * h) * score * score


def not_the_third(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """Exclude every third key."""
    return torch.where(kv_idx % 3 != 0, score, -torch.inf)


#: The same in NumPy: ``(scores (..., B, H, L, S), b, h, q_idx, kv_idx)``, analytic in the scores.
MODS: dict[object, Callable[[Array, Array, Array, Array, Array], Array]] = {
    near_is_more: lambda s, b, h, q, k: s - np.abs(q - k) / 4,  # noqa: ARG005
    by_sequence: lambda s, b, h, q, k: s + (b + 2 * h) * s * s / 8,  # noqa: ARG005
    not_the_third: lambda s, b, h, q, k: np.where(k % 3 != 0, s, -np.inf),  # noqa: ARG005
}


def _randn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator)


def _positive(generator: torch.Generator, *size: int) -> Tensor:
    return 0.5 + torch.rand(size, generator=generator)


def _kernel(cls: type[Distance], size: Callable[[Widths], tuple[int, ...]]) -> Maker:
    """Return a factory of kernels whose width is a tensor of this size, near that of the kernel's sample."""

    def make(w: Widths, generator: torch.Generator) -> Score:
        usual = cls.sample(w.query, w.key, w.keys, generator).width
        return cls((1.2 if cls.compact else 1.0) * usual * _positive(generator, *size(w)))

    return make


#: Variants by name, "score/variant"; only those of registered scores are used.
VARIANTS: dict[str, Maker] = {
    "general/heads": lambda w, g: scores.General(_randn(g, w.heads, w.query, w.key) / 2),
    "additive/projected": lambda w, g: scores.Additive(_randn(g, w.query)),
    "additive/heads": lambda w, g: scores.Additive(
        _randn(g, w.heads, 3), _randn(g, w.heads, 3, w.query), _randn(g, *_key_heads(w), 3, w.key)
    ),
    "concat/heads": lambda w, g: scores.Concat(_randn(g, w.heads, 3), _randn(g, 3, w.query + w.key)),
    "cosine/learned": lambda w, g: scores.Cosine(_positive(g, 1)),  # noqa: ARG005
    "score_mod/near": lambda w, g: scores.ScoreMod(near_is_more),  # noqa: ARG005
    "score_mod/sequence": lambda w, g: scores.ScoreMod(by_sequence, scores.Dot()),  # noqa: ARG005
    "score_mod/third": lambda w, g: scores.ScoreMod(  # noqa: ARG005
        not_the_third, scores.Gaussian(_positive(g, 1).squeeze())
    ),
    **{f"{name}/learned": _kernel(cls, lambda w: ()) for name, cls in kernels().items()},  # noqa: ARG005
    **{f"{name}/features": _kernel(cls, lambda w: (w.query,)) for name, cls in kernels().items()},
}

#: Variants that need equal query and key widths though their class does not.
SAME_WIDTHS = {"additive/projected"}


def _key_heads(w: Widths) -> tuple[int, ...]:
    return (w.key_heads,) if w.key_heads == w.heads else ()


def score_names() -> list[str]:
    """Return the names of all scores and variants."""
    variants = [name for name in VARIANTS if name.split("/")[0] in (*TABLE, "score_mod")]
    return [*TABLE, *variants]


def make_score(name: str, widths: Widths, generator: torch.Generator) -> Score:
    """Return the score of this name with random parameters."""
    if name in VARIANTS:
        return VARIANTS[name](widths, generator)
    return TABLE[name].sample(widths.query, widths.key, widths.keys, generator)


#: Variants of normalizers by name, "normalizer/variant", from the number of query heads.
NORMALIZER_VARIANTS: dict[str, Callable[[int, torch.Generator], Normalizer]] = {
    "softmax_sink/heads": lambda heads, g: SoftmaxSink(2 * _randn(g, heads)),
    "scalable_softmax/heads": lambda heads, g: ScalableSoftmax(0.2 + torch.rand(heads, generator=g)),
    "learned_entmax/heads": lambda heads, g: LearnedEntmax(2 * _randn(g, heads)),
    "talking_heads/heads": lambda heads, g: TalkingHeads(*torch.rand(2, heads, heads, generator=g)),
    "softmax_sink/plus one": lambda heads, g: SoftmaxSink(),  # noqa: ARG005
}


def normalizer_names() -> list[str]:
    """Return the names of all normalizers and variants."""
    return [*NORMALIZERS, *NORMALIZER_VARIANTS]


def make_normalizer(name: str, heads: int, generator: torch.Generator) -> Normalizer:
    """Return the normalizer of this name, with random parameters, for a number of query heads."""
    if name in NORMALIZER_VARIANTS:
        return NORMALIZER_VARIANTS[name](heads, generator)
    return NORMALIZERS[name].sample(generator)


def mixes_widths(name: str) -> bool:
    """Return whether the score accepts keys and queries of different widths."""
    base = name.split("/", maxsplit=1)[0]
    return name not in SAME_WIDTHS and base in TABLE and TABLE[base].mixed_widths


def fits_lines(name: str) -> bool:
    """Return whether order 1 has an oracle with the score."""
    base = name.split("/", maxsplit=1)[0]
    return base == "score_mod" or (base in TABLE and any(issubclass(TABLE[base], cls) for cls in POSITIONS))


# Masks as recipes: nested tuples that print, compare and shrink, and become masks of any size -------------------------


#: The name of a kind of mask and its arguments, or ``("and" | "or", recipe, recipe)``, or ``("not", recipe)``, or
#: ``("part", recipe, first query, first key)`` of a mask for more queries and keys.
Recipe = tuple[Any, ...]


def build_mask(recipe: Recipe, extent: Extent, generator: torch.Generator, dtype: torch.dtype) -> Mask:
    """Return the mask of a recipe, with random tensors.

    Examples
    --------
    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> build_mask(("and", ("causal", 1), ("window", 2, -1, 0)), Extent(1, 1, 3, 4), generator, torch.float32)
    causal(offset=1) & window(2, -1, offset=0)
    """
    kind, *arguments = recipe
    if kind in ("and", "or"):
        left, right = (build_mask(part, extent, generator, dtype) for part in arguments)
        return left & right if kind == "and" else left | right
    if kind == "not":
        return ~build_mask(arguments[0], extent, generator, dtype)
    if kind == "part":
        inner, first_query, first_key = arguments
        whole = Extent(extent.B, extent.H, extent.L + first_query + 1, extent.S + first_key + 1)
        bound = build_mask(inner, whole, generator, dtype).bind(whole, "cpu")
        return masks.Submatrix(bound, whole, first_query, first_key)
    if kind in KINDS:
        return KINDS[kind](extent, generator, dtype, *arguments)
    return sampled()[kind].sample(extent, generator)


def has_bias(recipe: Recipe | None) -> bool:
    """Return whether the mask of a recipe has a bias."""
    if recipe is None:
        return False
    if recipe[0] in sampled():
        return bool(sampled()[recipe[0]].sample(Extent(1, 1, 1, 1), torch.Generator()).has_bias)
    return recipe[0] in BIASES or any(has_bias(part) for part in recipe[1:] if isinstance(part, tuple))


def kinds_in(recipe: Recipe | None) -> set[str]:
    """Return the kinds of masks of which a recipe is made, without what joins them.

    Examples
    --------
    >>> sorted(kinds_in(("and", ("causal", 1), ("not", ("padding", False)))))
    ['causal', 'padding']
    """
    if recipe is None:
        return set()
    inner = set[str]().union(*(kinds_in(part) for part in recipe[1:] if isinstance(part, tuple)))
    return inner if recipe[0] in ("and", "or", "not", "part") else inner | {str(recipe[0])}


def mask_names() -> list[str]:
    """Return the kinds of masks: those with a builder in :data:`KINDS`, and classes that make samples."""
    return sorted([*KINDS, *sampled()])


def plain_recipe(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe with contiguous dense masks and biases around 0, for finite differences."""
    if recipe is None or recipe[0] in ("dense", "bias"):
        return None if recipe is None else recipe[:3]
    return tuple(plain_recipe(part) if isinstance(part, tuple) else part for part in recipe)


def _where(offset: Any, extent: Extent, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments for an alignment by name, a fixed offset, or "each": one for each sequence."""
    if offset == "each":
        return {"offset": _ints(-1, 4, (extent.B,), generator)}
    return {"offset": offset} if isinstance(offset, int) else {"align": offset}


def _ints(low: int, high: int, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, max(high, low + 1), size, generator=generator)


def _bools(share: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(size, generator=generator) < share


def _causal(extent: Extent, generator: torch.Generator, _: Any, where: Any) -> Mask:
    return masks.causal(**_where(where, extent, generator))


def _window(extent: Extent, generator: torch.Generator, _: Any, left: int, right: int, where: Any) -> Mask:
    return masks.window(left, right, **_where(where, extent, generator))


def _dilated(extent: Extent, generator: torch.Generator, _: Any, step: int, where: Any) -> Mask:
    return masks.dilated(step, **_where(where, extent, generator))


def _chunked(extent: Extent, generator: torch.Generator, _: Any, size: int, where: Any) -> Mask:
    return masks.chunked(size, **_where(where, extent, generator))


def _padding(extent: Extent, generator: torch.Generator, _: Any, per_query: bool) -> Mask:
    size = (extent.B, extent.L) if per_query else (extent.B,)
    return masks.padding(_ints(0, extent.S + 1, size, generator))


def _key_padding(extent: Extent, generator: torch.Generator, _: Any, shared: bool) -> Mask:
    return masks.key_padding(_bools(0.7, (extent.S,) if shared else (extent.B, extent.S), generator))


def _prefix(extent: Extent, generator: torch.Generator, _: Any, n: int | str) -> Mask:
    return masks.prefix(n if isinstance(n, int) else _ints(0, extent.S + 1, (extent.B,), generator))


def _sinks(extent: Extent, generator: torch.Generator, _: Any, n: int) -> Mask:  # noqa: ARG001
    return masks.sinks(n)


def _others(extent: Extent, generator: torch.Generator, _: Any, named: bool) -> Mask:
    return masks.leave_one_out(_ints(-1, extent.S, (extent.L,), generator) if named else None)


def _selected(extent: Extent, generator: torch.Generator, _: Any, keys: int, shared: str, block_size: int = 1) -> Mask:
    size = tuple(getattr(extent, letter) if letter.isupper() else 1 for letter in shared)
    return masks.selected(_ints(-1, -(-extent.S // block_size), (*size, extent.L, keys), generator), block_size)


def _document(extent: Extent, generator: torch.Generator, _: Any, per_sequence: bool) -> Mask:
    lead = (extent.B,) if per_sequence else ()
    ids, kv_ids = (_ints(0, 3, (*lead, n), generator).sort(-1).values for n in (extent.L, extent.S))
    return masks.document(ids, kv_ids)


def _packed(
    extent: Extent,
    generator: torch.Generator,
    _: Any,
    left: int | None = None,
    right: int | None = None,
    align: str | None = None,
) -> Mask:
    cu_q, cu_kv = (
        torch.cat((torch.zeros(1, dtype=torch.long), _ints(0, n + 1, (3,), generator).sort().values))
        for n in (extent.L, extent.S)
    )
    window = None if left is None or right is None else (left, right)
    return masks.from_cu_seqlens(cu_q, cu_kv, window=window, align=align)


def _size(extent: Extent, shared: str) -> tuple[int, ...]:
    """Return the shape of a dense mask: the letters B, H, L and S in upper case are its own, in lower case shared."""
    return tuple(getattr(extent, letter) if letter.isupper() else 1 for letter in shared)


def _stored(values: Tensor, layout: str, extent: Extent, shared: str) -> Tensor:
    """Return a dense mask's values with a memory layout.

    "expanded": what is shared has stride 0; "transposed": queries stand side by side, not keys; "sliced": with gaps.
    """
    if layout == "expanded":
        return values.expand(_size(extent, shared.upper()))
    if layout == "transposed":
        return values.mT.contiguous().mT
    return torch.stack((values, values), -1)[..., 0] if layout == "sliced" else values


def _dense(
    extent: Extent, generator: torch.Generator, _: Any, shared: str, share: float, layout: str = "plain"
) -> Mask:
    return masks.dense(_stored(_bools(share, _size(extent, shared), generator), layout, extent, shared))


def _bias(
    extent: Extent,
    generator: torch.Generator,
    dtype: torch.dtype,
    shared: str,
    share: float,
    layout: str = "plain",
    level: float = 0.0,
) -> Mask:
    size, most = _size(extent, shared), torch.finfo(dtype).max / 4
    level = min(max(level, -most), most)
    values = (level + torch.randn(size, generator=generator)).to(dtype)
    values = values.masked_fill(~_bools(share, size, generator), -torch.inf)
    return masks.dense(_stored(values, layout, extent, shared))


def _alibi(extent: Extent, generator: torch.Generator, dtype: torch.dtype, paper: bool, where: Any) -> Mask:
    slopes = torch.rand(extent.H, generator=generator).to(dtype)
    return masks.alibi(extent.H if paper and extent.H else slopes, **_where(where, extent, generator))


def _relative(
    extent: Extent, generator: torch.Generator, dtype: torch.dtype, reach: int, per_head: bool, where: Any
) -> Mask:
    table = torch.randn(*((extent.H,) if per_head else ()), 2 * reach + 1, generator=generator).to(dtype)
    return masks.relative(table, **_where(where, extent, generator))


def _forgetting(extent: Extent, generator: torch.Generator, dtype: torch.dtype, shared: str, where: Any) -> Mask:
    size = tuple(getattr(extent, letter) if letter.isupper() else 1 for letter in shared)
    gates = -3 * torch.rand(*size, extent.S, generator=generator).to(dtype)
    return masks.forgetting(gates, **_where(where, extent, generator))


def _predicate(extent: Extent, generator: torch.Generator, _: Any, step: int) -> Mask:  # noqa: ARG001
    return masks.as_mask(lambda b, h, q_idx, kv_idx: (b + h + q_idx + 2 * kv_idx) % step != 0)


def _everything(extent: Extent, generator: torch.Generator, _: Any) -> Mask:  # noqa: ARG001
    return masks.everything()


def _empty_rows(extent: Extent, generator: torch.Generator, _: Any) -> Mask:
    rows = _bools(0.5, (extent.L, 1), generator)
    rows[:1] = False
    return masks.dense(rows)


def _hidden_keys(extent: Extent, generator: torch.Generator, _: Any) -> Mask:
    keys = _bools(0.6, (1, extent.S), generator)
    keys[:, -1:] = False
    return masks.dense(keys)


#: The builder of each kind: ``(extent, generator, dtype of floats, *arguments) -> Mask``.
KINDS: dict[str, Callable[..., Mask]] = {
    "alibi": _alibi,
    "bias": _bias,
    "causal": _causal,
    "chunked": _chunked,
    "dense": _dense,
    "dilated": _dilated,
    "document": _document,
    "empty_rows": _empty_rows,
    "everything": _everything,
    "forgetting": _forgetting,
    "hidden_keys": _hidden_keys,
    "key_padding": _key_padding,
    "others": _others,
    "packed": _packed,
    "padding": _padding,
    "predicate": _predicate,
    "prefix": _prefix,
    "relative": _relative,
    "selected": _selected,
    "sinks": _sinks,
    "window": _window,
}

#: The kinds with a bias, which "or" and "not" reject.
BIASES = {"alibi", "bias", "forgetting", "relative"}


def sampled() -> dict[str, type[Any]]:
    """Return the public masks with a method ``sample(extent, generator)``, by name."""
    return {name: cls for name, cls in vars(masks).items() if isinstance(cls, type) and hasattr(cls, "sample")}


# A case: a call of ``attention`` described by numbers and names, which print, compare and shrink ----------------------


@dataclass(frozen=True)
class Case:
    """The description of a call; the same description always makes the same tensors.

    Attributes
    ----------
    score, normalizer : str
        Names from the tables, or of a variant.
    dtype : str
        Of query, key and value.
    lead : tuple of int
        Leading dimensions, before heads.
    key_heads, group : int
        G, and the number of query heads per key head.
    queries, keys, width, key_width, value_width : int
        L, S, E, Ek (0 for E) and V.
    mask : recipe or None
    scale, softcap : float or None
    magnitude : float
        Standard deviation of queries and keys.
    values : float
        Standard deviation of values.
    layout : str
        "plain", "transposed", "sliced", "expanded" (keys and values shared by stride 0), "broadcast" (keys and
        values without the first leading dimension), "broadcast query", or "matrix" (2-D, for one sequence and head).
    rows : str
        "random"; "zeros": the first query and key are 0; or "twins": the first two keys are equal, and equal to the
        first query if the widths match.
    learned : bool
        Whether to compute gradients of the tensors of score and mask.
    wide : bool
        Whether those tensors are float32 when the inputs are narrower.
    dropout_p : float
    ridge : float
        Of ``order=1``; 0 for order 0.
    tile : (int, int)
        Rows and columns of a tile, for engines with a configurable tile size.
    seed : int
    device : str
        Of all tensors of the call; what is right is computed on the CPU.
    """

    score: str = "scaled_dot"
    normalizer: str = "softmax"
    dtype: str = "float32"
    lead: tuple[int, ...] = (1,)
    key_heads: int = 1
    group: int = 1
    queries: int = 4
    keys: int = 5
    width: int = 4
    key_width: int = 0
    value_width: int = 3
    mask: Recipe | None = None
    scale: float | None = None
    softcap: float | None = None
    magnitude: float = 1.0
    values: float = 1.0
    layout: str = "plain"
    rows: str = "random"
    learned: bool = False
    wide: bool = False
    dropout_p: float = 0.0
    ridge: float = 0.0
    tile: tuple[int, int] = (4, 4)
    seed: int = 0
    device: str = "cpu"

    @property
    def extent(self) -> Extent:
        """B, H, L and S."""
        return Extent(math.prod(self.lead), self.key_heads * self.group, self.queries, self.keys)

    def but(self, **changes: Any) -> Case:
        """Return the case with some fields changed."""
        return replace(self, **changes)

    def masked(self, recipe: Recipe) -> Case:
        """Return the case with a mask added to its own."""
        return replace(self, mask=recipe if self.mask is None else ("and", self.mask, recipe))

    def __str__(self) -> str:
        """Return code for the case, with the fields that differ from the defaults."""
        plain = Case()
        changed = [f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return f"Case({', '.join(changed)})"


@dataclass
class CaseCall:
    """The tensors and parts of a case as arguments of ``attention``; any of them may be replaced."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    score: Score
    normalizer: Normalizer
    scale: float | None
    softcap: float | None
    dropout_p: float
    enable_gqa: bool
    order: int | LocalLinear = 0

    @classmethod
    def of(cls, case: Case) -> CaseCall:
        """Make the tensors and parts of a case."""
        generator = torch.Generator().manual_seed(case.seed)
        dtype, extent = getattr(torch, case.dtype), case.extent
        key_width = case.key_width or case.width
        inner = case.lead[1:] if case.layout == "broadcast" else case.lead
        outer = case.lead[1:] if case.layout == "broadcast query" else case.lead
        shapes = [
            (*outer, extent.H, case.queries, case.width),
            (*inner, case.key_heads, case.keys, key_width),
            (*inner, case.key_heads, case.keys, case.value_width),
        ]
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        query, key = _special(case.rows, drawn[0] * case.magnitude, drawn[1] * case.magnitude)
        query, key, value = (
            _laid_out(t, case.layout, i > 0, dtype, case.device)
            for i, t in enumerate((query, key, drawn[2] * case.values))
        )
        widths = Widths(case.width, key_width, case.keys, extent.H, case.key_heads)
        score = make_score(case.score, widths, generator)
        inside = torch.promote_types(dtype, torch.float32) if case.wide else dtype
        mask = None if case.mask is None else build_mask(case.mask, extent, generator, inside)
        normalizer = make_normalizer(case.normalizer, extent.H, generator)

        def settle(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.to(case.device)
            # As it stands in memory: a copy would make strides of 0 and gaps plain.
            return tensor.to(case.device, inside).detach().requires_grad_(case.learned)

        return cls(
            query, key, value, None if mask is None else mask.map_tensors(settle), score.map_tensors(settle),
            normalizer.map_tensors(settle), case.scale, case.softcap, case.dropout_p,
            case.group > 1 and bool(case.key_heads > 1 or case.seed % 2),
            LocalLinear(case.ridge) if case.ridge else 0,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``attention``, engine aside."""
        return {
            "query": self.query, "key": self.key, "value": self.value, "attn_mask": self.mask, "score": self.score,
            "normalizer": self.normalizer, "scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout_p,
            "enable_gqa": self.enable_gqa, "order": self.order,
        }  # fmt: skip

    def run(self, engine: Engine | str) -> Tensor:
        """Return the output of an engine."""
        return regard.attention(**self.arguments(), engine=engine)

    def run_with_aux(self, engine: Engine | str, **request: Any) -> tuple[Tensor, regard.Aux]:
        """Return the output of an engine and the auxiliary outputs of ``AuxRequest(**request)``."""
        return regard.attention(**self.arguments(), engine=engine, return_aux=regard.AuxRequest(**request))

    def but(self, **changes: Any) -> CaseCall:
        """Return the call with some arguments changed."""
        return replace(self, **changes)

    def problem(self) -> Problem:
        """Return the call as engines see it."""
        return Problem.of(Call(**self.arguments()))

    def refusal(self, engine: Engine) -> str | None:
        """Return why an engine cannot run the call, or None."""
        return engine.why_not(self.problem())

    def on_cpu(self) -> CaseCall:
        """Return the same call with all tensors on the CPU, where the oracle and the eager formula run."""
        if self.query.is_cpu:
            return self

        def there(tensor: Tensor) -> Tensor:
            return tensor.detach().cpu().requires_grad_(tensor.requires_grad)

        return self.but(
            query=there(self.query), key=there(self.key), value=there(self.value),
            mask=None if self.mask is None else self.mask.map_tensors(there), score=self.score.map_tensors(there),
            normalizer=self.normalizer.map_tensors(there),
        )  # fmt: skip

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors to differentiate, by name; sets ``requires_grad`` of query, key and value."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        for tensor in found.values():
            tensor.requires_grad_()
        for what, part in (("score", self.score), ("mask", self.mask), ("normalizer", self.normalizer)):
            found |= {name: t for name, t in named(what, part) if name}
        return found


def named(what: str, part: Part | None) -> list[tuple[str, Tensor]]:
    """Return a part's tensors, with names for those that require gradients; binding a mask may add others."""
    tensors = [] if part is None else part.tensors()
    count = iter(range(len(tensors)))
    return [(f"{what} tensor {next(count)}" if t.requires_grad else "", t) for t in tensors]


def gradients(output: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return the gradient of ``(output · grad).sum()`` to each leaf; zeros where there is none."""
    found = torch.autograd.grad(output, list(leaves.values()), grad, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found)
    }


def has_graph(output: Tensor, leaves: dict[str, Tensor]) -> bool:
    """Return whether an output requires gradients; raise AssertionError if a leaf does but the output does not."""
    if not output.requires_grad and any(leaf.requires_grad for leaf in leaves.values()):
        raise AssertionError("an input wants a gradient, and the output has no graph")
    return output.requires_grad


def _special(rows: str, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys with the special rows of a case; unchanged if queries, keys or heads are empty."""
    if rows == "zeros":
        query[..., :1, :], key[..., :1, :] = 0, 0
    if rows == "twins" and query.numel() and key.numel():
        key[..., :2, :] = (
            query.reshape(-1, query.shape[-1])[0] if query.shape[-1] == key.shape[-1] else key[..., :1, :].clone()
        )
    return query, key


def _laid_out(values: Tensor, layout: str, shared: bool, dtype: torch.dtype, device: str) -> Tensor:
    """Return values with a memory layout."""
    values = values.to(device, dtype)
    if layout == "matrix" and values.shape[:-2].numel() == 1:
        return values.reshape(values.shape[-2:]).clone()
    if layout == "transposed":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "sliced":
        return torch.stack((values, values.flip(-1)), -1)[..., 0]
    if layout == "expanded" and shared and values.dim() > 3 and values.shape[0]:
        return values[:1].expand(values.shape)
    return values.clone()
