"""Campaigns repeat themselves, go on where they were broken off, and outlive what kills their processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from tiers import sized

from regard import engines
from regard.engines.reference import Reference
from regard.scores.base import TABLE
from regard.testing import Case, campaign, judge
from regard.testing.campaign import Failure, Plan, answers, main, run
from regard.testing.guarded_memory import guarded, guarded_kernels

pytestmark = pytest.mark.slow

QUICK = Plan(3, ("budget", "determinism"), ("streaming",))


@pytest.fixture
def off():
    class Off(Reference):
        name = "off"

        def run(self, problem):
            outcome = super().run(problem)
            return type(outcome)(outcome.output + 1)

    engines.register(Off())
    yield "off"
    del engines.TABLE["off"]


def test_a_campaign_repeats_itself(capsys):
    arguments = ["--cases", "15", "--seed", "7", "--law", "determinism", "--engine", "streaming", "--workers", "0"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "determinism" in said and "streaming" in said and "15 cases" in said and "0 broken" in said
    first, second = (run(12, QUICK, progress=False) for _ in range(2))
    assert first.counts == second.counts and first.total() == 12


def test_a_campaign_fails_with_a_reproduction(off, capsys):
    assert main(["--cases", "20", "--law", "budget", "--engine", off, "--workers", "0"]) == 1
    captured = capsys.readouterr()
    assert "judge('budget', 'off', Case(" in captured.err and "broken" in captured.out


OWN = """
from regard import scores

@scores.register("cityblock")
class Cityblock(scores.Score):
    def compare(self, query, key):
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)
"""


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("workers", ["0", "1"])  # a worker process imports the file itself
def test_parts_of_a_file_are_judged(workers, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN, encoding="utf-8")
    arguments = ["--import", str(file), "--score", "cityblock", "--law", "budget", "--cases", "8", "--workers", workers]
    try:
        assert main(arguments) == 0
    finally:
        campaign.import_parts.cache_clear()
        del TABLE["cityblock"], sys.modules["own"]
    assert "scores drawn: cityblock" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["--import", str(tmp_path / "own.py"), "--score", "cityblock"]) == 2
    assert "own.py: there is no such file" in capsys.readouterr().err
    assert main(["--import", "no_such_module"]) == 2
    assert "--import no_such_module: there is no such module" in capsys.readouterr().err
    assert main(["--import", "no_such_package.part"]) == 2
    assert "--import no_such_package.part: there is no such module" in capsys.readouterr().err


def test_a_campaign_goes_on_where_it_was_broken_off(tmp_path, monkeypatch):
    journal, judged = tmp_path / "journal.jsonl", []
    judge = campaign.judge
    monkeypatch.setattr(campaign, "judge", lambda *about: judged.append(about) or judge(*about))
    half = run(10, QUICK, journal=journal, progress=False)
    with journal.open("a", encoding="utf-8") as file:
        file.write('{"index": 10, "law": "bud')  # as a process that was killed leaves it
    whole = run(25, QUICK, journal=journal, progress=False)
    assert len(judged) == 25 and half.total() == 10 and whole.total() == 25
    assert whole.counts == run(25, QUICK, progress=False).counts
    indices = [json.loads(line)["index"] for line in journal.read_text(encoding="utf-8").splitlines()[1:]]
    assert indices == list(range(25))


def test_a_journal_of_another_campaign_is_refused(tmp_path, capsys):
    journal = tmp_path / "journal.jsonl"
    arguments = ["--law", "plan", "--engine", "sdpa", "--workers", "0", "--journal", str(journal)]
    assert main(["--cases", "2", *arguments]) == 0
    assert main(["--cases", "2", "--seed", "1", *arguments]) == 2
    assert f"{journal} belongs to another campaign or another version" in capsys.readouterr().err


def test_laws_that_concern_no_case_are_said(capsys):
    assert main(["--cases", "1", "--law", "drawn", "--engine", "fused", "--workers", "0"]) == 2
    assert "the laws drawn concern no case of fused" in capsys.readouterr().err


def answer(item):
    if item == 3:
        os.kill(os.getpid(), signal.SIGFPE)
    if item == 5:
        time.sleep(600)
    return 10 * item


@pytest.mark.campaign
def test_what_kills_or_hangs_a_process_is_told_and_the_rest_is_done():
    found = dict(answers(answer, range(8), workers=2, patience=20))
    assert found == {i: 10 * i for i in (0, 1, 2, 4, 6, 7)} | {
        3: Failure("died", -signal.SIGFPE),
        5: Failure("hung"),
    }


def process(item):
    if item == 0:  # as a kernel that read what it must not leaves a GPU
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = lambda: torch.ones(2) @ torch.ones(3)
    return os.getpid()


@pytest.mark.campaign
def test_a_process_whose_gpu_is_lost_is_replaced():
    found = dict(answers(process, range(3)))
    assert found[0] != found[1] == found[2]


def test_answers_stop_when_their_time_is_up():
    assert list(answers(answer, [5], until=time.monotonic() + 0.1)) == []


def test_the_laws_hold_on_guarded_memory():
    plan = Plan(1, ("budget", "gradient budget", "aux", "no leak"), ("fused",), guard=True)
    tally = run(sized(60, 30), plan, progress=False)
    assert not tally.broken, tally.broken[0].reason
    assert tally.counts["gradient budget", "fused", "held"] > sized(8, 3)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("score", ["gaussian", "epanechnikov", "scaled_dot", "additive"])
def test_blocks_and_tiles_that_are_not_full_stay_within_guarded_memory(score):
    shared = Case(score, key_heads=2, queries=67, keys=131, width=5, value_width=13)
    for mask in (None, ("bias", "Ls", 0.8), ("and", ("bias", "BhLs", 0.8), ("causal", 40)), ("bias", "bHLS", 1.0)):
        # The oracle's derivative of a bias is (L·S)² numbers.
        own = {"learned": True} if mask is None else {"learned": True, "queries": 19, "keys": 37}
        with guarded_kernels():
            verdicts = [judge("gradient budget", "fused", shared.but(mask=mask, **each)) for each in ({}, own)]
        assert [each.outcome for each in verdicts] == ["held", "held"], str(verdicts)


def test_a_kernel_that_reads_past_its_arrays_dies_on_guarded_memory():
    code = """if True:
        import torch, regard
        from regard.engines.fused.kernel_call import KernelCall
        from regard.engines.fused.arguments import F
        from regard.testing.guarded_memory import guarded_kernels
        execute = KernelCall.execute
        def beyond(call, arguments):
            arguments[F.S] += 16
            execute(call, arguments)
        KernelCall.execute = beyond
        q = torch.randn(1, 1, 8, 4)
        with guarded_kernels():
            regard.attention(q, q, q, score="gaussian", engine="fused")
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGSEGV


def test_a_write_before_guarded_memory_is_found():
    import ctypes

    with pytest.raises(AssertionError, match="a kernel wrote before the start of its array"), guarded(24) as address:
        ctypes.memset(address - 1, 0, 1)
    with guarded(24) as address:
        ctypes.memset(address, 0, 24)
