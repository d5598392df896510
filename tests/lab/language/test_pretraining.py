"""Language models from text: what is learned, kept, resumed and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from regard_lab.data.packing import PackedBatches, TokenShards
from regard_lab.models import DecoderLM, DecoderLMConfig, EncoderLM, EncoderLMConfig, load
from regard_lab.tasks.language.options import LanguageOptions, TextOptions, TokenizerOptions
from regard_lab.tasks.language.pretraining import MaskedTokens, NextTokens, Pretraining
from regard_lab.text.tokenizer import Tokenizer

SMALL = {"width": 32, "layers": 2, "heads": 2}
#: Each word tells the next.
CHAIN = ["the", "cat", "sat", "on", "a", "mat", "and", "saw"]


def sentence(random: Random) -> str:
    begin = random.randrange(len(CHAIN))
    return " ".join(CHAIN[(begin + i) % len(CHAIN)] for i in range(random.randrange(4, 20)))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    random = Random(0)
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{sentence(random)}\n" for _ in range(300)))
    return path


def options(data: Path, **changes: object) -> LanguageOptions:
    table = {
        "data": {"data": [str(data)], "per": "line", "length": 32},
        "tokenizer": {"kind": "characters"},
        "preset": "tiny",
        "model": SMALL,
        "training": {"steps": 60, "batch_tokens": 256, "learning_rate": 1e-2, "validate_every": 30, "save_every": 10}
        | {"precision": "float32"},
    }
    return LanguageOptions.from_table(table | changes)


def quiet(_: str) -> None:
    pass


@pytest.mark.slow
def test_next_tokens_are_learned_and_the_folder_is_a_model(lines: Path, tmp_path: Path) -> None:
    told: list[str] = []
    model, ended = Pretraining(options(lines), tmp_path / "out", told.append).train()
    assert ended.reason == "steps" and ended.best < 0.5 and not ended.at_frequency_baseline
    again, tokenizer = load(tmp_path / "out"), Tokenizer.load(tmp_path / "out")
    assert isinstance(again, DecoderLM) and again.config.width == model.config.width
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    numbers = torch.tensor([tokenizer.encode("the cat sat o", specials=False)])
    assert tokenizer.decode([int(again(numbers)[0, -1].argmax())]) == "n"
    assert any("batches per epoch" in line for line in told)


@pytest.mark.slow
def test_masked_tokens_are_learned(lines: Path, tmp_path: Path) -> None:
    changes = {"masked": True, "tokenizer": {"kind": "bpe", "size": 300}}
    run = Pretraining(options(lines, **changes), tmp_path / "out", quiet)
    _, ended = run.train()
    assert ended.best < 3.0
    again = load(tmp_path / "out")
    assert isinstance(again, EncoderLM) and again.masked_head is not None


@pytest.mark.slow
def test_a_run_that_goes_on_ends_with_the_same_bits(lines: Path, tmp_path: Path) -> None:
    whole, _ = Pretraining(options(lines), tmp_path / "whole", quiet).train()
    begun = options(lines)
    training = replace(begun.training, seconds=1e-9)  # one step
    Pretraining(replace(begun, training=training), tmp_path / "parts", quiet).train()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "parts" / name).unlink()
    lines.unlink()  # what was read is kept
    rest = Pretraining.resumed(tmp_path / "parts", {"seconds": 0.0}, quiet)
    parts, ended = rest.train(resume=True)
    assert ended.steps == 60
    for one, other in zip(whole.state_dict().values(), parts.state_dict().values()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("separate", [True, False])
def test_what_packed_documents_cost_is_what_each_costs_alone(separate: bool) -> None:
    torch.manual_seed(0)
    model = DecoderLM(DecoderLMConfig(20, width=16, layers=2, heads=2, positions="rotary", max_length=40)).double()
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(20, (length,), generator=generator).tolist() for length in (3, 9, 17, 2, 31, 8)]
    batches = PackedBatches(TokenShards.of(documents), length=40, rows=4)
    total = sum(NextTokens(separate).validation(model, batch) for batch in batches.once())
    alone = torch.zeros(2, dtype=torch.float64)
    for document in documents:
        logits = model(torch.tensor([document[:-1]]))[0]
        targets = torch.tensor(document[1:])
        alone[0] += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").detach()
        alone[1] += len(targets)
    assert total[1] == alone[1]
    same = torch.allclose(total[0], alone[0], rtol=1e-9)
    assert same == separate  # without the mask, documents see those before them


def test_the_loss_counts_masked_tokens_alone() -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer.learn([], kind="bytes", specials=("end", "pad", "mask"))
    assert tokenizer.mask is not None
    model = EncoderLM(EncoderLMConfig(len(tokenizer), width=16, layers=1, heads=2)).eval()
    numbers = TokenShards.of([tokenizer.encode("some text to read")] * 8, len(tokenizer))
    (batch,) = PackedBatches(numbers, length=16, rows=8).once()
    objective = MaskedTokens(tokenizer, 0.5)
    first, second = (objective.validation(model, batch) for _ in range(2))
    assert torch.equal(first, second), "the same tokens are masked each time"
    assert 30 < first[1] < 100
    torch.manual_seed(1)
    one = objective.loss(model, batch).shown
    torch.manual_seed(1)
    assert objective.loss(model, batch).shown == one
    torch.manual_seed(2)
    assert objective.loss(model, batch).shown != one


@pytest.mark.campaign
@pytest.mark.slow
def test_rows_read_both_ways_teach_both(lines: Path, tmp_path: Path) -> None:
    """Each word tells the next, and the one before it."""
    found = {}
    for both_ways in (False, True):
        asked = options(lines)
        asked = replace(asked, data=replace(asked.data, both_ways=both_ways))
        asked = replace(asked, training=replace(asked.training, steps=120))
        folder = tmp_path / str(both_ways)
        model, _ = Pretraining(asked, folder, quiet).train()
        tokenizer = Tokenizer.load(folder)
        text = tokenizer.encode("the cat sat on a mat", specials=False)
        with torch.no_grad():
            forward, backward = (
                torch.nn.functional.cross_entropy(model(torch.tensor([read[:-1]]))[0], torch.tensor(read[1:]))
                for read in (text, text[::-1])
            )
        found[both_ways] = float(forward), float(backward)
    assert max(found[True]) < found[False][1] / 3, found  # the first letters do not say which way they are read


@pytest.mark.campaign(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_sampled_softmax_learns_what_is_validated_among_all(masked: bool, lines: Path, tmp_path: Path) -> None:
    changes = {"masked": masked, "tokenizer": {"kind": "bpe", "size": 300}}
    best = {}
    for draws in (0, 20):
        asked = options(lines, **changes)
        asked = replace(asked, training=replace(asked.training, sampled_softmax=draws))
        _, ended = Pretraining(asked, tmp_path / f"{draws}", quiet).train()
        best[draws] = ended.best
    assert best[20] < best[0] + 0.3 and best[0] < 3.0, best


@pytest.mark.slow
def test_a_model_to_begin_with(lines: Path, tmp_path: Path) -> None:
    Pretraining(options(lines), tmp_path / "first", quiet).train()
    table = options(lines).to_table() | {"start": str(tmp_path / "first"), "tokenizer": {}, "preset": "small"}
    table["model"] = {}
    table["training"] |= {"steps": 1, "learning_rate": 1e-6}
    _, ended = Pretraining(LanguageOptions.from_table(table), tmp_path / "second", quiet).train()
    assert ended.best < 0.5
    with pytest.raises(ValueError, match="tokenizer must have mask and padding tokens"):
        masked = LanguageOptions.from_table(table | {"masked": True})
        Pretraining(masked, tmp_path / "third", quiet).train()


def test_of_one_document_the_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab" * 2000)
    run = options(tmp_path / "one.txt", training={"steps": 1, "batch_tokens": 64})
    run = replace(run, data=TextOptions(data=[str(tmp_path / "one.txt")], length=16))
    told: list[str] = []
    Pretraining(run, tmp_path / "out", told.append).train()
    assert TokenShards.open(tmp_path / "out/tokens/valid").tokens in range(400, 404)
    assert json.loads((tmp_path / "out/run.json").read_text())["bytes"] == 400


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"masked": True, "data": {"rows": "stream"}}, "data.rows must be 'packed' where tokens are masked"),
        ({"masked": True, "data": {"both_ways": True}}, "both_ways must be left out where tokens are masked"),
        ({"training": {"sampled_softmax": 9, "label_smoothing": 0.1}}, "label_smoothing must be left out with sampled"),
        ({"training": {"sampled_softmax": 9, "strategy": "fsdp"}}, "sampled_softmax must be 0 where processes divide"),
        ({"data": {"masked_share": 0.2}}, "masked_share must be left out unless tokens are masked"),
        ({"training": {"guide": 1.0}}, "guide must be left out for a language model"),
        ({"training": {"batch_tokens": 8}, "data": {"length": 16}}, "batch_tokens must be at least data.length"),
        ({"training": {"metric": "bleu"}}, "metric must be 'loss'"),
        ({"model": {"depth": 3}}, "model.depth must be"),
        ({"preset": "huge"}, "preset must be"),
        ({"model": {"heads": 3}}, "heads must divide width"),
        ({"tokenizer": {"kind": "syllables"}}, "kind must be one of"),
        ({"tokenizer": {"kind": "bytes", "size": 300}}, "size must be left out where the tokenizer is not bpe or"),
        ({"data": {"data": ["-"], "valid": ["-"]}}, "valid must be a file where standard input is something else"),
    ],
)
def test_options_that_do_not_fit(changes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        Pretraining(LanguageOptions.from_table(changes), tmp_path / "out", quiet)


def test_folders_and_texts_that_do_not_fit(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data is required: files of text"):
        Pretraining(LanguageOptions(), tmp_path / "none", quiet).train()
    (tmp_path / "binary").write_bytes(b"\x00\x01" * 100)
    with pytest.raises(ValueError, match="binary"):
        Pretraining(options(tmp_path / "binary"), tmp_path / "none", quiet).train()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        run = replace(options(lines), tokenizer=TokenizerOptions(kind=str(tmp_path)))
        Pretraining(run, tmp_path / "none", quiet).train()
    Pretraining(options(lines, training={"steps": 1, "batch_tokens": 64}), tmp_path / "out", quiet).train()
    with pytest.raises(ValueError, match="out must be a new folder"):
        Pretraining(options(lines), tmp_path / "out", quiet).train()
    (tmp_path / "out/tokens/learn/shards.json").write_text("{}")
    with pytest.raises(ValueError, match="shards"):
        Pretraining.resumed(tmp_path / "out", {"steps": 2}, quiet).train(resume=True)


@pytest.mark.parametrize("kind", ["characters", "wordpiece"])
@pytest.mark.parametrize("masked", [False, True])
def test_text_that_the_tokenizer_cannot_spell_is_refused(kind: str, masked: bool, lines: Path, tmp_path: Path) -> None:
    specials = ("end", "pad", "mask", "cls", "sep")
    made = Tokenizer.learn(lines.read_text().splitlines(), kind=kind, specials=specials)
    made.save(tmp_path / "tokenizer")
    russian = tmp_path / "russian.txt"
    russian.write_text("the cat\n" + "кошка сидит на коврике\n" * 40, encoding="utf-8")
    changes = {"tokenizer": {"kind": str(tmp_path / "tokenizer")}, "masked": masked}
    told: list[str] = []
    with pytest.raises(
        ValueError, match=r"^train: training: .* symbols \(\d\d\.\d%\).*first in document 2: 'к"
    ) as caught:
        Pretraining(options(russian, **changes), tmp_path / "out", told.append).train()
    assert str(caught.value).endswith("or add --set data.max_unknown=1.")
    assert not (tmp_path / "out").exists()
    table = options(russian, **changes).to_table()
    table["data"]["max_unknown"] = 1.0
    table["training"]["steps"] = 2
    Pretraining(LanguageOptions.from_table(table), tmp_path / "out", told.append).train()
    assert [line.split(": ")[0] for line in told if "unknown to the vocabulary" in line] == ["training", "validation"]


def test_a_warm_start_counts_unknown_symbols_too(lines: Path, tmp_path: Path) -> None:
    begun = options(lines)
    Pretraining(replace(begun, training=replace(begun.training, steps=1)), tmp_path / "start", quiet).train()
    path = tmp_path / "other.txt"
    path.write_text("the cat sat on a mat!\n" * 20 + "кошка\n")
    table = begun.to_table() | {"start": str(tmp_path / "start"), "tokenizer": {}, "model": {}, "preset": "small"}
    table["data"] |= {"data": [str(path)]}
    table["training"] |= {"steps": 1}
    told: list[str] = []
    Pretraining(LanguageOptions.from_table(table), tmp_path / "out", told.append).train()
    (line, _) = [line for line in told if "unknown to the vocabulary" in line]
    assert line.startswith("training: 2") and line.endswith("(first in document 1: '!')")


def test_letters_that_a_new_tokenizer_drops_are_told(tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    letters = [chr(0x4E00 + number) for number in range(1100)]
    path.write_text("".join(f"{letter} " * 9 + "\n" for letter in letters[:1000]) + " ".join(letters[1000:]))
    changes = {"tokenizer": {"kind": "wordpiece", "size": 8000}}
    asked = options(path, **changes)
    asked = replace(asked, data=replace(asked.data, per="file"), training=replace(asked.training, steps=1))
    told: list[str] = []
    Pretraining(asked, tmp_path / "out", told.append).train()
    assert any("are unknown to the vocabulary (first in document 1: " in line for line in told)
