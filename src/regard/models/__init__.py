"""Models, one file each, that read from top to bottom; every one of them attends through :func:`regard.attention`."""

from regard.models.base import EncoderDecoder
from regard.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard.models.heads import PairClassifier, SequenceClassifier, TokenClassifier
from regard.models.image_classifier import ImageClassifier
from regard.models.recurrent import RecurrentConfig, RecurrentEncoderDecoder
from regard.models.resnet import ResNet, ResNetConfig
from regard.models.stored_models import load, save
from regard.models.transformer import TransformerConfig, TransformerEncoderDecoder
from regard.models.vision_transformer import VisionTransformer, VisionTransformerConfig

__all__ = [
    "DecoderLM",
    "DecoderLMConfig",
    "EncoderDecoder",
    "EncoderLM",
    "EncoderLMConfig",
    "ImageClassifier",
    "PairClassifier",
    "RecurrentConfig",
    "RecurrentEncoderDecoder",
    "ResNet",
    "ResNetConfig",
    "SequenceClassifier",
    "TokenClassifier",
    "TransformerConfig",
    "TransformerEncoderDecoder",
    "VisionTransformer",
    "VisionTransformerConfig",
    "load",
    "save",
]
