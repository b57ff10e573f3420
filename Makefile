# make quickstart: the whole chain in minutes.   make test: the tests.   make env: the environment alone.
# make bench: every benchmark, one report (some 20 minutes).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-slow bench lint env lock clean

quickstart: env
	$(BIN)/cloze quickstart --output runs/quickstart

test: env
	$(BIN)/python -m pytest

test-slow: env
	$(BIN)/python -m pytest -m slow

bench: env
	$(BIN)/python benchmarks/run_all.py --output runs/bench $(if $(BENCH_DATA),--data $(BENCH_DATA))

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy

env: $(VENV)/.installed

# Rebuilt when what is to be installed changes; the mark is made last, so a broken installation is repeated.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and 'cloze needs Python 3.10 to 3.13, found ' + sys.version.split()[0] + '; name one: make env PYTHON=python3.11')"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/install.py --constraint constraints.txt --editable '.[test]'
	@touch $@

# Write down what is installed now, after trying newer versions by hand.
lock:
	$(BIN)/python .ci/lock.py > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info
