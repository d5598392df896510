"""The models by name: what options, folders and the command line call them."""

from __future__ import annotations

from typing import Any

from regard_lab.models.recurrent import RecurrentConfig, RecurrentEncoderDecoder
from regard_lab.models.transformer import TransformerConfig, TransformerEncoderDecoder

#: Models with their configs.
MODELS: dict[str, tuple[type[Any], type[Any]]] = {
    "recurrent": (RecurrentConfig, RecurrentEncoderDecoder),
    "transformer": (TransformerConfig, TransformerEncoderDecoder),
}
