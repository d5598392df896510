"""The examples of CONTRIBUTING.md and docs/extending.md: each runs, is linted, and holds the laws, as it stands."""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.regard.nn import test_layers as layers
from tests.regard.nn.layer_samples import SAMPLES
from tiers import sized

import regard.nn
from regard import engines, masks
from regard._utils import mechanism
from regard.normalizers.base import TABLE as NORMALIZERS
from regard.scores.base import TABLE as SCORES
from regard.testing import LAWS
from regard.testing.campaign import Plan, run

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "extending.md")
#: What engines of torch's own compilers trace takes long, and is held by the sweep over all parts.
QUICK = tuple(law for law in LAWS if law not in ("traced", "compiled", "meta"))


def examples() -> dict[str, str]:
    """Return the code of each example by the page and the path that stands above it."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL)
        assert len(shown) == text.count("```python"), f"{page.name}: a path, a colon and an empty line before each"
        found |= {f"{page.name}:{path}": code for path, code in shown}
    return found


EXAMPLES = examples()


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Forget what an example registers."""
    before = [(table, dict(table)) for table in (SCORES, NORMALIZERS, engines.TABLE, mechanism._TABLE)]
    samples = list(SAMPLES)
    yield
    SAMPLES[:] = samples
    for table, entries in before:
        table.clear()
        table.update(entries)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Write an example to a file, and import it under the name that it would have."""

    def loaded(name: str) -> ModuleType:
        path = name.partition(":")[2]
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(EXAMPLES[name], encoding="utf-8")
        dotted = re.sub(r"^(lab/)?src/", "", path).removesuffix(".py").replace("/", ".")
        spec = spec_from_file_location(dotted, file)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, dotted, module)
        spec.loader.exec_module(module)
        if "from regard.nn import" not in EXAMPLES[name]:  # whose name the test puts there first
            assert doctest.testmod(module).failed == 0
        return module

    return loaded


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_linted(name: str) -> None:
    ruff = shutil.which("ruff") or Path(sys.executable).with_name("ruff")
    path = name.partition(":")[2]
    for command in (["check"], ["format", "--diff"]):
        done = subprocess.run(
            [ruff, *command, "--no-cache", "--stdin-filename", path, "-"],
            input=EXAMPLES[name], capture_output=True, text=True, encoding="utf-8", cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("CONTRIBUTING.md:src/regard/scores/rational.py", {"score": "rational"}),
        ("CONTRIBUTING.md:src/regard/masks/checkered.py", {"mask": "Checkered"}),
        ("CONTRIBUTING.md:src/regard/normalizers/softmax1.py", {"normalizer": "softmax1"}),
        ("extending.md:src/regard/normalizers/softmax1.py", {"normalizer": "softmax1"}),
    ],
)
def test_a_part_holds_the_laws(name: str, part: dict[str, str], load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(name)
    for public in ("checkered", "Checkered"):
        if hasattr(module, public):
            monkeypatch.setattr(masks, public, getattr(module, public), raising=False)
    among = ("streaming", "reference") if NORMALIZERS.get("softmax1") is None or "extending" in name else ("reference",)
    tally = run(sized(60, 25), Plan(laws=QUICK, engines=among, **part), progress=False)
    assert not tally.broken, tally.broken[0].reason
    ((kind, value),) = part.items()
    assert tally.parts[f"{kind} {value}"] > sized(25, 10)


@pytest.mark.slow
def test_a_normalizer_that_streams_by_the_wrong_rule_is_caught(load) -> None:
    right = load("extending.md:src/regard/normalizers/softmax1.py").SoftmaxPlusOne
    NORMALIZERS["softmax1"] = type("Wrong", (right,), {"streams": True, "slope_total": lambda self, total: total})
    tally = run(
        20, Plan(laws=("gradient budget", "gradcheck"), engines=("streaming",), normalizer="softmax1"), progress=False
    )
    assert len(tally.broken) > 4


@pytest.mark.slow
def test_a_layer_does_what_every_layer_owes(load, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = load("extending.md:src/regard/nn/heads/gated.py").GatedAttention
    monkeypatch.setattr(regard.nn, "GatedAttention", kind, raising=False)
    assert doctest.testmod(sys.modules[kind.__module__]).failed == 0
    load("extending.md:tests/regard/nn/layer_samples/gated.py")
    sample = SAMPLES[-1]
    assert sample.name == "GatedAttention"
    owed = [test for name, test in vars(layers).items() if name.startswith("test_")]
    owed = [test for test in owed if list(inspect.signature(test).parameters) == ["sample"]]
    assert layers.test_formula in owed and len(owed) > 5
    for test in owed:
        test(sample)
    layers.test_what_padding_holds_cannot_leak(sample, float("nan"))
    monkeypatch.setattr(layers, "LAYERS", [mechanism.mechanism_of(kind)])
    layers.test_the_docstring_gives_formula_shapes_source_and_example()


@pytest.mark.slow
def test_an_engine_holds_the_laws(load) -> None:
    engines.register(load("extending.md:src/regard/engines/rows.py").Rows())
    tally = run(sized(60, 25), Plan(laws=QUICK, engines=("rows",)), progress=False)
    assert not tally.broken, tally.broken[0].reason
    assert tally.total() - sum(n for (*_, outcome), n in tally.counts.items() if outcome == "refused") > sized(40, 15)


def test_a_task_trains(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("regard_lab.tasks.translation.tasks")
    from regard_lab.cli import kinds, translate
    from regard_lab.tasks.translation.options import ExperimentOptions
    from regard_lab.tasks.translation.training import Experiment

    task = load("extending.md:lab/src/regard_lab/tasks/translation/reversal.py").Reversal()
    monkeypatch.setitem(tasks.TASKS, "reversal", task)
    declared = next(each for each in fields(ExperimentOptions) if each.name == "task").metadata["constraint"]
    monkeypatch.setattr(declared, "choices", tuple(tasks.TASKS))  # as they are where the task stands in TASKS
    generator = torch.Generator().manual_seed(0)
    words = {"".join("abcd"[int(i)] for i in torch.randint(4, (6,), generator=generator)) for _ in range(200)}
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{word}\t{word[::-1]}\n" for word in sorted(words)), encoding="utf-8")
    table = {"task": "reversal", "preset": "small", "data": {"data": str(pairs)}}
    options = ExperimentOptions.from_table(table | {"training": {"steps": 3, "metric": task.metric}})
    model, ended = Experiment(options, tmp_path / "run", lambda _: None).train()
    monkeypatch.setitem(kinds.COMMANDS, "reversal model", "regard translate --model {}")
    assert translate.load(tmp_path / "run", "translate").about["task"] == "reversal"
    assert ended.steps == 3 and set("abcd") <= set(model.target.symbols)
    assert task.scores(["dcba"], [["dcba"]]) == {"per": 0.0, "wer": 0.0}


def test_the_pages_are_short() -> None:
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/extending.md"])
def test_files_that_are_named_exist(name: str) -> None:
    shown = {key.partition(":")[2] for key in EXAMPLES}
    text = re.sub(r"```python.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    roots = ("", "src/regard", "lab/src/regard_lab", "tests/regard/nn", "src/regard/engines")
    for path in re.findall(r"`([\w/]+\.(?:py|md|json|bib|toml))`", text):
        assert path in shown or any((ROOT / root / path).exists() for root in roots), path
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert ((ROOT / name).parent / target).exists(), target


def test_make_has_the_commands_that_are_named() -> None:
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in (*PAGES, ROOT / "ARCHITECTURE.md"):
        for command in re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8")):
            assert f"\n{command}:" in made, command
