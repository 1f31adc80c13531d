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
# The tests of each integration run where it lies: they are packages of their own.
SUITES := $(addprefix tests-of/,$(INTEGRATIONS))
PYTEST := "$(CURDIR)/$(BIN)/python" -m pytest
# Lint and the integrations run beside them. A third worker keeps two cores busy while others wait, and takes 3 GB more.
WORKERS ?= $(shell awk '/MemTotal/ { print ($$2 > 15e6 ? 3 : 2) }' /proc/meminfo 2>/dev/null || echo 2)
# Beside each other: the files of the core, and one after the other lint and the integrations. What measures time or uses all cores is marked
# `alone`, and is.
# Processes that share cores do not spin where a thread waits: others would wait for it. That alone is most of the time of small models.
SHARE := OMP_WAIT_POLICY=passive
# Dozens of tests start processes of their own: each would compile torch and transformers anew where Python may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE
CHECK = $(SHARE) $(MAKE) -j2 --output-sync=target core lint $(SUITES) KINDS=$(1) && \
	echo "make: tests of the core that run alone" && $(PYTEST) -m "$(subst |, or ,$(2))" $$(grep -rlE "mark\.($(2))" tests --include=*.py)

.PHONY: help setup demo test test-all core lint bench serve clean $(SUITES)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo "PYTHON=/path/to/python3 chooses the interpreter (3.10 or newer) that $(VENV) is made from."

setup: $(STAMP)  ## make .venv with everything in it (the other targets do this themselves)

$(STAMP): pyproject.toml constraints.txt $(wildcard integrations/*/pyproject.toml)
	@PYTHON='$(PYTHON)' VENV='$(VENV)' LOG='$(LOG)' bash .ci/setup
	@touch $@

demo: $(STAMP)  ## replay an agent's episode with reuse off, cold and warm
	@$(BIN)/agentcache demo

test: $(STAMP)  ## the whole check: lint, types, import contracts, tests
	@$(call CHECK,"not slow",alone)

test-all: $(STAMP)  ## the check with the slow tests
	@$(call CHECK,"not slow",alone|slow) && \
	echo "make: slow tests of the integrations, which measure time" && $(MAKE) -j1 $(SUITES) KINDS=slow

$(SUITES): tests-of/%: $(STAMP)
	@echo "make: tests of $*" && cd "$*" && $(PYTEST) -m "$(KINDS)"

# With "+" its output is not held back to the end as that of the others; `make -n` would run it.
core: $(STAMP)
	$(if $(findstring n,$(filter-out -%,$(firstword $(MAKEFLAGS)))),,+)@echo "make: tests of the core, $(WORKERS) files at a time, beside lint and the integrations" && \
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow and not alone"

lint: $(STAMP)  ## ruff, mypy, import-linter
	@echo "make: ruff" && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet --diff .
	@echo "make: mypy" && $(BIN)/mypy
	@MYPYPATH=integrations/langchain-agentcache $(BIN)/mypy -p langchain_agentcache
	@MYPYPATH=integrations/llama-index-llms-agentcache $(BIN)/mypy --namespace-packages --explicit-package-bases -p llama_index.llms.agentcache
	@echo "make: import contracts" && $(BIN)/lint-imports --no-logo

bench: $(STAMP)  ## time to first token against stock transformers (some minutes)
	@$(BIN)/agentcache bench latency

serve: $(STAMP)  ## serve the embedded model, and a page, on http://127.0.0.1:8787
	@$(BIN)/agentcache serve embedded

clean:  ## remove .venv and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
