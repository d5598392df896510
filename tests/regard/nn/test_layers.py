"""What every layer of the catalogue owes: its formula, and everything that torch expects of a module."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.regard.nn.layer_samples import SAMPLES, Sample
from torch import Tensor, nn

import regard
from regard._utils.mechanism import mechanisms

LAYERS = [row for row in mechanisms() if row.module == "regard.nn" and isinstance(row.defined, type)]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)
F32, F64 = torch.float32, torch.float64

#: What autocast may change of an output's largest number: three steps of bfloat16. Layers of today need one and a half.
BFLOAT16 = 3 * torch.finfo(torch.bfloat16).eps


def numbers(dtype: torch.dtype = F32, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def built(sample: Sample, dtype: torch.dtype = F32) -> nn.Module:
    torch.manual_seed(3)
    return sample.build(dtype=dtype).train(sample.training)


def outputs(answer: Any) -> list[Tensor]:
    """Return all tensors of an answer, whatever holds them."""
    if isinstance(answer, Tensor):
        return [answer]
    if hasattr(answer, "__dict__") and not isinstance(answer, (tuple, list, dict)):
        answer = vars(answer)
    inside = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, (tuple, list)) else ()
    return [tensor for each in inside for tensor in outputs(each)]


def run(layer: nn.Module, sample: Sample, dtype: torch.dtype = F32, value: float | None = None) -> list[Tensor]:
    call = sample.call(numbers(dtype))
    if value is not None:
        assert sample.hidden is not None
        call = sample.hidden(call, value)
    torch.manual_seed(5)
    return outputs(layer(*call[0], **call[1]))


def test_every_layer_has_a_sample() -> None:
    assert {row.name for row in LAYERS} == {sample.name for sample in SAMPLES}


def test_the_docstring_gives_formula_shapes_source_and_example() -> None:
    for row in LAYERS:
        doc = inspect.getdoc(row.defined)
        assert doc is not None and "Examples" in doc and ">>>" in doc, row.name
        for reference in row.references:
            assert str(reference.year) in doc or reference.arxiv in doc, f"{row.name} does not name {reference.short}"
        if list(inspect.signature(row.defined).parameters):
            assert "Parameters" in doc, row.name


@every_sample
def test_formula(sample: Sample) -> None:
    layer = built(sample, F64)
    args, kwargs = sample.call(numbers(F64))
    torch.manual_seed(5)
    found = outputs(layer(*args, **kwargs))[0]
    right = sample.formula(layer, *args, **kwargs)
    np.testing.assert_allclose(found.detach().numpy(), right, rtol=1e-10, atol=1e-10)


@every_sample
def test_single_precision_is_as_good_as_it_can_be(sample: Sample) -> None:
    wide, narrow = built(sample, F64), built(sample, F32)
    narrow.load_state_dict(wide.state_dict())
    for a, b in zip(run(narrow, sample, F32), run(wide, sample, F64)):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-5)


@every_sample
def test_gradients_reach_every_parameter(sample: Sample) -> None:
    layer = built(sample)
    total = sum(t.square().sum() for t in run(layer, sample) if t.requires_grad)
    if not list(layer.parameters()):
        return
    total.backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # In evaluation, hard attention chooses the best key: its choice has no slope.
        assert parameter.grad.any() or (sample.name == "HardAttention" and name.startswith("scorer.")), name


@pytest.mark.slow
def test_reset_parameters_draws_them_anew_and_alike() -> None:
    """A value that no layer starts with is gone from every parameter, and the same seed gives the same bits."""
    for sample in SAMPLES:
        layer = built(sample)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(7.0)
        torch.manual_seed(9)
        layer.reset_parameters()
        once = {name: t.clone() for name, t in layer.state_dict().items()}
        for name, parameter in layer.named_parameters():
            assert not (parameter == 7).any(), f"{sample}: {name}"
        torch.manual_seed(9)
        layer.reset_parameters()
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, once[name]), f"{sample}: {name}"
            assert tensor.isfinite().all(), f"{sample}: {name}"


@pytest.mark.slow
def test_each_layer_prints_and_its_sources_can_be_cited() -> None:
    for row in LAYERS:
        layer = built(next(sample for sample in SAMPLES if sample.name == row.name))
        assert row.name in repr(layer)
        for reference in row.references:
            assert reference.bibtex in regard.cite(layer), row.name


@every_sample
def test_device_and_dtype(sample: Sample) -> None:
    for tensor in sample.build(device="meta", dtype=F64).state_dict().values():
        assert tensor.device.type == "meta"
        assert not tensor.is_floating_point() or tensor.dtype == F64
    torch.manual_seed(3)
    assert all(
        t.dtype == F64 for t in run(sample.build().to(F64).train(sample.training), sample, F64) if t.is_floating_point()
    )


@pytest.mark.campaign(keep=110)
@every_sample
def test_copies_and_files(sample: Sample) -> None:
    layer = built(sample)
    right = run(layer, sample)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    torch.manual_seed(77)
    loaded = sample.build().train(sample.training)
    loaded.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        for a, b in zip(run(other, sample), right):
            assert torch.equal(a, b)


@pytest.mark.campaign(keep=110)
@every_sample
def test_functional_call(sample: Sample) -> None:
    layer = built(sample)
    args, kwargs = sample.call(numbers())
    state = {name: t * 1.5 if t.is_floating_point() else t for name, t in layer.state_dict().items()}
    torch.manual_seed(5)
    found = outputs(torch.func.functional_call(layer, state, args, kwargs))
    layer.load_state_dict(state)
    for a, b in zip(found, run(layer, sample)):
        torch.testing.assert_close(a, b)


@pytest.mark.campaign(keep=110)
@every_sample
def test_autocast(sample: Sample) -> None:
    layer = built(sample)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer, sample)
    for a, b in zip(found, run(layer, sample)):
        assert torch.equal(a.isfinite(), b.isfinite())
        if b.is_floating_point() and b.numel():
            a, b = a.float().nan_to_num(), b.nan_to_num()
            assert (a - b).abs().max() <= BFLOAT16 * b.abs().max()


@pytest.mark.campaign(keep=2)
@every_sample
def test_compile(sample: Sample) -> None:
    if not sample.compiles:
        pytest.skip("its docstring says that it does not")
    layer = built(sample)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(compiled, sample), run(layer, sample)):
        torch.testing.assert_close(a, b)


def test_samples_of_layers_with_lengths_have_padding() -> None:
    for sample in SAMPLES:
        takes = "valid_lens" in inspect.signature(type(built(sample)).forward).parameters
        assert sample.hidden is not None or not takes, f"{sample} takes lengths: say what they hide"


def test_lengths_beyond_the_sequences_are_refused() -> None:
    for sample in SAMPLES:
        layer, (args, kwargs) = built(sample), sample.call(numbers())
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        for name in given.keys() & {"a_lens", "b_lens", "query_lens", "valid_lens"}:
            with pytest.raises(
                ValueError, match=r"(_lens must be from 0 to|masks.padding: lengths must be at most) \d"
            ):
                layer(**{**given, name: given[name] + 99})


@pytest.mark.campaign(keep=220)
@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if sample.hidden is not None], ids=str)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_padding_holds_cannot_leak(sample: Sample, garbage: float) -> None:
    layer = built(sample)

    def all_of(value: float) -> list[Tensor]:
        layer.zero_grad()
        found = run(layer, sample, value=value)
        total = sum(t.square().sum() for t in found if t.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
        return [*found, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    for a, b in zip(all_of(garbage), all_of(0.0)):
        torch.testing.assert_close(a, b)
