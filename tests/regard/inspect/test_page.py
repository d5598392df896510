"""A page holds what its picture shows: exact weights, texts as data, and nothing that asks anybody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, L, made, tokens
from pages import Page, addresses, decoded, pooled
from torch import nn
from transformers import AutoModelForSeq2SeqLM

import regard
from regard import masks
from regard.inspect import Alignment, Patches, Record, Text, capture, flow, render_html, rollout, save_html
from regard.inspect._view.overview import codes
from regard.inspect._view.page import HONEST, describe_page
from regard_lab.models import DecoderLM, DecoderLMConfig

PIXEL = b"\x89PNG\r\n\x1a\n" + b"0" * 20


def attended(*, L: int = 9, S: int = 9, heads: int = 2, seed: int = 0, **options: object) -> Record:
    """Attention without a model."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, heads, size, 8, generator=generator) * 2 for size in (L, S))
    with capture() as record:
        regard.attention(query, key, key, **options)  # type: ignore[call-overload]
    return record


def exact(record: Record, most: float = 1e-5) -> Page:
    page = Page(str(record.to_html()))
    heads = iter(page.heads())
    for layer, run in enumerate(record):
        expected = run.weights(batch=0).double().numpy()
        for number in range(run.shape[1]):
            head = next(heads)
            assert (head["layer"], head["head"]) == (layer, number)
            found = page.weights(head)
            assert found.shape == expected[number].shape
            assert np.abs(found - expected[number]).max() < most
            whole, bare, entropy = page.rows(head)
            assert np.allclose(whole, expected[number].max(1), rtol=2**-10, atol=1e-6) and (bare <= whole).all()
            positive = np.where(expected[number] > 0, expected[number], 1)
            assert np.allclose(entropy, -(positive * np.log(positive)).sum(1), rtol=2**-9, atol=1e-4)
    assert next(heads, None) is None
    return page


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_weights_of_decoders(name: str) -> None:
    model = made(DECODERS[name]())
    with capture(model) as record:
        model(tokens(1))
    page = exact(record)
    assert all(head["weights"]["kind"] == "products" for head in page.heads())


@torch.no_grad()
@pytest.mark.parametrize("name", PAIRED)
def test_weights_of_encoder_decoders(name: str) -> None:
    model = made(PAIRED[name](), AutoModelForSeq2SeqLM)
    with capture(model) as record:
        model(input_ids=tokens(1), decoder_input_ids=tokens(1, 6))
    record.describe([f"s{i}" for i in range(L)], [f"t{i}" for i in range(6)])
    page = exact(record, 5e-4 if name == "t5" else 1e-5)  # biases go as tables, in float16
    layers = page.described["layers"]
    texts = [text["tokens"] for text in page.described["texts"]]
    for layer in layers:
        queries, keys = texts[layer["queries"]], texts[layer["keys"]]
        assert [len(queries), len(keys)] == layer["shape"]
        assert (queries[0], keys[0]) == (("t0", "s0") if layer["kind"] == "cross" else (queries[0], queries[0]))
    assert len(texts) == 2 and {layer["kind"] for layer in layers} == {"self", "cross"}


def test_what_a_model_writes_is_one_matrix() -> None:
    model = made(DECODERS["llama, grouped"]())
    with capture(model) as record, torch.no_grad():
        model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False)
    page = exact(record)
    assert page.described["layers"][0]["shape"] == [8, 8]
    assert page.described["heads"][0]["weights"]["kind"] == "products"


@pytest.mark.parametrize(
    "options",
    [
        {"score": "gaussian"},
        {"normalizer": "entmax15"},
        {"attn_mask": masks.alibi(2)},
        {"attn_mask": torch.arange(81).view(9, 9) % 3 > 0},
        {"score": regard.scores.Gaussian(torch.linspace(0.7, 2.0, 8))},
    ],
    ids=str,
)
def test_what_is_no_softmax_of_products_is_sent_as_it_is(options: dict[str, object]) -> None:
    page = exact(attended(**options), 5e-4)
    assert {head["weights"]["kind"] for head in page.described["heads"]} == {"table"}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": masks.window(2, 0)}], ids=str)
def test_products_need_no_matrix(options: dict[str, object]) -> None:
    page = exact(attended(**options))
    assert {head["weights"]["kind"] for head in page.described["heads"]} == {"products"}


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 70), (100, 49)])
def test_any_shape(shape: tuple[int, int]) -> None:
    record = attended(L=shape[0], S=shape[1])
    page = exact(record)
    grid = page.overview(0)
    weights = [page.weights(head) for head in page.heads()]
    weights.append(np.mean(weights, 0))
    expected = [-(each * np.log(each)).sum(1).mean() for each in weights]
    assert np.allclose(grid["entropy"], expected, atol=1e-5) and (grid["sinks"] == -1).all()
    assert np.allclose(grid["received"], [each.mean(0).max() for each in weights], atol=1e-5)
    block = tuple(-(-each // 48) for each in shape)
    assert (grid["counts"] == shape[1]).all() and (grid["starts"] == 0).all() and (grid["stops"] == shape[1]).all()
    for thumbnail, each in zip(grid["thumbnails"], weights, strict=True):
        found, whole = decoded(thumbnail), pooled(each, block)
        assert found.shape == whole.shape
        assert np.allclose(found, whole, rtol=0.035, atol=2.0**-24)


def test_a_large_matrix_is_pooled_with_its_sinks_apart() -> None:
    length, special = 2100, (0, 7)
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, length, 8, generator=generator) for _ in range(2))
    key[..., 33, :] = query.mean(2) * 0 + 3  # a sink where no special token is
    query += 1.5
    with capture() as record:
        F.scaled_dot_product_attention(query, key, key, is_causal=True)
    record.describe(Text(tuple(map(str, range(length))), special))
    page = exact(record)
    (head,) = page.described["heads"]
    size, sinks = head["pooled"]["size"], page.overview(0)["sinks"]
    assert size == [2, 2] and sinks.tolist() == [33]
    whole = page.weights(head)
    hidden = sorted({*special, 33})
    bare = whole.copy()
    bare[:, hidden] = 0
    rows = -(-length // 2)
    blocks = np.frombuffer(page.block(head["pooled"]["blocks"]), np.uint8).reshape(rows, rows)
    assert np.allclose(decoded(blocks), pooled(bare, size), rtol=0.035, atol=2.0**-24)
    apart = np.frombuffer(page.block(head["pooled"]["sinks"]), np.uint8).reshape(rows, len(hidden))
    assert np.allclose(decoded(apart)[:, 2], pooled(whole[:, [33]], (2, 1))[:, 0], rtol=0.035, atol=2.0**-24)
    assert np.allclose(page.rows(head)[1], bare.max(1), rtol=2**-10, atol=1e-6)


def test_thumbnails_without_sinks_and_their_share() -> None:
    """Blocks of two keys: one has a special token beside another key, and one has nothing but special tokens."""
    length, special = 70, (0, 10, 11)
    record = attended(L=length, S=length, heads=1)
    page = Page(str(record.describe(Text(tuple(map(str, range(length))), special)).to_html()))
    grid, weights = page.overview(0), record[0].weights(batch=0, head=0).numpy()
    assert page.described["layers"][0]["block"] == [2, 2] and grid["sinks"].tolist() == [-1]
    assert np.allclose(grid["hidden"], weights[:, special].sum(1).mean(), rtol=1e-5)
    bare = grid["bare"].reshape(35, 2)  # the blocks of keys 0 and 1, and of 10 and 11
    assert np.allclose(decoded(bare[:, 0]), weights[:, 1].reshape(35, 2).max(1), rtol=0.035)
    assert (bare[:, 1] == 0).all()


def test_codes_are_steps_of_the_logarithm() -> None:
    weights = torch.cat([torch.zeros(1), torch.logspace(-30, 0, 1000, base=2.0)])
    found = decoded(codes(weights).numpy())
    expected = weights.double().numpy()
    small = expected < 2.0**-24
    assert (codes(weights) > 0).all()  # 0 says that a pair is masked
    assert (found[small] == 0).all() and np.allclose(found[~small], expected[~small], rtol=0.034)


def test_a_record_of_float16_is_near_that_of_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(1, 1, 60, 64, generator=generator) for _ in range(2))
    with capture(precision="float16") as record:
        F.scaled_dot_product_attention(query, key, key)
    page = Page(render_html(record))
    expected = (query.double() @ key.double().mT / 8).softmax(-1)[0, 0].numpy()
    assert np.abs(page.weights(page.described["heads"][0]) - expected).max() < 1e-3


class TestTexts:
    evil = ("</script><script>alert(1)</script>", "<!--<script>", "\u2028\u202e\x00", "]]>", "&lt;", "\\u003c")

    def test_tokens_are_data(self) -> None:
        record = attended(L=6, S=6).describe(self.evil, title=self.evil[0])
        text = str(record.to_html())
        page = Page(text)
        assert page.described["texts"][0]["tokens"] == list(self.evil)
        assert page.described["title"] == self.evil[0]
        others = [name for name in page.scripts if name not in ("page", "code")]
        assert all(re.fullmatch(r"block-\d+", name) for name in others)
        assert "alert(1)" not in page.scripts["code"] and "<!--" not in page.scripts["page"]

    def test_texts_come_back_from_a_file(self, tmp_path: Path) -> None:
        text = Text(self.evil, (0, 5), Patches(PIXEL, 1, 3, 2))
        record = attended(L=6, S=6).describe(text, title="evil")
        back = Record.load(record.save(tmp_path / "evil.regard"))
        assert back.texts == (text,) and back.title == "evil"
        assert Page(render_html(back)).scripts["page"] == Page(render_html(record)).scripts["page"]
        (found,) = Page(render_html(back)).described["texts"]
        (image,) = found["images"]
        assert image["data"].startswith("data:image/png;base64,")
        assert [at for at, place in enumerate(found["places"]) if place] == [2, 3, 4]

    def test_more_tokens_than_columns(self) -> None:
        with pytest.raises(ValueError, match="texts must have as many tokens as the layer has rows, 9, got 10"):
            attended().describe(["a"] * 10)
        with pytest.raises(ValueError, match="texts must be one text, or the texts read and written, got 3 texts"):
            attended().describe(["a"], ["a"], ["b"])

    def test_the_last_rows_of_a_text(self) -> None:
        record = attended(L=2, S=5).describe(Text(("a", "b", "c", "d", "e"), (0, 4)))
        texts = Page(render_html(record)).described["texts"]
        assert [text["tokens"] for text in texts] == [["d", "e"], ["a", "b", "c", "d", "e"]]
        assert [text["special"] for text in texts] == [[1], [0, 4]]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Text("abc"), "Text: tokens must be a sequence of str"),  # type: ignore[arg-type]
            (lambda: Text(("a",), (1,)), "Text: special must be below 1"),
            (lambda: Text(("a",), (), Patches(PIXEL, 1, 2)), "Text: patches must end by token 1, got 2"),
            (lambda: Patches(b"BM", 1, 1), "Patches: image must be a file of PNG, JPEG, WebP or GIF"),
            (lambda: Patches(PIXEL, 0, 1), "Patches: rows and cols must be at least 1"),
        ],
    )
    def test_bad_texts(self, make, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            make()


class TestTheFile:
    def test_it_asks_nobody(self, tmp_path: Path) -> None:
        text = save_html([Alignment(("I",), ("je",), torch.ones(1, 1), "I")], tmp_path / "a.html").read_text()
        page = Page(text)
        assert not addresses(text)
        assert not {"link", "img", "iframe", "object"} & set(page.tags)
        assert not {name for name, _ in page.attributes} & {"src", "href"}
        rules = dict(page.attributes)["content"]
        policies = [value for name, value in page.attributes if name == "content" and value and "default-src" in value]
        assert len(policies) == 1 and "default-src 'none'" in policies[0] and "connect-src" not in policies[0], rules
        assert "unsafe-inline' 'sha256" not in policies[0] and re.search(r"script-src 'sha256-[^']+'", policies[0])

    def test_alignments_are_pictures_of_their_own(self) -> None:
        shown = [
            Alignment(("a", "b"), ("x",), torch.tensor([[0.25, 0.75]]), "one"),
            Alignment(("a",), (), torch.ones(0, 1)),
        ]
        page = Page(render_html(shown, heading="Two", note="Rows are what was written."))
        assert page.described["title"] == "Two" and page.described["note"].startswith(
            "Rows are what was written. A weight"
        )
        assert [layer["name"] for layer in page.described["layers"]] == ["one", ""]
        assert page.weights(page.described["heads"][0]).tolist() == [[0.25, 0.75]]
        assert page.weights(page.described["heads"][1]).shape == (0, 1)

    def test_every_page_says_what_weights_explain(self) -> None:
        assert Page(str(attended().to_html())).described["note"].endswith(HONEST)
        alignment = Alignment(("a",), ("b",), torch.ones(1, 1))
        assert Page(render_html([alignment], note="Of one run.")).described["note"] == f"Of one run. {HONEST}"
        assert render_html(alignment) == render_html([alignment])

    def test_two_records(self) -> None:
        first, second = attended(seed=1).describe(title="one"), attended(seed=2)
        page = Page(render_html([first, second]))
        assert page.described["records"] == ["one", "record 2"]
        assert [layer["record"] for layer in page.described["layers"]] == [0, 1]
        found = page.weights(page.described["heads"][3])
        assert np.abs(found - second[0].weights(batch=0, head=1).numpy()).max() < 1e-5

    def test_which_sequence(self) -> None:
        query = torch.randn(3, 1, 4, 8, generator=torch.Generator().manual_seed(0))
        with capture() as record:
            F.scaled_dot_product_attention(query, query, query)
        page = Page(render_html(record, batch=2))
        assert (
            np.abs(page.weights(page.described["heads"][0]) - record[0].weights(batch=2, head=0).numpy()).max() < 1e-6
        )
        with pytest.raises(ValueError, match="page: batch must be below 3, the batch size, got 3"):
            render_html(record, batch=3)

    def test_nothing_to_show(self) -> None:
        with capture(nn.Linear(2, 2)) as record:
            pass
        with pytest.raises(ValueError, match="page: record must hold attention, got none"):
            render_html(record)

    def test_a_matrix_that_cannot_be_sent(self) -> None:
        length = 4200
        query = torch.randn(1, 1, length, 4, generator=torch.Generator().manual_seed(0))
        with capture() as record:
            regard.attention(query, query, query, masks.window(3, 0), score="gaussian")
        with pytest.raises(ValueError, match=r"be a softmax of dot products .* got 4200 × 4200"):
            render_html(record)


def test_learned_scores_come_back_from_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 8, generator=generator)
    score = regard.scores.Additive(torch.randn(5, generator=generator), torch.randn(8, 5, generator=generator).mT)
    with capture() as record:
        regard.attention(x[:, None], torch.randn(2, 1, 6, 5, generator=generator), x[:, None], score=score)
        regard.attention(x[:, None], x[:, None], x[:, None], normalizer=regard.normalizers.Entmax(1.3))
    back = Record.load(record.save(tmp_path / "a.regard"))
    assert len(back.runs(0)) == len(record.runs(0)) == 2
    for mine, theirs in zip(record.runs(0), back.runs(0)):
        assert torch.allclose(mine.weights(), theirs.weights(), atol=1e-6)
    with capture() as record:
        regard.attention(x, x, x, score=lambda score, b, h, q, k: score * 2)
    with pytest.raises(ValueError, match="save: score must be a built-in one such as"):
        record.save(tmp_path / "b.regard")


def test_our_decoder(tmp_path: Path) -> None:
    model = DecoderLM(DecoderLMConfig(20, width=16, layers=2, heads=4)).eval()
    with capture(model) as record, torch.no_grad():
        model(torch.arange(7)[None])
    assert len(exact(record).heads()) == 8


def test_damaged_records_are_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part of the description may be anything."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    record = attended(score="gaussian").describe(Text(tuple("abcdefghi"), (0,), Patches(PIXEL, 2, 2)), title="nine")
    path = record.save(tmp_path / "whole.regard")
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["regard"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    refused = 0
    for value in (None, -1, 10**9, "x", [], {}, [[]], {"name": "additive", "fields": {}}, True, 1.5):
        for place in places(about):
            changed = json.loads(json.dumps(about))
            inner = changed
            for step in place[:-1]:
                inner = inner[step]
            inner[place[-1]] = value
            save_file(tensors, tmp_path / "damaged.regard", {"regard": json.dumps(changed)})
            try:
                for run in Record.load(tmp_path / "damaged.regard"):
                    run.weights(batch=0)
            except ValueError as error:
                assert str(error).endswith(".") and "\n" not in str(error)
                refused += 1
    assert refused > 150
    monkeypatch.setattr("regard.inspect._record.file.available_memory", lambda: 100)
    with pytest.raises(ValueError, match=r"whole.regard must fit 0.0 GB of memory, got 0.0 GB"):
        Record.load(path)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a description."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from places(inner, (*at, key))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": masks.window(300, 20)}], ids=str)
def test_a_matrix_too_large_to_read_whole(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    """Evenly spaced queries stand for the others; log-sum-exps come in chunks, as exact as ever."""
    L = 2100
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, L, 8, generator=generator) * 2 for heads in (4, 2))
    with capture() as record:
        regard.attention(query, key, key, enable_gqa=True, **options)  # type: ignore[call-overload]
    monkeypatch.setattr("regard.inspect._view.page._READ", 1000)
    data = describe_page(record)
    assert "show one of 2 queries" in data.described["note"]
    (layer,), heads = data.described["layers"], data.described["heads"]
    weights = record[0].weights(batch=0)
    for number, head in enumerate(heads):
        chunks = head["weights"]["lse"]
        assert len(chunks) == 3
        lse = np.concatenate([np.frombuffer(data.blocks[each](), "<f4") for each in chunks])
        assert np.allclose(lse, record[0].lse()[0, number].numpy(), atol=1e-4)
        at = torch.arange(1, L, 2)
        rows = np.frombuffer(data.blocks[head["rows"]](), "<f2").reshape(3, L)
        assert np.allclose(rows[0, 1::2], weights[number, at].amax(-1), rtol=2**-9, atol=1e-6)
        assert (rows[:, 0::2] == rows[:, 1::2]).all()
        assert head["pooled"]["size"] == [2, 2]
        blocks = np.frombuffer(data.blocks[head["pooled"]["blocks"]](), np.uint8).reshape(L // 2, L // 2)
        expected = weights[number, at].unflatten(1, (-1, 2)).amax(-1).numpy()
        assert np.allclose(decoded(blocks), expected, rtol=0.035, atol=2.0**-24)
    mean = np.frombuffer(data.blocks[layer["mean"]["rows"]](), "<f2").reshape(3, L)
    assert np.allclose(mean[0, 1::2], weights.mean(0)[1::2].amax(-1), rtol=2**-9, atol=1e-6)


def test_masked_pairs_differ_from_weights_of_zero() -> None:
    gaps = torch.arange(81).view(9, 9) % 3 > 0
    page = Page(str(attended(attn_mask=gaps, normalizer="sparsemax").to_html()))
    for head in page.heads():
        values = np.frombuffer(page.block(head["weights"]["block"]), "<f2").reshape(9, 9)
        assert (np.signbit(values) == ~gaps.numpy()).all() and (values[gaps.numpy()] == 0).any()
    grid = page.overview(0)
    assert (grid["counts"] == gaps.sum(1).numpy()).all()
    assert ((grid["thumbnails"] == 0) == ~gaps.numpy()).all() and (grid["thumbnails"] == 1).any()
    page = Page(str(attended(L=96, S=96, attn_mask=masks.window(4, 0)).to_html()))
    grid, at = page.overview(0), np.arange(0, 96, 2)
    assert (grid["starts"] == np.maximum(at - 4, 0)).all() and (grid["stops"] == at + 2).all()
    assert (grid["counts"][2:] == 5).all()


def test_weights_that_are_no_numbers() -> None:
    query = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    note = "Some queries or keys are not finite"
    for value, is_noted in ((1e30, False), (torch.inf, True), (torch.nan, True)):
        query[0, 0, 2] = value
        with capture() as record:
            F.scaled_dot_product_attention(query, torch.ones_like(query), query)
        page = Page(str(record.to_html()))
        assert (note in page.described["note"]) == is_noted
        hidden = page.overview(0)["thumbnails"] == 0
        assert hidden[0, 2].all() == is_noted and not hidden[1].any()


def test_an_empty_batch_has_no_page() -> None:
    with capture() as record:
        F.scaled_dot_product_attention(*[torch.zeros(0, 2, 3, 4)] * 3)
    with pytest.raises(ValueError, match="page: record must hold a sequence, got an empty batch"):
        describe_page(record)


def test_what_causal_layers_mask_their_rollout_masks() -> None:
    model = DecoderLM(DecoderLMConfig(20, width=16, layers=2, heads=2)).eval()
    with capture(model) as record, torch.no_grad():
        model(torch.arange(7)[None])
    page = Page(str(record.to_html()))
    assert page.described["models"] == ["DecoderLM"]
    for number, kind in ((-2, "rollout"), (-1, "flow")):
        head = page.described["heads"][number]
        values = np.frombuffer(page.block(head["weights"]["block"]), "<f2").reshape(7, 7)
        assert page.layer(head)["kind"] == kind
        assert (np.signbit(values) == np.triu(np.ones((7, 7), bool), 1)).all()


def test_words_of_a_text() -> None:
    tokens = ["[CLS]", "un", "##believ", "##able", "!"]
    (text,) = Page(str(attended(L=5, S=5).describe(tokens).to_html())).described["texts"]
    assert text["tokens"] == tokens and text["labels"] == ["[CLS]", "un", "believ", "able", "!"]
    assert text["words"] == [[0, 1], [1, 4], [4, 5]] and text["wordTexts"] == ["[CLS]", "unbelievable", "!"]
    (text,) = Page(str(attended(L=3, S=3).describe(["a", "##b", "##c"]).to_html())).described["texts"]
    assert text["wordTexts"] == ["abc"]
    patches = Text(("Ġa", "x", "x", "b", "c"), (), Patches(PIXEL, 1, 2, 1))
    (text,) = Page(str(attended(L=5, S=5).describe(patches).to_html())).described["texts"]
    assert text["words"] == [[0, 1], [1, 2], [2, 3], [3, 5]]  # patches stay apart
    (text,) = Page(str(attended(L=3, S=3).describe(["The", " un", "able"]).to_html())).described["texts"]
    assert text["wordTexts"] == ["The", "unable"]
    (text,) = Page(str(attended(L=2, S=2).describe(["a", "b"]).to_html())).described["texts"]
    assert not {"labels", "words", "wordTexts"} & set(text)


def test_every_sequence_and_run_rollout_and_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)]
    model = nn.TransformerEncoder(layers[0], 2, enable_nested_tensor=False).eval()
    with capture(model) as record, torch.no_grad():
        for length in (4, 5):
            model(torch.randn(3, length, 8))
    page = Page(render_html(record, batch=1))
    runs = page.described["runs"]
    assert [(each["sequence"], each["run"]) for each in runs] == [(1, 1), (1, 0), (0, 1), (2, 1), (0, 0), (2, 0)]
    for head in page.heads():
        layer = page.layer(head)
        expected = record.runs(record.layers[layer["number"]])[runs[layer["run"]]["run"]].weights(
            batch=runs[layer["run"]]["sequence"], head=head["head"]
        )
        assert np.abs(page.weights(head) - expected.numpy()).max() < 1e-6
    rolled = [head for head in page.described["heads"] if page.layer(head)["kind"] == "rollout"]
    assert [page.described["runs"][page.layer(head)["run"]]["sequence"] for head in rolled] == [1, 0, 2]
    assert np.abs(page.weights(rolled[1]) - rollout(record, batch=0).numpy()).max() < 1e-3
    flowing = [head for head in page.described["heads"] if page.layer(head)["kind"] == "flow"]
    expected = flow(record, batch=0)
    assert np.abs(page.weights(flowing[1]) - (expected / expected.sum(1, keepdim=True)).numpy()).max() < 1e-3
    monkeypatch.setattr("regard.inspect._view.page._OTHERS", 10)
    alone = Page(render_html(record, batch=1)).described
    assert len(alone["runs"]) == 1 and "one of 6 sequences and runs" in alone["note"]
    assert len(describe_page(record).described["runs"]) == 6
