"""Drawings of alignments: in characters, as a picture, as a page."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import Page

from regard.inspect import Alignment, draw, legend, plot_attention, render_html, save_plot

THROUGH = Alignment(
    tuple("through"),
    ("TH", "R", "UW"),
    torch.tensor([[0.6, 0.4, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0.3, 0.2, 0.25, 0.25]]),
    "through: TH R UW",
)


def _letters(count: int) -> Alignment:
    letters = tuple("abcdefghij"[i % 10] for i in range(count))
    return Alignment(letters, ("AH", "B"), torch.full((2, count), 1 / count))


def test_letters_go_across_and_phonemes_down() -> None:
    assert draw(THROUGH).splitlines() == [
        "    t  h  r  o  u  g  h",
        "TH  ▒▒ ▒▒",
        "R         ██",
        "UW           ░░ ░░ ░░ ░░",
    ]


def test_plain_characters_will_do() -> None:
    drawn = draw(THROUGH, ascii_only=True)
    assert drawn.isascii()
    assert drawn.splitlines()[2] == "R         ##"
    assert legend(ascii_only=True).isascii()


@pytest.mark.parametrize("count", [1, 20, 28, 38, 64])
def test_a_drawing_fits_the_terminal(count: int) -> None:
    lines = draw(_letters(count), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert [symbol for symbol in lines[0] if symbol != " "] == list(_letters(count).source)


SENTENCE = Alignment(
    ("the", "zone", "of", "international", "control", "."),
    ("la", "zone", "de", "contrôle", "international", "."),
    torch.eye(6)[[0, 1, 2, 4, 3, 5]],
    "the zone of international control. → la zone de contrôle international.",
)


def test_words_lead_down_to_their_columns() -> None:
    assert draw(SENTENCE).splitlines() == [
        "               the",
        "               │  zone",
        "               │  │  of",
        "               │  │  │  international",
        "               │  │  │  │  control",
        "               │  │  │  │  │  .",
        "la             ██",
        "zone              ██",
        "de                   ██",
        "contrôle                   ██",
        "international           ██",
        ".                             ██",
    ]
    assert "|  |  of" in draw(SENTENCE, ascii_only=True)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("count", [1, 9, 30, 90])
def test_long_sentences_go_on_below(count: int, width: int) -> None:
    words = tuple(f"word{i}" for i in range(count))
    drawn = draw(
        Alignment(words, ("Donaudampfschifffahrtsgesellschaft", "b"), torch.full((2, count), 1.0)), width=width
    )
    assert max(map(len, drawn.splitlines())) <= width
    assert sum(line.startswith("b ") for line in drawn.splitlines()) == drawn.count("\n\n") + 1
    assert drawn.count("█") >= 2 * count


def test_wide_characters_take_two_columns() -> None:
    assert draw(Alignment(("猫", "が"), ("猫", "cat"), torch.eye(2))).splitlines() == [
        "     猫 が",
        "猫   ██",
        "cat     ██",
    ]
    narrow = draw(Alignment(tuple("猫" * 30), ("a",), torch.ones(1, 30)), width=40)
    assert [line.count("猫") for line in narrow.splitlines()] == [18, 0, 0, 12, 0]


@pytest.mark.slow
def test_pictures_make_room_for_words(tmp_path: Path) -> None:
    def size(alignments: list[Alignment]) -> tuple[int, int]:
        data = save_plot(alignments, tmp_path / "a.png", dpi=50).read_bytes()
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")

    short = Alignment(tuple("abcdef"), tuple("abcdef"), torch.eye(6))
    assert size([SENTENCE])[0] > size([short])[0]
    assert size([SENTENCE])[1] > size([short])[1]
    endless = Alignment(("word",) * 300, ("word",) * 2, torch.full((2, 300), 0.1))
    assert size([endless])[0] < 50 * 45
    assert size([SENTENCE] * 3)[0] < 50 * 16


def test_too_much_for_a_picture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^save_plot: alignments must fit a picture of at most 65535 dots a side, got "
    ):
        save_plot([SENTENCE] * 4, tmp_path / "a.png", dpi=20_000)
    assert not (tmp_path / "a.png").exists()


def test_nothing_said_is_drawn_too(tmp_path: Path) -> None:
    nothing = Alignment(("a", "b"), (), torch.zeros(0, 2))
    assert draw(nothing) == "  a  b"
    assert save_plot([nothing], tmp_path / "a.png").stat().st_size > 1000
    assert Page(render_html([nothing])).described["layers"][0]["shape"] == [0, 2]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(7, 3), r"Alignment: weights must be of shape \(3, 7\) \(target, source\), got \(7, 3\)\."),
        (torch.full((3, 7), torch.nan), "Alignment: weights must be finite, got nan or inf"),
    ],
)
def test_bad_weights_are_refused(weights: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Alignment(THROUGH.source, THROUGH.target, weights)


@pytest.mark.parametrize("function", [render_html, lambda alignments: save_plot(alignments, "never.png")])
def test_nothing_to_draw_is_an_error(function) -> None:
    with pytest.raises(ValueError, match="alignments must have at least one alignment, got none"):
        function([])
    with pytest.raises(ValueError, match="alignments must have source symbols, got 'x', which has none"):
        function([Alignment((), ("AH",), torch.zeros(1, 0), "x")])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = save_plot([THROUGH, _letters(28), THROUGH, THROUGH], tmp_path / "a.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") > 500


def test_pictures_leave_the_plotting_state_alone(tmp_path: Path) -> None:
    import matplotlib

    before = matplotlib.get_backend()
    save_plot([Alignment(("$", "_"), ("^", "\\"), torch.eye(2), "$a^$ costs_$")], tmp_path / "a.png")
    assert matplotlib.get_backend() == before


def test_weights_of_numpy_are_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"Alignment: weights must be a tensor .*, got a numpy float64 array"):
        Alignment(("a",), ("b",), np.ones((1, 1)))  # type: ignore[arg-type]


def test_it_draws_on_an_axis_of_ones_own() -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(4, 2))
    assert plot_attention(THROUGH, axes[1]) is axes[1] and not axes[0].images
    (image,) = axes[1].images
    torch.testing.assert_close(torch.tensor(image.get_array()), THROUGH.weights.double())
    assert (image.norm.vmin, image.norm.vmax) == (0, 1), "axes can be compared"
    assert [label.get_text() for label in axes[1].get_xticklabels()] == list("through")
    own = plot_attention(SENTENCE)
    assert own.figure is not figure
    shrunk, usual = (ax.get_yticklabels()[0].get_fontsize() for ax in (axes[1], own))
    assert shrunk < usual, "labels shrink with their cells"
    with pytest.raises(TypeError, match="plot_attention: ax must be a matplotlib Axes or None, got 'here'"):
        plot_attention(THROUGH, "here")
    with pytest.raises(ValueError, match="plot_attention: alignments must have source symbols"):
        plot_attention(Alignment((), ("AH",), torch.ones(1, 0)))
    plt.close("all")


def test_a_notebook_shows_the_picture_and_print_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = THROUGH._repr_png_()
    assert shown is not None and shown.startswith(b"\x89PNG")
    assert str(THROUGH) == f"{THROUGH.title}\n{draw(THROUGH)}"
    assert Alignment((), ("AH",), torch.ones(1, 0))._repr_png_() is None, "there is nothing to draw"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert THROUGH._repr_png_() is None, "the text is shown instead"
