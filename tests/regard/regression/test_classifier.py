"""The classifier against votes counted by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from reference import weights
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score

from regard.regression import ExtrapolationWarning, NadarayaWatsonClassifier


def made(n=90, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    y = np.array(["low", "middle", "top"])[np.digitize(X[:, 0] + 0.2 * rng.normal(size=n), [-0.5, 0.5])]
    return X, y, rng.normal(size=(30, 2))


@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov", "laplacian"])
@pytest.mark.parametrize("weighted", [False, True])
def test_votes(kernel, weighted):
    X, y, query = made()
    sample_weight = np.random.default_rng(1).uniform(0.1, 2, len(X)) if weighted else None
    model = NadarayaWatsonClassifier(kernel, 1.5, empty="mean").fit(X, y, sample_weight)
    w = weights(kernel, query, X, 1.5, sample_weight)
    votes = np.stack([w[:, y == label].sum(1) for label in model.classes_], 1)
    reached = votes.sum(1) > 0
    found = model.predict_proba(query)
    np.testing.assert_allclose(found[reached], votes[reached] / votes[reached].sum(1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1)
    assert (model.predict(query) == model.classes_[found.argmax(1)]).all()


def test_real_flowers():
    X, y = load_iris(return_X_y=True)
    assert cross_val_score(NadarayaWatsonClassifier(bandwidth="loo"), X, y, cv=5).mean() > 0.94


def test_leave_one_out():
    X, y, _ = made()
    model = NadarayaWatsonClassifier(bandwidth=0.5).fit(X, y)
    left = [
        NadarayaWatsonClassifier(bandwidth=0.5).fit(np.delete(X, i, 0), np.delete(y, i)).predict(X[[i]])[0]
        for i in range(len(X))
    ]
    assert model.loo_predict().tolist() == left
    shares = np.concatenate(
        [
            NadarayaWatsonClassifier(bandwidth=0.5).fit(np.delete(X, i, 0), np.delete(y, i)).predict_proba(X[[i]])
            for i in range(len(X))
        ]
    )
    np.testing.assert_allclose(model.loo_predict_proba(), shares, atol=1e-12)
    brier = ((shares - (y[:, None] == model.classes_)) ** 2).mean()
    assert model.loo_error() == pytest.approx(brier, rel=1e-10)


class TestEmpty:
    X, y, query = [[0.0], [1.0], [1.5]], ["a", "b", "b"], [[0.1], [7.0]]

    def model(self, empty):
        return NadarayaWatsonClassifier("boxcar", 0.5, empty=empty).fit(self.X, self.y)

    def test_nearest(self):
        with pytest.warns(ExtrapolationWarning, match="1 of 2 queries"):
            assert self.model("nearest").predict(self.query).tolist() == ["a", "b"]

    def test_mean(self):
        np.testing.assert_allclose(self.model("mean").predict_proba(self.query), [[1, 0], [1 / 3, 2 / 3]])

    def test_nan(self):
        found = self.model("nan").predict_proba(self.query)
        assert found[0].tolist() == [1, 0] and np.isnan(found[1]).all()
        with pytest.raises(ValueError, match=r"empty='nan' gives no label beyond it\), got 1 of 2 queries"):
            self.model("nan").predict(self.query)

    def test_raise(self):
        with pytest.raises(ValueError, match=r"\(empty='raise'\), got 1 of 2 queries"):
            self.model("raise").predict_proba(self.query)


class TestPartialFit:
    def test_parts_make_the_whole(self):
        X, y, query = made()
        whole = NadarayaWatsonClassifier().fit(X, y)
        parts = NadarayaWatsonClassifier().partial_fit(X[:5], y[:5], classes=["top", "low", "middle"])
        parts.partial_fit(X[5:], y[5:])
        assert parts.classes_.tolist() == ["low", "middle", "top"]
        np.testing.assert_allclose(parts.predict_proba(query), whole.predict_proba(query))

    def test_labels_of_a_later_call(self):
        model = NadarayaWatsonClassifier().partial_fit([[0.0], [1.0]], ["a", "b"])
        with pytest.raises(ValueError, match=r"y must be labels of the first call, \['a' 'b'\], got \['c'\]"):
            model.partial_fit([[2.0]], ["c"])
        with pytest.raises(ValueError, match="classes must be those of the first call"):
            model.partial_fit([[2.0]], ["a"], classes=["a", "c"])
        assert len(model.weights([[0.0]])[0]) == 2


def test_labels_and_tensors():
    X, y, query = made()
    codes = np.unique(y, return_inverse=True)[1]
    for labels in (y, pd.Series(y), pd.Categorical(y), codes, torch.from_numpy(codes), codes == 1):
        model = NadarayaWatsonClassifier(bandwidth=0.3).fit(X, labels)
        assert model.score(X, np.asarray(labels)) > 0.9
    tensor = NadarayaWatsonClassifier(bandwidth=0.3).fit(torch.from_numpy(X), y)
    assert isinstance(tensor.predict_proba(torch.from_numpy(query)), torch.Tensor)


def test_numbers_are_no_labels():
    with pytest.raises(ValueError, match="Unknown label type"):
        NadarayaWatsonClassifier().fit([[0.0], [1.0]], [0.5, 1.7])


def test_explanation_names_labels():
    X, y, query = made()
    found = NadarayaWatsonClassifier(bandwidth=0.3).fit(X, y).explain(query[0])
    assert found.prediction in ("low", "middle", "top")
    assert {row["target"] for row in found.rows} <= {"low", "middle", "top"}
    assert found.prediction in str(found)


def test_float32():
    X, y, query = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ExtrapolationWarning)
        found = NadarayaWatsonClassifier(bandwidth=0.3).fit(X.astype("f4"), y).predict_proba(query.astype("f4"))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, NadarayaWatsonClassifier(bandwidth=0.3).fit(X, y).predict_proba(query), atol=1e-5)
