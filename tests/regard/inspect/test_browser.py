"""The page in a browser without a network: it draws, answers the pointer and the keys, and writes what is in view."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, made
from PIL import Image
from tiers import sized
from transformers import AutoModelForSeq2SeqLM

from regard.inspect import (
    Alignment,
    Patches,
    Record,
    Text,
    capture,
    flow,
    head_effect,
    merge_tokens,
    rollout,
    save_html,
    words_of,
)
from regard.inspect._view.page import PageData, bundled, describe_page
from regard.inspect._view.server import PageServer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow
WORDS = ["[CLS]", "The", "cat", "sat", "on", "</script>", "<b>mat</b>", "\u202eit\x07", "日本", "."]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None and not os.environ.get("REGARD_BROWSER"):
        pytest.skip("there is no Chromium here; apt-get install chromium brings it, and REGARD_BROWSER=1 insists on it")
    assert CHROMIUM is not None, "REGARD_BROWSER is set, and there is no Chromium"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a page with all network blocked, and let nothing pass that it complains of."""
    complaints: list[str] = []
    opened: list[Any] = []

    def visit(address: str | Path, **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1300, "height": 800}, "accept_downloads": True} | options
        )
        page = context.new_page()
        opened.append(context)

        def route(request: Any) -> None:
            url = request.request.url
            if url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")):
                request.continue_()
            else:
                complaints.append(url)
                request.abort()

        context.route("**/*", route)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(f"file://{address}" if isinstance(address, Path) else address)
        page.wait_for_selector(".room canvas, .grid[data-state=complete]")
        page.wait_for_timeout(300)
        return page

    yield visit
    for each in opened:
        each.close()
    assert not complaints


@pytest.fixture(scope="module")
def record() -> Record:
    model = made(DECODERS["gpt2"]())
    with capture(model) as found, torch.no_grad():
        model(torch.arange(10)[None])
    return found.describe(Text(tuple(WORDS), (0,)), title="A <model>")


def opened(page: Any, head: int = 0) -> Any:
    """The page with a head of its grid opened."""
    page.locator(f'[data-head="{head}"]').click()
    page.wait_for_selector(".room canvas[data-state=complete]")
    return page


def cell(page: Any, row: int, col: int, at: int = 0, count: int = len(WORDS)) -> tuple[float, float]:
    """Where a cell of a matrix that is shown whole is on the screen."""
    box = page.locator(".room canvas").nth(at).bounding_box()
    side = min((box["width"] - 98) / count, (box["height"] - 86) / count, 56)
    return box["x"] + 96 + (col + 0.5) * side, box["y"] + 84 + (row + 0.5) * side


def colour(page: Any, x: float, y: float) -> tuple[int, ...]:
    clip = {"x": int(x), "y": int(y), "width": 1, "height": 1}
    return Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB").getpixel((0, 0))


def status(page: Any) -> str:
    return page.locator("output").text_content()


def test_it_draws_hovers_and_pins(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    weights = record[0].weights(batch=0, head=0)
    for row, col in ((9, 2), (4, 4), (3, 0)):
        page.mouse.move(*cell(page, row, col))
        page.wait_for_timeout(50)
        found = float(status(page).rpartition(": ")[2])
        assert found == pytest.approx(float(weights[row, col]), rel=1e-3)
        assert f"({row}) → " in status(page) and f"({col})" in status(page)
    page.mouse.click(*cell(page, 9, 2))
    page.mouse.move(5, 5)
    page.wait_for_timeout(100)
    assert ". (9) is pinned" in status(page)
    listed = page.locator(".largest li").all_text_contents()
    best = weights[9].topk(8)
    assert [float(each.split()[-1]) for each in listed] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert page.locator(".list h2").text_content().startswith("“.” (9) attends to · 8 of 10")
    page.get_by_role("button", name="Show all").click()
    every = [float(each.split()[-1]) for each in page.locator(".largest li").all_text_contents()]
    assert every == pytest.approx(weights[9].sort(descending=True).values.tolist(), abs=1e-4)
    page.get_by_role("button", name="Show only 8").click()
    assert page.locator(".largest li").all_text_contents() == listed
    dark, light = (colour(page, cell(page, 9, col)[0], cell(page, 9, col)[1] + 20) for col in
                   (int(best.indices[0]), int(weights[9].argmin())))  # fmt: skip
    assert sum(dark) < sum(light) - 150
    page.keyboard.press("ArrowUp")
    assert "(8) is pinned" in status(page)
    page.keyboard.press("Escape")
    assert "Point at a cell" in status(page)
    said = page.locator(".says").text_content()
    assert said.endswith("The colour bar's numbers are for row “on” (4), which sees 5 keys (the median).")


def test_words_are_chosen_and_pinned_by_the_keyboard(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    page.mouse.move(*cell(page, 3, 1))
    page.locator(".tokens").focus()
    before = page.locator(".room canvas").screenshot()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
        page.wait_for_timeout(50)
    current = page.locator(".tokens .current").text_content()
    assert current in WORDS and page.locator(".room canvas").screenshot() == before  # the matrix stays where it is
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    assert f"{current} ({WORDS.index(current)}) is pinned" in status(page)  # and not the pair under the pointer
    page.keyboard.press("k")
    assert page.get_by_label("what attends to it").is_checked() and "is pinned as a key" in status(page)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.wait_for_timeout(100)
    assert f"({WORDS.index(current) + 1}) is pinned as a key" in status(page)


def test_tokens_are_data(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    spans = page.locator(".tokens span").all_text_contents()
    assert spans == [*WORDS[:7], "⟨RLO⟩it␇", *WORDS[8:]]
    assert page.locator(".tokens b").count() == 0 and page.locator("h1").text_content() == "A <model>"
    page.locator(".tokens span").nth(6).click()
    assert "<b>mat</b> (6) is pinned" in status(page)


COUNTING = """() => {
  const measure = CanvasRenderingContext2D.prototype.measureText;
  window.measured = 0;
  CanvasRenderingContext2D.prototype.measureText = function (text) {
    window.measured += text.length;
    return measure.call(this, text);
  };
}"""


def test_long_tokens_are_cut_before_they_are_measured(visit, tmp_path: Path) -> None:
    """Letter by letter, a token of 8,000 letters froze the page for 93 s: 32 million letters were measured a label."""
    with capture() as record:
        rows = torch.zeros(1, 1, 3, 4)
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
    record.describe(["a", "W" * 8000, "b"])
    page = visit(record.to_html(tmp_path / "a.html"))  # one head: there is no grid
    page.evaluate(COUNTING)
    page.mouse.move(*cell(page, 1, 1))
    page.keyboard.press("+")
    page.wait_for_timeout(300)
    assert 0 < page.evaluate("window.measured") < 50_000
    assert len(status(page)) < 400


def test_zoom_pan_and_fit(visit, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 3000, 16, generator=generator) for _ in range(2))
    with capture() as found:
        F.scaled_dot_product_attention(query, key, key)
    page = visit(found.to_html(tmp_path / "a.html"))
    box = page.locator(".room canvas").bounding_box()
    x, y = box["x"] + 300, box["y"] + 300
    for times in range(sized(14, 7)):
        page.mouse.move(x, y)
        page.wait_for_timeout(30)
        said = re.fullmatch(r"(\d+) \(\1\) → (\d+) \(\2\): (\S+)", status(page))
        assert said, status(page)
        row, col, weight = int(said[1]), int(said[2]), float(said[3])
        scores = query[0, 0, row].double() @ key[0, 0].double().T / 4
        assert weight == pytest.approx(float(scores.softmax(-1)[col]), abs=1e-3, rel=1e-3)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -sized(200, 400))
        page.keyboard.up("Control")
        page.mouse.move(x + times % 3, y)
        page.wait_for_timeout(30)
    assert page.locator("output").text_content()
    before = status(page)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 200, y - 150, steps=4)
    page.mouse.up()
    page.mouse.move(x, y)
    page.wait_for_timeout(50)
    assert status(page) != before and "pinned" not in status(page)
    for back in (lambda: page.keyboard.press("0"), lambda: page.get_by_role("button", name="Reset zoom").click()):
        back()
        page.mouse.move(x + 1, y)
        page.wait_for_timeout(50)
        assert abs(int(status(page).split()[0]) - (300 - 84) * 3000 / min(box["width"] - 96, box["height"] - 84)) < 8
        before = status(page)
        page.mouse.wheel(0, -200)  # the wheel alone is the browser's
        page.mouse.move(x, y)
        page.mouse.move(x + 1, y)
        page.wait_for_timeout(50)
        assert status(page) == before and "Hold Ctrl" in page.locator(".hint").text_content()
        page.get_by_role("button", name="Zoom in").click()


def test_a_matrix_that_is_whole_in_view_stays_there(visit, tmp_path: Path) -> None:
    query = torch.randn(1, 1, 60, 8, generator=torch.Generator().manual_seed(0))
    with capture() as found:
        F.scaled_dot_product_attention(query, query, query)
    page = visit(found.describe([f"w{i}" for i in range(60)]).to_html(tmp_path / "a.html"))
    page.locator(".tokens span").nth(59).click()
    page.wait_for_timeout(100)
    assert "w59 (59) is pinned" in status(page)
    box = page.locator(".room canvas").bounding_box()
    page.mouse.move(box["x"] + 98, box["y"] + 86)
    page.wait_for_timeout(50)
    assert status(page).startswith("w0 (0) → w0 (0)")


def test_the_grid_has_headings_and_opens_heads(visit, record: Record, tmp_path: Path) -> None:
    page = visit(record.to_html(tmp_path / "a.html"))
    assert page.locator(".grid thead th").all_text_contents() == ["mean", "head 0", "head 1", "head 2", "head 3"]
    assert page.locator(".grid tbody th").all_text_contents() == ["layer 0", "layer 1", "rollout", "flow"]
    assert page.locator(".grid [data-head]").count() == 2 * (4 + 1) + 2
    assert "one attention head" in page.locator(".lead").text_content()
    page.keyboard.press("ArrowDown")  # to the first cell, and on from there
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".room canvas[data-state=complete]")
    assert page.locator("figcaption").text_content() == "layer 1, head 2 · transformer.h.1.attn"
    page.mouse.move(*cell(page, 9, 2))
    page.wait_for_timeout(50)
    expected = record[1].weights(batch=0, head=2)[9, 2]
    assert float(status(page).rpartition(": ")[2]) == pytest.approx(float(expected), rel=1e-3)
    page.keyboard.press("Escape")
    page.wait_for_timeout(100)
    assert page.locator(".room canvas").count() == 0
    assert page.evaluate("document.activeElement.dataset.head") == "6"


def test_the_mean_rollout_and_flow(visit, record: Record, tmp_path: Path) -> None:
    page = visit(record.to_html(tmp_path / "a.html"))
    page.get_by_label("layer 1, mean of 4 heads").click()
    page.wait_for_selector(".room canvas[data-state=complete]")
    page.mouse.move(*cell(page, 9, 2))
    page.wait_for_timeout(50)
    expected = record[1].weights(batch=0).mean(0)[9, 2]
    assert float(status(page).rpartition(": ")[2]) == pytest.approx(float(expected), rel=1e-3)
    for name, expected in (("rollout", rollout(record)), ("flow", flow(record))):
        page.select_option('[aria-label="Layer"]', label=name)
        page.wait_for_timeout(200)
        assert page.locator(".note").text_content().startswith(f"{name.capitalize()}: how much")
        page.mouse.move(*cell(page, 9, 3))
        page.wait_for_timeout(50)
        assert float(status(page).rpartition(": ")[2]) == pytest.approx(
            float(expected[9, 3] / expected[9].sum()), rel=2e-3
        )


def test_heads_layers_order_and_scales(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")), 6)
    assert "layer 1, head 2" in page.locator("figcaption").text_content()
    for key, expected in (("{", "layer 0, head 2"), ("]", "layer 0, head 3"), ("]", "layer 1, mean of 4 heads")):
        page.keyboard.press(key)
        page.wait_for_timeout(100)
        assert expected in page.locator("figcaption").text_content()
    colours, names = set(), set()
    for _ in range(5):
        page.locator("h1").click()
        page.keyboard.press("s")
        page.wait_for_timeout(150)
        x, y = cell(page, 9, 1)
        colours.add(colour(page, x, y + 20))
        names.add(page.locator(".says").text_content())
        assert page.locator(".bar span").count() >= 2
    assert len(colours) == 5 and len(names) == 5
    page.keyboard.press("Escape")
    entropies = torch.cat([run.entropy()[0].mean(-1) for run in record])
    received = torch.cat([run.received()[0].amax(-1) for run in record])
    for order, expected in (("entropy", entropies), ("sink", -received)):
        page.select_option('[aria-label="Order of heads"]', order)
        found = [int(each.get_attribute("data-head")) for each in page.locator(".grid [data-head]").all()]
        assert found == expected.argsort(stable=True).tolist()
        labels = page.locator(".cards .thumbnail span").all_text_contents()
        assert all(re.match(r"\d·\d ", each) for each in labels)
        assert page.locator(".grid h2").count() == 1
        page.locator("h1").click()
        page.keyboard.press("ArrowDown")  # to a head, though the chosen mean is not among them
        assert page.evaluate("document.activeElement.dataset.head") == str(found[0])


def test_the_least_weights_are_zero_everywhere(visit, tmp_path: Path) -> None:
    weights = torch.tensor([[1 - 1e-5, 1e-5 - 1e-9, 1e-9], [0.5, 0.5, 0.0]])
    shown = [Alignment(tuple("abc"), tuple("xy"), weights, name) for name in ("one", "two")]
    page = opened(visit(save_html(shown, tmp_path / "a.html")))
    for col, white in ((1, False), (2, True)):
        x, y = cell(page, 0, col, count=3)
        assert (colour(page, x, y + 20) == (255, 255, 255)) == white
    page.locator(".tokens span").first.click()
    items = page.locator(".largest li")
    assert items.nth(1).text_content().endswith("<0.0001") and not items.nth(1).locator("i").is_visible()


def test_two_heads_are_linked_and_subtracted(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    page.select_option('[aria-label="Compare with"]', "5")
    page.wait_for_timeout(300)
    assert page.locator(".room canvas").count() == 2
    first, second = record[0].weights(batch=0, head=0), record[1].weights(batch=0, head=1)
    page.mouse.move(*cell(page, 9, 3, at=1))
    page.wait_for_timeout(50)
    said = [float(each) for each in status(page).rpartition(": ")[2].split(" and ")]
    assert said == pytest.approx([float(first[9, 3]), float(second[9, 3])], rel=1e-3)
    page.get_by_text("Difference").click()
    page.wait_for_timeout(300)
    page.mouse.move(*cell(page, 9, 3))
    page.wait_for_timeout(50)
    assert page.locator(".room canvas").count() == 1 and " minus " in page.locator("figcaption").text_content()
    assert float(status(page).rpartition(": ")[2]) == pytest.approx(
        float(first[9, 3] - second[9, 3]), rel=2e-3, abs=1e-6
    )


def test_search_and_sinks(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    page.keyboard.press("/")
    page.keyboard.type("AT")
    assert page.locator(".found").all_text_contents() == ["cat", "sat", "<b>mat</b>"]
    page.keyboard.press("Enter")
    assert "cat (2) is pinned" in status(page)
    page.keyboard.press("Enter")
    assert "sat (3) is pinned" in status(page)
    page.keyboard.press("Escape")  # the keys work at once
    page.keyboard.press("ArrowDown")
    assert "on (4) is pinned" in status(page)
    x, y = cell(page, 9, 0)
    before = colour(page, x, y + 20)
    page.get_by_label("Hide sinks").check()
    page.mouse.move(5, 5)
    page.wait_for_timeout(300)
    red, _, blue = colour(page, x, y + 20)
    assert before[0] < before[2] and red > blue  # a weight is blue; stripes are not
    assert "[CLS]" not in " ".join(page.locator(".largest li").all_text_contents())
    share = float(re.search(r"Hidden: \[CLS\].*with (\S+) of the weight", page.locator(".share").text_content())[1])
    assert share >= float(record[0].weights(batch=0, head=0)[4, 0]) - 0.006


def test_both_sides_can_be_pinned(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    weights = record[0].weights(batch=0, head=0)
    page.get_by_label("what attends to it").check()
    page.locator(".tokens span").nth(2).click()
    page.mouse.move(5, 5)
    page.wait_for_timeout(100)
    assert "cat (2) is pinned as a key" in status(page)
    assert page.locator(".list h2").text_content() == "“cat” (2) is attended to by"  # two of 10 words do not see it
    listed = [float(each.split()[-1]) for each in page.locator(".largest li").all_text_contents()]
    assert listed == pytest.approx(weights[2:, 2].topk(8).values.tolist(), abs=1e-4)
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    assert "sat (3) is pinned as a key" in status(page)
    page.keyboard.press("k")
    assert page.locator(".list h2").text_content().startswith("“sat” (3) attends to")
    box = page.locator(".room canvas").bounding_box()
    x, _ = cell(page, 0, 4)
    page.mouse.click(x, box["y"] + 70)  # the label of a column
    page.mouse.move(5, 5)
    page.wait_for_timeout(100)
    assert "on (4) is pinned as a key" in status(page)


def test_the_address_keeps_the_view(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")), 5)
    page.select_option('[aria-label="Scale"]', "log")
    page.locator(".tokens span").nth(4).click()
    page.get_by_label("Hide sinks").check()
    page.wait_for_url("**hide=sinks**")
    address = page.url
    again = visit(address)
    assert "layer 1, head 1" in again.locator("figcaption").text_content()
    assert again.locator('[aria-label="Scale"]').input_value() == "log" and "on (4) is pinned" in status(again)
    assert again.get_by_label("Hide sinks").is_checked()
    assert visit(address.partition("#")[0] + "#head=99&scale=x&view=y&query=-1").locator(".grid").count() == 1


def test_words_instead_of_pieces(visit, tmp_path: Path) -> None:
    tokens = ["The", "Ġun", "believ", "able", "Ġna", "Ã¯", "ve", "Ġcat"]
    query = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    with capture() as found:
        F.scaled_dot_product_attention(query, query, query)
    page = visit(found.describe(tokens).to_html(tmp_path / "a.html"))
    assert page.locator(".tokens").text_content() == "The unbelievable naïve cat"
    page.get_by_label("Whole words").check()
    page.wait_for_timeout(200)
    assert page.locator(".tokens span").all_text_contents() == ["The", "unbelievable", "naïve", "cat"]
    merged = merge_tokens(found[0].weights(batch=0, head=0), words_of(tokens)[0])
    page.locator(".tokens span").nth(1).click()
    page.wait_for_timeout(100)
    listed = {each.split()[0]: float(each.split()[-1]) for each in page.locator(".largest li").all_text_contents()}
    assert listed == pytest.approx(dict(zip(["The", "unbelievable", "naïve", "cat"], merged[1].tolist())), abs=1e-3)


def test_signs_that_cannot_be_seen(visit, tmp_path: Path) -> None:
    query = torch.zeros(1, 1, 5, 4)
    with capture() as found:
        F.scaled_dot_product_attention(query, query, query)
    page = visit(found.describe(["\x7f", "\ufeffa", "\u200b", "שלום", "\u200d"]).to_html(tmp_path / "a.html"))
    assert page.locator(".tokens span").all_text_contents() == ["␡", "⟨BOM⟩a", "⟨ZWSP⟩", "שלום", "⟨ZWJ⟩"]


def test_every_sequence_and_run(visit, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(2, 2, 6, 8, generator=generator) for _ in range(2)]
    layer = Attention()
    model = torch.nn.ModuleList([layer])
    with capture(model) as found:
        for query in queries:
            layer(query)
    assert len(found.runs(0)) == 2
    page = visit(found.to_html(tmp_path / "a.html"))
    for sequence, run in ((1, 2), (0, 1)):
        label = f"sequence {sequence}, run {run} of 2"
        page.select_option('[aria-label="Sequence and run"]', label=label)
        page.get_by_label(re.compile(f"{label}, layer 0, head 1;")).click()
        page.wait_for_selector(".room canvas[data-state=complete]")
        box = page.locator(".room canvas").bounding_box()
        page.mouse.move(box["x"] + 96 + 56 * 2.5, box["y"] + 84 + 56 * 4.5)
        page.wait_for_timeout(50)
        expected = found.runs(0)[run - 1].weights(batch=sequence, head=1)[4, 2]
        assert float(status(page).rpartition(": ")[2]) == pytest.approx(float(expected), rel=1e-3)
        page.keyboard.press("Escape")


class Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query)


def test_encoder_decoders_open_on_cross_attention(visit, tmp_path: Path) -> None:
    model = made(PAIRED["bart"](), AutoModelForSeq2SeqLM)
    with capture(model) as found, torch.no_grad():
        model(input_ids=torch.arange(8)[None] + 3, decoder_input_ids=torch.arange(5)[None] + 3)
    found.describe([f"s{i}" for i in range(8)], [f"t{i}" for i in range(5)])
    page = visit(found.to_html(tmp_path / "a.html"))
    headings = page.locator(".grid h2").all_text_contents()
    assert [each.partition(":")[0] for each in headings] == ["Cross-attention", "Decoder", "Encoder"]
    page.locator(".grid section [data-head]").nth(1).click()
    page.wait_for_selector(".room canvas[data-state=complete]")
    assert page.locator("figcaption").text_content().startswith("cross-attention, layer 0, head 0 · ")
    page.locator(".reading").nth(1).locator("span").nth(3).click()
    assert "s3 (3) is pinned as a key" in status(page)
    page.keyboard.press("/")
    page.keyboard.type("t1")  # of the output alone
    page.wait_for_selector(".found")
    assert page.locator(".found").all_text_contents() == ["t1"] and page.locator(".count").text_content() == "1 found"
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    assert "t1 (1) is pinned" in status(page) and "as a key" not in status(page)
    page.locator('[aria-label="Search for a token"]').fill("1")
    page.locator(".found").nth(1).wait_for()
    assert page.locator(".found").all_text_contents() == ["t1", "s1"]
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    assert "s1 (1) is pinned as a key" in status(page)
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    assert "t1 (1) is pinned" in status(page) and "as a key" not in status(page)
    page.locator(".back").click()
    page.select_option('[aria-label="Order of heads"]', label="sharpest first")
    names = [each.locator("span").first.text_content() for each in page.locator(".grid [data-head]").all()]
    assert len(names) == len(set(names)) and {each.split()[0] for each in names} == {"cross", "decoder", "encoder"}


def test_a_long_and_narrow_matrix_fills_the_page(visit, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, size, 8, generator=generator) for size in (10, 1500))
    with capture() as found:
        F.scaled_dot_product_attention(query, key, key)
    page = visit(found.to_html(tmp_path / "a.html"))
    box = page.locator(".room canvas").bounding_box()
    width, height = (box["width"] - 98) / 1500, min((box["height"] - 86) / 10, 56)
    weights = found[0].weights(batch=0, head=0)
    for row, col in ((2, 1400), (9, 20)):
        page.mouse.move(box["x"] + 96 + (col + 0.5) * width, box["y"] + 84 + (row + 0.5) * height)
        page.wait_for_timeout(50)
        said = re.fullmatch(r"\d+ \((\d+)\) → \d+ \((\d+)\): (\S+)", status(page))
        assert int(said[1]) == row and abs(int(said[2]) - col) <= 2
        assert float(said[3]) == pytest.approx(float(weights[row, int(said[2])]), rel=1e-3)


def test_frames_of_a_video_and_times_of_a_recording(visit, tmp_path: Path) -> None:
    """What the page gets of images, places and seconds it shows, though this record's text has none."""
    query, key = torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4)
    query[..., 0], key[..., 3, 0] = 8.0, 8.0  # all look at the last patch of the second frame
    with capture() as found:
        F.scaled_dot_product_attention(query, key, key)
    source = f"data:image/png;base64,{base64.b64encode(pixels(40, 20)).decode()}"
    data = describe_page(found.describe(["<v>", "<v>", "<v>", "<v>", "a", "dog"]))
    (text,) = data.described["texts"]
    text["images"] = [{"name": f"frame {i}", "width": 40, "height": 20, "data": source} for i in range(2)]
    text["places"] = [
        {"image": i // 2, "x": 20.0 * (i % 2), "y": 0.0, "width": 20.0, "height": 20.0, "seconds": 0.5 * (i // 2)}
        for i in range(4)
    ] + [None, None]  # fmt: skip
    with served(data) as address:
        page = visit(address)
        assert page.locator(".image figcaption").all_text_contents() == ["frame 0", "frame 1"]
        page.locator(".tokens span").nth(5).click()
        page.wait_for_timeout(200)
        assert page.locator(".largest li").first.text_content().startswith("0.5 s, patch 3")
        bright = [
            sum(colour(page, box["x"] + across * box["width"], box["y"] + box["height"] / 2))
            for box in (each.bounding_box() for each in page.locator(".image canvas").all())
            for across in (0.25, 0.75)
        ]
        assert np.argmax(bright) == 3
        box = page.locator(".image canvas").nth(1).bounding_box()
        page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.5 * box["height"])
        page.wait_for_timeout(100)
        assert "0.5 s, patch 3 (3) is pinned as a key" in status(page)  # with words there, a patch shows its words
        dragged(page, (0.1, 0.1), (0.9, 0.9))
        assert "on average over all 6 queries, patches included." in status(page)
        assert page.locator(".toned").text_content().strip() == "Bright: what “0.5 s, patch 3” (3) is attended to by"
        assert [each.split()[0] for each in page.locator(".largest li").all_text_contents()] == ["a", "dog"]
        share = float(found[0].weights(batch=0, head=0)[5, 2:4].sum())
        page.locator(".largest li").nth(1).click()
        assert f"These 2 patches receive {share:.2f} of the weight of “dog” (5)." in status(page)
    data = describe_page(found)
    data.described["texts"][0]["seconds"] = [[0.02 * i, 0.02 * (i + 1)] for i in range(6)]
    with served(data) as address:
        page = visit(address)
        page.mouse.move(*cell(page, 3, 2, count=6))
        page.wait_for_timeout(50)
        assert status(page).startswith("0.06 s (3) → 0.04 s (2): ")


def test_heads_are_grouped_by_what_they_do(visit, record: Record) -> None:
    data = describe_page(record)
    for number, label in ((1, "previous"), (6, "previous"), (3, "first")):
        text = f"attends to the {label} token: 0.{number} of its weight"
        data.described["heads"][number]["summary"] = {"label": label, "score": number / 10, "text": text}
    data.described["heads"][6]["summary"]["second"] = ["first", 0.31]
    with served(data) as address:
        page = visit(address)
        labels = page.locator(".grid .thumbnail span").all_text_contents()
        assert labels == ["previous .1", "first .3", "previous .6", "first .31"]
        assert page.locator(".grid .second").count() == 1
        page.select_option('[aria-label="Order of heads"]', label="by what heads do")
        assert [each.partition(" (")[0] for each in page.locator(".grid h2").all_text_contents()] == [
            "First: to the first token, often a sink",
            "Previous: to the token before",
            "No label: none of the definitions fits",
        ]
        second = page.locator(".grid section").nth(1)
        assert second.locator(".thumbnail span").all_text_contents() == ["0·1 0.10", "1·2 0.60"]
        second.get_by_label("layer 1, head 2: attends to the previous token").click()
        page.wait_for_selector(".room canvas[data-state=complete]")
        assert page.locator(".note").text_content() == "attends to the previous token: 0.6 of its weight"
        narrow = visit(address, viewport={"width": 250, "height": 800})
        captions = narrow.locator(".grid .thumbnail span").all_text_contents()
        assert captions == ["previous", "first", "previous", "first"]
        assert "scroll sideways" in narrow.locator(".more").text_content()


def test_a_text_of_many_tokens_is_laid_out_in_part(visit, tmp_path: Path) -> None:
    key = torch.zeros(1, 1, 30_000, 4)
    with capture() as found:
        F.scaled_dot_product_attention(key[..., :1, :], key, key)
    page = visit(found.to_html(tmp_path / "a.html"))
    keys = page.locator(".reading").nth(1)
    assert keys.locator("h2").text_content() == "Keys: the input: 0 to 19,999 of 30,000 tokens"
    assert keys.locator("span").count() == 20_000
    is_laid_out = "each => each.checkVisibility({contentVisibilityAuto: true})"
    assert [keys.locator("span").nth(at).evaluate(is_laid_out) for at in (0, 15_000)] == [True, False]
    page.keyboard.press("/")
    page.keyboard.type("29999")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    assert "29999 (29999) is pinned as a key" in status(page)
    pinned, box = keys.locator(".pinned"), keys.locator(".tokens").bounding_box()
    assert pinned.text_content() == "29999"
    assert box["y"] <= pinned.bounding_box()["y"] <= box["y"] + box["height"] - 10


@contextmanager
def served(data: PageData, without: Any = None) -> Iterator[str]:
    with PageServer(data, without=without) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


NOTEBOOK = """<!doctype html><body data-jp-theme-light="{light}"><div id="cell"></div><script type="module">
const {{page, blocks, code}} = {given};
const widget = await import(URL.createObjectURL(new Blob([code], {{type: "text/javascript"}})));
let listener;
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
const model = {{
  get: () => page, on: (_, given) => (listener = given), off: () => {{}},
  send: ({{block}}) => setTimeout(() => listener({{block}}, [bytes(blocks[block])])),
}};
document.head.append(Object.assign(document.createElement("style"), {{textContent: {style}}}));
widget.default.render({{model, el: document.getElementById("cell")}});
</script>"""


@pytest.mark.parametrize("width", [600, 900])
def test_the_widget_of_a_notebook(visit, record: Record, tmp_path: Path, width: int) -> None:
    data = describe_page(record)
    blocks = [base64.b64encode(each()).decode() for each in data.blocks]
    given = {"page": data.described | {"blocks": "served"}, "blocks": blocks, "code": bundled("widget.js")}
    given = json.dumps(given).replace("</", "<\\/")
    light = json.dumps(width > 600)
    written = NOTEBOOK.format(given=given, style=json.dumps(bundled("page.css")), light=light)
    (tmp_path / "notebook.html").write_text(written, encoding="utf-8")
    page = opened(visit(tmp_path / "notebook.html", viewport={"width": width, "height": 900}), 1)
    page.locator(".tokens span").nth(4).click()
    assert "on (4) is pinned" in status(page)
    assert page.locator(".app").get_attribute("data-theme") == ("light" if width > 600 else "dark")  # as JupyterLab
    box = page.locator(".room canvas").bounding_box()
    assert box["width"] > 280 and box["height"] > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for key in ("ArrowLeft", "Enter"):
        page.keyboard.press(key)
    page.wait_for_timeout(50)
    assert "sat (3) is pinned" in status(page)
    # JupyterLab leaves the keys to what has this attribute and the focus; without it, "x" and "dd" delete cells.
    assert page.evaluate("document.activeElement.dataset.lmSuppressShortcuts") == "true"


AXE = ROOT / "viewer/node_modules/axe-core/axe.min.js"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit, record: Record, tmp_path: Path, scheme: str) -> None:
    rules = (
        "" if scheme == "light" else "{runOnly: ['color-contrast', 'link-in-text-block']}"
    )  # dark differs in colours
    if not AXE.exists() and not os.environ.get("REGARD_BROWSER"):
        pytest.skip("axe-core is not here; `npm ci` in viewer/ brings it, and REGARD_BROWSER=1 insists on it")
    path = record.to_html(tmp_path / "a.html")
    rows = torch.eye(3, 4)
    image = Text(("p",) * 4, patches=Patches(pixels(20, 20), 2, 2))
    seen = save_html(Alignment(image.tokens, ("a", "b", "c"), rows, patches=image.patches[0]), tmp_path / "b.html")
    views = (
        (path, ""), (f"file://{path}#view=matrix&head=5&query=9&hide=sinks", "?"),
        (f"file://{seen}#query=1&region=key,0,0,0,20,9", ""), (path, "?"),
        (f"file://{path}#order=label&hide=sinks", ""),
    )  # fmt: skip
    for address, keys in views[: sized(5, 3)]:
        page = visit(address, color_scheme=scheme, bypass_csp=True)
        for key in keys:
            page.keyboard.press(key)
        page.add_script_tag(path=str(AXE))
        found = page.evaluate(f"axe.run({rules})")["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


def test_numbers_in_cells_contrast_with_them() -> None:
    """Black or white: one of them has 4.5 : 1 on any colour, and the page takes that one."""
    source = (ROOT / "viewer/src/colors.ts").read_text(encoding="utf-8")
    turn = float(re.search(r"\* b > ([\d.]+) \? \"#000\" : \"#fff\"", source)[1])
    for luminance in np.linspace(0, 1, 1001):
        assert ((luminance + 0.05) / 0.05 if luminance > turn else 1.05 / (luminance + 0.05)) > 4.5


def test_it_writes_what_is_in_view(visit, record: Record, tmp_path: Path) -> None:
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    page.get_by_label("Hide sinks").check()
    page.locator(".tokens span").nth(2).click()
    page.mouse.move(5, 5)
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    picture = Image.open(download.value.path())
    assert picture.width == 2 * round(page.locator(".room canvas").bounding_box()["width"])
    assert picture.format == "PNG" and len({picture.convert("RGB").getpixel((x, 500)) for x in range(0, 600, 10)}) > 4
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    text = Path(download.value.path()).read_text()
    from xml.etree import ElementTree

    root = ElementTree.fromstring(text)
    cells = root.findall(".//*[@shape-rendering='crispEdges']/*")
    assert len(cells) == len(WORDS) ** 2 and {each.tag.rpartition("}")[2] for each in cells} == {"rect"}
    said = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {
        "</script>",
        "cat",
        "日本",
        "A <model>",
        "queries (rows) ↓",
        "keys (columns) →",
        "colour: compared with an even split",
        "zero",
        "masked or hidden",
        "even 0.33",
        "GPT2LMHeadModel, layer 0, head 0 · transformer.h.0.attn",
        "Outlined: what “cat” (2) attends to.",
    } <= set(said)
    weights = record[0].weights(batch=0, head=0)
    columns = hidden(weights)
    names, share = ", ".join(WORDS[each] for each in columns), float(weights[:, columns].sum(1).mean())
    assert any(each == f"Hidden: {names}, with {share:.2f} of all weight." for each in said)
    assert "The colour bar's numbers are for row “cat” (2), which sees 3 keys." in said
    assert f"({share:.2f})" in page.locator(".concealed").text_content()
    note = page.locator(".note").text_content()
    assert note.endswith(f"A row adds up to 1 with what is hidden. Stripes hide {share:.2f} of the weight.")
    (frames,) = root.findall(".//*[@viewBox]/*[@fill='none']/..")
    assert frames.get("viewBox").startswith("-2 -2 ") and frames[0].get("x") == "-0.5"  # its left line is inside
    assert root[1].get("fill") == "#ffffff" and picture.getpixel((1, 1))[:3] == (255, 255, 255)
    striped = np.triu(np.ones((10, 10), bool), 1)  # masked
    striped[:, columns] = True
    assert sum(each.get("fill") == "url(#striped)" for each in cells) == striped.sum()
    assert download.value.suggested_filename.endswith(".svg") and "<" not in download.value.suggested_filename


def test_it_writes_the_grid(visit, record: Record, tmp_path: Path) -> None:
    page = visit(record.to_html(tmp_path / "a.html"))
    page.get_by_label("Hide sinks").check()
    grid = page.locator(".grid").bounding_box()
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    picture = Image.open(download.value.path()).convert("RGB")
    assert 800 < picture.width < 2 * grid["width"] + 60 and picture.getpixel((1, 1)) == (255, 255, 255)
    assert download.value.suggested_filename == "A-model-GPT2LMHeadModel-all-heads-by-layer.png"
    with page.expect_download() as download:
        page.keyboard.press("Shift+E")
    from xml.etree import ElementTree

    root = ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))
    images = [each for each in root.iter() if each.tag.endswith("image")]
    assert len(images) == page.locator(".grid [data-head]").count() and 2 * int(root.get("width")) == picture.width
    x, y, side = (float(images[1].get(name)) for name in ("x", "y", "width"))
    y += float(root.find(".//*[@transform]").get("transform").split()[1].rstrip(")"))

    def mean(across: float, down: float) -> np.ndarray:
        """The mean colour of a tenth of a thumbnail's width and height."""
        box = [int(2 * each) for each in (x + across * side, y + down * side)]
        return np.asarray(picture.crop((*box, *(int(each + 0.2 * side) for each in box)))).mean((0, 1))

    masked, weight = mean(0.8, 0.1), mean(0.5, 0.5)
    assert masked[0] > masked[2] and weight[2] > weight[0]  # a weight is blue; stripes are not
    said = {each.text for each in root.iter() if each.tag.endswith("text")}
    assert {"mean", "0", "3", "layer 0", "layer 1", "rollout", "even share", "masked or hidden", "A <model>"} <= said
    assert any(each.startswith("Stripes hide ") for each in said)
    page.select_option('[aria-label="Order of heads"]', "entropy")
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert "all heads, sharpest first" in text and " nats</text>" in text


def pixels(width: int, height: int) -> bytes:
    """Return a white image."""
    written = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(written, "PNG")
    return written.getvalue()


def dragged(page: Any, first: tuple[float, float], last: tuple[float, float]) -> None:
    """Drag over the image, from one place to another in shares of its width and height."""
    box = page.locator(".image canvas").last.bounding_box()
    start, end = ((box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (first, last))
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=3)
    page.mouse.up()
    page.wait_for_timeout(150)


def test_a_region_of_an_image(visit, tmp_path: Path) -> None:
    words = ("a", "dog", "sleeps")
    weights = torch.rand(3, 24, generator=torch.Generator().manual_seed(0)).double().softmax(-1).float()
    shown = Alignment(("patch",) * 24, words, weights, "sleeping", Patches(pixels(96, 64), 4, 6))
    page = visit(save_html(shown, tmp_path / "a.html"))
    assert page.locator('[aria-label="Scale"]').input_value() == "even"
    assert "compared with an even split" in page.locator('[aria-label="Scale"] option:checked').text_content()
    page.locator(".tokens span").nth(1).click()
    dragged(page, (0.3, 0.3), (0.95, 0.8))  # rows 1 to 3, columns 1 to 5: all that it touches
    inside = [row * 6 + col for row in (1, 2, 3) for col in (1, 2, 3, 4, 5)]
    sums = weights.double()[:, inside].sum(1)
    expected = f"These 15 patches receive {sums[1]:.2f} of the weight of “dog” (1). An even split would give 0.63."
    assert status(page).strip() == expected
    listed = {each.split()[0]: float(each.split()[-1]) for each in page.locator(".largest li").all_text_contents()}
    assert listed == pytest.approx(dict(zip(words, sums.tolist())), abs=1e-4)
    assert list(listed) == [words[at] for at in sums.argsort(descending=True)]
    assert status(visit(page.url)).strip() == expected
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    drawing = Path(download.value.path()).read_text(encoding="utf-8")
    assert expected in drawing and drawing.count("<image") == 2  # the image, and the weights over it
    assert "image 1: what “dog” (1) attends to; bright:" in drawing
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    assert (
        Image.open(download.value.path()).width > 2 * round(page.locator(".room canvas").bounding_box()["width"]) + 600
    )
    page.locator(".image canvas").focus()  # by the keyboard: a patch, then a region of two
    page.keyboard.press("Escape")
    page.wait_for_url(lambda address: "region=" not in address)
    assert "is pinned" in status(page)
    dragged(page, (0.3, 0.3), (0.95, 0.8))
    page.get_by_role("button", name="Clear region").click()
    page.keyboard.press("ArrowUp")
    assert "a (0) is pinned" in status(page)  # keys work though the button is gone
    page.keyboard.press("ArrowDown")
    page.locator(".image canvas").focus()
    for keys, patches in (("ArrowLeft", [12]), ("Shift+ArrowRight", [12, 13]), ("Shift+ArrowUp", [6, 7, 12, 13])):
        page.keyboard.press(keys)
        page.wait_for_timeout(100)
        assert f"{weights[1, patches].sum():.2f} of the weight of “dog”" in status(page)
    page.keyboard.press("Enter")
    page.wait_for_url("**key=7**")
    assert "patch 7 (7) is pinned as a key" in status(page) and "region=" not in page.url
    dragged(page, (0.3, 0.3), (0.95, 0.8))
    page.wait_for_url("**region=**")
    box = page.locator(".image canvas").bounding_box()
    page.mouse.click(box["x"] + 0.5, box["y"] + 0.5)  # a patch takes the place of a region
    page.wait_for_url(lambda address: "region=" not in address)
    assert "patch 0 (0) is pinned as a key" in status(page)
    assert "masked" not in page.locator(".legend").text_content()  # nothing is


def test_the_keyboard_chooses_patches_of_one_size(visit, tmp_path: Path) -> None:
    """An overview of 2 × 2 patches, and two tiles of 2 × 2 patches that lie on it."""
    image, name = pixels(80, 40), "photo"
    patches = (
        Patches(image, 2, 2, name=name),
        Patches(image, 2, 2, first=4, box=(0, 0, 40, 40), name=name),
        Patches(image, 2, 2, first=8, box=(40, 0, 40, 40), name=name),
    )
    text = Text((*("p",) * 12, "dog"), patches=patches)
    query = torch.randn(1, 1, 13, 4, generator=torch.Generator().manual_seed(0))
    with capture() as found:
        F.scaled_dot_product_attention(query, query, query)
    page = visit(found.describe(text).to_html(tmp_path / "a.html"))
    row = found[0].weights(batch=0, head=0)[12]
    page.locator(".tokens span").nth(12).click()
    page.locator(".image canvas").focus()
    for keys, chosen in (
        ("ArrowDown", [6]), ("ArrowRight", [7]), ("ArrowRight", [10]), ("Shift+ArrowUp", [8, 10]),
        ("PageUp", [1]), ("ArrowLeft", [0]), ("Shift+ArrowDown", [0, 2]), ("PageDown", [6]), ("PageDown", [6]),
    ):  # fmt: skip
        page.keyboard.press(keys)
        page.wait_for_timeout(100)
        assert f"{float(row[chosen].sum()):.2f} of the weight of “dog”" in status(page), (keys, status(page))
    assert status(visit(page.url)).strip() == status(page).strip()
    dragged(page, (0.02, 0.02), (0.1, 0.1))  # the pointer counts patches of all sizes
    assert "These 2 patches" in status(page)


def hidden(weights: torch.Tensor) -> list[int]:
    """The special token, and the key that receives more than 0.3 of all weight."""
    received = weights.mean(0)
    return sorted({0, int(received.argmax())} if received.max() > 0.3 else {0})


def test_sinks_are_hidden_in_thumbnails_too(visit, record: Record, tmp_path: Path) -> None:
    page = visit(record.to_html(tmp_path / "a.html"))
    alphas = """(at) => {
      const canvas = document.querySelectorAll(".grid [data-head] canvas")[at];
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return [...pixels].filter((_, i) => i % 4 === 3).map((alpha) => alpha > 0);
    }"""
    for at in (1, 5, 10):  # a head, a mean, the rollout
        assert (np.array(page.evaluate(alphas, at)).reshape(10, 10) == np.tri(10, dtype=bool)).all()
    striped = page.locator(".grid canvas").first.evaluate("each => getComputedStyle(each).backgroundImage")
    assert "repeating-linear-gradient" in striped
    hide = page.get_by_label("Hide sinks")
    described = page.locator(f"[id='{hide.get_attribute('aria-describedby')}']")
    assert "A sink is a key that takes much" in described.text_content() and not described.is_visible()
    hide.focus()
    assert described.is_visible()
    hide.check()
    page.wait_for_timeout(200)
    matrices = [run.weights(batch=0) for run in record]
    matrices = [each for heads in matrices for each in (heads.mean(0), *heads)]  # as the grid has them
    for at, columns in ((1, hidden(matrices[1])), (5, hidden(matrices[5])), (10, [0])):
        expected = np.tri(10, dtype=bool)
        expected[:, columns] = False
        assert (np.array(page.evaluate(alphas, at)).reshape(10, 10) == expected).all()
    shares = [float(each[:, hidden(each)].sum(1).mean()) for each in matrices]
    said = page.locator(".lead").text_content()
    assert f"Stripes hide {np.mean(shares):.2f} of all weight" in said and f"{max(shares):.2f} of a head's" in said
    assert "hide=sinks" in page.url and "of the weight is hidden" in page.locator('[data-head="0"]').get_attribute(
        "title"
    )


def test_the_scale_of_entropy_cannot_be_read_the_wrong_way(visit, record: Record, tmp_path: Path) -> None:
    page = visit(f"file://{record.to_html(tmp_path / 'a.html')}#scale=entropy&view=matrix&head=0")
    assert page.locator(".bar span").all_text_contents() == ["even: 1.6 nats", "on one key: 0 nats"]
    assert "Strong: its weight is on one key (entropy 0)" in page.locator(".says").text_content()
    most, entropy = np.log(np.arange(1, 11)).mean(), float(record[0].entropy()[0, 0].mean())
    said = f"entropy {entropy:.2f} of at most {most:.2f} nats (mean of rows)"
    assert said in page.locator(".says").text_content()
    assert said in page.locator('.strip [data-head="0"]').get_attribute("title")
    page.select_option('[aria-label="Scale"]', "log")
    assert page.locator(".bar span").all_text_contents() == ["0.0001", "0.01", "0.1", "1"]


def test_the_same_head_of_another_run(visit, tmp_path: Path) -> None:
    query = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    with capture(torch.nn.ModuleList([layer := Attention()])) as found:
        layer(query)
    page = opened(visit(found.to_html(tmp_path / "a.html")))
    page.select_option('[aria-label="Compare with"]', label="sequence 1")
    page.get_by_label("Difference").check()
    page.keyboard.press("]")  # the other head of both
    page.wait_for_timeout(300)
    assert page.locator("figcaption").text_content() == (
        "sequence 0, layer 0, head 1 minus sequence 1, layer 0, head 1 · 0"
    )
    page.mouse.move(*cell(page, 4, 2, count=6))
    page.wait_for_timeout(50)
    weights = found[0].weights(head=1)
    expected = float(weights[0, 4, 2] - weights[1, 4, 2])
    assert float(status(page).rpartition(": ")[2]) == pytest.approx(expected, rel=2e-3, abs=1e-6)
    assert "compare=run1&difference=1" in page.url
    assert " minus " in visit(page.url).locator("figcaption").text_content()


def test_the_answer_without_a_head(visit, record: Record, tmp_path: Path) -> None:
    model, tokens = made(DECODERS["gpt2"]()), torch.arange(10)[None]

    def without(layer: str, head: int) -> Any:
        if head == 3:
            raise ValueError("the model is gone")
        return head_effect(model, lambda: model(tokens), layer, head, names=lambda number: f"answer {number}")

    with served(describe_page(record), without) as address:
        page = opened(visit(address), 1)
        page.get_by_role("button", name="Without this head").click()
        page.wait_for_selector(".answers")
        effect = without("transformer.h.0.attn", 1)
        assert page.locator(".without p").first.text_content().lower() == f"{effect.text}."
        for table, answers in zip(page.locator(".answers table").all(), (effect.before, effect.after), strict=True):
            assert table.locator("th").all_text_contents() == [name for name, _ in answers]
            assert table.locator("td").all_text_contents() == [f"{share:.2f}" for _, share in answers]
        again = visit(page.url)
        again.wait_for_selector(".answers")
        page.select_option('[aria-label="Layer"]', label="rollout")
        page.wait_for_timeout(200)
        assert page.locator(".without").count() == 0
    page = opened(visit(record.to_html(tmp_path / "a.html")))
    assert page.get_by_role("button", name="Without this head").count() == 0


def test_images_and_their_patches(visit, tmp_path: Path) -> None:
    rows, cols = 4, 6
    text = Text(("[CLS]", *(f"p{i}" for i in range(24))), (0,), Patches(pixels(96, 64), rows, cols, 1))
    query = torch.zeros(1, 1, 25, 4)
    key = torch.zeros(1, 1, 25, 4)
    query[..., 0], key[..., 9, 0] = 8.0, 8.0  # all look at patch 8: row 1, column 2
    with capture() as found:
        F.scaled_dot_product_attention(query, key, key)
    page = visit(found.describe(text).to_html(tmp_path / "a.html"))
    box = page.locator(".image canvas").bounding_box()
    page.mouse.click(box["x"] + 5.5 * box["width"] / cols, box["y"] + 3.5 * box["height"] / rows)
    page.wait_for_timeout(200)
    assert "p23 (24) is pinned" in status(page)
    middle = [
        [sum(colour(page, box["x"] + (c + 0.5) * box["width"] / cols, box["y"] + (r + 0.5) * box["height"] / rows))
         for c in range(cols)]
        for r in range(rows)
    ]  # fmt: skip
    assert np.unravel_index(np.argmax(middle), (rows, cols)) == (1, 2)
    assert np.array(middle)[1, 2] > 700 and np.median(middle) < 300


def test_a_summary(visit, tmp_path: Path) -> None:
    query = torch.randn(1, 1, 10, 8, generator=torch.Generator().manual_seed(0)) * 3
    with capture() as whole:
        F.scaled_dot_product_attention(query, query, query)
    with capture(keep="summaries", topk=2) as found:
        F.scaled_dot_product_attention(query, query, query)
    page = visit(found.describe(WORDS).to_html(tmp_path / "a.html"))
    weights = whole[0].weights(batch=0, head=0)
    best = weights[4].topk(2)
    for col in range(10):
        page.mouse.move(*cell(page, 4, col))
        page.wait_for_timeout(50)
        told = status(page).rpartition(": ")[2]
        assert told == f"{weights[4, col]:.4g}" if col in best.indices else told == "not among the largest", col
    page.mouse.click(*cell(page, 4, 0))
    page.wait_for_timeout(100)
    assert len(page.locator(".largest li").all_text_contents()) == 2
    assert "the 2 largest weights of each query" in page.locator("footer").text_content()
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    assert "NaN" not in Path(download.value.path()).read_text(encoding="utf-8")


def test_light_dark_and_narrow(visit, record: Record, tmp_path: Path) -> None:
    path = record.to_html(tmp_path / "a.html")
    dark = visit(path, color_scheme="dark")
    assert sum(colour(dark, 600, 790)) < 150
    dark.keyboard.press("d")
    dark.wait_for_timeout(100)
    assert sum(colour(dark, 600, 790)) > 600
    for width in (380, 900):
        narrow = visit(path, viewport={"width": width, "height": 800})
        assert narrow.evaluate("document.documentElement.scrollWidth") <= width + 1
        assert narrow.locator(".more").count() == 0  # nothing lies at the right
        box = opened(narrow).locator(".room canvas").bounding_box()
        assert box["width"] > 200 and box["height"] > 200
        assert narrow.evaluate("document.documentElement.scrollWidth") <= width + 1


def test_shapes_from_one_cell(visit, tmp_path: Path) -> None:
    shapes = [(1, 1), (0, 2), (3, 200), (200, 3)]
    shown = [
        Alignment(tuple(f"s{i}" for i in range(S)), tuple(f"t{i}" for i in range(L)), torch.rand(L, S), f"{L} × {S}")
        for L, S in shapes
    ]
    page = visit(save_html(shown, tmp_path / "a.html", heading="Shapes"))
    for number, (L, S) in enumerate(shapes):
        page.locator(f'[data-head="{number}"]').click()
        page.wait_for_timeout(150)
        assert page.locator("figcaption").text_content() == f"{L} × {S}"
        box = page.locator(".room canvas").bounding_box()
        page.mouse.move(box["x"] + 98, box["y"] + 86)
        page.wait_for_timeout(50)
        if L:
            assert float(status(page).rpartition(": ")[2]) == pytest.approx(
                float(shown[number].weights[0, 0]), abs=1e-3
            )


def test_a_served_record(visit, record: Record) -> None:
    with served(describe_page(record)) as address:
        page = opened(visit(address), 7)
        page.mouse.move(*cell(page, 9, 2))
        page.wait_for_timeout(50)
        expected = float(record[1].weights(batch=0, head=3)[9, 2])
        assert float(status(page).rpartition(": ")[2]) == pytest.approx(expected, rel=1e-3)


def test_a_notebook_shows_it_in_a_box_of_its_own(visit, record: Record, tmp_path: Path) -> None:
    shown = record._repr_html_()
    assert re.match(r'<iframe sandbox="allow-scripts allow-downloads"', shown)
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body><div class='room'><canvas></canvas></div>{shown}")
    page = visit(tmp_path / "notebook.html")
    frame = page.frame_locator("iframe")
    assert frame.locator("h1").text_content() == "A <model>"
    frame.locator('[data-head="1"]').click()
    frame.locator(".room canvas[data-state=complete]").wait_for()
    assert "layer 0, head 1" in frame.locator("figcaption").text_content()


def test_a_small_frame_that_forbids_everything_but_scripts(visit, record: Record, tmp_path: Path) -> None:
    """As notebooks have: no address, no storage, no downloads, and little height."""
    frame = f'<iframe sandbox="allow-scripts" srcdoc="{escape(record.to_html())}" width="600" height="300"></iframe>'
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body><div class='room'><canvas></canvas></div>{frame}")
    page = visit(tmp_path / "notebook.html")
    inside = page.frames[1]
    inside.locator('[data-head="1"]').click()
    inside.wait_for_selector(".room canvas[data-state=complete]")
    inside.locator(".tokens span").nth(4).click()
    box = inside.locator(".room canvas").bounding_box()
    assert box["width"] > 250 and box["height"] > 200 and "on (4) is pinned" in inside.locator("output").text_content()
    page.keyboard.press("e")
    inside.wait_for_selector(".saved img")
    assert "Saved as A-model-GPT2LMHeadModel-layer-0-head-1" in inside.locator(".saved").text_content()
    assert (
        inside.locator(".saved img").evaluate("async each => { await each.decode(); return each.naturalWidth; }") > 600
    )
    page.keyboard.press("Escape")
    assert inside.locator(".saved").count() == 0 and inside.locator(".room canvas").count() == 1
