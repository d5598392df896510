"""Folders of a language model with its tokenizer: read together, and only where they fit."""

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
    """Return the model and the tokenizer of a folder, of a run of ours or of Hugging Face.

    Parameters
    ----------
    folder : str or Path
    kind : type, or tuple of types
        What the model must be.
    what : str
        What an error calls that.
    function : str
        Who asks.
    dtype : torch.dtype, optional
        Of the parameters; that of the files by default.
    loaded : Module, optional
        The model in the folder, where that was loaded before.

    Raises
    ------
    ModelFileError, ValueError
        If there is no such model, its files are damaged, it is another, or its tokenizer has more tokens than it.
    """
    model = load(folder, dtype=dtype) if loaded is None else loaded
    if not isinstance(model, kind):
        raise rejected(function, "model", f"be the folder of {what}", f"{type(model).__name__} in {folder}")
    tokenizer = Tokenizer.load(folder)
    trunk = model.model if isinstance(model, Head) else model
    check_tokenizer(trunk, tokenizer, function, str(folder))
    return model, tokenizer


def check_tokenizer(model: EncoderLM | DecoderLM | Hosted, tokenizer: Tokenizer, function: str, argument: str) -> None:
    """Raise where a tokenizer has tokens that a model knows nothing of."""
    if model.config.vocabulary < len(tokenizer):
        expected = f"have a tokenizer of at most {model.config.vocabulary:,} tokens, as its model"
        raise rejected(function, argument, expected, f"{len(tokenizer):,}")
