"""Models, one file each, that read from top to bottom; every one of them attends through :func:`regard.attention`."""

from regard_lab.models.base import EncoderDecoder
from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard_lab.models.heads import PairClassifier, SequenceClassifier, TokenClassifier
from regard_lab.models.image_classifier import ImageClassifier
from regard_lab.models.recurrent import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.models.resnet import ResNet, ResNetConfig
from regard_lab.models.stored_models import load, save
from regard_lab.models.transformer import TransformerConfig, TransformerEncoderDecoder
from regard_lab.models.vision_transformer import VisionTransformer, VisionTransformerConfig

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
