"""Options: names of files written before, counts beyond all runs, and options without effect."""

from __future__ import annotations

from typing import Any

import pytest

from regard_lab._options import Options
from regard_lab.tasks.captioning.options import CaptionDataOptions
from regard_lab.tasks.translation.options import DataOptions
from regard_lab.training.options import TrainingOptions


@pytest.mark.parametrize("kind", [DataOptions, CaptionDataOptions])
def test_files_of_version_0_1_are_read(kind: type[Options]) -> None:
    assert kind.from_table({"longest": 7}) == kind.from_table({"max_length": 7}) == kind(max_length=7)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ({"steps": 1 << 31}, ValueError, "options: steps must be below 2,147,483,648, got 2147483648."),
        ({"beta2": 1}, ValueError, "options: beta2 must be a number in [0, 1), got 1."),
        ({"beta2": "x"}, TypeError, "options: beta2 must be a number in [0, 1), got 'x'."),
        ({"clip": 10**400}, ValueError, f"options: clip must be a finite number of at least 0, got {10**400}."),
        ({"tensorboard": 1}, TypeError, "options: tensorboard must be a bool, got 1."),
        ({"shard": 2}, ValueError, "options: shard must be left out unless strategy is fsdp, got 2."),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(table: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        TrainingOptions.from_table(table)
    assert str(caught.value) == message


def test_numbers_become_floats() -> None:
    assert type(TrainingOptions(clip=2).clip) is float
