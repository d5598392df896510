"""``regard regress``: what it refuses, in one sentence each."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest

from regard_cli import messages

GOOD = "x,z,name,y,w\n1,5,a,1,1\n2,4,b,4,1\n3,1,a,9,2\n4,2,b,16,1\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    return path


def _refused(outcome, *parts: str) -> None:
    assert outcome.code == 2, outcome.out
    for part in parts:
        assert part in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert outcome.err.startswith("regard: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "have a row of names and rows of values, got an empty file"),
        (b"\n  \n", "got an empty file"),
        (b"x,y\n", "must have rows below the names of its columns, got none"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "must be a table in CSV or Parquet, got a binary file"),
        (b"PK\x03\x04\x14\0\6\0", "must be a whole zip file, got one that is cut short or damaged"),
        (b"x,y\n1,2\nK\xf6ln,3\n", "got byte 0xf6 in line 3 (save it in UTF-8, or name its encoding, such as"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-12], "must be a whole gzip file, got one that is cut short"),
        (b"PAR1 and nothing more", "must be a whole Parquet file, got one that is cut short or something else"),
        (b"y\n1\n2\n", "must have 2 columns or more, separated by commas, semicolons, tabs, bars, got 1: 'y'"),
        (b"x,y\n1,2\n3,4,5\n", "must have 2 cells in every row as in its first, got 3 in line 3"),
        (b"x,y\n1,2,5\n3,4\n", "must have 2 cells in every row as in its first, got 3 in line 2"),
        (b'x,y\n1,2\n"3,4\n', "got a quotation mark that is never closed"),
        (b"1,2\n3,4\n", "must have the names of its columns in its first row, got numbers alone"),
        (b"x,y,x\n1,2,3\n3,4,5\n", "must have a name for each column, got 'x' twice"),
        (b"x,y\n1,\n2,\n,4\n,5\n", "two rows or more that miss nothing, got 0 of 4 (missing: 'y' in 2, 'x' in 2)"),
        (b"x,y\n1,2\n3,\n", "must have two rows or more that miss nothing, got 1 of 2 (missing: 'y' in 1)"),
        (b"x,y\n1,7\n3,7\n", "target 'y' must differ between rows, got 7 in all: there is nothing to learn"),
        (b"x,y\n1,7\n3,7\n,8\n", "must differ between the rows that miss nothing, got one value in all of them"),
        (b"x,y\n1,a\n3,a\n", "target 'y' must differ between rows, got 'a' in all: there is nothing to learn"),
        (b"x,y\n1,a\n3,b\n", "target 'y' must repeat its texts, one for each class, got another in every row"),
        (b"x,y\n1,\n3,NA\n", "target 'y' must hold numbers, or text for a classification, got a column that is empty"),
        (b"x,y\n1,2024-01-01\n3,2024-01-02\n", "target 'y' must hold numbers, or text for a classification, got dates"),
        (b"x,y\n1,2\ninf,4\n", "a.csv must be finite, got inf in line 3"),
        (b"x,y\n1,2\n2,-inf\n", "a.csv must be finite, got -inf in line 3"),
        (b"x,y\n1,1e200\n2,3\n", "a.csv must be finite and not above 1e+100 in size, got 1e+200 in line 2"),
        (b"x,y\n1,1\n1e308,3\n-1e308,3\n", "a.csv must be finite and not above 1e+100 in size, got 1e+308 in line 3"),
        (b"x,y\r1,2\rK\xf6ln,3\r", "must be text in UTF-8, got byte 0xf6 in line 3"),
        (b"x,y\n5,2\n5,4\n", "must have a column to learn from beside the target, got 'x' is the same in every row"),
        (b"x,y\n,2\nNA,4\n", "must have a column to learn from beside the target, got 'x' is empty"),
    ],
)  # fmt: skip
def test_tables(regard, tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    _refused(regard("regress", path, "--target", "y"), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "Y"], ("regress: --target must be one of 'name', 'w', 'x', 'y', 'z', got 'Y'",)),
        (["--target", "nam"], ("got 'nam' (did you mean 'name'?)",)),
        (["--target", "y", "--features", "x,nane"], ("features must be one of", "'nane' (did you mean 'name'?)")),
        (["--target", "y", "--weights", "ww"], ("regress: --weights must be one of",)),
        (["--target", "y", "--features", "x,y"], ("be other columns than target and weights, got 'y', the target",)),
        (["--target", "y", "--features", "x,w", "--weights", "w"], ("got 'w', the weights",)),
        (["--target", "y", "--weights", "y"], ("be another column than the target, got 'y'",)),
        (["--target", "y", "--features", "x,x"], ("features must name each column once, got 'x' twice",)),
        (["--target", "y", "--weights", "name"], ("weights 'name' must hold numbers of at least 0", "got text")),
        (["--target", "y", "--kernel", "gausian"], ("--kernel must be one of", "(did you mean 'gaussian'?)",)),
        (["--target", "y", "--bandwidth", "learnt"], ("--bandwidth", "(did you mean 'learned'?)",)),
        (["--target", "y", "--bandwidth", "0"], ("--bandwidth must be above 0 and finite, got 0",)),
        (["--target", "y", "--bandwidth", "nan"], ("--bandwidth must be above 0 and finite, got nan",)),
        (["--target", "y", "--bandwidth", "1,2"], ("one for each of 4 features (x, z, name, w), got 2 numbers",)),
        (["--target", "y", "--bandwidth", "learned", "--kernel", "boxcar"], ("'learned' with --kernel boxcar",)),
        (["--target", "y", "--bandwidth", ""], ("--bandwidth (where it is no number) must be one of", "got ''.")),
        (["--target", "y", "--features", ""], ("--features must name columns, separated by commas, got ''.",)),
        (["--target", "y", "--features", "x\nz"], ("must stand in one line, separated by commas, got 'x\\nz'.",)),
        (["--target", "y", "--predict", "good.csv", "--quantiles", ""], ("--quantiles must be numbers", "got ''.")),
        (["--target", "y", "--quantiles", ""], ("--quantiles must be numbers between 0 and 1", "got ''.")),
        (["--target", "y", "--empty", "zero"], ("--empty must be one of",)),
        (["--target", "y", "--method", "nuft"], ("--method must be one of", "did you mean 'nufft'?")),
        (["--target", "y", "--method", "nufft", "--kernel", "boxcar"], ("'nufft' with --kernel boxcar",)),
        (["--target", "y", "--rtol", "2"], ("--rtol must be a number in (0, 1), got 2.0",)),
        (["--target", "y", "--std"], ("--std must come with --predict, got none",)),
        (["--target", "y", "--quantiles", "0.5"], ("--quantiles must come with --predict, got none",)),
        (["--target", "y", "--quantiles", "5,95"], ("--quantiles must be numbers between 0 and 1",)),
        (["--target", "y", "--quantiles", "half"], ("--quantiles must be numbers between 0 and 1",)),
        (["--target", "y", "--predict", "new.csv"], ("regress: new.csv must exist, got no such file",)),
        (["--target", "y", "--predict", "."], ("regress: . must be a file, got a folder",)),
        (["--target", "y", "--out", "no/out.csv"], ("regress: --out must be in a folder that exists, got no,",)),
        (["--target", "y", "--out", "out.xlsx"], ("must end in one of .csv, .tsv, .csv.gz, ", "got out.xlsx")),
        (["--target", "y", "--out", "good.csv"], ("--out must be another file than those that are read",)),
        (["--target", "y", "--out", "-", "--json"], ("--out must be a file with --json, which prints too",)),
        (["--target", "y", "--plot", "fit.docx"], ("--plot must end in one of", ".png", "got fit.docx",)),
        (["--target", "y", "--plot", "no/fit.png"], ("--plot must be in a folder that exists, got no,",)),
        (["--target", "name", "--order", "1"], ("--order 1 must come with a target of numbers, got text in 'name'",)),
        (["--target", "name", "--predict", "good.csv", "--std"], ("--std must come with a target of numbers",)),
        (
            ["--target", "name", "--predict", "good.csv", "--quantiles", "0.5"],
            ("--quantiles must come with a target of numbers",),
        ),
    ],
)  # fmt: skip
def test_options(regard, good: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: tuple) -> None:
    monkeypatch.chdir(good.parent)
    _refused(regard("regress", "good.csv", *options), *message)
    assert [each.name for each in good.parent.iterdir()] == ["good.csv"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("1,-2,1", "weights 'w' must hold numbers of at least 0, not all 0, got -2 in line 3"),
        ("0,0,0", "got 0 in every row"),
        ("0,0,3", "must have two rows or more that miss nothing and have a weight, got 1 of 3"),
        ("1,inf,3", "must be finite, got inf in line 3"),
        (",,", "got a column that is empty"),
        ("2024-01-01,2024-01-02,2024-01-03", "got dates"),
    ],
)
def test_weights(regard, tmp_path: Path, weights: str, message: str) -> None:
    path = tmp_path / "a.csv"
    pd.DataFrame({"x": [1, 2, 3], "y": [1, 4, 9], "w": weights.split(",")}).to_csv(path, index=False)
    _refused(regard("regress", path, "--target", "y", "--weights", "w"), message)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("x,name,w\n1,a,1\n", "new.csv must have the column 'z', as the rows learned from have, got no such one"),
        ("x,z,name,w\none,1,a,1\ntwo,2,a,1\n", "column 'x' of new.csv must hold numbers, got 'one'"),
        ("x,z,name,w\ninf,1,a,1\n", "column 'x' of new.csv must be finite, got inf in line 2"),
        ("x,z,name,w,y_predicted\n1,1,a,1,1\n", "new.csv must have no column 'y_predicted', which predictions add"),
        ("x,z\n", "new.csv must have rows"),
    ],
)
def test_rows_to_predict(regard, good: Path, monkeypatch: pytest.MonkeyPatch, new: str, message: str) -> None:
    monkeypatch.chdir(good.parent)
    Path("new.csv").write_text(new)
    outcome = regard("regress", "good.csv", "--target", "y", "--predict", "new.csv", "--out", "out.csv")
    _refused(outcome, message)
    assert not Path("out.csv").exists()


def test_files(regard, tmp_path: Path) -> None:
    _refused(regard("regress", tmp_path / "no.csv", "--target", "y"), "no.csv must exist, got no such file")
    _refused(regard("regress", tmp_path, "--target", "y"), "must be a file, got a folder")
    _refused(
        regard("regress", "-", "--target", "y"), "regress: standard input must have a row of names", "an empty file"
    )
    _refused(regard("regress", "-", "--target", "y", "--predict", "-", stdin=GOOD), "--predict must be a file when")


def test_what_is_wrong_is_found_before_anything_is_written(regard, good: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "out.csv", tmp_path / "no" / "fit.png"
    _refused(regard("regress", good, "--target", "y", "--out", out, "--plot", png), "--plot must be in a folder")
    assert not out.exists()


def test_usage(regard) -> None:
    for arguments in (["regress"], ["regress", "a.csv"], ["regress", "a.csv", "--target", "y", "--order", "2"]):
        outcome = regard(*arguments)
        assert outcome.code == 2
        assert "Traceback" not in outcome.err


@pytest.mark.parametrize("package", ["pandas", "sklearn", "matplotlib", "pyarrow"])
def test_a_missing_package_names_its_extra(regard, good: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = messages.find_spec
    monkeypatch.setattr(messages, "find_spec", lambda name: None if name == package else found(name))
    options = ["--plot", good.parent / "fit.png", "--out", good.parent / "out.parquet"]
    outcome = regard("regress", good, "--target", "y", *options)
    _refused(outcome, f"{package} is missing: pip install 'regard[regress]'")
