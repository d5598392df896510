"""The training pairs of the included model, from small collections."""

import gzip

import pytest
from recipes import pairs


@pytest.fixture
def written(tmp_path):
    tatoeba = [("The cat sees.", "Le chat voit."), ("See the cat!", "Vois le chat !"), ("Hello!", "Bonjour !")]
    for part, some in (
        ("train", tatoeba * 5),
        ("valid", [("A dog.", "Un chien.")]),
        ("test", [("A cow.", "Une vache.")]),
    ):
        lines = "".join(f"{source}\t{target}\n" for source, target in some)
        (tmp_path / f"en-fr.{part}.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    for name in {**pairs.WEIGHTS, **pairs.HELD_OUT}:
        some = [(f"{name} says {i}", f"{name} dit {i}") for i in range(40)] + [("a dog", "un chien")]
        (tmp_path / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in some), encoding="utf-8")
    pairs.main(
        [str(tmp_path), str(tmp_path), str(tmp_path / "made"), "--phrases", "5", "--copies", "20", "--typed", "1"]
    )
    folder = tmp_path / "made"
    return {path.stem: [tuple(line.split("\t")) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_what_is_written(written) -> None:
    made = written["train"]
    assert ("The cat sees.", "Le chat voit.") in made
    assert ("the cat sees", "le chat voit") in made
    assert made.count(("Hello!", "Bonjour !")) == pairs.SHORT[1]
    assert any(source.startswith("<") for source, _ in made)
    assert all(len(pair) == 2 for pair in made)


def test_what_is_held_out_is_not_trained_on(written) -> None:
    sources = {source.lower() for source, _ in written["train"]}
    for name in pairs.HELD_OUT:
        held = {source.lower() for source, _ in written[name]}
        assert held and not held & sources
    # What the validation pairs have is held out in whatever signs and capitals it comes.
    assert not {"a dog", "a dog."} & sources
    assert len(written["pud"]) == 41 and 1 <= len(written["numbers_dates_times"]) < 20


def test_the_same_seed_gives_the_same_pairs(written, tmp_path) -> None:
    before = written["train"]
    pairs.main(
        [str(tmp_path), str(tmp_path), str(tmp_path / "again"), "--phrases", "5", "--copies", "20", "--typed", "1"]
    )
    again = (tmp_path / "again" / "train.tsv").read_text().splitlines()
    assert [tuple(line.split("\t")) for line in again] == before
