"""What ``regard --help`` says of the commands, which it does not import, and what it says where some are missing."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer

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
        "m.version = lambda name: '0.2.0' if name == 'regard' else real(name)\n"
        "import regard_lab"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: regard_lab 0.1.0 needs regard 0.1, and 0.2.0 is installed" in done.stderr


def test_a_command_with_a_typing_error(regard) -> None:
    outcome = regard("tranlate", "a")
    assert outcome.code == 2 and "No such command 'tranlate'. Did you mean 'translate'?" in outcome.err
    assert "Did you mean" not in regard("xyzzy").err
