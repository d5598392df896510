# Each door does its own set-up on a fresh machine, and skips it when nothing has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_SECONDS ?= 170

.PHONY: demo test lint bench campaign clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/regard demo --seconds $(DEMO_SECONDS)

test: $(READY)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

# The laws over tens of thousands of generated cases; `make test` runs a smaller number.
campaign: $(READY)
	$(BIN)/python -m regard.testing --cases 20000

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
