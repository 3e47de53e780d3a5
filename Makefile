# Two commands do everything, each with its own set-up: `make compare` runs the main job, `make test` the tests.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: compare test lint types unit clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt tools/system-packages
	tools/system-packages
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $(READY)

compare: $(READY)
	$(BIN)/gradwire compare --out compare-report $(ARGS)

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

# Laws and doctests share the cores; what starts ranks of its own, or times them, has the machine to itself.
unit: $(READY)
	$(BIN)/python -m pytest --numprocesses auto tests/laws src
	$(BIN)/python -m pytest tests --ignore tests/laws

clean:
	rm -rf $(VENV) compare-report .pytest_cache .ruff_cache .hypothesis
