"""``regard evaluate language-model``: perplexity and bits per byte of a causal or masked language model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from regard._utils.errors import rejected
from regard_cli.messages import note
from regard_lab.cli.kinds import require_kind
from regard_lab.data.documents import read_documents
from regard_lab.models import DecoderLM, EncoderLM, load
from regard_lab.models.hugging_face.hosted import HostedMaskedLM, HostedWriter
from regard_lab.tasks.folders import check_tokenizer
from regard_lab.tasks.language.evaluation import score_text
from regard_lab.text.tokenizer import Tokenizer


def evaluate(
    data: str, folder: Path, *, per: str, length: int | None, stride: int | None, batch: int, precision: str
) -> dict[str, Any]:
    """Return the scores of the language model in a folder on the documents of a file or folder."""
    began = time.monotonic()
    require_kind("evaluate", folder, "language model", "masked language model")
    model = load(folder, dtype=torch.float32)
    if not isinstance(model, DecoderLM | EncoderLM | HostedWriter | HostedMaskedLM):
        raise rejected("evaluate", "model", "be a language model", f"{type(model).__name__} in {folder}")
    tokenizer = Tokenizer.load(folder)
    check_tokenizer(model, tokenizer, "evaluate", str(folder))
    scores = score_text(
        model, tokenizer, read_documents(data, per=per, function="evaluate"), length=length, stride=stride,
        batch=batch, precision=precision, function="evaluate",
    )  # fmt: skip
    if scores.unknown:
        note(f"regard: {scores.unknown}")
    return scores.report() | {"seconds": round(time.monotonic() - began, 2)}
