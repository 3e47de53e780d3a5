# Two commands do everything, each with its own set-up: `make compare` runs the main job, `make test` the tests.
# `make test` draws from each product of parameters, as by SEED if that is given; `make test-all` runs the whole.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MAIN   := $(VENV)/.main
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# A processor without vector units, as far as torch, MKL and numba can play one: what all ranks compute alike must not
# depend on it. One thread, since MKL and OpenMP divide work by their number.
PLAIN  := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 NUMBA_CPU_NAME=x86-64 NUMBA_CPU_FEATURES=+sse2

# Tests start many processes, which take a third longer to begin where each compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

CASES  := drawn
PYTEST := $(BIN)/python -m pytest --cases $(CASES) $(if $(SEED),--seed $(SEED))

.PHONY: compare test test-all lint types unit plain mutants clean
.DEFAULT_GOAL := test

# What the main job needs comes first and alone; the tests add what they need to the same environment.
$(MAIN): pyproject.toml constraints.txt tools/system-packages
	tools/system-packages
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[compare]'
	touch $(MAIN)

$(READY): $(MAIN)
	$(PIP) --editable '.[dev]'
	touch $(READY)

compare: $(MAIN)
	$(BIN)/gradwire compare --out compare-report $(ARGS)

test-all:
	$(MAKE) CASES=all test

# One core checks types while the other one begins with the tests.
test: lint
	$(MAKE) --jobs=2 --output-sync types plain
	$(MAKE) unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

# Tests that hold times of ranks or of links to a few percent have the machine to themselves; all others share the cores,
# each file in one process, doctests last, which are short. There is one process more than cores, since ranks wait for each other.
PROCESSES := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
ALONE  := $(addprefix tests/test_,bubble.py delay.py doctor_ranks.py link_times.py run_report.py slow.py)

unit: $(READY)
	$(PYTEST) --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder tests src $(addprefix --ignore=,$(ALONE))
	$(PYTEST) $(ALONE)

# The laws whose promises are bits, once more on a plain processor.
plain: $(READY)
	$(PLAIN) $(PYTEST) --numprocesses auto $(addprefix tests/,laws/test_golden.py laws/test_state.py \
		laws/test_power_sgd.py laws/test_acp_sgd.py laws/test_reducers.py test_matrices.py test_robust_kernels.py \
		test_lowrank_kernels.py laws/test_zeros.py)

# A hundred and sixty small faults in drivers, adapters and sync, one at a time: do tests notice? Takes more than an hour (docs/building/mutants.md).
mutants: $(READY)
	$(BIN)/python tools/mutants.py $(ARGS)

clean:
	rm -rf $(VENV) compare-report .pytest_cache .ruff_cache .hypothesis
