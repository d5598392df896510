"""What ``regard --help`` says of the commands, which it does not import, and what it says where some are missing."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

import regard_lab
from regard_cli import app, commands
from regard_lab.cli import commands as lab_commands

LISTED = [commands.COMMANDS, lab_commands.COMMANDS]


@pytest.mark.parametrize("listed", LISTED, ids=["regard", "regard-lab"])
def test_each_command_is_listed_with_its_own_first_words(listed: tuple[str, dict[str, str]]) -> None:
    place, helps = listed
    module, _, name = place.partition(":")
    defined = typer.main.get_group(getattr(import_module(module), name)).commands
    assert defined.keys() == helps.keys()
    for each, text in helps.items():
        said = (defined[each].help or "").partition("\n")[0]
        assert said.split()[:3] == text.split()[:3], each


def helps() -> dict[str, dict[str, str]]:
    """Return the help of every option and argument of every command."""
    found: dict[str, dict[str, str]] = {}
    groups = [(place.partition(":"), "") for place, _ in LISTED] + [
        (("regard_lab.cli.train_tasks", ":", "train"), "train ")
    ]
    for (module, _, name), before in groups:
        for command, defined in typer.main.get_group(getattr(import_module(module), name)).commands.items():
            found[before + command] = {each.name: getattr(each, "help", None) or "" for each in defined.params}
    del found["train"]
    return found


def test_every_option_is_explained_in_a_sentence_of_its_own() -> None:
    """Not by a fragment, such as "of a GPU", and not by words of another command."""
    shown = helps()
    assert len(shown) > 20
    for command, options in shown.items():
        for name, text in options.items():
            assert len(text.split()) >= 2 and text[0] == text[0].upper() and text[-1] == ".", (command, name, text)
            assert text.split()[0] not in ("Of", "Or", "Such", "Those", "Any,", "Its"), (command, name, text)
    for command in ("caption", "classify", "embed", "fill-mask", "generate", "train captioner", "train classifier"):
        assert not any("translat" in text for text in shown[command].values()), command
    assert shown["plan"]["pue"].startswith("Power usage effectiveness")
    assert shown["train translation"]["alignments"].startswith("File of word alignments in Pharaoh format")
    assert shown["caption"]["length_penalty"] == "0 favours short results, 1 long ones."
    assert "from this start" in shown["train captioner"]["seconds"]


def test_commands_of_other_packages_are_known_by_name() -> None:
    assert app.ELSEWHERE.keys() == lab_commands.COMMANDS[1].keys()


def test_help_imports_neither_torch_nor_the_library() -> None:
    code = "import sys\nfrom regard_cli import main\ntry: main(['--help'])\n"
    code += "except SystemExit: print('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, _, modules = done.stdout.partition("modules:")
    assert "fill-mask" in told and not set(modules.split()) & {"torch", "numpy", "regard"}


def test_a_command_of_a_package_that_is_missing(regard, monkeypatch: pytest.MonkeyPatch) -> None:
    app.sources.cache_clear()
    monkeypatch.setattr(app, "entry_points", lambda group: [])
    try:
        outcome = regard("translate", "a")
        assert outcome.code == 2 and "translate is a command of regard-lab" in outcome.err
        assert regard("say").code == 2
    finally:
        app.sources.cache_clear()


def test_a_package_that_does_not_fit_is_left_out(regard, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "regard-lab"

        def load(self) -> None:
            raise ImportError("regard_lab 0.1.0 needs regard 0.1, and 0.2.0 is installed: pip install 'regard==0.1.*'")

    app.sources.cache_clear()
    monkeypatch.setattr(app, "entry_points", lambda group: [Entry()])
    try:
        outcome = regard("translate", "a")
        assert outcome.code == 2 and "skipped the commands of regard-lab: regard_lab 0.1.0 needs" in outcome.err
    finally:
        app.sources.cache_clear()


def test_the_lab_names_the_version_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '9.3.0' if name == 'regard' else real(name)\n"
        "import regard_lab"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    series = regard_lab.__version__.rpartition(".")[0]
    assert (
        f"ImportError: regard_lab {regard_lab.__version__} needs regard {series}, and 9.3.0 is installed" in done.stderr
    )


def test_a_command_with_a_typing_error(regard) -> None:
    outcome = regard("tranlate", "a")
    assert outcome.code == 2 and "No such command 'tranlate'. Did you mean 'translate'?" in outcome.err
    assert "Did you mean" not in regard("xyzzy").err


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "translation"],
        ["train", "language-model"],
        ["train", "classifier"],
        ["compare", "translation", "--attention", "additive,dot"],
    ],
    ids=" ".join,
)
def test_training_without_its_packages_is_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "data.tsv").write_text("a b\tx\nc d\ty\ne f\tx\ng h\ty\n")
    # As in an installation without the extra "train".
    code = "import sys; sys.modules['lightning'] = None; from regard_cli import command; command()"
    command = [sys.executable, "-c", code, *arguments, "--data", "data.tsv", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (2, "regard: lightning is missing: pip install 'regard-lab[train]'\n")
