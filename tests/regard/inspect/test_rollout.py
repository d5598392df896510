"""Rollout, flow, means and differences follow their definitions, written by other means."""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, made, tokens
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from regard._utils.errors import RegardWarning
from regard.inspect import Record, average, capture, difference, flow, rollout
from regard.inspect._record.calls import AttentionCall


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def recorded(*, layers: int = 4, length: int = 6, batch: int = 2, causal: bool = False) -> Record:
    names = [f"layers.{i}.attn" for i in range(layers)]
    stack = nn.ModuleDict({name.replace(".", "/"): _Attend() for name in names})
    with capture(stack) as record:
        for i, each in enumerate(stack.values()):
            each(drawn(batch, 3, length, 8, seed=i) * 2, drawn(batch, 3, length, 8, seed=100 + i), causal)
    return record


class _Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, is_causal=causal)


FUSIONS: dict[str, Any] = {"mean": np.mean, "max": np.max, "min": np.min}


def mixed(record: Record, batch: int, fusion: str, residual: float, discard: float = 0.0) -> list[np.ndarray]:
    """Each layer's matrix by numpy, an entry at a time."""
    found = []
    for run in record:
        fused = FUSIONS[fusion](run.weights(batch=batch).double().numpy(), axis=0)
        for row in fused:
            for j in sorted(range(len(row)), key=lambda j: row[j])[: int(discard * len(row))]:
                row[j] = 0
        whole = (1 - residual) * fused + residual * np.eye(len(fused))
        found.append(whole / whole.sum(1, keepdims=True))
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("fusion", "residual", "discard"), [("mean", 0.5, 0), ("max", 0.2, 0.4), ("min", 0.9, 0.9), ("mean", 0, 0.5)]
)
def test_rollout_is_a_sum_over_paths(fusion: str, residual: float, discard: float, causal: bool) -> None:
    record = recorded(causal=causal)
    found = rollout(record, batch=1, head_fusion=fusion, residual=residual, discard=discard)
    first, second, third, fourth = mixed(record, 1, fusion, residual, discard)
    expected = np.einsum("ab,bc,cd,de->ae", fourth, third, second, first)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(-1), torch.ones(6))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_rollout_of_more_rows_than_are_multiplied_together(fusion: str, causal: bool) -> None:
    record = recorded(layers=3, length=300, batch=1, causal=causal)
    first, second, third = mixed(record, 0, fusion, 0.5)
    found = rollout(record, head_fusion=fusion).numpy()
    np.testing.assert_allclose(found, third @ second @ first, rtol=1e-5, atol=1e-7)
    assert (found[np.triu_indices(300, 1)] == 0).all() == causal


def test_a_part_of_the_layers() -> None:
    record = recorded()
    matrices = mixed(record, 0, "mean", 0.5)
    for layers in ([0, 2], ["layers/2/attn", 0], [2, "layers/0/attn"]):
        np.testing.assert_allclose(rollout(record, layers=layers).numpy(), matrices[2] @ matrices[0], atol=1e-6)
    with capture(model := nn.ModuleDict({"shared": _Attend()})) as record:
        for i in range(3):
            model["shared"](drawn(1, 2, 5, 4, seed=i), drawn(1, 2, 5, 4, seed=9 + i))
    with pytest.raises(ValueError, match="rollout: layers must name runs of the only layer, got 3 runs"):
        rollout(record)
    each = [(run.weights(batch=0).double().mean(0).numpy() + np.eye(5)) / 2 for run in record.runs(0)]
    found = rollout(record, layers=[("shared", i) for i in range(3)])
    np.testing.assert_allclose(found.numpy(), each[2] @ each[1] @ each[0], atol=1e-6)


def by_networkx(matrices: list[np.ndarray]) -> np.ndarray:
    size, graph = len(matrices[0]), networkx.DiGraph()
    for layer, matrix in enumerate(matrices):
        for (i, j), width in np.ndenumerate(matrix):
            graph.add_edge((layer + 1, i), (layer, j), capacity=float(width))
    top = len(matrices)
    return np.array([[networkx.maximum_flow_value(graph, (top, i), (0, j)) for j in range(size)] for i in range(size)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("residual", [0.5, 0.1, 0.0])
def test_flow_is_that_of_networkx(residual: float, causal: bool) -> None:
    record = recorded(causal=causal, layers=3, length=7)
    found = flow(record, batch=1, residual=residual)
    expected = by_networkx(mixed(record, 1, "mean", residual))
    np.testing.assert_allclose(found.numpy(), expected, atol=3 * 49 * 2.0**-31 + 1e-7)
    assert torch.equal(flow(record, batch=1, residual=residual, rows=slice(2, 5)), found[2:5])


def test_flow_of_one_layer_is_its_matrix() -> None:
    record = recorded(layers=1)
    np.testing.assert_allclose(flow(record, residual=0).numpy(), record[0].weights(batch=0).mean(0).numpy(), atol=1e-7)
    assert flow(record, rows=slice(3, 3)).shape == (0, 6)


@torch.no_grad()
def test_models() -> None:
    model = made(DECODERS["llama, grouped"]())
    with capture(model) as record:
        attentions = model(tokens(), output_attentions=True, use_cache=False).attentions
    first, second = ((each[1].double().mean(0) + torch.eye(14)) / 2 for each in attentions)
    torch.testing.assert_close(rollout(record, batch=1), (second @ first).float(), atol=1e-5, rtol=0)
    expected = torch.stack(attentions)[:, 1].mean((0, 1))
    torch.testing.assert_close(average(record, batch=1), expected, atol=1e-5, rtol=0)
    expected = attentions[1][0].amax(0)
    torch.testing.assert_close(average(record, head_fusion="max", layers=[1]), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_encoders_and_decoders_are_chosen_by_name() -> None:
    model = made(PAIRED["bart"](), AutoModelForSeq2SeqLM)
    with capture(model) as record:
        model(tokens(), decoder_input_ids=tokens(length=9))
    for function in (rollout, flow, average):
        name = function.__name__
        with pytest.raises(ValueError, match=f"{name}: layers must name layers of one sequence, got both self- and"):
            function(record)
    assert rollout(record, layers=["model.encoder"]).shape == (14, 14)
    chosen = [name for name in record.layers if "decoder" in name and "self_attn" in name]
    assert flow(record, layers=chosen, rows=slice(8, None)).shape == (1, 9)
    crossed = [name for name in record.layers if "encoder_attn" in name]
    assert average(record, layers=crossed).shape == (9, 14)
    with pytest.raises(ValueError, match="rollout: layers must read their own sequence, got 9 queries and 14 keys"):
        rollout(record, layers=crossed)
    with pytest.raises(ValueError, match=r"average: layers must be of one shape \(L, S\), got \(9, 14\), \(14, 14\)"):
        average(record, layers=["encoder 0", "cross 0"])


@torch.no_grad()
def test_rollout_of_a_hybrid_model_says_what_it_leaves_out() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(_Attend() for _ in range(6))})
    with capture(model) as record:
        for at in (2, 5):
            model["layers"][at](drawn(1, 2, 4, 8, seed=at), drawn(1, 2, 4, 8, seed=at + 1))
    expected = r"rollout: it combines attention layers 2, 5. It leaves out layers 0–1, 3–4, which are not recorded."
    with pytest.warns(RegardWarning, match=expected):
        found = rollout(record)
    assert torch.equal(found, rollout(record, layers=[2, 5]))  # no warning: these were named
    for run, kind in zip(record, ("linear", "self")):
        run.reads = kind
    with pytest.warns(RegardWarning, match="combines attention layer 5. It leaves out the recurrences 2 and"):
        found = rollout(record)
    assert torch.equal(found, rollout(record, layers=["layers.5"]))
    record[2].calls[0] = AttentionCall.of_weights(-record[2].weights())
    with pytest.raises(ValueError, match="rollout: layers must have no negative weights, got recurrences, or"):
        rollout(record, layers=[2])
    record[5].reads = "linear"
    with pytest.raises(ValueError, match="rollout: record must hold layers of attention, got recurrences alone"):
        rollout(record)


def test_a_query_that_sees_nothing() -> None:
    query, seen = drawn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    seen[1] = False
    with capture() as record:
        F.scaled_dot_product_attention(query, query, query, seen)
    assert torch.equal(rollout(record)[1], torch.eye(4)[1])
    assert torch.equal(rollout(record, residual=0)[1], torch.zeros(4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"residual": 1.5}, r"rollout: residual must be in \[0, 1\], got 1.5"),
        ({"discard": 1.0}, r"rollout: discard must be in \[0, 1\), got 1.0"),
        ({"head_fusion": "men"}, r"rollout: head_fusion must be one of .* \(did you mean 'mean'\?\)"),
        ({"layers": []}, "rollout: layers must name at least one layer, got none"),
        ({"layers": [7]}, r"rollout: layers must be the number or the name of 0 \(layers/0/attn\), .*, got 7"),
        ({"batch": 2}, "weights: batch must be a slice, or a number below 2, got 2"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout(recorded(), **given)


def test_differences() -> None:
    first, second = recorded(), recorded(causal=True)
    for name, each in difference(first, second).items():
        expected = first[name].weights().double() - second[name].weights().double()
        torch.testing.assert_close(each.double(), expected, atol=1e-7, rtol=0)
        assert float(each.min()) < 0 < float(each.max())
    part = difference(first[0], second[0], batch=1, head=2, rows=slice(0, 3))
    assert torch.equal(part, difference(first, second)["layers/0/attn"][1, 2, :3])
    with pytest.raises(ValueError, match=r"records must be of one shape, got \(2, 3, 6, 6\) and \(2, 3, 5, 5\)"):
        difference(first, recorded(length=5))
    with pytest.raises(ValueError, match="have the same layer names, got 'layers/3/attn' in only one of them"):
        difference(first, recorded(layers=3))
    with pytest.raises(TypeError, match="be two Records or two LayerRecords"):
        difference(first, second[0])  # type: ignore[call-overload]
