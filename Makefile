# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do everything on a fresh machine; `make help` lists the rest.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
PYTEST := $(PYTHON) -m pytest -q
# More threads than cores make small jobs of several ranks slower, and sums differ with the number.
export OMP_NUM_THREADS = 1
export VENV

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format nightly clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

venv: ## make or renew .venv with the pinned versions
	@launch/bootstrap.sh venv

demo: venv ## check a correct run and a broken one, and show both reports
	$(VENV)/bin/ttrace demo

test: lint ## lint, then all tests but the nightly ones
	$(PYTEST) -m "not nightly"

lint: venv ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: venv ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

nightly: venv ## every test, the long ones included
	$(PYTEST) --timeout 3600

clean: ## remove the environment and all caches
	rm -rf $(VENV) .*.lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
