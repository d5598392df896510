"""Many queries: in parts, shown, stopped, at once, in little memory."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from regard.regression import NadarayaWatsonRegressor
from regard.regression._sums import smoother as _kernel_smoother

rng = np.random.default_rng(0)
X, QUERY = rng.normal(size=(300, 2)), rng.normal(size=(230, 2))
Y = np.sin(X[:, 0])


@pytest.fixture
def parts(monkeypatch):
    """Make every call small."""
    monkeypatch.setattr(_kernel_smoother, "ROWS", 50)
    monkeypatch.setattr(_kernel_smoother, "PAIRS", 1)
    monkeypatch.setattr(_kernel_smoother, "HELD", 7 * 300)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov"])
def test_parts_make_no_difference(order, kernel, monkeypatch, request):
    model = NadarayaWatsonRegressor(kernel, 0.8, order=order, empty="mean").fit(X, Y)
    whole = [*model.predict(QUERY, return_std=True), model.weights(QUERY), *model.attention(QUERY, topk=4)]
    request.getfixturevalue("parts")
    split = [*model.predict(QUERY, return_std=True), model.weights(QUERY), *model.attention(QUERY, topk=4)]
    for one, other in zip(whole, split):
        np.testing.assert_allclose(other, one, atol=1e-12)


def test_progress_is_shown_where_asked(parts, capsys):
    model = NadarayaWatsonRegressor(bandwidth="loo", verbose=1).fit(X, Y)
    shown = capsys.readouterr()
    assert "bandwidth" in shown.err and "error" in shown.err
    model.predict(QUERY)
    assert "predicting" in capsys.readouterr().err
    model.set_params(verbose=0).predict(QUERY)
    assert capsys.readouterr() == ("", "")


def test_progress_in_a_notebook_is_text(capsys, monkeypatch):
    # What rich knows a notebook by.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NadarayaWatsonRegressor(bandwidth="loo", verbose=1).fit(X, Y)
    assert len(capsys.readouterr().err.splitlines()) <= 3


def test_an_interrupt_leaves_everything_usable(parts, monkeypatch):
    model = NadarayaWatsonRegressor(bandwidth=0.5).fit(X, Y)
    before, state = model.predict(QUERY), sorted(vars(model))
    real, calls = _kernel_smoother.Smoother.estimate, []

    def at(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    monkeypatch.setattr(_kernel_smoother.Smoother, "estimate", at)
    with pytest.raises(KeyboardInterrupt):
        model.predict(QUERY)
    assert sorted(vars(model)) == state
    assert (model.predict(QUERY) == before).all()


def test_calls_at_once():
    model = NadarayaWatsonRegressor("epanechnikov", 0.7, empty="mean").fit(X, Y)
    expected = model.predict(QUERY)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: model.predict(QUERY), range(12)):
            assert (found == expected).all()


@pytest.mark.campaign
def test_no_weights_are_held():
    """400,000 × 4,000 pairs would be 12.8 GB; what is held beyond the data is a small part of that."""
    program = """
import resource, numpy as np
from regard.regression import NadarayaWatsonRegressor
rng = np.random.default_rng(0)
X, y, query = rng.normal(size=(400_000, 3)), rng.normal(size=400_000), rng.normal(size=(4_000, 3))
model = NadarayaWatsonRegressor(bandwidth=0.3, method="exact").fit(X, y)
model.predict(query[:64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.predict(query)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60e6
