# Everything sets itself up: `make demo` and `make test` work on a fresh clone. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOG := $(VENV)/setup.log
STAMP := $(VENV)/.ready
INTEGRATIONS := $(wildcard integrations/*)
# The tests of the core, then those of each integration where it lies: they are packages of their own.
SUITES = for each in . $(INTEGRATIONS); do echo "make: tests of $$each" && (cd "$$each" && "$(CURDIR)/$(BIN)/python" -m pytest $(1)) || exit 1; done

.PHONY: help setup demo test test-all lint bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo "PYTHON=/path/to/python3 chooses the interpreter (3.10 or newer) that $(VENV) is made from."

setup: $(STAMP)  ## make .venv with everything in it (the other targets do this themselves)

$(STAMP): pyproject.toml constraints.txt $(wildcard integrations/*/pyproject.toml)
	@PYTHON='$(PYTHON)' VENV='$(VENV)' LOG='$(LOG)' bash .ci/setup
	@touch $@

demo: $(STAMP)  ## replay an agent's episode with reuse off, cold and warm
	@$(BIN)/agentcache demo

test: lint  ## the whole check: lint, types, import contracts, tests
	@$(call SUITES,-m "not slow")

test-all: lint  ## the check with the slow tests
	@$(call SUITES,)

lint: $(STAMP)  ## ruff, mypy, import-linter
	@echo "make: ruff" && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet --diff .
	@echo "make: mypy" && $(BIN)/mypy
	@MYPYPATH=integrations/langchain-agentcache $(BIN)/mypy -p langchain_agentcache
	@MYPYPATH=integrations/llama-index-llms-agentcache $(BIN)/mypy --namespace-packages --explicit-package-bases -p llama_index.llms.agentcache
	@echo "make: import contracts" && $(BIN)/lint-imports --no-logo

bench: $(STAMP)  ## time to first token against stock transformers (some minutes)
	@$(BIN)/agentcache bench latency

clean:  ## remove .venv and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
