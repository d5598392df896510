"""The page in a notebook: it gets its description at once, and numbers when it asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from regard.inspect import Record, capture, widget
from regard.inspect._view.page import bundled
from regard.inspect._view.widget import AttentionWidget


@pytest.fixture
def record() -> Record:
    query = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    with capture() as found:
        F.scaled_dot_product_attention(query, query, query)
    return found.describe(list("abcdef"), title="six", sequence=1)


def test_blocks_come_when_they_are_asked_for(record: Record, monkeypatch) -> None:
    sent: list[tuple[object, list[bytes]]] = []
    monkeypatch.setattr(AttentionWidget, "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    page = widget(record, batch=1)
    assert page.page["title"] == "six" and page.page["texts"][0]["tokens"] == list("abcdef")
    number = page.page["heads"][1]["weights"]["lse"]
    page._handle_custom_msg({"block": number}, [])
    ((content, (block,)),) = sent
    assert content == {"block": number}
    assert np.allclose(np.frombuffer(block, "<f4"), record[0].lse()[1, 1].numpy(), atol=1e-5)


@pytest.mark.parametrize("message", [{"block": -1}, {"block": 10**6}, {"block": "0"}, {}, None, [], "block"])
def test_other_messages_are_left_alone(record: Record, monkeypatch, message: object) -> None:
    sent: list[object] = []
    monkeypatch.setattr(AttentionWidget, "send", lambda self, content, buffers=None: sent.append(content))
    AttentionWidget(record)._handle_custom_msg(message, [])
    assert not sent


def test_its_script_is_one_module_that_asks_nobody(record: Record) -> None:
    script = str(AttentionWidget(record)._esm)
    assert "export{" in script.replace(" ", "") and "import(" not in script and "fetch(" in script
    for name in ("page.js", "widget.js"):
        assert len(bundled(name).encode()) + len(bundled("page.css").encode()) < 120_000
