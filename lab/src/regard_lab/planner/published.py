"""Parameter counts of large models compared with published counts, and the reasons for differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from regard._utils.mechanism import references
from regard_lab.models.decoder_lm import DecoderLMConfig
from regard_lab.models.encoder_lm import EncoderLMConfig
from regard_lab.models.language_blocks import LanguageConfig
from regard_lab.models.transformer import TransformerConfig
from regard_lab.planner.counts import parameters_by_part
from regard_lab.planner.shapes import Shape, Weight, linear, shape_of

#: Tokens of the shared vocabulary of Vaswani 2017, which says "about".
_VASWANI = 37_000
#: Papers with the planner's formulas.
METHODS = (
    "kaplan2020", "hoffmann2022", "korthikanti2022", "rajbhandari2019", "narayanan2021", "shoeybi2019", "liu2023",
)  # fmt: skip

Config = DecoderLMConfig | EncoderLMConfig | TransformerConfig


@dataclass(frozen=True)
class Published:
    """A model of the table.

    Attributes
    ----------
    name, title : str
        For a command line, and for readers.
    make : callable
        ``make()`` returns its config, or its shape where no config here describes it.
    printed : str
        The count as it was published.
    count : float
        The same as a number.
    source : str
        A key of the bibliography.
    explain : callable
        ``explain(shape)`` returns why our count is another.
    """

    name: str
    title: str
    make: Callable[[], Config | Shape]
    printed: str
    count: float
    source: str
    explain: Callable[[Shape], str]

    def shape(self) -> Shape:
        """Return the model's shape."""
        made = self.make()
        return replace(made, name=self.name) if isinstance(made, Shape) else shape_of(made, self.name)


def decoder(name: str) -> Callable[[], Config]:
    """Return what makes the config of a preset."""
    return lambda: DecoderLMConfig.preset(name)


def encoder(name: str) -> Callable[[], Config]:
    """Return what makes the config of a preset."""
    return lambda: EncoderLMConfig.preset(name)


def transformer(name: str) -> Callable[[], Config]:
    """Return what makes the config of a preset, of one vocabulary as large as the paper's."""
    return lambda: TransformerConfig.preset(name, _VASWANI, _VASWANI, tied="all")


def xlnet() -> Shape:
    """Return the shape of XLNet-Large: BERT's, with relative positions and without learned ones (Yang 2019).

    A layer also projects relative positions with a matrix of E², and has three biases (of content, position and
    segment) and two rows of segments for each head, of E numbers each. Both streams have the same parameters.
    """
    bert = shape_of(EncoderLMConfig.preset("bert-large"))
    E, N = bert.width, 32_000
    layer = bert.stacks[0].layer
    F = layer.hidden
    weights = [each for _ in range(5) for each in linear("attention", E, E, False)]  # queries, keys, values, positions
    weights += [Weight("attention", (E,)) for _ in range(5)]
    weights += [*linear("feed-forward", E, F, True), *linear("feed-forward", F, E, True)]
    weights += [Weight("norms", (2, E))] * 2
    rest = (
        Weight("embeddings", (N, E)), Weight("embeddings", (E,)), Weight("head", (N, E), "tokens", stored=False),
        Weight("head", (N,)),
    )  # fmt: skip
    stack = replace(bert.stacks[0], layer=replace(layer, weights=tuple(weights)))
    return Shape("xlnet-large", E, N, 512, (stack,), rest)


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f}M"


def _base(shape: Shape) -> str:
    inside = sum(stack.parameters for stack in shape.stacks)
    rows = (65e6 - inside) / shape.width
    return (
        f"the layers have {_millions(inside)}, so 65M leaves {rows:,.0f} rows of embeddings; the paper says about "
        f"{_VASWANI:,}, and does not say what else it counts"
    )


def _big(shape: Shape) -> str:
    rows = (213e6 - sum(stack.parameters for stack in shape.stacks)) / shape.width
    return f"213M leaves {rows:,.0f} rows of embeddings; the paper says about {_VASWANI:,}"


def _bert(shape: Shape) -> str:
    head = parameters_by_part(shape)["head"]
    return f"rounded; the pooler and what makes logits are {_millions(head)} of ours"


def _roberta(shape: Shape) -> str:
    pooler = shape.width * (shape.width + 1)
    return f"rounded; with BERT's pooler, which it does not train, there are {_millions(pooler)} more"


def _xlnet(shape: Shape) -> str:
    relative = sum(stack.depth for stack in shape.stacks) * shape.width**2
    return (
        f"the paper gives no count and calls the size similar to BERT-Large's; {_millions(relative)} of ours project "
        "relative positions, which BERT does not"
    )


def _gpt2(shape: Shape) -> str:
    ours = _millions(shape.parameters)
    return f"cut to two digits; the paper's table says 1,542M, and the released checkpoint, called 1558M, has {ours}"


def _megatron(shape: Shape) -> str:
    more = (51_200 - shape.vocabulary) * shape.width
    return f"rounded; a vocabulary padded to 51,200 rows adds {_millions(more)}"


def _turing(shape: Shape) -> str:
    table = shape.vocabulary * shape.width
    return f"rounded; the vocabulary was not published, and GPT-2's is {_millions(table)} of ours"


def _gpt3(shape: Shape) -> str:
    return f"rounded; all but {_millions(parameters_by_part(shape)['embeddings'])} are in the layers"


#: Rows: name, title, function that builds it, the count as printed and as a number, the source, and the difference.
_ROWS: tuple[tuple[str, str, Callable[[], Config | Shape], str, float, str, Callable[[Shape], str]], ...] = (
    ("transformer-base", "Transformer-Base", transformer("vaswani2017-base"), "65M", 65e6, "vaswani2017", _base),
    ("transformer-big", "Transformer-Big", transformer("vaswani2017-big"), "213M", 213e6, "vaswani2017", _big),
    ("bert-base", "BERT-Base", encoder("bert-base"), "110M", 110e6, "devlin2018", _bert),
    ("bert-large", "BERT-Large", encoder("bert-large"), "340M", 340e6, "devlin2018", _bert),
    ("xlnet-large", "XLNet-Large", xlnet, "~340M", 340e6, "yang2019", _xlnet),
    ("roberta-large", "RoBERTa-Large", encoder("roberta-large"), "355M", 355e6, "liu2019", _roberta),
    ("gpt2-xl", "GPT-2", decoder("gpt2-xl"), "1.5B", 1.5e9, "radford2019", _gpt2),
    ("megatron-lm", "Megatron-LM", decoder("megatron-lm"), "8.3B", 8.3e9, "shoeybi2019", _megatron),
    ("turing-nlg", "Turing-NLG", decoder("turing-nlg"), "17B", 17e9, "rosset2020", _turing),
    ("gpt3", "GPT-3", decoder("gpt3"), "175B", 175e9, "brown2020", _gpt3),
)
PUBLISHED: dict[str, Published] = {row[0]: Published(*row) for row in _ROWS}


def find_config(name: str) -> Config | Shape | None:
    """Return the config of a model by its name, or its shape where no config describes it; None for others."""
    if name in PUBLISHED:
        return PUBLISHED[name].make()
    for kind in (DecoderLMConfig, EncoderLMConfig):
        if name in kind.presets():
            return kind.preset(name)
    return None


def model_names() -> list[str]:
    """Return the names of all models that the planner knows, those of the table first.

    Where a decoder and an encoder have one name, it is the decoder's.
    """
    kinds: tuple[type[LanguageConfig], ...] = (DecoderLMConfig, EncoderLMConfig)
    return list(dict.fromkeys([*PUBLISHED, *(name for kind in kinds for name in kind.presets())]))


def published_rows() -> list[dict[str, object]]:
    """Return the table: of every model layers, width, heads, both counts, their ratio, the source, the difference.

    Examples
    --------
    >>> rows = published_rows()
    >>> rows[-1]["name"], rows[-1]["published"], rows[-1]["counted"]
    ('gpt3', '175B', 174604259328)
    """
    rows: list[dict[str, object]] = []
    for each in PUBLISHED.values():
        shape, source = each.shape(), references()[each.source]
        rows.append(
            {
                "name": each.name,
                "title": each.title,
                "layers": shape.depth,
                "width": shape.width,
                "heads": shape.stacks[0].layer.attentions[0].heads,
                "published": each.printed,
                "counted": shape.parameters,
                "ratio": shape.parameters / each.count,
                "source": source.short,
                "url": source.url or source.fields.get("url", ""),
                "difference": each.explain(shape),
            }
        )
    return rows
