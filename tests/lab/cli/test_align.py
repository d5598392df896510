"""``regard align``, training that attention is guided in, and ``regard evaluate alignment``, as a user runs them."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import torch

import regard_cli
from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.translation.alignment.links import Agreement, read_links

WORDS = {"one": "un", "two": "deux", "red": "rouge", "blue": "bleu", "cat": "chat", "dog": "chien", "sees": "voit"}
TINY = [
    "--preset", "small", "--vocabulary-size", "60", "--batch-tokens", "300", "--set", "training.precision=float32",
    "--set", "data.held_out=20", "--set", "training.threads=1",
    "--set", "training.validate_every=60", "--set", "training.save_every=10",
]  # fmt: skip
RECURRENT = [
    "--set", "model.embedding=32", "--set", "model.encoder=32", "--set", "model.decoder=64", "--set",
    "model.features=32",
]  # fmt: skip
TRANSFORMER = [
    "--model", "transformer", "--set", "model.width=32", "--set", "model.heads=2", "--set", "model.feedforward=64",
    "--set", "model.encoder_layers=2", "--set", "model.decoder_layers=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Sentences, and their translations word by word, the first two exchanged; one line has no target."""
    drawn = random.Random(0)
    lines = []
    for _ in range(250):
        first, second, *others = chosen = drawn.sample(list(WORDS), drawn.randint(2, 5))
        lines.append(f"{' '.join(chosen)}.\t{' '.join(WORDS[word] for word in (second, first, *others))} .")
    lines[3] = "nothing\t"
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def gold(pairs) -> Path:
    path = pairs.with_name("gold")
    lines = []
    for line in pairs.read_text(encoding="utf-8").splitlines():
        _, target = line.split("\t")
        others = " ".join(f"{j}-{j}" for j in range(2, len(target.split())))
        lines.append(f"1-0 0-1 {others}" if target else "")
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def trained(out: Path, pairs: Path, *options: str) -> Path:
    torch.manual_seed(0)
    with pytest.raises(SystemExit) as caught:
        regard_cli.main(["train", "translation", "--data", str(pairs), "--out", str(out), *TINY, *options])
    assert not caught.value.code
    return out


@pytest.fixture(scope="module")
def model(pairs, gold, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "out"
    return trained(
        out, pairs, *RECURRENT, "--steps", "120", "--alignments", str(gold), "--set", "training.guide=1"
    )  # fmt: skip


def test_characters_without_spaces_are_words_unless_the_text_is_tokenized(regard, tmp_path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(
        "I am a student.\t我是学生。\nI am he.\t我是他。\nYou are he.\t你是他。\nYes.\t好。\n", encoding="utf-8"
    )
    result = regard("align", path)
    (line,) = [line for line in result.err.splitlines() if line.startswith("each character")]
    assert line == (
        "each character is a word: 3 texts in scripts without spaces, such as Chinese or Japanese; to align words, "
        "separate them by spaces and pass --tokenized"
    )
    assert "4-4" in result.out.splitlines()[0].split(), "the stop is the fifth word on both sides"
    path.write_text("I am a student .\t我 是 学生 。\nI am he .\t我 是 他 。\n", encoding="utf-8")
    result = regard("align", path, "--tokenized")
    assert "each character" not in result.err and "4-3" in result.out.splitlines()[0].split()


def test_pairs_in_and_links_out_a_line_for_each(regard, pairs, gold, tmp_path) -> None:
    result = regard("align", pairs, "--method", "intersection")
    assert result.code == 0 and "249 pairs of 250 lines" in result.err
    lines = result.out.splitlines()
    assert len(lines) == 250 and lines[3] == ""
    assert regard("align", pairs, "--method", "intersection", "--out", tmp_path / "links").out == ""
    assert (tmp_path / "links").read_text(encoding="utf-8") == result.out
    found = [each.sure for each in read_links(tmp_path / "links")]
    assert Agreement.of(found, read_links(gold)).aer < 0.2


def test_tokenized_text_is_counted_by_its_spaces(regard, tmp_path) -> None:
    (tmp_path / "pairs").write_text("l' eau !\tthe water !\n" * 20 + "l' air !\tthe air !\n" * 20, encoding="utf-8")
    assert regard("align", tmp_path / "pairs", "--tokenized").out.splitlines()[0] == "0-0 1-1 2-2"
    # Else the apostrophe is a sign of its own.
    assert regard("align", tmp_path / "pairs").out.splitlines()[0].endswith("3-2")


@pytest.mark.slow
def test_a_translator_aligns(regard, model, pairs, gold, tmp_path) -> None:
    result = regard("align", pairs, "--model", model, "--out", tmp_path / "links")
    assert result.code == 0, result.err
    found = [each.sure for each in read_links(tmp_path / "links")]
    assert Agreement.of(found, read_links(gold)).aer < 0.15
    both = regard("align", pairs, "--model", model, "--back", model)
    assert both.code == 0 and len(both.out.splitlines()) == 250


@pytest.mark.slow
def test_attention_is_scored_by_links(regard, model, pairs, gold) -> None:
    told = json.loads(regard("evaluate", "alignment", pairs, "--model", model, "--links", gold, "--json").out)
    assert told["pairs"] == 249
    for way in ("attention", "intersection", "grow-diag-final-and"):
        assert 0 <= told[f"aer|{way}"] < 30 and 60 < told[f"recall|{way}"] <= 100
    lines = regard("evaluate", "alignment", pairs, "--model", model, "--links", gold).out.splitlines()
    assert f"aer|attention: {told['aer|attention']}" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--back", "english-french"], "--back requires --model"),
        (["--model", "english-french", "--aligner", "lexical"], "--aligner must be left out with --model"),
        (["--method", "both"], "method must be one of"),
        (["--aligner", "giza"], "aligner must be one of 'eflomal', 'lexical'"),
        (["--model", "nowhere"], "there is no model at nowhere"),
        (["--model", "english-french", "--back", "nowhere"], "there is no model at nowhere"),
        (["--out", "/nowhere/links"], "/nowhere"),
    ],
)
def test_what_cannot_be_aligned_is_a_sentence(regard, pairs, arguments, said) -> None:
    result = regard("align", pairs, *arguments)
    assert result.code == 2 and said in result.err and "Traceback" not in result.err and not result.out


def test_a_file_of_links_is_there_whole_or_not_at_all(regard, pairs, tmp_path, monkeypatch) -> None:
    import regard_lab.cli.align as command

    (tmp_path / "links").write_text("as it was\n", encoding="utf-8")
    monkeypatch.setattr(command, "align_words", lambda *_: (_ for _ in ()).throw(ValueError("align: it failed.")))
    assert regard("align", pairs, "--out", tmp_path / "links").code == 2
    assert (tmp_path / "links").read_text(encoding="utf-8") == "as it was\n"
    assert [path.name for path in tmp_path.iterdir()] == ["links"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0-0\n", "must have a line for each of the 250 lines"),
        ("9-0\n" + "0-0\n" * 249, "line 1 must link words 0 to"),
        ("0-0\n" * 249 + "zero\n", "line 250 must have links such as 0-0"),
        ("0-0\n" * 249 + "\x000-0\n", "must be text in UTF-8"),
    ],
)
def test_bad_links_end_training_before_it_begins(regard, pairs, tmp_path, lines, said) -> None:
    (tmp_path / "links").write_text(lines, encoding="utf-8")
    out = tmp_path / "out"
    for arguments in (
        ["train", "translation", "--data", pairs, "--out", out, "--alignments", tmp_path / "links", *TINY],
        ["evaluate", "alignment", pairs, "--links", tmp_path / "links"],
    ):
        result = regard(*arguments)
        assert result.code == 2 and said in result.err and "Traceback" not in result.err
    assert not (out / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--align", "--alignments", "links"], "--align must be left out where data.alignments are given"),
        (["--align", "--set", "data.tokenized=true"], "data.tokenized must be left out without data.alignments"),
        (["--set", "data.aligner=eflomal"], "data.aligner must be left out without data.align"),
        (["--align", "--set", "data.aligner=giza"], "data.aligner must be one of"),
        (["--align", "--attention", "none"], "model.attention must be one that learns where to look"),
        (["--align", "--set", "training.guided=layer 9"], "training.guided must be one of"),
        (["--align", "--set", "training.guide=-1"], "guide must be a finite number of at least 0"),
        (["--align", "--set", "training.guide=0"], "training.guide must be above 0 where links are to guide attention"),
        (["--set", "training.guided=attention"], "training.guided must be left out without data.alignments"),
        (["--align", "--attention", "constant"], "model.attention must be one that learns where to look"),
        (["--align", "--set", "model.hard=reinforce"], "model.hard must be 'none' or 'gumbel' where links guide"),
    ],
)
def test_options_of_guidance_that_do_not_fit_are_refused(regard, pairs, tmp_path, arguments, said) -> None:
    result = regard("train", "translation", "--data", pairs, "--out", tmp_path / "out", *TINY, *RECURRENT, *arguments)
    assert result.code == 2 and said in result.err and "Traceback" not in result.err


def test_a_guided_transformer_is_given_the_right_symbols(regard, pairs, tmp_path) -> None:
    options = ["--align", *TRANSFORMER, "--set", "training.teacher_forcing=0.5"]
    result = regard("train", "translation", "--data", pairs, "--out", tmp_path / "out", *TINY, *options)
    assert result.code == 2 and "training.teacher_forcing must be 1" in result.err


def test_links_are_refused_where_letters_are_the_symbols(regard, tmp_path) -> None:
    result = regard("train", "pronunciation", "--out", tmp_path / "out", "--align")
    assert result.code == 2 and "No such option: --align" in " ".join(result.err.split())
    result = regard("train", "pronunciation", "--out", tmp_path / "out", "--set", "data.align=true")
    assert result.code == 2 and "align must be left out for pronunciation" in result.err


@pytest.mark.slow
def test_a_transformer_is_guided_in_one_head_and_remembers_it(regard, pairs, gold, tmp_path, capsys) -> None:
    out = trained(tmp_path / "out", pairs, *TRANSFORMER, "--steps", "40", "--alignments", str(gold))
    model = SequenceModel.load(out)
    assert model.aligning == "layer 1 head 1" and model.about["aligning"] == "layer 1 head 1"
    capsys.readouterr()
    told = json.loads(regard("translate", "--model", out, "one cat.", "--json").out)
    assert told["aligning"] == "layer 1 head 1"
    mine = next(each for each in told["maps"] if each["name"] == "layer 1 head 1")
    assert told["alignment"] == mine["words"]


@pytest.mark.slow
def test_a_transformer_is_guided_in_the_head_that_reads_the_word(regard, pairs, gold, tmp_path, capsys) -> None:
    head = ["--set", "model.alignment=layer 1 head 2", "--steps", "40", "--alignments", str(gold)]
    out = trained(tmp_path / "out", pairs, *TRANSFORMER, *head)
    assert SequenceModel.load(out).aligning == "alignment"
    capsys.readouterr()
    told = json.loads(regard("translate", "--model", out, "one cat.", "--json").out)
    maps = {each["name"]: each["words"] for each in told["maps"]}
    assert told["aligning"] == "alignment" and told["alignment"] == maps["alignment"] != maps["layer 1 head 2"]


@pytest.mark.slow
def test_a_transformer_without_guidance_finds_the_map_that_aligns(pairs, tmp_path, capsys) -> None:
    out = trained(tmp_path / "out", pairs, *TRANSFORMER, "--steps", "20")
    name = SequenceModel.load(out).aligning
    assert name and f"the attention map that aligns words best: {name}" in capsys.readouterr().out


def test_links_of_a_file_that_changed_are_those_the_run_began_with(regard, pairs, gold, tmp_path) -> None:
    links = tmp_path / "links"
    links.write_bytes(gold.read_bytes())
    out = trained(tmp_path / "out", pairs, *RECURRENT, "--steps", "10", "--alignments", str(links))
    links.unlink()
    result = regard("train", "translation", "--out", out, "--resume", "--steps", "12")
    assert result.code == 0 and "attention is guided by" in result.out


@pytest.mark.slow
def test_a_guided_run_goes_on_with_the_links_it_began_with(pairs, tmp_path, monkeypatch) -> None:
    from regard_lab.tasks.translation.alignment import guidance

    whole = trained(tmp_path / "whole", pairs, *RECURRENT, "--steps", "20", "--align")
    lines = {line for line in pairs.read_text(encoding="utf-8").splitlines() if not line.endswith("\t")}
    # Every sentence has one translation: 20 of them are held out.
    assert (whole / "links.txt").read_text(encoding="utf-8").count("\n") == len(lines) - 20
    part = trained(
        tmp_path / "part",
        pairs,
        *RECURRENT,
        "--steps",
        "10",
        "--align",
        "--set",
        "training.schedule=constant",
        "--set",
        "training.warmup=1",
    )
    monkeypatch.setattr(guidance, "align_words", lambda *_: pytest.fail("links are made once"))
    with pytest.raises(SystemExit) as caught:
        regard_cli.main(["train", "translation", "--out", str(part), "--resume", "--steps", "20"])
    assert not caught.value.code
    straight = trained_again(tmp_path / "straight", pairs, monkeypatch)
    one, other = (SequenceModel.load(folder).model.state_dict() for folder in (part, straight))
    assert all(torch.equal(one[name], other[name]) for name in one)


def trained_again(out: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.undo()
    return trained(
        out,
        pairs,
        *RECURRENT,
        "--steps",
        "20",
        "--align",
        "--set",
        "training.schedule=constant",
        "--set",
        "training.warmup=1",
    )


def test_links_are_written_into_pipes_and_through_links(regard, pairs, tmp_path) -> None:
    right = regard("align", pairs).out
    (tmp_path / "real").write_text("before\n", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert regard("align", pairs, "--out", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text(encoding="utf-8") == right
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert regard("align", pairs, "--out", tmp_path / "pipe").code == 0
    reader.join(20)
    assert read == [right] and (tmp_path / "pipe").is_fifo()


def test_the_pairs_are_not_overwritten(regard, pairs, tmp_path) -> None:
    (tmp_path / "pairs").write_bytes(pairs.read_bytes())
    result = regard("align", tmp_path / "pairs", "--out", tmp_path / "pairs")
    assert result.code == 2 and "--out must not be the file of the pairs" in result.err
    assert (tmp_path / "pairs").read_bytes() == pairs.read_bytes()


def test_a_missing_aligner_is_a_sentence_before_anything_is_done(regard, pairs, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "eflomal", None)
    for arguments in (
        ["align", "nowhere", "--aligner", "eflomal"],
        [
            "train",
            "translation",
            "--data",
            pairs,
            "--out",
            tmp_path / "out",
            "--align",
            "--set",
            "data.aligner=eflomal",
        ],
    ):
        result = regard(*arguments)
        assert result.code == 2 and "pip install 'regard-lab[align]'" in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_a_model_without_attention_is_named_by_its_option(regard, pairs, tmp_path) -> None:
    out = trained(tmp_path / "out", pairs, *RECURRENT, "--steps", "2", "--attention", "none")
    result = regard("align", pairs, "--model", "english-french", "--back", out)
    assert result.code == 2 and "--back must be a translation model with attention" in result.err


def test_a_huge_pair_is_left_without_links_and_the_rest_is_aligned(regard, pairs, tmp_path) -> None:
    lines = pairs.read_text(encoding="utf-8").splitlines()[:20]
    lines[7] = f"{'a ' * 2100}\t{'b ' * 2100}"
    (tmp_path / "pairs").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = regard("align", tmp_path / "pairs")
    found = result.out.splitlines()
    assert result.code == 0 and len(found) == 20 and found[7] == "" and found[8]
    assert "no links: 1 pairs" in result.err
