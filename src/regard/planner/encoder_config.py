"""The sizes of encoder-only language models, as far as the planner counts them.

``regard.models.EncoderLMConfig`` takes this class's place, field by field, once there is one: then this file goes, and
:mod:`regard.planner.shapes` and :mod:`regard.planner.published` import that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard._schema import option
from regard.models.language_config import LanguageConfig


@dataclass(frozen=True)
class EncoderLMConfig(LanguageConfig):
    """Sizes of a stack of blocks in which every token sees those on both sides (Devlin 2018, arXiv 1810.04805)."""

    function = "EncoderLMConfig"
    norm_first: bool = option(False, "whether what enters a block is normalized, or each sum")
    segments: int = option(2, "kinds of segments that a token may belong to; 0 for none", least=0, most=1 << 16)
    #: Lan 2019, arXiv 1909.11942, as the next.
    embedding_width: int | None = option(
        None, "width W of the embeddings, which are projected to E; E by default", kind=int, least=1, most=1 << 16
    )
    shared: bool = option(False, "whether all layers have the parameters of one")
    pooled: bool = option(True, "whether the first row goes through another layer, for what is asked of a sequence")
    masked_head: bool = option(True, "whether there is a head that scores the vocabulary")
    #: Liu 2019, arXiv 1907.11692.
    first_position: int = option(0, "row of the first position among learned ones", least=0, most=1 << 16)

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        return PRESETS

    @property
    def embedded(self) -> int:
        """Width W of the embeddings."""
        return self.width if self.embedding_width is None else self.embedding_width


_BERT: dict[str, Any] = {"vocabulary": 30522, "longest": 512, "dropout": 0.1, "attention_dropout": 0.1}
_ROBERTA = _BERT | {"vocabulary": 50265, "segments": 1, "first_position": 2, "pooled": False}
#: Settings by name; those of papers have the papers' sizes.
PRESETS: dict[str, dict[str, Any]] = {
    "bert-base": _BERT | {"width": 768, "layers": 12, "heads": 12},
    "bert-large": _BERT | {"width": 1024, "layers": 24, "heads": 16},
    "roberta-base": _ROBERTA | {"width": 768, "layers": 12, "heads": 12},
    "roberta-large": _ROBERTA | {"width": 1024, "layers": 24, "heads": 16},
}
