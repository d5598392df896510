"""Skip-gram: which tokens are alike, what its gradient is, and that a run begins with its vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from regard_lab.data.packing import TokenShards
from regard_lab.models import EncoderLM, load
from regard_lab.tasks.language.options import LanguageOptions, SkipGramOptions
from regard_lab.tasks.language.pretraining import SCALE, Pretraining, token_vectors
from regard_lab.text.tokenizer import Tokenizer


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.mark.slow
def test_tokens_with_the_same_neighbours_are_alike() -> None:
    drawn = np.random.default_rng(0)
    # Tokens 0 and 1 stand between 4 and 5, tokens 2 and 3 between 6 and 7; token 8 is a mark, token 9 is not there.
    documents = [[4, int(drawn.integers(2)), 5, 8] for _ in range(2000)]
    documents += [[6, 2 + int(drawn.integers(2)), 7, 8] for _ in range(2000)]
    options = SkipGramOptions(epochs=5, window=2, sample=0.0)
    vectors = token_vectors(TokenShards.of(documents, 10), 16, options, skip=(8,), say=quiet)
    assert vectors.shape == (10, 16) and vectors.dtype == torch.float32 and bool(vectors.isfinite().all())
    unit = torch.nn.functional.normalize(vectors[:4], dim=1)
    near = unit @ unit.t()
    assert near[0, 1] > 0.9 > 0.3 > near[0, 2] and near[2, 3] > 0.9 > 0.3 > near[1, 3]
    assert vectors[:8].square().mean().sqrt() == pytest.approx(SCALE, rel=1e-5)
    assert vectors[9].abs().max() < vectors[0].abs().max()


def test_documents_text_and_seed_settle_it() -> None:
    drawn = np.random.default_rng(1)
    shards = TokenShards.of([drawn.integers(0, 20, 30).tolist() for _ in range(50)], 20)
    said: list[str] = []
    options = SkipGramOptions(epochs=2, sample=0.0)
    first = token_vectors(shards, 8, options, seed=3, say=said.append)
    assert torch.equal(first, token_vectors(shards, 8, options, seed=3, say=quiet))
    assert not torch.equal(first, token_vectors(shards, 8, options, seed=4, say=quiet))
    assert [line.split(":")[0] for line in said] == ["token vectors, pass 1 of 2", "token vectors, pass 2 of 2"]
    # Documents of one token have no neighbours, so nothing is learned but its size.
    alone = token_vectors(TokenShards.of([[i % 20] for i in range(50)], 20), 8, options, seed=3, say=quiet)
    start = (np.random.default_rng(3).random((20, 8), np.float32) - 0.5) / 8
    torch.testing.assert_close(alone, torch.from_numpy(start) * (SCALE / float(np.sqrt((start**2).mean()))))


def test_a_run_begins_with_them(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\nthe dog sat on the rug\n" * 40, encoding="utf-8")
    table = {
        "data": {"data": [str(text)], "per": "line", "length": 16},
        "tokenizer": {"size": 280},
        "masked": True,
        "skip_gram": {"epochs": 2},
        "model": {"width": 16, "layers": 1, "heads": 2},
        "training": {"steps": 1, "batch_tokens": 64, "learning_rate": 1e-9},
    }
    said: list[str] = []
    Pretraining(LanguageOptions.from_table(table), tmp_path / "run", said.append).train()
    made = load(tmp_path / "run")
    assert isinstance(made, EncoderLM)
    assert sum("token vectors" in line for line in said) == 2
    shards = TokenShards.open(tmp_path / "run/tokens/learn")
    marks = sorted(set(Tokenizer.load(tmp_path / "run").roles().values()))
    again = token_vectors(shards, 16, SkipGramOptions(epochs=2), skip=tuple(marks), say=quiet)
    first = marks[0]  # they are numbered behind all others
    torch.testing.assert_close(made.embedding.weight.detach()[:first], again[:first], rtol=1e-5, atol=1e-6)


def test_options_without_an_effect() -> None:
    with pytest.raises(ValueError, match="window must be left out without epochs"):
        SkipGramOptions(window=3)
    fsdp = {"skip_gram": {"epochs": 1}, "training": {"strategy": "fsdp", "devices": 2}}
    with pytest.raises(ValueError, match=r"skip_gram\.epochs must be 0 where processes divide the model, got 1"):
        LanguageOptions.from_table(fsdp)
    with pytest.raises(ValueError, match=r"skip_gram\.epochs must be left out with start"):
        LanguageOptions.from_table({"skip_gram": {"epochs": 1}, "start": "folder"})
