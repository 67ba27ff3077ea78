# Everything runs in .venv, which is made when it is missing and brought up to date when pyproject.toml has changed.
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo venv test soak check format bench conformance clean

BIN := .venv/bin/python -m

help:
	@echo 'make demo         run the example shop on SQLite; needs nothing but Python'
	@echo "make test         run the tests on SQLite and PostgreSQL; ARGS='-k claim -x' goes to pytest"
	@echo 'make check        lint, formatting, types, import directions'
	@echo 'make format       fix what the linter and the formatter can fix'
	@echo 'make soak         the tests that run for minutes'
	@echo 'make bench        the benchmarks; ARGS goes to them'
	@echo "make conformance  Kombu's and Celery's own suites, fetched from PyPI, on our broker; ARGS=--help"
	@echo 'make venv         only prepare .venv'
	@echo 'make clean        remove everything that make and the tools made'
	@echo
	@echo 'PYTHON=python3.13 chooses the interpreter of a new .venv (now: $(PYTHON)).'

demo: .venv-demo/.stamp
	@.venv-demo/bin/python -m examples.shop.demo $(ARGS)

venv: .venv/.stamp

test: .venv/.stamp
	@$(BIN) pytest $(ARGS)

soak: .venv/.stamp
	@$(BIN) pytest -m soak $(ARGS)

check: .venv/.stamp
	@$(BIN) ruff check .
	@$(BIN) ruff format --check .
	@$(BIN) mypy
	@.venv/bin/lint-imports --no-logo

format: .venv/.stamp
	@$(BIN) ruff check --fix .
	@$(BIN) ruff format .

bench: .venv-bench/.stamp
	@.venv-bench/bin/python -m bench $(ARGS)

conformance: .venv/.stamp
	@$(BIN) tests.conformance $(ARGS)

clean:
	rm -rf .venv .venv-demo .venv-bench .venv-conformance build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: EXTRA := [dev]
.venv-bench/.stamp: EXTRA := [bench]
.venv/.stamp .venv-demo/.stamp .venv-bench/.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo 'dbqueue needs Python 3.10 or newer: make PYTHON=python3.x'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo 'This Python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@echo 'Preparing $(@D) (pip install -e ".$(EXTRA)")'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check -qq -e '.$(EXTRA)'
	@touch $@
