"""Model folders: their configuration, vocabularies and parameters, each damaged, and often sealed again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.fuzz.mutations import TEXTS, as_json, mutated_bytes, mutated_value
from regard_lab.generation import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder, TransformerConfig, TransformerEncoderDecoder
from regard_lab.text import SubwordVocabulary, SymbolVocabulary

ENGLISH = ["the zone of control", "I love you", "a cat and a dog", "the dog loves the cat", "you and I"]
FRENCH = ["la zone de contrôle", "je t'aime", "un chat et un chien", "le chien aime le chat", "toi et moi"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
NAMES = (CONFIG, "source.json", "target.json", WEIGHTS)


def make(folder: Path) -> None:
    """Write one small model of each kind."""
    letters, sounds = (
        SymbolVocabulary.train(["abcdef"], lowercase=True),
        SymbolVocabulary.train(["K AE T"], separator=" "),
    )
    for name, source, target in (
        ("bpe", SubwordVocabulary.train(ENGLISH), SubwordVocabulary.train(FRENCH, byte_fallback=True)),
        ("unigram", SubwordVocabulary.train(ENGLISH, "unigram"), SubwordVocabulary.train(FRENCH, "characters")),
        ("symbols", letters, sounds),
    ):
        torch.manual_seed(0)
        sizes = len(source), len(target)
        small = RecurrentConfig(*sizes, embedding=4, encoder=3, decoder=4, features=3)
        recurrent = RecurrentEncoderDecoder(small)
        about = {"task": "pronunciation" if name == "symbols" else "translation"}
        SequenceModel(recurrent, source, target, about).save(folder / f"{name}-recurrent")
        wide = TransformerConfig(*sizes, width=4, heads=2, feedforward=4, encoder_layers=1, decoder_layers=1)
        SequenceModel(TransformerEncoderDecoder(wide), source, target, about).save(
            folder / f"{name}-transformer", dtype="bfloat16"
        )


def mutate(drawn: Random, bases: Path, folder: Path) -> None:
    """Write a damaged copy of one of the models."""
    models = sorted(bases.iterdir())
    shutil.copytree(drawn.choice(models), folder)
    for _ in range(drawn.choice((1, 1, 1, 2))):
        path = folder / drawn.choice((*NAMES, CONFIG, WEIGHTS))
        if not path.is_file():
            continue
        kind = drawn.randrange(12)
        if kind == 0:
            path.unlink()
            replaced(drawn, path, drawn.choice(models) / drawn.choice(NAMES))
        elif kind <= 3:
            path.write_bytes(mutated_bytes(drawn, path.read_bytes()))
        elif path.name == WEIGHTS:
            path.write_bytes(_mutated_tensors(drawn, path.read_bytes()))
        else:
            path.write_bytes(_mutated_json(drawn, path.read_bytes()))
    if drawn.random() < 0.02 and (folder / WEIGHTS).is_file():
        os.truncate(folder / WEIGHTS, drawn.choice((2**29, 2**30 + 1, 2**34)))  # without taking the disk
    if drawn.random() < 0.8:
        _seal(folder)


def replaced(drawn: Random, path: Path, other: Path) -> None:
    """Put something else, or nothing, in the place of a file."""
    kind = drawn.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.name)  # in a circle
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to(other)
    elif kind == 4:
        os.mkfifo(path)


def _mutated_json(drawn: Random, data: bytes) -> bytes:
    try:
        return as_json(mutated_value(drawn, json.loads(data)))
    except (ValueError, RecursionError):
        return mutated_bytes(drawn, data)


def _mutated_tensors(drawn: Random, data: bytes) -> bytes:
    """Return a file of parameters with another header or other numbers."""
    size = int.from_bytes(data[:8], "little")
    body = data[8 + size :]
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        names = [name for name in header if name != "__metadata__" and isinstance(header[name], dict)]
    except (ValueError, AttributeError, TypeError):
        return mutated_bytes(drawn, data)
    if not names:
        return data
    name, kind = drawn.choice(names), drawn.randrange(7)
    if kind == 0:
        header = mutated_value(drawn, header)
    elif kind == 1:
        header[drawn.choice(TEXTS) + name] = header.pop(name)
    elif kind == 2:
        header[name]["shape"] = [*header[name].get("shape", []), drawn.choice((1, 0, 2**40))]
    elif kind == 3:
        header[name]["dtype"] = drawn.choice(("F64", "I8", "BOOL", "BF16", "F16", "\x1b[31m", "F8_E4M3"))
    elif kind == 4:
        header["__metadata__"] = {drawn.choice(TEXTS): drawn.choice(TEXTS)}
    elif len(body) >= 4:
        place = drawn.randrange(len(body) // 4) * 4
        odd = struct.pack("<f", drawn.choice((float("nan"), float("inf"), 3e38, 1e12, -1e9, 1e-45, 0.0)))
        count = drawn.choice((1, 1, len(body) // 4))
        body = body[:place] + odd * min(count, (len(body) - place) // 4) + body[place + 4 * count :]
        body = body[: len(data) - 8 - size]
    text = as_json(header)
    claimed = len(text) if drawn.random() < 0.9 else drawn.choice((2**62, 2**24 + 1, 10**8, 0))
    return claimed.to_bytes(8, "little") + text + body


def _seal(folder: Path) -> None:
    """Make the checksums right again, so that what is behind them is reached."""
    if not (folder / CONFIG).is_file():  # a link to /dev/zero has no end
        return
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        sums = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in NAMES[1:]
            if (folder / name).is_file() and not (folder / name).is_symlink() and (folder / name).stat().st_size < 2**26
        }
        config["sha256"] = sums.pop(WEIGHTS, "")
        config["files"] = sums
        config.pop("config_sha256", None)
        config["config_sha256"] = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        (folder / CONFIG).write_bytes(as_json(config))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return
