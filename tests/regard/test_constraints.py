"""Constraints on arguments: what they take, and the one sentence with which they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from regard._utils.constraints import Constraint, Integer, Number, OneOf, TensorOf, Texts, flag, lengths

RIGHT: list[tuple[Constraint, Any, Any]] = [
    (flag, True, True),
    (Integer(ge=0), np.int64(3), 3),
    (Number(ge=0, le=1), np.float32(0.5), 0.5),
    (Number(gt=0, le=1), 1, 1.0),
    (OneOf(("a", None)), None, None),
]
ABOVE, BELOW = Number(gt=2), Number(ge=0, lt=1)
FLOAT = torch.ones(())
POSITIVE = Number(gt=0, note=" or a tensor")
WRONG: list[tuple[Constraint, Any, type[Exception], str]] = [
    (flag, 1, TypeError, "be a bool, got 1"),
    (Texts(), ["a", 1], TypeError, "be a list of strings, got an object of type list"),
    (Integer(ge=1, le=1000), 1001, ValueError, "be an int from 1 to 1,000, got 1001"),
    (Number(lt=1), 1, ValueError, "be a number in (-inf, 1), got 1"),
    (Integer(ge=1), True, TypeError, "be an int of at least 1, got True"),
    (Integer(ge=1), 1.0, TypeError, "be an int of at least 1, got 1.0"),
    (Integer(ge=2, note=", or None"), 1, ValueError, "be an int of at least 2, or None, got 1"),
    (ABOVE, 2, ValueError, "be a finite number above 2, got 2"),
    (ABOVE, math.inf, ValueError, "be a finite number above 2, got inf"),
    (BELOW, 1, ValueError, "be a number in [0, 1), got 1"),
    (BELOW, 10**400, ValueError, f"be a number in [0, 1), got {10**400}"),
    (BELOW, math.nan, ValueError, "be a number in [0, 1), got nan"),
    (POSITIVE, "x", TypeError, "be a positive finite number or a tensor, got 'x'"),
    (Number(ge=0), -1, ValueError, "be a finite number of at least 0, got -1"),
    (Number(), -math.inf, ValueError, "be a finite number, got -inf"),
    (OneOf(("sum", "mean")), "men", ValueError, "be one of 'mean', 'sum', got 'men' (did you mean 'mean'?)"),
    (OneOf(("sum", "mean")), 1, TypeError, "be one of 'mean', 'sum', got 1"),
    (OneOf((0, 1)), True, TypeError, "be one of 0, 1, got True"),
    (TensorOf(("B", 3)), torch.ones(2, 4), ValueError, "have shape (B, 3), got (2, 4)"),
    (TensorOf(("B", 3)), torch.ones(2), ValueError, "have shape (B, 3), got (2,)"),
    (TensorOf((), ("E",)), torch.ones(2, 4), ValueError, "have shape () or (E,), got (2, 4)"),
    (TensorOf(("B",)), torch.ones(2).int(), TypeError, "be a float tensor (B,), got an int32 tensor of shape (2,)"),
    (TensorOf((2,), integer=True), FLOAT, TypeError, "be an integer tensor (2,), got a float32 tensor of shape ()"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "value", "normalized"), RIGHT, ids=[f"{type(row[0]).__name__}-{row[1]!r}" for row in RIGHT]
)
def test_what_is_right_comes_back(constraint: Constraint, value: Any, normalized: Any) -> None:
    found = constraint("f", "x", value)
    assert found == normalized
    assert type(found) is type(normalized)


@pytest.mark.parametrize(("constraint", "value", "kind", "sentence"), WRONG, ids=[row[3] for row in WRONG])
def test_what_is_wrong_is_one_sentence(
    constraint: Constraint, value: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        constraint("f", "x", value)
    assert type(caught.value) is kind
    assert str(caught.value) == f"f: x must {sentence}."


def test_an_object_is_called_by_its_class() -> None:
    with pytest.raises(ValueError, match=r"^Linear: valid_lens must have shape \(3,\), got \(2,\)\.$"):
        lengths(torch.nn.Linear(1, 1), "valid_lens", torch.tensor([1, 2]), 3)
