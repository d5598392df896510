"""Captions of images: encoders, options, training, metrics, trained captioners, and pictures of their attention."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.tasks.captioning.captioner import Captioner, is_captioner
    from regard_lab.tasks.captioning.encoders import (
        EFFICIENTNETS,
        ConvolutionalEncoder,
        EfficientNetEncoder,
        Features,
        HuggingFaceEncoder,
        ImageEncoder,
        build_encoder,
        efficientnet_file,
        open_encoder,
        write_features,
    )
    from regard_lab.tasks.captioning.metrics import (
        CaptionReward,
        CiderD,
        bleu_scores,
        caption_scores,
        caption_words,
        cider_d,
        rouge_l,
    )
    from regard_lab.tasks.captioning.options import (
        CaptionDataOptions,
        CaptionOptions,
        CaptionRewardOptions,
        CaptionTrainingOptions,
        CaptionVocabularyOptions,
    )
    from regard_lab.tasks.captioning.pictures import CaptionAttention, save_captions, word_weights
    from regard_lab.tasks.captioning.training import Captioning, PolicyGradientObjective, draw_targets
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.tasks.captioning.captioner": "Captioner is_captioner",
            "regard_lab.tasks.captioning.encoders": (
                "EFFICIENTNETS ConvolutionalEncoder EfficientNetEncoder Features HuggingFaceEncoder "
                "ImageEncoder build_encoder efficientnet_file open_encoder write_features"
            ),
            "regard_lab.tasks.captioning.metrics": (
                "CaptionReward CiderD bleu_scores caption_scores caption_words cider_d rouge_l"
            ),
            "regard_lab.tasks.captioning.options": (
                "CaptionDataOptions CaptionOptions CaptionRewardOptions CaptionTrainingOptions CaptionVocabularyOptions"
            ),
            "regard_lab.tasks.captioning.pictures": "CaptionAttention save_captions word_weights",
            "regard_lab.tasks.captioning.training": "Captioning PolicyGradientObjective draw_targets",
        },
    )

__all__ = [
    "EFFICIENTNETS",
    "CaptionAttention",
    "CaptionDataOptions",
    "CaptionOptions",
    "CaptionReward",
    "CaptionRewardOptions",
    "CaptionTrainingOptions",
    "CaptionVocabularyOptions",
    "Captioner",
    "Captioning",
    "CiderD",
    "ConvolutionalEncoder",
    "EfficientNetEncoder",
    "Features",
    "HuggingFaceEncoder",
    "ImageEncoder",
    "PolicyGradientObjective",
    "bleu_scores",
    "build_encoder",
    "caption_scores",
    "caption_words",
    "cider_d",
    "draw_targets",
    "efficientnet_file",
    "is_captioner",
    "open_encoder",
    "rouge_l",
    "save_captions",
    "word_weights",
    "write_features",
]
