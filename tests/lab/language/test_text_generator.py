"""Texts that go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard._utils.errors import RegardWarning
from regard_lab.generation.continuous_batching import AttentionRequest
from regard_lab.generation.generation import generate
from regard_lab.generation.sampling import GenerationOptions
from regard_lab.generation.speculative import NGramDrafter
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, save
from regard_lab.tasks.language.text_generator import TextGenerator, earlier_tokens
from regard_lab.text.tokenizer import Tokenizer

TEXTS = ["the cat sat on the mat", "a dog saw the cat", "the mat saw a dog and a cat"]


def trained(tokenizer: Tokenizer, path: Path) -> Path:
    """Return the folder of a model that knows TEXTS by heart."""
    torch.manual_seed(0)
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
    save(model.eval(), path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(Tokenizer.learn(TEXTS, kind="characters"), tmp_path_factory.mktemp("letters"))


def with_spaces() -> Tokenizer:
    """Return a tokenizer of words, whose space stands in the token, as in SentencePiece."""
    engine = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"], show_progress=False)
    engine.train_from_iterator(TEXTS, trainer)
    tokenizer = Tokenizer(engine, {"unknown": "<unk>", "end": "</s>", "begin": "</s>"})
    return tokenizer.surrounded(tokenizer.begin, None, None)


@pytest.fixture(scope="module", params=["bytes with words", "words with spaces"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are words with the space before them."""
    tokenizer = Tokenizer.learn(2 * TEXTS, 278, "bpe") if request.param == "bytes with words" else with_spaces()
    assert tokenizer.tokens(tokenizer.encode("the cat sat on")) in (
        ["the", "▁cat", "▁sat", "▁on"], ["▁the", "▁cat", "▁sat", "▁on"]
    )  # fmt: skip
    return trained(tokenizer, tmp_path_factory.mktemp("words"))


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


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (["sat"], " ", 0),
        ([" sat"], "", 0),
        (["t on"], " sa", 0),
        (["the m", "at on the"], " s", 0),
        (["he m"], " sat on t", 2),
        (["mat"], " sat on the ", 3),
        (["cat"], " sat on the mat", 4),
    ],
)
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_text_is_found_across_tokens(words: Path, stop: list[str], text: str, count: int, drafted: bool) -> None:
    generator = TextGenerator.load(words)
    said: list[tuple[int, str]] = []
    prompts = ["the cat", "a dog saw the cat", "the cat"]
    drafter = NGramDrafter() if drafted else None
    written = generator.generate(prompts, stop=stop, drafter=drafter, say=lambda *each: said.append(each))
    assert [each.text for each in written] == [text, "", text]
    assert ["".join(part for request, part in said if request == i) for i in range(3)] == [text, "", text]
    assert {each.end for each in written} == {"stop"} and len(written[0].numbers) == count
    assert text.strip().startswith(generator.tokenizer.decode(written[0].numbers).strip())


def test_texts_that_continue_words_have_their_space(words: Path) -> None:
    generator = TextGenerator.load(words)
    (written,) = generator.generate(["the cat"])
    (searched,) = generator.search(["the cat"], 3, GenerationOptions(max_new_tokens=40))
    assert written.text == searched.text == " sat on the mat"
    assert generator.generate([""])[0].text in TEXTS


def test_a_stop_text_may_name_a_special_token() -> None:
    tokenizer = Tokenizer.learn(TEXTS, kind="characters", specials=("end", "pad", "mask"))
    model = DecoderLM(DecoderLMConfig(len(tokenizer), width=16, layers=1, tied=False)).eval()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    generator = TextGenerator(model, tokenizer)
    drawn = GenerationOptions.from_dotted({"max_new_tokens": 50, "samples": 9, "sampling.temperature": 1.0})
    whole = [each.numbers for each in generate(model, [generator.encode("the")], drawn)]
    ends = [next(i for i, number in enumerate(each) if number in (tokenizer.end, tokenizer.mask)) for each in whole]
    assert {each[end] for each, end in zip(whole, ends)} == {tokenizer.end, tokenizer.mask}
    written = generator.generate(["the"], drawn, stop=["<|mask|>"])
    assert [list(each.numbers) for each in written] == [each[:end] for each, end in zip(whole, ends)]


def test_stop_texts_that_never_come_are_refused(folder: Path, words: Path) -> None:
    generator = TextGenerator.load(folder)
    for stop, spelled in (("жук", "\ufffd\ufffd\ufffd"), ("the Cat", "the \ufffdat"), ("\n", "\ufffd")):
        expected = f"stop must be text that the model's vocabulary can spell, got {stop!r}, which it spells {spelled!r}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            generator.generate(["the cat"], stop=[" on", stop])
    with pytest.raises(TypeError, match=r"generate: stop must be a list of texts, got 'on'\."):
        generator.generate(["the cat"], stop="on")
    with pytest.raises(ValueError, match=r"generate: stop must not be empty, got ''\."):
        generator.generate(["the cat"], stop=[""])
    lower = Tokenizer.learn(TEXTS, None, "characters", lowercase=True)
    with pytest.raises(ValueError, match="got 'The', which it spells 'the'"):
        TextGenerator(DecoderLM(DecoderLMConfig(len(lower), width=16)), lower).generate([""], stop=["The"])


def test_characters_of_a_prompt_that_the_vocabulary_lacks(folder: Path) -> None:
    generator = TextGenerator.load(folder)
    options = GenerationOptions(max_new_tokens=2)
    with pytest.warns(RegardWarning, match=r"^generate: the model's vocabulary lacks 2 of 17 characters: 'é', '!'$"):
        written = generator.generate(["the cét", "a dog saw!"], options)
    assert len(written) == 2
    refusal = "generate: the model's vocabulary lacks 6 of 7 characters: 'П', 'р', 'и', 'в', 'е' and 1 more; to"
    with pytest.raises(ValueError, match=refusal):
        generator.generate(["Привет "], options)
    with pytest.raises(ValueError, match="generate: in prompt 2, the model's vocabulary lacks 2 of 3 characters"):
        generator.search(["the", "жуa"], 2, options)
    with pytest.warns(RegardWarning, match="lacks 6 of 7 characters"):
        assert len(generator.generate(["Привет "], options, max_unknown=1)) == 1
    with pytest.raises(ValueError, match="lacks 1 of 7 characters"):
        generator.generate(["the cét"], options, max_unknown=0)
    with pytest.raises(ValueError, match=r"generate: max_unknown must be a number in \[0, 1\], got 2\."):
        generator.generate(["the"], options, max_unknown=2)


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
