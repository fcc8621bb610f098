# make demo             install into .venv and run nine algorithms on real data: a table, curves, a report
# make test             install into .venv and run every check
# make lint             formatting, lint, types and the layers of the package
# make reproduce-quick  every table and figure of the paper on real data, scaled down to minutes
# make soak             long runs, many clients, large checkpoints: measures every promise of docs/reliability.md
# make attack           bad nodes, mutated replies, received files, on loopback only: measures what docs/reliability.md says
# make audit            look up every pinned version for known vulnerabilities (exit code 3: not all were looked up)
# make bench            time every engine on this machine
# make bench-peers      time pfl-research and Flower, each in its own environment
PYTHON ?= python3

# Every path is relative and every tool runs as `python -m`, so that the folder may have any name of any length.
# pip splits the two variables at spaces; they pin the build requirements, in older and newer versions of pip.
VENV_PYTHON := .venv/bin/python
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(VENV_PYTHON) -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo install test lint docs reproduce-quick soak attack audit bench bench-peers clean

demo: install
	$(VENV_PYTHON) -m fedagrac run

install: .venv/.installed

test: .venv/.dev lint docs
	$(VENV_PYTHON) -m pytest -n auto

lint: .venv/.dev
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache --no-logo

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --quiet

reproduce-quick: install
	$(VENV_PYTHON) -m fedagrac reproduce all --scale quick --out runs/reproduce-quick

soak: .venv/.fuzz
	$(VENV_PYTHON) -m benchmarks.soak

attack: .venv/.dev
	$(VENV_PYTHON) -m benchmarks.attack

audit:
	"$(PYTHON)" .ci/audit.py

bench: install
	$(VENV_PYTHON) -m fedagrac bench --parts engines,clients,spread,size --out runs/bench

bench-peers: install
	$(VENV_PYTHON) -m fedagrac bench pfl --out runs/bench-peers
	$(VENV_PYTHON) benchmarks/peers/run.py --json runs/bench-peers/peers.json
	$(VENV_PYTHON) -m fedagrac bench pfl --out runs/bench-peers-again

clean:
	rm -rf .venv .audit .bench-peers site dist

.venv/bin/python:
	"$(PYTHON)" -m venv .venv

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
