"""Public names: what ``__all__`` of a public package holds, and nothing else, is what pages and examples import."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import regard
import regard_cli
import regard_lab

ROOT = Path(__file__).parents[2]
#: docs/extending.md is, as CONTRIBUTING.md, for who changes the library itself.
PAGES = [ROOT / "README.md", ROOT / "lab" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "extending.md")

#: Packages, and one module, whose ``__all__`` is a promise.
PUBLIC = (
    "regard", "regard.bench", "regard.distributed", "regard.engines", "regard.inspect",
    "regard.integrations.transformers",
    "regard.masks", "regard.nn", "regard.normalizers", "regard.regression", "regard.scores", "regard.testing",
    "regard_lab", "regard_lab.data", "regard_lab.generation", "regard_lab.models", "regard_lab.planner",
    "regard_lab.pretrained", "regard_lab.tasks.captioning", "regard_lab.tasks.classification",
    "regard_lab.tasks.embedding", "regard_lab.tasks.language", "regard_lab.tasks.pronunciation",
    "regard_lab.tasks.translation", "regard_lab.tasks.translation.alignment", "regard_lab.text",
    "regard_lab.training", "regard_lab.training.sharded",
)  # fmt: skip

#: What benchmarks import beside public names, and why. An entry that nothing needs any more fails.
ALLOWED = {
    ("benchmarks/campaign.py", "regard.testing.campaign"): "runs the campaign of `python -m regard.testing` in parts",
    ("benchmarks/cases/small.py", "regard.engines.fused"): "times kernels without what surrounds them",
    ("benchmarks/costs.py", "regard.engines"): "fits the cost model to what engines are given",
    ("benchmarks/families/checks.py", "regard.integrations.transformers.attention_function"): "counts its calls",
    ("benchmarks/gpu.py", "regard.engines"): "lists the engines that run on a device",
    ("benchmarks/gpu.py", "regard.testing"): "runs the campaign and the laws in parts",
    ("benchmarks/fuzz/cases.py", "regard_cli"): "runs commands within its own process",
    ("benchmarks/page.py", "regard.inspect._view"): "times the page's blocks and its server",
    ("benchmarks/planning.py", "regard_lab.cli.plan"): "prints the table of `regard plan --table`",
    ("benchmarks/pronunciation.py", "regard_lab.cli.training_display"): "shows its progress as `regard train` does",
    ("benchmarks/readme.py", "regard.engines"): "lists what is registered",
    ("benchmarks/readme.py", "regard.normalizers.base"): "lists what is registered",
    ("benchmarks/readme.py", "regard.scores.base"): "lists what is registered",
    ("benchmarks/screenshots.py", "regard_lab.cli.look"): "shows what `regard look` shows",
    ("benchmarks/short_runs.py", "regard_lab.cli.train"): "trains as `regard train` does by default",
}

#: A name of ours in prose: not a file or an address that ends so.
DOTTED = re.compile(r"(?<![\w./@-])(?:regard|regard_lab)(?:\.[A-Za-z_]\w*)+(?![\w-])")


def packages() -> list[str]:
    """Return every package, and the modules among the public names."""
    found = set(PUBLIC)
    for package in (regard, regard_cli, regard_lab):
        root = Path(package.__file__ or "").parent
        found |= {".".join(path.parent.relative_to(root.parent).parts) for path in root.rglob("__init__.py")}
    return sorted(found)


def stated(module: str) -> list[str]:
    """Return what a package states as public."""
    return list(getattr(importlib.import_module(module), "__all__", []))


def unpublic(name: str) -> bool:
    """Return whether a dotted name is neither a public package nor begins with a public name of one."""
    parts = name.split(".")
    module = parts[0]
    for part in parts[1:]:
        if any(f"{public}.".startswith(f"{module}.{part}.") for public in PUBLIC):
            module = f"{module}.{part}"
        else:
            return part not in stated(module) and not part.startswith("__")
    return False


# What is read ---------------------------------------------------------------------------------------------------------


def python_of_page(text: str) -> Iterator[str]:
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if ">>>" in block:
            yield "".join(example.source for example in doctest.DocTestParser().get_examples(block))
        else:
            yield block


def sources() -> Iterator[tuple[str, str]]:
    """Yield what people read to learn our names from: each file with its Python, notebooks cell by cell."""
    for path in PAGES:
        for code in python_of_page(path.read_text(encoding="utf-8")):
            yield path.relative_to(ROOT).as_posix(), code
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield path.relative_to(ROOT).as_posix(), "".join(cell["source"])
    for folder in ("examples", "recipes", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("regard", "regard_lab", "regard_cli")


def names_in(code: str) -> Iterator[str]:
    """Yield the full names that code imports from our packages, and those that it takes as attributes of modules."""
    tree, modules = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: is_ours(alias.name), node.names):
                yield alias.name
                modules[alias.asname or alias.name.partition(".")[0]] = alias.asname and alias.name
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name
                if name in PUBLIC:
                    modules[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        first, _, rest = text.partition(".")
        if first in modules and re.fullmatch(r"\w+(\.\w+)*", rest):
            yield f"{modules[first] or first}.{rest}"


@pytest.mark.slow
def test_what_people_read_takes_public_names_only() -> None:
    used, wrong = set(), set()
    for file, code in sources():
        for name in filter(unpublic, names_in(code)):
            entry = next((key for key in ALLOWED if key[0] == file and f"{name}.".startswith(f"{key[1]}.")), None)
            used.add(entry)
            wrong |= set() if entry else {f"{file}: {name}"}
    assert not wrong, "import it from a public package, or export it there"
    assert set(ALLOWED) <= used, "these need no exception any more"


def test_pages_speak_of_public_names_only() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not {name for name in DOTTED.findall(text) if unpublic(name)}, page


# What packages state --------------------------------------------------------------------------------------------------


def order(name: str) -> tuple[int, list[str | int]]:
    """Return what ruff (RUF022) sorts a name by: constants, classes, the rest; digits as numbers."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@pytest.mark.parametrize("package", PUBLIC)
def test_a_public_package_says_what_it_is_and_holds(package: str) -> None:
    assert stated(package)
    summary = (importlib.import_module(package).__doc__ or "").partition("\n")[0]
    assert summary.endswith((".", ":")), "its docstring begins with a sentence in one line"


@pytest.mark.parametrize("package", [package for package in packages() if stated(package)])
def test_public_names_are_sorted_and_there_and_described(package: str) -> None:
    module, names = importlib.import_module(package), stated(package)
    # Where a package makes the list of its imports, so that a new part is one line, it is in plain order.
    assert names in (sorted(set(names), key=order), sorted(set(names)))
    for name in names:
        assert not name.startswith("_") or name == "__version__"
        value = getattr(module, name)
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own or not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)), name
    aliases = [alias for node in tree_of(module).body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {alias.name for alias in aliases if alias.name == alias.asname} <= set(names), "X as X hands on"


def tree_of(module: ModuleType) -> ast.Module:
    return ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))


LAZY = [package for package in packages() if "__getattr__" in vars(importlib.import_module(package))]


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_are_those_that_type_checkers_see(package: str) -> None:
    module = importlib.import_module(package)
    eager = {name for name in vars(module) if name in stated(package)}
    (block,) = (node for node in tree_of(module).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            seen[alias.name] = getattr(importlib.import_module(node.module or ""), alias.name)
            # Importing a module makes it an attribute of its package, in place of what else has its name.
            assert node.module == package or find_spec(f"{package}.{alias.name}") is None, alias.name
    closure = inspect.getclosurevars(module.__getattr__).nonlocals
    assert set(closure["homes"]) == set(seen)
    assert all(module.__getattr__(name) is value for name, value in seen.items())
    assert set(stated(package)) <= eager | set(seen)
    assert dir(module) == sorted(stated(package))


def test_completion_shows_public_names_and_packages_only() -> None:
    assert set(dir(regard)) == set(regard.__all__)
    for name in dir(regard):
        value = getattr(regard, name)
        assert not inspect.ismodule(value) or value.__name__ in PUBLIC
    with pytest.raises(AttributeError, match=r"^module 'regard' has no attribute 'atention'$"):
        _ = regard.atention
    assert type(regard.explain(*torch.zeros(3, 1, 2, 3, 4))) is regard.Explanation


@pytest.mark.parametrize("module", sorted({module for _, module in ALLOWED}))
def test_modules_of_exceptions_exist(module: str) -> None:
    assert module in sys.modules or find_spec(module)


def documented(thing: Any) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a function or class whose docstring states a default, and what it states."""
    _, found, rest = (inspect.getdoc(thing) or "").partition("Parameters\n----")
    section = re.split(r"\n[A-Z]\w+\n---", rest)[0] if found else ""
    for names, values in re.findall(r"^(\w+(?:, \w+)*) : .*?default (\S.*)$", section, re.MULTILINE):
        several = names.split(", ")
        each = re.split(r", | and ", values) if len(several) > 1 else [values]
        yield from zip(several, each if len(each) > 1 else each * len(several), strict=True)


def test_defaults_are_those_of_the_docstrings() -> None:
    count, wrong = 0, []
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            public = getattr(module, name)
            methods = vars(public).items() if inspect.isclass(public) else ()
            named = {f"{name}.{own}": each for own, each in methods if inspect.isfunction(each) and own[0] != "_"}
            for path, thing in {name: public, **named}.items():
                for parameter, value in documented(thing):
                    given = inspect.signature(thing).parameters.get(parameter)
                    if given is not None and given.default is not inspect.Parameter.empty:
                        default = getattr(given.default, "__name__", given.default)
                        count += 1
                        shown = value.strip("\"'`").lower()
                        if shown != str(default).lower() and float_of(shown) != float_of(str(default)):
                            wrong.append(f"{package}.{path}: {parameter} is {default!r}, documented as {value}")
    assert count > 350
    assert not wrong, "\n".join(wrong)


def float_of(text: str) -> float | str:
    """Return the number that a text states, as 1e-6 and 1e-06 are one, and 2 ** 24 is one, or the text."""
    base, _, power = text.partition(" ** ")
    try:
        return float(base) ** float(power or 1)
    except ValueError:
        return text
