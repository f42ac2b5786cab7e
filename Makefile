# `make` lists the targets. Each that needs it sets up .venv first, which takes a moment once and nothing after.
SHELL := bash
.DEFAULT_GOAL := help

# The first Python that is new enough; `python3` comes first, as it is where an installed torch would be.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Tools run as modules: one that came with an existing torch's Python has no script in .venv/bin.
VENV_PYTHON := .venv/bin/python
PYTEST := $(VENV_PYTHON) -m pytest
RUFF := $(VENV_PYTHON) -m ruff

# Expands to an error where there is no such Python. The names after it are the extras of pyproject.toml to install.
SETUP = @"$(or $(PYTHON),$(error vtensor needs Python 3.11 or newer, and none is on PATH: \
	install one, or name it: make PYTHON=/path/to/python3))" .ci/setup_env.py

##@ Use

.PHONY: demo
demo: ## run a real model over a virtual KV cache; ARGS="..." goes to `vtensor demo`
	$(SETUP) hf
	@.venv/bin/vtensor demo $(ARGS)

.PHONY: setup
setup: ## make .venv ready (an installed torch is used, never replaced)
	$(SETUP) hf test

##@ Check

.PHONY: test
test: lint types unit notebooks ## all that a machine without a GPU can check

# One thread each: the models of the tests are so small that threads spend their time waiting for each other.
.PHONY: unit
unit: setup ## tests that need no GPU, doctests among them
	OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses 4 -m "not gpu and not slow"

.PHONY: test-gpu
test-gpu: setup ## tests that need a CUDA GPU
	@$(VENV_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	"make test-gpu: torch " + torch.__version__ + " sees no CUDA GPU here, so nothing was tested")'
	$(PYTEST) -m gpu

.PHONY: test-slow
test-slow: setup ## tests that take minutes
	$(PYTEST) -m "slow and not gpu"

.PHONY: lint
lint: setup ## ruff: rules and format
	$(RUFF) check
	$(RUFF) format --check

.PHONY: types
types: setup ## mypy, strict, over the packages
	$(VENV_PYTHON) .ci/typecheck.py

.PHONY: notebooks
notebooks: setup ## run every notebook from top to bottom
	$(PYTEST) --nbmake --nbmake-timeout=600 notebooks

##@ Tidy

.PHONY: format
format: setup ## let ruff fix and format what it can
	$(RUFF) check --fix
	$(RUFF) format

.PHONY: clean
clean: ## remove all that make made, .venv too
	rm -rf .venv .venv.old build dist vtensor.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^##@/ { printf "\n%s\n", substr($$0, 5) } \
	/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
