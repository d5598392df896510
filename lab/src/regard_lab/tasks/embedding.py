"""Text embeddings from a model folder.

Dimensions: N texts, B batch, L tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard._utils.errors import unknown_name
from regard_lab.data.batches import length_batches
from regard_lab.models import DecoderLM, EncoderLM
from regard_lab.models.folders import brief, file_error, read_json
from regard_lab.models.heads import Head
from regard_lab.models.hugging_face.hosted import Hosted
from regard_lab.models.pooling import pooled
from regard_lab.tasks.classification.classifiers import input_layout, readable_length
from regard_lab.tasks.folders import check_tokenizer, load_with_tokenizer
from regard_lab.text.inputs import Inputs
from regard_lab.text.tokenizer import Tokenizer

__all__ = ["Embedder", "Pooling"]

#: How to pool a text's hidden states.
POOLINGS = ("mean", "first", "last", "max")
_NOUNS = {"mean": "the mean over all tokens", "first": "the first token", "last": "the last token"}
_NOUNS |= {"max": "the maximum of each feature over all tokens"}
#: Files of a Sentence Transformers folder, and its names for the poolings.
_MODULES, _READING = "modules.json", "sentence_bert_config.json"
_THEIRS = {"mean": "mean", "cls": "first", "lasttoken": "last", "max": "max"}
_FLAGS = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "lasttoken", "max_tokens": "max"}


@dataclass(frozen=True)
class Pooling:
    """How to turn a text's hidden states into its vector.

    Attributes
    ----------
    pooling : {"mean", "first", "last", "max"}
        Over all tokens, special tokens included.
    normalize : bool
        Scale vectors to length 1, so that dot products are cosine similarities.
    length : int or None
        Maximum length in tokens, if the folder sets one; longer texts are truncated.
    """

    pooling: str = "mean"
    normalize: bool = False
    length: int | None = None

    def __str__(self) -> str:
        return f"{_NOUNS[self.pooling]} in the last layer" + (", scaled to length 1" if self.normalize else "")

    @classmethod
    def load(cls, folder: str | Path) -> Self | None:
        """Read the pooling from the ``modules.json`` of a Sentence Transformers folder; None if there is no such file.

        Raises
        ------
        ModelFileError
            If the folder uses a module or setting that is not supported.
        """
        folder = Path(folder)
        path = folder / _MODULES
        if not path.exists():
            return None
        listed = read_json(path)
        steps = [each.get("type") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        kinds = [str(each).rpartition(".")[2] for each in steps]
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
            expected = "list Transformer, Pooling and optionally Normalize (--pooling ignores the other modules)"
            raise file_error(path, expected, brief(kinds))
        reading = read_json(folder / _READING) if (folder / _READING).exists() else {}
        if not isinstance(reading, dict) or reading.get("do_lower_case"):
            expected = "leave lowercasing to the tokenizer (--pooling embeds without lowercasing)"
            raise file_error(folder / _READING, expected, brief(reading))
        length = reading.get("max_seq_length")
        said = folder / "config_sentence_transformers.json"
        prompts = read_json(said) if said.exists() else {}
        if isinstance(prompts, dict) and prompts.get("default_prompt_name"):
            expected = "have no default_prompt_name: put the prompt before each text yourself, and pass --pooling"
            raise file_error(said, expected, brief(prompts["default_prompt_name"]))
        where = folder / Path(str(listed[1].get("path"))).name / "config.json"
        return cls(_stated(where), len(kinds) == 3, length if isinstance(length, int) and length > 0 else None)


def _stated(path: Path) -> str:
    """Return the pooling in a Sentence Transformers pooling config."""
    table = read_json(path)
    given: Any = table.get("pooling_mode") if isinstance(table, dict) else None
    if given is None and isinstance(table, dict):
        flags = [name.removeprefix("pooling_mode_") for name, on in table.items() if on is True]
        named = [_FLAGS.get(name, name) for name in flags if f"pooling_mode_{name}" in table]
        given = named[0] if len(named) == 1 else named
    if not isinstance(given, str) or given not in _THEIRS:
        expected = f"have a pooling of {', '.join(_THEIRS)} (--pooling overrides it)"
        raise file_error(path, expected, brief(given))
    return _THEIRS[given]


class Embedder:
    """Computes a vector for each text by pooling the last layer's hidden states.

    Parameters
    ----------
    model : EncoderLM, DecoderLM or Hosted
        A hosted model is used without its head, an encoder–decoder without its decoder.
    tokenizer : Tokenizer
    how : Pooling, optional
        Mean pooling by default.

    Raises
    ------
    ValueError
        If the tokenizer has more tokens than the model, or the pooling is unknown.

    Examples
    --------
    >>> from regard_lab.models import EncoderLMConfig
    >>> tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "cls", "sep"))
    >>> embedder = Embedder(EncoderLM(EncoderLMConfig(260, width=16, layers=1)).eval(), tokenizer)
    >>> vectors = embedder.vectors(embedder.read(["to be", "or not to be"]))
    >>> vectors.shape, torch.allclose(vectors[:1], embedder.vectors(embedder.read(["to be"])), atol=1e-5)
    (torch.Size([2, 16]), True)
    """

    def __init__(self, model: EncoderLM | DecoderLM | Hosted, tokenizer: Tokenizer, how: Pooling | None = None) -> None:
        self.how = Pooling() if how is None else how
        if self.how.pooling not in POOLINGS:
            raise unknown_name("Embedder", "pooling", self.how.pooling, POOLINGS)
        check_tokenizer(model, tokenizer, "Embedder", "tokenizer")
        self.model, self.tokenizer = model, tokenizer
        self.length = readable_length(model, self.how.length or tokenizer.max_length or model.config.max_length)
        self._layout = input_layout(model, tokenizer)

    @classmethod
    def load(
        cls, folder: str | Path, *, pooling: str | None = None, normalize: bool | None = None, function: str = "load"
    ) -> Self:
        """Load the model and tokenizer from a regard or Hugging Face folder.

        Parameters
        ----------
        folder : str or Path
        pooling : {"mean", "first", "last", "max"}, optional
            Overrides the folder's Sentence Transformers settings. By default these, or the mean without them.
        normalize : bool, optional
            Scale vectors to length 1. By default the folder's setting, or False without one.
        function : str
            Prefix of error messages.

        Raises
        ------
        ModelFileError, ValueError
            If there is no such model, its files are damaged, or it uses a feature that is not supported.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise unknown_name(function, "pooling", pooling, POOLINGS)
        kinds: tuple[type[Any], ...] = (EncoderLM, DecoderLM, Hosted, Head)
        model, tokenizer = load_with_tokenizer(folder, kinds, "a model of text", function, torch.float32)
        how = (Pooling.load(folder) if pooling is None else Pooling(pooling)) or Pooling()
        how = how if normalize is None else replace(how, normalize=normalize)
        return cls(model.model if isinstance(model, Head) else model, tokenizer, how)

    def read(self, texts: Sequence[str]) -> Inputs:
        """Tokenize texts; the result's ``cut`` lists the truncated ones."""
        return self._layout.read(self.tokenizer, texts, length=self.length)

    @torch.no_grad()
    def vectors(self, inputs: Inputs, *, batch: int = 128) -> Tensor:
        """Return the vectors (N, E) of texts, on the CPU; they do not depend on the batch size.

        Parameters
        ----------
        inputs : Inputs
            From :meth:`read`.
        batch : int, default 128
            Batch size, in texts.
        """
        device = next(self.model.parameters()).device
        made: list[Tensor | None] = [None] * len(inputs)
        for rows in length_batches(inputs.tokens.lengths.tolist(), batch, alike=isinstance(self.model, Hosted)):
            numbers, lengths = inputs.tokens.padded(np.array(rows))
            mask = (torch.arange(numbers.shape[1]) < lengths[:, None]).to(device)
            vectors = pooled(self.how.pooling, self._rows(numbers.to(device), mask).float(), mask)
            vectors = F.normalize(vectors, dim=-1) if self.how.normalize else vectors
            for row, vector in zip(rows, vectors.cpu()):
                made[row] = vector
        return torch.stack([each for each in made if each is not None]) if made else torch.empty(0, 0)

    def _rows(self, numbers: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the hidden states (B, L, E) of tokens (B, L) with padding on the right."""
        mask = None if bool(attention_mask.all()) else attention_mask
        if isinstance(self.model, Hosted):
            return self.model.rows(numbers, mask)
        if isinstance(self.model, EncoderLM):
            return self.model(numbers, attention_mask=mask)
        return self.model.features(numbers)  # causal attention never sees padding on the right
