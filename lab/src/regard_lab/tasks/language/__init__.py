"""Language models: pretrained on text, evaluated, and put to writing and to filling masks."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.tasks.language.evaluation import TextScores, score_text
    from regard_lab.tasks.language.mask_filler import Candidate, FilledText, MaskFiller
    from regard_lab.tasks.language.options import (
        LanguageOptions,
        LanguageTrainingOptions,
        SkipGramOptions,
        TextOptions,
        TokenizerOptions,
    )
    from regard_lab.tasks.language.pretraining import VALID, MaskedTokens, NextTokens, Pretraining, token_vectors
    from regard_lab.tasks.language.text_generator import GeneratedText, TextGenerator, earlier_tokens
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.tasks.language.evaluation": "TextScores score_text",
            "regard_lab.tasks.language.mask_filler": "Candidate FilledText MaskFiller",
            "regard_lab.tasks.language.options": (
                "LanguageOptions LanguageTrainingOptions SkipGramOptions TextOptions TokenizerOptions"
            ),
            "regard_lab.tasks.language.pretraining": "VALID MaskedTokens NextTokens Pretraining token_vectors",
            "regard_lab.tasks.language.text_generator": "GeneratedText TextGenerator earlier_tokens",
        },
    )

__all__ = [
    "VALID",
    "Candidate",
    "FilledText",
    "GeneratedText",
    "LanguageOptions",
    "LanguageTrainingOptions",
    "MaskFiller",
    "MaskedTokens",
    "NextTokens",
    "Pretraining",
    "SkipGramOptions",
    "TextGenerator",
    "TextOptions",
    "TextScores",
    "TokenizerOptions",
    "earlier_tokens",
    "score_text",
    "token_vectors",
]
