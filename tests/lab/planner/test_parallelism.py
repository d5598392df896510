"""Layouts: what is sent, what fits, what is refused, and which is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.mixers import MIXERS
from regard_lab.models.transformer import TransformerConfig
from regard_lab.planner import GB, Cluster, Layout, Recipe, best, choices, executed_flops, shape_of, training_step
from regard_lab.planner.parallelism import KINDS, refusal
from regard_lab.planner.shapes import _UNCOUNTED
from regard_lab.training.sharded.parallelize import check_divisible

GPT2, GPT3 = (shape_of(DecoderLMConfig.preset(name)) for name in ("gpt2", "gpt3"))
CLUSTER = Cluster(1024, memory=80, peak=312, share=0.5, bandwidth=300, network=25, node=8)
RECIPE = Recipe(2048)


def step(layout: Layout, sequences: int = 1024, shape=GPT3):
    return training_step(shape, RECIPE, replace(CLUSTER, devices=layout.devices), layout, sequences)


def test_what_copies_send() -> None:
    """A ring sums an array with twice (n − 1)/n of it from each device, and gathers it with half of that."""
    numbers = GPT3.parameters * 7 / 8
    assert step(Layout(8)).sent["data"] == pytest.approx(2 * 2 * numbers)
    assert step(Layout(8, sharding="optimizer")).sent["data"] == pytest.approx((2 + 2) * numbers)
    assert step(Layout(8, sharding="all"), 8).sent["data"] == pytest.approx(3 * 2 * numbers)
    assert step(Layout(8, sharding="all"), 80).sent["data"] == pytest.approx(10 * 3 * 2 * numbers)
    assert step(Layout()).sent == dict.fromkeys(("data", "tensor", "pipeline", "context"), 0.0)


def test_what_pieces_of_matrices_send() -> None:
    """Four sums of a row in each layer (Shoeybi 2019), six where it runs forward again."""
    rows = 1024 * 2048 * 12288 * 2
    assert step(Layout(tensor=8)).sent["tensor"] == pytest.approx(96 * 4 * 2 * 7 / 8 * rows)
    assert step(Layout(tensor=8, recompute=True)).sent["tensor"] == pytest.approx(96 * 6 * 2 * 7 / 8 * rows)


def test_what_stages_and_pieces_of_sequences_send() -> None:
    rows = 1024 * 2048 * 12288 * 2
    assert step(Layout(pipeline=8)).sent["pipeline"] == pytest.approx(2 * rows)
    assert step(Layout(context=4)).sent["context"] == pytest.approx(3 * 3 * 96 * 2 * rows / 4)


def test_a_pipeline_waits() -> None:
    found = step(Layout(pipeline=8), 64)
    running = sum(found.seconds[each] for each in ("arithmetic", "pipeline"))
    assert found.seconds["bubble"] == pytest.approx(running * 7 / 64)


def test_utilization_is_what_is_asked_of_what_could_be_done() -> None:
    alone = step(Layout())
    assert alone.utilization == pytest.approx(0.5, rel=0.01)
    assert step(Layout(recompute=True)).utilization == pytest.approx(0.5 * 3 / 4, rel=0.01)


def test_rings_over_nodes_leave_them_by_every_member() -> None:
    assert CLUSTER.speed(8) == 300 * GB and CLUSTER.speed(16) == 200 * GB and CLUSTER.speed(16, 8) == 25 * GB


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(8), "8 devices are not 1,024"), (Layout(64, tensor=16), "a node has 8 devices"),
        (Layout(128, tensor=8), ""), (Layout(16, pipeline=64), "96 layers cannot be cut in 64"),
        (Layout(512, context=2, micro_batch=4), "2 sequences are no multiple of 4"),
        (Layout(128, tensor=1, pipeline=8, micro_batch=2), "there are fewer micro-batches than stages"),
    ],
)  # fmt: skip
def test_refusals(layout: Layout, reason: str) -> None:
    assert refusal(GPT3, RECIPE, CLUSTER, layout, 1024) == reason


def test_more_refusals() -> None:
    assert refusal(GPT2, RECIPE, replace(CLUSTER, devices=8), Layout(tensor=8), 64) == "12 heads cannot be cut in 8"
    assert "are no multiple of" in refusal(GPT2, RECIPE, replace(CLUSTER, devices=8), Layout(8), 63)
    odd = refusal(GPT2, Recipe(2052), replace(CLUSTER, devices=8), Layout(context=8), 64)
    assert odd == "2,052 tokens cannot be cut in 8"
    both = shape_of(TransformerConfig.preset("vaswani2017-base", 100, 100))
    assert "no row of layers" in refusal(both, RECIPE, replace(CLUSTER, devices=2), Layout(pipeline=2), 64)


CUTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in sorted(MIXERS) if kind not in _UNCOUNTED]
CUTS += [("softmax", {"positions": "disentangled"}), ("order1", {"qk_norm": "head"}), ("laser", {"output_gate": True})]


@pytest.mark.parametrize(("kind", "changes"), CUTS, ids=str)
def test_heads_are_cut_where_training_cuts_them(kind: str, changes: dict[str, Any]) -> None:
    positions = "rotary" if MIXERS[kind].rotary else "none"
    config = DecoderLMConfig(50, **{"width": 32, "heads": 4, "attention": kind, "positions": positions} | changes)
    reason = refusal(shape_of(config), RECIPE, replace(CLUSTER, devices=2), Layout(tensor=2), 64)
    try:
        with torch.device("meta"):
            check_divisible(DecoderLM(config), 2)
    except ValueError:
        assert reason == "this kind of attention is not cut by heads"
    else:  # of latents, each device computes all
        assert bool(reason) == (kind in ("mla", "dsa"))
    reason = refusal(shape_of(config), RECIPE, replace(CLUSTER, devices=2), Layout(context=2), 64)
    whole = changes == {"positions": "disentangled"} or kind not in ("softmax", "laser", "differential")
    assert reason == ("this kind of attention needs all tokens of a sequence on one device" if whole else "")


def test_gpt3_needs_more_than_copies() -> None:
    found = {each.kind: each for each in choices(GPT3, RECIPE, CLUSTER, 1024)}
    assert list(found) == list(KINDS)
    assert not found["DDP"].fits and "needs 2,8" in found["DDP"].reason
    assert not found["TP + DDP"].fits and found["TP + PP + DDP"].fits and found["FSDP"].fits
    for each in found.values():
        assert each.step is not None and each.step.layout.devices == 1024
        assert each.fits == (each.step.memory.total <= 80 * GB)
    chosen = best(list(found.values()))
    assert chosen is not None and chosen.step is not None
    assert chosen.step.total == min(each.step.total for each in found.values() if each.fits and each.step)


def test_one_device() -> None:
    one = replace(CLUSTER, devices=1)
    (small,), (large,) = choices(GPT2, Recipe(1024), one, 8), choices(GPT3, RECIPE, one, 8)
    assert small.fits and best([small]) is small
    assert not large.fits and best([large]) is None and large.step is not None


def test_devices_that_cannot_share() -> None:
    found = choices(GPT3, RECIPE, replace(CLUSTER, devices=7), 7)
    refused = {each.kind: each.reason for each in found if each.step is None}
    assert (
        refused["TP + DDP"] == "96 heads cannot be cut in 7" and refused["PP + DDP"] == "96 layers cannot be cut in 7"
    )


def test_a_run_that_was_reported() -> None:
    """175 billion parameters on 1,024 A100 at 140 TFLOP/s take 34 days for 300 billion tokens (Narayanan 2021, 5.1).

    Those are operations that are executed: layers ran forward again before they ran backward.
    """
    executed = executed_flops(GPT3, 2048, recompute=True, keeps_scores=True).total
    assert 300e9 * executed / (1024 * 140e12) / 86400 == pytest.approx(34, rel=0.03)
    layout = Layout(data=16, tensor=8, pipeline=8, recompute=True)
    cluster = replace(CLUSTER, share=0.55)
    found = training_step(GPT3, RECIPE, cluster, layout, 1536)
    assert 25 < 300e9 / (1536 * 2048) * found.total / 86400 < 40
