"""Drawings, asserted by what they show."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from regard import masks


def grid(text: str) -> list[str]:
    """The cells of a drawing, without title, note, key numbers and query numbers."""
    return [line.split(maxsplit=1)[1] for line in text.splitlines()[3:]]


def test_cells_are_the_mask():
    lines = grid(masks.causal(offset=2).draw(4, 7))
    assert lines == ["███····", "████···", "█████··", "██████·"]


def test_caption():
    text = (masks.causal() & masks.padding(torch.tensor([2, 4]))).draw(4, 4, b=1).splitlines()
    assert text[0] == "causal() & padding(tensor[2])"
    assert text[1] == "4 queries ↓, 4 keys →; █ visible, · not; sequence 1 of 2"
    assert "head 2 of 3" in masks.alibi(3).draw(2, h=2)


def test_numbers_stand_over_their_columns():
    lines = masks.causal().draw(12).splitlines()
    margin = lines[3].index("█")
    for column in (0, 5, 10):
        assert lines[2][margin + column :].startswith(str(column))
    assert [line.split()[0] for line in lines[3:]] == [str(q) for q in range(12)]


@pytest.mark.parametrize(
    ("mask", "rows", "columns"),
    [
        (masks.causal(), 16, 16),
        (masks.dense(torch.ones(3, 5)), 3, 5),
        (masks.document(torch.tensor([1, 1, 2])), 3, 3),
        (masks.document(torch.tensor([1, 1, 2]), torch.tensor([1, 2])), 3, 2),
        (masks.padding(torch.tensor([2, 9])), 9, 9),
        (masks.from_cu_seqlens(torch.tensor([0, 2, 5])), 5, 5),
        (masks.causal() & masks.key_padding(torch.ones(2, 6, dtype=torch.bool)), 6, 6),
    ],
    ids=repr,
)
def test_natural_size(mask, rows, columns):
    lines = grid(str(mask))
    assert len(lines) == rows and {len(line) for line in lines} == {columns}


def test_biases_are_shaded():
    lines = grid((masks.causal() & masks.alibi(1)).draw(8))
    assert all(lines[q][q] == "█" and set(lines[q][q + 1 :]) <= {"·"} for q in range(8))
    assert lines[7][0] == "░" and list(lines[7]) == sorted(lines[7], key="░▒▓█".index)
    assert "from █ 0 down to ░ -0.02734" in (masks.causal() & masks.alibi(1)).draw(8)


def test_large_masks_are_drawn_by_tiles():
    text = (masks.causal() & masks.window(300, 0)).draw(2000)
    assert "a cell is 42×42 pairs: █ full, ▒ mixed, · empty" in text
    lines = grid(text)
    assert len(lines) == 48 and all(lines[i][i] == "▒" and "█" not in lines[i][i + 1 :] for i in range(48))
    assert "▒ mixed or unknown" in masks.document(torch.arange(9000) // 7).draw()
    one_row = masks.sinks(4).draw(1, 1_000_000)
    assert len(grid(one_row)) == 1 and grid(one_row)[0].startswith("▒·")


def test_nothing_to_draw():
    assert masks.causal().draw(0, 0).count("\n") == 2
    assert masks.causal().draw(3, 0).splitlines()[-1].strip() == "2"


def test_printing_never_fails():
    text = str(masks.causal() & masks.dense(torch.ones(3, 5)))
    assert text.startswith("causal() & dense(tensor[3, 5])\n(cannot be drawn: masks.causal: align must be given")
    assert "cannot be drawn" in (masks.causal() & masks.dense(torch.ones(3, 5)))._repr_html_()


def test_index_is_checked():
    with pytest.raises(ValueError, match=r"Mask\.draw: b must be an index below 1, got 1\."):
        masks.causal().draw(3, b=1)


def test_html_is_a_figure_whose_cells_are_the_mask():
    html = (masks.causal() & masks.as_mask(lambda b, h, q, k: k != 1))._repr_html_()
    figure = ElementTree.fromstring(html)
    assert figure.find("figcaption/code").text == "causal() & as_mask(<lambda>)"
    hidden, visible = figure.findall(".//path")
    count = sum(k <= q and k != 1 for q in range(16) for k in range(16))
    assert visible.get("d").count("M") == count and hidden.get("d").count("M") == 256 - count
    assert float(hidden.get("fill-opacity")) < 0.1 < float(visible.get("fill-opacity"))
    assert figure.find("svg").get("fill") == "currentColor"  # the ink of the page, light or dark
    assert "http" not in html and "<script" not in html
