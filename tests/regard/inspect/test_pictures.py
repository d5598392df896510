"""Pictures of weights: scales, signs, sizes, formats, many heads, images; and for every kind of colour vision."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from regard.inspect import Alignment, capture, draw, legend, plot_attention, plot_heads, plot_image, save_plot
from regard.inspect._view.plots import DIVERGING, SCALES, SEQUENTIAL, pooled, scaled

mpl.use("agg")
import matplotlib.pyplot as plt

#: Machado, Oliveira & Fernandes 2009: linear RGB as each dichromat sees it.
BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "everyone": np.eye(3),
}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def seen(colours: np.ndarray, kind: str) -> np.ndarray:
    """Colours (N, 3) in sRGB as CIELAB, as somebody sees them."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    linear = (linear @ np.array(BLIND[kind]).T).clip(0, 1)
    xyz = linear @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], -1)


def page_palettes() -> dict[str, list[np.ndarray]]:
    """The stops of the page's palettes, from its source."""
    import re

    text = (Path(__file__).parents[3] / "viewer/src/colors.ts").read_text(encoding="utf-8")
    found: dict[str, list[np.ndarray]] = {}
    for name in ("SEQUENTIAL", "DIVERGING"):
        part = text[text.index(f"const {name}") :].partition("};")[0]
        for line in part.splitlines()[1:]:
            if stops := re.findall(r"#([0-9a-f]{6})", line):
                found.setdefault(name, []).append(
                    np.array([[int(each[i : i + 2], 16) / 255 for i in (0, 2, 4)] for each in stops])
                )
    assert {name: len(each) for name, each in found.items()} == {"SEQUENTIAL": 2, "DIVERGING": 2}
    return found


@pytest.mark.parametrize("kind", BLIND)
def test_everybody_can_read_the_colours(kind: str) -> None:
    steps = np.linspace(0, 1, 33)
    sequential = [mpl.colormaps[SEQUENTIAL](steps)[:, :3], *page_palettes()["SEQUENTIAL"]]
    for colours in sequential:
        lightness = seen(colours, kind)[:, 0]
        assert (np.diff(lightness) < 0).all() or (np.diff(lightness) > 0).all()
        assert abs(lightness[-1] - lightness[0]) > 60
    diverging = [mpl.colormaps[DIVERGING](steps)[:, :3], *page_palettes()["DIVERGING"]]
    for colours in diverging:
        lab = seen(colours, kind)
        middle = len(lab) // 2
        for half in (lab[: middle + 1], lab[middle:]):
            assert (np.diff(half[:, 0]) < 0).all() or (np.diff(half[:, 0]) > 0).all()
        for left, right in zip(lab[: middle // 2], lab[::-1]):  # of equal size, and other sign
            assert np.linalg.norm(left - right) > 15


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.sampled_from(list(SCALES)), st.booleans())
def test_scales_keep_order_and_sign(values: list[float], scale: str, negative: bool) -> None:
    weights = torch.tensor([values], dtype=torch.float64) * (-1 if negative else 1)
    found = scaled(weights, scale, "draw")
    assert bool((found.abs() <= 1).all()) and bool((found * weights >= 0).all())
    order = weights[0].abs().argsort()
    assert bool((found[0].abs()[order].diff() >= 0).all())


def test_what_scales_stand_for() -> None:
    weights = torch.tensor([[0.99, 0.009, 0.001], [0.2, 0.2, 0.0]])
    assert scaled(weights, "absolute", "draw").tolist() == weights.tolist()
    assert scaled(weights, "row", "draw")[1].tolist() == [1, 1, 0]
    assert scaled(weights, "log", "draw")[0].tolist() == pytest.approx([0.9989, 0.4886, 0.25], abs=1e-4)
    with pytest.raises(ValueError, match="draw: scale must be one of 'absolute', 'even', 'log', 'row', got 'linear'"):
        draw(Alignment(("a",), ("b",), torch.ones(1, 1)), scale="linear")


def on_even_scale(weight: float, n: int) -> float:
    """The scale as the docs state it."""
    if weight == 0:
        return 0.0
    times = weight * n
    place = 0.1 + 0.9 * math.log(times) / math.log(n) if times > 1 and n > 1 else 0.1 * math.sqrt(min(times, 1))
    return max(place, 0.035)


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 999))
def test_an_even_row_is_pale_and_a_sharp_one_dark_at_any_length(L: int, S: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(L, S, generator=generator).mul(3).softmax(-1).double()
    visible = torch.randint(1, S + 1, (L,), generator=generator)
    found = scaled(weights, "even", "draw", visible)
    for row, n, places in zip(weights.tolist(), visible.tolist(), found.tolist()):
        assert places == pytest.approx([min(on_even_scale(each, n), 1) for each in row], abs=1e-9)
    even, sharp = torch.full((1, S), 1 / S).double(), torch.eye(S).double()
    assert scaled(even, "even", "draw", torch.tensor([S])).tolist()[0] == pytest.approx([0.1] * S)
    assert S == 1 or scaled(sharp, "even", "draw", torch.tensor([S] * S)).allclose(sharp)


def test_the_terminal_shows_small_weights_against_an_even_split() -> None:
    weights = torch.full((2, 40), 1 / 40)
    weights[1] = torch.eye(40)[7]
    one = Alignment(tuple("a" * 40), ("x", "y"), weights, visible=torch.tensor([40, 40]))
    _, even, sharp = draw(one, width=130).splitlines()
    assert even.count("░") == 80 and sharp.strip("y ") == "██"
    assert draw(one, scale="absolute", width=130).splitlines()[1] == "x"
    assert legend(scale="even", ascii_only=True) == ("attention: . an even share of the visible keys  : * more  # all")
    with pytest.raises(ValueError, match=r"Alignment: visible must be of shape \(2,\) \(target,\), got \(3,\)"):
        Alignment(one.source, one.target, weights, visible=torch.ones(3))


def test_a_picture_says_its_head_and_its_scale(tmp_path: Path) -> None:
    one = Alignment(("a", "b"), ("x", "y"), torch.tensor([[0.3, 0.7], [0.5, 0.5]]), visible=torch.tensor([2, 2]))
    titled = dataclasses.replace(one, title="layer 1 (h.1.attn), head 2")
    for scale, said in ((None, "compared with an even split"), ("row", "relative to row maximum"), ("log", "(log)")):
        text = save_plot([titled], tmp_path / "a.svg", scale=scale).read_text(encoding="utf-8")
        assert "layer 1 (h.1.attn), head 2" in text and said in text  # matplotlib writes texts as comments, too
    assert one.scale_or(None) == "even" and dataclasses.replace(one, visible=None).scale_or(None) == "absolute"


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 45), st.randoms(use_true_random=False))
def test_pooling_keeps_the_largest(L: int, S: int, most: int, random) -> None:
    weights = torch.tensor([[random.uniform(-1, 1) for _ in range(S)] for _ in range(L)])
    found, block = pooled(weights, most)
    assert max(found.shape) <= most or block == 1 == most
    for row in range(found.shape[0]):
        for col in range(found.shape[1]):
            part = weights[row * block : (row + 1) * block, col * block : (col + 1) * block]
            assert abs(found[row, col]) == part.abs().max() and found[row, col] in part


def test_differences_have_signs_in_the_terminal() -> None:
    difference = Alignment(("a", "b", "c"), ("x",), torch.tensor([[-1.0, 0.0, 0.5]]))
    assert draw(difference).splitlines()[1] == "x  ≣≣    ▒▒"
    assert draw(difference, ascii_only=True).splitlines()[1] == "x  @@    **".replace("**", "::")
    assert legend(is_signed=True).endswith("; less: - = ≡ ≣")
    assert legend(scale="log") == "attention: ░ 0.001  ▒ 0.01  ▓ 0.1  █ 1"


def test_a_long_text_is_drawn_in_blocks() -> None:
    drawn = draw(Alignment(tuple("a" * 1000), tuple("b" * 1000), torch.eye(1000)), width=80)
    lines = drawn.splitlines()
    assert lines[0] == "Each cell is the largest of 3 × 3 weights." and max(map(len, lines)) <= 80
    assert drawn.count("█") == 334


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_formats(kind: str, tmp_path: Path) -> None:
    path = save_plot([Alignment(("a", "<b>"), ("x",), torch.tensor([[0.3, 0.7]]), "one")], tmp_path / f"a.{kind}")
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
    with pytest.raises(ValueError, match=r"save_plot: path must end in .png, .svg, .pdf, got 'a.jpg'"):
        save_plot([Alignment(("a",), ("b",), torch.ones(1, 1))], tmp_path / "a.jpg")
    assert not (tmp_path / "a.jpg").exists()


def test_a_sink_drowns_nothing_on_a_scale_of_logarithms() -> None:
    weights = torch.full((6, 6), 0.002)
    weights[:, 0], weights[2, 4] = 0.95, 0.04
    alignment = Alignment(tuple("abcdef"), tuple("uvwxyz"), weights)
    contrast = {}
    for scale in SCALES:
        cells = np.asarray(plot_attention(alignment, scale=scale).images[0].get_array())
        contrast[scale] = cells[2, 4] - cells[1, 1]
    assert contrast["log"] > 0.3 and contrast["absolute"] < 0.05


def test_differences_have_two_colours() -> None:
    ax = plot_attention(Alignment(("a", "b"), ("x",), torch.tensor([[-0.5, 0.5]])))
    (image,) = ax.images
    assert (image.norm.vmin, image.norm.vmax, image.get_cmap().name) == (-1, 1, DIVERGING)


@pytest.mark.campaign
@pytest.mark.slow
def test_thousands_of_tokens_are_drawn(tmp_path: Path) -> None:
    tokens = tuple(f"word{i}" for i in range(2500))
    alignment = Alignment(tokens, tokens, torch.eye(2500))
    ax = plot_attention(alignment)
    assert ax.images[0].get_array().shape == (1250, 1250) and len(ax.get_xticklabels()) < 500
    named = [label.get_text() for label in ax.get_yticklabels()]
    at = ax.get_yticks()
    assert named[3] == f"word{int(at[3])}" and min(label.get_fontsize() for label in ax.get_yticklabels()) >= 6
    small = save_plot([alignment], tmp_path / "a.png", dpi=30)
    picture = np.asarray(Image.open(small).convert("L"))
    assert picture.shape[0] > 1000 and (picture < 100).sum() > 1000


class TestHeads:
    def test_of_a_record(self) -> None:
        query = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(0))
        with capture() as record:
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
        figure = plot_heads(record, batch=1)
        titles = [ax.get_title() for ax in figure.axes if ax.images]
        assert [title.split()[0] for title in titles] == ["0·0", "0·1", "0·2"]
        expected = record[0].entropy()[1].mean(-1).tolist()
        assert [float(title.split()[1]) for title in titles] == pytest.approx(expected, abs=0.006)
        cells = figure.axes[1].images[0].get_array()
        weights = record[0].weights(batch=1, head=1)
        assert np.allclose(cells, [[on_even_scale(float(each), 7) for each in row] for row in weights], atol=1e-6)
        sharp = plot_heads(record[0], batch=1, order="entropy", figure=plt.figure())
        told = [float(ax.get_title().split()[1]) for ax in sharp.axes if ax.images]
        assert told == sorted(told)

    @pytest.mark.slow
    def test_many_heads_are_one_picture(self) -> None:
        figure = plot_heads(torch.rand(16, 30, 30).softmax(-1), scale="log")
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=50)
        assert len(figure.axes) == 17 and len(buffer.getvalue()) > 10_000

    @pytest.mark.parametrize(
        ("heads", "options", "message"),
        [
            (torch.rand(3, 3), {}, r"heads must be a record, or a tensor \(H, L, S\), got 2 dimensions"),
            (torch.rand(0, 3, 3), {}, "heads must have at least one, got none"),
            (torch.rand(1, 3, 3), {"order": "name"}, "order must be one of 'entropy', 'number', got 'name'"),
            (torch.rand(1, 3, 3), {"scale": "x"}, "scale must be one of"),
        ],
    )
    def test_what_is_refused(self, heads: torch.Tensor, options: dict[str, str], message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            plot_heads(heads, **options)


class TestImages:
    def test_what_is_not_attended_to_lies_in_the_dark(self) -> None:
        weights = torch.zeros(12)
        weights[7] = 0.9
        figure = plt.figure(figsize=(4, 3), dpi=50)
        plot_image(weights, np.ones((30, 40, 3)), (3, 4), figure.add_axes((0, 0, 1, 1)))
        figure.canvas.draw()
        drawn = np.asarray(figure.canvas.buffer_rgba())[..., :3].mean(-1)
        brightness = drawn.reshape(3, 50, 4, 50).mean((1, 3))
        assert np.unravel_index(brightness.argmax(), (3, 4)) == (1, 3) and np.median(brightness) < 80

    def test_smoothly(self) -> None:
        ax = plot_image(torch.eye(4)[1], np.ones((8, 8, 3)), (2, 2), smooth=True)
        assert ax.images[1].get_alpha().shape == (32, 32) and float(ax.images[1].get_alpha().max()) <= 0.8

    @pytest.mark.parametrize(
        ("weights", "image", "message"),
        [
            (torch.ones(5), np.ones((4, 4, 3)), "weights must be a tensor of 4, one weight for each patch, got 5"),
            ([1, 2, 3, 4], np.ones((4, 4, 3)), "weights must be a tensor of 4"),
            (torch.ones(4), np.ones(4), "image must have a height, a width and colours, got 1 dimensions"),
        ],
    )
    def test_what_is_refused(self, weights, image, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plot_image(weights, image, (2, 2))
