"""Alignment of words with those of their translations: links, aligners, guided attention, and links from attention."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.tasks.translation.alignment.attention import (
        attention_links,
        best_map,
        predicted_attention,
        strongest_links,
        symmetrize_attention,
        word_attention,
    )
    from regard_lab.tasks.translation.alignment.guidance import Guidance, Guide, Side
    from regard_lab.tasks.translation.alignment.links import (
        Agreement,
        Gold,
        Link,
        Links,
        align_words,
        eflomal,
        format_links,
        lexical,
        lowercase,
        merge_pieces,
        parse_links,
        read_links,
        read_pair_links,
        symmetrize,
    )
    from regard_lab.tasks.translation.alignment.maps import alignment, alignments, merge, record, select_map
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.tasks.translation.alignment.attention": (
                "attention_links best_map predicted_attention strongest_links symmetrize_attention word_attention"
            ),
            "regard_lab.tasks.translation.alignment.guidance": "Guidance Guide Side",
            "regard_lab.tasks.translation.alignment.links": (
                "Agreement Gold Link Links align_words eflomal format_links lexical lowercase "
                "merge_pieces parse_links read_links read_pair_links symmetrize"
            ),
            "regard_lab.tasks.translation.alignment.maps": "alignment alignments merge record select_map",
        },
    )

__all__ = [
    "Agreement",
    "Gold",
    "Guidance",
    "Guide",
    "Link",
    "Links",
    "Side",
    "align_words",
    "alignment",
    "alignments",
    "attention_links",
    "best_map",
    "eflomal",
    "format_links",
    "lexical",
    "lowercase",
    "merge",
    "merge_pieces",
    "parse_links",
    "predicted_attention",
    "read_links",
    "read_pair_links",
    "record",
    "select_map",
    "strongest_links",
    "symmetrize",
    "symmetrize_attention",
    "word_attention",
]
