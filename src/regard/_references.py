"""The papers that mechanisms come from: ``references.bib``, read when somebody asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Reference:
    """A publication.

    Attributes
    ----------
    key : str
        The BibTeX key.
    bibtex : str
        The whole entry.
    fields : dict of str to str
        What the entry says: ``author``, ``title``, ``year``, and ``eprint`` where it is on arXiv.
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
        """Return when it appeared."""
        return int(self.fields["year"])

    @property
    def arxiv(self) -> str:
        """Return its number on arXiv, or ""."""
        return self.fields.get("eprint", "")

    @property
    def url(self) -> str:
        """Return where to read it on arXiv, or ""."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else ""


@cache
def references() -> dict[str, Reference]:
    """Return every reference by its key."""
    text = files("regard").joinpath("references.bib").read_text(encoding="utf-8")
    found = {}
    for entry in re.findall(r"^@\w+\{.*?^\}", text, re.DOTALL | re.MULTILINE):
        key = entry[entry.index("{") + 1 : entry.index(",")]
        found[key] = Reference(key, entry, dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.MULTILINE)))
    return found
