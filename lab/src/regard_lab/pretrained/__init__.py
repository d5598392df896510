"""The included models, each in a folder next to this file, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard._utils.errors import unknown_name

if TYPE_CHECKING:
    from regard_lab.generation.sequence_model import SequenceModel

__all__ = ["CARD", "load", "names", "path"]

_HERE = Path(__file__).parent
CARD = "README.md"
#: English to French.
TRANSLATOR = "english-french"


def names() -> list[str]:
    """Return the names of the models that come with the package.

    Examples
    --------
    >>> names()
    ['english-french']
    """
    return sorted(card.parent.name for card in _HERE.glob(f"*/{CARD}"))


def path(name: str) -> Path:
    """Return the folder of an included model.

    Raises
    ------
    ValueError
        If there is none of this name.
    """
    if name not in names():
        raise unknown_name("pretrained", "name", name, names())
    return _HERE / name


def load(name: str = TRANSLATOR) -> SequenceModel:
    """Return an included model; ``SequenceModel.load`` reads one of your own from its folder.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Raises
    ------
    ValueError
        If there is none of this name.

    Examples
    --------
    >>> load().predict(["I love you"])[0].text
    "je t'aime"
    """
    from regard_lab.generation.sequence_model import SequenceModel

    return SequenceModel.load(path(name))
