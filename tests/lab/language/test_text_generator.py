"""Texts that go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard_lab.generation.continuous_batching import AttentionRequest
from regard_lab.generation.sampling import GenerationOptions
from regard_lab.generation.speculative import NGramDrafter
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, save
from regard_lab.tasks.language.text_generator import TextGenerator, earlier_tokens
from regard_lab.text.tokenizer import Tokenizer

TEXTS = ["the cat sat on the mat", "a dog saw the cat", "the mat saw a dog and a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows TEXTS by heart."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.learn(TEXTS, kind="characters")
    model = DecoderLM(DecoderLMConfig(len(tokenizer), width=64, layers=2, heads=2, positions="rotary", tied=False))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    assert tokenizer.end is not None
    rows = [torch.tensor([[*tokenizer.encode(text, specials=True), tokenizer.end]]) for text in TEXTS]
    for _ in range(120):
        loss = sum(
            torch.nn.functional.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten()) for row in rows
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("generator")
    save(model.eval(), path)
    tokenizer.save(path)
    return path


def test_a_text_goes_on_to_its_end(folder: Path) -> None:
    generator = TextGenerator.load(folder)
    said: list[tuple[int, str]] = []
    (written,) = generator.generate(["the cat"], say=lambda request, text: said.append((request, text)))
    assert written.prompt + written.text == TEXTS[0] and written.end == "stop"
    assert "".join(text for _, text in said) == written.text
    assert written.log_probability is not None and written.log_probability > -1
    (searched,) = generator.search(["the cat"], 3, GenerationOptions(max_new_tokens=40))
    assert searched.text == written.text and searched.end == "stop"


def test_several_prompts_and_samples(folder: Path) -> None:
    generator = TextGenerator.load(folder)
    options = GenerationOptions.from_dotted({"samples": 2, "sampling.temperature": 0.7, "sampling.seed": 1})
    written = generator.generate([*TEXTS[:1], "a"], options)
    assert [each.prompt for each in written] == [TEXTS[0], TEXTS[0], "a", "a"]
    (alone,) = generator.generate(["a"], options.with_changes({"samples": 1}))
    assert alone.text == written[2].text  # whatever else is written
    drafted = generator.generate(["a"], options, drafter=NGramDrafter())
    assert len(drafted) == 2


def test_texts_that_end_a_text(folder: Path) -> None:
    generator = TextGenerator.load(folder)
    (written,) = generator.generate(["the cat"], stop=[" on"])
    assert written.text == " sat" and written.end == "stop"
    (short,) = generator.generate(["the cat"], GenerationOptions(max_new_tokens=3))
    assert short.text == " sa" and short.end == "length"


def test_what_each_token_looked_at(folder: Path) -> None:
    generator = TextGenerator.load(folder)
    (written,) = generator.generate(["the cat"], GenerationOptions(max_new_tokens=4), attention=AttentionRequest())
    seen = earlier_tokens(written, generator.tokenizer)
    assert seen.target == ("▁", "s", "a", "t") and len(seen.source) == 1 + 7 + 3
    torch.testing.assert_close(seen.weights.sum(1), torch.ones(4))
    assert not seen.weights[0, 8:].any(), "a token looks at those before it alone"
    with pytest.raises(ValueError, match="mean of all weights"):
        (several,) = generator.generate(
            ["the"], GenerationOptions(max_new_tokens=2), attention=AttentionRequest(average=False)
        )
        earlier_tokens(several, generator.tokenizer)


def test_an_empty_prompt_begins_a_text(folder: Path) -> None:
    (written,) = TextGenerator.load(folder).generate([""])
    assert written.text in TEXTS


def test_models_that_do_not_write(folder: Path, tmp_path: Path) -> None:
    save(EncoderLM(EncoderLMConfig(30, width=16)), tmp_path)
    with pytest.raises(ValueError, match="be the folder of a text generator: a decoder"):
        TextGenerator.load(tmp_path)
    save(DecoderLM(DecoderLMConfig(5, width=16)), tmp_path)
    Tokenizer.load(folder).save(tmp_path)
    with pytest.raises(ValueError, match="have a tokenizer of at most 5 tokens, the model's vocabulary size"):
        TextGenerator.load(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        TextGenerator.load(tmp_path / "nowhere")
