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
from sklearn.utils.class_weight import compute_sample_weight

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


@pytest.mark.slow
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


class TestClassWeight:
    @pytest.mark.parametrize(
        "given", ["balanced", {"top": 3.5, "low": 0}, {"low": 1, "middle": 2, "top": 5, "none": 1}]
    )
    @pytest.mark.parametrize("weighted", [False, True])
    def test_votes_are_those_of_row_weights(self, given, weighted):
        X, y, query = made()
        sample_weight = np.random.default_rng(1).uniform(0.1, 2, len(X)) if weighted else np.ones(len(X))
        model = NadarayaWatsonClassifier(bandwidth=0.4, class_weight=given).fit(X, y, sample_weight)
        rows = NadarayaWatsonClassifier(bandwidth=0.4).fit(X, y, sample_weight * compute_sample_weight(given, y))
        np.testing.assert_allclose(model.predict_proba(query), rows.predict_proba(query), atol=1e-15)

    def test_balanced_classes_have_the_same_total_weight(self):
        X, y, query = made()
        wide = NadarayaWatsonClassifier(bandwidth=1e4, class_weight="balanced").fit(X, y)
        np.testing.assert_allclose(wide.predict_proba(query), 1 / 3, atol=1e-6)

    @pytest.mark.parametrize("bandwidth", ["scott", "loo", "learned"])
    def test_whole_numbers_count_no_repetitions(self, bandwidth):
        X, y, _ = made()
        weights = {"low": 6, "middle": 2, "top": 4}
        whole, scaled = (
            NadarayaWatsonClassifier(bandwidth=bandwidth, class_weight=each, max_iter=5).fit(X, y)
            for each in (weights, {label: weight / 16 for label, weight in weights.items()})
        )
        np.testing.assert_allclose(whole.bandwidth_, scaled.bandwidth_, rtol=1e-6)
        np.testing.assert_allclose(whole.loo_predict_proba(), scaled.loo_predict_proba(), atol=1e-6)
        left = NadarayaWatsonClassifier(bandwidth=whole.bandwidth_, class_weight=weights).fit(X[1:], y[1:])
        np.testing.assert_allclose(whole.loo_predict_proba()[:1], left.predict_proba(X[:1]), atol=1e-12)

    def test_parts_make_the_whole(self):
        X, y, query = made()
        order = y.argsort(kind="stable")
        whole = NadarayaWatsonClassifier(class_weight={"top": 3}).fit(X, y)
        parts = NadarayaWatsonClassifier(class_weight={"top": 3})
        for rows in np.array_split(order, 3):
            parts.partial_fit(X[rows], y[rows], classes=np.unique(y))
        np.testing.assert_allclose(parts.predict_proba(query), whole.predict_proba(query), atol=1e-12)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"topp": 2}, "class_weight must have labels of y, ['low', 'middle', 'top'], got ['topp']"),
            ({"top": -1}, "class_weight['top'] must be a finite number of at least 0, got -1"),
            ("balance", "class_weight must be None, 'balanced' or a dict of labels and weights, got 'balance'"),
        ],
    )
    def test_what_cannot_be_is_a_sentence(self, given, message):
        X, y, _ = made()
        with pytest.raises((TypeError, ValueError)) as caught:
            NadarayaWatsonClassifier(class_weight=given).fit(X, y)
        assert str(caught.value) == f"NadarayaWatsonClassifier: {message}."
        with pytest.raises(ValueError, match="class_weight must be a dict for partial_fit"):
            NadarayaWatsonClassifier(class_weight="balanced").partial_fit(X, y)
