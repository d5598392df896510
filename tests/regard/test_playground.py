"""The toys of the site in a browser: their masks are those of `regard.masks`, their curve is that of the estimator."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard import masks
from regard.regression import NadarayaWatsonRegressor

SCRIPT = Path(__file__).parents[2] / "docs" / "_static" / "playground.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.slow
N = 32


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None and not os.environ.get("REGARD_BROWSER"):
        pytest.skip("there is no Chromium here; apt-get install chromium brings it, and REGARD_BROWSER=1 insists on it")
    assert CHROMIUM is not None, "REGARD_BROWSER is set, and there is no Chromium"
    from playwright.sync_api import sync_playwright

    file = tmp_path_factory.mktemp("site") / "page.html"
    code = SCRIPT.read_text(encoding="utf-8")
    file.write_text(
        '<meta charset="utf-8"><div id="mask-playground"></div><div id="regression-playground"></div>'
        f"<script>{code}</script>",
        encoding="utf-8",
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.on("pageerror", lambda error: pytest.fail(str(error)))
        opened.goto(file.as_uri())
        yield opened
        browser.close()


def slide(page: Any, place: str, number: int, value: float) -> None:
    sliders = page.locator(f"#{place} input[type=range]")
    sliders.nth(number).evaluate(f"(one) => {{ one.value = {value}; one.dispatchEvent(new Event('input')); }}")


@pytest.mark.parametrize("name", [
    "everything()", "causal()", "window(3, 0)", "window(3, 3)", "sinks(3)", "prefix(3)", "dilated(3)", "chunked(3)",
    "leave_one_out()",
])  # fmt: skip
def test_a_mask_is_that_of_the_library(page: Any, name: str) -> None:
    selects = page.locator("#mask-playground select")
    selects.nth(0).select_option(re.sub(r"\b3\b", "n", name))  # first, and second and third show everything
    selects.nth(1).select_option("&")
    for other in (2, 4):
        selects.nth(other).select_option("everything()")
    slide(page, "mask-playground", 0, 3)
    cells = page.eval_on_selector_all(
        "#mask-playground .pair",
        "(all) => all.map((one) => [one.getAttribute('y'), one.getAttribute('x')].map(Number))",
    )
    expected = masks.everything() if name == "everything()" else eval(f"masks.{name}", {"masks": masks})
    rows = [line.split()[1] for line in expected.draw(N).splitlines()[-N:]]
    assert {tuple(cell) for cell in cells} == {(i, j) for i in range(N) for j in range(N) if rows[i][j] == "█"}
    skipped = sum(
        all(rows[y + i][x + j] != "█" for i in range(8) for j in range(8))
        for y in range(0, N, 8)
        for x in range(0, N, 8)
    )
    said = page.locator("#mask-playground p").inner_text()
    assert said.startswith(name) and f"; {skipped} of 16" in said


def points(count: int) -> list[tuple[float, float]]:
    """Return the points of the page: the same generator."""
    state = 7

    def random() -> float:
        nonlocal state
        state = state * 48271 % 2147483647
        return state / 2147483647

    found = []
    for _ in range(count):
        x = 5 * random()
        found.append((x, math.sin(2 * x) + x / 2 + 0.6 * (random() + random() + random() - 1.5)))
    return found


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "boxcar", "triangular", "epanechnikov"])
def test_the_error_is_that_of_the_estimator(page: Any, kernel: str) -> None:
    page.locator("#regression-playground select").select_option(kernel)
    slide(page, "regression-playground", 0, 0.6)
    said = page.locator("#regression-playground p").inner_text()
    data = points(60)
    errors = []
    for k, (x, y) in enumerate(data):
        rest = data[:k] + data[k + 1 :]
        model = NadarayaWatsonRegressor(kernel=kernel, bandwidth=0.6).fit(
            [[at] for at, _ in rest], [v for _, v in rest]
        )
        errors.append((float(model.predict([[x]])[0]) - y) ** 2)
    assert said == f"Mean squared leave-one-out error: {sum(errors) / 60:.4f}."
