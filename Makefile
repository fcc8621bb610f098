# make demo   set everything up and run the main job: nine algorithms on real data, a table, curves
# make test   set everything up and run every check
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo install test lint docs clean

demo: install
	$(BIN)/fedagrac run

install: .venv/.installed

test: .venv/.dev lint docs
	$(BIN)/python -m pytest -n auto

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv site dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing fedagrac into .venv (a minute or two the first time)"
	$(PIP) -e .
	@touch $@

.venv/.dev: .venv/.installed
	@echo "installing the development tools into .venv"
	$(PIP) -e '.[dev]'
	@touch $@
