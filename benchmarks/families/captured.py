"""What ``regard.inspect.capture`` records of a model, compared with the weights of the model's own attention."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.families.checks import OURS, THEIRS, Family, Found, apart, cast, fresh, reason
from regard.inspect import Record, capture

#: How far weights may be apart, and outputs of one model on two implementations that do the same.
NEAR, SAME = 1e-5, 1e-3
#: The softmaxes of torch, by which every eager attention makes its weights.
_SOFTMAXES = frozenset((torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default))


class _Softmaxes(TorchDispatchMode):
    """Keeps the result of every softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # where functions come whole that are made of others
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        result = func(*args, **(kwargs or {}))
        if func in _SOFTMAXES and args[1] % result.dim() == result.dim() - 1:  # else over features or channels
            self.found.append(result.detach().clone())
        return result


def softmaxes(call: Callable[[], Any]) -> list[Tensor]:
    """Return the results of the softmaxes of a call, those of torch's own attention among them."""
    with sdpa_kernel(SDPBackend.MATH), _Softmaxes() as mode, torch.no_grad():
        call()
    return mode.found


def returned(output: Any) -> list[Tensor]:
    """Return the weights (B, H, L, S) that a model of transformers returned, of all its parts."""
    found: list[Tensor] = []
    items = output.items() if hasattr(output, "items") else ()
    for name, value in items:
        if name.endswith("attentions") and isinstance(value, (tuple, list)):
            found += [t for t in _flat(value) if t.dim() == 4 and t.is_floating_point()]
        elif hasattr(value, "items"):
            found += returned(value)
    return found


def _flat(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)


def recorded(model: nn.Module, call: Callable[[], Any]) -> tuple[Record, list[Tensor], bool]:
    """Return the record of a call, its matrices, and whether a warning said that something is missing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with capture(model, recurrences=True) as record, torch.no_grad():
            call()
    warned = any("unrecorded" in str(each.message) or "record" in str(each.message) for each in caught)
    runs = [run for layer in record.layers for run in record.runs(layer)]
    # Effective weights of recurrences are not among those that a model returns: tests compare them with its outputs.
    matrices = [run.weights().detach() for run in runs if run.kind != "linear"]
    return record, matrices, warned and not record.coverage.complete


#: What the record of a model with recurrences also holds.
RECURRENCES = "recurrences as effective weights (`recurrences=True`)"


def is_among(matrix: Tensor, others: list[Tensor]) -> int | None:
    """Return the place of the first of several matrices that is a matrix, whatever their leading dimensions."""
    for i, other in enumerate(others):
        if _is_near(matrix, other) or _is_near(matrix, other[..., :-1]):  # a softmax may have a sink as its last key
            return i
    return None


def _is_near(a: Tensor, b: Tensor) -> bool:
    if a.shape[-1] != b.shape[-1] or a.numel() != b.numel():
        return False
    a = a.reshape(b.shape).to(b.dtype)
    # A sink that is no key takes its share of what is read, which some models take from the output afterwards.
    pairs = (a, b), tuple(each / each.sum(-1, keepdim=True).clamp(1e-9, 1.0) for each in (a, b))
    return any(bool(((one - other).abs().nan_to_num(0.0) <= NEAR).all()) for one, other in pairs)


def judged(expected: list[Tensor], seen: list[Tensor], matrices: list[Tensor], warned: bool, coverage: str) -> Found:
    """Return a verdict: what was expected is recorded, or a warning says what is not; and no matrix is wrong.

    Parameters
    ----------
    expected : list of Tensor (..., L, S)
        Weights that must be in the record.
    seen : list of Tensor (..., L, S)
        Further weights that may be.
    matrices : list of Tensor
        The record's.
    warned : bool
        Whether a warning said that something is missing.
    coverage : str
        What it said.
    """
    if not expected and not matrices and not warned:
        return Found("capture", "no attention")
    among = [*expected, *seen]
    wrong = [m for m in matrices if is_among(m, among) is None]
    if wrong:
        return Found("capture", "different", f"{len(wrong)} of {len(matrices)} recorded matrices are of no softmax")
    left, missing = list(matrices), 0
    for each in expected:
        place = is_among(each, left)
        if place is None:
            missing += 1
        else:
            left.pop(place)
    if missing and not warned:
        return Found("capture", "different", f"{missing} of {len(expected)} matrices are missing, and nothing is said")
    if missing or warned:
        return Found("capture", "reported", f"{len(matrices)} matrices; {coverage}")
    return Found("capture", "recorded", f"{len(matrices)} matrices")


def checked(family: Family) -> list[Found]:
    """Return what the record of a model holds.

    Where float32 is too coarse to judge by, it is judged in float64, by the softmaxes of torch's own attention if the
    model takes that: many an eager one rounds its weights to float32.
    """
    found = _checked(family)
    if not any(each.verdict == "different" for each in found):
        return found
    family.model.double()
    family.inputs = cast(family.inputs, torch.float64)
    for by in (["sdpa"] if family.model._supports_sdpa else []) + [THEIRS]:
        exact = _checked(family, by)  # a part of the model may not take sdpa
        same = [one.verdict == "not run" for one in exact] == [one.verdict == "not run" for one in found]
        if same:
            return exact
    return found


def _checked(family: Family, by: str = THEIRS) -> list[Found]:
    """Return what the record of a model holds, run as transformers does by itself and on our attention.

    It is judged by what the model computes on the implementation ``by``.
    """
    model = family.model
    try:
        right = family.run(by, family.inputs)
        truth = _truth(family) if by == THEIRS else _computed(family)
    except Exception as error:
        return [Found("capture", "not run", reason(error))]
    usual = "sdpa" if model._supports_sdpa else THEIRS
    verdicts = []
    for implementation in (usual, OURS):
        expected, seen = truth
        try:
            same = apart(right, family.run(implementation, family.inputs))[0] <= SAME
        except Exception as error:
            verdicts.append(Found(f"capture on {implementation}", "not run", reason(error)))
            continue
        if not same and implementation == OURS:
            verdicts.append(Found(f"capture on {OURS}", "not run", "its outputs are not those of its own attention"))
            continue
        if not same:  # as where no mask means a causal one
            expected, seen = _computed(family)
        try:
            record, matrices, warned = recorded(model, lambda: _run(family))
        except Exception as error:
            verdicts.append(Found(f"capture on {implementation}", "different", reason(error)))
            continue
        found = judged(expected, seen, matrices, warned, str(record.coverage))
        recurrences = sum(run.kind == "linear" for run in record)
        verdict = "recorded" if recurrences and found.verdict == "no attention" else found.verdict
        detail = f"{found.detail}, {RECURRENCES}" if recurrences and verdict == "recorded" else found.detail
        verdicts.append(Found(f"capture on {implementation}", verdict, detail.removeprefix(", ")))
    return verdicts


def _run(family: Family, **given: Any) -> Any:
    torch.manual_seed(3)
    return family.model(**fresh(family.inputs), **given)


def _truth(family: Family) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights that a model returns, on its own attention, and the softmaxes that it computes.

    Where it returns none, those of four dimensions are expected.
    """
    family.use(THEIRS)
    expected: list[Tensor] = []
    names = inspect.signature(family.model.forward).parameters
    if "output_attentions" in names or "kwargs" in names:
        with torch.no_grad():
            try:
                expected = returned(_run(family, output_attentions=True))
            except TypeError:  # a class without
                expected = []
    computed, seen = _computed(family)
    # Some models return scores, or what was before dropout of whole layers, in the place of weights.
    expected = [each for each in expected if is_among(each, seen) is not None] or computed
    layers = [module for module in family.model.modules() if hasattr(module, "lambda_init")]
    if len(layers) == len(expected):
        expected = [_difference(*pair) for pair in zip(layers, expected)]
    return expected, seen


def _computed(family: Family) -> tuple[list[Tensor], list[Tensor]]:
    """Return the softmaxes that a model computes as it is set, those of four dimensions first."""
    seen = softmaxes(lambda: _run(family))
    return [each for each in seen if each.dim() == 4], seen


def _difference(layer: Any, weights: Tensor) -> Tensor:
    """Return what DiffLlama's layer multiplies values with: softmaxes of half of its heads less λ times the others."""
    first, second = (
        (q * k).sum().exp() for q, k in ((layer.lambda_q1, layer.lambda_k1), (layer.lambda_q2, layer.lambda_k2))
    )
    left, right = weights.chunk(2, 1)
    return (left - (first - second + layer.lambda_init) * right).detach()
