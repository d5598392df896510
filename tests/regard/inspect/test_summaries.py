"""Summaries are those of the whole matrix, and what they hold grows with L + S."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, L, made, tokens
from hypothesis import given
from hypothesis import strategies as st
from pages import Page
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from regard.inspect import AttentionSummary, LayerRecord, Record, Text, capture
from regard.inspect._record.summary import BASE, Pyramid
from regard.integrations.transformers import register


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(summary: LayerRecord, whole: LayerRecord, k: int = 3) -> None:
    assert isinstance(summary, AttentionSummary)
    assert (summary.shape, summary.kind, summary.heads_per_group) == (whole.shape, whole.kind, whole.heads_per_group)
    weights = whole.weights().double()
    torch.testing.assert_close(summary.topk(k).weights, weights.float().topk(k).values, rtol=1e-5, atol=1e-6)
    found = weights.gather(-1, summary.topk(k).indices.clamp(min=0)) * (summary.topk(k).indices >= 0)
    torch.testing.assert_close(found.float(), summary.topk(k).weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(summary.entropy().double(), torch.special.entr(weights).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(summary.received().double(), weights.sum(2), rtol=1e-4, atol=1e-4)
    for level in summary.pyramid():
        blocks(level.max, level.mean, weights, level.size)


def blocks(largest: Tensor, mean: Tensor, weights: Tensor, size: int) -> None:
    """Compare with every block of the matrix, one by one."""
    rows, cols = weights.shape[2:]
    assert largest.shape[2:] == mean.shape[2:] == (-(-rows // size), -(-cols // size))
    for down in range(largest.shape[2]):
        for across in range(largest.shape[3]):
            block = weights[:, :, down * size : (down + 1) * size, across * size : (across + 1) * size]
            torch.testing.assert_close(largest[:, :, down, across].double(), block.amax((2, 3)), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mean[:, :, down, across].double(), block.mean((2, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.campaign(keep=3)
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize("name", ["llama, grouped", "mistral, sliding"])
def test_what_a_model_reads_and_writes(name: str, implementation: str) -> None:
    model, given_tokens = made(DECODERS[name]()), tokens()
    model.set_attn_implementation(implementation)
    runs: list[Record] = []
    for keep in ("rows", "summaries"):
        with capture(model, keep=keep, topk=3) as record:
            model.generate(given_tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        runs.append(record)
    assert runs[0].layers == runs[1].layers and len(runs[1].runs(0)) == 1
    for whole, summary in zip(*runs):
        same(summary, whole)


@torch.no_grad()
def test_encoder_decoders_and_fast_paths() -> None:
    pairs = made(PAIRED["bart"](), AutoModelForSeq2SeqLM)
    fast = nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    model, runs = nn.ModuleList([pairs, fast]), []
    for keep in ("rows", "summaries"):
        with capture(model, keep=keep, topk=3) as record:
            pairs(tokens(), decoder_input_ids=tokens(length=4))
            fast(drawn(2, 7, 16))
        runs.append(record)
    for whole, summary in zip(*runs, strict=True):
        same(summary, whole)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 9))
def test_pyramids_of_rows_that_come_in_parts(parts: list[int], cols: int, seed: int) -> None:
    weights = torch.rand(1, 2, sum(parts), cols, generator=torch.Generator().manual_seed(seed))
    pyramid, at = Pyramid((1, 2), base=8), 0
    for each in parts:
        pyramid.add(weights[:, :, at : at + each])
        at += each
    levels = pyramid.levels()
    assert max(levels[0].max.shape) <= 8 and levels[-1].max.shape == (1, 2, 1, 1)
    for level in levels:
        rows, across = (-(-each // level.size) for each in weights.shape[2:])
        padded = F.pad(weights, (0, across * level.size - cols, 0, rows * level.size - weights.shape[2]))
        cells = padded.unflatten(3, (across, -1)).unflatten(2, (rows, -1))
        ones = F.pad(torch.ones_like(weights), (0, across * level.size - cols, 0, rows * level.size - weights.shape[2]))
        counts = ones.unflatten(3, (across, -1)).unflatten(2, (rows, -1)).sum((3, 5))
        assert torch.equal(level.max, cells.amax((3, 5)))
        torch.testing.assert_close(level.mean, cells.double().sum((3, 5)).div(counts).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_memory_grows_with_the_length_alone() -> None:
    sizes = []
    for length in (1024, 2048, 4096):
        query = drawn(1, 1, length, 4)
        with capture(keep="summaries", topk=2) as record:
            F.scaled_dot_product_attention(query, query, query)
        sizes.append(record.nbytes)
    assert sizes[0] < 2 * 4 * BASE**2 + 1024 * 32 and sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


class TestFiles:
    @pytest.fixture(scope="class")
    def record(self) -> Record:
        model = made(DECODERS["gpt2"]())
        with torch.no_grad(), capture(model, keep="summaries", topk=4) as record:
            model(tokens())
        return record

    def test_a_summary_comes_back_whole(self, record: Record, tmp_path: Path) -> None:
        read = Record.load(record.save(tmp_path / "run.regard"))
        for one, other in zip(read, record, strict=True):
            assert isinstance(one, AttentionSummary) and isinstance(other, AttentionSummary)
            assert repr(one) == repr(other) and one.nbytes == other.nbytes
            for mine, theirs in zip(vars(one.topk(4)).values(), vars(other.topk(4)).values(), strict=True):
                assert torch.equal(mine, theirs)
            for mine, theirs in zip(one.pyramid(), other.pyramid(), strict=True):
                assert torch.equal(mine.max, theirs.max) and torch.equal(mine.mean, theirs.mean)

    @pytest.mark.parametrize("change", [(b'\\"size\\": 1', b'\\"size\\": 2'), (b'\\"size\\": 1', b'\\"size\\": 0'),
                                        (b'\\"groups\\": 4', b'\\"groups\\": 9'), (b'\\"groups\\"', b'\\"grouqs\\"'),
                                        (b"largest", b"smalles")])  # fmt: skip
    def test_damage(self, record: Record, tmp_path: Path, change: tuple[bytes, bytes]) -> None:
        path = record.save(tmp_path / "run.regard")
        data = path.read_bytes()
        assert change[0] in data
        path.write_bytes(data.replace(*change))
        with pytest.raises(ValueError, match="must be a whole record of attention, got a damaged one"):
            Record.load(path)

    def test_what_is_gone_is_said(self, record: Record) -> None:
        with pytest.raises(ValueError, match="weights: record must be captured with its queries and keys, got"):
            record[0].weights()
        with pytest.raises(ValueError, match=r"topk: k must be in \[1, 4\], the number of weights in the summary"):
            record[0].topk()


@torch.no_grad()
@pytest.mark.parametrize("length", [12, 700])
def test_the_page_of_a_summary(length: int) -> None:
    query = 3 * drawn(1, 2, length, 8)
    with capture() as whole:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with capture(keep="summaries", topk=4) as record:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    words = [f"t{i}" for i in range(length)]
    page = Page(str(record.describe(Text(tuple(words), (0,))).to_html()))
    (layer,), heads, weights = page.described["layers"], page.described["heads"], whole[0].weights(batch=0)
    assert "only the 4 largest weights of each query" in page.described["note"]
    size = 1 if length == 12 else 8
    for head, described in enumerate(heads):
        best = weights[head].topk(4).values
        found = np.frombuffer(page.block(described["weights"]["weights"]), "<f4").reshape(length, 4)
        np.testing.assert_allclose(found, best, rtol=1e-5, atol=1e-6)
        assert np.frombuffer(page.block(described["weights"]["keys"]), "<i4").min() == -1  # row 0 has one key
        largest, bare, _ = page.rows(described)
        np.testing.assert_allclose(largest, weights[head].amax(-1), rtol=2**-10)
        assert (bare <= largest).all() and bare[0] == 0
        assert described["pooled"]["size"] == [size, size]
        blocks = np.frombuffer(page.block(described["pooled"]["blocks"]), np.uint8)
        assert blocks.size == (-(-length // size)) ** 2
    down, across = layer["thumbnail"]
    facts = 4 * 5 + 7 * down  # five numbers of a head; what each row of the thumbnail sees, and how spread it is
    known = page.overview(0)
    blocks = 2 * down * (max(layer["block"]) > 1)  # the block of the special token, without it, in each head
    assert known["bare"].size == blocks and max(down, across) <= 48
    assert len(page.block(layer["overview"])) == 2 * (facts + down * across) + blocks
    np.testing.assert_allclose(known["hidden"], weights[..., 0].mean(1), rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"keep": "all"}, {"topk": 0}, {"topk": True}, {"topk": 2.0}])
def test_what_is_wrong_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"capture: {next(iter(wrong))} must be "), capture(**wrong):
        pass


@torch.no_grad()
def test_a_query_that_sees_nothing_and_matrices_without_keys() -> None:
    query = drawn(1, 2, 3, 4)
    with capture(keep="summaries") as record:
        F.scaled_dot_product_attention(query, query, query, torch.zeros(3, 3, dtype=torch.bool))
        F.scaled_dot_product_attention(query, query[:, :, :0], query[:, :, :0])
    assert not record[0, 0].topk(1).weights.any() and (record[0, 0].topk(1).indices == -1).all()
    assert record[0, 1].shape == (1, 2, 3, 0) and L
