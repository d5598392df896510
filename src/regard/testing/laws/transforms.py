"""Law 9: torch's function transforms and higher derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import regard
from regard.engines import Engine
from regard.scores.kernels import Distance
from regard.testing.budget import Budget
from regard.testing.case import Case, CaseCall, Recipe, gradients, plain_recipe
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.oracle import stated
from regard.testing.trial import Trial, keeps_lse

#: The step of differences, as in gradcheck; and its tolerances, absolute and relative.
STEP, ATOL, RTOL = 1e-6, 1e-5, 1e-3


def _small(case: Case) -> Case | None:
    """Shrink a case for gradcheck, and drop it if it is near a point without a derivative."""
    if 0 in (*case.extent, case.width, case.value_width) or case.layout != "plain":
        return None
    case = case.but(
        dtype="float64", queries=min(case.queries, 3), keys=min(case.keys, 4), lead=case.lead[:1] and (1,),
        magnitude=0.5, rows="random", width=min(case.width, 2), key_width=min(case.key_width, 2),
        group=min(case.group, 2), value_width=min(case.value_width, 2), tile=(2, 3),
        scale=None if case.scale == 0.0 else case.scale, values=1.0, mask=plain_recipe(case.mask),
    )  # fmt: skip
    call = CaseCall.of(case)
    if not call.normalizer.smooth or judged(case) is None:
        return None
    if getattr(call.normalizer, "alpha", 1.0) > 2:
        return None  # small weights are so steep that rounding exceeds the effect of a finite difference
    return None if Trial(call).undecided.any() or _is_near_a_kink(call) else case


def _is_near_a_kink(call: CaseCall) -> bool:
    """Return whether finite differences may cross a kink of a distance.

    A distance has a kink where a query equals a key (in any one feature for the Manhattan distance): its first
    derivative jumps, and the second changes as fast as the distance. A random direction moves a row by less than a
    hundred steps.
    """
    score = stated(call.score)
    if not isinstance(score, Distance):
        return False
    problem = call.problem()
    key = problem.key.detach().repeat_interleave(problem.query.shape[1] // problem.key.shape[1], 1)
    apart = (problem.query.detach().unsqueeze(-2) - key.unsqueeze(-3)).abs()  # (B, H, L, S, E)
    return bool(((apart if score.manhattan else apart.amax(-1)) < 100 * STEP).any())


def function(call: CaseCall, engine: Engine) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return the output as a function of the call's leaves, and the leaves."""
    leaves = call.leaves()
    inputs = tuple(leaves.values())

    def run(query: Tensor, key: Tensor, value: Tensor, *inside: Tensor) -> Tensor:
        remaining = list(inside)

        def take(tensor: Tensor) -> Tensor:
            return remaining.pop(0) if tensor.requires_grad else tensor

        score = call.score.map_tensors(take)
        mask = None if call.mask is None else call.mask.map_tensors(take)
        normalizer = call.normalizer.map_tensors(take)
        return call.but(query=query, key=key, value=value, score=score, mask=mask, normalizer=normalizer).run(engine)

    return run, inputs


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in a tensor like another."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


@law("gradcheck", "Gradients in float64 agree with differences.", _small, share=0.3)
def gradcheck(case: Case, engine: Engine) -> None:
    """``torch.autograd.gradcheck``, in its fast mode."""
    run, inputs = function(CaseCall.of(case), engine)
    torch.manual_seed(case.seed)
    require(
        torch.autograd.gradcheck(run, inputs, fast_mode=True, raise_exception=False, check_undefined_grad=False),
        "gradcheck fails",
    )


@law(
    "second derivatives",
    "gradgradcheck and forward mode pass, or an error names an engine that supports them.",
    _small,
    share=0.3,
)
def second_derivatives(case: Case, engine: Engine) -> None:
    """``gradgradcheck`` and ``jvp`` for engines that claim them; for others, the error."""
    run, inputs = function(CaseCall.of(case), engine)
    if not engine.twice_differentiable:
        _check_refuses(run, inputs)
        return
    _check_twice(run, inputs)
    _check_forward(run, inputs, by_function=bool(case.seed % 2))


def _check_twice(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Compare the second derivative along a direction with finite differences of the first.

    gradgradcheck does the same in its fast mode, but fails for constant gradients.
    """
    generator = torch.Generator().manual_seed(0)
    u = _drawn(run(*inputs), generator)
    w, t = ([_drawn(x, generator) for x in inputs] for _ in range(2))

    def first(point: tuple[Tensor, ...], graph: bool) -> Tensor:
        output = run(*point)
        if not output.requires_grad:
            return u.new_zeros(())
        found = torch.autograd.grad(output, point, u, create_graph=graph, allow_unused=True)
        return sum(((g * d).sum() for g, d in zip(found, w) if g is not None), u.new_zeros(()))

    total, seconds = first(inputs, True), []
    if total.requires_grad:
        seconds = [
            (g * d).sum() for g, d in zip(torch.autograd.grad(total, inputs, allow_unused=True), t) if g is not None
        ]
    ends = [
        first(tuple((x.detach() + sign * STEP * d).requires_grad_() for x, d in zip(inputs, t)), False)
        for sign in (1, -1)
    ]
    found, expected = float(sum(seconds)), float(ends[0] - ends[1]) / (2 * STEP)
    require(
        abs(found - expected) <= ATOL + RTOL * abs(expected),
        f"second derivative {found:.9g}, differences {expected:.9g}",
    )


def _check_forward(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], by_function: bool) -> None:
    """Compare forward with backward mode: u·(J t) = (Jᵀ u)·t for any u and t, to the tolerances of gradcheck."""
    generator = torch.Generator().manual_seed(0)
    output = run(*inputs)
    u = _drawn(output, generator)
    tangents = tuple(_drawn(t, generator) for t in inputs)
    back = torch.autograd.grad(output, inputs, u, allow_unused=True) if output.requires_grad else [None] * len(inputs)
    expected = sum(float((g * t).sum()) for g, t in zip(back, tangents) if g is not None)
    values = tuple(t.detach() for t in inputs)
    if by_function:
        moved = torch.func.jvp(run, values, tangents)[1]
    else:
        with forward_ad.dual_level():
            dual = run(*(forward_ad.make_dual(v, t) for v, t in zip(values, tangents)))
            moved = forward_ad.unpack_dual(dual).tangent
    found = 0.0 if moved is None else float((u * moved).sum())
    require(abs(found - expected) <= ATOL + RTOL * abs(expected), f"forward mode {found:.9g}, backward {expected:.9g}")


def _check_refuses(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    for attempt in (_twice, _forward):
        try:
            attempt(run, inputs)
        except (RuntimeError, ValueError) as error:
            helpful = any(f"'{name}'" in str(error) for name in ("streaming", "reference"))
            require(helpful, f"the error names no engine that supports it: {error}")
        else:
            raise AssertionError(f"{attempt.__name__.strip('_')} works although the engine does not claim it")


def _twice(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    output = run(*inputs)
    torch.autograd.grad(output.sum(), inputs[2], create_graph=True)


def _forward(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0].detach(), torch.ones_like(inputs[0]))
        run(dual, *(t.detach() for t in inputs[1:]))


#: Second derivatives of a function along fixed directions, each by a different composition of transforms.
def _compositions(f: Callable[[Tensor], Tensor], point: Tensor, along: Tensor) -> dict[str, Callable[[], Tensor]]:
    grad, vmap, jvp = torch.func.grad, torch.func.vmap, torch.func.jvp

    def slope(x: Tensor) -> Tensor:
        return (grad(f)(x) * along).sum()

    def penalty() -> Tensor:
        leaf = point.clone().requires_grad_()
        return _derivative(slope(leaf), leaf)

    def graph() -> Tensor:
        leaf = point.clone().requires_grad_()
        return _derivative((_derivative(f(leaf), leaf) * along).sum(), leaf)

    return {
        "grad of grad": lambda: grad(slope)(point),
        "vmap of grad of grad": lambda: vmap(grad(slope))(torch.stack([point, point]))[1],
        "jacrev of jacrev": lambda: (torch.func.jacrev(torch.func.jacrev(f))(point) * along).sum(
            tuple(range(point.dim(), 2 * point.dim()))
        ),
        "jvp of grad": lambda: jvp(grad(f), (point,), (along,))[1],
        "grad of jvp": lambda: grad(lambda x: jvp(f, (x,), (along,))[1])(point),
        "hessian": lambda: (torch.func.hessian(f)(point) * along).sum(tuple(range(point.dim(), 2 * point.dim()))),
        "autograd of grad": penalty,
        "create_graph": graph,
    }


def _derivative(total: Tensor, leaf: Tensor) -> Tensor:
    """Return a derivative with its graph; zeros if the output does not depend on the leaf."""
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    found = torch.autograd.grad(total, leaf, create_graph=True, allow_unused=True)[0]
    return torch.zeros_like(leaf) if found is None else found


@law(
    "composed derivatives",
    "Every composition of torch.func transforms up to second order is correct, or an error names an engine for it.",
    _small,
    share=0.05,
)
def composed_derivatives(case: Case, engine: Engine) -> None:
    """A second derivative is never silently 0."""
    call = CaseCall.of(case)
    name = ("query", "key", "value")[case.seed % 3]
    point = getattr(call, name).detach()
    generator = torch.Generator().manual_seed(case.seed)
    along = _drawn(point, generator)
    weight = _drawn(call.run("reference"), generator)

    def loss(way: Engine | str) -> Callable[[Tensor], Tensor]:
        return lambda x: ((call.but(**{name: x}).run(way) + 0.5) ** 2 * weight).sum()

    leaf = point.clone().requires_grad_()
    expected = _derivative((_derivative(loss("reference")(leaf), leaf) * along).sum(), leaf)
    tolerance = ATOL + RTOL * float(expected.abs().max())
    for way in (engine, "auto"):
        for what, derivative in _compositions(loss(way), point, along).items():
            try:
                got = derivative()
            except (RuntimeError, ValueError) as error:
                helpful = any(f"'{each}'" in str(error) for each in ("streaming", "reference"))
                require(helpful and not getattr(way, "twice_differentiable", False), f"{what}: {error}")
                continue
            off = float((got - expected).abs().max())
            require(
                off <= tolerance,
                f"{what} of {name} is off by {off:.3g}; the largest value is {expected.abs().max():.3g}",
            )


def _traceable(case: Case) -> Case | None:
    """Keep cases without functions or randomness, whose parts do not depend on sizes."""
    call = CaseCall.of(case)
    if call.normalizer.random or case.score.startswith("score_mod") or 0 in case.extent:
        return None
    return judged(
        case.but(
            layout="plain", learned=False, lead=(case.extent.B,), mask=None if _holds_sizes(case.mask) else case.mask
        )
    )


def _holds_sizes(recipe: Recipe | None) -> bool:
    """Return whether a mask has a fixed size or contains a function."""
    if recipe is None or recipe[0] in ("and", "or", "not"):
        return recipe is not None and any(_holds_sizes(part) for part in recipe[1:])
    return recipe[0] not in ("causal", "window", "sinks", "dilated", "chunked", "everything", "alibi", "relative") or (
        recipe[0] in ("causal", "window", "dilated", "chunked", "alibi", "relative") and recipe[-1] == "each"
    )


def _recordable(case: Case) -> Case | None:
    """Keep cases that torch.jit.trace can record: those of the library's own classes."""
    call = CaseCall.of(case)
    ours = all(type(part).__module__.startswith("regard.") for part in (call.score, call.normalizer))
    return _traceable(case) if ours else None


@law(
    "traced",
    "A call recorded by torch.jit.trace is correct at other lengths, with gradients.",
    _recordable,
    share=0.1,
)
def traced(case: Case, engine: Engine) -> None:
    """A trace also runs with other numbers of queries and keys."""
    call = CaseCall.of(case)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return call.but(query=query, key=key, value=value).run(engine.name)

    ends = [t.detach() for t in (call.query, call.key, call.value)]
    made = torch.jit.trace(run, tuple(ends), check_trace=False)
    longer = CaseCall.of(case.but(queries=case.queries + 3, keys=case.keys + 5))
    _check_other(call, longer, made, engine, "the traced output")


def _check_other(call: CaseCall, other: CaseCall, run: Callable[..., Tensor], engine: Engine, what: str) -> None:
    """Check a traced or compiled call on other inputs with the same score and mask."""
    other = other.but(score=call.score, mask=call.mask, normalizer=call.normalizer)
    try:
        refusal = other.refusal(engine)
    except ValueError:
        return  # a mask or a score of fixed size
    if refusal is not None:
        return
    leaves = {name: getattr(other, name).detach().requires_grad_() for name in ("query", "key", "value")}
    other = other.but(**leaves)
    output = run(*leaves.values())
    trial = Trial(other, keeps_lse=True)
    trial.check_output(output, what)
    upstream = trial.upstream(output)
    if output.requires_grad and not trial.undecided.any():
        trial.check_gradients(gradients(output, leaves, upstream), upstream)


@law(
    "compiled",
    "torch.compile(fullgraph=True) gives the bits of the eager call, also at other lengths.",
    _traceable,
    share=0.01,
)
def compiled_lengths(case: Case, engine: Engine) -> None:
    """A compiled call with dynamic sizes from the first or the second call on. Takes seconds."""
    call = CaseCall.of(case)
    torch.compiler.reset()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return call.but(query=query, key=key, value=value).run(engine.name)

    made = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=(None, True)[case.seed % 2])
    with torch.no_grad():
        ends = [t.detach() for t in (call.query, call.key, call.value)]
        require(torch.equal(made(*ends).nan_to_num(), run(*ends).nan_to_num()), "a compiled call gives different bits")
    for more in (0, 2, 3):
        longer = CaseCall.of(case.but(queries=case.queries + more, keys=case.keys + 2 * more))
        _check_other(call, longer, made, engine, f"the compiled output for {more} more queries")


def _batched(case: Case) -> Case | None:
    plain = case.layout == "plain" and len(case.lead) == 1 and case.extent.B and case.extent.H
    if not plain or case.score == "score_mod/sequence" or case.normalizer in ("gumbel", "sampled"):
        return None
    recipe = case.mask if case.mask is not None and case.mask[0] in ("causal", "window", "sinks", "dilated") else None
    if recipe is not None and "each" in recipe:
        recipe = None
    return judged(case.but(mask=recipe, lead=(1,), learned=False))


@law("vmap", "vmap over the inputs, and grad inside it, equal a loop.", _batched, share=0.3)
def vmap(case: Case, engine: Engine) -> None:
    """``torch.func.vmap`` and ``grad`` against the oracle of each call.

    For lines, and from engines without transforms, an error may name another engine.
    """
    call = CaseCall.of(case)
    count = 2
    stacked = [
        torch.stack([t.detach() * (1 - 0.25 * i) for i in range(count)]) for t in (call.query, call.key, call.value)
    ]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return call.but(query=query, key=key, value=value).run(engine)

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (run(query, key, value) * upstream).sum()

    try:
        outputs = torch.func.vmap(run)(*stacked)
    except ValueError as error:
        refuses = case.ridge or not engine.has_transforms
        require(refuses and "engines 'streaming'" in str(error), f"vmap raises {error}")
        return
    trials = [Trial(call.but(query=q, key=k, value=v), keeps_lse=keeps_lse(engine)) for q, k, v in zip(*stacked)]
    for trial, output in zip(trials, outputs):
        trial.check_output(output, "the output under vmap")
    if not outputs[0].numel():
        return
    undecided = any(trial.undecided.any() for trial in trials)
    upstream = trials[0].upstream(outputs[0])
    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for i, trial in enumerate(trials):
        if not undecided:
            trial.check_gradients(dict(zip(("query", "key", "value"), (g[i] for g in grads))), upstream)


def _shapes(case: Case) -> Case:
    """Shrink a case and keep only masks that need no data."""
    recipe = case.mask
    structural = recipe is not None and recipe[0] in ("causal", "window") and "each" not in recipe
    small = {name: min(getattr(case, name), 3) for name in ("queries", "keys")}
    return case.but(mask=recipe if structural else None, tile=(2, 2), **small)


@law("meta", "Meta tensors get the correct shape and dtype.", _shapes, share=0.2)
def meta(case: Case, engine: Engine) -> None:
    """Shapes without data."""
    call = CaseCall.of(case)

    def there(tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta")

    shadow = call.but(
        query=there(call.query), key=there(call.key), value=there(call.value), score=call.score.map_tensors(there),
        normalizer=call.normalizer.map_tensors(there),
    )  # fmt: skip
    if shadow.refusal(engine) is not None:
        return
    output, right = shadow.run(engine), call.run(engine)
    same = output.is_meta and output.shape == right.shape and output.dtype == right.dtype
    got = f"{tuple(output.shape)} {output.dtype}, not {tuple(right.shape)} {right.dtype}"
    require(same, f"meta tensors give {got}")


def compiled(case: Case, engine: Engine, backend: str = "aot_eager") -> None:
    """Check that ``torch.compile(fullgraph=True)`` gives an output and gradients within budget. Takes seconds."""
    call = CaseCall.of(case)
    leaves = call.leaves()
    torch.compiler.reset()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return regard.attention(**{**call.arguments(), "query": query, "key": key, "value": value}, engine=engine)

    output = torch.compile(run, fullgraph=True, backend=backend)(call.query, call.key, call.value)
    trial = Trial(call, keeps_lse=keeps_lse(engine))
    trial.check_output(output, "the compiled output")
    upstream = trial.upstream(output)
    trial.check_gradients(gradients(output, leaves, upstream), upstream)


__all__ = [
    "Budget",
    "compiled",
    "compiled_lengths",
    "composed_derivatives",
    "gradcheck",
    "meta",
    "second_derivatives",
    "traced",
    "vmap",
]
