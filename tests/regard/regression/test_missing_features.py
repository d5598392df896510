"""Features that are missing, ordered, or a place on the Earth."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.special import erfcx
from sklearn.metrics.pairwise import haversine_distances

from regard.regression import NadarayaWatsonClassifier, NadarayaWatsonRegressor
from regard.regression._features import EARTH


def with_gaps(count=200, width=2, share=0.2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, width))
    y = np.sin(2 * X[:, 0]) + X[:, -1] + 0.1 * rng.normal(size=count)
    X[rng.random(X.shape) < share] = np.nan
    X[np.isnan(X).all(1)] = 0.0
    return X, y


def weights(query, X, bandwidth, kernel):
    """Return the kernel of each pair (L, N), one pair and feature at a time."""
    sigma = np.nanstd(X, axis=0)
    found = np.zeros((len(query), len(X)))
    for i, q in enumerate(query):
        for n, x in enumerate(X):
            total = 0.0
            for j, h in enumerate(bandwidth):
                if np.isnan(q[j]):
                    continue
                if kernel == "laplacian":
                    total += np.log(100) - np.log(erfcx(sigma[j] / h)) if np.isnan(x[j]) else abs(q[j] - x[j]) / h
                else:
                    unknown = np.log(1 + 2 * (sigma[j] / h) ** 2) + 2 * np.log(100)
                    total += unknown if np.isnan(x[j]) else ((q[j] - x[j]) / h) ** 2
            if kernel == "laplacian":
                found[i, n] = np.exp(-total)
            else:
                found[i, n] = np.exp(-total / 2) if kernel == "gaussian" else max(1 - total, 0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "epanechnikov"])
def test_missing_values_are_marginalized(kernel):
    X, y = with_gaps()
    query = np.vstack([X[:30], [[np.nan, np.nan], [np.nan, 0.3], [0.1, np.nan]]])
    h = np.array([1.1, 1.4])
    model = NadarayaWatsonRegressor(kernel, h, missing="marginal", empty="nan").fit(X, y)
    K = weights(query, X, h, kernel)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(model.predict(query), K @ y / K.sum(1), rtol=1e-9)
    assert model.predict([[np.nan, np.nan]]) == pytest.approx(y.mean())
    own = weights(X, X, h, kernel)
    np.fill_diagonal(own, 0)
    np.testing.assert_allclose(model.loo_predict(), own @ y / own.sum(1), rtol=1e-9)
    np.testing.assert_allclose(model.weights(query[:5]).sum(1), 1)


def test_the_weight_of_a_missing_value_is_the_average_of_the_kernel():
    rng = np.random.default_rng(0)
    x, h, sigma = rng.normal(scale=2.0, size=4000), 0.7, 2.0
    gap = np.subtract.outer(x[:2000], x[2000:])
    assert np.exp(-((gap / h) ** 2) / 2).mean() == pytest.approx((1 + 2 * (sigma / h) ** 2) ** -0.5, rel=0.03)
    assert np.exp(-np.abs(gap) / h).mean() == pytest.approx(erfcx(sigma / h), rel=0.03)


def test_rows_with_missing_values_help_and_do_not_mislead():
    errors = np.zeros((2, 3))  # of rows with all values, and with some; by rows without, filled in, and marginalized
    for seed in range(3):
        X, y = with_gaps(600, width=3, share=0.3, seed=seed)
        rng = np.random.default_rng(seed + 10)
        full = rng.normal(size=(300, 3))
        truth = np.sin(2 * full[:, 0]) + full[:, -1]
        gapped = np.where(rng.random(full.shape) < 0.3, np.nan, full)
        whole, median = ~np.isnan(X).any(1), np.nanmedian(X, 0)
        dropped = NadarayaWatsonRegressor().fit(X[whole], y[whole])
        filled = NadarayaWatsonRegressor().fit(np.where(np.isnan(X), median, X), y)
        kept = NadarayaWatsonRegressor(missing="marginal").fit(X, y)
        rows = np.where(np.isnan(gapped), median, gapped)
        for i, (plain, own) in enumerate([(full, full), (rows, gapped)]):
            found = dropped.predict(plain), filled.predict(plain), kept.predict(own)
            errors[i] += [np.mean((each - truth) ** 2) for each in found]
    assert (errors[:, 2] < errors[:, 0]).all()
    assert (errors[:, 2] < errors[:, 1]).all()


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("way", ["scott", "loo", "learned"])
def test_without_missing_values_nothing_changes(way, order):
    X, y = with_gaps(150, share=0.0)
    found = [
        NadarayaWatsonRegressor(bandwidth=way, order=order, missing=missing).fit(X, y)
        for missing in ("error", "marginal")
    ]
    np.testing.assert_allclose(found[0].bandwidth_, found[1].bandwidth_, rtol=5e-3)
    np.testing.assert_allclose(found[0].predict(X), found[1].predict(X), atol=0.02)


def test_a_line_keeps_its_slope_where_values_are_missing():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2))
    y = 2 * X[:, 0] - X[:, 1]
    X[rng.random(400) < 0.1, 1] = np.nan
    model = NadarayaWatsonRegressor(bandwidth=1e3, order=1, missing="marginal").fit(X, y)
    rise = model.predict([[1.0, 0.0]]) - model.predict([[0.0, 0.0]])
    assert rise == pytest.approx(2.0, abs=0.1)


def test_missing_numbers_are_refused_by_default():
    X, y = with_gaps()
    for call in (lambda model: model.fit(X, y), lambda model: model.fit(X * 0 + 1, y)):
        with pytest.raises(ValueError, match=r"NaN in \d+ rows of x0.*|missing='marginal' allows them"):
            call(NadarayaWatsonRegressor())
    model = NadarayaWatsonRegressor(bandwidth=1.0).fit(np.nan_to_num(X), y)
    with pytest.raises(ValueError, match="missing='marginal'"):
        model.predict(X[:50])
    with pytest.raises(ValueError, match="X must have a value in each column, got none in column 1"):
        NadarayaWatsonRegressor(missing="marginal").fit([[0.0, np.nan], [1.0, np.nan]], [0.0, 1.0])
    with pytest.raises(ValueError, match="missing must be"):
        NadarayaWatsonRegressor(missing="drop").fit(X, y)


@pytest.mark.parametrize("few", [True, False])
def test_a_missing_category_is_one_of_its_own(few):
    frame = pd.DataFrame({"city": ["Ulm", None, "Bonn", None] * 20, "heat": np.linspace(0, 1, 80)})
    y = np.array([1.0, 5.0, 2.0, 5.0] * 20)
    model = NadarayaWatsonRegressor(bandwidth=[0.1, 10.0]).fit(frame if few else frame[["city"]], y) if few else (
        NadarayaWatsonRegressor(bandwidth=0.1).fit(frame[["city"]], y)
    )  # fmt: skip
    rows = frame[:2] if few else frame[["city"]][:2]
    np.testing.assert_allclose(model.predict(rows), [1.0, 5.0], atol=1e-6)
    assert not model.extrapolates(rows).any()
    assert "None" in str(model.explain(rows[1:2], topk=1))
    codes = np.array([[0.0], [np.nan], [1.0], [np.nan]] * 20)
    same = NadarayaWatsonClassifier(bandwidth=0.1, metric="categorical").fit(codes, (y > 4) * 1)
    assert same.predict(codes[:4]).tolist() == [0, 1, 0, 1]
    assert same.extrapolates([[np.nan], [7.0]]).tolist() == [False, True]


def test_missing_dates_and_angles():
    frame = pd.DataFrame({"day": pd.date_range("2024-01-01", periods=60), "hour": np.arange(60.0) % 24})
    frame.loc[3, "day"], frame.loc[7, "hour"] = pd.NaT, np.nan
    y = np.arange(60.0)
    model = NadarayaWatsonRegressor(bandwidth=[2, 3], metric={"hour": ("angular", 24)}, missing="marginal")
    found = model.fit(frame, y).predict(frame)
    assert np.isfinite(found).all()
    assert abs(found[30] - 30) < 1


# Ordered categories ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_ordered_categories_count_by_rank(kernel):
    sizes = ["small", "medium", "large", "huge"]
    rng = np.random.default_rng(0)
    rank = rng.choice([0, 2, 3], size=120)  # no row is of medium size, which still is one step
    column = pd.Categorical.from_codes(rank, sizes, ordered=True)
    y = rank + rng.normal(size=120)
    frame = pd.DataFrame({"size": column})
    model = NadarayaWatsonRegressor(kernel, 1.3).fit(frame, y)
    u = np.abs(np.subtract.outer(np.arange(4), rank)) / 1.3
    # With the Laplacian, Wang and van Ryzin's λ^|r| for λ = exp(−1/h).
    K = np.exp(-u) if kernel == "laplacian" else np.exp(-(u**2) / 2)
    query = pd.DataFrame({"size": pd.Categorical(sizes, sizes, ordered=True)})
    np.testing.assert_allclose(model.predict(query), K @ y / K.sum(1), rtol=1e-10)
    nominal = NadarayaWatsonRegressor(kernel, 1.3, metric="categorical").fit(frame, y)
    assert nominal._features.kinds[0][0] == "categorical"
    np.testing.assert_allclose(model.cross_val_predict()[:3], model.cross_val_predict()[:3])
    with pytest.raises(ValueError, match="column 'size' of X must hold the ordered categories of fit, got 'tiny'"):
        model.predict(pd.DataFrame({"size": pd.Categorical(["tiny"], ["tiny"], ordered=True)}))


def test_ordered_numbers_count_by_rank():
    X = np.array([[1.0], [10.0], [100.0], [1000.0]])
    model = NadarayaWatsonRegressor(bandwidth=0.8, metric="ordered").fit(X, [0.0, 1.0, 2.0, 3.0])
    K = np.exp(-((np.subtract.outer([0, 2, 1.5, 4], np.arange(4)) / 0.8) ** 2) / 2)
    np.testing.assert_allclose(model.predict([[1.0], [100.0], [55.0], [5000.0]]), K @ np.arange(4.0) / K.sum(1))
    assert model.extrapolates([[100.0], [5000.0]]).tolist() == [False, True]
    with pytest.raises(ValueError, match="be of numbers, or of an ordered Categorical of pandas, got text in size"):
        NadarayaWatsonRegressor(metric={"size": "ordered"}).fit(pd.DataFrame({"size": ["a", "b"]}), [0.0, 1.0])


# Places on the Earth --------------------------------------------------------------------------------------------------


def places(count, seed=0):
    rng = np.random.default_rng(seed)
    z, east = rng.uniform(-1, 1, count), rng.uniform(-180, 180, count)
    return np.column_stack([np.rad2deg(np.arcsin(z)), east])


def test_haversine_is_the_distance_on_the_sphere():
    X, query = places(200), np.vstack([places(50, 1), [[90, 0], [-90, 77], [10, 180], [10, -180], [10, 179.999]]])
    y = X[:, 0]
    arc = haversine_distances(np.deg2rad(query), np.deg2rad(X)) * EARTH
    K = np.exp(-((2 * EARTH * np.sin(arc / (2 * EARTH))) ** 2) / (2 * 900.0**2))
    model = NadarayaWatsonRegressor(bandwidth=900.0, metric={(0, 1): "haversine"}).fit(X, y)
    np.testing.assert_allclose(model.predict(query), K @ y / K.sum(1), rtol=1e-9)
    assert model.predict([[10, 180]]) == pytest.approx(model.predict([[10, -180]]))
    assert model.predict([[90, 0]]) == pytest.approx(model.predict([[90, 123]]))
    # Within 1,000 km chords are arcs but for 0.1 %.
    near = arc[(arc < 1000) & (arc > 1)]
    np.testing.assert_allclose(2 * EARTH * np.sin(near / (2 * EARTH)), near, rtol=1.1e-3)


@pytest.mark.parametrize("way", ["scott", "loo", "learned", "given"])
def test_a_place_has_one_bandwidth_in_kilometres(way):
    frame = pd.DataFrame(places(150), columns=["lat", "lon"]).assign(height=np.linspace(0, 1, 150))
    y = np.sin(np.deg2rad(frame["lat"])) + frame["height"]
    bandwidth = [1500.0, 1500.0, 0.3] if way == "given" else way
    model = NadarayaWatsonRegressor(bandwidth=bandwidth, metric={("lat", "lon"): "haversine"}).fit(frame, y)
    assert model.bandwidth_[0] == model.bandwidth_[1] > 10
    assert np.isfinite(model.cross_val_predict()).all()
    east = frame.assign(lon=(frame["lon"] + 360) % 360)
    np.testing.assert_allclose(model.predict(east), model.predict(frame), atol=1e-9)


def test_a_line_on_the_sphere_has_two_slopes():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(45, 50, 300), rng.uniform(177, 183, 300)])
    wrapped = np.column_stack([X[:, 0], (X[:, 1] + 180) % 360 - 180])
    y = 3 * X[:, 0] + 2 * X[:, 1]
    model = NadarayaWatsonRegressor(bandwidth=100.0, order=1, metric={(0, 1): "haversine"}).fit(wrapped, y)
    query = np.array([[47.0, 179.9], [48.0, -179.8], [47.5, 180.0]])
    truth = 3 * query[:, 0] + 2 * (query[:, 1] % 360)
    np.testing.assert_allclose(model.predict(query), truth, atol=0.05)
    pole = NadarayaWatsonRegressor(bandwidth=800.0, order=1, metric={(0, 1): "haversine"})
    around = np.column_stack([rng.uniform(80, 90, 300), rng.uniform(-180, 180, 300)])
    height = np.cos(np.deg2rad(around[:, 0])) * np.cos(np.deg2rad(around[:, 1]))
    assert pole.fit(around, height).predict([[90.0, 50.0]]) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("haversine", "metric must be 'haversine' of two features"),
        ({0: "haversine"}, "metric must be 'haversine' of two features"),
        ({(0, 1): "angular"}, "metric must be 'haversine' of two features"),
        ({(0, 0): "haversine"}, "metric must name each feature once"),
        ({(0, 7): "haversine"}, "name features by name or index below 2"),
    ],
)
def test_wrong_places(metric, message):
    with pytest.raises(ValueError, match=message):
        NadarayaWatsonRegressor(metric=metric).fit([[0.0, 1.0], [1.0, 0.0]], [0.0, 1.0])


def test_what_is_no_latitude():
    model = NadarayaWatsonRegressor(bandwidth=9.0, metric={(0, 1): "haversine"})
    with pytest.raises(ValueError, match="latitude x0 must lie between -90 and 90 degrees, got 120"):
        model.fit([[120.0, 1.0], [1.0, 0.0]], [0.0, 1.0])
    with pytest.raises(ValueError, match="the same for a latitude and its longitude, in kilometres, got 9 and 8"):
        model.set_params(bandwidth=[9.0, 8.0]).fit([[12.0, 1.0], [1.0, 0.0]], [0.0, 1.0])
    with pytest.raises(ValueError, match="got 'haversine' with a kernel of the Manhattan distance"):
        model.set_params(kernel="laplacian", bandwidth=9.0).fit([[12.0, 1.0], [1.0, 0.0]], [0.0, 1.0])
