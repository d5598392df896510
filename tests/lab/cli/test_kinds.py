"""A folder of the wrong kind: every command that loads a model says what it is and which command uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard_lab.cli.kinds import COMMANDS, kind_of

#: A config.json of each kind; nothing else of a folder is read to tell its kind.
CONFIGS = {
    "pronunciation model": {"format": "regard.sequences", "about": {"task": "pronunciation"}},
    "span-corruption model": {"format": "regard.sequences", "about": {"task": "span-corruption"}},
    "captioner": {"format": "regard.captioner"},
    "language model": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "masked language model": {"format": "regard.language_model", "kind": "encoder", "model": {"masked_head": True}},
    "text encoder": {"format": "regard.language_model", "kind": "encoder", "model": {"masked_head": False}},
    "text classifier": {"architectures": ["BertForSequenceClassification"]},
    "token classifier": {"format": "regard.language_model", "head": "tokens"},
    "text-pair classifier": {"format": "regard.language_model", "head": "pairs"},
    "image classifier": {"format": "regard.vision_model", "head": "images"},
    "image model": {"format": "regard.vision_model", "head": None},
}
#: Commands with the kinds that they use.
USES = {
    "translate": (["translate", "a"], {"translation model"}),
    "align": (["align", "pairs.tsv"], {"translation model"}),
    "pronounce": (["pronounce", "a"], {"pronunciation model"}),
    "caption": (["caption", "a.png"], {"captioner"}),
    "generate": (["generate", "a"], {"language model"}),
    "fill-mask": (["fill-mask", "a"], {"masked language model"}),
    "embed": (["embed", "a"], {"language model", "masked language model", "text encoder", "text classifier",
                               "token classifier", "text-pair classifier"}),
    "classify": (["classify", "a"], {"text classifier", "token classifier", "image classifier"}),
    "look": (["look"], {*COMMANDS} - {"captioner"}),
}  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    names = {"translation model": "english-french"}
    for kind, config in CONFIGS.items():
        names[kind] = kind.replace(" ", "-")
        (tmp_path / names[kind]).mkdir()
        (tmp_path / names[kind] / "config.json").write_text(json.dumps(config))
    return names


def test_every_kind_is_told_from_its_config(folders) -> None:
    assert {kind: kind_of(folder) for kind, folder in folders.items()} == {kind: kind for kind in COMMANDS}
    Path("other").mkdir()
    for text in ("{", "[]", '{"model_type": "t5", "architectures": [3]}', '{"format": "regard.sequences", "about": 3}'):
        Path("other", "config.json").write_text(text)
        assert kind_of("other") == ""


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("command", USES)
def test_a_folder_of_another_kind_names_the_command_to_use(regard, folders, command: str) -> None:
    words, used = USES[command]
    for kind, folder in folders.items():
        given = [folder, "--text", "a"] if command == "look" else ["--model", folder]
        result = regard(*words, *given)
        use = COMMANDS[kind].format(folder)
        one = f"regard: {command}: {folder} is a{'n' * (kind[0] in 'aeiou')} {kind}: use `{use}`.\n"
        if kind in used:
            assert f"{folder} is a" not in result.err
        else:
            assert (result.code, result.err) == (2, one)


#: Tasks of ``regard evaluate`` with the kinds that they score.
EVALUATED = {
    "translation": {"translation model"},
    "alignment": {"translation model"},
    "pronunciation": {"pronunciation model"},
    "language-model": {"language model", "masked language model"},
    "classifier": {"text classifier", "image classifier"},
    "captioner": {"captioner"},
}


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("task", EVALUATED)
def test_evaluation_of_another_kind_names_the_task_to_use(regard, folders, task: str) -> None:
    more = {"alignment": ["--links", "b"], "captioner": ["--images", "b"]}.get(task, [])
    tasks = {kind: name for name, kinds in EVALUATED.items() if name != "alignment" for kind in kinds}
    for kind, folder in folders.items():
        result = regard("evaluate", task, "a.tsv", "--model", folder, *more)
        use = f"regard evaluate {tasks[kind]} DATA --model {folder}" if kind in tasks else COMMANDS[kind].format(folder)
        one = f"regard: evaluate: {folder} is a{'n' * (kind[0] in 'aeiou')} {kind}: use `{use}`.\n"
        if kind in EVALUATED[task]:
            assert f"{folder} is a" not in result.err
        else:
            assert (result.code, result.err) == (2, one)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pairs.tsv", "--model", "my model"], "`regard evaluate TASK pairs.tsv --model 'my model'`"),
        (["--model", "m", "pairs.tsv"], "`regard evaluate TASK --model m pairs.tsv`"),
        (["clasifier", "a.tsv"], "there is no task 'clasifier'. Did you mean 'classifier'?"),
    ],
)
def test_evaluation_without_a_task_names_the_tasks(regard, words: list[str], said: str) -> None:
    result = regard("evaluate", *words)
    assert result.code == 2 and result.out == "" and said in result.err and result.err.count("\n") == 1
    if "TASK" in said:
        assert all(f"{name}" in result.err for name in EVALUATED)


@pytest.mark.parametrize(
    ("words", "wrong", "expected"),
    [
        (
            ["translation", "--data", "x"],
            "language model",
            "a translation model or a pronunciation model or a span-corruption model",
        ),
        (["language-model"], "masked language model", "a language model"),
        (["language-model", "--masked"], "language model", "a masked language model or a text encoder"),
        (["classifier"], "translation model", "a language model or a masked language model or a text encoder or"),
        (["classifier", "--images", "x"], "captioner", "an image classifier or an image model"),
        (["captioner", "--data", "x"], "language model", "a captioner"),
    ],
)
def test_a_start_of_another_kind(regard, folders, words: list[str], wrong: str, expected: str) -> None:
    result = regard("train", *words, "--out", "out", "--start", folders[wrong])
    assert result.code == 2
    assert f"regard: train: --start must be the folder of {expected}" in result.err
    assert result.err.endswith(f"got a {wrong}, {folders[wrong]}.\n")


def test_a_draft_of_another_kind(regard, folders) -> None:
    result = regard("generate", "a", "--model", folders["language model"], "--draft", folders["captioner"])
    assert result.code == 2 and "generate: captioner is a captioner: use `regard caption" in result.err
