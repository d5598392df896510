"""Rows beyond the training data: which they are, and that nothing certain is said of them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes, load_wine
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from tiers import examples

from regard.regression import (
    ExtrapolationWarning,
    NadarayaWatsonClassifier,
    NadarayaWatsonRegressor,
    _training,
)
from regard.regression._sums.smoother import names

NAMES = names()


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    kernel=st.sampled_from(NAMES),
    order=st.sampled_from([0, 1]),
    width=st.integers(1, 3),
    bandwidth=st.sampled_from(["scott", 0.05, 0.3, 2.0, 1e3]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_far_away_nothing_is_certain(seed, kernel, order, width, bandwidth, dtype):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 1, (60, width)) + rng.integers(-3, 3)
    y = X.sum(1) + 0.05 * rng.normal(size=60)
    away = rng.normal(size=(20, width))
    far = X.mean(0) + 10.0 ** rng.uniform(1, 6, (20, 1)) * away / np.abs(away).max(1, keepdims=True)
    model = NadarayaWatsonRegressor(kernel, bandwidth, order=order, dtype=dtype).fit(X, y)
    assert not model.extrapolates(X).any(), "training points are no further from themselves than from others"
    assert model.extrapolates(far).all()
    rows = np.r_[X[:5], far]
    for predicted in (lambda: model.predict(rows, return_std=True)[1], lambda: model.predict_quantiles(rows)[:, 1]):
        with pytest.warns(ExtrapolationWarning, match="20 of 25 queries") as caught:
            found = predicted()
        assert [each.filename for each in caught] == [__file__], "once"
        assert np.isnan(found[5:]).all()
    # Units and origins make no difference.
    moved = NadarayaWatsonRegressor(kernel, bandwidth if bandwidth == "scott" else 7 * bandwidth, order=order)
    near = X + rng.normal(size=X.shape)
    assert (moved.fit(7 * X - 3, y).extrapolates(7 * near - 3) == model.extrapolates(near)).mean() > 0.95


@pytest.mark.parametrize(("kernel", "radius"), [("gaussian", np.sqrt(2 * np.log(100))), ("laplacian", np.log(100))])
def test_reach_is_a_number_of_bandwidths(kernel, radius):
    X, rng = np.random.default_rng(0).uniform(0, 1, (300, 2)), np.random.default_rng(1)
    query = rng.uniform(-0.5, 1.5, (400, 2))
    bandwidth = np.array([0.03, 0.06])
    model = NadarayaWatsonRegressor(kernel, bandwidth).fit(X, X[:, 0])
    neighbours = NearestNeighbors(n_neighbors=1, p=1 if kernel == "laplacian" else 2).fit(X / bandwidth)
    distance = neighbours.kneighbors(query / bandwidth)[0][:, 0]
    assert (model.extrapolates(query) == (distance > radius)).all()
    assert 0.1 < (distance > radius).mean() < 0.9


def test_compact_kernels_reach_one_bandwidth():
    model = NadarayaWatsonRegressor("epanechnikov", 0.2).fit(np.linspace(0, 1, 50)[:, None], np.zeros(50))
    assert model.extrapolates([[1.19], [1.21], [-0.19], [-0.21]]).tolist() == [False, True, False, True]


def test_wide_bandwidths_reach_no_further_than_the_data_spread():
    X = np.random.default_rng(0).normal(size=(200, 1))
    edge = X.max()
    for options in ({"bandwidth": 1e3}, {"kernel": "constant"}, {"kernel": "constant", "order": 1}):
        model = NadarayaWatsonRegressor(**options).fit(X, X[:, 0])
        assert model.extrapolates([[edge + 0.9 * X.std()], [edge + 1.1 * X.std()]]).tolist() == [False, True]


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("load", [load_diabetes, load_wine])
@pytest.mark.parametrize("options", [{}, {"bandwidth": 0.3}, {"kernel": "laplacian"}, {"bandwidth": "loo", "order": 1}])
def test_rows_like_those_of_training_are_within_reach(load, options):
    X = StandardScaler().fit_transform(load(return_X_y=True)[0])
    y, alike, shifted = X[:, 0], [], []
    for train, test in KFold(4, shuffle=True, random_state=0).split(X):
        model = NadarayaWatsonRegressor(**options).fit(X[train], y[train])
        alike.append(model.extrapolates(X[test]))
        shifted.append(model.extrapolates(X[test] + 8))
    assert np.mean(np.concatenate(alike)) <= 0.02
    assert np.concatenate(shifted).all()


def test_a_category_that_was_not_there():
    rng = np.random.default_rng(0)
    for categories in (1, 2, 3, 9):
        for kernel in ("gaussian", "laplacian", "epanechnikov"):
            X = np.column_stack([np.arange(60) % categories, rng.normal(size=(60, 4))])
            query = np.column_stack([[0.0, categories - 1, categories, -1.0], X[:4, 1:]])
            for kind in (NadarayaWatsonRegressor, NadarayaWatsonClassifier):
                model = kind(kernel, 1e3, metric={0: "categorical"}).fit(X, np.arange(60) % 2)
                assert model.extrapolates(query).tolist() == [False, False, True, True]


def test_a_line_through_two_points_leaves_nothing_to_judge_by():
    model = NadarayaWatsonRegressor("boxcar", 1.1, order=1).fit([[0.0], [1.0], [2.0], [2.5]], [0.0, 1.0, 4.0, 3.0])
    _, deviation = model.predict([[0.5], [1.9]], return_std=True)
    assert np.isnan(deviation).tolist() == [True, False]
    assert np.isnan(model.predict_quantiles([[0.5], [1.9]])).tolist() == [[True] * 3, [False] * 3]


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), kernel=st.sampled_from(NAMES), weighted=st.booleans(), outputs=st.integers(1, 2))
def test_quantiles_go_along_the_line(seed, kernel, weighted, outputs):
    rng = np.random.default_rng(seed)
    X, query = rng.uniform(0, 1, (80, 2)), rng.uniform(0.1, 0.9, (6, 2))
    noise, slope = rng.gamma(2.0, size=(80, outputs)), 100 * rng.normal(size=(2, outputs))
    sample_weight = rng.uniform(0.2, 2, 80) if weighted else None
    shares = np.array([0.0, 0.1, 0.5, 0.9, 1.0])
    level = NadarayaWatsonRegressor(kernel, 0.7, order=1).fit(X, noise, sample_weight).predict_quantiles(query, shares)
    steep = NadarayaWatsonRegressor(kernel, 0.7, order=1).fit(X, noise + X @ slope, sample_weight)
    found = steep.predict_quantiles(query, shares)
    # A plane added to the targets is added to every quantile.
    np.testing.assert_allclose(found, level + (query @ slope)[..., None], atol=1e-7)
    assert (np.diff(found, axis=2) >= 0).all()
    # Their distribution has the prediction for its mean, so it lies between the outermost.
    mean = steep.predict(query)
    assert (found[..., 0] <= mean + 1e-9).all() and (mean <= found[..., -1] + 1e-9).all()


def test_quantiles_of_a_steep_line_cover_what_they_say():
    rng = np.random.default_rng(0)
    X, query = rng.uniform(0, 10, (400, 1)), rng.uniform(0, 10, (2000, 1))
    y, truth = (30 * x[:, 0] + rng.normal(size=len(x)) for x in (X, query))
    for bandwidth in (1.5, "learned"):
        model = NadarayaWatsonRegressor(bandwidth=bandwidth, order=1).fit(X, y)
        low, median, high = model.predict_quantiles(query).T
        assert abs(((low <= truth) & (truth <= high)).mean() - 0.9) < 0.03
        assert np.abs(median - model.predict(query)).max() < 1, "an average is off by 20 at the edges"


def test_no_warning_where_empty_was_set_for_it():
    X = np.linspace(0, 1, 20)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for empty, expected in (("mean", [0.5]), ("nan", [np.nan])):
            model = NadarayaWatsonRegressor("boxcar", 0.2, empty=empty).fit(X, X[:, 0])
            np.testing.assert_allclose(model.predict([[5.0]]), expected)


class TestShownOnce:
    """By Python's default filter, one warning for each line of code of the user's."""

    X = np.linspace(0, 1, 60)[:, None] ** 3

    @pytest.fixture(autouse=True)
    def _by_default(self):
        with warnings.catch_warnings(record=True) as self.caught:
            warnings.simplefilter("default")
            yield

    def test_folds_warn_once(self):
        model = NadarayaWatsonRegressor(bandwidth=0.001, metric=["euclidean"])
        cross_val_score(model, self.X, self.X[:, 0], cv=KFold(6))
        assert len(self.caught) == 1
        GridSearchCV(model, {"bandwidth": [0.001, 0.002]}, cv=KFold(6)).fit(self.X, self.X[:, 0])
        assert len(self.caught) == 2
        assert all("queries lie beyond the reach of the training data" in str(each.message) for each in self.caught)

    @pytest.mark.campaign
    @pytest.mark.slow
    def test_worker_processes_warn_once_together(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import numpy as np\n"
            "from sklearn.model_selection import GridSearchCV, KFold, cross_val_score\n"
            "from regard.regression import NadarayaWatsonRegressor\n"
            "if __name__ == '__main__':\n"
            "    X = np.linspace(0, 1, 60)[:, None] ** 3\n"
            "    model = NadarayaWatsonRegressor(bandwidth=0.001)\n"
            "    cross_val_score(model, X, X[:, 0], cv=KFold(6), n_jobs=2)\n"
            "    GridSearchCV(model, {'bandwidth': [0.001, 0.002]}, cv=KFold(6), n_jobs=2).fit(X, X[:, 0])\n"
        )
        aside = tmp_path / "temporary"
        aside.mkdir()
        settings = {**os.environ, "TMPDIR": str(aside)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=settings, check=True)
        assert done.stderr.count("queries lie beyond") == 2, done.stderr
        assert not list(aside.glob("regard*")), "nothing is left behind"

    def test_notes_of_killed_processes_do_not_silence(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_training.tempfile, "gettempdir", lambda: str(tmp_path))
        lines = [(self.test_filters_hold.__code__, 1)]
        assert [_training._sibling_warned(name, lines) for name in "AAB"] == [False, True, False]
        for note in tmp_path.iterdir():
            os.utime(note, (0, 0))
        assert [_training._sibling_warned(name, lines) for name in "AAB"] == [False, True, False]
        monkeypatch.setattr(_training.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
        assert not _training._sibling_warned("A", lines)

    def test_lines_and_estimators_warn_by_themselves(self):
        model = NadarayaWatsonRegressor(bandwidth=0.1).fit(self.X, self.X[:, 0])
        for place in ([[5.0]], [[6.0], [7.0]], [[8.0]]):
            model.predict(place)
        assert [str(each.message).split(" queries")[0].split(": ")[1] for each in self.caught] == ["1 of 1"]
        model.predict([[6.0], [7.0]])
        assert "2 of 2 queries" in str(self.caught[1].message)
        for kind in (NadarayaWatsonRegressor, NadarayaWatsonClassifier):
            kind(bandwidth=0.1).fit(self.X, self.X[:, 0] > 0.5).predict([[5.0]])
        assert [each.filename for each in self.caught] == [__file__] * 4

    def test_filters_hold(self):
        model = NadarayaWatsonRegressor(bandwidth=0.1).fit(self.X, self.X[:, 0])
        for action, shown in (("ignore", 0), ("always", 3), ("error", 3)):
            warnings.simplefilter(action, ExtrapolationWarning)
            for _ in range(3):
                with pytest.raises(ExtrapolationWarning) if action == "error" else nullcontext():
                    model.predict([[5.0]])
            assert len(self.caught) == shown, action
