"""What ``make gpu`` runs, on the CPU and with tiny sizes: that every part runs, and what its report says."""

import json
import subprocess
import sys
from itertools import islice

import pytest
import torch
from benchmarks import costs, gpu, gpu_cases
from benchmarks.gpu import main
from benchmarks.machine import ROOT

TINY = ["--device", "cpu", "--divisor", "512", "--workers", "0"]
NO_GPU = "This machine has no GPU that torch can use"


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_says_that_there_is_no_gpu():
    command = ["make", "gpu", f"GPU_PYTHON={sys.executable}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode != 0 and NO_GPU in found.stdout


@pytest.mark.slow
def test_every_row_is_checked_and_timed(tmp_path, capsys):
    assert main([*TINY, "--part", "benchmarks", "--out", str(tmp_path)]) == 0
    part = json.loads((tmp_path / "stand-in-cpu.json").read_text())["parts"]["benchmarks"]
    assert {each["row"] for each in part["tasks"]} == set(gpu_cases.ROWS) and not part["broken"]
    for each in part["tasks"]:
        assert each["seconds"]["regard"] > 0, each
        assert set(each["seconds"]) | set(each["not timed"]) >= {"regard"}
        assert all("needs a GPU" in reason for reason in each["not timed"].values()), each["not timed"]
    report = (tmp_path / "stand-in-cpu.md").read_text()
    assert "| masks | causal window of" in report and "needs a GPU" in report and "share" in report


@pytest.mark.slow
def test_one_row_replaces_its_own_numbers(tmp_path):
    for row in ("dot", "gaussian", "dot"):
        assert main([*TINY, "--part", "benchmarks", "--row", row, "--out", str(tmp_path)]) == 0
    tasks = json.loads((tmp_path / "stand-in-cpu.json").read_text())["parts"]["benchmarks"]["tasks"]
    assert [each["row"] for each in tasks] == ["dot"] * 5 + ["gaussian"]


def test_a_wrong_result_is_not_timed():
    task = next(gpu_cases.dots(gpu_cases.Sizes("cpu", 512)))
    task.contenders["wrong"] = lambda t: lambda: gpu_cases.ours()(t)() + 0.5
    task.contenders["broken"] = lambda t: lambda: 1 / 0
    entry = gpu.timed(task, {}, gpu.Clock("cpu"))
    assert set(entry["seconds"]) == {"regard"}
    assert entry["not timed"]["wrong"].startswith("wrong: output is off by 0.")
    assert entry["not timed"]["broken"].startswith("failed: ZeroDivisionError")


@pytest.mark.campaign
@pytest.mark.slow
def test_laws_are_checked_until_the_time_is_up(tmp_path, capsys):
    parts = ["--part", "conformance", "--part", "campaign", "--seconds", "1"]
    assert main([*TINY, *parts, "--out", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "stand-in-cpu.json").read_text())["parts"]
    assert 0 < parts["conformance"]["done"] < parts["conformance"]["of"]
    assert parts["campaign"]["cases"] > 0
    assert "## Conformance" in (tmp_path / "stand-in-cpu.md").read_text()


def test_a_sanitizer_that_is_not_there_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.shutil, "which", lambda *_, **__: None)
    assert main([*TINY, "--part", "sanitizer", "--out", str(tmp_path)]) == 0
    assert "Not run: compute-sanitizer is not installed here." in (tmp_path / "stand-in-cpu.md").read_text()


def test_the_sanitizer_runs_one_pass_in_a_process_of_its_own(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\nshift 4\n{sys.executable} -c "print(\'7 calls\')"\necho "$@" >&2\nexit 9\n')
    tool.chmod(0o755)
    monkeypatch.setattr(gpu.shutil, "which", lambda *_, **__: str(tool))
    settings = gpu.Settings("cpu", 512, 1, ())
    (found,) = gpu.sanitized(settings, gpu.time.monotonic() + 60)
    assert found["calls"] == 7 and found["code"] == gpu.FOUND and found["broken"]
    assert "-m benchmarks.gpu --part pass --device cpu" in found["said"]


def test_a_sanitizer_that_is_stopped_keeps_what_it_found(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\necho '3 calls'\necho '========= Invalid __global__ read of size 4 bytes'\nexec sleep 60\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(gpu.shutil, "which", lambda *_, **__: str(tool))
    (found,) = gpu.sanitized(gpu.Settings("cpu", 512, 1, ()), gpu.time.monotonic() + 1)
    assert found["calls"] == 3 and found["code"] is None and "Invalid __global__ read" in found["broken"][0]


@pytest.mark.slow
def test_one_pass_counts_its_calls():
    settings = gpu.Settings("cpu", 512, 1, ())
    assert list(islice(gpu.one_pass(settings, gpu.time.monotonic() + 60), 12)) == list(range(1, 13))


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_what_it_found(tmp_path, monkeypatch):
    def killed(line):
        if line.startswith("benchmarks, ") and "| dot |" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "_say", killed)
    with pytest.raises(KeyboardInterrupt):
        main([*TINY, "--part", "benchmarks", "--row", "dot", "--out", str(tmp_path)])
    part = json.loads((tmp_path / "stand-in-cpu.json").read_text())["parts"]["benchmarks"]
    assert [each["row"] for each in part["tasks"]] == ["dot"] and part["not reached"] == ["dot"]
    assert "Not done in time: dot." in (tmp_path / "stand-in-cpu.md").read_text()


def test_what_triton_lacks_is_said(tmp_path, monkeypatch):
    assert gpu._lacking("cpu") == ""
    monkeypatch.setattr(gpu.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "Python's headers" in gpu._lacking("cuda")
    monkeypatch.setattr(gpu.shutil, "which", lambda _: None)
    assert "set CC" in gpu._lacking("cuda")


def test_costs_of_a_device_go_to_a_file_of_its_own(tmp_path, monkeypatch):
    small = [costs.Setting("dot", mask, 1, 32, n, 2, 16, 16, False) for mask in ("all", "matrix") for n in (16, 32, 64)]
    monkeypatch.setattr(costs, "device_settings", lambda: small)
    monkeypatch.setattr(costs, "FLOOR", 1e-5)
    out = tmp_path / "costs_cpu.json"
    assert costs.main(["--device", "cpu:0", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["device"] == "cpu:0" and found["wide"]["streaming"] > 0
    assert {"streaming/dot/all/forward", "streaming/dot/matrix/forward"} <= set(found["lanes"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_costs_say_that_there_is_no_gpu(capsys):
    with pytest.raises(SystemExit):
        costs.main(["--device", "cuda"])
    assert "torch finds no GPU on this machine" in capsys.readouterr().err
