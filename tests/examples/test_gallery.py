"""The gallery: every example draws, its words and numbers are right."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from examples import __main__ as gallery
from examples import kernel_regression, kernels, vision_gates, vision_rollout, worked_examples

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
mpl.use("agg")


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", gallery.NAMES)
def test_every_example_draws_a_picture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (vision_gates, vision_rollout):
        monkeypatch.setattr(module, "EPOCHS", 0.2)  # that it draws needs no good model
    assert gallery.main([name, "--out", str(tmp_path)]) == 0
    picture = mpl.image.imread(tmp_path / f"{name}.png")
    assert min(picture.shape[:2]) > 100
    assert picture[..., :3].std() > 0.01, "it is empty"
    assert name in capsys.readouterr().out


def test_the_page_shows_every_picture() -> None:
    page = (ROOT / "docs" / "gallery" / "README.md").read_text(encoding="utf-8")
    assert page == gallery.page(), "run `make gallery`"
    for name in gallery.NAMES:
        assert (ROOT / "docs" / "gallery" / f"{name}.png").exists(), "run `make gallery`"


def test_an_unknown_example_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gallery.main(["kernel"])
    assert "there is no example called kernel" in capsys.readouterr().err


def test_the_dot_product_example() -> None:
    scores, weights, output = worked_examples.dot_product()
    assert scores[0].tolist() == [-3.0, -3.0, 5.0]
    expected = torch.softmax(torch.tensor([-3.0, -3.0, 5.0]), 0)
    torch.testing.assert_close(weights[0], expected)
    torch.testing.assert_close(output[0], expected @ worked_examples.VALUES)


def test_the_self_attention_example() -> None:
    expected = torch.tensor([[1.9366, 2.0000, 1.9997], [6.6831, 7.9640, 7.7599]])
    torch.testing.assert_close(worked_examples.self_attention().mT[:2], expected, rtol=0, atol=5e-5)


def test_the_masked_softmax_example() -> None:
    for weights, lengths in zip(worked_examples.lengths(), ([[2, 2], [3, 3]], [[1, 3], [2, 4]])):
        beyond = torch.arange(4) >= torch.tensor(lengths)[..., None]
        assert (weights[beyond] == 0).all() and (weights[~beyond] > 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))


def test_the_learned_width_is_the_best_of_a_grid() -> None:
    x, y = kernels.made(40, 1.0, 1.0, seed=1)
    others = kernels.masks.dense(~torch.eye(40, dtype=torch.bool))

    def error(width: float) -> float:
        curve = kernels.regard.attention(
            x[:, None], x[:, None], y[:, None], others, score=kernels.scores.Gaussian(width), engine="reference"
        )
        return float((curve[:, 0] - y).square().mean())

    best = kernels.learned_width(x, y)
    assert error(best) <= min(error(float(w)) for w in torch.linspace(0.05, 2, 79)) * 1.001


def test_a_learned_bandwidth_ignores_the_irrelevant_feature() -> None:
    found = kernel_regression.chosen()
    widths, error = found["learned"]
    assert widths[2] > 10 * widths[:2].max()
    assert error < min(found["scott"][1], found["loo"][1])


def test_an_example_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "worked_examples.py"), run_name="__main__")
    assert "scores: [-3.0, -3.0, 5.0]" in capsys.readouterr().out
