"""What signatures say to editors and type checkers: names as they are in the tables, and calls that check."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import regard
import regard.nn
from regard import Aux, AuxRequest, engines, masks, normalizers, scores
from regard.nn import SAB, AdditiveAttention, KernelAttention, MultiheadAttention, Transformer
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores import Score
from regard.scores.base import TABLE as SCORES
from regard.scores.base import KernelName
from regard.scores.kernels import kernels


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (scores.ScoreName, SCORES),
        (normalizers.NormalizerName, NORMALIZERS),
        (engines.EngineName, ["auto", *engines.TABLE]),
        (KernelName, kernels()),
    ],
)
def test_literals_list_the_tables(names: Any, table: Any) -> None:
    assert set(get_args(names)) == set(table)


def signatures() -> list[Any]:
    layers = [getattr(regard.nn, name) for name in regard.nn.__all__]
    functions = [regard.attention, regard.explain]
    functions += [x.__init__ if isinstance(x, type) else x for x in layers]
    return functions + [x.forward for x in layers if hasattr(x, "forward")]


def test_parts_have_types() -> None:
    """No part is ``Any``, which tells an editor nothing."""
    for function in signatures():
        named = inspect.signature(function).parameters
        for part in {"attn_mask", "score", "normalizer", "engine", "parts"} & set(named):
            found = named[part].annotation
            assert found not in (Any, "Any", inspect.Parameter.empty), f"{function.__qualname__}: {part}"


class Laplace(Score):
    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return -torch.cdist(query, key, p=1)


def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - (q_idx - kv_idx).abs()


def earlier(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def test_right_calls_check() -> None:
    x = torch.randn(1, 2, 5, 4)
    name: str = "gaussian"
    outputs: list[Tensor] = [
        regard.attention(x, x, x, masks.causal() & masks.window(2, 0), score="gaussian", normalizer="sparsemax"),
        regard.attention(x, x, x, earlier, score=nearer, engine="streaming"),
        regard.attention(x, x, x, torch.zeros(5, 5), score=name),
    ]
    pair: tuple[Tensor, Aux] = regard.attention(x, x, x, score=Laplace(), return_aux=AuxRequest(lse=True))
    for asked in (None, AuxRequest(max=True)):
        either: Tensor | tuple[Tensor, Aux] = regard.attention(x, x, x, return_aux=asked)
        assert isinstance(either, Tensor) == (asked is None)
    layers: list[nn.Module] = [
        MultiheadAttention(8, 2, score=AdditiveAttention(4, 4, 4), normalizer="entmax15"),
        Transformer(8, 2, 1, 1, 8, score="dot"),
        AdditiveAttention(4, 4, 4, normalizer="sparsemax", scale=1.0),
        KernelAttention("boxcar"),
        SAB(4, 4, 2, scale=2.0),
    ]
    assert len(outputs) == 3 and len(pair) == 2 and len(layers) == 5


def test_wrong_calls_do_not() -> None:
    """mypy warns of a comment that has nothing to ignore: each of these must be an error of types, too."""
    x = torch.randn(1, 2, 5, 4)
    for wrong in (
        lambda: regard.attention(x, x, x, 3),  # type: ignore[call-overload]
        lambda: regard.attention(x, x, x, score=nn.Linear),  # type: ignore[arg-type]
        lambda: regard.attention(x, x, x, normalizer=None),  # type: ignore[call-overload]
        lambda: KernelAttention("gausian"),  # type: ignore[arg-type]
        lambda: AdditiveAttention(4, 4, 4, normaliser="sparsemax"),  # type: ignore[call-arg]
        lambda: Transformer(8, 2, nromalizer="softmax"),  # type: ignore[call-arg]
    ):
        with pytest.raises((TypeError, ValueError)):
            wrong()
