"""Models, one file each, that read from top to bottom; every one of them attends through :func:`regard.attention`."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.models.base import END, PAD, EncoderDecoder
    from regard_lab.models.captioner import (
        RecurrentCaptioner,
        RecurrentCaptionerConfig,
        TransformerCaptioner,
        TransformerCaptionerConfig,
    )
    from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
    from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
    from regard_lab.models.folders import ModelFileError, NotMappedError
    from regard_lab.models.heads import PairClassifier, SequenceClassifier, TokenClassifier
    from regard_lab.models.image_classifier import ImageClassifier
    from regard_lab.models.lora import LoRALinear, add_lora, merge_lora
    from regard_lab.models.recurrent import RecurrentConfig, RecurrentEncoderDecoder
    from regard_lab.models.resnet import ResidualBlock, ResNet, ResNetConfig
    from regard_lab.models.stored_models import load, save
    from regard_lab.models.transformer import TransformerConfig, TransformerEncoderDecoder
    from regard_lab.models.vision_transformer import VisionTransformer, VisionTransformerConfig
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.models.base": "END PAD EncoderDecoder",
            "regard_lab.models.captioner": (
                "RecurrentCaptioner RecurrentCaptionerConfig TransformerCaptioner TransformerCaptionerConfig"
            ),
            "regard_lab.models.decoder_lm": "DecoderLM DecoderLMConfig",
            "regard_lab.models.encoder_lm": "EncoderLM EncoderLMConfig",
            "regard_lab.models.folders": "ModelFileError NotMappedError",
            "regard_lab.models.heads": "PairClassifier SequenceClassifier TokenClassifier",
            "regard_lab.models.image_classifier": "ImageClassifier",
            "regard_lab.models.lora": "LoRALinear add_lora merge_lora",
            "regard_lab.models.recurrent": "RecurrentConfig RecurrentEncoderDecoder",
            "regard_lab.models.resnet": "ResNet ResNetConfig ResidualBlock",
            "regard_lab.models.stored_models": "load save",
            "regard_lab.models.transformer": "TransformerConfig TransformerEncoderDecoder",
            "regard_lab.models.vision_transformer": "VisionTransformer VisionTransformerConfig",
        },
    )

__all__ = [
    "END",
    "PAD",
    "DecoderLM",
    "DecoderLMConfig",
    "EncoderDecoder",
    "EncoderLM",
    "EncoderLMConfig",
    "ImageClassifier",
    "LoRALinear",
    "ModelFileError",
    "NotMappedError",
    "PairClassifier",
    "RecurrentCaptioner",
    "RecurrentCaptionerConfig",
    "RecurrentConfig",
    "RecurrentEncoderDecoder",
    "ResNet",
    "ResNetConfig",
    "ResidualBlock",
    "SequenceClassifier",
    "TokenClassifier",
    "TransformerCaptioner",
    "TransformerCaptionerConfig",
    "TransformerConfig",
    "TransformerEncoderDecoder",
    "VisionTransformer",
    "VisionTransformerConfig",
    "add_lora",
    "load",
    "merge_lora",
    "save",
]
