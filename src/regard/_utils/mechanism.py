"""The catalogue of mechanisms: formulas, sources in ``references.bib``, and citations."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from regard._utils.errors import rejected

# References -----------------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """A publication.

    Attributes
    ----------
    key : str
        The BibTeX key.
    bibtex : str
        The whole entry.
    fields : dict of str to str
        Fields of the entry: ``author``, ``title``, ``year``, and ``eprint`` if it is on arXiv.
    """

    key: str
    bibtex: str
    fields: dict[str, str]

    @property
    def short(self) -> str:
        """Return the first author's last name and the year, as tables show them.

        Examples
        --------
        >>> references()["bahdanau2014"].short, references()["watson1964"].short
        ('Bahdanau et al. 2014', 'Watson 1964')
        """
        names = [name.split(",")[0] for name in self.fields["author"].split(" and ")]
        who = names[0] if len(names) == 1 else f"{names[0]} & {names[1]}" if len(names) == 2 else f"{names[0]} et al."
        return f"{who} {self.year}"

    @property
    def year(self) -> int:
        """The year of publication."""
        return int(self.fields["year"])

    @property
    def arxiv(self) -> str:
        """The arXiv identifier, or ""."""
        return self.fields.get("eprint", "")

    @property
    def url(self) -> str:
        """The arXiv URL, or ""."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else ""


@cache
def references() -> dict[str, Reference]:
    """Return every reference by key."""
    text = files("regard").joinpath("references.bib").read_text(encoding="utf-8")
    found = {}
    for entry in re.findall(r"^@\w+\{.*?^\}", text, re.DOTALL | re.MULTILINE):
        key = entry[entry.index("{") + 1 : entry.index(",")]
        found[key] = Reference(key, entry, dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.MULTILINE)))
    return found


# The catalogue --------------------------------------------------------------------------------------------------------


#: Modules that define mechanisms and that ``import regard`` does not import.
_LATE = ("regard.nn",)
#: Groups of mechanisms, by the place of the file that defines them, in the order of the catalogue.
GROUPS = {
    "regard.scores": "Scores",
    "regard.masks": "Masks",
    "regard.normalizers": "Normalizers",
    "regard.engines": "Orders",
    "regard.nn.heads": "Layers: heads of attention",
    "regard.nn.positions": "Layers: positions",
    "regard.nn.linear": "Layers: linear attention and recurrences",
    "regard.nn.memory": "Layers: memory",
    "regard.nn.image": "Layers: images",
    "regard.nn": "Layers: sets and others",
}


class Mechanism(NamedTuple):
    """One row of the catalogue.

    Attributes
    ----------
    name : str
        Name in code.
    module : str
        Module: ``regard.scores``, ``regard.nn`` and so on.
    formula : str
        One-line formula.
    sources : tuple of str
        Keys of ``references.bib``.
    learned : str
        Its parameters, or "".
    cost : str
        Asymptotic number of operations, O(...), in L, S and widths.
    reads : str
        For a layer, the name of its score, as in ``score=``; "" if it has none.
    causal : str
        For a layer over a sequence: "yes" if a step reads no later ones, "no", or "option"; "" for others.
    cache : str
        What decoding keeps of a sequence, in numbers: in H heads, G heads of keys and values, D their width, N tokens
        so far; "" where there is no decoding step by step.
    defined : type or function
        The class or function.
    """

    name: str
    module: str
    formula: str
    sources: tuple[str, ...]
    learned: str
    cost: str
    reads: str
    causal: str
    cache: str
    defined: Any

    @property
    def group(self) -> str:
        """The key of its group in :data:`GROUPS`."""
        place: str = self.defined.__module__
        return max((each for each in GROUPS if f"{place}.".startswith(f"{each}.")), key=len)

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references of the mechanism."""
        return tuple(references()[key] for key in self.sources)

    @property
    def source(self) -> str:
        """The references in short, for tables."""
        return "; ".join(each.short for each in self.references)


_TABLE: dict[str, Mechanism] = {}
_D = TypeVar("_D", bound=Callable[..., Any])


def mechanism(
    *,
    formula: str,
    sources: tuple[str, ...] = (),
    learned: str = "",
    cost: str,
    reads: str = "",
    causal: str = "",
    cache: str = "",
    module: str = "",
) -> Callable[[_D], _D]:
    """Decorator: add a class or function to the catalogue.

    Parameters
    ----------
    formula, learned, cost, reads, causal, cache : str
        See :class:`Mechanism`. A layer whose call takes ``is_causal`` has the causality "option".
    sources : tuple of str
        Keys of ``references.bib``.
    module : str
        Where users find it; its package by default.
    """

    def add(defined: _D) -> _D:
        package = module or ".".join(defined.__module__.split(".")[:2])
        name: str = defined.__name__
        found = _causality(defined, causal)
        _TABLE[name] = Mechanism(name, package, formula, sources, learned, cost, reads, found, cache, defined)
        return defined

    return add


def _causality(defined: Any, causal: str) -> str:
    forward = getattr(defined, "forward", None)
    taken = inspect.signature(forward).parameters if forward is not None else ()
    return causal or "option" * ("is_causal" in taken or "tgt_is_causal" in taken)


def mechanisms() -> tuple[Mechanism, ...]:
    """Return all mechanisms, by group and in order of definition."""
    _import_all()
    return tuple(sorted(_TABLE.values(), key=lambda each: list(GROUPS).index(each.group)))


def _import_all() -> None:
    for name in _LATE:
        importlib.import_module(name)


def mechanism_of(thing: object) -> Mechanism | None:
    """Return the catalogue entry of a class or function, or of an object's class; None if there is none."""
    _import_all()
    if isinstance(thing, FunctionType):
        return _entry(thing)
    cls = thing if isinstance(thing, type) else type(thing)
    return next(filter(None, map(_entry, cls.__mro__)), None)  # of the most derived class with an entry


def _entry(defined: type | FunctionType) -> Mechanism | None:
    found = _TABLE.get(defined.__name__)
    return found if found is not None and found.defined is defined else None


def _parts(thing: object) -> Iterator[object]:
    """Yield an object, its submodules and the parts that they hold."""
    modules = getattr(thing, "modules", None)
    inside = list(modules()) if callable(modules) else [thing]
    for each in inside:
        yield each
        yield from (part for part in getattr(each, "__dict__", {}).values() if part is not each)
        named = (getattr(each, attribute, None) for attribute in ("score", "normalizer"))
        yield from (_by_name(name) for name in named if isinstance(name, str))


def _by_name(name: str) -> object:
    """Return the score or normalizer of this name."""
    wanted = name.replace("_", "")
    return next((row.defined for row in _TABLE.values() if row.name.lower() == wanted), None)


def cite(thing: object) -> str:
    r"""Return the BibTeX entries of a mechanism, a part, or a model that contains mechanisms.

    Parameters
    ----------
    thing : object
        A score, a normalizer, a layer, or any ``torch.nn.Module`` that contains layers; an instance or a class.

    Returns
    -------
    str
        One entry per reference, in order of appearance, without duplicates.

    Raises
    ------
    ValueError
        If it contains no mechanism with a reference.

    Examples
    --------
    >>> import regard
    >>> print(regard.cite(regard.scores.Epanechnikov))
    @article{epanechnikov1969,
      author = {Epanechnikov, V. A.},
      title = {Non-Parametric Estimation of a Multivariate Probability Density},
      year = {1969},
      journal = {Theory of Probability \& Its Applications},
    }
    """
    found: dict[str, Reference] = {}
    for part in [thing] if isinstance(thing, type) else _parts(thing):
        row = mechanism_of(part)
        found |= {each.key: each for each in row.references} if row else {}
    if not found:
        name = thing.__name__ if isinstance(thing, type) else type(thing).__name__
        expected = "be or contain a mechanism in regard.catalogue() with a source"
        raise rejected("cite", "thing", expected, name)
    return "\n\n".join(each.bibtex for each in found.values())
