"""Options: names of files written before, counts beyond all runs, and options without effect."""

from __future__ import annotations

from typing import Any

import pytest

from regard_lab._options import Options
from regard_lab.tasks.captioning.options import CaptionDataOptions, CaptionTrainingOptions
from regard_lab.tasks.classification.options import ImageTrainingOptions, TextTrainingOptions
from regard_lab.tasks.language.options import LanguageTrainingOptions
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


@pytest.mark.parametrize(
    ("kind", "counts", "sizes"),
    [
        (TrainingOptions, (1, 20_479, 20_480, 40_960, 81_920, 10**8), (1024, 1024, 1024, 2048, 4096, 4096)),
        (LanguageTrainingOptions, (1, 40_960, 163_840, 10**9), (1024, 2048, 8192, 8192)),
        (CaptionTrainingOptions, (1, 180, 450, 900, 1_280, 6_000), (4, 4, 8, 16, 32, 32)),
        (TextTrainingOptions, (1, 180, 450, 900, 60_000), (8, 8, 16, 32, 32)),
        (ImageTrainingOptions, (1, 180, 450, 900, 60_000), (8, 8, 16, 32, 64)),
    ],
)
def test_batches_suit_the_amount_of_data(
    kind: type[TrainingOptions], counts: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    name = kind.batch_option
    assert tuple(getattr(kind().sized(count), name) for count in counts) == sizes
    several = kind(accumulate=2)
    assert tuple(getattr(several.sized(2 * count), name) for count in counts) == sizes
    own = kind(**{name: 7})  # type: ignore[arg-type]
    assert own.sized(10**9) is own


def test_numbers_become_floats() -> None:
    assert type(TrainingOptions(clip=2).clip) is float
