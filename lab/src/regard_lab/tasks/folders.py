"""Loading a language model together with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from regard._utils.errors import rejected
from regard_lab.models import DecoderLM, EncoderLM, load
from regard_lab.models.heads import Head
from regard_lab.models.hugging_face.hosted import Hosted
from regard_lab.text.tokenizer import Tokenizer

_M = TypeVar("_M", bound=EncoderLM | DecoderLM | Head | Hosted)


def load_with_tokenizer(
    folder: str | Path,
    kind: type[_M] | tuple[type[_M], ...],
    what: str,
    function: str,
    dtype: torch.dtype | None = None,
    loaded: nn.Module | None = None,
) -> tuple[_M, Tokenizer]:
    """Load the model and tokenizer from a regard or Hugging Face folder.

    Parameters
    ----------
    folder : str or Path
    kind : type, or tuple of types
        The expected type of the model.
    what : str
        Description of that type for error messages.
    function : str
        Prefix of error messages.
    dtype : torch.dtype, optional
        Dtype of the parameters; as stored by default.
    loaded : Module, optional
        The model in the folder, if it is already loaded.

    Raises
    ------
    ModelFileError, ValueError
        If there is no such model, its files are damaged, it has another type, or the tokenizer has more tokens than
        the model.
    """
    model = load(folder, dtype=dtype) if loaded is None else loaded
    if not isinstance(model, kind):
        raise rejected(function, "model", f"be the folder of {what}", f"{type(model).__name__} in {folder}")
    tokenizer = Tokenizer.load(folder)
    trunk = model.model if isinstance(model, Head) else model
    check_tokenizer(trunk, tokenizer, function, str(folder))
    return model, tokenizer


def check_tokenizer(model: EncoderLM | DecoderLM | Hosted, tokenizer: Tokenizer, function: str, argument: str) -> None:
    """Raise if a tokenizer has more tokens than a model."""
    if model.config.vocabulary < len(tokenizer):
        expected = f"have a tokenizer of at most {model.config.vocabulary:,} tokens, the model's vocabulary size"
        raise rejected(function, argument, expected, f"{len(tokenizer):,}")
