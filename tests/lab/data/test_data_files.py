"""Files that a user names: pipes, links in a circle, and what unpacks to more than may be read."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from regard._utils.files import read_bytes
from regard_cli.tables import read
from regard_lab._options import read_toml
from regard_lab.data.pairs import read_pairs


@pytest.mark.parametrize("data", [b"", b"x,y\n1,2\n", gzip.compress(b"x,y\n1,2\n")], ids=["empty", "plain", "gzip"])
def test_a_pipe_waits_for_its_writer(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Timer(0.3, path.write_bytes, (data,))
    writer.start()
    assert read_bytes(path, "read", 100) == (data and b"x,y\n1,2\n")
    writer.join()


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    code = f"""
import signal
from regard._utils.files import read_bytes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores interrupts for what runs in the background
print("waiting", flush=True)
read_bytes({str(path)!r}, "", 9)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"waiting\n"
        time.sleep(0.5)
        assert reader.poll() is None
        reader.send_signal(signal.SIGINT)
        try:
            _, err = reader.communicate(timeout=60)
        finally:
            reader.kill()
    assert reader.returncode == -signal.SIGINT
    assert err.endswith(b"KeyboardInterrupt\n")


def test_a_pipe_with_a_writer_is_read_without_a_word(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(b"a\tb\nc\td\n")
    assert read_pairs(f"/dev/fd/{reader}").sources == ["a", "c"]
    os.close(reader)


@pytest.mark.parametrize("load", [read, read_pairs, read_toml])
def test_no_file_at_all(tmp_path: Path, load) -> None:
    circle = tmp_path / "circle.csv"
    circle.symlink_to(circle)
    for path, message in (
        (circle, "must be readable, got Too many levels of symbolic links"),
        (tmp_path, "must be a file, got a folder"),
        (tmp_path / "none.csv", "must exist, got no such file"),
        ("a\0b", "must be readable, got embedded null byte"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "data", "message"),
    [
        (
            read,
            b'"' + b"x" * (1 << 28),
            r"must have at most 134,217,728 bytes \(unpacked, if it is compressed\)",
        ),
        (read_pairs, b"x" * (1 << 28), "line 1 must have fewer than 1,048,576 bytes, got more"),
        (read_toml, b"#" * (1 << 28), "must have at most 1,048,576 bytes"),
    ],
)
def test_what_unpacks_to_more_than_may_be_read_takes_no_memory(tmp_path: Path, load, data: bytes, message: str) -> None:
    path = tmp_path / "small.csv.gz"
    path.write_bytes(gzip.compress(data, 1))
    assert path.stat().st_size < 2_000_000
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000_000


@pytest.mark.slow
def test_a_few_bytes_of_parquet_do_not_stand_for_gigabytes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = tmp_path / "small.parquet"
    pandas.DataFrame({"x": pandas.Categorical.from_codes([0] * 200_000, ["x" * 4000]), "y": 1.0}).to_parquet(path)
    import pyarrow.parquet as parquet

    plain = parquet.read_table(path).replace_schema_metadata(None)
    parquet.write_table(plain.set_column(0, "x", plain["x"].cast("string")), path)
    assert path.stat().st_size < 2_000_000
    with pytest.raises(ValueError, match="must have at most 134,217,728 bytes"):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 140_000 + ",y\n1,2\n", "must have names of columns in its first row, got one of more than 131,072"),
        ('"x,y\n' + "1,2\n" * 50_000, "must have names of columns in its first row, got one of more than 131,072"),
        ('"",""\n"",""\n', "must have names of columns in its first row, got nothing but empty cells"),
        (",".join(f"c{i}" for i in range(10_001)) + "\n", "must have at most 10,000 columns, got 10,001"),
    ],
    ids=["long", "open", "empty", "wide"],
)
def test_headers_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_long_cell_is_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "x" * 200_000 + ",1\n")
    assert len(read(path).frame["x"][0]) == 200_000


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000,
        f"[a{'.b' * 3000}]",
        "a = 99999999999999999999",
        "a = " + "9" * 5000,
        "a = 0x" + "f" * 99,
    ],
    ids=["brackets", "dots", "large", "digits", "hexadecimal"],
)
def test_options_without_measure(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"options: .* must be TOML, got something else") as caught:
        read_toml(path)
    assert len(str(caught.value)) < 700
