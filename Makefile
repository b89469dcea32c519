# spot-dlm: `make demo` and `make test` do all their own set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# An index with CPU builds of torch, where the default one would bring CUDA: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check setup setup-dev verify-full clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[bench,server]'
	@touch $(STAMP)

$(DEV_STAMP): $(STAMP)
	$(PIP) --editable '.[dev,bench,server,lm-eval,ray]'
	@touch $(DEV_STAMP)

setup: $(STAMP)  ## create the virtual environment and install what the commands need

setup-dev: $(DEV_STAMP)  ## install what tests and checks need besides: the tools, lm-eval, Ray

demo: setup  ## decode with the shipped model, plainly and speculatively, and prove that the tokens are identical
	$(BIN)/spot demo

test: setup-dev  ## run the tests (about a quarter of an hour on two cores)
	$(BIN)/python -m pytest -n 2

check: setup-dev  ## lint, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

verify-full: setup  ## the whole grid of `spot verify` behind the README's figures (half an hour on two quiet cores)
	benchmarks/verify.sh

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
