"""The laws on tensors that are not on the CPU: a stand-in device finds those made or left on the CPU."""

import pytest
import torch
from tests.helpers.stand_in_device import DEVICE, OnDevice, stand_in

from regard.testing import LAWS, judge
from regard.testing.campaign import Plan, main, run

#: Laws that the stand-in cannot run: they compile, nest or transform, draw on the device, or run no engine.
ELSEWHERE = {
    *("nested", "traced", "compiled", "meta", "vmap", "composed derivatives", "second derivatives"),
    *("dropout", "dropout gradient", "dropout mean", "drawn", "definition"),
}
#: Cases of each law.
CASES = 6


@pytest.mark.campaign(keep=8)
@pytest.mark.parametrize("engine", ["reference", "streaming"])
@pytest.mark.parametrize("law", [law for law in LAWS if law not in ELSEWHERE])
def test_the_laws_hold_on_another_device(law, engine):
    plan, judged = Plan(5, (law,), (engine,), device=str(DEVICE)), 0
    with stand_in():
        for index in range(CASES):
            the_law, the_engine, case = plan.case(index)
            if case.learned or case.normalizer in ("gumbel", "sampled"):  # the oracle transforms; drawn on the device
                continue
            verdict = judge(the_law, the_engine, case)
            assert verdict.outcome in ("held", "refused"), str(verdict)
            judged += verdict.outcome == "held"
    assert judged > 1


def test_the_stand_in_finds_a_tensor_that_was_left_on_the_cpu():
    with stand_in():
        there = torch.randn(3, 4).to(DEVICE)
        assert isinstance(there, OnDevice) and there.device == DEVICE and not there.is_cpu
        assert torch.equal((there + there).cpu(), 2 * there.cpu())
        with pytest.raises(RuntimeError, match="tensors on cuda:0 and on cpu"):
            there + torch.ones(3, 4)


def test_a_campaign_says_that_there_is_no_such_device(capsys):
    assert main(["--cases", "1", "--device", "cuda:7", "--workers", "0"]) == 2
    assert "--device cuda:7: torch cannot use it here" in capsys.readouterr().err


def test_a_campaign_on_a_device_draws_the_cases_of_the_cpu():
    there, here = (Plan(2, ("budget",), ("streaming",), device=device).case(3)[2] for device in ("cpu:0", "cpu"))
    assert there == here.but(device="cpu:0")
    assert run(5, Plan(2, ("budget",), ("streaming",), device="cpu:0"), progress=False).total() == 5
