"""Public names, and the pages of the reference that document them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

#: Public packages in the order of the reference, and what each is for.
PACKAGES = {
    "regard": "One attention function: the call, its explanation, and auxiliary outputs.",
    "regard.scores": "How a query and a key compare.",
    "regard.masks": "Which queries see which keys, and what is added to their scores.",
    "regard.normalizers": "How the scores of a row become weights.",
    "regard.engines": "How a call is executed.",
    "regard.nn": "Layers.",
    "regard.inspect": "Record, draw and change what a model attends to.",
    "regard.regression": "Kernel regression as scikit-learn estimators.",
    "regard.integrations.transformers": "Hugging Face models on regard's attention.",
    "regard.distributed": "Attention over a sequence that several processes hold.",
    "regard.testing": "Laws that every part and engine must satisfy.",
    "regard.bench": "How fast attention is on this machine: ``python -m regard.bench``.",
    "regard_lab": "The package built with regard.",
    "regard_lab.models": "Language models, encoder–decoders, classifiers and captioners.",
    "regard_lab.text": "Tokenizers and vocabularies.",
    "regard_lab.data": "Files, batches and packing.",
    "regard_lab.training": "The training loop, objectives and checkpoints.",
    "regard_lab.training.sharded": "Training with sharded parameters.",
    "regard_lab.generation": "Beam search, sampling, batching and speculative decoding.",
    "regard_lab.tasks.translation": "Translation.",
    "regard_lab.tasks.translation.alignment": "Word alignment.",
    "regard_lab.tasks.language": "Language modelling.",
    "regard_lab.tasks.classification": "Classification of texts and images.",
    "regard_lab.tasks.captioning": "Image captions.",
    "regard_lab.tasks.embedding": "Sentence embeddings.",
    "regard_lab.tasks.pronunciation": "Pronunciation.",
    "regard_lab.planner": "Memory, time and cost of training a large model.",
    "regard_lab.pretrained": "The included translator.",
}


@cache
def public_names() -> dict[str, Any]:
    """Return every public object by its full public name, without modules; the first package that has it names it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType) or (id(value) in seen and callable(value)):
                continue
            seen.add(id(value))
            found[f"{package}.{name}"] = value
    return found


@cache
def _places() -> tuple[dict[int, str], dict[str, list[str]]]:
    by_object, by_last = {}, {}
    for name, value in public_names().items():
        by_object[id(value)] = name
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    return by_object, by_last


def resolve(target: str, module: str | None, within: str | None = None) -> str | None:
    """Return the full public name for a name as a docstring or an annotation has it, or None.

    A name may be qualified by the private module that defines it, by its class, or not at all: then it is a member of
    the class ``within`` whose docstring refers to it, a name of its package, or the only one of this name.
    """
    by_object, by_last = _places()
    target = target.lstrip(".~")
    if target in public_names():
        return target
    parts = target.split(".")
    owned = public_names().get(f"{module}.{within}")
    if owned is not None and hasattr(owned, parts[0]):
        return f"{module}.{within}.{target}"
    for length in range(len(parts), 0, -1):  # a class, or a class and its member
        head, members = parts[:length], parts[length:]
        owner = by_object.get(id(_imported(head))) if length > 1 else None
        if length == 1:
            same = by_last.get(head[0], [])
            near = [name for name in same if name.rpartition(".")[0] == module]
            owner = near[0] if near else same[0] if len(same) == 1 else None
        if owner is not None:
            return ".".join([owner, *members])
    return None


def _imported(parts: list[str]) -> Any:
    """Return what a dotted name of ours stands for, or None."""
    if parts[0] not in ("regard", "regard_lab"):
        return None
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name, None)
        return value
    return None


def exists(target: str, described: str) -> bool:
    """Return whether the code that a docstring describes, or the bases of its class, know a name that it refers to.

    Such a name is private, or inherited: it has no entry in the reference.
    """
    if _imported(target.split(".")) is not None and "." in target:
        return True
    parts = described.split(".")
    modules = set()
    for length in range(len(parts), 0, -1):
        value = _imported(parts[:length])
        if inspect.isclass(value):
            modules |= {base.__module__ for base in value.__mro__}
        elif value is not None:
            modules.add(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    last = target.rpartition(".")[2]
    return any(last in _identifiers(module) for module in modules if module.startswith("regard"))


@cache
def _identifiers(module: str) -> frozenset[str]:
    """Return the names in the code of a module, without its texts."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "asname", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.add(name.rpartition(".")[2])
    return frozenset(found)


def comment(name: str) -> str:
    """Return the comment (``#:``) above a constant, wherever in its package it is defined."""
    package, _, last = name.rpartition(".")
    top = package.partition(".")[0]
    modules = sorted(
        (each for each in sys.modules if each.startswith(top)), key=lambda each: not each.startswith(package)
    )
    for module in modules:
        file = getattr(sys.modules[module], "__file__", None)
        if not file or not file.endswith(".py"):
            continue
        text = Path(file).read_text(encoding="utf-8")
        found = re.search(rf"((?:^#: .*\n)+)^{last}\b[^\n(]*=", text, re.MULTILINE)
        if found:
            text = " ".join(line.removeprefix("#:").strip() for line in found[1].splitlines())
            return re.sub(r":\w+:`~?\.?([^`]*)`", r"``\1``", text)
    return ""


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page of the reference, the index first."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, value in public_names().items():
        package = name.rpartition(".")[0]
        groups.setdefault(_page(package, value), []).append((name, value))
    yield "reference/index.md", _index(groups)
    for page, members in groups.items():
        yield f"reference/{page}.rst", _text(page, members)


def _page(package: str, value: Any) -> str:
    """Return the page that documents a name: that of its package, and for layers that of their family."""
    if package != "regard.nn":
        return package
    parts = getattr(value, "__module__", package).split(".")
    family = parts[2] if len(parts) > 3 else "other"
    return f"regard.nn.{family}"


#: Families of layers: the folders of regard/nn, and the modules that lie beside them.
FAMILIES = {
    "heads": "Layers: heads of attention",
    "transformer": "Layers: Transformer",
    "positions": "Layers: positions",
    "linear": "Layers: linear attention and recurrences",
    "memory": "Layers: memory",
    "image": "Layers: images",
    "approximate": "Layers: approximations",
    "latents": "Layers: latent arrays",
    "other": "Layers: sets, graphs, points, caches",
}


def _title(page: str) -> str:
    family = page.removeprefix("regard.nn.")
    return FAMILIES.get(family, family) if page.startswith("regard.nn.") else page


def summary(value: Any) -> str:
    """Return the first sentence of a docstring."""
    text = inspect.getdoc(value) if callable(value) or inspect.isclass(value) else None
    return " ".join((text or "").partition("\n\n")[0].split())


def _index(groups: dict[str, list[tuple[str, Any]]]) -> str:
    tables, hidden = {"regard": [], "regard_lab": []}, []
    for page, members in groups.items():
        package = page if page in PACKAGES else "regard.nn"
        about = PACKAGES[package] if page == package else ""
        name = f"[`{page}`]({page}.rst)" if page == package else f"[{_title(page)}]({page}.rst)"
        tables[package.partition(".")[0]].append(f"| {name} | {len(members)} | {about} |")
        hidden.append(page)
    head = "| page | names | |\n| --- | ---: | --- |\n"
    return (
        "# Reference\n\nEvery public name, from the `__all__` of its package. What is not here is private and may "
        "change in any version.\n\nThe [catalogue](../catalogue.md) lists all mechanisms with formula, source, engines "
        "and cost, and has filters. [Names in other libraries](../coverage.md) translates from flash-linear-attention "
        "and x-transformers.\n\n## regard\n\n"
        + head
        + "\n".join(tables["regard"])
        + "\n\n## regard_lab\n\n"
        + head
        + "\n".join(tables["regard_lab"])
        + "\n\n```{toctree}\n:hidden:\n\nCatalogue <../catalogue>\nNames in other libraries <../coverage>\n"
        + "\n".join(f"{_title(page)} <{page}>" for page in hidden)
        + "\n```\n"
    )


def _text(page: str, members: list[tuple[str, Any]]) -> str:
    package = members[0][0].rpartition(".")[0]
    title = _title(page)
    lines = [title, "=" * len(title), ""]
    if page == package or page == "regard.nn.heads":  # one page of those of a package declares it
        lines += [f".. py:module:: {package}", ""]
    lines += [f"{PACKAGES[package]}" if page == package else f"From ``{package}``.", ""]
    lines += [".. list-table::", "   :widths: 30 70", ""]
    lines += [
        line for name, value in members for line in (f"   * - :py:obj:`~{name}`", f"     - {_escaped(name, value)}")
    ]
    lines += ["", f".. currentmodule:: {package}", ""]
    for name, value in members:
        if inspect.isclass(value):
            directive = "autoexception" if issubclass(value, BaseException) else "autoclass"
            lines += [f".. {directive}:: {name}", "   :members:", ""]
        elif inspect.isroutine(value):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. py:data:: {name}", "", f"   {comment(name) or _alias(value)}", ""]
    return "\n".join(lines)


def _escaped(name: str, value: Any) -> str:
    """Return the first sentence on a name for a table in reStructuredText."""
    text = summary(value) if hasattr(value, "__name__") else comment(name) or _alias(value)
    text = re.sub(r":\w+:`~?\.?([^`]*)`", r"\1", text).replace("`", "")
    return re.sub(r"([*|_\\])", r"\\\1", text)


def _alias(value: Any) -> str:
    """Return what a type without a comment stands for, in the short names of types."""
    if isinstance(value, int | float | str):
        return f"``{value!r}``"
    return "One of ``" + re.sub(r"\b(?:\w+\.)+(?=\w)|typing\.|ForwardRef\('([^']*)'\)", r"\1", repr(value)) + "``."
