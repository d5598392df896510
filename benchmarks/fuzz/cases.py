"""One case: something damaged, the command that loads it, and what came of that."""

from __future__ import annotations

import io
import shutil
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from unittest.mock import patch

import typer.main

from benchmarks.fuzz import folders, texts
from regard_cli import main

KINDS = ("folder", "table", "pairs", "options")
_SHARES = (10, 6, 2, 4)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes
    ----------
    number : int
        The seed of the case.
    kind : str
    verdict : str
        ``"accepted"``, ``"refused"``, or a description of the fault.
    told : str
        The error message, or the traceback.
    """

    number: int
    kind: str
    verdict: str
    told: str = ""


class Cases:
    """Cases in a folder of their own, where the undamaged models are."""

    def __init__(self, folder: Path) -> None:
        self.bases, self.here = folder / "bases", folder / "case"
        folders.make(self.bases)

    def arguments(self, number: int) -> tuple[str, list[str]]:
        """Write what a case is about, and return its kind and the command."""
        drawn = Random(number)
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        kind = drawn.choices(KINDS, _SHARES)[0]
        name = "\x1b[31m\n" if drawn.random() < 0.05 else "some"
        if kind == "folder":
            folders.mutate(drawn, self.bases, self.here / name)
            model = ["--model", str(self.here / name)]
            return kind, drawn.choice((
                ["translate", "the cat", *model], ["translate", "the cat", "--json", "--beams", "1", *model],
                ["pronounce", "abc", *model],
                ["train", "translation", "--out", str(self.here / "run"), "--show-options", "--start", model[1]],
            ))  # fmt: skip
        make: dict[str, Callable[[Random], tuple[str, bytes]]] = {
            "table": texts.table, "pairs": texts.pairs, "options": texts.options,
        }  # fmt: skip
        ending, data = make[kind](drawn)
        path = self.here / f"{name}{ending}"
        path.write_bytes(data)
        if drawn.random() < 0.01:
            path.unlink()
            # A pipe without a writer is waited for, and so is not among these.
            _instead(drawn, path)
        if kind == "table":
            more = drawn.choice(([], ["--predict", str(path)], ["--features", "x"], ["--weights", "x", "--json"]))
            return kind, ["regress", str(path), "--target", "y", "--bandwidth", drawn.choice(("1", "scott")), *more]
        if kind == "pairs":
            model = ["--model", str(self.bases / "bpe-recurrent")]
            return kind, ["evaluate", "translation", str(path), "--beams", "1", *model]
        command = ["train", "translation", "--out", str(self.here / "run"), "--show-options", "--options", str(path)]
        return kind, [*command, "--set", texts.setting(drawn)] if drawn.random() < 0.2 else command

    def warm(self) -> None:
        """Run each command on something whole: what is imported and compiled there is no case's time."""
        self.here.mkdir(exist_ok=True)
        table, pairs, model = self.here / "some.csv", self.here / "some.tsv", str(self.bases / "bpe-recurrent")
        table.write_text("x,z,y\n" + "".join(f"{i},{'ab'[i % 2]},{i * i}\n" for i in range(12)), encoding="utf-8")
        pairs.write_text("I love you\tje t'aime\n", encoding="utf-8")
        for arguments in (
            ["regress", str(table), "--target", "y", "--bandwidth", "1"],
            ["evaluate", "translation", str(pairs), "--model", model],
            ["translate", "the cat", "--model", str(self.bases / "bpe-transformer")],
            ["train", "translation", "--out", str(self.here / "run"), "--show-options"],
        ):
            code, _, err, trace = _ran(arguments)
            if code != 0 or trace:
                raise RuntimeError(f"{arguments}: {err}{trace}")

    def run(self, number: int) -> Outcome:
        """Run a case in this process."""
        kind, arguments = self.arguments(number)
        code, out, err, trace = _ran(arguments)
        return Outcome(number, kind, *_judged(arguments[0], code, out, err, trace))


def _instead(drawn: Random, path: Path) -> None:
    if drawn.random() < 0.5:
        path.symlink_to(path.name)
    else:
        path.mkdir()


#: Made once: finding out the options of all commands takes longer than most cases.
_command = cache(typer.main.get_command)


def _ran(arguments: list[str]) -> tuple[object, str, str, str]:
    """Return the exit code of a command, what it printed, and the traceback that its user would see."""
    out, err, trace = io.StringIO(), io.StringIO(), ""
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err), patch("typer.main.get_command", _command):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            trace = traceback.format_exc()
    return code, out.getvalue(), err.getvalue(), trace


def _judged(command: str, code: object, out: str, err: str, trace: str) -> tuple[str, str]:
    if trace:
        return "traceback", trace
    obeyed = {each for each in out + err if unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t"}
    if obeyed:
        return "control characters", f"{sorted(obeyed)!r} in {(out + err)[-1000:]!r}"
    if code == 0:
        return "accepted", ""
    # What another library says names neither the file nor what was expected.
    own = f"regard: {command}: ", "regard: there is no model at "
    sentences = [line for line in err.splitlines() if line.startswith(own)]
    if code != 2 or not sentences or not err.endswith("\n") or err.rstrip("\n").count("\n") > 3:
        return "no sentence", f"exit code {code}: {err[-2000:]!r}"
    return "refused", sentences[-1]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(Path(folder))
        for number in map(int, sys.argv[1:]):
            began = time.monotonic()
            print(cases.run(number), round(time.monotonic() - began, 3), flush=True)
