# Each door does its own set-up on a fresh machine, and skips it when nothing has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
DEMO_SECONDS ?= 170

.PHONY: demo test lint costs bench regression docs gallery campaign clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# Threads that spin for a moment and then sleep: endless spinning loses most of the speed on a machine that is busy
# with something else, and sleeping at once a third of it on one that is not.
demo: $(READY)
	GOMP_SPINCOUNT=20000 $(BIN)/regard demo --seconds $(DEMO_SECONDS)

# Two processes of one thread each; scikit-learn's check of other array libraries runs only where SciPy was told of them.
test: $(READY)
	OMP_NUM_THREADS=1 SCIPY_ARRAY_API=1 $(BIN)/python -m pytest -q -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BENCH_READY): $(READY)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable '.[dev,bench]'
	touch $@

costs: $(READY)
	$(BIN)/python -m benchmarks.costs

bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.readme

# Kernel regression: what its bandwidths are worth, and real data, for docs/regression.md.
regression: $(BENCH_READY)
	$(BIN)/python -m benchmarks.bandwidths
	$(BIN)/python -m benchmarks.real_data
	$(BIN)/python -m benchmarks.readme

# The catalogue in README and docs, and the numbers that README shows.
docs: $(READY)
	$(BIN)/python -m benchmarks.readme

gallery: $(READY)
	$(BIN)/python -m examples

# The laws over tens of thousands of generated cases; `make test` runs a smaller number.
campaign: $(READY)
	$(BIN)/python -m regard.testing --cases 20000

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
