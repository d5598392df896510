"""The table of big models, and the schedule of a run."""

from __future__ import annotations

import pytest

from regard._utils.mechanism import references
from regard_lab.models.decoder_lm import DecoderLMConfig
from regard_lab.planner import (
    PUBLISHED,
    Shape,
    chinchilla_tokens,
    find_config,
    model_names,
    published_rows,
    schedule,
    shape_of,
    training_flops,
)

#: How far a count may be from what was published: by rounding alone, but where the difference says what else.
NEAR = {"transformer-base": 0.03, "bert-large": 0.012, "xlnet-large": 0.06, "gpt2-xl": 0.04, "turing-nlg": 0.011}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_near_those_published(name: str) -> None:
    each = PUBLISHED[name]
    shape = each.shape()
    assert shape.name == name
    assert shape.parameters == pytest.approx(each.count, rel=NEAR.get(name, 0.007))
    digits, unit = each.printed.strip("~")[:-1], each.printed[-1]
    assert each.count == pytest.approx(float(digits) * {"M": 1e6, "B": 1e9}[unit])
    assert each.explain(shape) and each.source in references()


def test_xlnet_is_as_released() -> None:
    """The encoder of the released checkpoint; its logits have a bias more."""
    shape = find_config("xlnet-large")
    assert isinstance(shape, Shape) and shape.parameters == 360_268_800 + 32_000


def test_roberta_is_as_released() -> None:
    """355,359,744 with a pooler and without what makes logits."""
    E, N = 1024, 50265
    released = 355_359_744 - E * (E + 1)
    assert PUBLISHED["roberta-large"].shape().parameters == released + E * (E + 1) + 2 * E + N


def test_rows_say_everything() -> None:
    rows = published_rows()
    assert [row["name"] for row in rows] == list(PUBLISHED) and len(rows) == 10
    for row in rows:
        assert all(row[each] for each in ("title", "layers", "width", "heads", "source", "url", "difference"))
        assert str(row["url"]).startswith("https://")


def test_every_name_has_a_config() -> None:
    assert len(set(model_names())) == len(model_names())
    assert all(find_config(name) is not None for name in model_names())
    assert find_config("nothing") is None


def test_a_run() -> None:
    shape = shape_of(DecoderLMConfig.preset("gpt3"))
    assert chinchilla_tokens(shape) == 20 * shape.parameters
    # Brown 2020 (arXiv 2005.14165, table D.1) has 3.14e23 for 300 billion tokens, without attention.
    asked = training_flops(shape)
    assert 300e9 * (asked.layers + asked.head) == pytest.approx(3.14e23, rel=0.005)
    run = schedule(1001, batch=100, step_seconds=3600.0, devices=4)
    assert run.steps == 11 and run.days == pytest.approx(11 / 24) and run.device_hours == 44
    assert run.energy(500, 1.2) == pytest.approx(26.4) and run.money(2.5) == 110
