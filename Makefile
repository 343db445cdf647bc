# Every target works as the first command in a clean clone: it sets up what it needs first, and prints the log only if that fails.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
READY := $(VENV)/.ready
DEMO := runs/demo
LOWEST := .venv-lowest
WORKERS ?= $(shell nproc)

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-faults test-slow test-docs test-lowest faults newcomer docs check bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv with all development packages, unless it is up to date
	@:

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "cramlm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN)python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' >$(VENV)/setup.log 2>&1 \
		|| { cat $(VENV)/setup.log >&2; echo "setup failed; the lines above are in $(VENV)/setup.log" >&2; exit 1; }
	@touch $@

demo: $(DEMO)/data/counts.json  ## run the whole method and its baselines on documentation installed on every machine
	@$(RUN)python demo/run.py

$(DEMO)/data/counts.json: demo/build_task.py | $(READY)
	@$(RUN)python demo/build_task.py --out $(DEMO)/data

test: $(READY)  ## run the test suite, one process per core; needs no network and no GPU
	@$(RUN)pytest -n $(WORKERS) --dist loadfile

test-faults: $(READY)  ## run the tests that kill a process, limit its memory or load a server
	@$(RUN)pytest -n $(WORKERS) --dist loadfile -m 'faults and not slow'

test-slow: $(READY)  ## run all tests, including those marked slow or faults
	@$(RUN)pytest -m 'slow or not slow' --hypothesis-profile=slow

test-docs: $(READY)  ## run the code of the README, the guide, the tutorials and the notebook on a tiny task
	@$(RUN)pytest -n $(WORKERS) --dist worksteal -m slow tests/test_docs.py

test-lowest: $(LOWEST)/.ready  ## run the test suite with the oldest versions that pyproject.toml allows, in its own environment
	@$(LOWEST)/bin/pytest -n $(WORKERS) --dist loadfile

$(LOWEST)/.ready: pyproject.toml constraints.txt tests/lowest.py
	@echo "setting up $(LOWEST) (some minutes)"
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(PYTHON) tests/lowest.py >$(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -c $(LOWEST)/constraints.txt \
		-e '.[bench,cloud,dev,docs,elasticsearch,hub,onnx,ray,search,serve]' >$(LOWEST)/setup.log 2>&1 \
		|| { tail -20 $(LOWEST)/setup.log >&2; echo "setup failed; the lines above are in $(LOWEST)/setup.log" >&2; exit 1; }
	@touch $@

faults: $(READY)  ## inject faults (kill signals, failing calls, damaged files), at release size: make faults ARGS='R4 R11', ARGS='fuzz --minutes 60'
	@$(RUN)python tests/faults/run.py $(ARGS)

newcomer: $(READY)  ## test the first steps of a user: install the wheel in a new environment, fit a CSV, report, predict, ONNX, serve, demo (installs packages)
	@$(RUN)pytest -m slow tests/test_newcomer.py

docs: $(READY)  ## build the documentation site in site/
	@$(RUN)python -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]' >>$(VENV)/setup.log 2>&1 \
		|| { tail -5 $(VENV)/setup.log >&2; echo "the packages of [docs] could not be installed; see $(VENV)/setup.log" >&2; exit 1; }
	@$(RUN)python docs/pictures/method.py
	@NO_MKDOCS_2_WARNING=1 $(RUN)python -m mkdocs build --quiet --strict
	@echo "site/index.html"

check: $(READY)  ## check formatting, lint, types and import rules
	@$(RUN)ruff format --check .
	@$(RUN)ruff check .
	@$(RUN)mypy
	@$(RUN)lint-imports --no-cache --verbose >$(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(RUN)pytest tests/test_architecture.py

bench: bench-select bench-fit bench-retrieval bench-selection bench-training bench-prediction bench-learning bench-quality  ## run every benchmark; each prints a table and one line of JSON

$(VENV)/.bench: $(READY)
	@$(RUN)python -m pip install --disable-pip-version-check -c constraints.txt -e '.[bench]' >>$(VENV)/setup.log 2>&1 && touch $@ \
		|| echo "the engines to compare with could not be installed ($(VENV)/setup.log); continuing without them" >&2

bench-%: $(READY) $(VENV)/.bench  ## run one benchmark: make bench-retrieval ARGS='--sample 0'
	@$(RUN)python benchmarks/bench_$*.py $(ARGS)

clean:  ## remove the environments, caches and the demo's run; keep other runs
	@rm -rf $(VENV) $(LOWEST) $(DEMO) dist build site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests demo benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
