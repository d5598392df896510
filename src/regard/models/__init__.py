"""Models, one file each, that read from top to bottom; every one of them attends through :func:`regard.attention`."""

from regard.models.base import EncoderDecoder
from regard.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard.models.heads import PairClassifier, SequenceClassifier, TokenClassifier
from regard.models.language_folders import load, save
from regard.models.recurrent import RecurrentConfig, RecurrentEncoderDecoder
from regard.models.transformer import TransformerConfig, TransformerEncoderDecoder

__all__ = [
    "DecoderLM",
    "DecoderLMConfig",
    "EncoderDecoder",
    "EncoderLM",
    "EncoderLMConfig",
    "PairClassifier",
    "RecurrentConfig",
    "RecurrentEncoderDecoder",
    "SequenceClassifier",
    "TokenClassifier",
    "TransformerConfig",
    "TransformerEncoderDecoder",
    "load",
    "save",
]
