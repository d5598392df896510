"""Training runs: whole checkpoints, and going on to the same bits."""

from __future__ import annotations

import csv
import errno
import math
import os
import random
import signal
import socket
import time
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from copying import OPTIONS, VALID, alone, apart, batch, begun, learner
from interrupts import StopAt
from lightning.pytorch import Callback

from regard_lab.training import checkpoints
from regard_lab.training import checkpoints as logs
from regard_lab.training.learner import is_bfloat16
from regard_lab.training.loop import train
from regard_lab.training.options import TrainingError, TrainingOptions

pytestmark = pytest.mark.slow


def parameters(learning):
    return {name: tensor.clone() for name, tensor in learning.model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that was never stopped: its end, its folder and its parameters."""
    folder = tmp_path_factory.mktemp("whole")
    learning = learner()
    ended = train(learning, VALID, OPTIONS, folder)
    return ended, folder, parameters(learning)


def test_it_learns(whole):
    ended, folder, _ = whole
    assert ended.steps == 40 and ended.reason == "steps"
    with (folder / "log" / "metrics.csv").open() as file:
        losses = [float(row["valid_loss"]) for row in csv.DictReader(file) if row["valid_loss"]]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    assert ended.best == pytest.approx(min(losses), rel=1e-4)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("at", [3, 37, 39, 60])  # 39 ends with a validation and a checkpoint
def test_an_interrupted_run_goes_on_to_the_same_bits(at, whole, tmp_path):
    ended = train(learner(), VALID, OPTIONS, tmp_path, callbacks=[StopAt(at)])
    assert ended.reason == "interrupt" and ended.steps == at // 2 + 1
    learning = learner(OPTIONS.with_changes({"seed": 0}))
    ended = train(learning, VALID, OPTIONS, tmp_path, resume=True)
    assert ended == whole[0]
    assert same(parameters(learning), whole[2])


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """At a random moment, also while a file is written; what was saved before is whole."""
    drawn = random.Random(0)
    ended = begun(alone, str(tmp_path / "whole"))
    ended.join()
    assert ended.exitcode == 0
    killed = 0
    while not (tmp_path / "killed" / "end.pt").exists():
        process = begun(alone, str(tmp_path / "killed"))
        last = tmp_path / "killed" / "checkpoints" / "last.ckpt"
        while killed < 2 and process.is_alive() and not last.exists():
            time.sleep(0.01)
        if killed < 2:
            time.sleep(drawn.uniform(0, 0.4))
            process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL)
    assert killed >= 1
    one, other = (torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed"))
    assert same(one, other)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("options", [{"save_every": 10}, {"save_every": 5, "patience": 9}, {"save_every": 20}])
def test_a_step_that_is_saved_and_validated(options, tmp_path):
    """The checkpoint of such a step knows what its validation found."""
    chosen = OPTIONS.with_changes(options)
    one = learner(chosen)
    ended = train(one, VALID, chosen, tmp_path / "one")
    killed = learner(chosen, make=Killed(41))
    with pytest.raises(KeyError, match="killed"):
        train(killed, VALID, chosen, tmp_path / "other")
    again = learner(chosen)
    assert train(again, VALID, chosen, tmp_path / "other", resume=True) == ended
    assert same(parameters(again), parameters(one))


class Killed:
    """Batches that end a run as if it were killed, once one of them has been asked for."""

    def __init__(self, number):
        self.number = number

    def __call__(self, number):
        if number == self.number:
            raise KeyError("killed")
        return batch(number)


def test_the_best_are_those_of_a_run_that_was_not_killed(tmp_path, monkeypatch):
    """Also where validations between the last checkpoint and the end of the process drove some of them out."""
    monkeypatch.chdir(tmp_path)  # a folder may be named relative to where one is
    values = [5.0, 5.0, 5.0, 5.0, 6.0, 5.0, 6.0, 5.0]
    options = OPTIONS.with_changes({"metric": "bleu", "validate_every": 5, "save_every": 20, "average": 3})
    found = []
    for folder, ends in (("one", None), ("other", 73)):
        begun = score = Scores(values)
        if ends is not None:
            with pytest.raises(KeyError, match="killed"):
                train(learner(options, score, Killed(ends)), VALID, options, folder)
            assert begun.count == 7  # two that are better, after the checkpoint of step 20
            score = Scores(values, 4)
        ended = train(again := learner(options, score), VALID, options, folder, resume=ends is not None)
        assert (ended.best, score.count) == (6.0, 8)
        found.append((sorted(path.name for path in Path(folder, "checkpoints").iterdir()), parameters(again)))
    assert found[0][0] == found[1][0] == ["best-step=25.ckpt", "best-step=35.ckpt", "best-step=40.ckpt", "last.ckpt"]
    assert same(found[0][1], found[1][1])


class Scores:
    """Scores of validations, from one of them on."""

    def __init__(self, values, count=0):
        self.values, self.count = values, count

    def __call__(self, model):
        self.count += 1
        return {"bleu": self.values[self.count - 1]}


def test_a_resumed_run_goes_on_with_its_log(whole, tmp_path):
    with pytest.raises(KeyError, match="killed"):
        train(learner(make=Killed(63)), VALID, OPTIONS, tmp_path)
    log = tmp_path / "log" / "metrics.csv"
    log.write_text(log.read_text(encoding="utf-8") + "0,1.5,2", encoding="utf-8")  # a line that was cut
    left = tmp_path / "checkpoints" / ".last.ckpt.abc.unfinished"
    left.write_bytes(b"half")
    train(learner(), VALID, OPTIONS, tmp_path, resume=True)
    assert not left.exists()
    one, other = (path.read_text(encoding="utf-8") for path in (log, whole[1] / "log" / "metrics.csv"))
    told, expected = ([(row["step"], row["loss"], row["valid_loss"]) for row in rows(text)] for text in (one, other))
    assert told == expected and len(told) == 8


def rows(text):
    return csv.DictReader(text.splitlines())


@pytest.mark.parametrize(
    "changes", [{}, {"seconds": 0.2, "steps": 100_000}, {"patience": 1, "metric": "bleu", "average": 1}]
)
def test_a_run_that_has_ended_stays_as_it_is(changes, tmp_path):
    options = OPTIONS.with_changes(changes)
    score = (lambda model: {"bleu": 0.0}) if "metric" in changes else None
    one = learner(options, score)
    ended = train(one, VALID, options, tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "moved")
    again = learner(options, score)
    resumed = train(again, VALID, options, tmp_path / "moved", resume=True)
    assert (resumed.steps, resumed.reason, resumed.best) == (ended.steps, ended.reason, ended.best)
    assert same(parameters(again), parameters(one))


def test_a_request_to_terminate_is_an_interrupt(tmp_path):
    class Terminate(StopAt):
        number = signal.SIGTERM

    ended = train(learner(), VALID, OPTIONS, tmp_path, callbacks=[Terminate(11)])
    assert ended.reason == "interrupt" and ended.steps == 6
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_random_numbers_of_others_change_nothing(whole, tmp_path):
    def score(model):
        torch.rand(random.Random().randint(1, 9))
        return {"bleu": 0.0}

    learning = learner(score=score)
    train(learning, VALID, OPTIONS, tmp_path)
    assert same(parameters(learning), whole[2])


def test_a_model_in_evaluation_mode_is_trained_all_the_same(whole, tmp_path):
    learning = learner()
    learning.eval()
    train(learning, VALID, OPTIONS, tmp_path)
    assert same(parameters(learning), whole[2])


def test_more_steps_may_be_asked_for(tmp_path):
    longer = OPTIONS.with_changes({"steps": 24, "schedule": "constant", "warmup": 3})
    shorter = longer.with_changes({"steps": 12})
    one, other = learner(longer), learner(shorter)
    train(one, VALID, longer, tmp_path / "one")
    train(other, VALID, shorter, tmp_path / "other")
    ended = train(again := learner(longer), VALID, longer, tmp_path / "other", resume=True)
    assert ended.steps == 24
    assert same(parameters(one), parameters(again))


def test_a_changed_learning_rate_is_obeyed(tmp_path):
    options = OPTIONS.with_changes({"steps": 12, "average": 1, "validate_every": 1000})
    train(one := learner(options), VALID, options, tmp_path)
    before = parameters(one)
    still = options.with_changes({"steps": 20, "learning_rate": 0.0})
    assert still.changed_from(options) == ["steps", "learning_rate"]
    assert train(again := learner(still), VALID, still, tmp_path, resume=True).steps == 20
    assert same(parameters(again), before)


def test_a_changed_patience_is_obeyed(tmp_path):
    options = OPTIONS.with_changes({"patience": 1, "metric": "bleu", "steps": 100, "average": 1})
    score = lambda model: {"bleu": 0.0}  # noqa: E731
    assert train(learner(options, score), VALID, options, tmp_path).steps == 20
    longer = options.with_changes({"patience": 3})
    ended = train(learner(longer, score), VALID, longer, tmp_path, resume=True)
    assert ended.steps == 40 and ended.reason == "patience"


def test_the_model_is_the_mean_of_the_best(whole):
    _, folder, found = whole
    saved = sorted((folder / "checkpoints").glob("best-*.ckpt"))
    assert len(saved) == OPTIONS.keep
    states = [torch.load(path, weights_only=True) for path in saved]
    ranked = sorted(states, key=lambda state: state["global_step"])[-2:]  # the loss fell all the time
    for name, tensor in found.items():
        mean = sum(state["state_dict"][f"model.{name}"].double() for state in ranked) / 2
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_of_equally_good_ones_the_later_count(tmp_path):
    options = OPTIONS.with_changes({"metric": "bleu", "keep": 2, "average": 1, "steps": 40})
    ended = train(one := learner(options, score=lambda model: {"bleu": 0.0}), VALID, options, tmp_path / "one")
    assert ended.best == 0
    assert sorted(path.stem for path in (tmp_path / "one").rglob("best-*.ckpt")) == ["best-step=30", "best-step=40"]
    plain = options.with_changes({"metric": "loss", "validate_every": 40})
    train(other := learner(plain), VALID, plain, tmp_path / "other")
    assert same(parameters(one), parameters(other))  # those of the last step


def test_the_last_step_is_validated(tmp_path):
    options = OPTIONS.with_changes({"steps": 14})
    ended = train(learner(options), VALID, options, tmp_path)
    assert (ended.steps, ended.reason) == (14, "steps")
    with (tmp_path / "log" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["valid_loss"]] == ["9", "13"]


def test_a_run_killed_before_its_last_step_is_validated_ends_as_one_that_was_not(tmp_path):
    class Gone(Callback):
        def on_validation_start(self, trainer, module):
            if trainer.global_step == 14:
                raise KeyError("killed")

    options = OPTIONS.with_changes({"steps": 14, "save_every": 7, "average": 1})
    ended = train(one := learner(options), VALID, options, tmp_path / "one")
    with pytest.raises(KeyError, match="killed"):
        train(learner(options), VALID, options, tmp_path / "other", callbacks=[Gone()])
    again = learner(options)
    assert train(again, VALID, options, tmp_path / "other", resume=True) == ended
    assert same(parameters(one), parameters(again))


def test_patience(tmp_path):
    values = iter([3.0, 2.0, 2.5, 2.4, 1.0])
    options = OPTIONS.with_changes({"patience": 2, "metric": "bleu", "steps": 100, "average": 1})
    ended = train(learner(options, score=lambda model: {"bleu": next(values)}), VALID, options, tmp_path)
    assert ended.reason == "patience" and ended.steps == 30 and ended.best == 3.0


def test_time(tmp_path):
    options = OPTIONS.with_changes({"seconds": 0.3, "steps": 100_000, "validate_every": 50_000})
    ended = train(learner(options), VALID, options, tmp_path)
    assert ended.reason == "seconds" and 0 < ended.steps < 100_000
    assert 0.3 <= ended.seconds < 5 and ended.pairs >= 16 * ended.steps
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


class Norms(Callback):
    """Notes the norm of every step's gradient, when the next one begins."""

    def __init__(self):
        self.found = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        given = [each.grad for each in module.parameters() if each.grad is not None]
        if given:
            self.found.append(float(torch.nn.utils.get_total_norm(given)))


def test_gradients_are_clipped():
    for clip in (0.0, 0.05):
        options, norms = OPTIONS.with_changes({"clip": clip, "steps": 5}), Norms()
        train(learner(options), [], options, None, callbacks=[norms])
        assert norms.found == pytest.approx([0.05] * 4, rel=1e-3) if clip else min(norms.found) > 0.05


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_threads_and_bfloat16_go_on_to_the_same_bits(tmp_path, precision):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        options = OPTIONS.with_changes({"precision": precision, "steps": 4})
        train(one := learner(options), VALID, options, tmp_path / "one")
        ended = train(learner(options), VALID, options, tmp_path / "other", callbacks=[StopAt(3)])
        assert ended.reason == "interrupt"
        train(other := learner(options), VALID, options, tmp_path / "other", resume=True)
    finally:
        torch.set_num_threads(before)
    assert same(parameters(one), parameters(other))


def test_without_a_folder_or_a_validation_nothing_is_written(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = train(learning := learner(), [], OPTIONS.with_changes({"patience": 1}), None)
    assert (ended.steps, ended.pairs, ended.reason) == (40, 80 * 8, "steps")
    assert math.isnan(ended.best) and ended.seconds > 0
    assert not list(tmp_path.iterdir())
    last = torch.load(whole[1] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert same(parameters(learning), {name.removeprefix("model."): tensor for name, tensor in last.items()})


def test_without_a_validation_a_run_is_saved_and_resumed(tmp_path):
    longer = OPTIONS.with_changes({"steps": 15, "schedule": "inverse_sqrt", "warmup": 3})
    shorter = longer.with_changes({"steps": 10})
    ended = train(one := learner(longer), [], longer, tmp_path / "one")
    assert (ended.steps, ended.reason, math.isnan(ended.best)) == (15, "steps", True)
    train(learner(shorter), [], shorter, tmp_path / "other")
    train(again := learner(longer), [], longer, tmp_path / "other", resume=True)
    assert same(parameters(one), parameters(again))


def test_a_disk_is_not_blamed_where_nothing_is_written():
    def make(number):
        raise OSError("no data")

    with pytest.raises(OSError, match=r"^no data$"):
        train(learner(make=make), [], OPTIONS, None)


def processes(folder, count, *arguments):
    """Train in so many processes at once, to their end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [begun(apart, str(folder), count, rank, port, *arguments) for rank in range(count)]
    running = started
    while running and not any(process.exitcode for process in started):
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
    for process in running:  # it would wait for the one that failed
        process.kill()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * count


def test_two_processes_are_two_batches_for_each_step_and_one_validation(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    processes(one, 1)
    processes(two, 2)
    alone, first, second = (torch.load(path) for path in (one / "end0.pt", two / "end0.pt", two / "end1.pt"))
    assert same(first, second)
    for name, tensor in alone.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)
    alone, first, second = (torch.load(path) for path in (one / "told0.pt", two / "told0.pt", two / "told1.pt"))
    assert (alone["asked"], first["asked"], second["asked"]) == (2, 2, 0), "one process scores for all"
    assert first["told"] == second["told"] == pytest.approx(alone["told"], rel=1e-4, abs=1e-5)
    assert set(first["told"]) == {"valid_loss", "valid_bleu"}


@pytest.mark.campaign
def test_processes_whose_clocks_differ_go_by_one(tmp_path):
    processes(tmp_path, 2, 1.5)
    told = [torch.load(tmp_path / f"told{rank}.pt") for rank in (0, 1)]
    assert [each["reason"] for each in told] == ["seconds", "seconds"]
    assert told[0]["steps"] == told[1]["steps"] > 1
    # A rate of its own in each process would part them, as their gradients are shared and their parameters are not.
    assert same(*(torch.load(tmp_path / f"end{rank}.pt") for rank in (0, 1)))


def test_lightning_asks_the_private_hook_to_remove_checkpoints(tmp_path):
    """What is no longer among the best goes only later: a Lightning without this hook would remove it at once."""
    asked = []

    class Asked(checkpoints.Best):
        def _remove_checkpoint(self, trainer, filepath):
            asked.append(filepath)

    values = iter([1.0, 2.0, 3.0])
    options = OPTIONS.with_changes({"metric": "bleu", "steps": 30, "keep": 1, "average": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard_lab.training.loop.Best", Asked)
        train(learner(options, score=lambda model: {"bleu": next(values)}), VALID, options, tmp_path)
    assert [Path(path).name for path in asked] == ["best-step=10.ckpt", "best-step=20.ckpt"]


class TestTrouble:
    def test_a_loss_that_is_no_number(self, tmp_path):
        options = OPTIONS.with_changes({"save_every": 1})
        learning = learner(options)

        def bad(number):
            if number == 12:  # made while the batch before it is learned
                learning.model.output.bias.data.fill_(torch.nan)
            return batch(number)

        learning.stream._batch = bad
        with pytest.raises(TrainingError, match=r"the loss is nan at step 6: lower learning_rate"):
            train(learning, VALID, options, tmp_path)
        state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
        assert state["global_step"] == 5
        assert all(torch.isfinite(tensor).all() for tensor in state["state_dict"].values())

    def test_a_full_disk_leaves_the_checkpoint_before(self, tmp_path, monkeypatch):
        real, calls = checkpoints.write_atomically, []

        def full(path, data):
            calls.append(path.name)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(path, data)

        monkeypatch.setattr(checkpoints, "write_atomically", full)
        with pytest.raises(
            TrainingError, match=r"cannot write a checkpoint to .*: No space left on device\. The previous .* --resume"
        ):
            train(learner(), VALID, OPTIONS, tmp_path)
        assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4

    def test_a_full_disk_before_the_first_checkpoint(self, tmp_path, monkeypatch):
        def full(path, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(checkpoints, "write_atomically", full)
        with pytest.raises(TrainingError, match="No checkpoint exists yet: fix the problem and start again"):
            train(learner(), VALID, OPTIONS, tmp_path)

    def test_a_full_disk_leaves_the_log_of_before(self, tmp_path, monkeypatch):
        write = logs.write_atomically

        def full(path, data):
            if path.suffix == ".ckpt":
                return write(path, data)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(logs, "write_atomically", full)
        with pytest.raises(TrainingError, match=r"cannot write the log to .*/log: No space left on device\. The check"):
            train(learner(), VALID, OPTIONS, tmp_path)

    def test_other_errors_of_the_system_are_not_a_checkpoints(self, tmp_path):
        def make(number):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "pairs.tsv")

        with pytest.raises(FileNotFoundError, match=r"No such file or directory: 'pairs\.tsv'$"):
            train(learner(make=make), VALID, OPTIONS, tmp_path)

    def test_a_checkpoint_that_cannot_be_read(self, tmp_path):
        path = tmp_path / "checkpoints" / "last.ckpt"
        path.mkdir(parents=True)
        with pytest.raises(TrainingError, match=r"resume: cannot read .*last\.ckpt: Is a directory\.$"):
            train(learner(), VALID, OPTIONS, tmp_path, resume=True)

    def test_a_second_interrupt_is_raised(self, tmp_path):
        class Twice(Callback):
            def on_train_batch_start(self, trainer, module, data, index):
                if index == 9:
                    os.kill(os.getpid(), signal.SIGINT)
                    os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(learner(), VALID, OPTIONS, tmp_path, callbacks=[Twice()])
        assert signal.getsignal(signal.SIGINT) is before
        assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4

    @pytest.mark.parametrize(
        "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9")]
    )
    def test_too_little_memory(self, tmp_path, error):
        def make(number):
            raise error

        with pytest.raises(
            TrainingError, match=r"start again with a lower batch_tokens \(now 4096\), and raise accumulate \(now 2\)"
        ):
            train(learner(make=make), VALID, OPTIONS.with_changes({"batch_tokens": 4096}), tmp_path)

    def test_other_errors_stay_what_they_are(self, tmp_path):
        def make(number):
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match=r"^a bug$"):
            train(learner(make=make), VALID, OPTIONS, tmp_path)

    def test_a_checkpoint_with_code_is_refused(self, tmp_path):
        import pickle

        path = tmp_path / "checkpoints" / "last.ckpt"
        path.parent.mkdir()
        path.write_bytes(pickle.dumps(learner))
        message = "last.ckpt is damaged or not a checkpoint"
        with pytest.raises(TrainingError, match=message):
            train(learner(), VALID, OPTIONS, tmp_path, resume=True)
        path.write_bytes(b"PK\x03\x04 cut")
        with pytest.raises(TrainingError, match=message):
            train(learner(), VALID, OPTIONS, tmp_path, resume=True)
        path.unlink()
        with pytest.raises(TrainingError, match=r"last\.ckpt does not exist"):
            train(learner(), VALID, OPTIONS, tmp_path, resume=True)


class TestOptions:
    def test_what_may_change_and_what_may_not(self):
        before = TrainingOptions(batch_tokens=4096)
        assert before.with_changes({"steps": 9, "patience": 3}).changed_from(before) == ["steps", "patience"]
        with pytest.raises(ValueError, match=r"resume: batch_tokens must be 4096, as the run that is resumed began"):
            TrainingOptions(batch_tokens=64).changed_from(before)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"stpes": 3}, r"options: stpes must be one of .* got 'stpes' \(did you mean 'steps'\?\)"),
            ({"steps": 0}, "options: steps must be an int of at least 1, got 0"),
            ({"label_smoothing": 1.0}, "label_smoothing must be a number in .0, 1., got 1.0"),
            ({"schedule": "cosin"}, r"schedule must be one of .* \(did you mean 'cosine'\?\)"),
            ({"average": 9}, "average must be at most keep, which is 5, got 9"),
        ],
    )
    def test_wrong_values(self, changes, message):
        with pytest.raises(ValueError, match=message):
            TrainingOptions().with_changes(changes)

    def test_wrong_types(self):
        with pytest.raises(TypeError, match="options: steps must be an int of at least 1, got True"):
            TrainingOptions(steps=True)

    def test_precision_is_that_of_the_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False})
        wide = is_bfloat16.__wrapped__  # what was found before is kept
        assert [wide("auto", device) for device in ("cpu", "cuda")] == [False, True]
        assert [wide(precision, "cpu") for precision in ("bfloat16", "float32")] == [True, False]

    @pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
    def test_rates(self, schedule):
        options = TrainingOptions(steps=100, warmup=10, schedule=schedule)
        rates = [options.rate(step) for step in range(100)]
        assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
        assert all(0 < rate <= 1 for rate in rates)
        assert schedule == "constant" or all(a > b for a, b in pairwise(rates[10:]))
        short = TrainingOptions(steps=59, warmup=500, schedule=schedule)
        assert max(range(59), key=short.rate) == 17 and short.rate(17) == pytest.approx(1.0)
        shares = options.with_changes({"warmup": 10 / 101})
        assert [shares.rate(step) for step in range(100)] == pytest.approx(rates)

    @pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
    def test_rates_by_the_clock(self, schedule):
        """Shares of the budget are of the steps or of the seconds, whichever is further."""
        options = TrainingOptions(steps=100, seconds=1000, warmup=0.1, schedule=schedule)
        by_step = [options.rate(step) for step in range(100)]
        assert [options.rate(0, 1000 * (step + 1) / 101) for step in range(100)] == pytest.approx(by_step)
        assert [options.rate(step, 1.0) for step in range(100)] == pytest.approx(by_step)
        assert schedule in ("constant", "inverse_sqrt") or options.rate(0, 1000) == options.rate(0, 1001) == 0
        steps = options.with_changes({"warmup": 10})
        assert steps.rate(4, 10) == 0.5
        # Nobody knows how many steps there will be: a warm-up of more than there are would never be over.
        slow = TrainingOptions(seconds=1000, warmup=500, schedule="constant")
        assert [slow.rate(2, share) for share in (30, 150, 300, 900)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
        assert options.progress(30, 100) == 0.3 and options.progress(30, 700) == 0.7
        assert TrainingOptions(steps=100).progress(30, 700) == 0.3
