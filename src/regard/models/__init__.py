"""Models, one file each, that read from top to bottom; every one of them attends through :func:`regard.attention`."""

from regard.models.base import EncoderDecoder
from regard.models.recurrent import RecurrentConfig, RecurrentEncoderDecoder
from regard.models.transformer import TransformerConfig, TransformerEncoderDecoder

__all__ = [
    "EncoderDecoder",
    "RecurrentConfig",
    "RecurrentEncoderDecoder",
    "TransformerConfig",
    "TransformerEncoderDecoder",
]
