"""Laws 1, 2 and 5: rows without visible keys, keys hidden from all queries, and causality."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.engines import Engine
from regard.testing.budget import Budget
from regard.testing.case import Case, CaseCall, gradients, has_graph
from regard.testing.formulas import NORMALIZER_FORMULAS
from regard.testing.laws.accuracy import judged
from regard.testing.laws.base import law, require
from regard.testing.oracle import WithAmplitude
from regard.testing.statement import evaluate_mask
from regard.testing.trial import Trial, is_judged, keeps_lse


def _with_empty_rows(case: Case) -> Case | None:
    return case.masked(("empty_rows",)) if case.queries and case.keys else None


@law("empty rows", "A row without visible keys has output 0, weights 0, lse −inf and zero gradients.", _with_empty_rows)
def empty_rows(case: Case, engine: Engine) -> None:
    """Law 1."""
    call = CaseCall.of(case)
    leaves = call.leaves()
    output, aux = call.run_with_aux(
        engine, lse=True, max=True, entropy=not case.ridge, received=True, topk=2, weights=True
    )
    problem = call.problem()
    empty = torch.from_numpy(~evaluate_mask(problem.mask, problem.extent)[0].any(-1)).to(output.device)
    rows = empty.unsqueeze(-1)

    def at(tensor: Tensor | None, width: bool) -> Tensor:
        assert tensor is not None
        shape = (*empty.shape, -1) if width and tensor.numel() else empty.shape
        return tensor.detach().reshape(shape)[empty] if tensor.numel() else tensor

    assert aux.topk is not None
    require((at(output, True) == 0).all(), "an empty row has an output that is not 0")
    require((at(aux.weights, True) == 0).all(), "an empty row has weights that are not 0")
    require((at(aux.lse, False) == -torch.inf).all(), "an empty row has an lse that is not −inf")
    require((at(aux.max, False) == -torch.inf).all(), "an empty row has a max that is not −inf")
    require(case.ridge or (at(aux.entropy, False) == 0).all(), "an empty row has an entropy that is not 0")
    require((at(aux.topk.weights, True) == 0).all(), "an empty row has a topk weight that is not 0")
    require((at(aux.topk.indices, True) == -1).all(), "an empty row names keys in topk.indices")
    require(output.isfinite().all(), "an output is not finite")
    assert aux.received is not None
    require(aux.received.isfinite().all(), "aux.received is not finite")
    if not has_graph(output, leaves):
        return
    upstream = torch.ones_like(output)
    found = gradients(output, leaves, upstream)
    if is_judged(call):
        Trial(call).check_finite(found, upstream, "empty rows make")
    else:
        require(all(gradient.isfinite().all() for gradient in found.values()), "a gradient is not finite")
    output = call.run(engine)
    upstream = rows.expand(*empty.shape, case.value_width).reshape(output.shape).to(output.dtype)
    for name, gradient in gradients(output, leaves, upstream).items():
        require((gradient == 0).all(), f"empty rows give a gradient to {name}")


def _with_hidden_keys(case: Case) -> Case | None:
    if not case.keys or case.extent.B == 0 or case.extent.H == 0 or case.layout in ("expanded", "broadcast"):
        return None
    judged_case = judged(case)
    return None if judged_case is None else judged_case.masked(("hidden_keys",))


def poisoned(call: CaseCall, hidden: Tensor, seed: int) -> tuple[CaseCall, CaseCall]:
    """Return the call with poison in the ``hidden`` rows (B, G, S) of key and value, and with zeros there.

    NaN, infinities and numbers whose products overflow are mixed; or such numbers with small ones; or one infinity in a
    row of zeros, which makes scores infinite without a NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    large = torch.finfo(call.key.dtype).max / 2
    kinds = torch.tensor(
        ([torch.nan, torch.inf, -torch.inf, 1.0, large], [large, -large, large, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0, 0.0])[
            seed % 3
        ],
        dtype=torch.float64,
    )

    def spoiled(tensor: Tensor) -> Tensor:
        bad = kinds[torch.randint(5, tensor.shape, generator=generator)].to(tensor)
        if seed % 3 == 2 and tensor.shape[-1]:
            bad[..., seed % tensor.shape[-1]] = (torch.inf, -torch.inf)[seed % 2]
        return torch.where(hidden.view(*tensor.shape[:-1], 1), bad, tensor).detach()

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(hidden.view(*tensor.shape[:-1], 1), 0.0, tensor).detach()

    return (
        call.but(key=spoiled(call.key), value=spoiled(call.value)),
        call.but(key=clean(call.key), value=clean(call.value)),
    )


def unseen(call: CaseCall) -> Tensor:
    """Return which keys (B, G, S) no query may attend to."""
    problem = call.problem()
    seen = evaluate_mask(problem.mask, problem.extent)[0].any(-2)  # (B, H, S)
    B, _, S = seen.shape
    return torch.from_numpy(~seen.reshape(B, problem.key.shape[1], -1, S).any(2)).to(call.query.device)


@law("no leak", "NaN or inf in a key or value hidden from all queries changes nothing.", _with_hidden_keys)
def no_leak(case: Case, engine: Engine) -> None:
    """Law 2."""
    call = CaseCall.of(case)
    hidden = unseen(call)
    spoiled, clean = poisoned(call, hidden, case.seed)
    leaves = spoiled.leaves()
    with torch.no_grad():
        quiet = spoiled.run(engine)
    require(quiet.isfinite().all(), "a hidden key or value makes an output not finite, without gradients")
    trial = Trial(clean, keeps_lse=keeps_lse(engine))
    trial.check_output(quiet, "output without gradients")
    output = spoiled.run(engine)
    require(output.isfinite().all(), "a hidden key or value makes an output not finite, with gradients")
    if not has_graph(output, leaves):
        trial.check_output(output)
        return
    upstream = trial.upstream(output)
    found = gradients(output, leaves, upstream)
    trial.check_finite(found, upstream, "a hidden key or value makes")
    for name in ("key", "value"):
        require((found[name][hidden.view(found[name].shape[:-1])] == 0).all(), f"a hidden {name} gets a gradient")
    trial.check_output(output)
    trial.check_gradients(found, upstream)


@law("contained", "NaN or inf in a key or value does not affect rows that cannot see it.", _with_hidden_keys)
def contained(case: Case, engine: Engine) -> None:
    """Law 2 for each pair: a bad key has no influence on rows that cannot see it."""
    call = CaseCall.of(case)
    problem = call.problem()
    visible = evaluate_mask(problem.mask, problem.extent)[0]
    B, _, _, S = visible.shape
    bad = torch.zeros(B, problem.key.shape[1], S, dtype=torch.bool)
    bad[..., case.seed % S] = True
    spoiled, clean = poisoned(call, bad.to(call.query.device), case.seed)
    safe = ~visible[..., case.seed % S]  # (B, H, L)
    if call.normalizer.mixes_heads:  # a row cannot see what another head's row sees
        safe = np.broadcast_to(safe.all(1, keepdims=True), safe.shape)
    with torch.no_grad():
        output = spoiled.run(engine)
    trial = Trial(clean)
    kept = torch.from_numpy(safe & ~trial.undecided).unsqueeze(-1)
    right, K = trial.oracle.output, trial.statement.query.shape[0]
    mask = kept.numpy()
    budget = Budget.of(
        WithAmplitude(right.value * mask, right.amplitude * mask),
        trial.eager.output.detach().unflatten(0, (K, -1)).double() * kept,
        output.dtype,
    )
    got = trial.canonical(output).double().cpu()
    budget.check("the output of rows that do not see a bad key", torch.where(kept, got, 0.0))


def _with_a_score_that_reads_keys(case: Case) -> Case | None:
    if 0 in (case.queries, case.keys, case.width, case.extent.B, case.extent.H):
        return None
    return case.but(score="scaled_dot", layout="plain", key_width=0, values=1.0, scale=None, magnitude=1.0)


@law("shown", "A NaN in a visible key propagates to outputs and gradients.", _with_a_score_that_reads_keys, 0.5)
def shown(case: Case, engine: Engine) -> None:
    """No normalizer swallows a visible NaN."""
    call = CaseCall.of(case)
    problem = call.problem()
    place = case.seed % case.keys
    seen = torch.from_numpy(evaluate_mask(problem.mask, problem.extent)[0][..., place])  # (B, H, L)
    if problem.mask is not None and problem.mask.has_bias:
        bias = evaluate_mask(problem.mask, problem.extent)[1]
        assert bias is not None
        seen = seen & torch.from_numpy(bias[..., place] > -np.inf)
    key = call.key.detach().clone()
    key[..., place, :] = torch.nan
    spoiled = call.but(key=key)
    with torch.no_grad():
        quiet = spoiled.run(engine).reshape(*seen.shape, -1).cpu()
    leaves = spoiled.leaves()
    output = spoiled.run(engine)
    rows = output.detach().reshape(*seen.shape, -1).cpu()
    if case.value_width:
        require(quiet[seen].isnan().all(), "a visible NaN key does not reach the output, without gradients")
        require(rows[seen].isnan().all(), "a visible NaN key does not reach the output, with gradients")
    if not (output.requires_grad and call.normalizer.smooth and case.value_width):
        return
    found = gradients(output, leaves, torch.ones_like(output))["query"].reshape(*seen.shape, -1).cpu()
    require(found[seen].isnan().any(-1).all(), "a visible NaN key does not reach the gradient of the query")


@law(
    "bad queries",
    "A query of NaN or infinity affects only its own row, and not even that without visible keys.",
    _with_hidden_keys,
)
def bad_queries(case: Case, engine: Engine) -> None:
    """Law 2 for queries; law 1 for a query without visible keys."""
    call = CaseCall.of(case.masked(("empty_rows",)) if case.seed % 2 and case.queries else case)
    if call.refusal(engine) is not None:  # with the further mask
        return
    problem = call.problem()
    seen = torch.from_numpy(evaluate_mask(problem.mask, problem.extent)[0].any(-1))  # (B, H, L)
    if not seen.numel() or not case.width:
        return
    query = call.query.detach().clone()
    row = case.seed % case.queries
    query[..., row, :] = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    spoiled = call.but(query=query)
    leaves = spoiled.leaves()
    with torch.no_grad():
        quiet = spoiled.run(engine).reshape(*seen.shape, -1).cpu()
    output = spoiled.run(engine)
    for what, rows in (("without", quiet), ("with", output.detach().reshape(*seen.shape, -1).cpu())):
        require(
            (rows[..., row, :][~seen[..., row]] == 0).all(),
            f"a bad query without visible keys has an output that is not 0, {what} gradients",
        )
        others = torch.cat((rows[..., :row, :], rows[..., row + 1 :, :]), -2)
        require(others.isfinite().all(), f"a bad query affects another row, {what} gradients")
    if case.seed % 3 == 0 and case.value_width and case.score == "scaled_dot" and case.normalizer != "argmax":
        shown = quiet[..., row, :][seen[..., row]]
        require(shown.isnan().all(), "a NaN query does not reach its output")
    if has_graph(output, leaves) and not seen[..., row].any():
        for name, gradient in gradients(output, leaves, torch.ones_like(output)).items():
            require(gradient.isfinite().all(), f"a bad query without visible keys makes the {name} gradient not finite")


def _causal(case: Case) -> Case | None:
    if not case.queries or not case.keys or case.layout in ("expanded", "broadcast"):
        return None
    causal = case.but(mask=("causal", "upper_left")) if case.seed % 3 == 0 else case.masked(("causal", "upper_left"))
    return None if CaseCall.of(causal).normalizer.random else causal


@law("causality", "Under a causal mask, output i does not depend on rows after i, and gives them no gradient.", _causal)
def causality(case: Case, engine: Engine) -> None:
    """Law 5."""
    call = CaseCall.of(case)
    i = case.seed % case.queries
    leaves = call.leaves()
    output = call.run(engine)
    other = call.but(**{
        name: _changed_after(getattr(call, name), i, size) for name, size in (("query", 2), ("key", 4), ("value", 64))
    })  # fmt: skip
    with torch.no_grad():
        changed = other.run(engine)
    same = output.detach()[..., : i + 1, :], changed[..., : i + 1, :]
    if not torch.equal(*same):
        require(same[1].isfinite().all(), "later rows make an earlier output not finite")
        if is_judged(call):
            _check_rows_up_to(Trial(call), i, changed)
        else:  # a part that states no formula in NumPy: a search for a threshold may round otherwise, nothing else
            weighing = NORMALIZER_FORMULAS.get(type(call.normalizer))
            searched = weighing is not None and weighing.threshold is not None
            off = (same[0] - same[1]).abs().max()
            require(searched, f"outputs up to {i} change with later rows, by {off:.3g}")
    if not has_graph(output, leaves):
        return
    upstream = torch.ones_like(output)
    upstream[..., i + 1 :, :] = 0
    for name, gradient in gradients(output, leaves, upstream).items():
        if name in ("query", "key", "value"):
            require(
                (gradient[..., i + 1 :, :] == 0).all(), f"rows of {name} after {i} get a gradient from rows up to it"
            )


def _changed_after(tensor: Tensor, i: int, size: float) -> Tensor:
    changed = tensor.detach().clone()
    changed[..., i + 1 :, :] = -size * changed[..., i + 1 :, :].flip(-1) + 0.5
    return changed


def _check_rows_up_to(trial: Trial, i: int, output: Tensor) -> None:
    """Check rows up to i within budget: a threshold search may take different steps and differ by rounding."""
    undecided = trial.undecided.copy()
    undecided[..., i + 1 :] = True
    mask = ~undecided[..., None]
    K = trial.statement.query.shape[0]
    eager = trial.eager.output.detach().unflatten(0, (K, -1)).double() * torch.from_numpy(mask)
    right = trial.oracle.output
    budget = Budget.of(WithAmplitude(right.value * mask, right.amplitude * mask), eager, output.dtype)
    got = np.where(mask, trial.canonical(output).double().cpu().numpy(), 0)
    budget.check(f"with later rows changed, an output up to row {i}", torch.from_numpy(got))
