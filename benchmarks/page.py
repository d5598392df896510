"""How large the inspector's page is, how fast it opens and answers, and how exact it is.

    python -m benchmarks.page [--steps 40]

Chromium without a network opens pages written by :func:`regard.inspect.render_html` or served by ``regard view``. A
page is open once its grid of heads, or its only matrix, is drawn in full detail; a head, once its matrix is. A step is
one turn of the wheel or one drag, timed until the resulting frame is drawn. Weights shown under the pointer are
compared with a float64 softmax of the original queries and keys. BertViz shows random weights for as many heads; the
three libraries that it would download are served locally.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.machine import ROOT, facts
from regard.inspect import Record, capture
from regard.inspect._view.page import describe_page
from regard.inspect._view.server import PageServer

RESULTS = ROOT / "benchmarks/results/page.json"
LONG, LONGEST, WIDTH = 16_384, 100_000, 128
#: Tokens of GPT-2's size; and those at which BertViz is tried.
TOKENS, BERTVIZ = 1024, (64, 128, 256)
LIBRARIES = {"d3": ("d3@5.7.0", "dist/d3.min.js"), "jquery": ("jquery@2.2.4", "dist/jquery.min.js"),
             "require": ("requirejs@2.3.6", "require.js")}  # fmt: skip


@contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


def visited(browser: Any, address: str, libraries: dict[str, bytes] | None = None) -> Any:
    """Return a browser page that can only reach this machine."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})

    def route(request: Any) -> None:
        url = request.request.url
        if url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")):
            request.continue_()
        elif name := next((name for name in libraries or {} if name in url), None):
            request.fulfill(body=libraries[name], content_type="text/javascript")
        else:
            request.abort()

    page.route("**/*", route)
    page.set_default_timeout(300_000)
    page.goto(address)
    return page


def until(page: Any, selector: str) -> None:
    """Wait for an element. Playwright's own wait walks through all elements in each frame, which slows a long page."""
    page.wait_for_function("(selector) => document.querySelector(selector)", arg=selector)


def opened(browser: Any, address: str) -> tuple[Any, float]:
    """Open a page of ours, and return it and the seconds until what it opens on is whole."""
    start = time.perf_counter()
    page = visited(browser, address)
    until(page, ".room canvas[data-state=complete], .grid[data-state=complete]")
    return page, time.perf_counter() - start


def entered(page: Any) -> float:
    """Open a head of a grid, and return the seconds until its matrix is whole."""
    start = time.perf_counter()
    page.locator('[data-head="17"]').click()
    until(page, ".room canvas[data-state=complete]")
    return time.perf_counter() - start


STEP = """async ([kind, x, y, by]) => {
  const canvas = document.querySelector(".room canvas"), box = canvas.getBoundingClientRect();
  const at = {clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, pointerId: 1};
  const start = performance.now();
  if (kind === "wheel") canvas.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: by, ctrlKey: true}));
  else canvas.dispatchEvent(new PointerEvent("pointermove", {...at, buttons: 1}));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - start;
}"""


def steps(page: Any, count: int) -> dict[str, float]:
    """Return the median and the slowest milliseconds of zooming in and out, and of panning half way in."""
    zooms = [page.evaluate(STEP, ["wheel", 400, 380, by]) for by in [-120] * count + [120] * (count // 2)]
    box = page.locator(".room canvas").bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 500)
    page.mouse.down()
    pans = [page.evaluate(STEP, ["move", 500 - 12 * i, 500 - 9 * i, 0]) for i in range(1, count)]
    page.mouse.up()
    found = {"zoom": statistics.median(zooms), "pan": statistics.median(pans)}
    return found | {"slowest": max(zooms + pans)}


def errors(page: Any, query: torch.Tensor, key: torch.Tensor, count: int) -> tuple[float, float]:
    """Return the largest difference of a weight under the pointer from that in float64, and the largest of these."""
    page.keyboard.press("0")
    box = page.locator(".room canvas").bounding_box()
    generator = torch.Generator().manual_seed(3)
    worst, largest = 0.0, 0.0
    for _ in range(count):
        down, along = torch.rand(2, generator=generator).tolist()
        y = box["y"] + 90 + down * (box["height"] - 100)
        page.mouse.move(box["x"] + 97 + along * (y - box["y"] - 86), y)  # below the diagonal, where weights are
        page.wait_for_timeout(20)
        said = re.fullmatch(r".*\((\d+)\) → .*\((\d+)\): (\S+)", page.locator("output").text_content())
        assert said is not None
        row, col, weight = int(said[1]), int(said[2]), float(said[3])
        scores = key[: row + 1].double() @ query[row].double() / WIDTH**0.5
        exact = float(scores.softmax(0)[col]) if col <= row else 0.0
        worst, largest = max(worst, abs(weight - exact)), max(largest, exact)
    return worst, largest


def head_record(length: int) -> tuple[Record, torch.Tensor, torch.Tensor]:
    """Return what one head attends to, and its queries and keys."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(length, WIDTH, generator=generator) for _ in range(2))
    phase = torch.arange(length)[:, None] / torch.tensor([300.0, 40.0])
    wave = torch.cat([phase.sin(), phase.cos()], -1) * 4
    query[:, :4] += wave
    key[:, :4] += wave
    with capture(precision="float16") as record, torch.no_grad():
        F.scaled_dot_product_attention(query[None, None], key[None, None], key[None, None], is_causal=True)
    return record, query, key


def long_head(browser: Any, folder: Path, count: int) -> dict[str, Any]:
    """Measure the page of one head over 16,384 tokens."""
    record, query, key = head_record(LONG)
    path = folder / "long.html"
    start = time.perf_counter()
    record.to_html(path)
    written = time.perf_counter() - start
    page, seconds = opened(browser, path.as_uri())
    timings = steps(page, count)
    worst, largest = errors(page, query, key, 100)
    page.close()
    named = {"page": f"one head, {LONG:,} × {LONG:,}, a file", "megabytes": path.stat().st_size / 1e6}
    return named | {"written": written, "open": seconds, **timings, "error": worst, "largest": largest}


@contextmanager
def served(record: Record) -> Iterator[tuple[str, float]]:
    """Serve a record, and yield the page's address and the seconds until it is there."""
    start = time.perf_counter()
    with PageServer(describe_page(record)) as server:
        started = time.perf_counter() - start
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.address, started
        server.shutdown()


def longest_head(browser: Any, count: int) -> dict[str, Any]:
    """Measure the page of one head over 100,000 tokens, served."""
    with served(head_record(LONGEST)[0]) as (address, started):
        page, seconds = opened(browser, address)
        named = {"page": f"one head, {LONGEST:,} × {LONGEST:,}, served", "megabytes": None, "written": started}
        found = named | {"open": seconds, **steps(page, count)}
        page.close()
    return found


def gpt2_record() -> Record:
    """Return what a model of GPT-2's size attends to in 1,024 tokens."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(attn_implementation="sdpa", initializer_range=0.1)).eval()
    with capture(model, precision="float16") as record, torch.no_grad():
        model(torch.randint(50_000, (1, TOKENS)))
    return record


def gpt2(browser: Any, folder: Path, count: int) -> list[dict[str, Any]]:
    """Measure the page of 12 × 12 heads over 1,024 tokens, as a file and served."""
    record, path = gpt2_record(), folder / "gpt2.html"
    start = time.perf_counter()
    record.to_html(path)
    written = time.perf_counter() - start
    page, seconds = opened(browser, path.as_uri())
    size = path.stat().st_size / 1e6
    named = {"page": f"12 × 12 heads, {TOKENS:,} tokens, a file", "megabytes": size, "written": written}
    found = [named | {"open": seconds, "head": entered(page), **steps(page, count)}]
    page.close()
    with served(record) as (address, started):
        page, seconds = opened(browser, address)
        found.append({"page": f"12 × 12 heads, {TOKENS:,} tokens, served", "megabytes": None, "written": started,
                      "open": seconds, "head": entered(page), **steps(page, count)})  # fmt: skip
        page.close()
    return found


def libraries(folder: Path) -> dict[str, bytes]:
    """Return what BertViz's page asks the network for; of jQuery, the next version that there is a package of."""
    found = {}
    for name, (package, member) in LIBRARIES.items():
        packed = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, capture_output=True, check=True)
        with tarfile.open(folder / packed.stdout.decode().strip().splitlines()[-1]) as file:
            member = file.extractfile(f"package/{member}")
            assert member is not None
            found[name] = member.read()
    return found


def bertviz(browser: Any, folder: Path, tokens: int) -> dict[str, Any]:
    """Measure BertViz's page of 12 × 12 heads."""
    from bertviz import head_view

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(1, 12, tokens, tokens, generator=generator).softmax(-1) for _ in range(12)]
    start = time.perf_counter()
    text = head_view(weights, [str(i) for i in range(tokens)], html_action="return").data
    path = folder / "bertviz.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{text}", encoding="utf-8")
    written = time.perf_counter() - start
    named = {"page": f"BertViz: 12 × 12 heads, {tokens} tokens, a file", "megabytes": path.stat().st_size / 1e6}
    start = time.perf_counter()
    page = visited(browser, path.as_uri(), libraries(folder))
    page.wait_for_selector("svg line", state="attached")
    found = named | {"written": written, "open": time.perf_counter() - start}
    page.close()
    return found


def table(result: dict[str, Any]) -> str:
    """Return the table of the results, with where they were measured."""
    lines = [
        "| page | size | written in | opens in | a head opens in | zoom, pan (median) | slowest step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        size = f"{row['megabytes']:.1f} MB" if row["megabytes"] else ""
        step = f"{row['zoom']:.0f}, {row['pan']:.0f} ms | {row['slowest']:.0f} ms" if "zoom" in row else "|"
        head = f"{row['head']:.2f} s" if "head" in row else ""
        lines.append(f"| {row['page']} | {size} | {row['written']:.1f} s | {row['open']:.2f} s | {head} | {step} |")
    exact = next(row for row in result["rows"] if "error" in row)
    error = f"weights under the pointer are within {exact['error']:.1g} of float64"
    lines += ["", f"In the largest matrix, {error}; the largest weight is {exact['largest']:.2g}."]
    machine = result["machine"]
    return "\n".join([*lines, "", f"{machine['CPU']} ({machine['vector instructions']}), {result['date']}."])


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    assert __doc__ is not None
    text = __doc__.partition("\n\n")[2].partition("\n\n")[2].strip()
    return "\n".join(["# The inspector's page", "", text, "", table(result)]) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        place = Path(folder)
        rows = [long_head(chromium, place, given.steps), longest_head(chromium, given.steps)]
        rows += gpt2(chromium, place, given.steps)
        rows += [bertviz(chromium, place, tokens) for tokens in BERTVIZ]
        version = chromium.version
    result = {"machine": facts() | {"Chromium": version}, "date": f"{datetime.now(UTC):%Y-%m-%d}", "rows": rows}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(report(result), encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main(sys.argv[1:])
