# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` work on a fresh machine; `make help` lists all targets.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
PYTEST := $(PYTHON) -m pytest -q
# What `make test-versions` runs: training on the CPU, bitwise neutrality, checks, known bugs.
RELEASE_TESTS := tests/integration/test_releases.py tests/integration/test_demo.py \
  tests/integration/test_bitwise.py tests/cpu/test_training.py
# What `make bridge` runs. Some test modules import Megatron before the CPU backend is active.
BRIDGE_TESTS = $(shell grep -rl --include='test_*.py' pytest.mark.bridge tests)
# More threads than cores slow down small jobs of several ranks, and change the order of sums.
export OMP_NUM_THREADS = 1
# Hundreds of processes import the same files: compile them once.
unexport PYTHONDONTWRITEBYTECODE
# What mypy knows of PyTorch stays true in another clone with the same environment.
export MYPY_CACHE_DIR ?= $(VENV)/mypy_cache
# Test processes at a time. Each imports Megatron once and forks what it runs (tests/warm.py).
JOBS ?= 2
export VENV

.DEFAULT_GOAL := help
.PHONY: help venv demo test tests unit test-versions bridge verl lint format docs nightly bench gpu gpu-wheels clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

venv: ## create or update .venv with the pinned versions
	@launch/bootstrap.sh venv

demo: venv ## check a healthy run and one with a known bug; needs nothing installed
	$(VENV)/bin/ttrace demo

test: venv ## lint, and at the same time all tests except the nightly ones
	@$(MAKE) --no-print-directory -j 2 lint tests

tests: venv ## what `make test` runs, without lint
	@path=$$(launch/bootstrap.sh hf) && \
	  TTRACE_TEST_HF=$$path $(PYTEST) -n $(JOBS) --dist worksteal -m "not nightly and not releases"

unit: venv ## the tests that do not train
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not nightly and not releases"

test-versions: venv ## selected tests with every supported megatron-core release
	@set -e; for release in $$($(PYTHON) -c \
	  'from megatron_ttrace.mcore.versions import SUPPORTED; print(*SUPPORTED)'); do \
	  echo "== megatron-core $$release"; \
	  PYTHONPATH=$$(launch/bootstrap.sh release $$release) TTRACE_TEST_RELEASE=$$release \
	    $(PYTEST) -m "not nightly" $(RELEASE_TESTS); \
	done

bridge: venv ## install Megatron-Bridge (900 MB) and run its tests
	@path=$$(launch/bootstrap.sh bridge) && \
	  PYTHONPATH=$$path $(PYTEST) -m bridge $(BRIDGE_TESTS)

verl: venv ## install verl (250 MB) and Megatron-Bridge, and run the tests of verl's engine
	@path=$$(launch/bootstrap.sh bridge) && path=$$path:$$(launch/bootstrap.sh verl) && \
	  PYTHONPATH=$$path $(PYTEST) -m verl tests/run/test_own_loop.py

lint: venv ## run ruff and mypy, and build the documentation strictly
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

format: venv ## fix style with ruff
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

docs: venv ## serve the documentation on this machine, at 127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

nightly: venv ## all tests, including the long ones
	HYPOTHESIS_PROFILE=nightly $(PYTEST) --timeout 3600

# BENCH="--only traced-step --job TP" measures a part; with --write the page has the figures.
bench: venv ## measure what a check costs, as ratios; see docs/measurements.md
	$(PYTHON) -m tests.bench $(BENCH)

# GPU_PYTHON must have PyTorch. DRY_RUN=1 needs no GPU. ONLY chooses tests, by name or letter.
GPU_PYTHON ?= python3
gpu: ## run the tests of the GPU path from WHEELS, without a network; see docs/gpu.md
	PYTHON=$(GPU_PYTHON) launch/gpu.sh run $(if $(DRY_RUN),--dry) $(if $(TE_STAGE),--te) $(if $(ONLY),--only $(ONLY))

gpu-wheels: ## download what `make gpu` installs into WHEELS
	PYTHON=$(GPU_PYTHON) launch/gpu.sh wheels

clean: ## remove the environment and all caches
	rm -rf $(VENV) .*.lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
