# `make` alone lists the targets. `make demo` and `make test` set up everything that they need in .venv.

VENV := .venv
BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12 test` chooses another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	then echo "$$python"; break; fi; done)

# Further arguments for pip, such as PIP_ARGS="--find-links /path/to/wheels".
PIP_ARGS ?=
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
TORCH := $(shell grep '^torch==' constraints.txt)
SETUPTOOLS := $(shell grep '^setuptools==' constraints.txt)
TRL := $(shell grep '^trl==' constraints.txt)

# Processes of the test run; each uses one torch thread.
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-10s %s\n", $$1, $$2}'

venv: $(VENV)/.dev-installed ## make .venv with everything for development

demo: $(VENV)/.demo-installed ## train a small drafter for a real 135M model and decode with it, without any model hub
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

test: $(VENV)/.dev-installed ## run all tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal

check: $(VENV)/.dev-installed ## lint, formatting, types, architecture
	@echo "ruff check"; $(BIN)/ruff check .
	@echo "ruff format --check"; $(BIN)/ruff format --check .
	@echo "basedpyright"; $(BIN)/basedpyright
	@echo "architecture"; $(BIN)/python -m pytest -q tests/test_architecture.py

format: $(VENV)/.dev-installed ## sort imports and format
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean: ## remove caches and build leftovers
	@rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv and what the demo made
	@rm -rf $(VENV) runs/demo

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then echo "make: Python 3.11, 3.12 or 3.13 is needed and was not found;" \
		"name it with make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "[1/3] $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) cannot make a virtual environment;" \
		"install its venv and ensurepip modules (Debian: python3-venv)" >&2; exit 1; }

# torch comes first and by its exact version, so that no dependency pulls in another build of it.
$(VENV)/.torch-installed: constraints.txt | $(VENV)/bin/python
	@echo "[2/3] $(TORCH) (some minutes)"
	@$(PIP) "$(TORCH)" "$(SETUPTOOLS)"
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.torch-installed pyproject.toml
	@if [ $(VENV)/.dev-installed -nt pyproject.toml ] && [ $(VENV)/.dev-installed -nt constraints.txt ]; \
		then touch $@; exit 0; fi; \
	echo "[3/3] spd-lightning and what it needs (a minute)"; \
	$(PIP) --no-build-isolation -e '.[demo]'; \
	touch $@

# trl is read as a file (it ships the Qwen3.5 chat template, which tests use): what it depends on is not needed.
$(VENV)/.dev-installed: $(VENV)/.torch-installed pyproject.toml
	@echo "[3/3] spd-lightning and what its development needs (a minute or two)"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(PIP) --no-deps "$(TRL)"
	@touch $@
