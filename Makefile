# make demo   set everything up and run the main job: nine algorithms on real data, a table, curves
# make test   set everything up and run every check
# make reproduce-quick   every table and figure of the paper on real data, cut down to minutes
# make soak   long runs, many clients, large checkpoints: every promise of docs/reliability.md measured in full
# make audit  look up every pinned version for known vulnerabilities (exit code 3 of .ci/audit.py: not possible here)
# make bench  time every engine on this machine (make bench-peers: pfl-research and Flower, in their own environments)
PYTHON ?= python3
BIN := .venv/bin
# the variables pin what builds the package too, which pip installs apart from the rest (older and newer pip in turn)
PIP := PIP_CONSTRAINT="$(CURDIR)/constraints.txt" PIP_BUILD_CONSTRAINT="$(CURDIR)/constraints.txt" \
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo install test lint docs reproduce-quick soak audit bench bench-peers clean

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

reproduce-quick: install
	$(BIN)/fedagrac reproduce all --scale quick --out runs/reproduce-quick

soak: .venv/.fuzz
	$(BIN)/python -m benchmarks.soak

audit:
	$(PYTHON) .ci/audit.py

bench: install
	$(BIN)/fedagrac bench --parts engines,clients,spread,size --out runs/bench

bench-peers: install
	$(BIN)/fedagrac bench pfl --out runs/bench-peers
	$(BIN)/python benchmarks/peers/run.py --json runs/bench-peers/peers.json
	$(BIN)/fedagrac bench pfl --out runs/bench-peers-again

clean:
	rm -rf .venv .audit .bench-peers site dist

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

.venv/.fuzz: .venv/.dev
	@echo "installing the fuzzer into .venv"
	$(PIP) -e '.[dev,fuzz]'
	@touch $@
