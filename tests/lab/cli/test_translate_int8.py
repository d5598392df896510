"""``regard translate --int8``, and weights that are laid out for the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import recurrent

from regard_lab.generation.quantization import quantize
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import TransformerConfig, TransformerEncoderDecoder
from regard_lab.models.base import END
from regard_lab.text.vocabulary import SymbolVocabulary

TEXTS = ["abc", "cab", "bbbb"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Transformer that has learned nothing, in a folder."""
    vocabulary = SymbolVocabulary.train(["abcdefgh"])
    N = len(vocabulary)
    torch.manual_seed(0)
    config = TransformerConfig(N, N, width=32, heads=4, feedforward=64, encoder_layers=1, decoder_layers=1)
    model = TransformerEncoderDecoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.output.bias.data[END] = -9.0
    SequenceModel(model, vocabulary, vocabulary).save(tmp_path / "model")
    return tmp_path / "model"


def test_it_writes_what_the_quantized_model_does(regard, folder: Path) -> None:
    loaded = SequenceModel.load(folder)
    written = [each.text for each in loaded.predict(TEXTS)]
    narrow = SequenceModel(quantize(loaded.model), loaded.source, loaded.target)
    assert all(written)
    assert regard("translate", "--model", folder, *TEXTS).out.splitlines() == written
    expected = [each.text for each in narrow.predict(TEXTS)]
    assert regard("translate", "--model", folder, "--int8", *TEXTS).out.splitlines() == expected
    assert [each.text for each in loaded.predict(TEXTS)] == written, "the model is as it was"


def test_alignments_are_told_in_int8_too(regard, folder: Path) -> None:
    for arguments in (["abc"], ["abc", "--given", "cab"]):
        result = regard("translate", "--model", folder, "--int8", "--alignment", *arguments)
        assert result.code == 0 and len(result.out.splitlines()) > 3, result.err


def test_what_it_does_not_go_with(regard, folder: Path, tmp_path: Path) -> None:
    result = regard("translate", "--model", recurrent().save(tmp_path / "recurrent"), "--int8", "abc")
    assert (result.code, result.err) == (
        2, "regard: translate: --int8 must be used with a Transformer, got a recurrent model.\n",
    )  # fmt: skip
    result = regard("translate", "--model", folder, "--int8", "--precision", "bfloat16", "abc")
    assert (result.code, result.err) == (
        2,
        "regard: translate: --precision must be left out with --int8, got bfloat16.\n",
    )
