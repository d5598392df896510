"""What layers are called: their names in the model, and the numbers that the page shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from regard._utils.errors import rejected

#: Parts of the names of cross-attention layers: in torch, BART, T5 and BERT, and in our recurrent decoders.
_CROSS = ("cross", "multihead_attn", "encoder_attn", "encdec", "attending")
#: What a page calls a layer: "layer 3", "cross-attention, layer 3", or shorter.
_LABEL = re.compile(r"(?:(encoder|decoder|self|cross|linear)(?:-attention)?,? *)?(?:layer *)?(-?\d+)")
#: How many layers an error lists.
_LISTED = 12


@dataclass(frozen=True)
class Named:
    """A layer, by what its number depends on.

    Attributes
    ----------
    name : str
        Its name in the model.
    kind : str
        "self", "cross" or "linear".
    queries : hashable
        Equal for layers whose queries are the same text.
    """

    name: str
    kind: str
    queries: Hashable = None


@dataclass(frozen=True)
class Label:
    """What a page calls a layer.

    Attributes
    ----------
    section : str
        Which of several kinds of layers: "encoder", "decoder", "self", "cross" or "linear"; empty if there is one kind.
    number : int
        The number of the layer in the model.
    """

    section: str
    number: int

    def __str__(self) -> str:
        return f"{self.section} {self.number}".strip()

    @property
    def text(self) -> str:
        """The heading of a picture."""
        kind = self.section if self.section in ("", "encoder", "decoder") else f"{self.section}-attention"
        return f"{kind}, layer {self.number}" if kind else f"layer {self.number}"


def number_of(name: str) -> int | None:
    """Return the number of a layer in the model, the first one of its name; None without one.

    Examples
    --------
    >>> number_of("model.layers.3.self_attn"), number_of("h.2.attn#4"), number_of("attn")
    (3, 2, None)
    """
    return next((int(part) for part in module_of(name).split(".") if part.isdecimal()), None)


def module_of(layer: str) -> str:
    """Return the name of a layer's module: "name" for "name#3"."""
    name, sign, number = layer.rpartition("#")
    return name if sign and number.isdecimal() else layer


def names_cross_attention(name: str) -> bool:
    """Whether a layer's name says that it is cross-attention."""
    return any(each in name.lower() for each in _CROSS)


def labels_of(layers: Sequence[Named], *, crossed: bool = False) -> list[Label]:
    """Return what a page calls each layer.

    A layer has the number in its name if no other layer of its kind has it; otherwise all layers of the kind are
    counted from 0, in the order in which they run. If there is cross-attention (or ``crossed`` says that there will
    be), self-attention is that of an encoder or of a decoder.

    Examples
    --------
    >>> names = ["layers.3.self_attn", "layers.7.self_attn"], ["stages.0.blocks.0.attn", "stages.0.blocks.1.attn"]
    >>> [[str(label) for label in labels_of([Named(each, "self") for each in found])] for found in names]
    [['3', '7'], ['0', '1']]
    """
    places = _places(layers, crossed=crossed)
    is_alone = len({section for section, _ in places}) < 2
    return [Label("" if is_alone else section, number) for section, number in places]


def _places(layers: Sequence[Named], *, crossed: bool) -> list[tuple[str, int]]:
    """Return the section and the number of each layer."""
    cross = next((each for each in layers if each.kind == "cross"), None)
    is_named = any("decoder" in each.name.lower() for each in layers if each.kind == "self")
    sections = []
    for each in layers:
        section = each.kind
        if each.kind == "self" and (crossed or cross is not None):
            reads = cross is not None and each.queries is not None and each.queries == cross.queries
            section = "decoder" if ("decoder" in each.name.lower() if is_named else reads) else "encoder"
        sections.append(section)
    own = [number_of(each.name) for each in layers]
    twice = Counter(zip(sections, own))
    counted = {section for (section, number), count in twice.items() if number is None or count > 1}
    seen: Counter[str] = Counter()
    found = []
    for section, number in zip(sections, own):
        found.append((section, seen[section] if section in counted or number is None else number))
        seen[section] += 1
    return found


def matching(wanted: int | str, layers: Sequence[Named], *, within: bool = False, crossed: bool = False) -> list[int]:
    """Return the positions of the layers that a number or a name means; several if it is ambiguous, or none.

    A name is that of a layer or its module, a label such as "3" or "cross 3", the name with one more or one less first
    part, or its end; with ``within``, also of a module that contains layers. The first of these that fits counts.
    Negative numbers count from the last layer.
    """
    if isinstance(wanted, int):
        if wanted < 0:
            return [len(layers) + wanted] if -wanted <= len(layers) else []
        return [i for i, each in enumerate(labels_of(layers, crossed=crossed)) if each.number == wanted]
    names = [each.name for each in layers]
    if found := [i for i, name in enumerate(names) if wanted in (name, module_of(name))]:
        return found
    if within and (found := [i for i, name in enumerate(names) if name.startswith(f"{wanted}.")]):
        return found
    if spelled := _LABEL.fullmatch(wanted.strip()):
        section, number = spelled[1], int(spelled[2])
        if number < 0 and section is None:
            return matching(number, layers)
        places = _places(layers, crossed=crossed)
        return [i for i, (own, at) in enumerate(places) if at == number and section in (None, own, layers[i].kind)]
    known = known_name(names, wanted)
    if known != wanted:
        return [i for i, name in enumerate(names) if known in (name, module_of(name))]
    ends = [i for i, name in enumerate(names) if wanted and name.endswith(f".{wanted}")]
    return ends if len(ends) == 1 else []


def may_match(wanted: int | str, at: int, layers: Sequence[Named]) -> bool:
    """Whether a number or a name may mean the layer at a position, when further layers may follow."""
    if isinstance(wanted, str):
        spelled = _LABEL.fullmatch(wanted.strip())
        if spelled is None or at in matching(wanted, layers, within=True):
            return at in matching(wanted, layers, within=True)
        if spelled[1] is not None:
            return True
        wanted = int(spelled[2])
    return wanted < 0 or wanted in (number_of(layers[at].name), at, labels_of(layers)[at].number)


def found_layers(
    function: str, wanted: int | str, layers: Sequence[Named], *, argument: str = "layer", within: bool = False
) -> list[int]:
    """Return the positions of the layer or the layers of a module that a number or a name means.

    Raises
    ------
    TypeError, ValueError
        If it means none, or layers of several modules.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, int | str):
        raise rejected(function, argument, "be a number or a name", repr(wanted), TypeError)
    found = matching(wanted, layers, within=within)
    if not found:
        near = get_close_matches(str(wanted), [each.name for each in layers], n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise rejected(function, argument, f"be the number or the name of {listed(layers)}", f"{wanted!r}{hint}")
    is_number = isinstance(wanted, int) or _LABEL.fullmatch(wanted.strip()) is not None
    if len(found) > 1 and is_number and not any(wanted == module_of(layers[i].name) for i in found):
        raise rejected(function, argument, f"name one of {listed(layers, found)}", repr(wanted))
    return found


def listed(layers: Sequence[Named], some: Sequence[int] | None = None) -> str:
    """Return the numbers and names of layers, or of some of them, for an error message."""
    labels = labels_of(layers)
    parts = [f"{labels[i]} ({layers[i].name})" for i in (range(len(layers)) if some is None else some)]
    if len(parts) > _LISTED:
        parts[_LISTED - 1 : -1] = ["..."]
    return ", ".join(part.removesuffix(" ()") for part in parts)


def known_name(names: Iterable[str], wanted: str) -> str:
    """Return the name of a module that ``wanted`` means, which may have one more or one less first part.

    Examples
    --------
    >>> known_name(["layers", "layers.0", "layers.0.self_attn"], "model.layers.0.self_attn#2")
    'layers.0.self_attn#2'
    >>> known_name(["model.layers.0.self_attn"], "layers.0.self_attn"), known_name(["model.a", "head.a"], "a")
    ('model.layers.0.self_attn', 'a')
    """
    known, module = set(names), module_of(wanted)
    if module not in known and not _LABEL.fullmatch(module.strip()):
        longer = {each for each in known if each.partition(".")[2] == module}
        shorter = {module.partition(".")[2]} & known - {""}
        if len(fit := longer | shorter) == 1:
            return fit.pop() + wanted.removeprefix(module)
    return wanted
