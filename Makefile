# make demo     install, fetch a small model, quantize it, teach it to add, print what it learned
# make test     install what the tests need and run them
# make docs     build the documentation site into build/site
# make check    tests, lint, types and the site: what CI runs

PYTHON ?= python3
RUN ?= runs/demo
BIN := .venv/bin

.PHONY: demo test test-gpu lint types docs check clean

demo: .venv/installed
	$(BIN)/qerl train demo --out $(RUN)

test: .venv/installed-test
	$(BIN)/python -m pytest -q

test-gpu:
	$(PYTHON) -m pytest -q -m gpu $(shell grep -rlE '\bgpu\b' tests)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-test
	$(BIN)/pyright

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types docs test

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@ .venv/installed

.venv/installed-docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
